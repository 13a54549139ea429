"""The run folder: whether to resume in it, what to start from, which settings may change, and its lock."""

import dataclasses
import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from nmt.config import NON_NUMERIC_KEYS, TrainRun, flatten_keys, select_immutable_settings
from nmt.config.data import find_swapped_side
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.runs.checkpoint import (
    MODEL_FILE,
    find_checkpoint,
    find_last_checkpoint,
    find_last_intact_checkpoint,
    load_config,
    load_config_and_tokenizer,
    load_weights,
    save_config,
)
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE
from nmt.system.device import choose_precision
from nmt.system.distributed import mark_started, was_started
from nmt.system.files import remove_path
from nmt.system.logging import log
from nmt.system.quoting import quote_setting
from nmt.training.by_pairs import apply_by_pairs
from nmt.training.state import TrainState, resume_from
from nmt.training.vocabulary_transfer import transfer_weights

RUN_FILE_PATTERNS = (
    "checkpoints",
    ".checkpoints.old",
    "eval",
    "tensorboard",
    "tokenizer*.model",
    METRICS_FILE,
    SAMPLES_FILE,
    "skipped.jsonl",
    "train.log",
)


class StartingPoint(NamedTuple):
    """What a run starts from."""

    run: TrainRun  # the final settings, with values of `by_pairs`, inherited settings and precision
    is_resuming: bool
    last: Path | None  # the run's last checkpoint, which may be damaged
    checkpoint: Path | None  # the weights to load: the run's own checkpoint, or that of `init_from`
    tokenizer: Tokenizer | None  # to use; None: one is trained
    parent_tokenizer: Tokenizer | None  # of a parent whose vocabulary is replaced by the run's own


def find_starting_point(run: TrainRun, folder: Path, device: torch.device, given: Collection[str]) -> StartingPoint:
    """Decide from the run folder and `init_from` what to start from and with which settings.

    Keys in `given` (dotted) are not changed by `by_pairs`.

    Raises:
        UserError: the folder cannot be used, a checkpoint is missing or damaged, or immutable settings have changed.
    """
    if was_started(folder):  # torchrun has restarted this job after a process died
        run = dataclasses.replace(run, resume="auto", overwrite=False)
    is_resuming = check_run_folder(folder, run)
    last = find_last_checkpoint(folder)
    run = apply_by_pairs(run, given)
    origin = None
    if is_resuming:
        origin = folder, find_last_intact_checkpoint(folder)
    elif run.init_from:
        origin = find_checkpoint(run.init_from)
    precision = choose_precision(run.precision, device)
    if origin is None:
        return StartingPoint(dataclasses.replace(run, precision=precision), is_resuming, last, None, None, None)
    settings, tokenizer = load_config_and_tokenizer(*origin)
    if is_resuming and run.precision == "auto":
        precision = settings.precision
    run = dataclasses.replace(run, precision=precision)
    if is_resuming and run.bleu_tokenizer == "auto":
        run = dataclasses.replace(run, bleu_tokenizer=settings.bleu_tokenizer)
    if run.init_from:
        if not is_resuming:
            check_parent_languages(run, settings)
        run = inherit_settings(run, settings)
    if is_resuming:
        check_resumed_settings(run, settings)
    if run.new_tokenizer and not is_resuming:
        return StartingPoint(run, is_resuming, last, origin[1], None, parent_tokenizer=tokenizer)
    return StartingPoint(run, is_resuming, last, origin[1], tokenizer, None)


def check_parent_languages(run: TrainRun, parent: TrainRun) -> None:
    """Raise a `UserError` if a side of the run has the language of the parent's opposite side.

    With a joint vocabulary, only warn.
    """
    side = find_swapped_side(run.data, parent.data)
    if side is None:
        return
    language, parent_language = getattr(run.data, side), getattr(parent.data, side)
    direction = f"init_from={run.init_from} translates {parent.data.source} to {parent.data.target}"
    if not parent.tokenizer.joint:
        raise UserError(
            f"data.{side}={language}: {direction} with separate vocabularies, so {language} would get the {side} "
            f"vocabulary, which is that of {parent_language}; start from a run with {language} as its {side} or with "
            "tokenizer.joint=true, or remove init_from"
        )
    log.warning(
        f"data.{side}={language}: {direction}; the vocabulary is joint, but the {side} side was trained on "
        f"{parent_language}"
    )


def inherit_settings(run: TrainRun, parent: TrainRun) -> TrainRun:
    """Return the run with the model settings and, unless it trains its own, the tokenizer settings of its parent."""
    tokenizer = run.tokenizer
    if not run.new_tokenizer:
        tokenizer = dataclasses.replace(parent.tokenizer, sampling=run.tokenizer.sampling)
    model = dataclasses.replace(parent.model, dropout=run.model.dropout, kernels=run.model.kernels)
    # A vocabulary without literal pieces cannot learn them.
    augment = dataclasses.replace(run.augment, literals=run.augment.literals if tokenizer.literals else 0.0)
    inherited = dataclasses.replace(run, tokenizer=tokenizer, model=model, augment=augment)
    if changes := [f"{key}={new} (not {old})" for key, new, old in list_differences(inherited, run)]:
        log.info(f"taken from init_from={run.init_from}: {', '.join(changes)}")
    return inherited


def check_run_folder(folder: Path, run: TrainRun) -> bool:
    """Check that the run may use its folder, and return whether it resumes there.

    Raises:
        UserError: the folder is in use for something else, or needs resume= or overwrite=.
    """
    names = [path.name for path in list_run_files(folder)]
    if (folder / MODEL_FILE).is_file():
        init_from = quote_setting("init_from", str(folder))
        raise UserError(f"{folder} is an exported model; {init_from} name=ANOTHER starts a new run from it")
    if names:
        try:
            load_config(folder)
        except UserError as error:
            raise UserError(
                f"{folder} contains {', '.join(names)} but is not a run of this program ({error}); "
                "name=ANOTHER uses another folder"
            ) from None
    if run.overwrite:
        return False
    has_checkpoint = find_last_checkpoint(folder) is not None
    if "eval" in names and not has_checkpoint:
        raise UserError(
            f"{folder} contains evaluations of a model whose checkpoints are gone; overwrite=true deletes them, "
            "name=ANOTHER uses another folder"
        )
    if has_checkpoint and run.resume == "false":
        raise UserError(
            f"{folder} already contains a trained model; resume=true continues it, overwrite=true deletes it, "
            "name=ANOTHER uses another folder"
        )
    if run.resume == "true" and not has_checkpoint:
        raise UserError(f"resume=true, but {folder} has no checkpoint; use resume=auto to start a new run there")
    return has_checkpoint


def open_run_folder(state: TrainState, start: StartingPoint) -> AbstractContextManager[object]:
    """Lock the run folder, then resume from its checkpoint or clear it, and return the lock.

    Raises:
        UserError: another process is training in the folder, or has been since `find_starting_point`.
    """
    folder, run = state.folder, start.run
    lock = lock_run_folder(folder)
    if (check_run_folder(folder, run), find_last_checkpoint(folder)) != (start.is_resuming, start.last):
        raise UserError(f"another process trained in {folder} in the meantime; run the command again")
    if start.is_resuming:
        assert start.checkpoint is not None
        resume_from(state, start.checkpoint)
    else:
        if start.checkpoint and start.parent_tokenizer:
            transfer_weights(state.model, state.tokenizer, start.checkpoint, start.parent_tokenizer)
        elif start.checkpoint:
            load_weights(state.model, start.checkpoint)
        clear_run_folder(folder)
    mark_started(folder)
    if not start.is_resuming:  # `fit` saves the settings of a resumed run, if there is anything left to do
        save_config(folder, run)  # the first file, because it identifies the folder as a run
    state.tokenizer.save(folder)
    return lock


def lock_run_folder(folder: Path) -> AbstractContextManager[object]:
    """Lock a run folder against training by other processes, and return the lock as a context manager.

    The system releases the lock when this process ends in any way.

    Raises:
        UserError: another process is training in the folder.
    """
    try:
        return FileLock(folder / ".lock", fallback_to_soft=False).acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is training in {folder}; wait for it, or use name=ANOTHER") from None


def list_run_files(folder: Path) -> list[Path]:
    """List the existing files and folders that a run writes, except its settings."""
    return [path for pattern in RUN_FILE_PATTERNS for path in sorted(folder.glob(pattern))]


def clear_run_folder(folder: Path) -> None:
    """Remove the files of an earlier run, and nothing else.

    All checkpoints are renamed first, so that a process that dies does not leave only some of them.
    """
    checkpoints, old = folder / "checkpoints", folder / ".checkpoints.old"
    if os.path.lexists(checkpoints):
        remove_path(old)
        checkpoints.rename(old)
    for path in list_run_files(folder):
        if path.is_symlink():
            log.warning(f"{path} is a symbolic link: removing the link, but not its target {path.resolve()}")
        remove_path(path)


def check_resumed_settings(run: TrainRun, before: TrainRun) -> None:
    """Raise a `UserError` if immutable settings such as data, tokenizer, model and seed have changed.

    Other changes are logged, with a warning if they change the numbers of the run.
    """
    changed = {key: f"{key}={new} (was {old})" for key, new, old in list_differences(run, before)}
    immutable = select_immutable_settings(dataclasses.asdict(run))
    if refused := [text for key, text in changed.items() if key in immutable]:
        raise UserError(
            f"a resumed run keeps its settings, but these differ: {', '.join(refused)}; "
            "give the old values, or start a new run with name=ANOTHER or overwrite=true"
        )
    non_numeric = list_non_numeric_keys(run)
    if harmless := [text for key, text in changed.items() if key in non_numeric]:
        log.info(f"changed since this run last trained: {', '.join(harmless)}")
    if numeric := [text for key, text in changed.items() if key not in non_numeric]:
        log.warning(f"changed since this run last trained, which changes its results: {', '.join(numeric)}")


def list_non_numeric_keys(run: TrainRun) -> set[str]:
    """Return the keys that do not influence the numbers of this run."""
    keys = set(NON_NUMERIC_KEYS)
    depends_on_length = run.optim.schedule == "cosine" or run.train.guided_alignment
    depends_on_validation = run.optim.schedule == "plateau" or run.train.patience
    if not depends_on_validation:
        keys.add("train.validate_every")
        if not depends_on_length:  # the last step has a validation, so the limits count as validation, too
            keys |= {"train.max_steps", "train.max_epochs"}
    return keys


def list_differences(config: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value, other value) for each key in which two configs of the same class differ."""
    values, other_values = (dict(flatten_keys(dataclasses.asdict(item))) for item in (config, other))
    return [(key, values[key], other_values[key]) for key in values if values[key] != other_values[key]]
