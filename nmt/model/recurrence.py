"""Recurrent cells and layers: a whole sequence in one call, or a step of a loop.

Shapes: B sentences, N rows, T steps, I input size, D state size, G gates x D (4 gates LSTM, 3 GRU).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmt.model.kernels.inference_weights import LinearFn, plain, prepare_linear, whole_lstm
from nmt.model.kernels.linear import by_rows, cast, linear_for_steps, tanh

State = tuple[Tensor, ...]  # (h_ND, c_ND) of an LSTM layer, (h_ND,) of a GRU layer
FLAT = ("cuda",)  # devices whose library reads the weights of a layer from one buffer
FUSED_BIAS = ("cpu",)  # devices on which a product adds a bias at no cost


def _lstm(gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, ...]:
    """h_t and c_t, and what their gradients are made of."""
    size = c_ND.shape[1]
    sigmoids_NG = torch.sigmoid(gates_NG)
    i, f, _, o = sigmoids_NG.chunk(4, 1)
    g = tanh(gates_NG[:, 2 * size : 3 * size])
    new_c = torch.addcmul(f * c_ND, i, g)
    tanh_c = tanh(new_c)
    return o * tanh_c, new_c, sigmoids_NG, g, tanh_c


class _LSTMCell(torch.autograd.Function):
    """The pointwise half of an LSTM step with its gradient written out: half the operations that autograd would run."""

    @staticmethod
    def forward(ctx: Any, gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, Tensor]:
        h_ND, new_c, sigmoids_NG, g, tanh_c = _lstm(gates_NG, c_ND)
        ctx.save_for_backward(sigmoids_NG, g, c_ND, tanh_c)
        return h_ND, new_c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        dh, dc_next = gradients
        sigmoids_NG, g, c, tanh_c = ctx.saved_tensors
        size = c.shape[1]
        i, f, _, o = sigmoids_NG.split(size, 1)
        dgates_NG = torch.empty_like(sigmoids_NG)
        di_f, dg, do = dgates_NG.split([2 * size, size, size], 1)
        di, df = di_f.split(size, 1)
        through_o = torch.mul(dh, o)
        torch.mul(through_o, tanh_c, out=do)
        dc = dc_next + torch.addcmul(through_o, do, tanh_c, value=-1)
        torch.mul(dc, i, out=dg)
        torch.mul(dg, g, out=di)
        before = dc * f
        torch.mul(before, c, out=df)
        # Each is now a gradient times an activation; what is left is 1 - activation, of g the square.
        dg.addcmul_(di, g, value=-1)
        di_f.addcmul_(di_f, sigmoids_NG[:, : 2 * size], value=-1)
        do.addcmul_(do, o, value=-1)
        return dgates_NG, before


def lstm_cell(inputs_NG: Tensor | None, hidden: LinearFn, state: State) -> State:
    """One LSTM step (Hochreiter and Schmidhuber 1997, with forget gates) from its pre-activations.

    i, f, o = sigmoid(.), g = tanh(.); c_t = f c_{t-1} + i g; h_t = o tanh(c_t). Gates are stacked as i, f, g, o;
    `hidden(h_{t-1}, inputs_NG)` is what comes from the input, if it is known, and the rest, biases included.
    """
    gates_NG = hidden(state[0], inputs_NG)
    return _LSTMCell.apply(gates_NG, state[1]) if torch.is_grad_enabled() else _lstm(gates_NG, state[1])[:2]


def _gru(inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> tuple[Tensor, ...]:
    """h_t, and what its gradient is made of."""
    size = h_ND.shape[1]
    sigmoids_NG = torch.sigmoid(inputs_NG[:, : 2 * size] + hidden_NG[:, : 2 * size])
    r, z = sigmoids_NG.split(size, 1)
    n = tanh(torch.addcmul(inputs_NG[:, 2 * size :], r, hidden_NG[:, 2 * size :]))
    return torch.lerp(n, h_ND, z), sigmoids_NG, n


class _GRUCell(torch.autograd.Function):
    """As `_LSTMCell`, of a GRU step."""

    @staticmethod
    def forward(ctx: Any, inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> Tensor:
        new_h, sigmoids_NG, n = _gru(inputs_NG, hidden_NG, h_ND)
        ctx.save_for_backward(sigmoids_NG, n, hidden_NG, h_ND)
        return new_h

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor]:
        sigmoids_NG, n, hidden_NG, h_ND = ctx.saved_tensors
        (dnew,), size = gradients, h_ND.shape[1]
        r, z = sigmoids_NG.split(size, 1)
        dinputs_NG = torch.empty_like(hidden_NG)
        dr_z, dn = dinputs_NG.split([2 * size, size], 1)
        dr, dz = dr_z.split(size, 1)
        dh = dnew * z
        torch.sub(dnew, dh, out=dn)
        dn.addcmul_(dn * n, n, value=-1)
        torch.mul(dn, hidden_NG[:, 2 * size :], out=dr)
        torch.mul(dnew, h_ND - n, out=dz)
        dr_z.mul_(sigmoids_NG).addcmul_(dr_z, sigmoids_NG, value=-1)
        dhidden_NG = dinputs_NG.clone()
        dhidden_NG[:, 2 * size :].mul_(r)
        return dinputs_NG, dhidden_NG, dh


def gru_cell(inputs_NG: Tensor, hidden: LinearFn, state: State) -> State:
    """One GRU step (Cho et al. 2014) with the reset gate after the product, as in cuDNN, from its pre-activations.

    r, z = sigmoid(.); n = tanh(i_n + r h_n); h_t = (1 - z) n + z h_{t-1}. Gates are stacked as r, z, n.
    """
    gates = inputs_NG, hidden(state[0]), state[0]
    return (_GRUCell.apply(*gates),) if torch.is_grad_enabled() else _gru(*gates)[:1]


CELLS = {"lstm": (lstm_cell, 4, 2), "gru": (gru_cell, 3, 1)}  # step, gates, tensors of state


class _Flatten(torch.autograd.Function):
    """Copies of weights in `dtype`, side by side in one buffer, as views of it.

    cuDNN wants the weights of a layer as w_ih, w_hh, b_ih, b_hh in one buffer. Given separate tensors it warns and
    copies all of them in every call.
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


class RNN(nn.Module):
    """One unidirectional recurrent layer: a whole sequence in one call, or a map for each step of a loop, outside which
    the first `projected` inputs go through `project`."""

    def __init__(self, cell: str, inputs: int, hidden: int, projected: int = 0) -> None:
        super().__init__()
        self.cell: Callable[..., State]
        self.cell, gates, self.states = CELLS[cell]
        self.hidden, self.projected = hidden, projected
        # Once weights no longer change: the maps of `project` and `prepare_steps`, or the layer of `forward`.
        self.inference_fns: dict[str, LinearFn] = {}
        self.inference_layer: Callable[..., tuple[Tensor, ...]] | None = None
        self.whole: Callable[..., Any] = torch.lstm if cell == "lstm" else torch.gru
        self.weight_ih = nn.Parameter(torch.empty(gates * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(gates * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.zeros(gates * hidden))
        self.bias_hh = nn.Parameter(torch.zeros(gates * hidden))
        for block in self.weight_ih.detach().split(hidden):
            nn.init.xavier_uniform_(block)
        for block in self.weight_hh.detach().split(hidden):
            nn.init.orthogonal_(block)
        if cell == "lstm":
            nn.init.ones_(self.bias_ih.detach()[hidden : 2 * hidden])  # remember at first (Jozefowicz et al. 2015)

    def zeros(self, like_BTI: Tensor) -> State:
        """The state before the first step, for a batch like `like_BTI`."""
        return (like_BTI.new_zeros(like_BTI.shape[0], self.hidden),) * self.states

    def forward(self, x_BTI: Tensor, state: State) -> tuple[Tensor, State]:
        """All T steps at once. Returns the outputs h_BTD and the state after the last step."""
        run = self.inference_layer or partial(self.torch_layer, self.cast_weights(x_BTI.dtype))
        h_BTD, *final = run(x_BTI, *state)
        return h_BTD, tuple(s.squeeze(0) for s in final)

    def torch_layer(self, weights: tuple[Tensor, ...], x_BTI: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The layer as torch has it: h_BTD and the last h_1BD (and c_1BD)."""
        start = tuple(s.unsqueeze(0).contiguous() for s in state)
        initial = start if self.states == 2 else start[0]
        return self.whole(x_BTI, initial, weights, True, 1, 0.0, self.training, False, True)

    def cast_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The four weights in `dtype`, on a GPU in one buffer."""
        weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if self.weight_ih.device.type in FLAT:
            return _Flatten.apply(dtype, *weights)
        return tuple(weight.to(dtype) for weight in weights)

    def prepare_layer_for_inference(self) -> None:
        """Fix the weights of `forward`."""
        if self.weight_ih.device.type in FLAT:
            with torch.no_grad():
                flat = self.cast_weights(self.weight_ih.dtype)
            for parameter, view in zip(self.parameters(), flat, strict=True):
                parameter.data = view  # so that memory holds them once
            self.inference_layer = partial(self.torch_layer, flat)
        elif self.cell is lstm_cell:
            self.inference_layer = whole_lstm(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)

    def prepare_for_inference(self, int8: bool) -> None:
        """Fix the weights of `project` and `linear_for_steps`."""
        self.inference_fns = {name: prepare_linear(*parts, int8) for name, parts in self.parts(joined=True).items()}
        if self.projected:
            self.inference_fns["project"] = prepare_linear(self.weight_ih[:, : self.projected], self.biases()[0], int8)

    def biases(self) -> tuple[Tensor | None, ...]:
        """The biases of `project`, of a step's product with its input, and of that with the state. The gates of an LSTM
        are sums, so where a bias costs a step something, `project` adds both."""
        if not self.projected:
            return None, self.bias_ih, self.bias_hh
        if self.cell is lstm_cell and self.bias_ih.device.type not in FUSED_BIAS:
            return self.bias_ih + self.bias_hh, None, None
        return self.bias_ih, None, self.bias_hh

    def parts(self, joined: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Weights and biases of a step's products. The gates of an LSTM are sums: one product can make both halves."""
        weight_GI, (_, bias_G, hidden_bias_G) = self.weight_ih[:, self.projected :], self.biases()
        if not joined or self.cell is not lstm_cell:
            return {"input": (weight_GI, bias_G), "hidden": (self.weight_hh, hidden_bias_G)}
        both_G = hidden_bias_G if bias_G is None else self.bias_hh + bias_G
        return {"both": (torch.cat([weight_GI, self.weight_hh], 1), both_G)}

    def project(self, x: Tensor) -> Tensor:
        """(..., projected) -> (..., G): what these inputs add to the pre-activations, biases included, for all T steps
        at once."""
        weight_GI = self.weight_ih[:, : self.projected]
        return by_rows(self.inference_fns.get("project") or plain(*cast(weight_GI, self.biases()[0], x.dtype)), x)

    def prepare_steps(self, dtype: torch.dtype) -> "RecurrentStep":
        """The layer as a step of a loop.

        Returns step(x_NI, state, inputs_NG) -> state, where x are the inputs that are not projected and `inputs_NG` is
        a step of what `project` returned, None where none are.
        """
        joined = torch.is_grad_enabled()  # greedy search binds anew at each step: to join weights would take longer
        maps = self.inference_fns or {
            name: linear_for_steps(*parts, dtype) for name, parts in self.parts(joined).items()
        }
        both = maps.get("both")

        def step(x_NI: Tensor, state: State, inputs_NG: Tensor | None = None) -> State:
            if both is None:
                return self.cell(maps["input"](x_NI, inputs_NG), maps["hidden"], state)
            return self.cell(inputs_NG, lambda h_ND, plus: both(torch.cat([x_NI, h_ND], 1), plus), state)

        return step


RecurrentStep = Callable[..., State]
