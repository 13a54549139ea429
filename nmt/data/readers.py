"""Pairs from files of lines, each with the number of its line, or what is wrong with a line in its place."""

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmt.data.lines import NOT_TEXT, counted, raw_lines, undecodable
from nmt.data.parting import Lengths, first_gap
from nmt.errors import UserError, nearest

SHOWN = 20  # names in a message
CLIPPED = 100  # characters of a name or a value in one


class Line(NamedTuple):
    """A pair of texts."""

    number: int  # of the line in its file, from 1
    source: str
    target: str


class BadLine(NamedTuple):
    """A line that holds no pair."""

    file: Path
    number: int
    kind: str  # of trouble: what such lines are
    reason: str  # what it is in this one


class NoPair(ValueError):
    """Of a line, with the kind of trouble and the reason."""


def text_pairs(source: Path, target: Path) -> Iterator[Line | BadLine]:
    """The pairs of two line-aligned files.

    Raises:
        UserError: one has more lines; and where they part, as far as can be told.
    """
    with open(source, "rb") as source_file, open(target, "rb") as target_file:
        lines = zip_longest(raw_lines(source_file), raw_lines(target_file))
        for number, (left, right) in enumerate(lines, 1):
            if left is None or right is None:
                raise UserError(different_lengths(source, target))
            try:
                pair = Line(number, left.decode(), right.decode())
            except UnicodeDecodeError:
                yield from undecodable_sides(number, {source: left, target: right})
            else:
                yield pair


def undecodable_sides(number: int, sides: dict[Path, bytes]) -> Iterator[BadLine]:
    for file, line in sides.items():
        try:
            line.decode()
        except UnicodeDecodeError as error:
            yield BadLine(file, number, NOT_TEXT, undecodable(error))


def different_lengths(source: Path, target: Path) -> str:
    lengths = {file: lengths_of(file) for file in (source, target)}
    short, long = sorted(lengths, key=lambda file: len(lengths[file]))
    gap = first_gap(lengths[short], lengths[long])
    lacking = len(lengths[long]) - len(lengths[short])
    hint = ""
    if gap is not None:
        where = f"at its end, after line {gap:,}" if gap == len(lengths[short]) else f"near line {gap + 1:,}"
        what = "a line" if lacking == 1 else f"{lacking:,} lines, the first of them"
        hint = f". By the lengths of the lines, {short} lacks {what} {where}"
    counts = f"{source} has {counted(len(lengths[source]), 'line')} and {target} has {len(lengths[target]):,}"
    return f"{counts}; each line of one must translate the same line of the other{hint}"


def lengths_of(file: Path) -> Lengths:
    """Of the lines of a file, in bytes."""
    with open(file, "rb") as stream:
        return np.fromiter(map(len, raw_lines(stream)), np.int64)


def parsed(path: Path, parse: Callable[[str], tuple[str, str] | None], skip: int = 0) -> Iterator[Line | BadLine]:
    """The pairs that `parse` finds in the lines of a file after the first `skip`; it may raise `NoPair`."""
    with open(path, "rb") as file:
        for number, line in enumerate(raw_lines(file), 1):
            if number <= skip:
                continue
            try:
                pair = parse(line.decode())
            except UnicodeDecodeError as error:
                yield BadLine(path, number, NOT_TEXT, undecodable(error))
            except NoPair as error:
                yield BadLine(path, number, *error.args)
            else:
                if pair is not None:
                    yield Line(number, *pair)


def tsv_pairs(path: Path, source: str, target: str) -> Iterator[Line | BadLine]:
    """The pairs of a table: columns by their names in the first line or, if both are numbers, by these, from 1."""
    header = not (source.isdecimal() and target.isdecimal())
    if header:
        with open(path, "rb") as file:
            names = next(raw_lines(file), b"").decode(errors="replace").split("\t")
        for name in (source, target):
            if name not in names:
                raise UserError(
                    f"{path}: no column '{name}' in the first line, which has {listed(names)}{nearest(name, names)}; "
                    "if it names no columns, give their numbers: data.source=1 data.target=2"
                )
        left, right = names.index(source), names.index(target)
    else:
        left, right = int(source) - 1, int(target) - 1
        if min(left, right) < 0:
            raise UserError(f"data.source={source} data.target={target}: columns are counted from 1")

    def parse(line: str) -> tuple[str, str]:
        cells = line.split("\t")
        needed = max(left, right) + 1
        if len(cells) < needed:
            raise NoPair("short of columns", f"{len(cells)} columns, but {needed} are needed")
        return cells[left], cells[right]

    return parsed(path, parse, skip=int(header))


def jsonl_pairs(path: Path, source: str, target: str) -> Iterator[Line | BadLine]:
    """The pairs of a file of JSON objects, one a line; keys may be nested as in `translation.de`. Empty lines are
    skipped."""

    def parse(line: str) -> tuple[str, str] | None:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise NoPair("not JSON", f"not JSON ({error.msg} at position {error.pos + 1})") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise NoPair("not JSON", f"not JSON ({error})") from None
        texts = dig(record, source), dig(record, target)
        for key, text in zip((source, target), texts, strict=True):
            if not isinstance(text, str):
                held = listed(list(record)) if isinstance(record, dict) else type(record).__name__
                reason = f"no text under '{key}' but {clipped(text)}; the line has {held}"
                raise NoPair(f"without a text under '{key}'", reason)
            try:
                text.encode()
            except UnicodeEncodeError as error:  # half a surrogate pair is no text
                raise NoPair(f"without a text under '{key}'", f"no text under '{key}': {error}") from None
        return texts

    return parsed(path, parse)


def dig(record: Any, key: str) -> Any:
    """The value of a key in a JSON object, or in an object within it; else None."""
    if not isinstance(record, dict):
        return None
    head, dot, rest = key.partition(".")
    return dig(record.get(head), rest) if dot and key not in record else record.get(key)


def clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= CLIPPED else f"{text[:CLIPPED]}..."


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = [name if name.isprintable() and len(name) <= CLIPPED else clipped(name) for name in names[:SHOWN]]
    return ", ".join(shown) + more if names else "nothing"


LINE_READERS: dict[str, Callable[..., Iterator[Line | BadLine]]] = {
    "text": text_pairs,
    "tsv": tsv_pairs,
    "jsonl": jsonl_pairs,
}
