"""Device and precision of a command."""

import os

import torch
from torch import nn

from nmt.config import TRAINING_PRECISIONS
from nmt.errors import UserError, check_choice
from nmt.system.memory import configure_malloc
from nmt.system.torchrun import LAUNCH_ENV

# Others, as matrix products in tf32 and weights in int8, are beside values in fp32.
PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def choose_device(name: str) -> torch.device:
    """Return the device of this rank. `auto` is a GPU if there is one; each local rank gets its own GPU.

    Raises:
        UserError: the machine does not have this device.
    """
    several = LAUNCH_ENV["LOCAL_WORLD_SIZE"] > 1
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", LAUNCH_ENV["LOCAL_RANK"]) if several and name == "cuda" else torch.device(name)
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = available[device.type]
    if (device.index or 0) >= count:
        devices = ", ".join(f"{kind} ({number})" for kind, number in available.items() if number)
        remedy = f"use torchrun --nproc-per-node={count}" if several and count else "use device=auto"
        message = f"device={device} does not exist; this machine has {devices}; {remedy}"
        raise UserError(message, any_rank=name == "cuda")
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """Return the precision for a device.

    `auto` is the environment variable NMT_PRECISION if that is set, so that machines of different kinds compute alike;
    else bf16 where its matrix products are faster, else fp32.

    Raises:
        UserError: the device does not support the precision.
    """
    if name == "auto":
        name = os.environ.get("NMT_PRECISION", "auto")
        check_choice("the environment variable NMT_PRECISION", name, TRAINING_PRECISIONS)
    if name == "fp64" and device.type == "mps":
        raise UserError("device=mps does not support precision=fp64; use precision=fp32")
    if name == "int8" and device.type != "cpu":
        raise UserError(f"device={device} does not support precision=int8; set device=cpu or choose another precision")
    has_tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "tf32" and not has_tensor_cores:
        raise UserError(f"precision=tf32 needs an NVIDIA GPU, Ampere or later, not device={device}; use precision=fp32")
    if name != "auto":
        return name
    return "bf16" if has_tensor_cores or device.type == "cpu" and is_bf16_faster() else "fp32"


def is_bf16_faster() -> bool:
    """Return whether matrix products are faster in bf16 than in fp32 on this CPU.

    They are with AMX, and with AVX-512 BF16 on AMD. On Intel CPUs without AMX, which a virtual machine may hide,
    training took 1.6 times as long in bf16 (docs/benchmarks.md).
    """
    capabilities = torch.cpu.get_capabilities()
    has_fast_avx = capabilities.get("avx512_bf16") and "Intel" not in capabilities.get("cpu_name", "")
    return bool(capabilities.get("amx_bf16") or has_fast_avx)


def has_exact_int8_matmul() -> bool:
    """Return whether PyTorch has exact int8 matrix products on this CPU. Without VNNI, 16-bit sums may overflow."""
    x_NI = torch.full((4, 256), 127, dtype=torch.int8)
    return hasattr(torch, "_int_mm") and bool((torch._int_mm(x_NI, x_NI.t()) == 256 * 127**2).all())


def prepare_model(model: nn.Module, precision: str, device: torch.device, training: bool = False) -> None:
    """Move a model to a device and set its compute precision.

    For training, parameters stay fp32 (or become fp64). For inference they are cast once, instead of at every step.
    On a GPU this also sets for the whole process whether fp32 matrix products use tf32 (10 mantissa bits) or full fp32.

    Raises:
        UserError: the CPU has no exact int8 matrix products.
    """
    # The first call of an MKL function sets its accuracy. If two threads make it at the same time, one of them may get
    # a lower accuracy, and results are not reproducible. Make the first calls in a single thread.
    for function in (torch.exp, torch.log, torch.tanh):
        function(torch.ones(1, dtype=torch.float32))
        function(torch.ones(1, dtype=torch.float64))
    # Number of shapes whose kernels oneDNN and PyTorch cache, each a few hundred kilobytes; 1,024 by default. Shapes
    # that repeat fit into fewer, and an epoch has more shapes than any cache would hold. Read at the first product.
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "512" if training else "256")
    if precision == "int8" and not has_exact_int8_matmul():
        raise UserError("precision=int8 needs a CPU with VNNI (8-bit matrix products); use precision=fp32")
    if device.type == "cuda":  # PyTorch's defaults for cuBLAS and cuDNN differ
        # Not by `fp32_precision`: setting it makes `allow_tf32` raise an error for other code that reads it.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = PRECISION_DTYPES.get(precision, torch.float32)
    model.to(device, torch.promote_types(dtype, torch.float32) if training else dtype)
    model.dtype = dtype  # type: ignore[assignment]
    if training:
        configure_malloc()
    else:
        model.prepare_for_inference(precision == "int8")  # type: ignore[operator]
