"""Peak memory of the host and of GPUs, out-of-memory errors, and the settings of malloc."""

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
OUT_OF_MEMORY = re.compile(
    "allocate memory|out of memory|ALLOC_FAILED|bad_alloc|could not (create|execute) a (memory object|primitive)$"
    "|StreamCaptureInvalidated|previous error during capture"  # later errors of a CUDA graph capture
    "|Overflow when unpacking|size calculation overflowed"  # sizes beyond 64 bits
)
PEAK_RESERVED_BYTES: dict[int, int] = {}  # by GPU index: peak of reserved memory before the last counter reset


def peak_memory() -> int | None:
    """Return the peak resident memory of this process in bytes; None if the system is not Linux."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(match[1]) if match else None


def peak_device_memory(device: torch.device) -> int | None:
    """Return the peak of GPU memory reserved by PyTorch in bytes, including CUDA graphs; None for other devices."""
    if device.type != "cuda":
        return None
    return max(PEAK_RESERVED_BYTES.get(get_device_index(device), 0), torch.cuda.max_memory_reserved(device))


def get_device_index(device: torch.device) -> int:
    """Return the index of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def measure_peak_allocation(work: Callable[[], Any], device: torch.device) -> int:
    """Run `work` and return the peak of GPU memory that it allocates, in bytes."""
    PEAK_RESERVED_BYTES[get_device_index(device)] = peak_device_memory(device) or 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def get_free_device_memory(device: torch.device) -> int:
    """Release cached GPU memory and return the number of free bytes."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; not every allocator has an exception class for it.

    When a CUDA graph capture fails, ending it raises a second error, so that the first one counts.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError | TypeError):
        return False
    if isinstance(error.__context__, RuntimeError):
        return is_out_of_memory(error.__context__)
    return bool(OUT_OF_MEMORY.search(str(error)))


def configure_malloc() -> None:
    """Let glibc reuse freed memory instead of returning large blocks to the system immediately.

    Otherwise a training step would spend a tenth of its time on 20,000 page faults, and a busy server a twentieth.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the largest allowed value
        LIBC.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def release_memory() -> None:
    """Return freed memory to the system.

    Batches of many shapes fragment glibc's heap, which would grow to twice the memory in use.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
