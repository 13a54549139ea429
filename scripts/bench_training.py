"""Measure training speed: nmt, a textbook loop of nn.LSTMCell, and Eole 0.6.4, on one machine in one run.

python scripts/bench_training.py                                 # on random sentences as long as Multi30k's
python scripts/bench_training.py data=DIR peers=1                # on DIR/{train,valid,test}.{de,en}, with Eole
python scripts/bench_training.py size=gnmt device=cuda           # a large model on a GPU

The small model is an LSTM with embeddings of 256, an encoder of 256 in each direction, a decoder of 512, additive
attention and 8,000 joint pieces, with 64 sentences per update. Each system runs in its own process. The processes take
turns: a window of `updates` updates each, `windows` times (on a GPU one system after the other, with the same batches
in each window). Eole cannot be paused, so it runs before and after them, in a separate virtual environment. Medians of
the windows go to docs/benchmarks.md.

Tokens are target pieces with </s>, without padding; one column counts both sides. Other settings: source=de
target=en windows=7 updates=15 folder=runs/bench_training.

Shapes: B sentences, S source and T target positions, A size in which queries and keys are compared, M memory size.
"""

import multiprocessing
import os
import platform
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import install_eole, parse_settings, run_command, write_eole_config, write_lines
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD, OptimConfig, TrainConfig, TrainRun
from nmt.config.data import DataConfig, TokenizerConfig
from nmt.config.model import AttentionConfig, ModelConfig
from nmt.data.batch import Batch
from nmt.data.batching import collate, epoch_batches, padding_waste
from nmt.data.corpus import load_pairs
from nmt.data.encoding import EncodedPairs, EncodedSide, encode_corpus, get_or_train_tokenizer, sort_by_length
from nmt.data.tokenizer import SPECIALS
from nmt.model.seq2seq import build_model
from nmt.system.device import choose_device, choose_precision, prepare_model
from nmt.system.logging import log_to_stderr
from nmt.system.memory import peak_memory
from nmt.training.data import TrainingData
from nmt.training.optim import build_optimizer
from nmt.training.progress import Progress
from nmt.training.state import TrainState
from nmt.training.step import train_step

DOCS = Path("docs")
END_MARKER = "<!-- end of what scripts/bench_training.py writes -->"  # in docs/benchmarks.md
SMALL = ModelConfig(style="luong", embed=256, hidden=512, dropout=0.3, attention=AttentionConfig(score="additive"))
GNMT = ModelConfig(
    style="gnmt",
    embed=1024,
    hidden=1024,
    encoder_layers=4,
    decoder_layers=4,
    residual=True,
    bridge="last",
    attention=AttentionConfig(score="additive"),
)
OPTIM = OptimConfig(lr=0.001, schedule="constant", clip=5.0, label_smoothing=0.1)


@dataclass(frozen=True)
class Size:
    model: ModelConfig
    vocabulary: int
    length: float  # mean length of random sentences
    sentences: tuple[int, ...]  # per update
    precisions: tuple[str, ...]


SIZES = {
    "small": Size(SMALL, 8000, 14.5, (64,), ("fp32", "auto")),
    "gnmt": Size(GNMT, 32000, 28.0, (128, 384), ("auto",)),
}


@dataclass(frozen=True, eq=False)
class System:
    """A system to measure: nmt, or the plain loop."""

    name: str
    model: ModelConfig
    precision: str
    sentences: int
    plain: bool = False


# ---------------------------------------------------------------------------------------------------- textbook loop
class PlainModel(nn.Module):
    """An LSTM encoder-decoder with additive attention, whose decoder starts from a state of zeros.

    Style `luong`, with or without input feeding, is a loop over target positions, without residual connections. Style
    `gnmt` has one nn.LSTM per decoder layer, and all positions attend at once. `forward` returns the mean loss.
    """

    def __init__(self, config: ModelConfig, vocabulary: int, smoothing: float) -> None:
        super().__init__()
        embed, hidden, memory = config.embed, config.hidden, config.memory
        self.feeds, self.smoothing, self.whole = config.input_feeding, smoothing, config.style == "gnmt"
        self.residual = config.residual
        self.source, self.target = nn.Embedding(vocabulary, embed), nn.Embedding(vocabulary, embed)
        among = config.dropout if config.encoder_layers > 1 else 0.0
        layers = config.encoder_layers
        self.encoder = nn.LSTM(embed, memory // 2, layers, batch_first=True, dropout=among, bidirectional=True)
        upper = config.decoder_layers - 1
        if self.whole:
            inputs = [embed] + [hidden + memory] * upper
            self.layers = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in inputs)
        else:
            inputs = [embed + self.feeds * hidden] + [hidden] * upper
            self.cells = nn.ModuleList(nn.LSTMCell(size, hidden) for size in inputs)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(memory, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)
        self.readout = None if self.whole else nn.Linear(memory + hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: Batch) -> Tensor:
        values_BSM, _ = self.encoder(self.dropout(self.source(batch.source_BS)))
        keys_BSA, hidden_BS = self.key(values_BSM), batch.source_BS == PAD
        values_BSM = values_BSM.to(keys_BSA.dtype)  # autocast runs nn.LSTM in another dtype
        embedded_BTE = self.dropout(self.target(batch.target_BT[:, :-1]))
        features_BTD = (self.run_layers if self.whole else self.run_steps)(
            embedded_BTE, values_BSM, keys_BSA, hidden_BS
        )
        wanted = batch.target_BT[:, 1:].flatten()
        logits = self.output(self.dropout(features_BTD)).flatten(0, 1).float()
        return F.cross_entropy(logits, wanted, ignore_index=PAD, label_smoothing=self.smoothing)

    def attend(self, query_BTD: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Return the context of each target position, (B, T, M)."""
        scores_BTS = self.v(torch.tanh(self.query(query_BTD).unsqueeze(2) + keys_BSA.unsqueeze(1))).squeeze(3)
        weights_BTS = torch.softmax(scores_BTS.float().masked_fill(hidden_BS.unsqueeze(1), float("-inf")), 2)
        return weights_BTS.to(values_BSM.dtype) @ values_BSM

    def run_steps(self, embedded_BTE: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Run the decoder one step at a time."""
        assert self.readout is not None
        feed = values_BSM.new_zeros(len(values_BSM), self.query.in_features)
        states = [(feed, feed)] * len(self.cells)
        features = []
        for x in embedded_BTE.unbind(1):
            h = torch.cat([x, feed], 1) if self.feeds else x
            for depth, cell in enumerate(self.cells):
                h, c = states[depth] = cell(self.dropout(h) if depth else h, states[depth])
            context = self.attend(h.unsqueeze(1), values_BSM, keys_BSA, hidden_BS).squeeze(1)
            feed = torch.tanh(self.readout(torch.cat([context, h], 1)))
            features.append(feed)
        return torch.stack(features, 1)

    def run_layers(self, embedded_BTE: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Run the decoder layer by layer; the bottom layer attends, and every upper layer gets its context."""
        bottom, *upper = self.layers
        x_BTD = bottom(embedded_BTE)[0].to(keys_BSA.dtype)
        context_BTM = self.attend(x_BTD, values_BSM, keys_BSA, hidden_BS)
        for depth, layer in enumerate(upper):
            below = self.dropout(x_BTD)
            h_BTD = layer(torch.cat([below, context_BTM], 2))[0].to(keys_BSA.dtype)
            x_BTD = h_BTD + below if self.residual and depth else h_BTD
        return x_BTD


# ------------------------------------------------------------------------------------------------------------- work
def make_random_pairs(source: Any, target: Any, vocabulary: int) -> EncodedPairs:
    """Return pairs of random pieces with the given lengths."""
    rng = np.random.default_rng(1)
    sides = []
    for lengths in (source, target):
        offsets = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
        sides.append(EncodedSide(rng.integers(len(SPECIALS), vocabulary, offsets[-1], dtype=np.int32), offsets))
    nothing: Any = None
    order, runs = sort_by_length(np.stack([side.lengths(np.arange(len(source))) for side in sides]))
    return EncodedPairs("random", nothing, nothing, *sides, order, runs, 10**4, 0.0, False)  # type: ignore[arg-type, call-arg]


def make_random_corpus(size: Size, pairs: int) -> EncodedPairs:
    """Return pairs of random sentences of similar length."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.gamma(8, size.length / 8, pairs), 3, 80)
    return make_random_pairs(lengths, np.clip(lengths * rng.normal(1, 0.12, pairs), 3, 80), size.vocabulary)


def make_update(
    system: System, vocabulary: int, encoded: EncodedPairs, device: torch.device
) -> Callable[[Any], Tensor]:
    """Return a function that makes one update on the given rows and returns the number of target tokens."""
    torch.manual_seed(1)
    if not system.plain:
        train = TrainConfig(max_steps=10**6, batch_sentences=system.sentences)
        run = TrainRun(model=system.model, optim=OPTIM, train=train, precision=system.precision)
        model = build_model(system.model, vocabulary, vocabulary)
        prepare_model(model, system.precision, device, training=True)
        nothing: Any = None
        optimizer = build_optimizer(run.optim, model.parameters())
        progress = Progress(encoded.key)
        data = TrainingData(run, encoded, nothing, progress)
        state = TrainState(run, Path(), device, model, optimizer, data, progress)
        return lambda indices: train_step(state, indices, 10**6).sums.target

    plain = PlainModel(system.model, vocabulary, OPTIM.label_smoothing).to(device)
    adam = torch.optim.Adam(plain.parameters(), lr=OPTIM.lr)

    def update(indices: Any) -> Tensor:
        batch = collate(encoded, indices).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=system.precision == "bf16"):
            loss = plain(batch)
        loss.backward()
        assert OPTIM.clip is not None
        nn.utils.clip_grad_norm_(plain.parameters(), OPTIM.clip)
        adam.step()
        adam.zero_grad()
        return batch.target_length_B.sum()

    return update


def serve_updates(connection: Connection, system: System, vocabulary: int, encoded: EncodedPairs, device: str) -> None:
    """Answer each requested number of updates with (tokens, seconds, peak memory in bytes)."""
    torch_device = torch.device(device)
    batches = epoch_batches(encoded, TrainConfig(batch_sentences=system.sentences), 1, 0)
    update, done = make_update(system, vocabulary, encoded, torch_device), 0
    while count := connection.recv():
        if torch_device.type == "cuda":
            done = 0  # the same batches in each window, whose shapes are captured in the first two
        started = time.perf_counter()
        tokens = sum(update(batches[(done + number) % len(batches)]) for number in range(count))
        done += count
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        seconds = time.perf_counter() - started
        on_gpu = torch.cuda.max_memory_allocated(torch_device) if torch_device.type == "cuda" else 0
        connection.send((int(tokens), seconds, on_gpu or peak_memory() or 0))


def count_flop_per_token(system: System, vocabulary: int, encoded: EncodedPairs) -> float:
    """Return the FLOP of matrix products, forward and backward, per target token, without padding and the bridge."""
    model = build_model(system.model, vocabulary, vocabulary)
    per_source = per_target = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embedding" not in name and not name.startswith("decoder.bridge"):
            on_source = name.startswith(("encoder", "decoder.attention.score.key"))
            per_source += on_source * parameter.numel()
            per_target += (not on_source) * parameter.numel()
    source, target = encoded.lengths(encoded.order)
    attention = (system.model.hidden + system.model.memory) * (source * target).sum()
    return float(6 * (per_source * source.sum() + per_target * target.sum() + attention) / target.sum())


def measure_product_rate(device: torch.device, precision: str) -> float:
    """Return the FLOP/s of a large matrix product."""
    size = 2048 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / median(times[1:])


def get_processor_name() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", path.read_text(encoding="utf-8")) if path.exists() else None
    return found[1] if found else platform.machine()


# ------------------------------------------------------------------------------------------------------------- Eole
def measure_eole(encoded: EncodedPairs, count: int, folder: Path) -> list[float]:
    """Return target tokens/s of `count` windows of 20 updates, after 100 in which Eole is still getting faster."""
    eole = install_eole(folder)
    for name, side in (("source", encoded.tokenizer.source), ("target", encoded.tokenizer.target)):
        ids = getattr(encoded, name)
        text = [" ".join(side.pieces(ids[row].tolist())) for row in np.sort(encoded.order)]
        write_lines(folder / f"valid.{name}", text[:10])
        write_lines(folder / f"train.{name}", text)
    (folder / "vocabulary").unlink(missing_ok=True)  # of the text of an earlier run
    config = write_eole_config(eole, folder, 100 + 20 * count, report_every=20)
    run_command(eole, "train", "-config", config, log=folder / "eole.log")
    found = re.findall(r"/(\d+) tok/s", (folder / "eole.log").read_text(encoding="utf-8"))
    return [float(speed) for speed in found[5:]]


# ---------------------------------------------------------------------------------------------------------- reports
def list_systems(size: Size, device: torch.device) -> list[System]:
    precisions = dict.fromkeys(choose_precision(name, device) for name in size.precisions)
    found = []
    for sentences in size.sentences:
        for precision in precisions:
            for plain in (True, False):
                for feeding in (True, False):
                    model = replace(size.model, style="luong", input_feeding=feeding)
                    name = ("plain loop" if plain else "nmt, luong") + (", input feeding" if feeding else "")
                    found.append(System(name, model, precision, sentences, plain))
            model = replace(size.model, style="bahdanau")
            found.append(System("nmt, bahdanau", model, precision, sentences))
            layers = max(2, size.model.decoder_layers)
            model = replace(size.model, style="gnmt", decoder_layers=layers)
            found.append(System(f"nmt, gnmt, {layers} layers", model, precision, sentences))
    return found


def measure_systems(
    systems: list[System], vocabulary: int, encoded: EncodedPairs, device: torch.device, windows: int, count: int
) -> tuple[dict[System, list[float]], dict[System, int], dict[str, float]]:
    """Return tokens/s of each window and peak memory in bytes by system, and FLOP/s of a product by precision."""
    spawn = multiprocessing.get_context("spawn")
    speeds: dict[System, list[float]] = {system: [] for system in systems}
    peaks: dict[System, int] = {}
    rates: dict[str, list[float]] = {system.precision: [] for system in systems}
    groups = [systems] if device.type == "cpu" else [[system] for system in systems]  # a GPU has memory for one
    for group in groups:
        ends: dict[System, Connection] = {}
        for system in group:
            ends[system], other = spawn.Pipe()
            spawn.Process(
                target=serve_updates, args=(other, system, vocabulary, encoded, str(device)), daemon=True
            ).start()
            other.close()
        for window in range(windows + 2):  # the first two are a warm-up: kernels are compiled, CUDA graphs captured
            for precision in {system.precision for system in group}:
                rates[precision].append(measure_product_rate(device, precision))
            for system, end in ends.items():
                end.send(count)
                tokens, seconds, peaks[system] = end.recv()
                if window > 1:
                    speeds[system].append(tokens / seconds)
                    print(
                        f"window {window - 1}, {system.name}, {system.precision}: {tokens / seconds:,.0f}", flush=True
                    )
        for end in ends.values():
            end.send(0)
    return speeds, peaks, {precision: median(values) for precision, values in rates.items()}


def format_table(
    speeds: dict[System, list[float]],
    peaks: dict[System, int],
    rates: dict[str, float],
    eole: list[float],
    size: Size,
    encoded: EncodedPairs,
) -> list[str]:
    several = len(size.sentences) > 1
    columns = ["", "Precision"]
    if several:
        columns.append("Sentences")
    columns += ["Tokens/s", "from - to", "Both sides", "Plain loop"]
    if eole:
        columns.append("Eole")
    columns += ["Peak memory", "Share of product rate"]
    found = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    source, target = encoded.lengths(encoded.order).sum(axis=1)
    both = 1 + source / target
    plain = {(s.precision, s.sentences): median(v) for s, v in speeds.items() if s.plain and s.model.input_feeding}

    def row(name: str, precision: str, values: list[float], *others: str) -> str:
        return (
            f"| {name} | {precision} | {median(values):,.0f} | {min(values):,.0f} - {max(values):,.0f} | "
            f"{median(values) * both:,.0f} | " + " | ".join(others) + " |"
        )

    if eole:
        by_plain = [f"{median(eole) / plain['fp32', size.sentences[0]]:.2f}"]
        found.append(row("Eole 0.6.4, input feeding", "fp32", eole, *by_plain, "1", "", ""))
    for system, values in speeds.items():
        speed = median(values)
        beside = plain.get((system.precision, system.sentences))
        share = speed * count_flop_per_token(system, size.vocabulary, encoded) / rates[system.precision]
        precision = system.precision + (f" | {system.sentences}" if several else "")
        ratios = [f"{speed / beside:.2f}" if beside else "", *([f"{speed / median(eole):.2f}"] if eole else [])]
        found.append(row(system.name, precision, values, *ratios, f"{peaks[system] / 1e9:.2f} GB", f"{share:.0%}"))
    return found


def main() -> None:
    settings = parse_settings(
        data="",
        source="de",
        target="en",
        peers="0",
        size="small",
        device="auto",
        windows="7",
        updates="15",
        folder="runs/bench_training",
    )
    if settings["size"] not in SIZES or settings["peers"] not in ("0", "1"):
        sys.exit(__doc__)
    if settings["peers"] == "1" and not (settings["data"] and settings["size"] == "small"):
        sys.exit("error: peers=1 is for size=small and needs text: data=DIR with train.de and train.en")
    log_to_stderr()
    size, device = SIZES[settings["size"]], choose_device(settings["device"])
    page, begin = DOCS / "benchmarks.md", f"<!-- size={settings['size']} device={device.type} -->\n"
    if begin not in page.read_text(encoding="utf-8"):
        sys.exit(f"error: {page} has no line {begin.strip()} for this table")
    windows, folder = int(settings["windows"]), Path(settings["folder"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if settings["data"]:
        data = DataConfig(format="text", path=settings["data"], source=settings["source"], target=settings["target"])
        given = TokenizerConfig(type="bpe", vocab_size=size.vocabulary, joint=True)
        pairs = load_pairs(data, "train")
        given_run = TrainRun(data=data, tokenizer=given)
        encoded = encode_corpus(pairs, get_or_train_tokenizer(pairs, given_run), given_run)
    else:
        encoded = make_random_corpus(size, 20_000)
    half = -(-windows // 2)
    eole = measure_eole(encoded, half, folder) if settings["peers"] == "1" else []
    systems, count = list_systems(size, device), int(settings["updates"])
    speeds, peaks, rates = measure_systems(systems, size.vocabulary, encoded, device, windows, count)
    eole += measure_eole(encoded, half, folder) if settings["peers"] == "1" else []
    waste = padding_waste(encoded, epoch_batches(encoded, TrainConfig(batch_sentences=size.sentences[0]), 1, 0))
    where = (
        f"{os.cpu_count()} cores of {get_processor_name()}"
        if device.type == "cpu"
        else torch.cuda.get_device_name(device)
    )
    setting = (
        f"{where}, PyTorch {torch.__version__.partition('+')[0]}, {Path(settings['data']).name or 'random text'}; "
        f"medians of {windows} windows of {settings['updates']} updates"
        + (f" (Eole's: {len(eole)} of 20)" if eole else "")
        + "; a large product runs at "
        + ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {precision}" for precision, rate in rates.items())
        + f"; padding of nmt's batches {waste:.1%}."
    )
    lines = [textwrap.fill(setting, 120), "", *format_table(speeds, peaks, rates, eole, size, encoded)]
    print("\n" + "\n".join(lines))
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    text = "\n".join([*lines, END_MARKER])
    page.write_text(before + begin + text + rest.partition(END_MARKER)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
