"""Where a command runs: device, precision, logging, signals."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from nmt.errors import UserError

log = logging.getLogger("nmt")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's numbers for them
DTYPES = {
    **{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64},
    "int8": torch.float32,  # but for the weights
}


def check_alone() -> None:
    """Refuse a launch by torchrun with several processes, which would all write the same run.

    Raises:
        UserError: there are several.
    """
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(f"training uses one process as yet, and torchrun started {world}; write --nproc-per-node=1")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one.

    Raises:
        UserError: the device is unknown or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name} is none of auto, cpu, cuda, cuda:N, mps") from None
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = there.get(device.type, 0)
    if (device.index or 0) >= count:
        found = ", ".join(f"{kind} ({n})" for kind, n in there.items() if n)
        raise UserError(f"device={name} is not there; this machine has {found}; device=auto picks one")
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """`auto` by capability alone: bf16 where the processor has matrix units for it, fp32 else.

    Raises:
        UserError: the device cannot do it.
    """
    if name == "fp64" and device.type == "mps":
        raise UserError("precision=fp64 is not there on device=mps; write precision=fp32")
    if name == "int8" and device.type != "cpu":
        raise UserError(f"precision=int8 is not for device={device}; write device=cpu too, or another precision")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return "bf16" if device.type == "cpu" and torch.cpu._is_amx_tile_supported() else "fp32"


def multiplies_int8() -> bool:
    """Whether products of int8 are exact here: without VNNI sums of 16 bits in between may overflow."""
    x_NI = torch.full((4, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(x_NI, x_NI.t()) == 256 * 127**2).all())


def place(model: nn.Module, precision: str, device: torch.device, training: bool = False) -> None:
    """Move a model to where it computes and tell it in what. In training parameters stay fp32 (or become fp64); else
    they are cast once, instead of at every step.

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
    model.to(device, torch.promote_types(DTYPES[precision], torch.float32) if training else DTYPES[precision])
    model.dtype = DTYPES[precision]  # type: ignore[assignment]
    if training:
        keep_memory()
    else:
        model.freeze(precision == "int8")  # type: ignore[operator]


def keep_memory() -> None:
    """Let freed memory be used again instead of handing large blocks back to the system at once, which is what glibc
    does: a training step would spend a tenth of its time on 20,000 page faults."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # more is refused
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def release_memory() -> None:
    """Hand memory that was freed back to the system.

    Batches of many shapes leave gaps in glibc's heap, which would grow to twice what is in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _Lines(logging.Handler):
    """Lines to standard error that do not break a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: that ends no training
            tqdm.write(self.format(record), file=sys.stderr)


class _File(logging.FileHandler):
    """Lines to a file that must not be lost: a full disk is an error, and not the complaint that logging prints."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  its name in the library
        raise  # noqa: PLE0704  it is called where the exception is handled


def log_to_stderr() -> None:
    """Show what nmt reports on standard error; standard output is for results."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = _Lines()
    handler.addFilter(lambda record: not getattr(record, "quiet", False))
    handler.setFormatter(logging.Formatter("%(message)s"))
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
    """Collect the first SIGINT or SIGTERM instead of dying of it; a second one ends the process at once."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        log.warning(f"{signal.Signals(number).name}: finishing this step, then saving; once more stops at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
