"""What training minimises, and its gradient for one batch.

Shapes: B sentences, T target and S source positions.
"""

from collections.abc import Callable
from functools import partial

import torch

from nmt.config import PAD, TrainConfig, TrainRun
from nmt.data.batching import Batch
from nmt.model.attention import Weights
from nmt.model.kernels.cuda_graphs import Recorded
from nmt.model.loss import Loss, coverage_loss, guidance_loss
from nmt.model.seq2seq import Seq2Seq

Differentiate = Callable[[Batch, torch.Tensor, torch.Tensor], tuple[Loss, list[torch.Tensor | None]]]


def differentiate(
    run: TrainRun, model: Seq2Seq, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
) -> tuple[Loss, list[torch.Tensor | None]]:
    """The loss of a batch, with `train.r_drop` the mean of two passes with different dropout, and `factor` times what
    it adds to the gradient of each parameter. `update_2`: the target tokens of the update that the batch is part of,
    and the share of training that is done."""
    tokens, done = update_2.unbind()
    smoothing, r_drop = run.optim.label_smoothing, run.train.r_drop
    batch, passes = (batch.twice(), 2) if r_drop else (batch, 1)
    loss, weights = model.loss(batch.source_BS, batch.source_length_B, batch.target_BT, smoothing, r_drop)
    try:
        (objective(run.train, batch, loss, weights, done) / (passes * tokens / factor)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    finally:  # half of a backward pass may be there, where memory did not suffice
        model.zero_grad(set_to_none=True)
    return Loss(*(part.detach() / passes for part in loss)), gradients


class GraphedGradient:
    """`differentiate` as CUDA graphs (`model/replay.py`), for batches of few shapes.

    Graphs share the memory of all that does not leave them. So that gradients need no more, all leave by way of the
    same tensors: those of one call are overwritten by the next.
    """

    def __init__(self, run: TrainRun, model: Seq2Seq) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        # Not a method: a reference to this object would keep it, and its graphs, until the garbage is collected.
        self.graphs = Recorded(partial(differentiate_into, self.gradients, run, model))

    def __call__(
        self, batch: Batch, update_2: torch.Tensor, factor: torch.Tensor
    ) -> tuple[Loss, list[torch.Tensor | None]]:
        return self.graphs(batch, update_2, factor), [*self.gradients]


def differentiate_into(
    places: list[torch.Tensor],
    run: TrainRun,
    model: Seq2Seq,
    batch: Batch,
    update_2: torch.Tensor,
    factor: torch.Tensor,
) -> Loss:
    """`differentiate`, with the gradients written to `places`: 0 where a parameter has none."""
    loss, gradients = differentiate(run, model, batch, update_2, factor)
    pairs = zip(places, gradients, strict=True)
    torch._foreach_copy_(places, [torch.zeros_like(place) if new is None else new for place, new in pairs])
    return loss


def objective(
    config: TrainConfig, batch: Batch, loss: Loss, weights: Weights | None, done: torch.Tensor
) -> torch.Tensor:
    """What training minimises: smoothed cross-entropy, and what is asked of attention. Gold links weigh as much as the
    share of training that is `done`: asked for from the first, they cost translation quality."""
    total = loss.smoothed
    if weights is None or not (config.coverage_loss or config.guided_alignment):
        return total
    dense_BTS = weights.dense(batch.source_BS.shape[1])
    if config.coverage_loss:
        total = total + config.coverage_loss * coverage_loss(dense_BTS, batch.target_BT[:, 1:] != PAD)
    if config.guided_alignment:
        total = total + config.guided_alignment * done * guidance_loss(dense_BTS, batch.guide_BTS)
    return total
