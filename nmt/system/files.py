"""Atomic writing of files and folders, and safe opening of files of a run."""

import errno
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

try:
    import fcntl
except ImportError:  # on Windows, where files that are open can be neither renamed nor removed
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

log = logging.getLogger("nmt")
MAX_SMALL_FILE_BYTES = 2**20  # maximum size of a JSON or YAML file of a run
UNFINISHED_NAME = re.compile(r"\..*\.[0-9a-f]+\.new")  # temporary names of unfinished files and folders
MAX_STEM_LENGTH = 50  # characters of the final name in the temporary name; file systems allow 255 bytes in all
# Windows has neither of these flags.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
# Errors of file systems without locks or fsync.
UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF}


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder.

    Raises:
        OSError: this cannot be told, or the files of the folder cannot be reached, for lack of permission, say. From
            Python 3.14 on, `Path.is_dir` and `Path.is_file` return False then.
    """
    with with_filename(path), suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL
        return stat.S_ISDIR(os.stat(os.path.join(path, os.curdir)).st_mode)
    return False


def write_atomically(path: Path, parts: Iterable[str | bytes], beside: Path | None = None) -> None:
    """Replace a file atomically by the concatenation of `parts`.

    The temporary file is a sibling of `beside`, by default of the file itself.
    """
    with with_filename(path), temporary_sibling(beside or path) as new:
        with open(new, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        fsync_path(new)
        new.replace(path)


@contextmanager
def temporary_sibling(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a new file or folder next to `path` to fill and rename. If it is not renamed, it is removed at the end.

    Temporary files that killed processes left for the same path are removed first.
    """
    stem = f".{path.name[:MAX_STEM_LENGTH]}."
    remove_abandoned(path.parent, f"{glob.escape(stem)}*")
    with locked_path(lambda: path.with_name(f"{stem}{secrets.token_hex(8)}.new"), folder) as new:
        yield new


@contextmanager
def locked_path(draw_path: Callable[[], Path], folder: bool) -> Iterator[Path]:
    """Yield a new file or folder at a path from `draw_path`. If it is not renamed, it is removed at the end.

    This process locks it as long as it lives, so that other processes know that it is in use (`remove_abandoned`),
    except on Windows.
    """
    handle = None
    while handle is None:  # another process may remove it as abandoned before it is locked
        path = draw_path()
        path.mkdir() if folder else path.touch(exist_ok=False)
        if not HAS_FLOCK:
            break
        with suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
            if not (try_lock(handle) and path.exists()):
                os.close(handle)
                handle = None
    try:
        yield path
    finally:
        with suppress(OSError):
            remove_path(path)
        if handle is not None:
            os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder. Returns False if another process has locked it, True without support for locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED_ERRNOS:
            raise
    return True


def remove_abandoned(folder: Path, pattern: str = "*", names: re.Pattern[str] = UNFINISHED_NAME) -> None:
    """Remove unfinished files and folders of dead processes, whose locks the system has released.

    Nothing is removed without locks: on Windows and on some file systems.
    """
    if not HAS_FLOCK:
        return
    for path in folder.glob(pattern):
        if not names.fullmatch(path.name):
            continue
        with suppress(OSError):  # in use, already removed, or no support for locks
            access = os.O_RDONLY if path.is_dir() else os.O_RDWR
            handle = os.open(path, access | NO_FOLLOW | NO_WAIT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_path(path)
            finally:
                os.close(handle)


def remove_path(path: Path) -> None:
    """Remove a file, a folder with its contents, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Force a file or folder to the disk, with a warning if the file system does not support it.

    Windows opens no folders, and forces only files to the disk that may be written.
    """
    if not HAS_FLOCK and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if HAS_FLOCK else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED_ERRNOS:
            error.filename = str(path)
            raise
        warn_once(
            f"this file system does not force files to the disk (fsync: {error.strerror}): if the machine fails, the "
            "last checkpoint may be damaged, and the one before it is used"
        )
    finally:
        os.close(handle)


@cache
def warn_once(message: str) -> None:
    log.warning(message)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which then replaces `folder`. On failure `folder` is unchanged.

    Raises:
        UserError: the folder cannot be written.
    """
    old = folder.with_name(f".{folder.name}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_sibling(folder, folder=True) as new:
            yield new
            if os.path.lexists(folder):
                remove_path(old)
                folder.rename(old)  # if the process dies here, readers find it under this name
            new.rename(folder)
            fsync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        if os.path.lexists(old) and not os.path.lexists(folder):
            old.rename(folder)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} cannot be written: {reason}") from None
    with suppress(OSError):
        remove_path(old)


@contextmanager
def replacing_files(folder: Path, mark: str, *patterns: str) -> Iterator[Path]:
    """Yield a new folder to fill, whose files then replace the files in `folder` that match `patterns`.

    This takes several steps. The file `mark` is removed first and replaced last, so that all files belong together if
    it exists. Other processes that replace files of this folder wait.
    """
    with temporary_sibling(folder, folder=True) as new:
        try:
            yield new
        except OSError as error:
            if error.filename is not None and Path(error.filename).parent == new:
                error.filename = str(folder / Path(error.filename).name)
            raise
        with locked_folder(folder):
            remove_path(folder / mark)
            for old in [path for pattern in patterns for path in folder.glob(pattern)]:
                remove_path(old)
            for path in sorted(new.iterdir(), key=lambda path: (path.name == mark, path.name)):
                path.replace(folder / path.name)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked the folder, and lock it, where there are locks."""
    if not HAS_FLOCK:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # no support for locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file of a run; to be used as the `opener` of `open`.

    The run may come from someone else, so pipes, on which reading would block, are refused, and so is writing through
    symbolic links.

    Raises:
        OSError: the path is not a regular file.
    """
    is_writing = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        if is_writing and not NO_FOLLOW and os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        handle = os.open(path, flags | NO_WAIT | (NO_FOLLOW if is_writing else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a symbolic link, which cannot be written through; remove it"
        elif error.errno == errno.ENXIO:
            reason = "it is a pipe; remove it"
        else:
            raise
        raise OSError(error.errno, reason, str(path)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def read_small(path: Path) -> str:
    """Return the text of a JSON or YAML file of a run.

    Raises:
        ValueError: the file is not UTF-8 or is too large.
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(MAX_SMALL_FILE_BYTES + 1)
    if len(content) > MAX_SMALL_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_SMALL_FILE_BYTES:,} bytes")
    return content.decode()


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to fill, which then replaces `path` and has the same permissions.

    If only the content can be replaced, it is copied into the old file at the end: if that has several hard links or
    another owner, is a mount point, or its folder is not writable.

    Raises:
        OSError: the file cannot be written.
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
            file = open(new, "wb")  # noqa: SIM115  closed below
        with file:
            if old:
                with suppress(OSError, AttributeError):  # another owner; on Windows there is no such function
                    os.chown(new, old.st_uid, old.st_gid)
                shutil.copymode(path, new)
            yield file
        with with_filename(path):
            replace_or_copy(new, path, old)


def replace_or_copy(new: Path, path: Path, old: os.stat_result | None) -> None:
    """Replace `path` or its content by the file `new`. `old` is the status of `path`, None if it does not exist."""
    if old is None:
        new.replace(path)
        return
    status = new.stat()
    if old.st_nlink == 1 and (status.st_uid, status.st_gid) == (old.st_uid, old.st_gid):
        with suppress(OSError):  # a mount point, for example, or the folder is not writable
            new.replace(path)
            return
    shutil.copyfile(new, path)
