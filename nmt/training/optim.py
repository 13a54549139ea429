"""Optimizers by name, a step that nothing but numbers passes, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nmt.config import OptimConfig

GUARDED = ("cpu", "cuda")  # devices whose fused kernels know `grad_scale` and `found_inf`
STEADY = 2000  # updates after which a larger loss scale is tried


class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16: halved after an update that
    failed, doubled after `STEADY` that did not (Micikevicius et al. 2018, section 3.2). In other precisions it stays 1.

    Both are tensors, so that nobody waits for what came of an update.
    """

    def __init__(self, adapts: bool, factor: float, steady: int, device: torch.device) -> None:
        self.adapts = adapts
        self.factor = torch.tensor(factor, device=device)
        self.steady = torch.tensor(steady, device=device)  # updates since it last changed

    def adapt(self, failed: Tensor) -> None:
        if self.adapts:
            self.steady = torch.where(failed, 0, (self.steady + 1) % STEADY)
            grown = torch.where(self.steady == 0, 2 * self.factor, self.factor)
            self.factor = torch.where(failed, self.factor / 2, grown)


def build_optimizer(config: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam or AdamW with betas 0.9 and 0.999, or plain SGD; fused into one pass over the parameters. It has its whole
    state from the first, so that every checkpoint has the same tensors."""
    optimizer = OPTIMIZERS[config.name](parameters, lr=0.0, weight_decay=0.0, fused=True)
    [group] = optimizer.param_groups
    for parameter in group["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # without rate and decay: it makes the state, of zeros, and changes nothing
    optimizer.zero_grad(set_to_none=True)
    for slots in optimizer.state.values():
        if "step" in slots:
            slots["step"].zero_()
    group["lr"], group["weight_decay"] = config.lr, config.weight_decay
    return optimizer


def guarded_step(optimizer: torch.optim.Optimizer, norm: float | None, scale: Tensor, loss: Tensor) -> Tensor:
    """One step with gradients that are `scale` times too large, shortened to a norm if they are longer (Pascanu et al.
    2013). Returns whether it failed: if the loss or the gradient is not finite, nothing changes.

    A fused optimizer divides by `grad_scale` as it reads, which saves passes over all gradients, and does nothing where
    `found_inf` is 1. All is decided on the device; nobody waits for it.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm(gradients)
    failed = ~torch.isfinite(total + loss.detach())
    divisor = scale if norm is None else torch.maximum(scale, total / norm)
    if total.device.type not in GUARDED:  # its kernels leave both out of account
        if not failed:
            torch._foreach_div_(gradients, divisor)
            optimizer.step()
        return failed
    optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]  # it wants both in fp32, whatever the gradient
    optimizer.found_inf = failed.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return failed


def learning_rate(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    """The rate of update `step` = 1, 2, ... `total_steps`; `decays` counts the plateaus so far.

    warm-up: lr step / warmup, then constant: lr; inverse_sqrt: lr sqrt(warmup / step) (Vaswani et al. 2017, eq. 3, up
    to a constant); cosine: half a wave from lr down to 0 at `total_steps`; plateau: lr decay^decays.
    """
    return (
        config.lr
        * min(1.0, step / max(1, config.warmup))
        * SCHEDULES[config.schedule](config, step, total_steps, decays)
    )


def constant(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    return 1.0


def inverse_sqrt(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    return (config.warmup / max(step, config.warmup)) ** 0.5


def cosine(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    share = max(0, step - config.warmup) / max(1, total_steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def plateau(config: OptimConfig, step: int, total_steps: int, decays: int) -> float:
    return config.decay**decays


OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
SCHEDULES = {"constant": constant, "inverse_sqrt": inverse_sqrt, "cosine": cosine, "plateau": plateau}
