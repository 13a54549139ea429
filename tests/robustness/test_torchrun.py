"""Tests of torchrun: ranks that are killed, restarted or signaled.

Torchrun and its ranks are forked from a process with all imports done, except in one test, which starts them anew.
"""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    CONTEXT,
    SMALL_SETTINGS,
    command_environment,
    load_last_weights,
    read_events,
    run_program,
    run_ranks_ok,
    write_corpus,
)
from interrupted_train import send_signal_in_sixth_update

from nmt.runs.checkpoint import find_last_intact_checkpoint
from nmt.system.torchrun import LAUNCH_ENV

OPTIONS = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")  # rdzv: like --standalone
FORK = multiprocessing.get_context("fork")
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


class ForkedProcess:
    """A process of multiprocessing with those methods of `subprocess.Popen` that torchrun and the tests call."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.process.start()
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self.process.exitcode


Launcher = ForkedProcess | subprocess.Popen[bytes]


def run_torchrun(folder: Path, restarts: int, arguments: tuple[str, ...]) -> None:
    """Run torchrun in this process, with ranks that are forked instead of started anew."""
    os.chdir(folder)
    with open("output", "ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= command_environment(folder)
    # Fork all ranks before torchrun starts threads. They wait for their commands.
    pipes = [FORK.Pipe() for _ in range(2 * (restarts + 1))]
    workers = [ForkedProcess(FORK.Process(target=run_worker, args=(pipe[0],), daemon=True)) for pipe in pipes]
    idle = list(zip(workers, pipes, strict=True))

    def give_command(_: object, command: tuple[str, ...], environment: dict[str, str]) -> ForkedProcess:
        worker, pipe = idle.pop(0)
        pipe[1].send((environment, command))
        return worker

    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main  # here, because each process imports this file

    SubprocessHandler._popen = give_command  # type: ignore[assignment]
    try:
        main(arguments)
    except BaseException as error:
        sys.exit(str(error))  # without the traceback, which names files of the tests


def run_worker(commands: Any) -> None:
    """Wait for the command of a rank, `python -u -m nmt.train arguments`, and run it in this process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    environment, command = commands.recv()
    os.environ |= environment
    LAUNCH_ENV.update({name: int(environment[name]) for name in LAUNCH_ENV})
    send_signal_in_sixth_update()
    run_program("train", *command[4:])


def start_torchrun(folder: Path, *arguments: str, restarts: int = 0, fresh: bool = False) -> Launcher:
    """Run torchrun with two ranks, in new Python processes if `fresh`, with output to the file `output`."""
    options = (*OPTIONS, f"--max-restarts={restarts}", "-m", "interrupted_train", *arguments)
    if not fresh:
        return ForkedProcess(CONTEXT.Process(target=run_torchrun, args=(folder, restarts, options)))
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            (sys.executable, "-m", "torch.distributed.run", *options),
            cwd=folder,
            env=command_environment(folder),
            stdout=output,
            stderr=output,
        )


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
    launcher = start_torchrun(tmp_path, "name=x", *text, *SETTINGS, restarts=2, fresh=number == 0)
    code, output = launcher.wait(120), (tmp_path / "output").read_text()
    assert code == 0 and "resource_tracker" not in output, output
    assert not (tmp_path / f"signal.{number}").exists()
    assert_runs_equal(tmp_path / "runs" / "x", uninterrupted)


@pytest.mark.slow
def test_torchrun_restart_does_not_resume_rejected_run(text: tuple[str, ...], tmp_path: Path) -> None:
    """The second job finds the run of another job in its folder, and fails again when torchrun restarts it."""
    for steps, restarts in ((2, 0), (3, 1)):
        settings = ("name=x", *text, *SMALL_SETTINGS, f"train.max_steps={steps}")
        launcher = start_torchrun(tmp_path, *settings, restarts=restarts)
        assert bool(launcher.wait(120)) == (steps == 3), (tmp_path / "output").read_text()
    assert "already contains a trained model" in (tmp_path / "output").read_text()
    assert find_last_intact_checkpoint(tmp_path / "runs" / "x").name == "step_000002"


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
