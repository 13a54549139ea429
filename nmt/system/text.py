"""Text in and out: plain and compressed files, members of zip files, pipes, terminals and standard streams.

Only `\\n` ends a line. A `\\r` before it is dropped, and so is a byte order mark at the start of a file.
"""

import codecs
import io
import logging
import math
import os
import select
import stat
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

from nmt.errors import UserError, escape_controls
from nmt.system.files import replacing_file
from nmt.system.messages import format_first_lines

T = TypeVar("T", bound=Sequence[Sized])
log = logging.getLogger("nmt")
STDIN_PATH = "/dev/stdin"
STDOUT_PATH = "/dev/stdout"
OPEN_FILES = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")  # paths of files that are open already
UTF8_BOM = b"\xef\xbb\xbf"
NOT_UTF8 = "not UTF-8"
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
READ_ERRORS = (OSError, EOFError, zipfile.BadZipFile, zlib.error)
MAX_LINE_BYTES = 2**24  # a file with a longer line is not text and would fill memory
READ_BLOCK_BYTES = 2**16  # read at a time; the capacity of a pipe
MAX_CHUNK_LINES = 4096  # lines in memory at a time
MAX_CHUNK_CHARACTERS = 2**22  # a chunk ends when it has more


def use_utf8() -> None:
    """Write UTF-8 to the standard streams, whatever the locale says. Standard input is read as bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # neither closed nor replaced, as in notebooks
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def split_on_spaces(line: str) -> list[str]:
    """Split a line at spaces (U+0020 only) and drop empty words."""
    return [word for word in line.split(" ") if word]


def replace_nonfinite(numbers: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN, which JSON does not have, by None."""
    return {
        key: None if isinstance(number, float) and not math.isfinite(number) else number
        for key, number in numbers.items()
    }


# ------------------------------------------------------------------------------------------------------- paths in keys
def is_regular_file(path: str) -> bool:
    """Return whether a path names a regular file or does not exist. Standard streams and descriptors are none."""
    return not path.startswith(OPEN_FILES) and (os.path.isfile(path) or not os.path.exists(path))


def check_readable(paths: dict[str, str | None]) -> None:
    """Raise a `UserError` unless the path of each key is None, a file, a pipe or a device."""
    for key, path in paths.items():
        if path not in (None, STDIN_PATH) and (not os.path.exists(path) or os.path.isdir(path)):
            raise UserError(f"{key}={path} is not a file")


def resolve_standard_streams(command: Any, read: Sequence[str], written: Sequence[str]) -> None:
    """Replace `-` in keys of files by the path of standard input (keys to `read`) or output (those `written`).

    Raises:
        UserError: two keys read standard input, write the same file or standard output, or read and write a file.
    """
    used: dict[str, str] = {}  # `key=value` by file
    for key in (*read, *written):
        value = getattr(command, key)
        if value is None:
            continue
        path = (STDIN_PATH if key in read else STDOUT_PATH) if value == "-" else value
        setattr(command, key, path)
        if path not in (STDIN_PATH, STDOUT_PATH) and not is_regular_file(path):
            continue  # several outputs may share a pipe or a device
        file = os.path.realpath(path) if is_regular_file(path) else path
        if file in used and (key not in read or path == STDIN_PATH):
            raise UserError(f"{key}={value} is the same file as {used[file]}; give another one")
        used[file] = f"{key}={value}"


# ------------------------------------------------------------------------------------------------------------- reading
@contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, decompressed according to its suffix. It may be inside a zip: `a.zip/b.txt`.

    Raises:
        UserError: the file is damaged, encrypted or has another compression.
    """
    compression = COMPRESSION_BY_SUFFIX.get(path.suffix)
    archive = next((parent for parent in path.parents if parent.suffix == ".zip" and parent.is_file()), None)
    if archive is None and compression is None:
        with nullcontext(sys.stdin.buffer) if str(path) == STDIN_PATH else open(path, "rb") as file:
            yield cast(io.BufferedReader, file)
        return
    try:
        with ExitStack() as stack:
            stream: Any = stack.enter_context(open(archive or path, "rb"))
            if archive:
                members = zipfile.ZipFile(stream)
                found = [info for info in members.infolist() if member_path(archive, info.filename) == path]
                if not found:
                    raise UserError(f"{path} does not exist; {archive} has no such file")
                try:
                    stream = stack.enter_context(members.open(found[0]))
                except RuntimeError as error:  # encrypted
                    raise make_read_error(path, error) from error
            if compression:
                import pyarrow as pa  # takes 0.1 s, and most files are not compressed

                stream = stack.enter_context(pa.input_stream(stream, compression))
            yield io.BufferedReader(stream)
    except READ_ERRORS as error:
        raise make_read_error(path, error) from error


def member_path(archive: Path, name: str) -> Path:
    """Return the path that stands for a member of a zip, which is never outside the zip, whatever its name."""
    return archive.joinpath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))


def make_read_error(name: object, error: Exception) -> UserError:
    return UserError(f"{name} cannot be read: {str(error).rstrip('.')}")


def describe_decode_error(error: UnicodeDecodeError) -> str:
    return f"{NOT_UTF8} (byte 0x{error.object[error.start]:02X} at position {error.start + 1})"


class LineReader(Iterator[bytes]):
    """Iterator over the lines of a binary file, without line ends.

    Raises:
        UserError: a line has more than `MAX_LINE_BYTES` bytes (name:line), the file is UTF-16 or cannot be read.
    """

    def __init__(self, file: io.BufferedReader, name: object) -> None:
        self.file = file
        self.name = name
        self.lines: deque[bytes] = deque()  # read, but not yet returned
        self.rest = b""  # start of the next line
        self.complete_lines = 0  # number of complete lines read
        self.at_end = False

    def __next__(self) -> bytes:
        while not self.lines:
            if self.at_end:
                raise StopIteration
            self.read_block()
        return self.lines.popleft()

    def has_more(self) -> bool:
        """Return whether another line is there, without waiting for one."""
        while not self.lines and not self.at_end and can_read(self.file):
            self.read_block()
        return bool(self.lines)

    def read_block(self) -> None:
        """Read a block of available bytes, or wait for the next ones."""
        try:
            block = self.file.read1(READ_BLOCK_BYTES)
        except OSError as error:
            raise make_read_error(self.name, error) from error
        if not self.complete_lines and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{self.name} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
        self.at_end = not block
        *lines, self.rest = (self.rest + block).split(b"\n")
        lines = [line.removesuffix(b"\r") for line in lines]
        if self.at_end:
            has_last = self.rest and (self.complete_lines or self.rest != UTF8_BOM)
            lines, self.rest = [self.rest] if has_last else [], b""
        if len(lines[0] if lines else self.rest) > MAX_LINE_BYTES:
            raise UserError(
                f"{self.name}:{self.complete_lines + 1}: the line has more than {MAX_LINE_BYTES:,} bytes; write one "
                "sentence per line, each ending in a line feed"
            )
        if lines and not self.complete_lines:
            lines[0] = lines[0].removeprefix(UTF8_BOM)
        self.lines.extend(lines)
        self.complete_lines += len(lines)


def can_read(file: io.BufferedReader) -> bool:
    """Return whether reading does not wait: always in a file, and in a pipe or terminal if something has arrived.

    Windows can tell this of sockets only. There the answer for pipes is no.
    """
    try:
        number = file.fileno()
    except io.UnsupportedOperation:  # decompressed or in memory
        return True
    if stat.S_ISREG(os.fstat(number).st_mode):
        return True
    return sys.platform != "win32" and bool(select.select([number], [], [], 0)[0])


class TextInput(Iterable[str]):
    """The lines of a plain or compressed file, of a pipe or of a terminal.

    Bytes that are not UTF-8 are replaced by U+FFFD, with a warning.

    Raises:
        UserError: a compressed file is damaged, or a line is too long.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: LineReader | None = None  # set while a file is read

    def __iter__(self) -> Iterator[str]:
        damaged = []
        with open_binary(Path(self.path)) as file:
            self.lines = LineReader(file, self.path)
            for number, line in enumerate(self.lines, 1):
                try:
                    yield line.decode()
                except UnicodeDecodeError:
                    damaged.append(number)
                    yield line.decode(errors="replace")
        if damaged:
            log.warning(
                f"{self.path}: {len(damaged):,} lines are {NOT_UTF8} ({format_first_lines(damaged)}); invalid bytes "
                "are replaced by U+FFFD"
            )

    def has_more(self) -> bool:
        return self.lines is not None and self.lines.has_more()


def read_chunks(rows: Iterable[T], has_more: Callable[[], bool]) -> Iterator[list[T]]:
    """Group rows of text into lists of what has arrived by now.

    A list ends at `MAX_CHUNK_LINES` rows, at more than `MAX_CHUNK_CHARACTERS`, or when no row waits (`has_more`). What
    arrives while the caller works on a list is in the next one.
    """
    chunk: list[T] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(map(len, row))
        if len(chunk) == MAX_CHUNK_LINES or characters > MAX_CHUNK_CHARACTERS or not has_more():
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def read_dictionary(key: str, path: str | None) -> dict[str, str]:
    """Read translations by source word, or term, from the file of tab-separated pairs that `key` names.

    Raises:
        UserError: the file does not exist, or a line is not a pair of words.
    """
    check_readable({key: path})
    dictionary = {}
    for number, line in enumerate(TextInput(path) if path else (), 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target):
            raise UserError(f"{path}:{number}: {line[:80]!r} is not a pair; write source word, tab, target word")
        dictionary[source] = target
    return dictionary


# ------------------------------------------------------------------------------------------------------------- writing
class Output:
    """A binary stream whose write errors name its file. On a terminal, control characters are escaped."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.stream = stream
        self.path = path
        self.is_terminal = path == STDOUT_PATH and stream.isatty()

    def write(self, data: bytes) -> int:
        if self.is_terminal:
            data = escape_controls(data.decode("utf-8", "replace")).encode()
        with explained_write_errors(self.path):
            return self.stream.write(data)

    def flush(self) -> None:
        with explained_write_errors(self.path):
            self.stream.flush()


@contextmanager
def explained_write_errors(path: str) -> Iterator[None]:
    """Turn an OSError of `path` into a `UserError` that names it.

    Exit without a message if the reader of a pipe has closed it, as in `| head`.
    """
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush prints an error
        sys.exit(1)
    except OSError as error:
        if error.filename not in (None, path):
            raise
        name = "standard output" if path == STDOUT_PATH else f"{path} cannot be written"
        raise UserError(f"{name}: {error.strerror or error}") from error


@contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """Open a file for writing, compressed according to its suffix.

    A regular file is created or replaced atomically at the end, also through a link. A pipe, a device or an open
    descriptor such as `/dev/stdout` is written directly, at its end.

    Raises:
        UserError: the file cannot be written.
    """
    with explained_write_errors(path), ExitStack() as stack:
        if path == STDOUT_PATH:
            stream: Any = sys.stdout.buffer
        elif is_regular_file(path):
            stream = stack.enter_context(replacing_file(Path(os.path.realpath(path) if os.path.islink(path) else path)))
        else:
            stream = stack.enter_context(open(path, "ab"))
        if compression := COMPRESSION_BY_SUFFIX.get(Path(path).suffix):
            import pyarrow as pa  # takes 0.1 s, and most files are not compressed

            stream = stack.enter_context(pa.CompressedOutputStream(stream, compression))
        output = Output(stream, path)
        yield cast(BinaryIO, output)
        output.flush()  # standard output is not closed


def write_utf8(file: BinaryIO, text: str) -> None:
    file.write(text.encode("utf-8", errors="replace"))
    file.flush()


def echo(text: str) -> None:
    """Print results, with control characters escaped."""
    with explained_write_errors(STDOUT_PATH):
        write_utf8(sys.stdout.buffer, escape_controls(text) + "\n")
