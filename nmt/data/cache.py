"""Cache of read and tokenized text, in folders that are either complete or absent."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from nmt.config import DataConfig
from nmt.errors import UserError
from nmt.system.files import fsync_path


def cache_folder(data: DataConfig) -> Path:
    """Return the cache folder, creating it if needed.

    Raises:
        UserError: the folder cannot be created.
    """
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(data.cache or Path(parent, "nmt"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be created ({error.strerror}); set data.cache=FOLDER") from error
    return folder


def get_or_build(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a complete folder of the cache, first letting `fill` write it if it does not exist.

    If several processes of a machine ask for the same folder, one fills it and the others wait. It is filled under
    another name and then renamed; what a killed process left under that name is removed before the next attempt.

    Raises:
        UserError: the cache cannot be written, for example because the disk is full.
    """
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                try:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir()
                    fill(part)
                    for file in part.iterdir():
                        fsync_path(file)
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        if error.filename and folder.parent not in Path(error.filename).parents:  # an input file, not the cache
            raise
        raise UserError(
            f"the cache {folder.parent} cannot be written ({error.strerror or error}); make room there, or choose "
            "another folder: data.cache=FOLDER"
        ) from error
    return folder
