"""Training pairs that differ from epoch to epoch: augmentation (`augment.*`), and subword regularization, which is a
new random segmentation of the text (`tokenizer.sampling`)."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from nmt.config import SIDES
from nmt.data.augmentation import augment_pair, split_tag
from nmt.data.encoding import Array, EncodedPairs, EncodedSide, Indices, concatenate_ids, order_pairs
from nmt.data.tokenizer import LanguageTokenizer
from nmt.data.words import join_sentences
from nmt.system.distributed import all_gather, rank, world_size

TEXTS_PER_SEED = 1_000  # pairs changed and segmented with one seed
Ids = Sequence[int] | Array


def sample_ids(
    texts: list[str], best: Sequence[Ids], side: LanguageTokenizer, sampling: float, limit: int, seed: str, first: int
) -> list[Ids]:
    """Sample a segmentation of each text, and return its ids.

    An empty text stays empty. A text keeps its best segmentation, given by its ids in `best`, if that or the sampled
    one exceeds `limit` pieces. `first` is the index of the first text in the corpus.
    """
    sequences: list[Ids] = []
    for start in range(0, len(texts), TEXTS_PER_SEED):
        chunk = list(zip(texts[start : start + TEXTS_PER_SEED], best[start : start + TEXTS_PER_SEED], strict=True))
        to_encode = [text if 0 < len(ids) <= limit else "" for text, ids in chunk]
        sampled = side.encode(to_encode, sampling, f"{seed} {first + start}")
        sequences += [new if 0 < len(new) <= limit else old for new, (_, old) in zip(sampled, chunk, strict=True)]
    return sequences


def augment_texts(
    encoded: EncodedPairs, rows: Indices, texts: list[list[str]], ids: list[list[Ids]], seed: str
) -> None:
    """Change some of the pairs in these rows, given their texts and ids by side; both are updated in place.

    A pair stays as it is if a side would become empty or longer than the training pairs may be.
    """
    assert encoded.augmenter is not None
    rng = random.Random(seed)
    augmenter = encoded.augmenter
    changed: list[int] = []
    new_texts: list[list[str]] = []
    for i, (row, source, target) in enumerate(zip(rows.tolist(), *texts, strict=True)):
        tag, untagged = split_tag(source, augmenter.tags)
        size = len(tag)
        links = [(s - size, e - size, t, u) for s, e, t, u in augmenter.links.of_pair(row) if s >= size]
        new = augment_pair(untagged, target, links, augmenter, rng)
        if rng.random() < augmenter.config.concatenate:
            other = rng.randrange(len(rows))
            other_tag, other_source = split_tag(texts[0][other], augmenter.tags)
            if other_tag == tag:
                new = [join_sentences([new[0], other_source]), join_sentences([new[1], texts[1][other]])]
        new[0] = tag + new[0]
        if new != [source, target]:
            changed.append(i)
            new_texts.append(new)
    new_ids = [
        side.encode([new[number] for new in new_texts], threads=1)
        for number, side in enumerate((encoded.tokenizer.source, encoded.tokenizer.target))
    ]
    for i, new, *pair_ids in zip(changed, new_texts, *new_ids, strict=True):
        if all(0 < len(side_ids) <= encoded.max_length for side_ids in pair_ids):
            for number in range(len(SIDES)):
                texts[number][i] = new[number]
                ids[number][i] = pair_ids[number]


def resample_pairs(encoded: EncodedPairs, seed: int, epoch: int) -> EncodedPairs:
    """Change the training pairs, and segment them again, for an epoch; each rank does its share.

    The result depends only on the arguments, not on the world size. It is held in memory, since augmentation and
    subword sampling are used with small corpora.
    """
    rows = np.sort(encoded.order).astype(np.int64)
    tokenizers = encoded.tokenizer.source, encoded.tokenizer.target
    local_ids: list[list[Ids]] = [[], []]
    starts = range(0, len(rows), TEXTS_PER_SEED)
    share = starts[len(starts) * rank() // world_size() : len(starts) * (rank() + 1) // world_size()]
    for start in tqdm(share, desc="segmenting", unit=" thousand pairs", leave=False, disable=rank() > 0 or None):
        chunk_rows = rows[start : start + TEXTS_PER_SEED]
        table = encoded.pairs.slice(chunk_rows[0], chunk_rows[-1] - chunk_rows[0] + 1)
        columns = [table[name].to_pylist() for name in SIDES]
        texts = [[column[row] for row in chunk_rows - chunk_rows[0]] for column in columns]
        ids: list[list[Ids]] = [[side[row] for row in chunk_rows] for side in (encoded.source, encoded.target)]
        if encoded.augmenter is not None:
            augment_texts(encoded, chunk_rows, texts, ids, f"{seed} {epoch} {start}")
        for number, (name, side) in enumerate(zip(SIDES, tokenizers, strict=True)):
            side_ids = ids[number]
            if encoded.sampling:
                side_seed = f"{seed} {epoch} {name}"
                side_ids = sample_ids(
                    texts[number], side_ids, side, encoded.sampling, encoded.max_length, side_seed, start
                )
            local_ids[number] += side_ids
    ranks = all_gather([concatenate_ids(ids, side) for ids, side in zip(local_ids, tokenizers, strict=True)])
    sides = []
    lengths = np.zeros((2, len(encoded.pairs)), dtype=np.int64)
    for number, parts in enumerate(zip(*ranks, strict=True)):
        all_ids, lengths[number, rows] = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        sides.append(EncodedSide.build(all_ids, lengths[number]))
    order, runs, _ = order_pairs(lengths, encoded.max_length)
    source, target = sides
    return dataclasses.replace(encoded, source=source, target=target, order=order, runs=runs)
