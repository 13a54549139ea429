"""Reading and writing text for commands: files, packed files, pipes, terminals and standard streams."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import pyarrow as pa

from nmt.errors import UserError, escape_controls
from nmt.runtime.files import replacing_file
from nmt.runtime.lines import COMPRESSION_BY_SUFFIX, LineReader, open_decompressed, read_lines
from nmt.runtime.streams import find_own_descriptor, is_regular_file, is_stdout, open_descriptor, resolve_descriptor

T = TypeVar("T", bound=Sequence[Sized])
MAX_CHUNK_LINES = 4096  # lines in memory at a time
MAX_CHUNK_CHARACTERS = 2**22  # ... or as many as have so many characters


def replace_nonfinite(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same with None for each number that JSON does not have: infinities and NaN."""
    return {key: None if isinstance(n, float) and not math.isfinite(n) else n for key, n in numbers.items()}


def check_readable(paths: dict[str, str | None]) -> None:
    """Refuse a setting that is no file, nor a pipe or a device.

    Raises:
        UserError: there is no such thing, or it is a folder.
    """
    for key, path in paths.items():
        if path is not None and find_own_descriptor(path) is None and (not os.path.exists(path) or os.path.isdir(path)):
            raise UserError(f"{key}={path} is not a file")


@dataclass
class TextInput(Iterable[str]):
    """The lines of a file, which may be packed, or of a pipe; bytes that are not UTF-8 become U+FFFD, with a warning.
    With a prompt they are those that somebody types.

    Raises:
        UserError: a packed file is damaged, or a line is too long.
    """

    path: str
    prompt: str | None = None
    done: int = 0  # lines with which the command is done
    lines: LineReader | None = None  # once they are read

    def __iter__(self) -> Iterator[str]:
        if self.prompt is not None:
            yield from read_terminal(self.prompt)
            return
        with open_decompressed(Path(self.path)) as file:
            self.lines = LineReader(file, self.path)
            yield from read_lines(self.lines, "replace")

    def has_more(self, since: float) -> bool:
        """As `LineReader.has_more`; lines are typed one by one."""
        return self.lines is not None and self.lines.has_more(since)


def read_terminal(prompt: str) -> Iterator[str]:
    """The lines that somebody types at a terminal, until the end of input (Ctrl-D)."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  editing and history; only here, for it writes to a terminal when it is imported

    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    while True:
        try:
            yield input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except EOFError:
            print(file=sys.stderr)
            return


def read_chunks(rows: Iterable[T], more: Callable[[float], bool]) -> Iterator[list[T]]:
    """Yield lists of rows of text: of at most `MAX_CHUNK_LINES` rows, shorter once they have `MAX_CHUNK_CHARACTERS`, or
    once `more(since)` says that no row follows at once."""
    chunk: list[T] = []
    size, since = 0, 0.0
    for row in rows:
        since = since if chunk else time.monotonic()
        chunk.append(row)
        size += sum(map(len, row))
        if len(chunk) == MAX_CHUNK_LINES or size > MAX_CHUNK_CHARACTERS or not more(since):
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def read_dictionary(path: str | None) -> dict[str, str]:
    """Target words by source word.

    Raises:
        UserError: there is no such file, or a line of it is no pair of words.
    """
    check_readable({"search.dictionary": path})
    found = {}
    for number, line in enumerate(TextInput(path) if path else (), 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target):
            raise UserError(f"{path}:{number}: {line[:80]!r} is no source word, tab, target word")
        found[source] = target
    return found


class TerminalOutput:
    """Standard output where somebody looks at it: control characters are escaped."""

    def write(self, data: bytes) -> int:
        return sys.stdout.buffer.write(escape_controls(data.decode("utf-8", "replace")).encode())

    def flush(self) -> None:
        sys.stdout.buffer.flush()


@contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """A file to write to, packed if its name says so.

    A regular file appears, or is replaced, only when it is whole. A pipe, a device or an open descriptor, as
    `/dev/stdout`, is written to as it is.

    Raises:
        UserError: it cannot be written.
    """
    packed = COMPRESSION_BY_SUFFIX.get(
        Path(path).suffix
    )  # as it is read: by the name of a link, not of what it leads to
    try:
        with (
            open_sink(path) as file,
            pa.CompressedOutputStream(file, packed) if packed else nullcontext(file) as stream,
        ):
            yield cast(BinaryIO, stream)
            stream.flush()  # standard output stays open
    except BrokenPipeError:
        exit_on_closed_pipe()
    except OSError as error:
        if is_stdout(path):
            error.filename = "standard output"
            raise
        raise UserError(f"{error.filename or path} failed: {error.strerror or error}") from error


def open_sink(path: str) -> AbstractContextManager[BinaryIO]:
    """Where `open_output` writes to."""
    if is_regular_file(path):
        return replacing_file(Path(os.path.realpath(path)))
    number = find_own_descriptor(path)
    if is_stdout(path) and sys.__stdout__ is not None and sys.stdout.isatty():
        return nullcontext(cast(BinaryIO, TerminalOutput()))
    if number is not None:
        return open_descriptor(path, number, "wb")
    # A descriptor of another process, as /proc/PID/fd/1, cannot be shared; its file must not be truncated.
    return open(path, "ab" if resolve_descriptor(path) else "wb")


def exit_on_closed_pipe() -> NoReturn:
    """End without a word: who reads the output has enough, as in `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output at its end
    sys.exit(1)


def write_utf8(file: BinaryIO, text: str) -> None:
    try:
        file.write(text.encode("utf-8", errors="replace"))
        file.flush()
    except BrokenPipeError:
        exit_on_closed_pipe()
    except OSError as error:
        if file is sys.stdout.buffer:
            error.filename = "standard output"
        raise


def echo(text: str) -> None:
    """Print results, in which text of somebody else's may be."""
    write_utf8(sys.stdout.buffer, escape_controls(text) + "\n")
