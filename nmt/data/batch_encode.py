"""Many texts to their ids at a time, as arrays."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import UNK
from nmt.data.tokenizer import LanguageTokenizer

KNOWN = 2**18  # words of a side whose ids are remembered while it is tokenized: the frequent ones are met first
Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def encode_texts(
    texts: pa.Array, side: LanguageTokenizer, max_length: int, known: dict[str, list[int]]
) -> tuple[Array, Indices]:
    """The ids of some texts, end to end, and how many each has: word by word where that gives the same, which is four
    times as fast, for most words of a text have been met before."""
    plain = np.zeros(len(texts), dtype=bool)
    if side.word_by_word:
        plain = ~odd(texts, side.longest_piece * max_length)
    ids_of_plain, plain_lengths = encode_words(texts.filter(pa.array(plain)), side, known)
    ids_of_others, other_lengths = encode_lines(as_list(texts.filter(pa.array(~plain))), side, max_length)
    if not len(other_lengths):
        return ids_of_plain, plain_lengths
    lengths, starts = np.empty((2, len(texts)), dtype=np.int64)
    lengths[plain], lengths[~plain] = plain_lengths, other_lengths
    starts[plain] = np.cumsum(plain_lengths) - plain_lengths
    starts[~plain] = len(ids_of_plain) + np.cumsum(other_lengths) - other_lengths
    return picked(np.concatenate([ids_of_plain, ids_of_others]), starts, lengths), lengths


def odd(texts: pa.Array, longest: int) -> npt.NDArray[np.bool_]:
    """Which texts are not words one space apart, or longer than so many characters, or nothing but white space."""
    spaces = [pc.starts_with(texts, " "), pc.ends_with(texts, " "), pc.match_substring(texts, "  ")]
    others = [pc.utf8_is_space(texts), pc.greater(pc.utf8_length(texts), longest)]
    return np.logical_or.reduce([found.to_numpy(zero_copy_only=False) for found in spaces + others])


def encode_words(texts: pa.Array, side: LanguageTokenizer, known: dict[str, list[int]]) -> tuple[Array, Indices]:
    """The same of texts that are words one space apart; `known` has the ids of words, and is added to."""
    split = pc.split_pattern(texts, " ")
    words = split.flatten().dictionary_encode()
    names = as_list(words.dictionary)
    found = [known.get(name) for name in names]
    new = [name for name, ids in zip(names, found, strict=True) if ids is None]
    fresh = dict(zip(new, side.encode(new, threads=1), strict=True))
    if len(known) < KNOWN:
        known.update(fresh)
    ids, each = end_to_end([fresh[name] if ids is None else ids for name, ids in zip(names, found, strict=True)], side)
    places = words.indices.to_numpy()
    counts = each[places]
    lengths = np.diff(np.append(0, np.cumsum(counts))[split.offsets.to_numpy()])
    return picked(ids, (np.cumsum(each) - each)[places], counts), lengths


def encode_lines(texts: list[str], side: LanguageTokenizer, max_length: int) -> tuple[Array, Indices]:
    """The same of any texts. Of one that has more than `max_length` pieces for certain, nothing but that it has more is
    kept: to tokenize lines without end could take longer than the corpus."""
    over = [len(text) > max_length and side.surely_longer(text, max_length) for text in texts]
    rest = ["" if far or text.isspace() else text for text, far in zip(texts, over, strict=True)]
    longer = [UNK] * (max_length + 1)
    found = [longer if far else ids for far, ids in zip(over, side.encode(rest, threads=1), strict=True)]
    return end_to_end(found, side)


def end_to_end(found: Sequence[Sequence[int] | Array], side: LanguageTokenizer) -> tuple[Array, Indices]:
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    return np.fromiter(itertools.chain.from_iterable(found), kind_of(side), lengths.sum()), lengths


def picked(ids: Array, starts: Indices, lengths: Indices) -> Array:
    """Pieces of `ids` of these lengths, end to end."""
    before = np.cumsum(lengths) - lengths
    return ids[np.repeat(starts - before, lengths) + np.arange(lengths.sum())]


def kind_of(side: LanguageTokenizer) -> type[np.uint16] | type[np.int32]:
    """The numbers that ids are kept as."""
    return np.uint16 if side.vocab_size <= 2**16 else np.int32


def as_list(texts: pa.Array) -> list[str]:
    return texts.to_numpy(zero_copy_only=False).tolist()
