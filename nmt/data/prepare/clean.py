"""Clean sentence pairs: normalize their text, and find reasons to drop them.

Shapes: N pairs.
"""

import html
import unicodedata
from collections import Counter

import numpy as np
import numpy.typing as npt
import regex

from nmt.config import CleaningConfig
from nmt.data.literals import find_numbers
from nmt.data.words import UNSPACED_PATTERN, may_be_unspaced

# Control characters, soft hyphen, marks of text direction, byte order mark, interlinear annotations. Joiners (U+200C,
# U+200D) and zero-width spaces stay: Persian, Hindi and Khmer need them.
INVISIBLE = regex.compile(r"[\p{Cc}\u00AD\u061C\u200E\u200F\u202A-\u202E\u2060\u2066-\u2069\uFEFF\uFFF9-\uFFFB]+")
WHITE_SPACE = regex.compile(r"\s+")
LINE_BREAKS = regex.compile(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")  # each sentence will be a line
VISIBLE = regex.compile(r"[^\p{C}\p{Z}]")
ENTITY = regex.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]\w{1,30});")
TAG = regex.compile(
    r"</?(?:a|abbr|b|big|blockquote|br|center|code|dd|div|dl|dt|em|font|h[1-6]|hr|i|img|li|ol|p|pre|q|s|small|span|"
    r"strike|strong|sub|sup|table|tbody|td|th|tr|tt|u|ul)"
    r"(?:\s+[\w:-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s<>]+))*\s*/?>",
    regex.IGNORECASE,
)
REPLACEMENT_CHARACTER = "\ufffd"
RATIO_OFFSET = 10  # characters added to both lengths, so that short sentences may differ more
MIN_SCRIPT_SHARE = 0.05  # of all letters of a side, for a script to be usual there


def find_usual_scripts(characters: Counter[str]) -> set[str]:
    """Return the scripts that have at least `MIN_SCRIPT_SHARE` of the letters of a text, given its characters."""
    scripts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            scripts[script_of(character)] += count
    return {script for script, count in scripts.items() if count >= MIN_SCRIPT_SHARE * scripts.total()}


def script_of(letter: str) -> str:
    """Return the first word of a letter's Unicode name, such as LATIN, CJK or HIRAGANA.

    Full-width and half-width letters count as those of their script, and the mark of long vowels as Katakana.
    """
    name = unicodedata.name(letter, "UNNAMED").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    return name.replace("-", " ").partition(" ")[0]


def normalize_text(text: str) -> str:
    """Return a sentence without markup and control characters, in composed characters and with single spaces."""
    if "&" in text or "<" in text:
        text = TAG.sub(" ", ENTITY.sub(lambda entity: html.unescape(entity[0]), text))
    if not text.isprintable():
        text = INVISIBLE.sub("", WHITE_SPACE.sub(" ", text))
    return " ".join(unicodedata.normalize("NFC", text).split())


def count_words(text: str) -> int:
    """Return the number of words between spaces, where each character of a script without spaces is one."""
    if may_be_unspaced(text):
        text = UNSPACED_PATTERN.sub(" x ", text)
    return len(text.split())


def numbers_differ(source: str, target: str) -> bool:
    """Return whether both sides have numbers that differ.

    Numbers match if they are the same in any order, or if their digits, read in sequence, are the same, so 14.30
    matches 14:30, and 3-4 matches 3 and 4.
    """
    left, right = find_numbers(source), find_numbers(target)
    return bool(left and right) and sorted(left) != sorted(right) and "".join(left) != "".join(right)


def join_lines(text: str) -> str:
    """Return a sentence as one line."""
    return LINE_BREAKS.sub(" ", text)


def find_reason(source: str, target: str, clean: CleaningConfig) -> str | None:
    """Return the first rule by which a pair is dropped, of those that need no other pairs."""
    if not (VISIBLE.search(source) and VISIBLE.search(target)):
        return "empty"
    if REPLACEMENT_CHARACTER in source + target:
        return "damaged"
    if source == target:
        return "copies"
    limit = clean.max_words
    if limit is not None and any(len(text) > limit and count_words(text) > limit for text in (source, target)):
        return "max_words"
    if clean.numbers and numbers_differ(source, target):
        return "numbers"
    return None


class ScriptRule:
    """Tells sentences of which too few letters belong to the usual scripts of a text."""

    def __init__(self, characters: Counter[str], min_share: float) -> None:
        usual = find_usual_scripts(characters)
        foreign = [letter for letter in characters if letter.isalpha() and script_of(letter) not in usual]
        self.pattern = regex.compile(f"[{''.join(map(regex.escape, foreign))}]") if foreign else None
        self.min_share = min_share

    def is_broken_by(self, text: str) -> bool:
        if self.pattern is None or not self.pattern.search(text):
            return False
        letters = sum(map(str.isalpha, text))
        return letters - len(self.pattern.findall(text)) < self.min_share * letters


def find_unusual_ratios(
    source_lengths_N: npt.NDArray[np.int32], target_lengths_N: npt.NDArray[np.int32], max_ratio: float
) -> npt.NDArray[np.bool_]:
    """Return which pairs have a ratio of lengths that is at least `max_ratio` times the median ratio, or its inverse.

    The ratio is (source + c) / (target + c) with lengths in characters and c = `RATIO_OFFSET`.
    """
    ratios_N = np.log((source_lengths_N + RATIO_OFFSET) / (target_lengths_N + RATIO_OFFSET))
    usual = np.median(ratios_N) if len(ratios_N) else 0.0
    return np.abs(ratios_N - usual) >= np.log(max_ratio)
