"""Optimizers, a step that skips non-finite gradients, and learning rate schedules."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nmt.config import OptimConfig

FUSED_DEVICES = ("cpu", "cuda")  # devices whose fused optimizer kernels support `grad_scale` and `found_inf`


def build_optimizer(config: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build a fused Adam or AdamW with betas 0.9 and 0.999, or plain SGD.

    Its state is allocated right away, so that all checkpoints have the same tensors.
    """
    optimizer = OPTIMIZERS[config.name](parameters, lr=0.0, weight_decay=0.0, fused=True)
    [group] = optimizer.param_groups
    for parameter in group["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the state as zeros; without learning rate and weight decay it changes no parameter
    optimizer.zero_grad(set_to_none=True)
    for slots in optimizer.state.values():
        if "step" in slots:
            slots["step"].zero_()
    group["lr"], group["weight_decay"] = config.lr, config.weight_decay  # `train_step` sets the rate of each update
    return optimizer


def step_if_finite(optimizer: torch.optim.Optimizer, max_norm: float | None, loss: Tensor) -> Tensor:
    """Take one step, and return whether it failed.

    Gradients longer than `max_norm` are clipped (Pascanu et al. 2013). The step fails, and nothing changes, if
    the loss or the gradient is not finite.

    A fused optimizer divides by `grad_scale` while it reads the gradients, which saves passes over them, and skips the
    step where `found_inf` is 1. Everything is decided on the device, without synchronization.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_norm = nn.utils.get_total_norm(gradients)
    failed = ~torch.isfinite(total_norm + loss.detach())
    divisor = torch.ones_like(total_norm) if max_norm is None else (total_norm / max_norm).clamp(min=1)
    if total_norm.device.type not in FUSED_DEVICES:
        if not failed:
            torch._foreach_div_(gradients, divisor)
            optimizer.step()
        return failed
    optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]  # must be fp32, whatever the gradient's dtype
    optimizer.found_inf = failed.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return failed


def compute_learning_rate(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    """Return the learning rate of update `step` = 1, 2, ... `total_steps`, after `decays` plateaus.

    All schedules are multiplied by a linear warm-up, step / warmup. Then
    constant: lr; inverse_sqrt: lr sqrt(warmup / step) (Vaswani et al. 2017, eq. 3, up to a constant);
    cosine: half a cosine wave from lr to 0 at `total_steps`; plateau: lr / 2^decays.
    """
    warmup_factor = min(1.0, step / max(1, config.warmup))
    return config.lr * warmup_factor * SCHEDULES[config.schedule](config, step, total_steps, decays)


def scale_by_cosine(config: OptimConfig, step: int, total_steps: int) -> float:
    fraction_done = max(0, step - config.warmup) / max(1, total_steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, fraction_done)))


OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
SCHEDULES: dict[str, Callable[[OptimConfig, int, int, int], float]] = {
    "constant": lambda config, step, total_steps, decays: 1.0,
    "inverse_sqrt": lambda config, step, total_steps, decays: (config.warmup / max(step, config.warmup)) ** 0.5,
    "cosine": lambda config, step, total_steps, decays: scale_by_cosine(config, step, total_steps),
    "plateau": lambda config, step, total_steps, decays: 0.5**decays,
}
