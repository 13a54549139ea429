"""The decoder: target tokens in, features out. Its style says where attention is placed.

`bahdanau` attends with the previous state s_{t-1}, and the context is an input of the cell (Bahdanau et al. 2014).
`luong` attends with the current state h_t and computes the attentional vector h~_t = tanh(W_c [c_t; h_t]) (Luong et al.
2015, eq. 5), which with input feeding is part of the next step's input (section 3.3).
`gnmt` attends with the current state of the bottom layer, and the context is part of every upper layer's input (Wu et
al. 2016, section 3).

If attention feeds the recurrence, the decoder loops over target positions. If it does not, the whole target takes one
call per layer and one batched attention. Both handle T target positions (training) and one (search).

Shapes: B sentences, N rows (N = B x K, with the K hypotheses of a sentence adjacent; K = 1 in training), T target
positions, Q = K x T queries of a sentence, E embedding size, D decoder size, G gates x D of a layer, M memory size, S
source positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import LayerAndHead, ModelConfig
from nmt.model.attention import Attention, AttentionContext, NoAttention
from nmt.model.kernels import KERNELS
from nmt.model.numerics import tanh
from nmt.model.reference import RNNState
from nmt.model.windows import Memory


class RecurrentState(NamedTuple):
    """Everything that a hypothesis carries from one target position to the next. Every tensor has N rows."""

    cells: tuple[RNNState, ...]  # for each layer (h_ND, c_ND) or (h_ND,)
    feed_ND: Tensor | None = None  # previous attentional vector, with input feeding
    position_N: Tensor | None = None  # position of the next target token, from 0, with window local_m
    coverage_NS: Tensor | None = None  # sum of the attention weights of earlier steps, with coverage

    def make_room(self, positions: int) -> "RecurrentState":
        """Return the state itself: a recurrent state does not grow."""
        return self


class Bridge(nn.Module):
    """Computes the initial decoder state from the final encoder states, h_BM of each encoder layer.

    `learned`: tanh(W h + b) of the top layer for each tensor of each decoder layer (Bahdanau et al. 2014, appendix
    A.2.2, who use only the backward half of h). `last`: h of the corresponding encoder layer, counted from the top.
    `mean`: the mean of the encoder outputs. `zero`: zeros. Except for `learned`, an LSTM's c starts at 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.bridge
        self.layers = config.decoder_layers
        self.hidden = config.hidden
        self.num_states = 2 if config.cell == "lstm" else 1
        if self.kind == "learned":
            self.map = KERNELS[config.kernels].Linear(config.memory, self.layers * self.num_states * self.hidden)

    def forward(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[RNNState, ...]:
        """Return the initial state of each decoder layer. `lasts` holds last_BM of each encoder layer."""
        if self.kind == "learned":
            parts = tanh(self.map(lasts[-1])).split(self.hidden, 1)
            return tuple(parts[i : i + self.num_states] for i in range(0, len(parts), self.num_states))
        zeros_BD = outputs_BSM.new_zeros(outputs_BSM.shape[0], self.hidden)
        if self.kind == "last":
            encoder_layers = [max(0, len(lasts) - self.layers + layer) for layer in range(self.layers)]
            initial = [lasts[layer] for layer in encoder_layers]
        elif self.kind == "mean":
            initial = [outputs_BSM.sum(1) / length_B.unsqueeze(1).to(outputs_BSM.dtype)] * self.layers
        else:
            initial = [zeros_BD] * self.layers
        return tuple((h_BD, zeros_BD)[: self.num_states] for h_BD in initial)


class RecurrentDecoder(nn.Module):
    """Maps embedded_NTE, state and memory to features_NTD, weights and the new state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        self.style = config.style
        self.residual = config.residual
        self.attention: Attention | NoAttention
        if config.attention.score == "none":
            self.attention = NoAttention()
        else:
            self.attention = Attention(config.attention, config.hidden, config.memory, kernels)
        self.bridge = Bridge(config)
        context = self.attention.context_size
        layers = config.decoder_layers
        self.has_input_feeding = config.style == "luong" and config.input_feeding
        # Whether attention feeds the recurrence, which needs a loop over target positions.
        self.has_step_loop = self.has_input_feeding or config.style == "bahdanau" and context > 0
        self.max_source_positions = self.attention.max_source_positions
        self.query_layer = 0 if config.style == "gnmt" else layers - 1  # the layer whose output is the query
        feed = {"bahdanau": context, "luong": config.hidden if self.has_input_feeding else 0, "gnmt": 0}[config.style]
        upper = config.hidden + (context if config.style == "gnmt" else 0)
        sizes = [(config.embed + feed, config.embed)] + [(upper, 0)] * (layers - 1)
        self.layers = nn.ModuleList(
            kernels.RNN(config.cell, inputs, config.hidden, num_projected) for inputs, num_projected in sizes
        )
        if config.style != "gnmt":
            inputs = context + config.hidden + (config.embed if config.style == "bahdanau" else 0)
            outputs = 2 * config.features if config.readout == "maxout" else config.features
            self.readout = kernels.Linear(inputs, outputs, bias=config.style == "bahdanau")
        self.maxout = config.readout == "maxout"
        self.dropout = kernels.Dropout(config.dropout)

    def show_attention(self, shown: LayerAndHead) -> None:
        """Choose the head whose attention weights are returned. Only one layer attends to the source."""
        if isinstance(self.attention, Attention):
            self.attention.show_head(shown.head)

    def start(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[Memory, RecurrentState]:
        """Return the memory and the initial state, one row per sentence, from the outputs of the encoder."""
        cells = self.bridge(outputs_BSM, lasts, length_B)
        feed_BD = torch.zeros_like(cells[0][0]) if self.has_input_feeding else None
        memory = self.attention.project_memory(outputs_BSM, length_B)
        return memory, RecurrentState(cells, feed_BD, *self.attention.init_state(memory))

    def forward(
        self, embedded_NTE: Tensor, state: RecurrentState, memory: Memory, inputs_NTG: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, RecurrentState]:
        """Return features_NTD (which predict the token after each input token), weights_NTS and the final state.

        `inputs_NTG` is the result of the bottom layer's `project`, if it is already known. It is used only if
        `has_step_loop`.
        """
        context = AttentionContext(
            self.attention, memory, state.position_N, state.coverage_NS, embedded_NTE.dtype, self.has_step_loop
        )
        if self.has_step_loop:
            if inputs_NTG is None:
                inputs_NTG = self.layers[0].project(embedded_NTE)
            features_NTD, cells, feed_ND = self.run_steps(embedded_NTE, inputs_NTG, state, context)
        else:
            features_NTD, cells, feed_ND = self.run_layers(embedded_NTE, state, context)
        new_state = RecurrentState(cells, feed_ND, context.position_N, context.coverage_NS)
        return features_NTD, context.concat_weights(), new_state

    def compute_features(self, context_NTM: Tensor, state_NTD: Tensor, embedded_NTE: Tensor) -> Tensor:
        """Return features_NTD, the input of the output layer. Runs outside of any loop.

        `luong`: h~_t = tanh(W_c [c_t; h_t]), Luong et al. 2015, eq. 5. `bahdanau`: tanh(W_r [c_t; s_t; E y_{t-1}]), or
        t_t = max(t~_{2j-1}, t~_{2j}), t~_t = U_o s_{t-1} + V_o E y_{t-1} + C_o c_t, Bahdanau et al. 2014, A.2.2.
        """
        inputs = [context_NTM, state_NTD]
        if self.style == "bahdanau":
            inputs.append(embedded_NTE)
        readout_NTD = self.readout(torch.cat(inputs, 2))
        return readout_NTD.unflatten(2, (-1, 2)).amax(3) if self.maxout else tanh(readout_NTD)

    def run_layers(
        self, embedded_NTE: Tensor, state: RecurrentState, context: AttentionContext
    ) -> tuple[Tensor, tuple[RNNState, ...], None]:
        """Run one layer after the other over all positions, for styles in which attention does not feed back."""
        x_NTD = embedded_NTE
        cells: list[RNNState] = []
        contexts: list[Tensor] = []
        for depth, (rnn, cell) in enumerate(zip(self.layers, state.cells, strict=True)):
            below = self.dropout(x_NTD) if depth else x_NTD
            h_NTD, last = rnn(torch.cat([below, *contexts], 2) if contexts else below, cell)
            is_residual = self.residual and depth > (self.style == "gnmt")  # gnmt: from the third layer on
            x_NTD = h_NTD + below if is_residual else h_NTD
            cells.append(last)
            if depth == self.query_layer:
                contexts.append(context.attend(x_NTD))
        if self.maxout:
            x_NTD = torch.cat([state.cells[-1][0].unsqueeze(1), h_NTD[:, :-1]], 1)  # s_{t-1}
        if self.style != "gnmt":
            x_NTD = self.compute_features(contexts[0], x_NTD, embedded_NTE)
        return x_NTD, tuple(cells), None

    def run_steps(
        self, embedded_NTE: Tensor, inputs_NTG: Tensor, state: RecurrentState, context: AttentionContext
    ) -> tuple[Tensor, tuple[RNNState, ...], Tensor | None]:
        """Loop over target positions, for styles in which attention feeds the recurrence.

        Everything that does not depend on the previous step is computed outside of the loop.
        """
        rows, length, _ = embedded_NTE.shape
        dtype = embedded_NTE.dtype
        bottom, *upper = [rnn.for_step_loop(dtype) for rnn in self.layers]
        masks_TLND: Sequence[Any] = (None,) * length  # dropout masks of the inputs of upper layers
        if upper:
            ones_TLND = embedded_NTE.new_ones(length, len(upper), rows, state.cells[0][0].shape[1])
            masks_TLND = self.dropout(ones_TLND).unbind()
        readout = self.readout.for_step_loop(dtype) if self.has_input_feeding else self.readout

        def attend(query_ND: Tensor) -> Tensor:
            return context.attend(query_ND.unsqueeze(1)).squeeze(1)

        def step_layers(feed: Tensor, inputs_NG: Tensor, masks_LND: Any) -> Tensor:
            """Run one step of every layer. Return the output of the top layer and update `cells`."""
            cells[0] = bottom(feed, cells[0], inputs_NG)
            x_ND = cells[0][0]
            for depth, step in enumerate(upper, 1):
                x_ND = x_ND * masks_LND[depth - 1]
                cells[depth] = step(x_ND, cells[depth])
                x_ND = cells[depth][0] + x_ND if self.residual else cells[depth][0]
            return x_ND

        cells = list(state.cells)
        feed_ND = state.feed_ND
        contexts, states = [], []
        for inputs_NG, masks_LND in zip(inputs_NTG.unbind(1), masks_TLND, strict=True):
            if self.style == "bahdanau":
                previous_ND = cells[-1][0]
                contexts.append(attend(previous_ND))
                top_ND = step_layers(contexts[-1], inputs_NG, masks_LND)
                states.append(previous_ND if self.maxout else top_ND)
            else:
                assert feed_ND is not None
                top_ND = step_layers(feed_ND, inputs_NG, masks_LND)
                feed_ND = tanh(readout(torch.cat([attend(top_ND), top_ND], 1)))
                states.append(feed_ND)
        features_NTD = torch.stack(states, 1)
        if self.style == "bahdanau":
            features_NTD = self.compute_features(torch.stack(contexts, 1), features_NTD, embedded_NTE)
        return features_NTD, tuple(cells), feed_ND
