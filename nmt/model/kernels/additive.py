"""The additive score on a CPU, for parts that fit into its caches.

Shapes: R rows, H heads, Q queries of a row, W keys of a row, A size per head.
"""

from typing import Any

import torch
from torch import Tensor

from nmt.model.kernels.inference_weights import add_optional
from nmt.model.numerics import CACHE_NUMEL


def compute_hidden(query_RHQA: Tensor, keys_RHWA: Tensor, extra_RHQWA: Tensor | None = None) -> Tensor:
    """Return hidden_RHQWA = tanh(q + k + extra) for each pair of query and key."""
    return add_optional(query_RHQA.unsqueeze(3) + keys_RHWA.unsqueeze(2), extra_RHQWA).tanh_()


def score_hidden(hidden_RHQWA: Tensor, v_HA: Tensor) -> Tensor:
    """Return scores_RHQW = v . hidden."""
    if len(v_HA) == 1:
        return hidden_RHQWA @ v_HA.squeeze(0)  # faster than the batched product below
    return (hidden_RHQWA @ v_HA[:, None, :, None]).squeeze(4)


class _ChunkedAdditiveScore(torch.autograd.Function):
    """v . tanh(q + k), computed for a few rows at a time so that hidden_RHQWA fits into the CPU caches.

    The backward pass recomputes hidden_RHQWA. For a whole target sentence it is by far the largest tensor of a batch.
    """

    @staticmethod
    def forward(ctx: Any, rows_per_chunk: int, query_RHQA: Tensor, keys_RHWA: Tensor, v_HA: Tensor) -> Tensor:
        ctx.save_for_backward(query_RHQA, keys_RHWA, v_HA)
        ctx.rows_per_chunk = rows_per_chunk
        chunks = zip(query_RHQA.split(rows_per_chunk), keys_RHWA.split(rows_per_chunk), strict=True)
        return torch.cat([score_hidden(compute_hidden(query, keys), v_HA) for query, keys in chunks])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query_RHQA, keys_RHWA, v_HA = ctx.saved_tensors
        dquery_RHQA = torch.empty_like(query_RHQA)
        dkeys_RHWA = torch.empty_like(keys_RHWA)
        dv_HA = torch.zeros_like(v_HA)
        tensors = (query_RHQA, keys_RHWA, gradients[0], dquery_RHQA, dkeys_RHWA)
        chunks = zip(*(tensor.split(ctx.rows_per_chunk) for tensor in tensors), strict=True)
        for query, keys, dscores_RHQW, dquery, dkeys in chunks:
            hidden_RHQWA = compute_hidden(query, keys)
            dv_HA += (dscores_RHQW.unsqueeze(3) @ hidden_RHQWA).sum((0, 2, 3))
            dsum_RHQWA = torch.ops.aten.tanh_backward.grad_input(  # still without the factor v, see the return value
                dscores_RHQW.unsqueeze(4), hidden_RHQWA, grad_input=hidden_RHQWA
            )
            dquery.copy_(dsum_RHQWA.sum(3))
            dkeys.copy_(dsum_RHQWA.sum(2))
        v_H1A = v_HA.unsqueeze(1)
        return None, dquery_RHQA.mul_(v_H1A), dkeys_RHWA.mul_(v_H1A), dv_HA


def additive_score(query_RHQA: Tensor, keys_RHWA: Tensor, v_HA: Tensor, extra_RHQWA: Tensor | None = None) -> Tensor:
    """Return scores_RHQW = v . tanh(q + k + extra), see `reference.additive_score`."""
    rows_per_chunk = max(1, CACHE_NUMEL * len(query_RHQA) // (query_RHQA.numel() * keys_RHWA.shape[2]))
    # In a step loop (Q = 1) it is faster to keep the hidden values than to recompute them.
    should_keep_hidden = torch.is_grad_enabled() and query_RHQA.shape[2] == 1
    fits = query_RHQA.device.type != "cpu" or len(query_RHQA) <= rows_per_chunk
    if extra_RHQWA is not None or should_keep_hidden or fits:
        return score_hidden(compute_hidden(query_RHQA, keys_RHWA, extra_RHQWA), v_HA)
    return _ChunkedAdditiveScore.apply(rows_per_chunk, query_RHQA, keys_RHWA, v_HA)
