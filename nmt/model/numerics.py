"""Data types of sums and of step loops, constants, and the distribution of new parameters."""

import math

import torch
from torch import Tensor, nn

CACHE_NUMEL = 2**19  # number of fp32 elements that fit into the private caches of a CPU core


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and normalization: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def step_dtype(x: Tensor) -> torch.dtype:
    """Return the fastest dtype, at least as precise as that of `x`, for the operations of a step without weights.

    These are tanh and products with a single query. On a CPU they are faster in fp32 than in bf16 or fp16.
    """
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and x.device.type == "cpu" else x.dtype


def tanh(x: Tensor) -> Tensor:
    """Return `torch.tanh(x)`, computed in fp32 for bf16 on a CPU, where bf16 takes seven times as long."""
    dtype = step_dtype(x)
    return torch.tanh(x) if dtype == x.dtype else torch.tanh(x.to(dtype)).to(x.dtype)


def init_uniform_(weight: Tensor, fan_in: int) -> None:
    """Fill with U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the default of `nn.Linear`, for parameters outside of one."""
    nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
