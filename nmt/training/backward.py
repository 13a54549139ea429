"""The loss of a micro-batch and its gradient, on a GPU as a CUDA graph.

Shapes: B sentences, T target and S source positions.
"""

from functools import partial

import torch
from torch import Tensor

from nmt.config import PAD, TrainConfig, TrainRun
from nmt.data.batch import Batch
from nmt.model.kernels.cuda_graphs import GraphedCallable
from nmt.model.reference import Loss
from nmt.model.seq2seq import Seq2Seq

Gradients = list[Tensor | None]  # one per parameter, None where a parameter has no gradient


def backward(run: TrainRun, model: Seq2Seq, batch: Batch, update_2: Tensor) -> tuple[Loss, Gradients]:
    """Return the loss of a micro-batch, and its gradient for each parameter.

    `update_2` holds the number of target tokens of the whole update, and the fraction of training that is done.
    """
    objective, loss = compute_loss(run, model, batch, update_2)
    try:
        objective.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    finally:  # a backward pass that runs out of memory may leave some gradients
        model.zero_grad(set_to_none=True)
    return loss, gradients


def compute_loss(run: TrainRun, model: Seq2Seq, batch: Batch, update_2: Tensor) -> tuple[Tensor, Loss]:
    """Return the training objective, a mean over the update's target tokens, and the sums for the log.

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
    return total / (passes * target_tokens), Loss(*(part.detach() / passes for part in loss))


def add_attention_losses(
    config: TrainConfig, batch: Batch, total: Tensor, weights_BTS: Tensor | None, fraction_done: Tensor
) -> Tensor:
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


def coverage_loss(weights_BTS: Tensor, inside_BT: Tensor) -> Tensor:
    """Return sum_t sum_s min(a_ts, c_ts), c_t = sum_{t' < t} a_t', over the target tokens that are `inside`.

    Penalizes attention to positions that were attended to before (See et al. 2017, eq. 12).
    """
    previous_BTS = weights_BTS.cumsum(1) - weights_BTS
    return (torch.minimum(weights_BTS, previous_BTS).sum(2) * inside_BT).sum()


def guidance_loss(weights_BTS: Tensor, alignment_BTS: Tensor) -> Tensor:
    """Return - sum_ts g_ts log a_ts, the cross-entropy of attention weights a given gold alignment weights g.

    One of the two losses of Chen et al. 2016 (arXiv:1607.01628), summed. A weight of exactly 0 gets no gradient.
    """
    return -(alignment_BTS * weights_BTS.clamp(min=torch.finfo(weights_BTS.dtype).tiny).log()).sum()


class GraphedBackward:
    """`backward` as CUDA graphs, for batches of few shapes.

    All graphs write gradients to the same tensors, so gradients need no more memory than without graphs; each call
    overwrites the gradients of the previous one.
    """

    def __init__(self, run: TrainRun, model: Seq2Seq) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        # Not a method: a reference cycle through `self` would keep the graphs alive until garbage collection.
        self.callable = GraphedCallable(partial(backward_into, self.gradients, run, model))

    def __call__(self, batch: Batch, update_2: Tensor) -> tuple[Loss, Gradients]:
        return self.callable(batch, update_2), [*self.gradients]


def backward_into(buffers: list[Tensor], run: TrainRun, model: Seq2Seq, batch: Batch, update_2: Tensor) -> Loss:
    """Call `backward`, and write the gradients to `buffers`: 0 where a parameter has none."""
    loss, gradients = backward(run, model, batch, update_2)
    pairs = zip(buffers, gradients, strict=True)
    torch._foreach_copy_(buffers, [torch.zeros_like(buffer) if new is None else new for buffer, new in pairs])
    return loss
