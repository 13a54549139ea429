"""Products of linear maps with weights in int8: nmt's beside torchao's and beside fp32.

python scripts/bench_int8.py rounds=5     # needs torchao, which nothing of nmt installs

One row of the table for each shape: O outputs, I inputs, N rows. Times are of the processor, medians of the rounds, in
which the maps take turns. The error is relative to float64. A row is independent of the others if its result is the
same to the bit alone, among the N rows, and among rows of other magnitudes.
"""

import statistics
import time
from collections.abc import Callable

import torch
from settings import parse_settings
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from nmt.model.kernels.inference_weights import make_int8_linear, make_packed_linear

SHAPES = ((2048, 1024), (512, 1024), (4000, 256))  # of an LSTM of 512, its readout, and an output layer
ROWS = (1, 8, 64)
CALLS = 100


def make_torchao_linear(weight_OI: Tensor, bias_O: Tensor) -> nn.Module:
    layers = nn.Sequential(nn.Linear(weight_OI.shape[1], weight_OI.shape[0]))
    layers.load_state_dict({"0.weight": weight_OI, "0.bias": bias_O})
    quantize_(layers, Int8DynamicActivationInt8WeightConfig())
    return layers


def measure_seconds(linear: Callable[[Tensor], Tensor], x_NI: Tensor) -> float:
    """Return the processor time of a call."""
    linear(x_NI)
    start = time.process_time()
    for _ in range(CALLS):
        linear(x_NI)
    return (time.process_time() - start) / CALLS


def is_row_independent(linear: Callable[[Tensor], Tensor], x_NI: Tensor) -> bool:
    y_NO = linear(x_NI)
    alone = torch.cat([linear(x_NI[row : row + 1]) for row in range(len(x_NI))])
    among_others = linear(torch.cat([x_NI, 100 * torch.randn(5, x_NI.shape[1])]))[: len(x_NI)]
    return torch.equal(alone, y_NO) and torch.equal(among_others, y_NO)


@torch.no_grad()
def main() -> None:
    rounds = int(parse_settings(rounds="5")["rounds"])
    torch.manual_seed(1)
    print("| O | I | N | Map | Microseconds | Error | Rows independent |\n|---|---|---|---|---|---|---|")
    for outputs, inputs in SHAPES:
        weight_OI, bias_O = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
        maps: dict[str, Callable[[Tensor], Tensor]] = {
            "fp32": make_packed_linear(weight_OI, bias_O),
            "nmt, int8": make_int8_linear(weight_OI, bias_O),
            "torchao, int8": make_torchao_linear(weight_OI, bias_O),
        }
        for rows in ROWS:
            x_NI = torch.randn(rows, inputs)
            exact = F.linear(x_NI.double(), weight_OI.double(), bias_O.double())
            turns = [[measure_seconds(linear, x_NI) for linear in maps.values()] for _ in range(rounds)]
            for (name, linear), seconds in zip(maps.items(), zip(*turns, strict=True), strict=True):
                error = float((linear(x_NI).double() - exact).norm() / exact.norm())
                independent = "yes" if is_row_independent(linear, x_NI) else "no"
                microseconds = 1e6 * statistics.median(seconds)
                print(f"| {outputs} | {inputs} | {rows} | {name} | {microseconds:.0f} | {error:.1e} | {independent} |")


if __name__ == "__main__":
    main()
