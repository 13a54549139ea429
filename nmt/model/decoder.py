"""The decoder: tokens in, features out; where attention sits is its style.

`bahdanau` attends with the previous state s_{t-1}, and the context feeds the cell (Bahdanau et al. 2014).
`luong` attends with the present state h_t and makes the attentional vector h~_t = tanh(W_c [c_t; h_t]) (Luong et al.
2015, eq. 5), which with input feeding is part of the next step's input (section 3.3).
`gnmt` attends with the bottom layer's present state, and the context is part of every upper layer's input (Wu et al.
2016, section 3).

Where attention feeds the recurrence, steps run in a loop; where it does not, the whole target runs as one call for each
layer and one batched attention. Either serves T target positions (training) and one (search) alike.

Shapes: B sentences, N rows (N = B x K: the K hypotheses of a sentence stand together; K = 1 in training), T target
positions, Q = K x T queries of a sentence, E embedding size, D decoder size, G gates x D of a layer, M memory size, S
source positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import ModelConfig
from nmt.model.attention import Attention, NoAttention, Weights
from nmt.model.kernels.linear import Dropout, Linear, tanh
from nmt.model.recurrence import RNN, State
from nmt.model.windows import Memory

QUERIES = 16  # target positions that attend at once where no gradient is wanted


class DecoderState(NamedTuple):
    """All that a hypothesis carries from one target position to the next; every tensor has N rows."""

    cells: tuple[State, ...]  # for each layer (h_ND, c_ND) or (h_ND,)
    feed_ND: Tensor | None = None  # the last attentional vector, with input feeding
    position_N: Tensor | None = None  # of the next target piece, from 0, with window local_m
    coverage_NS: Tensor | None = None  # the attention weights so far, summed, with coverage

    def select(self, rows_N: Tensor) -> "DecoderState":
        """The states of these rows, in this order; rows may repeat."""
        cells = tuple(tuple(s.index_select(0, rows_N) for s in layer) for layer in self.cells)
        return DecoderState(cells, *(None if part is None else part.index_select(0, rows_N) for part in self[1:]))

    def scatter_rows(self, rows_N: Tensor, others: "DecoderState") -> "DecoderState":
        """The states of others in the place of these rows."""

        def joined(own: Any, its: Any) -> Any:
            if isinstance(own, tuple):
                return tuple(map(joined, own, its))
            return None if own is None else own.index_copy(0, rows_N, its)

        return DecoderState(*joined(tuple(self), tuple(others)))

    def trim_source(self, positions: int) -> "DecoderState":
        """With only the first source positions."""
        return self._replace(coverage_NS=None if self.coverage_NS is None else self.coverage_NS[:, :positions])


class AttentionContext:
    """Attention through one call of the decoder: position and coverage go on from query to query, weights are kept."""

    def __init__(
        self, attention: Attention | NoAttention, memory: Memory, state: DecoderState, dtype: torch.dtype
    ) -> None:
        self.attend = attention.prepare_steps(memory, dtype)
        self.sentences, _, self.positions, _ = memory.values_BHSM.shape
        self.position_N, self.coverage_NS = state.position_N, state.coverage_NS
        self.kept: list[Weights] = []

    def __call__(self, query_NTD: Tensor) -> Tensor:
        """context_NTM of the next T queries of each row: all at once, some at a time where no gradient is wanted (the
        additive score takes memory for each pair of positions), one after the other if coverage tells each what those
        before it looked at."""
        rows, steps, size = query_NTD.shape
        at_once = 1 if self.coverage_NS is not None else steps if torch.is_grad_enabled() else QUERIES
        if steps > at_once:
            return torch.cat([self(part_NTD) for part_NTD in query_NTD.split(at_once, 1)], 1)
        position_BQ = coverage_BQS = None
        if self.position_N is not None:
            position_NT = self.position_N.unsqueeze(1) + torch.arange(steps, device=query_NTD.device)
            position_BQ = position_NT.view(self.sentences, -1)
            self.position_N = self.position_N + steps
        if self.coverage_NS is not None:
            coverage_BQS = self.coverage_NS.view(self.sentences, -1, self.positions)
        query_BQD = query_NTD.reshape(self.sentences, -1, size)
        context_BQM, weights = self.attend(query_BQD, position_BQ, coverage_BQS)
        if weights is not None:
            self.kept.append(weights.reshape(rows, steps))
            if self.coverage_NS is not None:
                self.coverage_NS = self.coverage_NS + self.kept[-1].dense(self.positions).squeeze(1)
        return context_BQM.reshape(rows, steps, context_BQM.shape[2])

    def weights(self) -> Weights | None:
        """weights_NTW of all queries; None without attention."""
        if not self.kept:
            return None
        weights_NTW = torch.cat([weights.weights_BQW for weights in self.kept], 1)
        firsts = [weights.first_BQ for weights in self.kept if weights.first_BQ is not None]
        return Weights(weights_NTW, torch.cat(firsts, 1) if firsts else None)


class Bridge(nn.Module):
    """The first decoder state from the encoder's last ones, h_BM of each of its layers.

    `bridge`: tanh(W h + b) of the top layer for each tensor of each decoder layer (Bahdanau et al. 2014, appendix
    A.2.2, who take the backward half of h only); `last`: h of the encoder layer beside it, top with top; `mean`: the
    mean of what attention sees of the source; `zero`. Except for `bridge`, an LSTM's c starts at 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.layers, self.hidden = config.bridge, config.decoder_layers, config.hidden
        self.states = 2 if config.cell == "lstm" else 1
        if self.kind == "bridge":
            self.map = Linear(config.memory, self.layers * self.states * self.hidden)

    def forward(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[State, ...]:
        if self.kind == "bridge":
            parts = tanh(self.map(lasts[-1])).split(self.hidden, 1)
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
        self.attention: Attention | NoAttention
        self.attention = NoAttention() if config.attention.score == "none" else Attention(config)
        self.bridge = Bridge(config)
        self.feeding = config.style == "luong" and config.input_feeding
        self.looping = self.feeding or config.style == "bahdanau" and self.attention.context_size > 0
        context, layers = self.attention.context_size, config.decoder_layers
        self.attending = 0 if config.style == "gnmt" else layers - 1  # the layer whose output is the query
        fed = {"bahdanau": context, "luong": config.hidden if self.feeding else 0, "gnmt": 0}[config.style]
        upper = config.hidden + (context if config.style == "gnmt" else 0)
        inputs = [(config.embed + fed, config.embed)] + [(upper, 0)] * (layers - 1)
        self.layers = nn.ModuleList(RNN(config.cell, size, config.hidden, projected) for size, projected in inputs)
        if config.style != "gnmt":
            seen = context + config.hidden + (config.embed if config.style == "bahdanau" else 0)
            out = 2 * config.features if config.readout == "maxout" else config.features
            self.readout = Linear(seen, out, bias=config.style == "bahdanau")
        self.maxout = config.readout == "maxout"
        self.dropout = Dropout(config.dropout)

    def start(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[Memory, DecoderState]:
        """Memory and first state, one row a sentence, from what the encoder returned."""
        cells = self.bridge(outputs_BSM, lasts, length_B)
        feed_BD = torch.zeros_like(cells[0][0]) if self.feeding else None
        memory = self.attention.project_memory(outputs_BSM, length_B)
        return memory, DecoderState(cells, feed_BD, *self.attention.begin(memory))

    def forward(
        self, embedded_NTE: Tensor, state: DecoderState, memory: Memory, inputs_NTG: Tensor | None = None
    ) -> tuple[Tensor, Weights | None, DecoderState]:
        """Returns features_NTD (of the token after each given one), weights_NTW and the state after the last. Where
        attention feeds the recurrence, `inputs_NTG` is what the bottom layer's `project` returns, if that is known."""
        gaze = AttentionContext(self.attention, memory, state, embedded_NTE.dtype)
        if self.looping:
            if inputs_NTG is None:
                inputs_NTG = self.layers[0].project(embedded_NTE)
            features_NTD, cells, feed_ND = self.steps(embedded_NTE, inputs_NTG, state, gaze)
        else:
            features_NTD, cells, feed_ND = self.whole(embedded_NTE, state, gaze)
        return features_NTD, gaze.weights(), DecoderState(cells, feed_ND, gaze.position_N, gaze.coverage_NS)

    def read(self, context_NTM: Tensor, state_NTD: Tensor, embedded_NTE: Tensor) -> Tensor:
        """features_NTD, outside any loop: what the output layer sees.

        `luong`: h~_t = tanh(W_c [c_t; h_t]), Luong et al. 2015, eq. 5. `bahdanau`: tanh(W_r [c_t; s_t; E y_{t-1}]), or
        t_t = max(t~_{2j-1}, t~_{2j}), t~_t = U_o s_{t-1} + V_o E y_{t-1} + C_o c_t, Bahdanau et al. 2014, A.2.2.
        """
        seen = [context_NTM, state_NTD, *([embedded_NTE] if self.style == "bahdanau" else [])]
        inner_NTD = self.readout(torch.cat(seen, 2))
        return inner_NTD.unflatten(2, (-1, 2)).amax(3) if self.maxout else tanh(inner_NTD)

    def whole(
        self, embedded_NTE: Tensor, state: DecoderState, gaze: AttentionContext
    ) -> tuple[Tensor, tuple[State, ...], None]:
        """Attention does not feed back: every layer in one call, all positions attend at once."""
        x_NTD, cells = embedded_NTE, []
        contexts: list[Tensor] = []
        for depth, (rnn, cell) in enumerate(zip(self.layers, state.cells, strict=True)):
            below = self.dropout(x_NTD) if depth else x_NTD
            h_NTD, last = rnn(torch.cat([below, *contexts], 2) if contexts else below, cell)
            summed = self.residual and depth > (self.style == "gnmt")  # gnmt: from the third layer on
            x_NTD = h_NTD + below if summed else h_NTD
            cells.append(last)
            if depth == self.attending:
                contexts.append(gaze(x_NTD))
        if self.maxout:
            x_NTD = torch.cat([state.cells[-1][0].unsqueeze(1), h_NTD[:, :-1]], 1)  # s_{t-1}
        return x_NTD if self.style == "gnmt" else self.read(contexts[0], x_NTD, embedded_NTE), tuple(cells), None

    def steps(
        self, embedded_NTE: Tensor, inputs_NTG: Tensor, state: DecoderState, gaze: AttentionContext
    ) -> tuple[Tensor, tuple[State, ...], Tensor | None]:
        """Attention feeds the recurrence: a loop over target positions, with all that can leave it outside."""
        rows, length, _ = embedded_NTE.shape
        dtype = embedded_NTE.dtype
        bottom, *upper = [rnn.prepare_steps(dtype) for rnn in self.layers]
        masks_TLND: Sequence[Any] = (None,) * length
        if upper:
            ones_TLND = embedded_NTE.new_ones(length, len(upper), rows, state.cells[0][0].shape[1])
            masks_TLND = self.dropout(ones_TLND).unbind()
        readout = self.readout.prepare_steps(dtype) if self.feeding else self.readout

        def attend(query_ND: Tensor) -> Tensor:
            return gaze(query_ND.unsqueeze(1)).squeeze(1)

        def climb(feed: Tensor, inputs_NG: Tensor, masks_LND: Any) -> Tensor:
            """One step of every layer. Returns the top's output; the new states go to `cells`."""
            cells[0] = bottom(feed, cells[0], inputs_NG)
            x_ND = cells[0][0]
            for depth, step in enumerate(upper, 1):
                x_ND = x_ND * masks_LND[depth - 1]
                cells[depth] = step(x_ND, cells[depth])
                x_ND = cells[depth][0] + x_ND if self.residual else cells[depth][0]
            return x_ND

        cells, feed_ND = list(state.cells), state.feed_ND
        contexts, states = [], []
        for inputs_NG, masks_LND in zip(inputs_NTG.unbind(1), masks_TLND, strict=True):
            if self.style == "bahdanau":
                before_ND = cells[-1][0]
                contexts.append(attend(before_ND))
                after_ND = climb(contexts[-1], inputs_NG, masks_LND)
                states.append(before_ND if self.maxout else after_ND)
            else:
                assert feed_ND is not None
                top_ND = climb(feed_ND, inputs_NG, masks_LND)
                feed_ND = tanh(readout(torch.cat([attend(top_ND), top_ND], 1)))
                states.append(feed_ND)
        features_NTD = torch.stack(states, 1)
        if self.style == "bahdanau":
            features_NTD = self.read(torch.stack(contexts, 1), features_NTD, embedded_NTE)
        return features_NTD, tuple(cells), feed_ND
