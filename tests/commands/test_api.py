"""The Python API, and models as folders of their own."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import run_error, run_ok
from safetensors.torch import load_file

import nmt
from nmt.config import AttentionConfig, ModelConfig
from nmt.config.data import TokenizerConfig
from nmt.data.tokenizer import train_tokenizer
from nmt.decoding import translator
from nmt.model.seq2seq import build_model
from nmt.training.checkpoint import load_config

LINES = ["Die Frau liest ein Buch .", "", "Der Hund schläft ."]


@pytest.fixture(scope="module")
def model(home: Path) -> nmt.Model:
    return nmt.load(home / "runs" / "mine", device="cpu", precision="fp32", beam=3, n_best=3)


def test_python_does_what_the_commands_do(model: nmt.Model, home: Path) -> None:
    text = "".join(line + "\n" for line in LINES).encode()
    command = ("checkpoint=runs/mine", "precision=fp32", "search.beam=3", "search.n_best=3")
    best = model.translate(LINES, weights=True)
    options = model.translate_n_best(LINES)
    shown = run_ok("translate", *command, folder=home, text=text).split("\n")[:-1]
    assert [translation.text for translation in best] == shown[::3] and best[1].text == ""
    assert [option.text for option in options[2]] == shown[6:9]
    texts = [translation.text for translation in best]
    forced = model.translator.score(LINES, texts)  # by the best segmentation, which need not be what was written
    assert model.score(LINES, texts) == [translation.score for translation in forced]
    assert all(translation.weights_TS is None for translation in forced)  # which nobody asked for
    same = [(a.score, b.score) for a, b in zip(best, forced, strict=True) if a.target_pieces == b.target_pieces]
    assert same and [a for a, _ in same] == pytest.approx([b for _, b in same], abs=1e-4)
    [record] = model.align(LINES[:1], [best[0].text])
    assert record.source_words == LINES[0].split() and record.links() == best[0].record.links()


def test_a_translation_has_what_it_is_ranked_by(home: Path) -> None:
    def opened(**search: Any) -> nmt.Model:
        return nmt.load(home / "runs" / "mine", device="cpu", precision="fp32", **search)

    for penalty, coverage in (("gnmt", 0.0), ("mean", 0.0), ("gnmt", 0.3)):
        model = opened(beam=4, n_best=4, penalty=penalty, coverage_penalty=coverage)
        for options in model.translate_n_best(LINES, weights=True):
            for option in filter(lambda one: one.target_pieces, options):
                length = len(option.target_pieces)
                weights_TS = option.weights_TS
                assert weights_TS is not None
                covered = np.log(weights_TS.sum(0).clip(np.exp(-20), 1)).sum()
                penalized = option.score / ((5 + length) / 6 if penalty == "gnmt" else length) + coverage * covered
                assert option.ranking_score == pytest.approx(penalized, rel=1e-5)
            ranks = [option.ranking_score for option in options]
            assert ranks == sorted(ranks, key=lambda rank: -(rank or 0))
    line = " ".join(LINES[:1] * 4)
    whole = opened(beam=4, max_source=9)
    [joined] = whole.translate([line])
    parts = whole.translator.split_lines([line], None, 1)
    texts = [whole.translator.tokenizer.source.decode(part.ids) for part in parts]
    ranks = [translation.ranking_score or 0.0 for translation in whole.translate(texts)]
    assert len(parts) > 1 and joined.ranking_score == pytest.approx(sum(ranks), rel=1e-5)  # of a line in parts the sum
    assert [whole.translate([empty])[0].ranking_score for empty in ("", " ")] == [0, 0]
    assert whole.translator.score(LINES[:1], ["A dog ."])[0].ranking_score is None  # nothing is ranked
    drawn = opened(sample=True, n_best=2).translate_n_best(["", *LINES, line])
    assert {sample.ranking_score for samples in drawn for sample in samples} == {None}


def test_an_exported_model_is_taken_by_all_commands(model: nmt.Model, home: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    model.export(folder)
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "manifest.json", "model.safetensors", "tokenizer.model",
    }  # fmt: skip
    text = LINES[0].encode() + b"\n"
    given = (f"checkpoint={folder}", "precision=fp32")
    assert run_ok("translate", *given, folder=home, text=text) == run_ok(
        "translate", "checkpoint=runs/mine", "precision=fp32", folder=home, text=text
    )
    run_ok("evaluate", *given, "search.beam=1", "pictures=0", folder=home)
    run_ok("align", *given, folder=home)
    run_ok("train", f"init_from={folder}", "data=text", f"data.path={corpus}", "name=from_export",
          "train.max_steps=1", folder=home)  # fmt: skip
    assert (folder / "eval" / "test" / "metrics.json").is_file()
    with pytest.raises(nmt.UserError, match="already exists"):
        model.export(folder)
    assert "is an exported model; init_from=" in run_error("train", f"hydra.run.dir={folder}", folder=home)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert "is missing or damaged" in run_error("translate", *given, folder=home, text=text)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_out_of_memory_halves_the_batch(
    model: nmt.Model, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [translation.text for translation in model.translate(LINES * 4)]
    real, most, calls = translator.stream_search, 2, 0

    def short_of_memory(*arguments: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        found = real(*arguments)
        if calls == 2:
            yield next(found)  # what was translated before is kept
        if arguments[-1] > most:
            raise error
        yield from found

    monkeypatch.setattr(translator, "stream_search", short_of_memory)
    assert [translation.text for translation in model.translate(LINES * 4)] == expected
    assert "out of memory for 8 lines at a time" in caplog.text

    def short_of_two(*arguments: Any) -> Iterator[Any]:
        if len(arguments[1]) > 1:
            raise error  # even for those that only wait
        yield from real(*arguments)

    monkeypatch.setattr(translator, "stream_search", short_of_two)
    assert [translation.text for translation in model.translate(LINES * 4)] == expected
    most = 0
    monkeypatch.setattr(translator, "stream_search", short_of_memory)
    with pytest.raises(nmt.UserError, match="out of memory for one line of .* lower search.beam=3"):
        model.translate(LINES)


def test_other_errors_are_not_taken_for_a_lack_of_memory(model: nmt.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(translator, "stream_search", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        model.translate(LINES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beem": 3}, "search.beem does not exist; available are batch_sentences, .*beam"),
        ({"precision": "bf17"}, "precision=bf17 is not one of"),
        ({"average": 0}, "average=0 must be"),
        ({"beam": 0}, "search.beam=0"),
        ({"checkpoint": []}, "checkpoint is not set"),
        ({"beam": 2.5}, "search.beam: Value '2.5' of type 'float' could not be converted to Integer"),
        ({"beam": None}, "search.beam: "),
        ({"average": 1.5}, "average: Value '1.5' of type 'float' could not be converted to Integer"),
        ({"sample": "perhaps"}, "search.sample: Value 'perhaps' is not a valid bool"),
        ({"dictionary": "none", "replace_unknown": True}, "replace_unknown=true needs a model|none is not a file"),
    ],
)
def test_what_cannot_be_is_a_user_error(home: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(nmt.UserError, match=message):
        nmt.load(**{"checkpoint": home / "runs" / "mine"} | settings)


def test_what_is_no_list_of_lines_is_refused(model: nmt.Model) -> None:
    for strange, message in (
        (5, "5 is not a list of lines"),
        ("a b", "got a single string"),
        ([b"a"], "is not a string but"),
    ):
        with pytest.raises(nmt.UserError, match=message):
            model.translate(strange)  # type: ignore[arg-type]


def test_nothing_is_aligned_without_attention(model: nmt.Model) -> None:
    blind = build_model(ModelConfig(embed=4, hidden=4, attention=AttentionConfig(score="none")), 500, 500)
    with pytest.raises(nmt.UserError, match="mine has no attention, so it cannot align"):
        replace(model, translator=replace(model.translator, model=blind)).align(LINES[:1], LINES[:1])


def test_an_export_may_be_anywhere(model: nmt.Model, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "mine"
    model.export(folder)
    assert nmt.load(folder).translate(LINES[:1])[0].text


def test_a_line_of_which_nothing_is_left_has_an_empty_translation(model: nmt.Model) -> None:
    text = [f"{line} {line[::-1]}" for line in LINES for _ in range(9)]
    folding = train_tokenizer(text, text, TokenizerConfig(vocab_size=330, normalization="nmt_nfkc"))
    searcher = replace(model.translator, tokenizer=folding)
    assert [options[0].text for options in searcher.translate(["\u200b", " \ufeff ", "\x07", ""])] == [""] * 4


def test_lines_longer_than_training_had_are_translated_in_parts(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = load_config(home / "runs" / "mine").data.max_length
    line = " ".join(LINES[0] for _ in range(trained))
    for settings, limit in (({}, trained + 1), ({"max_source": 30}, 30)):
        searcher = nmt.load(home / "runs" / "mine", beam=1, **settings).translator
        parts = [part.ids for part in searcher.split_lines([line], None, 1)]
        assert all(len(ids) < limit for ids in parts)
        assert sum(parts, []) == searcher.tokenizer.source.encode([line])[0]
        assert f"1 line of more than search.max_source={limit} pieces, translated in parts (first: 1)" in caplog.text


def test_a_line_that_is_very_long_is_translated_but_not_aligned(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights would be of all its pieces by all of its translation's, nearly all of them 0."""
    searcher = nmt.load(home / "runs" / "mine", beam=1, max_source=30).translator
    lines = ["", LINES[0], " ".join(LINES * 9)]
    [_, [short], [long]] = searcher.translate(lines, keep_weights=True)
    assert long.weights_TS is not None and "too long" not in caplog.text
    monkeypatch.setattr("nmt.decoding.translator.MAX_LINE_WEIGHTS", long.weights_TS.size - 1)
    [_, [same], [bare]] = searcher.translate(lines, keep_weights=True, first_line=11)
    assert bare == replace(long, weights_TS=None) and bare.record.links() == []
    assert same.weights_TS is not None and (same.weights_TS == short.weights_TS).all()
    assert caplog.text.count("1 line too long to be aligned (first: 13)") == 1


@pytest.mark.parametrize("limit", range(12, 20))
def test_no_part_ends_within_a_word(limit: int) -> None:
    """A mark is an end where a word ends, too, but for those that need no space after them."""
    line = "▁On ly ▁3 . 50 ▁at ▁www . x . de . ▁He ▁said : ▁ No . ' ▁ Wait ! ▁And 好 。 再 见"
    pieces = line.replace("▁ ", "▁").split()
    parts = translator.split_long_line(list(range(len(pieces))), pieces, limit)
    assert sum(parts, []) == list(range(len(pieces))) and all(0 < len(part) <= limit for part in parts)
    for part in parts[1:]:
        before, first = pieces[part[0] - 1], pieces[part[0]]
        assert first.startswith("▁") or before == "。"
    [first, *_] = translator.split_long_line(list(range(20)), [*pieces[:14], *["▁and"] * 6], 16)
    assert pieces[first[-1]] == "." and len(first) == 12


def test_a_line_in_parts_has_as_many_samples_as_others(home: Path) -> None:
    lines = [LINES[0], " ".join(LINES * 9), ""]
    drawn = nmt.load(home / "runs" / "mine", sample=True, n_best=3, max_length=20, max_source=30)
    found = drawn.translate_n_best(lines)
    assert [len(options) for options in found] == [3, 3, 1] and len({option.text for option in found[1]}) > 1
    best = nmt.load(home / "runs" / "mine", beam=3, n_best=3, max_length=20, max_source=30)
    assert len(best.translate_n_best(lines)[1]) == 1


def test_translations_that_were_cut_are_named(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a line in parts, whichever part it was."""
    short = nmt.load(home / "runs" / "mine", precision="fp32", beam=1, max_length=1)
    cut, empty = short.translate([LINES[0], ""])
    whole = nmt.Translation("Yes.", ["▁Ja", ".", "</s>"], ["▁Yes", ".", "</s>"])
    assert not cut.ended and empty.ended
    assert (
        "1 translation truncated at the maximum length (first: 1); the limits are search.max_length=1 and"
        in caplog.text
    )
    for parts in ([cut, whole], [whole, cut], [whole, cut, empty]):
        assert not translator.join_translations(parts).ended
    assert translator.join_translations([whole, empty, whole]).ended


def test_lines_are_lists_of_equal_length(model: nmt.Model) -> None:
    for call in (lambda: model.translate("Ein Hund"), lambda: model.score(["a"], ["b", "c"]),
                 lambda: model.align(["a"], []), lambda: model.translate(["a"], prefixes=["b", "c"]),
                 lambda: model.translate([b"a"]), lambda: model.score(["a"], [None])):  # fmt: skip
        with pytest.raises(
            nmt.UserError, match="give a list of lines|numbers must be equal|is not a string but of type"
        ):
            call()
    assert model.translate(["Die Frau schläft ."], prefixes=["The"])[0].text.startswith("The")


def test_lines_may_come_from_files(model: nmt.Model, tmp_path: Path) -> None:
    """With their ends, and one at a time."""
    (tmp_path / "text").write_bytes("".join(f"{line}\r\n" for line in LINES).encode())
    with open(tmp_path / "text", encoding="utf-8", newline="") as file:
        found = model.translate(file, prefixes=iter(["The\n", "", ""]))
    assert found[0].text.startswith("The ") and found[2] == model.translate(LINES)[2]
    assert model.score([f"{line}\n" for line in LINES], iter(LINES)) == model.score(LINES, LINES)


def test_several_models_are_one(model: nmt.Model, home: Path, tmp_path: Path) -> None:
    run = home / "runs" / "mine"
    both = nmt.load([run, run], device="cpu", precision="fp32", beam=3, n_best=3)
    assert [found.text for found in both.translate(LINES)] == [found.text for found in model.translate(LINES)]
    with pytest.raises(nmt.UserError, match="an ensemble of several models cannot be exported"):
        both.export(tmp_path / "export")


def test_the_mean_of_the_last_checkpoints(home: Path) -> None:
    run = home / "runs" / "mine"
    steps = sorted((run / "checkpoints").glob("step_*"))[-2:]
    assert len(steps) == 2
    parts = [load_file(step / "model.safetensors") for step in steps]
    mean = nmt.load(run, average=2, precision="fp32").translator.model.state_dict()
    for name, first in parts[0].items():
        torch.testing.assert_close(mean[name], (first + parts[1][name]) / 2)
    settings = ("average=2", "data.split=valid", "search.beam=1", "pictures=0")
    run_ok("evaluate", "checkpoint=runs/mine", *settings, folder=home)
    measures = json.loads((run / "eval" / "valid" / "metrics.json").read_text())
    assert measures["checkpoint"] == " ".join(step.name for step in steps)
    assert "train.keep" in run_error("translate", "checkpoint=runs/mine", "average=9", folder=home, text=b"x\n")
    step = f"checkpoint=runs/mine/checkpoints/{steps[0].name}"
    assert "is a single checkpoint" in run_error("evaluate", step, "average=2", folder=home)
