"""How well translations keep the literals of their sources: numbers, addresses, tags and placeholders."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nmt.data.literals import PATTERNS, find_literals


def measure_literals(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return how many literals of each kind the translations keep, for the kinds that occur.

    A literal of a source is kept if the translation has it as often as the source.

    Returns:
        By kind: `in_source`, their number; `kept`, how many of them the translations keep; `added`, how many the
        translations have that the sources have not; and `kept_by_references`.
    """
    measured = {}
    for kind in PATTERNS:
        wanted, written, expected = (
            [Counter(literal.text for literal in find_literals(text) if literal.kind == kind) for text in texts]
            for texts in (sources, translations, references)
        )
        added = sum((own - source).total() for source, own in zip(wanted, written, strict=True))
        in_source = sum(count.total() for count in wanted)
        if in_source or added:
            measured[kind] = {
                "in_source": in_source,
                "kept": count_kept(wanted, written),
                "added": added,
                "kept_by_references": count_kept(wanted, expected),
            }
    return measured


def count_kept(sources: Sequence[Counter[str]], texts: Sequence[Counter[str]]) -> int:
    """Return how many literals of the sources occur as often in their texts."""
    return sum(
        count
        for source, own in zip(sources, texts, strict=True)
        for text, count in source.items()
        if own[text] == count
    )


def describe_literals(counts: dict[str, Any]) -> str:
    """Return the counts of a kind of literals on one line."""
    shares = [f"{counts['kept']:,} of {counts['in_source']:,}"]
    if counts["in_source"]:
        shares[0] += f" ({counts['kept'] / counts['in_source']:.1%})"
        shares.append(f"references keep {counts['kept_by_references'] / counts['in_source']:.1%}")
    if counts["added"]:
        shares.append(f"{counts['added']:,} added")
    return "; ".join(shares)
