"""What the documents show is what the project does."""

import contextlib
import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import ROOT

import nmt
from nmt.config.model import AttentionConfig, ModelConfig
from nmt.model.attention import Attention
from nmt.runtime.cli import main

DOCS = ROOT / "docs"
USER_PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "experiments").glob("*.md")))
PAGES = (ROOT / "CONTRIBUTING.md", *USER_PAGES)
SIZE, QUERIES, POSITIONS = 8, 3, 5


def blocks(page: Path, language: str = "") -> list[str]:
    """The text between fences of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands() -> dict[str, list[str]]:
    """Those that the documents show, by page and text, but for parts of one and what needs a plug-in."""
    found = {}
    for page in USER_PAGES:
        for block in blocks(page):
            for line in block.replace("\\\n", " ").splitlines():
                shown = re.search(r"-m (nmt\.\w+.*)", line)
                if shown and "..." not in line and "hydra/" not in line:
                    words = shlex.split(shown[1], comments=True)
                    found[f"{page.name}: {shlex.join(words)}"] = words
    return found


COMMANDS = commands()


def headings(page: Path) -> set[str]:
    """Those of a page, as links name them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.*)$", prose, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_is_there(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("shown", COMMANDS)
def test_commands_are_taken_as_they_are_shown(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = COMMANDS[shown]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the program sets it for itself alone; so it is put back
    monkeypatch.setattr(sys, "argv", [name, *words])
    main(name.removeprefix("nmt."))(lambda command: None)()


def test_python_is_as_the_readme_shows(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks(ROOT / "README.md", "python")
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, {})
    assert printed.getvalue().count("\n") == 4
    assert nmt.load("dog-en").translate(["Ein Hund läuft."])[0].text


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The names that the Python of docs/models.md defines, and what it prints."""
    found = blocks(DOCS / "models.md", "python")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in found:
            exec(block, names)
    return names | {"printed": printed.getvalue(), "text": "".join(found)}


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
    memory = attention.project_memory(values_BSM, torch.tensor([POSITIONS]))
    context_BQM, weights = attention.prepare_steps(memory, torch.float64)(query_BQD, None, None)
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
