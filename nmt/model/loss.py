"""Losses: the sums of cross-entropy over target tokens, and losses on attention weights.

Shapes: B sentences, T target and S source positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Loss(NamedTuple):
    """Sums over target tokens, `</s>` included. To average over batches, add them up and divide once."""

    smoothed: Tensor  # cross-entropy with label smoothing and R-Drop
    nats: Tensor  # negative log-likelihood, without smoothing
    correct: Tensor  # number of tokens with the highest logit of the vocabulary, ties included (common in bf16)


def coverage_loss(weights_BTS: Tensor, inside_BT: Tensor) -> Tensor:
    """Return sum_t sum_s min(a_ts, c_ts), c_t = sum_{t' < t} a_t', over the target tokens that are `inside`.

    Penalizes attention to positions that were attended to before (See et al. 2017, eq. 12).
    """
    previous_BTS = weights_BTS.cumsum(1) - weights_BTS
    return (torch.minimum(weights_BTS, previous_BTS).sum(2) * inside_BT).sum()


def guidance_loss(weights_BTS: Tensor, alignment_BTS: Tensor) -> Tensor:
    """Return - sum_ts g_ts log a_ts, the cross-entropy of attention weights a given gold alignment weights g.

    One of the two losses of Chen et al. 2016 (arXiv:1607.01628), summed. A weight of exactly 0 gets no gradient.
    """
    return -(alignment_BTS * weights_BTS.clamp(min=torch.finfo(weights_BTS.dtype).tiny).log()).sum()
