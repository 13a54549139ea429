"""What search does with a row as long as the vocabulary: normalise it, find the best of it.

A processor does a few rows at a time, so that they stay in its own cache. Shapes: B sentences, K hypotheses of each, N
rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nmt.config import BOS, PAD
from nmt.model.recurrence import CACHED, wide

BLOCK = 64  # tokens that `top` looks at as one


class Logits(NamedTuple):
    """What the model says of the next token of each hypothesis."""

    logits_BKV: Tensor
    lse_BK: Tensor  # log sum_v exp logits, before anything was forbidden; fp32 at least
    largest_BKG: Tensor | None = None  # the largest logit of each whole block of tokens; None with groups

    def of(self, own: slice) -> "Logits":
        """Those of some hypotheses of every sentence."""
        return Logits(self.logits_BKV[:, own], self.lse_BK[:, own])


def survey(logits_NV: Tensor, hypotheses: int) -> Logits:
    """The logits of B sentences with so many hypotheses each. `<s>` and padding are struck out: never to be chosen."""
    size = logits_NV.shape[1]
    rows = max(1, CACHED // size) if logits_NV.device.type == "cpu" else len(logits_NV)
    found = []
    for part_NV in logits_NV.split(rows):
        wide_NV = part_NV.to(wide(logits_NV.dtype))
        largest_NG = largest(wide_NV)
        best_N1 = torch.cat([largest_NG, wide_NV[:, size - size % BLOCK :]], 1).amax(1, keepdim=True)
        lse_N = (best_N1 + (wide_NV - best_N1).exp_().sum(1, keepdim=True).log()).squeeze(1)  # never below the best
        found.append((lse_N, largest_NG))
    lse_N, largest_NG = (torch.cat(parts) for parts in zip(*found, strict=True))
    strike_out(logits_NV)
    largest_NG[:, :1] = largest(logits_NV[:, :BLOCK])  # where `<s>` and padding are
    parts = (part.unflatten(0, (-1, hypotheses)) for part in (logits_NV, lse_N, largest_NG))
    return Logits(*parts)


def strike_out(logits_NV: Tensor) -> None:
    for token in (PAD, BOS):
        logits_NV[:, token].fill_(float("-inf"))


def largest(logits: Tensor) -> Tensor:
    """The largest of each whole block of the last dimension."""
    blocks = logits.shape[-1] // BLOCK
    return logits[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1)


def top(x_BKV: Tensor, k: int, largest_BKG: Tensor | None) -> Tensor:
    """The places of the k largest of each row, the largest first.

    They stand in the k blocks with the largest maxima, or in what is left after the last whole block: so they are found
    in half the time of `topk` or less.
    """
    size = x_BKV.shape[2]
    if largest_BKG is None or largest_BKG.shape[2] < k:
        return x_BKV.topk(k).indices
    first_BKC = largest_BKG.topk(k).indices * BLOCK
    index_BKV = (first_BKC.unsqueeze(3) + torch.arange(BLOCK, device=x_BKV.device)).flatten(2)
    if size % BLOCK:
        rest_BKV = torch.arange(size - size % BLOCK, size, device=x_BKV.device).expand(*x_BKV.shape[:2], -1)
        index_BKV = torch.cat([index_BKV, rest_BKV], 2)
    return index_BKV.gather(2, x_BKV.gather(2, index_BKV).topk(k).indices)
