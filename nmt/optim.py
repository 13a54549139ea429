"""Optimisers by name, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from nmt.config import OptimConfig


def build_optimiser(config: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with betas 0.9 and 0.999, or plain SGD; fused into one pass over the parameters."""
    return OPTIMISERS[config.name](parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)


def clip(optimiser: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Shorten the whole gradient to the norm, if it is longer (Pascanu et al. 2013). A fused optimiser divides by
    `grad_scale` as it reads: that saves a pass over all gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale = (nn.utils.get_total_norm(gradients) / norm).clamp(min=1)
    optimiser.grad_scale = scale.float()  # type: ignore[attr-defined]  # which it wants of all dtypes


def learning_rate(config: OptimConfig, step: int, last_step: int, decays: int) -> float:
    """The rate of update `step` = 1, 2, ... `last_step`; `decays` counts the plateaus so far.

    warm-up: lr step / warmup, then constant: lr; inverse_sqrt: lr sqrt(warmup / step) (Vaswani et al. 2017, eq. 3, up
    to a constant); cosine: half a wave from lr down to 0 at `last_step`; plateau: lr decay^decays.
    """
    return (
        config.lr
        * min(1.0, step / config.warmup if config.warmup else 1.0)
        * SCHEDULES[config.schedule](config, step, last_step, decays)
    )


def constant(config: OptimConfig, step: int, last_step: int, decays: int) -> float:
    return 1.0


def inverse_sqrt(config: OptimConfig, step: int, last_step: int, decays: int) -> float:
    return (config.warmup / max(step, config.warmup)) ** 0.5


def cosine(config: OptimConfig, step: int, last_step: int, decays: int) -> float:
    share = max(0, step - config.warmup) / max(1, last_step - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def plateau(config: OptimConfig, step: int, last_step: int, decays: int) -> float:
    return config.decay**decays


OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
SCHEDULES = {"constant": constant, "inverse_sqrt": inverse_sqrt, "cosine": cosine, "plateau": plateau}
