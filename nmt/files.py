"""Reading and writing for commands: whole files or none, and nothing in them that their format does not have."""

import hashlib
import itertools
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import pyarrow as pa
from safetensors import SafetensorError

from nmt.data.lines import PACKED, opened, read_lines
from nmt.errors import UserError, named

T = TypeVar("T")
PLAIN = 2**20  # bytes of a JSON or YAML file of ours at most


def write_atomically(path: Path, parts: Iterable[str | bytes]) -> None:
    """Replace a file in one step by these texts or bytes, one after the other."""
    temporary = unfinished(path)
    try:
        with named(path), open(temporary, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` when it is whole, in the place of an earlier one; if that cannot be,
    nothing has changed.

    Raises:
        UserError: it cannot be written.
    """
    new, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)  # a process that dies here leaves it to be found under this name
        new.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} cannot be written: {reason}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def read_small(path: Path) -> str:
    """The text of a JSON or YAML file.

    Raises:
        ValueError: it is not UTF-8, or larger than any of ours.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(PLAIN + 1)
    if len(content) > PLAIN:
        raise ValueError(f"it has more than {PLAIN:,} bytes")
    return content.decode()


def unfinished(path: Path) -> Path:
    """Where a file is written until it is whole: beside it, under a name that nobody else has."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same with None for each number that JSON does not have: infinities and NaN."""
    return {key: None if isinstance(n, float) and not math.isfinite(n) else n for key, n in numbers.items()}


def check_readable(paths: dict[str, str | None]) -> None:
    """Refuse a setting that is no file, nor a pipe or a device.

    Raises:
        UserError: there is no such thing, or it is a folder.
    """
    for key, path in paths.items():
        if path is not None and (not os.path.exists(path) or os.path.isdir(path)):
            raise UserError(f"{key}={path} is not a file")


def read_text(path: str | None) -> Iterator[str]:
    """The lines of a file, which may be packed, or of standard input; bytes that are not UTF-8 become U+FFFD, with a
    warning.

    Raises:
        UserError: a packed file is damaged.
    """
    if path is None:
        yield from read_lines(sys.stdin.buffer, "standard input", "replace")
    else:
        with opened(Path(path)) as file:
            yield from read_lines(file, path, "replace")


def typed(prompt: str) -> Iterator[str]:
    """The lines that somebody types at a terminal, until the end of input (Ctrl-D)."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  editing and history; only here, for it writes to a terminal when it is imported

    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    while True:
        try:
            yield input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except EOFError:
            print(file=sys.stderr)
            return


def chunks(lines: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` lines."""
    iterator = iter(lines)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def read_dictionary(path: str | None) -> dict[str, str]:
    """Target words by source word.

    Raises:
        UserError: there is no such file, or a line of it is no pair of words.
    """
    check_readable({"search.dictionary": path})
    found = {}
    for number, line in enumerate(read_text(path) if path else (), 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target):
            raise UserError(f"{path}:{number}: {line[:80]!r} is no source word, tab, target word")
        found[source] = target
    return found


@contextmanager
def output(path: str | None) -> Iterator[BinaryIO]:
    """A file to write to that appears only when it is whole, packed if its name says so; or standard output."""
    if path is None:
        yield sys.stdout.buffer
        return
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
        with open(path, "wb") as file:
            yield file
        return
    packed = PACKED.get(Path(path).suffix)  # as it is read: by the name of a link, not of what it leads to
    path = os.path.realpath(path)
    temporary = unfinished(Path(path))
    try:
        with open(temporary, "wb") as file, pa.CompressedOutputStream(file, packed) if packed else file as stream:
            yield cast(BinaryIO, stream)
        temporary.replace(path)
    except OSError as error:
        failed = path if error.filename in (None, str(temporary)) else error.filename
        raise UserError(f"{failed} failed: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def nobody_reads() -> NoReturn:
    """End without a word: who reads standard output has enough, as in `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def write(file: BinaryIO, text: str) -> None:
    try:
        file.write(text.encode("utf-8", errors="replace"))
        file.flush()
    except BrokenPipeError:
        nobody_reads()
