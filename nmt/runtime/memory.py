"""Memory of the host and of GPUs: how much was in use at most, and how it is kept for the next step."""

import contextlib
import ctypes
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's numbers for them
OUT_OF_MEMORY = re.compile(
    "allocate memory|out of memory|ALLOC_FAILED|bad_alloc|could not (create|execute) a (memory object|primitive)$"
    "|StreamCaptureInvalidated|previous error during capture"  # what follows in the capture of a CUDA graph
)
PEAKS: dict[int, int] = {}  # bytes reserved on each GPU at most, until its counters were last reset


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes. On Linux ru_maxrss includes that of the process that
    started it, hence VmHWM."""
    status = Path("/proc/self/status")
    if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else ""):
        return 1024 * int(found[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_device_memory(device: torch.device) -> int | None:
    """Bytes of GPU memory that PyTorch has reserved at most, CUDA graphs included; None where there is no GPU."""
    if device.type != "cuda":
        return None
    return max(PEAKS.get(index_of(device), 0), torch.cuda.max_memory_reserved(device))


def index_of(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def allocated_by(work: Callable[[], Any], device: torch.device) -> int:
    """Run `work` and return the peak of the GPU memory that it allocated, in bytes."""
    PEAKS[index_of(device)] = peak_device_memory(device) or 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def free_device_memory(device: torch.device) -> int:
    """Bytes of GPU memory that are free, after PyTorch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means out of memory; not every allocator has an exception class for it. Where a capture
    fails, its end raises another error: the first one decides."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error.__context__, RuntimeError):
        return is_out_of_memory(error.__context__)
    return bool(OUT_OF_MEMORY.search(str(error)))


def configure_malloc() -> None:
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
