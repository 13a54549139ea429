"""What makes a step loop fast: linear maps with deferred weight gradients, cells, and whole-sequence recurrent layers.

In training parameters are kept in fp32 (fp64 when asked); a map computes in the dtype of its input and casts its
weights to it, once for a whole loop. For translation maps are frozen (`frozen.py`) in the dtype in which they compute.

Shapes: B sentences, N rows, T steps, R = T x N, I input size, D state size, G gates x D (4 gates LSTM, 3 GRU), O output
size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model.frozen import Map, freeze, sum_of, whole_lstm

CACHED = 2**19  # numbers that a processor's own caches hold
ROWS = 128  # what `filled` fills up to
State = tuple[Tensor, ...]  # (h_ND, c_ND) of an LSTM layer, (h_ND,) of a GRU layer


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and normalises is fp32 at least, whatever the precision around it."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Linear):
    """`nn.Linear` whose weights follow the dtype of its input, until it is frozen."""

    frozen: Map | None = None  # the map itself, once its weights no longer change

    def freeze(self, int8: bool) -> None:
        self.frozen = freeze(self.weight, self.bias, int8)

    def forward(self, x: Tensor) -> Tensor:
        return by_rows(self.frozen or (lambda x: linear(x, self.weight, self.bias)), x)

    def bind(self, dtype: torch.dtype) -> Map:
        """The same map for use inside a step loop, see `bind`."""
        return self.frozen or bind(self.weight, self.bias, dtype)


def filled(x_RI: Tensor) -> Tensor:
    """In bf16 on a processor with zero rows up to a multiple of `ROWS`: for each new shape of a product a kernel is
    compiled, which takes longer than the product."""
    if x_RI.dtype != torch.bfloat16 or x_RI.device.type != "cpu":
        return x_RI
    return F.pad(x_RI, (0, 0, 0, -len(x_RI) % ROWS))


def by_rows(product: Map, x: Tensor) -> Tensor:
    """A map of the last dimension; rows of x_NTI are `filled` where T > 1."""
    if x.dim() != 3 or x.shape[1] == 1:
        return product(x)
    x_RI = x.flatten(0, 1)
    return product(filled(x_RI))[: len(x_RI)].view(*x.shape[:2], -1)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b in the dtype of x."""
    return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


class Dropout(nn.Module):
    """Zero a share of the values in training and scale the others up by 1 / (1 - share) (Srivastava et al. 2014).

    As `nn.Dropout`, but a processor draws 64 random bits for four values: several times faster, with the share rounded
    to a multiple of 2^-16.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask(x.shape, x) if self.training and self.share else x

    def mask(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Factors 0 or 1 / (1 - share), of the dtype and device of `like`."""
        count = math.prod(shape)
        bits = torch.empty(count // 4 + 1, dtype=torch.int64, device=like.device).random_(-(2**63), None)
        kept = bits.view(torch.int16)[:count] >= round(self.share * 2**16) - 2**15
        return kept.to(like.dtype).mul_(1 / (1 - self.share)).view(shape)


# ----------------------------------------------------------------------------------------- deferred weight gradients
Tape = list[tuple[Tensor, Tensor]]  # (dy_NO, x_NI) of each step


class _Anchor(torch.autograd.Function):
    """Casts a map's weights before a loop. Its backward runs after that of every step and makes the weights' gradients
    from what the steps left on the tape: one product over all T x N rows instead of one, and one addition, a step."""

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, tape: Tape) -> Any:
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.dtype, ctx.biased = tape, weight_OI.dtype, bias_O is not None
        return weight_OI.to(dtype, copy=True), None if bias_O is None else bias_O.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if not ctx.tape:
            return None, None, None, None
        gradients, inputs = zip(*ctx.tape, strict=True)
        ctx.tape.clear()
        dy_RO, x_RI = filled(torch.cat(gradients)), filled(torch.cat(inputs))
        dbias_O = dy_RO.sum(0).to(ctx.dtype) if ctx.biased else None  # summed in fp32 in any case
        return (dy_RO.t() @ x_RI).to(ctx.dtype), dbias_O, None, None


class _Step(torch.autograd.Function):
    """y = x W^T + b + plus by `product`; backward returns dx at once and leaves (dy, x) on the tape for the anchor of W
    and b."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, plus: Tensor | None, product: Map, tape: Tape
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.tape = tape
        return product(x_NI, plus)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_NI, weight_OI = ctx.saved_tensors
        ctx.tape.append((gradients[0], x_NI))
        return gradients[0] @ weight_OI, None, None, gradients[0] if ctx.needs_input_grad[3] else None, None, None


def bind(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Map:
    """A linear map (x_NI, plus) -> x W^T + b + plus for one step loop: weights are cast and laid out once, their
    gradients are one product at the end.

    It must not outlive the loop's backward pass: bind again for the next loop.
    """
    if not torch.is_grad_enabled():
        weight, bias = weight_OI.to(dtype), None if bias_O is None else bias_O.to(dtype)
        return lambda x_NI, plus=None: sum_of(F.linear(x_NI, weight, bias), plus)
    tape: Tape = []
    weight, bias = _Anchor.apply(weight_OI, bias_O, dtype, tape)
    product = freeze(weight, bias, int8=False)
    return lambda x_NI, plus=None: _Step.apply(x_NI, weight, bias, plus, product, tape)


class _Shared(torch.autograd.Function):
    """The right-hand side of products in a loop. Its backward runs after that of every step and makes its gradient from
    what the steps left on the tape, as `_Anchor`'s does."""

    @staticmethod
    def forward(ctx: Any, values_BHSM: Tensor, tape: Tape) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        return values_BHSM.view_as(values_BHSM)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if not ctx.tape:
            return None, None
        gradients, weights = zip(*ctx.tape, strict=True)
        ctx.tape.clear()
        return torch.cat(weights, 2).transpose(2, 3) @ torch.cat(gradients, 2), None


class _Read(torch.autograd.Function):
    """c = w V; backward returns dw at once and leaves (dc, w) on the tape for V."""

    @staticmethod
    def forward(ctx: Any, weights_BHQS: Tensor, values_BHSM: Tensor, tape: Tape) -> Tensor:
        ctx.save_for_backward(weights_BHQS, values_BHSM)
        ctx.tape = tape
        return weights_BHQS @ values_BHSM

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights_BHQS, values_BHSM = ctx.saved_tensors
        ctx.tape.append((gradients[0], weights_BHQS))
        return gradients[0] @ values_BHSM.transpose(2, 3), None, None


def bind_values(values_BHSM: Tensor) -> Callable[[Tensor], Tensor]:
    """A map weights_BHQS -> weights values, for one step loop: the gradient of the values is one product at the end. As
    with `bind`, it must not outlive the loop's backward pass."""
    if not torch.is_grad_enabled():
        return lambda weights_BHQS: weights_BHQS @ values_BHSM
    tape: Tape = []
    anchor = _Shared.apply(values_BHSM, tape)
    return lambda weights_BHQS: _Read.apply(weights_BHQS, anchor, tape)


class _Table(torch.autograd.Function):
    """A table whose rows are taken in a loop. Its backward runs after that of every step and returns the one gradient
    in which the steps have added up theirs."""

    @staticmethod
    def forward(ctx: Any, table_RA: Tensor, total: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.dtype = total, table_RA.dtype
        return table_RA.view_as(table_RA)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.total.pop().to(ctx.dtype) if ctx.total else None, None


class _Rows(torch.autograd.Function):
    """Rows of a table; the backward pass adds to as many rows of `total`, not to a new gradient of the whole table."""

    @staticmethod
    def forward(ctx: Any, table_RA: Tensor, index: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.total = table_RA.shape, total
        return table_RA.index_select(0, index.flatten()).view(*index.shape, table_RA.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.total:
            ctx.total.append(gradients[0].new_zeros(ctx.shape, dtype=wide(gradients[0].dtype)))
        index = ctx.saved_tensors[0].flatten()
        ctx.total[0].index_add_(0, index, gradients[0].reshape(len(index), ctx.shape[1]).to(ctx.total[0].dtype))
        return None, None, None


def bind_rows(table_RA: Tensor) -> Callable[[Tensor], Tensor]:
    """A map index -> rows of a table, shaped (*index, A), for one step loop: what a step costs, there and back, does
    not depend on the length of the table. As with `bind`, it must not outlive the loop's backward pass."""
    total: list[Tensor] = []
    anchor = _Table.apply(table_RA, total)
    return lambda index: _Rows.apply(anchor, index, total)


# ------------------------------------------------------------------------------------------------------------- cells
def tanh(x: Tensor) -> Tensor:
    """`torch.tanh`. A processor takes seven times as long for it in bf16 as in fp32: there it goes by way of fp32."""
    dtype = tanh_dtype(x)
    return torch.tanh(x) if dtype == x.dtype else torch.tanh(x.to(dtype)).to(x.dtype)


def tanh_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the device of `x` computes tanh fastest, with at least the precision of `x`."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow and x.device.type == "cpu" else x.dtype


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


def lstm_cell(inputs_NG: Tensor | None, hidden: Map, state: State) -> State:
    """One LSTM step (Hochreiter and Schmidhuber 1997, with forget gates) from its pre-activations.

    i, f, o = sigmoid(.), g = tanh(.); c_t = f c_{t-1} + i g; h_t = o tanh(c_t). Gates are stacked as i, f, g, o;
    `hidden(h_{t-1}, inputs_NG)` is what comes from the input, if it is known, and the rest, biases included.
    """
    gates_NG = hidden(state[0], inputs_NG)
    return _LSTMCell.apply(gates_NG, state[1]) if torch.is_grad_enabled() else _lstm(gates_NG, state[1])[:2]


def gru_cell(inputs_NG: Tensor, hidden: Map, state: State) -> State:
    """One GRU step (Cho et al. 2014) with the reset gate after the product, as in cuDNN, from its pre-activations.

    r, z = sigmoid(.); n = tanh(i_n + r h_n); h_t = (1 - z) n + z h_{t-1}. Gates are stacked as r, z, n.
    """
    h_ND = state[0]
    hidden_NG, size = hidden(h_ND), h_ND.shape[1]
    r, z = torch.sigmoid(inputs_NG[:, : 2 * size] + hidden_NG[:, : 2 * size]).split(size, 1)
    n = tanh(torch.addcmul(inputs_NG[:, 2 * size :], r, hidden_NG[:, 2 * size :]))
    return (torch.lerp(n, h_ND, z),)


CELLS = {"lstm": (lstm_cell, 4, 2), "gru": (gru_cell, 3, 1)}  # step, gates, tensors of state


class RNN(nn.Module):
    """One unidirectional recurrent layer: a whole sequence in one call, or a map for each step of a loop."""

    def __init__(self, cell: str, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell: Callable[..., State]
        self.cell, gates, self.states = CELLS[cell]
        self.hidden = hidden
        # Once weights no longer change, the maps of `project` and `bind`, or the layer as `forward` calls it.
        self.frozen: dict[str, Map] = {}
        self.frozen_whole: Callable[..., tuple[Tensor, ...]] | None = None
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
        if self.frozen_whole is not None:
            h_BTD, *final = self.frozen_whole(x_BTI, *state)
            return h_BTD, tuple(s.squeeze(0) for s in final)
        weights = [w.to(x_BTI.dtype) for w in (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)]
        start = tuple(s.unsqueeze(0).contiguous() for s in state)
        initial = start if self.states == 2 else start[0]
        h_BTD, *final = self.whole(x_BTI, initial, weights, True, 1, 0.0, self.training, False, True)
        return h_BTD, tuple(s.squeeze(0) for s in final)

    def freeze_whole(self) -> None:
        """Fix the weights of `forward`."""
        if self.cell is lstm_cell:
            self.frozen_whole = whole_lstm(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)

    def freeze(self, projected: int, int8: bool) -> None:
        """Fix the weights of `project` and `bind`, to be called with so many projected inputs."""
        self.frozen = {name: freeze(*parts, int8) for name, parts in self.parts(projected, joined=True).items()}
        if projected:
            self.frozen["project"] = freeze(self.weight_ih[:, :projected], self.bias_ih, int8)

    def parts(self, projected: int, joined: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Weights and biases of a step's products. The gates of an LSTM are sums: one product can make both halves."""
        weight_GI, bias_G = self.weight_ih[:, projected:], None if projected else self.bias_ih
        if not joined or self.cell is not lstm_cell:
            return {"input": (weight_GI, bias_G), "hidden": (self.weight_hh, self.bias_hh)}
        bias_G = self.bias_hh if bias_G is None else self.bias_hh + bias_G
        return {"both": (torch.cat([weight_GI, self.weight_hh], 1), bias_G)}

    def project(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., G): what the first I inputs add to the pre-activations, biases included, for all T steps at
        once."""
        weight_GI = self.weight_ih[:, : x.shape[-1]]
        return by_rows(self.frozen.get("project") or (lambda x: linear(x, weight_GI, self.bias_ih)), x)

    def bind(self, dtype: torch.dtype, projected: int = 0) -> "Step":
        """The layer as a step of a loop. Its first `projected` inputs have gone through `project` outside the loop.

        Returns step(x_NI, state, inputs_NG) -> state, where x are the other inputs and `inputs_NG` is a step of what
        `project` returned, None if `projected` is 0.
        """
        assert not self.frozen or bool(projected) == ("project" in self.frozen)
        joined = torch.is_grad_enabled()  # in validation a loop has one step, and to join weights would take longer
        maps = self.frozen or {name: bind(*parts, dtype) for name, parts in self.parts(projected, joined).items()}
        both = maps.get("both")

        def step(x_NI: Tensor, state: State, inputs_NG: Tensor | None = None) -> State:
            if both is None:
                return self.cell(maps["input"](x_NI, inputs_NG), maps["hidden"], state)
            return self.cell(inputs_NG, lambda h_ND, plus: both(torch.cat([x_NI, h_ND], 1), plus), state)

        return step


Step = Callable[..., State]


def uniform_(weight: Tensor, fan: int) -> None:
    """U(-1/sqrt(fan), 1/sqrt(fan)), torch's own default for linear maps, for parameters that stand alone."""
    nn.init.uniform_(weight, -1 / math.sqrt(fan), 1 / math.sqrt(fan))
