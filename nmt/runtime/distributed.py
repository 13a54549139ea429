"""Where a command runs: device, precision, the other processes of its job, logging, signals.

`torchrun` starts the processes of a job and gives each a number, its rank. All do the same; what only one may do, like
writing, the first one does (rank 0).
"""

import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from nmt.errors import UserError, named, printable, told_by_another
from nmt.runtime.files import regular
from nmt.runtime.memory import keep_memory

T = TypeVar("T")
log = logging.getLogger("nmt")
ALONE = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
LAUNCHED = {  # by torchrun: processes of the job, and of this machine; the number of this one among either; restarts
    name: int(os.environ.get(name, default)) for name, default in ALONE.items()
}
STDERR = 2  # its file descriptor
OTHER_MODEL = (
    "the processes of this job have different models; see that the checkpoints (and search.dictionary) are the same on "
    "all machines"
)
OTHER_TEXT = "the processes of this job have different text; see that files have the same content on all machines"
PATIENCE = timedelta(days=1)  # for what another process prepares; that one has died is noticed at once
DTYPES = {
    **{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64},
    "tf32": torch.float32,  # but for products
    "int8": torch.float32,  # but for the weights
}


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one; of several processes on a machine each takes its own.

    Raises:
        UserError: it is not there.
    """
    local, here = LAUNCHED["LOCAL_RANK"], LAUNCHED["LOCAL_WORLD_SIZE"]
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    device = torch.device(chosen)
    if here > 1 and device == torch.device("cuda"):
        device = torch.device("cuda", local)
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = there.get(device.type, 0)
    if (device.index or 0) >= count:
        found = ", ".join(f"{kind} ({n})" for kind, n in there.items() if n)
        remedy = f"torchrun --nproc-per-node={count} fits it" if here > 1 and count else "device=auto picks one"
        raise UserError(f"device={device} is not there; this machine has {found}; {remedy}", own=chosen == "cuda")
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """`auto` by capability alone: bf16 where its products are faster, fp32 else.

    Raises:
        UserError: the device cannot do it.
    """
    if name == "fp64" and device.type == "mps":
        raise UserError("precision=fp64 is not there on device=mps; write precision=fp32")
    if name == "int8" and device.type != "cpu":
        raise UserError(f"precision=int8 is not for device={device}; write device=cpu too, or another precision")
    if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise UserError(
            f"precision=tf32 is for NVIDIA GPUs from Ampere on, not for device={device}; write precision=fp32"
        )
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return "bf16" if device.type == "cpu" and bf16_is_faster() else "fp32"


def bf16_is_faster() -> bool:
    """Whether products of bf16 are faster here than those of fp32: by AMX, or by AVX-512 BF16 on processors of AMD. On
    one of Intel without AMX, which a virtual machine may hide, training took 1.6 times as long (docs/benchmarks.md)."""
    capabilities = torch.cpu.get_capabilities()
    by_avx = capabilities.get("avx512_bf16") and "Intel" not in capabilities.get("cpu_name", "")
    return bool(capabilities.get("amx_bf16") or by_avx)


def multiplies_int8() -> bool:
    """Whether products of int8 are exact here: without VNNI sums of 16 bits in between may overflow."""
    x_NI = torch.full((4, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(x_NI, x_NI.t()) == 256 * 127**2).all())


def place(model: nn.Module, precision: str, device: torch.device, training: bool = False) -> None:
    """Move a model to where it computes and tell it in what. In training parameters stay fp32 (or become fp64); else
    they are cast once, instead of at every step. On a GPU products of fp32 numbers are exact to fp32, or with tf32
    rounded to its 10 bits, from here on in the whole process.

    Raises:
        UserError: this processor has no exact products of int8.
    """
    # The first call of one of MKL's functions sets up how exactly it computes. Two threads that make it together can
    # leave one of them with fewer digits, so that the same command gives other numbers: let one thread make it.
    for function in (torch.exp, torch.log, torch.tanh):
        for dtype in (torch.float32, torch.float64):
            function(torch.ones(1, dtype=dtype))
    # oneDNN keeps the kernels of so many shapes, some hundred kilobytes each; PyTorch as many again of its own; by
    # default 1,024. What is repeated fits into fewer, and an epoch has more shapes than any cache would hold. Read at
    # the first product.
    for kernels in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kernels, "512" if training else "256")
    if precision == "int8" and not multiplies_int8():
        raise UserError("precision=int8 needs a processor with 8-bit products (VNNI), and this has none; write fp32")
    if device.type == "cuda":  # PyTorch's defaults differ between the two
        # Not by `fp32_precision`: after that has been set, a program that reads `allow_tf32` gets an error.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    model.to(device, torch.promote_types(DTYPES[precision], torch.float32) if training else DTYPES[precision])
    model.dtype = DTYPES[precision]  # type: ignore[assignment]
    if training:
        keep_memory()
    else:
        model.freeze(precision == "int8")  # type: ignore[operator]


def crowded(device: torch.device, speed: float, best: float) -> str | None:
    """What to do where the threads of this process seem to wait for cores that others have: by the load of the machine,
    or because the speed (tokens/s) has fallen to less than half of the best so far. None of a single thread, which
    waits for nobody."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if device.type != "cpu" or threads == 1:
        return None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores + 0.5 and speed >= best / 2:
        return None
    seen = f"{speed:,.0f} tokens/s" + (f" after {best:,.0f}" if speed < best / 2 else "")
    return (
        f"{seen}, with a load of {load:.1f} on {cores} cores: other processes seem to have a part of them, and "
        f"{threads} threads wait for each other; OMP_NUM_THREADS={threads - 1} before the command may make it faster "
        "(with another number of threads numbers are rounded in another order)"
    )


# ---------------------------------------------------------------------------------------------------------- processes
_times = 0  # that this process has joined others: once for each run of a sweep
_store: Any = None  # torchrun's, which outlives the processes that it starts anew
_joined = False  # the other processes of this job; torch.distributed may also be in use by somebody who imports nmt


@contextlib.contextmanager
def joined(name: str) -> Iterator[torch.device]:
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
        join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        remedy = "see that all were started, and that their machines' ports are open to each other"
        missed = f"the other processes of this job cannot be reached ({why(error)}); {remedy}"
        raise UserError(missed, own=True) from None
    _joined = True
    try:
        yield device
    finally:
        _joined = False
        dist.destroy_process_group()


def join(backend: str) -> None:
    """Meet the other processes. After a restart by torchrun the addresses of those that died are still in its store, in
    a sweep those of the run before: each time has names of its own there."""
    global _store, _times
    _times += 1
    _store, number, count = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {LAUNCHED['TORCHELASTIC_RESTART_COUNT']}.{_times}", _store)
    dist.init_process_group(backend, timeout=PATIENCE, world_size=count, rank=number, store=store)


def begin(run: Path) -> None:
    """Note that this job has taken a run's folder, for processes that torchrun starts in place of these."""
    if _joined:
        _store.set(f"begun {run}", "")


def begun(run: Path) -> bool:
    """Whether processes that were here before have noted that."""
    return _joined and bool(_store.check([f"begun {run}"]))


def rank() -> int:
    """The number of this process in its job, from 0."""
    return LAUNCHED["RANK"] if _joined else 0


def ranks() -> int:
    """Processes of this job."""
    return LAUNCHED["WORLD_SIZE"] if _joined else 1


def why(error: Exception) -> str:
    """What gloo complains of, in short; it has no class of its own for it."""
    return re.sub(r"\[\S*?\.cc:\d+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0][:200]


def together(call: Callable[..., Any], *arguments: Any) -> None:
    """What all processes have to call.

    Raises:
        UserError: one is gone, so that this one cannot go on.
    """
    try:
        call(*arguments)
    except RuntimeError as error:
        gone = f"another process of this job has ended, so this one cannot go on ({why(error)})"
        raise UserError(gone, own=True) from None


def summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All-reduce: the sums over all processes of tensors on one device, in one message."""
    if ranks() == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    together(dist.all_reduce, flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def agreed(number: int) -> int:
    """The largest of the numbers that the processes give."""
    if ranks() == 1:
        return number
    largest = torch.tensor(number)
    together(dist.all_reduce, largest, dist.ReduceOp.MAX)
    return int(largest)


def gathered(part: T) -> list[T]:
    """All-gather: what each process gives, in the order of their numbers."""
    if ranks() == 1:
        return [part]
    parts: list[Any] = [None] * ranks()
    together(dist.all_gather_object, parts, part)
    return parts


def copied(tensors: list[torch.Tensor]) -> None:
    """Broadcast: fill these tensors with those of the first process."""
    if ranks() > 1:
        for tensor in tensors:
            together(dist.broadcast, tensor, 0)


def mine(path: str) -> str:
    """Where the first process writes; the others write nowhere."""
    return os.devnull if rank() else path


def dealt(rows: Sequence[T]) -> Sequence[T]:
    """The part of this process of what all have, dealt out like cards."""
    return rows[rank() :: ranks()]


def told(work: Callable[[], T]) -> T:
    """Broadcast of an object: what the first process finds, in all of them. Its UserError ends them all."""
    return gathered(tried(work, rank() == 0))[0]  # type: ignore[return-value]


def in_turn(work: Callable[[], T]) -> T:
    """What each process finds; the first of each machine before the others, which come upon what it has prepared. A
    UserError of one ends them all."""
    first = LAUNCHED["LOCAL_RANK"] == 0
    found, after = tried(work, first), tried(work, not first)
    return found if first else after  # type: ignore[return-value]


def same(what: Callable[[], object], complaint: str) -> None:
    """Compare what each process has.

    Raises:
        UserError: the complaint, where they have different things.
    """
    if ranks() > 1 and len(set(gathered(what()))) > 1:
        raise UserError(complaint)


def tried(work: Callable[[], T], mine: bool) -> T | None:
    """What `work` returns, where it is for this process to do. If it fails in some, the first of them says why, and the
    others end without a word."""
    found = error = None
    try:
        found = work() if mine else None
    except (UserError, OSError) as caught:
        error = caught
    failed = gathered(error is not None)
    if error and failed.index(True) == rank():
        error.own = True  # type: ignore[union-attr]
        raise error
    if any(failed):
        told_by_another()
    return found


# ------------------------------------------------------------------------------------------------------------ logging
class _Lines(logging.Handler):
    """Lines to standard error that do not break a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: that ends no training
            tqdm.write(printable(self.format(record)), file=sys.stderr)


class _File(logging.FileHandler):
    """Lines to a file that must not be lost: a full disk is an error, and not the complaint that logging prints."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=regular)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  its name in the library
        with named(self.baseFilename):
            raise  # noqa: PLE0704  it is called where the exception is handled


def log_to_stderr() -> None:
    """Show what nmt reports on standard error; standard output is for results. The processes of a job find the same
    things; beside the first, one shows only what is its `own`."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = _Lines()
    handler.addFilter(lambda record: not getattr(record, "quiet", False))
    if number := LAUNCHED["RANK"]:
        handler.addFilter(lambda record: getattr(record, "own", False))
        handler.setFormatter(logging.Formatter(f"process {number}: %(message)s"))
    log.addHandler(handler)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[logging.Handler]:
    """Append all reports to a file too, with the time."""
    handler = _File(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()


# ------------------------------------------------------------------------------------------------------------ signals
@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM instead of dying of it; a second one ends the process at once.

    It is answered past the log and Python's buffers: they cannot be written to where it comes while they are.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        if LAUNCHED["RANK"]:
            return
        below = "\n" * os.isatty(STDERR)  # a progress bar
        answer = f"{signal.Signals(number).name}: finishing this step, then saving; once more stops at once\n"
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(STDERR, (below + answer).encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Put off the first SIGINT or SIGTERM until what is done here is done; a second one is not put off."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for other, handler in before.items():
            signal.signal(other, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
        for number in received:
            signal.raise_signal(number)
