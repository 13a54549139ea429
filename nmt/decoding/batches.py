"""Batches of sentences of similar length, shared among the processes of a job, and smaller where memory is short."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nmt.data.batch import round_down_to_shape
from nmt.errors import UserError
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.system.distributed import shard
from nmt.system.logging import log


def run_in_batches(
    run: Callable[[list[int]], Any], lengths: Sequence[int], tokens: int, width: int = 1, remedy: str = ""
) -> None:
    """Call `run(rows)` until all rows of this process's share are done.

    The rows of a call have similar lengths and are sorted by decreasing length. There are as many of them as
    `choose_batch_size` says. If memory is too small, they are halved from there on, and the call is repeated.

    Raises:
        UserError: memory is too small for a single row. `remedy` ends the message.
    """
    remaining = list(shard(sorted(range(len(lengths)), key=lambda row: -lengths[row])))
    max_size = len(remaining)

    def run_first(rows: list[int], size: int) -> int:
        run(rows[:size])
        return len(rows[:size])

    while remaining:
        longest = lengths[remaining[0]]
        full_size = choose_batch_size(longest, width, tokens)
        size = min(full_size, max_size, len(remaining))
        # Leave out much shorter lines, which can be processed in larger batches.
        rows = [row for row in remaining[:size] if choose_batch_size(lengths[row], width, tokens) < 2 * full_size]
        error = UserError(f"out of memory for one line of {longest + 1:,} pieces{remedy}", any_rank=True)
        num_done, fitting_size = halve_until_it_fits(partial(run_first, rows), size, error)
        if fitting_size < size:
            log.warning(
                f"out of memory for {size:,} lines at a time; continuing with {fitting_size:,}",
                extra={"any_rank": True},
            )
            max_size = fitting_size
        remaining = remaining[num_done:]


def default_batch_tokens(device: torch.device) -> int:
    """Return the default of `search.batch_tokens`. A GPU needs larger batches to hide kernel launches."""
    return 64_000 if device.type == "cuda" else 8_000


def choose_batch_size(longest: int, width: int, tokens: int) -> int:
    """Return the number of sentences in a batch, at least 1.

    It is as many as `tokens` allow, where each sentence counts as the longest one, `</s>` included, times `width`
    hypotheses.
    """
    return round_down_to_shape(max(1, tokens // ((longest + 1) * width)))
