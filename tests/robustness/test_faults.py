"""Tests of the guarantees in docs/reliability.md: interrupted training, full disks, damaged and crafted files."""

import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import numpy as np
import pytest
import torch
import yaml
from builders import (
    CONTEXT,
    TINY_SETTINGS,
    command_environment,
    make_state,
    measure_peak_memory,
    read_events,
    run_error,
    run_in_folder,
    run_ok,
    write_corpus,
)
from faults import kill_at_operation, run_trials
from safetensors.torch import load_file, save_file

import nmt
from nmt.config import OptimConfig, TrainConfig, TrainRun, select_immutable_settings
from nmt.errors import UserError, escape_controls
from nmt.runs.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    find_checkpoint,
    find_last_intact_checkpoint,
    load_model,
)
from nmt.system.files import hash_file, replacing_folder, write_atomically
from nmt.system.logging import log, log_to_file, log_to_stderr
from nmt.system.text import echo, open_output, write_utf8
from nmt.training import step as training_step
from nmt.training.loop import fit
from nmt.training.progress import ValidatedCheckpoint, read_progress
from nmt.training.start import check_resumed_settings
from nmt.training.state import resume, save_state

Change = Callable[[Path], Any]


@pytest.mark.slow
def test_training_killed_at_random_moments_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run faults.py in this process, with few trials."""
    monkeypatch.setattr(faults, "SMALL_SETTINGS", (*faults.SMALL_SETTINGS, "model.input_feeding=false"))
    monkeypatch.setattr(sys, "argv", ["faults.py", "kill=2", "term=2", f"folder={tmp_path}"])
    run_trials()


# -------------------------------------------------------------------------------------------------------------- resume
@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text"), train=120, valid=2, test=2)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four updates, validated after the second and the last; tests copy it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    fit(make_state(text, folder, max_steps=4, validate_every=2, monitor="loss"))
    return folder


def test_resume_uses_previous_checkpoint_if_last_is_damaged(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_steps": 12, "validate_every": 4, "keep": 1}
    whole = make_state(text, tmp_path / "whole", **settings)
    fit(whole)
    damaged = make_state(text, tmp_path / "damaged", **settings | {"max_steps": 8})
    fit(damaged)
    last = tmp_path / "damaged" / "checkpoints" / "step_000008"
    with open(last / OPTIMIZER_FILE, "r+b") as file:
        file.truncate(100)
    resumed = make_state(text, tmp_path / "damaged", **settings)
    assert resumed.progress.step == 4 and "step_000008/optimizer.safetensors is missing or damaged" in caplog.text
    fit(resumed)
    runs = [tmp_path / name for name in ("whole", "damaged")]
    expected, actual = (load_file(run / "checkpoints" / "step_000012" / "model.safetensors") for run in runs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert read_events(runs[0], "validate") == read_events(runs[1], "validate")
    for folder in (tmp_path / "damaged" / "checkpoints").glob("step_*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no intact checkpoint"):
        find_last_intact_checkpoint(tmp_path / "damaged")


def test_signal_before_validation_defers_validation_to_resume(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopped run is saved without validation. Resuming validates first and ends like an uninterrupted run."""
    settings = {"max_steps": 8, "validate_every": 4}
    whole = make_state(text, tmp_path / "whole", **settings)
    fit(whole)
    stopped = make_state(text, tmp_path / "stopped", **settings)
    original_backward = training_step.backward

    def backward_with_signal(*arguments: Any) -> Any:
        if stopped.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_backward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training_step, "backward", backward_with_signal)
        with pytest.raises(SystemExit) as end:
            fit(stopped)
    assert end.value.code == 143 and not read_events(tmp_path / "stopped", "validate")
    resumed = make_state(text, tmp_path / "stopped", **settings)
    fit(resumed)
    assert read_events(tmp_path / "stopped", "validate") == read_events(tmp_path / "whole", "validate")
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_resume_rejects_changed_gold_links(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    shutil.copytree(text, folder, ignore=shutil.ignore_patterns("cache"))
    command = ("data=text", f"data.path={folder}", "data.alignments=links", *TINY_SETTINGS)
    run_ok("train", "name=x", *command, "train.max_steps=1", folder=tmp_path)
    links = folder / "train.links"
    links.write_text(links.read_text().replace("0-0", "0?0", 1))
    message = run_error("train", "name=x", *command, "train.max_steps=2", "resume=true", folder=tmp_path)
    assert "(or its gold links)" in message


# ------------------------------------------------------------------------------------------- commits of several files
def is_killed_at(number: int, work: Callable[[], Any]) -> bool:
    """Do the work in a process that is killed just before its file operation `number`.

    Return whether it was killed, or False if the work has fewer operations.
    """
    child = os.fork()
    if not child:
        kill_at_operation(number)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def kill_at_every_operation(folder: Path, work: Callable[[Path], Any]) -> Iterator[Path]:
    """Yield copies of a folder in which the work was killed before its first, second, ... and after its last file
    operation."""
    killed = True
    for number in range(1, 1000):
        if killed:
            copy = folder.with_name(f"{folder.name}_{number}")
            shutil.copytree(folder, copy, symlinks=True)
            killed = is_killed_at(number, lambda copy=copy: work(copy))  # type: ignore[misc]
            yield copy


@pytest.mark.parametrize("overwrites", [False, True])
def test_save_killed_at_any_point_leaves_consistent_state(overwrites: bool, text: Path, tmp_path: Path) -> None:
    """Before and after resuming, the best checkpoint is the one named by the last checkpoint, and no others are left.

    A save overwrites a checkpoint of the same step if that was saved after a signal, without validation.
    """
    state = make_state(text, tmp_path / "run", max_steps=9, validate_every=3, monitor="loss")
    fit(state)
    after = replace(state.progress)
    assert [checkpoint.step for checkpoint in after.best] == [9]
    before = replace(after, validated_step=6, best=[ValidatedCheckpoint(after.best[0].score + 1, 5.0, 6)])
    if not overwrites:
        before.step = 6
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000009")
    state.progress = before
    save_state(state)
    best_by_validated_step = {before.validated_step: f"step_{before.best[0].step:06d}", 9: "step_000009"}
    validated_steps = []

    def save_to(copy: Path) -> None:
        state.folder, state.progress = copy, after
        save_state(state)

    for copy in kill_at_every_operation(tmp_path / "run", save_to):
        stored = read_progress(find_last_intact_checkpoint(copy) / STATE_FILE)
        assert stored.step >= before.step
        validated_step = stored.validated_step
        best = best_by_validated_step[validated_step]
        assert find_checkpoint(str(copy))[1].name == best
        resumed = make_state(text, copy, max_steps=9, validate_every=3, monitor="loss")
        assert resumed.progress.validated_step == validated_step and find_checkpoint(str(copy))[1].name == best
        assert (copy / "checkpoints" / "best").read_text() == best + "\n"
        names = {path.name for path in (copy / "checkpoints").iterdir()}
        last, kept = f"step_{resumed.progress.step:06d}", {"step_000003", "step_000006"}
        assert names <= {"best", last, best} | kept and "step_000006" in names, names
        validated_steps.append(validated_step)
    assert validated_steps[0] == 6 and validated_steps[-1] == 9 and len(validated_steps) > 6


def test_results_killed_at_any_point_are_from_one_evaluation(tmp_path: Path) -> None:

    def write_results(eval_folder: Path, model: str, pictures: int) -> None:
        with replacing_folder(eval_folder / "test") as new:
            for name in ("metrics.json", "translations.txt", *(f"alignment_{i}.png" for i in range(pictures))):
                write_atomically(new / name, [model])

    def read_texts(eval_folder: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in (eval_folder / "test").glob("*")}

    write_results(tmp_path / "eval", "old", 2)
    old, seen = read_texts(tmp_path / "eval"), []
    new = dict.fromkeys(["metrics.json", "translations.txt", "alignment_0.png"], "new")
    for copy in kill_at_every_operation(tmp_path / "eval", lambda copy: write_results(copy, "new", 1)):
        seen.append(read_texts(copy))
        assert seen[-1] in (old, {}, new)
        write_results(copy, "again", 0)
        assert read_texts(copy) == {"metrics.json": "again", "translations.txt": "again"}
        assert [path.name for path in copy.iterdir()] == ["test"]
    assert seen[0] == old and seen[-1] == new


def test_save_minutes_saves_by_time(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(text, tmp_path, max_steps=7, validate_every=7, save_minutes=1)
    clock = SimpleNamespace(monotonic=lambda: 25.0 * state.progress.step, perf_counter=time.perf_counter)
    monkeypatch.setattr("nmt.training.loop.time", clock)  # each update takes 25 seconds
    saved: list[int] = []
    monkeypatch.setattr("nmt.training.loop.save_state", lambda state: saved.append(state.progress.step))
    fit(state)
    assert saved == [3, 6, 7]


def test_resume_rejects_or_logs_changed_settings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    before = TrainRun()
    check_resumed_settings(TrainRun(), before)
    assert not caplog.messages
    check_resumed_settings(TrainRun(train=TrainConfig(max_epochs=30), optim=OptimConfig(lr=0.1)), before)
    [message] = caplog.messages
    assert message.endswith(": optim.lr=0.1 (was 0.001), train.max_epochs=30 (was 20)")
    optim, train = OptimConfig(name="sgd"), TrainConfig(batch_tokens=9)
    for changed in (TrainRun(optim=optim), TrainRun(seed=2), TrainRun(train=train)):
        with pytest.raises(UserError, match="these differ: (optim.name=sgd|seed=2|train.batch_tokens=9) "):
            check_resumed_settings(changed, before)


def test_terminated_translate_leaves_no_partial_output(home: Path, tmp_path: Path) -> None:
    streams = [tmp_path / name for name in ("stdin", "printed", "stderr")]
    os.mkfifo(streams[0])
    command = ("translate", f"checkpoint={home / 'runs' / 'mine'}", "output=out")
    process = CONTEXT.Process(target=run_in_folder, args=(tmp_path, command_environment(tmp_path), streams, *command))
    process.start()
    with open(streams[0], "wb"):
        while process.is_alive() and not list(tmp_path.glob(".out.*.new")):
            time.sleep(0.05)
        process.terminate()
        process.join()
    assert process.exitcode == 143 and "Traceback" not in streams[2].read_text() and not list(tmp_path.glob("*out*"))


# ---------------------------------------------------------------------------------------------------------------- disk
@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes, in bytes."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


@pytest.mark.parametrize("limit", [500, 20_000, 100_000])
def test_failed_save_keeps_last_checkpoint(text: Path, trained: Path, tmp_path: Path, limit: int) -> None:
    def read_checkpoints() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}

    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    state = make_state(text, tmp_path)
    before = read_checkpoints()
    state.progress.step = 5
    with (
        limit_file_size(limit),
        pytest.raises(UserError, match="cannot be written: .*large.* resume=auto continues from it"),
    ):
        save_state(state)
    assert read_checkpoints() == before
    save_state(state)
    assert find_last_intact_checkpoint(tmp_path).name == "step_000005"


def test_full_standard_output(home: Path, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m nmt.translate checkpoint='{home / 'runs' / 'mine'}' >/dev/full"
    environment = command_environment(tmp_path)
    result = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, input=b"Hallo .\n", capture_output=True)
    assert result.returncode == 1
    assert result.stderr.decode().splitlines()[-1] == "error: standard output: No space left on device"


# ------------------------------------------------------------------------------------------------------ crafted files
def change_checkpoints(run: Path, change: Callable[[Path, dict[str, Any]], Any]) -> None:
    """Change all checkpoints of a run and their manifests."""
    for step in (run / "checkpoints").glob("step_*"):
        manifest = json.loads((step / "manifest.json").read_text())
        change(step, manifest)
        (step / "manifest.json").write_text(json.dumps(manifest))


def edit_config(edit: Callable[[str], str]) -> Change:
    return lambda run: (run / "config.yaml").write_text(edit((run / "config.yaml").read_text()))


def change_model_settings(**model: object) -> Change:
    """Change settings of the model, and the manifests to match."""

    def change(run: Path) -> None:
        settings = asdict(load_model(str(run)).config)
        settings["model"] |= model
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        change_checkpoints(run, lambda _, manifest: manifest.update(settings=select_immutable_settings(settings)))

    return change


def replace_weights(write: Callable[[Path], Any]) -> Change:
    """Replace the weights, and change the manifests to match."""

    def change(step: Path, manifest: dict[str, Any]) -> None:
        path = step / "model.safetensors"
        write(path)
        manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}

    return lambda run: change_checkpoints(run, change)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def write(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return replace_weights(write)


class MaliciousPickle:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def make_lying_header() -> bytes:
    """Return a safetensors file with a header that claims more data than there is."""
    text = json.dumps({"x": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


OUTSIDE = {"../../../../../dev/null": {"bytes": 0, "sha256": hash_file(Path(os.devnull))}}
BOMB = "bomb: &a0 [x, x]\n" + "".join(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
CRAFTED: dict[str, tuple[Change, str]] = {
    "pickle": (
        replace_weights(lambda path: path.write_bytes(pickle.dumps(MaliciousPickle()))),
        "cannot be read as safetensors",
    ),
    "wrong sizes": (
        replace_weights(lambda path: path.write_bytes(make_lying_header())),
        "cannot be read as safetensors",
    ),
    "wrong shape": (change_tensors(lambda t: t.update({"output.bias": torch.zeros(1)})), "settings: output.bias"),
    "NaN": (
        change_tensors(lambda t: t["output.bias"].fill_(math.nan)),
        "model.safetensors has NaN or infinity in output.bias",
    ),
    "terabytes of weights": (change_model_settings(hidden=10**6), "does not fit the model's settings"),
    "more weights than memory": (change_model_settings(embed=10**18), "out of memory for a model"),
    "billions of layers": (change_model_settings(encoder_layers=10**9), "must be from 1 to 100"),
    "changed setting": (
        edit_config(lambda text: text.replace("bridge: learned", "bridge: zero")),
        r"config.yaml \(model.bridge\) differs from what",
    ),
    "_target_": (edit_config(lambda text: text + "_target_: os.system\ncommand: x\n"), "config.yaml .*_target_"),
    "interpolation": (
        edit_config(lambda text: text.replace("name: mine", "name: ${oc.env:HOME}")),
        "is not a valid folder name",
    ),
    "YAML tag": (
        edit_config(lambda text: text + "x: !!python/object/apply:os.system ['touch executed']\n"),
        "config.yaml is damaged",
    ),
    "YAML bomb": (edit_config(lambda text: text + BOMB), "aliases .* are not allowed"),
    "random tokenizer": (
        lambda run: (run / "tokenizer.model").write_bytes(np.random.default_rng(1).bytes(5000)),
        "is not a tokenizer",
    ),
    "path traversal": (
        lambda run: change_checkpoints(run, lambda _, manifest: manifest["files"].update(OUTSIDE)),
        "missing or damaged",
    ),
}


def test_control_characters_are_escaped_in_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors, the log and printed text are escaped. Output files are not."""
    evil = "\x1b]0;title\x07 \x9b31m \r \u202e"
    log_to_stderr()
    with log_to_file(tmp_path / "train.log"):
        log.warning(f"{evil}\tä\u200d")
    escaped = "\\x1b]0;title\\x07 \\x9b31m \\x0d \\u202e\tä\u200d\n"
    assert capsys.readouterr().err == escaped
    assert (tmp_path / "train.log").read_text(encoding="utf-8").endswith(escaped)
    echo(f"source {evil}")
    assert capsys.readouterr().out == f"source {escape_controls(evil)}\n"
    with open_output(str(tmp_path / "out")) as file:
        write_utf8(file, evil)
    assert (tmp_path / "out").read_bytes() == evil.encode()
    message = run_error("translate", "checkpoint=nowhere\x1b[31m", folder=tmp_path)
    assert "\x1b" not in message and "nowhere\\x1b" in message


def test_nan_scores_are_rejected(home: Path, tmp_path: Path) -> None:
    """The weights of the model are finite, but so large that its outputs overflow."""
    run = tmp_path / "mine"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    change_tensors(lambda t: [tensor.fill_(3e38) for name, tensor in t.items() if name.startswith("output")])(run)
    model = nmt.load(str(run), beam=1)
    with pytest.raises(UserError, match="line 1: the model's score is NaN"):
        model.score(["ein Hund ."], ["a dog ."])
    with pytest.raises(UserError, match="line 1: the model's score is NaN"):
        model.translate(["ein Hund ."])


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_rejected(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = CRAFTED[name]
    run = tmp_path / "runs" / "mine"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    monkeypatch.chdir(tmp_path)
    change(run)
    measure_peak_memory()
    before = measure_peak_memory()
    with pytest.raises(UserError, match=message):
        nmt.load(str(run))
    assert measure_peak_memory() - before < 200e6
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", "1"), ("step", True), ("decays", None), ("new", 1), ("best", 3), ("best", [[1]]), ("best", ["12"])],
)
def test_crafted_state_is_rejected(key: str, value: object, trained: Path, tmp_path: Path) -> None:
    state, path = find_last_intact_checkpoint(trained) / STATE_FILE, tmp_path / STATE_FILE
    path.write_text(json.dumps(json.loads(state.read_text()) | {key: value}))
    with pytest.raises(UserError, match="state.json is damaged or from another version"):
        read_progress(path)


def test_crafted_optimizer_is_rejected(text: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    state = make_state(text, tmp_path)
    path = find_last_intact_checkpoint(tmp_path) / OPTIMIZER_FILE
    given = state.run, tmp_path, path.parent, state.model, state.optimizer, state.progress.corpus
    tensors = load_file(path)
    for change in ({"0.exp_avg": torch.zeros(1)}, {"x": torch.zeros(1)}, {"999.step": torch.zeros(())}):
        save_file(tensors | change, path)
        with pytest.raises(UserError, match="optimizer.safetensors does not fit the optimizer"):
            resume(*given)
