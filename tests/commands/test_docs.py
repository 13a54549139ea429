"""What the documents show is what the project does."""

import ast
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
from torch.distributed.run import get_args_parser

from nmt.config.model import AttentionConfig
from nmt.model.attention import Attention
from nmt.model.kernels import KERNELS
from nmt.system.cli import main

DOCS = ROOT / "docs"
USER_PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "experiments").glob("*.md")))
PAGES = (ROOT / "CONTRIBUTING.md", *USER_PAGES)
SIZE, QUERIES, POSITIONS = 8, 3, 5


# Commands that no test checks, by how they begin, and why. All others in a code block are checked below.
NOT_RUN = {
    ". .venv/bin/activate": "changes the shell that runs it",
    "pip install": "downloads packages",
    "docker build": "needs Docker",
    "docker run": "needs Docker",
    "py -m venv": "needs Windows",
    ".venv\\Scripts\\activate": "needs Windows",
    "mkdir corpus": "plain shell, between commands that are checked",
    "curl": "needs a running server; test_serve.py sends such requests",
    "cp mono.en": "plain shell, between commands that are checked",
    "cp corpus": "plain shell, between commands that are checked",
    "head=$(scontrol": "needs Slurm",
    "python -m nmt.train -m hydra/launcher=submitit_slurm": "needs Slurm",
    "python -m nmt.train -m hydra/launcher=joblib": "needs the extra `sweep`; test_sweeps.py runs it where it is there",
    "python tests/robustness/faults.py": "takes hours; tests/robustness/test_faults.py runs parts of it",
    "sed 's/.*/": "needs sacremoses, which nothing installs",
    "sacrebleu": "needs the file that sacremoses writes",
}
CHECKED = {  # patterns of the commands that are checked; the group is the part that is
    "nmt": r"-m (nmt\.\w+[^;|]*)",
    "make": r"^make (.*)",
    "script": r"^(?:\w+=\S+ )*python (scripts/.*)",
    "python": r"^python -c (.*)",
}


def blocks(page: Path, language: str = "") -> list[str]:
    """The text between fences of a page."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def split_commands(block: str) -> list[str]:
    """The commands of a block, one a line, without comments."""
    lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


SHOWN = {
    f"{page.name}: {line}": line for page in USER_PAGES for block in blocks(page) for line in split_commands(block)
}


def checked_commands(kind: str) -> dict[str, list[str]]:
    """The words of the commands of a kind of `CHECKED`, by text. An ellipsis is left out."""
    found = {}
    for line in SHOWN.values():
        match = re.search(CHECKED[kind], line)
        if match and not line.startswith(tuple(NOT_RUN)):
            words = [word for word in shlex.split(match[1], comments=True) if word != "..."]
            found[shlex.join(words)] = words
    return found


COMMANDS = checked_commands("nmt")
SCRIPTS = checked_commands("script")


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


def test_every_command_is_checked_or_says_why_not() -> None:
    known = "|".join([*CHECKED.values(), *(f"^{re.escape(start)}" for start in NOT_RUN)])
    unknown = [shown for shown, line in SHOWN.items() if not re.search(known, line)]
    assert not unknown, "check these or list them in NOT_RUN; a block that is not of commands begins with ```text"
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in SHOWN.values())] == []


def test_torchrun_takes_its_options() -> None:
    for line in SHOWN.values():
        if options := re.search(r"\btorchrun ([^;]*)", line):
            get_args_parser().parse_args(shlex.split(options[1], comments=True))


def test_make_has_the_targets_and_variables() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) *\?=", makefile, re.MULTILINE))
    for shown, words in checked_commands("make").items():
        for word in words:
            name, equals, _ = word.partition("=")
            assert name in (variables if equals else targets), shown


@pytest.mark.parametrize("shown", SCRIPTS)
def test_scripts_have_the_settings_shown(shown: str) -> None:
    name, *settings = SCRIPTS[shown]
    calls = [node for node in ast.walk(ast.parse((ROOT / name).read_bytes())) if isinstance(node, ast.Call)]
    parses = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "parse_settings"]
    assert {setting.partition("=")[0] for setting in settings} <= {key.arg for call in parses for key in call.keywords}


def test_one_line_programs_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for program in {program for [program] in checked_commands("python").values()}:
        exec(program, {})


def test_python_is_as_the_readme_shows(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks(ROOT / "README.md", "python")
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, {})
    assert printed.getvalue().count("\n") == 4


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The names that the Python of docs/how_attention_works.md defines, and what it prints."""
    found = blocks(DOCS / "how_attention_works.md", "python")
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


@pytest.mark.parametrize("heads", [1, 2])
def test_the_modules_compute_what_the_example_does(shown: dict[str, Any], heads: int) -> None:
    torch.manual_seed(heads)
    attention = Attention(AttentionConfig(score="scaled_dot", heads=heads), SIZE, SIZE, KERNELS["fast"]).double()
    values_BSM = torch.randn(1, POSITIONS, SIZE, dtype=torch.float64)
    query_BQD = torch.randn(1, QUERIES, SIZE, dtype=torch.float64)
    memory = attention.project_memory(values_BSM, torch.tensor([POSITIONS]))
    context_BQM, weights = attention(query_BQD, memory)
    queries, values = query_BQD[0].numpy(), values_BSM[0].numpy()
    if heads == 1:
        expected, expected_weights = shown["attention"](queries, values, values)
        np.testing.assert_allclose(weights[0].detach().numpy(), expected_weights, atol=1e-12)
    else:
        maps = (attention.score.query, attention.score.key, attention.value, attention.output)
        expected = shown["multi_head"](
            queries, values, values, heads, *(linear.weight.detach().numpy() for linear in maps)
        )
    np.testing.assert_allclose(context_BQM[0].detach().numpy(), expected, atol=1e-12)
