"""Read sentence pairs from line-based files as record batches with line numbers, and report invalid lines.

The `datasets` library also reads such files, but names no line in its errors, cannot leave out a damaged line, and
refuses JSON objects whose other keys differ from line to line.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from nmt.errors import UserError, suggest
from nmt.system.messages import clip_repr, list_names, pluralize
from nmt.system.text import NOT_UTF8, LineReader, describe_decode_error, open_binary

ONE_OBJECT_PER_LINE = "each line must hold one object, which jq -c . FILE writes, or jq -c '.[]' FILE from an array"
SURROGATE = re.compile("[\ud800-\udfff]")  # an unpaired one, in an escape of JSON
BATCH_PAIRS = 10_000  # maximum pairs of a record batch
BATCH_CHARACTERS = 2**20  # of both sides, after which a batch of parsed lines is complete
TEXT_SCHEMA = pa.schema({"source": pa.string(), "target": pa.string()})
LINE_SCHEMA = TEXT_SCHEMA.append(pa.field("line", pa.int64()))


class LinePair(NamedTuple):
    """A sentence pair and where it was read."""

    number: int  # line number in its file, from 1
    source: str
    target: str


class BadLine(NamedTuple):
    """An invalid line, which is not a pair."""

    file: Path
    number: int  # line number in its file, from 1
    kind: str  # kind of problem, by which dropped lines are counted
    reason: str  # what is wrong with this line


class NoPairError(ValueError):
    """Raised for an invalid line, with the arguments `kind` and `reason` of `BadLine`."""


def batch_line_pairs(lines: Iterator[LinePair | BadLine]) -> Iterator[pa.RecordBatch | BadLine]:
    """Collect pairs into record batches of limited size; bad lines pass through."""
    pairs: list[LinePair] = []
    size = 0
    for line in lines:
        if isinstance(line, BadLine):
            yield line
            continue
        pairs.append(line)
        size += len(line.source) + len(line.target)
        if len(pairs) == BATCH_PAIRS or size > BATCH_CHARACTERS:
            yield build_record_batch(pairs)
            pairs, size = [], 0
    if pairs:
        yield build_record_batch(pairs)


def build_record_batch(pairs: list[LinePair]) -> pa.RecordBatch:
    numbers, sources, targets = zip(*pairs, strict=True)
    return pa.record_batch([pa.array(sources), pa.array(targets), pa.array(numbers)], schema=LINE_SCHEMA)


def parse_lines(
    paths: Sequence[Path], parse: Callable[..., tuple[str, str] | None], skip: int = 0
) -> Iterator[LinePair | BadLine]:
    """Yield the pairs that `parse` returns for the lines of a file, or of two aligned files, after the first `skip`.

    It may raise `NoPairError`.

    Raises:
        UserError: two files have different numbers of lines.
    """
    for number, lines in islice(enumerate(zip_longest(*map(iterate_lines, paths)), 1), skip, None):
        if None in lines:
            counts = [sum(1 for _ in iterate_lines(path)) for path in paths]
            raise UserError(
                f"{paths[0]} has {pluralize(counts[0], 'line')} and {paths[1]} has {counts[1]:,}; each line of one "
                "must translate the same line of the other"
            )
        try:
            pair = parse(*[line.decode() for line in lines])
        except UnicodeDecodeError as error:
            path = next(path for path, line in zip(paths, lines, strict=True) if line == error.object)
            yield BadLine(path, number, NOT_UTF8, describe_decode_error(error))
        except NoPairError as error:
            yield BadLine(paths[0], number, *error.args)
        else:
            if pair is not None:
                yield LinePair(number, *pair)


def iterate_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which may be compressed."""
    with open_binary(path) as file:
        yield from LineReader(file, path)


def read_text_pairs(source: Path, target: Path) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of two line-aligned files."""
    return batch_line_pairs(parse_lines([source, target], lambda *texts: texts))


def read_tsv_pairs(
    path: Path, source: str, target: str, numbers_hint: str = "data.source=1 data.target=2"
) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of a table, with columns given by their names in the first line or by their numbers from 1.

    A row with more columns than the first is invalid, because a tab inside a sentence would truncate it. `numbers_hint`
    tells error messages how to specify columns by number.
    """
    has_header = not (source.isdecimal() and target.isdecimal())
    first_cells = next(iterate_lines(path), b"").decode(errors="replace").split("\t")
    if has_header:
        for name in (source, target):
            if name not in first_cells:
                raise UserError(
                    f"{path}: no column '{name}' in the first line, which has {list_names(first_cells)}"
                    f"{suggest(name, first_cells)}; if that line is not a header, give the numbers of the columns: "
                    f"{numbers_hint}"
                )
        left, right = first_cells.index(source), first_cells.index(target)
    else:
        left, right = int(source) - 1, int(target) - 1
        if min(left, right) < 0:
            raise UserError(f"{path}: columns {source} and {target}: columns are counted from 1")

    def parse(line: str) -> tuple[str, str]:
        cells = line.split("\t")
        needed = max(left, right) + 1
        if len(cells) < needed:
            raise NoPairError("too few columns", f"{pluralize(len(cells), 'column')}, but {needed} are needed")
        if len(cells) > len(first_cells):
            reason = f"{pluralize(len(cells), 'column')}, but the first line has {len(first_cells)}"
            raise NoPairError("too many columns", reason)
        return cells[left], cells[right]

    return batch_line_pairs(parse_lines([path], parse, skip=int(has_header)))


def read_jsonl_pairs(path: Path, source: str, target: str) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of a file with one JSON object per line; keys may be nested as in `translation.de`.

    Empty lines are skipped.
    """

    def parse(line: str) -> tuple[str, str] | None:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number with thousands of digits, or very deep nesting
            raise NoPairError("not JSON", f"not JSON ({error}); {ONE_OBJECT_PER_LINE}") from None
        if not isinstance(record, dict):
            reason = f"expected a JSON object with '{source}' and '{target}', got {clip_repr(record)}"
            raise NoPairError("not a JSON object", f"{reason}; {ONE_OBJECT_PER_LINE}")
        texts = get_nested(record, source), get_nested(record, target)
        for key, text in zip((source, target), texts, strict=True):
            if not isinstance(text, str) or SURROGATE.search(text):
                reason = f"expected text under '{key}', got {clip_repr(text)}; the line has {list_names(list(record))}"
                raise NoPairError(f"no text under '{key}'", reason)
        return texts

    return batch_line_pairs(parse_lines([path], parse))


def get_nested(record: Any, key: str) -> Any:
    """Return the value of a key in a JSON object, or of a dotted key in a nested one; None if there is none."""
    if not isinstance(record, dict):
        return None
    head, dot, rest = key.partition(".")
    return get_nested(record.get(head), rest) if dot and key not in record else record.get(key)


LINE_READERS: dict[str, Callable[..., Iterator[pa.RecordBatch | BadLine]]] = {
    "text": read_text_pairs,
    "tsv": read_tsv_pairs,
    "jsonl": read_jsonl_pairs,
}
