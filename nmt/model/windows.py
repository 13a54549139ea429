"""Windows: which source positions a query attends to, and with what gain.

Shapes: B sentences, Q queries of a sentence, S source positions (`</s>` included), D query (decoder) size, M memory
(encoder output) size, A size of the space in which queries and keys are compared, W width of a window. H heads: in
shapes that contain H, sizes are per head. R rows: sets of W keys, each with the queries that share them. Usually a row
is a sentence with all its queries (R = B, W = S). With a local window in a long source every query has keys of its own
and is a row (R = B x Q, one query each). N = B x Q queries, w half the width of a local window (D in Luong et al.
2015).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config.model import AttentionConfig
from nmt.model.kernels import Kernels
from nmt.model.numerics import MASK_BIAS, accumulation_dtype, init_uniform_, tanh
from nmt.model.parts import resize_last

MAX_WINDOWS_TO_MASK = 1.5  # sources of up to this many local windows are masked; longer ones are gathered from


class Memory(NamedTuple):
    """What is attended to: the encoded source, or in self-attention the sequence itself.

    One row per sentence, however many hypotheses it has. Passed as an argument, never stored.
    """

    values_BHSM: Tensor
    keys_BHSA: Tensor  # the values as the score needs them, projected once per sentence
    length_B: Tensor  # source length, `</s>` included
    visible_B: Tensor  # number of positions that attention can reach, at most the length
    bias_BS: Tensor  # fp32, added to scores: 0, and `MASK_BIAS` from `visible_B` on

    @property
    def positions(self) -> int:
        """The number of source positions S."""
        return self.bias_BS.shape[1]

    def select(self, rows_B: Tensor) -> "Memory":
        """Return the given rows in the given order."""
        return Memory(*(part.index_select(0, rows_B) for part in self))

    def scatter_rows(self, rows_B: Tensor, new_rows: "Memory") -> "Memory":
        """Overwrite the given rows in place with `new_rows`."""
        return Memory(*(target.index_copy_(0, rows_B, source) for target, source in zip(self, new_rows, strict=True)))

    def keep_first(self, rows: int) -> "Memory":
        """Return the first rows, without a copy."""
        return Memory(*(part[:rows] for part in self))

    def resize_source(self, positions: int) -> "Memory":
        """Return a copy with this many source positions, of which the last are padding. No sentence may be longer."""
        values_BHSM, keys_BHSA = (
            F.pad(part, (0, 0, 0, positions - self.positions)).contiguous()
            for part in (self.values_BHSM, self.keys_BHSA)
        )
        bias_BS = resize_last(self.bias_BS, positions, MASK_BIAS)
        return Memory(values_BHSM, keys_BHSA, self.length_B, self.visible_B, bias_BS)


class WindowView(NamedTuple):
    """The part of the memory that a batch of queries attends to."""

    keys_RHWA: Tensor
    values_RHWM: Tensor
    position_RW: Tensor  # source positions of the keys; R may be 1
    bias_RHQW: Tensor  # fp32, added to scores: 0, or `MASK_BIAS` at hidden positions; H is 1
    gain_RHQW: Tensor | None = None  # factor of the weights; H is 1
    first_BQ: Tensor | None = None  # first source position of each window; None: always 0


ViewFn = Callable[[Tensor, Tensor | None], WindowView]


def build_memory(values_BHSM: Tensor, keys_BHSA: Tensor, length_B: Tensor, reach: int | None) -> Memory:
    """Return the memory, with positions from `reach` on (None: no limit) and padding masked."""
    visible_B = length_B if reach is None else length_B.clamp(max=reach)
    position_S = torch.arange(values_BHSM.shape[2], device=length_B.device)
    bias_BS = (position_S >= visible_B.unsqueeze(1)) * MASK_BIAS
    return Memory(values_BHSM, keys_BHSA, length_B, visible_B, bias_BS)


class GlobalWindow(nn.Module):
    """The whole sentence. If it is causal, a query at position t sees the positions up to t."""

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> ViewFn:
        """Return get_view(query_ND, position_BQ) -> WindowView for one step loop."""
        position_RW = torch.arange(memory.positions, device=memory.bias_BS.device).unsqueeze(0)
        view = WindowView(memory.keys_BHSA, memory.values_BHSM, position_RW, memory.bias_BS[:, None, None])
        if not self.is_causal:
            return lambda query_ND, position_BQ: view

        def get_causal_view(query_ND: Tensor, position_BQ: Tensor | None) -> WindowView:
            assert position_BQ is not None
            is_later_BHQW = position_RW > position_BQ[:, None, :, None]
            return view._replace(bias_RHQW=view.bias_RHQW.masked_fill(is_later_BHQW, MASK_BIAS))

        return get_causal_view


class LocalMWindow(nn.Module):
    """{s : |s - c| <= w}, c = min(t, S - 1): the t-th target token attends around the t-th source position.

    t counts from 0 (Luong et al. 2015, section 3.2, local-m). The window is cut at the ends of the sentence, not
    shifted. If it is causal, it is cut after position t, and S is t + 1.
    """

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, is_causal: bool = False) -> None:
        super().__init__()
        self.half_width = config.half_width
        self.is_causal = is_causal
        self.rows_for_steps = kernels.rows_for_steps

    def prepare_focus(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Return get_focus(query_ND, position_BQ, length_BQ) -> focus_BQ, the position that each query attends around.

        `length_BQ` is the number of positions to choose from; its shape may be (B, 1).
        """
        return lambda query_ND, position_BQ, length_BQ: position_BQ

    def compute_gain(self, distance_BQW: Tensor) -> Tensor | float:
        """Return the factor of the weights at this distance from the position that the query attends to."""
        return 1.0

    def prepare_steps(self, memory: Memory, dtype: torch.dtype) -> ViewFn:
        """Return get_view(query_ND, position_BQ) -> WindowView for one step loop.

        From a long source it gathers W = 2 w + 1 keys and values for each query, starting at clamp(c - w, 0, S - W), so
        the cost of a step does not depend on S. In a source of at most `MAX_WINDOWS_TO_MASK` W positions it is cheaper
        to mask the positions outside the window: all queries of a sentence then share its keys.
        """
        sentences, heads, positions, _ = memory.values_BHSM.shape
        device = memory.length_B.device
        width = 2 * self.half_width + 1
        length_B1, visible_B1 = memory.length_B.unsqueeze(1), memory.visible_B.unsqueeze(1)
        get_focus_in = self.prepare_focus(dtype)

        def get_focus(query_ND: Tensor, position_BQ: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            """Return focus_BQ, center_BQ, and visible_BQ: how many of the first positions may be attended to."""
            length_BQ, visible_BQ = length_B1, visible_B1
            if self.is_causal:
                assert position_BQ is not None
                length_BQ = position_BQ + 1
                visible_BQ = torch.minimum(visible_B1, length_BQ)
            focus_BQ = get_focus_in(query_ND, position_BQ, length_BQ)
            return focus_BQ, torch.minimum(focus_BQ.detach().floor().long(), length_BQ - 1), visible_BQ

        def compute_bias_and_gain(
            focus_BQ: Tensor, center_BQ: Tensor, visible_BQ: Tensor, position_BQW: Tensor
        ) -> tuple[Tensor, Tensor]:
            near_BQW = (position_BQW - center_BQ.unsqueeze(2)).abs() <= self.half_width
            seen_BQW = near_BQW & (position_BQW < visible_BQ.unsqueeze(2))
            gain_BQW = seen_BQW * self.compute_gain(position_BQW - focus_BQ.unsqueeze(2))
            return ~seen_BQW * MASK_BIAS, gain_BQW

        if positions <= MAX_WINDOWS_TO_MASK * width:
            position_1S = torch.arange(positions, device=device).unsqueeze(0)

            def get_masked_view(query_ND: Tensor, position_BQ: Tensor | None) -> WindowView:
                where = get_focus(query_ND, position_BQ)
                bias_BQS, gain_BQS = compute_bias_and_gain(*where, position_1S.unsqueeze(0))
                bias_RHQW, gain_RHQW = bias_BQS.unsqueeze(1), gain_BQS.unsqueeze(1)
                return WindowView(memory.keys_BHSA, memory.values_BHSM, position_1S, bias_RHQW, gain_RHQW)

            return get_masked_view

        offset_W = torch.arange(width, device=device)
        head_BQHW = positions * torch.arange(sentences * heads, device=device).view(sentences, 1, heads, 1)
        gather_keys = self.rows_for_steps(memory.keys_BHSA.flatten(0, 2))
        gather_values = self.rows_for_steps(memory.values_BHSM.flatten(0, 2))

        def get_gathered_view(query_ND: Tensor, position_BQ: Tensor | None) -> WindowView:
            focus_BQ, center_BQ, visible_BQ = get_focus(query_ND, position_BQ)
            first_BQ = (center_BQ - self.half_width).clamp(0, positions - width)
            position_BQW = first_BQ.unsqueeze(2) + offset_W
            index_RHW = (head_BQHW + position_BQW.unsqueeze(2)).flatten(0, 1)
            bias_BQW, gain_BQW = compute_bias_and_gain(focus_BQ, center_BQ, visible_BQ, position_BQW)
            bias_RHQW = bias_BQW.flatten(0, 1)[:, None, None]
            gain_RHQW = gain_BQW.flatten(0, 1)[:, None, None]
            position_RW = position_BQW.flatten(0, 1)
            keys_RHWA, values_RHWM = gather_keys(index_RHW), gather_values(index_RHW)
            return WindowView(keys_RHWA, values_RHWM, position_RW, bias_RHQW, gain_RHQW, first_BQ)

        return get_gathered_view


class LocalPWindow(LocalMWindow):
    """A local window around c = floor(p), p = S sigmoid(v . tanh(W q)), with gain exp(-(s - p)^2 / (2 sigma^2)).

    sigma = w / 2 (Luong et al. 2015, eq. 9 and 10, local-p). p is learned through the gain and shared by all heads. The
    parameter holds sqrt(D) v, for the reason given at `General`: otherwise the sigmoid soon saturates.
    """

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, is_causal: bool = False) -> None:
        super().__init__(config, query_size, kernels, is_causal)
        self.point = kernels.Linear(query_size, query_size, bias=False)
        self.v = nn.Parameter(torch.empty(query_size))
        init_uniform_(self.v.detach(), query_size)

    def prepare_focus(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        linear = self.point.prepare_steps(dtype)

        def get_focus(query_ND: Tensor, position_BQ: Tensor | None, length_BQ: Tensor) -> Tensor:
            hidden_ND = tanh(linear(query_ND)).to(accumulation_dtype(dtype))
            logit_N = hidden_ND @ self.v.to(accumulation_dtype(dtype)) * self.v.numel() ** -0.5
            return length_BQ * torch.sigmoid(logit_N.view(len(length_BQ), -1))

        return get_focus

    def compute_gain(self, distance_BQW: Tensor) -> Tensor:
        return torch.exp(distance_BQW.square() * (-2 / self.half_width**2))


WINDOW_CLASSES = {"global": GlobalWindow, "local_m": LocalMWindow, "local_p": LocalPWindow}
