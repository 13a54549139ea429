"""Files and folders that are written as a whole or not at all, and safe reading of a run's own files."""

import errno
import fcntl
import glob
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from nmt.errors import UserError, with_filename

log = logging.getLogger("nmt")
PLAIN = 2**20  # bytes of a JSON or YAML file of ours at most
UNFINISHED = re.compile(r"\..*\.[0-9a-f]+\.new")  # names of what is not whole yet
NAME = 50  # characters of a file's name in them: a name may have 255 bytes at most
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF}


def write_atomically(path: Path, parts: Iterable[str | bytes], beside: Path | None = None) -> None:
    """Replace a file in one step by these texts or bytes, one after the other. The file is written next to `beside`
    first, by default next to itself."""
    with with_filename(path), temporary_sibling(beside or path) as new:
        with open(new, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        sync(new)
        new.replace(path)


@contextmanager
def temporary_sibling(path: Path, folder: bool = False) -> Iterator[Path]:
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
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` when it is whole, in the place of an earlier one; if that cannot be,
    nothing has changed.

    Raises:
        UserError: it cannot be written.
    """
    old = folder.with_name(f".{folder.name}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_sibling(folder, folder=True) as new:
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
    with temporary_sibling(folder, folder=True) as new:
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


def open_regular(path: str | Path, flags: int) -> int:
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
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(PLAIN + 1)
    if len(content) > PLAIN:
        raise ValueError(f"it has more than {PLAIN:,} bytes")
    return content.decode()


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
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
        with with_filename(path):
            if old and not os.access(path.parent, os.W_OK):
                new = Path(stack.enter_context(tempfile.TemporaryDirectory()), "new")
            else:
                new = stack.enter_context(temporary_sibling(path))
            file = open(new, "wb")  # noqa: SIM115  errors in writing have the name of the file already
        with file:
            if old:
                with suppress(OSError):  # of another owner
                    os.chown(new, old.st_uid, old.st_gid)
                shutil.copymode(path, new)
            yield file
        with with_filename(path):
            replace_or_copy(new, path, old)


def replace_or_copy(new: Path, path: Path, old: os.stat_result | None) -> None:
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
