"""Cross-entropy with label smoothing and R-Drop, output layer included, without fp32 copies of the logits; losses on
attention.

Shapes: B sentences, T target and S source positions, R target tokens (and padding, where it is not dropped), P passes
over the same tokens, r tokens at a time, D feature size, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.model.kernels.inference_weights import LinearFn, prepare_linear
from nmt.model.kernels.linear import CACHED, accumulation_dtype, pad_rows

AT_ONCE = {"cpu": CACHED // 2, "cuda": 2**26}  # logits whose fp32 values are alive at a time
SLAB = 256  # rows of a product with the vocabulary inside: as one product it takes a processor 1.6 times as long


class Loss(NamedTuple):
    """Sums over target tokens, `</s>` included; who adds them up over batches divides once at the end."""

    smoothed: Tensor  # what training minimizes
    nats: Tensor  # negative log-likelihood, without smoothing
    correct: Tensor  # tokens that no other token of the vocabulary beats (in bf16 some share the first rank)


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The forward pass turns logits into their gradient in place, some rows at a time and each row but for a factor of
    its own; the backward pass is products."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, target_R: Tensor, smoothing: float,
        r_drop: float, training: bool, product: LinearFn | None, pad: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        weight, rows, passes = weight_VD.to(x_RD.dtype), len(x_RD), 2 if r_drop else 1
        if product is None:
            product = prepare_linear(weight, bias_V.to(weight.dtype), int8=False)
        x_RD = pad_rows(x_RD)
        logits_RV = product(x_RD)
        exact, vocabulary = accumulation_dtype(x_RD.dtype), logits_RV.shape[1]
        target_R1 = target_R.unsqueeze(1)
        wanted_R1 = logits_RV[:rows].gather(1, target_R1).to(exact)
        most_R1, mean_R1, apart_R1 = (torch.zeros_like(wanted_R1) for _ in range(3))
        sum_R1 = wanted_R1.new_full((len(logits_RV), 1), torch.inf)
        # The gradient of the gold piece has the sum of all in it, with R-Drop up to 1 + a / 2 times; it must not pass
        # what fp16 can hold.
        largest = vocabulary * (1 + r_drop / 2)
        shift = max(0.0, math.log(largest / 2**15)) if logits_RV.dtype == torch.float16 else 0.0
        alive = 6 if r_drop else 1  # both passes' p, its ratio and a product of the two
        at_once = max(1, AT_ONCE.get(x_RD.device.type, logits_RV.numel()) // (alive * vocabulary))
        whole = (logits_RV[:rows], most_R1, mean_R1, apart_R1, sum_R1[:rows], target_R1)
        parts = (part.unflatten(0, (passes, rows // passes)).split(at_once, 1) for part in whole)
        for logits_PrV, most_Pr1, mean_Pr1, apart_Pr1, sum_Pr1, target_Pr1 in zip(*parts, strict=True):
            p_PrV = logits_PrV.to(exact)  # in place where it is exact already
            torch.amax(p_PrV, 2, keepdim=True, out=most_Pr1)
            if smoothing:
                torch.mean(p_PrV, 2, keepdim=True, out=mean_Pr1)
            p_PrV.sub_(most_Pr1 + shift)
            ratio_PrV = p_PrV - p_PrV.flip(0) if r_drop else None
            torch.sum(p_PrV.exp_(), 2, keepdim=True, out=sum_Pr1)
            if ratio_PrV is not None:
                _pull(p_PrV, ratio_PrV, sum_Pr1, apart_Pr1, r_drop)
            if training:  # from here on it is the gradient, but for a factor 1 / sum
                if smoothing:
                    p_PrV.sub_(sum_Pr1 * (smoothing / vocabulary))
                p_PrV.scatter_add_(2, target_Pr1, sum_Pr1 * (smoothing - 1))
                logits_PrV.copy_(p_PrV)
        logsum_R1, padding_R1 = most_R1 + shift + sum_R1[:rows].log(), target_R1 == pad
        nats = (logsum_R1 - wanted_R1).masked_fill_(padding_R1, 0).sum()
        smoothed_R1 = logsum_R1 - (1 - smoothing) * wanted_R1 - smoothing * mean_R1 + r_drop / 2 * apart_R1
        smoothed = smoothed_R1.masked_fill_(padding_R1, 0).sum()
        correct = ((wanted_R1 >= most_R1) & ~padding_R1).sum()
        if training:
            sum_R1[:rows].masked_fill_(padding_R1, torch.inf)  # no loss, no gradient
            ctx.save_for_backward(x_RD, weight, logits_RV, sum_R1)
            ctx.rows, ctx.dtype = rows, weight_VD.dtype
        ctx.mark_non_differentiable(nats, correct)
        return smoothed, nats, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_RD, weight_VD, gradient_RV, sum_R1 = ctx.saved_tensors
        dtype, factor_R1 = x_RD.dtype, gradients[0] / sum_R1
        slabs = gradient_RV.split(SLAB if gradient_RV.device.type == "cpu" else len(gradient_RV))
        dx_RD = (torch.cat([slab_rV @ weight_VD for slab_rV in slabs]) * factor_R1)[: ctx.rows].to(dtype)
        dweight_VD = (gradient_RV.t() @ (x_RD * factor_R1).to(dtype)).to(ctx.dtype)
        dbias_V = (factor_R1.t().to(dtype) @ gradient_RV)[0].to(ctx.dtype)
        return dx_RD, dweight_VD, dbias_V, None, None, None, None, None, None


def _pull(p_PrV: Tensor, ratio_PrV: Tensor, sum_Pr1: Tensor, apart_Pr1: Tensor, r_drop: float) -> None:
    """Add to p of both passes, each times its sum, what draws them together: the gradient of a (KL_1 + KL_2) / 2, where
    KL_i = sum_v p_i ln(p_i / p_j) goes to `apart`. With respect to the logits it is a / 2 (p_i (ln(p_i / p_j) - KL_i) +
    p_i - p_j). `ratio` is by how much a pass's logits, each less the greatest, are above those of the other."""
    sums_Pr1 = sum_Pr1 / sum_Pr1.flip(0)
    ratio_PrV.sub_(sums_Pr1.log())  # ln(p_i / p_j)
    apart_Pr1.copy_(torch.linalg.vecdot(p_PrV, ratio_PrV).unsqueeze(2) / sum_Pr1)
    pull_PrV = ratio_PrV.add_(1 - apart_Pr1).mul_(p_PrV).addcmul_(p_PrV.flip(0), sums_Pr1, value=-1)
    p_PrV.add_(pull_PrV, alpha=r_drop / 2)


def cross_entropy(
    x_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, target_R: Tensor, smoothing: float = 0.0, r_drop: float = 0.0,
    product: LinearFn | None = None, pad: int = -1,
) -> Loss:  # fmt: skip
    """-(1 - e) log p(y) - e / V sum_v log p(v), summed over rows with y != pad, with p = softmax(x W^T + b) and
    e = smoothing (Szegedy et al. 2016, section 7). `product` is x W^T + b itself where the output layer is frozen.

    With `r_drop`, a, the second half of the rows is another pass over the tokens of the first, and a / 2 KL(p || q) is
    added to each row's loss, q being p of the other pass: together a token's rows have a (KL(p || q) + KL(q || p)) / 2,
    R-Drop (Liang et al. 2021, eq. 2 to 4)."""
    training = torch.is_grad_enabled()  # inside a function it never is
    found = _SmoothedCrossEntropy.apply(x_RD, weight_VD, bias_V, target_R, smoothing, r_drop, training, product, pad)
    return Loss(*found)


def coverage_loss(weights_BTS: Tensor, inside_BT: Tensor) -> Tensor:
    """sum_t sum_s min(a_ts, c_ts), c_t = sum_{t' < t} a_t': attention to what was attended to before (See et al. 2017,
    eq. 12), summed over the target tokens that are `inside`."""
    before_BTS = weights_BTS.cumsum(1) - weights_BTS
    return (torch.minimum(weights_BTS, before_BTS).sum(2) * inside_BT).sum()


def guidance_loss(weights_BTS: Tensor, alignment_BTS: Tensor) -> Tensor:
    """- sum_ts g_ts log a_ts: cross-entropy of the attention weights a by those that gold links ask for, g. One of the
    two losses of Chen et al. 2016 (arXiv:1607.01628), summed. A weight of exactly 0 cannot be guided."""
    return -(alignment_BTS * weights_BTS.clamp(min=torch.finfo(weights_BTS.dtype).tiny).log()).sum()
