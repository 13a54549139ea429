"""One update of the weights: the gradient of a batch, as a whole or in parts, and a step with it."""

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch

from nmt.data.batching import Indices, assemble, micro_batches, sent
from nmt.distributed import log
from nmt.errors import UserError
from nmt.model.loss import Loss
from nmt.model.maps import wide
from nmt.model.replay import within_memory
from nmt.optim import guarded_step, learning_rate
from nmt.state import TrainState, seed_of


class Sums(NamedTuple):
    """What was met on the way to a gradient."""

    loss: Loss  # over target tokens
    source: int  # tokens
    target: int  # tokens


class Outcome(NamedTuple):
    """What came of an update."""

    step: int  # its number, from 1
    indices: Indices  # its pairs
    sums: Sums
    failed: torch.Tensor  # whether loss or gradient was not finite, so that the weights are as before; 0-dimensional


def train_step(state: TrainState, indices: Indices, last_step: int) -> Outcome:
    """One update by the gradient of the mean loss over all target tokens. Where memory does not suffice for the batch,
    it is divided further.

    Raises:
        UserError: memory does not suffice for a single pair.
    """
    optim, progress = state.run.optim, state.progress
    parts = parts_of(state, indices)
    while (sums := within_memory(partial(find_gradient, state, parts, last_step))) is None:
        parts = divided(state, indices, parts)
    rate = learning_rate(optim, progress.step + 1, last_step, progress.decays)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    failed = guarded_step(state.optimiser, optim.clip, state.scale.factor, sums.loss.smoothed)
    state.optimiser.zero_grad(set_to_none=True)
    state.scale.adapt(failed)
    progress.step += 1
    return Outcome(progress.step, indices, sums, failed)


def find_gradient(state: TrainState, parts: list[Indices], last_step: int) -> Sums:
    """Give each parameter its gradient, times the loss scale: the sum over all micro-batches."""
    run, model, step = state.run, state.model, state.progress.step
    batches = [assemble(state.train, part, seed_of(run.seed, step, i)) for i, part in enumerate(parts)]
    source = sum(int(batch.source_length_B.sum()) for batch in batches)
    target = sum(int(batch.target_length_B.sum()) for batch in batches)
    scale_2 = sent(torch.tensor([target, (step + 1) / last_step], dtype=wide(model.dtype)), state.device)
    model.train()
    losses = []
    totals: list[Any] = [None for _ in model.parameters()]
    for i, batch in enumerate(batches):
        torch.manual_seed(seed_of(run.seed, step, i))
        try:
            loss, found = state.differentiate(batch.to(state.device), scale_2, state.scale.factor)
        except (RuntimeError, MemoryError):
            model.zero_grad(set_to_none=True)  # half of a backward pass may be there
            raise
        losses.append(loss)
        totals = [new if total is None else total.add_(new) for total, new in zip(totals, found, strict=True)]
    for parameter, total in zip(model.parameters(), totals, strict=True):
        parameter.grad = total
    return Sums(Loss(*(sum(terms) for terms in zip(*losses, strict=True))), source, target)


def parts_of(state: TrainState, indices: Indices) -> list[Indices]:
    """The micro-batches of an update: `train.accumulate`, or more where memory was short for as many positions."""
    return micro_batches(indices, max(state.run.train.accumulate, ceil(positions(state, indices) / state.room)))


def positions(state: TrainState, indices: Indices) -> int:
    """Of both sides of a batch, padding included."""
    return len(indices) * int(sum(longest(state, indices)))


def longest(state: TrainState, indices: Indices) -> tuple[int, int]:
    """Pieces of the longest source and of the longest target."""
    return int(state.train.source_lengths[indices].max()), int(state.train.target_lengths[indices].max())


def divided(state: TrainState, indices: Indices, parts: list[Indices]) -> list[Indices]:
    """Smaller micro-batches of the same pairs, after memory did not suffice; later updates begin with as small ones.

    Raises:
        UserError: each was a single pair.
    """
    largest = max(parts, key=len)
    source, target = longest(state, indices)
    shape = f"of up to {source} source and {target} target pieces (update {state.progress.step + 1})"
    if len(largest) == 1:
        raise UserError(
            f"out of memory for a single pair {shape}; lower data.max_length={state.run.data.max_length} or "
            f"model.hidden={state.run.model.hidden}"
        )
    state.room = positions(state, largest) / 2
    smaller = parts_of(state, indices)
    log.warning(
        f"out of memory for {len(largest)} pairs {shape}: once more in {len(smaller)} parts, and from here on no more "
        f"at a time; train.accumulate={len(smaller)} would divide every batch so"
    )
    return smaller
