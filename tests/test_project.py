"""The project itself: who imports whom, that the configuration composes and the versions agree."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from packaging.requirements import Requirement

from nmt.command import CONFIGS, checked
from nmt.config import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT / "nmt").with_suffix("").parts): path for path in sorted(ROOT.glob("nmt/**/*.py"))
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What each module may import of nmt beside `config` and `errors`, which all but these two and `command` may.
TOKENIZER = {"data.tokenizer"}
DATA = TOKENIZER | {"data.cache", "data.lines", "data.gold", "data.readers", "data.splits", "data.corpus"}
DATA |= {
    "data.words",
    "data.pieces",
    "data.encoding",
    "data.batching",
    "data.mixing",
    "data.processed",
    "data.sampling",
    "data.stream",
}
MODEL = {
    "model.attention",
    "model.config",
    "model.encoder",
    "model.ensemble",
    "model.decoder",
    "model.frozen",
    "model.logits",
    "model.loss",
    "model.maps",
    "model.normalisers",
    "model.recurrence",
    "model.replay",
    "model.seq2seq",
    "model.windows",
}
BELOW = DATA | MODEL  # what training and validation stand on
BELOW |= {
    "alignment",
    "beams",
    "checkpoint",
    "distributed",
    "files",
    "links",
    "memory",
    "metrics",
    "objective",
    "optim",
    "plot",
    "search",
    "translator",
}
ALL = BELOW | {"streams", "comparison", "report", "folder", "sizing", "state", "update", "validation", "training"}
MAY_IMPORT = {
    "__init__": ALL | {"command", "data.config", "openmp"},
    "openmp": set(),
    "errors": set(),
    "streams": {"errors"},
    "quoting": {"errors"},
    "command": {"errors", "quoting", "streams"},
    "config": {"command", "errors", "data.config", "model.config", "streams"},
    "data.config": {"errors"},
    "model.config": {"errors"},
    "memory": set(),
    "distributed": {"files", "memory"},
    "data.__init__": set(),
    "data.lexicon": set(),
    "data.grammar": {"data.lexicon"},
    "data.toy": {"data.grammar", "data.lexicon"},
    "data.lines": {"streams"},
    "data.words": set(),
    "data.gold": {"data.lines", "data.words", "links"},
    "data.parting": set(),
    "data.readers": {"data.lines", "data.parting"},
    "data.splits": {"data.config", "data.lines", "data.readers"},
    "data.cache": {"files"},
    "data.corpus": {"data.toy", "data.lines", "data.gold", "data.readers", "data.splits", "data.cache"},
    "data.tokenizer": {"data.lines", "data.words", "files"},
    "data.pieces": {"data.tokenizer"},
    "data.encoding": {
        *("data.cache", "data.corpus", "data.lines", "data.pieces", "data.tokenizer"),
        *("distributed", "links", "memory"),
    },
    "data.batching": {"data.encoding", "data.tokenizer", "alignment", "links"},
    "data.mixing": {"data.cache", "data.corpus", "data.encoding", "data.readers", "data.tokenizer"},
    "data.processed": {"data.corpus", "data.lines", "data.mixing", "data.readers"},
    "data.sampling": {"data.encoding", "data.pieces", "data.tokenizer", "distributed"},
    "data.stream": DATA - {"data.batching", "data.stream"} | {"distributed"},
    "model.__init__": set(),
    "model.frozen": set(),
    "model.maps": {"model.frozen"},
    "model.recurrence": {"model.frozen", "model.maps"},
    "model.logits": {"model.maps"},
    "model.loss": {"model.frozen", "model.maps"},
    "model.normalisers": set(),
    "model.windows": {"model.config", "model.maps"},
    "model.attention": {"model.config", "model.frozen", "model.maps", "model.normalisers", "model.windows"},
    "model.encoder": {"model.config", "model.maps", "model.recurrence"},
    "model.decoder": {"model.attention", "model.config", "model.maps", "model.recurrence", "model.windows"},
    "model.seq2seq": MODEL - {"model.seq2seq"},
    "model.ensemble": MODEL,
    "model.replay": {"memory"},
    "beams": MODEL,
    "search": MODEL | {"beams"},
    "links": set(),
    "alignment": {"data.lines", "links"},
    "translator": DATA | MODEL | {"alignment", "beams", "files", "search", "distributed"},
    "objective": DATA | MODEL,
    "comparison": {"data.config", "data.corpus", "data.mixing", "distributed", "files", "metrics", "plot"},
    "report": {"alignment", "metrics", "translator"},
    "metrics": {"data.words", "links"},
    "plot": set(),
    "optim": set(),
    "sizing": {"command", "data.mixing", "distributed"},
    "files": {"data.lines", "streams"},
    "checkpoint": TOKENIZER | MODEL | {"files", "quoting"},
    "folder": {"checkpoint", "data.config", "data.tokenizer", "distributed", "files", "quoting", "sizing", "state"},
    "state": BELOW | {"quoting"},
    "update": BELOW | {"state"},
    "validation": BELOW,
    "training": BELOW | {"state", "update", "validation"},
    "train": ALL | {"command", "quoting"},
    "evaluate": ALL,
    "translate": ALL,
    "align": ALL | {"data.config"},
}


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    assert module in MAY_IMPORT, f"give {module} its place in MAY_IMPORT"
    own = {name.removeprefix("nmt.") for name in imports(MODULES[module])} & set(MODULES)
    allowed = MAY_IMPORT[module] | (
        set() if module in ("errors", "openmp", "quoting", "command", "config") else {"config", "errors"}
    )
    assert own <= allowed, f"{module} must not import {own - allowed}"


def test_only_plot_imports_matplotlib_and_only_when_it_draws() -> None:
    users = {module for module, path in MODULES.items() if any(n.startswith("matplotlib") for n in imports(path))}
    assert users == {"plot"}
    top_level = ast.parse(MODULES["plot"].read_text(encoding="utf-8")).body
    names = [ast.unparse(node) for node in top_level if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("matplotlib" in name for name in names)


def test_the_configuration_needs_no_torch() -> None:
    for module in ("errors", "quoting", "command", "config", "data.config", "model.config"):
        assert not any(name.split(".")[0] == "torch" for name in imports(MODULES[module]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_composes(path: Path) -> None:
    """Each command's own file; each choice of a group as training takes it."""
    group = path.parent.name if path.parent != CONFIGS else None
    command = "train" if group else path.stem
    given = [] if command == "train" else ["checkpoint=runs/x"]
    if group:
        given = [f"{group}={path.stem}", *([] if path.stem == "toy" or group == "model" else ["data.path=x"])]
    ConfigStore.instance().store(name=f"{command}_schema", node=COMMANDS[command])
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        run = checked(compose(command, overrides=given))
    assert isinstance(run, COMMANDS[command])
    assert "_target_" not in path.read_text(encoding="utf-8")


def test_a_checkout_has_its_configuration_beside_the_package() -> None:
    assert ROOT / "configs" == CONFIGS and not (ROOT / "nmt" / "configs").exists()


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_console_scripts_are_programs(name: str) -> None:
    module, _, function = PROJECT["scripts"][name].partition(":")
    assert not inspect.signature(getattr(importlib.import_module(module), function)).parameters


def test_the_package_carries_the_readme_there_is() -> None:
    assert (PROJECT.get("readme") == "README.md") == (ROOT / "README.md").exists()


def test_constraints_pin_what_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {normal(name): version for name, version in pinned.items()}
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]):
        assert pinned[normal(requirement.name)] in requirement.specifier, requirement


def normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
