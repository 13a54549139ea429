"""Tests of nmt.align on real files, mostly in this process, which is faster than in a new one."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import run_in_new_process, run_ok

from nmt import UserError, load
from nmt.align import align as align_command
from nmt.config import DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.toy.corpus import SPLIT_SIZES, Pair, generate
from nmt.data.word_links import GoldLinks, grow_diag_final_and
from nmt.evaluation.metrics import LinkCounts
from nmt.model.seq2seq import build_model
from nmt.runs.checkpoint import export_model, load_model, save_checkpoint, save_config
from nmt.system.device import prepare_model
from nmt.training.validation import compute_entropy, evaluate_loss

MODEL = "checkpoint=runs/mine"
BACK = "reverse_checkpoint=runs/back"
FILES = ("source=test.de", "target=test.en")
ODD_PAIRS = [
    ("Der Hund schläft .", "The dog is sleeping ."),
    ("", ""),
    ("", "no source"),
    ("kein Ziel", "  "),
    ("  zwei   Leerzeichen ", "two  spaces"),
    ("tab\there\u3000and\u00a0there", "a\u2028line\x85break"),
    ("▁", "▁ a▁b ▁▁"),
    ("bell\x07 and \x00 NUL", "<s> </s> <unk> <pad>"),
    ("emoji 😀👩‍👩‍👧 مرحبا", "x" * 500),
]


Align = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    """Return the test split of `corpus`."""
    return generate(1, {"train": 600, "valid": 40, "test": 30})["test"]


@pytest.fixture(scope="session")
def folder(home: Path, corpus: Path, pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, text to align, and its gold links, counted from 0 and from 1.

    The model is there three times: as trained, with settings of the opposite direction, and with settings of the
    built-in corpus.
    """
    folder = tmp_path_factory.mktemp("align")
    shutil.copytree(home / "runs" / "mine", folder / "runs" / "mine", ignore=shutil.ignore_patterns("eval"))
    loaded = load_model(str(folder / "runs" / "mine"))
    text = loaded.config.data
    for name, data in {"back": replace(text, source="en", target="de"), "toy": DataConfig()}.items():
        export_model(loaded.model, loaded.tokenizer, replace(loaded.config, data=data), folder / "runs" / name)
    for side in ("de", "en"):
        shutil.copy(corpus / f"test.{side}", folder)
    for base in (0, 1):
        lines = []
        for pair in pairs:
            links = [f"{s + base}-{t + base}" for s, t in pair.sure]
            links += [f"{s + base}p{t + base}" for s, t in pair.possible]
            lines.append(" ".join(links) + "\n")
        (folder / f"gold{base}").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def align(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Align:
    """Return a function that runs nmt.align in `folder`, and returns its standard output and standard error."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it; monkeypatch restores it afterwards
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["align", *arguments])
        try:
            align_command()
            exit_code = 0
        except SystemExit as end:
            exit_code = end.code
        captured = capsys.readouterr()
        assert exit_code == code, captured.err
        return captured.out, captured.err

    return run


def read_links(text: str) -> list[set[tuple[int, int]]]:
    """Parse the links of each line in Pharaoh format."""
    *lines, end = text.split("\n")
    assert end == ""
    return [{(int(s), int(t)) for s, t in (link.split("-") for link in line.split())} for line in lines]


def read_scores(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines())}


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_align_pairs_and_score_against_gold_links(folder: Path, pairs: list[Pair]) -> None:
    scores = read_scores(run_ok("align", MODEL, *FILES, "output=links.pharaoh", "gold=gold0", folder=folder))
    links = read_links((folder / "links.pharaoh").read_text())
    counts = LinkCounts()
    for pair, pair_links in zip(pairs, links, strict=True):
        assert all(s < len(pair.german.split()) and t < len(pair.english.split()) for s, t in pair_links)
        counts.add(pair_links, GoldLinks.from_pairs(pair.sure, pair.possible))
    assert list(scores) == ["precision", "recall", "aer"]
    assert scores == pytest.approx(counts.scores(), abs=1e-4)
    assert 0.1 < scores["aer"] < 0.95

    piped = run_in_new_process("align", MODEL, *FILES, "gold=gold1", "gold_base=1", folder=folder)
    assert piped.returncode == 0, piped.stderr.decode()
    assert piped.stdout == (folder / "links.pharaoh").read_bytes() and read_scores(piped.stderr.decode()) == scores


def test_align_corpus_of_run(align: Align, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, size in {"train": 600, "valid": 200, "test": 30}.items():  # of the built-in corpus
        monkeypatch.setitem(SPLIT_SIZES, split, size)
    links, _ = align(MODEL, *FILES)
    assert align(MODEL) == (links, "")  # the test split of the run's corpus, which has no gold links
    assert read_scores(align(MODEL, "gold=gold0")[1]) == read_scores(align(MODEL, *FILES, "gold=gold0")[1])
    scores = read_scores(align("checkpoint=runs/toy", "data.split=valid", "output=links")[0])  # has gold links
    model, tokenizer, run, *_ = load_model(str(folder / "runs" / "toy"))
    prepare_model(model, "fp32", torch.device("cpu"))
    metrics = evaluate_loss(model, tokenizer, load_pairs(run.data, "valid"), torch.device("cpu"))
    assert scores["aer"] == pytest.approx(metrics["aer"], abs=0.005)  # the command may use bf16
    assert 0 < metrics["entropy"] < np.log(40)


def test_align_rejects_model_without_attention(align: Align, folder: Path) -> None:
    _, tokenizer, run, *_ = load_model(str(folder / "runs" / "mine"))
    run.model.attention.score = "none"
    run_folder = folder / "runs" / "no_attention"
    run_folder.mkdir(exist_ok=True)
    tokenizer.save(run_folder)
    save_config(run_folder, run)
    model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    save_checkpoint(run_folder, model, tokenizer, run, torch.optim.SGD(model.parameters()), {"step": 1, "best": []})
    _, message = align("checkpoint=runs/no_attention", *FILES, "output=new", code=1)
    assert "model.attention.score=none" in message and not list(folder.glob("new*"))


def test_compute_entropy_normalizes_weights() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4, [0] * 4, [0.1, 0.1, 0, 0]]]).double()
    assert compute_entropy(weights).tolist() == [pytest.approx([np.log(2), 0, np.log(4), 0, np.log(2)])]


def test_symmetrization_of_two_directions(align: Align) -> None:
    forward = read_links(align(MODEL, *FILES)[0])
    reverse = read_links(align("checkpoint=runs/back", "source=test.en", "target=test.de")[0])
    backward = [{(s, t) for t, s in links} for links in reverse]
    expected = [grow_diag_final_and(*links) for links in zip(forward, backward, strict=True)]
    assert read_links(align(MODEL, BACK, *FILES)[0]) == expected
    intersection = [a & b for a, b in zip(forward, backward, strict=True)]
    assert read_links(align(MODEL, BACK, *FILES, "symmetrize=intersection")[0]) == intersection != expected


def test_links_of_odd_lines_are_in_range(align: Align, folder: Path) -> None:
    for side, name in enumerate(("odd.de", "odd.en")):
        text = "".join(pair[side] + "\n" for pair in ODD_PAIRS).encode()
        (folder / name).write_bytes(text + b"not \xff UTF-8\n" + b"w " * 1500 + b"\n")
    odd = (MODEL, "source=odd.de", "target=odd.en")
    for extra in ((), ("links.threshold=0.01",), (BACK, "symmetrize=union")):
        output, message = align(*odd, *extra)
        all_links = read_links(output)
        assert len(all_links) == len(ODD_PAIRS) + 2
        for (source, target), links in zip(ODD_PAIRS, all_links, strict=False):
            assert all(s < len(source.split()) and t < len(target.split()) for s, t in links)
        assert all_links[0] and not any(all_links[1:4]) and not all_links[-1]
        assert "U+FFFD" in message and "line 11 has" in message and "it has no links" in message
    align(*odd, "output=odd.jsonl")
    for (source, target), record in zip(ODD_PAIRS, read_records(folder / "odd.jsonl"), strict=False):
        assert (record["source_words"], record["target_words"]) == (source.split(), target.split())
        assert len(record["source_word_of_piece"]) == len(record["source_pieces"]) == len(record["weights"][0])
    last = read_records(folder / "odd.jsonl")[-1]
    assert last["weights"] is last["score"] is None and len(last["source_pieces"]) > 1500


@pytest.mark.parametrize("beam", [1, 3])
def test_search_and_forced_decoding_give_same_alignment(align: Align, folder: Path, beam: int) -> None:
    translate = (MODEL, "precision=fp32", "input=test.de", f"search.beam={beam}", f"search.n_best={beam}")
    run_ok("translate", *translate, "output=searched.en", "alignments=searched.jsonl", folder=folder)
    lines = [line for line in (folder / "test.de").read_text(encoding="utf-8").splitlines() for _ in range(beam)]
    (folder / "repeated.de").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    align(MODEL, "precision=fp32", "source=repeated.de", "target=searched.en", "output=forced.jsonl")
    pairs = list(zip(read_records(folder / "searched.jsonl"), read_records(folder / "forced.jsonl"), strict=True))
    assert len(pairs) == 30 * beam
    compared = 0
    assert pairs[0][1]["source_words"] == lines[0].split()
    for searched, forced in pairs:
        if searched["target_pieces"] != forced["target_pieces"]:  # truncated, or the text is segmented differently
            continue
        compared += 1
        assert searched.pop("score") == pytest.approx(forced.pop("score"), abs=1e-3)
        np.testing.assert_allclose(searched.pop("weights"), forced.pop("weights"), atol=1e-5)
        assert searched == forced
    assert compared > 10 * beam


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("source=test.de", "target=short.en"), "source=test.de has 30 lines, target=short.en has 29"),
        (("source=missing.de", "target=test.en"), "source=missing.de is not a file"),
        ((*FILES, "gold=missing"), "gold=missing is not a file"),
        ((*FILES, "gold=short.gold"), "short.gold has 29 lines for 30 pairs of sentences"),
        ((*FILES, "gold=bad.gold"), "bad.gold:3: '1:2' is not a link; write 0-1 for a sure link"),
        ((*FILES, "gold=far.gold"), "far.gold:2: '99-0' is out of range: counted from 0, the source sentence has"),
        ((*FILES, "gold=far.gold"), "; if words are counted from 1, nmt.align accepts gold_base=1 for its gold file"),
        ((*FILES, "gold=gold0", "gold_base=1"), "gold0:1: '0-0' is out of range: counted from 1,"),
        ((*FILES, "gold=latin.gold"), "latin.gold:1: "),
        ((*FILES, "reverse_checkpoint=runs/mine"), "reverse_checkpoint=runs/mine translates de to en, but checkpoint="),
        ((*FILES, "reverse_checkpoint=runs/none"), "error: runs/none is not a folder; give a run"),
        (("data.split=dev2",), "dev2.de does not exist"),
        (("data.source=en", "data.target=de"), "the model was trained to translate de to en"),
    ],
)
def test_align_rejects_bad_input_and_leaves_no_output(
    align: Align, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    gold = (folder / "gold0").read_text().splitlines(keepends=True)
    (folder / "short.en").write_text("".join((folder / "test.en").read_text().splitlines(keepends=True)[:29]))
    (folder / "short.gold").write_text("".join(gold[:29]))
    (folder / "bad.gold").write_text("".join([*gold[:2], "0-0 1:2\n", *gold[3:]]))
    (folder / "far.gold").write_text("".join([gold[0], "99-0\n", *gold[2:]]))
    (folder / "latin.gold").write_bytes(b"0-0 \xff\n" + "".join(gold[1:]).encode())
    output, error = align(MODEL, *arguments, "output=new", code=1)
    assert not output and message in error
    assert not list(folder.glob("new*"))


def test_load_rejects_ensemble_of_opposite_directions(folder: Path) -> None:
    with pytest.raises(UserError, match="runs/back.* translates in the opposite direction of .*runs/mine"):
        load([folder / "runs" / "mine", folder / "runs" / "back"])
