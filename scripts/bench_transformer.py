"""Compare a Transformer's training step with PyTorch's own Transformer, and its decoding with and without the past.

python scripts/bench_transformer.py size=256

The two models have the same sizes: three layers in encoder and decoder, 4 heads, 8,000 tied embeddings, dropout 0.1.
Training is a forward and backward pass of 64 sentences of about 15 pieces on one thread; runs take turns, and the
medians of times and of the ratios of neighbors are printed. Decoding measures one step of beam search (8 sentences,
beam 5) after 20 and after 200 pieces, compared with decoding the whole prefix again as a model without a state would.
"""

import statistics
import time
from collections.abc import Callable

import torch
from settings import parse_settings
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD, AttentionConfig, ModelConfig
from nmt.model.seq2seq import Seq2Seq, build_model

VOCABULARY, LAYERS, HEADS, DROPOUT, SMOOTHING = 8000, 3, 4, 0.1, 0.1
SENTENCES, LONGEST = 64, 17
WARM_UP, ROUNDS = 2, 10
BEAM_ROWS, WRITTEN = 40, (20, 200)


class TorchModel(nn.Module):
    """`nn.Transformer` between tied embeddings. Positions are left out: they cost nothing that matters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=PAD)
        self.transformer = nn.Transformer(
            size, HEADS, LAYERS, LAYERS, 4 * size, DROPOUT, batch_first=True, norm_first=True
        )
        self.output = nn.Linear(size, VOCABULARY)
        self.output.weight = self.embedding.weight
        self.dropout = nn.Dropout(DROPOUT)
        self.scale = size**0.5

    def loss(self, source_BS: Tensor, length_B: Tensor, target_BT: Tensor) -> Tensor:
        hidden_BS = torch.arange(source_BS.shape[1]) >= length_B.unsqueeze(1)
        features_BTD = self.transformer(
            self.dropout(self.embedding(source_BS) * self.scale),
            self.dropout(self.embedding(target_BT[:, :-1]) * self.scale),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target_BT.shape[1] - 1),
            src_key_padding_mask=hidden_BS,
            memory_key_padding_mask=hidden_BS,
            tgt_is_causal=True,
        )
        labels_R = target_BT[:, 1:].flatten()
        logits_RV = self.output(features_BTD.flatten(0, 1)[labels_R != PAD])
        return F.cross_entropy(logits_RV, labels_R[labels_R != PAD], label_smoothing=SMOOTHING, reduction="sum")


def build_own_model(size: int) -> Seq2Seq:
    config = ModelConfig(
        encoder="transformer",
        style="transformer",
        embed=size,
        hidden=size,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        dropout=DROPOUT,
        tie="three",
        attention=AttentionConfig(score="scaled_dot", heads=HEADS),
    )
    return build_model(config, VOCABULARY, VOCABULARY)


def measure_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(pieces: int, names: tuple[str, str], runs: tuple[Callable[[], object], Callable[[], object]]) -> None:
    """Print the median time of each run, target pieces per second, and the median ratio of the second to the first."""
    times = [[measure_seconds(run) for run in runs] for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    ratio = statistics.median(second / first for first, second in times)
    for name, seconds in zip(names, medians, strict=True):
        print(f"{name:<44}{1000 * seconds:>10.1f} ms{pieces / seconds:>10,.0f} pieces/s")
    print(f"{'ratio':<44}{ratio:>10.2f}\n", flush=True)


def compare_training(size: int) -> None:
    length_B = torch.randint(12, LONGEST + 1, (SENTENCES,))
    source_BS = torch.randint(4, VOCABULARY, (SENTENCES, LONGEST))
    source_BS[torch.arange(LONGEST) >= length_B.unsqueeze(1)] = PAD
    target_BT = torch.randint(4, VOCABULARY, (SENTENCES, LONGEST + 1))
    own, other = build_own_model(size), TorchModel(size)

    def train_own() -> None:
        own.zero_grad()
        own.loss(source_BS, length_B, target_BT, SMOOTHING)[0].smoothed.backward()

    def train_other() -> None:
        other.zero_grad()
        other.loss(source_BS, length_B, target_BT).backward()

    compare(target_BT[:, 1:].numel(), ("training step, nmt", "training step, nn.Transformer"), (train_own, train_other))


@torch.inference_mode()
def compare_decoding(size: int, written: int) -> None:
    model = build_own_model(size).eval()
    model.prepare_for_inference(int8=False)
    source_BS = torch.randint(4, VOCABULARY, (BEAM_ROWS, LONGEST))
    tokens_NT = torch.randint(4, VOCABULARY, (BEAM_ROWS, written + 1))
    memory, start = model.start(source_BS, torch.full((BEAM_ROWS,), LONGEST))
    state = model.decode(tokens_NT[:, :-1], start, memory)[2].make_room(written + 1)  # as 31 of 32 steps find it
    order_N = torch.randperm(BEAM_ROWS)

    def step() -> None:
        features_NTD, _, new_state = model.decode(tokens_NT[:, -1:], state, memory)
        model.logits(features_NTD[:, -1])
        new_state.select(order_N)

    def decode_again() -> None:
        features_NTD, _, _ = model.decode(tokens_NT, start, memory)
        model.logits(features_NTD[:, -1])

    compare(BEAM_ROWS, (f"step after {written} pieces", "the whole prefix again"), (step, decode_again))


def main() -> None:
    settings = parse_settings(size="256")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    compare_training(int(settings["size"]))
    for written in WRITTEN:
        compare_decoding(int(settings["size"]), written)


if __name__ == "__main__":
    main()
