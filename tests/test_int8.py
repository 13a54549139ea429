"""Linear maps in int8 against those in fp64, and models that translate with them."""

from pathlib import Path

import pytest
import torch
from conftest import refused, works
from test_model import STYLES, model_of, ragged_batch
from torch import nn

import nmt
from nmt.distributed import choose_precision, place
from nmt.model.int8 import Int8, linear, quantise
from nmt.search import force


def quantised(weight_OI: torch.Tensor) -> Int8:
    module = nn.Linear(*weight_OI.shape[::-1], bias=False)
    module.weight = nn.Parameter(weight_OI)
    quantise(module, "weight")
    return module.weight  # type: ignore[return-value]


def test_a_product_is_as_near_as_rounding_allows() -> None:
    torch.manual_seed(1)
    x_NI, weight_OI, bias_O = torch.randn(7, 96), torch.randn(33, 96) * torch.rand(33, 1), torch.randn(33)
    weight_OI[5], x_NI[2] = 0, 0
    weight = quantised(weight_OI)
    assert weight.weight_OI.dtype == torch.int8 and int(weight.weight_OI.abs().max()) == 127
    half_x_N1, half_w_O = x_NI.abs().amax(1, keepdim=True).double() / 254, weight.scale_O.double() / 2
    bound_NO = half_x_N1 * weight_OI.double().abs().sum(1) + half_w_O * x_NI.double().abs().sum(1, keepdim=True)
    bound_NO += 96 * half_x_N1 * half_w_O + 1e-5
    exact_NO = x_NI.double() @ weight_OI.double().t() + bias_O
    found_NO = linear(x_NI, weight, bias_O)
    assert ((found_NO - exact_NO).abs() <= bound_NO).all()
    assert (found_NO - exact_NO).abs().mean() < 0.01 * exact_NO.abs().mean()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x_BTI, weight = torch.randn(4, 5, 64), quantised(torch.randn(48, 64))
    whole_BTO = linear(x_BTI, weight, None)
    for row in range(4):
        assert torch.equal(linear(x_BTI[row : row + 1], weight, None)[0], whole_BTO[row])
    assert torch.equal(linear(torch.cat([x_BTI, 1000 * x_BTI]), weight, None)[:4], whole_BTO)


def test_columns_of_a_weight_are_a_weight() -> None:
    x_NI, weight_OI = torch.randn(3, 64), torch.randn(40, 96)
    weight = quantised(weight_OI)
    exact_NO = x_NI @ weight_OI[:, 32:].t()
    assert (linear(x_NI, weight[:, 32:], None) - exact_NO).abs().mean() < 0.02 * exact_NO.abs().mean()


@pytest.mark.parametrize("style", STYLES)
def test_scores_are_near_those_of_full_precision(style: str) -> None:
    source_BS, length_B, target_BT = ragged_batch()
    exact = force(model_of(style).eval(), source_BS, length_B, target_BT)
    model = model_of(style).eval()
    place(model, "int8", torch.device("cpu"))
    with torch.inference_mode():
        loss, _ = model.loss(source_BS, length_B, target_BT)
    assert float(loss.nats) == pytest.approx(-sum(wanted.score for wanted in exact), rel=0.02)
    for found, wanted in zip(force(model, source_BS, length_B, target_BT), exact, strict=True):
        assert found.score != wanted.score
        assert found.score == pytest.approx(wanted.score, rel=0.02)


def test_translation_alignment_and_evaluation_take_it(home: Path, corpus: Path) -> None:
    run = home / "runs" / "mine"
    lines = (corpus / "test.de").read_text(encoding="utf-8").splitlines()
    exact, near = (nmt.load(run, device="cpu", precision=precision) for precision in ("fp32", "int8"))
    same = [a.text == b.text for a, b in zip(exact.translate(lines), near.translate(lines), strict=True)]
    assert sum(same) >= 0.7 * len(same)
    given = ("checkpoint=runs/mine", "precision=int8")
    assert works("translate", *given, folder=home, text=b"Der Hund .\n").strip()
    assert works("align", *given, f"output={home / 'int8.links'}", folder=home) is not None
    works("evaluate", *given, "search.beam=1", "pictures=0", "data.split=valid", folder=home)


def test_where_it_cannot_be(tmp_path: Path) -> None:
    assert "train in auto, fp32, bf16 or fp64" in refused("train", "precision=int8", folder=tmp_path)
    with pytest.raises(nmt.UserError, match="int8 is for processors"):
        choose_precision("int8", torch.device("cuda"))
