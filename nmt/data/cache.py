"""The cache: what was read and tokenized, in folders that are whole or not there.

Each folder has digests of its files, which are compared before they are used. They tell damage, not malice, and so are
quick ones: a corpus may have gigabytes.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from xxhash import xxh3_128

from nmt.config import DataConfig
from nmt.errors import UserError
from nmt.runtime.files import UNFINISHED, UNSUPPORTED, locked, remove_abandoned, warn_once, write_atomically

log = logging.getLogger("nmt")
DIGESTS = "digests.json"
PARTS = re.compile(r".*\.[0-9a-f]{32}\.part|[0-9a-f]{32}.*\.lock|" + UNFINISHED.pattern)  # of folders being filled
LOCK_POLL = 5.0  # seconds of waiting for another process before the log says so


def cache_folder(data: DataConfig) -> Path:
    """Where the read and the tokenized corpus are kept; made if need be.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder = Path(data.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nmt"))
    except RuntimeError:
        raise UserError("you have no home folder, where the cache would be; write data.cache=FOLDER") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be made ({error.strerror}); write data.cache=FOLDER") from error
    return folder


def get_or_build(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The folder, whole: as it is there already, or new and filled. Of several processes of a machine one fills it, and
    the others wait.

    Raises:
        UserError: the cache cannot be written, as on a full disk.
    """
    if is_valid(folder):
        return folder
    with alone(folder):
        if not is_valid(folder):
            with building(folder) as part:
                fill(part)
    return folder


def is_valid(folder: Path) -> bool:
    """Whether a folder of the cache is there, with all its files as they were written; a damaged one is removed.

    Raises:
        OSError: it cannot be removed.
    """
    if not folder.is_dir():
        return False
    try:
        if json.loads((folder / DIGESTS).read_bytes()) == digests(folder):
            return True
    except (OSError, ValueError, RecursionError):
        pass
    log.warning(f"the cache is damaged: {folder} is not as it was written; making it anew")
    with suppress(FileNotFoundError):  # another process is at it, too
        shutil.rmtree(folder)
    return False


def write_digests(folder: Path) -> None:
    """Write the digests of a folder that is whole; others who look there see all of them or none."""
    content = json.dumps(digests(folder), indent=1)
    write_atomically(folder / DIGESTS, [content], beside=folder.with_name(f"{folder.name}.{DIGESTS}"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in folder.iterdir() if path.name != DIGESTS}


def digest(path: Path) -> str:
    """Of the bytes of a file."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine makes the folder; a process that dies lets others go on. Where there
    are no locks, as on some network drives, several may make it, and the first to end is taken."""
    path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(path, fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOCK_POLL)
        except Timeout:
            log.info(f"waiting for another process that prepares {folder}")
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # if nothing can be written, who makes the folder says so
        if getattr(error, "errno", errno.ENOSYS) in UNSUPPORTED:
            warn_once("this file system has no locks: several processes may prepare the same text at a time")
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # who waits for it finds the folder whole, or makes it
            lock.release()


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` when it is whole, and goes if it is not to be.

    Raises:
        UserError: the cache cannot be written, as on a full disk.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(lambda: folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part"), folder=True) as part:
            remove_abandoned(folder.parent, names=PARTS)
            yield part
            write_digests(part)
            part.rename(folder)
    except OSError as error:
        where = Path(str(error.filename or folder)).absolute()
        if not where.is_relative_to(folder.parent.absolute()):  # of a file that is read
            raise
        if not is_valid(folder):  # else another process was faster
            raise unwritable(folder.parent, error) from error


def unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the cache {folder} cannot be written ({error.strerror or error}); make room there, "
        "or name a folder elsewhere: data.cache=FOLDER"
    )
