"""Literals: the parts of a sentence that a translation repeats, such as numbers, addresses and tags."""

import unicodedata
from typing import NamedTuple

import regex

# Separators within numbers are ignored: 1,000 = 1.000 = 1 000.
NUMBER = regex.compile(r"\d{1,3}(?: \d{3})+(?!\d)|\d+(?:[.,'’\u00a0\u202f\u066b\u066c]\d+)*")
NON_DIGIT = regex.compile(r"\D+")
NO_LETTER_BEFORE = r"(?<![A-Za-z0-9])"  # but perhaps one of a script without spaces
FULL_WIDTH_MARKS = "，。、；：！？（）「」『』《》"  # not part of a URL
FINAL_MARKS = ".,;:!?'\"»”’)]}"  # at the end of a URL they belong to the sentence

# Where patterns overlap, the first in this order that matches at the leftmost place counts. Repetitions before a fixed
# character are bounded, so that the time is proportional to the length of the sentence.
PATTERNS = {
    "tags": r"</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?>",
    "urls": rf"{NO_LETTER_BEFORE}(?:[a-z][a-z0-9+.-]{{1,20}}://|www\.)[^\s<>\x22{FULL_WIDTH_MARKS}]+",
    "emails": rf"{NO_LETTER_BEFORE}[A-Za-z0-9_.+-]{{1,64}}@[A-Za-z0-9-]{{1,64}}(?:\.[A-Za-z0-9-]+)+",
    "placeholders": (
        r"\$?\{\{?[\w.:]*\}?\}"  # {name}, {0}, ${name}, {{name}}
        r"|(?<![\d%])%(?:\([\w.]+\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh|ll|[hlLqjzt])?[diouxXeEfgGcsp](?![A-Za-z])"  # %s
    ),
    "numbers": NUMBER.pattern,
}
LITERAL = regex.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in PATTERNS.items()))


class Literal(NamedTuple):
    """A literal, and where it is in its sentence."""

    kind: str  # a key of `PATTERNS`
    text: str  # as it is compared: numbers in ASCII digits without separators, all others as written
    start: int  # offsets in characters
    end: int


def find_literals(text: str) -> list[Literal]:
    """Return the literals of a sentence from left to right; they do not overlap."""
    found = []
    for match in LITERAL.finditer(text):
        kind, value = str(match.lastgroup), match[0]
        if kind == "urls":
            value = value.rstrip(FINAL_MARKS)
        end = match.start() + len(value)
        found.append(Literal(kind, normalize_number(value) if kind == "numbers" else value, match.start(), end))
    return found


def find_numbers(text: str) -> list[str]:
    """Return the numbers of a sentence in ASCII digits, without separators."""
    return [normalize_number(number) for number in NUMBER.findall(text)]


def normalize_number(number: str) -> str:
    """Return a number in ASCII digits, without separators: 1.000 and 1,000 become 1000."""
    digits = NON_DIGIT.sub("", number)
    return digits if digits.isascii() else "".join(str(unicodedata.digit(digit, digit)) for digit in digits)
