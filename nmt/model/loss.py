"""Cross-entropy with label smoothing, output layer included, without fp32 copies of the logits; losses on attention.

Shapes: B sentences, T target and S source positions, R target tokens (no padding among them), D feature size, V
vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.model.frozen import Map
from nmt.model.recurrence import filled, wide

CHUNK = 64  # rows whose fp32 values are alive at a time: few enough to stay in a processor's cache


class Loss(NamedTuple):
    """Sums over target tokens, `</s>` included; who adds them up over batches divides once at the end."""

    smoothed: Tensor  # what training minimises
    nats: Tensor  # negative log-likelihood, without smoothing
    correct: Tensor  # tokens that no other token of the vocabulary beats (in bf16 some share the first rank)


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The forward pass turns logits into their gradient in place, a chunk of rows at a time; the backward pass is two
    products."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_R: Tensor, smoothing: float,
        training: bool, product: Map | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        weight, rows = weight_VD.to(x_RD.dtype), len(x_RD)
        x_RD = filled(x_RD)
        if product is None:
            logits_RV = F.linear(x_RD, weight, None if bias_V is None else bias_V.to(x_RD.dtype))
        else:
            logits_RV = product(x_RD)
        exact = wide(x_RD.dtype)
        smoothed, nats = torch.zeros(2, dtype=exact, device=x_RD.device).unbind()
        correct = torch.zeros((), dtype=torch.int64, device=x_RD.device)
        vocabulary = logits_RV.shape[1]
        logits_RV[rows:] = 0  # has no loss; below, no gradient
        for logits_rV, target_r1 in zip(logits_RV[:rows].split(CHUNK), target_R.unsqueeze(1).split(CHUNK), strict=True):
            logp_rV = torch.log_softmax(logits_rV, 1, dtype=exact)
            target_logp_r1 = logp_rV.gather(1, target_r1)
            correct += (target_logp_r1 >= logp_rV.amax(1, keepdim=True)).sum()
            nats -= target_logp_r1.sum()
            smoothed -= (1 - smoothing) * target_logp_r1.sum()
            if smoothing:
                smoothed -= smoothing / vocabulary * logp_rV.sum()
            if training:
                gradient_rV = logp_rV.exp_()
                if smoothing:
                    gradient_rV -= smoothing / vocabulary
                gradient_rV.scatter_add_(1, target_r1, torch.full_like(target_logp_r1, smoothing - 1))
                logits_rV.copy_(gradient_rV)
        if training:
            ctx.save_for_backward(x_RD, weight, logits_RV)
            ctx.rows, ctx.dtype, ctx.biased = rows, weight_VD.dtype, bias_V is not None
        ctx.mark_non_differentiable(nats, correct)
        return smoothed, nats, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weight_VD, gradient_RV = ctx.saved_tensors
        scale = gradients[0]
        dx = (gradient_RV @ weight_VD)[: ctx.rows] * scale.to(x_RD.dtype)
        dweight = (gradient_RV.t() @ x_RD).to(ctx.dtype) * scale
        dbias = gradient_RV.sum(0, dtype=ctx.dtype) * scale if ctx.biased else None
        return dx, dweight, dbias, None, None, None, None


def cross_entropy(
    x_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_R: Tensor, smoothing: float = 0.0,
    product: Map | None = None,
) -> Loss:  # fmt: skip
    """-(1 - e) log p(y) - e / V sum_v log p(v), summed over rows, with p = softmax(x W^T + b) and e = smoothing
    (Szegedy et al. 2016, section 7). `product` is x W^T + b itself where the output layer is frozen."""
    training = torch.is_grad_enabled()  # inside a function it never is
    return Loss(*_SmoothedCrossEntropy.apply(x_RD, weight_VD, bias_V, target_R, smoothing, training, product))


def coverage_loss(weights_BTS: Tensor, inside_BT: Tensor) -> Tensor:
    """sum_t sum_s min(a_ts, c_ts), c_t = sum_{t' < t} a_t': attention to what was attended to before (See et al. 2017,
    eq. 12), summed over the target tokens that are `inside`."""
    before_BTS = weights_BTS.cumsum(1) - weights_BTS
    return (torch.minimum(weights_BTS, before_BTS).sum(2) * inside_BT).sum()


def guidance_loss(weights_BTS: Tensor, guide_BTS: Tensor) -> Tensor:
    """- sum_ts g_ts log a_ts: cross-entropy of the attention weights a by those that gold links ask for, g. One of the
    two losses of Chen et al. 2016 (arXiv:1607.01628), summed. A weight of exactly 0 cannot be guided."""
    return -(guide_BTS * weights_BTS.clamp(min=torch.finfo(weights_BTS.dtype).tiny).log()).sum()
