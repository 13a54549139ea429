"""Loss, accuracy and speed of training, and where they are written."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.errors import UserError, with_filename
from nmt.system.distributed import rank
from nmt.system.text import replace_nonfinite
from nmt.training.progress import Progress

MAX_SKIPPED = 20  # consecutive updates with a non-finite loss or gradient after which training stops


class LossSums(NamedTuple):
    """Sums over the tokens of an update, 0-dimensional tensors."""

    smoothed: torch.Tensor  # cross-entropy with label smoothing and R-Drop, over target tokens
    nats: torch.Tensor  # negative log-likelihood, over target tokens
    correct: torch.Tensor  # correctly predicted target tokens
    source: torch.Tensor  # number of source tokens
    target: torch.Tensor  # number of target tokens


class UpdateResult(NamedTuple):
    """The result of one update."""

    step: int  # number of the update, from 1
    sums: LossSums  # over all ranks
    failed: torch.Tensor  # True if loss or gradient was not finite and the weights were left unchanged; 0-dimensional


class ProgressMeter:
    """Measures the updates since the last report."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0  # of all reported updates
        self.restart()

    def restart(self) -> None:
        """Start a new reporting interval now."""
        self.results: list[UpdateResult] = []
        self.failed: list[bool] = []  # one per result, as far as `count_failures` has read them
        self.started = time.perf_counter()

    def add(self, result: UpdateResult) -> None:
        self.results.append(result)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave time that is not spent on training out of the interval."""
        paused = time.perf_counter()
        yield
        self.started += time.perf_counter() - paused

    def count_failures(self, progress: Progress) -> None:
        """Count the updates that failed since the last call. This waits for the GPU, so it is not done at each step.

        Raises:
            UserError: `MAX_SKIPPED` failed in a row.
        """
        for result in self.results[len(self.failed) :]:
            self.failed.append(bool(result.failed.item()))
            progress.skipped += self.failed[-1]
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if self.failed[-1] else 0
            if progress.skipped_in_a_row >= MAX_SKIPPED:
                raise UserError(
                    f"training diverged: the loss or gradient was not finite in {MAX_SKIPPED} updates in a row, last "
                    f"at step {result.step}. Try a lower optim.lr, a longer optim.warmup, or an optim.clip below 1; "
                    "the last checkpoint is unchanged"
                )

    def measure(self) -> dict[str, float]:
        """Return means over the updates that did not fail, NaN if all did, and start a new interval.

        loss: in nats per target token, without label smoothing; ppl: perplexity; accuracy: of target tokens.
        tokens_per_second: on both sides; target_tokens_per_second.

        `count_failures` must have read every update.
        """
        seconds = time.perf_counter() - self.started
        self.seconds += seconds
        self.steps += len(self.results)
        table = np.array(torch.stack([torch.stack(result.sums) for result in self.results]).tolist())
        *_, source_tokens, target_tokens = table.sum(axis=0)
        _, nats, correct, _, learned_tokens = table[~np.array(self.failed)].sum(axis=0)
        loss = accuracy = math.nan
        if learned_tokens:
            loss, accuracy = nats / learned_tokens, correct / learned_tokens
        self.restart()
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700)),
            "accuracy": accuracy,
            "tokens_per_second": (source_tokens + target_tokens) / seconds,
            "target_tokens_per_second": target_tokens / seconds,
        }


def write_event(path: Path, event: dict[str, Any]) -> None:
    """Append an event to a file of the run, on rank 0 only."""
    if rank():
        return
    with with_filename(path), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(replace_nonfinite(event)) + "\n")
