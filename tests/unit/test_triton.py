"""Triton kernels, which run in Python here, against their readable versions, and compiled for GPUs.

`tests/conftest.py` sets TRITON_INTERPRET.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import ROOT, make_model, make_ragged_batch
from torch import Tensor

from nmt.errors import UserError
from nmt.model import reference
from nmt.model.kernels import with_triton
from nmt.model.normalizers import NORMALIZER_FNS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not with_triton.is_installed(), reason="triton is not installed")


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare a result of tensors of `dtype` with one of the same values in fp32, relative to the largest value."""
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


def differentiate(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of a sum that weights all of their values differently."""
    factors = [torch.linspace(1, 2, output.numel()).view_as(output) for output in outputs]
    total = sum((output.float() * factor).sum() for output, factor in zip(outputs, factors, strict=True))
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, leaves)]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(7, 50), (3, 2048), (5, 2051), (4, 13), (0, 50)])
def test_cross_entropy_matches_the_reference(
    tokens: int, vocabulary: int, smoothing: float, dtype: torch.dtype
) -> None:
    """The first token shares the highest logit with another one, and the second is padding."""
    torch.manual_seed(1)
    target_R = torch.randint(1, vocabulary, (tokens,))
    target_R[:2] = torch.tensor([1, 0])[:tokens]
    values = torch.randn(tokens, 6), torch.randn(vocabulary, 6), torch.randn(vocabulary)
    leaves = [value.to(dtype).float() for value in values]
    leaves[1][1:3], leaves[2][1:3] = 0, 16
    x_RD, *output = [leaf.requires_grad_() for leaf in leaves]
    results = []
    for module, compute_dtype in ((with_triton, dtype), (reference, torch.float32)):
        loss = module.cross_entropy(x_RD.to(compute_dtype), *output, target_R, smoothing, pad=0)
        results.append([*differentiate((loss.smoothed,), leaves), loss.nats, loss.correct])
        with torch.no_grad():
            assert torch.equal(
                torch.stack(module.cross_entropy(x_RD.to(compute_dtype), *output, target_R, smoothing, pad=0)),
                torch.stack(loss),
            )
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(("rows", "size"), [(5, 24), (3, 171), (1, 512), (2, 1031), (0, 8)])
def test_cells_match_the_reference(rows: int, size: int, cell: str, dtype: torch.dtype) -> None:
    """With a state whose rows are not contiguous, as the first one of a decoder."""
    torch.manual_seed(1)
    shapes = [(rows, 4 * size)] if cell == "lstm" else [(rows, 3 * size)] * 2
    gates = [3 * torch.randn(shape) for shape in shapes]
    state_ND = torch.randn(rows, 3 * size)[:, size : 2 * size]
    leaves = [value.to(dtype).float().requires_grad_() for value in (*gates, state_ND)]
    actual = with_triton.RNN.cell_fns[cell](*(leaf.to(dtype) for leaf in leaves))
    if cell == "lstm":
        expected = reference.lstm_cell(leaves[0], torch.zeros_like(leaves[0]), (leaves[1], leaves[1]))
    else:
        expected = reference.gru_cell(leaves[0], leaves[1], (leaves[2],))
    pairs = zip(differentiate(tuple(actual), leaves), differentiate(tuple(expected), leaves), strict=True)
    for value, expected_value in pairs:
        assert_close(value, expected_value, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [(5,), (1, 2)])
@pytest.mark.parametrize(("heads", "positions", "size", "value_size"), [(1, 5, 24, 20), (2, 11, 20, 7), (1, 1, 1, 1)])
def test_attention_matches_the_reference(
    heads: int,
    positions: int,
    size: int,
    value_size: int,
    steps: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole target and a step loop, with a sentence that is empty and one that is padded."""
    from nmt.model.kernels import triton_attention

    for name, value in {"TILE": 256, "BLOCK_S": 8, "BLOCK_A": 16}.items():  # several blocks
        monkeypatch.setattr(triton_attention, name, value)
    torch.manual_seed(1)
    length_B = torch.tensor([positions, 0, max(1, positions - 2)])
    shapes = [(3, heads, positions, size), (3, heads, positions, value_size), (heads, size)]
    shapes += [(3, heads, queries, size) for queries in steps]
    leaves = [torch.randn(shape).to(dtype).float().requires_grad_() for shape in shapes]
    keys, values, v_HA, *queries = [leaf.to(dtype) for leaf in leaves]
    attend = with_triton.attention_for_steps(keys, values, v_HA, length_B, NORMALIZER_FNS["softmax"])
    assert attend is not None
    actual = [output for query in queries for output in attend(query)]
    memory = *leaves[:3], length_B
    expected = [output for query in leaves[3:] for output in reference.additive_attention(query, *memory)]
    pairs = zip(differentiate(tuple(actual), leaves), differentiate(tuple(expected), leaves), strict=True)
    for value, expected_value in pairs:
        assert_close(value, expected_value, dtype)


@needs_triton
def test_the_kernel_of_attention_is_used_with_softmax_only() -> None:
    """By a copy of a model, too, such as the one that validation translates with."""
    length_B, v_HA = torch.tensor([3, 2]), torch.ones(1, 4)
    keys = torch.zeros(2, 1, 3, 4)
    for normalizer in ("sparsemax", "entmax15"):
        assert with_triton.attention_for_steps(keys, keys, v_HA, length_B, NORMALIZER_FNS[normalizer]) is None
    normalize = make_model("bahdanau", "gru", kernels="triton").decoder.attention.normalize
    for fn in (normalize, copy.deepcopy(normalize)):
        assert with_triton.attention_for_steps(keys, keys, v_HA, length_B, fn) is not None


@needs_triton
@pytest.mark.parametrize(("style", "cell"), [("bahdanau", "gru"), ("luong", "lstm")])
def test_search_steps_match_the_reference(style: str, cell: str) -> None:
    """Two steps of two hypotheses of each sentence, with weights prepared for inference."""
    source_BS, length_B, target_BT = make_ragged_batch()
    rows_N, results = torch.arange(len(source_BS)).repeat_interleave(2), []
    for kernels in ("triton", "reference"):
        model = make_model(style, cell, kernels=kernels).float().eval()
        model.dtype = torch.float32
        model.prepare_for_inference(int8=False)
        with torch.inference_mode():
            memory, state = model.start(source_BS, length_B)
            state, outputs = state.select(rows_N), []
            for step in range(2):
                tokens_N1 = target_BT[rows_N, step].unsqueeze(1) + torch.arange(len(rows_N)).unsqueeze(1) % 2
                features, weights, state = model.decode(tokens_N1, state, memory)
                outputs += [model.logits(features), weights.weights_BQW]
        results.append(outputs)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@needs_triton
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "scripts/compile_kernels.py"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(process.stdout)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [line.strip("| ").split(" | ") for line in process.stdout.splitlines()[2:]]
    assert len({row[0] for row in rows}) == 10 and {row[2] for row in rows} == {"8.0", "9.0"}
    assert all(row[4] == "0" for row in rows)


def test_training_refuses_triton_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_triton, "is_installed", lambda: False)
    with pytest.raises(UserError, match="needs the package triton"):
        with_triton.check_triton(torch.device("cuda"), "bf16")
    with pytest.raises(UserError, match="not precision=fp64; use model.kernels=fast"):
        with_triton.check_triton(torch.device("cuda"), "fp64")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="needs an NVIDIA GPU, not device=cpu; use model.kernels=fast"):
        with_triton.check_triton(CPU, "fp32")


def test_fp64_and_a_cpu_take_the_fast_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not with_triton.uses_triton(torch.zeros(1, dtype=torch.float64))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not with_triton.uses_triton(torch.zeros(1))
