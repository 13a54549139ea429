"""Tests of distributed jobs: results do not depend on the number of ranks, and failures of a rank are handled.

The ranks are forked from a process with all imports done. Tests of torchrun itself are in test_torchrun.py.
"""

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
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
from safetensors.torch import load_file, save_file

from nmt.config import AttentionConfig, DataConfig, ModelConfig, OptimConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data.batch import Batch
from nmt.data.batching import Indices, collate
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.system.device import prepare_model
from nmt.system.distributed import all_gather, process_group, rank
from nmt.system.torchrun import LAUNCH_ENV
from nmt.train import read_corpus
from nmt.training import step as training_step
from nmt.training.data import TrainingData
from nmt.training.optim import build_optimizer
from nmt.training.progress import Progress
from nmt.training.state import TrainState
from nmt.training.step import train_step

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


def make_state(text: tuple[str, ...], folder: Path, **train: Any) -> tuple[TrainState, Indices]:
    """Return the state of a new run in fp64, and the pairs of its first update."""
    path, cache = (setting.partition("=")[2] for setting in text[1:])
    run = TrainRun(
        precision="fp64",
        data=DataConfig(format="text", path=path, cache=cache),
        tokenizer=TokenizerConfig(vocab_size=400),
        model=ModelConfig(embed=8, hidden=16, dropout=0.0, attention=AttentionConfig()),
        optim=OptimConfig(name="sgd", lr=0.5, clip=None),
        train=TrainConfig(batch_tokens=400, **train),
    )
    encoded, valid, key = read_corpus(run, None)
    torch.manual_seed(1)
    model = build_model(run.model, encoded.tokenizer.source.vocab_size, encoded.tokenizer.target.vocab_size)
    cpu = torch.device("cpu")
    prepare_model(model, "fp64", cpu, training=True)
    optimizer = build_optimizer(run.optim, model.parameters())
    progress = Progress(key)
    data = TrainingData(run, encoded, valid, progress)
    return TrainState(run, folder, cpu, model, optimizer, data, progress), data.batches[0]


def update_and_save_weights(text: tuple[str, ...], folder: Path, accumulate: int, out_of_memory: bool) -> None:
    """Make an update as one of the ranks, and save the weights.

    With `out_of_memory`, rank 1 runs out of memory on its last micro-batch.
    """
    with process_group("cpu"):
        state, indices = make_state(text, folder, accumulate=accumulate)
        backward, calls = training_step.backward, []

        def failing_backward(run: TrainRun, model: Seq2Seq, batch: Batch, *others: Any) -> Any:
            calls.append(len(batch.source_BS))
            if out_of_memory and rank() == 1 and len(calls) == accumulate:
                raise MemoryError
            return backward(run, model, batch, *others)

        training_step.backward = failing_backward
        outcome = train_step(state, indices, 10)
        assert not outcome.failed and sum(calls[-accumulate:]) <= len(indices)
        save_file(dict(state.model.state_dict()), folder / f"weights.{rank()}")


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


def reference_update(state: TrainState, shares: list[Indices]) -> dict[str, torch.Tensor]:
    """Return the weights after a step of SGD on the mean loss over the tokens of all shares."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for rows in shares:
        batch = collate(state.data.pairs, rows)
        smoothing = state.run.optim.label_smoothing
        total = total + state.model.loss(batch.source_BS, batch.source_length_B, batch.target_BT, smoothing)[0].smoothed
        tokens += int(batch.target_length_B.sum())
    (total / tokens).backward()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter -= state.run.optim.lr * parameter.grad
    return dict(state.model.state_dict())


@pytest.mark.parametrize(
    ("count", "accumulate", "out_of_memory"), [(2, 1, False), (3, 2, False), (2, 1, True), (2, 2, True)]
)
def test_update_averages_over_tokens_of_all_ranks(
    count: int, accumulate: int, out_of_memory: bool, text: tuple[str, ...], tmp_path: Path
) -> None:
    code, output = run_ranks(count, tmp_path, update_and_save_weights, text, tmp_path, accumulate, out_of_memory)
    assert code == 0 and output.count("out of memory") == out_of_memory, output
    state, indices = make_state(text, tmp_path)
    shares = [part for number in range(count) for part in np.array_split(indices[number::count], accumulate)]
    expected = reference_update(state, shares)
    for number in range(count):
        torch.testing.assert_close(load_file(tmp_path / f"weights.{number}"), expected, rtol=1e-9, atol=1e-12)


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


def test_evaluate_does_not_depend_on_number_of_ranks(home: Path, corpus: Path, tmp_path: Path) -> None:
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
        ("input=nowhere", "input=nowhere is not a file"),
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
    "unknown key": (("train.max_stepz=1",), "there is no key 'train.max_stepz'"),
    "invalid value": (("train.max_steps=0",), "train.max_steps=0"),
    "unknown device": (("device=cpu:1",), "device=cpu:1 is not one of"),
    "single device": (("device=cuda:0",), "device=cuda:0 "),
    "missing folder": (("data.path=nowhere",), "data.path=nowhere is not a folder"),
    "vocabulary too large": (("tokenizer.vocab_size=100000",), "tokenizer.vocab_size=100000"),
    "divergence": (
        ("optim.lr=1e38", "optim.clip=null", "train.max_steps=30"),
        "training diverged: the loss or gradient was not finite in 20 updates in a row",
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_train_reports_error_once(name: str, text: tuple[str, ...], tmp_path: Path) -> None:
    bad_settings, message = BAD_SETTINGS[name]
    settings = ("name=x", *text, *SETTINGS, "precision=fp32", *bad_settings)
    assert run_ranks_error(2, tmp_path, "train", *settings).startswith(message)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prepare", ["input=a.tsv", "output=b"]),
        ("align", ["checkpoint=run"]),
        ("export", ["checkpoint=run", "output=b.html"]),
        ("serve", ["checkpoint=run"]),
    ],
)
def test_commands_that_cannot_share_their_work_refuse_several_processes(
    name: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n")
    message = run_ranks_error(2, tmp_path, name, *arguments)
    assert message.startswith(f"nmt.{name}") and message.endswith("runs in one process; start it without torchrun")
