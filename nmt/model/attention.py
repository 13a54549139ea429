"""Attention as three independent parts: score, window and normalizer.

A score compares queries with keys, a window limits which source positions a query attends to and with what gain, and a
normalizer turns scores into weights that sum to 1. The context is the weighted sum of the values.

Shapes: B sentences, Q queries of a sentence (K hypotheses x T target positions), S source positions (`</s>` included),
D query (decoder) size, M memory (encoder output) size, A size in which queries and keys are compared (D or M). H
heads: in shapes that contain H, sizes are per head. N = B x Q queries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import AttentionConfig
from nmt.model import reference
from nmt.model.kernels import Kernels
from nmt.model.normalizers import NORMALIZER_FNS
from nmt.model.numerics import accumulation_dtype, init_uniform_, step_dtype
from nmt.model.parts import resize_last
from nmt.model.reference import LinearFn
from nmt.model.windows import WINDOW_CLASSES, Memory, build_memory

LOCATION_POSITIONS = 256  # source positions that score `location` has a weight for
MAX_QUERIES_AT_ONCE = 16  # queries of a row that attend in one call if no gradient is needed


class AttentionMaps(NamedTuple):
    """The linear maps of the queries of attention: modules, or functions for one step loop (`Linear.for_step_loop`)."""

    query: LinearFn  # of the score
    focus: LinearFn  # of window `local_p`
    output: LinearFn  # of contexts, with several heads


# ------------------------------------------------------------------------------------------------------------ scores
class Score(nn.Module):
    """Base class of scores. Compares queries with keys per head; masking and softmax happen elsewhere.

    Subclasses define `query`, `key` and `score_keys`. `Additive` overrides `forward` instead, because its coverage is
    inside of tanh.
    """

    max_source_positions: int | None = None  # later ones get no weight; None: unlimited
    query: nn.Module  # projection of query_ND for all heads, concatenated
    key: nn.Module  # projection of values_BSM for all heads, concatenated
    score_keys: Callable[[Tensor, Tensor], Tensor]  # (query_BHQA, keys_BHSA) -> scores_BHQS without coverage

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, coverage_size: int = 1) -> None:
        super().__init__()
        self.kernels = kernels
        self.heads = config.heads
        if config.coverage:
            self.coverage = nn.Parameter(torch.zeros(self.heads, 1, coverage_size))

    def forward(self, query_BHQA: Tensor, keys_BHSA: Tensor, coverage_BQS: Tensor | None) -> Tensor:
        """Return scores_BHQS.

        `coverage_BQS` is the sum of the weights that the keys received from earlier queries, or None if the model has
        no coverage.
        """
        scores_BHQS = self.score_keys(query_BHQA, keys_BHSA)
        if coverage_BQS is None:
            return scores_BHQS
        return scores_BHQS + self.coverage * coverage_BQS.unsqueeze(1)


class Additive(Score):
    """v . tanh(W q + U k + b), Bahdanau et al. 2014, appendix A.1.2; `concat` in Luong et al. 2015.

    With coverage: v . tanh(W q + U k + w_c c + b), See et al. 2017, eq. 11.
    """

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels, coverage_size=query_size // config.heads)
        self.query = kernels.Linear(query_size, query_size, bias=False)
        self.key = kernels.Linear(memory_size, query_size)
        self.v = nn.Parameter(torch.empty(query_size))
        init_uniform_(self.v.detach(), query_size)

    def forward(self, query_BHQA: Tensor, keys_BHSA: Tensor, coverage_BQS: Tensor | None) -> Tensor:
        v_HA = self.v.to(keys_BHSA.dtype).view(self.heads, -1)
        if coverage_BQS is None:
            return self.kernels.additive_score(query_BHQA, keys_BHSA, v_HA)
        coverage_BHQSA = coverage_BQS[:, None, :, :, None].to(keys_BHSA.dtype) * self.coverage[:, None].to(v_HA.dtype)
        return self.kernels.additive_score(query_BHQA, keys_BHSA, v_HA, coverage_BHQSA)


class Dot(Score):
    """q . k, Luong et al. 2015, section 3.1. With projections: (W q) . (U k) within each head."""

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels)
        self.query = nn.Identity()
        self.key = nn.Identity()
        if config.has_projections:
            self.query = kernels.Linear(query_size, query_size, bias=False)
            self.key = kernels.Linear(memory_size, query_size, bias=False)

    def score_keys(self, query_BHQA: Tensor, keys_BHSA: Tensor) -> Tensor:
        return query_BHQA @ keys_BHSA.transpose(2, 3)


class ScaledDot(Dot):
    """q . k / sqrt(A), Vaswani et al. 2017, eq. 1. A is the size per head."""

    def score_keys(self, query_BHQA: Tensor, keys_BHSA: Tensor) -> Tensor:
        return super().score_keys(query_BHQA * query_BHQA.shape[3] ** -0.5, keys_BHSA)


class General(ScaledDot):
    """q . W k, Luong et al. 2015, section 3.1. W is applied to the keys, outside the step loop.

    The parameter holds sqrt(A) W: Adam moves every entry of a matrix by about the learning rate, whatever its gradient,
    and entries that move together change a score by |q|_1 |k|_1 times as much. Unscaled, attention collapses onto one
    position, mostly a wrong one, before it has learned anything. With projections, (W q) . (U k) = q . (W^T U) k is
    already of this form.
    """

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, memory_size, kernels)
        if not config.has_projections:
            self.key = kernels.Linear(memory_size, query_size, bias=False)


class Location(Score):
    """W q: a score for each source position, regardless of its content, Luong et al. 2015, eq. 8."""

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels)
        self.max_source_positions = LOCATION_POSITIONS
        self.query = kernels.Linear(query_size, self.heads * LOCATION_POSITIONS, bias=False)
        self.key = nn.Identity()  # only the number of keys matters

    def score_keys(self, query_BHQA: Tensor, keys_BHSA: Tensor) -> Tensor:
        return resize_last(query_BHQA, keys_BHSA.shape[2])  # later ones are hidden


# --------------------------------------------------------------------------------------------------------- attention
class Attention(nn.Module):
    """Attention with the configured score, window and normalizer: queries and memory -> contexts and weights."""

    def __init__(
        self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.context_size = memory_size
        self.heads = config.heads
        self.show_head(config.head)
        self.uses_position = config.window == "local_m"
        self.has_coverage = config.coverage
        self.score = SCORE_CLASSES[config.score](config, query_size, memory_size, kernels)
        self.max_source_positions = self.score.max_source_positions
        self.window = WINDOW_CLASSES[config.window](config, query_size, kernels, is_causal)
        self.normalize = NORMALIZER_FNS[config.normalizer]
        self.value = nn.Identity()
        self.output = nn.Identity()
        if config.has_projections:
            self.value = kernels.Linear(self.context_size, self.context_size, bias=False)
            self.output = kernels.Linear(self.context_size, self.context_size, bias=False)

    def show_head(self, head: int | None) -> None:
        """Choose the head whose weights are returned. None: their mean."""
        self.shown_head = 0 if self.heads == 1 else head

    def project_memory(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        """Project the keys and values of each sentence, once for all steps.

        They are kept in `step_dtype`: on a CPU, tanh and products with a single query are faster in fp32 than in bf16.
        """
        return build_memory(*self.project(values_BSM), length_B, self.max_source_positions)

    def project(self, values_BSM: Tensor) -> tuple[Tensor, Tensor]:
        """Return values_BHSM and keys_BHSA."""
        dtype = step_dtype(values_BSM)
        values_BHSM = self.split_heads(self.value(values_BSM).to(dtype))
        keys_BHSA = self.split_heads(self.score.key(values_BSM).to(dtype))
        return values_BHSM, keys_BHSA

    def split_heads(self, x_RQX: Tensor) -> Tensor:
        """Split the last dimension into heads: x_RQX -> x_RHQX."""
        if self.heads == 1:
            return x_RQX.unsqueeze(1)
        rows, queries, size = x_RQX.shape
        return x_RQX.view(rows, queries, self.heads, size // self.heads).transpose(1, 2).contiguous()

    def init_state(self, memory: Memory) -> tuple[Tensor | None, Tensor | None]:
        """Return position_B and coverage_BS before the first query, each None if it is not used."""
        position_B = torch.zeros_like(memory.length_B) if self.uses_position else None
        if not self.has_coverage:
            return position_B, None
        sentences, _, positions, _ = memory.values_BHSM.shape
        dtype = accumulation_dtype(memory.values_BHSM.dtype)
        return position_B, memory.values_BHSM.new_zeros(sentences, positions, dtype=dtype)

    def get_maps(self, dtype: torch.dtype, is_loop: bool) -> AttentionMaps:
        """Return the linear maps of queries. For a step loop with queries of `dtype` they are cast once."""
        modules = self.score.query, self.window.point, self.output
        if is_loop:
            modules = (map.for_step_loop(dtype) if isinstance(map, reference.Linear) else map for map in modules)
        return AttentionMaps(*modules)

    def forward(
        self,
        query_BQD: Tensor,
        memory: Memory,
        position_BQ: Tensor | None = None,
        coverage_BQS: Tensor | None = None,
        maps: AttentionMaps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return context_BQM and weights_BQS of the queries.

        c = sum_s a_s v_s with a = normalize(score(q, k)), Bahdanau et al. 2014, eq. 5-6, times the gain of the window,
        after which the weights are not normalized again (Luong et al. 2015, eq. 10). Several heads: Vaswani et al.
        2017, section 3.2.2; the returned weights are those of `attention.head`, or the mean over heads. Weights are at
        least fp32 whatever the dtype of the queries.

        `position_BQ` is the position of each query in its own sequence, from 0, and `coverage_BQS` the sum of the
        weights of earlier queries. Either may be None if it is not used. `maps` are those of a step loop, if any.
        """
        maps = maps or self.get_maps(query_BQD.dtype, is_loop=False)
        sentences, queries, _ = query_BQD.shape
        query_ND = query_BQD.flatten(0, 1)
        query_BHQA = self.split_heads(maps.query(query_ND).view(sentences, queries, -1)).to(memory.keys_BHSA.dtype)

        scores_BHQS = self.score(query_BHQA, memory.keys_BHSA, coverage_BQS)
        bias_BQS, gain_BQS = self.window(query_BQD, position_BQ, memory, maps.focus)
        weights_BHQS = self.normalize(scores_BHQS + bias_BQS.unsqueeze(1))  # at least fp32, because the bias is fp32
        if gain_BQS is not None:
            weights_BHQS = weights_BHQS * gain_BQS.unsqueeze(1)
        context_BHQM = weights_BHQS.to(memory.values_BHSM.dtype) @ memory.values_BHSM

        context_NM = context_BHQM.transpose(1, 2).reshape(sentences * queries, self.context_size)
        context_BQM = maps.output(context_NM.to(query_BQD.dtype)).view(sentences, queries, -1)
        return context_BQM, weights_BHQS.mean(1) if self.shown_head is None else weights_BHQS[:, self.shown_head]


class NoAttention(nn.Module):
    """The encoder-decoder without attention (Sutskever et al. 2014): contexts of size 0, and no weights."""

    context_size = 0
    max_source_positions = None

    def project_memory(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        return build_memory(values_BSM.unsqueeze(1), values_BSM[..., :0].unsqueeze(1), length_B)

    def init_state(self, memory: Memory) -> tuple[None, None]:
        return None, None

    def get_maps(self, dtype: torch.dtype, is_loop: bool) -> None:
        return None

    def forward(self, query_BQD: Tensor, *_: Any) -> tuple[Tensor, None]:
        return query_BQD[..., :0], None


class AttentionContext:
    """Attention during one call of a decoder, or of a Transformer layer.

    Advances position and coverage, and collects the weights. `is_loop` says whether there is a call of `attend` for
    each target position. N rows: the hypotheses of the sentences, in order. T target positions.
    """

    def __init__(
        self,
        attention: Attention | NoAttention,
        memory: Memory,
        position_N: Tensor | None,
        coverage_NS: Tensor | None,
        dtype: torch.dtype,
        is_loop: bool = False,
    ) -> None:
        self.attention = attention
        self.memory = memory
        self.maps = attention.get_maps(dtype, is_loop or coverage_NS is not None)
        self.sentences, _, self.positions, _ = memory.values_BHSM.shape
        self.position_N = position_N
        self.coverage_NS = coverage_NS
        self.weights: list[Tensor] = []  # weights_NTS of each call of the attention

    def attend(self, query_NTD: Tensor) -> Tensor:
        """Return context_NTM of the next T queries of each row.

        All queries attend in one call, with two exceptions. Without gradients at most `MAX_QUERIES_AT_ONCE` do, since
        the additive score needs memory for each pair of positions. With coverage they attend one by one, since each
        depends on the weights of those before it.
        """
        rows, steps, size = query_NTD.shape
        if self.coverage_NS is not None:
            steps_per_call = 1
        else:
            steps_per_call = steps if torch.is_grad_enabled() else MAX_QUERIES_AT_ONCE
        if steps > steps_per_call:
            return torch.cat([self.attend(chunk_NTD) for chunk_NTD in query_NTD.split(steps_per_call, 1)], 1)
        position_BQ = coverage_BQS = None
        if self.position_N is not None:
            position_NT = self.position_N.unsqueeze(1) + torch.arange(steps, device=query_NTD.device)
            position_BQ = position_NT.view(self.sentences, -1)
            self.position_N = self.position_N + steps
        if self.coverage_NS is not None:
            coverage_BQS = self.coverage_NS.view(self.sentences, -1, self.positions)
        query_BQD = query_NTD.reshape(self.sentences, -1, size)
        context_BQM, weights_BQS = self.attention(query_BQD, self.memory, position_BQ, coverage_BQS, self.maps)
        if weights_BQS is not None:
            self.weights.append(weights_BQS.reshape(rows, steps, self.positions))
            if self.coverage_NS is not None:
                self.coverage_NS = self.coverage_NS + self.weights[-1].squeeze(1)
        return context_BQM.reshape(rows, steps, context_BQM.shape[2])

    def concat_weights(self) -> Tensor | None:
        """Return weights_NTS of all queries, or None without attention."""
        return torch.cat(self.weights, 1) if self.weights else None


SCORE_CLASSES = {
    "additive": Additive,
    "concat": Additive,
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "general": General,
    "location": Location,
}
