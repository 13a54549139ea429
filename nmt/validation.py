"""What can be measured of a model without searching: loss, accuracy, and where it looks.

Shapes: B sentences, S source and T target positions.
"""

import math
from functools import partial
from typing import Any

import torch
from datasets import Dataset

from nmt.alignment import extract_links
from nmt.config import EOS, PAD, SearchConfig
from nmt.data.batching import Batch, make_batch
from nmt.data.corpus import column
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.links import gold_of
from nmt.metrics import LinkCounts
from nmt.model.loss import Loss
from nmt.model.replay import within_memory
from nmt.model.seq2seq import Seq2Seq
from nmt.translator import batches_by_length


@torch.inference_mode()
def evaluate_loss(model: Seq2Seq, tokenizer: Tokenizer, pairs: Dataset, device: torch.device) -> dict[str, Any]:
    """Unsmoothed loss in nats per target token (`</s>` included), perplexity, and token accuracy under teacher forcing,
    over every pair, none left out. Of the attention weights met there the mean entropy in nats per target token, None
    without attention, and the alignment error rate of their links, None without gold.

    Raises:
        UserError: memory does not suffice for a single pair.
    """
    model.eval()
    texts = list(column(pairs, "source")), list(column(pairs, "target"))
    sources, targets = tokenizer.source.encode(texts[0]), tokenizer.target.encode(texts[1])
    lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
    gold, counts = gold_of(pairs), LinkCounts()
    entropy: list[float] = []
    nats = correct = tokens = 0.0
    waiting = list(batches_by_length(lengths, SearchConfig(batch_tokens=4000)))[::-1]
    while waiting:
        rows = waiting.pop()
        batch = make_batch([sources[row] for row in rows], [targets[row] for row in rows]).to(device)
        found = within_memory(partial(forced, model, batch))
        if found is None and len(rows) == 1:
            raise UserError(f"out of memory for a pair of {lengths[rows[0]] + 1:,} pieces in validation")
        if found is None:
            waiting += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
            continue
        loss, weights_BTS = found
        nats, correct = nats + loss.nats.item(), correct + loss.correct.item()
        tokens += int(batch.target_length_B.sum())
        if weights_BTS is None:
            continue
        entropy.append(entropies(weights_BTS)[batch.target_BT[:, 1:] != PAD].sum().item())
        if gold is None:
            continue
        for row, weights_TS in zip(rows, weights_BTS.cpu().numpy(), strict=True):
            source = tokenizer.source.words_of(texts[0][row], [*sources[row], EOS])
            target = tokenizer.target.words_of(texts[1][row], [*targets[row], EOS])
            counts.add(extract_links(weights_TS[: len(target), : len(source)], source, target), gold[row])
    mean = nats / tokens
    return {
        **{"loss": mean, "ppl": math.exp(min(mean, 700)), "accuracy": correct / tokens},
        **{"aer": counts.scores()["aer"], "entropy": sum(entropy) / tokens if entropy else None},
    }


def forced(model: Seq2Seq, batch: Batch) -> tuple[Loss, torch.Tensor | None]:
    """The loss of a batch, and where each target piece looks."""
    loss, weights = model.loss(batch.source_BS, batch.source_length_B, batch.target_BT)
    return loss, None if weights is None else weights.dense(batch.source_BS.shape[1])


def entropies(weights_BTS: torch.Tensor) -> torch.Tensor:
    """entropy_BT, in nats, of the weights of each target position as shares of their sum; 0 where all are 0."""
    tiny = torch.finfo(weights_BTS.dtype).tiny
    return torch.special.entr(weights_BTS / weights_BTS.sum(2, keepdim=True).clamp(min=tiny)).sum(2)
