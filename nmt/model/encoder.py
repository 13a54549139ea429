"""The encoder: a stack of GRU or LSTM layers over the source, in one direction or both.

Shapes: B sentences, S source positions, R = B x S positions of a batch, E embedding size, D state size of one
direction, M output size: D times the number of directions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nmt.config.model import ModelConfig
from nmt.model.kernels.linear import Dropout, Linear
from nmt.model.recurrence import RNN


class _Permute(torch.autograd.Function):
    """The rows of x in another order that is its own inverse. So the gradient is read in the same order: autograd's own
    would add to rows, on a GPU by atomic operations."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_BSE.flatten(0, 1).index_select(0, order_R).view_as(x_BSE)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [dx_BSE], [order_R] = gradients, ctx.saved_tensors
        return dx_BSE.flatten(0, 1).index_select(0, order_R).view_as(dx_BSE), None


def backward_order(length_B: Tensor, positions: int) -> Tensor:
    """order_R, R = B x S: where each position is in its sentence read backwards. Padding keeps its place."""
    s = torch.arange(positions, device=length_B.device)
    mirrored_BS = torch.where(s < length_B.unsqueeze(1), length_B.unsqueeze(1) - 1 - s, s)
    first_B1 = positions * torch.arange(len(length_B), device=length_B.device).unsqueeze(1)
    return (mirrored_BS + first_B1).flatten()


def reverse(x_BSE: Tensor, order_R: Tensor) -> Tensor:
    """Each sentence backwards, as `backward_order` says. Its own inverse."""
    return _Permute.apply(x_BSE, order_R)


class Encoder(nn.Module):
    """embedded_BSE -> outputs_BSM, and the last state of each layer.

    Padding stands after a sentence, so a forward layer never sees it; a backward layer reads each sentence reversed.
    Layers are called on padded batches: much faster than packed ones, on processors as on GPUs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.memory // config.directions
        self.layers = nn.ModuleList()
        for layer in range(config.encoder_layers):
            inputs = config.memory if layer else config.embed
            self.layers.append(nn.ModuleList(RNN(config.cell, inputs, hidden) for _ in range(config.directions)))
        self.residual = config.residual
        read = config.attention.score != "none"
        self.shortcut = Linear(config.embed, config.memory, bias=False) if config.shortcut and read else None
        self.dropout = Dropout(config.dropout)

    def forward(self, embedded_BSE: Tensor, length_B: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns outputs_BSM (0 at padding) and, for each layer, last_BM: h after a direction's last position,
        h_S of the forward layer beside h_1 of the backward one.

        With `shortcut` W E x_s is added to each output, and attention finds a piece where it stands before it finds its
        traces in its neighbors (Gehring et al. 2017, eq. 2, where W is the identity and keys are without it).
        """
        inside_BS1 = (torch.arange(embedded_BSE.shape[1], device=length_B.device) < length_B.unsqueeze(1)).unsqueeze(2)
        ends_B11 = (length_B - 1).view(-1, 1, 1)
        order_R = backward_order(length_B, embedded_BSE.shape[1])
        x, lasts = embedded_BSE, []
        for depth, directions in enumerate(self.layers):
            outputs, ends = [], []
            for direction, rnn in enumerate(directions):  # type: ignore[arg-type, var-annotated]
                inputs = reverse(x, order_R) if direction else x
                h_BSD, _ = rnn(inputs, rnn.zeros(inputs))
                ends.append(h_BSD.gather(1, ends_B11.expand(-1, 1, h_BSD.shape[2])).squeeze(1))
                outputs.append(reverse(h_BSD, order_R) if direction else h_BSD)
            h_BSM = torch.cat(outputs, 2)
            lasts.append(torch.cat(ends, 1))
            x = h_BSM + x if depth and self.residual else h_BSM
            if depth + 1 < len(self.layers):
                x = self.dropout(x)
        if self.shortcut is not None:
            x = x + self.shortcut(embedded_BSE)
        return x * inside_BS1, lasts
