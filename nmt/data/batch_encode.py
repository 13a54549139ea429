"""Encoding of many texts at a time into arrays of ids."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import UNK
from nmt.data.tokenizer import LanguageTokenizer

MAX_KNOWN_WORDS = 2**18  # per side; words whose ids are cached while encoding. Frequent words are seen first.
Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def encode_texts(
    texts: pa.Array, side: LanguageTokenizer, max_length: int, known: dict[str, list[int]]
) -> tuple[Array, Indices]:
    """Return the concatenated ids of texts, and the number of ids of each.

    Texts are encoded word by word where that gives the same ids: this is four times as fast, since most words have been
    seen before. `known`, the ids of words, is updated in place. `max_length` is as in `encode_lines`.
    """
    by_word = np.zeros(len(texts), dtype=bool)
    if side.can_encode_by_word:
        by_word = ~needs_line_encoding(texts, side.longest_piece * max_length)
    word_ids, word_lengths = encode_by_word(texts.filter(pa.array(by_word)), side, known)
    line_ids, line_lengths = encode_lines(to_list(texts.filter(pa.array(~by_word))), side, max_length)
    if not len(line_lengths):
        return word_ids, word_lengths
    lengths = np.empty(len(texts), dtype=np.int64)
    lengths[by_word] = word_lengths
    lengths[~by_word] = line_lengths
    starts = np.empty(len(texts), dtype=np.int64)
    starts[by_word] = np.cumsum(word_lengths) - word_lengths
    starts[~by_word] = len(word_ids) + np.cumsum(line_lengths) - line_lengths
    return gather_ranges(np.concatenate([word_ids, line_ids]), starts, lengths), lengths


def needs_line_encoding(texts: pa.Array, max_characters: int) -> npt.NDArray[np.bool_]:
    """Return which texts `encode_by_word` cannot handle.

    Such texts are not words separated by single spaces, are too long, or are only white space.
    """
    conditions = [
        pc.starts_with(texts, " "),
        pc.ends_with(texts, " "),
        pc.match_substring(texts, "  "),
        pc.utf8_is_space(texts),
        pc.greater(pc.utf8_length(texts), max_characters),
    ]
    return np.logical_or.reduce([condition.to_numpy(zero_copy_only=False) for condition in conditions])


def encode_by_word(texts: pa.Array, side: LanguageTokenizer, known: dict[str, list[int]]) -> tuple[Array, Indices]:
    """Encode texts of words separated by single spaces, like `encode_texts`."""
    split = pc.split_pattern(texts, " ")
    words = split.flatten().dictionary_encode()
    distinct_words = to_list(words.dictionary)
    known_ids = [known.get(word) for word in distinct_words]
    new_words = [word for word, ids in zip(distinct_words, known_ids, strict=True) if ids is None]
    new_ids = dict(zip(new_words, side.encode(new_words, threads=1), strict=True))
    if len(known) < MAX_KNOWN_WORDS:
        known.update(new_ids)
    ids, ids_per_word = concatenate_ids(
        [new_ids[word] if ids is None else ids for word, ids in zip(distinct_words, known_ids, strict=True)], side
    )
    word_indices = words.indices.to_numpy()
    counts = ids_per_word[word_indices]
    lengths = np.diff(np.append(0, np.cumsum(counts))[split.offsets.to_numpy()])
    return gather_ranges(ids, (np.cumsum(ids_per_word) - ids_per_word)[word_indices], counts), lengths


def encode_lines(texts: list[str], side: LanguageTokenizer, max_length: int) -> tuple[Array, Indices]:
    """Encode any texts, like `encode_texts`.

    A text that must have more than `max_length` pieces is replaced by `max_length + 1` times `<unk>`, since encoding
    extremely long lines could take longer than the rest of the corpus.
    """
    too_long = [len(text) > max_length and side.must_exceed(text, max_length) for text in texts]
    to_encode = ["" if skip or text.isspace() else text for text, skip in zip(texts, too_long, strict=True)]
    placeholder = [UNK] * (max_length + 1)
    encoded = side.encode(to_encode, threads=1)
    return concatenate_ids([placeholder if skip else ids for skip, ids in zip(too_long, encoded, strict=True)], side)


def concatenate_ids(sequences: Sequence[Sequence[int] | Array], side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Return the concatenated ids, and the length of each sequence."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return np.fromiter(itertools.chain.from_iterable(sequences), id_dtype(side), lengths.sum()), lengths


def concatenate_parts(parts: list[tuple[Array, Indices]], side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Concatenate the ids and the lengths of parts of a text."""
    all_ids, all_lengths = zip(concatenate_ids([], side), *parts, strict=True)  # with an empty part for the dtypes
    return np.concatenate(all_ids), np.concatenate(all_lengths)


def gather_ranges(ids: Array, starts: Indices, lengths: Indices) -> Array:
    """Concatenate the ranges of `ids` with these starts and lengths."""
    offsets = np.cumsum(lengths) - lengths
    return ids[np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())]


def id_dtype(side: LanguageTokenizer) -> type[np.uint16] | type[np.int32]:
    """Return the dtype in which ids are stored."""
    return np.uint16 if side.vocab_size <= 2**16 else np.int32


def to_list(texts: pa.Array) -> list[str]:
    return texts.to_numpy(zero_copy_only=False).tolist()
