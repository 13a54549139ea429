"""Tests of the Python API and of exported models."""

import json
import subprocess
import sys
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
from nmt.decoding.translation import join_translations
from nmt.decoding.translator import split_long_line
from nmt.model.seq2seq import build_model
from nmt.runs.checkpoint import load_config

LINES = ["Die Frau liest ein Buch .", "", "Der Hund schläft ."]


@pytest.fixture(scope="module")
def model(home: Path) -> nmt.Model:
    return nmt.load(home / "runs" / "mine", device="cpu", precision="fp32", beam=3, n_best=3)


def test_api_matches_commands(model: nmt.Model, home: Path) -> None:
    text = "".join(line + "\n" for line in LINES).encode()
    command = ("checkpoint=runs/mine", "precision=fp32", "search.beam=3", "search.n_best=3")
    best = model.translate(LINES, weights=True)
    n_best = model.translate_n_best(LINES)
    printed = run_ok("translate", *command, folder=home, text=text).split("\n")[:-1]
    assert [translation.text for translation in best] == printed[::3] and best[1].text == ""
    assert [translation.text for translation in n_best[2]] == printed[6:9]
    texts = [translation.text for translation in best]
    forced = model.translator.score(LINES, texts)  # the text may be segmented differently than in search
    assert model.score(LINES, texts) == [translation.score for translation in forced]
    assert all(translation.weights_TS is None for translation in forced)
    pairs = [(a.score, b.score) for a, b in zip(best, forced, strict=True) if a.target_pieces == b.target_pieces]
    assert pairs and [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-4)
    [record] = model.align(LINES[:1], [best[0].text])
    assert record.source_words == LINES[0].split() and record.links() == best[0].record.links()


def test_translating_does_not_import_compiler_and_libraries_for_training(home: Path) -> None:
    """Each of them takes about a second to import."""
    program = (
        "import sys, nmt; nmt.load('runs/mine').translate(['Der Hund schläft .']); "
        "print({'datasets', 'pandas', 'sacrebleu', 'torch._dynamo'} & sys.modules.keys())"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=home, capture_output=True, check=True).stdout
    assert printed.decode().strip() == "set()"


def test_ranking_score(home: Path) -> None:
    def load(**search: Any) -> nmt.Model:
        return nmt.load(home / "runs" / "mine", device="cpu", precision="fp32", **search)

    for coverage in (0.0, 0.3):
        model = load(beam=4, n_best=4, coverage_penalty=coverage)
        for n_best in model.translate_n_best(LINES, weights=True):
            for translation in n_best:
                if not translation.target_pieces:
                    continue
                length = len(translation.target_pieces)
                weights_TS = translation.weights_TS
                assert weights_TS is not None
                covered = np.log(weights_TS.sum(0).clip(np.exp(-20), 1)).sum()
                expected = translation.score / ((5 + length) / 6) + coverage * covered
                assert translation.ranking_score == pytest.approx(expected, rel=1e-5)
            scores = [translation.ranking_score for translation in n_best]
            assert scores == sorted(scores, key=lambda score: -(score or 0))
    # The ranking score of a line in parts is the sum over its parts.
    line = " ".join(LINES[:1] * 4)
    splitting = load(beam=4, max_source=9)
    [joined] = splitting.translate([line])
    parts = splitting.translator.split_lines([line], None, 1)
    texts = [splitting.translator.tokenizer.source.decode(part.ids) for part in parts]
    scores = [translation.ranking_score or 0.0 for translation in splitting.translate(texts)]
    assert len(parts) > 1 and joined.ranking_score == pytest.approx(sum(scores), rel=1e-5)
    assert [splitting.translate([empty])[0].ranking_score for empty in ("", " ")] == [0, 0]
    assert [splitting.translate([empty])[0].confidence for empty in ("", " ")] == [1, 1]
    assert joined.confidence == pytest.approx(np.exp(joined.score / len(joined.target_pieces)))
    # Forced decoding and sampling rank nothing.
    assert splitting.translator.score(LINES[:1], ["A dog ."])[0].ranking_score is None
    samples = load(sample=True, n_best=2).translate_n_best(["", *LINES, line])
    assert {sample.ranking_score for n_best in samples for sample in n_best} == {None}


def test_commands_accept_exported_model(home: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    run_ok("export", "checkpoint=runs/mine", f"output={folder}", folder=home)
    names = {"config.yaml", "manifest.json", "model.safetensors", "tokenizer.model"}
    assert {path.name for path in folder.iterdir()} == names
    text = LINES[0].encode() + b"\n"
    exported = (f"checkpoint={folder}", "precision=fp32")
    expected = run_ok("translate", "checkpoint=runs/mine", "precision=fp32", folder=home, text=text)
    assert run_ok("translate", *exported, folder=home, text=text) == expected
    run_ok("evaluate", *exported, "search.beam=1", folder=home)
    run_ok("align", *exported, folder=home)
    settings = ("data=text", f"data.path={corpus}", "name=from_export", "train.max_steps=1")
    run_ok("train", f"init_from={folder}", *settings, folder=home)
    assert (folder / "eval" / "test" / "metrics.json").is_file()
    message = run_error("export", "checkpoint=runs/mine", f"output={folder}", folder=home)
    assert "already exists" in message
    assert "is an exported model; init_from=" in run_error("train", f"hydra.run.dir={folder}", folder=home)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert "is missing or damaged" in run_error("translate", *exported, folder=home, text=text)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_out_of_memory_halves_batch(
    model: nmt.Model, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [translation.text for translation in model.translate(LINES * 4)]
    search_translations, max_batch, calls = translator.search_translations, 2, 0

    def search_with_limited_batch(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        results = search_translations(*arguments, **options)
        if calls == 2:
            yield next(results)
        if len(arguments[1]) > max_batch:
            raise error
        yield from results

    monkeypatch.setattr(translator, "search_translations", search_with_limited_batch)
    assert [translation.text for translation in model.translate(LINES * 4)] == expected
    assert "out of memory for 8 lines at a time" in caplog.text

    def search_single_lines_only(*arguments: Any, **options: Any) -> Iterator[Any]:
        if len(arguments[1]) > 1:
            raise error
        yield from search_translations(*arguments, **options)

    monkeypatch.setattr(translator, "search_translations", search_single_lines_only)
    assert [translation.text for translation in model.translate(LINES * 4)] == expected
    max_batch = 0
    monkeypatch.setattr(translator, "search_translations", search_with_limited_batch)
    with pytest.raises(nmt.UserError, match="out of memory for one line of .* lower search.beam=3"):
        model.translate(LINES)
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        model.translate(LINES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beem": 3}, "search.beem: Key 'beem' not in 'SearchConfig'"),
        ({"precision": "bf17"}, "precision=bf17 is not one of"),
        ({"average": 0}, "average=0 must be"),
        ({"beam": 0}, "search.beam=0"),
        ({"checkpoint": []}, "checkpoint is not set"),
        ({"beam": 2.5}, "search.beam: Value '2.5' of type 'float' could not be converted to Integer"),
        ({"sample": "perhaps"}, "search.sample: Value 'perhaps' is not a valid bool"),
    ],
)
def test_load_rejects_invalid_settings(home: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(nmt.UserError, match=message):
        nmt.load(**{"checkpoint": home / "runs" / "mine"} | settings)


def test_align_rejects_model_without_attention(model: nmt.Model) -> None:
    without_attention = build_model(ModelConfig(embed=4, hidden=4, attention=AttentionConfig(score="none")), 500, 500)
    with pytest.raises(nmt.UserError, match="the model has no attention, so it cannot align"):
        replace(model, translator=replace(model.translator, model=without_attention)).align(LINES[:1], LINES[:1])


def test_export_to_folder_named_checkpoints(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "mine"
    run_ok("export", "checkpoint=runs/mine", f"output={folder}", folder=home)
    assert nmt.load(folder).translate(LINES[:1])[0].text


def test_line_without_pieces_has_empty_translation(model: nmt.Model) -> None:
    text = [f"{line} {line[::-1]}" for line in LINES for _ in range(9)]
    tokenizer = train_tokenizer(text, text, TokenizerConfig(vocab_size=330, normalization="nmt_nfkc"))
    n_best_lists = replace(model.translator, tokenizer=tokenizer).translate(["\u200b", " \ufeff ", "\x07", ""])
    assert [n_best[0].text for n_best in n_best_lists] == [""] * 4


def test_long_lines_are_translated_in_parts(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    max_length = load_config(home / "runs" / "mine").data.max_length
    line = " ".join(LINES[0] for _ in range(max_length))
    for settings, limit in (({}, max_length + 1), ({"max_source": 30}, 30)):
        loaded = nmt.load(home / "runs" / "mine", beam=1, **settings).translator
        parts = [part.ids for part in loaded.split_lines([line], None, 1)]
        assert all(len(ids) < limit for ids in parts)
        assert sum(parts, []) == loaded.tokenizer.source.encode([line])[0]
        assert f"1 line of more than search.max_source={limit} pieces, translated in parts (first: 1)" in caplog.text


def test_very_long_line_is_translated_without_weights(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining the weights of all parts would take a large matrix that is nearly all 0."""
    loaded = nmt.load(home / "runs" / "mine", beam=1, max_source=30).translator
    lines = ["", LINES[0], " ".join(LINES * 9)]
    [_, [short], [long]] = loaded.translate(lines, keep_weights=True)
    assert long.weights_TS is not None and "too long" not in caplog.text
    monkeypatch.setattr("nmt.decoding.translation.MAX_LINE_WEIGHTS", long.weights_TS.size - 1)
    [_, [limited_short], [limited_long]] = loaded.translate(lines, keep_weights=True, first_line=11)
    assert limited_long == replace(long, weights_TS=None) and limited_long.record.links() == []
    assert limited_short.weights_TS is not None and (limited_short.weights_TS == short.weights_TS).all()
    assert caplog.text.count("1 line is too long to be aligned (first: 13)") == 1


@pytest.mark.parametrize("limit", range(12, 20))
def test_split_long_line_keeps_words_whole(limit: int) -> None:
    """Parts end between words, and after punctuation only if a space follows or none is needed."""
    line = "▁On ly ▁3 . 50 ▁at ▁www . x . de . ▁He ▁said : ▁ No . ' ▁ Wait ! ▁And 好 。 再 见"
    pieces = line.replace("▁ ", "▁").split()
    parts = split_long_line(list(range(len(pieces))), pieces, limit)
    assert sum(parts, []) == list(range(len(pieces))) and all(0 < len(part) <= limit for part in parts)
    for part in parts[1:]:
        before, first = pieces[part[0] - 1], pieces[part[0]]
        assert first.startswith("▁") or before == "。"
    [first, *_] = split_long_line(list(range(20)), [*pieces[:14], *["▁and"] * 6], 16)
    assert pieces[first[-1]] == "." and len(first) == 12


@pytest.mark.parametrize("limit", range(6, 20))
def test_split_long_line_keeps_characters_whole(limit: int) -> None:
    """Characters that training never saw are spelled as bytes, three to a Chinese character."""
    text = "日本語文章漢字" * 3
    pieces = [f"<0x{byte:02X}>" for byte in text.encode()]
    parts = split_long_line(list(range(len(pieces))), pieces, limit)
    assert "".join(bytes(text.encode()[i] for i in part).decode() for part in parts) == text


def test_n_best_of_line_in_parts(home: Path) -> None:
    lines = [LINES[0], " ".join(LINES * 9), ""]
    sampling = nmt.load(home / "runs" / "mine", sample=True, n_best=3, max_length=20, max_source=30)
    samples = sampling.translate_n_best(lines)
    assert [len(n_best) for n_best in samples] == [3, 3, 1] and len({sample.text for sample in samples[1]}) > 1
    beam_search = nmt.load(home / "runs" / "mine", beam=3, n_best=3, max_length=20, max_source=30)
    assert len(beam_search.translate_n_best(lines)[1]) == 1


def test_truncated_translations_are_reported(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in parts counts as truncated if any part is."""
    short = nmt.load(home / "runs" / "mine", precision="fp32", beam=1, max_length=1)
    truncated, empty = short.translate([LINES[0], ""])
    complete = nmt.Translation("Yes.", ["▁Ja", ".", "</s>"], ["▁Yes", ".", "</s>"])
    assert not truncated.ended and empty.ended
    message = "1 translation truncated at the maximum length (first: 1); the limits are search.max_length=1 and"
    assert message in caplog.text
    for parts in ([truncated, complete], [complete, truncated], [complete, truncated, empty]):
        assert not join_translations(parts).ended
    assert join_translations([complete, empty, complete]).ended


def test_arguments_must_be_lists_of_equal_length(model: nmt.Model) -> None:
    for call in (
        lambda: model.translate("Ein Hund"),
        lambda: model.translate(5),
        lambda: model.score(["a"], ["b", "c"]),
        lambda: model.align(["a"], []),
        lambda: model.translate(["a"], prefixes=["b", "c"]),
        lambda: model.translate([b"a"]),
        lambda: model.score(["a"], [None]),
    ):
        message = "give a list of lines|both sides need the same number|is not a string but of type"
        with pytest.raises(nmt.UserError, match=message):
            call()
    assert model.translate(["Die Frau schläft ."], prefixes=["The"])[0].text.startswith("The")


def test_lines_may_come_from_files_and_iterators(model: nmt.Model, tmp_path: Path) -> None:
    """Line ends are removed."""
    (tmp_path / "text").write_bytes("".join(f"{line}\r\n" for line in LINES).encode())
    with open(tmp_path / "text", encoding="utf-8", newline="") as file:
        translations = model.translate(file, prefixes=iter(["The\n", "", ""]))
    assert translations[0].text.startswith("The ") and translations[2] == model.translate(LINES)[2]
    assert model.score([f"{line}\n" for line in LINES], iter(LINES)) == model.score(LINES, LINES)


def test_load_ensemble(model: nmt.Model, home: Path) -> None:
    run = home / "runs" / "mine"
    ensemble = nmt.load([run, run], device="cpu", precision="fp32", beam=3, n_best=3)
    expected = [translation.text for translation in model.translate(LINES)]
    assert [translation.text for translation in ensemble.translate(LINES)] == expected


def test_average_of_last_checkpoints(home: Path) -> None:
    run = home / "runs" / "mine"
    steps = sorted((run / "checkpoints").glob("step_*"))[-2:]
    assert len(steps) == 2
    parts = [load_file(step / "model.safetensors") for step in steps]
    mean = nmt.load(run, average=2, precision="fp32").translator.model.state_dict()
    for name, first in parts[0].items():
        torch.testing.assert_close(mean[name], (first + parts[1][name]) / 2)
    settings = ("average=2", "data.split=valid", "search.beam=1")
    run_ok("evaluate", "checkpoint=runs/mine", *settings, folder=home)
    metrics = json.loads((run / "eval" / "valid" / "metrics.json").read_text())
    assert metrics["checkpoint"] == " ".join(step.name for step in steps)
    assert "train.keep" in run_error("translate", "checkpoint=runs/mine", "average=9", folder=home, text=b"x\n")
    step = f"checkpoint=runs/mine/checkpoints/{steps[0].name}"
    assert "is a single checkpoint" in run_error("evaluate", step, "average=2", folder=home)
