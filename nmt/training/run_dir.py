"""A run's folder: whether a command may train in it, from where it starts, what must stay as it was, and who is at work
there."""

import dataclasses
import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from nmt.config import NON_NUMERIC, TrainRun, flatten_keys, immutable_settings
from nmt.config.data import swapped_side
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.runtime.device import choose_precision
from nmt.runtime.distributed import mark_started, was_started
from nmt.runtime.files import UNSUPPORTED, remove, remove_abandoned
from nmt.runtime.logging import log
from nmt.runtime.quoting import quote_setting
from nmt.training.checkpoint import (
    MODEL,
    find_checkpoint,
    last_checkpoint,
    last_intact,
    load_config,
    load_verified,
    load_weights,
    save_config,
)
from nmt.training.presets import apply_presets
from nmt.training.state import TrainState, resume

CONTENTS = (
    *("checkpoints", ".checkpoints.old", "eval", "tensorboard", "tokenizer*.model"),
    *("metrics.jsonl", "skipped.jsonl", "train.log"),
)


class RunStart(NamedTuple):
    """From where a run starts."""

    run: TrainRun  # with what is decided here
    resuming: bool
    last: Path | None  # the run's last checkpoint
    checkpoint: Path | None  # whose weights it goes on with: its own, or that of another run
    tokenizer: Tokenizer | None  # likewise


def find_start(run: TrainRun, folder: Path, device: torch.device, given: Collection[str]) -> RunStart:
    """Look at the run's folder and at what it is to go on with. Dotted keys that are `given` stay as they are, whatever
    the size of the corpus.

    Raises:
        UserError: something is in the way, missing or damaged, or settings have changed that must not.
    """
    if was_started(folder):  # and a process has died
        run = dataclasses.replace(run, resume="auto", overwrite=False)
    resuming, last = check_folder(folder, run), last_checkpoint(folder)
    run = apply_presets(run, given)
    origin = (folder, last_intact(folder)) if resuming else find_checkpoint(run.init_from) if run.init_from else None
    precision = choose_precision(run.precision, device)
    if origin is None:
        return RunStart(dataclasses.replace(run, precision=precision), resuming, last, None, None)
    settings, tokenizer = load_verified(*origin)
    if resuming and run.precision == "auto":
        precision = settings.precision
    run = dataclasses.replace(run, precision=precision)
    if resuming and run.bleu_tokenizer == "auto":
        run = dataclasses.replace(run, bleu_tokenizer=settings.bleu_tokenizer)
    if run.init_from:
        if not resuming:
            check_languages(run, settings)
        run = inherit_settings(run, settings)
    if resuming:
        check_unchanged(run, settings)
    return RunStart(run, resuming, last, origin[1], tokenizer)


def check_languages(run: TrainRun, parent: TrainRun) -> None:
    """Look whether a side of the run has the language that is the other side's in the run that it starts from.

    Raises:
        UserError: it has, and each side of the parent has a vocabulary of its own.
    """
    if (side := swapped_side(run.data, parent.data)) is None:
        return
    own, other = getattr(run.data, side), getattr(parent.data, side)
    trained = f"init_from={run.init_from} translates {parent.data.source} to {parent.data.target}"
    if not parent.tokenizer.joint:
        raise UserError(
            f"data.{side}={own}: {trained} with a vocabulary for each, so {own} would get the {side} vocabulary, that "
            f"of {other}; start from a run that has {own} as its {side}, from one with tokenizer.joint=true, or "
            "without init_from"
        )
    log.warning(f"data.{side}={own}: {trained}; the vocabulary is one for both, but as {side} it has learned {other}")


def inherit_settings(run: TrainRun, parent: TrainRun) -> TrainRun:
    """The settings of a run that starts from another's weights: the tokenizer and the sizes are those of the parent."""
    tokenizer = dataclasses.replace(parent.tokenizer, sampling=run.tokenizer.sampling)
    model = dataclasses.replace(parent.model, dropout=run.model.dropout)
    adopted = dataclasses.replace(run, tokenizer=tokenizer, model=model)
    if taken := [f"{key}={new} (not {old})" for key, new, old in differences(adopted, run)]:
        log.info(f"as in init_from={run.init_from}: {', '.join(taken)}")
    return adopted


def check_folder(folder: Path, run: TrainRun) -> bool:
    """Whether to resume. Refuses a folder that holds a checkpoint unless told what to do with it.

    Raises:
        UserError: what to write instead.
    """
    found = [path.name for path in contents(folder)]
    if (folder / MODEL).is_file():
        start = quote_setting("init_from", str(folder))
        raise UserError(f"{folder} is an exported model: {start} starts from it, name=ANOTHER elsewhere")
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


def open_folder(state: TrainState, start: RunStart) -> AbstractContextManager[object]:
    """Take the run's folder: with nobody else in it, cleared or resumed, with settings and tokenizer.

    Raises:
        UserError: somebody else is there, or was.
    """
    folder, run = state.folder, start.run
    held = lock(folder)
    if (check_folder(folder, run), last_checkpoint(folder)) != (start.resuming, start.last):
        raise UserError(f"another process has trained in {folder} meanwhile; repeat the command")
    if start.resuming:
        assert start.checkpoint is not None
        resume(state, start.checkpoint)
    else:
        if start.checkpoint:
            load_weights(state.model, start.checkpoint)
        clear(folder)
    for place in (folder, folder / "checkpoints", folder / "eval"):
        remove_abandoned(place)
    mark_started(folder)
    if not start.resuming:  # else it is as it was until there is something to do
        save_config(folder, run)  # first of all: by it a folder is known to be a run
    state.tokenizer.save(folder)
    return held


def lock(folder: Path) -> AbstractContextManager[object]:
    """Keep other processes from training in this folder, within a `with`; the system releases it when this one ends,
    however it ends. Where the file system has no locks, a warning says so.

    Raises:
        UserError: another one is at work.
    """
    try:
        return FileLock(folder / ".lock", fallback_to_soft=False).acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is training in {folder}; wait for it, or write name=ANOTHER") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning(
            f"the file system of {folder} has no locks ({error.strerror}): see that no other process trains there"
        )
        return nullcontext(True)


def contents(folder: Path) -> list[Path]:
    """What a run writes into its folder, as far as it is there; its settings apart."""
    return [path for pattern in CONTENTS for path in sorted(folder.glob(pattern))]


def clear(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else: first all its checkpoints, in one step."""
    checkpoints, old = folder / "checkpoints", folder / ".checkpoints.old"
    if os.path.lexists(checkpoints):
        remove(old)
        checkpoints.rename(old)
    for path in contents(folder):
        if path.is_symlink():
            log.warning(f"{path} is a symbolic link: it is removed, and {path.resolve()} stays")
        remove(path)


def check_unchanged(run: TrainRun, before: TrainRun) -> None:
    """What a run was begun with cannot change while it is resumed: its data, tokenizer, model and seed, for example.
    Changes that are possible are named in the log, as a warning where other numbers come of them.

    Raises:
        UserError: naming each key that differs and must not.
    """
    changed = {key: f"{key}={new} (was {old})" for key, new, old in differences(run, before)}
    kept = immutable_settings(dataclasses.asdict(run))
    if refused := [text for key, text in changed.items() if key in kept]:
        raise UserError(f"a resumed run keeps its settings, but these differ: {', '.join(refused)}; "
                        "give the old values, or start anew with name=ANOTHER or overwrite=true")  # fmt: skip
    free = non_numeric_keys(run)
    if known := [text for key, text in changed.items() if key in free]:
        log.info(f"changed since this run last trained: {', '.join(known)}")
    if other := [text for key, text in changed.items() if key not in free]:
        log.warning(f"changed since this run last trained, which changes its numbers: {', '.join(other)}")


def non_numeric_keys(run: TrainRun) -> set[str]:
    """Keys on which no number depends in this run; some of them in other runs, as when it ends or is validated."""
    share = run.optim.schedule == "cosine" or run.train.guided_alignment  # of training that is done
    judged = run.optim.schedule == "plateau" or run.train.patience
    ends = ("train.max_steps", "train.max_epochs") * (not (share or judged))  # the last step is judged, too
    return {*NON_NUMERIC, *ends, *("train.validate_every",) * (not judged)}


def differences(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, value, other value) wherever two sets of settings of one kind differ."""
    new, old = (dict(flatten_keys(dataclasses.asdict(config))) for config in (one, other))
    return [(key, new[key], old[key]) for key in new if new[key] != old[key]]
