"""What docs/reliability.md promises: trainings that are ended, disks that are full, files that are damaged or made to
deceive. The trials of faults.py are run as a user would run them."""

import errno
import fcntl
import io
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from builders import (
    ROOT,
    TINY_SETTINGS,
    command_environment,
    list_checkpoints,
    make_state,
    measure_peak_memory,
    read_events,
    run_error,
    run_ok,
    write_corpus,
)
from faults import count_changes
from safetensors.torch import load_file, save_file

import nmt
from nmt.config import OptimConfig, TrainConfig, TrainRun, select_immutable_settings
from nmt.data.cache import get_or_build
from nmt.data.tokenizer import SPECIALS
from nmt.errors import UserError, escape_controls
from nmt.runtime.command_line import describe_os_error
from nmt.runtime.files import hash_file, replacing_files, temporary_sibling, warn_once, write_atomically
from nmt.runtime.logging import _StderrHandler, log, log_to_file, log_to_stderr
from nmt.runtime.signals import deferred_signals
from nmt.runtime.text_io import echo, open_output, write_utf8
from nmt.training import step as training_step
from nmt.training.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    find_checkpoint,
    find_last_checkpoint,
    find_last_intact_checkpoint,
    load_model,
    save_config,
)
from nmt.training.loop import fit, write_event
from nmt.training.run_dir import check_resumed_settings, check_run_folder, clear_run_folder, lock_run_folder
from nmt.training.state import ValidatedCheckpoint, read_progress, resume_from, save_state

Change = Callable[[Path], Any]


@pytest.mark.slow
def test_trials(tmp_path: Path) -> None:
    """Two at a time: each uses one processor."""

    def run(trial: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tests" / "robustness" / "faults.py"), trial]
        return subprocess.run(command, cwd=tmp_path, env=command_environment(tmp_path), capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, ("kill=3", "term=3", "gaps=4", "flip=150", "noise=600", "lines=2000")):
            assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------- resume
@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text"), train=120, valid=12, test=2)


def test_where_the_last_checkpoint_is_damaged_the_one_before_serves(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_steps": 12, "validate_every": 4, "keep": 1}
    whole = make_state(text, tmp_path / "whole", **settings)
    fit(whole)
    torn = make_state(text, tmp_path / "torn", **settings | {"max_steps": 8})
    fit(torn)
    last = tmp_path / "torn" / "checkpoints" / "step_000008"
    with open(last / OPTIMIZER_FILE, "r+b") as file:
        file.truncate(100)
    again = make_state(text, tmp_path / "torn", **settings)
    assert again.progress.step == 4 and "step_000008/optimizer.safetensors is missing or damaged" in caplog.text
    fit(again)
    runs = [tmp_path / name for name in ("whole", "torn")]
    one, other = (load_file(run / "checkpoints" / "step_000012" / "model.safetensors") for run in runs)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert read_events(runs[0], "validate") == read_events(runs[1], "validate")
    for folder in (tmp_path / "torn" / "checkpoints").glob("step_*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no intact checkpoint"):
        find_last_intact_checkpoint(tmp_path / "torn")


def test_a_checkpoint_without_its_model_is_damaged_and_not_absent(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(make_state(text, tmp_path, max_steps=2))
    save_config(tmp_path, TrainRun())
    (find_last_intact_checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="already contains a trained model"):
        check_run_folder(tmp_path, TrainRun())
    with pytest.raises(UserError, match="has no intact checkpoint"):
        find_last_intact_checkpoint(tmp_path)
    assert "step_000002/model.safetensors is missing or damaged" in caplog.text
    (tmp_path / "checkpoints" / "best").unlink()
    with pytest.raises(UserError, match="missing or damaged|does not exist"):
        load_model(str(tmp_path))


def test_a_signal_before_a_validation_puts_it_off(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved and not judged; the next start judges first, and ends as a run without a stop."""
    settings = {"max_steps": 8, "validate_every": 4}
    whole = make_state(text, tmp_path / "whole", **settings)
    fit(whole)
    torn = make_state(text, tmp_path / "torn", **settings)
    sound = training_step.backward

    def signaled(*given: Any) -> Any:
        if torn.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return sound(*given)

    monkeypatch.setattr(training_step, "backward", signaled)
    with pytest.raises(SystemExit) as end:
        fit(torn)
    monkeypatch.setattr(training_step, "backward", sound)
    assert end.value.code == 143 and not read_events(tmp_path / "torn", "validate")
    again = make_state(text, tmp_path / "torn", **settings)
    fit(again)
    assert read_events(tmp_path / "torn", "validate") == read_events(tmp_path / "whole", "validate")
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_patience_with_failures_is_that_of_the_present_command(text: Path, tmp_path: Path) -> None:
    state = make_state(text, tmp_path, max_steps=8, max_skipped=3)
    state.progress.skipped_in_a_row = 4
    with torch.no_grad():
        state.model.output.bias[5] = math.nan
    with pytest.raises(UserError, match="5 updates in a row"):
        fit(state)


def test_other_gold_links_are_another_corpus(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("cache"))
    command = (
        "data=text",
        f"data.path={folder}",
        "data.alignments=links",
        "train.guided_alignment=0.1",
        *TINY_SETTINGS,
    )
    run_ok("train", "name=x", *command, "train.max_steps=2", folder=tmp_path)
    links = folder / "train.links"
    links.write_text(links.read_text().replace("0-0", "0?0", 1))
    message = run_error("train", "name=x", *command, "train.max_steps=4", "resume=true", folder=tmp_path)
    assert "(or its gold links)" in message


def test_a_checkpoint_on_its_way_out_is_found(text: Path, tmp_path: Path) -> None:
    """A process died after it had moved a checkpoint away and before another of the same step was in its place."""
    state = make_state(text, tmp_path, max_steps=2)
    fit(state)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_000002").rename(checkpoints / ".step_000002.old")
    assert find_last_intact_checkpoint(tmp_path) == checkpoints / ".step_000002.old"
    again = make_state(text, tmp_path, max_steps=2)
    assert again.progress.step == 2
    save_state(again)
    assert list_checkpoints(tmp_path) >= {"step_000002"}
    fit(make_state(text, tmp_path, max_steps=4))
    assert list_checkpoints(tmp_path) == {"step_000002", "step_000004"}


# ------------------------------------------------------------------------------------------- commits of several files
def dies_at(gap: int, work: Callable[[], Any]) -> bool:
    """Do it in a process that is killed just before the change number `gap` of names in a file system; whether there
    was one."""
    child = os.fork()
    if not child:
        count_changes("", gap, print)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def every_gap(folder: Path, work: Callable[[Path], Any]) -> Iterator[Path]:
    """Copies of a folder, each after work on it was killed at another place; the last one after all of it was done."""
    killed = True
    for gap in range(1, 1000):
        if killed:
            copy = folder.with_name(f"{folder.name}_{gap}")
            shutil.copytree(folder, copy, symlinks=True)
            killed = dies_at(gap, lambda copy=copy: work(copy))  # type: ignore[misc]
            yield copy


@pytest.mark.parametrize("again", [False, True])
def test_a_save_that_is_killed_at_any_place_leaves_one_state(again: bool, text: Path, tmp_path: Path) -> None:
    """Readers find the best checkpoint that the last one knows, at once and when it was resumed; nothing else is left.
    A checkpoint may be written `again`: after a signal there is one that is not validated."""
    state = make_state(text, tmp_path / "run", max_steps=9, validate_every=3, monitor="loss")
    fit(state)
    after = replace(state.progress)
    assert [one.step for one in after.best] == [9]
    before = replace(after, validated_step=6, best=[ValidatedCheckpoint(after.best[0].score + 1, 5.0, 6)])
    if not again:
        before.step = 6
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000009")
    state.progress = before
    save_state(state)
    expected = {before.validated_step: f"step_{before.best[0].step:06d}", 9: "step_000009"}
    found = []

    def work(copy: Path) -> None:
        state.folder, state.progress = copy, after
        save_state(state)

    for copy in every_gap(tmp_path / "run", work):
        judged = read_progress(find_last_intact_checkpoint(copy) / STATE_FILE).validated_step
        assert find_checkpoint(str(copy))[1].name.strip(".").removesuffix(".old") == expected[judged]
        resumed = make_state(text, copy, max_steps=9, validate_every=3, monitor="loss")
        assert resumed.progress.validated_step == judged and find_checkpoint(str(copy))[1].name == expected[judged]
        assert (copy / "checkpoints" / "best").read_text() == expected[judged] + "\n"
        left = {path.name for path in (copy / "checkpoints").iterdir()}
        last, kept = f"step_{resumed.progress.step:06d}", {"step_000003", "step_000006"}
        assert left <= {"best", "last", last, expected[judged]} | kept and "step_000006" in left, left
        found.append(judged)
    assert found[0] == 6 and found[-1] == 9 and len(found) > 6


def test_a_run_that_is_cleared_is_there_or_gone(text: Path, tmp_path: Path) -> None:
    state = make_state(text, tmp_path / "run", max_steps=4, validate_every=2)
    fit(state)
    save_config(tmp_path / "run", state.run)
    for copy in every_gap(tmp_path / "run", clear_run_folder):
        if find_last_checkpoint(copy):
            load_model(str(copy))
        clear_run_folder(copy)
        assert [path.name for path in copy.iterdir()] == ["config.yaml"]


def test_results_belong_together_wherever_evaluate_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "mine.txt").write_text("somebody's own")

    def write(folder: Path, model: str, pictures: int) -> None:
        with replacing_files(folder, "metrics.json", "metrics.json", "translations.txt", "alignment_*.png") as new:
            for name in ("metrics.json", "translations.txt", *(f"alignment_{i}.png" for i in range(pictures))):
                write_atomically(new / name, [model])

    def contents(folder: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in folder.iterdir()}

    write(folder, "old", 2)
    old, new, seen = contents(folder), None, []
    for copy in every_gap(folder, lambda copy: write(copy, "new", 1)):
        found = contents(copy)
        if "metrics.json" in found:
            seen.append(found["metrics.json"])
            new = new or (found if seen[-1] == "new" else None)
            assert found == (old if seen[-1] == "old" else new)
        assert found["mine.txt"] == "somebody's own"
        write(copy, "again", 0)
        assert contents(copy) == {name: "again" for name in ("metrics.json", "translations.txt")} | {
            "mine.txt": "somebody's own"
        }
        assert not list(tmp_path.glob(f".{copy.name}.*"))
    assert seen[0] == "old" and seen[-1] == "new" and len(new or ()) == 4


def test_time_makes_checkpoints_too(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(text, tmp_path, max_steps=7, validate_every=7, save_minutes=1)
    clock = SimpleNamespace(monotonic=lambda: 25.0 * state.progress.step, perf_counter=time.perf_counter)
    monkeypatch.setattr("nmt.training.loop.time", clock)  # each update takes 25 seconds
    saved: list[int] = []
    monkeypatch.setattr("nmt.training.loop.save_state", lambda state: saved.append(state.progress.step))
    fit(state)
    assert saved == [3, 6, 7]


def test_changed_settings_are_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")

    def said(run: TrainRun, before: TrainRun) -> list[tuple[str, str]]:
        caplog.clear()
        check_resumed_settings(run, before)
        return [(record.levelname, record.getMessage().partition(": ")[2]) for record in caplog.records]

    longer = {"train": TrainConfig(max_epochs=30, log_every=9)}
    plain = TrainRun()
    assert said(TrainRun(**longer), plain) == [
        ("INFO", "train.max_epochs=30 (was 20), train.log_every=9 (was 50)"),
    ]
    for schedule in ("cosine", "plateau"):  # the share of training that is done; a validation at its end
        optim = OptimConfig(schedule=schedule)
        assert said(TrainRun(optim=optim, **longer), TrainRun(optim=optim)) == [
            ("INFO", "train.log_every=9 (was 50)"),
            ("WARNING", "train.max_epochs=30 (was 20)"),
        ]
    assert said(TrainRun(optim=OptimConfig(lr=0.1)), plain) == [("WARNING", "optim.lr=0.1 (was 0.001)")]
    for key, other in {"optim.name": TrainRun(optim=OptimConfig(name="sgd")), "seed": TrainRun(seed=2)}.items():
        with pytest.raises(UserError, match=f"these differ: {key}="):
            check_resumed_settings(other, plain)


def test_half_precision_keeps_its_scale(text: Path, tmp_path: Path) -> None:
    """A scale that is far too large is halved until updates succeed, and a checkpoint has it."""
    state = make_state(text, tmp_path, max_steps=24, validate_every=8, log_every=4)
    state.model.dtype = torch.float16
    state.progress.loss_scale = 2.0**30
    state.restore_loss_scale()
    fit(state)
    skipped, steady = state.progress.skipped, state.progress.loss_scale_steps
    assert 2 <= skipped <= 16 and steady == 24 - skipped
    assert state.progress.loss_scale == 2.0 ** (30 - skipped)
    stored = read_progress(tmp_path / "checkpoints" / "step_000024" / STATE_FILE)
    assert (stored.loss_scale, stored.skipped, stored.loss_scale_steps) == (state.progress.loss_scale, skipped, steady)
    losses = [event["loss"] for event in read_events(tmp_path, "train")]
    assert losses[-1] < losses[-2] and all(loss is None or math.isfinite(loss) for loss in losses)


def test_a_command_that_is_ended_leaves_no_half_file(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nmt.translate", f"checkpoint={home / 'runs' / 'mine'}", "output=out"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=command_environment(tmp_path), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while process.poll() is None and not list(tmp_path.glob(".out.*.new")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read().decode() if process.stderr else ""
    assert process.returncode == 143 and "Traceback" not in said and not list(tmp_path.glob("*out*"))


ENDED = """
import signal, time
from nmt.config import TrainRun
from nmt.runtime.cli import main
from nmt.errors import UserError

class Late:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

@main("train")
def program(run: TrainRun) -> None:
    {body}
    time.sleep(60)

program()
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("Late()", 143, ""),  # where Python lets no exception out
        ("late = Late(); raise UserError('what was wrong')", 1, "error: what was wrong\n"),
        ("try: raise UserError('what was wrong')\n    finally: Late()", 1, "error: what was wrong\n"),
    ],
)
def test_a_signal_is_neither_lost_nor_hides_a_message(body: str, code: int, message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED.format(body=body)]
    done = subprocess.run(
        command, cwd=tmp_path, env=command_environment(tmp_path), capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (code, message)


class Signaled(io.RawIOBase):
    """A file where a signal comes while it is written to, when Python lets nobody else write there."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        return len(data)


def test_a_signal_may_come_while_a_line_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = io.TextIOWrapper(io.BufferedWriter(Signaled()), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(log, "handlers", [_StderrHandler()])
    with deferred_signals() as received:
        log.warning("a line")
        assert received == [signal.SIGTERM] and "SIGTERM: finishing this step" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- disk
@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [500, 20_000, 100_000])
def test_a_save_that_cannot_be_leaves_the_last_checkpoint(text: Path, tmp_path: Path, room: int) -> None:
    state = make_state(text, tmp_path, max_steps=2)
    fit(state)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    state.progress.step = 3
    with (
        file_limit(room),
        pytest.raises(UserError, match="cannot be written: .*large.* resume=auto continues from it"),
    ):
        save_state(state)
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()} == before
    save_state(state)
    assert find_last_intact_checkpoint(tmp_path).name == "step_000003"


def test_a_file_that_cannot_grow_is_named(text: Path, tmp_path: Path) -> None:
    """Whatever writes it: the system says only that something is too large."""
    state = make_state(text, tmp_path, max_steps=1)
    with log_to_file(tmp_path / "train.log"), file_limit(100):
        for path, act in (
            (tmp_path / "train.log", lambda: log.warning("a word " * 100)),
            (tmp_path / "metrics.jsonl", lambda: write_event(state, {"event": "train", "words": "a word " * 100})),
            (tmp_path / "page", lambda: write_atomically(tmp_path / "page", ["a word " * 100])),
        ):
            with pytest.raises(OSError) as caught:
                act()
            assert describe_os_error(caught.value) == f"{path}: File too large"
    assert not list(tmp_path.glob("*page*"))


@pytest.mark.slow
def test_training_goes_on_when_a_full_disk_has_room_again(home: Path, corpus: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "nmt", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    try:
        folder = disk / "run"
        command = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, f"hydra.run.dir={folder}", "resume=auto")
        run_ok("train", *command, "train.max_epochs=1", folder=tmp_path)
        free = shutil.disk_usage(disk).free
        size = sum(path.stat().st_size for path in find_last_intact_checkpoint(folder).iterdir())
        (disk / "ballast").write_bytes(bytes(free - size // 2))
        message = run_error("train", *command, "train.max_epochs=2", folder=tmp_path)
        assert "No space left on device" in message and "resume=auto continues from it" in message, message
        assert run_ok("translate", f"checkpoint={folder}", folder=tmp_path, text=b"Hallo .\n").count("\n") == 1
        (disk / "ballast").unlink()
        run_ok("train", *command, "train.max_epochs=2", folder=tmp_path)
        one, other = (
            load_file(find_last_intact_checkpoint(run) / "model.safetensors")
            for run in (folder, home / "runs" / "mine")
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_named(home: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine")
    folder = tmp_path / "runs" / "mine"
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        command = ("name=mine", "data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_epochs=3", "resume=auto")
        assert "Read-only file system" in run_error("train", *command, folder=tmp_path)
        assert "Read-only file system" in run_error("evaluate", f"checkpoint={folder}", folder=tmp_path)
        run_ok("translate", f"checkpoint={folder}", folder=tmp_path, text=b"Hallo .\n")
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("target", ["link", "checkpoints", "file", "nothing"])
def test_links_among_the_checkpoints_end_no_save(target: str, text: Path, tmp_path: Path) -> None:
    """What they lead to stays."""
    settings = {"validate_every": 2, "monitor": "loss"}
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    fit(make_state(text, run, max_steps=4, **settings))
    checkpoints = run / "checkpoints"
    if target == "checkpoints":
        checkpoints.rename(elsewhere)
        checkpoints.symlink_to(elsewhere)
    elif target == "link":
        elsewhere.mkdir()
        for step in checkpoints.glob("step_*"):
            step.symlink_to(step.rename(elsewhere / step.name))
    elif target == "file":
        (checkpoints / "step_000001").write_text("no folder")
    else:
        (checkpoints / "step_000001").symlink_to(elsewhere)
    state = make_state(text, run, max_steps=8, **settings)
    save_state(state)  # in the place of one that is there
    fit(state)
    assert list_checkpoints(run) == {"step_000006", "step_000008"}
    if target == "link":
        assert {path.name for path in elsewhere.iterdir()} == {"step_000002", "step_000004"}
    clear_run_folder(run)
    assert not checkpoints.exists() and (target != "checkpoints" or (elsewhere / "last").exists())


REFUSED = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS]


@pytest.mark.parametrize("number", REFUSED)
def test_a_file_system_without_fsync_and_locks_is_named_once(
    number: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    warn_once.cache_clear()
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "run").mkdir()
    with lock_run_folder(tmp_path / "run"):
        assert "has no locks" in caplog.text
    fit(make_state(text, tmp_path / "run", max_steps=4, validate_every=2))
    get_or_build(tmp_path / "cache" / "thing", lambda part: (part / "x").touch())
    assert find_last_intact_checkpoint(tmp_path / "run").name == "step_000004"
    assert caplog.text.count("does not force files to the disk") == 1
    assert caplog.text.count("several processes may prepare") == 1
    litter = tmp_path / ".out.12ab.new"
    litter.touch()
    write_atomically(tmp_path / "out", ["text"])
    assert litter.exists()  # nobody can tell whose it is


def test_a_disk_that_fails_is_not_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as caught:
        write_atomically(tmp_path / "out", ["text"])
    assert describe_os_error(caught.value) == f"{tmp_path}/out: Input/output error" and not list(tmp_path.iterdir())


def test_what_a_killed_process_was_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    """Not what a living one writes to the same file."""
    path = tmp_path / ("[long] *" + "x" * 240)

    def work() -> None:
        with temporary_sibling(path):
            os.kill(os.getpid(), signal.SIGKILL)

    with temporary_sibling(path) as alive:
        assert dies_at(1000, work)
        assert len(list(tmp_path.iterdir())) == 2
        write_atomically(path, ["text"])
        assert {*tmp_path.iterdir()} == {alive, path}
    assert path.read_text() == "text"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate checkpoint=runs/mine <&-", "standard input is closed; write input=FILE"),
        ("translate checkpoint=runs/mine >&-", "standard output is closed; write output=FILE"),
        ("translate checkpoint=runs/mine >/dev/full", "standard output: No space left on device"),
        ("translate checkpoint=runs/mine output=/dev/full", "/dev/full cannot be written: No space left on device"),
        ("align checkpoint=runs/mine >/dev/full", "standard output: No space left on device"),
        ("evaluate checkpoint=runs/mine pictures=0 >/dev/full", "standard output: No space left on device"),
        ("train --help >/dev/full", "standard output: No space left on device"),
        ("evaluate checkpoint=runs/mine pictures=0 <&- >&- 2>&-", None),
        ("translate checkpoint=runs/mine output=out 2>&-", None),
        ("train --help <&- 2>&-", None),
    ],
)
def test_closed_and_full_streams(command: str, message: str | None, home: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine", ignore=shutil.ignore_patterns("eval"))
    line = f"{sys.executable} -m nmt.{command}"
    shell = {"shell": True, "cwd": tmp_path, "env": command_environment(tmp_path), "capture_output": True, "text": True}
    done = subprocess.run(line, input="Hallo .\n", timeout=120, **shell)  # type: ignore[call-overload]
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"error: {message}", done.stderr


# ------------------------------------------------------------------------------------------------------ crafted files
def remade(run: Path, change: Callable[[Path, dict[str, Any]], Any]) -> None:
    """Change all checkpoints of a run and their manifests."""
    for step in (run / "checkpoints").glob("step_*"):
        manifest = json.loads((step / "manifest.json").read_text())
        change(step, manifest)
        (step / "manifest.json").write_text(json.dumps(manifest))


def replaced(name: str, content: bytes) -> Change:
    return lambda run: (run / name).write_bytes(content)


def appended(content: str) -> Change:
    return lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text() + content)


def exchanged(old: str, new: str) -> Change:
    return lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(old, new))


def with_settings(**model: object) -> Change:
    """Other settings of the model, and manifests that fit them."""

    def change(run: Path) -> None:
        loaded = load_model(str(run))
        settings = asdict(loaded.config)
        settings["model"] |= model
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        remade(run, lambda _, manifest: manifest.update(settings=select_immutable_settings(settings)))

    return change


def pointed(content: bytes) -> Change:
    """Another `best`, which is read where the state of the last checkpoint is damaged."""

    def change(run: Path) -> None:
        (run / "checkpoints" / "best").write_bytes(content)
        (find_last_intact_checkpoint(run) / STATE_FILE).unlink()

    return change


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def model_of(write: Callable[[Path], Any]) -> Change:
    """Other weights, and manifests that fit them."""

    def change(step: Path, manifest: dict[str, Any]) -> None:
        path = step / "model.safetensors"
        write(path)
        manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}

    return lambda run: remade(run, change)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def write(path: Path) -> None:
        found = load_file(path)
        change(found)
        save_file(found, path)

    return model_of(write)


def header(path: Path, shape: list[int]) -> None:
    """A file of safetensors that promises more than it has."""
    text = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def listing(name: str) -> Change:
    """A manifest with the name of a file that is elsewhere."""
    entry = {"bytes": 0, "sha256": hash_file(Path(os.devnull))}
    return lambda run: remade(run, lambda _, manifest: manifest["files"].update({name: entry}))


BOMB = "bomb: &a0 [x, x]\n" + "".join(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
CRAFTED: dict[str, tuple[Change, str]] = {
    "pickle": (model_of(lambda path: path.write_bytes(pickle.dumps(Evil()))), "cannot be read as safetensors"),
    "torch.save": (model_of(lambda path: torch.save({"x": Evil()}, path)), "cannot be read as safetensors"),
    "empty model": (model_of(lambda path: path.write_bytes(b"")), "cannot be read as safetensors"),
    "a header that lies": (model_of(lambda path: header(path, [10**6, 10**6])), "cannot be read as safetensors"),
    "a tensor too many": (tensors(lambda t: t.update(x=torch.zeros(1))), "does not fit the model's settings: x"),
    "a tensor too few": (tensors(lambda t: t.popitem()), "does not fit the model's settings"),
    "another shape": (tensors(lambda t: t.update({"output.bias": torch.zeros(1)})), "settings: output.bias"),
    "whole numbers": (tensors(lambda t: t.update({"output.bias": t["output.bias"].long()})), "output.bias"),
    "a model of terabytes": (with_settings(hidden=10**6), "does not fit the model's settings"),
    "a model beyond memory": (with_settings(embed=10**18), "out of memory for a model"),
    "a model beyond numbers": (with_settings(embed=10**30), "model.embed=10+ must be at least 1 and below"),
    "layers without end": (with_settings(encoder_layers=10**9), "must be from 1 to 100"),
    "not a number": (
        tensors(lambda t: t["output.bias"].fill_(math.nan)),
        "model.safetensors has NaN or infinity in output.bias",
    ),
    "infinity": (tensors(lambda t: t["output.bias"][3:4].fill_(-math.inf)), "has NaN or infinity in output.bias"),
    "other settings": (exchanged("bridge: bridge", "bridge: zero"), r"config.yaml \(model.bridge\) differs from what"),
    "_target_": (appended("_target_: os.system\ncommand: touch executed\n"), "config.yaml .*_target_"),
    "a target deep within": (exchanged("  style:", "  _target_: os.system\n  style:"), "_target_"),
    "interpolation": (exchanged("name: mine", "name: ${oc.env:HOME}"), "contains an interpolation"),
    "a tag": (appended("x: !!python/object/apply:os.system ['touch executed']\n"), "config.yaml is damaged"),
    "a bomb": (appended(BOMB), "must not have aliases"),
    "depth": (replaced("config.yaml", b"[" * 100_000), "more than 9 levels"),
    "a large config": (
        replaced("config.yaml", b"#" * 2**24),
        "config.yaml is damaged or from another version: it has more than",
    ),
    "no text": (replaced("config.yaml", b"\xff\xfe"), "config.yaml is damaged"),
    "nothing": (replaced("config.yaml", b""), r"config.yaml \(bleu_tokenizer, data.format.* differs from what"),
    "no tokenizer": (replaced("tokenizer.model", np.random.default_rng(1).bytes(5000)), "is not a tokenizer"),
    "an empty tokenizer": (replaced("tokenizer.model", b""), "is not a tokenizer"),
    "traversal": (listing("../../../../../dev/null"), "missing or damaged"),
    "an absolute name": (listing("/dev/null"), "missing or damaged"),
    "a name with a zero": (listing("a\0b"), "missing or damaged"),
    "a pointer out": (
        pointed(b"../../../elsewhere"),
        "state.json is missing or damaged .*best does not name a checkpoint",
    ),
    "a pointer up": (pointed(b".."), "state.json is missing or damaged .*best does not name a checkpoint"),
    "a pointer with a zero": (pointed(b"step\0"), "state.json is missing or damaged .*best does not name a checkpoint"),
}


FILES = ("config.yaml", "tokenizer.model", "checkpoints/last", "checkpoints/best")
FILES += tuple(f"checkpoints/step_*/{name}" for name in ("model.safetensors", "state.json", "manifest.json"))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_nothing_waits_for_what_is_no_file(name: str, kind: str, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    for path in run.glob(name):
        path.unlink()
        {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    signal.alarm(20)
    try:
        nmt.load(str(run))
    except UserError:
        pass
    else:
        assert name in ("checkpoints/last", "checkpoints/best", "checkpoints/step_*/state.json")
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl"])
def test_nothing_is_written_through_links_and_pipes_of_a_run(name: str, text: Path, tmp_path: Path) -> None:
    state = make_state(text, tmp_path / "run", max_steps=2)
    victim, path = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("precious")

    def write() -> None:
        if name == "train.log":
            with log_to_file(path):
                pass
        else:
            write_event(state, {"event": "train", "step": 1})

    for make, complaint in ((lambda: path.symlink_to(victim), "symbolic link"), (lambda: os.mkfifo(path), "pipe")):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(OSError, match=complaint) as caught:
            write()
        assert str(path) in describe_os_error(caught.value) and victim.read_text() == "precious"


def test_results_are_not_written_through_links(home: Path, tmp_path: Path) -> None:
    run, victim = tmp_path / "mine", tmp_path / "victim"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    victim.mkdir()
    (victim / "metrics.json").write_text("precious")
    (run / "eval").mkdir()
    (run / "eval" / "test").symlink_to(victim)
    command = ("evaluate", f"checkpoint={run}", "pictures=2", "search.beam=1")
    assert "eval/test is a symbolic link" in run_error(*command, folder=tmp_path)
    (run / "eval" / "test").unlink()
    (run / "eval" / "test").mkdir()
    for name in ("metrics.json", "translations.txt", "alignments.jsonl", "report.html", "alignment_1.png"):
        (run / "eval" / "test" / name).symlink_to(victim / "metrics.json")
    run_ok(*command, folder=tmp_path)
    assert (victim / "metrics.json").read_text() == "precious"
    assert not any(path.is_symlink() for path in (run / "eval" / "test").iterdir())


def test_control_characters_reach_no_terminal(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In errors, the log, and what evaluate shows; a file of translations has what was said."""
    evil = "\x1b]0;title\x07 \x9b31m \r \u202e"
    log_to_stderr()
    with log_to_file(tmp_path / "train.log"):
        log.warning(f"{evil}\tä\u200d")
    shown = "\\x1b]0;title\\x07 \\x9b31m \\x0d \\u202e\tä\u200d\n"
    assert capsys.readouterr().err == shown and (tmp_path / "train.log").read_text(encoding="utf-8").endswith(shown)
    echo(f"source {evil}")
    assert capsys.readouterr().out == f"source {escape_controls(evil)}\n"
    with open_output(str(tmp_path / "out")) as file:
        write_utf8(file, evil)
    assert (tmp_path / "out").read_bytes() == evil.encode()
    done = run_error("translate", "checkpoint=nowhere\x1b[31m", folder=tmp_path)
    assert "\x1b" not in done and "nowhere\\x1b" in done


def test_scores_that_are_no_numbers_are_refused(home: Path, tmp_path: Path) -> None:
    """Of a model whose weights are finite, but so large that nothing can be computed with them."""
    run = tmp_path / "mine"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    tensors(lambda t: [tensor.fill_(3e38) for name, tensor in t.items() if name.startswith("output")])(run)
    model = nmt.load(str(run), beam=1)
    with pytest.raises(UserError, match="line 1: the model's score is NaN"):
        model.score(["ein Hund ."], ["a dog ."])
    with pytest.raises(UserError, match="line 1: the model's score is NaN"):
        model.translate(["ein Hund ."])


def test_a_normalization_that_makes_much_of_little_is_refused(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    (tmp_path / "rules.tsv").write_text("61\t" + "62 " * 100_000 + "\n")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["der Hund", "die Katze"]), model_writer=model, vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_tsv=str(tmp_path / "rules.tsv"), minloglevel=2,
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, unk_piece=SPECIALS[1], hard_vocab_limit=False,
    )  # fmt: skip
    (run / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match="would replace a character by 100,000 bytes"):
        nmt.load(str(run))


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pickle", "_target_"])
def test_commands_refuse_them_in_one_line(name: str, home: Path, corpus: Path, tmp_path: Path) -> None:
    change, _ = CRAFTED[name]
    shutil.copytree(home / "runs" / "mine", tmp_path / "runs" / "mine", ignore=shutil.ignore_patterns("eval"))
    change(tmp_path / "runs" / "mine")
    assert run_error("translate", "checkpoint=runs/mine", folder=tmp_path, text=b"x\n").startswith("error: ")
    command = ("name=mine", "data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_epochs=3", "resume=auto")
    run_error("train", *command, folder=tmp_path)
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("step", "1"), ("step", 10**400), ("step", -5), ("step", True), ("step", None)],
        *[("loss_scale", math.nan), ("loss_scale", 0.0), ("new", 1), ("best", 3), ("best", [[1]]), ("best", ["12"])],
        *[("best", [[10**400, 1]]), ("best", [[1.0, math.inf]]), ("best", [[math.nan, 1.0, 1]]), ("best", {"12": 1})],
        *[("best", [[1.0, math.nan, 1]]), ("best", [[1.0, 1.0, 0]]), ("best", [[1.0, 1.0, 1.0]])],
    ],
)
def test_a_crafted_state_is_refused(key: str, value: object, text: Path, tmp_path: Path) -> None:
    fit(make_state(text, tmp_path, max_steps=1))
    path = find_last_intact_checkpoint(tmp_path) / STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match="state.json is damaged or from another version"):
        read_progress(path)


def test_a_crafted_optimizer_is_refused(text: Path, tmp_path: Path) -> None:
    state = make_state(text, tmp_path, max_steps=1)
    fit(state)
    path = find_last_intact_checkpoint(tmp_path) / OPTIMIZER_FILE
    sound = load_file(path)
    for change in ({"0.exp_avg": torch.zeros(1)}, {"x": torch.zeros(1)}, {"999.step": torch.zeros(())}):
        save_file(sound | change, path)
        with pytest.raises(UserError, match="optimizer.safetensors does not fit the optimizer"):
            resume_from(state, path.parent)
