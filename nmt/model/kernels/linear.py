"""Linear maps, also for step loops: what can leave a loop is done once, outside it.

In training parameters are kept in fp32 (fp64 when asked); a map computes in the dtype of its input and casts its
weights to it, once for a whole loop. For translation, weights are cast once (`inference_weights.py`).

Shapes: N rows, T steps, R = T x N, I input size, O output size; B sentences, H heads, Q queries, S source positions, M
memory size; P rows of a table, A their size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model.kernels.inference_weights import LinearFn, plain, prepare_linear

CACHED = 2**19  # numbers that a processor's own caches hold
ROWS = 128  # what `pad_rows` fills up to


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and normalizes is fp32 at least, whatever the precision around it."""
    return torch.promote_types(dtype, torch.float32)


def tanh(x: Tensor) -> Tensor:
    """`torch.tanh`. A processor takes seven times as long for it in bf16 as in fp32: there it goes by way of fp32."""
    dtype = step_dtype(x)
    return torch.tanh(x) if dtype == x.dtype else torch.tanh(x.to(dtype)).to(x.dtype)


def step_dtype(x: Tensor) -> torch.dtype:
    """The dtype, with at least the precision of `x`, in which its device is fastest at what a step does besides
    products with weights: tanh, and products with a single query."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow and x.device.type == "cpu" else x.dtype


def init_uniform_(weight: Tensor, fan: int) -> None:
    """U(-1/sqrt(fan), 1/sqrt(fan)), torch's own default for linear maps, for parameters that stand alone."""
    nn.init.uniform_(weight, -1 / math.sqrt(fan), 1 / math.sqrt(fan))


class Linear(nn.Linear):
    """`nn.Linear` whose weights follow the dtype of its input, until it is frozen."""

    inference_fn: LinearFn | None = None  # set once the weights no longer change

    def prepare_for_inference(self, int8: bool) -> None:
        self.inference_fn = prepare_linear(self.weight, self.bias, int8)

    def forward(self, x: Tensor) -> Tensor:
        return by_rows(self.inference_fn or plain(*cast(self.weight, self.bias, x.dtype)), x)

    def prepare_steps(self, dtype: torch.dtype) -> LinearFn:
        """The same map for use inside a step loop, see `linear_for_steps`."""
        return self.inference_fn or linear_for_steps(self.weight, self.bias, dtype)


def pad_rows(x_RI: Tensor) -> Tensor:
    """In bf16 on a processor with zero rows up to a multiple of `ROWS`: for each new shape of a product a kernel is
    compiled, which takes longer than the product."""
    if x_RI.dtype != torch.bfloat16 or x_RI.device.type != "cpu":
        return x_RI
    return F.pad(x_RI, (0, 0, 0, -len(x_RI) % ROWS))


def by_rows(product: LinearFn, x: Tensor) -> Tensor:
    """A map of the last dimension; rows of x_NTI are `pad_rows` where T > 1."""
    if x.dim() != 3 or x.shape[1] == 1:
        return product(x)
    x_RI = x.flatten(0, 1)
    return product(pad_rows(x_RI))[: len(x_RI)].view(*x.shape[:2], -1)


def cast(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight_OI.to(dtype), None if bias_O is None else bias_O.to(dtype)


class Dropout(nn.Module):
    """Zero a share p of the values in training and scale the others up by 1 / (1 - p) (Srivastava et al. 2014).

    As `nn.Dropout`, but on a CPU 64 random bits are drawn for four values: several times faster, with p rounded to a
    multiple of 2^-16.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)  # one kernel
        bits = torch.empty(x.numel() // 4 + 1, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()] >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p)).view(x.shape)


# ------------------------------------------------------------------------------------------------ deferred gradients
class _Anchor(torch.autograd.Function):
    """Tensors that all steps of a loop share. Its backward runs after that of every step and returns what `collect`
    makes of what these have left: one product over all T x N rows instead of one, and one addition, a step."""

    @staticmethod
    def forward(ctx: Any, collect: Callable[[], tuple[Tensor | None, ...]], *shared: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.collect = collect
        return tuple(None if part is None else part.view_as(part) for part in shared)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.collect()


Tape = list[tuple[Tensor, Tensor]]  # of each step (dy_NO, x_NI) of a map, (dc_BHQM, w_BHQS) of weighted sums


def joined(tape: Tape, dim: int) -> tuple[Tensor, Tensor]:
    """What all steps have left on a tape, which is empty after that."""
    gradients, inputs = zip(*tape, strict=True)
    tape.clear()
    return torch.cat(gradients, dim), torch.cat(inputs, dim)


class _Step(torch.autograd.Function):
    """y = x W^T + b + plus by `product`; backward returns dx at once and leaves (dy, x) on the tape for the anchor of W
    and b."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        plus: Tensor | None,
        product: LinearFn,
        tape: Tape,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.tape = tape
        return product(x_NI, plus)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_NI, weight_OI = ctx.saved_tensors
        ctx.tape.append((gradients[0], x_NI))
        return gradients[0] @ weight_OI, None, None, gradients[0] if ctx.needs_input_grad[3] else None, None, None


def linear_for_steps(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> LinearFn:
    """A linear map (x_NI, plus) -> x W^T + b + plus for one step loop: weights are cast and laid out once, their
    gradients are one product at the end.

    It must not outlive the loop's backward pass: bind again for the next loop.
    """
    weight, bias = cast(weight_OI, bias_O, dtype)
    if not torch.is_grad_enabled():
        return plain(weight, bias)  # greedy search binds anew at each step: to lay weights out would take longer
    tape: Tape = []

    def collect() -> tuple[Tensor, Tensor | None]:
        dy_RO, x_RI = map(pad_rows, joined(tape, 0))
        return dy_RO.t() @ x_RI, None if bias_O is None else dy_RO.sum(0)  # summed in fp32 in any case

    weight, bias = _Anchor.apply(collect, weight, bias)
    product = prepare_linear(weight, bias, int8=False)
    return lambda x_NI, plus=None: _Step.apply(x_NI, weight, bias, plus, product, tape)


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


def values_for_steps(values_BHSM: Tensor) -> Callable[[Tensor], Tensor]:
    """A map weights_BHQS -> weights values, for one step loop: the gradient of the values is one product at the end. As
    with `linear_for_steps`, it must not outlive the loop's backward pass."""
    if not torch.is_grad_enabled():
        return lambda weights_BHQS: weights_BHQS @ values_BHSM
    tape: Tape = []

    def collect() -> tuple[Tensor]:
        dcontext_BHRM, weights_BHRS = joined(tape, 2)
        return (weights_BHRS.transpose(2, 3) @ dcontext_BHRM,)

    [values] = _Anchor.apply(collect, values_BHSM)
    return lambda weights_BHQS: _Read.apply(weights_BHQS, values, tape)


class _Rows(torch.autograd.Function):
    """Rows of a table; the backward pass adds to as many rows of `total`, not to a new gradient of the whole table."""

    @staticmethod
    def forward(ctx: Any, table_PA: Tensor, index: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.total = table_PA.shape, total
        return table_PA.index_select(0, index.flatten()).view(*index.shape, table_PA.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.total:
            ctx.total.append(gradients[0].new_zeros(ctx.shape, dtype=accumulation_dtype(gradients[0].dtype)))
        index, total = ctx.saved_tensors[0].flatten(), ctx.total[0]
        rows = gradients[0].reshape(len(index), ctx.shape[1]).to(total.dtype)
        if total.device.type == "cpu":
            total.index_add_(0, index, rows)
        else:
            total.index_put_((index,), rows, accumulate=True)  # in the same order in every run, unlike `index_add_`
        return None, None, None


def rows_for_steps(table_PA: Tensor) -> Callable[[Tensor], Tensor]:
    """A map index -> rows of a table, shaped (*index, A), for one step loop: what a step costs, there and back, does
    not depend on the length of the table. As with `linear_for_steps`, it must not outlive the loop's backward pass."""
    total: list[Tensor] = []
    [table] = _Anchor.apply(lambda: (total.pop().to(table_PA.dtype),), table_PA)
    return lambda index: _Rows.apply(table, index, total)
