"""Settings, command-line arguments, and errors about invalid ones."""

import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from nmt.config import (
    AlignRun,
    AttentionConfig,
    DataConfig,
    DataOverride,
    EvaluateRun,
    ExportRun,
    LinksConfig,
    ModelConfig,
    OptimConfig,
    SearchConfig,
    SelfAttentionConfig,
    TokenizerConfig,
    TrainConfig,
    TrainRun,
    TranslateRun,
)
from nmt.config.data import is_opposite_direction
from nmt.errors import UserError
from nmt.system.cli import main

Result = tuple[int, str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a program with the settings of `nmt.train` in an empty folder; return exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the program sets it; monkeypatch restores it

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        try:
            main("train")(lambda run: None)()
        except SystemExit as error:
            assert isinstance(error.code, int)
            return error.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model.hiden=5", "there is no key 'model.hiden'; did you mean 'model.hidden'?"),
        ("lr=0.1", "there is no key 'lr'; did you mean 'optim.lr'?"),
        ("--hidden-size=64", "there is no option --hidden-size; use key=value; did you mean 'model.hidden'?"),
        ("learning-rate=1", "there is no key 'learning-rate'; did you mean 'optim.lr'?"),
        ("optim.early_stopping=x", "there is no key 'optim.early_stopping'; did you mean 'train.patience'?"),
        ("name=a,b", "Ambiguous value for argument 'name=a,b'; "),
        ("data.path=/it's,here", """quote values with special characters: 'data.path="/it'"'"'s,here"'"""),
        ("data.corpora=nums", "data.corpora=nums: Invalid value assigned: str is not a ListConfig, list or tuple"),
        ("data.corpora=[{path:x,wieght:2}]", "Key 'wieght' not in 'CorpusConfig'"),
        ("+model.hidden=5", "An item is already at 'model.hidden'; Either remove + prefix: 'model.hidden=5'"),
        ("--name=x", "--name=x: settings are written without dashes: name=x"),
        ("-x", "there is no option -x; use key=value"),
        ("model.hidden", "model.hidden cannot be read; use key=value"),
        ("model.hidden=[1", "model.hidden=[1 cannot be read; quote the list, and items with special characters"),
        ("data.path=~/text", "data.path=~/text cannot be read; the shell did not expand ~; use data.path=$HOME/text"),
        ("name=a=b", """name=a=b cannot be read; quote values with special characters: 'name="a=b"'"""),
        ("model.hidden=big", "model.hidden=big: Value 'big' of type 'str' could not be converted to Integer"),
        ("new_tokenizer=maybe", "new_tokenizer=maybe: Value 'maybe' is not a valid bool (type str)"),
        ("seed=null", "seed=null: field 'seed' is not Optional"),
        ("model.hidden=${nothing}", "model.hidden: Interpolation key 'nothing' not found"),
        ("model.attention=dot", "model.attention=dot: model.attention is a section; set its keys"),
        ("data=txt", "data=txt is not one of back_translation, .* tsv; did you mean 'text'?"),
        ("init_from=", "init_from=: the value is missing; set init_from=VALUE or remove init_from"),
        ("hydra.nothing=1", "hydra.nothing"),
    ],
)
def test_invalid_arguments_give_one_line_error(train: Callable[..., Result], argument: str, expected: str) -> None:
    code, message = train(argument)
    assert code == 1
    assert message.startswith("error: ") and message.count("\n") == 1
    assert all(part in message for part in expected.split(".*"))
    assert not list(Path.cwd().iterdir())


def test_suggested_quoting_works(train: Callable[..., Result]) -> None:
    """Split the suggestion as a shell does."""
    value = 'it\'s "a",b'
    message = train(f"name={value}")[1]
    match = re.search(r"""'name=.*"'""", message)
    assert match, message
    [argument] = shlex.split(match[0])
    assert OverridesParser.create().parse_override(argument).value() == value
    assert train(argument) == (0, "")


@pytest.mark.parametrize(
    "argument", ["seed=7", "name=a b", 'name="1.10"', "optim.lr=1e-2", "data.cache=/x:y/z", "optim.clip=null", "-m"]
)
def test_valid_arguments_are_accepted(train: Callable[..., Result], argument: str) -> None:
    assert train(argument) == (0, "")


@pytest.mark.parametrize("name", ["2024_11_24", "1.10", "007", "1e5", "-.50"])
def test_name_that_looks_like_a_number_stays_text(train: Callable[..., Result], name: str) -> None:
    assert train(f"name={name}") == (0, "") and [path.name for path in Path("runs").iterdir()] == [name]


def test_options_may_come_between_settings(train: Callable[..., Result]) -> None:
    assert train("model.hidden=32", "-m", "seed=1,2") == (0, "")


def test_recipe_of_the_user_is_found(train: Callable[..., Result]) -> None:
    Path("recipes/experiment").mkdir(parents=True)
    Path("recipes/experiment/mine.yaml").write_text("# @package _global_\nmodel: {hidden: 31}\n")
    assert "model.hidden=31 must be even" in train("--config-dir", "recipes", "experiment=mine")[1]


def test_files_of_failed_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "name=mine"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    @main("train")
    def program(run: TrainRun) -> float | None:
        Path("runs/mine/train.log").touch()
        raise UserError("the disk is full")

    with pytest.raises(SystemExit):
        program()
    assert Path("runs/mine/train.log").exists()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainRun(name=".."), "name='..' is not a valid folder name"),
        (lambda: TrainRun(device="gpu"), "device=gpu is not one of auto, cpu, cuda, cuda:N, mps"),
        (lambda: TrainRun(precision="fp23"), "precision=fp23 is not one of .*did you mean 'fp32'"),
        (
            lambda: TrainRun(tokenizer=TokenizerConfig(joint=False), model=ModelConfig(tie="three")),
            "model.tie=three needs one vocabulary; use model.tie=two or tokenizer.joint=true",
        ),
        (lambda: DataConfig(format="text"), "data.path is not set"),
        (lambda: DataConfig(source="en"), "data.source and data.target are both 'en'"),
        (lambda: DataConfig(source="fr"), "the built-in corpus has de and en"),
        (lambda: DataConfig(split="../test"), "data.split=../test is a path"),
        (lambda: SearchConfig(max_length=10**19), "search.max_length=1.* must be at least 1 and below 2"),
        (lambda: SearchConfig(beam=2, n_best=3), "search.n_best=3 must not exceed search.beam=2"),
        (lambda: TokenizerConfig(type="bpee"), "tokenizer.type=bpee is not one of .*did you mean 'bpe'"),
        (lambda: TokenizerConfig(sampling=1.0), "tokenizer.sampling=1.0 must be at least 0 and below 1"),
        (lambda: TokenizerConfig(type="char", split_digits=True), "tokenizer.split_digits needs tokenizer.type=bpe"),
        (lambda: ModelConfig(hidden=31), "model.hidden=31 must be even"),
        (lambda: ModelConfig(dropout=float("nan")), "model.dropout=nan"),
        (lambda: ModelConfig(bridge="last", encoder_hidden=8), "model.bridge=last: 16, .* or use model.bridge=learned"),
        (lambda: ModelConfig(encoder_hidden=8, attention=AttentionConfig(score="dot")), "=dot: 16, .*score=general"),
        (lambda: ModelConfig(attention=AttentionConfig(heads=3)), "model.attention.heads=3 must evenly divide 512; ch"),
        (lambda: ModelConfig(hidden=6, encoder_hidden=4, attention=AttentionConfig(heads=4)), "divide 6, which is"),
        (lambda: ModelConfig(encoder="transformer", encoder_hidden=6), "model.self_attention.heads=4 must evenly div"),
        (lambda: SelfAttentionConfig(coverage=True), "remove coverage, layer and head, .* keys of model.attention"),
        (lambda: SelfAttentionConfig(score="none"), "model.self_attention.score=none: a Transformer layer needs"),
        (lambda: SelfAttentionConfig(window="far"), "model.self_attention.window=far is not one of"),
        (lambda: ModelConfig(attention=AttentionConfig(head=1)), "attention.head=1 must be below .*heads=1"),
        (lambda: ModelConfig(attention=AttentionConfig(layer=0)), "layer=0 must be below .* model.style=transformer"),
        (lambda: ModelConfig(style="transformer", attention=AttentionConfig(score="none")), "would not see the source"),
        (lambda: ModelConfig(bridge="zero", attention=AttentionConfig(score="none")), "would not see the source"),
        (lambda: ModelConfig(style="gnmt"), "model.style=gnmt needs model.decoder_layers=2 or more"),
        (lambda: ModelConfig(style="luong", readout="maxout"), "model.readout=maxout needs model.style=bahdanau"),
        (lambda: TrainRun(train=TrainConfig(coverage_loss=1.0)), "model.attention.coverage=true as well"),
        (lambda: OptimConfig(lr=0), "optim.lr=0 must be greater than 0"),
        (lambda: OptimConfig(lr=float("inf")), "optim.lr=inf"),
        (lambda: OptimConfig(schedule="inverse_sqrt"), "needs optim.warmup"),
        (lambda: TrainConfig(max_epochs=None), "training never ends"),
        (lambda: EvaluateRun(checkpoint="x", bleu_tokenizer="flores"), "bleu_tokenizer=flores is not .*'flores\\d+'"),
        (lambda: EvaluateRun(), "checkpoint is not set"),
        (lambda: EvaluateRun(["x", "y"]), "checkpoint=.*: this command takes one model"),
        (lambda: TranslateRun(checkpoint="x", target="y", prefix="z"), "target=y gives scores"),
        (lambda: LinksConfig(threshold=math.nan), "links.threshold=nan must be greater than 0 and at most 1"),
        (lambda: ExportRun("x"), "output is not set; give output=FILE.html, output=FOLDER or output=hf://OWNER/NAME"),
        (lambda: AlignRun(), "checkpoint is not set"),
        (lambda: AlignRun("x", tokenize=True), "tokenize=true is for an aligner"),
        (lambda: AlignRun(source="a", target="b", reverse_checkpoint="x"), "reverse_checkpoint= is for models with"),
        (lambda: AlignRun("x", source="a"), "give both, or neither"),
        (lambda: AlignRun("x", source="a", target="b", data=DataOverride(split="valid")), "remove data.*"),
        (lambda: AlignRun("x", gold="g", gold_base=2), "gold_base=2 is not one of 0, 1"),
        (lambda: AlignRun("x", "y", symmetrize="grow"), "symmetrize=grow is not one of intersection, union, grow_"),
        (lambda: AlignRun("x", "y", output="a.jsonl"), "output=a.jsonl is for weights of one model"),
    ],
)
def test_invalid_settings_raise(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_data_override_keeps_unset_values_of_run() -> None:
    run = DataConfig(format="text", path="corpus", source="fr", target="en", limit=10)
    assert DataOverride().apply_to(run) == DataConfig(format="text", path="corpus", source="fr", target="en")
    assert DataOverride(split="valid", path="other").apply_to(run).path == "other"
    linked = DataConfig(format="text", path="corpus", source="fr", target="en", alignments="links")
    assert DataOverride(format="text", path="corpus").apply_to(linked).alignments == "links"
    assert DataOverride(path="other").apply_to(linked).alignments is None
    table = DataConfig(format="tsv", path="corpus", source="2", target="1")
    assert DataOverride(path="other", source="1", target="2").apply_to(table).source == "1"  # columns, not languages
    with pytest.raises(UserError, match="the model was trained to translate 2 to 1"):
        DataOverride(path="corpus", source="1", target="2").apply_to(table)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a de en", "b en de", True),
        ("a de en", "b de en", False),
        ("a de en", "b fr de", False),
        ("a translation.de translation.en", "b en de", True),  # a dataset and plain text
        ("a de.text en.text", "b source.text target.text", False),
        ("a de.text en.text", "b en.text de.text", True),
        ("a 1 2", "a 2 1", True),
        ("a 1 2", "./a/ 1 2", False),
        ("a 1 2", "b 1 2", None),  # columns of another table
        ("a de en", "b 2 1", None),
    ],
)
def test_is_opposite_direction(first: str, second: str, expected: bool | None) -> None:
    parts = (text.split() for text in (first, second))
    configs = (DataConfig(format="tsv", path=path, source=source, target=target) for path, source, target in parts)
    assert is_opposite_direction(*configs) is expected
