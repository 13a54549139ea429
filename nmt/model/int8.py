"""Linear maps in int8, for translation on a processor: weights are rounded once, inputs as they come.

Shapes: N rows, I input size, O output size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """A weight matrix W = scale x weight, a scale for each row; it stands where a parameter stood."""

    weight_OI: Tensor  # int8
    scale_O: Tensor  # fp32

    def __getitem__(self, part: tuple[slice, slice]) -> "Int8":
        return Int8(self.weight_OI[part], self.scale_O[part[0]])

    def to(self, dtype: torch.dtype) -> "Int8":
        """Itself: the dtype of a product is that of its input."""
        return self


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and a scale for each row, the smallest that cuts none off."""
    scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x_NI.dtype).tiny * LARGEST) / LARGEST
    return (x_NI / scale_N1).round_().to(torch.int8), scale_N1


def quantise(module: nn.Module, *names: str) -> None:
    """Put int8 weights in place of a module's parameters of these names."""
    for name in names:
        weight_OI, scale_O1 = rounded(getattr(module, name).detach())
        delattr(module, name)
        setattr(module, name, Int8(weight_OI, scale_O1.squeeze(1)))


def linear(x: Tensor, weight_OI: Any, bias_O: Tensor | None) -> Tensor:
    """x W^T + b in the dtype of x, W a tensor or an `Int8`.

    In int8 each row of x is rounded by a scale of its own, and sums are exact: no row depends on those beside it.
    """
    bias = None if bias_O is None else bias_O.to(x.dtype)
    if not isinstance(weight_OI, Int8):
        return F.linear(x, weight_OI.to(x.dtype), bias)
    x_NI, scale_N1 = rounded(x.flatten(0, -2))
    y_NO = torch._int_mm(x_NI, weight_OI.weight_OI.t()).to(x.dtype).mul_(weight_OI.scale_O).mul_(scale_N1)
    if bias is not None:
        y_NO += bias
    return y_NO.view(*x.shape[:-1], -1)
