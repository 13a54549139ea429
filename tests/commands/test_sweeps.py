"""Tests of sweeps (`-m`) and searches. Those that need a plug-in are skipped if it is not installed."""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from builders import CONTEXT, ROOT, TINY_SETTINGS, command_environment, run_in_new_process
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from nmt.config import TrainRun
from nmt.system.cli import main
from nmt.system.command_line import CONFIG_DIR, KEYS_NOT_IN_RUN_NAMES
from nmt.system.sweep_names import MAX_RUN_NAME_BYTES, build_run_name, exclude_constant_keys

# A job without training, whose score is best at optim.lr=0.01.
PROGRAM = """
import math, os, time
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
    return -abs(math.log(run.optim.lr / 0.01))

train()
"""

SWEPT_SETTINGS = {  # more than fit into a job name
    "model.embed": 128,
    "model.hidden": 256,
    "model.encoder_layers": 2,
    "model.decoder_layers": 2,
    "model.dropout": 0.3,
    "model.attention.heads": 4,
    "model.attention.window": "local_p",
    "model.attention.half_width": 5,
    "model.cell": "gru",
    "optim.warmup": 200,
    "optim.schedule": "cosine",
    "optim.label_smoothing": 0.1,
    "optim.clip": 5.0,
    "train.keep": 3,
    "train.batch_tokens": 3000,
    "tokenizer.vocab_size": 8000,
    "train.max_steps": 7,
    "train.monitor": "loss",
}


def require_plugin(name: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{name}", reason="pip install '.[sweep]'")


def write_program(folder: Path, program: str = PROGRAM) -> None:
    (folder / "program.py").write_text(program)


def start_sweep(folder: Path, *arguments: str, path: str = os.environ["PYTHONPATH"]) -> subprocess.Popen[str]:
    """Start a sweep over jobs without training, in a new Python process."""
    write_program(folder)
    environment = command_environment(folder) | {"PYTHONPATH": path}
    command = [sys.executable, "program.py", "-m", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE)


def run_program_file(folder: Path, *arguments: str) -> None:
    """Run the program in this process, with standard error in the file `err`."""
    os.chdir(folder)
    with open("err", "wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    sys.argv = ["program.py", "-m", *arguments]
    runpy.run_path("program.py", run_name="__main__")


def run_sweep(folder: Path, *arguments: str, program: str = PROGRAM) -> tuple[int | None, str]:
    """Run a sweep over jobs without training in a forked process, and return its exit code and standard error."""
    write_program(folder, program)
    process = CONTEXT.Process(target=run_program_file, args=(folder, *arguments))
    process.start()
    process.join(120)
    return process.exitcode, (folder / "err").read_text(encoding="utf-8")


@pytest.mark.parametrize("launcher", ["basic", pytest.param("submitit_local", marks=pytest.mark.slow)])
def test_failed_jobs_report_user_errors_and_tracebacks(tmp_path: Path, launcher: str) -> None:
    if launcher != "basic":
        require_plugin("submitit_launcher")
    code, message = run_sweep(tmp_path, f"hydra/launcher={launcher}", "seed=2,3")
    user_error, _, traceback = message.partition("Error executing job with overrides: ['seed=3']\n")
    assert code == 1 and user_error == "error: seed=2 is rejected\n"
    assert 'program.py", line 14, in train' in traceback and "ValueError: a bug" in traceback
    assert not (tmp_path / "runs" / "run" / "seed=2").exists() and (tmp_path / "runs" / "run" / "seed=3").exists()


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
    ("arguments", "error"),
    [
        (["seed=range(6,9)", "optim.lr=choice(0.01,0.02)"], ""),
        (["optim.lr=interval(0.01,0.02)"], "interval() needs hydra/sweeper=optuna"),
        (["optim.lr=tag(log,interval(0.01,0.02))"], "interval() needs hydra/sweeper=optuna"),
        (["optim.lt=interval(0.01,0.02)"], "there is no key 'optim.lt'; did you mean 'optim.lr'?"),
        (
            ["data.path=a,b"],
            "data.path=a,b: data.path cannot be swept, since run names do not contain it; use one command per value",
        ),
        (["device=cpu,"], "device=cpu, cannot be read"),
        (["hydra/launcher=submitit"], "hydra/launcher=submitit is not one of basic"),
    ],
)
def test_sweep_syntax(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main() sets it; monkeypatch restores it afterwards
    monkeypatch.setattr(sys, "argv", ["train", "-m", *arguments])
    with pytest.raises(SystemExit) if error else contextlib.nullcontext():
        main("train")(lambda run: None)()
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == bool(error)


def test_job_names_contain_varying_keys(tmp_path: Path) -> None:
    constant = [f"{key}={value}" for key, value in SWEPT_SETTINGS.items()]
    varying = ('model.attention.score="dot",general', 'tokenizer.type="bpe/../x",char', "optim.lr=0.01,0.001,0.0001")
    program = PROGRAM.replace("Path(f", "0 and Path(f")
    code, message = run_sweep(tmp_path, *constant, *varying, "hydra.sweep.dir=out", program=program)
    assert message.count("error: tokenizer.type=bpe/../x is not one of") == 6 and code == 1
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    start = "model.attention.score=dot,optim.lr=0.0001,tokenizer.type="
    assert len(names) == 3 + 3 and names[0] == f"{start}char"  # rejected jobs leave no folder
    assert not [path for path in (tmp_path / "out").glob("*/*") if path.is_dir()]


@pytest.mark.parametrize("count", [1, 5, len(SWEPT_SETTINGS)])
def test_job_names_are_short_unique_and_safe(count: int) -> None:
    keys = list(SWEPT_SETTINGS)[:count]
    values = [
        "1",
        "a/b",
        "'a-b'",
        '"a b"',
        "[1,2]",
        "1+2",
        "null",
        "x" * 100,
        "x" * 101,
        '"é"',
        "true",
        "{a:1}",
        '"a\nb"',
    ]
    jobs = []
    for value in values:
        settings = {key: SWEPT_SETTINGS[key] for key in keys} | {keys[-1]: value}
        jobs.append([f"{key}={setting}" for key, setting in settings.items()])
    names = [build_run_name(job, ["name"]) for job in jobs]
    assert len(set(names)) == len(values) and max(map(len, names)) <= MAX_RUN_NAME_BYTES
    assert all(re.fullmatch(r"[\w.+=,-]+", name, re.ASCII) for name in names)
    assert names == [build_run_name([*job[::-1], "name=x"], ["name"]) for job in jobs]  # in any order
    assert count > 1 or names[0] == f"{keys[0]}=1"
    assert all(f"{keys[-1].rpartition('.')[2]}=" in name for name in names) or count > 5


@pytest.mark.parametrize(
    ("arguments", "excluded"),
    [
        (["-m", "seed=1,2", "optim.lr=0.1"], "optim.lr"),
        (["seed=1,2", "~by_pairs", "-m"], "by_pairs"),
        (["-m", "seed=1"], None),
        (["-m", "hydra/sweeper=optuna", "sweep=toy"], None),
        (["seed=1", "optim.lr=0.1"], None),
    ],
)
def test_constant_keys_are_excluded_from_job_names(arguments: list[str], excluded: str | None) -> None:
    added = [argument for argument in exclude_constant_keys(arguments) if argument not in arguments]
    if excluded is None:
        assert added == []
    else:
        keys = ",".join([*KEYS_NOT_IN_RUN_NAMES, excluded])
        assert added == [f"hydra.job.config.override_dirname.exclude_keys=[{keys}]"]


def test_keys_not_in_run_names_match_configuration() -> None:
    hydra = yaml.safe_load((CONFIG_DIR / "train.yaml").read_text())["hydra"]
    assert hydra["job"]["config"]["override_dirname"]["exclude_keys"] == [*KEYS_NOT_IN_RUN_NAMES]


def test_missing_plugin_error_names_remedy(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()  # hides installed plug-ins
    error = (
        'error: hydra/launcher=joblib needs a missing plug-in; install it with: pip install "attention-nmt[sweep]"\n'
    )
    process = start_sweep(tmp_path, "hydra/launcher=joblib", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert process.communicate(timeout=120)[1] == error and process.returncode == 1


def test_slurm_launcher_configuration() -> None:
    require_plugin("submitit_launcher")
    ConfigStore.instance().store(name="train_schema", node=TrainRun)
    overrides = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        launcher = compose("train", overrides=overrides, return_hydra_config=True).hydra.launcher
    assert launcher.partition == "gpu" and launcher.gpus_per_node == 1


def test_search_continues_after_failed_jobs(tmp_path: Path) -> None:
    require_plugin("optuna_sweeper")
    sweeper = ("sweep=toy", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.sampler.seed=1")
    code, message = run_sweep(tmp_path, *sweeper, "hydra.sweeper.direction=maximize", "seed=1,2")
    rates: dict[str, list[float]] = {"1": [], "2": []}
    for path in tmp_path.glob("job_*"):
        _, seed, rate = path.name.split("_")
        rates[seed].append(float(rate))
    assert code == 1 and message.count("error: ") == len(rates["2"]) > 0 and "Failed" not in message
    best = yaml.safe_load((tmp_path / "runs" / "search" / "optimization_results.yaml").read_text())
    assert best["best_params"]["optim.lr"] == min(rates["1"], key=lambda rate: max(rate / 0.01, 0.01 / rate))
    assert best["best_params"].keys() == {"optim.lr", "model.dropout", "model.attention.score", "seed"}
    assert f"Best value: {best['best_value']}" in message


@pytest.mark.slow
def test_sweep_trains_in_two_processes(small_corpus: Path, tmp_path: Path) -> None:
    require_plugin("joblib_launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    settings = [setting for setting in TINY_SETTINGS if not setting.startswith("model.hidden")]
    settings += ["data=text", f"data.path={small_corpus}", "model.hidden=31,32", "train.max_steps=2"]
    done = run_in_new_process("train", "-m", *launcher, *settings, folder=tmp_path)
    message = done.stderr.decode()
    assert done.returncode == 1 and message.count("error: model.hidden=31 must be even") == 1, message
    [metrics] = (tmp_path / "runs" / "run").glob("*/metrics.jsonl")
    assert "model.hidden=32" in metrics.parent.name and '"validate"' in metrics.read_text()
