"""The translation of a line: text, pieces, attention weights and scores; and how those of its parts are joined."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nmt.config import LinksConfig, SearchConfig
from nmt.data.tokenizer import group_by_words
from nmt.data.words import join_sentences
from nmt.decoding.alignment import Record, restore_unknown_words
from nmt.decoding.rewriting import RewrittenLine
from nmt.errors import UserError
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize
from nmt.system.text import replace_nonfinite

MAX_LINE_WEIGHTS = 2**21  # attention weights kept for one line; a damaged line of 100,000 characters would fill memory


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of a line. Its pieces end with `</s>`, unless it was truncated at the maximum length."""

    text: str
    source_pieces: list[str] = field(default_factory=list)
    target_pieces: list[str] = field(default_factory=list)
    score: float = 0.0  # summed log-probability, `</s>` included, without penalties
    weights_TS: np.ndarray | None = None  # a row for each target piece, a column for each source piece
    ended: bool = True  # whether it ends with `</s>`; for a line translated in parts, whether all of them do
    ranking_score: float | None = None  # score after length and coverage penalty, by which n-best lists are sorted; the
    # sum over the parts of a line; None for samples and given targets, which are not ranked
    rewritten: RewrittenLine | None = None  # the line as it was translated

    @property
    def confidence(self) -> float:
        """The geometric mean of the probabilities of its pieces; 1 for an empty line."""
        return math.exp(self.score / max(1, len(self.target_pieces)))

    @property
    def restored_pieces(self) -> tuple[list[str], list[str]]:
        """The pieces with what literal pieces stand for, and in capitals if the line is."""
        if self.rewritten is None:
            return self.source_pieces, self.target_pieces
        return self.rewritten.restore_pieces(self.source_pieces, self.target_pieces)

    @property
    def record(self) -> Record:
        """The pieces with their attention weights, and the words they form.

        Words are separated by spaces in the text of the pieces; in scripts without spaces they are segmented.
        """
        source_pieces, target_pieces = self.restored_pieces
        source_words, source_index = group_by_words(source_pieces)
        target_words, target_index = group_by_words(target_pieces)
        return Record(
            source_pieces=self.source_pieces,
            target_pieces=self.target_pieces,
            source_words=source_words,
            target_words=target_words,
            source_word_of_piece=source_index,
            target_word_of_piece=target_index,
            weights=self.weights_TS,
            score=self.score,
        )


def drop_duplicate_texts(translations: list[Translation]) -> list[Translation]:
    """Return the first translation with each text."""
    first_by_text: dict[str, Translation] = {}
    for translation in translations:
        first_by_text.setdefault(translation.text, translation)
    return list(first_by_text.values())


def combine_parts(options_of_parts: list[list[Translation]], sample: bool) -> list[Translation]:
    """Return the translations of a line, given the n-best list or the samples of each of its parts.

    Several parts are joined from the best translation of each, or sample by sample. A line without parts is empty, and
    so is its translation.
    """
    if len(options_of_parts) == 1:
        return options_of_parts[0]
    if not sample:
        options_of_parts = [options[:1] for options in options_of_parts]
    joined = [join_translations(list(parts)) for parts in zip(*options_of_parts, strict=True)]
    return joined or [Translation("", ranking_score=None if sample else 0.0)]


def join_translations(parts: list[Translation]) -> Translation:
    """Join the translations of the parts of a line.

    Attention weights become blocks on a diagonal. They are dropped if there would be more than `MAX_LINE_WEIGHTS`.
    """
    source_pieces = [piece for part in parts for piece in part.source_pieces]
    target_pieces = [piece for part in parts for piece in part.target_pieces]
    blocks = [torch.from_numpy(part.weights_TS) for part in parts if part.weights_TS is not None]
    keep_weights = len(blocks) == len(parts) and len(source_pieces) * len(target_pieces) <= MAX_LINE_WEIGHTS
    ranking_scores = [part.ranking_score for part in parts if part.ranking_score is not None]
    return Translation(
        text=join_sentences(part.text for part in parts),
        source_pieces=source_pieces,
        target_pieces=target_pieces,
        score=sum(part.score for part in parts),
        weights_TS=torch.block_diag(*blocks).numpy() if keep_weights else None,
        ended=all(part.ended for part in parts),
        ranking_score=sum(ranking_scores) if len(ranking_scores) == len(parts) else None,
        rewritten=parts[0].rewritten if parts else None,
    )


def describe_translations(line: str, options: list[Translation], links: LinksConfig) -> dict[str, Any]:
    """Return a line with its translations, best first, as `format=jsonl` of `nmt.translate` writes them."""
    translations = []
    for option in options:
        record = option.record
        translations.append(
            {
                "text": option.text,
                **replace_nonfinite(
                    {"score": option.score, "ranking_score": option.ranking_score, "confidence": option.confidence}
                ),
                "source_words": restore_unknown_words(line, record.source_words),
                "target_words": restore_unknown_words(option.text, record.target_words),
                "source_pieces": option.source_pieces,
                "target_pieces": option.target_pieces,
                "links": record.links(links),
            }
        )
    return {"source": line, "translations": translations}


def warn_if_truncated(translations: Sequence[Translation], config: SearchConfig, first_line: int) -> None:
    """Warn of translations that were truncated at their maximum length."""
    truncated = [line for line, translation in enumerate(translations, first_line) if not translation.ended]
    if truncated:
        log.warning(
            f"{pluralize(len(truncated), 'translation')} truncated at the maximum length "
            f"({format_first_lines(truncated)}); the limits are search.max_length={config.max_length} and "
            f"search.max_ratio={config.max_ratio}"
        )


def check_scores(translations: Iterable[Translation], first_line: int) -> None:
    """Raise a `UserError` if a score is NaN."""
    for line, translation in enumerate(translations, first_line):
        if math.isnan(translation.score):
            raise UserError(
                f"line {line}: the model's score is NaN; its weights are damaged, or too large for this precision; "
                "try precision=fp32, or another checkpoint"
            )
