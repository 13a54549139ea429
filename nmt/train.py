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

import pyarrow as pa
import torch
from hydra.core.hydra_config import HydraConfig

from nmt.config import TrainRun
from nmt.data.corpus import iter_column, load_pairs
from nmt.data.encoding import EncodedPairs, content_key, encode_corpus, get_or_train_tokenizer
from nmt.data.mixing import check_tags, load_mixture
from nmt.data.overlap import warn_of_overlap
from nmt.data.preprocessed_text import warn_if_preprocessed
from nmt.data.stream import build_empty_pairs, sample_stream
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.evaluation.metrics import choose_bleu_tokenizer
from nmt.model.seq2seq import build_model
from nmt.runs.folder import lock_run_folder
from nmt.system.cli import main
from nmt.system.device import prepare_model
from nmt.system.distributed import all_gather, broadcast_from_rank0, local_rank0_first, process_group, rank, world_size
from nmt.system.logging import log, log_to_file
from nmt.system.memory import peak_device_memory, peak_memory
from nmt.system.messages import pluralize
from nmt.system.quoting import quote_setting
from nmt.training.aligned_words import build_augmenter
from nmt.training.data import TrainingData
from nmt.training.loop import fit
from nmt.training.optim import build_optimizer
from nmt.training.start import StartingPoint, find_starting_point, start_run
from nmt.training.state import TrainState, broadcast_tensors, derive_seed


def read_corpus(run: TrainRun, tokenizer: Tokenizer | None) -> tuple[EncodedPairs, pa.Table, str]:
    """Return the encoded training pairs, the validation pairs, and a key of both.

    Without a `tokenizer`, one is trained. With `data.streaming` the training pairs are empty until the first window.

    Raises:
        UserError: the text is missing or invalid.
    """
    valid = load_pairs(run.data, "valid")
    warn_if_preprocessed(run.data, valid, "valid", may_be_tokenized(run))
    if run.data.streaming:
        encoded = build_empty_pairs(run, tokenizer or get_or_train_tokenizer(sample_stream(run), run))
    else:
        pairs, shares = load_mixture(run.data)
        warn_if_preprocessed(run.data, pairs, "train", may_be_tokenized(run))
        if run.data.format != "toy":
            warn_of_overlap(run.data, pairs, valid)
        encoded = encode_corpus(pairs, tokenizer or get_or_train_tokenizer(pairs, run), run, shares)
        encoded = dataclasses.replace(encoded, augmenter=build_augmenter(run, pairs))
    check_tags(run.data, encoded.tokenizer)
    return encoded, valid, f"{encoded.key} {content_key(valid, encoded.tokenizer)}"


def may_be_tokenized(run: TrainRun) -> bool:
    """Whether the settings need text with words and punctuation separated by spaces."""
    return run.data.alignments is not None or run.tokenizer.type == "word"


@main("train")
def train(run: TrainRun) -> float:
    """Train a model, and return its best validation score."""
    hydra = HydraConfig.get()
    given_keys = {override.lstrip("+~").partition("=")[0] for override in hydra.overrides.task}
    folder = Path(hydra.runtime.output_dir)
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    early_log = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)  # buffers messages until train.log is open
    log.addHandler(early_log)
    with process_group(run.device) as device, ExitStack() as resources:
        # Settings: resume, start from another run, or start from scratch. Only rank 0 locks the folder and decides.
        def choose_start() -> StartingPoint:
            resources.enter_context(lock_run_folder(folder))
            return find_starting_point(run, folder, device, given_keys)

        start = broadcast_from_rank0(choose_start)
        run = start.run
        local_rank0_first(lambda: choose_bleu_tokenizer(run.bleu_tokenizer, []))  # fails early if a package is missing

        encoded, valid, key = local_rank0_first(lambda: read_corpus(run, start.tokenizer))
        if len(set(all_gather(key))) > 1:
            raise UserError(
                "the processes of this job have different text, or trained different tokenizers on it; make sure that "
                f"data.path={run.data.path} has the same files on all machines"
            )
        bleu_tokenizer = broadcast_from_rank0(
            lambda: choose_bleu_tokenizer(run.bleu_tokenizer, list(iter_column(valid, "target")), is_logged=True)
        )
        run = dataclasses.replace(run, bleu_tokenizer=bleu_tokenizer)
        start = start._replace(run=run)
        tokenizer = encoded.tokenizer

        # Model and optimizer, and the checkpoint to start from.
        torch.manual_seed(derive_seed(run.seed))
        model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
        prepare_model(model, run.precision, device, training=True)
        optimizer = build_optimizer(run.optim, model.parameters())
        progress = broadcast_from_rank0(lambda: start_run(start, folder, model, tokenizer, optimizer, key))
        broadcast_tensors(model, optimizer)
        data = TrainingData(run, encoded, valid, progress)
        if run.data.streaming:
            warn_if_preprocessed(run.data, data.pairs.pairs, "train", may_be_tokenized(run))
        log.removeHandler(early_log)
        if not rank():
            early_log.setTarget(resources.enter_context(log_to_file(folder / "train.log")))
            early_log.flush()

        parameters = sum(parameter.numel() for parameter in model.parameters())
        setup = f"{device}, {run.precision}, {pluralize(torch.get_num_threads(), 'thread')}"
        if world_size() > 1:
            setup += f", {world_size()} processes"
        log.info(f"{folder}: {parameters:,} parameters, {setup}")
        best = fit(TrainState(run, folder, device, model, optimizer, data, progress))
        for name, size in (("memory", peak_memory()), ("GPU memory", peak_device_memory(device))):
            if size is not None:
                log.info(f"peak {name} {size / 1e9:.2f} GB")
        log.info(f"evaluate with: python -m nmt.evaluate {quote_setting('checkpoint', str(folder))}")
    return best


if __name__ == "__main__":
    train()
