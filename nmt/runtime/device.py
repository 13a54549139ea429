"""The device and the precision that a command computes in."""

import os

import torch
from torch import nn

from nmt.errors import UserError
from nmt.runtime.launch import LAUNCHED
from nmt.runtime.memory import configure_malloc

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
        raise UserError(f"device={device} is not there; this machine has {found}; {remedy}", any_rank=chosen == "cuda")
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


def move_model(model: nn.Module, precision: str, device: torch.device, training: bool = False) -> None:
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
        configure_malloc()
    else:
        model.prepare_for_inference(precision == "int8")  # type: ignore[operator]


def contention_advice(device: torch.device, speed: float, best: float) -> str | None:
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
