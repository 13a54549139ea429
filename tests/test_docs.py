"""What the documents show is what the project does."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nmt.model.attention import Attention
from nmt.model.config import AttentionConfig, ModelConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE, QUERIES, POSITIONS = 8, 3, 5


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The names that the Python of docs/attention.md defines, and what it prints."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "attention.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(block, names)
    return names | {"printed": printed.getvalue(), "text": "".join(blocks)}


def test_the_example_prints_what_it_says(shown: dict[str, Any]) -> None:
    said = re.findall(r"print\(.*?\)  # (.*)", shown["text"])
    assert [re.findall(r"[\d.]+", line) for line in said] == [
        re.findall(r"[\d.]+", part) for part in re.split(r"(?<=\]\])\n", shown["printed"])[:-1]
    ]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_modules_compute_what_the_example_does(shown: dict[str, Any], heads: int) -> None:
    torch.manual_seed(heads)
    config = ModelConfig(embed=4, hidden=SIZE, attention=AttentionConfig(score="scaled_dot", heads=heads))
    attention = Attention(config).double()
    values_BSM = torch.randn(1, POSITIONS, SIZE, dtype=torch.float64)
    query_BQD = torch.randn(1, QUERIES, SIZE, dtype=torch.float64)
    memory = attention.memorise(values_BSM, torch.tensor([POSITIONS]))
    context_BQM, weights = attention.bind(memory, torch.float64)(query_BQD, None, None)
    queries, values = query_BQD[0].numpy(), values_BSM[0].numpy()
    if heads == 1:
        expected, expected_weights = shown["attention"](queries, values, values)
        np.testing.assert_allclose(weights.weights_BQW[0].detach().numpy(), expected_weights, atol=1e-12)
    else:
        maps = (attention.score.query, attention.score.key, attention.value, attention.output)
        expected = shown["multi_head"](
            queries, values, values, heads, *(linear.weight.detach().numpy() for linear in maps)
        )
    np.testing.assert_allclose(context_BQM[0].detach().numpy(), expected, atol=1e-12)
