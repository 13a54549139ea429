"""Batches of the encoded training pairs, and their order.

Shapes: B pairs, S source positions (including `</s>`), T target positions (including `<s>` and `</s>`). The length of a
sentence in a batch counts its pieces and `</s>`, never `<s>`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nmt.config import EOS, TrainConfig
from nmt.data.batch import SHAPE_MULTIPLE, Batch, TokenIds, make_batch, round_down_to_shape
from nmt.data.corpus import take_rows
from nmt.data.encoding import EncodedPairs, Indices, RowArray
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_links import GoldLinks, alignment_targets

GOLDEN_RATIO = (5**0.5 - 1) / 2
EPOCH_PARTS = 64  # parts in which the rows of an epoch are processed, to save memory
SAMPLED_BATCHES = 2_000  # batches from which padding is estimated
MAX_SHAPE_WASTE = 0.055  # share of padding in an epoch up to which shapes are merged further
MAX_SHAPE_EXCESS = 1.75  # a batch is not padded to a shape with more than this many times its positions
NO_SHAPES: Indices = np.zeros((0, 3), np.int64)


def epoch_batches(encoded: EncodedPairs, config: TrainConfig, seed: int, epoch: int) -> list[Indices]:
    """Return the rows of each update of an epoch, as a deterministic function of the arguments.

    Each pair occurs once, or with corpus weights as often as its weight on average over epochs. An update has pairs of
    similar length: either `train.batch_sentences` of them, or as many as `train.batch_tokens` allows, where a pair
    counts its longer side with `</s>` and without padding. A pair longer than that forms an update of its own.

    Every epoch has the same number of updates, since only pairs of equal size are shuffled before the rows are split.
    With fractional weights, subword sampling or augmentation, the number differs somewhat.

    Memory use is 8 bytes per pair plus the boundaries.
    """
    rng = np.random.default_rng((seed, epoch))
    source, target, counts = encoded.runs
    if encoded.mixture_weights:
        parts = np.array_split(encoded.order, EPOCH_PARTS)
        times = np.concatenate([count_repetitions(rows, encoded.mixture_weights, epoch) for rows in parts])  # type: ignore[arg-type]
        order = np.repeat(encoded.order, times).astype(np.int64)
        counts = np.add.reduceat(times, np.cumsum(counts) - counts, dtype=np.int64)
    else:
        order = encoded.order.astype(np.int64)
    for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
        if count > 1:
            rng.shuffle(order[end - count : end])
    if config.batch_sentences is not None:
        ends = np.append(np.arange(0, len(order), config.batch_sentences), len(order))
    else:
        ends = batch_boundaries(np.maximum(source, target), counts, config.batch_tokens)
    return [order[ends[update] : ends[update + 1]] for update in rng.permutation(len(ends) - 1)]


def count_repetitions(
    rows: RowArray, mixture_weights: Sequence[tuple[int, float]], epoch: int
) -> npt.NDArray[np.uint16]:
    """Return how often each row is used in an epoch.

    After n epochs, a row has been used n times the weight of its corpus, rounded up or down depending on the row.
    """
    ends, weights = zip(*mixture_weights, strict=True)
    weight = np.array(weights)[np.searchsorted(ends, rows, side="right")]
    phase = rows * GOLDEN_RATIO % 1.0  # evenly spread over consecutive rows
    return (np.floor((epoch + 1) * weight + phase) - np.floor(epoch * weight + phase)).astype(np.uint16)


def batch_boundaries(sizes: Indices, counts: Indices, budget: int) -> Indices:
    """Return the boundaries of consecutive batches, including 0 and the end, within a budget of tokens per batch.

    Only a single pair may exceed the budget. A batch of more than `SHAPE_MULTIPLE` pairs has a multiple of it, since
    libraries compile a kernel for each new shape.

    Args:
        sizes: tokens of the pairs in each run of pairs of equal size.
        counts: number of pairs in each run.
    """
    run_starts = np.append(0, np.cumsum(counts)).tolist()
    run_sums = np.append(0, np.cumsum(sizes * counts)).tolist()  # tokens before each run
    run_sizes = sizes.tolist()
    ends = [0]
    run = 0
    while ends[-1] < run_starts[-1]:
        start = ends[-1]
        run = bisect_right(run_starts, start, run) - 1
        max_sum = run_sums[run] + (start - run_starts[run]) * run_sizes[run] + budget
        last_run = bisect_right(run_sums, max_sum, run) - 1  # the run in which the budget ends
        if last_run < len(run_sizes):
            end = run_starts[last_run] + (max_sum - run_sums[last_run]) // run_sizes[last_run]
        else:
            end = run_starts[-1]
        ends.append(start + round_down_to_shape(max(1, end - start)))
    return np.array(ends)


def padding_waste(encoded: EncodedPairs, batches: Sequence[Indices]) -> float:
    """Return the share of padding in the positions of both sides, estimated from evenly spaced batches if many."""
    pieces = positions = 0
    for i in np.unique(np.linspace(0, len(batches) - 1, SAMPLED_BATCHES, dtype=np.int64)):
        lengths = encoded.lengths(batches[i])
        pieces += int(lengths.sum())
        positions += int(lengths.max(axis=1).sum()) * lengths.shape[1]
    return 1 - pieces / positions


def count_positions(sizes_X3: Indices) -> Indices:
    """Return the source and target positions of batches of these sizes (pairs, source pieces, target pieces)."""
    return sizes_X3[..., 0] * (sizes_X3[..., 1] + sizes_X3[..., 2])


def choose_shapes(sizes_N3: Indices, pieces: int, max_shapes: int) -> Indices:
    """Choose a few shapes_K3 (pairs, source length, target length) such that every batch fits into one.

    The two shapes whose merge adds the least padding are merged: until at most `max_shapes` are left, then for as long
    as padding stays below `MAX_SHAPE_WASTE`.

    Args:
        sizes_N3: sizes of the batches of an epoch (pairs, source length, target length).
        pieces: number of their pieces on both sides, without padding.
    """
    shapes_K3, counts_K = np.unique(sizes_N3, axis=0, return_counts=True)
    positions_K = counts_K * count_positions(shapes_K3)  # of all batches that have the shape
    max_positions = pieces / (1 - MAX_SHAPE_WASTE)

    def added_positions(k: int) -> npt.NDArray[np.float64]:
        """Return how many positions are added by merging shape k with each other shape."""
        merged_K = (counts_K[k] + counts_K) * count_positions(np.maximum(shapes_K3[k], shapes_K3))
        added_K = merged_K - positions_K[k] - positions_K
        return np.where((counts_K == 0) | (np.arange(len(counts_K)) == k), np.inf, added_K)

    cost_KK = np.stack([added_positions(k) for k in range(len(shapes_K3))])
    partner_K = cost_KK.argmin(1)  # the cheapest shape to merge each with
    while (remaining := np.count_nonzero(counts_K)) > 1:
        cost_K = cost_KK[np.arange(len(partner_K)), partner_K]
        i = int(cost_K.argmin())
        j = int(partner_K[i])
        if remaining <= max_shapes and positions_K.sum() + cost_K[i] > max_positions:
            break
        shapes_K3[i] = np.maximum(shapes_K3[i], shapes_K3[j])
        counts_K[i] += counts_K[j]
        counts_K[j] = 0
        positions_K[i] = counts_K[i] * count_positions(shapes_K3[i])
        positions_K[j] = 0
        cost_KK[j] = cost_KK[:, j] = np.inf
        cost_KK[i] = cost_KK[:, i] = added_positions(i)
        current_K = cost_KK[np.arange(len(partner_K)), partner_K]
        stale_K = (partner_K == i) | (partner_K == j) | (cost_KK[:, i] < current_K)
        stale_K[i] = True
        partner_K[stale_K] = cost_KK[stale_K].argmin(1)
    return shapes_K3[counts_K > 0]


def pick_shape(size_3: Sequence[int], shapes_K3: Indices) -> list[int]:
    """Return the smallest shape that holds a batch of this size.

    If none does, or all are much too large (as after a split for lack of memory), the lengths of the batch are rounded
    up to a multiple of `SHAPE_MULTIPLE` instead.
    """
    fitting_K3 = shapes_K3[(shapes_K3 >= size_3).all(1)]
    if len(fitting_K3):
        smallest_3 = fitting_K3[count_positions(fitting_K3).argmin()]
        if count_positions(smallest_3) <= MAX_SHAPE_EXCESS * count_positions(np.array(size_3)):
            return smallest_3.tolist()
    return [size_3[0], *(-(-length // SHAPE_MULTIPLE) * SHAPE_MULTIPLE for length in size_3[1:])]


def collate(encoded: EncodedPairs, rows: Indices) -> Batch:
    """Return the batch of the pairs in these rows."""
    sources: list[TokenIds] = [encoded.source[row] for row in rows]
    targets: list[TokenIds] = [encoded.target[row] for row in rows]
    batch = make_batch(sources, targets)
    if encoded.guided:
        pairs = take_rows(encoded.pairs, rows).to_pydict()
        return batch._replace(alignment_BTS=batch_alignment_targets(encoded.tokenizer, pairs, sources, targets))
    return batch


def batch_alignment_targets(
    tokenizer: Tokenizer, pairs: dict[str, list[Any]], sources: Sequence[TokenIds], targets: Sequence[TokenIds]
) -> torch.Tensor:
    """Return the gold attention alignment_BTS; 0 at padding and for pairs without gold links."""
    alignment_BTS = torch.zeros(len(sources), max(map(len, targets)) + 1, max(map(len, sources)) + 1)
    for row, (sure, possible) in enumerate(zip(pairs["sure"], pairs["possible"], strict=True)):
        if sure or possible:
            source = tokenizer.source.word_indices(pairs["source"][row], [*sources[row], EOS])
            target = tokenizer.target.word_indices(pairs["target"][row], [*targets[row], EOS])
            weights_TS = alignment_targets(GoldLinks.from_pairs(sure, possible), source, target)
            alignment_BTS[row, : len(target), : len(source)] = torch.from_numpy(weights_TS)
    return alignment_BTS
