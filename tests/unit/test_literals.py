"""Tests of literals: numbers, addresses, tags and placeholders that a translation repeats."""

import re
from collections import Counter

import pytest

from nmt.data.literals import find_literals
from nmt.evaluation.literal_counts import describe_literals, measure_literals


@pytest.mark.parametrize(
    ("text", "literals"),
    [
        ("Seite 1.000 von 12 345, 3,5 % und 50%ige Lösung", ["1000", "12345", "35", "50"]),
        ("١٢٫٥ كيلو و ۳۰۰", ["125", "300"]),
        ("第４７１１号", ["4711"]),
        (
            "Siehe https://example.org/a?b=1,2&c=(3). Oder (www.example.com/x).",
            ["https://example.org/a?b=1,2&c=(3", "www.example.com/x"],
        ),
        ("Mail an max.muster+x@mail.example.co.uk, bitte", ["max.muster+x@mail.example.co.uk"]),
        (
            '<b>fett</b><br/> <a href="https://x.org/1">Text</a> 3 < 4 und a<b',
            ["<b>", "</b>", "<br/>", '<a href="https://x.org/1">', "</a>", "3", "4"],
        ),
        ("<ent1> ruft <ent2> heute.", ["<ent1>", "<ent2>"]),
        (
            "%s: %1$d von %(total)s, %5.2f %% {name} {0} ${user} {{x.y}} {}",
            ["%s", "%1$d", "%(total)s", "%5.2f", "{name}", "{0}", "${user}", "{{x.y}}", "{}"],
        ),
        ("100 % der 20% sind", ["100", "20"]),
        ("", []),
    ],
)
def test_literals_are_found_from_left_to_right(text: str, literals: list[str]) -> None:
    found = find_literals(text)
    assert [literal.text for literal in found] == literals
    assert all(left.end <= right.start for left, right in zip(found, found[1:], strict=False))
    for literal in found:
        if literal.kind != "numbers":
            assert text[literal.start : literal.end] == literal.text


@pytest.mark.parametrize("unit", ["a.", "a@", "1 111 ", "<a ", "{a", "%1", "http:", "www.", "1,", "-"])
def test_long_lines_take_linear_time(unit: str) -> None:
    """With a pattern that takes quadratic time, this would take minutes."""
    find_literals(unit * 50_000)


def test_counts_equal_those_of_a_slow_twin() -> None:
    sources = ["a 1 b 2", "no number", "7 and 7", "<b>x</b> 3", "mail x@y.org"]
    translations = ["1 2", "5 5", "7", "<b>x 3", "x@y.org x@y.org"]
    references = ["1 two", "", "7 7", "<b>x</b> 3", "x@y.org"]
    measured = measure_literals(sources, translations, references)
    assert set(measured) == {"numbers", "tags", "emails"}

    in_source = kept = added = kept_by_references = 0
    for source, translation, reference in zip(sources, translations, references, strict=True):
        wanted, own, human = (re.findall(r"\d+", text) for text in (source, translation, reference))
        for number in wanted:
            in_source += 1
            kept += wanted.count(number) == own.count(number)
            kept_by_references += wanted.count(number) == human.count(number)
        added += sum(max(0, count - wanted.count(number)) for number, count in Counter(own).items())
    assert measured["numbers"] == {
        "in_source": in_source,
        "kept": kept,
        "added": added,
        "kept_by_references": kept_by_references,
    }
    assert measured["tags"]["kept"] == 1
    assert measured["emails"] == {"in_source": 1, "kept": 0, "added": 1, "kept_by_references": 1}
    assert describe_literals(measured["numbers"]) == ("3 of 5 (60.0%); references keep 80.0%; 2 added")


def test_kinds_that_do_not_occur_are_left_out() -> None:
    assert measure_literals(["no"], ["none"], ["3"]) == {}
