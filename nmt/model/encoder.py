"""The encoder: a stack of GRU or LSTM layers over the source, in one direction or both.

Shapes: B sentences, S source positions, E embedding size, D state size of one direction, M output size: D times the
number of directions.
"""

import torch
from torch import Tensor, nn

from nmt.model.config import ModelConfig
from nmt.model.maps import Dropout, Linear
from nmt.model.recurrence import RNN


def reverse(x_BSE: Tensor, length_B: Tensor) -> Tensor:
    """Each sentence backwards; its padding stays at the end. Its own inverse."""
    rows, positions = x_BSE.shape[:2]
    s = torch.arange(positions, device=x_BSE.device)
    mirrored_BS = torch.where(s < length_B.unsqueeze(1), length_B.unsqueeze(1) - 1 - s, s)
    flat = mirrored_BS + positions * torch.arange(rows, device=x_BSE.device).unsqueeze(1)
    return x_BSE.flatten(0, 1).index_select(0, flat.flatten()).view_as(x_BSE)


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
        traces in its neighbours (Gehring et al. 2017, eq. 2, where W is the identity and keys are without it).
        """
        inside_BS1 = (torch.arange(embedded_BSE.shape[1], device=length_B.device) < length_B.unsqueeze(1)).unsqueeze(2)
        ends_B11 = (length_B - 1).view(-1, 1, 1)
        x, lasts = embedded_BSE, []
        for depth, directions in enumerate(self.layers):
            outputs, ends = [], []
            for direction, rnn in enumerate(directions):  # type: ignore[arg-type, var-annotated]
                inputs = reverse(x, length_B) if direction else x
                h_BSD, _ = rnn(inputs, rnn.zeros(inputs))
                ends.append(h_BSD.gather(1, ends_B11.expand(-1, 1, h_BSD.shape[2])).squeeze(1))
                outputs.append(reverse(h_BSD, length_B) if direction else h_BSD)
            h_BSM = torch.cat(outputs, 2)
            lasts.append(torch.cat(ends, 1))
            x = h_BSM + x if depth and self.residual else h_BSM
            if depth + 1 < len(self.layers):
                x = self.dropout(x)
        if self.shortcut is not None:
            x = x + self.shortcut(embedded_BSE)
        return x * inside_BS1, lasts
