"""Lines of text.

Only `\\n` ends a line. A `\\r` before it is dropped, and so is a byte order mark at the start of a file.
"""

import codecs
import io
import logging
import os
import select
import stat
import sys
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from nmt.errors import UserError
from nmt.system.messages import format_first_lines
from nmt.system.standard_streams import find_own_descriptor, open_descriptor

log = logging.getLogger("nmt")
UTF8_BOM = b"\xef\xbb\xbf"
NOT_UTF8 = "not UTF-8"
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd"}  # files that are decompressed while they are read
LINE_END_PROBE_BYTES = 8_192  # start of a file that is checked for line ends
MAX_LINE_BYTES = 2**24  # a file with a longer line is not text and would fill memory
READ_BLOCK_BYTES = 2**16  # read at a time; the capacity of a pipe
LINE_GAP_SECONDS = 0.02  # maximum wait for another line that follows immediately
COLLECT_SECONDS = 0.5  # after this time lines are no longer waited for


def split_on_spaces(line: str) -> list[str]:
    """Split a line at spaces (U+0020 only) and drop empty words."""
    return [word for word in line.split(" ") if word]


@contextmanager
def open_decompressed(path: Path) -> Iterator[io.BufferedReader]:
    """Open a text file for reading bytes, decompressed according to its suffix.

    Raises:
        UserError: the file is damaged, has another compression, or is UTF-16.
    """
    with open_binary(path) as file:
        check_encoding(file, path)
        yield file


@contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, decompressed according to its suffix. It may be inside a zip: `a.zip/b.txt`.

    Raises:
        UserError: the file is damaged or has another compression.
    """
    compression = COMPRESSION_BY_SUFFIX.get(path.suffix)
    archive = find_archive(path)
    if archive is None and compression is None:
        number = find_own_descriptor(str(path))
        with open(path, "rb") if number is None else open_descriptor(str(path), number, "rb") as file:
            yield cast(io.BufferedReader, file)
        return
    try:
        with open(path, "rb") if archive is None else open_zip_member(archive, path) as stored:
            if compression is None:
                yield io.BufferedReader(cast(io.RawIOBase, stored))
            else:
                import pyarrow as pa  # takes 0.1 s, and most files are not compressed

                with pa.input_stream(stored, compression) as stream:
                    yield io.BufferedReader(stream)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise make_read_error(path, error) from error


def member_path(archive: Path, name: str) -> Path:
    """Return the path that stands for a member of a zip, which is never outside the zip, whatever its name."""
    return archive.joinpath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))


def find_archive(path: Path) -> Path | None:
    """Return the zip file that contains a path such as `a.zip/b.txt`, or None if it is not in one."""
    return next((parent for parent in path.parents if parent.suffix == ".zip" and parent.is_file()), None)


@contextmanager
def open_zip_member(archive: Path, path: Path) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(archive) as file:
        member = next((info for info in file.infolist() if member_path(archive, info.filename) == path), None)
        if member is None:
            raise UserError(f"{path} does not exist; {archive} has no such file")
        if member.flag_bits & 1:
            raise UserError(f"{path} is encrypted; unpack {archive} and give the file")
        try:
            stream = file.open(member)
        except NotImplementedError as error:
            raise UserError(f"{path} cannot be read: {error}; unpack {archive} and give the file") from None
        with stream:
            yield stream


def make_read_error(name: object, error: Exception) -> UserError:
    return UserError(f"{name} cannot be read: {str(error).rstrip('.')}")


def check_encoding(file: io.BufferedReader, path: Path) -> None:
    """Refuse UTF-16, which might be valid UTF-8 with NUL characters after the first line."""
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")


def check_line_ends(file: io.BufferedReader, path: Path) -> None:
    """Refuse a file whose lines end in a carriage return only, as on old Macs, because it would be a single line.

    Only the start of the file is checked. A single carriage return in a line may be intended.
    """
    start = file.peek(LINE_END_PROBE_BYTES)[:LINE_END_PROBE_BYTES].removesuffix(b"\n").removesuffix(b"\r")
    if b"\n" not in start and start.count(b"\r") > 1:
        raise UserError(
            f"{path}: lines end in a carriage return (CR, \\r) only, so the file would be a single line; convert it: "
            "tr '\\r' '\\n' < FILE"
        )


def check_line_length(length: int, name: object, number: int) -> None:
    if length > MAX_LINE_BYTES:
        raise UserError(
            f"{name}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes; write one sentence per line, each "
            "ending in a line feed"
        )


class LineReader(Iterator[bytes]):
    """Iterator over the lines of a binary file, without line ends.

    Raises:
        UserError: a line has more than `MAX_LINE_BYTES` bytes (name:line), or the file cannot be read.
    """

    def __init__(self, file: io.BufferedReader, name: object) -> None:
        self.file = file
        self.name = name
        self.may_block = may_block(file)
        self.lines: deque[bytes] = deque()  # read, but not yet returned
        self.partial_line = bytearray()  # start of the next line
        self.complete_lines = 0  # number of complete lines read
        self.at_end = False

    @property
    def count(self) -> int:
        """Number of lines read, including a partial one."""
        return self.complete_lines + bool(self.partial_line)

    def __next__(self) -> bytes:
        while not self.lines:
            if self.at_end:
                raise StopIteration
            self.read()
        return self.lines.popleft()

    def has_more(self, since: float) -> bool:
        """Return whether another line is available or follows immediately.

        Lines are waited for until `COLLECT_SECONDS` after `since`, the time when the caller began to collect lines.
        """
        while not self.lines and not self.at_end:
            timeout = LINE_GAP_SECONDS if time.monotonic() < since + COLLECT_SECONDS else 0
            if self.may_block and not wait_for_input(self.file, timeout):
                return False
            self.read()
        return bool(self.lines)

    def read(self) -> None:
        """Read a block of available bytes, or wait for the next ones."""
        try:
            block = self.file.read1(READ_BLOCK_BYTES)
        except OSError as error:
            raise make_read_error(self.name, error) from error
        *lines, remainder = block.split(b"\n")
        if lines:
            lines[0] = bytes(self.partial_line) + lines[0]
            check_line_length(len(lines[0]), self.name, self.complete_lines + 1)
            lines = [line.removesuffix(b"\r") for line in lines]
            self.partial_line = bytearray(remainder)
        elif block:
            self.partial_line += remainder
            check_line_length(len(self.partial_line), self.name, self.complete_lines + 1)
        else:
            self.at_end = True
            if self.partial_line and (self.complete_lines or self.partial_line != UTF8_BOM):
                lines = [bytes(self.partial_line)]
            self.partial_line.clear()
        if lines and not self.complete_lines:
            lines[0] = lines[0].removeprefix(UTF8_BOM)
        self.lines.extend(lines)
        self.complete_lines += len(lines)


def may_block(file: io.BufferedReader) -> bool:
    """Return whether reading may wait for data: from a pipe, a socket or a terminal."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # decompressed or in memory
        return False


def wait_for_input(file: io.BufferedReader, timeout: float) -> bool:
    """Wait for data from a pipe or terminal. Returns whether there are any.

    Windows waits for sockets only. There the answer is no, so that lines are translated as they arrive.
    """
    return sys.platform != "win32" and bool(select.select([file], [], [], timeout)[0])


def read_lines(lines: LineReader, invalid: str = "refuse") -> Iterator[str]:
    """Decode lines as UTF-8.

    Args:
        lines: the lines of a file.
        invalid: "refuse" lines with invalid bytes, or "replace" these bytes by U+FFFD and log a warning at the end.

    Raises:
        UserError: a line is refused (name:line).
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
            f"{lines.name}: {len(replaced):,} lines are {NOT_UTF8} ({format_first_lines(replaced)}); invalid bytes are "
            "replaced by U+FFFD"
        )


def describe_decode_error(error: UnicodeDecodeError) -> str:
    return f"{NOT_UTF8} (byte 0x{error.object[error.start]:02X} at position {error.start + 1})"
