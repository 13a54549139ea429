"""The decoder: tokens in, features out; where attention sits is its style.

`bahdanau` attends with the previous state s_{t-1}, and the context feeds the cell (Bahdanau et al. 2014).
`luong` attends with the present state h_t and makes the attentional vector h~_t = tanh(W_c [c_t; h_t]) (Luong et al.
2015, eq. 5), which with input feeding is part of the next step's input (section 3.3).

Where attention feeds the recurrence, steps run in a loop; where it does not, the whole target runs as one call for each
layer and one batched attention. Either serves T target positions (training) and one (search) alike.

Shapes: B sentences, N rows (N = B x K: the K hypotheses of a sentence stand together; K = 1 in training), T target
positions, Q = K x T queries of a sentence, E embedding size, D decoder size, M memory size, S source positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.model.attention import Attention, Memory, Weights
from nmt.model.recurrence import RNN, Dropout, Linear, State


class DecoderState(NamedTuple):
    """All that a hypothesis carries from one target position to the next; every tensor has N rows."""

    cells: tuple[State, ...]  # for each layer (h_ND, c_ND) or (h_ND,)
    feed_ND: Tensor | None  # the last attentional vector, with input feeding

    def select(self, rows_N: Tensor) -> "DecoderState":
        """The states of these rows, in this order; rows may repeat."""
        cells = tuple(tuple(s.index_select(0, rows_N) for s in layer) for layer in self.cells)
        return DecoderState(cells, None if self.feed_ND is None else self.feed_ND.index_select(0, rows_N))


class Bridge(nn.Module):
    """The first decoder state from the encoder's last ones, h_BM of each of its layers.

    `bridge`: tanh(W h + b) of the top layer for each tensor of each decoder layer (Bahdanau et al. 2014, appendix
    A.2.2, who take the backward half of h only); `last`: h of the encoder layer beside it, top with top; `mean`: the
    mean of the top layer's outputs; `zero`. Except for `bridge`, an LSTM's c starts at 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.layers, self.hidden = config.bridge, config.decoder_layers, config.hidden
        self.states = 2 if config.cell == "lstm" else 1
        if self.kind == "bridge":
            self.map = Linear(config.memory, self.layers * self.states * self.hidden)

    def forward(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[State, ...]:
        if self.kind == "bridge":
            parts = torch.tanh(self.map(lasts[-1])).split(self.hidden, 1)
            return tuple(parts[i : i + self.states] for i in range(0, len(parts), self.states))
        zeros_BD = outputs_BSM.new_zeros(outputs_BSM.shape[0], self.hidden)
        mean_BM = outputs_BSM.sum(1) / length_B.unsqueeze(1).to(outputs_BSM.dtype)
        beside = [max(0, len(lasts) - self.layers + layer) for layer in range(self.layers)]
        first = {"last": [lasts[i] for i in beside], "mean": [mean_BM] * self.layers, "zero": [zeros_BD] * self.layers}
        return tuple((h, zeros_BD)[: self.states] for h in first[self.kind])


class Decoder(nn.Module):
    """embedded_NTE, state, memory -> features_NTD, weights, state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.style, self.residual = config.style, config.residual
        self.feeding = config.style == "luong" and config.input_feeding
        self.attention = Attention(config)
        self.bridge = Bridge(config)
        fed = {"bahdanau": config.memory, "luong": config.hidden if self.feeding else 0}[config.style]
        self.layers = nn.ModuleList()
        for layer in range(config.decoder_layers):
            self.layers.append(RNN(config.cell, config.hidden if layer else config.embed + fed, config.hidden))
        readout = config.memory + config.hidden + (config.embed if config.style == "bahdanau" else 0)
        self.readout = Linear(readout, config.hidden, bias=config.style == "bahdanau")
        self.dropout = Dropout(config.dropout)

    def start(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[Memory, DecoderState]:
        """Memory and first state, one row a sentence, from what the encoder returned."""
        cells = self.bridge(outputs_BSM, lasts, length_B)
        feed_BD = torch.zeros_like(cells[0][0]) if self.feeding else None
        return self.attention.memorise(outputs_BSM, length_B), DecoderState(cells, feed_BD)

    def forward(
        self, embedded_NTE: Tensor, state: DecoderState, memory: Memory
    ) -> tuple[Tensor, Weights, DecoderState]:
        """Returns features_NTD (of the token after each given one), weights_NTW and the state after the last."""
        if self.style == "luong" and not self.feeding:
            return self.whole(embedded_NTE, state, memory)
        return self.steps(embedded_NTE, state, memory)

    def whole(self, embedded_NTE: Tensor, state: DecoderState, memory: Memory) -> tuple[Tensor, Weights, DecoderState]:
        """Attention does not feed back: every layer in one call, all positions attend at once."""
        x_NTD, cells = embedded_NTE, []
        for depth, (rnn, cell) in enumerate(zip(self.layers, state.cells, strict=True)):
            inputs = self.dropout(x_NTD) if depth else x_NTD
            h_NTD, cell = rnn(inputs, cell)
            x_NTD = h_NTD + inputs if depth and self.residual else h_NTD
            cells.append(cell)
        rows, steps, _ = x_NTD.shape
        query = self.attention.score.query(x_NTD)
        context_BQM, weights = self.attention(query.reshape(len(memory.values_BSM), -1, query.shape[2]), memory)
        context_NTM = context_BQM.reshape(rows, steps, -1)
        features_NTD = torch.tanh(self.readout(torch.cat([context_NTM, x_NTD], 2)))
        return (
            features_NTD,
            Weights(weights.weights_BQW.reshape(rows, steps, -1), None),
            DecoderState(tuple(cells), None),
        )

    def steps(self, embedded_NTE: Tensor, state: DecoderState, memory: Memory) -> tuple[Tensor, Weights, DecoderState]:
        """Attention feeds the recurrence: a loop over target positions, with all that can leave it outside."""
        rows, length, embed = embedded_NTE.shape
        dtype = embedded_NTE.dtype
        bottom, *upper = [rnn.bind(dtype, 0 if depth else embed) for depth, rnn in enumerate(self.layers)]
        inputs_TNG = self.layers[0].project(embedded_NTE).unbind(1)
        masks_LTND = self.dropout(embedded_NTE.new_ones(len(upper), length, rows, state.cells[0][0].shape[1]))
        query_map = self.attention.score.query
        if isinstance(query_map, Linear):
            query_map = query_map.bind(dtype)
        readout = self.readout.bind(dtype)

        def attend(query_ND: Tensor) -> Tensor:
            query = query_map(query_ND)
            context_BQM, weights = self.attention(query.view(len(memory.values_BSM), -1, query.shape[1]), memory)
            attended.append(weights.weights_BQW.reshape(rows, -1))
            return context_BQM.reshape(rows, -1)

        def climb(feed: Tensor, inputs_NG: Tensor, masks_LND: Tensor) -> Tensor:
            """One step of every layer. Returns the top's output; the new states go to `cells`."""
            cells[0] = bottom(feed, cells[0], inputs_NG)
            x_ND = cells[0][0]
            for depth, step in enumerate(upper, 1):
                x_ND = x_ND * masks_LND[depth - 1]
                cells[depth] = step(x_ND, cells[depth])
                x_ND = cells[depth][0] + x_ND if self.residual else cells[depth][0]
            return x_ND

        cells, feed_ND = list(state.cells), state.feed_ND
        attended: list[Tensor] = []
        outputs, contexts = [], []
        for inputs_NG, masks_LND in zip(inputs_TNG, masks_LTND.unbind(1), strict=True):
            if self.style == "bahdanau":
                contexts.append(attend(cells[-1][0]))
                outputs.append(climb(contexts[-1], inputs_NG, masks_LND))
            else:
                assert feed_ND is not None
                top_ND = climb(feed_ND, inputs_NG, masks_LND)
                feed_ND = torch.tanh(readout(torch.cat([attend(top_ND), top_ND], 1)))
                outputs.append(feed_ND)
        features_NTD = torch.stack(outputs, 1)
        if self.style == "bahdanau":
            seen_NTX = torch.cat([torch.stack(contexts, 1), features_NTD, embedded_NTE], 2)
            features_NTD = torch.tanh(self.readout(seen_NTX))
        return features_NTD, Weights(torch.stack(attended, 1), None), DecoderState(tuple(cells), feed_ND)
