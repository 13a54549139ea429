"""Everything that a training run works with, and how it is saved and restored."""

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from nmt.config import TrainRun
from nmt.data.batching import NO_SHAPES
from nmt.data.encoding import Indices
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import STATE_FILE, load_optimizer, load_weights, save_checkpoint
from nmt.runs.folder import find_last_checkpoint, prune_checkpoints
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE, truncate_events
from nmt.system.distributed import rank, run_collective, world_size
from nmt.system.logging import log
from nmt.system.quoting import quote_setting
from nmt.training.backward import GraphedBackward
from nmt.training.data import TrainingData
from nmt.training.progress import Progress, read_progress


@dataclass(slots=True)
class TrainState:
    """Everything that a training run works with."""

    run: TrainRun
    folder: Path
    device: torch.device
    model: Seq2Seq
    optimizer: torch.optim.Optimizer
    data: TrainingData
    progress: Progress
    # What the updates so far have shown about the memory of the device, and CUDA graphs; in no checkpoint.
    max_positions: float = math.inf  # source and target positions of the largest micro-batch known to fit in memory
    shapes_K3: Indices = field(default_factory=NO_SHAPES.copy)  # shapes that batches are padded to on a GPU
    graphed_backward: GraphedBackward | None = None  # on a GPU from the first update on


def derive_seed(*numbers: int) -> int:
    """Hash several numbers into one seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


def save_state(state: TrainState) -> None:
    """Write a checkpoint, update the pointer `best`, and delete checkpoints that are no longer needed.

    Only rank 0 writes. If the process dies after the checkpoint is in place, `resume` does the rest.

    Raises:
        UserError: the checkpoint cannot be written; the last one is unchanged.
    """
    if rank():
        return
    progress = state.progress
    try:
        save_checkpoint(
            state.folder, state.model, state.data.corpus.tokenizer, state.run, state.optimizer, asdict(progress)
        )
    except UserError as error:
        last = find_last_checkpoint(state.folder)
        remedy = f"; {last} is unchanged, and resume=auto continues from it" if last else ""
        raise UserError(f"{error}{remedy}") from None
    prune_checkpoints(state.folder, [entry.step for entry in progress.best], progress.step)


def resume(
    run: TrainRun, folder: Path, checkpoint: Path, model: Seq2Seq, optimizer: torch.optim.Optimizer, corpus: str
) -> Progress:
    """Restore weights and optimizer from a checkpoint of the run, and return its progress.

    Truncates the files of events to the checkpoint's step, and cleans up what a process that died left incomplete
    among the checkpoints.

    Raises:
        UserError: the checkpoint does not fit the model, or the text, whose key is `corpus`, is a different one.
    """
    load_weights(model, checkpoint)
    load_optimizer(optimizer, checkpoint)
    progress = read_progress(checkpoint / STATE_FILE)
    if progress.corpus != corpus:
        raise UserError(
            f"the training or validation text (or its gold links) in data.path={run.data.path} differs from what "
            f"{folder} was trained on; give the same text, or start a new run with name=ANOTHER "
            f"{quote_setting('init_from', str(folder))}"
        )
    for name in (METRICS_FILE, SAMPLES_FILE):
        # A validation at this step whose outcome was not saved is repeated, so its event is dropped.
        truncate_events(folder / name, progress.step, progress.validated_step == progress.step)
    prune_checkpoints(folder, [entry.step for entry in progress.best], progress.step)
    log.info(f"resuming {folder} at step {progress.step}")
    return progress


def broadcast_tensors(model: Seq2Seq, optimizer: torch.optim.Optimizer) -> None:
    """Broadcast weights and optimizer state from rank 0 to all ranks."""
    if world_size() == 1:
        return
    slots = [value for slot in optimizer.state.values() for value in slot.values() if torch.is_tensor(value)]
    for tensor in (*(parameter.detach() for parameter in model.parameters()), *slots):
        run_collective(dist.broadcast, tensor, 0)
