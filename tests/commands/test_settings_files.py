"""Tests of `config=FILE`, whose settings are overridden by those on the command line."""

import json
from pathlib import Path

import pytest
from builders import run_error, run_ok

from nmt.runs.checkpoint import load_config

FILE = """
name: from_file
data: {format: text, path: CORPUS}
tokenizer.vocab_size: 500
model: {embed: 16, hidden: 32}
train: {batch_tokens: 400, max_steps: 2}
optim: {lr: 1e-3}
by_pairs: {model.dropout: {0: 0.25}, model.hidden: {0: 64}}
"""


def test_train_with_config_of_other_run(home: Path, corpus: Path, tmp_path: Path) -> None:
    file = home / "runs" / "mine" / "config.yaml"
    config = f"config={file}"
    run_ok("train", config, "name=again", "seed=3", "train.max_steps=2", "optim.lr=0.002", folder=tmp_path)
    first, again = load_config(file.parent), load_config(tmp_path / "runs" / "again")
    assert (again.name, again.seed, again.train.max_steps, again.optim.lr) == ("again", 3, 2, 0.002)
    assert (again.data, again.model, again.tokenizer) == (first.data, first.model, first.tokenizer)
    changes = ("seed=3", "optim.lr=0.002", "train.max_steps=3")
    run_ok("train", config, "name=again", *changes, "resume=true", folder=tmp_path)
    before = file.read_bytes()
    assert "runs/mine already contains a trained model" in run_error("train", config, "optim.lr=0.002", folder=home)
    assert file.read_bytes() == before
    text = file.read_text().replace("overwrite: false", "overwrite: true")  # must not overwrite again
    (tmp_path / "other.yaml").write_text(text)
    assert "already contains a trained model" in run_error("train", f"config={tmp_path}/other.yaml", folder=home)


def test_train_with_own_config_file(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "my $ettings.yaml").write_text(FILE.replace("CORPUS", json.dumps(str(corpus))))
    settings = ('config="my $ettings.yaml"', "model.hidden=48")
    run_ok("train", *settings, folder=tmp_path)
    run = load_config(tmp_path / "runs" / "from_file")
    assert (run.data.path, run.tokenizer.vocab_size, run.optim.lr) == (str(corpus), 500, 0.001)
    # The command line overrides the file, and both override by_pairs.
    assert (run.model.embed, run.model.hidden, run.model.dropout) == (16, 48, 0.25)
    assert run.optim.schedule == "constant"  # the default for text, not for the built-in corpus
    run_ok("train", "-m", *settings, "seed=1,2", "name=sweep", "train.max_steps=1", folder=tmp_path)
    runs = [load_config(tmp_path / "runs" / "sweep" / f"seed={seed}") for seed in (1, 2)]
    assert [(run.seed, run.model.embed, run.optim.lr) for run in runs] == [(1, 16, 0.001), (2, 16, 0.001)]


def test_translate_with_config_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text("search: {beam: 2, n_best: 2}\ncheckpoint: runs/mine\n")
    config, text = f"config={tmp_path}/search.yaml", b"Die Frau liest .\n"
    assert run_ok("translate", config, folder=home, text=text).count("\n") == 2
    assert run_ok("translate", config, "search.n_best=1", folder=home, text=text).count("\n") == 1
    assert "there is no key 'name'" in run_error("evaluate", "config=runs/mine/config.yaml", folder=home)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("model: {hiden: 3}", (), "config=a.yaml: there is no key 'model.hiden'; did you mean 'model.hidden'?"),
        (
            "model: luong",
            (),
            "config=a.yaml: model: luong is for the command line only; set the keys of model",
        ),
        ("model: {attention: 3}", (), "config=a.yaml: model.attention is a section; write its keys below it"),
        ("seed: x", (), "config=a.yaml: seed: Value 'x' of type 'str' could not be converted to Integer"),
        ("seed: [", (), "config=a.yaml is not YAML: "),
        ("seed: !!python/object/apply:os.getcwd []", (), "config=a.yaml is not YAML: "),
        ("a: &a [x]\nb: *a", (), "config=a.yaml: settings must not have aliases"),
        ("", (), "config=a.yaml has no settings"),
        ("seed: -1", (), "seed=-1 must be at least 0"),
        ("name: a${x}", (), "the name of a run folder cannot contain ${"),
        ("seed: 1", ("model=luong",), "model= and config=a.yaml both set many keys"),
        ("seed: 1", ("experiment=small",), "experiment= and config=a.yaml both set many keys"),
        ("seed: 1", ("config=b.yaml",), "config=b.yaml: config= was already given"),
        ("seed: 1", ("optim.lt=3",), "there is no key 'optim.lt'"),
    ],
)
def test_errors_in_config_file_name_the_file(
    content: str, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(content)
    assert message in run_error("train", "config=a.yaml", *arguments, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("argument", ["config=none.yaml", "config=.", "config=a.yaml,b.yaml", "config=[a]"])
def test_config_must_be_one_existing_file(argument: str, tmp_path: Path) -> None:
    assert argument.partition(",")[0] in run_error("train", argument, folder=tmp_path)


def test_file_name_is_quoted_in_error(tmp_path: Path) -> None:
    message = run_error("train", "config=ünï.yaml", folder=tmp_path)
    assert message.endswith("quote names with special characters: 'config=\"ünï.yaml\"'")
