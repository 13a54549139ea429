"""Linear maps and dropout, and step loops that compute the gradients of their weights once, after the loop.

In training, parameters are kept in fp32 (fp64 if asked). A map computes in the dtype of its input and casts its weights
to it; in a step loop, once for the whole loop. For translation, weights are cast once (`inference_weights.py`).

Shapes: N rows, T steps, R = T x N, I input size, O output size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model import reference
from nmt.model.kernels.inference_weights import make_plain_linear, prepare_linear
from nmt.model.reference import LinearFn

ROW_MULTIPLE = 128  # `pad_rows` pads the number of rows to a multiple of this


class Linear(reference.Linear):
    """`nn.Linear` that casts its weights to the dtype of its input, until `prepare_for_inference` fixes them."""

    def prepare_for_inference(self, int8: bool) -> None:
        self.inference_fn = prepare_linear(self.weight, self.bias, int8)

    def forward(self, x: Tensor) -> Tensor:
        linear = self.inference_fn or make_plain_linear(*cast_linear_weights(self.weight, self.bias, x.dtype))
        return apply_to_rows(linear, x)

    def for_step_loop(self, dtype: torch.dtype) -> LinearFn:
        """Return this map for use in one step loop, see `linear_for_steps`."""
        return self.inference_fn or linear_for_steps(self.weight, self.bias, dtype)


def pad_rows(x_RI: Tensor) -> Tensor:
    """Append zero rows up to a multiple of `ROW_MULTIPLE`, for bf16 on a CPU only.

    oneDNN compiles a kernel for each new shape of a bf16 product, which takes longer than the product.
    """
    if x_RI.dtype != torch.bfloat16 or x_RI.device.type != "cpu":
        return x_RI
    return F.pad(x_RI, (0, 0, 0, -len(x_RI) % ROW_MULTIPLE))


def apply_to_rows(linear: LinearFn, x: Tensor) -> Tensor:
    """Apply a map to the last dimension. The rows of x_NTI with T > 1 are flattened and padded by `pad_rows`."""
    if x.dim() != 3 or x.shape[1] == 1:
        return linear(x)
    x_RI = x.flatten(0, 1)
    y_RO = linear(pad_rows(x_RI))
    return y_RO[: len(x_RI)].view(*x.shape[:2], y_RO.shape[1])


def cast_linear_weights(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight_OI.to(dtype), None if bias_O is None else bias_O.to(dtype)


class Dropout(nn.Module):
    """In training, zeroes values with probability p and scales the others by 1 / (1 - p) (Srivastava et al. 2014).

    Like `nn.Dropout`, but on a CPU one random 64-bit integer serves four values. This is several times faster, and
    rounds p to a multiple of 2^-16.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)  # a single kernel
        bits = torch.empty(x.numel() // 4 + 1, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        mask = bits.view(torch.int16)[: x.numel()] >= round(self.p * 2**16) - 2**15
        return x * mask.to(x.dtype).mul_(1 / (1 - self.p)).view(x.shape)


# ------------------------------------------------------------------------------------------------ deferred gradients
# All steps of a loop share the same weights. Autograd would compute a weight gradient in every step and add it to the
# sum. Instead, each step's backward pass only saves the factors of its gradient, and one product over all T x N rows
# computes the sum after the last of them.
class DeferredGradient(torch.autograd.Function):
    """Passes on tensors that all steps of a loop share. Their gradient is the result of `collect`.

    Its backward pass runs after those of all steps, so `collect` finds what each of them saved.
    """

    @staticmethod
    def forward(ctx: Any, collect: Callable[[], tuple[Tensor | None, ...]], *shared: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.collect = collect
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in shared)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.collect()


GradientTape = list[tuple[Tensor, Tensor]]  # dy_NO and x_NI of each step


class _LinearStep(torch.autograd.Function):
    """y = x W^T + b + addend, computed by `linear`.

    The backward pass returns dx and appends (dy, x) to the tape, for the deferred gradients of W and b.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        addend: Tensor | None,
        linear: LinearFn,
        tape: GradientTape,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.tape = tape
        return linear(x_NI, addend)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_NI, weight_OI = ctx.saved_tensors
        [dy_NO] = gradients
        ctx.tape.append((dy_NO, x_NI))
        return dy_NO @ weight_OI, None, None, dy_NO if ctx.needs_input_grad[3] else None, None, None


def linear_for_steps(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> LinearFn:
    """Return (x_NI, addend) -> x W^T + b + addend for one step loop.

    Weights are cast and brought into the CPU's layout once, and their gradients take one product after the loop. The
    returned function must not outlive the loop's backward pass: call this again for the next loop.
    """
    weight, bias = cast_linear_weights(weight_OI, bias_O, dtype)
    if not torch.is_grad_enabled():
        # Greedy search prepares again at each step, where changing the layout would cost more than it saves.
        return make_plain_linear(weight, bias)
    tape: GradientTape = []

    def collect() -> tuple[Tensor, Tensor | None]:
        dy_RO, x_RI = (pad_rows(torch.cat(parts)) for parts in zip(*tape, strict=True))
        tape.clear()
        return dy_RO.t() @ x_RI, None if bias_O is None else dy_RO.sum(0)  # both accumulate in fp32 internally

    weight, bias = DeferredGradient.apply(collect, weight, bias)
    linear = prepare_linear(weight, bias, int8=False)
    return lambda x_NI, addend=None: _LinearStep.apply(x_NI, weight, bias, addend, linear, tape)
