"""The command `attention-nmt`, and the wheel and source archive that installations begin with."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from builders import ROOT, TINY_SETTINGS

from nmt import __version__
from nmt.config import COMMANDS


def run_attention_nmt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `attention-nmt`, as `python -m nmt`, in a new process."""
    command = [sys.executable, "-m", "nmt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_attention_nmt_lists_its_commands_and_version() -> None:
    shown = run_attention_nmt("--help").stdout
    assert shown == run_attention_nmt().stdout
    listed = [line.split()[0] for line in shown.partition("\nCommands\n")[2].splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert run_attention_nmt("--version").stdout == f"attention-nmt {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch_and_ends_silently_without_reader(command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = [sys.executable, "-X", "importtime", "-m", f"nmt.{command}", "--help"]
    done = subprocess.run(program, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    *imports, rest = re.findall(r"^import time:.*\| +(\S+)$|(.+)", done.stderr, re.MULTILINE)
    assert done.returncode == 1
    assert not [message for _, message in [*imports, rest] if message and "cumulative" not in message]
    assert {name for name, _ in imports} & {"torch", "numpy", "pyarrow", "datasets", "hydra"} == {"hydra"}


def test_attention_nmt_runs_commands_and_rejects_unknown_ones() -> None:
    done = run_attention_nmt("trian", "name=x")
    message = "error: there is no command 'trian' (attention-nmt --help lists them); did you mean 'train'?\n"
    assert (done.returncode, done.stderr) == (1, message)
    done = run_attention_nmt("prepare", "input=raw file", "output=corpus")
    assert done.returncode == 1 and re.fullmatch("error: input=raw file .*\n", done.stderr)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The source archive and the wheel, built with the packages that are installed."""
    pytest.importorskip("hatchling", reason="the extra `dev` has hatchling")
    folder = tmp_path_factory.mktemp("archives")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return sorted(folder.iterdir())


def test_archives_pass_the_checks_of_pypi(archives: list[Path]) -> None:
    pytest.importorskip("twine", reason="the extra `dev` has twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_archives_have_the_package_its_settings_and_pages(archives: list[Path]) -> None:
    [wheel] = [path for path in archives if path.suffix == ".whl"]
    [source] = [path for path in archives if path.suffix == ".gz"]
    assert wheel.name == f"attention_nmt-{__version__}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = [
        str(path.relative_to(ROOT))
        for folder in ("nmt", "configs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    expected = {name if name.startswith("nmt/") else f"nmt/{name}" for name in files}
    assert expected <= packed and {name.split("/")[0] for name in packed - expected} == {
        f"attention_nmt-{__version__}.dist-info"
    }
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pages = re.findall(r"PAGES :=((?:.*\\\n)*.*)", makefile)[0].replace("\\\n", " ").split()
    assert {"mkdocs.yml", *files} <= names and set(pages) <= {name.split("/")[0] for name in names}


@pytest.mark.slow
def test_wheel_needs_neither_the_checkout_nor_a_home_nor_a_locale(
    archives: list[Path], small_corpus: Path, tmp_path: Path
) -> None:
    """Commands of the wheel alone, in folders with odd names; the libraries are those of the tests."""
    folder = tmp_path / "wörk 'ä' \"b\" $c"
    folder.mkdir()
    [wheel] = [path for path in archives if path.suffix == ".whl"]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    shutil.copytree(small_corpus, folder / "tëxt 1")
    settings = ["name=mine", "data=text", 'data.path="tëxt 1"', *TINY_SETTINGS, "train.max_steps=4"]
    program = f"""
import html, importlib, nmt, os, sys
from nmt.system.page_template import fill_template
os.umask(0o077)
def run(command, *arguments):
    sys.argv = [command, *arguments]
    getattr(importlib.import_module(f"nmt.{{command}}"), command)()
run("train", *{settings})
run("evaluate", "checkpoint=runs/mine", "search.max_length=5")
run("translate", "checkpoint=runs/mine", "search.max_length=5", 'input="tëxt 1/test.de"', 'output="öut.txt"')
run("align", 'source="tëxt 1/test.de"', 'target="tëxt 1/test.en"', "output=links.pharaoh")
run("export", "checkpoint=runs/mine", 'output="päge.html"')
run("prepare", 'input="tëxt 1"', "output=prepared", "source=de", "target=en", "valid_size=4", "test_size=4")
import nmt.watch
print(nmt.__file__, fill_template(nmt.watch.TEMPLATE, {{"TITLE": html.escape(os.getcwd())}}))
"""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "OMP_NUM_THREADS", "MPLCONFIGDIR")}
    environment = kept | {"LC_ALL": "C", "PYTHONPATH": str(folder / "installed")}  # without HOME
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert str(folder / "installed" / "nmt" / "__init__.py") in done.stdout.decode()
    assert (folder / "öut.txt").read_bytes().count(b"\n") == 6
    modes = {path.stat().st_mode & 0o077 for path in (folder / "runs").rglob("*")}
    assert modes == {0}  # nothing is readable by others
