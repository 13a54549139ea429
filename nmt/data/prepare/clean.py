"""Clean sentence pairs: normalize their text, and find reasons to drop them.

Shapes: N pairs.
"""

import html
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from nmt.config import CleaningConfig
from nmt.data.literals import find_numbers
from nmt.data.words import UNSPACED_PATTERN, may_be_unspaced

# Control characters, soft hyphen, marks of text direction, byte order mark, interlinear annotations. Joiners (U+200C,
# U+200D) and zero-width spaces stay: Persian, Hindi and Khmer need them.
INVISIBLE = regex.compile(r"[\p{Cc}\u00AD\u061C\u200E\u200F\u202A-\u202E\u2060\u2066-\u2069\uFEFF\uFFF9-\uFFFB]+")
LINE_BREAKS = regex.compile(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")
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


def remove_markup(text: str) -> str:
    """Remove HTML tags, and replace entities by their characters."""
    if "&" not in text and "<" not in text:
        return text
    text = ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    return LINE_BREAKS.sub(" ", TAG.sub(" ", text))  # &#10; is a line break


def remove_controls(text: str) -> str:
    return text if text.isprintable() else INVISIBLE.sub("", text.replace("\t", " "))


def compose_characters(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def normalize_spaces(text: str) -> str:
    return " ".join(text.split())


NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "markup": remove_markup,
    "controls": remove_controls,
    "unicode": compose_characters,
    "white_space": normalize_spaces,
}


def normalize_text(text: str, steps: Iterable[tuple[str, Callable[[str], str]]], changed: Counter[str]) -> str:
    """Return a sentence after some of `NORMALIZATIONS`, and count it in `changed` for each that changed it.

    Line breaks always become spaces, since each sentence will be a line.
    """
    if not text.isprintable():
        text = LINE_BREAKS.sub(" ", text)
    for name, normalize in steps:
        old, text = text, normalize(text)
        if text != old:
            changed[name] += 1
    return text


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


class CleanedPairs(NamedTuple):
    """Pairs after the rules that need no other pairs."""

    sources: list[str]
    targets: list[str]
    reasons: list[str | None]  # rule by which a pair is dropped
    changed: Counter[str]  # number of sentences that each normalization has changed


def clean_pairs(sources: Iterable[str], targets: Iterable[str], clean: CleaningConfig) -> CleanedPairs:
    """Normalize pairs, and apply the rules that need no other pairs."""
    steps = [(name, function) for name, function in NORMALIZATIONS.items() if getattr(clean, name)]
    changed: Counter[str] = Counter()
    sources = [normalize_text(text, steps, changed) for text in sources]
    targets = [normalize_text(text, steps, changed) for text in targets]
    reasons = [find_reason(source, target, clean) for source, target in zip(sources, targets, strict=True)]
    return CleanedPairs(sources, targets, reasons, changed)


def find_reason(source: str, target: str, clean: CleaningConfig) -> str | None:
    """Return the first rule by which a pair is dropped, of those that need no other pairs."""
    if clean.empty and not (VISIBLE.search(source) and VISIBLE.search(target)):
        return "empty"
    if clean.damaged and (REPLACEMENT_CHARACTER in source or REPLACEMENT_CHARACTER in target):
        return "damaged"
    if clean.copies and source == target:
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
