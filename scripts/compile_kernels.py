"""Compile all Triton kernels for GPUs that need not be there, and print what they use.

python scripts/compile_kernels.py

Each kernel is compiled as a model of GNMT's size (4 layers of 1,024, 32,000 pieces, 384 sentences) would launch it, by
running the parts of the model on PyTorch's `meta` device. The exit code is 1 if a kernel spills registers to memory.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nmt.model.kernels import triton_attention, triton_loss, triton_recurrence

TARGETS = (80, 90)  # compute capabilities: A100; H100 and H200
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SENTENCES, SIZE, VOCABULARY, TOKENS = 384, 1024, 32_000, 9_600
SOURCE_POSITIONS = (32, triton_attention.MAX_POSITIONS)


def run_parts(dtype: torch.dtype) -> None:
    """Launch every kernel, forward and backward."""

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    target_R = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    inputs = make(TOKENS, SIZE), make(VOCABULARY, SIZE), make(VOCABULARY)
    triton_loss.cross_entropy(*inputs, target_R, 0.1, None, 0).smoothed.backward()
    state_ND = make(SENTENCES, SIZE)
    h_ND, c_ND = triton_recurrence.lstm_cell(make(SENTENCES, 4 * SIZE), state_ND)
    (h_ND + c_ND).sum().backward()
    triton_recurrence.gru_cell(make(SENTENCES, 3 * SIZE), make(SENTENCES, 3 * SIZE), state_ND)[0].sum().backward()
    length_B = torch.empty(SENTENCES, dtype=torch.int64, device="meta")
    for positions in SOURCE_POSITIONS:
        keys, values = make(SENTENCES, 1, positions, SIZE), make(SENTENCES, 1, positions, SIZE)
        attend = triton_attention.attention_for_steps(keys, values, make(1, SIZE), length_B)
        context, weights = attend(make(SENTENCES, 1, 1, SIZE))
        # The gradient of the weights is None where the loss does not use them.
        (context.sum() if positions == SOURCE_POSITIONS[0] else context.sum() + weights.sum()).backward()


def compile_kernels(capability: int, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield the name of each kernel and what Triton compiled, in the order of their launches."""
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        suffix = f", {options['POSITIONS']} positions" if "POSITIONS" in options else ""
        compiled[f"`{kernel.fn.__name__}`{suffix}"] = run(kernel, *args, grid=grid, warmup=True, **options)

    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: capability, get_current_stream=lambda device: 0
    )
    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_only
    try:
        run_parts(dtype)
    finally:
        JITFunction.run = run
    yield from compiled.items()


def measure_usage(compiled: Any) -> dict[str, int]:
    """Return the resources of a kernel by name: REG registers of a thread, STACK bytes for those that did not fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def main() -> int:
    if triton.knobs.runtime.interpret:
        sys.exit("error: TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    has_spills = False
    print("| Kernel | Type | Compute capability | Registers | Spilled bytes |\n|---|---|---|---|---|")
    for capability in TARGETS:
        for dtype_name, dtype in DTYPES.items():
            for name, compiled in compile_kernels(capability, dtype):
                usage = measure_usage(compiled)
                spilled = usage["STACK"] + usage["LOCAL"]
                has_spills |= spilled > 0
                capability_text = f"{capability // 10}.{capability % 10}"
                print(f"| {name} | {dtype_name} | {capability_text} | {usage['REG']} | {spilled} |")
    return int(has_spills)


if __name__ == "__main__":
    sys.exit(main())
