"""From scores to weights that are not negative and sum to 1, over the last dimension.

The sparse ones are alpha-entmax for alpha = 2 and 1.5 and give many weights of exactly 0. Their thresholds are found by
sorting, which is exact, and their gradients are written out: they depend only on what has weight.
"""

from typing import Any

import torch
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    """exp(z_s) / sum_s exp(z_s), over the last dimension."""
    return torch.softmax(scores, dim=-1)


def ranked(z: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the last dimension from the largest on, and their ranks from 1. Given z with maximum 0: what is
    not above -1 has no weight in either normalizer below, and is cut there, so that sums stay finite."""
    falling = z.clamp(min=-1).sort(dim=-1, descending=True).values
    return falling, torch.arange(1, z.shape[-1] + 1, device=z.device)


def simplex_backward(s: Tensor, gradient: Tensor) -> Tensor:
    """The product with diag(s) - s s^T / sum s, the Jacobian of alpha-entmax, s = p^(2 - alpha) where p > 0 and else 0
    (Peters et al. 2019, section 3)."""
    product = s * gradient
    return product - product.sum(-1, keepdim=True) / s.sum(-1, keepdim=True) * s


class _Sparsemax(torch.autograd.Function):
    """max(z - tau, 0) with tau such that it sums to 1, Martins and Astudillo 2016, algorithm 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        z = scores - scores.amax(-1, keepdim=True)
        falling, rank = ranked(z)
        sums = falling.cumsum(-1)
        support = (1 + rank * falling > sums).sum(-1, keepdim=True).clamp(min=1)  # 0 if there are NaN
        weights = (z - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return simplex_backward((ctx.saved_tensors[0] > 0).to(gradients[0].dtype), gradients[0])


class _Entmax15(torch.autograd.Function):
    """max(z / 2 - tau, 0)^2 with tau such that it sums to 1, Peters et al. 2019, algorithm 2."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        z = (scores - scores.amax(-1, keepdim=True)) / 2
        falling, rank = ranked(z)
        mean = falling.cumsum(-1) / rank
        deviation = falling.square().cumsum(-1) - rank * mean.square()  # sum of squares about the mean
        tau = mean - ((1 - deviation) / rank).clamp(min=0).sqrt()
        support = ((tau <= falling) & (falling > -1)).sum(-1, keepdim=True).clamp(min=1)  # 0 if there are NaN
        root = (z - tau.gather(-1, support - 1)).clamp(min=0)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return simplex_backward(ctx.saved_tensors[0], gradients[0])


NORMALIZERS = {"softmax": softmax, "sparsemax": _Sparsemax.apply, "entmax15": _Entmax15.apply}
