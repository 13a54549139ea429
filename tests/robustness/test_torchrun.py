"""Tests of torchrun: ranks that are killed, restarted or signaled."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import (
    SMALL_SETTINGS,
    command_environment,
    load_last_weights,
    read_events,
    run_ranks_ok,
    write_corpus,
)

from nmt.runs.checkpoint import find_last_intact_checkpoint

OPTIONS = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")  # rdzv: like --standalone
SETTINGS = (
    *SMALL_SETTINGS,
    "data.max_length=30",
    "train.max_steps=16",
    "train.max_epochs=null",
    "train.validate_every=16",
    "train.save_minutes=1e-6",
    "train.log_every=8",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the settings for a small corpus."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), train=120, valid=2, test=2)
    return "data=text", f"data.path={folder}", f"data.cache={folder / 'cache'}"


def start_torchrun(folder: Path, *arguments: str, restarts: int = 0) -> subprocess.Popen[bytes]:
    """Run torchrun with two ranks, with output to the file `output`."""
    options = (*OPTIONS, f"--max-restarts={restarts}", "-m", "interrupted_train", *arguments)
    command = (sys.executable, "-m", "torch.distributed.run", *options)
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(command, cwd=folder, env=command_environment(folder), stdout=output, stderr=output)


@pytest.fixture(scope="module")
def uninterrupted(text: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that two ranks have trained without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks_ok(2, folder, "train", "name=x", *text, *SETTINGS)
    return folder / "runs" / "x"


def assert_runs_equal(run: Path, uninterrupted: Path) -> None:
    torch.testing.assert_close(load_last_weights(run), load_last_weights(uninterrupted), rtol=0, atol=0)
    assert read_events(run, "validate") == read_events(uninterrupted, "validate")
    assert [event["step"] for event in read_events(run, "train")] == [8, 16]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_rank_ends_job_and_resume_is_exact(
    number: int, uninterrupted: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / f"signal.{number}").write_text(str(int(signal.SIGKILL)))
    launcher = start_torchrun(tmp_path, "name=x", *text, *SETTINGS)
    code, output = launcher.wait(120), (tmp_path / "output").read_text()
    assert code != 0
    # The other process says why it ends, unless torchrun has sent it SIGTERM before it noticed.
    assert "another process of this job has ended" in output or re.search("exitcode +: (143|-15) ", output), output
    assert not re.search('File ".*nmt/(?!.*site-packages)', output), output
    run_ranks_ok(2, tmp_path, "train", "name=x", *text, *SETTINGS, "resume=auto")
    assert_runs_equal(tmp_path / "runs" / "x", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_torchrun_restart_is_exact(number: int, uninterrupted: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / f"signal.{number}").write_text(str(int(signal.SIGKILL)))
    launcher = start_torchrun(tmp_path, "name=x", *text, *SETTINGS, "resume=auto", restarts=2)
    code, output = launcher.wait(120), (tmp_path / "output").read_text()
    assert code == 0 and "resource_tracker" not in output, output
    assert not (tmp_path / f"signal.{number}").exists()
    assert_runs_equal(tmp_path / "runs" / "x", uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_to_torchrun_saves_checkpoint(
    number: signal.Signals, uninterrupted: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "x"
    (tmp_path / "signal.0").write_text(str(int(number)))
    launcher = start_torchrun(tmp_path, "name=x", *text, *SETTINGS)
    code, output = launcher.wait(120), (tmp_path / "output").read_text()
    [step] = map(int, re.findall(r"stopped at step (\d+); run the same command with resume=auto", output))
    assert code != 0 and step >= 5 and find_last_intact_checkpoint(run).name == f"step_{step:06}"
    run_ranks_ok(2, tmp_path, "train", "name=x", *text, *SETTINGS, "resume=auto")
    assert_runs_equal(run, uninterrupted)
