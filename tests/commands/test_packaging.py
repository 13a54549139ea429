"""The command `attention-nmt`, and the wheel and source archive that installations begin with."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from builders import ROOT

from nmt import __version__
from nmt.config import COMMANDS


def run_attention_nmt(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `attention-nmt`, as `python -m nmt`, in a new process."""
    command = [sys.executable, "-m", "nmt", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


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
    assert {name for name, _ in imports} & {"torch", "numpy", "pyarrow", "hydra"} == {"hydra"}


def test_version_of_a_command_is_that_of_the_distribution() -> None:
    command = [sys.executable, "-m", "nmt.train", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"attention-nmt {__version__}\n"


def test_attention_nmt_rejects_unknown_commands() -> None:
    done = run_attention_nmt("trian", "name=x")
    message = "error: there is no command 'trian' (attention-nmt --help lists them); did you mean 'train'?\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_attention_nmt_runs_a_command_with_its_settings(tmp_path: Path) -> None:
    done = run_attention_nmt("prepare", "input=raw file", "output=corpus", "source=de", "target=en", folder=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch("error: input=raw file .*\n", done.stderr)


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
