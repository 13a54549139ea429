"""Row gathers whose backward passes avoid unnecessary additions and sum in a fixed order.

Shapes: B sentences, S source positions, R = B x S positions of a batch, E embedding size; P rows of a table, A their
size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmt.model.kernels.linear import DeferredGradient
from nmt.model.numerics import accumulation_dtype


class _SelfInversePermutation(torch.autograd.Function):
    """Reorders positions by a permutation that is its own inverse.

    The backward pass is therefore a gather with the same indices. Autograd's would add to rows, with atomic operations
    on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_BSE.flatten(0, 1).index_select(0, order_R).view_as(x_BSE)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [dx_BSE], [order_R] = gradients, ctx.saved_tensors
        return dx_BSE.flatten(0, 1).index_select(0, order_R).view_as(dx_BSE), None


def permute_positions(x_BSE: Tensor, order_R: Tensor) -> Tensor:
    """Reorder the positions of a batch. The permutation must be its own inverse, like a reversal of each sentence."""
    return _SelfInversePermutation.apply(x_BSE, order_R)


class _RowLookupStep(torch.autograd.Function):
    """Looks up rows of a table.

    The backward pass adds only to the same rows of `total`, the gradient that all steps share, instead of allocating
    and adding a gradient of the whole table in each step.
    """

    @staticmethod
    def forward(ctx: Any, table_PA: Tensor, index: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.total = table_PA.shape, total
        return table_PA.index_select(0, index.flatten()).view(*index.shape, table_PA.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.total:
            ctx.total.append(gradients[0].new_zeros(ctx.shape, dtype=accumulation_dtype(gradients[0].dtype)))
        index, total = ctx.saved_tensors[0].flatten(), ctx.total[0]
        rows = gradients[0].reshape(len(index), ctx.shape[1]).to(total.dtype)
        if total.device.type == "cpu":
            total.index_add_(0, index, rows)
        else:
            total.index_put_((index,), rows, accumulate=True)  # deterministic on a GPU, unlike `index_add_`
        return None, None, None


def rows_for_steps(table_PA: Tensor) -> Callable[[Tensor], Tensor]:
    """Return index -> rows of a table, with shape (*index.shape, A), for one step loop.

    The cost of a step, forward and backward, does not depend on the length of the table. Like `linear_for_steps`, the
    returned function must not outlive the loop's backward pass.
    """
    total: list[Tensor] = []  # the gradient of the table, empty until the first backward pass
    [table] = DeferredGradient.apply(lambda: (total.pop().to(table_PA.dtype),), table_PA)
    return lambda index: _RowLookupStep.apply(table, index, total)
