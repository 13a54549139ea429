"""Files and folders that appear whole or not at all.

Something new is written next to its place under a hidden name, `.NAME.DIGITS.new`, and renamed when it is complete. A
process that is killed leaves that behind, and under the final name what was there before. Whoever writes a folder of
this name next removes it.
"""

import glob
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from nmt.errors import UserError, with_filename

MAX_SMALL_FILE_BYTES = 2**18  # maximum size of a JSON or YAML file of a run; PyYAML reads 0.1 MB a second at worst
MAX_STEM_LENGTH = 50  # characters of the final name in the temporary name; file systems allow 255 bytes in all


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield an unused path next to `path`, for a file or folder to be renamed. If it still exists, it is removed."""
    new = path.with_name(f".{path.name[:MAX_STEM_LENGTH]}.{secrets.token_hex(8)}.new")
    try:
        yield new
    finally:
        with suppress(OSError):
            remove_path(new)


def write_atomically(path: Path, parts: Iterable[str | bytes]) -> None:
    """Replace a file atomically by the concatenation of `parts`."""
    with with_filename(path), temporary_sibling(path) as new:
        with open(new, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        fsync_path(new)
        new.replace(path)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to fill, which then replaces `path` and has the same permissions.

    Raises:
        OSError: the file cannot be written.
    """
    with temporary_sibling(path) as new:
        with with_filename(path):
            new.touch()
            if path.exists():
                open(path, "r+b").close()  # renaming would replace a file that may not be written
                shutil.copymode(path, new)
        with open(new, "wb") as file:
            yield file
        with with_filename(path):
            new.replace(path)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which then replaces `folder`. On failure `folder` is unchanged.

    Raises:
        UserError: the folder cannot be written.
    """
    old = folder.with_name(f".{folder.name}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{glob.escape(folder.name[:MAX_STEM_LENGTH])}.{'?' * 16}.new"):
            remove_path(left)  # of a process that was killed
        with temporary_sibling(folder) as new:
            new.mkdir()
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


def remove_path(path: Path) -> None:
    """Remove a file, a folder with its contents, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Force a file or folder to the disk. Windows opens no folders, and forces only files that may be written."""
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    with with_filename(path):
        handle = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path) -> str:
    """Return the text of a JSON or YAML file of a run.

    Raises:
        ValueError: the file is not UTF-8 or is too large.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_SMALL_FILE_BYTES + 1)
    if len(content) > MAX_SMALL_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_SMALL_FILE_BYTES:,} bytes")
    return content.decode()
