"""Additive attention with softmax: one Triton kernel forward, one backward, and one for the keys of a whole step loop.

tanh(q + k) exists only inside of the kernels, which compute it again backward.

Shapes: B sentences, H heads, Q queries of a sentence, S source positions, A score size and M value size per head, P
blocks of source positions.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmt.model.kernels.linear import DeferredGradient
from nmt.model.kernels.triton_math import tanh

MAX_POSITIONS = 256  # a program holds the scores of all source positions
TILE = 4096  # values of keys or values that a program holds at a time
QUERY_WARPS = 8
BLOCK_S, BLOCK_A = 16, 64  # keys of a program of `_keys_backward_kernel`
SIZES = ["H", "Q", "S"]  # arguments whose values make Triton compile no variants

Tape = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # query, dscores, weights and dcontext of each step
AttendFn = Callable[[Tensor], tuple[Tensor, Tensor]]


@triton.jit
def _load_tile(x_SX, s, is_visible, start, X: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of columns of all positions of a sentence, 0 where hidden, the columns, and which ones exist."""
    x = start + tl.arange(0, BLOCK)
    mask = is_visible[:, None] & (x < X)[None, :]
    return tl.load(x_SX + s[:, None] * X + x[None, :], mask, other=0.0).to(tl.float32), x, x < X


@triton.jit(do_not_specialize=SIZES)
def _attend_kernel(
    query_BHQA,
    keys_BHSA,
    values_BHSM,
    v_HA,
    length_B,
    context_BHQM,
    weights_BHQS,
    H,
    Q,
    S,
    A: tl.constexpr,
    M: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query: scores, weights and context. A sentence of length 0 has weights 0."""
    query = tl.program_id(0).to(tl.int64)
    head = query // Q
    s = tl.arange(0, POSITIONS)
    is_visible = s < tl.load(length_B + head // H)
    scores = tl.zeros([POSITIONS], tl.float32)
    for start in range(0, A, BLOCK):
        k, a, exists = _load_tile(keys_BHSA + head * S * A, s, is_visible, start, A, BLOCK)
        q = tl.load(query_BHQA + query * A + a, exists, other=0.0).to(tl.float32)
        v = tl.load(v_HA + (head % H) * A + a, exists, other=0.0).to(tl.float32)
        scores += tl.sum(tanh(q[None, :] + k) * v[None, :], 1)
    scores = tl.where(is_visible, scores, -1e30)
    exponentials = tl.where(is_visible, tl.exp(scores - tl.max(scores, 0)), 0.0)
    total = tl.sum(exponentials, 0)
    weights = exponentials / tl.where(total > 0, total, 1.0)
    tl.store(weights_BHQS + query * S + s, weights, s < S)
    for start in range(0, M, BLOCK):
        value, m, exists = _load_tile(values_BHSM + head * S * M, s, is_visible, start, M, BLOCK)
        tl.store(context_BHQM + query * M + m, tl.sum(weights[:, None] * value, 0), exists)


@triton.jit(do_not_specialize=SIZES)
def _attend_backward_kernel(
    query_BHQA,
    keys_BHSA,
    values_BHSM,
    v_HA,
    length_B,
    weights_BHQS,
    dcontext_BHQM,
    dweights_BHQS,
    dquery_BHQA,
    dscores_BHQS,
    H,
    Q,
    S,
    A: tl.constexpr,
    M: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query: the gradients of its scores and of itself. `dweights` may be None."""
    query = tl.program_id(0).to(tl.int64)
    head = query // Q
    s = tl.arange(0, POSITIONS)
    is_visible = s < tl.load(length_B + head // H)
    dweights = tl.zeros([POSITIONS], tl.float32)
    if dweights_BHQS is not None:
        dweights += tl.load(dweights_BHQS + query * S + s, is_visible, other=0.0)
    for start in range(0, M, BLOCK):
        value, m, exists = _load_tile(values_BHSM + head * S * M, s, is_visible, start, M, BLOCK)
        dcontext = tl.load(dcontext_BHQM + query * M + m, exists, other=0.0).to(tl.float32)
        dweights += tl.sum(value * dcontext[None, :], 1)
    weights = tl.load(weights_BHQS + query * S + s, is_visible, other=0.0)
    dscores = weights * (dweights - tl.sum(weights * dweights, 0))
    tl.store(dscores_BHQS + query * S + s, dscores, s < S)
    for start in range(0, A, BLOCK):
        k, a, exists = _load_tile(keys_BHSA + head * S * A, s, is_visible, start, A, BLOCK)
        q = tl.load(query_BHQA + query * A + a, exists, other=0.0).to(tl.float32)
        v = tl.load(v_HA + (head % H) * A + a, exists, other=0.0).to(tl.float32)
        hidden = tanh(q[None, :] + k)
        dquery = v * tl.sum(dscores[:, None] * (1 - hidden * hidden), 0)
        tl.store(dquery_BHQA + query * A + a, dquery, exists)


@triton.jit(do_not_specialize=SIZES)
def _keys_backward_kernel(
    query_BHQA,
    keys_BHSA,
    v_HA,
    dscores_BHQS,
    dkeys_BHSA,
    dv_BPHA,
    H,
    Q,
    S,
    A: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Some columns of some keys: their gradient from all queries, and their part of the gradient of v."""
    head = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    a = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    mask = (s < S)[:, None] & (a < A)[None, :]
    index = (head * S + s[:, None]) * A + a[None, :]
    k = tl.load(keys_BHSA + index, mask, other=0.0).to(tl.float32)
    v = tl.load(v_HA + (head % H) * A + a, a < A, other=0.0).to(tl.float32)
    dkeys = tl.zeros([BLOCK_S, BLOCK_A], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_A], tl.float32)
    for number in range(0, Q):
        query = head * Q + number
        q = tl.load(query_BHQA + query * A + a, a < A, other=0.0).to(tl.float32)
        dscores = tl.load(dscores_BHQS + query * S + s, s < S, other=0.0)
        hidden = tanh(q[None, :] + k)
        dkeys += dscores[:, None] * (1 - hidden * hidden)
        dv += dscores[:, None] * hidden
    tl.store(dkeys_BHSA + index, dkeys * v[None, :], mask)
    part = ((head // H) * tl.num_programs(1) + tl.program_id(1)) * H + head % H
    tl.store(dv_BPHA + part * A + a, tl.sum(dv, 0), a < A)


def _launch_queries(kernel: Any, query_BHQA: Tensor, values_BHSM: Tensor, *tensors: Tensor | None) -> None:
    """Run a kernel for each query. All tensors must be contiguous."""
    sentences, heads, queries, size = query_BHQA.shape
    positions, value_size = values_BHSM.shape[2:]
    block_s = max(16, triton.next_power_of_2(positions))
    with torch.cuda.device_of(query_BHQA):
        kernel[(sentences * heads * queries,)](
            *tensors,
            heads,
            queries,
            positions,
            A=size,
            M=value_size,
            POSITIONS=block_s,
            BLOCK=min(TILE // block_s, triton.next_power_of_2(max(size, value_size))),
            num_warps=QUERY_WARPS,
        )


class _AttendStep(torch.autograd.Function):
    """Attention of some queries. The backward pass appends what `collect` needs to the tape."""

    @staticmethod
    def forward(
        ctx: Any, query_BHQA: Tensor, keys: Tensor, values: Tensor, v_HA: Tensor, length_B: Tensor, tape: Tape
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        query_BHQA = query_BHQA.contiguous()
        context_BHQM = values.new_empty(*query_BHQA.shape[:3], values.shape[3])
        weights_BHQS = values.new_empty(*query_BHQA.shape[:3], values.shape[2], dtype=torch.float32)
        inputs = query_BHQA, keys, values, v_HA, length_B
        _launch_queries(_attend_kernel, query_BHQA, values, *inputs, context_BHQM, weights_BHQS)
        ctx.save_for_backward(*inputs, weights_BHQS)
        ctx.tape = tape
        return context_BHQM, weights_BHQS

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, weights_BHQS = ctx.saved_tensors
        query_BHQA, values = inputs[0], inputs[2]
        dcontext, dweights = (None if gradient is None else gradient.contiguous() for gradient in gradients)
        if dcontext is None:
            dcontext = values.new_zeros(*query_BHQA.shape[:3], values.shape[3])
        dquery, dscores = torch.empty_like(query_BHQA), torch.empty_like(weights_BHQS)
        tensors = *inputs, weights_BHQS, dcontext, dweights, dquery, dscores
        _launch_queries(_attend_backward_kernel, query_BHQA, values, *tensors)
        ctx.tape.append((query_BHQA, dscores, weights_BHQS, dcontext))
        return dquery, None, None, None, None, None


def _collect(tape: Tape, keys_BHSA: Tensor, v_HA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of keys, values and v from all steps."""
    query, dscores, weights, dcontext = (torch.cat(parts, 2) for parts in zip(*tape, strict=True))
    tape.clear()
    sentences, heads, positions, size = keys_BHSA.shape
    grid = sentences * heads, triton.cdiv(positions, BLOCK_S), triton.cdiv(size, BLOCK_A)
    dkeys = torch.empty_like(keys_BHSA)
    dv_BPHA = keys_BHSA.new_empty(sentences, grid[1], heads, size, dtype=torch.float32)
    with torch.cuda.device_of(keys_BHSA):
        _keys_backward_kernel[grid](
            query,
            keys_BHSA,
            v_HA,
            dscores,
            dkeys,
            dv_BPHA,
            heads,
            query.shape[2],
            positions,
            A=size,
            BLOCK_S=BLOCK_S,
            BLOCK_A=BLOCK_A,
        )
    return dkeys, weights.to(dcontext.dtype).transpose(2, 3) @ dcontext, dv_BPHA.sum((0, 1)).to(v_HA.dtype)


def attention_for_steps(keys_BHSA: Tensor, values_BHSM: Tensor, v_HA: Tensor, length_B: Tensor) -> AttendFn:
    """Return query_BHQA -> (context_BHQM, weights_BHQS), see `reference.additive_attention`, for one step loop.

    The gradients of keys, values and v are computed once, after those of all steps. Like `linear_for_steps`, the
    returned function must not outlive the loop's backward pass.
    """
    keys, values, v = keys_BHSA.contiguous(), values_BHSM.contiguous(), v_HA.contiguous()
    tape: Tape = []
    if torch.is_grad_enabled():
        plain_keys, plain_v = keys.detach(), v.detach()
        keys, values, v = DeferredGradient.apply(lambda: _collect(tape, plain_keys, plain_v), keys, values, v)
    return lambda query_BHQA: _AttendStep.apply(query_BHQA, keys, values, v, length_B, tape)
