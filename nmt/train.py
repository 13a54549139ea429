"""Train a model.

python -m nmt.train                                                            the built-in corpus
python -m nmt.train data=text data.path=DIR data.source=de data.target=en      your own text
python -m nmt.train --help
"""

import dataclasses
import logging
import resource
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig

from nmt.checkpoint import find_checkpoint, last_checkpoint, last_whole, load_weights, save_config, verified
from nmt.config import TrainRun, main
from nmt.data.batching import content_key, encode_corpus, gold_key
from nmt.data.corpus import column, load_pairs
from nmt.data.tokenizer import train_tokenizer
from nmt.distributed import check_alone, choose_device, choose_precision, log, log_to_file, log_to_stderr, place
from nmt.errors import UserError
from nmt.folder import check_folder, check_same, clear, differences, lock
from nmt.model.seq2seq import build_model
from nmt.optim import build_optimiser
from nmt.state import Progress, TrainState, resume, seed_of
from nmt.training import fit

KIB = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def adopt(run: TrainRun, parent: TrainRun) -> TrainRun:
    """The settings of a run that starts from another's weights: the tokenizer and the sizes are those of the parent."""
    tokenizer = dataclasses.replace(parent.tokenizer, sampling=run.tokenizer.sampling)
    model = dataclasses.replace(parent.model, dropout=run.model.dropout)
    adopted = dataclasses.replace(run, tokenizer=tokenizer, model=model)
    if taken := [f"{key}={new} (not {old})" for key, new, old in differences(adopted, run)]:
        log.info(f"as in init_from={run.init_from}: {', '.join(taken)}")
    return adopted


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
    resuming, last = check_folder(folder, run), last_checkpoint(folder)
    early = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)  # what is said before the run has a log
    log.addHandler(early)
    origin = (folder, last_whole(folder)) if resuming else find_checkpoint(run.init_from) if run.init_from else None
    settings, tokenizer = verified(*origin) if origin else (None, None)
    precision = choose_precision(run.precision, device)
    if settings and resuming and run.precision == "auto":
        precision = settings.precision
    run = dataclasses.replace(run, precision=precision)
    if settings and run.init_from:
        run = adopt(run, settings)
    if settings and resuming:
        check_same(run, settings)

    for setting in run.model.idle:
        log.warning(f"{setting} means nothing to this model")
    pairs, valid = load_pairs(run.data, "train"), load_pairs(run.data, "valid")
    if tokenizer is None:
        log.info(f"training a {run.tokenizer.type} tokenizer of {run.tokenizer.vocab_size:,} pieces")
        with TemporaryDirectory() as temporary:  # the run's folder is not ours yet
            texts = column(pairs, "source"), column(pairs, "target")
            tokenizer = train_tokenizer(*texts, run.tokenizer, Path(temporary), run.data.max_length)
    encoded = encode_corpus(pairs, tokenizer, run)
    corpus = f"{encoded.key} {content_key(valid, tokenizer)} {gold_key(pairs)} {gold_key(valid)}"
    torch.manual_seed(seed_of(run.seed))
    model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    place(model, precision, device, training=True)
    optimiser = build_optimiser(run.optim, model.parameters())
    state = TrainState(run, folder, device, model, tokenizer, optimiser, encoded, valid, Progress(corpus))
    if origin and not resuming:
        load_weights(model, origin[1])
    held = lock(folder)
    if (check_folder(folder, run), last_checkpoint(folder)) != (resuming, last):
        raise UserError(f"another process has trained in {folder} meanwhile; repeat the command")
    if origin and resuming:
        resume(state, origin[1])
    else:
        clear(folder)
    save_config(folder, run)  # first of all: by it a folder is known to be a run
    tokenizer.save(folder)
    log.removeHandler(early)
    with held, log_to_file(folder / "train.log") as handler:
        early.setTarget(handler)
        early.flush()
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
