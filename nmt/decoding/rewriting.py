"""What is done to a line before the search, and undone in its translation.

Text to copy instead of translating it (`search.protect`), and terms with a given translation (`search.terms`), are
replaced by literal pieces of the vocabulary, which the model has learned to copy to where they belong
(`augment.literals`). The search writes each of them exactly once. Then the text comes back in their place; a term comes
back as its translation. A line in capitals is translated as one in lowercase (`search.capitals`). The prefix of a
translation is rewritten like the line.
"""

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import regex

from nmt.config import UNK, SearchConfig
from nmt.data.letter_case import is_in_capitals, to_lower, to_upper
from nmt.data.literals import NON_DIGIT, NUMBER, find_literals, normalize_number
from nmt.data.tokenizer import LITERAL_PIECE, SPACE_SYMBOL, SPECIALS, Tokenizer
from nmt.data.words import UNSPACED_PATTERN
from nmt.decoding.search import Literals
from nmt.errors import UserError
from nmt.system.text import read_dictionary

UNKNOWN_WORD = SPECIALS[UNK].removeprefix(SPACE_SYMBOL)
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
MIN_DIGITS = 2  # of numbers that are protected; a model needs to know 1, as for the plural of what is counted


class RewrittenLine(NamedTuple):
    """A line as it is translated."""

    text: str
    originals: dict[str, str]  # by literal piece: the text that comes in its place in the source
    translations: dict[str, str]  # and in the translation
    left_out: int  # how much could not be protected, for lack of literal pieces
    languages: tuple[str, str]  # codes of source and target
    in_capitals: bool  # whether the line was in capitals, and is in lowercase now
    prefix: str = ""  # text that the translation begins with, as the search sees it

    def undo(self, translation: str) -> str:
        """Undo the changes in the translation."""
        if self.in_capitals:
            words = translation.split(" ")
            translation = " ".join(
                word if word == UNKNOWN_WORD else to_upper(word, self.languages[1]) for word in words
            )
        return restore_literals(translation, self.translations)

    def restore_pieces(self, source: Sequence[str], target: Sequence[str]) -> tuple[list[str], list[str]]:
        """Undo the changes in the pieces of the line and of its translation."""
        if self.in_capitals:
            source, target = (
                [to_upper(piece, language) if is_text(piece) else piece for piece in pieces]
                for pieces, language in zip((source, target), self.languages, strict=True)
            )
        return (
            [restore_literals(piece, self.originals) for piece in source],
            [restore_literals(piece, self.translations) for piece in target],
        )


class Replacement(NamedTuple):
    """Text of a line with a given translation."""

    start: int  # offsets in characters
    end: int
    translation: str


class LineRewriter:
    """Rewrites lines for the search."""

    def __init__(self, config: SearchConfig, tokenizer: Tokenizer, languages: tuple[str, str]) -> None:
        """Raises `UserError` if the vocabulary lacks literal pieces, or the file of terms cannot be used.

        Args:
            languages: codes of source and target, such as `de`.
        """
        self.config = config
        self.languages = languages
        self.terms = read_dictionary("search.terms", config.terms)
        self.term_pattern = compile_terms(self.terms)
        self.source_ids = tokenizer.source.literal_ids
        self.target_ids = tokenizer.target.literal_ids
        self.pieces = tokenizer.source.pieces(self.source_ids)
        if (config.protect or config.terms) and not self.pieces:
            key = "search.protect=true" if config.protect else f"search.terms={config.terms}"
            raise UserError(
                f"{key} needs a model with pieces that stand for literals; train one with tokenizer.literals=16 "
                f"augment.literals=0.1, or remove {key.partition('=')[0]}"
            )

    def rewrite(self, line: str, prefix: str = "") -> RewrittenLine:
        """Replace what is to be protected in a line by literal pieces, one for each place, and capitals.

        Args:
            prefix: text that the translation begins with. What stands in it for something protected becomes the same
                piece. If it is not in capitals, the line keeps its own.
        """
        found = select_replacements(self.find_replacements(line))
        kept = dict(zip((piece for piece in self.pieces if piece not in line + prefix), found, strict=False))
        text = replace_all(line, kept)
        originals = {piece: line[r.start : r.end] for piece, r in kept.items()}
        translations = {piece: r.translation for piece, r in kept.items()}
        of_prefix = self.find_in_prefix(prefix, originals, translations)
        new_prefix = replace_all(prefix, of_prefix)
        lower_prefix = to_lower(new_prefix, self.languages[1])
        has_prefix_in_capitals = to_upper(lower_prefix, self.languages[1]) == new_prefix
        in_capitals = self.config.capitals and is_in_capitals(text) and has_prefix_in_capitals
        return RewrittenLine(
            text=to_lower(text, self.languages[0]) if in_capitals else text,
            originals=originals,
            translations=translations | {piece: prefix[r.start : r.end] for piece, r in of_prefix.items()},
            left_out=len(found) - len(kept),
            languages=self.languages,
            in_capitals=in_capitals,
            prefix=lower_prefix if in_capitals else new_prefix,
        )

    def find_in_prefix(
        self, prefix: str, originals: Mapping[str, str], translations: Mapping[str, str]
    ) -> dict[str, Replacement]:
        """Return where a prefix has what literal pieces stand for, by piece, from left to right.

        A number of the prefix may have other separators than in the source.
        """
        if not prefix:
            return {}
        pieces_of_text: defaultdict[str, list[str]] = defaultdict(list)
        for piece, text in translations.items():
            pieces_of_text[normalize_literal(text)].append(piece)
        terms = [text for piece, text in translations.items() if text != originals[piece]]
        found = [Replacement(match.start(), match.end(), match[0]) for match in compile_terms(terms).finditer(prefix)]
        places = {}
        for replacement in select_replacements([*found, *self.find_replacements(prefix)]):
            text = prefix[replacement.start : replacement.end]
            pieces = pieces_of_text[normalize_literal(text)]
            if pieces:
                piece = next((piece for piece in pieces if translations[piece] == text), pieces[0])
                pieces.remove(piece)
                places[piece] = replacement
        return places

    def find_replacements(self, line: str) -> Iterator[Replacement]:
        """Yield all that is to be protected in a line. Where two overlap, the first one counts."""
        for match in self.term_pattern.finditer(line) if self.terms else ():
            yield Replacement(match.start(), match.end(), self.terms[match[0]])
        for literal in find_literals(line) if self.config.protect else ():
            text = line[literal.start : literal.end]
            if literal.kind != "numbers" or len(NON_DIGIT.sub("", text)) >= MIN_DIGITS:
                yield Replacement(literal.start, literal.end, text)

    def find_required(self, sentences: Sequence[Sequence[int]], prefixes: Sequence[str]) -> Literals:
        """Return the literal pieces that the translations of sentences, given as source ids, must have.

        Those in the prefix of the line's translation are not required again, in whichever part of the line they are.
        """
        literals = {i: (j, piece) for i, j, piece in zip(self.source_ids, self.target_ids, self.pieces, strict=True)}
        required = []
        for ids, prefix in zip(sentences, prefixes, strict=True):
            found = [literals[i] for i in ids if i in literals]
            required.append([target for target, piece in found if piece not in prefix])
        return Literals(self.target_ids, required)


def select_replacements(replacements: Iterable[Replacement]) -> list[Replacement]:
    """Return those that are not empty and overlap no earlier one, from left to right."""
    selected: list[Replacement] = []
    for new in replacements:
        place = bisect(selected, new)
        neighbors = selected[max(0, place - 1) : place + 1]
        if new.start < new.end and not any(new.start < old.end and old.start < new.end for old in neighbors):
            selected.insert(place, new)
    return selected


def replace_all(text: str, places: Mapping[str, Replacement]) -> str:
    """Return a text with each piece in its place. Pieces are in the order of their places."""
    parts, end = [], 0
    for piece, place in places.items():
        parts += [text[end : place.start], piece]
        end = place.end
    return "".join([*parts, text[end:]])


def normalize_literal(text: str) -> str:
    """Return a literal as it is compared: a number without separators, all others as written."""
    return normalize_number(text) if NUMBER.fullmatch(text) else text


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


def is_text(piece: str) -> bool:
    """Return whether a piece spells text, and is neither special nor a byte."""
    return piece not in SPECIALS and not BYTE_PIECE.fullmatch(piece)


def restore_literals(text: str, by_piece: Mapping[str, str]) -> str:
    """Put the text that literal pieces stand for back in their place."""
    return LITERAL_PIECE.sub(lambda match: by_piece.get(match[0], match[0]), text) if by_piece else text
