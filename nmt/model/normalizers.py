"""Normalizers: from scores to nonnegative weights that sum to 1 over the last dimension.

The sparse ones are alpha-entmax with alpha = 2 (sparsemax) and 1.5, and give many weights of exactly 0. Their threshold
is found exactly, by sorting. Their gradients are written out, since they depend only on the nonzero weights.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


def sort_descending(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last dimension in descending order, and the ranks 1, 2, ...

    `z` must have maximum 0. Values up to -1 get no weight in either normalizer below; they are clamped to -1 so that
    sums stay finite.
    """
    sorted_z = z.clamp(min=-1).sort(dim=-1, descending=True).values
    return sorted_z, torch.arange(1, z.shape[-1] + 1, device=z.device)


def simplex_backward(s: Tensor, gradient: Tensor) -> Tensor:
    """Multiply with diag(s) - s s^T / sum s, the Jacobian of alpha-entmax.

    s = p^(2 - alpha) where p > 0, and 0 elsewhere (Peters et al. 2019, section 3).
    """
    product = s * gradient
    return product - product.sum(-1, keepdim=True) / s.sum(-1, keepdim=True) * s


class _Sparsemax(torch.autograd.Function):
    """max(z - tau, 0) with tau chosen so that the weights sum to 1, Martins and Astudillo 2016, algorithm 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        z = scores - scores.amax(-1, keepdim=True)
        sorted_z, rank = sort_descending(z)
        sums = sorted_z.cumsum(-1)
        support = (1 + rank * sorted_z > sums).sum(-1, keepdim=True).clamp(min=1)  # 0 if there are NaNs
        weights = (z - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return simplex_backward((ctx.saved_tensors[0] > 0).to(gradients[0].dtype), gradients[0])


class _Entmax15(torch.autograd.Function):
    """max(z / 2 - tau, 0)^2 with tau chosen so that the weights sum to 1, Peters et al. 2019, algorithm 2."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        z = (scores - scores.amax(-1, keepdim=True)) / 2
        sorted_z, rank = sort_descending(z)
        mean = sorted_z.cumsum(-1) / rank
        deviation = sorted_z.square().cumsum(-1) - rank * mean.square()  # sum of squared deviations from the mean
        tau = mean - ((1 - deviation) / rank).clamp(min=0).sqrt()
        support = ((tau <= sorted_z) & (sorted_z > -1)).sum(-1, keepdim=True).clamp(min=1)  # 0 if there are NaNs
        root = (z - tau.gather(-1, support - 1)).clamp(min=0)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return simplex_backward(ctx.saved_tensors[0], gradients[0])


NORMALIZER_FNS = {
    "softmax": partial(torch.softmax, dim=-1),
    "sparsemax": _Sparsemax.apply,
    "entmax15": _Entmax15.apply,
}
