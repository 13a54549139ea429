"""What to do when memory is too small: free CUDA graphs first, then work on fewer sentences at a time."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import free_graphs
from nmt.runtime.memory import is_out_of_memory

T = TypeVar("T")


def try_or_oom(work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if memory is too small for it. If it is with CUDA graphs, they are freed and
    the work is tried once more without them."""
    for _ in range(2):
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Here the exception is gone, and with it all tensors of the work that it kept.
        if not free_graphs():
            break
    return None


def halve_until_it_fits(work: Callable[[int], T], size: int, too_large: UserError) -> tuple[T, int]:
    """Return the result of `work(size)`, and the size, which is halved while memory is too small.

    Raises:
        UserError: `too_large`, if memory is too small for a size of 1.
    """
    while (found := try_or_oom(partial(work, size))) is None:
        if size == 1:
            raise too_large
        size //= 2
    return found, size
