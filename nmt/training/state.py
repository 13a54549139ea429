"""What a run works with and how far it has come: saved, and gone back to.

Randomness is stateless: torch's generator is reseeded at each micro-batch from (seed, step, micro-batch), and the order
of the data is a function of (seed, epoch), so a checkpoint stores positions, and resuming is exact.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from nmt.config import TrainRun
from nmt.data.batching import NO_SHAPES
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.stream import Window
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq
from nmt.runtime.distributed import broadcast, broadcast_from_rank0, rank
from nmt.runtime.files import read_small, write_atomically
from nmt.runtime.logging import log
from nmt.runtime.quoting import quote_setting
from nmt.training.checkpoint import (
    STATE,
    keep_only,
    last_checkpoint,
    load_optimizer,
    load_weights,
    save_checkpoint,
)
from nmt.training.optim import LossScale

INCOMPLETE = (-1, False)  # place of a line of metrics.jsonl that is not whole


class Validated(NamedTuple):
    """A checkpoint that was validated."""

    score: float  # of train.monitor
    loss: float
    step: int


@dataclass(slots=True)
class Progress:
    """How far training has come: all that a checkpoint stores beside tensors."""

    corpus: str  # key of the training and validation text, as tokenized
    step: int = 0  # updates made or skipped
    epoch: int = 0  # the present one, from 0
    window: int = 0  # of a stream, the present one, from 0
    stream_offsets: list[list[int]] = field(
        default_factory=list
    )  # of a stream, where the present window begins in each corpus
    position: int = 0  # batches of the present epoch, or of the present window, done
    best: list[Validated] = field(default_factory=list)  # the best checkpoints, best first
    validated_step: int = -1  # step of the last validation
    bad_validations: int = 0  # validations since the last better one
    decays: int = 0  # plateaus of the learning rate
    skipped: int = 0  # updates whose loss or gradient was not finite
    skipped_in_a_row: int = 0  # of these the last ones, with no other between
    loss_scale: float = 2.0**16  # fp16: what the loss is multiplied by
    loss_scale_steps: int = 0  # fp16: updates since it last changed


@dataclass(slots=True)
class TrainState:
    """What a run works with."""

    run: TrainRun
    folder: Path
    device: torch.device
    model: Seq2Seq
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    train: EncodedPairs
    valid: Dataset
    progress: Progress
    tensorboard: Any = None  # TensorBoard's writer, where its extra is installed
    stream: Iterator[Window] | None = None  # where `train` is one window of it
    graphs: Any = None  # step.GraphedBackward, on a GPU from the first update on
    max_positions: float = math.inf  # positions of both sides for which memory suffices at a time, as far as is known
    shapes_K3: Indices = field(default_factory=NO_SHAPES.copy)  # what batches are padded to on a GPU
    unsampled: EncodedPairs = field(init=False)  # `train` before subwords were drawn
    scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        self.unsampled = self.train
        self.scale_loss()

    def scale_loss(self) -> None:
        """Take the loss scale from `progress`."""
        half = self.model.dtype == torch.float16
        self.scale = LossScale(
            half, self.progress.loss_scale if half else 1.0, self.progress.loss_scale_steps, self.device
        )


def seed_of(*numbers: int) -> int:
    """One seed from several numbers, well mixed and the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


def save(state: TrainState) -> None:
    """Write a checkpoint, point `last` to it and `best` to the best one, and delete what need not be kept. The first
    process does it. From when `last` points to it, the checkpoint counts: what was not done by then, `resume` does.

    Raises:
        UserError: there is no room, for one; the last checkpoint is as it was.
    """
    if rank():
        return
    progress = state.progress
    if state.scale.adapts:
        progress.loss_scale, progress.loss_scale_steps = state.scale.factor.item(), int(state.scale.steady.item())
    stored = dataclasses.asdict(progress)
    try:
        save_checkpoint(state.folder, state.model, state.tokenizer, state.run, state.optimizer, stored)
    except UserError as error:
        last = last_checkpoint(state.folder)
        kept = f"; {last} is as it was, and resume=auto goes on from there" if last else ""
        raise UserError(f"{error}{kept}") from None
    keep_only(state.folder, [entry.step for entry in progress.best], progress.step)


def read_progress(path: Path) -> Progress:
    """The inverse of what `save` writes to state.json.

    Raises:
        UserError: it is something else.
    """
    try:
        found = Progress(**json.loads(read_small(path)))
        for item in dataclasses.fields(Progress):
            value = getattr(found, item.name)
            least = {"validated_step": -1, "loss_scale": 2.0**-40}.get(item.name, 0)
            if item.type in (int, float) and not (type(value) is item.type and least <= value < 2**53):
                raise TypeError(f"{item.name} is {repr(value)[:40]}")
        found.best = [Validated(*entry) for entry in found.best]
        for score, loss, step in found.best:
            numbers = type(score) is type(loss) is float and not (math.isnan(score) or math.isnan(loss))
            if not numbers or type(step) is not int or not 0 < step < 2**53:
                raise TypeError(f"best is {repr(found.best)[:40]}")
        for place in found.stream_offsets:
            if len(place) != 2 or not all(type(number) is int and 0 <= number < 2**53 for number in place):
                raise TypeError(f"places is {repr(found.stream_offsets)[:40]}")
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        remedy = f"name=ANOTHER {quote_setting('init_from', str(path.parent))} starts anew from its weights"
        raise UserError(f"{path} is damaged or from another version: {error}; {remedy}") from None
    return found


def resume(state: TrainState, folder: Path) -> None:
    """Go back to a checkpoint of the run: weights, optimizer, place in the data; metrics.jsonl is cut back to its step,
    and checkpoints are those of its state, whatever a process that died has not finished.

    Raises:
        UserError: the checkpoint is of another model, or the training text is another one.
    """
    load_weights(state.model, folder)
    load_optimizer(state.optimizer, folder)
    corpus = state.progress.corpus
    state.progress = read_progress(folder / STATE)
    if state.progress.corpus != corpus:
        raise UserError(
            f"the training or validation text (or its gold links) of data.path={state.run.data.path} is not that of "
            f"{state.folder}; give the same text, or start anew with name=ANOTHER "
            f"{quote_setting('init_from', str(state.folder))}"
        )
    state.scale_loss()
    step = state.progress.step
    path = state.folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    last = step, state.progress.validated_step == step  # a validation of this step that was not acted on is made again
    write_atomically(path, (line for line in lines if INCOMPLETE < event_position(line) <= last))
    if folder.name.startswith("."):  # another was to take its place
        folder = folder.rename(folder.with_name(f"step_{step:06d}"))
    write_atomically(state.folder / "checkpoints" / "last", [folder.name + "\n"])
    keep_only(state.folder, [entry.step for entry in state.progress.best], step)
    log.info(f"resuming {state.folder} at step {step}")


def broadcast_state(state: TrainState) -> None:
    """Give all processes of the job the weights, the optimizer's state and the progress of the first one."""
    slots = [value for slot in state.optimizer.state.values() for value in slot.values() if torch.is_tensor(value)]
    broadcast([*(parameter.detach() for parameter in state.model.parameters()), *slots])
    state.progress = broadcast_from_rank0(lambda: state.progress)
    state.scale_loss()


def event_position(line: str) -> tuple[int, bool]:
    """The step of a line of metrics.jsonl, and whether it is of the validation there, which comes after training."""
    try:
        event = json.loads(line)
        return (int(event["step"]), event["event"] == "validate") if line.endswith("}\n") else INCOMPLETE
    except (ValueError, TypeError, KeyError):
        return INCOMPLETE
