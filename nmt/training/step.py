"""One optimizer step: `train_step` -> `forward_backward` -> `backward` -> `compute_loss` -> `Seq2Seq.loss`.

`forward_backward` sums over micro-batches, which `halve_until_it_fits` makes smaller if memory is short. `backward`
runs one of them forward and backward, on a GPU as a CUDA graph.

Shapes: B sentences, T target and S source positions.
"""

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.config import PAD, TrainConfig, TrainRun
from nmt.data.batch import Batch, to_device
from nmt.data.batching import (
    NO_SHAPES,
    Batches,
    choose_shapes,
    collate,
    count_positions,
    pick_shape,
    split_into_micro_batches,
)
from nmt.data.encoding import Indices
from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import MAX_GRAPHS, GraphedCallable
from nmt.model.loss import Loss, coverage_loss, guidance_loss
from nmt.model.numerics import accumulation_dtype
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.model.seq2seq import Seq2Seq
from nmt.system.distributed import all_reduce_sum, rank, world_size
from nmt.system.logging import log
from nmt.system.messages import pluralize
from nmt.training.optim import compute_learning_rate, step_if_finite
from nmt.training.state import TrainState, derive_seed

Gradients = list[torch.Tensor | None]  # one per parameter, None where a parameter has no gradient


class LossSums(NamedTuple):
    """Sums over the tokens of an update, 0-dimensional tensors."""

    smoothed: torch.Tensor  # cross-entropy with label smoothing and R-Drop, over target tokens
    nats: torch.Tensor  # negative log-likelihood, over target tokens
    correct: torch.Tensor  # correctly predicted target tokens
    source: torch.Tensor  # number of source tokens
    target: torch.Tensor  # number of target tokens


class UpdateResult(NamedTuple):
    """The result of one update."""

    step: int  # number of the update, from 1
    indices: Indices  # rows of its pairs
    sums: LossSums  # over all ranks
    failed: torch.Tensor  # True if loss or gradient was not finite and the weights were left unchanged; 0-dimensional


# ------------------------------------------------------------------------------------------------------------- update
def train_step(state: TrainState, indices: Indices, total_steps: int) -> UpdateResult:
    """Update the weights with the gradient of the mean loss over all target tokens of the pairs `indices`.

    Each rank computes its share of the gradient, in smaller micro-batches if memory is too small.

    Raises:
        UserError: memory is too small for a single pair, or another process has ended.
    """
    optim, progress = state.run.optim, state.progress
    share = indices[rank() :: world_size()]
    target_tokens = int(state.train_pairs.lengths(indices)[1].sum())
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
    failed = step_if_finite(state.optimizer, optim.clip, state.loss_scale.factor, sums.smoothed)
    state.optimizer.zero_grad(set_to_none=True)
    state.loss_scale.update(failed)
    progress.step += 1
    return UpdateResult(progress.step, indices, sums, failed)


def forward_backward(
    state: TrainState, micro_batches: list[Indices], target_tokens: int, total_steps: int
) -> tuple[list[Any], LossSums]:
    """Sum the gradients and the losses of this rank's micro-batches.

    Gradients are divided by the `target_tokens` of the whole update and multiplied by the loss scale.
    """
    run, model, step = state.run, state.model, state.progress.step
    if state.device.type == "cuda" and model.is_fast and state.graphed_backward is None:
        state.graphed_backward = GraphedBackward(run, model)
    compute = state.graphed_backward or partial(backward, run, model)

    batches = [build_batch(state, rows) for rows in micro_batches]
    lengths = (state.train_pairs.lengths(rows).sum(axis=1) for rows in micro_batches)
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
        loss, gradients = compute(batch.to(state.device), update_2, state.loss_scale.factor)
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


def backward(
    run: TrainRun, model: Seq2Seq, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
) -> tuple[Loss, Gradients]:
    """Return the loss of a micro-batch, and `factor` times its gradient for each parameter.

    `update_2` holds the number of target tokens of the whole update, and the fraction of training that is done.
    """
    objective, loss = compute_loss(run, model, batch, update_2, factor)
    try:
        objective.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    finally:  # a backward pass that runs out of memory may leave some gradients
        model.zero_grad(set_to_none=True)
    return loss, gradients


def compute_loss(
    run: TrainRun, model: Seq2Seq, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, Loss]:
    """Return `factor` times the training objective, a mean over the update's target tokens, and the sums for the log.

    With `train.r_drop` the loss is the mean of two passes with different dropout.
    """
    target_tokens, fraction_done = update_2.unbind()
    passes = 1
    if run.train.r_drop:
        batch, passes = batch.duplicate(), 2
    loss, weights = model.loss(
        batch.source_BS, batch.source_length_B, batch.target_BT, run.optim.label_smoothing, run.train.r_drop
    )
    total = add_attention_losses(run.train, batch, loss.smoothed, weights, fraction_done)
    return total / (passes * target_tokens / factor), Loss(*(part.detach() / passes for part in loss))


def add_attention_losses(
    config: TrainConfig,
    batch: Batch,
    total: torch.Tensor,
    weights_BTS: torch.Tensor | None,
    fraction_done: torch.Tensor,
) -> torch.Tensor:
    """Add the losses of `train.coverage_loss` and `train.guided_alignment` to `total`.

    The weight of guided alignment grows with the fraction of training that is done, because full weight from the start
    costs translation quality.
    """
    if weights_BTS is None or not (config.coverage_loss or config.guided_alignment):
        return total
    if config.coverage_loss:
        total = total + config.coverage_loss * coverage_loss(weights_BTS, batch.target_BT[:, 1:] != PAD)
    if config.guided_alignment:
        total = total + config.guided_alignment * fraction_done * guidance_loss(weights_BTS, batch.alignment_BTS)
    return total


# -------------------------------------------------------------------------------------------------------- CUDA graphs
class GraphedBackward:
    """`backward` as CUDA graphs, for batches of few shapes.

    All graphs write gradients to the same tensors, so gradients need no more memory than without graphs; each call
    overwrites the gradients of the previous one.
    """

    def __init__(self, run: TrainRun, model: Seq2Seq) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        # Not a method: a reference cycle through `self` would keep the graphs alive until garbage collection.
        self.callable = GraphedCallable(partial(backward_into, self.gradients, run, model))

    def __call__(self, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor) -> tuple[Loss, Gradients]:
        return self.callable(batch, update_2, factor), [*self.gradients]


def backward_into(
    buffers: list[torch.Tensor],
    run: TrainRun,
    model: Seq2Seq,
    batch: Batch,
    update_2: torch.Tensor,
    factor: torch.Tensor,
) -> Loss:
    """Call `backward`, and write the gradients to `buffers`: 0 where a parameter has none."""
    loss, gradients = backward(run, model, batch, update_2, factor)
    pairs = zip(buffers, gradients, strict=True)
    torch._foreach_copy_(buffers, [torch.zeros_like(buffer) if new is None else new for buffer, new in pairs])
    return loss


# ------------------------------------------------------------------------------------------------------ micro-batches
def build_batch(state: TrainState, rows: Indices) -> Batch:
    """Collate pairs into a batch, which on a GPU is padded to one of few shapes."""
    batch = collate(state.train_pairs, rows)
    if state.device.type == "cuda":
        return batch.pad_to(*pick_shape(measure_batch(state, rows), state.shapes_K3))
    return batch


def measure_batch(state: TrainState, rows: Indices) -> tuple[int, int, int]:
    """Return the number of pairs, and the largest source and target lengths in pieces, `</s>` included."""
    source, target = state.train_pairs.lengths(rows).max(axis=1)
    return len(rows), int(source), int(target)


def positions_per_pair(state: TrainState, share: Indices) -> float:
    """Return the positions of this rank's pairs of an update, padded as one batch, per pair."""
    return int(count_positions(np.array(measure_batch(state, share)))) / len(share)


def choose_epoch_shapes(state: TrainState, batches: Batches) -> Indices:
    """Choose a few shapes for this rank's micro-batches of an epoch, since a GPU captures a graph for each shape."""
    shares = (rows[rank() :: world_size()] for rows in batches)
    micro_batches = [
        rows for share in shares for rows in split_share(state, share, choose_micro_batch_size(state, share))
    ]
    if not micro_batches:  # there are more ranks than pairs in an update
        return NO_SHAPES
    sizes_N3 = np.array([measure_batch(state, rows) for rows in micro_batches])
    pieces = sum(int(state.train_pairs.lengths(rows).sum()) for rows in micro_batches)
    shapes_K3 = choose_shapes(sizes_N3, pieces, MAX_GRAPHS)
    padded = sum(int(count_positions(np.array(pick_shape(size_3, shapes_K3)))) for size_3 in sizes_N3.tolist())
    log.info(f"batches are padded to {pluralize(len(shapes_K3), 'shape')}: padding {1 - pieces / padded:.1%}")
    return shapes_K3


def choose_micro_batch_size(state: TrainState, share: Indices) -> int:
    """Return the pairs per micro-batch: by `train.accumulate`, or fewer if memory was too small for that many."""
    if not len(share):  # there are more ranks than pairs in the update
        return 1
    fitting_size = state.max_positions / positions_per_pair(state, share)
    return max(1, int(min(ceil(len(share) / state.run.train.accumulate), fitting_size)))


def split_share(state: TrainState, share: Indices, size: int) -> list[Indices]:
    """Split this rank's pairs into micro-batches of at most `size` pairs: `train.accumulate` of them, or more."""
    if not len(share):
        return []
    return split_into_micro_batches(share, max(state.run.train.accumulate, ceil(len(share) / size)))


# ------------------------------------------------------------------------------------------------------ out of memory
def describe_batch(state: TrainState, rows: Indices) -> str:
    _, source, target = measure_batch(state, rows)
    return f"of up to {source} source and {target} target pieces (update {state.progress.step + 1})"


def make_out_of_memory_error(state: TrainState, share: Indices) -> UserError:
    """Return the error to raise if memory is too small for a single pair."""
    single_pass = ", or set train.r_drop=0 for one pass instead of two" if state.run.train.r_drop else ""
    description = describe_batch(state, share) if len(share) else ""
    return UserError(
        f"out of memory for a single pair {description}; lower data.max_length={state.run.data.max_length} or "
        f"model.hidden={state.run.model.hidden}{single_pass}",
        any_rank=True,
    )


def remember_memory_limit(state: TrainState, share: Indices, size: int, fitting_size: int) -> None:
    """Make later updates start with micro-batches that fit, after `size` pairs did not and `fitting_size` did."""
    state.max_positions = fitting_size * positions_per_pair(state, share)
    state.shapes_K3 = NO_SHAPES  # new shapes for the smaller micro-batches are chosen at the next epoch
    count = len(split_share(state, share, fitting_size))
    log.warning(
        f"out of memory for {size} pairs {describe_batch(state, share)}: split into {count} micro-batches, and later "
        f"updates are limited to the same size; train.accumulate={count} would split every batch this way",
        extra={"any_rank": True},
    )
