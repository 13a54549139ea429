"""The state of a run, and how it is saved and restored.

Randomness is stateless: torch's generator is reseeded at each micro-batch from (seed, step, micro-batch), and the order
of the data is a function of (seed, epoch). So a checkpoint only stores positions, and resuming is exact.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from nmt.config import TrainRun
from nmt.data.batching import NO_SHAPES
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.stream import Window
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import (
    STATE_FILE,
    find_last_checkpoint,
    load_optimizer,
    load_weights,
    prune_checkpoints,
    save_checkpoint,
)
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE, parse_event
from nmt.system.distributed import broadcast, broadcast_from_rank0, rank
from nmt.system.files import read_small, write_atomically
from nmt.system.logging import log
from nmt.system.quoting import quote_setting
from nmt.training.optim import LossScale


class ValidatedCheckpoint(NamedTuple):
    """The validation scores of a checkpoint."""

    score: float  # of train.monitor
    loss: float  # nats per target token
    step: int


@dataclass(slots=True)
class Progress:
    """The progress of training: all that a checkpoint stores besides tensors."""

    corpus: str  # key of the tokenized training and validation text
    step: int = 0  # updates made or skipped
    epoch: int = 0  # current epoch, from 0
    window: int = 0  # streaming: current window, from 0
    stream_offsets: list[list[int]] = field(default_factory=list)  # streaming: start of the window in each corpus
    position: int = 0  # batches done in the current epoch or window
    best: list[ValidatedCheckpoint] = field(default_factory=list)  # best checkpoints, best first
    validated_step: int = -1  # step of the last validation
    bad_validations: int = 0  # validations since the last improvement
    decays: int = 0  # plateaus of the learning rate
    skipped: int = 0  # updates skipped because loss or gradient was not finite
    skipped_in_a_row: int = 0  # skipped updates since the last one that was not
    loss_scale: float = 2.0**16  # fp16: factor on the loss
    loss_scale_steps: int = 0  # fp16: updates since the loss scale last changed


@dataclass(slots=True)
class TrainState:
    """Everything that a training run works with."""

    run: TrainRun
    folder: Path
    device: torch.device
    model: Seq2Seq
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    train_pairs: EncodedPairs
    valid: pa.Table
    progress: Progress
    tensorboard: Any = None  # SummaryWriter, if TensorBoard is installed
    stream: Iterator[Window] | None = None  # streaming: the windows to come; `train_pairs` are of the current one
    graphed_backward: Any = None  # step.GraphedBackward, on a GPU from the first update on
    max_positions: float = math.inf  # source and target positions of the largest micro-batch known to fit in memory
    shapes_K3: Indices = field(default_factory=NO_SHAPES.copy)  # shapes that batches are padded to on a GPU
    original_pairs: EncodedPairs = field(init=False)  # `train_pairs` before augmentation and subword sampling
    loss_scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        self.original_pairs = self.train_pairs
        self.restore_loss_scale()

    def restore_loss_scale(self) -> None:
        """Set the loss scale from `progress`."""
        is_half = self.model.dtype == torch.float16
        factor = self.progress.loss_scale if is_half else 1.0
        self.loss_scale = LossScale(is_half, factor, self.progress.loss_scale_steps, self.device)


def derive_seed(*numbers: int) -> int:
    """Hash several numbers into one seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


def save_state(state: TrainState) -> None:
    """Write a checkpoint, update the pointers `last` and `best`, and delete checkpoints that are no longer needed.

    Only rank 0 writes. The checkpoint counts once `last` points to it; if the process dies after that, `resume_from`
    does the rest.
    """
    if rank():
        return
    progress = state.progress
    if state.loss_scale.is_adaptive:
        progress.loss_scale = state.loss_scale.factor.item()
        progress.loss_scale_steps = int(state.loss_scale.steady_steps.item())
    stored = dataclasses.asdict(progress)
    try:
        save_checkpoint(state.folder, state.model, state.tokenizer, state.run, state.optimizer, stored)
    except UserError as error:
        last = find_last_checkpoint(state.folder)
        remedy = f"; {last} is unchanged, and resume=auto continues from it" if last else ""
        raise UserError(f"{error}{remedy}") from None
    prune_checkpoints(state.folder, [entry.step for entry in progress.best], progress.step)


def read_progress(path: Path) -> Progress:
    """Read state.json as written by `save_state`.

    Raises:
        UserError: it is damaged or from another version.
    """
    try:
        progress = Progress(**json.loads(read_small(path)))
        for item in dataclasses.fields(Progress):
            value = getattr(progress, item.name)
            minimum = {"validated_step": -1, "loss_scale": 2.0**-40}.get(item.name, 0)
            if item.type in (int, float) and not (type(value) is item.type and minimum <= value < 2**53):
                raise TypeError(f"{item.name} is {repr(value)[:40]}")
        progress.best = [ValidatedCheckpoint(*entry) for entry in progress.best]
        for score, loss, step in progress.best:
            are_numbers = type(score) is type(loss) is float and not (math.isnan(score) or math.isnan(loss))
            if not are_numbers or type(step) is not int or not 0 < step < 2**53:
                raise TypeError(f"best is {repr(progress.best)[:40]}")
        for offset in progress.stream_offsets:
            if len(offset) != 2 or not all(type(number) is int and 0 <= number < 2**53 for number in offset):
                raise TypeError(f"stream_offsets is {repr(progress.stream_offsets)[:40]}")
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        remedy = f"name=ANOTHER {quote_setting('init_from', str(path.parent))} starts a new run from its weights"
        raise UserError(f"{path} is damaged or from another version: {error}; {remedy}") from None
    return progress


def resume_from(state: TrainState, folder: Path) -> None:
    """Restore weights, optimizer and progress from a checkpoint of the run.

    Truncates the files of events to the checkpoint's step, and cleans up what a process that died left incomplete
    among the checkpoints.

    Raises:
        UserError: the checkpoint does not fit the model, or the training text is a different one.
    """
    load_weights(state.model, folder)
    load_optimizer(state.optimizer, folder)
    corpus = state.progress.corpus
    state.progress = read_progress(folder / STATE_FILE)
    if state.progress.corpus != corpus:
        raise UserError(
            f"the training or validation text (or its gold links) in data.path={state.run.data.path} differs from what "
            f"{state.folder} was trained on; give the same text, or start a new run with name=ANOTHER "
            f"{quote_setting('init_from', str(state.folder))}"
        )
    state.restore_loss_scale()
    step = state.progress.step
    # A validation at this step whose outcome was not saved is repeated, so its event is dropped.
    last = step, state.progress.validated_step == step
    for name in (METRICS_FILE, SAMPLES_FILE):
        path = state.folder / name
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
        write_atomically(path, (line for line in lines if (event := parse_event(line)) and event.position <= last))
    if folder.name.startswith("."):  # the process died while it was replacing this checkpoint
        folder = folder.rename(folder.with_name(f"step_{step:06d}"))
    write_atomically(state.folder / "checkpoints" / "last", [folder.name + "\n"])
    prune_checkpoints(state.folder, [entry.step for entry in state.progress.best], step)
    log.info(f"resuming {state.folder} at step {step}")


def broadcast_state(state: TrainState) -> None:
    """Broadcast weights, optimizer state and progress from rank 0 to all ranks."""
    slots = [value for slot in state.optimizer.state.values() for value in slot.values() if torch.is_tensor(value)]
    broadcast([*(parameter.detach() for parameter in state.model.parameters()), *slots])
    state.progress = broadcast_from_rank0(lambda: state.progress)
    state.restore_loss_scale()
