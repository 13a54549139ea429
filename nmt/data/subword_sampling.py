"""Subword regularization: text segmented at random, anew for each epoch (`tokenizer.sampling`)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from nmt.data.batch_encode import end_to_end
from nmt.data.encoding import SIDES, Array, EncodedPairs, EncodedSide, Indices, by_length
from nmt.data.tokenizer import LanguageTokenizer
from nmt.runtime.distributed import all_gather, rank, world_size

CHUNK = 1_000  # texts that are drawn from one seed


def own_share(count: int) -> tuple[int, int]:
    """Which of so many texts this process segments: whole chunks, so that the number of processes changes nothing."""
    chunks = -(-count // CHUNK)
    first, last = (min(count, chunks * number // world_size() * CHUNK) for number in (rank(), rank() + 1))
    return first, last


def draw(
    texts: list[str], best: list[Array], side: LanguageTokenizer, sampling: float, limit: int, seed: str, first: int
) -> tuple[Array, Indices]:
    """The ids of the texts from number `first` on, end to end, and how many each has. A text without pieces stays so,
    and one that has more than `limit`, or gets more, keeps its best ones."""
    found: list[Sequence[int] | Array] = []
    for start in range(0, len(texts), CHUNK):
        some = list(zip(texts[start : start + CHUNK], best[start : start + CHUNK], strict=True))
        kept = [text if 0 < len(ids) <= limit else "" for text, ids in some]
        drawn = side.encode(kept, sampling, f"{seed} {first + start}")
        found += [new if 0 < len(new) <= limit else old for new, (_, old) in zip(drawn, some, strict=True)]
    return end_to_end(found, side)


def resample_subwords(encoded: EncodedPairs, seed: int, epoch: int) -> EncodedPairs:
    """The pairs of a corpus segmented for an epoch: a function of the arguments, whatever the number of processes, each
    of which does its share. What it returns is held in memory, for it is small corpora that want sampling."""
    rows = np.sort(encoded.order).astype(np.int64)
    first, last = own_share(len(rows))
    sides = dict(zip(SIDES, (encoded.tokenizer.source, encoded.tokenizer.target), strict=True))
    own = []
    with tqdm(
        total=2 * (last - first), desc="segmenting", unit=" lines", leave=False, disable=rank() > 0 or None
    ) as bar:
        for name, side in sides.items():
            texts, best, parts = encoded.pairs.select_columns(name), getattr(encoded, name), []
            for start in range(first, last, CHUNK):
                some = rows[start : min(start + CHUNK, last)]
                given = texts[some][name], [best[row] for row in some]
                draws = f"{seed} {epoch} {name}"
                parts.append(draw(*given, side, encoded.sampling, encoded.max_length, draws, start))
                bar.update(len(some))
            own.append(together(parts, side))
    shares = all_gather(own)
    drawn, lengths = [], np.zeros((2, len(encoded.pairs)), dtype=np.int64)
    for number, side in enumerate(sides.values()):
        ids, lengths[number, rows] = together([share[number] for share in shares], side)
        drawn.append(EncodedSide(ids, np.append(0, np.cumsum(lengths[number]))))
    order, runs = by_length(lengths[:, rows] + 1)
    order = rows[order].astype(encoded.order.dtype)
    return dataclasses.replace(encoded, source=drawn[0], target=drawn[1], order=order, runs=runs)


def together(parts: list[tuple[Array, Indices]], side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Ids and lengths of parts of a text, as those of a whole."""
    nothing = end_to_end([], side)
    ids, lengths = (np.concatenate([part[what] for part in [nothing, *parts]]) for what in (0, 1))
    return ids, lengths
