"""Windows: which source positions a query attends to, and with what gain.

Shapes: B sentences, Q queries of a sentence, S source positions (`</s>` included), D query (decoder) size, M memory
(encoder output) size, A size of the space in which queries and keys are compared. H heads: in shapes that contain H,
sizes are per head. N = B x Q queries, w half the width of a local window (D in Luong et al. 2015).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.model import AttentionConfig
from nmt.model.kernels import Kernels
from nmt.model.numerics import accumulation_dtype, init_uniform_, tanh
from nmt.model.reference import LinearFn

MASK_BIAS = -1e30  # added to the scores of hidden positions; finite, to avoid NaN if all positions are hidden


class Memory(NamedTuple):
    """What is attended to: the encoded source, or in self-attention the sequence itself.

    One row per sentence, however many hypotheses it has. Passed as an argument, never stored.
    """

    values_BHSM: Tensor
    keys_BHSA: Tensor  # the values as the score needs them, projected once per sentence
    length_B: Tensor  # source length, `</s>` included
    bias_BS: Tensor  # fp32, added to scores: 0, and `MASK_BIAS` at padding and beyond `max_source_positions`

    @property
    def positions(self) -> int:
        """The number of source positions S."""
        return self.bias_BS.shape[1]


def build_memory(values_BHSM: Tensor, keys_BHSA: Tensor, length_B: Tensor, max_positions: int | None = None) -> Memory:
    """Return the memory, with padding and positions from `max_positions` on (None: no limit) masked."""
    position_S = torch.arange(values_BHSM.shape[2], device=length_B.device)
    visible_B = length_B if max_positions is None else length_B.clamp(max=max_positions)
    bias_BS = (position_S >= visible_B.unsqueeze(1)) * MASK_BIAS
    return Memory(values_BHSM, keys_BHSA, length_B, bias_BS)


def get_positions(memory: Memory) -> Tensor:
    """Return position_S, the numbers of the source positions."""
    return torch.arange(memory.positions, device=memory.bias_BS.device)


class GlobalWindow(nn.Module):
    """The whole sentence. If it is causal, a query at position t sees the positions up to t."""

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.point = nn.Identity()

    def forward(
        self, query_BQD: Tensor, position_BQ: Tensor | None, memory: Memory, point: LinearFn
    ) -> tuple[Tensor, Tensor | None]:
        """Return bias_BQS, which is added to the scores, and gain_BQS, a factor of the weights; None: 1.

        The bias is fp32: 0, or `MASK_BIAS` at hidden positions. Q may be 1 if all queries see the same. `point` is the
        module of this name, or its function for a step loop.
        """
        bias_BQS = memory.bias_BS.unsqueeze(1)
        if self.is_causal:
            assert position_BQ is not None
            bias_BQS = bias_BQS.masked_fill(get_positions(memory) > position_BQ.unsqueeze(2), MASK_BIAS)
        return bias_BQS, None


class LocalMWindow(GlobalWindow):
    """{s : |s - c| <= w}, c = min(t, S - 1): the t-th target token attends around the t-th source position.

    t counts from 0 (Luong et al. 2015, section 3.2, local-m). The window is cut at the ends of the sentence, not
    shifted. If it is causal, it is cut after position t, and S is t + 1.
    """

    def __init__(self, config: AttentionConfig, query_size: int, kernels: Kernels, is_causal: bool = False) -> None:
        super().__init__(config, query_size, kernels, is_causal)
        self.half_width = config.half_width

    def forward(
        self, query_BQD: Tensor, position_BQ: Tensor | None, memory: Memory, point: LinearFn
    ) -> tuple[Tensor, Tensor]:
        position_S = get_positions(memory)
        seen_BQS = (memory.bias_BS == 0).unsqueeze(1)
        length_BQ = memory.length_B.unsqueeze(1)
        if self.is_causal:
            assert position_BQ is not None
            seen_BQS = seen_BQS & (position_S <= position_BQ.unsqueeze(2))
            length_BQ = position_BQ + 1
        focus_BQ = self.find_focus(query_BQD, position_BQ, length_BQ, point)
        center_BQ = torch.minimum(focus_BQ.detach().floor().long(), length_BQ - 1)
        seen_BQS = seen_BQS & ((position_S - center_BQ.unsqueeze(2)).abs() <= self.half_width)
        return ~seen_BQS * MASK_BIAS, seen_BQS * self.compute_gain(position_S - focus_BQ.unsqueeze(2))

    def find_focus(self, query_BQD: Tensor, position_BQ: Tensor | None, length_BQ: Tensor, point: LinearFn) -> Tensor:
        """Return focus_BQ, the position that each query attends around. `length_BQ` positions can be chosen from."""
        assert position_BQ is not None
        return position_BQ

    def compute_gain(self, distance_BQS: Tensor) -> Tensor | float:
        """Return the factor of the weights at this distance from the position that the query attends around."""
        return 1.0


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

    def find_focus(self, query_BQD: Tensor, position_BQ: Tensor | None, length_BQ: Tensor, point: LinearFn) -> Tensor:
        hidden_ND = tanh(point(query_BQD.flatten(0, 1)))
        dtype = accumulation_dtype(hidden_ND.dtype)
        logit_N = hidden_ND.to(dtype) @ self.v.to(dtype) * self.v.numel() ** -0.5
        return length_BQ * torch.sigmoid(logit_N.view(len(length_BQ), -1))

    def compute_gain(self, distance_BQS: Tensor) -> Tensor:
        return torch.exp(distance_BQS.square() * (-2 / self.half_width**2))


WINDOW_CLASSES = {"global": GlobalWindow, "local_m": LocalMWindow, "local_p": LocalPWindow}
