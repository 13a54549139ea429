"""Rules that clean sentence pairs."""

from collections import Counter

import numpy as np
import pytest

from nmt.config import CleaningConfig
from nmt.data.prepare.clean import (
    ScriptRule,
    count_words,
    find_reason,
    find_unusual_ratios,
    normalize_text,
    numbers_differ,
)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("Ein Hund.", "Ein Hund."),
        (" Ein\u00a0 Hund\t.", "Ein Hund ."),
        ("cafe\u0301", "caf\u00e9"),
        ("<b>Fish</b> &amp; chips<br/>", "Fish & chips"),
        ("AT&T <file> a < b &c; &File", "AT&T <file> a < b &c; &File"),
        ("so\u00adft \u202bab\u202c\x07\ufeff", "soft ab"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # a zero-width non-joiner belongs to the spelling
        ("Hallo&#10;Welt &NewLine;!", "Hallo Welt !"),
        ('<a href="x y">link</a> a <b und c> d', "link a <b und c> d"),
    ],
)
def test_normalization(text: str, cleaned: str) -> None:
    assert normalize_text(text) == cleaned


@pytest.mark.parametrize(
    ("source", "target", "reason", "off"),
    [
        ("a", " \u00a0", "empty", {}),
        ("a\ufffd", "b", "damaged", {}),
        ("OK", "OK", "copies", {}),
        ("a " * 151, "b", "max_words", {"max_words": None}),
        ("字" * 151, "b", "max_words", {"max_words": None}),
        ("Raum 12", "room 13", "numbers", {"numbers": False}),
    ],
)
def test_dropped_pairs(source: str, target: str, reason: str, off: dict[str, object]) -> None:
    assert find_reason(source, target, CleaningConfig()) == reason
    assert not off or find_reason(source, target, CleaningConfig(**off)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("3 Hunde", "three dogs", False),
        ("Es ist 14.30 Uhr", "It is 14:30", False),
        ("1.000 Euro", "1,000 euros", False),
        ("12 000 Menschen, 2010", "In 2010, 12,000 people", False),
        ("\U000116d1 x", "1 y", not "\U000116d1".isdecimal()),  # a digit that Python knows from 3.14 on
        ("٣٤ كتابا", "34 books", False),
        ("34 Bücher", "43 books", True),
    ],
)
def test_numbers(source: str, target: str, expected: bool) -> None:
    assert numbers_differ(source, target) is expected


def test_word_counts() -> None:
    assert [count_words(text) for text in ("", "a b", "狗看见3本书。", "كتابٌ جديدٌ", "ab 猫")] == [0, 2, 7, 2, 2]


def test_unusual_ratios_are_relative_to_the_median() -> None:
    source = np.array([20, 20, 20, 20, 200, 4], np.int32)
    target = np.array([50, 50, 50, 50, 50, 200], np.int32)
    # The median ratio is 30 / 60; those of the last pairs are 210 / 60 and 14 / 210.
    assert find_unusual_ratios(source, target, 7.0).tolist() == [False] * 4 + [True, True]
    assert find_unusual_ratios(source, target, 7.1).tolist() == [False] * 5 + [True]


def test_scripts_are_found_from_the_text() -> None:
    text = "猫が好きです。カタカナー" * 50 + "Привет"
    rule = ScriptRule(Counter(text), 0.5)
    assert [rule.is_broken_by(line) for line in ("スーパー", "Привет мир", "犬 Пр", "123 !", "")] == [
        False,
        True,
        True,
        False,
        False,
    ]
