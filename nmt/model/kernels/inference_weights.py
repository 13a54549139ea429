"""Linear maps and LSTM layers whose weights do not change, in translation or within one loop in training: laid out as
the processor wants them; maps also rounded to int8.

Shapes: B sentences, T steps, N rows, I input size, O output size, D state size, G gates x D.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LinearFn = Callable[..., Tensor]  # (x, plus): x W^T + b, and `plus` if it is given
LARGEST = 127
LSTM = 2  # oneDNN's number for it
PACKED = []  # dtypes that oneDNN takes on this processor
if torch.backends.mkldnn.is_available():
    PACKED = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepare_linear(weight_OI: Tensor, bias_O: Tensor | None, int8: bool) -> LinearFn:
    """(x, plus) -> x W^T + b + plus, for x of the dtype of W. Later changes of W are not seen."""
    weight_OI, bias_O = weight_OI.detach(), None if bias_O is None else bias_O.detach()
    if int8:
        return quantized_linear(weight_OI, bias_O)
    if weight_OI.device.type == "cpu" and weight_OI.dtype in PACKED:
        return packed(weight_OI, bias_O)
    return plain(weight_OI, bias_O)


def plain(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """With weights as they are."""
    return lambda x, plus=None: sum_of(F.linear(x, weight_OI, bias_O), plus)


def sum_of(y: Tensor, plus: Tensor | None) -> Tensor:
    return y if plus is None else y + plus


def packed(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """With weights in the blocked layout that oneDNN would bring them into for each product; a single fp32 row is done
    sooner as it is."""
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    product = torch.ops.mkldnn._linear_pointwise
    least = 2 if weight_OI.dtype == torch.float32 else 1

    def several(x: Tensor, plus: Tensor | None = None) -> Tensor:
        if x.shape[0] < least:
            return sum_of(F.linear(x, weight_OI, bias_O), plus)
        if plus is None:
            return product(x, blocks, bias_O, "none", [], "")
        return product.binary(x, plus, blocks, bias_O, "add")  # without another pass over y

    return several


def quantized(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and a scale for each row, the smallest that cuts none off."""
    scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x_NI.dtype).tiny * LARGEST) / LARGEST
    return (x_NI / scale_N1).round_().to(torch.int8), scale_N1


def quantized_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """With weights rounded once and inputs as they come, each row by a scale of its own. Sums are exact, so that no row
    depends on those beside it."""
    int8_OI, scale_O1 = quantized(weight_OI)
    int8_IO, scale_O = int8_OI.t(), scale_O1.squeeze(1)

    def product(x: Tensor, plus: Tensor | None = None) -> Tensor:
        int8_NI, scale_N1 = quantized(x.flatten(0, -2))
        y_NO = torch._int_mm(int8_NI, int8_IO).to(x.dtype).mul_(scale_O).mul_(scale_N1)
        if bias_O is not None:
            y_NO += bias_O
        return sum_of(y_NO.view(*x.shape[:-1], -1), plus)

    return product


def whole_lstm(
    weight_ih_GI: Tensor, weight_hh_GD: Tensor, bias_ih_G: Tensor, bias_hh_G: Tensor
) -> Callable[..., tuple[Tensor, ...]] | None:
    """(x_BTI, h_BD, c_BD) -> h_BTD and the last h_1BD and c_1BD, as `torch.lstm`, which lays the weights out anew at
    each call: of a short batch that is most of its time. None where oneDNN does not take them."""
    if weight_ih_GI.device.type != "cpu" or weight_ih_GI.dtype not in PACKED:
        return None
    size = weight_hh_GD.shape[1]
    weights = weight_ih_GI.detach(), weight_hh_GD.detach()
    order = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight
    blocks = order(*weights, size, reverse=False, has_biases=True, batch_first=False)
    biases = bias_ih_G.detach(), bias_hh_G.detach()

    def layer(x_BTI: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, ...]:
        x_TBI = x_BTI.transpose(0, 1).contiguous()
        state = h_BD.unsqueeze(0).contiguous(), c_BD.unsqueeze(0).contiguous()  # it does not look at strides
        h_TBD, h_1BD, c_1BD, _ = torch.ops.aten.mkldnn_rnn_layer(
            x_TBI, *blocks, *biases, *state, reverse=False, batch_sizes=[], mode=LSTM, hidden_size=size, num_layers=1,
            has_biases=True, bidirectional=False, batch_first=False, train=False,
        )  # fmt: skip
        return h_TBD.transpose(0, 1), h_1BD, c_1BD

    return layer
