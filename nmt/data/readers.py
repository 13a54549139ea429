"""Read sentence pairs from line-based files as record batches with line numbers, and report invalid lines.

Line-aligned text is read in blocks of bytes, without running Python for each line; only a block that is not valid UTF-8
is decoded line by line.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nmt.errors import UserError, suggest
from nmt.system.messages import clip_repr, list_names, pluralize
from nmt.system.text import NOT_UTF8, UTF8_BOM, LineReader, check_line_length, describe_decode_error, open_decompressed

ONE_OBJECT_PER_LINE = "each line must hold one object"
TEXT_BLOCK_BYTES = 2**20  # bytes of each side held in memory; a longer line is held whole
PARSE_BATCH_SIZE = 10_000  # maximum pairs of a record batch that is parsed line by line
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


# --------------------------------------------------------------------------------------------------------------- text
def read_text_pairs(source: Path, target: Path) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of two line-aligned files.

    Raises:
        UserError: the files have different numbers of lines.
    """
    left_blocks, right_blocks = read_line_blocks(source), read_line_blocks(target)
    left, right = next(left_blocks, None), next(right_blocks, None)
    number = 1
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield from validate_pairs(number, {source: left[:count], target: right[:count]})
        number += count
        left = left[count:] if count < len(left) else next(left_blocks, None)
        right = right[count:] if count < len(right) else next(right_blocks, None)
    if left is not None or right is not None:
        raise UserError(describe_length_mismatch(source, target))


def read_line_blocks(path: Path) -> Iterator[pa.StringArray]:
    """Yield the lines of a file, as `LineReader` splits them, in nonempty blocks; they may not be valid UTF-8.

    Raises:
        UserError: the file is damaged, or a line has more than `MAX_LINE_BYTES` bytes.
    """
    rest: list[bytes] = []
    number = 1
    with open_decompressed(path) as file:
        block = file.read(TEXT_BLOCK_BYTES + len(UTF8_BOM)).removeprefix(UTF8_BOM)
        while block:
            end = block.rfind(b"\n") + 1
            check_line_length(sum(map(len, rest)) + (block.find(b"\n") if end else len(block)), path, number)
            rest.append(block[:end] if end else block)
            if end:
                lines = split_lines(b"".join(rest).replace(b"\r\n", b"\n"))
                yield lines
                number += len(lines)
                rest = [block[end:]]
            block = file.read(TEXT_BLOCK_BYTES)
    if tail := b"".join(rest):
        yield build_string_array(np.array([0, len(tail)]), tail)


def split_lines(text: bytes) -> pa.StringArray:
    """Return the lines of a text that ends with a line feed."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return build_string_array(np.append(0, ends - np.arange(len(ends))), text.translate(None, b"\n"))


def build_string_array(offsets: npt.NDArray[np.int64], text: bytes) -> pa.StringArray:
    return pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(text))


def validate_pairs(number: int, sides: dict[Path, pa.StringArray]) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of two blocks of lines that are valid UTF-8, and the other lines as bad ones.

    number: line number of the first line of the blocks.
    """
    left, right = sides.values()
    numbers = np.arange(number, number + len(left))
    try:
        left.validate(full=True)
        right.validate(full=True)
    except pa.ArrowInvalid:
        valid_rows = []
        for row, lines in enumerate(zip(left.view(pa.binary()), right.view(pa.binary()), strict=True)):
            lines_by_file = {file: line.as_py() for file, line in zip(sides, lines, strict=True)}
            bad_lines = list(find_undecodable(number + row, lines_by_file))
            yield from bad_lines
            if not bad_lines:
                valid_rows.append(row)
        indices = pa.array(valid_rows, pa.int64())
        left, right, numbers = left.take(indices), right.take(indices), numbers[valid_rows]
    if len(left):
        yield pa.record_batch([left, right, numbers], schema=LINE_SCHEMA)


def find_undecodable(number: int, sides: dict[Path, bytes]) -> Iterator[BadLine]:
    for file, line in sides.items():
        try:
            line.decode()
        except UnicodeDecodeError as error:
            yield BadLine(file, number, NOT_UTF8, describe_decode_error(error))


def describe_length_mismatch(source: Path, target: Path) -> str:
    counts = f"{source} has {pluralize(count_lines(source), 'line')} and {target} has {count_lines(target):,}"
    return f"{counts}; each line of one must translate the same line of the other"


def count_lines(path: Path) -> int:
    with open_decompressed(path) as file:
        return sum(1 for _ in LineReader(file, path))


# ------------------------------------------------------------------------------------------------------ tsv and jsonl
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
        if len(pairs) == PARSE_BATCH_SIZE or size > TEXT_BLOCK_BYTES:
            yield build_record_batch(pairs)
            pairs, size = [], 0
    if pairs:
        yield build_record_batch(pairs)


def build_record_batch(pairs: Sequence[LinePair]) -> pa.RecordBatch:
    numbers, sources, targets = zip(*pairs, strict=True)
    return pa.record_batch([pa.array(sources), pa.array(targets), pa.array(numbers)], schema=LINE_SCHEMA)


def parse_records(
    path: Path, parse: Callable[[str], tuple[str, str] | None], skip: int = 0
) -> Iterator[LinePair | BadLine]:
    """Yield what `parse` returns for each line of a file after the first `skip`; it may raise `NoPairError`."""
    with open_decompressed(path) as file:
        for number, line in enumerate(LineReader(file, path), 1):
            if number <= skip:
                continue
            try:
                pair = parse(line.decode())
            except UnicodeDecodeError as error:
                yield BadLine(path, number, NOT_UTF8, describe_decode_error(error))
            except NoPairError as error:
                yield BadLine(path, number, *error.args)
            else:
                if pair is not None:
                    yield LinePair(number, *pair)


def read_tsv_pairs(
    path: Path, source: str, target: str, numbers_hint: str = "data.source=1 data.target=2"
) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of a table, with columns given by their names in the first line or by their numbers from 1.

    A row with more columns than the first is invalid, because a tab inside a sentence would truncate it. `numbers_hint`
    tells error messages how to specify columns by number.
    """
    has_header = not (source.isdecimal() and target.isdecimal())
    with open_decompressed(path) as file:
        first_cells = next(LineReader(file, path), b"").decode(errors="replace").split("\t")
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

    return batch_line_pairs(parse_records(path, parse, skip=int(has_header)))


def read_jsonl_pairs(path: Path, source: str, target: str) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of a file with one JSON object per line; keys may be nested as in `translation.de`.

    Empty lines are skipped.
    """

    def parse(line: str) -> tuple[str, str] | None:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            jq_filter = "'.[]'" if "[" in line else "."
            is_multiline = line.strip() in ("[", "{")  # the start of a value that continues on the next line
            remedy = f"; {ONE_OBJECT_PER_LINE}: jq -c {jq_filter} FILE" if is_multiline else ""
            raise NoPairError("not JSON", f"not JSON ({error.msg} at position {error.pos + 1}){remedy}") from None
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, or very deep nesting
            raise NoPairError("not JSON", f"not JSON ({error})") from None
        if not isinstance(record, dict):
            is_array = isinstance(record, list)
            has_objects = is_array and any(isinstance(item, dict) for item in record)
            remedy = f"; {ONE_OBJECT_PER_LINE}: jq -c '.[]' FILE" if has_objects else ""
            actual = f"a JSON {'array' if is_array else 'value'}, {clip_repr(record)}"
            reason = f"expected a JSON object with '{source}' and '{target}', got {actual}{remedy}"
            raise NoPairError("not a JSON object", reason)
        texts = get_nested(record, source), get_nested(record, target)
        for key, text in zip((source, target), texts, strict=True):
            if not isinstance(text, str):
                reason = f"expected text under '{key}', got {clip_repr(text)}; the line has {list_names(list(record))}"
                raise NoPairError(f"no text under '{key}'", reason)
            try:
                text.encode()
            except UnicodeEncodeError as error:  # an unpaired surrogate
                raise NoPairError(f"no text under '{key}'", f"no valid text under '{key}': {error}") from None
        return texts

    return batch_line_pairs(parse_records(path, parse))


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
