"""Several processes: whatever their number, the numbers are the same; and what happens when one of them is ended.

Most tests start processes that have imported everything, and tell them what torchrun would; what is about torchrun
itself starts it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    EXACT_SETTINGS,
    SMALL_SETTINGS,
    command_environment,
    load_last_weights,
    read_events,
    run_program,
    run_ranks,
    run_ranks_error,
    run_ranks_ok,
    write_corpus,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nmt.config import AttentionConfig, DataConfig, ModelConfig, OptimConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data.batching import Batch, Indices, collate, epoch_batches
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.runtime.device import move_model
from nmt.runtime.distributed import all_gather, all_reduce_sum, process_group, rank, world_size
from nmt.runtime.launch import LAUNCH_ENV
from nmt.train import read_corpus
from nmt.training import step as training_step
from nmt.training.checkpoint import find_checkpoint, find_last_intact_checkpoint
from nmt.training.optim import build_optimizer
from nmt.training.state import Progress, TrainState
from nmt.training.step import choose_micro_batch_size, forward_backward, split_share, train_step

RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")  # as --standalone, under the name of all jobs
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, "--nproc-per-node=2")
LONG = (
    *SMALL_SETTINGS,
    "train.max_steps=100",
    "train.max_epochs=null",
    "train.validate_every=100",
    "train.save_every=20",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that name a small corpus."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), train=120, valid=13, test=2)
    return "data=text", f"data.path={folder}", f"data.cache={folder / 'cache'}"


def launched(folder: Path, *arguments: str, restarts: int = 0) -> "subprocess.Popen[bytes]":
    """`torchrun -m nmt.train`; what it says goes to a file."""
    whole = (*TORCHRUN, f"--max-restarts={restarts}", "-m", "nmt.train", *arguments)
    with open(folder / "said", "wb") as said:
        return subprocess.Popen(whole, cwd=folder, env=command_environment(folder), stdout=said, stderr=said)


def assert_same_run(one: Path, other: Path, rtol: float) -> None:
    """Every number of two runs but their speeds."""
    for kind in ("train", "validate"):
        pairs = list(zip(read_events(one, kind), read_events(other, kind), strict=True))
        assert pairs
        for first, second in pairs:
            numbers = [key for key in first if key != "event" and not key.endswith("per_second")]
            assert [second[key] is None for key in numbers] == [first[key] is None for key in numbers]
            numbers = [key for key in numbers if first[key] is not None]
            wanted = [first[key] for key in numbers]
            assert [second[key] for key in numbers] == pytest.approx(wanted, rel=rtol, abs=rtol), numbers
    torch.testing.assert_close(load_last_weights(one), load_last_weights(other), rtol=rtol, atol=rtol)


def meet_thrice(late: int) -> None:
    for _ in range(3):
        time.sleep(0.5 * (LAUNCH_ENV["RANK"] == late))
        with process_group("cpu"):
            assert all_gather(rank()) == [0, 1]


@pytest.mark.parametrize("late", [0, 1])
def test_processes_meet_again(late: int, tmp_path: Path) -> None:
    """As for each run of a sweep, whichever of them comes later."""
    code, said = run_ranks(2, tmp_path, meet_thrice, late)
    assert code == 0, said


CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "as it is": ((), (2, 3)),
    "micro-batches": (("train.accumulate=2",), (2,)),
    "guided": (("data.alignments=links", "train.guided_alignment=0.5", "optim.schedule=cosine"), (2,)),
    "subwords are drawn": (("tokenizer.sampling=0.3",), (2,)),
    "fewer pairs than processes": (("train.batch_sentences=1",), (3,)),
    "coverage, luong, sgd": (
        ("model=luong", "optim.name=sgd", "model.attention.coverage=true", "train.coverage_loss=0.5"),
        (2,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_do_not_depend_on_the_number_of_processes(case: str, text: tuple[str, ...], tmp_path: Path) -> None:
    settings, counts = CASES[case]
    for count in (1, *counts):
        run_ranks_ok(count, tmp_path, "train", f"name={count}", *text, *EXACT_SETTINGS, *settings)
    for count in counts:
        run = tmp_path / "runs" / str(count)
        assert_same_run(tmp_path / "runs" / "1", run, 1e-9)
        assert [event["step"] for event in read_events(run, "train")] == [*range(1, 21)]  # nothing is written twice
        log = (run / "train.log").read_text()
        assert log.count("finished at step 20") == 1 and f"{count} processes" in log


def test_a_run_goes_on_with_another_number_of_processes(text: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks_ok(1, tmp_path, "train", "name=whole", *text, *EXACT_SETTINGS)
    for count, steps in ((2, 7), (1, 13), (3, 20)):
        settings = (f"train.max_steps={steps}", "resume=auto", "name=parts")
        said = run_ranks_ok(count, tmp_path, "train", *text, *EXACT_SETTINGS, *settings)
        assert "changes its numbers" not in said
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    torch.testing.assert_close(load_last_weights(parts), load_last_weights(whole), rtol=1e-9, atol=1e-9)
    losses = [[event["loss"] for event in read_events(run, "train")] for run in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def opened(text: tuple[str, ...], folder: Path, **train: Any) -> tuple[TrainState, Indices]:
    """A run that begins, in fp64, and the pairs of its first update."""
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
    move_model(model, "fp64", cpu, training=True)
    optimizer = build_optimizer(run.optim, model.parameters())
    state = TrainState(run, folder, cpu, model, encoded.tokenizer, optimizer, encoded, valid, Progress(key))
    return state, epoch_batches(encoded, run.train, run.seed, 0)[0]


def update(text: tuple[str, ...], folder: Path, accumulate: int, short: bool) -> None:
    """One of the processes makes an update, the second one perhaps with too little memory, and keeps the weights."""
    with process_group("cpu"):
        state, indices = opened(text, folder, accumulate=accumulate)
        backward, calls = training_step.backward, []

        def stumbling(run: TrainRun, model: Seq2Seq, batch: Batch, *others: Any) -> Any:
            calls.append(len(batch.source_BS))
            if short and rank() == 1 and len(calls) == accumulate:  # the last part, when others have been made
                raise MemoryError
            return backward(run, model, batch, *others)

        training_step.backward = stumbling
        outcome = train_step(state, indices, 10)
        assert not outcome.failed and sum(calls[-accumulate:]) <= len(indices)
        save_file(dict(state.model.state_dict()), folder / f"weights.{rank()}")


def keep_what_came(text: tuple[str, ...], folder: Path) -> None:
    with process_group("cpu"):
        state, indices = opened(text, folder)
        sums = train_step(state, indices, 10).sums
        assert all(part.untyped_storage().nbytes() <= 8 * len(sums) for part in sums)


def test_what_is_kept_of_an_update_keeps_no_gradient(text: tuple[str, ...], tmp_path: Path) -> None:
    """Which came to all processes in one buffer with it."""
    code, said = run_ranks(2, tmp_path, keep_what_came, text, tmp_path)
    assert code == 0, said


def test_processes_with_different_text_are_refused(text: tuple[str, ...], tmp_path: Path) -> None:
    for number in range(2):
        shutil.copytree(text[1].partition("=")[2], tmp_path / str(number) / "text", ignore=lambda *_: ["cache"])
    path = tmp_path / "1" / "text" / "train.en"
    path.write_text(path.read_text(encoding="utf-8").replace("the", "a"), encoding="utf-8")
    code, said = run_ranks(2, tmp_path, run_apart, tmp_path, "train", "data=text", "data.path=text", *EXACT_SETTINGS)
    assert code == 1 and said.count("error: the processes of this job have different text, or trained different") == 1


def by_hand(state: TrainState, shares: list[Indices]) -> dict[str, torch.Tensor]:
    """The weights after a step down the gradient of the mean loss over the tokens of all shares."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for rows in shares:
        batch = collate(state.train, rows)
        smoothing = state.run.optim.label_smoothing
        total = total + state.model.loss(batch.source_BS, batch.source_length_B, batch.target_BT, smoothing)[0].smoothed
        tokens += int(batch.target_length_B.sum())
    (total / tokens).backward()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter -= state.run.optim.lr * parameter.grad
    return dict(state.model.state_dict())


@pytest.mark.parametrize(("count", "accumulate", "short"), [(2, 1, False), (3, 2, False), (2, 1, True), (2, 2, True)])
def test_an_update_is_the_mean_over_the_tokens_of_all(
    count: int, accumulate: int, short: bool, text: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where one of them has too little memory."""
    code, said = run_ranks(count, tmp_path, update, text, tmp_path, accumulate, short)
    assert code == 0 and said.count("out of memory") == short, said
    state, indices = opened(text, tmp_path)
    wanted = by_hand(state, [part for n in range(count) for part in np.array_split(indices[n::count], accumulate)])
    for number in range(count):
        torch.testing.assert_close(load_file(tmp_path / f"weights.{number}"), wanted, rtol=1e-9, atol=1e-12)


class Mean(nn.Module):
    """What torch's own parallel training needs: a module whose call is a loss."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, tokens: int) -> torch.Tensor:
        loss, _ = self.model.loss(batch.source_BS, batch.source_length_B, batch.target_BT, 0.1)
        return loss.smoothed / tokens


def compare_with_torch(text: tuple[str, ...], folder: Path) -> None:
    with process_group("cpu"):
        state, indices = opened(text, folder)
        tokens, own = int(state.train.lengths(indices)[1].sum()), indices[rank() :: world_size()]
        gradients = all_reduce_sum(
            forward_backward(state, split_share(state, own, choose_micro_batch_size(state, own)), tokens, 10)[0]
        )
        twin = DistributedDataParallel(Mean(state.model))
        (world_size() * twin(collate(state.train, own), tokens)).backward()  # torch takes the mean over processes
        for gradient, parameter in zip(gradients, state.model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-14)
            assert gradient.any()
        # Its reducer must not be the last to hold the group: torch would end the group's thread while it holds the
        # GIL, for which that thread may wait.
        del twin


def test_the_gradient_is_that_of_distributed_data_parallel(text: tuple[str, ...], tmp_path: Path) -> None:
    code, said = run_ranks(2, tmp_path, compare_with_torch, text, tmp_path)
    assert code == 0, said


def test_translations_do_not_depend_on_the_number_of_processes(home: Path, corpus: Path, tmp_path: Path) -> None:
    run = home / "runs" / "mine"
    lines = [*(corpus / "test.de").read_text().splitlines(), "", "Ein Hund . " * 20, "\x00 ?", ""]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    model = (f"checkpoint={run}", "input=in")
    ways: dict[str, tuple[str, ...]] = {
        "text": (),
        "jsonl": ("format=jsonl", "search.n_best=3"),
        "pharaoh": ("alignments=links.pharaoh", "search.max_source=12"),
        "npz": ("alignments=links.npz", "search.beam=1"),
        "samples": ("search.sample=true", "search.n_best=3"),
        "score": ("mode=score", "target=in"),
    }
    for way, arguments in ways.items():
        made = []
        for count in (1, 2):
            folder = tmp_path / str(count)
            folder.mkdir(exist_ok=True)
            shutil.copy(tmp_path / "in", folder / "in")
            run_ranks_ok(count, folder, "translate", *model, f"output={way}", *arguments)
            made.append({path.name: path.read_bytes() for path in folder.glob("*") if path.name not in ("said", "in")})
        assert made[0] == made[1] and len(made[0][way].splitlines()) >= len(lines), way


def test_measures_do_not_depend_on_the_number_of_processes(home: Path, corpus: Path, tmp_path: Path) -> None:
    measured, written = [], []
    for count in (1, 2):
        folder = tmp_path / str(count)
        shutil.copytree(home / "runs" / "mine", folder / "mine", ignore=shutil.ignore_patterns("eval"))
        said = run_ranks_ok(count, folder, "evaluate", "checkpoint=mine", "pictures=0", "data.alignments=links")
        assert said.count("sentences_per_second") == 1
        results = folder / "mine" / "eval" / "test"
        written.append([(results / name).read_bytes() for name in ("translations.txt", "alignments.jsonl")])
        measured.append(json.loads((results / "metrics.json").read_text()))
        measured[-1].pop("sentences_per_second")
    sums = [[each.pop(name) for name in ("loss", "ppl", "entropy")] for each in measured]  # in another order
    assert measured[0] == measured[1] and measured[0]["aer"] is not None
    assert written[0] == written[1]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_alignments_do_not_depend_on_the_number_of_processes(home: Path, corpus: Path, tmp_path: Path) -> None:
    files = (f"checkpoint={home / 'runs' / 'mine'}", f"source={corpus / 'valid.de'}", f"target={corpus / 'valid.en'}")
    for name, gold in (("links.pharaoh", (f"gold={corpus / 'valid.links'}",)), ("weights.jsonl", ())):
        said = [run_ranks_ok(count, tmp_path, "align", *files, *gold, f"output={count}.{name}") for count in (1, 2)]
        assert (tmp_path / f"1.{name}").read_bytes() == (tmp_path / f"2.{name}").read_bytes()
        tables = [re.findall("^(?:aer|oracle|prec|rec).*", each, re.MULTILINE) for each in said]
        assert tables[0] == tables[1] and bool(tables[0]) == bool(gold)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("output=out", "2 processes cannot share standard input; write input=FILE"),
        ("input=nowhere", "input=nowhere is not a file"),
        ("input=in search.max_length=2 prefix=in", "line 1: the prefix has"),
        ("input=in prefix=more", "prefix=more and the input have different numbers of lines: only one"),
    ],
)
def test_translate_says_once_what_is_wrong(argument: str, message: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("Ein Hund schläft .\n")
    (tmp_path / "more").write_text("A dog\n\n")
    model = f"checkpoint={home / 'runs' / 'mine'}"
    assert run_ranks_error(2, tmp_path, "translate", model, *argument.split()).startswith(message)


def run_apart(folder: Path, name: str, *arguments: str) -> None:
    """As on machines that have each a disk of its own."""
    os.chdir(folder / str(LAUNCH_ENV["RANK"]))
    run_program(name, *arguments)


APART = {
    "translate": ("input=test.de", "output=out"),
    "score": ("input=test.de", "target=test.en", "mode=score", "output=out"),
    "evaluate": ("data.path=.", "pictures=0"),
    "align": ("source=test.de", "target=test.en", "output=out"),
}


@pytest.mark.parametrize("differs", ["model", "text", "nothing"])
@pytest.mark.parametrize("way", APART)
def test_processes_with_other_models_or_text_are_refused(
    way: str, differs: str, home: Path, corpus: Path, tmp_path: Path
) -> None:
    for number in range(2):
        shutil.copytree(corpus, tmp_path / str(number), ignore=lambda *_: ["cache"])
        shutil.copytree(home / "runs" / "mine", tmp_path / str(number) / "mine", ignore=lambda *_: ["eval"])
    other = tmp_path / "1" / "test.de"
    if differs == "text":
        more = "zu viel\n" * (way == "translate")
        other.write_text("Noch " + other.read_text(encoding="utf-8") + more, encoding="utf-8")
    elif differs == "model":
        (tmp_path / "1" / "mine" / "checkpoints" / "last").write_text("step_000060\n")
        assert find_checkpoint(str(tmp_path / "1" / "mine"))[1] != find_checkpoint(str(tmp_path / "0" / "mine"))[1]
    name = way if way != "score" else "translate"
    code, said = run_ranks(2, tmp_path, run_apart, tmp_path, name, "checkpoint=mine", "device=cpu", *APART[way])
    assert code == (differs != "nothing"), said
    assert said.count(f"error: the processes of this job have different {differs}") == code, said


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "a key": (("train.max_stepz=1",), "there is no key 'train.max_stepz'"),
    "a value": (("train.max_steps=0",), "train.max_steps=0"),
    "a device": (("device=cpu:1",), "device=cpu:1 is not one of"),
    "a device for one": (("device=cuda:0",), "device=cuda:0 "),
    "a folder": (("data.path=nowhere",), "data.path=nowhere is not a folder"),
    "a tokenizer": (("tokenizer.vocab_size=100000",), "tokenizer.vocab_size=100000"),
    "astray": (("optim.lr=1e38", "optim.clip=null", "train.max_skipped=3"), "training diverged: 3 updates in a row"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_once(name: str, text: tuple[str, ...], tmp_path: Path) -> None:
    arguments, message = MISTAKES[name]
    assert run_ranks_error(
        2, tmp_path, "train", "name=x", *text, *EXACT_SETTINGS, "precision=fp32", *arguments
    ).startswith(message)
    assert (tmp_path / "runs" / "x" / "skipped.jsonl").exists() == (name == "astray")


def test_a_damaged_line_is_told_once(text: tuple[str, ...], tmp_path: Path) -> None:
    path = write_corpus(tmp_path, train=40, valid=4, test=2) / "train.de"
    path.write_bytes(path.read_bytes().replace(b"\n", b" \xff\n", 1))
    message = run_ranks_error(2, tmp_path, "train", "name=x", "data=text", f"data.path={tmp_path}", *EXACT_SETTINGS)
    assert "train.de:1: not UTF-8" in message


def await_step(run: Path, step: int, launcher: "subprocess.Popen[bytes]") -> None:
    """Wait for the checkpoint of a step."""
    last = time.monotonic() + 120
    while not (run / "checkpoints" / f"step_{step:06}").is_dir():
        assert launcher.poll() is None and time.monotonic() < last, (run.parent.parent / "said").read_text()
        time.sleep(0.02)


def worker(launcher: "subprocess.Popen[bytes]", number: int) -> int:
    """The process of this rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (found,) = (
        p for p in children if f"RANK={number}".encode() in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")
    )
    return int(found)


@pytest.fixture(scope="module")
def undisturbed(text: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes come to that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks_ok(2, folder, "train", "name=x", *text, *LONG)
    return folder / "runs" / "x"


def assert_equal(run: Path, undisturbed: Path) -> None:
    torch.testing.assert_close(load_last_weights(run), load_last_weights(undisturbed), rtol=0, atol=0)
    assert read_events(run, "validate") == read_events(undisturbed, "validate")
    assert [event["step"] for event in read_events(run, "train")] == [50, 100]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_death_of_one_ends_all(number: int, undisturbed: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    launcher = launched(tmp_path, "name=x", *text, *LONG)
    await_step(run, 20, launcher)
    os.kill(worker(launcher, number), signal.SIGKILL)
    began = time.monotonic()
    code, said = launcher.wait(60), (tmp_path / "said").read_text()
    assert code != 0 and time.monotonic() - began < 30
    assert "another process of this job has ended" in said and not re.search('File ".*nmt/(?!.*site-packages)', said), (
        said
    )
    run_ranks_ok(2, tmp_path, "train", "name=x", *text, *LONG, "resume=auto")
    assert_equal(run, undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
@pytest.mark.parametrize("number", [0, 1])
def test_torchrun_starts_them_again(number: int, undisturbed: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    launcher = launched(tmp_path, "name=x", *text, *LONG, "overwrite=true", restarts=2)
    await_step(run, 40, launcher)
    os.kill(worker(launcher, number), signal.SIGKILL)
    code = launcher.wait(120)
    assert code == 0, (tmp_path / "said").read_text()
    assert_equal(run, undisturbed)


@pytest.mark.slow
def test_what_was_refused_is_not_resumed_when_torchrun_starts_again(text: tuple[str, ...], tmp_path: Path) -> None:
    """Nor does another job of that name count, which had begun there."""
    for steps, restarts in ((2, 0), (3, 1)):
        launcher = launched(tmp_path, "name=x", *text, *SMALL_SETTINGS, f"train.max_steps={steps}", restarts=restarts)
        assert bool(launcher.wait(120)) == (steps == 3), (tmp_path / "said").read_text()
    assert "already contains a trained model" in (tmp_path / "said").read_text()
    assert find_last_intact_checkpoint(tmp_path / "runs" / "x").name == "step_000002"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_saves(
    number: signal.Signals, undisturbed: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "x"
    launcher = launched(tmp_path, "name=x", *text, *LONG)
    await_step(run, 20, launcher)
    launcher.send_signal(number)
    code, said = launcher.wait(60), (tmp_path / "said").read_text()
    (step,) = map(int, re.findall(r"stopped at step (\d+); the same command with resume=auto continues", said))
    assert code != 0 and step >= 20 and find_last_intact_checkpoint(run).name == f"step_{step:06}"
    run_ranks_ok(2, tmp_path, "train", "name=x", *text, *LONG, "resume=auto")
    assert_equal(run, undisturbed)
