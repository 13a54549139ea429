"""Text that is copied instead of translated (`search.protect`), and terms with a given translation (`search.terms`).

Before the search, each protected piece of text is replaced by a literal piece of the vocabulary, which the model has
learned to copy to where it belongs (`augment.literals`). The search writes each of them exactly once. Then the text
comes back in their place; a term comes back as its translation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import regex

from nmt.config import SearchConfig
from nmt.data.literals import NON_DIGIT, find_literals
from nmt.data.tokenizer import LITERAL_PIECE, Tokenizer
from nmt.data.words import UNSPACED_PATTERN
from nmt.decoding.search import Literals
from nmt.errors import UserError
from nmt.runtime.text_io import read_dictionary

MIN_DIGITS = 3  # of numbers that are protected; a model needs to know small ones, as for the plural of what they count


class ProtectedLine(NamedTuple):
    """A line with literal pieces in place of what is protected."""

    text: str
    originals: dict[str, str]  # by literal piece: the text that comes in its place in the source
    translations: dict[str, str]  # and in the translation
    left_out: int  # how much could not be protected, for lack of literal pieces


class Replacement(NamedTuple):
    """Text of a line that is protected."""

    start: int  # offsets in characters
    end: int
    translation: str


class Protector:
    """Finds what to protect, and replaces it by literal pieces of the vocabulary."""

    def __init__(self, config: SearchConfig, tokenizer: Tokenizer) -> None:
        """Raises `UserError` if the vocabulary has no literal pieces, or the file of terms cannot be used."""
        self.protects_literals = config.protect
        self.patterns = [regex.compile(pattern) for pattern in config.patterns]
        self.terms = read_dictionary("search.terms", config.terms)
        if self.terms:
            self.patterns.insert(0, compile_terms(self.terms))
        self.source_ids = tokenizer.source.literal_ids
        self.target_ids = tokenizer.target.literal_ids
        self.pieces = tokenizer.source.pieces(self.source_ids)
        if not self.pieces:
            key = f"search.terms={config.terms}" if config.terms else "search.protect=true"
            raise UserError(
                f"{key} needs a model with pieces that stand for literals; train one with tokenizer.literals=16 "
                f"augment.literals=0.1, or remove {key.partition('=')[0]}"
            )

    def protect(self, line: str) -> ProtectedLine:
        """Replace what is to be protected in a line by literal pieces, one for each place."""
        found = select_replacements(self.find_replacements(line))
        unused = (piece for piece in self.pieces if piece not in line)
        kept = dict(zip(unused, found, strict=False))
        parts, end = [], 0
        for piece, replacement in kept.items():
            parts += [line[end : replacement.start], piece]
            end = replacement.end
        return ProtectedLine(
            text="".join([*parts, line[end:]]),
            originals={piece: line[r.start : r.end] for piece, r in kept.items()},
            translations={piece: r.translation for piece, r in kept.items()},
            left_out=len(found) - len(kept),
        )

    def find_replacements(self, line: str) -> Iterator[Replacement]:
        """Yield all that is to be protected in a line. Where two overlap, the first one counts."""
        for pattern in self.patterns:
            for match in pattern.finditer(line):
                yield Replacement(match.start(), match.end(), self.terms.get(match[0], match[0]))
        for literal in find_literals(line) if self.protects_literals else ():
            text = line[literal.start : literal.end]
            if literal.kind != "numbers" or len(NON_DIGIT.sub("", text)) >= MIN_DIGITS:
                yield Replacement(literal.start, literal.end, text)

    def find_required(self, sentences: Sequence[Sequence[int]]) -> Literals:
        """Return the literal pieces that the translations of sentences, given as source ids, must have."""
        targets = dict(zip(self.source_ids, self.target_ids, strict=True))
        return Literals(self.target_ids, [[targets[i] for i in ids if i in targets] for ids in sentences])


def select_replacements(replacements: Iterable[Replacement]) -> list[Replacement]:
    """Return those that are not empty and overlap no earlier one, from left to right."""
    selected: list[Replacement] = []
    for new in replacements:
        if new.start < new.end and not any(new.start < old.end and old.start < new.end for old in selected):
            selected.append(new)
    return sorted(selected)


def compile_terms(terms: Iterable[str]) -> "regex.Pattern[str]":
    """Return a pattern that matches any of the terms, the longest if several begin in the same place.

    Only whole words match, except in scripts without spaces.
    """
    longest_first = sorted(terms, key=len, reverse=True)
    return regex.compile("|".join(map(mark_boundaries, longest_first)))


def mark_boundaries(term: str) -> str:
    """Return a pattern for a term that matches whole words only, except in scripts without spaces."""
    before = r"(?<!\w)" if is_word_character(term[0]) else ""
    after = r"(?!\w)" if is_word_character(term[-1]) else ""
    return before + regex.escape(term) + after


def is_word_character(character: str) -> bool:
    """Return whether a character is part of a word in a script with spaces between words."""
    return bool(regex.match(r"\w", character)) and not UNSPACED_PATTERN.match(character)


def restore(text: str, by_piece: Mapping[str, str]) -> str:
    """Put the text that literal pieces stand for back in their place."""
    return LITERAL_PIECE.sub(lambda match: by_piece.get(match[0], match[0]), text) if by_piece else text
