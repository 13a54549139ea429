"""Tests of sweeps (`-m`). Those that need a plug-in are skipped if it is not installed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import ROOT, command_environment
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from nmt.config import TrainRun
from nmt.system.command_line import CONFIG_DIR

# A job without training.
PROGRAM = """
import os, time
from pathlib import Path
from nmt.config import TrainRun
from nmt.errors import UserError
from nmt.system.cli import main

@main("train")
def train(run: TrainRun) -> float:
    Path(f"job_{run.seed}_{run.optim.lr}").write_text(str(os.getpid()))
    if run.seed == 2:
        raise UserError("seed=2 is rejected")
    if run.seed == 3:
        raise ValueError("a bug")
    if run.seed == 5:
        time.sleep(60)
    return 0.0

train()
"""


def require_plugin(name: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{name}", reason="pip install '.[sweep]'")


def start_sweep(folder: Path, *arguments: str, path: str = os.environ["PYTHONPATH"]) -> subprocess.Popen[str]:
    """Start a sweep over jobs without training, in a new Python process."""
    (folder / "program.py").write_text(PROGRAM)
    environment = command_environment(folder) | {"PYTHONPATH": path}
    command = [sys.executable, "program.py", "-m", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE)


def run_sweep(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a sweep over jobs without training, and return its exit code and standard error."""
    process = start_sweep(folder, *arguments)
    return process.wait(120), process.communicate()[1]


def test_failed_jobs_are_reported_and_the_others_run(tmp_path: Path) -> None:
    code, message = run_sweep(tmp_path, "seed=1,2,4", "optim.lr=0.01,0.02")
    assert code == 1 and message == 2 * "error: seed=2 is rejected\n"
    assert len(list(tmp_path.glob("job_*"))) == 6
    names = {path.name for path in (tmp_path / "runs" / "run").iterdir() if path.is_dir()}
    assert names == {f"optim.lr={lr},seed={seed}" for lr in (0.01, 0.02) for seed in (1, 4)}


@pytest.mark.parametrize("launcher", ["basic", pytest.param("submitit_local", marks=pytest.mark.slow)])
def test_errors_and_bugs_of_jobs_reach_the_command(tmp_path: Path, launcher: str) -> None:
    if launcher != "basic":
        require_plugin("submitit_launcher")
    code, message = run_sweep(tmp_path, f"hydra/launcher={launcher}", "seed=2,1")
    assert code == 1 and message.endswith("error: seed=2 is rejected\n")
    code, message = run_sweep(tmp_path, f"hydra/launcher={launcher}", "seed=3,1")
    assert code == 1 and "ValueError: a bug" in message and "in train" in message


def test_terminated_sweep_ends_its_processes(tmp_path: Path) -> None:
    require_plugin("joblib_launcher")
    process = start_sweep(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=5", "optim.lr=0.01,0.02")
    deadline = time.monotonic() + 180
    while len(pids := [path.read_text() for path in tmp_path.glob("job_*")]) < 2 or not all(pids):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143 and str(process.pid) not in pids
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["seed=range(6,8)", "optim.lr=0.1"], ["seed=6", "seed=7"]),
        (["model=luong,rnn", "~by_pairs", "name=mine"], ["model=luong", "model=rnn"]),
        (["data.limit=null,3", "hydra.sweep.dir=runs/mine"], ["data.limit=3", "data.limit=null"]),
    ],
)
def test_job_names_contain_varying_keys(tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    assert run_sweep(tmp_path, *arguments) == (0, "")
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/*=*")) == names


def test_missing_plugin_error_names_remedy(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()  # hides installed plug-ins
    process = start_sweep(tmp_path, "hydra/launcher=joblib", path=f"{tmp_path}{os.pathsep}{ROOT}")
    remedy = 'install it with: pip install "attention-nmt[sweep]"'
    assert process.communicate(timeout=120)[1] == f"error: hydra/launcher=joblib needs a missing plug-in; {remedy}\n"


def test_slurm_launcher_configuration() -> None:
    require_plugin("submitit_launcher")
    ConfigStore.instance().store(name="train_schema", node=TrainRun)
    overrides = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        launcher = compose("train", overrides=overrides, return_hydra_config=True).hydra.launcher
    assert launcher.partition == "gpu" and launcher.gpus_per_node == 1
