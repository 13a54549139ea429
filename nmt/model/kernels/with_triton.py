"""The fast parts, with Triton kernels in place of some of their operations: `model.kernels=triton`.

Triton is imported at the first call that uses it. Tensors that it cannot take go to the fast parts: those of a CPU, so
that a model trained on a GPU translates anywhere, and fp64.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from nmt.errors import UserError
from nmt.model.kernels import additive, loss, recurrence
from nmt.model.loss import Loss
from nmt.model.normalizers import softmax
from nmt.model.reference import LinearFn, RNNState


def is_interpreting() -> bool:
    """Return whether Triton runs its kernels in Python, on the CPU, which only tests want."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def is_installed() -> bool:
    """Return whether there are Triton and a C compiler, which it calls once to talk to the GPU's driver."""
    has_compiler = is_interpreting() or bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    return has_compiler and importlib.util.find_spec("triton") is not None


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton kernels can take a tensor."""
    return x.dtype != torch.float64 and (x.is_cuda or is_interpreting()) and is_installed()


def check_triton(device: torch.device, precision: str) -> None:
    """Raise a `UserError` if a run cannot train with `model.kernels=triton`."""
    if device.type != "cuda" and not is_interpreting():
        raise UserError(f"model.kernels=triton needs an NVIDIA GPU, not device={device}; use model.kernels=fast")
    if precision == "fp64":
        raise UserError("model.kernels=triton computes in fp32 and below, not precision=fp64; use model.kernels=fast")
    if not is_installed():
        raise UserError(
            "model.kernels=triton needs the package triton, which comes with PyTorch for CUDA on Linux, and a C "
            "compiler (gcc or clang); use model.kernels=fast"
        )


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
    """Return the cross-entropy of softmax(x W^T + b), see `reference.cross_entropy`. R-Drop takes the fast version."""
    if r_drop or not uses_triton(x_RD):
        return loss.cross_entropy(x_RD, weight_VD, bias_V, target_R, smoothing, r_drop, output_fn, pad)
    from nmt.model.kernels import triton_loss

    return triton_loss.cross_entropy(x_RD, weight_VD, bias_V, target_R, smoothing, output_fn, pad)


def lstm_cell(gates_NG: Tensor, c_ND: Tensor) -> RNNState:
    """Return h_t and c_t, see `recurrence.lstm_cell`."""
    if not uses_triton(gates_NG):
        return recurrence.lstm_cell(gates_NG, c_ND)
    from nmt.model.kernels import triton_recurrence

    return triton_recurrence.lstm_cell(gates_NG, c_ND)


def gru_cell(inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> RNNState:
    """Return (h_t,), see `recurrence.gru_cell`."""
    if not uses_triton(inputs_NG):
        return recurrence.gru_cell(inputs_NG, hidden_NG, h_ND)
    from nmt.model.kernels import triton_recurrence

    return triton_recurrence.gru_cell(inputs_NG, hidden_NG, h_ND)


class RNN(recurrence.RNN):
    """`recurrence.RNN` with Triton kernels for the elementwise part of a step."""

    cell_fns = {"lstm": lstm_cell, "gru": gru_cell}


def attention_for_steps(
    keys_BHSA: Tensor, values_BHSM: Tensor, v: Tensor, length_B: Tensor, normalize: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """Return query_BHQA -> (context_BHQM, weights_BHQS) for one step loop, see `reference.additive_attention`.

    `v` has the values of all heads. Returns None if the parts of attention have to run one by one.
    """
    if not uses_triton(keys_BHSA):
        return additive.attention_for_steps(keys_BHSA, values_BHSM, v, length_B, normalize)
    from nmt.model.kernels import triton_attention

    if normalize is not softmax or keys_BHSA.shape[2] > triton_attention.MAX_POSITIONS:
        return None
    v_HA = v.to(keys_BHSA.dtype).view(keys_BHSA.shape[1], -1)
    return triton_attention.attention_for_steps(keys_BHSA, values_BHSM, v_HA, length_B)
