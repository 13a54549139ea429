"""The project itself: that the configuration composes and the versions agree."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from builders import ROOT
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from packaging.requirements import Requirement

from nmt.config import COMMANDS
from nmt.runtime.command_line import CONFIG_DIR, to_dataclasses

MODULES = {
    ".".join(path.relative_to(ROOT / "nmt").with_suffix("").parts): path for path in sorted(ROOT.glob("nmt/**/*.py"))
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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


def test_only_plot_imports_matplotlib_and_only_when_it_draws() -> None:
    users = {module for module, path in MODULES.items() if any(n.startswith("matplotlib") for n in imports(path))}
    assert users == {"evaluation.plot"}
    top_level = ast.parse(MODULES["evaluation.plot"].read_text(encoding="utf-8")).body
    names = [ast.unparse(node) for node in top_level if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("matplotlib" in name for name in names)


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("**/*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_composes(path: Path) -> None:
    """Each command's own file; each choice of a group as training takes it."""
    group = path.parent.name if path.parent != CONFIG_DIR else None
    command = "train" if group else path.stem
    given = [] if command == "train" else ["checkpoint=runs/x"]
    if group:
        given = [f"{group}={path.stem}", *([] if path.stem == "toy" or group == "model" else ["data.path=x"])]
    ConfigStore.instance().store(name=f"{command}_schema", node=COMMANDS[command])
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        run = to_dataclasses(compose(command, overrides=given))
    assert isinstance(run, COMMANDS[command])
    assert "_target_" not in path.read_text(encoding="utf-8")


def test_a_checkout_has_its_configuration_beside_the_package() -> None:
    assert ROOT / "configs" == CONFIG_DIR and not (ROOT / "nmt" / "configs").exists()


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
