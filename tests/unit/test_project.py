"""Imports, configuration files, console scripts and version constraints of the project."""

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from builders import ROOT
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from packaging.requirements import Requirement

from nmt.config import COMMANDS
from nmt.config.commands import flatten_keys
from nmt.system.command_line import CONFIG_DIR, to_dataclasses

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_matplotlib_is_not_imported_before_it_is_used() -> None:
    program = "import sys, nmt.evaluate, nmt.evaluation.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


REQUIRED_SETTINGS = {
    "train": [],
    "prepare": ["input=x", "output=y"],
    "export": ["checkpoint=runs/x", "output=x"],
}  # of the other commands: checkpoint


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("**/*.yaml")), ids=lambda path: path.stem)
def test_config_files_compose(path: Path) -> None:
    """Compose each command's file with that command, and each choice of a group with `train`."""
    group = path.parent.name if path.parent != CONFIG_DIR else None
    command = "train" if group else path.stem
    overrides = REQUIRED_SETTINGS.get(command, ["checkpoint=runs/x"])
    is_pair = group in ("data_model", "experiment_model")  # read when both are chosen
    if group:
        choices = zip(group.split("_"), path.stem.rsplit("_", 1), strict=True) if is_pair else [(group, path.stem)]
        needs_path = not path.stem.startswith("toy") and group != "model"
        overrides = [f"{name}={choice}" for name, choice in choices] + ["data.path=x"] * needs_path
    ConfigStore.instance().store(name=f"{command}_schema", node=COMMANDS[command])
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        run = to_dataclasses(compose(command, overrides=overrides))
    assert isinstance(run, COMMANDS[command])
    if is_pair:
        settings = dict(flatten_keys(asdict(run)))
        chosen = flatten_keys(yaml.safe_load(path.read_text(encoding="utf-8")))
        assert {key: settings[key] for key, _ in chosen} == dict(chosen)
    assert "_target_" not in path.read_text(encoding="utf-8")


def test_checkout_uses_configs_folder_beside_package() -> None:
    assert ROOT / "configs" == CONFIG_DIR and not (ROOT / "nmt" / "configs").exists()


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_console_scripts_are_callable_without_arguments(name: str) -> None:
    module, _, function = PROJECT["scripts"][name].partition(":")
    assert not inspect.signature(getattr(importlib.import_module(module), function)).parameters


def test_constraints_satisfy_requirements() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {normalize_name(name): version for name, version in pinned.items()}
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]):
        if requirement.name == PROJECT["name"]:
            continue  # an extra with other extras in it
        assert pinned[normalize_name(requirement.name)] in requirement.specifier, requirement


def normalize_name(name: str) -> str:
    """Normalize the name of a distribution as PyPI does."""
    return re.sub(r"[-_.]+", "-", name).lower()
