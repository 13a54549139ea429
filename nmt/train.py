"""Train a model.

python -m nmt.train                                                            # on the built-in corpus
python -m nmt.train data=text data.path=DIR data.source=de data.target=en      # on your own text
torchrun --nproc-per-node=2 -m nmt.train ...                                   # with two processes
python -m nmt.train --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import dataclasses
import logging
from contextlib import ExitStack
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hydra.core.hydra_config import HydraConfig

from nmt.config import MONITOR_METRICS, SIDES, TrainRun
from nmt.data.corpus import iter_column, load_pairs
from nmt.data.encoding import EncodedPairs, content_key, encode_corpus, get_or_train_tokenizer, gold_key
from nmt.data.mixing import check_tags, load_mixture
from nmt.data.overlap import warn_of_overlap
from nmt.data.preprocessed_text import warn_if_training_text_is_preprocessed
from nmt.data.references import collect_references
from nmt.data.stream import build_empty_pairs, pairs_per_corpus, sample_stream, stream_windows
from nmt.data.tokenizer import Tokenizer
from nmt.data.words import segment_words
from nmt.errors import UserError
from nmt.evaluation.metrics import choose_bleu_tokenizer
from nmt.model.seq2seq import build_model
from nmt.system.cli import given_keys, main
from nmt.system.device import describe_unused_gpus, prepare_model
from nmt.system.distributed import (
    broadcast_from_rank0,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank,
    world_size,
)
from nmt.system.logging import log, log_to_file, log_to_stderr
from nmt.system.memory import peak_device_memory, peak_memory
from nmt.system.messages import pluralize
from nmt.system.quoting import quote_setting
from nmt.training.aligned_words import build_augmenter
from nmt.training.loop import fit, load_next_window
from nmt.training.optim import build_optimizer
from nmt.training.run_dir import find_starting_point, open_run_folder
from nmt.training.state import Progress, TrainState, broadcast_state, derive_seed


def read_corpus(run: TrainRun, tokenizer: Tokenizer | None) -> tuple[EncodedPairs, pa.Table, str]:
    """Return the encoded training pairs, the validation pairs, and a key of both.

    Without a `tokenizer`, one is trained. With `data.streaming` the training pairs are empty until the first window.

    Raises:
        UserError: the text is missing or invalid.
    """
    valid = load_pairs(run.data, "valid")
    if run.data.streaming:
        encoded = build_empty_pairs(run, tokenizer or get_or_train_tokenizer(sample_stream(run), run))
    else:
        pairs, shares = load_mixture(run.data)
        ends = [end for end, _ in shares] or [len(pairs)]
        warn_if_training_text_is_preprocessed(run.data, pairs, ends, valid, needs_word_tokens(run))
        if run.data.format != "toy":
            warn_of_overlap(run.data, pairs, valid)
        encoded = encode_corpus(pairs, tokenizer or get_or_train_tokenizer(pairs, run), run, shares)
        encoded = dataclasses.replace(encoded, augmenter=build_augmenter(run, pairs))
    check_tags(run.data, encoded.tokenizer)
    keys = encoded.key, content_key(valid, encoded.tokenizer), gold_key(encoded.pairs), gold_key(valid)
    return encoded, valid, " ".join(keys)


def needs_word_tokens(run: TrainRun) -> bool:
    """Whether the settings need text with words and punctuation separated by spaces."""
    return run.data.alignments is not None or run.tokenizer.type == "word"


def warn_of_unspaced_text(run: TrainRun, valid: pa.Table) -> None:
    """Warn if a word tokenizer would take sentences without spaces for single words."""
    if run.tokenizer.type != "word":
        return
    for side in SIDES:
        lines = list(iter_column(valid, side))
        if sum(len(segment_words(line)) for line in lines) > 3 * sum(len(line.split()) for line in lines):
            log.warning(
                f"tokenizer.type=word splits text at spaces, and the {side} text has few spaces: "
                "use tokenizer.type=bpe, unigram or char, or put spaces between the words of the text"
            )


def open_tensorboard(folder: Path, step: int) -> Any:
    """Return a TensorBoard writer that drops events after `step`, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def check_sweep_direction(monitor: str) -> None:
    """Check that a sweep searches for the best model by `train.monitor`, not for the worst.

    Raises:
        UserError: the direction of the sweeper contradicts train.monitor.
    """
    direction = HydraConfig.get().sweeper.get("direction")
    direction = getattr(direction, "name", direction)  # Optuna's default is an enum member
    expected = "maximize" if MONITOR_METRICS[monitor] else "minimize"
    if direction in ("minimize", "maximize") and direction != expected:
        raise UserError(
            f"hydra.sweeper.direction={direction} would select the worst {monitor}; set "
            f"hydra.sweeper.direction={expected}"
        )


@main("train")
def train(run: TrainRun) -> float:
    """Train a model, and return its best validation score."""
    check_sweep_direction(run.train.monitor)
    log_to_stderr()
    folder = Path(HydraConfig.get().runtime.output_dir)
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    early_log = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)  # buffers messages until train.log is open
    log.addHandler(early_log)
    with process_group(run.device) as device, ExitStack() as resources:
        # Settings: resume, start from another run, or start from scratch.
        start = broadcast_from_rank0(lambda: find_starting_point(run, folder, device, given_keys))
        run = start.run
        local_rank0_first(lambda: choose_bleu_tokenizer(run.bleu_tokenizer, []))  # fails early if a package is missing

        # Data.
        encoded, valid, key = local_rank0_first(lambda: read_corpus(run, start.tokenizer))
        check_same_on_all_ranks(
            lambda: key,
            "the processes of this job have different text, or trained different tokenizers on it; make sure that "
            f"data.path={run.data.path} has the same files on all machines",
        )
        bleu_tokenizer = broadcast_from_rank0(
            lambda: choose_bleu_tokenizer(run.bleu_tokenizer, collect_references(valid), is_logged=True)
        )
        run = dataclasses.replace(run, bleu_tokenizer=bleu_tokenizer)
        start = start._replace(run=run)
        warn_of_unspaced_text(run, valid)

        # Model and optimizer.
        torch.manual_seed(derive_seed(run.seed))
        model = build_model(run.model, encoded.tokenizer.source.vocab_size, encoded.tokenizer.target.vocab_size)
        prepare_model(model, run.precision, device, training=True)
        optimizer = build_optimizer(run.optim, model.parameters())
        state = TrainState(run, folder, device, model, encoded.tokenizer, optimizer, encoded, valid, Progress(key))

        # Run folder, and the checkpoint to start from.
        # The lock cannot be broadcast, so only rank 0 holds it.
        broadcast_from_rank0(lambda: bool(resources.enter_context(open_run_folder(state, start))))
        broadcast_state(state)
        if run.data.streaming:
            state.stream = stream_windows(run, encoded.tokenizer, state.progress.stream_offsets)
            load_next_window(state)
            ends = np.cumsum(pairs_per_corpus(run.data, run.data.buffer)).tolist()
            warn_if_training_text_is_preprocessed(
                run.data, state.train_pairs.pairs, ends, valid, needs_word_tokens(run)
            )
        log.removeHandler(early_log)
        if not rank():
            early_log.setTarget(resources.enter_context(log_to_file(folder / "train.log")))
            early_log.flush()
            state.tensorboard = open_tensorboard(folder, state.progress.step)

        # Training.
        parameters = sum(parameter.numel() for parameter in model.parameters())
        setup = f"{device}, {run.precision}, {pluralize(torch.get_num_threads(), 'thread')}"
        if world_size() > 1:
            setup += f", {world_size()} processes"
        log.info(f"{folder}: {parameters:,} parameters, {setup}")
        if advice := describe_unused_gpus(run.device):
            log.info(advice)
        try:
            best = fit(state)
        finally:
            if state.graphed_backward is not None:
                log.info(state.graphed_backward.callable.summarize("gradients"))
            if state.tensorboard is not None:
                state.tensorboard.close()
        device_memory = peak_device_memory(device)
        gpu = "" if device_memory is None else f", GPU memory {device_memory / 1e9:.2f} GB"
        log.info(f"peak memory {peak_memory() / 1e9:.2f} GB{gpu}")
        log.info(f"evaluate with: python -m nmt.evaluate {quote_setting('checkpoint', str(folder))}")
    return best


if __name__ == "__main__":
    train()
