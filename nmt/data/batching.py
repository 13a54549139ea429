"""Batches of the tokenized corpus, and their order.

Shapes: B pairs, S source positions (`</s>` included), T target positions (`<s>` and `</s>` included). The length of a
sentence in a batch counts its pieces and `</s>`, never `<s>`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from nmt.config import BOS, EOS, PAD, TrainConfig
from nmt.data.encoding import Array, EncodedPairs, Indices, Rows
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_links import GoldLinks, alignment_targets

GOLDEN_RATIO = (5**0.5 - 1) / 2
PARTS = 64  # of the rows of an epoch, in memory one at a time
SAMPLED_BATCHES = 2_000  # batches at most, to tell how much of them is padding
WASTE = 0.055  # of the positions of an epoch, at most, in few shapes
MAX_EXCESS = 1.75  # times a batch's positions: a larger shape is not used for it
SHAPE_MULTIPLE = (
    8  # sentences: a batch has a multiple of it where it can, for each new shape costs a processor a kernel
)
NO_SHAPES: Indices = np.zeros((0, 3), np.int64)
Ids = Sequence[int] | Array


# -------------------------------------------------------------------------------------------------------------- batch
class Batch(NamedTuple):
    """Padded ids of B pairs, int64."""

    source_BS: torch.Tensor  # x1 .. xn </s>, then padding
    source_length_B: torch.Tensor  # n + 1
    target_BT: torch.Tensor  # <s> y1 .. yn </s>, then padding; of shape (B, 0) where there are no targets
    target_length_B: torch.Tensor  # n + 1: what is to be predicted
    alignment_BTS: (
        torch.Tensor
    )  # fp32: where each predicted piece should look; of shape (B, 0, 0) where nothing says so

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(to_device(tensor, device) for tensor in self))

    def twice(self) -> "Batch":
        """Each pair a second time, after all of them."""
        return Batch(*(torch.cat([tensor, tensor]) for tensor in self))

    def padded(self, pairs: int, source: int, target: int) -> "Batch":
        """Pad to the given numbers of pairs, source positions and predicted target positions. An added pair has only
        `</s>` as its source and nothing to predict."""
        rows = pairs - len(self.source_BS)
        columns, steps = source - self.source_BS.shape[1], target + 1 - self.target_BT.shape[1]
        source_BS = F.pad(self.source_BS, (0, columns, 0, rows), value=PAD)
        source_BS[len(self.source_BS) :, 0] = EOS
        alignment_BTS = self.alignment_BTS
        return Batch(
            source_BS=source_BS,
            source_length_B=F.pad(self.source_length_B, (0, rows), value=1),
            target_BT=F.pad(self.target_BT, (0, steps, 0, rows), value=PAD),
            target_length_B=F.pad(self.target_length_B, (0, rows)),
            alignment_BTS=F.pad(alignment_BTS, (0, columns, 0, steps, 0, rows))
            if alignment_BTS.numel()
            else alignment_BTS,
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device. To a GPU it goes from memory that does not move, so that nobody waits for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def make_batch(sources: Sequence[Ids], targets: Sequence[Ids] | None = None) -> Batch:
    """A batch of sentences from their ids, given without `<s>` and `</s>`."""
    source_BS, source_length_B = pad(sources, 0)
    nowhere_BTS = torch.zeros(len(sources), 0, 0)
    if targets is None:
        return Batch(source_BS, source_length_B, source_BS[:, :0], torch.zeros_like(source_length_B), nowhere_BTS)
    target_BT, target_length_B = pad(targets, 1)
    target_BT[:, 0] = BOS
    return Batch(source_BS, source_length_B, target_BT, target_length_B, nowhere_BTS)


def pad(sentences: Sequence[Ids], first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids from column `first` on, `</s>` after each sentence; and the lengths, `</s>` included."""
    lengths = np.array([len(ids) + 1 for ids in sentences])
    padded = np.full((len(sentences), first + lengths.max()), PAD, dtype=np.int64)
    for row, ids in zip(padded, sentences, strict=True):
        row[first : first + len(ids)] = ids
        row[first + len(ids)] = EOS
    return torch.from_numpy(padded), torch.from_numpy(lengths)


# ------------------------------------------------------------------------------------------------------------ batches
@dataclass(frozen=True)
class Batches(Sequence[Indices]):
    """The rows of each update of an epoch."""

    order: Rows  # of all updates, one after the other by length
    ends: Indices  # of each in `order`, after a 0
    turns: Indices  # which update comes when

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        turn = self.turns[index]
        return self.order[self.ends[turn] : self.ends[turn + 1]].astype(np.int64)


def epoch_batches(encoded: EncodedPairs, config: TrainConfig, seed: int, epoch: int) -> Batches:
    """The rows of each update of an epoch, every pair once, or as often as its corpus' weight says in the mean over
    epochs; a function of the arguments and of nothing else.

    Every epoch has the same number of updates, for only pairs of equal size change places before the cut; with weights
    that are no whole numbers, or with subwords that are drawn, it may have one more or less.
    An update has pairs of similar length: as many as `train.batch_tokens` allows, where a pair counts its longer side
    with `</s>` and without padding (a longer pair still makes an update of its own), or `train.batch_sentences`.

    What is held in memory is the order, four bytes a pair (eight for more than 4 billion), and the cuts.
    """
    rng = np.random.default_rng((seed, epoch))
    source, target, counts = encoded.runs
    if encoded.shares:
        parts = np.array_split(encoded.order, PARTS)
        times = np.concatenate([repetitions(rows, encoded.shares, epoch) for rows in parts])  # type: ignore[arg-type]
        order: Rows = np.repeat(encoded.order, times)  # type: ignore[assignment]
        counts = np.add.reduceat(times, np.cumsum(counts) - counts, dtype=np.int64)
    else:
        order = encoded.order.copy()
    for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
        if count > 1:
            rng.shuffle(order[end - count : end])
    if config.batch_sentences is not None:
        ends = np.append(np.arange(0, len(order), config.batch_sentences), len(order))
    else:
        ends = batch_boundaries(np.maximum(source, target), counts, config.batch_tokens)
    return Batches(order, ends, rng.permutation(len(ends) - 1))


def repetitions(rows: Rows, shares: Sequence[tuple[int, float]], epoch: int) -> npt.NDArray[np.uint16]:
    """How often each row is used in an epoch: after n epochs n times its corpus' weight, rounded up or down, some rows
    sooner than others."""
    ends, weights = zip(*shares, strict=True)
    weight = np.array(weights)[np.searchsorted(ends, rows, side="right")]
    phase = rows * GOLDEN_RATIO % 1.0  # spread evenly over rows that follow each other
    return (np.floor((epoch + 1) * weight + phase) - np.floor(epoch * weight + phase)).astype(np.uint16)


def batch_boundaries(sizes: Indices, counts: Indices, budget: int) -> Indices:
    """Where to cut so many numbers of each size so that no part's sum is over the budget, unless it is a single number;
    0 and the end included.

    A part of more than `SHAPE_MULTIPLE` has a multiple of it: libraries compile a kernel for each new shape, so few
    are fast.
    """
    numbers, sums = np.append(0, np.cumsum(counts)).tolist(), np.append(0, np.cumsum(sizes * counts)).tolist()
    each = sizes.tolist()
    ends, run = [0], 0
    while ends[-1] < numbers[-1]:
        start = ends[-1]
        run = bisect_right(numbers, start, run) - 1
        most = sums[run] + (start - numbers[run]) * each[run] + budget
        last = bisect_right(sums, most, run) - 1  # the run that the budget ends in
        end = numbers[last] + (most - sums[last]) // each[last] if last < len(each) else numbers[-1]
        count = max(1, end - start)
        ends.append(start + (count - count % SHAPE_MULTIPLE if count > SHAPE_MULTIPLE else count))
    return np.array(ends)


def micro_batches(rows: Indices, parts: int) -> list[Indices]:
    """The rows in at most `parts` parts of (almost) as many pairs, none empty; lengths stay together."""
    return np.array_split(rows, min(parts, len(rows)))


def padding_waste(encoded: EncodedPairs, batches: Sequence[Indices]) -> float:
    """The share of padding in the positions of both sides of all batches; of many, of some that lie evenly."""
    pieces = positions = 0
    for i in np.unique(np.linspace(0, len(batches) - 1, SAMPLED_BATCHES, dtype=np.int64)):
        lengths = encoded.lengths(batches[i])
        pieces += int(lengths.sum())
        positions += int(lengths.max(axis=1).sum()) * lengths.shape[1]
    return 1 - pieces / positions


def padded_positions(sizes_X3: Indices) -> Indices:
    """Source and target positions of batches of these sizes (pairs, source pieces, target pieces)."""
    return sizes_X3[..., 0] * (sizes_X3[..., 1] + sizes_X3[..., 2])


def choose_shapes(sizes_N3: Indices, pieces: int, most: int) -> Indices:
    """Choose a few shapes_K3 (pairs, source length, target length) such that every batch fits into one.

    The two shapes that add the least padding are merged: until at most `most` are left, then for as long as padding
    stays below `WASTE`.

    Args:
        sizes_N3: of the batches of an epoch, as shapes are.
        pieces: the number of their tokens on both sides, without padding.
    """
    shapes_K3, counts_K = np.unique(sizes_N3, axis=0, return_counts=True)
    own_K = counts_K * padded_positions(shapes_K3)  # positions of all batches that have the shape
    limit = pieces / (1 - WASTE)

    def added(k: int) -> npt.NDArray[np.float64]:
        """How many positions are added where shape k is joined with each other one."""
        joined_K = (counts_K[k] + counts_K) * padded_positions(np.maximum(shapes_K3[k], shapes_K3)) - own_K[k] - own_K
        return np.where((counts_K == 0) | (np.arange(len(counts_K)) == k), np.inf, joined_K)

    cost_KK = np.stack([added(k) for k in range(len(shapes_K3))])
    least_K = cost_KK.argmin(1)  # with which each is joined best
    while (left := np.count_nonzero(counts_K)) > 1:
        cost_K = cost_KK[np.arange(len(least_K)), least_K]
        i = int(cost_K.argmin())
        j = int(least_K[i])
        if left <= most and own_K.sum() + cost_K[i] > limit:
            break
        shapes_K3[i] = np.maximum(shapes_K3[i], shapes_K3[j])
        counts_K[i], counts_K[j] = counts_K[i] + counts_K[j], 0
        own_K[i], own_K[j] = counts_K[i] * padded_positions(shapes_K3[i]), 0
        cost_KK[j] = cost_KK[:, j] = np.inf
        cost_KK[i] = cost_KK[:, i] = added(i)
        stale_K = (least_K == i) | (least_K == j) | (cost_KK[:, i] < cost_KK[np.arange(len(least_K)), least_K])
        stale_K[i] = True
        least_K[stale_K] = cost_KK[stale_K].argmin(1)
    return shapes_K3[counts_K > 0]


def shape_for(size_3: Sequence[int], shapes_K3: Indices) -> list[int]:
    """Return the smallest shape that holds a batch of this size. If none does, or all are much too large (as after a
    split for lack of memory), round its own lengths up to a multiple of `SHAPE_MULTIPLE`."""
    fitting_K3 = shapes_K3[(shapes_K3 >= size_3).all(1)]
    if len(fitting_K3):
        smallest_3 = fitting_K3[padded_positions(fitting_K3).argmin()]
        if padded_positions(smallest_3) <= MAX_EXCESS * padded_positions(np.array(size_3)):
            return smallest_3.tolist()
    return [size_3[0], *(-(-length // SHAPE_MULTIPLE) * SHAPE_MULTIPLE for length in size_3[1:])]


def collate(encoded: EncodedPairs, rows: Indices) -> Batch:
    """The batch of some pairs."""
    sources: list[Ids] = [encoded.source[row] for row in rows]
    targets: list[Ids] = [encoded.target[row] for row in rows]
    batch = make_batch(sources, targets)
    if encoded.guided:
        return batch._replace(alignment_BTS=target_weights(encoded.tokenizer, encoded.pairs[rows], sources, targets))
    return batch


def target_weights(
    tokenizer: Tokenizer, pairs: dict[str, list[Any]], sources: Sequence[Ids], targets: Sequence[Ids]
) -> torch.Tensor:
    """alignment_BTS: where attention should be by the gold links, 0 at padding and where a pair has none."""
    alignment_BTS = torch.zeros(len(sources), max(map(len, targets)) + 1, max(map(len, sources)) + 1)
    for row, (sure, possible) in enumerate(zip(pairs["sure"], pairs["possible"], strict=True)):
        if sure or possible:
            source = tokenizer.source.words_of(pairs["source"][row], [*sources[row], EOS])
            target = tokenizer.target.words_of(pairs["target"][row], [*targets[row], EOS])
            ideal_TS = alignment_targets(GoldLinks.of(sure, possible), source, target)
            alignment_BTS[row, : len(target), : len(source)] = torch.from_numpy(ideal_TS)
    return alignment_BTS
