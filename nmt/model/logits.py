"""What search does with rows as long as the vocabulary: normalize them, find the best of them.

Shapes: B sentences, K hypotheses of each, N = B x K rows, V vocabulary.
"""

import torch
from torch import Tensor

from nmt.config import BOS, PAD
from nmt.model.kernels.linear import CACHED, accumulation_dtype

BLOCK = 64  # tokens that `top` looks at as one


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """logp_NV of the next tokens, fp32 at least. `<s>` and padding are struck out: never to be chosen."""
    dtype, rows = accumulation_dtype(logits_NV.dtype), len(logits_NV)
    if logits_NV.device.type == "cpu":
        rows = max(1, CACHED // logits_NV.shape[1])  # so many, cast, stay in a processor's cache
    if len(logits_NV) <= rows:
        logp_NV = torch.log_softmax(logits_NV, 1, dtype=dtype)
    else:
        logp_NV = torch.empty_like(logits_NV, dtype=dtype)
        for part_NV, own_NV in zip(logits_NV.split(rows), logp_NV.split(rows), strict=True):
            torch.log_softmax(part_NV.to(dtype), 1, out=own_NV)
    logp_NV[:, PAD : BOS + 1 : BOS - PAD] = float("-inf")  # these two columns, as one slice
    return logp_NV


def top_continuations(x_BKV: Tensor, k: int) -> Tensor:
    """The places of the k largest of each row, the largest first.

    They stand in the k blocks with the largest maxima, or in what is left after the last whole block: so they are found
    in half the time of `topk` or less.
    """
    size = x_BKV.shape[2]
    blocks = size // BLOCK
    if blocks < k:
        return x_BKV.topk(k).indices
    largest_BKG = x_BKV[..., : blocks * BLOCK].unflatten(2, (blocks, BLOCK)).amax(3)
    first_BKC = largest_BKG.topk(k).indices * BLOCK
    index_BKV = (first_BKC.unsqueeze(3) + torch.arange(BLOCK, device=x_BKV.device)).flatten(2)
    if size % BLOCK:
        rest_BKV = torch.arange(size - size % BLOCK, size, device=x_BKV.device).expand(*x_BKV.shape[:2], -1)
        index_BKV = torch.cat([index_BKV, rest_BKV], 2)
    return index_BKV.gather(2, x_BKV.gather(2, index_BKV).topk(k).indices)
