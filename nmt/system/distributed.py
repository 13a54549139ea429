"""Process group of a torchrun job and collective operations.

`torchrun` starts the processes of a job and numbers them by rank. All run the same code; rank 0 does what only one
process may do, such as writing files.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nmt.errors import UserError
from nmt.system.device import choose_device
from nmt.system.logging import log
from nmt.system.messages import first_line
from nmt.system.torchrun import LAUNCH_ENV

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(days=1)  # to wait for another rank's preparations; a dead rank is noticed immediately
GROUP_NUMBERS = itertools.count()  # of the process groups that this process joins, one per run of a sweep
_joined = False  # whether nmt joined the group; a program that imports nmt may use torch.distributed itself


@contextlib.contextmanager
def process_group(name: str) -> Iterator[torch.device]:
    """Join the process group, if torchrun started several processes, and yield the device of this rank.

    Raises:
        UserError: the device does not exist or cannot be used by several processes, or other ranks are unreachable.
    """
    global _joined
    device = choose_device(name)
    if LAUNCH_ENV["WORLD_SIZE"] == 1:
        yield device
        return
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name} supports one process only; for several use device=auto, cuda or cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    log.info(f"joining {LAUNCH_ENV['WORLD_SIZE']} processes")
    with explained_gloo_errors("the other processes of this job cannot be reached; make sure that all were started"):
        store, number, count = next(dist.rendezvous("env://"))
        # A prefix of its own, for the store has addresses of processes before a restart, and of other runs of a sweep.
        store = dist.PrefixStore(f"{LAUNCH_ENV['TORCHELASTIC_RESTART_COUNT']}.{next(GROUP_NUMBERS)}", store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT, world_size=count, rank=number, store=store)
    _joined = True
    try:
        yield device
    finally:
        _joined = False
        dist.destroy_process_group()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return LAUNCH_ENV["RANK"] if _joined else 0


def world_size() -> int:
    """Return the number of processes of this job."""
    return LAUNCH_ENV["WORLD_SIZE"] if _joined else 1


@contextlib.contextmanager
def explained_gloo_errors(message: str) -> Iterator[None]:
    """Turn an error of gloo or NCCL into a `UserError` with the message."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"\[\S*?\.cc:\d+\] ", "", first_line(error))  # the place in the source code
        raise UserError(f"{message} ({reason})", any_rank=True) from None


def run_collective(call: Callable[..., Any], *arguments: Any) -> None:
    """Call a collective operation, and raise a `UserError` if another rank has ended."""
    with explained_gloo_errors("another process of this job has ended, so this one cannot continue"):
        call(*arguments)


def all_reduce_sum(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum tensors on one device over all ranks, in one message."""
    if world_size() == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    run_collective(dist.all_reduce, flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def all_reduce_max(number: int) -> int:
    """Return the maximum of a number over all ranks."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    run_collective(dist.all_reduce, largest, dist.ReduceOp.MAX)
    return int(largest)


def all_gather(part: T) -> list[T]:
    """Gather an object from each rank, in rank order."""
    if world_size() == 1:
        return [part]
    parts: list[Any] = [None] * world_size()
    run_collective(dist.all_gather_object, parts, part)
    return parts


def rank0_path(path: str) -> str:
    """Return the path on rank 0 and the null device on other ranks."""
    return os.devnull if rank() else path


def shard(rows: Sequence[T]) -> Sequence[T]:
    """Return the rows of this rank, every `world_size()`-th one."""
    return rows[rank() :: world_size()]


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on all ranks. An error ends all ranks."""
    return all_gather(run_on_some_ranks(work, rank() == 0))[0]  # type: ignore[return-value]


def local_rank0_first(work: Callable[[], T]) -> T:
    """Run `work` on local rank 0 of each machine, then on the others, which find the files that it prepared.

    Returns the result of this rank. An error ends all ranks.
    """
    is_first = LAUNCH_ENV["LOCAL_RANK"] == 0
    results = [run_on_some_ranks(work, is_first), run_on_some_ranks(work, not is_first)]
    return results[0 if is_first else 1]  # type: ignore[return-value]


def run_on_some_ranks(work: Callable[[], T], runs_here: bool) -> T | None:
    """Run `work` on the ranks with `runs_here` and return its result there, None elsewhere.

    If it fails on some ranks, all ranks raise the error of the first of them, and rank 0 reports it.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work() if runs_here else None
    except (UserError, OSError) as caught:
        error = caught
    for failure in filter(None, all_gather(error)):
        raise failure
    return result
