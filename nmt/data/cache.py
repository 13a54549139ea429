"""Cache of read and tokenized text, in folders that are either complete or absent.

Each folder contains digests of its files, which are checked before use. They detect damage, not tampering, so a fast
hash is used: a corpus may have gigabytes.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from xxhash import xxh3_128

from nmt.config import DataConfig
from nmt.errors import UserError
from nmt.system.files import warn_once, write_atomically

log = logging.getLogger("nmt")
DIGESTS_FILE = "digests.json"
LOCK_NOTICE_DELAY = 5.0  # seconds of waiting for another process before this is logged


def cache_folder(data: DataConfig) -> Path:
    """Return the cache folder, creating it if needed: in the working folder if the home folder cannot be written.

    Raises:
        UserError: the folder cannot be created.
    """
    parent = os.environ.get("XDG_CACHE_HOME")
    if not data.cache and not parent:
        with suppress(OSError, RuntimeError):  # the home folder is read-only, or there is none
            folder = Path.home() / ".cache" / "nmt"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        warn_once(
            "the home folder cannot be written, so text is cached in .cache/nmt in the working folder; set "
            "data.cache=FOLDER to choose another"
        )
    folder = Path(data.cache or Path(parent or Path.cwd() / ".cache", "nmt"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be created ({error.strerror}); set data.cache=FOLDER") from error
    return folder


def get_or_build(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a complete folder of the cache, first letting `fill` write it if it does not exist.

    If several processes of a machine ask for the same folder, one fills it and the others wait.

    Raises:
        UserError: the cache cannot be written, for example because the disk is full.
    """
    if is_valid(folder):
        return folder
    with lock_folder(folder):
        if not is_valid(folder):
            with build_folder(folder) as part:
                fill(part)
    return folder


def is_valid(folder: Path) -> bool:
    """Return whether a folder of the cache exists and all its files match their digests; remove a damaged one.

    Raises:
        OSError: a damaged folder cannot be removed.
    """
    if not folder.is_dir():
        return False
    try:
        if json.loads((folder / DIGESTS_FILE).read_bytes()) == digest_files(folder):
            return True
    except (OSError, ValueError, RecursionError):
        pass
    log.warning(f"the cache is damaged: {folder} does not match its digests; rebuilding it")
    with suppress(FileNotFoundError):  # another process may be removing it, too
        shutil.rmtree(folder)
    return False


def write_digests(folder: Path) -> None:
    """Write the digests of a complete folder atomically."""
    content = json.dumps(digest_files(folder), indent=1)
    write_atomically(folder / DIGESTS_FILE, [content])


def digest_files(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in folder.iterdir() if path.name != DIGESTS_FILE}


def digest_file(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is building the folder; the lock of a killed process is released.

    Where the cache cannot be written, `build_folder` reports it.
    """
    path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(path, fallback_to_soft=False)
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOCK_NOTICE_DELAY)
        except Timeout:
            log.info(f"waiting for another process that is preparing {folder}")
            lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(PermissionError):  # Windows does not remove open files
                path.unlink(missing_ok=True)  # waiting processes check the folder again once they have the lock
            lock.release()


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to `folder` on success and remove it on failure."""
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        write_digests(part)
        part.rename(folder)
    except OSError as error:
        failed_path = Path(str(error.filename or folder)).absolute()
        if not failed_path.is_relative_to(folder.parent.absolute()):  # an input file, not the cache
            raise
        if not is_valid(folder):  # otherwise another process finished first
            raise make_cache_write_error(folder.parent, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make_cache_write_error(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the cache {folder} cannot be written ({error.strerror or error}); make room there, "
        "or choose another folder: data.cache=FOLDER"
    )
