"""What a run starts from: its last checkpoint, another run or nothing, and with which settings."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nmt.config import TrainRun, flatten_keys, select_immutable_settings
from nmt.config.data import is_opposite_direction
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import (
    MODEL_FILE,
    find_checkpoint,
    find_last_intact_checkpoint,
    load_config,
    load_config_and_tokenizer,
    load_weights,
    save_config,
)
from nmt.runs.folder import find_last_checkpoint, list_run_files
from nmt.system.device import choose_precision
from nmt.system.files import remove_path
from nmt.system.logging import log
from nmt.system.quoting import quote_setting
from nmt.training.by_pairs import apply_by_pairs
from nmt.training.progress import Progress
from nmt.training.state import resume
from nmt.training.vocabulary_transfer import transfer_weights


class StartingPoint(NamedTuple):
    """What a run starts from."""

    run: TrainRun  # the final settings, with values of `by_pairs`, inherited settings and precision
    is_resuming: bool
    checkpoint: Path | None  # the weights to load: the run's own checkpoint, or that of `init_from`
    tokenizer: Tokenizer | None  # to use; None: one is trained
    parent_tokenizer: Tokenizer | None  # of a parent whose vocabulary is replaced by the run's own


def find_starting_point(run: TrainRun, folder: Path, device: torch.device, given: Collection[str]) -> StartingPoint:
    """Decide from the run folder and `init_from` what to start from and with which settings.

    Keys in `given` (dotted) are not changed by `by_pairs`.

    Raises:
        UserError: the folder cannot be used, a checkpoint is missing or damaged, or immutable settings have changed.
    """
    is_resuming = check_run_folder(folder, run)
    run = apply_by_pairs(run, given)
    precision = choose_precision(run.precision, device)
    if is_resuming:
        checkpoint = find_last_intact_checkpoint(folder)
        before, tokenizer = load_config_and_tokenizer(folder, checkpoint)
        if run.precision == "auto":
            precision = before.precision
        if run.bleu_tokenizer == "auto":
            run = dataclasses.replace(run, bleu_tokenizer=before.bleu_tokenizer)
        run = dataclasses.replace(run, precision=precision)
        if run.init_from:
            run = inherit_settings(run, before)
        check_resumed_settings(run, before)
        return StartingPoint(run, True, checkpoint, tokenizer, None)
    run = dataclasses.replace(run, precision=precision)
    if not run.init_from:
        return StartingPoint(run, False, None, None, None)
    parent_folder, checkpoint = find_checkpoint(run.init_from)
    parent, tokenizer = load_config_and_tokenizer(parent_folder, checkpoint)
    check_parent_direction(run, parent)
    run = inherit_settings(run, parent)
    if run.new_tokenizer:
        return StartingPoint(run, False, checkpoint, None, parent_tokenizer=tokenizer)
    return StartingPoint(run, False, checkpoint, tokenizer, None)


def check_parent_direction(run: TrainRun, parent: TrainRun) -> None:
    """Raise a `UserError` if the run translates back what its parent translates, with vocabularies of one side each."""
    if is_opposite_direction(run.data, parent.data) and not parent.tokenizer.joint:
        raise UserError(
            f"data.source={run.data.source}: init_from={run.init_from} translates {parent.data.source} to "
            f"{parent.data.target} with separate vocabularies, so each side would get that of the other language; "
            "start from a run of the same direction or with tokenizer.joint=true, or remove init_from"
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
        UserError: the folder is in use for something else, or needs resume=.
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
    has_checkpoint = find_last_checkpoint(folder) is not None
    if has_checkpoint and run.resume == "false":
        raise UserError(
            f"{folder} already contains a trained model; resume=true continues it, name=ANOTHER uses another folder; "
            "to start over, delete the folder"
        )
    if run.resume == "true" and not has_checkpoint:
        raise UserError(f"resume=true, but {folder} has no checkpoint; use resume=auto to start a new run there")
    return has_checkpoint


def start_run(
    start: StartingPoint,
    folder: Path,
    model: Seq2Seq,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer,
    corpus: str,
) -> Progress:
    """Load the weights that a run starts from, write its settings and tokenizer, and return its progress.

    What a run that died before its first checkpoint has left is removed. `corpus` is the key of the text.
    """
    progress = Progress(corpus)
    if start.is_resuming:
        assert start.checkpoint is not None
        progress = resume(start.run, folder, start.checkpoint, model, optimizer, corpus)
    else:
        if start.checkpoint and start.parent_tokenizer:
            transfer_weights(model, tokenizer, start.checkpoint, start.parent_tokenizer)
        elif start.checkpoint:
            load_weights(model, start.checkpoint)
        for path in list_run_files(folder):
            remove_path(path)
    save_config(folder, start.run)  # the first file, because it identifies the folder as a run
    tokenizer.save(folder)
    return progress


def check_resumed_settings(run: TrainRun, before: TrainRun) -> None:
    """Raise a `UserError` if immutable settings such as data, tokenizer, model and seed have changed; log others."""
    changed = {key: f"{key}={new} (was {old})" for key, new, old in list_differences(run, before)}
    immutable = select_immutable_settings(dataclasses.asdict(run))
    if refused := [text for key, text in changed.items() if key in immutable]:
        raise UserError(
            f"a resumed run keeps its settings, but these differ: {', '.join(refused)}; "
            "give the old values, or start a new run with name=ANOTHER"
        )
    if changed:
        log.info(f"changed since this run last trained: {', '.join(changed.values())}")


def list_differences(config: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value, other value) for each key in which two configs of the same class differ."""
    values, other_values = (dict(flatten_keys(dataclasses.asdict(item))) for item in (config, other))
    return [(key, values[key], other_values[key]) for key in values if values[key] != other_values[key]]
