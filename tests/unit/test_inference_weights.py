"""Weights prepared for inference give the same results, within rounding for int8."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import STYLES, make_model, make_ragged_batch, run_error, run_ok
from torch.nn import functional as F

import nmt
from nmt.decoding.search import score_targets
from nmt.model.kernels.inference_weights import LINEAR_OPERATORS, list_packable_dtypes, prepare_linear
from nmt.model.kernels.recurrence import RNN
from nmt.system.device import (
    choose_precision,
    has_exact_int8_matmul,
    is_bf16_faster,
    prepare_model,
)

int8 = pytest.mark.skipif(not has_exact_int8_matmul(), reason="the CPU has no exact int8 products (VNNI)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_prepared_linear_matches_f_linear(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(1)
    weight_OI, bias_O = torch.randn(33, 96).to(dtype), torch.randn(33).to(dtype) if biased else None
    for part in (weight_OI, weight_OI[:, :40], weight_OI[:, 40:]):
        for x in (torch.randn(7, part.shape[1]).to(dtype), torch.randn(1, 3, part.shape[1]).to(dtype)):
            prepared, y = prepare_linear(part, bias_O, int8=False), F.linear(x, part, bias_O)
            torch.testing.assert_close(prepared(x), y)
            for addend in (torch.randn_like(y), torch.randn(*y.shape[:-1], 66).to(dtype)[..., ::2]):
                rounding = {"rtol": 0.01, "atol": 0.05} if dtype == torch.bfloat16 else {}  # of y, before and after
                torch.testing.assert_close(prepared(x, addend), y + addend, **rounding)


def test_plain_products_replace_missing_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_packable_dtypes(*LINEAR_OPERATORS) and not list_packable_dtypes("no_such_operator")
    source_BS, length_B, target_BT = make_ragged_batch()
    results = []
    for _ in range(2):
        model = make_model("bahdanau").eval()
        prepare_model(model, "fp32", torch.device("cpu"))
        results.append([hypothesis.score for hypothesis in score_targets(model, source_BS, length_B, target_BT)])
        for name in ("PACKABLE_LINEAR_DTYPES", "PACKABLE_LSTM_DTYPES"):
            monkeypatch.setattr(f"nmt.model.kernels.inference_weights.{name}", [])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_prepared_rnn_layer_matches_rnn(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for cell, inputs, hidden in (("lstm", 33, 17), ("lstm", 64, 48), ("gru", 33, 17)):
        rnn = RNN(cell, inputs, hidden).to(dtype)
        for sentences, steps in ((1, 1), (1, 9), (7, 1), (7, 9)):
            x_BTI = torch.randn(sentences, steps, inputs).to(dtype)
            state = torch.randn(sentences, rnn.num_states * hidden).to(dtype).split(hidden, 1)
            with torch.no_grad():
                rnn.inference_layer = None
                h_BTD, last = rnn(x_BTI, state)
                rnn.prepare_layer_for_inference()
                prepared_BTD, prepared_last = rnn(x_BTI, state)
            for part, exact in zip((prepared_BTD, *prepared_last), (h_BTD, *last), strict=True):
                torch.testing.assert_close(part, exact)


@int8
def test_int8_error_is_within_rounding() -> None:
    torch.manual_seed(1)
    x_NI, weight_OI, bias_O = torch.randn(7, 96), torch.randn(33, 96) * torch.rand(33, 1), torch.randn(33)
    weight_OI[5], x_NI[2] = 0, 0
    half_x_N1, half_w_O = (part.abs().amax(1).double() / 254 for part in (x_NI, weight_OI))
    half_x_N1 = half_x_N1.unsqueeze(1)
    bound_NO = half_x_N1 * weight_OI.double().abs().sum(1) + half_w_O * x_NI.double().abs().sum(1, keepdim=True)
    bound_NO += 96 * half_x_N1 * half_w_O + 1e-5
    exact_NO = x_NI.double() @ weight_OI.double().t() + bias_O
    actual_NO = prepare_linear(weight_OI, bias_O, int8=True)(x_NI)
    assert ((actual_NO - exact_NO).abs() <= bound_NO).all()
    assert 0 < (actual_NO - exact_NO).abs().mean() < 0.01 * exact_NO.abs().mean()


@int8
def test_int8_rows_are_independent() -> None:
    torch.manual_seed(1)
    x_BTI, product = torch.randn(4, 5, 64), prepare_linear(torch.randn(48, 64), None, int8=True)
    whole_BTO = product(x_BTI)
    for row in range(4):
        assert torch.equal(product(x_BTI[row : row + 1])[0], whole_BTO[row])
    assert torch.equal(product(torch.cat([x_BTI, 1000 * x_BTI]))[:4], whole_BTO)


@int8
@pytest.mark.parametrize("style", STYLES)
def test_int8_scores_are_close_to_fp64(style: str) -> None:
    source_BS, length_B, target_BT = make_ragged_batch()
    exact = score_targets(make_model(style).eval(), source_BS, length_B, target_BT)
    model = make_model(style).eval()
    prepare_model(model, "int8", torch.device("cpu"))
    int8_hypotheses = score_targets(model, source_BS, length_B, target_BT)
    with torch.inference_mode():
        loss, _ = model.loss(source_BS, length_B, target_BT)
    assert float(loss.nats) == pytest.approx(-sum(hypothesis.score for hypothesis in int8_hypotheses), rel=1e-4)
    for actual, expected in zip(int8_hypotheses, exact, strict=True):
        assert actual.score != expected.score
        assert actual.score == pytest.approx(expected.score, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int8", marks=int8)])
def test_table_of_projected_embeddings_does_not_change_scores(precision: str) -> None:
    source_BS, length_B, target_BT = make_ragged_batch()
    for style, cell in (("bahdanau", "gru"), ("luong, input feeding", "lstm"), ("luong", "lstm")):
        model = make_model(style, cell=cell).eval()
        prepare_model(model, precision, torch.device("cpu"))
        assert (model.inputs_VG is None) == (style == "luong")  # nothing is fed back there: no loop
        actual = score_targets(model, source_BS, length_B, target_BT)
        model.inputs_VG = None
        for own, expected in zip(actual, score_targets(model, source_BS, length_B, target_BT), strict=True):
            assert own.score == pytest.approx(expected.score, rel=1e-6)


@int8
def test_commands_accept_int8(home: Path, corpus: Path) -> None:
    run = home / "runs" / "mine"
    lines = (corpus / "test.de").read_text(encoding="utf-8").splitlines()
    exact, quantized = (nmt.load(run, device="cpu", precision=precision) for precision in ("fp32", "int8"))
    same = [a.text == b.text for a, b in zip(exact.translate(lines), quantized.translate(lines), strict=True)]
    assert sum(same) >= 0.7 * len(same)
    given = ("checkpoint=runs/mine", "precision=int8", "device=cpu")
    assert run_ok("translate", *given, folder=home, text=b"Der Hund .\n").strip()
    run_ok("align", *given, f"output={home / 'int8.links'}", folder=home)
    assert len((home / "int8.links").read_text(encoding="utf-8").splitlines()) == len(lines)
    run_ok("evaluate", *given, "search.beam=1", "data.split=valid", folder=home)


def test_precisions_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    for settings, message in (
        (("precision=int8",), "precision=int8 is for translation only; train with precision=auto"),
        (("precision=tf32", "device=cpu"), "precision=tf32 needs an NVIDIA GPU, Ampere or later, not device=cpu"),
    ):
        assert message in run_error("train", *settings, folder=tmp_path)
    with pytest.raises(nmt.UserError, match="set device=cpu or choose another precision"):
        choose_precision("int8", torch.device("cuda"))
    with pytest.raises(nmt.UserError, match="precision=int8 needs model.kernels=fast"):
        make_model(kernels="reference").prepare_for_inference(int8=True)


@pytest.mark.parametrize(
    ("capabilities", "faster"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "arm64", "bf16": True}, False),
    ],
)
def test_auto_precision_is_bf16_where_it_is_faster(
    capabilities: dict[str, str | bool], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.delenv("NMT_PRECISION")
    assert is_bf16_faster() == faster
    assert choose_precision("auto", cpu) == ("bf16" if faster else "fp32")
    monkeypatch.setenv("NMT_PRECISION", "fp64")
    assert choose_precision("auto", cpu) == "fp64" and choose_precision("bf16", cpu) == "bf16"
    monkeypatch.setenv("NMT_PRECISION", "fp23")
    with pytest.raises(nmt.UserError, match="environment variable NMT_PRECISION=fp23 is not one of .*'fp32'"):
        choose_precision("auto", cpu)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU does not have the setting")
def test_tiny_numbers_become_zero_in_all_threads(tmp_path: Path) -> None:
    """The setting is one of each thread, which those that it starts inherit."""
    program = """
import threading, torch
from nmt.system.cli import main

@main("train")
def train(run):
    torch.set_num_threads(2)
    x = torch.full((1_000_000,), 1e-20)
    thread = threading.Thread(target=lambda: print(bool(x[0] * 1e20 == 1), int((x * x).count_nonzero())))
    thread.start()
    thread.join()

train()
"""
    assert subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path).split() == [b"True", b"0"]
