"""Output layer and smoothed cross-entropy with R-Drop in one function, with little memory.

Shapes: R target tokens (including padding if it is not dropped), P passes over the same tokens, r tokens of a chunk, D
feature size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from nmt.model.kernels.inference_weights import prepare_linear
from nmt.model.kernels.linear import pad_rows
from nmt.model.numerics import CACHE_NUMEL, accumulation_dtype
from nmt.model.reference import LinearFn, Loss

MAX_FP32_LOGITS = {"cpu": CACHE_NUMEL // 2, "cuda": 2**26}  # per device type: logits held in fp32 at a time
ROWS_PER_PRODUCT = 256  # in dx = dlogits W on a CPU; as a single product it takes 1.6 times as long


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Output layer and cross-entropy with label smoothing and R-Drop, see `cross_entropy`.

    The forward pass overwrites the logits with their gradient, a few rows at a time, up to a factor per row. So the
    backward pass consists only of matrix products, and memory holds one tensor of the size of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        target_R: Tensor,
        smoothing: float,
        r_drop: float,
        is_training: bool,
        output_fn: LinearFn | None,
        pad: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight, rows, passes = weight_VD.to(x_RD.dtype), len(x_RD), 2 if r_drop else 1
        if output_fn is None:
            output_fn = prepare_linear(weight, bias_V.to(weight.dtype), int8=False)
        x_RD = pad_rows(x_RD)
        logits_RV = output_fn(x_RD)
        exact_dtype, vocabulary = accumulation_dtype(x_RD.dtype), logits_RV.shape[1]
        target_R1 = target_R.unsqueeze(1)
        target_logit_R1 = logits_RV[:rows].gather(1, target_R1).to(exact_dtype)
        max_R1 = torch.zeros_like(target_logit_R1)
        mean_R1 = torch.zeros_like(target_logit_R1)
        kl_R1 = torch.zeros_like(target_logit_R1)
        sum_R1 = target_logit_R1.new_full((len(logits_RV), 1), torch.inf)
        copies = 6 if r_drop else 1  # of a token's logits in fp32: p, its log ratio and a temporary, in both passes
        max_logits = MAX_FP32_LOGITS.get(x_RD.device.type, logits_RV.numel())
        tokens_per_chunk = max(1, max_logits // (copies * vocabulary))
        tensors = (logits_RV[:rows], max_R1, mean_R1, kl_R1, sum_R1[:rows], target_R1)
        chunks = (tensor.unflatten(0, (passes, rows // passes)).split(tokens_per_chunk, 1) for tensor in tensors)
        for logits_PrV, max_Pr1, mean_Pr1, kl_Pr1, sum_Pr1, target_Pr1 in zip(*chunks, strict=True):
            p_PrV = logits_PrV.to(exact_dtype)  # no copy if the logits have this dtype already
            torch.amax(p_PrV, 2, keepdim=True, out=max_Pr1)
            if smoothing:
                torch.mean(p_PrV, 2, keepdim=True, out=mean_Pr1)
            p_PrV.sub_(max_Pr1)
            ratio_PrV = p_PrV - p_PrV.flip(0) if r_drop else None
            torch.sum(p_PrV.exp_(), 2, keepdim=True, out=sum_Pr1)
            if ratio_PrV is not None:
                _add_r_drop_gradient(p_PrV, ratio_PrV, sum_Pr1, kl_Pr1, r_drop)
            if is_training:  # turn p into the gradient of the logits, up to the factor 1 / sum
                if smoothing:
                    p_PrV.sub_(sum_Pr1 * (smoothing / vocabulary))
                p_PrV.scatter_add_(2, target_Pr1, sum_Pr1 * (smoothing - 1))
                logits_PrV.copy_(p_PrV)
        logsum_R1, padding_R1 = max_R1 + sum_R1[:rows].log(), target_R1 == pad
        nats = (logsum_R1 - target_logit_R1).masked_fill_(padding_R1, 0).sum()
        smoothed_R1 = logsum_R1 - (1 - smoothing) * target_logit_R1 - smoothing * mean_R1 + r_drop / 2 * kl_R1
        smoothed = smoothed_R1.masked_fill_(padding_R1, 0).sum()
        correct = ((target_logit_R1 >= max_R1) & ~padding_R1).sum()
        if is_training:
            sum_R1[:rows].masked_fill_(padding_R1, torch.inf)  # makes the gradient of padding 0
            ctx.save_for_backward(x_RD, weight, logits_RV, sum_R1)
            ctx.rows, ctx.dtype = rows, weight_VD.dtype
        ctx.mark_non_differentiable(nats, correct)
        return smoothed, nats, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weight_VD, dlogits_RV, sum_R1 = ctx.saved_tensors
        dtype, factor_R1 = x_RD.dtype, gradients[0] / sum_R1
        chunks = dlogits_RV.split(ROWS_PER_PRODUCT if dlogits_RV.device.type == "cpu" else len(dlogits_RV))
        dx_RD = (torch.cat([chunk_rV @ weight_VD for chunk_rV in chunks]) * factor_R1)[: ctx.rows].to(dtype)
        dweight_VD = (dlogits_RV.t() @ (x_RD * factor_R1).to(dtype)).to(ctx.dtype)
        dbias_V = (factor_R1.t().to(dtype) @ dlogits_RV)[0].to(ctx.dtype)
        return dx_RD, dweight_VD, dbias_V, None, None, None, None, None, None


def _add_r_drop_gradient(p_PrV: Tensor, ratio_PrV: Tensor, sum_Pr1: Tensor, kl_Pr1: Tensor, r_drop: float) -> None:
    """Add the gradient of R-Drop to p of both passes, where p and the gradient are multiplied by the pass's sum.

    The loss is a (KL_1 + KL_2) / 2 with KL_i = sum_v p_i ln(p_i / p_j), which is written to `kl`. Its gradient with
    respect to the logits is a / 2 (p_i (ln(p_i / p_j) - KL_i) + p_i - p_j). `ratio` holds the difference of the logits
    of the passes, each minus its maximum, and is overwritten.
    """
    sum_ratio_Pr1 = sum_Pr1 / sum_Pr1.flip(0)
    ratio_PrV.sub_(sum_ratio_Pr1.log())  # ln(p_i / p_j)
    kl_Pr1.copy_(torch.linalg.vecdot(p_PrV, ratio_PrV).unsqueeze(2) / sum_Pr1)
    gradient_PrV = ratio_PrV.add_(1 - kl_Pr1).mul_(p_PrV).addcmul_(p_PrV.flip(0), sum_ratio_Pr1, value=-1)
    p_PrV.add_(gradient_PrV, alpha=r_drop / 2)


def cross_entropy(
    x_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    target_R: Tensor,
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    output_fn: LinearFn | None = None,
    pad: int = -1,
) -> Loss:
    """Return the cross-entropy of softmax(x W^T + b), see `reference.cross_entropy`.

    The output layer is part of it so that no fp32 copy of all logits is needed.
    """
    is_training = torch.is_grad_enabled()  # always False inside of `forward`
    sums = _SmoothedCrossEntropy.apply(
        x_RD, weight_VD, bias_V, target_R, smoothing, r_drop, is_training, output_fn, pad
    )
    return Loss(*sums)
