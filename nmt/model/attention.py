"""Attention = score x window x normalizer, parts that know nothing of each other.

A score compares queries with keys, a window says which source positions a query may look at and with what gain, a
normalizer turns scores into weights that sum to 1. The context is the weighted sum of the values.

Shapes: B sentences, Q queries of a sentence (K hypotheses x T target positions), S source positions (`</s>` included),
D query (decoder) size, M memory (encoder output) size, A size of the space in which queries and keys meet, W width of a
window. H heads: behind an H, a size is a head's share of it. R rows: sets of W keys, and the queries that share them
(see `windows.py`); N = B x Q queries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import ModelConfig
from nmt.model.kernels.inference_weights import LinearFn, sum_of
from nmt.model.kernels.linear import CACHED, Linear, accumulation_dtype, init_uniform_, step_dtype
from nmt.model.normalizers import NORMALIZERS
from nmt.model.windows import WINDOWS, Memory, memory_of


class Weights(NamedTuple):
    """Attention weights as they travel: for each query W weights, from source position `first` on."""

    weights_BQW: Tensor
    first_BQ: Tensor | None  # None: all windows begin at 0

    def reshape(self, rows: int, steps: int) -> "Weights":
        """weights_NTW of N rows and T steps."""
        first_NT = None if self.first_BQ is None else self.first_BQ.reshape(rows, steps)
        return Weights(self.weights_BQW.reshape(rows, steps, -1), first_NT)

    def dense(self, positions: int) -> Tensor:
        """weights_BQS over all source positions, 0 outside the window."""
        if self.first_BQ is None:
            return self.weights_BQW
        dense_BQS = self.weights_BQW.new_zeros(*self.weights_BQW.shape[:2], positions)
        index_BQW = self.first_BQ.unsqueeze(2) + torch.arange(self.weights_BQW.shape[2], device=dense_BQS.device)
        return dense_BQS.scatter(2, index_BQW, self.weights_BQW)


Attend = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Weights | None]]


def bound(linear: nn.Module, dtype: torch.dtype) -> LinearFn:
    """A linear map for use in a step loop; the identity as it is."""
    return linear.prepare_steps(dtype) if isinstance(linear, Linear) else linear


# ------------------------------------------------------------------------------------------------------------ scores
class Score(nn.Module):
    """Compares queries with keys, each head on its share; sees no mask and does no softmax."""

    reach: int | None = None  # how many source positions it can tell apart; None: any number
    query: nn.Module  # maps of query_ND and values_BSM, those of all heads side by side
    key: nn.Module
    compare: Callable[[Tensor, Tensor, Tensor], Tensor]  # scores_RHQW without coverage, of what `forward` takes

    def __init__(self, config: ModelConfig, covered: int = 1) -> None:
        super().__init__()
        self.heads = config.attention.heads
        self.size = config.attention.size or config.hidden
        if config.attention.coverage:
            self.coverage = nn.Parameter(torch.zeros(self.heads, 1, covered))

    def forward(
        self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor, coverage_RQW: Tensor | None
    ) -> Tensor:
        """scores_RHQW; `position_RW` (R may be 1) says where in the source the keys are, `coverage_RQW` how much
        weight they have had (None where the model has no coverage)."""
        scores_RHQW = self.score_keys(query_RHQA, keys_RHWA, position_RW)
        if coverage_RQW is None:
            return scores_RHQW
        return scores_RHQW + self.coverage * coverage_RQW.unsqueeze(1)


def weighted(inner_RHQWA: Tensor, v_HA: Tensor) -> Tensor:
    """v . inner, scores_RHQW."""
    if len(v_HA) == 1:
        return inner_RHQWA @ v_HA.squeeze(0)  # faster than the product below
    return (inner_RHQWA @ v_HA[:, None, :, None]).squeeze(4)


def inner(query_RHQA: Tensor, keys_RHWA: Tensor, plus_RHQWA: Tensor | None = None) -> Tensor:
    """tanh(q + k + plus), inner_RHQWA."""
    return sum_of(query_RHQA.unsqueeze(3) + keys_RHWA.unsqueeze(2), plus_RHQWA).tanh_()


class _ByRows(torch.autograd.Function):
    """v . tanh(q + k) of so many rows at a time that a processor's caches hold the sums. They are made again for the
    gradient, not kept: of a whole target they are by far the largest tensor of a batch."""

    @staticmethod
    def forward(ctx: Any, at_once: int, query_RHQA: Tensor, keys_RHWA: Tensor, v_HA: Tensor) -> Tensor:
        ctx.save_for_backward(query_RHQA, keys_RHWA, v_HA)
        ctx.at_once = at_once
        parts = zip(query_RHQA.split(at_once), keys_RHWA.split(at_once), strict=True)
        return torch.cat([weighted(inner(*part), v_HA) for part in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query_RHQA, keys_RHWA, v_HA = ctx.saved_tensors
        dquery_RHQA, dkeys_RHWA = torch.empty_like(query_RHQA), torch.empty_like(keys_RHWA)
        dv_HA = torch.zeros_like(v_HA)
        tensors = query_RHQA, keys_RHWA, gradients[0], dquery_RHQA, dkeys_RHWA
        for query, keys, dscores_RHQW, dquery, dkeys in zip(*(t.split(ctx.at_once) for t in tensors), strict=True):
            inner_RHQWA = inner(query, keys)
            dv_HA += (dscores_RHQW.unsqueeze(3) @ inner_RHQWA).sum((0, 2, 3))
            through = torch.ops.aten.tanh_backward.grad_input(  # without v, which comes last
                dscores_RHQW.unsqueeze(4), inner_RHQWA, grad_input=inner_RHQWA
            )
            dquery.copy_(through.sum(3))
            dkeys.copy_(through.sum(2))
        v_H1A = v_HA.unsqueeze(1)
        return None, dquery_RHQA.mul_(v_H1A), dkeys_RHWA.mul_(v_H1A), dv_HA


class Additive(Score):
    """v . tanh(W q + U k + b), Bahdanau et al. 2014, appendix A.1.2; `concat` in Luong et al. 2015. With coverage
    v . tanh(W q + U k + w_c c + b), See et al. 2017, eq. 11."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, covered=(config.attention.size or config.hidden) // config.attention.heads)
        self.query = Linear(config.hidden, self.size, bias=False)
        self.key = Linear(config.memory, self.size)
        self.v = nn.Parameter(torch.empty(self.size))
        init_uniform_(self.v.detach(), self.size)

    def forward(
        self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor, coverage_RQW: Tensor | None
    ) -> Tensor:
        v_HA = self.v.to(keys_RHWA.dtype).view(self.heads, -1)
        if coverage_RQW is None:
            at_once = max(1, CACHED * len(query_RHQA) // (query_RHQA.numel() * keys_RHWA.shape[2]))
            kept = torch.is_grad_enabled() and query_RHQA.shape[2] == 1  # in a loop that takes less time
            if kept or query_RHQA.device.type != "cpu" or len(query_RHQA) <= at_once:
                return weighted(inner(query_RHQA, keys_RHWA), v_HA)
            return _ByRows.apply(at_once, query_RHQA, keys_RHWA, v_HA)
        coverage_RHQWA = coverage_RQW[:, None, :, :, None].to(keys_RHWA.dtype) * self.coverage[:, None].to(v_HA.dtype)
        return weighted(inner(query_RHQA, keys_RHWA, coverage_RHQWA), v_HA)


class Dot(Score):
    """q . k, Luong et al. 2015, section 3.1; of the shares of W q and U k where there are several heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.query, self.key = nn.Identity(), nn.Identity()
        if self.heads > 1:
            self.query = Linear(config.hidden, self.size, bias=False)
            self.key = Linear(config.memory, self.size, bias=False)

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        return query_RHQA @ keys_RHWA.transpose(2, 3)


class ScaledDot(Dot):
    """q . k / sqrt(A), Vaswani et al. 2017, eq. 1; A is a head's share."""

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        return super().score_keys(query_RHQA * query_RHQA.shape[3] ** -0.5, keys_RHWA, position_RW)


class General(ScaledDot):
    """q . W k, Luong et al. 2015, section 3.1. W is applied to the keys, outside the step loop.

    It is kept as sqrt(A) W: Adam moves every entry of a matrix by the learning rate, whatever its gradient, and in
    unison they move a score by |q|_1 |k|_1 times as much. Unscaled, attention is all on one position, and mostly on the
    wrong one, before it has learned anything. With several heads (W q) . (U k) is q . (W^T U) k already.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.heads == 1:
            self.key = Linear(config.memory, config.hidden, bias=False)


class NoKeys(nn.Module):
    def forward(self, values_BSM: Tensor) -> Tensor:
        return values_BSM[..., :0]


class Location(Score):
    """W q, a score for each source position whatever is there, Luong et al. 2015, eq. 8."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.reach = config.attention.max_positions
        self.query = Linear(config.hidden, self.heads * self.reach, bias=False)
        self.key = NoKeys()

    def score_keys(self, query_RHQA: Tensor, keys_RHWA: Tensor, position_RW: Tensor) -> Tensor:
        index_RHQW = position_RW.clamp(max=query_RHQA.shape[3] - 1)[:, None, None]
        return query_RHQA.gather(3, index_RHQW.expand(*query_RHQA.shape[:3], -1))


# --------------------------------------------------------------------------------------------------------- attention
class Attention(nn.Module):
    """Score, window and normalizer put together: queries and memory -> context and weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context_size, self.heads = config.memory, config.attention.heads
        self.counts, self.covers = config.attention.window == "local_m", config.attention.coverage
        self.score = SCORES[config.attention.score](config)
        self.reach = self.score.reach  # how many positions of a source can have weight; None: all of them
        self.window = WINDOWS[config.attention.window](config)
        self.normalize = NORMALIZERS[config.attention.normalizer]
        several = self.heads > 1
        self.value = Linear(self.context_size, self.context_size, bias=False) if several else nn.Identity()
        self.output = Linear(self.context_size, self.context_size, bias=False) if several else nn.Identity()

    def project_memory(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        """Project keys and values of each sentence, once. What a step does with them, tanh and products with a single
        query, a processor does faster in fp32 than in bf16."""
        dtype = step_dtype(values_BSM)
        values_BHSM, keys_BHSA = (
            self.split_heads(part.to(dtype)) for part in (self.value(values_BSM), self.score.key(values_BSM))
        )
        return memory_of(values_BHSM, keys_BHSA, length_B, self.reach)

    def split_heads(self, x_RQX: Tensor) -> Tensor:
        """x_RHQX: to each head its share of the last dimension."""
        if self.heads == 1:
            return x_RQX.unsqueeze(1)
        rows, queries, size = x_RQX.shape
        return x_RQX.view(rows, queries, self.heads, size // self.heads).transpose(1, 2).contiguous()

    def begin(self, memory: Memory) -> tuple[Tensor | None, Tensor | None]:
        """position_B and coverage_BS before the first query, each None where it is not used."""
        position_B = torch.zeros_like(memory.length_B) if self.counts else None
        if not self.covers:
            return position_B, None
        sentences, _, positions, _ = memory.values_BHSM.shape
        return position_B, memory.values_BHSM.new_zeros(
            sentences, positions, dtype=accumulation_dtype(memory.values_BHSM.dtype)
        )

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> Attend:
        """Returns attend(query_BQD, position_BQ, coverage_BQS) -> context_BQM, weights, for one step loop: all linear
        maps are bound (see `maps.bind`).

        c = sum_s a_s v_s with a = normalize(score(q, k)), Bahdanau et al. 2014, eq. 5-6, times the gain of the window,
        after which weights are not normalized again (Luong et al. 2015, eq. 10). `position_BQ` is the place of the
        piece to be written, from 0, and `coverage_BQS` the sum of the weights so far; both as in `begin`. Several
        heads: Vaswani et al. 2017, section 3.2.2; the weights that are returned are their mean. Weights are at least
        fp32 whatever the precision around them.
        """
        query_map, output_map = bound(self.score.query, dtype), bound(self.output, dtype)
        look = self.window.prepare_steps(memory, dtype)

        def attend(
            query_BQD: Tensor, position_BQ: Tensor | None, coverage_BQS: Tensor | None
        ) -> tuple[Tensor, Weights]:
            sentences, queries, _ = query_BQD.shape
            query_ND = query_BQD.flatten(0, 1)
            view = look(query_ND, position_BQ)
            shape = len(view.keys_RHWA), len(query_ND) // len(view.keys_RHWA), -1
            if coverage_BQS is not None and view.first_BQ is not None:
                coverage_BQS = coverage_BQS.gather(2, view.position_RW.view(sentences, queries, -1))
            coverage_RQW = None if coverage_BQS is None else coverage_BQS.view(shape)
            query_RHQA = self.split_heads(query_map(query_ND).view(shape)).to(view.keys_RHWA.dtype)
            scores_RHQW = self.score(query_RHQA, view.keys_RHWA, view.position_RW, coverage_RQW)
            weights_RHQW = self.normalize(scores_RHQW + view.bias_RHQW)  # the bias is fp32, so the sum is, at least
            if view.gain_RHQW is not None:
                weights_RHQW = weights_RHQW * view.gain_RHQW
            context_RHQM = view.read(weights_RHQW.to(memory.values_BHSM.dtype))
            joined_NM = context_RHQM.transpose(1, 2).reshape(sentences * queries, self.context_size)
            context_NM = output_map(joined_NM.to(dtype))
            mean_RQW = weights_RHQW.mean(1) if self.heads > 1 else weights_RHQW
            weights_BQW = mean_RQW.view(sentences, queries, -1)
            return context_NM.view(sentences, queries, -1), Weights(weights_BQW, view.first_BQ)

        return attend


class NoAttention(nn.Module):
    """The encoder-decoder that attention replaced (Sutskever et al. 2014): contexts of size 0, and no weights."""

    context_size, reach = 0, None

    def project_memory(self, values_BSM: Tensor, length_B: Tensor) -> Memory:
        return memory_of(values_BSM.unsqueeze(1), values_BSM[..., :0].unsqueeze(1), length_B, self.reach)

    def begin(self, memory: Memory) -> tuple[None, None]:
        return None, None

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> Attend:
        return lambda query_BQD, position_BQ, coverage_BQS: (query_BQD[..., :0], None)


SCORES = {
    "additive": Additive,
    "concat": Additive,
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "general": General,
    "location": Location,
}
