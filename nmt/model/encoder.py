"""The recurrent encoder: a stack of GRU or LSTM layers over the source, in one direction or both.

Shapes: B sentences, S source positions, R = B x S positions of a batch, E embedding size, D state size of one
direction, M output size: D times the number of directions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nmt.config.model import ModelConfig
from nmt.model.kernels import KERNELS


def compute_reverse_order(length_B: Tensor, positions: int) -> Tensor:
    """Return order_R, R = B x S, which reverses each sentence and leaves padding in place."""
    s = torch.arange(positions, device=length_B.device)
    reversed_BS = torch.where(s < length_B.unsqueeze(1), length_B.unsqueeze(1) - 1 - s, s)
    first_B1 = positions * torch.arange(len(length_B), device=length_B.device).unsqueeze(1)
    return (reversed_BS + first_B1).flatten()


class RecurrentEncoder(nn.Module):
    """Maps embedded_BSE to outputs_BSM and the final state of each layer.

    Sentences are padded at the end, so a forward layer never sees padding before a token; a backward layer reads each
    sentence reversed. Layers run on padded batches, which is much faster than on packed ones, on CPUs and GPUs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        self.permute_positions = kernels.permute_positions
        hidden = config.memory // config.directions
        self.layers = nn.ModuleList()
        for layer in range(config.encoder_layers):
            inputs = config.memory if layer else config.embed
            directions = [kernels.RNN(config.cell, inputs, hidden) for _ in range(config.directions)]
            self.layers.append(nn.ModuleList(directions))
        self.residual = config.residual
        has_shortcut = config.shortcut and config.attention.score != "none"
        self.shortcut = kernels.Linear(config.embed, config.memory, bias=False) if has_shortcut else None
        self.dropout = kernels.Dropout(config.dropout)

    def forward(self, embedded_BSE: Tensor, length_B: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return outputs_BSM (0 at padding) and last_BM of each layer.

        last_BM is h after the last position that each direction reads: h_S of the forward layer, concatenated with h_1
        of the backward layer.

        With `shortcut`, W E x_s is added to each output. Attention then finds a token at its own position before it
        finds the traces that it leaves in its neighbors (Gehring et al. 2017, eq. 2, where W is the identity and is
        added to values but not to keys).
        """
        inside_BS1 = (torch.arange(embedded_BSE.shape[1], device=length_B.device) < length_B.unsqueeze(1)).unsqueeze(2)
        end_B11 = (length_B - 1).view(-1, 1, 1)
        order_R = compute_reverse_order(length_B, embedded_BSE.shape[1])
        x = embedded_BSE
        lasts: list[Tensor] = []
        for depth, directions in enumerate(self.layers):
            runs = [
                self.run_direction(rnn, x, end_B11, order_R if direction else None)
                for direction, rnn in enumerate(directions.children())
            ]
            outputs, ends = zip(*runs, strict=True)
            h_BSM = torch.cat(outputs, 2)
            lasts.append(torch.cat(ends, 1))
            x = h_BSM + x if depth and self.residual else h_BSM
            if depth + 1 < len(self.layers):
                x = self.dropout(x)
        if self.shortcut is not None:
            x = x + self.shortcut(embedded_BSE)
        return x * inside_BS1, lasts

    def run_direction(self, rnn: Any, x_BSI: Tensor, end_B11: Tensor, order_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states h_BSD of one direction, and its last one, h_BD. With `order_R` it reads from the end."""
        inputs = x_BSI if order_R is None else self.permute_positions(x_BSI, order_R)
        h_BSD, _ = rnn(inputs, rnn.init_state(inputs))
        last_BD = h_BSD.gather(1, end_B11.expand(-1, 1, h_BSD.shape[2])).squeeze(1)
        return h_BSD if order_R is None else self.permute_positions(h_BSD, order_R), last_BD
