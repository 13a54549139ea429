"""One update of the weights: `train_step` -> `forward_backward` -> `backward` -> `compute_loss` -> `Seq2Seq.loss`.

Shapes: B sentences, T target and S source positions.
"""

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.config import PAD, TrainConfig, TrainRun
from nmt.data.batching import (
    NO_SHAPES,
    Batch,
    Batches,
    choose_shapes,
    collate,
    micro_batches,
    padded_positions,
    shape_for,
    to_device,
)
from nmt.data.encoding import Indices
from nmt.errors import UserError
from nmt.model.attention import Weights
from nmt.model.kernels.cuda_graphs import MAX_GRAPHS, GraphedCallable
from nmt.model.kernels.linear import accumulation_dtype
from nmt.model.loss import Loss, coverage_loss, guidance_loss
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.model.seq2seq import Seq2Seq
from nmt.runtime.distributed import all_reduce_sum, rank, world_size
from nmt.runtime.lines import count_of
from nmt.runtime.logging import log
from nmt.training.optim import guarded_step, learning_rate
from nmt.training.state import TrainState, seed_of

Gradients = list[torch.Tensor | None]  # of each parameter, None where it has none


class Sums(NamedTuple):
    """What was met on the way to a gradient: sums over tokens, 0-dimensional."""

    smoothed: torch.Tensor  # over target tokens, as are the next two: what training minimizes, attention apart
    nats: torch.Tensor  # negative log-likelihood
    correct: torch.Tensor
    source: torch.Tensor  # tokens
    target: torch.Tensor


class UpdateResult(NamedTuple):
    """What came of an update."""

    step: int  # its number, from 1
    indices: Indices  # its pairs
    sums: Sums  # of all processes
    failed: torch.Tensor  # whether loss or gradient was not finite, so that the weights are as before; 0-dimensional


def train_step(state: TrainState, indices: Indices, total_steps: int) -> UpdateResult:
    """One update by the gradient of the mean loss over all target tokens. Each process of the job makes its share of
    it; where memory does not suffice for that, it is divided further.

    Raises:
        UserError: memory does not suffice for a single pair; or another process has ended.
    """
    optim, progress = state.run.optim, state.progress
    share, tokens = indices[rank() :: world_size()], int(state.train.lengths(indices)[1].sum())
    size = size_of_parts(state, share)

    def attempt(size: int) -> tuple[list[Any], Sums]:
        return forward_backward(state, parts_of(state, share, size), tokens, total_steps)

    found, fits = halve_until_it_fits(attempt, size, too_large(state, share))
    if fits < size:
        remember_limit(state, share, size, fits)
    # The processes meet once an update, each with its whole gradient; DistributedDataParallel would have them meet
    # within the backward pass, where one may have to divide its share anew, and where a GPU replays what waits for
    # nobody. It would hide little of the sending: a recurrence's weight gradients are made last, all at once.
    gradients, own = found
    pooled = all_reduce_sum([*gradients, *own])
    for parameter, gradient in zip(state.model.parameters(), pooled[: len(gradients)], strict=True):
        parameter.grad = gradient
    sums = Sums(*torch.stack(pooled[len(gradients) :]))  # copies, which keep no buffer of all gradients alive
    rate = learning_rate(optim, progress.step + 1, total_steps, progress.decays)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    failed = guarded_step(state.optimizer, optim.clip, state.scale.factor, sums.smoothed)
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.adapt(failed)
    progress.step += 1
    return UpdateResult(progress.step, indices, sums, failed)


def forward_backward(state: TrainState, parts: list[Indices], tokens: int, total_steps: int) -> tuple[list[Any], Sums]:
    """Sum the gradients and the losses of this process's micro-batches.

    Gradients are divided by the `tokens` of the whole update and multiplied by the loss scale.
    """
    run, model, step = state.run, state.model, state.progress.step
    if state.device.type == "cuda" and state.graphs is None:
        state.graphs = GraphedBackward(run, model)
    batches = [batch_of(state, part) for part in parts]
    source, target = sum((state.train.lengths(part).sum(axis=1) for part in parts), np.zeros(2, np.int64)).tolist()
    numbers_4 = torch.tensor([tokens, (step + 1) / total_steps, source, target], dtype=accumulation_dtype(model.dtype))
    update_2, counts_2 = to_device(numbers_4, state.device).split(2)
    model.train()
    sums = [torch.zeros_like(counts_2[0]) for _ in Loss._fields] if not batches else []
    totals: list[Any] = [None for _ in model.parameters()]
    for number, batch in enumerate(batches):
        torch.manual_seed(seed_of(run.seed, step, rank() + world_size() * number))
        work = state.graphs or partial(backward, run, model)
        try:
            loss, gradients = work(batch.to(state.device), update_2, state.scale.factor)
        except (RuntimeError, MemoryError):
            model.zero_grad(set_to_none=True)  # half of a backward pass may be there
            raise
        if number:
            sums = [total + new for total, new in zip(sums, loss, strict=True)]
            totals = [new if total is None else total.add_(new) for total, new in zip(totals, gradients, strict=True)]
        else:
            sums, totals = [*loss], gradients
            if len(batches) > 1:  # the next may overwrite them
                totals = [None if new is None else new.clone() for new in gradients]
    if world_size() > 1:  # another process may have a gradient where this one has none
        pairs = zip(totals, model.parameters(), strict=True)
        totals = [torch.zeros_like(parameter) if total is None else total for total, parameter in pairs]
    return totals, Sums(*sums, *counts_2)


def backward(
    run: TrainRun, model: Seq2Seq, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
) -> tuple[Loss, Gradients]:
    """Return the loss of a micro-batch, and `factor` times its gradient for each parameter.

    `update_2` holds the number of target tokens of the whole update, and the share of training that is done.
    """
    objective, loss = compute_loss(run, model, batch, update_2, factor)
    try:
        objective.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    finally:  # half of a backward pass may be there if memory is too small
        model.zero_grad(set_to_none=True)
    return loss, gradients


class GraphedBackward:
    """`backward` as CUDA graphs, for batches of few shapes.

    All graphs write gradients to the same tensors, so gradients need no more memory than without graphs; each call
    overwrites those of the call before.
    """

    def __init__(self, run: TrainRun, model: Seq2Seq) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        # Not a method: a reference to this object would keep it, and its graphs, until the garbage is collected.
        self.graphs = GraphedCallable(partial(backward_into, self.gradients, run, model))

    def __call__(self, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor) -> tuple[Loss, Gradients]:
        return self.graphs(batch, update_2, factor), [*self.gradients]


def backward_into(
    buffers: list[torch.Tensor],
    run: TrainRun,
    model: Seq2Seq,
    batch: Batch,
    update_2: torch.Tensor,
    factor: torch.Tensor,
) -> Loss:
    """`backward`, with the gradients written to `buffers`: 0 where a parameter has none."""
    loss, gradients = backward(run, model, batch, update_2, factor)
    pairs = zip(buffers, gradients, strict=True)
    torch._foreach_copy_(buffers, [torch.zeros_like(buffer) if new is None else new for buffer, new in pairs])
    return loss


def compute_loss(
    run: TrainRun, model: Seq2Seq, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, Loss]:
    """Return `factor` times what training minimizes, as a mean over the update's tokens, and the sums for the log.

    With `train.r_drop` the loss is the mean of two passes with different dropout.
    """
    tokens, done = update_2.unbind()
    batch, passes = (batch.twice(), 2) if run.train.r_drop else (batch, 1)
    loss, weights = model.loss(
        batch.source_BS, batch.source_length_B, batch.target_BT, run.optim.label_smoothing, run.train.r_drop
    )
    total = add_attention_losses(run.train, batch, loss.smoothed, weights, done)
    return total / (passes * tokens / factor), Loss(*(part.detach() / passes for part in loss))


def add_attention_losses(
    config: TrainConfig, batch: Batch, total: torch.Tensor, weights: Weights | None, done: torch.Tensor
) -> torch.Tensor:
    """Add what `train.coverage_loss` and `train.guided_alignment` ask of attention. The weight of guided alignment
    grows with the share of training that is `done`: at full weight from the start it costs translation quality."""
    if weights is None or not (config.coverage_loss or config.guided_alignment):
        return total
    dense_BTS = weights.dense(batch.source_BS.shape[1])
    if config.coverage_loss:
        total = total + config.coverage_loss * coverage_loss(dense_BTS, batch.target_BT[:, 1:] != PAD)
    if config.guided_alignment:
        total = total + config.guided_alignment * done * guidance_loss(dense_BTS, batch.alignment_BTS)
    return total


def batch_of(state: TrainState, pairs: Indices) -> Batch:
    """The batch of some pairs, on a GPU padded to one of few shapes."""
    batch = collate(state.train, pairs)
    return batch.padded(*shape_for(size_of(state, pairs), state.shapes_K3)) if state.device.type == "cuda" else batch


def size_of(state: TrainState, pairs: Indices) -> tuple[int, int, int]:
    """Of a batch: its pairs, and the source and target pieces of the longest, `</s>` included."""
    source, target = state.train.lengths(pairs).max(axis=1)
    return len(pairs), int(source), int(target)


def shapes_of(state: TrainState, batches: Batches) -> Indices:
    """Few shapes for the micro-batches of this process in an epoch: a GPU captures a graph for each."""
    shares = (pairs[rank() :: world_size()] for pairs in batches)
    parts = [part for pairs in shares for part in parts_of(state, pairs, size_of_parts(state, pairs))]
    if not parts:  # there are more processes than pairs in an update
        return NO_SHAPES
    sizes_N3 = np.array([size_of(state, part) for part in parts])
    pieces = sum(int(state.train.lengths(part).sum()) for part in parts)
    shapes_K3 = choose_shapes(sizes_N3, pieces, MAX_GRAPHS)
    padded = sum(int(padded_positions(np.array(shape_for(size_3, shapes_K3)))) for size_3 in sizes_N3.tolist())
    log.info(f"batches are padded to {count_of(len(shapes_K3), 'shape')}: padding {1 - pieces / padded:.1%}")
    return shapes_K3


def size_of_parts(state: TrainState, pairs: Indices) -> int:
    """Pairs of a micro-batch: by `train.accumulate`, or fewer if memory was too small for as many positions."""
    if not len(pairs):  # there are more processes than pairs in the update
        return 1
    per_pair = int(padded_positions(np.array(size_of(state, pairs)))) / len(pairs)
    return max(1, int(min(ceil(len(pairs) / state.run.train.accumulate), state.max_positions / per_pair)))


def parts_of(state: TrainState, pairs: Indices, size: int) -> list[Indices]:
    """Micro-batches of `size` pairs at most: `train.accumulate` of them, or more."""
    return micro_batches(pairs, max(state.run.train.accumulate, ceil(len(pairs) / size))) if len(pairs) else []


def shape_in_words(state: TrainState, pairs: Indices) -> str:
    _, source, target = size_of(state, pairs)
    return f"of up to {source} source and {target} target pieces (update {state.progress.step + 1})"


def too_large(state: TrainState, pairs: Indices) -> UserError:
    """The error if memory is too small for a single pair."""
    once = ", or write train.r_drop=0, for one pass in place of two" if state.run.train.r_drop else ""
    shape = shape_in_words(state, pairs) if len(pairs) else ""
    return UserError(
        f"out of memory for a single pair {shape}; lower data.max_length={state.run.data.max_length} or "
        f"model.hidden={state.run.model.hidden}{once}",
        any_rank=True,
    )


def remember_limit(state: TrainState, pairs: Indices, tried: int, fits: int) -> None:
    """Let later updates begin with micro-batches as small as memory turned out to allow."""
    state.max_positions = fits * int(padded_positions(np.array(size_of(state, pairs)))) / len(pairs)
    state.shapes_K3 = NO_SHAPES  # those of smaller parts are chosen for the next epoch
    count = len(parts_of(state, pairs, fits))
    log.warning(
        f"out of memory for {tried} pairs {shape_in_words(state, pairs)}: divided into {count} parts, and from here on "
        f"no more at a time; train.accumulate={count} would divide every batch so",
        extra={"any_rank": True},
    )
