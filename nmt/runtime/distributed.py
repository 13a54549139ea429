"""The processes of a job, and what they do together.

`torchrun` starts the processes of a job and gives each a number, its rank. All do the same; what only one may do, like
writing, the first one does (rank 0).
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nmt.errors import UserError, exit_silently
from nmt.runtime.device import choose_device
from nmt.runtime.launch import LAUNCHED
from nmt.runtime.logging import log

T = TypeVar("T")
OTHER_MODEL = (
    "the processes of this job have different models; see that the checkpoints (and search.dictionary) are the same on "
    "all machines"
)
OTHER_TEXT = "the processes of this job have different text; see that files have the same content on all machines"
TIMEOUT = timedelta(days=1)  # for what another process prepares; that one has died is noticed at once
_times = 0  # that this process has joined others: once for each run of a sweep
_store: Any = None  # torchrun's, which outlives the processes that it starts anew
_joined = False  # the other processes of this job; torch.distributed may also be in use by somebody who imports nmt


@contextlib.contextmanager
def process_group(name: str) -> Iterator[torch.device]:
    """The device of that name, for a process that works together with the others that torchrun started, if there are.

    Raises:
        UserError: there is no such device, or it is not for several processes; or the others cannot be reached.
    """
    global _joined
    device = choose_device(name)
    if LAUNCHED["WORLD_SIZE"] == 1:
        yield device
        return
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name} is for one process; with several write device=auto, cuda or cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    log.info(f"joining {LAUNCHED['WORLD_SIZE']} processes")
    try:
        init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        remedy = "see that all were started, and that their machines' ports are open to each other"
        missed = f"the other processes of this job cannot be reached ({gloo_reason(error)}); {remedy}"
        raise UserError(missed, any_rank=True) from None
    _joined = True
    try:
        yield device
    finally:
        _joined = False
        dist.destroy_process_group()


def init_process_group(backend: str) -> None:
    """Meet the other processes. After a restart by torchrun the addresses of those that died are still in its store, in
    a sweep those of the run before: each time has names of its own there."""
    global _store, _times
    _times += 1
    _store, number, count = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {LAUNCHED['TORCHELASTIC_RESTART_COUNT']}.{_times}", _store)
    dist.init_process_group(backend, timeout=TIMEOUT, world_size=count, rank=number, store=store)


def mark_started(run: Path) -> None:
    """Note that this job has taken a run's folder, for processes that torchrun starts in place of these."""
    if _joined:
        _store.set(f"begun {run}", "")


def was_started(run: Path) -> bool:
    """Whether processes that were here before have noted that."""
    return _joined and bool(_store.check([f"begun {run}"]))


def rank() -> int:
    """The number of this process in its job, from 0."""
    return LAUNCHED["RANK"] if _joined else 0


def world_size() -> int:
    """Processes of this job."""
    return LAUNCHED["WORLD_SIZE"] if _joined else 1


def gloo_reason(error: Exception) -> str:
    """What gloo complains of, in short; it has no class of its own for it."""
    return re.sub(r"\[\S*?\.cc:\d+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0][:200]


def run_collective(call: Callable[..., Any], *arguments: Any) -> None:
    """What all processes have to call.

    Raises:
        UserError: one is gone, so that this one cannot go on.
    """
    try:
        call(*arguments)
    except RuntimeError as error:
        gone = f"another process of this job has ended, so this one cannot go on ({gloo_reason(error)})"
        raise UserError(gone, any_rank=True) from None


def all_reduce_sum(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All-reduce: the sums over all processes of tensors on one device, in one message."""
    if world_size() == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    run_collective(dist.all_reduce, flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def all_reduce_max(number: int) -> int:
    """The largest of the numbers that the processes give."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    run_collective(dist.all_reduce, largest, dist.ReduceOp.MAX)
    return int(largest)


def all_gather(part: T) -> list[T]:
    """All-gather: what each process gives, in the order of their numbers."""
    if world_size() == 1:
        return [part]
    parts: list[Any] = [None] * world_size()
    run_collective(dist.all_gather_object, parts, part)
    return parts


def broadcast(tensors: list[torch.Tensor]) -> None:
    """Broadcast: fill these tensors with those of the first process."""
    if world_size() > 1:
        for tensor in tensors:
            run_collective(dist.broadcast, tensor, 0)


def rank0_path(path: str) -> str:
    """Where the first process writes; the others write nowhere."""
    return os.devnull if rank() else path


def shard(rows: Sequence[T]) -> Sequence[T]:
    """The part of this process of what all have, dealt out like cards."""
    return rows[rank() :: world_size()]


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Broadcast of an object: what the first process finds, in all of them. Its UserError ends them all."""
    return all_gather(run_where(work, rank() == 0))[0]  # type: ignore[return-value]


def local_rank0_first(work: Callable[[], T]) -> T:
    """What each process finds; the first of each machine before the others, which come upon what it has prepared. A
    UserError of one ends them all."""
    first = LAUNCHED["LOCAL_RANK"] == 0
    found, after = run_where(work, first), run_where(work, not first)
    return found if first else after  # type: ignore[return-value]


def check_same_on_all_ranks(what: Callable[[], object], complaint: str) -> None:
    """Compare what each process has.

    Raises:
        UserError: the complaint, where they have different things.
    """
    if world_size() > 1 and len(set(all_gather(what()))) > 1:
        raise UserError(complaint)


def run_where(work: Callable[[], T], mine: bool) -> T | None:
    """What `work` returns, where it is for this process to do. If it fails in some, the first of them says why, and the
    others end without a word."""
    found = error = None
    try:
        found = work() if mine else None
    except (UserError, OSError) as caught:
        error = caught
    failed = all_gather(error is not None)
    if error and failed.index(True) == rank():
        error.any_rank = True  # type: ignore[union-attr]
        raise error
    if any(failed):
        exit_silently()
    return found
