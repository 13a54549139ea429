"""The folder of a run: which checkpoints it has and keeps, and who may train there.

runs/<name>/config.yaml  tokenizer*.model  train.log  metrics.jsonl  samples.jsonl  eval/SPLIT/
runs/<name>/checkpoints/step_000500/    a checkpoint; that of the largest step is the last one
runs/<name>/checkpoints/best            a line with the name of the best checkpoint, for people and scripts
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nmt.errors import UserError
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE
from nmt.system.files import remove_path, write_atomically

RUN_FILE_PATTERNS = ("checkpoints", "eval", "tokenizer*.model", METRICS_FILE, SAMPLES_FILE, "train.log")
STEP_FOLDER = re.compile(r"step_(\d{6,12})|\.step_(\d{6,12})\.old")


def list_step_folders(run_folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, in ascending order.

    If a process died while it was replacing a checkpoint, the old one counts unless the new one is in place.
    """
    folders = {}
    for path in sorted((run_folder / "checkpoints").glob("*step_*/")):  # .step_N.old before step_N
        if match := STEP_FOLDER.fullmatch(path.name):
            folders[int(match[1] or match[2])] = path
    return dict(sorted(folders.items()))


def find_last_checkpoint(run_folder: Path) -> Path | None:
    """Return the checkpoint of the largest step, or None if there is none."""
    return next(reversed(list_step_folders(run_folder).values()), None)


def prune_checkpoints(run_folder: Path, best_steps: list[int], step: int) -> None:
    """Point `best` to the best existing checkpoint, and remove those that are no longer needed.

    The checkpoints of `best_steps` and `step` are kept, and the one before `step`, as a fallback if `step` turns out to
    be damaged. What processes that died left half-written is removed, and what they were replacing is restored.
    """
    checkpoints = run_folder / "checkpoints"
    for old in checkpoints.glob(".step_*.old"):
        if not (place := checkpoints / old.name[1 : -len(".old")]).exists():
            old.rename(place)
    folders = list_step_folders(run_folder)
    best_steps = [number for number in best_steps if number in folders]
    best_pointer = checkpoints / "best"
    if best_steps:
        write_atomically(best_pointer, [folders[best_steps[0]].name + "\n"])
    else:  # no validation yet, or the best checkpoint was damaged and the run resumed from an earlier one
        best_pointer.unlink(missing_ok=True)
    earlier = [number for number in folders if number < step]
    for number in folders.keys() - {step, *earlier[-1:], *best_steps}:
        remove_path(folders[number])
    for path in [*checkpoints.glob(".*.new"), *checkpoints.glob(".*.old")]:
        remove_path(path)


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder, which may be new, against training by other processes.

    The system releases the lock when this process ends in any way. A folder that stays empty is removed.

    Raises:
        UserError: another process is training in the folder.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is training in {folder}; wait for it, or use name=ANOTHER") from None
    try:
        yield
    finally:
        lock.release()
        if {path.name for path in folder.iterdir()} <= {".lock"}:
            remove_path(folder)


def list_run_files(folder: Path) -> list[Path]:
    """List the existing files and folders that a run writes, except its settings."""
    return [path for pattern in RUN_FILE_PATTERNS for path in sorted(folder.glob(pattern))]
