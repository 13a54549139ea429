"""Train a model.

python -m nmt.train                                                            the built-in corpus
python -m nmt.train data=text data.path=DIR data.source=de data.target=en      your own text
torchrun --nproc-per-node=2 -m nmt.train ...                                   the same with two processes
python -m nmt.train --help
"""

import dataclasses
import logging
from contextlib import ExitStack
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from hydra.core.hydra_config import HydraConfig

from nmt.config import MONITORS, TrainRun
from nmt.data.corpus import column, load_pairs
from nmt.data.encoding import EncodedPairs, cached_tokenizer, content_key, encode_corpus, gold_key
from nmt.data.mixing import check_tags, load_mixture
from nmt.data.processed import warn_of_training_text
from nmt.data.stream import empty_corpus, pairs_per_corpus, sample_stream, stream_windows
from nmt.data.tokenizer import Tokenizer
from nmt.data.words import words_in
from nmt.errors import UserError
from nmt.evaluation.metrics import choose_tokenizer, resolve_tokenizer
from nmt.model.seq2seq import build_model
from nmt.runtime.cli import given_keys, main
from nmt.runtime.device import move_model
from nmt.runtime.distributed import (
    broadcast_from_rank0,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank,
    world_size,
)
from nmt.runtime.lines import count_of
from nmt.runtime.logging import log, log_to_file, log_to_stderr
from nmt.runtime.memory import peak_device_memory, peak_memory
from nmt.runtime.quoting import quote_setting
from nmt.training.loop import fit, load_window
from nmt.training.optim import build_optimizer
from nmt.training.run_dir import find_start, open_folder
from nmt.training.state import Progress, TrainState, broadcast_state, seed_of


def read_corpus(run: TrainRun, tokenizer: Tokenizer | None) -> tuple[EncodedPairs, Dataset, str]:
    """The training pairs, as tokenized, by a new tokenizer if there is none yet (none as yet of a stream); the
    validation pairs; a key of both.

    Raises:
        UserError: something is wrong with the text.
    """
    valid = load_pairs(run.data, "valid")
    if run.data.streaming:
        encoded = empty_corpus(run, tokenizer or cached_tokenizer(sample_stream(run), run))
    else:
        pairs, shares = load_mixture(run.data)
        warn_of_training_text(run.data, pairs, [end for end, _ in shares] or [len(pairs)], valid, by_words(run))
        encoded = encode_corpus(pairs, tokenizer or cached_tokenizer(pairs, run), run, shares)
    check_tags(run.data, encoded.tokenizer)
    keys = encoded.key, content_key(valid, encoded.tokenizer), gold_key(encoded.pairs), gold_key(valid)
    return encoded, valid, " ".join(keys)


def by_words(run: TrainRun) -> bool:
    """Whether the run asks for text with words and marks set apart."""
    return run.data.alignments is not None or run.tokenizer.type == "word"


def warn_of_sentences(run: TrainRun, valid: Dataset) -> None:
    """Say where a tokenizer of words would take a whole sentence, which has no spaces, for a word."""
    for side in ("source", "target") if run.tokenizer.type == "word" else ():
        lines = list(column(valid, side))
        if sum(len(words_in(line)) for line in lines) > 3 * sum(len(line.split()) for line in lines):
            log.warning(
                f"tokenizer.type=word takes what stands between spaces for a word, and the {side} text has few spaces: "
                "write tokenizer.type=bpe, unigram or char, or spaces between the words of the text"
            )


def tensorboard(folder: Path, step: int) -> Any:
    """A writer into the run, where the `tensorboard` extra is installed; events after `step` are dropped."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def check_direction(monitor: str) -> None:
    """Refuse a search for the worst model.

    Raises:
        UserError: the sweeper's direction is not that of train.monitor.
    """
    direction = HydraConfig.get().sweeper.get("direction")
    given = getattr(direction, "name", direction)  # Optuna's default is a member of an enumeration
    wanted = "maximize" if MONITORS[monitor] else "minimize"
    if given in ("minimize", "maximize") and given != wanted:
        raise UserError(f"hydra.sweeper.direction={given} looks for the worst {monitor}; write {wanted}")


@main("train")
def train(run: TrainRun) -> float:
    """Returns the best validation score."""
    check_direction(run.train.monitor)
    log_to_stderr()
    folder = Path(HydraConfig.get().runtime.output_dir)
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    early = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)  # what is said before the run has a log
    log.addHandler(early)
    with process_group(run.device) as device, ExitStack() as held:
        start = broadcast_from_rank0(lambda: find_start(run, folder, device, given_keys))
        run = start.run
        local_rank0_first(
            lambda: choose_tokenizer(run.bleu_tokenizer, [])
        )  # refused before the text is read, if it must be
        for idle in run.model.idle:
            log.warning(f"{idle} means nothing to this model")
        encoded, valid, key = local_rank0_first(lambda: read_corpus(run, start.tokenizer))
        check_same_on_all_ranks(
            lambda: key,
            "the processes of this job have different text, or made different tokenizers of it; see that "
            f"data.path={run.data.path} has the same files on all machines",
        )
        bleu_tokenizer = broadcast_from_rank0(
            lambda: resolve_tokenizer(run.bleu_tokenizer, list(column(valid, "target")))
        )
        run = dataclasses.replace(run, bleu_tokenizer=bleu_tokenizer)
        start = start._replace(run=run)
        warn_of_sentences(run, valid)
        torch.manual_seed(seed_of(run.seed))
        model = build_model(run.model, encoded.tokenizer.source.vocab_size, encoded.tokenizer.target.vocab_size)
        move_model(model, run.precision, device, training=True)
        optimizer = build_optimizer(run.optim, model.parameters())
        state = TrainState(run, folder, device, model, encoded.tokenizer, optimizer, encoded, valid, Progress(key))
        broadcast_from_rank0(
            lambda: bool(held.enter_context(open_folder(state, start)))
        )  # nobody else can be told of a lock
        broadcast_state(state)
        if run.data.streaming:
            state.stream = stream_windows(run, encoded.tokenizer, state.progress.stream_offsets)
            load_window(state)
            ends = np.cumsum(pairs_per_corpus(run.data, run.data.buffer)).tolist()
            warn_of_training_text(run.data, state.train.pairs, ends, valid, by_words(run))
        log.removeHandler(early)
        if not rank():
            early.setTarget(held.enter_context(log_to_file(folder / "train.log")))
            early.flush()
            state.tensorboard = tensorboard(folder, state.progress.step)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        how = f"{device}, {run.precision}, {count_of(torch.get_num_threads(), 'thread')}"
        log.info(f"{folder}: {parameters:,} parameters, {how}" + f", {world_size()} processes" * (world_size() > 1))
        try:
            best = fit(state)
        finally:
            if state.graphs is not None:
                log.info(state.graphs.graphs.summary("gradients"))
            if state.tensorboard is not None:
                state.tensorboard.close()
        on_gpu = peak_device_memory(device)
        gpu = "" if on_gpu is None else f", of the GPU {on_gpu / 1e9:.2f} GB"
        log.info(f"peak memory {peak_memory() / 1e9:.2f} GB{gpu}")
        log.info(f"evaluate with: python -m nmt.evaluate {quote_setting('checkpoint', str(folder))}")
    return best


if __name__ == "__main__":
    train()
