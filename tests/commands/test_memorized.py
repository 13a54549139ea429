"""Sentences of the validation and test splits that are also in the training text."""

import json
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, run_nmt, run_ok, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose test split has five training pairs, five with another first word, and two with a number."""
    folder = tmp_path_factory.mktemp("memorized")
    (folder / "corpus").mkdir()
    corpus = write_corpus(folder / "corpus", train=120, valid=12, test=12)
    for language in ("de", "en"):
        train = (corpus / f"train.{language}").read_text("utf-8").splitlines()
        test = (corpus / f"test.{language}").read_text("utf-8").splitlines()
        changed = [" ".join(["Unerhört", *line.split()[1:]]) for line in train[5:10]]
        lines = train[:5] + changed + [f"{line} 4711" for line in test[10:]]
        (corpus / f"test.{language}").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    settings = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_steps=2", "train.max_epochs=null")
    result = run_nmt("train", "name=mine", *settings, folder=folder)
    assert result.returncode == 0, result.stderr.decode()
    (folder / "train.log").write_bytes(result.stderr)
    return folder


def test_train_warns(folder: Path) -> None:
    [line] = [line for line in (folder / "train.log").read_text("utf-8").splitlines() if "measure memorization" in line]
    assert line.startswith("5 of 12 pairs of the split test have a source or target that is also in the training text")


def test_evaluate_scores_them_separately(folder: Path) -> None:
    text = run_ok("evaluate", "checkpoint=runs/mine", "search.beam=1", "search.max_length=5", folder=folder)
    results = folder / "runs" / "mine" / "eval" / "test"
    by_overlap = json.loads((results / "metrics.json").read_text("utf-8"))["by_overlap"]
    assert {name: scores["sentences"] for name, scores in by_overlap.items()} == {"seen": 5, "near": 5, "unseen": 2}
    assert "in training text" in text and "5 sentences" in text and "2 sentences" in text


def test_evaluate_without_training_text(folder: Path) -> None:
    train = folder / "corpus" / "train.de"
    train.rename(folder / "train.de")
    try:
        arguments = ("checkpoint=runs/mine", "data.split=valid", "search.beam=1", "search.max_length=5")
        result = run_nmt("evaluate", *arguments, folder=folder)
    finally:
        (folder / "train.de").rename(train)
    assert result.returncode == 0
    assert b"scores of sentences seen in the training text are left out: " in result.stderr
    assert "by_overlap" not in json.loads((folder / "runs/mine/eval/valid/metrics.json").read_text("utf-8"))
