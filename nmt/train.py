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
from hydra.core.hydra_config import HydraConfig

from nmt.checkpoint import find_checkpoint, last_checkpoint, load_config, load_weights, save_config
from nmt.config import TrainRun, main
from nmt.data.batching import encode_corpus
from nmt.data.corpus import column, load_pairs
from nmt.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from nmt.distributed import choose_device, choose_precision, log, log_to_file, log_to_stderr, place
from nmt.errors import UserError
from nmt.model.seq2seq import build_model
from nmt.optim import build_optimiser
from nmt.training import Progress, TrainState, fit, resume, seed_of

FOLDERS = ("checkpoints", "eval", "tensorboard")  # of a run
KIB = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def check_folder(folder: Path, run: TrainRun) -> bool:
    """Whether to resume. Refuses a folder that holds a checkpoint unless told what to do with it.

    Raises:
        UserError: what to write instead.
    """
    ours = (folder / "config.yaml").is_file()
    foreign = [name for name in (*FOLDERS, "model.safetensors") if (folder / name).exists()]
    if foreign and not ours:
        raise UserError(f"{folder} holds {', '.join(foreign)} but is no run of nmt; name=ANOTHER starts elsewhere")
    trained = last_checkpoint(folder) is not None
    if trained and run.resume == "false" and not run.overwrite:
        raise UserError(
            f"{folder} holds a trained model already: resume=true continues it, overwrite=true throws it away, "
            "name=ANOTHER starts beside it"
        )
    if run.resume == "true" and not trained:
        raise UserError(f"resume=true, but {folder} holds no checkpoint; resume=auto starts where there is none")
    return trained and run.resume != "false"


def check_same(run: TrainRun, before: TrainRun) -> None:
    """What a run was begun with cannot change while it is resumed: its data, tokenizer, model and seed.

    Raises:
        UserError: naming each key that differs.
    """
    kept = ("data", "tokenizer", "model", "seed", "precision")  # sections and keys
    counted = ("train.batch_tokens", "train.batch_sentences", "train.monitor")  # a place in the data, a ranking
    free = ("data.cache", "data.split", "data.path")  # the same text may have moved
    new, old = (dict(flat(dataclasses.asdict(config))) for config in (run, before))
    changed = [
        f"{key}={new[key]} (was {old[key]})"
        for key in new
        if (key.split(".")[0] in kept or key in counted) and key not in free and new[key] != old[key]
    ]
    if changed:
        raise UserError(f"a resumed run keeps its settings, but these differ: {', '.join(changed)}; "
                        "give the old values, or start anew with name=ANOTHER or overwrite=true")  # fmt: skip


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """A nested dict as (dotted key, value) pairs."""
    pairs = []
    for key, value in tree.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs


def make_tokenizer(run: TrainRun, pairs: Any, folder: Path) -> Tokenizer:
    """The tokenizer of `init_from`, or a new one trained on the training text; written to `folder`."""
    if run.init_from is None:
        log.info(f"training a {run.tokenizer.type} tokenizer of {run.tokenizer.vocab_size:,} pieces")
        return train_tokenizer(column(pairs, "source"), column(pairs, "target"), run.tokenizer, folder)
    parent, _ = find_checkpoint(run.init_from)
    for path in parent.glob("tokenizer*.model"):
        shutil.copy(path, folder)
    return load_tokenizer(folder)


def clear(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else."""
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in [*folder.glob("tokenizer*.model"), folder / "metrics.jsonl", folder / "train.log"]:
        path.unlink(missing_ok=True)


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
    folder = Path(HydraConfig.get().runtime.output_dir)
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    device = choose_device(run.device)
    resuming = check_folder(folder, run)
    early = MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL
    )  # what is said before there is a run to say it in
    log.addHandler(early)
    before = load_config(folder) if resuming else None
    precision = before.precision if before and run.precision == "auto" else choose_precision(run.precision, device)
    run = dataclasses.replace(run, precision=precision)
    if run.init_from:
        parent = load_config(find_checkpoint(run.init_from)[0]).tokenizer
        run.tokenizer = dataclasses.replace(parent, sampling=run.tokenizer.sampling)
    if before:
        check_same(run, before)

    pairs, valid = load_pairs(run.data, "train"), load_pairs(run.data, "valid")
    with TemporaryDirectory() as temporary:
        tokenizer = load_tokenizer(folder) if before else make_tokenizer(run, pairs, Path(temporary))
        encoded = encode_corpus(pairs, tokenizer, run)
        torch.manual_seed(seed_of(run.seed))
        model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
        if run.init_from and not before:
            load_weights(model, find_checkpoint(run.init_from)[1])
        if not before:
            clear(folder)
            for path in Path(temporary).glob("tokenizer*.model"):
                shutil.copy(path, folder)
    place(model, precision, device)
    save_config(folder, run)
    log.removeHandler(early)
    handler = log_to_file(folder / "train.log")
    early.setTarget(handler)
    early.flush()
    optimiser = build_optimiser(run.optim, model.parameters())
    state = TrainState(run, folder, device, model, tokenizer, optimiser, encoded, valid, Progress())
    if before:
        resume(state)
    state.board = tensorboard(folder, state.progress.step)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"{folder}: {parameters:,} parameters, {device}, {precision}, {torch.get_num_threads()} threads")
    try:
        best = fit(state)
    finally:
        if state.board is not None:
            state.board.close()
    log.info(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / 1e9:.2f} GB")
    log.info(f"evaluate with: python -m nmt.evaluate checkpoint={folder}")
    log.removeHandler(handler)
    return best


if __name__ == "__main__":
    train()
