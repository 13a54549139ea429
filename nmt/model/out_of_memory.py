"""Recovery from out-of-memory errors: free CUDA graphs first, then process fewer sentences at a time."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import free_graphs
from nmt.system.memory import is_out_of_memory

ResultT = TypeVar("ResultT")


def run_unless_out_of_memory(function: Callable[[], ResultT]) -> ResultT | None:
    """Return the result of `function`, or None if it runs out of memory.

    If there are CUDA graphs, they are freed and the call is repeated once.
    """
    for _ in range(2):
        try:
            return function()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Only here, after the except block, are the exception and the tensors that its traceback refers to freed.
        if not free_graphs():
            break
    return None


def halve_until_it_fits(function: Callable[[int], ResultT], size: int, too_large: UserError) -> tuple[ResultT, int]:
    """Return the result of `function(size)` and the size, which is halved while memory is too small.

    Raises:
        UserError: memory is too small for a size of 1; the error is `too_large`.
    """
    while (result := run_unless_out_of_memory(partial(function, size))) is None:
        if size == 1:
            raise too_large
        size //= 2
    return result, size
