"""Lines of text: they end at `\\n` alone; a `\\r` before it is dropped, and so is a byte order mark at the start of a
file."""

import codecs
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from nmt.errors import UserError

log = logging.getLogger("nmt")
BOM = b"\xef\xbb\xbf"
NOT_TEXT = "not UTF-8"
PACKED = {".gz": "gzip", ".zst": "zstd"}  # endings of files that are unpacked while they are read
FIRST = 5  # lines in a message
HEAD = 8_192  # bytes of a file by which its line ends are judged


def between_spaces(line: str) -> list[str]:
    """The words of a line: what stands between spaces (U+0020 alone; several count as one)."""
    return [word for word in line.split(" ") if word]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file in binary, unpacked if its name says that it is packed.

    Raises:
        UserError: it is damaged, packed in another way, or UTF-16.
    """
    if path.suffix not in PACKED:
        with open(path, "rb") as file:
            check_encoding(file, path)
            yield file
        return
    try:
        with pa.input_stream(str(path), compression=PACKED[path.suffix]) as stream, io.BufferedReader(stream) as file:
            check_encoding(file, path)
            yield cast(BinaryIO, file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {str(error).rstrip('.')}") from error


def check_encoding(file: io.BufferedReader, path: Path) -> None:
    """Refuse what would pass for UTF-8, each character with a NUL beside it, but for its first line."""
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(f"{path} is UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8")


def check_line_ends(file: BinaryIO, path: Path) -> None:
    """Refuse a file whose lines end as those of old Macs, in a carriage return alone: it would be one line.

    Its beginning decides. A single carriage return in a line may be meant.
    """
    begin = cast(io.BufferedReader, file).peek(HEAD)[:HEAD].removesuffix(b"\n").removesuffix(b"\r")
    if b"\n" not in begin and begin.count(b"\r") > 1:
        raise UserError(
            f"{path}: lines end in a carriage return (CR, \\r) alone, so this is one line; make line ends of them: "
            "tr '\\r' '\\n' < FILE"
        )


def raw_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file opened in binary, or of standard input's buffer, without their ends."""
    for number, line in enumerate(file):
        if number == 0 and not (line := line.removeprefix(BOM)):
            return  # there was nothing but the mark
        yield line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line


def read_lines(file: Iterable[bytes], name: object, invalid: str = "refuse") -> Iterator[str]:
    """The lines of a file opened in binary, or of standard input's buffer; `name` stands for it in messages.

    invalid: what to do with a line that is not UTF-8: "refuse" it, or "replace" its bad bytes by U+FFFD and warn of
        such lines after the last one.

    Raises:
        UserError: name:line, for a line that is refused.
    """
    replaced = []
    for number, line in enumerate(raw_lines(file), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            if invalid == "refuse":
                raise UserError(f"{name}:{number}: {undecodable(error)}") from None
            replaced.append(number)
            yield line.decode(errors="replace")
    if replaced:
        log.warning(
            f"{name}: {len(replaced):,} lines are {NOT_TEXT} ({first_of(replaced)}); U+FFFD stands for the bad bytes"
        )


def undecodable(error: UnicodeDecodeError) -> str:
    return f"{NOT_TEXT} (byte 0x{error.object[error.start]:02X} at position {error.start + 1})"


def first_of(numbers: Sequence[int]) -> str:
    return f"first: {', '.join(map(str, numbers[:FIRST]))}"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
