"""Tests of settings that depend on the size of the corpus (`by_pairs`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import ROOT, run_error, run_ok
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from nmt.config import DataConfig, TrainRun
from nmt.config.data import CorpusConfig
from nmt.errors import UserError
from nmt.system.command_line import to_dataclasses
from nmt.training.by_pairs import BY_PAIRS_SECTIONS, apply_by_pairs

TABLE: dict[str, dict[int, Any]] = {
    "tokenizer.vocab_size": {0: 300, 30: 400, 40: 500},
    "model.dropout": {0: 0.5, 31: 0.4},
}


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    for side in ("de", "en"):
        (tmp_path / f"train.{side}").write_text("".join(f"{side} {n}\n" for n in range(30)))
    return DataConfig(format="text", path=str(tmp_path), cache=str(tmp_path / "cache"))


def test_number_of_pairs_selects_values(corpus: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    run = apply_by_pairs(TrainRun(data=corpus, by_pairs=TABLE), ())
    assert (run.tokenizer.vocab_size, run.model.dropout) == (400, 0.5)
    expected = TrainRun(data=corpus)
    expected.tokenizer.vocab_size, expected.model.dropout = 400, 0.5
    assert run == expected
    assert caplog.messages[-3:] == [
        "by_pairs settings for 30 training pairs:",
        "  tokenizer.vocab_size=400 (from 30 to below 40)",
        "  model.dropout=0.5 (below 31)",
    ]


def test_shares_of_changed_pairs_depend_on_size_unless_left_out(corpus: DataConfig) -> None:
    run = TrainRun(data=corpus, by_pairs={"augment.concatenate": {0: 0.1, 30: 0.4}})
    assert apply_by_pairs(run, ()).augment.concatenate == 0.4
    assert apply_by_pairs(run, {"augment.concatenate"}).augment.concatenate == 0
    assert not apply_by_pairs(run, {"augment"}).augment.is_on  # '~augment'


def test_pairs_that_training_uses_are_counted_and_given_settings_kept(corpus: DataConfig, tmp_path: Path) -> None:
    mixture = replace(corpus, corpora=[CorpusConfig(str(tmp_path), weight=0.4)])  # 30 + 12 pairs
    for data, given, expected in (
        (mixture, (), (500, 0.4)),
        (replace(corpus, limit=29), (), (300, 0.5)),
        (corpus, ("model.dropout", "name"), (400, 0.3)),
        (replace(corpus, path="nowhere"), TABLE, (8000, 0.3)),
    ):
        run = apply_by_pairs(TrainRun(data=data, by_pairs=TABLE), given)
        assert (run.tokenizer.vocab_size, run.model.dropout) == expected


@pytest.mark.parametrize(("recipe", "pairs"), [("multi30k_de_en", 29_000), ("tatoeba_de_en", 164_811)])
def test_small_recipe_matches_recipe_of_same_size(recipe: str, pairs: int, tmp_path: Path) -> None:
    for side in ("de", "en"):
        (tmp_path / f"train.{side}").write_text(f"{side}\n" * pairs)
    ConfigStore.instance().store(name="train_schema", node=TrainRun)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        small, expected = (
            to_dataclasses(compose("train", [f"experiment={name}", f"data.path={tmp_path}"]))
            for name in ("small", recipe)
        )
    actual = apply_by_pairs(small, ())
    assert actual.tokenizer.literals  # for `augment.*`, which the other recipes leave out
    actual.tokenizer = replace(actual.tokenizer, split_digits=False, literals=0)
    actual.augment = expected.augment
    for section in BY_PAIRS_SECTIONS:
        assert getattr(actual, section) == getattr(expected, section)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model.dropuot": {0: 0.1}}, "model.dropuot is not a key of tokenizer, .*; did you mean 'model.dropout'"),
        ({"data.limit": {0: 1}}, "data.limit is not a key"),
        ({"model.dropout": {0: 2.0}}, "model.dropout=2.0"),
    ],
)
def test_invalid_table_is_rejected(corpus: DataConfig, table: dict[str, dict[int, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_by_pairs(TrainRun(data=corpus, by_pairs=table), ())


def test_by_pairs_on_command_line(corpus: DataConfig, tmp_path: Path) -> None:
    """The command line overrides by_pairs of a recipe, a resumed run keeps its values, and streams have no size."""
    (tmp_path / "valid.de").write_text("de 1\n")
    (tmp_path / "valid.en").write_text("en 1\n")
    sizes = ("tokenizer.vocab_size=294", "model.embed=8", "model.hidden=16", "device=cpu")
    steps = ("train.max_steps=2", "train.validate_every=1")
    command = ("train", "experiment=small", f"data.path={corpus.path}", *sizes, *steps)
    run_ok(*command, folder=tmp_path)
    log = (tmp_path / "runs" / "small" / "train.log").read_text()
    assert "by_pairs settings for 30 training pairs:\n" in log and "vocab_size" not in log
    dropout = yaml.safe_load((tmp_path / "runs" / "small" / "config.yaml").read_text())["model"]["dropout"]
    assert f"model.dropout={dropout} (below" in log
    run_ok(*command, "resume=true", folder=tmp_path)
    log = (tmp_path / "runs" / "small" / "train.log").read_text()
    assert "resuming" in log and "changed since this run last trained: resume=true (was false)\n" in log
    settings = ("model.dropout=0.1", "train.r_drop=0", "train.max_epochs=1", "model.attention.normalizer=softmax")
    run_ok(*command, "name=explicit", *settings, folder=tmp_path)
    assert "no by_pairs setting applies to 30 training" in (tmp_path / "runs" / "explicit" / "train.log").read_text()
    stream = (*command, "name=stream", "data.streaming=true", "data.buffer=60")
    assert "use '~augment'" in run_error(*stream, folder=tmp_path)
    assert "use '~by_pairs'" in run_error(*stream, "~augment", folder=tmp_path)
    run_ok(*stream, "~by_pairs", "~augment", folder=tmp_path)
