"""The parts of lines that are translated as one sentence each, and their translations as they are found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nmt.decoding.preparation import PreparedLine
from nmt.decoding.translation import Translation, combine_parts

SENTENCE_END_MARKS = tuple(".!?;:。！？；…")
FULL_WIDTH_END_MARKS = tuple("。！？；…")  # need no space after them
CONTINUATION_BYTE = re.compile(
    "<0x[89AB][0-9A-F]>"
)  # the piece of a byte of UTF-8 that is not the first of a character


@dataclass(frozen=True, slots=True)
class LinePart:
    """What is translated as one sentence: a line, or a part of a line that is too long."""

    line: int  # index among all lines
    ids: list[int]  # source ids
    prefix_ids: list[int]  # target ids that the translation starts with
    prefix_words: list[str]  # the word of each prefix id; only used to replace unknown words
    source_words: list[str]  # the word of each source id; only used to replace unknown words
    prepared: PreparedLine  # the line as it is translated


@dataclass(slots=True)
class LineParts:
    """The parts of lines, and their translations as they are found."""

    are_samples: bool  # whether translations are samples, and not ordered
    num_lines: int = 0
    num_parts: int = 0
    parts: dict[int, LinePart] = field(default_factory=dict)  # by index; without those of forgotten lines
    rows_of_lines: dict[int, list[int]] = field(default_factory=dict)  # the indices of the parts of each line
    results: dict[int, list[Translation]] = field(default_factory=dict)  # of each part; empty for forgotten lines

    def add(self, num_lines: int, parts: Sequence[LinePart]) -> range:
        """Add lines, and return the indices of their parts."""
        rows = range(self.num_parts, self.num_parts + len(parts))
        self.rows_of_lines.update((line, []) for line in range(self.num_lines, self.num_lines + num_lines))
        for row, part in zip(rows, parts, strict=True):
            self.parts[row] = part
            self.rows_of_lines[part.line].append(row)
        self.num_lines += num_lines
        self.num_parts += len(parts)
        return rows

    def find_missing(self) -> list[int]:
        """Return the indices of parts without a translation."""
        return [row for row in self.parts if row not in self.results]

    def is_complete(self, line: int) -> bool:
        """Return whether all parts of a line have translations."""
        return all(row in self.results for row in self.rows_of_lines[line])

    def join_results(self, line: int) -> list[Translation]:
        """Return the translations of a line."""
        return combine_parts([self.results[row] for row in self.rows_of_lines[line]], self.are_samples)

    def forget(self, line: int) -> None:
        """Free the memory of a line that is complete."""
        for row in self.rows_of_lines.pop(line):
            del self.parts[row]
            self.results[row] = []


def split_long_line(ids: list[int], pieces: list[str], limit: int) -> list[list[int]]:
    """Split the ids of a line into parts of at most `limit` pieces.

    Splits after punctuation at the end of a word if possible, else before a word, else before a character.
    """
    parts = []
    start = 0
    while len(ids) - start > limit:
        places = range(start + max(1, limit // 2) + 1, start + limit + 1)
        word_starts = [i for i in places if pieces[i].startswith("▁")]
        is_word_start = set(word_starts)
        sentence_ends = [
            i
            for i in places
            if pieces[i - 1].endswith(SENTENCE_END_MARKS if i in is_word_start else FULL_WIDTH_END_MARKS)
        ]
        characters = [i for i in places if not CONTINUATION_BYTE.fullmatch(pieces[i])]
        end = (sentence_ends or word_starts or characters or [start + limit])[-1]
        parts.append(ids[start:end])
        start = end
    return [*parts, ids[start:]]
