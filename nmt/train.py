"""Train a model.

python -m nmt.train                                                            the built-in corpus
python -m nmt.train data=text data.path=DIR data.source=de data.target=en      your own text
python -m nmt.train --help
"""

import dataclasses
import logging
import resource
import shutil
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from hydra.core.hydra_config import HydraConfig

from nmt.checkpoint import find_checkpoint, load_config, load_weights, save_config, verify
from nmt.config import TrainRun, main
from nmt.data.batching import content_key, encode_corpus
from nmt.data.corpus import column, load_pairs
from nmt.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from nmt.distributed import check_alone, choose_device, choose_precision, log, log_to_file, log_to_stderr, place
from nmt.errors import UserError
from nmt.folder import check_folder, check_same, clear, differences, lock
from nmt.model.seq2seq import build_model
from nmt.optim import build_optimiser
from nmt.training import Progress, TrainState, fit, resume, seed_of

KIB = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def adopt(run: TrainRun, parent: TrainRun) -> TrainRun:
    """The settings of a run that starts from another's weights: the tokenizer and the sizes are those of the parent."""
    tokenizer = dataclasses.replace(parent.tokenizer, sampling=run.tokenizer.sampling)
    model = dataclasses.replace(parent.model, dropout=run.model.dropout)
    adopted = dataclasses.replace(run, tokenizer=tokenizer, model=model)
    if taken := [f"{key}={new} (not {old})" for key, new, old in differences(adopted, run)]:
        log.info(f"as in init_from={run.init_from}: {', '.join(taken)}")
    return adopted


def make_tokenizer(run: TrainRun, pairs: Dataset, folder: Path) -> Tokenizer:
    """The tokenizer of `init_from`, or a new one trained on the training text; written to `folder`."""
    if run.init_from is None:
        log.info(f"training a {run.tokenizer.type} tokenizer of {run.tokenizer.vocab_size:,} pieces")
        return train_tokenizer(column(pairs, "source"), column(pairs, "target"), run.tokenizer, folder)
    for path in find_checkpoint(run.init_from)[0].glob("tokenizer*.model"):
        shutil.copy(path, folder)
    return load_tokenizer(folder)


def tensorboard(folder: Path, step: int) -> Any:
    """A writer into the run, where the `tensorboard` extra is installed; events after `step` are dropped."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


@main("train")
def train(run: TrainRun) -> float:
    """Returns the best validation score."""
    log_to_stderr()
    check_alone()
    folder = Path(HydraConfig.get().runtime.output_dir)
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    device = choose_device(run.device)
    resuming = check_folder(folder, run)
    early = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)  # what is said before the run has a log
    log.addHandler(early)
    before = load_config(folder) if resuming else None
    precision = before.precision if before and run.precision == "auto" else choose_precision(run.precision, device)
    run = dataclasses.replace(run, precision=precision)
    if run.init_from:
        run = adopt(run, before or load_config(find_checkpoint(run.init_from)[0]))
    if before:
        check_same(run, before)

    for setting in run.model.idle:
        log.warning(f"{setting} means nothing to this model")
    pairs, valid = load_pairs(run.data, "train"), load_pairs(run.data, "valid")
    with TemporaryDirectory() as temporary:
        tokenizer = load_tokenizer(folder) if before else make_tokenizer(run, pairs, Path(temporary))
        encoded = encode_corpus(pairs, tokenizer, run)
        corpus = f"{encoded.key} {content_key(valid, tokenizer)}"
        torch.manual_seed(seed_of(run.seed))
        model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
        place(model, precision, device, training=True)
        optimiser = build_optimiser(run.optim, model.parameters())
        state = TrainState(run, folder, device, model, tokenizer, optimiser, encoded, valid, Progress(corpus))
        if run.init_from and not before:
            step = find_checkpoint(run.init_from)[1]
            verify(step)
            load_weights(model, step)
        held = lock(folder)
        if check_folder(folder, run) != resuming:
            raise UserError(f"another process has trained in {folder} meanwhile; repeat the command")
        if before:
            resume(state)
        else:
            clear(folder)
        save_config(folder, run)  # first of all: by it a folder is known to be a run
        for path in Path(temporary).glob("tokenizer*.model"):
            shutil.copy(path, folder)
    log.removeHandler(early)
    with held, log_to_file(folder / "train.log") as handler:
        early.setTarget(handler)
        early.flush()
        if before and (changed := [f"{key}={new} (was {old})" for key, new, old in differences(run, before)]):
            log.info(f"changed since this run began: {', '.join(changed)}")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        log.info(f"{folder}: {parameters:,} parameters, {device}, {precision}, {torch.get_num_threads()} threads")
        state.board = tensorboard(folder, state.progress.step)
        try:
            best = fit(state)
        finally:
            if state.board is not None:
                state.board.close()
        log.info(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / 1e9:.2f} GB")
        log.info(f"evaluate with: python -m nmt.evaluate checkpoint={folder}")
    return best


if __name__ == "__main__":
    train()
