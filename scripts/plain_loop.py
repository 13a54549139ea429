"""The model of the benchmarks as textbooks write it: an nn.LSTMCell and attention, a step at a time, all by autograd.

Shapes: B sentences, S source and T target positions, A size in which queries and keys meet, M memory size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD
from nmt.data.batching import Batch
from nmt.model.config import ModelConfig


class Plain(nn.Module):
    """Style `luong` with additive attention, any number of layers (without residual sums, from a state of zeros), with
    input feeding or without. `forward` returns the mean loss."""

    def __init__(self, config: ModelConfig, vocabulary: int, smoothing: float) -> None:
        super().__init__()
        embed, hidden, memory = config.embed, config.hidden, config.memory
        self.feeds, self.smoothing = config.input_feeding, smoothing
        self.source, self.target = nn.Embedding(vocabulary, embed), nn.Embedding(vocabulary, embed)
        among = config.dropout if config.encoder_layers > 1 else 0.0
        layers = config.encoder_layers
        self.encoder = nn.LSTM(embed, memory // 2, layers, batch_first=True, dropout=among, bidirectional=True)
        inputs = [embed + self.feeds * hidden] + [hidden] * (config.decoder_layers - 1)
        self.cells = nn.ModuleList(nn.LSTMCell(size, hidden) for size in inputs)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(memory, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)
        self.readout, self.output = nn.Linear(memory + hidden, hidden, bias=False), nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: Batch) -> Tensor:
        values_BSM, _ = self.encoder(self.dropout(self.source(batch.source_BS)))
        keys_BSA, hidden_BS = self.key(values_BSM), batch.source_BS == PAD
        feed = values_BSM.new_zeros(len(values_BSM), self.query.in_features)
        states = [(feed, feed)] * len(self.cells)
        features = []
        for x in self.dropout(self.target(batch.target_BT[:, :-1])).unbind(1):
            h = torch.cat([x, feed], 1) if self.feeds else x
            for depth, cell in enumerate(self.cells):
                h, c = states[depth] = cell(self.dropout(h) if depth else h, states[depth])
            scores_BS = self.v(torch.tanh(self.query(h).unsqueeze(1) + keys_BSA)).squeeze(2)
            weights_BS = torch.softmax(scores_BS.float().masked_fill(hidden_BS, float("-inf")), 1)
            context = (weights_BS.to(values_BSM.dtype).unsqueeze(1) @ values_BSM).squeeze(1)
            feed = torch.tanh(self.readout(torch.cat([context, h], 1)))
            features.append(feed)
        logits = self.output(self.dropout(torch.stack(features, 1)))
        wanted = batch.target_BT[:, 1:].flatten()
        logits = logits.flatten(0, 1).float()
        return F.cross_entropy(logits, wanted, ignore_index=PAD, label_smoothing=self.smoothing)
