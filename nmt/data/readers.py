"""Pairs from files of lines, as record batches with the numbers of their lines, or what is wrong with a line in its
place.

Line-aligned text is read in blocks of bytes, without a step of Python for each line; only a block in which something is
no UTF-8 is looked at line by line.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nmt.errors import UserError, suggest
from nmt.runtime.lines import (
    BOM,
    NOT_TEXT,
    LineReader,
    check_length,
    check_line_ends,
    count_of,
    describe_decode_error,
    open_unpacked,
)

SHOWN = 20  # names in a message
CLIPPED = 100  # characters of a name or a value in one
ONE_A_LINE = "each line holds one object"
BLOCK = 2**20  # bytes of a side in memory at a time; one line may have more
BATCH = 10_000  # pairs at most that are parsed one by one before they are written
TEXTS = pa.schema({"source": pa.string(), "target": pa.string()})
SCHEMA = TEXTS.append(pa.field("line", pa.int64()))


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


# --------------------------------------------------------------------------------------------------------------- text
def text_pairs(source: Path, target: Path) -> Iterator[pa.RecordBatch | BadLine]:
    """The pairs of two line-aligned files.

    Raises:
        UserError: one has more lines; and where they part, as far as can be told.
    """
    left_blocks, right_blocks = line_blocks(source), line_blocks(target)
    left, right = next(left_blocks, None), next(right_blocks, None)
    number = 1
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield from checked(number, {source: left[:count], target: right[:count]})
        number += count
        left = left[count:] if count < len(left) else next(left_blocks, None)
        right = right[count:] if count < len(right) else next(right_blocks, None)
    if left is not None or right is not None:
        raise UserError(different_lengths(source, target))


def line_blocks(path: Path) -> Iterator[pa.StringArray]:
    """The lines of a file, as `LineReader` has them, some at a time and never none; they may be no UTF-8.

    Raises:
        UserError: the file is damaged, or a line has more than `LONGEST_LINE` bytes.
    """
    rest: list[bytes] = []
    number = 1
    with open_unpacked(path) as file:
        check_line_ends(file, path)
        block = file.read(BLOCK + len(BOM)).removeprefix(BOM)
        while block:
            end = block.rfind(b"\n") + 1
            check_length(sum(map(len, rest)) + (block.find(b"\n") if end else len(block)), path, number)
            rest.append(block[:end] if end else block)
            if end:
                lines = lines_of(b"".join(rest).replace(b"\r\n", b"\n"))
                yield lines
                number += len(lines)
                rest = [block[end:]]
            block = file.read(BLOCK)
    if tail := b"".join(rest):
        yield strings(np.array([0, len(tail)]), tail)


def lines_of(text: bytes) -> pa.StringArray:
    """The lines of a text that ends with one."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return strings(np.append(0, ends - np.arange(len(ends))), text.translate(None, b"\n"))


def strings(offsets: npt.NDArray[np.int64], text: bytes) -> pa.StringArray:
    return pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(text))


def checked(number: int, sides: dict[Path, pa.StringArray]) -> Iterator[pa.RecordBatch | BadLine]:
    """The pairs of two blocks of lines, the first of which has this number; those that are UTF-8."""
    left, right = sides.values()
    numbers = np.arange(number, number + len(left))
    try:
        left.validate(full=True)
        right.validate(full=True)
    except pa.ArrowInvalid:
        good = []
        for place, lines in enumerate(zip(left.view(pa.binary()), right.view(pa.binary()), strict=True)):
            raw = {file: line.as_py() for file, line in zip(sides, lines, strict=True)}
            bad = list(undecodable_sides(number + place, raw))
            yield from bad
            if not bad:
                good.append(place)
        chosen = pa.array(good, pa.int64())
        left, right, numbers = left.take(chosen), right.take(chosen), numbers[good]
    if len(left):
        yield pa.record_batch([left, right, numbers], schema=SCHEMA)


def undecodable_sides(number: int, sides: dict[Path, bytes]) -> Iterator[BadLine]:
    for file, line in sides.items():
        try:
            line.decode()
        except UnicodeDecodeError as error:
            yield BadLine(file, number, NOT_TEXT, describe_decode_error(error))


def different_lengths(source: Path, target: Path) -> str:
    counts = f"{source} has {count_of(count_lines(source), 'line')} and {target} has {count_lines(target):,}"
    return f"{counts}; each line of one must translate the same line of the other"


def count_lines(path: Path) -> int:
    with open_unpacked(path) as file:
        return sum(1 for _ in LineReader(file, path))


# ------------------------------------------------------------------------------------------------------ tsv and jsonl
def in_batches(lines: Iterator[Line | BadLine]) -> Iterator[pa.RecordBatch | BadLine]:
    """The same with pairs put together, as many as make a block."""
    pairs: list[Line] = []
    size = 0
    for line in lines:
        if isinstance(line, BadLine):
            yield line
            continue
        pairs.append(line)
        size += len(line.source) + len(line.target)
        if len(pairs) == BATCH or size > BLOCK:
            yield batch_of(pairs)
            pairs, size = [], 0
    if pairs:
        yield batch_of(pairs)


def batch_of(pairs: Sequence[Line]) -> pa.RecordBatch:
    numbers, sources, targets = zip(*pairs, strict=True)
    return pa.record_batch([pa.array(sources), pa.array(targets), pa.array(numbers)], schema=SCHEMA)


def parsed(path: Path, parse: Callable[[str], tuple[str, str] | None], skip: int = 0) -> Iterator[Line | BadLine]:
    """The pairs that `parse` finds in the lines of a file after the first `skip`; it may raise `NoPair`."""
    with open_unpacked(path) as file:
        check_line_ends(file, path)
        for number, line in enumerate(LineReader(file, path), 1):
            if number <= skip:
                continue
            try:
                pair = parse(line.decode())
            except UnicodeDecodeError as error:
                yield BadLine(path, number, NOT_TEXT, describe_decode_error(error))
            except NoPair as error:
                yield BadLine(path, number, *error.args)
            else:
                if pair is not None:
                    yield Line(number, *pair)


def tsv_pairs(path: Path, source: str, target: str) -> Iterator[pa.RecordBatch | BadLine]:
    """The pairs of a table: columns by their names in the first line or, if both are numbers, by these, from 1. A line
    of more than the first is none: a tab within a text would make another column of its end."""
    header = not (source.isdecimal() and target.isdecimal())
    with open_unpacked(path) as file:
        check_line_ends(file, path)
        first = next(LineReader(file, path), b"").decode(errors="replace").split("\t")
    if header:
        for name in (source, target):
            if name not in first:
                raise UserError(
                    f"{path}: no column '{name}' in the first line, which has {listed(first)}{suggest(name, first)}; "
                    "if it names no columns, give their numbers: data.source=1 data.target=2"
                )
        left, right = first.index(source), first.index(target)
    else:
        left, right = int(source) - 1, int(target) - 1
        if min(left, right) < 0:
            raise UserError(f"data.source={source} data.target={target}: columns are counted from 1")

    def parse(line: str) -> tuple[str, str]:
        cells = line.split("\t")
        needed = max(left, right) + 1
        if len(cells) < needed:
            raise NoPair("short of columns", f"{len(cells)} columns, but {needed} are needed")
        if len(cells) > len(first):
            raise NoPair("of too many columns", f"{len(cells)} columns, but the first line has {len(first)}")
        return cells[left], cells[right]

    return in_batches(parsed(path, parse, skip=int(header)))


def jsonl_pairs(path: Path, source: str, target: str) -> Iterator[pa.RecordBatch | BadLine]:
    """The pairs of a file of JSON objects, one a line; keys may be nested as in `translation.de`. Empty lines are
    skipped."""

    def parse(line: str) -> tuple[str, str] | None:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            chosen = "'.[]'" if "[" in line else "."
            spread = line.strip() in ("[", "{")  # the beginning of a value that goes on in the next line
            remedy = f"; {ONE_A_LINE}: jq -c {chosen} FILE" if spread else ""
            raise NoPair("not JSON", f"not JSON ({error.msg} at position {error.pos + 1}){remedy}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise NoPair("not JSON", f"not JSON ({error})") from None
        if not isinstance(record, dict):
            array = isinstance(record, list)
            remedy = f"; {ONE_A_LINE}: jq -c '.[]' FILE" if array and any(isinstance(x, dict) for x in record) else ""
            what = f"a JSON {'array' if array else 'value'}, {clipped(record)}"
            raise NoPair("no JSON object", f"{what}, and no object with '{source}' and '{target}'{remedy}")
        texts = dig(record, source), dig(record, target)
        for key, text in zip((source, target), texts, strict=True):
            if not isinstance(text, str):
                reason = f"no text under '{key}' but {clipped(text)}; the line has {listed(list(record))}"
                raise NoPair(f"without a text under '{key}'", reason)
            try:
                text.encode()
            except UnicodeEncodeError as error:  # half a surrogate pair is no text
                raise NoPair(f"without a text under '{key}'", f"no text under '{key}': {error}") from None
        return texts

    return in_batches(parsed(path, parse))


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


LINE_READERS: dict[str, Callable[..., Iterator[pa.RecordBatch | BadLine]]] = {
    "text": text_pairs,
    "tsv": tsv_pairs,
    "jsonl": jsonl_pairs,
}
