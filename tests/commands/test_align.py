"""nmt.align as a user runs it, on real files: as a process where that matters, else in this one, which is faster."""

import gzip
import json
import shutil
import subprocess
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
from nmt.align import align as program
from nmt.config import DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.toy.corpus import Pair, generate
from nmt.data.word_links import GoldLinks, grow_diag_final_and
from nmt.evaluation.metrics import LinkCounts
from nmt.model.seq2seq import build_model
from nmt.runtime.device import move_model as put
from nmt.training.checkpoint import export_model, load_model, save_checkpoint, save_config
from nmt.training.validation import compute_entropy, evaluate_loss

MODEL = "checkpoint=runs/mine"
BACK = "reverse_checkpoint=runs/back"
FILES = ("source=test.de", "target=test.en")
NASTY = [
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
    """The test split of `corpus`."""
    return generate(1, {"train": 600, "valid": 40, "test": 30})["test"]


@pytest.fixture(scope="session")
def place(home: Path, corpus: Path, pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the same as if it were one of the other direction or of the built-in corpus, text to
    align, and gold links of it, from 0 and from 1."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(home / "runs" / "mine", folder / "runs" / "mine", ignore=shutil.ignore_patterns("eval"))
    loaded = load_model(str(folder / "runs" / "mine"))
    text = loaded.config.data
    for name, data in {"back": replace(text, source="en", target="de"), "toy": DataConfig()}.items():
        export_model(loaded.model, loaded.tokenizer, replace(loaded.config, data=data), folder / "runs" / name)
    for side in ("de", "en"):
        shutil.copy(corpus / f"test.{side}", folder)
    for base in (0, 1):
        texts = [[f"{s + base}-{t + base}" for s, t in pair.sure] + [f"{s + base}p{t + base}" for s, t in pair.possible]
                 for pair in pairs]  # fmt: skip
        (folder / f"gold{base}").write_text("".join(" ".join(text) + "\n" for text in texts), encoding="utf-8")
    return folder


@pytest.fixture
def align(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Align:
    """Run nmt.align with these arguments. Returns what it wrote to standard output and to standard error."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the program sets it for itself alone; so it is put back
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["align", *arguments])
        try:
            program()
            ended = 0
        except SystemExit as end:
            ended = end.code
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return captured.out, captured.err

    return run


def read(text: str) -> list[set[tuple[int, int]]]:
    """The links of each line of Pharaoh text."""
    *lines, end = text.split("\n")
    assert end == ""
    return [{(int(s), int(t)) for s, t in (link.split("-") for link in line.split())} for line in lines]


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines())}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_links_of_given_pairs_and_how_good_they_are(place: Path, pairs: list[Pair]) -> None:
    shown = numbers(run_ok("align", MODEL, *FILES, "output=links.pharaoh", "gold=gold0", folder=place))
    links = read((place / "links.pharaoh").read_text())
    counts = LinkCounts()
    for pair, found in zip(pairs, links, strict=True):
        assert all(s < len(pair.german.split()) and t < len(pair.english.split()) for s, t in found)
        counts.add(found, GoldLinks.from_pairs(pair.sure, pair.possible))
    assert list(shown) == ["precision", "recall", "aer", "oracle_aer"]
    assert shown == pytest.approx({**counts.scores(), "oracle_aer": 0}, abs=1e-4)
    assert 0.1 < shown["aer"] < 0.95

    piped = run_in_new_process("align", MODEL, *FILES, "gold=gold1", "gold_base=1", folder=place)
    assert piped.returncode == 0, piped.stderr.decode()
    assert piped.stdout == (place / "links.pharaoh").read_bytes() and numbers(piped.stderr.decode()) == shown


def test_packed_files_and_pairs_that_are_too_long(place: Path, align: Align) -> None:
    """Of which nobody, not even who knows the links, lays out weights."""
    for name in ("test.de", "gold0"):
        (place / f"{name}.gz").write_bytes(gzip.compress((place / name).read_bytes()))
    packed = ("source=test.de.gz", "target=test.en", "gold=gold0.gz")
    assert align(MODEL, *packed) == align(MODEL, *FILES, "gold=gold0")
    links, said = align(MODEL, *packed, "max_length=30")
    assert 0 < links.split("\n")[:-1].count("") < 30 and float(said.split()[-1]) > 0  # the AER of who knows them


def test_a_reader_may_have_enough(place: Path) -> None:
    for side in ("de", "en"):
        (place / f"many.{side}").write_text("Der Hund .\n" * 10_000, encoding="utf-8")
    command = [sys.executable, "-m", "nmt.align", MODEL, "source=many.de", "target=many.en", "links.unit=pieces"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=place, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_corpus_is_aligned_too(align: Align, place: Path) -> None:
    given, _ = align(MODEL, *FILES)
    assert align(MODEL) == (given, "")  # the test split of the run's corpus, which has no gold links
    assert numbers(align(MODEL, "gold=gold0")[1]) == numbers(align(MODEL, *FILES, "gold=gold0")[1])
    shown = numbers(align("checkpoint=runs/toy", "data.split=valid", "output=links")[0])  # which has
    assert shown["oracle_aer"] == 0
    model, tokenizer, run, *_ = load_model(str(place / "runs" / "toy"))
    put(model, "fp32", torch.device("cpu"))
    measured = evaluate_loss(model, tokenizer, load_pairs(run.data, "valid"), torch.device("cpu"))
    assert shown["aer"] == pytest.approx(measured["aer"], abs=0.005)  # bf16, where the processor has it
    assert 0 < measured["entropy"] < np.log(40)


def test_a_model_without_attention_aligns_nothing(align: Align, place: Path) -> None:
    _, tokenizer, run, *_ = load_model(str(place / "runs" / "mine"))
    run.model.attention.score = "none"
    none = place / "runs" / "without"
    none.mkdir(exist_ok=True)
    tokenizer.save(none)
    save_config(none, run)
    model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    save_checkpoint(none, model, tokenizer, run, torch.optim.SGD(model.parameters()), {"step": 1, "best": []})
    _, message = align("checkpoint=runs/without", *FILES, "output=new", code=1)
    assert "model.attention.score=none" in message and not list(place.glob("new*"))


def test_entropy_is_that_of_shares() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4, [0] * 4, [0.1, 0.1, 0, 0]]]).double()
    assert compute_entropy(weights).tolist() == [pytest.approx([np.log(2), 0, np.log(4), 0, np.log(2)])]


def test_two_directions_are_put_together(align: Align) -> None:
    forward = read(align(MODEL, *FILES)[0])
    turned = read(align("checkpoint=runs/back", "source=test.en", "target=test.de")[0])
    backward = [{(s, t) for t, s in found} for found in turned]
    expected = [grow_diag_final_and(*both) for both in zip(forward, backward, strict=True)]
    found, figures = align(MODEL, BACK, *FILES, "gold=gold0")
    assert read(found) == expected and numbers(figures)["oracle_aer"] == 0
    both = [a & b for a, b in zip(forward, backward, strict=True)]
    assert read(align(MODEL, BACK, *FILES, "symmetrize=intersection")[0]) == both != expected


def test_all_weights_in_a_file(align: Align, place: Path) -> None:
    align(MODEL, *FILES, "output=a.jsonl")
    align(MODEL, *FILES, "output=a.npz")
    found = records(place / "a.jsonl")
    assert len(found) == 30
    with np.load(place / "a.npz", allow_pickle=False) as arrays:
        for number, record in enumerate(found):
            weights = np.array(record["weights"])
            assert weights.shape == (len(record["target_pieces"]), len(record["source_pieces"]))
            assert np.abs(weights.sum(1) - 1).max() < 1e-5 and record["score"] < 0
            assert record["source_pieces"][-1] == record["target_pieces"][-1] == "</s>"
            assert all(arrays[f"{number}/{name}"].tolist() == value for name, value in record.items())
    assert found[3]["source_words"] == (place / "test.de").read_text(encoding="utf-8").splitlines()[3].split()


def test_thresholds_and_pieces(align: Align) -> None:
    many = read(align(MODEL, *FILES, "links.threshold=0.05")[0])
    best = read(align(MODEL, *FILES)[0])
    assert sum(map(len, many)) > sum(map(len, best))
    assert any(len({s for s, t in found if t == 0}) > 1 for found in many)
    pieces = read(align(MODEL, *FILES, "links.unit=pieces")[0])
    assert sum(map(len, pieces)) > sum(map(len, best))


def test_links_stay_in_the_line_whatever_is_in_it(align: Align, place: Path) -> None:
    for side, name in enumerate(("odd.de", "odd.en")):
        text = "".join(pair[side] + "\n" for pair in NASTY).encode()
        (place / name).write_bytes(text + b"not \xff UTF-8\n" + b"w " * 1500 + b"\n")
    odd = (MODEL, "source=odd.de", "target=odd.en")
    for extra in ((), ("links.threshold=0.01",), (BACK, "symmetrize=union")):
        out, message = align(*odd, *extra)
        found = read(out)
        assert len(found) == len(NASTY) + 2
        for (source, target), links in zip(NASTY, found, strict=False):
            assert all(s < len(source.split()) and t < len(target.split()) for s, t in links)
        assert found[0] and not any(found[1:4]) and not found[-1]
        assert "U+FFFD" in message and "line 11 has" in message and "it has no links" in message
    align(*odd, "output=odd.jsonl")
    for (source, target), record in zip(NASTY, records(place / "odd.jsonl"), strict=False):
        assert (record["source_words"], record["target_words"]) == (source.split(), target.split())
        assert len(record["source_word_of_piece"]) == len(record["source_pieces"]) == len(record["weights"][0])
    last = records(place / "odd.jsonl")[-1]
    assert last["weights"] is last["score"] is None and len(last["source_pieces"]) > 1500


@pytest.mark.parametrize("beam", [1, 3])
def test_search_and_forced_decoding_see_the_same_alignment(align: Align, place: Path, beam: int) -> None:
    translate = (MODEL, "precision=fp32", "input=test.de", f"search.beam={beam}", f"search.n_best={beam}")
    run_ok("translate", *translate, "output=found.en", "alignments=found.jsonl", folder=place)
    lines = [line for line in (place / "test.de").read_text(encoding="utf-8").splitlines() for _ in range(beam)]
    (place / "repeated.de").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    align(MODEL, "precision=fp32", "source=repeated.de", "target=found.en", "output=forced.jsonl")
    compared = 0
    found_and_given = list(zip(records(place / "found.jsonl"), records(place / "forced.jsonl"), strict=True))
    assert len(found_and_given) == 30 * beam
    for found, given in found_and_given:
        if found["target_pieces"] != given["target_pieces"]:  # cut, or not written as its own text would be
            continue
        compared += 1
        assert found.pop("score") == pytest.approx(given.pop("score"), abs=1e-3)
        np.testing.assert_allclose(found.pop("weights"), given.pop("weights"), atol=1e-5)
        assert found == given
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
        ((*FILES, "gold=latin.gold"), "latin.gold:1: not UTF-8"),
        ((*FILES, "reverse_checkpoint=runs/mine"), "reverse_checkpoint=runs/mine translates de to en, but checkpoint="),
        ((*FILES, "reverse_checkpoint=runs/none"), "error: runs/none is not a folder; give a run"),
        (("data.split=dev2",), "dev2.de does not exist"),
        (("data.source=en", "data.target=de"), "the model was trained to translate de to en"),
    ],
)
def test_what_cannot_be_aligned_is_refused_and_leaves_no_file(
    align: Align, place: Path, arguments: tuple[str, ...], message: str
) -> None:
    gold = (place / "gold0").read_text().splitlines(keepends=True)
    (place / "short.en").write_text("".join((place / "test.en").read_text().splitlines(keepends=True)[:29]))
    (place / "short.gold").write_text("".join(gold[:29]))
    (place / "bad.gold").write_text("".join([*gold[:2], "0-0 1:2\n", *gold[3:]]))
    (place / "far.gold").write_text("".join([gold[0], "99-0\n", *gold[2:]]))
    (place / "latin.gold").write_bytes(b"0-0 \xff\n" + "".join(gold[1:]).encode())
    out, complaint = align(MODEL, *arguments, "output=new", code=1)
    assert not out and message in complaint
    assert not list(place.glob("new*"))


def test_models_of_opposite_directions_are_not_one(place: Path) -> None:
    with pytest.raises(UserError, match="runs/back.* translates in the opposite direction of .*runs/mine"):
        load([place / "runs" / "mine", place / "runs" / "back"])
