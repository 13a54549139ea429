"""One optimizer step: `train_step` -> `forward_backward` -> `backward` -> `compute_loss` -> `Seq2Seq.loss`.

`forward_backward` sums over micro-batches, which `halve_until_it_fits` makes smaller if memory is short. `backward`
runs one of them forward and backward, on a GPU as a CUDA graph.
"""

from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from nmt.data.batch import Batch, to_device
from nmt.data.batching import NO_SHAPES, choose_shapes, collate, count_positions, pick_shape
from nmt.data.encoding import EncodedPairs, Indices
from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import MAX_GRAPHS
from nmt.model.numerics import accumulation_dtype
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.model.reference import Loss
from nmt.system.distributed import all_reduce_sum, rank, world_size
from nmt.system.logging import log
from nmt.system.messages import pluralize
from nmt.training.backward import GraphedBackward, backward
from nmt.training.meter import LossSums, UpdateResult
from nmt.training.optim import compute_learning_rate, step_if_finite
from nmt.training.state import TrainState, derive_seed


# ------------------------------------------------------------------------------------------------------------- update
def train_step(state: TrainState, indices: Indices, total_steps: int) -> UpdateResult:
    """Update the weights with the gradient of the mean loss over all target tokens of the pairs `indices`.

    Each rank computes its share of the gradient, in smaller micro-batches if memory is too small.

    Raises:
        UserError: memory is too small for a single pair, or another process has ended.
    """
    optim, progress = state.run.optim, state.progress
    share = indices[rank() :: world_size()]
    target_tokens = int(state.data.pairs.lengths(indices)[1].sum())
    if state.device.type == "cuda" and not len(state.shapes_K3):
        state.shapes_K3 = choose_epoch_shapes(state)
    size = choose_micro_batch_size(state, share)

    def attempt(size: int) -> tuple[list[Any], LossSums]:
        return forward_backward(state, split_share(state, share, size), target_tokens, total_steps)

    (gradients, local_sums), fitting_size = halve_until_it_fits(attempt, size, make_out_of_memory_error(state, share))
    if fitting_size < size:
        remember_memory_limit(state, share, size, fitting_size)

    # Ranks communicate once per update, each with its whole gradient. DistributedDataParallel would communicate within
    # the backward pass, where a rank may have to split its share again, and where a CUDA graph cannot wait for others.
    # It would hide little of the communication: the weight gradients of a recurrence come last, all at once.
    reduced = all_reduce_sum([*gradients, *local_sums])
    for parameter, gradient in zip(state.model.parameters(), reduced[: len(gradients)], strict=True):
        parameter.grad = gradient
    sums = LossSums(*torch.stack(reduced[len(gradients) :]))  # copied, so as not to keep the gradient buffer alive

    rate = compute_learning_rate(optim, progress.step + 1, total_steps, progress.decays)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    failed = step_if_finite(state.optimizer, optim.clip, sums.smoothed)
    state.optimizer.zero_grad(set_to_none=True)
    progress.step += 1
    return UpdateResult(progress.step, sums, failed)


def forward_backward(
    state: TrainState, micro_batches: list[Indices], target_tokens: int, total_steps: int
) -> tuple[list[Any], LossSums]:
    """Sum the gradients and the losses of this rank's micro-batches.

    Gradients are divided by the `target_tokens` of the whole update.
    """
    run, model, step = state.run, state.model, state.progress.step
    if state.device.type == "cuda" and model.is_fast and state.graphed_backward is None:
        state.graphed_backward = GraphedBackward(run, model)
    compute = state.graphed_backward or partial(backward, run, model)

    batches = [build_batch(state, rows) for rows in micro_batches]
    lengths = (state.data.pairs.lengths(rows).sum(axis=1) for rows in micro_batches)
    source, target = sum(lengths, np.zeros(2, np.int64)).tolist()
    numbers_4 = torch.tensor(
        [target_tokens, (step + 1) / total_steps, source, target], dtype=accumulation_dtype(model.dtype)
    )
    update_2, counts_2 = to_device(numbers_4, state.device).split(2)

    model.train()
    sums: list[torch.Tensor] = []
    if not batches:  # there are more ranks than pairs in the update
        sums = [torch.zeros_like(counts_2[0]) for _ in Loss._fields]
    totals: list[Any] = [None for _ in model.parameters()]
    for number, batch in enumerate(batches):
        torch.manual_seed(derive_seed(run.seed, step, rank() + world_size() * number))
        loss, gradients = compute(batch.to(state.device), update_2)
        if number:
            sums = [total + new for total, new in zip(sums, loss, strict=True)]
            totals = [new if total is None else total.add_(new) for total, new in zip(totals, gradients, strict=True)]
        else:
            sums, totals = [*loss], gradients
            if len(batches) > 1:  # a CUDA graph overwrites its gradients at the next micro-batch
                totals = [None if new is None else new.clone() for new in gradients]
    if world_size() > 1:  # another rank may have a gradient where this one has none
        pairs = zip(totals, model.parameters(), strict=True)
        totals = [torch.zeros_like(parameter) if total is None else total for total, parameter in pairs]
    return totals, LossSums(*sums, *counts_2)


# ------------------------------------------------------------------------------------------------------ micro-batches
def build_batch(state: TrainState, rows: Indices) -> Batch:
    """Collate pairs into a batch, which on a GPU is padded to one of few shapes."""
    batch = collate(state.data.pairs, rows)
    if state.device.type == "cuda":
        return batch.pad_to(*pick_shape(measure_batch(state.data.pairs, rows), state.shapes_K3))
    return batch


def measure_batch(pairs: EncodedPairs, rows: Indices) -> tuple[int, int, int]:
    """Return the number of pairs, and the largest source and target lengths in pieces, `</s>` included."""
    source, target = pairs.lengths(rows).max(axis=1)
    return len(rows), int(source), int(target)


def positions_per_pair(pairs: EncodedPairs, share: Indices) -> float:
    """Return the positions of this rank's pairs of an update, padded as one batch, per pair."""
    return int(count_positions(np.array(measure_batch(pairs, share)))) / len(share)


def choose_micro_batch_size(state: TrainState, share: Indices) -> int:
    """Return the pairs per micro-batch: by `train.accumulate`, or fewer if memory was too small for that many."""
    if not len(share):  # there are more ranks than pairs in the update
        return 1
    fitting_size = state.max_positions / positions_per_pair(state.data.pairs, share)
    return max(1, int(min(ceil(len(share) / state.run.train.accumulate), fitting_size)))


def split_share(state: TrainState, share: Indices, size: int) -> list[Indices]:
    """Split this rank's pairs into micro-batches of at most `size` pairs: `train.accumulate` of them, or more."""
    if not len(share):
        return []
    parts = max(state.run.train.accumulate, ceil(len(share) / size))
    return np.array_split(share, min(parts, len(share)))


def choose_epoch_shapes(state: TrainState) -> Indices:
    """Choose a few shapes for this rank's micro-batches of an epoch, since a GPU captures a graph for each shape."""
    pairs = state.data.pairs
    micro_batches = []
    for rows in state.data.batches:
        share = rows[rank() :: world_size()]
        micro_batches += split_share(state, share, choose_micro_batch_size(state, share))
    if not micro_batches:  # there are more ranks than pairs in an update
        return NO_SHAPES
    sizes_N3 = np.array([measure_batch(pairs, rows) for rows in micro_batches])
    pieces = sum(int(pairs.lengths(rows).sum()) for rows in micro_batches)
    shapes_K3 = choose_shapes(sizes_N3, pieces, MAX_GRAPHS)
    padded = sum(int(count_positions(np.array(pick_shape(size_3, shapes_K3)))) for size_3 in sizes_N3.tolist())
    log.info(f"batches are padded to {pluralize(len(shapes_K3), 'shape')}: padding {1 - pieces / padded:.1%}")
    return shapes_K3


def describe_batch(state: TrainState, rows: Indices) -> str:
    _, source, target = measure_batch(state.data.pairs, rows) if len(rows) else (0, 0, 0)
    return f"of up to {source} source and {target} target pieces (update {state.progress.step + 1})"


def make_out_of_memory_error(state: TrainState, share: Indices) -> UserError:
    """Return the error to raise if memory is too small for a single pair."""
    run = state.run
    single_pass = ", or set train.r_drop=0 for one pass instead of two" if run.train.r_drop else ""
    return UserError(
        f"out of memory for a single pair {describe_batch(state, share)}; lower data.max_length={run.data.max_length} "
        f"or model.hidden={run.model.hidden}{single_pass}",
        any_rank=True,
    )


def remember_memory_limit(state: TrainState, share: Indices, size: int, fitting_size: int) -> None:
    """Make later updates start with micro-batches that fit, after `size` pairs did not and `fitting_size` did."""
    state.max_positions = fitting_size * positions_per_pair(state.data.pairs, share)
    state.shapes_K3 = NO_SHAPES  # other shapes are chosen for the smaller micro-batches
    count = len(split_share(state, share, fitting_size))
    log.warning(
        f"out of memory for {size} pairs {describe_batch(state, share)}: split into {count} micro-batches, and later "
        f"updates are limited to the same size; train.accumulate={count} would split every batch this way",
        extra={"any_rank": True},
    )
