"""Attention as three independent parts: score, window and normalizer.

A score compares queries with keys, a window limits which source positions a query attends to and with what gain, and a
normalizer turns scores into weights that sum to 1. The context is the weighted sum of the values.

Shapes: B sentences, Q queries of a sentence (K hypotheses x T target positions), S source positions (`</s>` included),
D query (decoder) size, M memory (encoder output) size, A size of the space in which queries and keys are compared, W
width of a window. H heads: in shapes that contain H, sizes are per head. R rows: sets of W keys, each with the queries
that share them (see `windows.py`). N = B x Q queries.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import AttentionConfig
from nmt.model import reference
from nmt.model.kernels import Kernels
from nmt.model.normalizers import NORMALIZER_FNS
from nmt.model.numerics import accumulation_dtype, init_uniform_, step_dtype
from nmt.model.reference import LinearFn
from nmt.model.windows import WINDOW_CLASSES, Memory, build_memory

MAX_QUERIES_AT_ONCE = 16  # queries of a row that attend in one call if no gradient is needed


class AttentionWeights(NamedTuple):
    """Attention weights, stored only inside each window: W weights per query, starting at source position `first`."""

    weights_BQW: Tensor
    first_BQ: Tensor | None  # None: every window starts at position 0

    def reshape(self, rows: int, steps: int) -> "AttentionWeights":
        """Regroup the queries as weights_NTW with N rows of T steps."""
        first_NT = None if self.first_BQ is None else self.first_BQ.reshape(rows, steps)
        return AttentionWeights(self.weights_BQW.reshape(rows, steps, -1), first_NT)

    def dense(self, positions: int) -> Tensor:
        """Return weights_BQS over all source positions, 0 outside the window."""
        if self.first_BQ is None:
            return self.weights_BQW
        dense_BQS = self.weights_BQW.new_zeros(*self.weights_BQW.shape[:2], positions)
        index_BQW = self.first_BQ.unsqueeze(2) + torch.arange(self.weights_BQW.shape[2], device=dense_BQS.device)
        return dense_BQS.scatter(2, index_BQW, self.weights_BQW)


def average_weights(weights: Sequence[AttentionWeights], positions: int) -> AttentionWeights:
    """Return the mean of the weights of several layers or models, over all source positions."""
    if len(weights) == 1:
        return weights[0]
    return AttentionWeights(torch.stack([part.dense(positions) for part in weights]).mean(0), None)


AttendFn = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, AttentionWeights | None]]


def prepare_projection(module: nn.Module, dtype: torch.dtype, is_loop: bool) -> LinearFn:
    """Return a `Linear` prepared for a step loop, or the module itself if there is no loop or it is the identity."""
    return module.prepare_steps(dtype) if is_loop and isinstance(module, reference.Linear) else module


# ------------------------------------------------------------------------------------------------------------ scores
class Score(nn.Module):
    """Base class of scores. Compares queries with keys per head; masking and softmax happen elsewhere.

    Subclasses define `query`, `key` and `score_keys`. `Additive` overrides `forward` instead, because its coverage is
    inside of tanh.
    """

    reach: int | None = None  # number of source positions that it can score; None: unlimited
    query: nn.Module  # projection of query_ND for all heads, concatenated
    key: nn.Module  # projection of values_BSM for all heads, concatenated
    score_keys: Callable[[Tensor, Tensor, Tensor], Tensor]  # (query, keys, position) -> scores_RHQW without coverage

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, coverage_size: int = 1) -> None:
        super().__init__()
        self.kernels = kernels
        self.heads = config.heads
        self.size = config.size or query_size
        if config.coverage:
            self.coverage = nn.Parameter(torch.zeros(self.heads, 1, coverage_size))

    def forward(
        self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor, coverage_RQW: Tensor | None
    ) -> Tensor:
        """Return scores_RHQW.

        `position_RW` (R may be 1) holds the source positions of the keys. `coverage_RQW` is the sum of the weights that
        they received from earlier queries, or None if the model has no coverage.
        """
        scores_RHQW = self.score_keys(query_RHQA, keys_RHWA, position_RW)
        if coverage_RQW is None:
            return scores_RHQW
        return scores_RHQW + self.coverage * coverage_RQW.unsqueeze(1)


class Additive(Score):
    """v . tanh(W q + U k + b), Bahdanau et al. 2014, appendix A.1.2; `concat` in Luong et al. 2015.

    With coverage: v . tanh(W q + U k + w_c c + b), See et al. 2017, eq. 11.
    """

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels, coverage_size=(config.size or query_size) // config.heads)
        self.query = kernels.Linear(query_size, self.size, bias=False)
        self.key = kernels.Linear(memory_size, self.size)
        self.v = nn.Parameter(torch.empty(self.size))
        init_uniform_(self.v.detach(), self.size)

    def forward(
        self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor, coverage_RQW: Tensor | None
    ) -> Tensor:
        v_HA = self.v.to(keys_RHWA.dtype).view(self.heads, -1)
        if coverage_RQW is None:
            return self.kernels.additive_score(query_RHQA, keys_RHWA, v_HA)
        coverage_RHQWA = coverage_RQW[:, None, :, :, None].to(keys_RHWA.dtype) * self.coverage[:, None].to(v_HA.dtype)
        return self.kernels.additive_score(query_RHQA, keys_RHWA, v_HA, coverage_RHQWA)


class Dot(Score):
    """q . k, Luong et al. 2015, section 3.1. With projections: (W q) . (U k) within each head."""

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels)
        self.query = nn.Identity()
        self.key = nn.Identity()
        if config.has_projections:
            self.query = kernels.Linear(query_size, self.size, bias=False)
            self.key = kernels.Linear(memory_size, self.size, bias=False)

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        return query_RHQA @ keys_RHWA.transpose(2, 3)


class ScaledDot(Dot):
    """q . k / sqrt(A), Vaswani et al. 2017, eq. 1. A is the size per head."""

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        return super().score_keys(query_RHQA * query_RHQA.shape[3] ** -0.5, keys_RHWA, position_RW)


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


class NoKeys(nn.Module):
    """Keys of size 0, for scores that do not look at the source."""

    def forward(self, values_BSM: Tensor) -> Tensor:
        return values_BSM[..., :0]


class Location(Score):
    """W q: a score for each source position, regardless of its content, Luong et al. 2015, eq. 8."""

    def __init__(self, config: AttentionConfig, query_size: int, memory_size: int, kernels: Kernels) -> None:
        super().__init__(config, query_size, kernels)
        self.reach = config.max_positions
        self.query = kernels.Linear(query_size, self.heads * self.reach, bias=False)
        self.key = NoKeys()

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        index_RHQW = position_RW.clamp(max=query_RHQA.shape[3] - 1)[:, None, None]
        return query_RHQA.gather(3, index_RHQW.expand(*query_RHQA.shape[:3], -1))


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
        self.reach = self.score.reach  # number of source positions that can have weight; None: unlimited
        self.window = WINDOW_CLASSES[config.window](config, query_size, kernels, is_causal)
        self.normalize = NORMALIZER_FNS[config.normalizer]
        sees_all = config.window == "global" and not is_causal
        can_fuse = isinstance(self.score, Additive) and not config.coverage and sees_all
        self.attention_for_steps = kernels.attention_for_steps if can_fuse else None
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
        return build_memory(*self.project(values_BSM), length_B, self.reach)

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

    def prepare_steps(self, memory: Memory, dtype: torch.dtype, is_loop: bool = True) -> AttendFn:
        """Return attend(query_BQD, position_BQ, coverage_BQS) -> (context_BQM, weights) for one step loop.

        c = sum_s a_s v_s with a = normalize(score(q, k)), Bahdanau et al. 2014, eq. 5-6, times the gain of the window,
        after which the weights are not normalized again (Luong et al. 2015, eq. 10). Several heads: Vaswani et al.
        2017, section 3.2.2; the returned weights are those of `attention.head`, or the mean over heads. Weights are at
        least fp32 whatever `dtype`.

        `position_BQ` is the position of each query in its own sequence, from 0, and `coverage_BQS` the sum of the
        weights of earlier queries. Either may be None if it is not used. All linear maps are prepared for the loop, see
        `linear_for_steps`. That is not worth it for a single call: `is_loop=False`.
        """
        project_query = prepare_projection(self.score.query, dtype, is_loop)
        project_output = prepare_projection(self.output, dtype, is_loop)
        get_view = self.window.prepare_steps(memory, dtype)
        attend_at_once = None
        if self.attention_for_steps is not None:
            attend_at_once = self.attention_for_steps(
                memory.keys_BHSA, memory.values_BHSM, self.score.v, memory.visible_B, self.normalize
            )

        def attend(
            query_BQD: Tensor, position_BQ: Tensor | None, coverage_BQS: Tensor | None
        ) -> tuple[Tensor, AttentionWeights]:
            sentences, queries, _ = query_BQD.shape
            query_ND = query_BQD.flatten(0, 1)
            view = get_view(query_ND, position_BQ)
            rows = len(view.keys_RHWA)
            shape = (rows, len(query_ND) // rows, -1)
            if coverage_BQS is not None and view.first_BQ is not None:
                coverage_BQS = coverage_BQS.gather(2, view.position_RW.view(sentences, queries, -1))
            coverage_RQW = None if coverage_BQS is None else coverage_BQS.view(shape)
            query_RHQA = self.split_heads(project_query(query_ND).view(shape)).to(view.keys_RHWA.dtype)
            if attend_at_once is not None:
                context_RHQM, weights_RHQW = attend_at_once(query_RHQA)
            else:
                scores_RHQW = self.score(query_RHQA, view.keys_RHWA, view.position_RW, coverage_RQW)
                weights_RHQW = self.normalize(scores_RHQW + view.bias_RHQW)  # at least fp32, because the bias is fp32
                if view.gain_RHQW is not None:
                    weights_RHQW = weights_RHQW * view.gain_RHQW
                context_RHQM = weights_RHQW.to(view.values_RHWM.dtype) @ view.values_RHWM
            joined_NM = context_RHQM.transpose(1, 2).reshape(sentences * queries, self.context_size)
            context_NM = project_output(joined_NM.to(dtype))
            shown_RQW = weights_RHQW.mean(1) if self.shown_head is None else weights_RHQW[:, self.shown_head]
            weights_BQW = shown_RQW.reshape(sentences, queries, -1)
            return context_NM.view(sentences, queries, -1), AttentionWeights(weights_BQW, view.first_BQ)

        return attend


class NoAttention(nn.Module):
    """The encoder-decoder without attention (Sutskever et al. 2014): contexts of size 0, and no weights."""

    context_size = 0
    reach = None

    def project_memory(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        return build_memory(values_BSM.unsqueeze(1), values_BSM[..., :0].unsqueeze(1), length_B, self.reach)

    def init_state(self, memory: Memory) -> tuple[None, None]:
        return None, None

    def prepare_steps(self, memory: Memory, dtype: torch.dtype, is_loop: bool = True) -> AttendFn:
        def attend(query_BQD: Tensor, position_BQ: Tensor | None, coverage_BQS: Tensor | None) -> tuple[Tensor, None]:
            return query_BQD[..., :0], None

        return attend


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
        self.attend_fn = attention.prepare_steps(memory, dtype, is_loop or coverage_NS is not None)
        self.sentences, _, self.positions, _ = memory.values_BHSM.shape
        self.position_N = position_N
        self.coverage_NS = coverage_NS
        self.weights: list[AttentionWeights] = []  # one entry per call of `attend_fn`

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
        context_BQM, weights = self.attend_fn(query_BQD, position_BQ, coverage_BQS)
        if weights is not None:
            self.weights.append(weights.reshape(rows, steps))
            if self.coverage_NS is not None:
                self.coverage_NS = self.coverage_NS + self.weights[-1].dense(self.positions).squeeze(1)
        return context_BQM.reshape(rows, steps, context_BQM.shape[2])

    def concat_weights(self) -> AttentionWeights | None:
        """Return weights_NTW of all queries, or None without attention."""
        if not self.weights:
            return None
        weights_NTW = torch.cat([weights.weights_BQW for weights in self.weights], 1)
        firsts = [weights.first_BQ for weights in self.weights if weights.first_BQ is not None]
        return AttentionWeights(weights_NTW, torch.cat(firsts, 1) if firsts else None)


SCORE_CLASSES = {
    "additive": Additive,
    "concat": Additive,
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "general": General,
    "location": Location,
}
