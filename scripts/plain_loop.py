"""A textbook version of the benchmark model that relies on autograd.

It runs nn.LSTMCell and attention one step at a time, or nn.LSTM over whole sentences.

Shapes: B sentences, S source and T target positions, A size in which queries and keys are compared, M memory size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD
from nmt.config.model import ModelConfig
from nmt.data.batch import Batch


class PlainModel(nn.Module):
    """An LSTM encoder-decoder with additive attention, whose decoder starts from a state of zeros.

    Style `luong`, with or without input feeding, is a loop over target positions, without residual connections. Style
    `gnmt` has one nn.LSTM per decoder layer, and all positions attend at once. `forward` returns the mean loss.
    """

    def __init__(self, config: ModelConfig, vocabulary: int, smoothing: float) -> None:
        super().__init__()
        embed, hidden, memory = config.embed, config.hidden, config.memory
        self.feeds, self.smoothing, self.whole = config.input_feeding, smoothing, config.style == "gnmt"
        self.residual = config.residual
        self.source, self.target = nn.Embedding(vocabulary, embed), nn.Embedding(vocabulary, embed)
        among = config.dropout if config.encoder_layers > 1 else 0.0
        layers = config.encoder_layers
        self.encoder = nn.LSTM(embed, memory // 2, layers, batch_first=True, dropout=among, bidirectional=True)
        upper = config.decoder_layers - 1
        if self.whole:
            inputs = [embed] + [hidden + memory] * upper
            self.layers = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in inputs)
        else:
            inputs = [embed + self.feeds * hidden] + [hidden] * upper
            self.cells = nn.ModuleList(nn.LSTMCell(size, hidden) for size in inputs)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(memory, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)
        self.readout = None if self.whole else nn.Linear(memory + hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: Batch) -> Tensor:
        values_BSM, _ = self.encoder(self.dropout(self.source(batch.source_BS)))
        keys_BSA, hidden_BS = self.key(values_BSM), batch.source_BS == PAD
        values_BSM = values_BSM.to(keys_BSA.dtype)  # autocast runs nn.LSTM in another dtype
        embedded_BTE = self.dropout(self.target(batch.target_BT[:, :-1]))
        features_BTD = (self.run_layers if self.whole else self.run_steps)(
            embedded_BTE, values_BSM, keys_BSA, hidden_BS
        )
        wanted = batch.target_BT[:, 1:].flatten()
        logits = self.output(self.dropout(features_BTD)).flatten(0, 1).float()
        return F.cross_entropy(logits, wanted, ignore_index=PAD, label_smoothing=self.smoothing)

    def attend(self, query_BTD: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Return the context of each target position, (B, T, M)."""
        scores_BTS = self.v(torch.tanh(self.query(query_BTD).unsqueeze(2) + keys_BSA.unsqueeze(1))).squeeze(3)
        weights_BTS = torch.softmax(scores_BTS.float().masked_fill(hidden_BS.unsqueeze(1), float("-inf")), 2)
        return weights_BTS.to(values_BSM.dtype) @ values_BSM

    def run_steps(self, embedded_BTE: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Run the decoder one step at a time."""
        assert self.readout is not None
        feed = values_BSM.new_zeros(len(values_BSM), self.query.in_features)
        states = [(feed, feed)] * len(self.cells)
        features = []
        for x in embedded_BTE.unbind(1):
            h = torch.cat([x, feed], 1) if self.feeds else x
            for depth, cell in enumerate(self.cells):
                h, c = states[depth] = cell(self.dropout(h) if depth else h, states[depth])
            context = self.attend(h.unsqueeze(1), values_BSM, keys_BSA, hidden_BS).squeeze(1)
            feed = torch.tanh(self.readout(torch.cat([context, h], 1)))
            features.append(feed)
        return torch.stack(features, 1)

    def run_layers(self, embedded_BTE: Tensor, values_BSM: Tensor, keys_BSA: Tensor, hidden_BS: Tensor) -> Tensor:
        """Run the decoder layer by layer; the bottom layer attends, and every upper layer gets its context."""
        bottom, *upper = self.layers
        x_BTD = bottom(embedded_BTE)[0].to(keys_BSA.dtype)
        context_BTM = self.attend(x_BTD, values_BSM, keys_BSA, hidden_BS)
        for depth, layer in enumerate(upper):
            below = self.dropout(x_BTD)
            h_BTD = layer(torch.cat([below, context_BTM], 2))[0].to(keys_BSA.dtype)
            x_BTD = h_BTD + below if self.residual and depth else h_BTD
        return x_BTD
