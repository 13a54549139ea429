"""Output layer and smoothed cross-entropy, with one Triton kernel between the matrix products.

Shapes: R target tokens with padding, D feature size, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmt.model.kernels.inference_weights import make_plain_linear
from nmt.model.loss import Loss
from nmt.model.reference import LinearFn

MAX_BLOCK = 2048  # logits of a row that a program holds at a time
# fp16 has no normal numbers below 6e-5, and probabilities are smaller. The product with the output layer's weights must
# stay below 65,504; the absolute values of a row's gradient add up to at most 2.
FP16_SCALE = 1024.0


@triton.jit
def _cross_entropy_kernel(
    logits_RV,
    target_R,
    sums_3R,
    pad,
    V: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write smoothed loss, nats and 1 or 0 for a correct prediction to `sums`, and the gradient over the logits."""
    r = tl.program_id(0).to(tl.int64)
    row_V = logits_RV + r * V
    block = tl.arange(0, BLOCK)
    target = tl.load(target_R + r)
    smoothed = 0.0
    nats = 0.0
    correct = 0.0
    if target != pad:
        # Each lane has a maximum and a sum of its own, so that only the end of the pass waits for other lanes.
        max_lane = tl.full([BLOCK], -1e38, tl.float32)
        sum_lane = tl.zeros([BLOCK], tl.float32)
        logits_lane = tl.zeros([BLOCK], tl.float32)
        target_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            v = start + block
            x = tl.load(row_V + v, v < V, other=float("-inf")).to(tl.float32)
            new_max = tl.maximum(max_lane, x)
            sum_lane = sum_lane * tl.exp(max_lane - new_max) + tl.exp(x - new_max)
            max_lane = new_max
            target_lane += tl.where(v == target, x, 0.0)
            if SMOOTHING > 0:
                logits_lane += tl.where(v < V, x, 0.0)
        largest = tl.max(max_lane, 0)
        logsum = largest + tl.log(tl.sum(sum_lane * tl.exp(max_lane - largest), 0))
        target_logit = tl.sum(target_lane, 0)
        nats = logsum - target_logit
        smoothed = logsum - (1 - SMOOTHING) * target_logit - SMOOTHING * (tl.sum(logits_lane, 0) / V)
        correct = tl.where(target_logit >= largest, 1.0, 0.0)
        if HAS_GRADIENT:
            for start in range(0, V, BLOCK):
                v = start + block
                x = tl.load(row_V + v, v < V, other=0.0).to(tl.float32)
                gradient = tl.exp(x - logsum) - SMOOTHING / V - tl.where(v == target, 1 - SMOOTHING, 0.0)
                tl.store(row_V + v, gradient * SCALE, v < V)
    elif HAS_GRADIENT:
        for start in range(0, V, BLOCK):
            v = start + block
            tl.store(row_V + v, tl.zeros([BLOCK], tl.float32), v < V)
    tokens = tl.num_programs(0)
    tl.store(sums_3R + r, smoothed)
    tl.store(sums_3R + tokens + r, nats)
    tl.store(sums_3R + 2 * tokens + r, correct)


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Output layer and cross-entropy with label smoothing, see `cross_entropy`.

    The forward pass overwrites the logits with their gradient, so memory holds one tensor of their size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        target_R: Tensor,
        smoothing: float,
        is_training: bool,
        output_fn: LinearFn | None,
        pad: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight = weight_VD.to(x_RD.dtype)
        if output_fn is None:
            output_fn = make_plain_linear(weight, bias_V.to(weight.dtype))
        logits_RV = output_fn(x_RD)
        rows, vocabulary = logits_RV.shape
        ctx.scale = FP16_SCALE if logits_RV.dtype == torch.float16 else 1.0
        sums_3R = torch.empty(3, rows, dtype=torch.float32, device=x_RD.device)
        if rows:
            with torch.cuda.device_of(logits_RV):
                _cross_entropy_kernel[(rows,)](
                    logits_RV,
                    target_R.contiguous(),
                    sums_3R,
                    pad,
                    V=vocabulary,
                    SMOOTHING=smoothing,
                    SCALE=ctx.scale,
                    HAS_GRADIENT=is_training,
                    BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocabulary)),
                    num_warps=8,
                )
        if is_training:
            ctx.save_for_backward(x_RD, weight, logits_RV)
            ctx.dtype = weight_VD.dtype
        smoothed, nats, correct = sums_3R.sum(1).unbind()
        correct = correct.long()
        ctx.mark_non_differentiable(nats, correct)
        return smoothed, nats, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weight_VD, dlogits_RV = ctx.saved_tensors
        factor_11 = (gradients[0] / ctx.scale).view(1, 1)  # without dimensions it would be rounded to the dtype of x
        dx_RD = ((dlogits_RV @ weight_VD) * factor_11).to(x_RD.dtype)
        dweight_VD = (dlogits_RV.t() @ (x_RD * factor_11).to(x_RD.dtype)).to(ctx.dtype)
        dbias_V = (dlogits_RV.sum(0, dtype=torch.float32) * factor_11[0]).to(ctx.dtype)
        return dx_RD, dweight_VD, dbias_V, None, None, None, None, None


def cross_entropy(
    x_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    target_R: Tensor,
    smoothing: float,
    output_fn: LinearFn | None,
    pad: int,
) -> Loss:
    """Return the cross-entropy of softmax(x W^T + b), see `reference.cross_entropy`, without R-Drop."""
    is_training = torch.is_grad_enabled()  # always False inside of `forward`
    sums = _SmoothedCrossEntropy.apply(x_RD, weight_VD, bias_V, target_R, smoothing, is_training, output_fn, pad)
    return Loss(*sums)
