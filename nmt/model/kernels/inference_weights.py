"""Linear maps and LSTM layers whose weights do not change, in translation or within one step loop in training.

PyTorch brings weights into the layout of the CPU library in every call. Here that happens once. Linear maps can also be
quantized to int8.

Shapes: B sentences, T steps, N rows, I input size, O output size, D state size, G gates x D.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.model.reference import LinearFn

INT8_MAX = 127
ONEDNN_LSTM_MODE = 2  # oneDNN's enum value for an LSTM
# Operators of PyTorch that are not part of its public interface. Where one is missing, plain products are used instead.
LINEAR_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
LSTM_OPERATORS = ("_reorder_mkldnn_rnn_layer_weight",)


def list_packable_dtypes(*operators: str) -> list[torch.dtype]:
    """Return the dtypes that oneDNN supports on this CPU, none if it or one of the operators is missing."""
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return []
    supports_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)()
    return [torch.float32, *([torch.bfloat16] if supports_bf16 else [])]


PACKABLE_LINEAR_DTYPES = list_packable_dtypes(*LINEAR_OPERATORS)
PACKABLE_LSTM_DTYPES = list_packable_dtypes(*LSTM_OPERATORS) if hasattr(torch.ops.aten, "mkldnn_rnn_layer") else []


def prepare_linear(weight_OI: Tensor, bias_O: Tensor | None, int8: bool) -> LinearFn:
    """Return (x, addend) -> x W^T + b + addend for x of the dtype of W. Later changes of W are ignored."""
    weight_OI, bias_O = weight_OI.detach(), None if bias_O is None else bias_O.detach()
    if int8:
        return make_int8_linear(weight_OI, bias_O)
    if weight_OI.device.type == "cpu" and weight_OI.dtype in PACKABLE_LINEAR_DTYPES:
        return make_packed_linear(weight_OI, bias_O)
    return make_plain_linear(weight_OI, bias_O)


def make_plain_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """Return a linear map that uses the weights in their layout in memory."""
    return lambda x, addend=None: add_optional(F.linear(x, weight_OI, bias_O), addend)


def add_optional(y: Tensor, addend: Tensor | None) -> Tensor:
    return y if addend is None else y + addend


def make_packed_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """Return a linear map with weights in oneDNN's blocked layout, which saves reordering them in every call.

    A single fp32 row is faster with the plain weights. The addend is added within the product, which saves a pass over
    the result.
    """
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    linear_pointwise = torch.ops.mkldnn._linear_pointwise
    min_rows = 2 if weight_OI.dtype == torch.float32 else 1

    def apply_packed(x: Tensor, addend: Tensor | None = None) -> Tensor:
        if x.shape[0] < min_rows:
            return add_optional(F.linear(x, weight_OI, bias_O), addend)
        if addend is None:
            return linear_pointwise(x, packed_weight, bias_O, "none", [], "")
        return linear_pointwise.binary(x, addend, packed_weight, bias_O, "add")

    return apply_packed


def quantize_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and a scale per row, the smallest scale that clips nothing."""
    scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x_NI.dtype).tiny * INT8_MAX) / INT8_MAX
    return (x_NI / scale_N1).round_().to(torch.int8), scale_N1


def make_int8_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """Return a linear map in int8: weights are quantized once, inputs dynamically, each with a scale per row.

    The integer sums are exact, so a row of the result does not depend on the other rows of the batch.
    """
    int8_OI, scale_O1 = quantize_rows(weight_OI)
    int8_IO, scale_O = int8_OI.t(), scale_O1.squeeze(1)

    def apply_int8(x: Tensor, addend: Tensor | None = None) -> Tensor:
        int8_NI, scale_N1 = quantize_rows(x.flatten(0, -2))
        y_NO = torch._int_mm(int8_NI, int8_IO).to(x.dtype).mul_(scale_O).mul_(scale_N1)
        if bias_O is not None:
            y_NO += bias_O
        return add_optional(y_NO.view(*x.shape[:-1], y_NO.shape[1]), addend)

    return apply_int8


def prepare_lstm(
    weight_ih_GI: Tensor, weight_hh_GD: Tensor, bias_ih_G: Tensor, bias_hh_G: Tensor
) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return (x_BTI, h_BD, c_BD) -> (h_BTD, final h_1BD, final c_1BD), or None where oneDNN does not apply.

    Computes what `torch.lstm` does, which reorders the weights in every call; for a small batch that takes most of its
    time.
    """
    if weight_ih_GI.device.type != "cpu" or weight_ih_GI.dtype not in PACKABLE_LSTM_DTYPES:
        return None
    size = weight_hh_GD.shape[1]
    packed_weights = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight(
        weight_ih_GI.detach(), weight_hh_GD.detach(), size, reverse=False, has_biases=True, batch_first=False
    )
    biases = bias_ih_G.detach(), bias_hh_G.detach()

    def apply_lstm(x_BTI: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, ...]:
        x_TBI = x_BTI.transpose(0, 1).contiguous()
        state = h_BD.unsqueeze(0).contiguous(), c_BD.unsqueeze(0).contiguous()  # the operator ignores strides
        h_TBD, h_1BD, c_1BD, _ = torch.ops.aten.mkldnn_rnn_layer(
            x_TBI,
            *packed_weights,
            *biases,
            *state,
            reverse=False,
            batch_sizes=[],
            mode=ONEDNN_LSTM_MODE,
            hidden_size=size,
            num_layers=1,
            has_biases=True,
            bidirectional=False,
            batch_first=False,
            train=False,
        )
        return h_TBD.transpose(0, 1), h_1BD, c_1BD

    return apply_lstm
