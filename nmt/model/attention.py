"""Attention = score x window x normaliser, parts that know nothing of each other.

A score compares queries with keys, a window says which source positions may be looked at, a normaliser turns scores
into weights that sum to 1. The context is the weighted sum of the values.

Shapes: B sentences, Q queries of a sentence (K hypotheses x T target positions), S source positions (`</s>` included),
D query (decoder) size, M memory (encoder output) size, A size of the space in which queries and keys meet, W width of a
window (W = S for `global`).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.model.recurrence import Linear, uniform_


class Memory(NamedTuple):
    """What a decoder may look at. One row a sentence, however many hypotheses it has; passed, never stored."""

    values_BSM: Tensor
    keys_BSA: Tensor  # the values as the score wants them, projected once a sentence
    bias_BS: Tensor  # fp32: 0 where the sentence is, -inf where there is padding

    def select(self, rows_B: Tensor) -> "Memory":
        return Memory(*(part.index_select(0, rows_B) for part in self))


class Weights(NamedTuple):
    """Attention weights as they travel: for each query W weights, from source position `first` on."""

    weights_BQW: Tensor
    first_BQ: Tensor | None  # None: all windows begin at 0

    def dense(self, positions: int) -> Tensor:
        """weights_BQS over all source positions, 0 outside the window."""
        if self.first_BQ is None:
            return self.weights_BQW
        dense_BQS = self.weights_BQW.new_zeros(*self.weights_BQW.shape[:2], positions)
        index_BQW = self.first_BQ.unsqueeze(2) + torch.arange(self.weights_BQW.shape[2], device=dense_BQS.device)
        return dense_BQS.scatter_(2, index_BQW, self.weights_BQW)


# ------------------------------------------------------------------------------------------------------------ scores
class Additive(nn.Module):
    """v . tanh(W q + U k + b), Bahdanau et al. 2014, appendix A.1.2; `concat` in Luong et al. 2015."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.attention.size or config.hidden
        self.query = Linear(config.hidden, size, bias=False)
        self.key = Linear(config.memory, size)
        self.v = nn.Parameter(torch.empty(size))
        uniform_(self.v.detach(), size)

    def forward(self, query_BQA: Tensor, keys_BSA: Tensor) -> Tensor:
        sums_BQSA = query_BQA.unsqueeze(2) + keys_BSA.unsqueeze(1)
        return torch.tanh(sums_BQSA) @ self.v.to(sums_BQSA.dtype)


class Dot(nn.Module):
    """q . k, Luong et al. 2015, section 3.1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query: nn.Module = nn.Identity()
        self.key: nn.Module = nn.Identity()

    def forward(self, query_BQA: Tensor, keys_BSA: Tensor) -> Tensor:
        return query_BQA @ keys_BSA.transpose(1, 2)


class ScaledDot(Dot):
    """q . k / sqrt(D), Vaswani et al. 2017, eq. 1."""

    def forward(self, query_BQA: Tensor, keys_BSA: Tensor) -> Tensor:
        return super().forward(query_BQA * query_BQA.shape[-1] ** -0.5, keys_BSA)


class General(Dot):
    """q . W k, Luong et al. 2015, section 3.1. W is applied to the keys, outside the step loop."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.key = Linear(config.memory, config.hidden, bias=False)


# ------------------------------------------------------------------------------------------------------- normalisers
def softmax(scores_BQW: Tensor) -> Tensor:
    return torch.softmax(scores_BQW, dim=-1)


# --------------------------------------------------------------------------------------------------------- attention
class Attention(nn.Module):
    """Score, window and normaliser put together: queries and memory -> context and weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.score = SCORES[config.attention.score](config)
        self.normalise = NORMALISERS[config.attention.normaliser]

    def memorise(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        """Project the keys of each sentence, once."""
        positions_S = torch.arange(values_BSM.shape[1], device=length_B.device)
        bias_BS = torch.zeros(values_BSM.shape[:2], device=length_B.device)
        bias_BS.masked_fill_(positions_S >= length_B.unsqueeze(1), float("-inf"))
        return Memory(values_BSM, self.score.key(values_BSM), bias_BS)

    def forward(self, query_BQA: Tensor, memory: Memory) -> tuple[Tensor, Weights]:
        """c = sum_s a_s v_s with a = normalise(score(q, k)), Bahdanau et al. 2014, eq. 5-6.

        `query_BQA` has gone through `score.query` already: a step loop binds that map (see `recurrence.bind`).
        Returns context_BQM and the weights, at least fp32 whatever the precision around them.
        """
        scores_BQS = self.score(query_BQA, memory.keys_BSA)
        wide = torch.promote_types(scores_BQS.dtype, torch.float32)
        weights_BQS = self.normalise(scores_BQS.to(wide) + memory.bias_BS.unsqueeze(1))
        context_BQM = weights_BQS.to(memory.values_BSM.dtype) @ memory.values_BSM
        return context_BQM, Weights(weights_BQS, None)


SCORES = {"additive": Additive, "concat": Additive, "dot": Dot, "scaled_dot": ScaledDot, "general": General}
NORMALISERS = {"softmax": softmax}
