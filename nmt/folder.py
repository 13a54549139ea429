"""A run's folder: whether a command may train in it, what must stay as it was, and who is at work there."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nmt.checkpoint import MODEL, last_checkpoint, load_config
from nmt.config import FREE, TrainRun, flat, lasting
from nmt.distributed import log
from nmt.errors import UserError

CONTENTS = ("checkpoints", "eval", "tensorboard", "tokenizer*.model", "metrics.jsonl", "skipped.jsonl", "train.log")


def check_folder(folder: Path, run: TrainRun) -> bool:
    """Whether to resume. Refuses a folder that holds a checkpoint unless told what to do with it.

    Raises:
        UserError: what to write instead.
    """
    found = [path.name for path in contents(folder)]
    if (folder / MODEL).is_file():
        raise UserError(f"{folder} is an exported model: init_from={folder} starts from it, name=ANOTHER elsewhere")
    if found:
        try:
            load_config(folder)
        except UserError as error:
            raise UserError(
                f"{folder} holds {', '.join(found)} but is no run of this program ({error}); "
                "name=ANOTHER starts elsewhere"
            ) from None
    if run.overwrite:
        return False
    trained = last_checkpoint(folder) is not None
    if "eval" in found and not trained:
        raise UserError(
            f"{folder} holds evaluations of a model whose checkpoints are gone: overwrite=true throws them away, "
            "name=ANOTHER starts beside them"
        )
    if trained and run.resume == "false":
        raise UserError(
            f"{folder} holds a trained model already: resume=true continues it, overwrite=true throws it away, "
            "name=ANOTHER starts beside it"
        )
    if run.resume == "true" and not trained:
        raise UserError(f"resume=true, but {folder} holds no checkpoint; resume=auto starts where there is none")
    return trained


def lock(folder: Path) -> FileLock:
    """Keep other processes from training in this folder; the system releases it when this one ends, however it ends.

    Raises:
        UserError: another one is at work.
    """
    held = FileLock(folder / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise UserError(f"another process is training in {folder}; wait for it, or write name=ANOTHER") from None
    return held


def contents(folder: Path) -> list[Path]:
    """What a run writes into its folder, as far as it is there; its settings apart."""
    return [path for pattern in CONTENTS for path in sorted(folder.glob(pattern))]


def clear(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else."""
    for path in contents(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_same(run: TrainRun, before: TrainRun) -> None:
    """What a run was begun with cannot change while it is resumed: its data, tokenizer, model and seed, for example.
    Changes that are possible are named in the log, as a warning where other numbers come of them.

    Raises:
        UserError: naming each key that differs and must not.
    """
    changed = {key: f"{key}={new} (was {old})" for key, new, old in differences(run, before)}
    if refused := [text for key, text in changed.items() if key in lasting(dataclasses.asdict(run))]:
        raise UserError(f"a resumed run keeps its settings, but these differ: {', '.join(refused)}; "
                        "give the old values, or start anew with name=ANOTHER or overwrite=true")  # fmt: skip
    harmless = {*FREE, *unused(run)}
    if free := [text for key, text in changed.items() if key in harmless]:
        log.info(f"changed since this run began: {', '.join(free)}")
    if other := [text for key, text in changed.items() if key not in harmless]:
        log.warning(f"changed since this run began, which changes its numbers: {', '.join(other)}")


def unused(run: TrainRun) -> tuple[str, ...]:
    """Keys on which no number depends in this run: when it ends, and when it is validated."""
    share = run.optim.schedule == "cosine" or run.train.guided_alignment  # of training that is done
    judged = run.optim.schedule == "plateau" or run.train.patience
    return ("train.max_steps", "train.max_epochs") * (not share) + ("train.validate_every",) * (not judged)


def differences(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, value, other value) wherever two sets of settings of one kind differ."""
    new, old = (dict(flat(dataclasses.asdict(config))) for config in (one, other))
    return [(key, new[key], old[key]) for key in new if new[key] != old[key]]
