"""The tokenised corpus, and batches of it.

Shapes: B pairs, S source positions (`</s>` included), T target positions (`<s>` and `</s>` included). The length of a
sentence in a batch counts its pieces and `</s>`, never `<s>`.
"""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch.nn import functional as F
from tqdm import tqdm

from nmt.alignment import ideal_weights
from nmt.config import BOS, EOS, PAD, STEP, UNK, TrainConfig, TrainRun
from nmt.data.cache import cache_folder, making, whole
from nmt.data.corpus import origins
from nmt.data.lines import FIRST, counted, first_of
from nmt.data.tokenizer import Side, Tokenizer
from nmt.errors import UserError
from nmt.links import Gold, gold_of

log = logging.getLogger("nmt")
CHUNK = 10_000  # pairs in memory at a time while tokenising
SIDES = ["source", "target"]
Ids = Sequence[int] | npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


# -------------------------------------------------------------------------------------------------------------- batch
class Batch(NamedTuple):
    """Padded ids of B pairs, int64."""

    source_BS: torch.Tensor  # x1 .. xn </s>, then padding
    source_length_B: torch.Tensor  # n + 1
    target_BT: torch.Tensor  # <s> y1 .. yn </s>, then padding; of shape (B, 0) where there are no targets
    target_length_B: torch.Tensor  # n + 1: what is to be predicted
    guide_BTS: torch.Tensor  # fp32: where each predicted piece should look; of shape (B, 0, 0) where nothing says so

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(sent(tensor, device) for tensor in self))

    def filled(self) -> "Batch":
        """With padding up to a multiple of `STEP` source pieces and of as many predicted ones: few shapes."""
        source, target = -self.source_BS.shape[1] % STEP, (1 - self.target_BT.shape[1]) % STEP
        guide_BTS = F.pad(self.guide_BTS, (0, source, 0, target)) if self.guide_BTS.numel() else self.guide_BTS
        return self._replace(
            source_BS=F.pad(self.source_BS, (0, source), value=PAD),
            target_BT=F.pad(self.target_BT, (0, target), value=PAD),
            guide_BTS=guide_BTS,
        )


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
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


# -------------------------------------------------------------------------------------------------------------- cache
@dataclass(frozen=True)
class EncodedSide:
    """The ids of all sentences of one side, end to end, mapped from a file."""

    ids: npt.NDArray[np.int32]
    offsets: Indices  # row i is ids[offsets[i] : offsets[i + 1]]

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class EncodedPairs:
    """The pairs that are trained on; an index counts these, a row counts all pairs of the corpus."""

    key: str  # of all texts and the tokenizer
    pairs: Dataset
    tokenizer: Tokenizer
    source: EncodedSide
    target: EncodedSide
    rows: Indices  # in rising order
    max_length: int  # pieces
    sampling: float  # of subwords, anew for each batch
    guided: bool  # batches say where to look, by the gold links of the pairs

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def source_lengths(self) -> Indices:
        """Source pieces of each pair, `</s>` included."""
        return np.diff(self.source.offsets)[self.rows] + 1

    @cached_property
    def target_lengths(self) -> Indices:
        """Target pieces of each pair, `</s>` included."""
        return np.diff(self.target.offsets)[self.rows] + 1


def encode_corpus(pairs: Dataset, tokenizer: Tokenizer, run: TrainRun) -> EncodedPairs:
    """Tokenise the training pairs, or take what was tokenised before of the same text with the same tokenizer.

    Pairs with a side that is empty, or nothing but white space, and those with more than `data.max_length` pieces on a
    side are left out; the log has their number, and for each side the first lines that are so.

    Raises:
        UserError: when no pair is left, or the cache cannot be written.
    """
    key = content_key(pairs, tokenizer)
    limit = run.data.max_length
    folder = cache_folder(run.data) / "ids" / f"{key}.{limit}"  # the limit, for what is far longer is not tokenised
    if not whole(folder):
        with making(folder) as part:
            encode_side(part, "source", pairs, tokenizer.source, limit)
            encode_side(part, "target", pairs, tokenizer.target, limit)
    offsets = {side: np.fromfile(folder / f"{side}.offsets", np.int64) for side in SIDES}
    lengths = np.stack([np.diff(offsets[side]) for side in SIDES])
    empty, longer = lengths == 0, lengths > limit
    kept = ~(empty | longer).any(axis=0)
    troubles = {"empty, or nothing but white space": empty, f"longer than data.max_length={limit} pieces": longer}
    without = empty.any(axis=0)
    counts = (
        f"{without.sum():,} with an empty side, {(~without & ~kept).sum():,} longer than data.max_length={limit} pieces"
    )
    guided = run.train.guided_alignment > 0
    if guided and "sure" not in pairs.column_names:
        raise UserError(
            f"train.guided_alignment={run.train.guided_alignment} needs gold links of the training text: "
            "data.alignments=ENDING for data.path/train.ENDING, a line of links as 0-0 1-2 for each pair"
        )
    if not kept.any():
        raise UserError(f"no training pair is left of {len(pairs):,}: {counts}; look at the text, or raise the length")
    log.info(f"train: {len(pairs):,} pairs, dropped {counts}")
    for trouble, sides in troubles.items():
        for where, side in zip(origins(run.data, "train"), sides, strict=True):
            tell(where, trouble, np.flatnonzero(side), pairs)
    ids = {side: np.asarray(np.memmap(folder / f"{side}.ids", np.int32, "r")) for side in SIDES}
    source, target = (EncodedSide(ids[side], offsets[side]) for side in SIDES)
    return EncodedPairs(
        key, pairs, tokenizer, source, target, np.flatnonzero(kept), limit, run.tokenizer.sampling, guided
    )


def content_key(pairs: Dataset, tokenizer: Tokenizer) -> str:
    """A key made of all texts and of the tokenizer."""
    key = hashlib.sha256(tokenizer.fingerprint.encode())
    for batch in pairs.select_columns(SIDES).iter(CHUNK):
        for side in SIDES:
            key.update(np.array([len(text) for text in batch[side]]).tobytes())
            key.update("".join(batch[side]).encode())
    return key.hexdigest()[:32]


def gold_key(pairs: Dataset) -> str:
    """A key made of all gold links; empty where there are none."""
    gold = gold_of(pairs)
    if gold is None:
        return ""
    links = [(sorted(one.sure), sorted(one.possible)) for one in gold]
    return hashlib.sha256(repr(links).encode()).hexdigest()[:32]


def encode_side(folder: Path, name: str, pairs: Dataset, side: Side, max_length: int) -> None:
    """Write the ids of one side, and where each row begins. Of a text that has more than `max_length` pieces for
    certain, nothing but that it has more is kept: to tokenise lines without end could take longer than the corpus."""
    longer = [UNK] * (max_length + 1)
    lengths = [0]
    with (
        open(folder / f"{name}.ids", "wb") as file,
        tqdm(total=len(pairs), desc=f"tokenising {name}", unit=" lines", leave=False, disable=None) as bar,
    ):
        for batch in pairs.select_columns(name).iter(CHUNK):
            over = [side.surely_longer(text, max_length) for text in batch[name]]
            texts = ["" if far or text.isspace() else text for text, far in zip(batch[name], over, strict=True)]
            ids = [longer if far else found for far, found in zip(over, side.encode(texts), strict=True)]
            file.write(np.fromiter(itertools.chain.from_iterable(ids), np.int32).tobytes())
            lengths += map(len, ids)
            bar.update(len(ids))
    (folder / f"{name}.offsets").write_bytes(np.cumsum(lengths, dtype=np.int64).tobytes())


def tell(where: str, trouble: str, rows: Indices, pairs: Dataset) -> None:
    """Which lines of a side are left out, in the log; of what is not read from lines, which pairs."""
    if not len(rows):
        return
    lines = "line" in pairs.column_names
    numbers = pairs[rows[:FIRST]]["line"] if lines else (rows[:FIRST] + 1).tolist()
    count = counted(len(rows), "line" if lines else "pair")
    log.info(f"left out {count} of {where}: {trouble} ({first_of(numbers)})")


# ------------------------------------------------------------------------------------------------------------ batches
def epoch_batches(encoded: EncodedPairs, config: TrainConfig, seed: int, epoch: int) -> list[Indices]:
    """The indices of each update of an epoch, every pair once; a function of the arguments and of nothing else.

    Every epoch has the same number of updates, for only pairs of equal size change places before the cut.
    An update has pairs of similar length: as many as `train.batch_tokens` allows, where a pair counts its longer side
    with `</s>` and without padding (a longer pair still makes an update of its own), or `train.batch_sentences`.
    """
    rng = np.random.default_rng((seed, epoch))
    order = by_length(encoded, rng)
    if config.batch_sentences is not None:
        ends = list(range(config.batch_sentences, len(order), config.batch_sentences))
    else:
        ends = cuts(np.maximum(encoded.source_lengths, encoded.target_lengths)[order], config.batch_tokens)
    batches = np.split(order, ends)
    return [batches[i] for i in rng.permutation(len(batches))]


def by_length(encoded: EncodedPairs, rng: np.random.Generator) -> Indices:
    """All indices by the longer side, among equals by the difference of the sides, among equals at random.

    The differences rise and fall in turn: where a batch goes from one length to the next, they are alike, too.
    """
    order = rng.permutation(len(encoded))
    source, target = encoded.source_lengths[order], encoded.target_lengths[order]
    longer, difference = np.maximum(source, target), source - target
    return order[np.lexsort((np.where(longer % 2, difference, -difference), longer))]


def cuts(sizes: Indices, budget: int) -> list[int]:
    """Where to cut so that no part's sum is over the budget, unless it is a single number.

    A part of more than `STEP` has a multiple of it: libraries compile a kernel for each new shape, so few are fast.
    """
    total = np.cumsum(sizes)
    ends = [0]
    while ends[-1] < len(sizes):
        before = total[ends[-1] - 1] if ends[-1] else 0
        count = max(1, int(np.searchsorted(total, before + budget, side="right")) - ends[-1])
        ends.append(ends[-1] + (count - count % STEP if count > STEP else count))
    return ends[1:-1]


def micro_batches(indices: Indices, parts: int) -> list[Indices]:
    """The indices in at most `parts` parts of (almost) as many pairs, none empty; lengths stay together."""
    return np.array_split(indices, min(parts, len(indices)))


def padding_waste(encoded: EncodedPairs, batches: Sequence[Indices]) -> float:
    """The share of padding in the positions of both sides of all batches."""
    order, starts = np.concatenate(batches), np.cumsum([0, *map(len, batches[:-1])])
    counts = np.diff(np.append(starts, len(order)))
    lengths = np.stack((encoded.source_lengths, encoded.target_lengths))[:, order]
    positions = np.maximum.reduceat(lengths, starts, axis=1) * counts
    return float(1 - lengths.sum() / positions.sum())


def assemble(encoded: EncodedPairs, indices: Indices, seed: int = 0) -> Batch:
    """The batch of some pairs.

    With `tokenizer.sampling` their text is segmented anew, by the seed; a sentence that gets more than
    `data.max_length` pieces by that keeps its best segmentation.
    """
    rows = encoded.rows[indices]
    sources: list[Ids] = [encoded.source[row] for row in rows]
    targets: list[Ids] = [encoded.target[row] for row in rows]
    texts = encoded.pairs[rows] if encoded.sampling or encoded.guided else {}
    if encoded.sampling:
        sources = resample(sources, texts["source"], encoded.tokenizer.source, encoded, 2 * seed)
        targets = resample(targets, texts["target"], encoded.tokenizer.target, encoded, 2 * seed + 1)
    batch = make_batch(sources, targets)
    if encoded.guided:
        return batch._replace(guide_BTS=guide(encoded.tokenizer, texts, sources, targets))
    return batch


def guide(
    tokenizer: Tokenizer, pairs: dict[str, list[Any]], sources: Sequence[Ids], targets: Sequence[Ids]
) -> torch.Tensor:
    """guide_BTS: the weights of one who knows the gold links of these pairs, 0 at padding and where a pair has none."""
    guide_BTS = torch.zeros(len(sources), max(map(len, targets)) + 1, max(map(len, sources)) + 1)
    for row, (sure, possible) in enumerate(zip(pairs["sure"], pairs["possible"], strict=True)):
        if sure or possible:
            source = tokenizer.source.words_of(pairs["source"][row], [*sources[row], EOS])
            target = tokenizer.target.words_of(pairs["target"][row], [*targets[row], EOS])
            ideal_TS = ideal_weights(Gold.of(sure, possible), source, target)
            guide_BTS[row, : len(target), : len(source)] = torch.from_numpy(ideal_TS)
    return guide_BTS


def resample(best: list[Ids], texts: list[str], side: Side, encoded: EncodedPairs, seed: int) -> list[Ids]:
    drawn = side.encode(texts, encoded.sampling, seed)
    return [new if len(new) <= encoded.max_length else old for new, old in zip(drawn, best, strict=True)]
