"""Operations of search on rows of vocabulary size: normalize them and find their largest values.

Shapes: B sentences, K hypotheses of each, N = B x K rows, V vocabulary, G blocks of the vocabulary, C blocks chosen.
"""

import torch
from torch import Tensor

from nmt.config import BOS, PAD
from nmt.model.numerics import accumulation_dtype

TOKENS_PER_BLOCK = 64  # `top_continuations` first compares the maxima of blocks of this many tokens


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """Return logp_NV of the next tokens, at least fp32. `<s>` and padding get -inf, so they are never chosen."""
    logp_NV = torch.log_softmax(logits_NV, 1, dtype=accumulation_dtype(logits_NV.dtype))
    logp_NV[:, PAD : BOS + 1 : BOS - PAD].fill_(float("-inf"))  # both columns with one strided slice
    return logp_NV


def top_continuations(x_BKV: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row, in descending order of value.

    They are in the k blocks with the largest maxima, or in the remainder after the last whole block. Searching only
    those takes half the time of `topk` or less.
    """
    size = x_BKV.shape[2]
    blocks = size // TOKENS_PER_BLOCK
    if blocks < k:
        return x_BKV.topk(k).indices
    largest_BKG = x_BKV[..., : blocks * TOKENS_PER_BLOCK].unflatten(2, (blocks, TOKENS_PER_BLOCK)).amax(3)
    first_BKC = largest_BKG.topk(k).indices * TOKENS_PER_BLOCK
    index_BKV = (first_BKC.unsqueeze(3) + torch.arange(TOKENS_PER_BLOCK, device=x_BKV.device)).flatten(2)
    if size % TOKENS_PER_BLOCK:
        start = size - size % TOKENS_PER_BLOCK
        rest_BKV = torch.arange(start, size, device=x_BKV.device).expand(*x_BKV.shape[:2], -1)
        index_BKV = torch.cat([index_BKV, rest_BKV], 2)
    return index_BKV.gather(2, x_BKV.gather(2, index_BKV).topk(k).indices)
