"""From attention weights to word alignments.

Rows are target pieces or words (T), columns source pieces or words (S). Which word a piece belongs to is given as a
list of word indices from 0, with -1 for pieces of no word: `</s>` and superfluous spaces.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

NULL = np.array(None)  # where a number cannot be written


def pool(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Weights between words, (target words + 1) x (source words + 1): the last row and column stand for no word."""
    source, target = np.asarray(source_word_of_piece, dtype=int), np.asarray(target_word_of_piece, dtype=int)
    pooled_TS = np.zeros((target.max(initial=-1) + 2, source.max(initial=-1) + 2))
    pieces_T = np.zeros(len(pooled_TS))
    np.add.at(pooled_TS, np.ix_(target, source), weights_TS)  # index -1 is the last one
    np.add.at(pieces_T, target, 1)
    return pooled_TS / np.maximum(pieces_T, 1)[:, None]


def word_weights(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Attention weights from each target word to each source word: target words x source words.

    The sum over a source word's pieces, for attention is shared out among them; the mean over a target word's pieces,
    for each of them shares out its own.
    """
    return pool(weights_TS, source_word_of_piece, target_word_of_piece)[:-1, :-1]


def links(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> list[tuple[int, int]]:
    """Links (source word, target word), in the order of the target: a target word with the source word of most weight.

    A target word has no link where pieces of no word (`</s>`) weigh more, or where nothing has weight.
    """
    pooled_TS = pool(weights_TS, source_word_of_piece, target_word_of_piece)
    best_T = pooled_TS[:-1].argmax(axis=1)  # the first of equals: a word comes before no word
    no_word = pooled_TS.shape[1] - 1
    return [(int(s), t) for t, s in enumerate(best_T) if s != no_word and pooled_TS[t, s] > 0]


def pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Links as `source-target` from 0, in the order of the source, as in `0-0 1-2 2-1`."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


@dataclass(frozen=True, slots=True)
class Record:
    """A line of `alignments.jsonl`: a pair of sentences, and where the model looked at each target piece."""

    source_pieces: list[str]  # with `</s>`
    target_pieces: list[str]  # with `</s>`, unless the translation was cut at its maximum length
    source_words: list[str]
    target_words: list[str]
    weights: np.ndarray | None  # target pieces x source pieces; None for a model without attention
    score: float  # summed log-probability, `</s>` included

    def to_json(self) -> str:
        """One line without its end; numbers are exact, those that are not finite become null."""
        weights = None if self.weights is None else np.where(np.isfinite(self.weights), self.weights, NULL).tolist()
        score = self.score if math.isfinite(self.score) else None
        return json.dumps(asdict(self) | {"weights": weights, "score": score}, ensure_ascii=False, allow_nan=False)
