"""Text input and output of commands: plain and compressed files, pipes, terminals and standard streams."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from nmt.errors import UserError, escape_controls
from nmt.system.files import replacing_file
from nmt.system.lines import (
    COMPRESSION_BY_SUFFIX,
    LineReader,
    describe_decode_error,
    open_decompressed,
    read_lines,
)
from nmt.system.standard_streams import (
    STANDARD_DESCRIPTORS,
    STDOUT_PATH,
    discard_output,
    find_own_descriptor,
    is_closed_pipe,
    is_regular_file,
    is_stdout,
    open_descriptor,
    resolve_descriptor,
)

T = TypeVar("T", bound=Sequence[Sized])
MAX_CHUNK_LINES = 4096  # lines in memory at a time
MAX_CHUNK_CHARACTERS = 2**22  # a chunk ends when it has more


def replace_nonfinite(numbers: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN, which JSON does not have, by None."""
    return {
        key: None if isinstance(number, float) and not math.isfinite(number) else number
        for key, number in numbers.items()
    }


def check_readable(paths: dict[str, str | None]) -> None:
    """Raise a `UserError` unless the path of each key is None, a file, a pipe or a device."""
    for key, path in paths.items():
        if path is not None and find_own_descriptor(path) is None and (not os.path.exists(path) or os.path.isdir(path)):
            raise UserError(f"{key}={path} is not a file")


@dataclass
class TextInput(Iterable[str]):
    """The lines of a plain or compressed file, of a pipe or, with a prompt, of a terminal.

    Bytes that are not UTF-8 are replaced by U+FFFD, with a warning.

    Raises:
        UserError: a compressed file is damaged, or a line is too long.
    """

    path: str
    prompt: str | None = None
    done: int = 0  # number of lines that the command has processed
    lines: LineReader | None = None  # set while a file is read

    def __iter__(self) -> Iterator[str]:
        if self.prompt is not None:
            yield from read_terminal(self.prompt)
            return
        with open_decompressed(Path(self.path)) as file:
            self.lines = LineReader(file, self.path)
            yield from read_lines(self.lines, "replace")

    def has_more(self, since: float) -> bool:
        """Return `LineReader.has_more`; False for a terminal, where lines are typed one at a time."""
        return self.lines is not None and self.lines.has_more(since)


def read_document(path: str) -> str:
    """Return the whole text of a plain or compressed file or of a pipe, byte for byte.

    Raises:
        UserError: the file is damaged, or not UTF-8.
    """
    with open_decompressed(Path(path)) as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {describe_decode_error(error)}; convert it: iconv -f ENCODING -t UTF-8") from None


def read_terminal(prompt: str) -> Iterator[str]:
    """Yield lines typed at a terminal until the end of input (Ctrl-D)."""
    with suppress(ImportError):  # not available on all systems
        import readline  # noqa: F401  editing and history; not at the top, because importing it writes to the terminal

    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    while True:
        try:
            yield input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except EOFError:
            print(file=sys.stderr)
            return


def read_chunks(rows: Iterable[T], has_more: Callable[[float], bool]) -> Iterator[list[T]]:
    """Group rows of text into lists.

    A list ends at `MAX_CHUNK_LINES` rows, at more than `MAX_CHUNK_CHARACTERS`, or when `has_more(start_time)` says
    that no row follows immediately.
    """
    chunk: list[T] = []
    characters = 0
    start_time = 0.0
    for row in rows:
        if not chunk:
            start_time = time.monotonic()
        chunk.append(row)
        characters += sum(map(len, row))
        if len(chunk) == MAX_CHUNK_LINES or characters > MAX_CHUNK_CHARACTERS or not has_more(start_time):
            yield chunk
            chunk = []
            characters = 0
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


class TerminalOutput:
    """Standard output on a terminal, with escaped control characters."""

    def write(self, data: bytes) -> int:
        return sys.stdout.buffer.write(escape_controls(data.decode("utf-8", "replace")).encode())

    def flush(self) -> None:
        sys.stdout.buffer.flush()


class NamedOutput:
    """A binary stream whose write errors name its file, also when several outputs are written at the same time."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.stream = stream
        self.path = path

    def write(self, data: bytes) -> int:
        with named_write_errors(self.path):
            return self.stream.write(data)

    def flush(self) -> None:
        with named_write_errors(self.path):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def named_write_errors(path: str) -> Iterator[None]:
    """Turn an OSError into a `UserError` that names `path`.

    Exit without a message if the reader of a pipe has closed it, as in `| head`.
    """
    try:
        yield
    except OSError as error:
        if is_closed_pipe(error) and not is_regular_file(path):
            discard_output(STANDARD_DESCRIPTORS[STDOUT_PATH])
            sys.exit(1)
        if is_stdout(path):
            error.filename = "standard output"
            raise
        raise UserError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


@contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """Open a file for writing, compressed according to its suffix.

    A regular file is created or replaced atomically at the end. A pipe, a device or an open descriptor such as
    `/dev/stdout` is written directly.

    Raises:
        UserError: the file cannot be written.
    """
    compression = COMPRESSION_BY_SUFFIX.get(Path(path).suffix)  # suffix of a symbolic link itself, as in reading
    with ExitStack() as stack:
        with named_write_errors(path):
            stream = stack.enter_context(open_sink(path))
            if compression:
                import pyarrow as pa  # takes 0.1 s, and most files are not compressed

                stream = stack.enter_context(pa.CompressedOutputStream(stream, compression))
        output = NamedOutput(stream, path)
        try:
            yield cast(BinaryIO, output)
            output.flush()  # standard output is not closed
        except BaseException:
            with suppress(OSError):  # closing writes what a failed write has left, and fails again
                stack.__exit__(*sys.exc_info())
            raise
        with named_write_errors(path):
            stack.close()


def open_sink(path: str) -> AbstractContextManager[BinaryIO]:
    """Open the uncompressed file, pipe, device or descriptor of `open_output`."""
    if is_regular_file(path):
        return replacing_file(Path(os.path.realpath(path)))
    number = find_own_descriptor(path)
    if is_stdout(path) and sys.__stdout__ is not None and sys.stdout.isatty():
        return nullcontext(cast(BinaryIO, TerminalOutput()))
    if number is not None:
        return open_descriptor(path, number, "wb")
    # The descriptor of another process, such as /proc/PID/fd/1, cannot be shared; do not truncate its file.
    return open(path, "ab" if resolve_descriptor(path) else "wb")


def write_utf8(file: BinaryIO, text: str) -> None:
    file.write(text.encode("utf-8", errors="replace"))
    file.flush()


def echo(text: str) -> None:
    """Print results, with control characters escaped."""
    with named_write_errors(STDOUT_PATH):
        write_utf8(sys.stdout.buffer, escape_controls(text) + "\n")
