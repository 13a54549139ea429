"""Subword regularization: a new random segmentation of the text for each epoch (`tokenizer.sampling`)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from nmt.config import SIDES
from nmt.data.batch_encode import concatenate_ids
from nmt.data.encoding import Array, EncodedPairs, EncodedSide, Indices, sort_by_length
from nmt.data.tokenizer import LanguageTokenizer
from nmt.runtime.distributed import all_gather, rank, world_size

TEXTS_PER_SEED = 1_000  # texts segmented with one seed


def local_range(count: int) -> tuple[int, int]:
    """Return the range of `count` texts that this rank segments.

    Ranges consist of whole chunks of `TEXTS_PER_SEED`, so that results do not depend on the world size.
    """
    chunks = -(-count // TEXTS_PER_SEED)
    first, last = (min(count, chunks * i // world_size() * TEXTS_PER_SEED) for i in (rank(), rank() + 1))
    return first, last


def sample_ids(
    texts: list[str], best: list[Array], side: LanguageTokenizer, sampling: float, limit: int, seed: str, first: int
) -> tuple[Array, Indices]:
    """Sample a segmentation of each text; return the concatenated ids and the number of ids of each text.

    An empty text stays empty. A text keeps its best segmentation, given by its ids in `best`, if that or the sampled
    one exceeds `limit` pieces. `first` is the index of the first text in the corpus.
    """
    sequences: list[Sequence[int] | Array] = []
    for start in range(0, len(texts), TEXTS_PER_SEED):
        chunk = list(zip(texts[start : start + TEXTS_PER_SEED], best[start : start + TEXTS_PER_SEED], strict=True))
        to_encode = [text if 0 < len(ids) <= limit else "" for text, ids in chunk]
        sampled = side.encode(to_encode, sampling, f"{seed} {first + start}")
        sequences += [new if 0 < len(new) <= limit else old for new, (_, old) in zip(sampled, chunk, strict=True)]
    return concatenate_ids(sequences, side)


def resample_subwords(encoded: EncodedPairs, seed: int, epoch: int) -> EncodedPairs:
    """Segment the training pairs again for an epoch; each rank segments its share.

    The result depends only on the arguments, not on the world size. It is held in memory, since subword sampling is
    used with small corpora.
    """
    rows = np.sort(encoded.order).astype(np.int64)
    first, last = local_range(len(rows))
    sides = dict(zip(SIDES, (encoded.tokenizer.source, encoded.tokenizer.target), strict=True))
    local_sides = []
    with tqdm(
        total=2 * (last - first), desc="segmenting", unit=" lines", leave=False, disable=rank() > 0 or None
    ) as bar:
        for name, side in sides.items():
            best = getattr(encoded, name)
            parts = []
            for start in range(first, last, TEXTS_PER_SEED):
                chunk_rows = rows[start : min(start + TEXTS_PER_SEED, last)]
                texts = encoded.pairs[name].slice(chunk_rows[0], chunk_rows[-1] - chunk_rows[0] + 1).to_pylist()
                parts.append(
                    sample_ids(
                        [texts[row] for row in chunk_rows - chunk_rows[0]],
                        [best[row] for row in chunk_rows],
                        side,
                        encoded.sampling,
                        encoded.max_length,
                        f"{seed} {epoch} {name}",
                        start,
                    )
                )
                bar.update(len(chunk_rows))
            local_sides.append(concatenate_parts(parts, side))
    ranks = all_gather(local_sides)
    sampled_sides = []
    lengths = np.zeros((2, len(encoded.pairs)), dtype=np.int64)
    for i, side in enumerate(sides.values()):
        ids, lengths[i, rows] = concatenate_parts([rank_sides[i] for rank_sides in ranks], side)
        sampled_sides.append(EncodedSide(ids, np.append(0, np.cumsum(lengths[i]))))
    order, runs = sort_by_length(lengths[:, rows] + 1)
    order = rows[order].astype(encoded.order.dtype)
    source, target = sampled_sides
    return dataclasses.replace(encoded, source=source, target=target, order=order, runs=runs)


def concatenate_parts(parts: list[tuple[Array, Indices]], side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Concatenate the ids and the lengths of parts of a text."""
    all_ids, all_lengths = zip(concatenate_ids([], side), *parts, strict=True)  # with an empty part for the dtypes
    return np.concatenate(all_ids), np.concatenate(all_lengths)
