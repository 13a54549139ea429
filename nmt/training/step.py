"""One update of the weights: the gradient of a batch, as a whole or in parts, and a step with it."""

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.data.batching import (
    NO_SHAPES,
    Batch,
    Batches,
    assemble,
    choose_shapes,
    micro_batches,
    positions,
    sent,
    shape_for,
)
from nmt.data.encoding import Indices
from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import GRAPHS, within_memory
from nmt.model.kernels.linear import wide
from nmt.model.loss import Loss
from nmt.runtime.distributed import rank, ranks, summed
from nmt.runtime.lines import counted
from nmt.runtime.logging import log
from nmt.training.optim import guarded_step, learning_rate
from nmt.training.state import TrainState, seed_of


class Sums(NamedTuple):
    """What was met on the way to a gradient: sums over tokens, 0-dimensional."""

    smoothed: torch.Tensor  # over target tokens, as are the next two: what training minimises, attention apart
    nats: torch.Tensor  # negative log-likelihood
    correct: torch.Tensor
    source: torch.Tensor  # tokens
    target: torch.Tensor


class Outcome(NamedTuple):
    """What came of an update."""

    step: int  # its number, from 1
    indices: Indices  # its pairs
    sums: Sums  # of all processes
    failed: torch.Tensor  # whether loss or gradient was not finite, so that the weights are as before; 0-dimensional


def train_step(state: TrainState, indices: Indices, last_step: int) -> Outcome:
    """One update by the gradient of the mean loss over all target tokens. Each process of the job makes its share of
    it; where memory does not suffice for that, it is divided further.

    Raises:
        UserError: memory does not suffice for a single pair; or another process has ended.
    """
    optim, progress = state.run.optim, state.progress
    share, tokens = indices[rank() :: ranks()], int(state.train.lengths(indices)[1].sum())
    parts = parts_of(state, share)
    while (found := within_memory(partial(find_gradient, state, parts, tokens, last_step))) is None:
        parts = divided(state, share, parts)
    # The processes meet once an update, each with its whole gradient; DistributedDataParallel would have them meet
    # within the backward pass, where one may have to divide its share anew, and where a GPU replays what waits for
    # nobody. It would hide little of the sending: a recurrence's weight gradients are made last, all at once.
    gradients, own = found
    pooled = summed([*gradients, *own])
    for parameter, gradient in zip(state.model.parameters(), pooled[: len(gradients)], strict=True):
        parameter.grad = gradient
    sums = Sums(*torch.stack(pooled[len(gradients) :]))  # copies, which keep no buffer of all gradients alive
    rate = learning_rate(optim, progress.step + 1, last_step, progress.decays)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    failed = guarded_step(state.optimiser, optim.clip, state.scale.factor, sums.smoothed)
    state.optimiser.zero_grad(set_to_none=True)
    state.scale.adapt(failed)
    progress.step += 1
    return Outcome(progress.step, indices, sums, failed)


def find_gradient(
    state: TrainState, parts: list[Indices], tokens: int, last_step: int
) -> tuple[list[torch.Tensor], Sums]:
    """What the micro-batches of this process add to the gradient of each parameter, times the loss scale and divided by
    the `tokens` of the update; and to the sums."""
    run, model, step = state.run, state.model, state.progress.step
    batches = [batch_of(state, part) for part in parts]
    source, target = sum((state.train.lengths(part).sum(axis=1) for part in parts), np.zeros(2, np.int64)).tolist()
    numbers_4 = torch.tensor([tokens, (step + 1) / last_step, source, target], dtype=wide(model.dtype))
    update_2, counts_2 = sent(numbers_4, state.device).split(2)
    model.train()
    sums = [torch.zeros_like(counts_2[0]) for _ in Loss._fields] if not batches else []
    totals: list[Any] = [None for _ in model.parameters()]
    for number, batch in enumerate(batches):
        torch.manual_seed(seed_of(run.seed, step, rank() + ranks() * number))
        try:
            loss, found = state.differentiate(batch.to(state.device), update_2, state.scale.factor)
        except (RuntimeError, MemoryError):
            model.zero_grad(set_to_none=True)  # half of a backward pass may be there
            raise
        if number:
            sums = [total + new for total, new in zip(sums, loss, strict=True)]
            totals = [new if total is None else total.add_(new) for total, new in zip(totals, found, strict=True)]
        else:
            sums, totals = [*loss], found
            if len(batches) > 1:  # the next may overwrite what this one has found
                totals = [None if new is None else new.clone() for new in found]
    if ranks() > 1:  # another process may have a gradient where this one has none
        pairs = zip(totals, model.parameters(), strict=True)
        totals = [torch.zeros_like(parameter) if total is None else total for total, parameter in pairs]
    return totals, Sums(*sums, *counts_2)


def batch_of(state: TrainState, pairs: Indices) -> Batch:
    """The batch of some pairs, on a GPU padded to one of few shapes."""
    batch = assemble(state.train, pairs)
    return batch.padded(*shape_for(size_of(state, pairs), state.shapes_K3)) if state.device.type == "cuda" else batch


def size_of(state: TrainState, pairs: Indices) -> tuple[int, int, int]:
    """Of a batch: its pairs, and the source and target pieces of the longest, `</s>` included."""
    source, target = state.train.lengths(pairs).max(axis=1)
    return len(pairs), int(source), int(target)


def shapes_of(state: TrainState, batches: Batches) -> Indices:
    """Few shapes for the micro-batches of this process in an epoch: a GPU captures a graph for each."""
    parts = [part for pairs in batches for part in parts_of(state, pairs[rank() :: ranks()])]
    if not parts:  # there are more processes than pairs in an update
        return NO_SHAPES
    sizes_N3 = np.array([size_of(state, part) for part in parts])
    pieces = sum(int(state.train.lengths(part).sum()) for part in parts)
    shapes_K3 = choose_shapes(sizes_N3, pieces, GRAPHS)
    padded = sum(int(positions(np.array(shape_for(size_3, shapes_K3)))) for size_3 in sizes_N3.tolist())
    log.info(f"batches are padded to {counted(len(shapes_K3), 'shape')}: padding {1 - pieces / padded:.1%}")
    return shapes_K3


def parts_of(state: TrainState, indices: Indices) -> list[Indices]:
    """The micro-batches of a process: `train.accumulate`, or more where memory was short for as many positions."""
    if not len(indices):  # there are more processes than pairs
        return []
    whole = positions(np.array(size_of(state, indices)))
    return micro_batches(indices, max(state.run.train.accumulate, ceil(whole / state.room)))


def divided(state: TrainState, indices: Indices, parts: list[Indices]) -> list[Indices]:
    """Smaller micro-batches of the same pairs, after memory did not suffice; later updates begin with as small ones.

    Raises:
        UserError: each was a single pair.
    """
    largest = max(parts, key=len)
    _, source, target = size_of(state, indices)
    shape = f"of up to {source} source and {target} target pieces (update {state.progress.step + 1})"
    if len(largest) == 1:
        once = ", or write train.r_drop=0, for one pass in place of two" if state.run.train.r_drop else ""
        raise UserError(
            f"out of memory for a single pair {shape}; lower data.max_length={state.run.data.max_length} or "
            f"model.hidden={state.run.model.hidden}{once}",
            own=True,
        )
    state.room = int(positions(np.array(size_of(state, largest)))) / 2
    state.shapes_K3 = NO_SHAPES  # those of smaller parts are chosen for the next epoch
    smaller = parts_of(state, indices)
    log.warning(
        f"out of memory for {len(largest)} pairs {shape}: once more in {len(smaller)} parts, and from here on no more "
        f"at a time; train.accumulate={len(smaller)} would divide every batch so",
        extra={"own": True},
    )
    return smaller
