"""Tests of distributed jobs: results do not depend on the number of ranks, and failures of a rank are handled.

The ranks are forked from a process with all imports done. Tests of torchrun itself are in test_torchrun.py.
"""

import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    EXACT_SETTINGS,
    load_last_weights,
    read_events,
    run_program,
    run_ranks,
    run_ranks_error,
    run_ranks_ok,
    write_corpus,
)

from nmt.system.distributed import all_gather, process_group, rank
from nmt.system.torchrun import LAUNCH_ENV
from nmt.training import step as training_step

SETTINGS = (*EXACT_SETTINGS, "data.max_length=30", "train.max_steps=8", "train.validate_every=8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the settings for a small corpus."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), train=120, valid=5, test=2)
    return "data=text", f"data.path={folder}", f"data.cache={folder / 'cache'}"


def assert_runs_close(actual_run: Path, expected_run: Path, rtol: float) -> None:
    """Compare all numbers of two runs except speeds."""
    for kind in ("train", "validate"):
        pairs = list(zip(read_events(actual_run, kind), read_events(expected_run, kind), strict=True))
        assert pairs
        for actual, expected in pairs:
            keys = [key for key in expected if key != "event" and not key.endswith("per_second")]
            assert [actual[key] is None for key in keys] == [expected[key] is None for key in keys]
            keys = [key for key in keys if expected[key] is not None]
            values = [expected[key] for key in keys]
            assert [actual[key] for key in keys] == pytest.approx(values, rel=rtol, abs=rtol), keys
    torch.testing.assert_close(load_last_weights(actual_run), load_last_weights(expected_run), rtol=rtol, atol=rtol)


def join_three_groups(late: int) -> None:
    for _ in range(3):
        time.sleep(0.5 * (LAUNCH_ENV["RANK"] == late))
        with process_group("cpu"):
            assert all_gather(rank()) == [0, 1]


@pytest.mark.parametrize("late", [0, 1])
def test_process_group_can_be_joined_repeatedly(late: int, tmp_path: Path) -> None:
    """Each run of a sweep joins a group, and either rank may be late."""
    code, output = run_ranks(2, tmp_path, join_three_groups, late)
    assert code == 0, output


CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "default": ((), (2, 3)),
    "guided, subword sampling": (
        ("data.alignments=links", "train.guided_alignment=0.5", "optim.schedule=cosine", "tokenizer.sampling=0.3"),
        (2,),
    ),
    "fewer pairs than ranks": (("train.batch_sentences=1",), (3,)),
    "coverage, luong, sgd, micro-batches": (
        (
            "model=luong",
            "optim.name=sgd",
            "model.attention.coverage=true",
            "train.coverage_loss=0.5",
            "train.accumulate=2",
        ),
        (2,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_does_not_depend_on_number_of_ranks(case: str, text: tuple[str, ...], tmp_path: Path) -> None:
    settings, counts = CASES[case]
    for count in (1, *counts):
        run_ranks_ok(count, tmp_path, "train", f"name={count}", *text, *SETTINGS, *settings)
    for count in counts:
        run = tmp_path / "runs" / str(count)
        assert_runs_close(run, tmp_path / "runs" / "1", 1e-9)
        assert [event["step"] for event in read_events(run, "train")] == [*range(1, 9)]  # nothing is written twice
        log = (run / "train.log").read_text()
        assert log.count("finished at step 8") == 1 and f"{count} processes" in log


def test_resume_with_different_number_of_ranks(text: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks_ok(1, tmp_path, "train", "name=whole", *text, *SETTINGS)
    for count, steps in ((2, 3), (1, 5), (3, 8)):
        settings = (f"train.max_steps={steps}", "resume=auto", "name=parts")
        output = run_ranks_ok(count, tmp_path, "train", *text, *SETTINGS, *settings)
        assert "changes its results" not in output
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    torch.testing.assert_close(load_last_weights(parts), load_last_weights(whole), rtol=1e-9, atol=1e-9)
    losses = [[event["loss"] for event in read_events(run, "train")] for run in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def train_with_too_little_memory(*arguments: str) -> None:
    """Train, but the second rank runs out of memory in its first pass."""
    backward, calls = training_step.backward, itertools.count()

    def failing_backward(*others: Any) -> Any:
        if LAUNCH_ENV["RANK"] == 1 and not next(calls):
            raise MemoryError
        return backward(*others)

    training_step.backward = failing_backward
    run_program("train", *arguments)


def test_rank_that_is_short_of_memory_does_not_change_the_update(text: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks_ok(1, tmp_path, "train", "name=whole", *text, *SETTINGS)
    code, output = run_ranks(2, tmp_path, train_with_too_little_memory, "name=short", *text, *SETTINGS)
    assert code == 0 and output.count("out of memory") == 1, output
    assert_runs_close(tmp_path / "runs" / "short", tmp_path / "runs" / "whole", 1e-9)


def run_in_rank_folder(folder: Path, name: str, *arguments: str) -> None:
    """Run a command in a separate folder for each rank, as on machines without a shared disk."""
    os.chdir(folder / str(LAUNCH_ENV["RANK"]))
    run_program(name, *arguments)


def test_train_rejects_different_text_on_ranks(text: tuple[str, ...], tmp_path: Path) -> None:
    for number in range(2):
        shutil.copytree(text[1].partition("=")[2], tmp_path / str(number) / "text", ignore=lambda *_: ["cache"])
    path = tmp_path / "1" / "text" / "train.en"
    path.write_text(path.read_text(encoding="utf-8").replace("the", "a"), encoding="utf-8")
    arguments = ("train", "data=text", "data.path=text", *SETTINGS)
    code, output = run_ranks(2, tmp_path, run_in_rank_folder, tmp_path, *arguments)
    assert code == 1 and output.count("error: the processes of this job have different text, or trained different") == 1


def assert_files_close(actual: Path, expected: Path) -> None:
    """Compare two files, except for the last digits of numbers, which depend on the size of batches on some CPUs."""
    parts, expected_parts = (re.split(r"(-?\d+\.?\d*(?:e-?\d+)?)", path.read_text()) for path in (actual, expected))
    assert parts[::2] == expected_parts[::2], expected.name
    assert [*map(float, parts[1::2])] == pytest.approx([*map(float, expected_parts[1::2])], rel=1e-5, abs=1e-6)


def test_translate_does_not_depend_on_number_of_ranks(home: Path, corpus: Path, tmp_path: Path) -> None:
    run = home / "runs" / "mine"
    lines = [*(corpus / "test.de").read_text().splitlines()[:6], "", "Ein Hund . " * 9, "\x00 ?", ""]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    model = (f"checkpoint={run}", "input=in")
    cases: dict[str, tuple[str, ...]] = {
        "text": ("search.beam=1", "search.max_source=12", "alignments=links.pharaoh"),
        "jsonl": ("format=jsonl", "search.n_best=3", "alignments=links.jsonl"),
        "samples": ("search.sample=true", "search.n_best=3"),
        "score": ("target=in",),
    }
    for case, arguments in cases.items():
        alignments = [argument.partition("=")[2] for argument in arguments if argument.startswith("alignments=")]
        short = () if case == "score" else ("search.max_length=20",)
        for count in (1, 2):
            folder = tmp_path / str(count)
            folder.mkdir(exist_ok=True)
            shutil.copy(tmp_path / "in", folder / "in")
            run_ranks_ok(count, folder, "translate", *model, f"output={case}", *arguments, *short)
        for name in (case, *alignments):
            assert_files_close(tmp_path / "2" / name, tmp_path / "1" / name)
        assert len((tmp_path / "1" / case).read_text().splitlines()) >= len(lines), case


def test_evaluate_does_not_depend_on_number_of_ranks(home: Path, tmp_path: Path) -> None:
    metrics, files = [], []
    for count in (1, 2):
        folder = tmp_path / str(count)
        shutil.copytree(home / "runs" / "mine", folder / "mine", ignore=shutil.ignore_patterns("eval"))
        output = run_ranks_ok(count, folder, "evaluate", "checkpoint=mine", "data.alignments=links")
        assert output.count("sentences_per_second") == 1
        results = folder / "mine" / "eval" / "test"
        files.append([(results / name).read_bytes() for name in ("translations.txt", "alignments.jsonl")])
        metrics.append(json.loads((results / "metrics.json").read_text()))
        metrics[-1].pop("sentences_per_second")
    # Sums in another order are not equal to the bit.
    sums = [[result.pop(name) for name in ("loss", "ppl", "entropy")] for result in metrics]
    assert metrics[0] == metrics[1] and metrics[0]["aer"] is not None
    assert files[0] == files[1]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("output=out", "2 processes cannot share standard input; use input=FILE"),
        ("input=in search.max_length=2 prefix=in", "line 1: the prefix has"),
        ("input=in prefix=more", "prefix=more and the input have different numbers of lines: only one"),
    ],
)
def test_translate_reports_error_once(argument: str, message: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("Ein Hund schläft .\n")
    (tmp_path / "more").write_text("A dog\n\n")
    model = f"checkpoint={home / 'runs' / 'mine'}"
    assert run_ranks_error(2, tmp_path, "translate", model, *argument.split()).startswith(message)


BAD_SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "single device": (("device=cuda:0",), "device=cuda:0 "),
    "missing folder": (("data.path=nowhere",), "data.path=nowhere is not a folder"),
    "divergence": (("optim.lr=1e38", "optim.clip=null", "train.max_steps=30"), "training diverged: the loss or"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_train_reports_error_once(name: str, text: tuple[str, ...], tmp_path: Path) -> None:
    bad_settings, message = BAD_SETTINGS[name]
    settings = ("name=x", *text, *SETTINGS, "precision=fp32", *bad_settings)
    assert run_ranks_error(2, tmp_path, "train", *settings).startswith(message)


@pytest.mark.parametrize("arguments", ["prepare input=a output=b", "align checkpoint=x", "serve checkpoint=x"])
def test_commands_that_cannot_share_their_work_refuse_several_processes(arguments: str, tmp_path: Path) -> None:
    message = run_ranks_error(2, tmp_path, *arguments.split())
    assert message == f"nmt.{arguments.split()[0]} runs in one process; start it without torchrun"
