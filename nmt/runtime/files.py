"""Reading and writing for commands: whole files or none, and nothing in them that their format does not have."""

import errno
import fcntl
import glob
import hashlib
import logging
import math
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import pyarrow as pa
from safetensors import SafetensorError

from nmt.errors import UserError, named, printable
from nmt.runtime.lines import PACKED, LineReader, opened, read_lines
from nmt.runtime.streams import descriptor_path, is_file, is_stdout, open_descriptor, own_descriptor

T = TypeVar("T", bound=Sequence[Sized])
log = logging.getLogger("nmt")
CHUNK = 4096  # lines in memory at a time
CHARACTERS = 2**22  # ... or as many as have so many characters
PLAIN = 2**20  # bytes of a JSON or YAML file of ours at most
UNFINISHED = re.compile(r"\..*\.[0-9a-f]+\.new")  # names of what is not whole yet
NAME = 50  # characters of a file's name in them: a name may have 255 bytes at most
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF}


# -------------------------------------------------------------------------------------------------- whole files or none
def write_atomically(path: Path, parts: Iterable[str | bytes], beside: Path | None = None) -> None:
    """Replace a file in one step by these texts or bytes, one after the other. The file is written next to `beside`
    first, by default next to itself."""
    with named(path), unfinished(beside or path) as new:
        with open(new, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        sync(new)
        new.replace(path)


@contextmanager
def unfinished(path: Path, folder: bool = False) -> Iterator[Path]:
    """A new file or folder next to `path` to fill and rename; whatever still has that name at the end is removed. What
    killed processes left there for the same path is removed first."""
    stem = f".{path.name[:NAME]}."
    remove_abandoned(path.parent, f"{glob.escape(stem)}*")
    with locked(lambda: path.with_name(f"{stem}{secrets.token_hex(8)}.new"), folder) as new:
        yield new


@contextmanager
def locked(name: Callable[[], Path], folder: bool) -> Iterator[Path]:
    """A new file or folder under a name that `name` draws, removed at the end if it still has that name. It is locked
    while this process lives: by that others know that it is in use, see `remove_abandoned`."""
    handle = None
    while handle is None:  # another process may take it for abandoned before it is locked
        path = name()
        path.mkdir() if folder else path.touch(exist_ok=False)
        with suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
            if not (try_lock(handle) and path.exists()):
                os.close(handle)
                handle = None
    try:
        yield path
    finally:
        with suppress(OSError):
            remove(path)
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder, unless another process has. A file system without locks lets everybody in."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True


def remove_abandoned(folder: Path, pattern: str = "*", names: re.Pattern[str] = UNFINISHED) -> None:
    """Remove unfinished files and folders whose processes are dead: the system has released their locks. Where a file
    system has no locks nobody can tell, so nothing is removed."""
    for path in folder.glob(pattern):
        if not names.fullmatch(path.name):
            continue
        with suppress(OSError):  # in use, gone by now, or a file system without locks
            access = os.O_RDONLY if path.is_dir() else os.O_RDWR
            handle = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
            finally:
                os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a symbolic link, but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; some network file systems refuse that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            error.filename = str(path)
            raise
        warn_once(
            f"this file system does not force files to the disk (fsync: {error.strerror}): if the machine fails, the "
            "last checkpoint may be damaged; the one before it then serves"
        )
    finally:
        os.close(handle)


@cache
def warn_once(message: str) -> None:
    log.warning(message)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` when it is whole, in the place of an earlier one; if that cannot be,
    nothing has changed.

    Raises:
        UserError: it cannot be written.
    """
    old = folder.with_name(f".{folder.name}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(folder, folder=True) as new:
            yield new
            if os.path.lexists(folder):
                remove(old)
                folder.rename(old)  # a process that dies here leaves it to be found under this name
            new.rename(folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        if os.path.lexists(old) and not os.path.lexists(folder):
            old.rename(folder)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} cannot be written: {reason}") from None
    with suppress(OSError):
        remove(old)


@contextmanager
def replacing_files(folder: Path, mark: str, *patterns: str) -> Iterator[Path]:
    """A new folder to fill, whose files then take the place of those in `folder` that match `patterns`.

    These are several steps. The file `mark` is removed in the first and comes back in the last: where it is, all files
    belong together. Other processes that replace files of this folder wait.
    """
    with unfinished(folder, folder=True) as new:
        try:
            yield new
        except OSError as error:
            if error.filename is not None and Path(error.filename).parent == new:
                error.filename = str(folder / Path(error.filename).name)
            raise
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            for path in (folder / mark, *(old for pattern in patterns for old in folder.glob(pattern))):
                remove(path)
            for path in sorted(new.iterdir(), key=lambda path: (path.name == mark, path.name)):
                path.replace(folder / path.name)
        finally:
            os.close(handle)


# ------------------------------------------------------------------------------------------------ reading and writing
def regular(path: str | Path, flags: int) -> int:
    """Open a file of a run (the `opener` of `open`). A pipe, on which reading would wait, is refused, and so is writing
    through a symbolic link: a run may be somebody else's.

    Raises:
        OSError: it is no regular file.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "is a symbolic link, through which nothing is written" if error.errno == errno.ELOOP else "is a pipe"
        raise OSError(error.errno, f"it {what}; remove it", str(path)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def read_small(path: Path) -> str:
    """The text of a JSON or YAML file.

    Raises:
        ValueError: it is not UTF-8, or larger than any of ours.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=regular) as file:
        content = file.read(PLAIN + 1)
    if len(content) > PLAIN:
        raise ValueError(f"it has more than {PLAIN:,} bytes")
    return content.decode()


def finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same with None for each number that JSON does not have: infinities and NaN."""
    return {key: None if isinstance(n, float) and not math.isfinite(n) else n for key, n in numbers.items()}


def check_readable(paths: dict[str, str | None]) -> None:
    """Refuse a setting that is no file, nor a pipe or a device.

    Raises:
        UserError: there is no such thing, or it is a folder.
    """
    for key, path in paths.items():
        if path is not None and own_descriptor(path) is None and (not os.path.exists(path) or os.path.isdir(path)):
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
            yield from typed(self.prompt)
            return
        with opened(Path(self.path)) as file:
            self.lines = LineReader(file, self.path)
            yield from read_lines(self.lines, "replace")

    def more(self, since: float) -> bool:
        """As `LineReader.more`; lines are typed one by one."""
        return self.lines is not None and self.lines.more(since)


def typed(prompt: str) -> Iterator[str]:
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


def chunks(rows: Iterable[T], more: Callable[[float], bool]) -> Iterator[list[T]]:
    """Lists of rows of text: of at most `CHUNK` rows, and no longer once they have `CHARACTERS`; where no more follow,
    as `more(since)` says, of those that are there."""
    chunk: list[T] = []
    size, since = 0, 0.0
    for row in rows:
        since = since if chunk else time.monotonic()
        chunk.append(row)
        size += sum(map(len, row))
        if len(chunk) == CHUNK or size > CHARACTERS or not more(since):
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


class Terminal:
    """Standard output where somebody looks at it: control characters are escaped."""

    def write(self, data: bytes) -> int:
        return sys.stdout.buffer.write(printable(data.decode("utf-8", "replace")).encode())

    def flush(self) -> None:
        sys.stdout.buffer.flush()


@contextmanager
def output(path: str) -> Iterator[BinaryIO]:
    """A file to write to, packed if its name says so.

    A regular file appears, or is replaced, only when it is whole. A pipe, a device or an open descriptor, as
    `/dev/stdout`, is written to as it is.

    Raises:
        UserError: it cannot be written.
    """
    packed = PACKED.get(Path(path).suffix)  # as it is read: by the name of a link, not of what it leads to
    try:
        with sink(path) as file, pa.CompressedOutputStream(file, packed) if packed else nullcontext(file) as stream:
            yield cast(BinaryIO, stream)
            stream.flush()  # standard output stays open
    except BrokenPipeError:
        nobody_reads()
    except OSError as error:
        if is_stdout(path):
            error.filename = "standard output"
            raise
        raise UserError(f"{error.filename or path} failed: {error.strerror or error}") from error


def sink(path: str) -> AbstractContextManager[BinaryIO]:
    """Where `output` writes to."""
    if is_file(path):
        return replaced(Path(os.path.realpath(path)))
    number = own_descriptor(path)
    if is_stdout(path) and sys.__stdout__ is not None and sys.stdout.isatty():
        return nullcontext(cast(BinaryIO, Terminal()))
    if number is not None:
        return open_descriptor(path, number, "wb")
    # A descriptor of another process, as /proc/PID/fd/1, cannot be shared; its file must not be truncated.
    return open(path, "ab" if descriptor_path(path) else "wb")


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to fill, which takes the place of `path` when it is whole. It has the permissions of the old one.

    Where only the content can be replaced it is copied into the old file at the end: one with several hard links, which
    would part otherwise, one of another owner, one that is mounted, or one in a folder that cannot be written.

    Raises:
        OSError: it cannot be written.
    """
    try:
        old = path.stat()
    except FileNotFoundError:
        old = None
    if old and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with ExitStack() as stack:
        with named(path):
            if old and not os.access(path.parent, os.W_OK):
                new = Path(stack.enter_context(tempfile.TemporaryDirectory()), "new")
            else:
                new = stack.enter_context(unfinished(path))
            file = open(new, "wb")  # noqa: SIM115  errors in writing have the name of the file already
        with file:
            if old:
                with suppress(OSError):  # of another owner
                    os.chown(new, old.st_uid, old.st_gid)
                shutil.copymode(path, new)
            yield file
        with named(path):
            put(new, path, old)


def put(new: Path, path: Path, old: os.stat_result | None) -> None:
    """Replace `path`, which has the status `old` if it exists, or its content."""
    if old is None:
        new.replace(path)
        return
    made = new.stat()
    if old.st_nlink == 1 and (made.st_uid, made.st_gid) == (old.st_uid, old.st_gid):
        with suppress(OSError):  # it is a mount point, say, or its folder cannot be written
            new.replace(path)
            return
    shutil.copyfile(new, path)


def nobody_reads() -> NoReturn:
    """End without a word: who reads the output has enough, as in `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output at its end
    sys.exit(1)


def write(file: BinaryIO, text: str) -> None:
    try:
        file.write(text.encode("utf-8", errors="replace"))
        file.flush()
    except BrokenPipeError:
        nobody_reads()
    except OSError as error:
        if file is sys.stdout.buffer:
            error.filename = "standard output"
        raise


def echo(text: str) -> None:
    """Print results, in which text of somebody else's may be."""
    write(sys.stdout.buffer, printable(text) + "\n")
