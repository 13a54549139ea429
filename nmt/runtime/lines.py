"""Lines of text: they end at `\\n` alone; a `\\r` before it is dropped, and so is a byte order mark at the start of a
file."""

import codecs
import io
import logging
import os
import select
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pyarrow as pa

from nmt.errors import UserError
from nmt.runtime.streams import open_descriptor, own_descriptor

log = logging.getLogger("nmt")
BOM = b"\xef\xbb\xbf"
NOT_TEXT = "not UTF-8"
PACKED = {".gz": "gzip", ".zst": "zstd"}  # endings of files that are unpacked while they are read
FIRST = 5  # lines in a message
HEAD = 8_192  # bytes of a file by which its line ends are judged
LONGEST_LINE = 2**24  # bytes; a file of more without a line feed is no text, and would fill memory
BLOCK = 2**16  # bytes that are read at a time, as many as a pipe holds
PAUSE = 0.02  # seconds in which a line counts as following the one before it at once
COLLECT = 0.5  # seconds in which lines that follow each other are collected, at least


def split_on_spaces(line: str) -> list[str]:
    """The words of a line: what stands between spaces (U+0020 alone; several count as one)."""
    return [word for word in line.split(" ") if word]


@contextmanager
def open_unpacked(path: Path) -> Iterator[io.BufferedReader]:
    """A file in binary, unpacked if its name says that it is packed.

    Raises:
        UserError: it is damaged, packed in another way, or UTF-16.
    """
    if path.suffix not in PACKED:
        number = own_descriptor(str(path))
        with open(path, "rb") if number is None else open_descriptor(str(path), number, "rb") as file:
            reader = cast(io.BufferedReader, file)
            check_encoding(reader, path)
            yield reader
        return
    try:
        with open(path, "rb") as packed, pa.input_stream(packed, PACKED[path.suffix]) as stream:
            file = io.BufferedReader(stream)
            check_encoding(file, path)
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(name: object, error: OSError) -> UserError:
    return UserError(f"{name} cannot be read: {str(error).rstrip('.')}")


def check_encoding(file: io.BufferedReader, path: Path) -> None:
    """Refuse what would pass for UTF-8, each character with a NUL beside it, but for its first line."""
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(f"{path} is UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8")


def check_line_ends(file: io.BufferedReader, path: Path) -> None:
    """Refuse a file whose lines end as those of old Macs, in a carriage return alone: it would be one line.

    Its beginning decides. A single carriage return in a line may be meant.
    """
    begin = file.peek(HEAD)[:HEAD].removesuffix(b"\n").removesuffix(b"\r")
    if b"\n" not in begin and begin.count(b"\r") > 1:
        raise UserError(
            f"{path}: lines end in a carriage return (CR, \\r) alone, so this is one line; make line ends of them: "
            "tr '\\r' '\\n' < FILE"
        )


def check_length(length: int, name: object, number: int) -> None:
    if length > LONGEST_LINE:
        raise UserError(
            f"{name}:{number}: the line has more than {LONGEST_LINE:,} bytes; write one sentence a line, each ending "
            "in a line feed"
        )


class LineReader(Iterator[bytes]):
    """The lines of a file opened in binary, without their ends.

    Raises:
        UserError: name:line, for a line of more than `LONGEST_LINE` bytes; or the file cannot be read.
    """

    def __init__(self, file: io.BufferedReader, name: object) -> None:
        self.file, self.name = file, name
        self.waits = may_block(file)
        self.lines: deque[bytes] = deque()  # read, but not yet returned
        self.rest = bytearray()  # the beginning of the next line
        self.number = 0  # complete lines that were read
        self.ended = False

    @property
    def count(self) -> int:
        """The number of lines that were read, including one that has no end yet."""
        return self.number + bool(self.rest)

    def __next__(self) -> bytes:
        while not self.lines:
            if self.ended:
                raise StopIteration
            self.read()
        return self.lines.popleft()

    def more(self, since: float) -> bool:
        """Whether another line is there, or follows at once. `since` is when the caller began to collect lines: after
        `COLLECT` seconds nothing is waited for any more."""
        while not self.lines and not self.ended:
            pause = PAUSE if time.monotonic() < since + COLLECT else 0
            if self.waits and not select.select([self.file], [], [], pause)[0]:
                return False
            self.read()
        return bool(self.lines)

    def read(self) -> None:
        """Read what is there; where there is nothing, wait for it."""
        try:
            block = self.file.read1(BLOCK)
        except OSError as error:
            raise unreadable(self.name, error) from error
        *lines, begun = block.split(b"\n")
        if lines:
            lines[0] = bytes(self.rest) + lines[0]
            check_length(len(lines[0]), self.name, self.number + 1)
            lines = [line.removesuffix(b"\r") for line in lines]
            self.rest = bytearray(begun)
        elif block:
            self.rest += begun
            check_length(len(self.rest), self.name, self.number + 1)
        else:
            self.ended = True
            if self.rest and (self.number or self.rest != BOM):
                lines = [bytes(self.rest)]
            self.rest.clear()
        if lines and not self.number:
            lines[0] = lines[0].removeprefix(BOM)
        self.lines.extend(lines)
        self.number += len(lines)


def may_block(file: io.BufferedReader) -> bool:
    """Whether reading waits for whoever writes: of a pipe, a socket or a terminal."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # it is unpacked, or in memory
        return False


def read_lines(lines: LineReader, invalid: str = "refuse") -> Iterator[str]:
    """The lines of a file as text.

    invalid: what to do with a line that is not UTF-8: "refuse" it, or "replace" its bad bytes by U+FFFD and warn of
        such lines after the last one.

    Raises:
        UserError: name:line, for a line that is refused.
    """
    replaced = []
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            if invalid == "refuse":
                raise UserError(f"{lines.name}:{number}: {describe_decode_error(error)}") from None
            replaced.append(number)
            yield line.decode(errors="replace")
    if replaced:
        log.warning(
            f"{lines.name}: {len(replaced):,} lines are {NOT_TEXT} ({first_few(replaced)}); U+FFFD stands for the bad "
            "bytes"
        )


def describe_decode_error(error: UnicodeDecodeError) -> str:
    return f"{NOT_TEXT} (byte 0x{error.object[error.start]:02X} at position {error.start + 1})"


def first_few(numbers: Sequence[int]) -> str:
    return f"first: {', '.join(map(str, numbers[:FIRST]))}"


def count_of(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
