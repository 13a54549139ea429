"""Word alignments from attention weights, and the files they are written to.

Rows are target pieces or words (T), columns source pieces or words (S). The words that pieces belong to are given as a
list of word indices from 0, with -1 for pieces that belong to no word: `</s>` and superfluous spaces.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmt.config import LinksConfig
from nmt.data.word_links import Link, format_pharaoh, threshold_links
from nmt.system.text import COMPRESSION_BY_SUFFIX, split_on_spaces

JSON_NULL = np.array(None)  # replaces numbers that JSON cannot represent
EOS_PIECE = "</s>"


def pool_to_words(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Return weights between words, (target words + 1) x (source words + 1).

    Weights are summed over the pieces of a source word and averaged over the pieces of a target word, so each target
    word still distributes a weight of 1. The last row and column are for pieces that belong to no word.
    """
    source = np.asarray(source_word_of_piece, dtype=int)
    target = np.asarray(target_word_of_piece, dtype=int)
    pooled_TS = np.zeros((target.max(initial=-1) + 2, source.max(initial=-1) + 2))
    pieces_T = np.zeros(len(pooled_TS))
    np.add.at(pooled_TS, np.ix_(target, source), weights_TS)  # index -1 is the last row or column
    np.add.at(pieces_T, target, 1)
    return pooled_TS / np.maximum(pieces_T, 1)[:, None]


def extract_links(
    weights_TS: np.ndarray,
    source_word_of_piece: Sequence[int],
    target_word_of_piece: Sequence[int],
    threshold: float | None = None,
) -> list[Link]:
    """Return links (source word, target word), sorted by target word.

    Without a threshold, each target word is linked to the source word with the largest weight. It has no link if the
    pieces that belong to no word (`</s>`) weigh more, or if all weights are 0. With a threshold, it is linked to every
    source word with at least that weight.
    """
    pooled_TS = pool_to_words(weights_TS, source_word_of_piece, target_word_of_piece)[:-1]
    if threshold is not None:
        return threshold_links(pooled_TS[:, :-1], threshold)
    best_T = pooled_TS.argmax(axis=1)  # the first of equal weights, so a word is preferred to no word
    no_word = pooled_TS.shape[1] - 1
    return [(int(s), t) for t, s in enumerate(best_T) if s != no_word and pooled_TS[t, s] > 0]


# ----------------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True, slots=True)
class Record:
    """A sentence pair with its attention weights; a line of `alignments.jsonl`."""

    source_pieces: list[str]  # with `</s>`
    target_pieces: list[str]  # with `</s>`, unless the translation was truncated at its maximum length
    source_words: list[str]
    target_words: list[str]
    source_word_of_piece: list[int]  # -1: of no word
    target_word_of_piece: list[int]
    weights: np.ndarray | None  # target pieces x source pieces; None for a model without attention
    score: float  # summed log-probability, `</s>` included
    source_spans: list[tuple[int, int]] | None = None  # start and end (exclusive) of each word in its line; None if the
    target_spans: list[tuple[int, int]] | None = None  # line itself is not known

    def word_weights(self) -> np.ndarray | None:
        """Return weights of target words x source words; None for a model without attention."""
        if self.weights is None:
            return None
        weights = np.zeros((len(self.target_words), len(self.source_words)))
        pooled = pool_to_words(self.weights, self.source_word_of_piece, self.target_word_of_piece)[:-1, :-1]
        weights[: pooled.shape[0], : pooled.shape[1]] = pooled  # the last words may have no pieces
        return weights

    def links(self, config: LinksConfig | None = None) -> list[Link]:
        """Return links between words; none for a model without attention."""
        if self.weights is None:
            return []
        threshold = config.threshold if config else None
        return extract_links(self.weights, self.source_word_of_piece, self.target_word_of_piece, threshold)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without a line break.

        Numbers are written exactly. Infinities and NaN become null.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.source_spans is None:
            del fields["source_spans"], fields["target_spans"]
        if self.weights is not None:
            fields["weights"] = np.where(np.isfinite(self.weights), self.weights, JSON_NULL).tolist()
        if not math.isfinite(self.score):
            fields["score"] = None
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def restore_unknown_words(text: str, words: list[str]) -> list[str]:
    """Return `words` with each `<unk>` as it is spelled in `text`, if both have the same number of words."""
    text_words = split_on_spaces(text)
    return text_words if "<unk>" in words and len(text_words) == len(words) else words


# ----------------------------------------------------------------------------------------------------------- formats
def choose_alignment_format(path: str) -> Callable[[Record, list[Link]], str]:
    """Return the function that gives a pair's line of the file: for `.jsonl` a record, else links, in Pharaoh format.

    A suffix of compression, `.gz` or `.zst`, is ignored.
    """
    name = Path(path)
    suffix = Path(name.stem).suffix if name.suffix in COMPRESSION_BY_SUFFIX else name.suffix
    if suffix == ".jsonl":
        return lambda record, links: record.to_json()
    return lambda record, links: format_pharaoh(links)
