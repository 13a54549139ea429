"""The elementwise part of LSTM and GRU steps as one Triton kernel forward and one backward.

The backward pass reads the pre-activations and computes the gates again, so the forward pass writes only the new state.

Shapes: N rows, D state size, G gates x D (4 gates LSTM, 3 GRU).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmt.model.kernels.triton_math import tanh

BLOCK = 512  # values of the state that a program computes


@triton.jit
def _load(x, index, inside):
    return tl.load(x + index, inside, other=0.0).to(tl.float32)


@triton.jit
def _locate(size, D, GATES: tl.constexpr, BLOCK: tl.constexpr):
    """Return indices of this program's values of a state_ND, of their first gates in an (N, GATES x D), and a mask."""
    state = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = (state // D).to(tl.int64)
    return state, n * (GATES * D) + state % D, state < size


@triton.jit
def _lstm_gates(gates_NG, first, D, inside):
    i = tl.sigmoid(_load(gates_NG, first, inside))
    f = tl.sigmoid(_load(gates_NG, first + D, inside))
    g = tanh(_load(gates_NG, first + 2 * D, inside))
    o = tl.sigmoid(_load(gates_NG, first + 3 * D, inside))
    return i, f, g, o


@triton.jit
def _lstm_forward_kernel(gates_NG, c_ND, h_ND, new_c_ND, size, D, BLOCK: tl.constexpr):
    state, first, inside = _locate(size, D, 4, BLOCK)
    i, f, g, o = _lstm_gates(gates_NG, first, D, inside)
    new_c = f * _load(c_ND, state, inside) + i * g
    tl.store(new_c_ND + state, new_c, inside)
    tl.store(h_ND + state, o * tanh(new_c), inside)


@triton.jit
def _lstm_backward_kernel(gates_NG, c_ND, dh_ND, dnew_c_ND, dgates_NG, dc_ND, size, D, BLOCK: tl.constexpr):
    state, first, inside = _locate(size, D, 4, BLOCK)
    i, f, g, o = _lstm_gates(gates_NG, first, D, inside)
    c = _load(c_ND, state, inside)
    dh = _load(dh_ND, state, inside)
    tanh_c = tanh(f * c + i * g)
    dc = _load(dnew_c_ND, state, inside) + dh * o * (1 - tanh_c * tanh_c)
    tl.store(dgates_NG + first, dc * g * i * (1 - i), inside)
    tl.store(dgates_NG + first + D, dc * c * f * (1 - f), inside)
    tl.store(dgates_NG + first + 2 * D, dc * i * (1 - g * g), inside)
    tl.store(dgates_NG + first + 3 * D, dh * tanh_c * o * (1 - o), inside)
    tl.store(dc_ND + state, dc * f, inside)


@triton.jit
def _gru_gates(inputs_NG, hidden_NG, first, D, inside):
    r = tl.sigmoid(_load(inputs_NG, first, inside) + _load(hidden_NG, first, inside))
    z = tl.sigmoid(_load(inputs_NG, first + D, inside) + _load(hidden_NG, first + D, inside))
    hidden_n = _load(hidden_NG, first + 2 * D, inside)
    return r, z, tanh(_load(inputs_NG, first + 2 * D, inside) + r * hidden_n), hidden_n


@triton.jit
def _gru_forward_kernel(inputs_NG, hidden_NG, h_ND, new_h_ND, size, D, BLOCK: tl.constexpr):
    state, first, inside = _locate(size, D, 3, BLOCK)
    _, z, n, _ = _gru_gates(inputs_NG, hidden_NG, first, D, inside)
    tl.store(new_h_ND + state, (1 - z) * n + z * _load(h_ND, state, inside), inside)


@triton.jit
def _gru_backward_kernel(
    inputs_NG, hidden_NG, h_ND, dnew_h_ND, dinputs_NG, dhidden_NG, dh_ND, size, D, BLOCK: tl.constexpr
):
    state, first, inside = _locate(size, D, 3, BLOCK)
    r, z, n, hidden_n = _gru_gates(inputs_NG, hidden_NG, first, D, inside)
    dnew_h = _load(dnew_h_ND, state, inside)
    dn = dnew_h * (1 - z) * (1 - n * n)
    dr = dn * hidden_n * r * (1 - r)
    dz = dnew_h * (_load(h_ND, state, inside) - n) * z * (1 - z)
    tl.store(dinputs_NG + first, dr, inside)
    tl.store(dinputs_NG + first + D, dz, inside)
    tl.store(dinputs_NG + first + 2 * D, dn, inside)
    tl.store(dhidden_NG + first, dr, inside)
    tl.store(dhidden_NG + first + D, dz, inside)
    tl.store(dhidden_NG + first + 2 * D, dn * r, inside)
    tl.store(dh_ND + state, dnew_h * z, inside)


def _launch(kernel: Any, state_ND: Tensor, *tensors: Tensor) -> None:
    """Run a kernel for each value of a state. All tensors must be contiguous."""
    size = state_ND.numel()
    if size:
        with torch.cuda.device_of(state_ND):
            kernel[(triton.cdiv(size, BLOCK),)](*tensors, size, state_ND.shape[1], BLOCK=BLOCK)


class _LSTMCell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, Tensor]:
        gates_NG, c_ND = gates_NG.contiguous(), c_ND.contiguous()
        h_ND, new_c = torch.empty_like(c_ND), torch.empty_like(c_ND)
        _launch(_lstm_forward_kernel, c_ND, gates_NG, c_ND, h_ND, new_c)
        ctx.save_for_backward(gates_NG, c_ND)
        return h_ND, new_c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        gates_NG, c_ND = ctx.saved_tensors
        dgates_NG, dc_ND = torch.empty_like(gates_NG), torch.empty_like(c_ND)
        dh_ND, dnew_c = (gradient.contiguous() for gradient in gradients)
        _launch(_lstm_backward_kernel, c_ND, gates_NG, c_ND, dh_ND, dnew_c, dgates_NG, dc_ND)
        return dgates_NG, dc_ND


class _GRUCell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> Tensor:
        inputs_NG, hidden_NG, h_ND = inputs_NG.contiguous(), hidden_NG.contiguous(), h_ND.contiguous()
        new_h = torch.empty_like(h_ND)
        _launch(_gru_forward_kernel, h_ND, inputs_NG, hidden_NG, h_ND, new_h)
        ctx.save_for_backward(inputs_NG, hidden_NG, h_ND)
        return new_h

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs_NG, hidden_NG, h_ND = ctx.saved_tensors
        dinputs_NG, dhidden_NG, dh_ND = (torch.empty_like(saved) for saved in ctx.saved_tensors)
        dnew_h = gradients[0].contiguous()
        _launch(_gru_backward_kernel, h_ND, inputs_NG, hidden_NG, h_ND, dnew_h, dinputs_NG, dhidden_NG, dh_ND)
        return dinputs_NG, dhidden_NG, dh_ND


def lstm_cell(gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_t and c_t, see `recurrence.lstm_cell`."""
    return _LSTMCell.apply(gates_NG, c_ND)


def gru_cell(inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> tuple[Tensor]:
    """Return (h_t,), see `recurrence.gru_cell`."""
    return (_GRUCell.apply(inputs_NG, hidden_NG, h_ND),)
