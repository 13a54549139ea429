"""What can be measured of a model without searching: loss, accuracy, and where it looks.

Shapes: B sentences, S source and T target positions.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from nmt.config import EOS, PAD, SearchConfig
from nmt.data.batching import Batch, make_batch
from nmt.data.corpus import column
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_links import gold_links
from nmt.decoding.alignment import extract_links
from nmt.decoding.translator import batch_size, default_batch_tokens, sort_by_length
from nmt.errors import UserError
from nmt.evaluation.metrics import LinkCounts
from nmt.model.loss import Loss
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.model.seq2seq import Seq2Seq
from nmt.runtime.distributed import all_gather, shard
from nmt.runtime.lines import count_of, first_few
from nmt.runtime.logging import log

LONGEST = 1_000  # pieces of the longer side: beyond that a pair of damaged lines may take all memory and hours


@torch.inference_mode()
def evaluate_loss(model: Seq2Seq, tokenizer: Tokenizer, pairs: Dataset, device: torch.device) -> dict[str, Any]:
    """Unsmoothed loss in nats per target token (`</s>` included), perplexity, and token accuracy under teacher forcing,
    measured by all processes of the job together.
    Of the attention weights met there the mean entropy in nats per target token, None without attention, and the
    alignment error rate of their links, None without gold. Over every pair, but those of more than `LONGEST` pieces: a
    warning counts them.

    Raises:
        UserError: memory does not suffice for a single pair.
    """
    model.eval()
    texts = list(column(pairs, "source")), list(column(pairs, "target"))
    sources, targets = tokenizer.source.encode(texts[0]), tokenizer.target.encode(texts[1])
    gold, counts = gold_links(pairs), LinkCounts()
    totals = np.zeros(5)  # nats, correct, tokens, entropy, batches whose entropy is known
    for rows, batch, loss, weights_BTS, entropy in forced(model, sources, targets, device):
        tokens = int(batch.target_length_B.sum())
        totals += [loss.nats.item(), loss.correct.item(), tokens, entropy or 0.0, entropy is not None]
        if gold is None or weights_BTS is None:
            continue
        for row, weights_TS in zip(rows, weights_BTS.cpu().numpy(), strict=True):
            source = tokenizer.source.words_of(texts[0][row], [*sources[row], EOS])
            target = tokenizer.target.words_of(texts[1][row], [*targets[row], EOS])
            counts.add(extract_links(weights_TS[: len(target), : len(source)], source, target), gold[row])
    parts = all_gather((totals, counts))
    nats, correct, tokens, entropy, attends = np.sum([numbers for numbers, _ in parts], axis=0).tolist()
    mean, accuracy = (nats / tokens, correct / tokens) if tokens else (math.nan, math.nan)
    return {
        **{"loss": mean, "ppl": math.exp(min(mean, 700)), "accuracy": accuracy},
        "aer": sum((own for _, own in parts), LinkCounts()).scores()["aer"],
        "entropy": entropy / tokens if attends else None,
    }


def forced(
    model: Seq2Seq, sources: list[list[int]], targets: list[list[int]], device: torch.device
) -> Iterator[tuple[list[int], Batch, Loss, torch.Tensor | None, float | None]]:
    """Rows of ids, those of this process, some at a time: their batch, its loss, where each target piece looks, and the
    entropy of that."""
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    order, batches = sort_by_length(lengths), []
    if longer := sorted(row + 1 for row in order if lengths[row] > LONGEST):
        which = f"{count_of(len(longer), 'pair')} of more than {LONGEST:,} pieces"
        log.warning(f"{which} ({first_few(longer)}): left out of loss, accuracy, entropy and AER, not of BLEU")
        order = order[len(longer) :]
    config = SearchConfig(batch_tokens=default_batch_tokens(device) // 2)  # gold targets come beside the sources
    while order:
        size = batch_size(lengths[order[0]], 1, config, device)
        batches.append(order[:size])
        order = order[size:]

    def work(rows: list[int], size: int) -> tuple[Batch, Loss, torch.Tensor | None, float | None]:
        rows = rows[:size]
        batch = make_batch([sources[row] for row in rows], [targets[row] for row in rows]).to(device)
        loss, weights = model.loss(batch.source_BS, batch.source_length_B, batch.target_BT)
        if weights is None:
            return batch, loss, None, None
        weights_BTS = weights.dense(batch.source_BS.shape[1])
        return batch, loss, weights_BTS, entropies(weights_BTS)[batch.target_BT[:, 1:] != PAD].sum().item()

    for rows in shard(batches):
        size = len(rows)
        while rows:
            error = UserError(
                f"out of memory for a pair of {lengths[rows[0]] + 1:,} pieces in validation", any_rank=True
            )
            found, size = halve_until_it_fits(partial(work, rows), min(size, len(rows)), error)
            yield rows[:size], *found
            rows = rows[size:]


def entropies(weights_BTS: torch.Tensor) -> torch.Tensor:
    """entropy_BT, in nats, of the weights of each target position as shares of their sum; 0 where all are 0."""
    tiny = torch.finfo(weights_BTS.dtype).tiny
    return torch.special.entr(weights_BTS / weights_BTS.sum(2, keepdim=True).clamp(min=tiny)).sum(2)
