"""End-to-end tests of the commands, run as processes on real files."""

import gzip
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    CONTEXT,
    ODD_LINES,
    ROOT,
    TINY_SETTINGS,
    TINY_SIZES,
    command_environment,
    read_all_events,
    run_error,
    run_in_folder,
    run_in_new_process,
    run_nmt,
    run_ok,
)

from nmt.runs.folder import lock_run_folder
from nmt.train import train
from nmt.training import loop as training
from nmt.training.state import TrainState

SEARCH = ("search.beam=2", "search.max_length=20")  # a model with so little training often does not end by itself


def read_last_weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step_*")) / "model.safetensors").read_bytes()


def test_run_folder_contents(home: Path) -> None:
    run = home / "runs" / "mine"
    names = {"config.yaml", "tokenizer.model", "train.log", "metrics.jsonl", "samples.jsonl", "checkpoints"}
    assert names <= {path.name for path in run.iterdir()}
    events = read_all_events(run)
    assert {event["event"] for event in events} == {"train", "validate"}
    validations = [event for event in events if event["event"] == "validate"]
    assert [event["epoch"] for event in validations] == [0, 1]
    assert validations[1]["loss"] < validations[0]["loss"]
    assert {"loss", "ppl", "accuracy", "bleu"} <= validations[0].keys()
    assert all(event["aer"] is None and event["entropy"] > 0 for event in validations)  # there are no gold links
    step = run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()
    names = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert {path.name for path in step.iterdir()} == names


def test_evaluate_writes_metrics_translations_alignments_and_report(home: Path) -> None:
    done = run_in_new_process("evaluate", "checkpoint=runs/mine", *SEARCH, folder=home)
    assert done.returncode == 0, done.stderr.decode()
    printed = done.stdout.decode()
    results = home / "runs" / "mine" / "eval" / "test"
    metrics = json.loads((results / "metrics.json").read_text())
    assert {"bleu", "chrf", "ter", "exact_match", "loss", "ppl", "sentences_per_second", "signatures"} <= metrics.keys()
    assert metrics["aer"] is None and f"{metrics['entropy']:.4f}" in printed
    assert "tok:13a" in metrics["signatures"]["bleu"] and f"{metrics['bleu']:.2f}" in printed
    translations = (results / "translations.txt").read_text(encoding="utf-8").split("\n")[:-1]
    records = [json.loads(line) for line in (results / "alignments.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(translations) == len(records) == 30
    for record in records:
        assert len(record["weights"]) == len(record["target_pieces"])
        assert all(len(row) == len(record["source_pieces"]) for row in record["weights"])
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in record["weights"])
        assert record["source_pieces"][-1] == "</s>"
    page = results / "report.html"
    assert str(page.relative_to(home)) in printed and f"{metrics['bleu']:.2f}" in page.read_text(encoding="utf-8")
    pictures = sorted(results.glob("*.png"))
    assert [path.name for path in pictures] == [f"alignment_{row}.png" for row in range(1, 5)]
    assert pictures[0].read_bytes().startswith(b"\x89PNG") and pictures[0].name in printed


def test_evaluate_erases_words(home: Path) -> None:
    arguments = ("checkpoint=runs/mine", *SEARCH, "data.split=valid")
    assert "erasure" not in run_ok("evaluate", *arguments, folder=home)
    printed = run_ok("evaluate", *arguments, "erase=true", folder=home)
    results = home / "runs" / "mine" / "eval" / "valid"
    metrics = json.loads((results / "metrics.json").read_text())
    assert metrics["erasure_aer"] is None and f"erasure_tau           {metrics['erasure_tau']:.4f}" in printed
    assert "Log-probability lost without the source word</option>" in (results / "report.html").read_text()


def test_translate_writes_one_line_per_input_line(home: Path) -> None:
    text = "\n".join(ODD_LINES).encode() + b"\ninvalid \xff\xfe bytes\nno newline at the end"
    lines = text.count(b"\n") + 1
    piped = run_in_new_process("translate", "checkpoint=runs/mine", *SEARCH, folder=home, text=text)
    assert piped.returncode == 0 and b"U+FFFD" in piped.stderr and b"max_source" in piped.stderr, piped.stderr
    translations = piped.stdout.decode().split("\n")
    assert len(translations) == lines + 1 and translations[-1] == ""
    assert translations[1] == translations[2] == "" and not re.search("[\r\u2028]", translations[0])
    (home / "in.txt").write_bytes(text)
    run_ok("translate", "checkpoint=runs/mine", *SEARCH, "input=in.txt", "output=out.txt", folder=home)
    assert (home / "out.txt").read_bytes() == piped.stdout
    (home / "in.txt.gz").write_bytes(gzip.compress(text))
    compressed = ("input=in.txt.gz", "output=out.txt.gz", "alignments=out.jsonl.gz")
    run_ok("translate", "checkpoint=runs/mine", *SEARCH, *compressed, folder=home)
    assert gzip.decompress((home / "out.txt.gz").read_bytes()) == piped.stdout
    # The output is one gzip stream, not one per line.
    assert (home / "out.txt.gz").stat().st_size < 1.2 * len(gzip.compress(piped.stdout))
    records = gzip.decompress((home / "out.jsonl.gz").read_bytes()).splitlines()
    assert len(records) == lines and all(json.loads(record)["target_pieces"] for record in records[-1:])
    (home / "in.txt.gz").write_bytes(gzip.compress(text)[:-20])
    assert "in.txt.gz" in run_error("translate", "checkpoint=runs/mine", "input=in.txt.gz", folder=home)
    assert run_ok("translate", "checkpoint=runs/mine", folder=home, text=b"") == ""


def test_translate_output_formats_and_alignment_files(home: Path) -> None:
    text = "\n".join([*ODD_LINES[:4], "Die Frau liest ein Buch ."]).encode() + b"\n"
    options = ("checkpoint=runs/mine", "search.beam=3", "search.n_best=3")
    texts = run_ok("translate", *options, "alignments=links.txt", folder=home, text=text).split("\n")
    links = (home / "links.txt").read_text().split("\n")
    assert len(texts) == len(links) == 5 * 3 + 1
    assert all(re.fullmatch(r"(\d+-\d+( \d+-\d+)*)?", line) for line in links)
    run_ok("translate", *options, "alignments=all.jsonl", folder=home, text=text)
    records = [json.loads(line) for line in (home / "all.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(records) == 15 and records[4]["score"] is None  # the second translation of an empty line
    assert np.shape(records[12]["weights"]) == (len(records[12]["target_pieces"]), len(records[12]["source_pieces"]))
    jsonl = run_ok("translate", *options, "format=jsonl", folder=home, text=text)
    rows = [json.loads(line) for line in jsonl.splitlines()]
    assert [row["translations"][0]["text"] for row in rows] == texts[:-1:3]
    for row in rows:
        scores = [translation["ranking_score"] for translation in row["translations"]]
        assert scores == sorted(scores, reverse=True)
    best = rows[4]["translations"]
    assert best[0]["source_words"] == ["Die", "Frau", "liest", "ein", "Buch", "."]
    (home / "s.txt").write_text("Die Frau liest ein Buch .\n" * 3, encoding="utf-8")
    (home / "t.txt").write_text("".join(translation["text"] + "\n" for translation in best), encoding="utf-8")
    files = ("input=s.txt", "target=t.txt")
    scores = run_ok("translate", "checkpoint=runs/mine", *files, "precision=fp32", folder=home).split()
    assert len(scores) == 3 and all(float(score) < 0 for score in scores)


def test_search_options(home: Path, tmp_path: Path) -> None:
    text = b"Die Frau liest ein Buch .\nDer Hund schl\xc3\xa4ft .\n"

    def translate(*settings: object, beam: tuple[str, ...] = ("search.beam=4",)) -> list[str]:
        base = ("checkpoint=runs/mine", "precision=fp32", *beam)
        return run_ok("translate", *base, *settings, folder=home, text=text).split("\n")[:-1]

    (tmp_path / "prefix").write_text("The cat\n\n", encoding="utf-8")
    with_prefix, plain = translate(f"prefix={tmp_path / 'prefix'}"), translate()
    assert with_prefix[0].startswith("The cat") and with_prefix[1] == plain[1]
    assert translate("checkpoint=[runs/mine,runs/mine]") == plain
    sampling = ("search.sample=true", "search.n_best=4", "search.temperature=2")
    first, same_seed, other_seed = (translate(*sampling, f"search.seed={seed}", beam=()) for seed in (1, 1, 2))
    assert len(first) == 8 and first == same_seed != other_seed
    n_best = translate("search.n_best=4")
    assert len(n_best) == 8
    for translations in (n_best[:4], n_best[4:]):
        nonempty = [line for line in translations if line]
        assert len(set(nonempty)) == len(nonempty)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("checkpoint=runs/blind", "alignments=none.jsonl"), "alignments=none.jsonl needs a model with attention"),
        (("checkpoint=runs/blind", "format=links"), "format=links needs a model with attention"),
        (("prefix=short",), "prefix=short and the input have different numbers of lines: only one"),
        (("prefix=nothing",), "prefix=nothing is not a file"),
        (("checkpoint=[]",), "checkpoint is not set"),
        (("checkpoint=[runs/mine,runs/none]",), "runs/none is not a folder"),
        (("checkpoint=[runs/mine,runs/words]",), "runs/mine and runs/words have different vocabularies"),
        (("checkpoint=runs/blind", "search.coverage_penalty=1"), "search.coverage_penalty=1.0 needs a model with"),
    ],
)
def test_translate_rejects_invalid_options(home: Path, corpus: Path, settings: tuple[str, ...], message: str) -> None:
    common = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_steps=1", "resume=auto")
    if "runs/words" in settings[0]:
        run_ok("train", "name=words", *common, "tokenizer.vocab_size=480", folder=home)
    if "runs/blind" in settings[0]:
        run_ok("train", "name=blind", *common, "model.attention.score=none", folder=home)
    (home / "short").write_text("A\n", encoding="utf-8")
    arguments = settings if settings[0].startswith("checkpoint") else ("checkpoint=runs/mine", *settings)
    assert message in run_error("translate", *arguments, folder=home, text=b"x\ny\n")


def test_translate_interactively_in_terminal(home: Path) -> None:
    line = "Die Frau liest ein Buch ."
    settings = ("checkpoint=runs/mine", "precision=fp32", "format=links")
    piped = run_ok("translate", *settings, folder=home, text=f"{line}\n".encode()).split("\n")
    assert re.fullmatch(r"    \S+=\S+(  \S+=\S+)*", piped[1])
    terminal, child_end = pty.openpty()
    name = Path(os.ttyname(child_end))
    streams = [name, name, home / "err"]
    child = CONTEXT.Process(
        target=run_in_folder, args=(home, command_environment(home), streams, "translate", *settings)
    )
    child.start()
    os.write(terminal, f"{line}\n".encode())
    output = b""
    while "\n".join(piped).encode() not in output.replace(b"\r", b""):  # before the end of the input
        assert select.select([terminal], [], [], 60)[0], output
        output += os.read(terminal, 1000)
    os.write(terminal, b"\x04")
    child.join(60)
    assert child.exitcode == 0 and "reading from the terminal" in (home / "err").read_text()
    os.close(child_end)
    os.close(terminal)


@pytest.mark.parametrize("model", sorted(path.stem for path in (ROOT / "configs" / "model").iterdir()))
def test_model_preset_trains_and_evaluates(model: str, small_corpus: Path, tmp_path: Path) -> None:
    sizes = (*TINY_SIZES, "model.encoder_hidden=null", "train.max_steps=20", "train.validate_every=20")
    run_ok("train", f"model={model}", "name=mine", "data=text", f"data.path={small_corpus}", *sizes, folder=tmp_path)
    run = tmp_path / "runs" / "mine"
    first, *_, last = (event["loss"] for event in read_all_events(run) if event["event"] == "train")
    assert last < first - 0.5
    run_ok("evaluate", "checkpoint=runs/mine", *SEARCH, folder=tmp_path)
    results = run / "eval" / "test"
    assert len((results / "alignments.jsonl").read_text(encoding="utf-8").splitlines()) == 6
    assert ('<select id="shown"' in (results / "report.html").read_text()) == (model == "transformer")


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_import_sets_gomp_spincount_unless_user_did(given: dict[str, str]) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    others = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", f"import os, nmt; print([os.environ.get(name) for name in {names}])"]
    printed = subprocess.check_output(command, env=others | given, text=True)
    assert printed == f"{[given.get(name) for name in names] if given else ['2000', None]}\n"


def test_training_is_deterministic_and_resume_is_exact(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    common = ("data=text", f"data.path={small_corpus}", *TINY_SETTINGS, "tokenizer.sampling=0.1", "train.accumulate=2")

    def train_until(steps: int, name: str, resume: str, run: Callable[..., Any] = run_in_new_process) -> str:
        """Train in a new Python process and return standard error."""
        settings = (f"name={name}", *common, "train.log_every=2", f"train.max_steps={steps}", f"resume={resume}")
        done = run("train", *settings, folder=tmp_path)
        assert done.returncode == 0, done.stderr.decode()
        return done.stderr.decode()

    def read_events_without_speeds(run: Path) -> list[dict[str, float]]:
        return [{key: event[key] for key in event if not key.endswith("per_second")} for event in read_all_events(run)]

    assert ", 2 threads" in train_until(5, "whole", "false")
    train_until(3, "stopped", "false")
    train_until(5, "stopped", "true")
    whole, stopped = (tmp_path / "runs" / name for name in ("whole", "stopped"))
    assert read_last_weights(whole) == read_last_weights(stopped)
    events = [read_events_without_speeds(run) for run in (whole, stopped)]
    assert events[0][0] == events[1][0] and events[0][-1] == events[1][-1]
    assert "max_steps: 5\n" in (stopped / "config.yaml").read_text()
    assert "is already finished" in train_until(5, "whole", "auto", run=run_nmt)


def test_train_rejects_existing_run_folder(home: Path, corpus: Path) -> None:
    before = read_last_weights(home / "runs" / "mine")
    settings = ("name=mine", "data=text", f"data.path={corpus}", *TINY_SETTINGS)
    message = run_error("train", *settings, folder=home)
    assert "resume=true" in message and "delete the folder" in message
    assert "model.hidden=64 (was 32)" in run_error("train", *settings, "resume=true", "model.hidden=64", folder=home)
    assert read_last_weights(home / "runs" / "mine") == before
    assert "resume=auto" in run_error("train", "name=none", "resume=true", folder=home)


def test_run_folder_is_locked_during_training(home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("name=locked", "data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_steps=1", "resume=auto")
    errors: list[str] = []
    monkeypatch.chdir(home)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # train() sets it; monkeypatch restores it afterwards
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setattr("nmt.train.fit", lambda _: errors.append(run_error("train", *settings, folder=home)))
    monkeypatch.setattr(sys, "argv", ["train", *settings])
    train()
    assert errors == ["error: another process is training in runs/locked; wait for it, or use name=ANOTHER"]
    with lock_run_folder(home / "runs" / "locked"):
        pass


def test_init_from_starts_with_parent_weights_and_tokenizer(home: Path, corpus: Path) -> None:
    settings = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_steps=1", "optim.lr=1e-9", "name=child")
    run_ok("train", *settings, "model.hidden=64", "model.kernels=reference", "init_from=runs/mine", folder=home)
    parent, child = home / "runs" / "mine", home / "runs" / "child"
    best_step = int((parent / "checkpoints" / "best").read_text().strip().removeprefix("step_"))
    validations = {event["step"]: event for event in read_all_events(parent) if event["event"] == "validate"}
    assert "model.hidden=32 (not 64)" in (child / "train.log").read_text()
    assert "kernels: reference" in (child / "config.yaml").read_text()
    assert read_all_events(child)[-1]["loss"] == pytest.approx(validations[best_step]["loss"], rel=0.01)
    assert (parent / "tokenizer.model").read_bytes() == (child / "tokenizer.model").read_bytes()


def test_init_from_opposite_direction_needs_joint_vocabulary(home: Path, small_corpus: Path) -> None:
    common = ("data=text", f"data.path={small_corpus}", *TINY_SETTINGS, "train.max_steps=1")
    reverse = ("data.source=en", "data.target=de", *common)
    run_ok("train", *common, "name=two", "tokenizer.joint=false", folder=home)
    message = run_error("train", *reverse, "name=two_back", "init_from=runs/two", folder=home)
    assert message.startswith(
        "error: data.source=en: init_from=runs/two translates de to en with separate vocabularies"
    )
    assert "start from a run of the same direction or with tokenizer.joint=true" in message
    assert not (home / "runs" / "two_back").exists()
    run_ok("train", *common, "name=two_child", "init_from=runs/two", "train.max_steps=2", folder=home)
    resumed = ("name=two_child", "init_from=runs/two", "train.max_steps=3", "resume=true", "model.kernels=reference")
    run_ok("train", *common, *resumed, folder=home)
    run_ok("train", *reverse, "name=mine_back", "init_from=runs/mine", folder=home)


def test_train_rejects_bad_corpus_without_creating_run(corpus: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(corpus, tmp_path / "bad", ignore=shutil.ignore_patterns("cache"))
    settings = ("name=bad", "data=text", f"data.path={bad}", *TINY_SETTINGS, "train.max_steps=2")
    message = run_error("train", *settings, "tokenizer.vocab_size=8000", folder=tmp_path)
    assert re.search(r"tokenizer.vocab_size=8000 .* use tokenizer.vocab_size=\d+ or less", message)
    (bad / "train.de").write_bytes(b"ein\nzwei\n\xff\xfe\n" + (bad / "train.de").read_bytes().split(b"\n", 3)[3])
    assert "train.de:3" in run_error("train", *settings, folder=tmp_path)
    (bad / "valid.en").unlink()
    assert "valid.en" in run_error("train", *settings, folder=tmp_path)
    assert "device=cuda:9 does not exist" in run_error("train", *settings, "device=cuda:9", folder=tmp_path)
    assert not (tmp_path / "runs").exists()


def test_commands_reject_missing_checkpoint(home: Path, tmp_path: Path) -> None:
    assert "nowhere is not a folder" in run_error("evaluate", "checkpoint=nowhere", folder=home)
    assert "has no checkpoint" in run_error("translate", f"checkpoint={tmp_path}", folder=home, text=b"x\n")
    assert "checkpoint=runs/NAME" in run_error("translate", folder=home, text=b"x\n")
    assert "missing.txt" in run_error("translate", "checkpoint=runs/mine", "input=missing.txt", folder=home)


def train_and_send(number: signal.Signals, *arguments: Any) -> None:
    """Train, with a signal to this process in its sixth update.

    SIGINT gets its default action, since it is ignored where the tests run in the background of a script.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train_step = training.train_step

    def step_with_signal(state: TrainState, *others: Any) -> Any:
        if state.progress.step == 5:
            os.kill(os.getpid(), number)
        return train_step(state, *others)

    training.train_step = step_with_signal  # type: ignore[assignment]
    run_in_folder(*arguments)


@pytest.fixture(scope="module")
def signal_command(small_corpus: Path) -> tuple[str, ...]:
    return ("name=mine", "data=text", f"data.path={small_corpus}", *TINY_SETTINGS, "train.max_steps=15")


@pytest.fixture(scope="module")
def uninterrupted(signal_command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ok("train", *signal_command, folder=folder)
    return folder / "runs" / "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_training_and_resume_is_exact(
    number: signal.Signals, signal_command: tuple[str, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    streams = [Path(os.devnull), Path(os.devnull), tmp_path / "err"]
    arguments = (number, tmp_path, command_environment(tmp_path), streams, "train", *signal_command)
    process = CONTEXT.Process(target=train_and_send, args=arguments)
    process.start()
    process.join(120)
    message = (tmp_path / "err").read_text(encoding="utf-8")
    assert process.exitcode == 128 + number and "with resume=auto to continue" in message and "Traceback" not in message
    assert not [event for event in read_all_events(tmp_path / "runs" / "mine") if event["event"] == "validate"]
    run_ok("train", *signal_command, "resume=auto", folder=tmp_path)
    assert read_last_weights(tmp_path / "runs" / "mine") == read_last_weights(uninterrupted)
    assert read_all_events(tmp_path / "runs" / "mine")[-1] == read_all_events(uninterrupted)[-1]


def test_evaluate_compares_two_runs(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "mine", tmp_path / "seed=2")
    runs = f'compare=["runs/mine","{tmp_path / "seed=2"}"]'
    printed = run_ok("evaluate", runs, "data.split=valid", "search.beam=1", folder=home)
    folder = home / "runs" / "mine" / "eval" / "valid"
    comparison = json.loads((folder / "comparison.json").read_text())
    metrics = json.loads((folder / "metrics.json").read_text())
    bleu = metrics["bleu"]
    validations = [event for event in read_all_events(home / "runs" / "mine") if event["event"] == "validate"]
    assert bleu == max(event["bleu"] for event in validations)
    first, second = comparison["scores"].values()
    assert first["bleu"]["score"] == second["bleu"]["score"] == pytest.approx(bleu)
    assert first["bleu"]["p_value"] is None and second["bleu"]["p_value"] == 1
    assert f"{bleu:.2f}" in printed and "(p = 1.000)" in printed and "bs:1000" in printed
    assert sum(sentences for _, sentences, _ in comparison["by_length"]["runs/mine"]) == metrics["sentences"]
    assert "comparison.json" in printed
    for arguments, message in {
        "compare=[runs/mine,runs/mine/]": "list each run once",
        "compare=[runs/a=1,runs/b=2]": """quote the list, and items with special characters: 'compare=["A","B"]'""",
        "compare=runs/mine,runs/other": "use key=[value1,value2]",
        "compare=[runs/mine,[a]]": "compare= takes two or more different runs",
        "compare=[runs/mine]": "compare= takes two or more different runs",
    }.items():
        assert message in run_error("evaluate", *arguments.split(), folder=home)


def test_evaluate_compares_systems_over_seeds(home: Path, tmp_path: Path) -> None:
    for name in ("a/seed=1", "a/seed=2", "b/seed=3"):
        shutil.copytree(home / "runs" / "mine", tmp_path / name)
    (tmp_path / "a" / "multirun.yaml").touch()
    arguments = ("search.beam=1", "search.max_length=8", "device=cpu")
    output = run_ok("evaluate", "compare=[a/*,b/*]", *arguments, folder=tmp_path)
    assert "b/* - a/*" in output and "seeds needed" in output and "mean ± standard deviation over runs" in output
    result = json.loads((tmp_path / "a" / "seed=1" / "eval" / "test" / "comparison.json").read_text())
    assert len(result["scores"]["a/*"]["bleu"]["scores"]) == 2 and result["scores"]["b/*"]["bleu"]["p_value"] == 1.0
    assert "compare=: c/* matches no run folder" in run_error("evaluate", "compare=[a/*,c/*]", folder=tmp_path)


def test_compare_rejects_different_test_text(home: Path, corpus: Path, tmp_path: Path) -> None:
    for name in ("here", "there"):
        shutil.copytree(home / "runs" / "mine", tmp_path / name, ignore=shutil.ignore_patterns("eval"))
    config = tmp_path / "there" / "config.yaml"
    config.write_text(config.read_text().replace(str(corpus), str(tmp_path / "elsewhere")))
    shutil.copytree(corpus, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("cache"))
    words = (tmp_path / "elsewhere" / "test.de").read_text().replace("n", "m")
    (tmp_path / "elsewhere" / "test.de").write_text(words)
    message = run_error("evaluate", "compare=[here,there]", folder=tmp_path)
    assert "there and here have different text" in message
    assert not (tmp_path / "here" / "eval").exists()


def test_help_describes_keys(tmp_path: Path) -> None:
    page = run_ok("train", "--help", folder=tmp_path)
    assert re.search(r"^  cell: lstm +# lstm \| gru$", page, re.MULTILINE)
    assert re.search("^experiment: .*multi30k_de_en", page, re.MULTILINE)
    assert "data_model" not in page  # chosen by data= and model=
    assert "there is no key 'data_model'" in run_error("train", "data_model=toy_rnn", folder=tmp_path)
    assert "# run folder (best checkpoint" in run_ok("evaluate", "--help", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_file_errors_are_reported_without_traceback(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    arguments = (f"checkpoint={home / 'runs' / 'mine'}", f"output={tmp_path}/file/out.txt")
    assert "Not a directory" in run_error("translate", *arguments, folder=home, text=b"x\n")
    message = run_error("train", "name=x", f"hydra.run.dir={tmp_path}/file/x", "train.max_steps=1", folder=tmp_path)
    assert "file" in message
