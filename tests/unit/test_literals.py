"""Tests of literals: numbers, addresses, tags and placeholders that a translation repeats."""

import pytest

from nmt.data.literals import find_literals


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
