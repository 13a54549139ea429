"""Recurrent cells with handwritten gradients, and layers that call PyTorch's library for a whole sequence.

Shapes: B sentences, N rows, T steps, I input size, D state size, G gates x D (4 gates LSTM, 3 GRU).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmt.model import reference
from nmt.model.kernels.inference_weights import make_plain_linear, prepare_linear, prepare_lstm
from nmt.model.kernels.linear import apply_to_rows, cast_linear_weights, linear_for_steps
from nmt.model.numerics import tanh
from nmt.model.reference import LinearFn, RNNState, RNNStepFn

FLAT_WEIGHT_DEVICES = ("cuda",)  # devices whose library reads the weights of a layer from one buffer


def compute_lstm(gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, ...]:
    """Return h_t and c_t, followed by what the backward pass needs: sigmoids_NG, g and tanh(c_t)."""
    size = c_ND.shape[1]
    sigmoids_NG = torch.sigmoid(gates_NG)
    i, f, _, o = sigmoids_NG.chunk(4, 1)
    g = tanh(gates_NG[:, 2 * size : 3 * size])
    new_c = torch.addcmul(f * c_ND, i, g)
    tanh_c = tanh(new_c)
    return o * tanh_c, new_c, sigmoids_NG, g, tanh_c


class _LSTMCell(torch.autograd.Function):
    """The elementwise part of an LSTM step with a handwritten gradient: half the operations that autograd would run."""

    @staticmethod
    def forward(ctx: Any, gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, Tensor]:
        h_ND, new_c, sigmoids_NG, g, tanh_c = compute_lstm(gates_NG, c_ND)
        ctx.save_for_backward(sigmoids_NG, g, c_ND, tanh_c)
        return h_ND, new_c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        dh, dnew_c = gradients
        sigmoids_NG, g, c, tanh_c = ctx.saved_tensors
        size = c.shape[1]
        i, f, _, o = sigmoids_NG.split(size, 1)
        dgates_NG = torch.empty_like(sigmoids_NG)
        di_f, dg, do = dgates_NG.split([2 * size, size, size], 1)
        di, df = di_f.split(size, 1)
        dtanh_c = torch.mul(dh, o)
        torch.mul(dtanh_c, tanh_c, out=do)
        dc_total = dnew_c + torch.addcmul(dtanh_c, do, tanh_c, value=-1)
        torch.mul(dc_total, i, out=dg)
        torch.mul(dg, g, out=di)
        dc = dc_total * f
        torch.mul(dc, c, out=df)
        # di, df and do now hold gradient times activation; the derivative of a sigmoid adds the factor 1 - activation.
        # dg holds the gradient alone; the derivative of tanh adds the factor 1 - g^2.
        dg.addcmul_(di, g, value=-1)
        di_f.addcmul_(di_f, sigmoids_NG[:, : 2 * size], value=-1)
        do.addcmul_(do, o, value=-1)
        return dgates_NG, dc


def lstm_step(inputs_NG: Tensor | None, hidden_fn: LinearFn, state: RNNState) -> RNNState:
    """Run one LSTM step, see `reference.lstm_cell`.

    The pre-activations are `hidden_fn(h_{t-1}, inputs_NG)`, which adds `inputs_NG`, if there are any, to its own
    product and biases.
    """
    gates_NG, c_ND = hidden_fn(state[0], inputs_NG), state[1]
    return _LSTMCell.apply(gates_NG, c_ND) if torch.is_grad_enabled() else compute_lstm(gates_NG, c_ND)[:2]


def compute_gru(inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> tuple[Tensor, ...]:
    """Return h_t, followed by what the backward pass needs: sigmoids_NG (r and z) and n."""
    size = h_ND.shape[1]
    sigmoids_NG = torch.sigmoid(inputs_NG[:, : 2 * size] + hidden_NG[:, : 2 * size])
    r, z = sigmoids_NG.split(size, 1)
    n = tanh(torch.addcmul(inputs_NG[:, 2 * size :], r, hidden_NG[:, 2 * size :]))
    return torch.lerp(n, h_ND, z), sigmoids_NG, n


class _GRUCell(torch.autograd.Function):
    """The elementwise part of a GRU step with a handwritten gradient, see `_LSTMCell`."""

    @staticmethod
    def forward(ctx: Any, inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> Tensor:
        new_h, sigmoids_NG, n = compute_gru(inputs_NG, hidden_NG, h_ND)
        ctx.save_for_backward(sigmoids_NG, n, hidden_NG, h_ND)
        return new_h

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor]:
        sigmoids_NG, n, hidden_NG, h_ND = ctx.saved_tensors
        [dnew_h] = gradients
        size = h_ND.shape[1]
        r, z = sigmoids_NG.split(size, 1)
        dinputs_NG = torch.empty_like(hidden_NG)
        dr_z, dn = dinputs_NG.split([2 * size, size], 1)
        dr, dz = dr_z.split(size, 1)
        dh = dnew_h * z
        torch.sub(dnew_h, dh, out=dn)
        dn.addcmul_(dn * n, n, value=-1)
        torch.mul(dn, hidden_NG[:, 2 * size :], out=dr)
        torch.mul(dnew_h, h_ND - n, out=dz)
        dr_z.mul_(sigmoids_NG).addcmul_(dr_z, sigmoids_NG, value=-1)
        dhidden_NG = dinputs_NG.clone()
        dhidden_NG[:, 2 * size :].mul_(r)
        return dinputs_NG, dhidden_NG, dh


def gru_step(inputs_NG: Tensor, hidden_fn: LinearFn, state: RNNState) -> RNNState:
    """Run one GRU step, see `reference.gru_cell`, with `hidden_fn(h_{t-1})` for the pre-activations from the state."""
    given = inputs_NG, hidden_fn(state[0]), state[0]
    return (_GRUCell.apply(*given),) if torch.is_grad_enabled() else compute_gru(*given)[:1]


class _SelfInversePermutation(torch.autograd.Function):
    """Reorders positions by a permutation that is its own inverse.

    The backward pass is therefore a gather with the same indices. Autograd's would add to rows, with atomic operations
    on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_BSE.flatten(0, 1).index_select(0, order_R).view_as(x_BSE)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [dx_BSE], [order_R] = gradients, ctx.saved_tensors
        return dx_BSE.flatten(0, 1).index_select(0, order_R).view_as(dx_BSE), None


def permute_positions(x_BSE: Tensor, order_R: Tensor) -> Tensor:
    """Reorder the positions of a batch. The permutation must be its own inverse, like a reversal of each sentence."""
    return _SelfInversePermutation.apply(x_BSE, order_R)


class _FlattenWeights(torch.autograd.Function):
    """Copies weights in `dtype` into one contiguous buffer and returns views of it.

    cuDNN wants the weights of a layer as w_ih, w_hh, b_ih, b_hh in one buffer. For separate tensors it warns and copies
    all of them in every call.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        sizes = [weight.numel() for weight in weights]
        parts = weights[0].new_empty(sum(sizes), dtype=dtype).split(sizes)
        views = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        torch._foreach_copy_(views, list(weights))
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True))


class RNN(reference.RNN):
    """`reference.RNN` with one call of PyTorch's library for a whole sequence, and fewer operations in a step loop."""

    def __init__(self, cell: str, inputs: int, hidden: int, num_projected: int = 0) -> None:
        super().__init__(cell, inputs, hidden, num_projected)
        self.is_lstm = cell == "lstm"
        # Set once the weights no longer change: the maps of `project` and `for_step_loop`, or the layer of `forward`.
        self.inference_fns: dict[str, LinearFn] = {}
        self.inference_layer: Callable[..., tuple[Tensor, ...]] | None = None

    def forward(self, x_BTI: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        run = self.inference_layer or partial(self.torch_layer, self.cast_weights(x_BTI.dtype))
        h_BTD, *final = run(x_BTI, *state)
        return h_BTD, tuple(s.squeeze(0) for s in final)

    def torch_layer(self, weights: tuple[Tensor, ...], x_BTI: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Run PyTorch's layer. Return h_BTD and the final h_1BD (and c_1BD)."""
        batched_state = tuple(s.unsqueeze(0).contiguous() for s in state)
        options = (True, 1, 0.0, self.training, False, True)
        if self.is_lstm:
            return torch.lstm(x_BTI, batched_state, weights, *options)
        return torch.gru(x_BTI, batched_state[0], weights, *options)

    def cast_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the four weights in `dtype`, on a GPU in one buffer."""
        weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if self.weight_ih.device.type in FLAT_WEIGHT_DEVICES:
            return _FlattenWeights.apply(dtype, *weights)
        return tuple(weight.to(dtype) for weight in weights)

    def prepare_layer_for_inference(self) -> None:
        """Lay out the weights of `forward` once. Later changes of the parameters may be ignored."""
        if self.weight_ih.device.type in FLAT_WEIGHT_DEVICES:
            with torch.no_grad():
                flat = self.cast_weights(self.weight_ih.dtype)
            for parameter, view in zip(self.parameters(), flat, strict=True):
                parameter.data = view  # so that memory does not hold the weights twice
            self.inference_layer = partial(self.torch_layer, flat)
        elif self.is_lstm:
            self.inference_layer = prepare_lstm(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)

    def prepare_for_inference(self, int8: bool) -> None:
        """Lay out the weights of `project` and `for_step_loop` once, in int8 if asked."""
        step_weights = self.get_step_weights(is_joint=True)
        self.inference_fns = {name: prepare_linear(*weights, int8) for name, weights in step_weights.items()}
        if self.num_projected:
            weight_GI = self.weight_ih[:, : self.num_projected]
            self.inference_fns["project"] = prepare_linear(weight_GI, self.bias_ih, int8)

    def get_step_weights(self, is_joint: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return weight and bias of each product of a step.

        The pre-activations of an LSTM are sums, so with `is_joint` one product takes input and state, concatenated.
        """
        weight_GI = self.weight_ih[:, self.num_projected :]
        bias_G = None if self.num_projected else self.bias_ih  # otherwise `project` has added it
        if not is_joint or not self.is_lstm:
            return {"input": (weight_GI, bias_G), "hidden": (self.weight_hh, self.bias_hh)}
        joint_bias_G = self.bias_hh if bias_G is None else self.bias_hh + bias_G
        return {"joint": (torch.cat([weight_GI, self.weight_hh], 1), joint_bias_G)}

    def project(self, x: Tensor) -> Tensor:
        """Map (..., num_projected) to (..., G): the part of the pre-activations that is known before the loop.

        Takes all T steps in one product.
        """
        weight_GI = self.weight_ih[:, : self.num_projected]
        project_fn = self.inference_fns.get("project") or make_plain_linear(
            *cast_linear_weights(weight_GI, self.bias_ih, x.dtype)
        )
        return apply_to_rows(project_fn, x)

    def for_step_loop(self, dtype: torch.dtype) -> RNNStepFn:
        # Greedy search prepares again at each step, where joining the weights would cost more than it saves.
        is_joint = torch.is_grad_enabled()
        fns = self.inference_fns or {
            name: linear_for_steps(*weights, dtype) for name, weights in self.get_step_weights(is_joint).items()
        }
        joint_fn = fns.get("joint")
        run_step: Callable[..., RNNState] = lstm_step if self.is_lstm else gru_step

        def step(x_NI: Tensor, state: RNNState, inputs_NG: Tensor | None = None) -> RNNState:
            if joint_fn is None:
                return run_step(fns["input"](x_NI, inputs_NG), fns["hidden"], state)

            def apply_joint(h_ND: Tensor, addend: Tensor | None) -> Tensor:
                return joint_fn(torch.cat([x_NI, h_ND], 1), addend)

            return run_step(inputs_NG, apply_joint, state)

        return step
