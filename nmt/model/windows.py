"""Which source positions a query may look at, and with what gain.

Shapes: B sentences, Q queries of a sentence, S source positions (`</s>` included), D query (decoder) size, M memory
(encoder output) size, A size of the space in which queries and keys meet, W width of a window. H heads: behind an H, a
size is a head's share of it. R rows: sets of W keys, and the queries that share them. Mostly a row is a sentence with
all its queries (R = B, W = S); in a local window of a long source every query has keys of its own and is a row
(R = B x Q, with one query each). N = B x Q queries, w half the width of a local window (D in Luong et al. 2015).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import ModelConfig
from nmt.model.kernels.linear import Linear, accumulation_dtype, init_uniform_, rows_for_steps, tanh, values_for_steps

WHOLE = 1.5  # sources up to so many local windows long are looked at whole
MASKED = -1e30  # the bias of what must not be seen; finite, so that no NaN arises where that is everything


class Memory(NamedTuple):
    """What a decoder may look at. One row a sentence, however many hypotheses it has; passed, never stored."""

    values_BHSM: Tensor
    keys_BHSA: Tensor  # the values as the score wants them, projected once a sentence
    length_B: Tensor
    visible_B: Tensor  # the length, as far as attention reaches
    bias_BS: Tensor  # fp32, added to scores: 0, and `MASKED` from `visible_B` on

    def select(self, rows_B: Tensor) -> "Memory":
        return Memory(*(part.index_select(0, rows_B) for part in self))

    def scatter_rows(self, rows_B: Tensor, others: "Memory") -> "Memory":
        """Others in the place of these rows. What it held of them is overwritten."""
        return Memory(*(own.index_copy_(0, rows_B, its) for own, its in zip(self, others, strict=True)))

    def trim_source(self, positions: int) -> "Memory":
        """With only the first source positions, where no sentence has more."""
        values_BHSM, keys_BHSA = (part[..., :positions, :].contiguous() for part in self[:2])
        return Memory(values_BHSM, keys_BHSA, self.length_B, self.visible_B, self.bias_BS[:, :positions])


class View(NamedTuple):
    """What queries may look at."""

    keys_RHWA: Tensor
    read: Callable[[Tensor], Tensor]  # weights_RHQW -> context_RHQM, weighted sums of the values
    position_RW: Tensor  # of the keys in the source; R may be 1
    bias_RHQW: Tensor  # fp32, added to scores: 0, or `MASKED` where nothing may be seen; H is 1
    gain_RHQW: Tensor | None = None  # weights are multiplied by it; H is 1
    first_BQ: Tensor | None = None  # where windows begin; None: at 0


Look = Callable[[Tensor, Tensor | None], View]


def memory_of(values_BHSM: Tensor, keys_BHSA: Tensor, length_B: Tensor, reach: int | None) -> Memory:
    visible_B = length_B if reach is None else length_B.clamp(max=reach)
    position_S = torch.arange(values_BHSM.shape[2], device=length_B.device)
    bias_BS = (position_S >= visible_B.unsqueeze(1)) * MASKED
    return Memory(values_BHSM, keys_BHSA, length_B, visible_B, bias_BS)


class Global(nn.Module):
    """The whole sentence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> Look:
        """Returns look(query_ND, position_BQ) -> View, for one step loop."""
        position_RW = torch.arange(memory.bias_BS.shape[1], device=memory.bias_BS.device).unsqueeze(0)
        bias_RHQW = memory.bias_BS[:, None, None]
        view = View(memory.keys_BHSA, values_for_steps(memory.values_BHSM), position_RW, bias_RHQW)
        return lambda query_ND, position_BQ: view


class LocalM(nn.Module):
    """{s : |s - c| <= w}, c = min(t, S - 1): the t-th target piece looks around the t-th source piece (t from 0; Luong
    et al. 2015, section 3.2, local-m). Cut at the ends of the sentence, not shifted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.half_width = config.attention.half_width

    def aim(self, length_B1: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Returns point(query_ND, position_BQ) -> the point_BQ around which to look."""
        return lambda query_ND, position_BQ: position_BQ

    def gain(self, distance_BQW: Tensor) -> Tensor | float:
        return 1.0

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> Look:
        """As `Global.bind`. From a long source it takes W = 2 w + 1 keys and values for each query, from
        clamp(c - w, 0, S - W) on: what a step costs does not depend on S. In a source of at most `WHOLE` W positions
        it costs less to hide what is outside the window: all queries of a sentence share its keys."""
        sentences, heads, positions, _ = memory.values_BHSM.shape
        device = memory.length_B.device
        width = 2 * self.half_width + 1
        length_B1, visible_B11 = memory.length_B.unsqueeze(1), memory.visible_B.view(-1, 1, 1)
        point = self.aim(length_B1, dtype)

        def center(point_BQ: Tensor) -> Tensor:
            return torch.minimum(point_BQ.detach().floor().long(), length_B1 - 1)

        def limits(point_BQ: Tensor, center_BQ: Tensor, position_BQW: Tensor) -> tuple[Tensor, Tensor]:
            """bias_BQW and gain_BQW."""
            near_BQW = (position_BQW - center_BQ.unsqueeze(2)).abs() <= self.half_width
            seen_BQW = near_BQW & (position_BQW < visible_B11)
            return ~seen_BQW * MASKED, seen_BQW * self.gain(position_BQW - point_BQ.unsqueeze(2))

        if positions <= WHOLE * width:
            position_1S = torch.arange(positions, device=device).unsqueeze(0)
            read = values_for_steps(memory.values_BHSM)

            def look_whole(query_ND: Tensor, position_BQ: Tensor | None) -> View:
                point_BQ = point(query_ND, position_BQ)
                bias_BQS, gain_BQS = limits(point_BQ, center(point_BQ), position_1S.unsqueeze(0))
                bias_RHQW, gain_RHQW = bias_BQS.unsqueeze(1), gain_BQS.unsqueeze(1)
                return View(memory.keys_BHSA, read, position_1S, bias_RHQW, gain_RHQW)

            return look_whole

        offset_W = torch.arange(width, device=device)
        head_BQHW = positions * torch.arange(sentences * heads, device=device).view(sentences, 1, heads, 1)
        keys, values = rows_for_steps(memory.keys_BHSA.flatten(0, 2)), rows_for_steps(memory.values_BHSM.flatten(0, 2))

        def look(query_ND: Tensor, position_BQ: Tensor | None) -> View:
            point_BQ = point(query_ND, position_BQ)
            center_BQ = center(point_BQ)
            first_BQ = (center_BQ - self.half_width).clamp(0, positions - width)
            position_BQW = first_BQ.unsqueeze(2) + offset_W
            index_RHW = (head_BQHW + position_BQW.unsqueeze(2)).flatten(0, 1)
            bias_RW, gain_RW = (part.flatten(0, 1) for part in limits(point_BQ, center_BQ, position_BQW))
            bias_RHQW, gain_RHQW = bias_RW[:, None, None], gain_RW[:, None, None]
            position_RW = position_BQW.flatten(0, 1)
            read = partial(torch.matmul, other=values(index_RHW))
            return View(keys(index_RHW), read, position_RW, bias_RHQW, gain_RHQW, first_BQ)

        return look


class LocalP(LocalM):
    """The same around floor(p), p = S sigmoid(v . tanh(W q)), with gain exp(-(s - p)^2 / (2 sigma^2)), sigma = w / 2
    (Luong et al. 2015, eq. 9 and 10, local-p). p is learned by way of the gain; heads share it. v is kept as sqrt(D) v,
    for the reason that `General` gives: the sigmoid would soon be at its end."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.point = Linear(config.hidden, config.hidden, bias=False)
        self.v = nn.Parameter(torch.empty(config.hidden))
        init_uniform_(self.v.detach(), config.hidden)

    def aim(self, length_B1: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
        linear = self.point.prepare_steps(dtype)

        def point(query_ND: Tensor, position_BQ: Tensor | None) -> Tensor:
            inner_ND = tanh(linear(query_ND)).to(accumulation_dtype(dtype))
            logit_N = inner_ND @ self.v.to(accumulation_dtype(dtype)) * self.v.numel() ** -0.5
            return length_B1 * torch.sigmoid(logit_N.view(len(length_B1), -1))

        return point

    def gain(self, distance_BQW: Tensor) -> Tensor:
        return torch.exp(distance_BQW.square() * (-2 / self.half_width**2))


WINDOWS = {"global": Global, "local_m": LocalM, "local_p": LocalP}
