"""nmt.align without a model: it trains an aligner on the pairs."""

import json
from pathlib import Path

import pytest
from builders import run_error, run_nmt, run_ok

from nmt.data.toy.corpus import generate
from nmt.data.word_links import format_pharaoh

FILES = ("source=train.de", "target=train.en")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder, whose name has a space, with pairs, their gold links and the links found."""
    folder = tmp_path_factory.mktemp("two words")
    for name, pairs in generate(1, {"train": 800, "test": 50}).items():
        (folder / f"{name}.de").write_text("".join(f"{pair.german}\n" for pair in pairs), encoding="utf-8")
        (folder / f"{name}.en").write_text("".join(f"{pair.english}\n" for pair in pairs), encoding="utf-8")
        (folder / f"{name}.gold").write_text("".join(f"{format_pharaoh(pair.sure)}\n" for pair in pairs))
    printed = run_ok("align", *FILES, "output=train links.pharaoh", "gold=train.gold", folder=folder)
    (folder / "printed").write_text(printed)
    return folder


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_one_command_trains_aligns_and_measures(folder: Path) -> None:
    scores = dict(line.split() for line in read_lines(folder / "printed"))
    assert scores.keys() == {"precision", "recall", "aer"} and float(scores["aer"]) < 0.15
    assert len(read_lines(folder / "train links.pharaoh")) == 800


def test_threshold_and_all_weights(folder: Path) -> None:
    links = read_lines(folder / "train links.pharaoh")
    more = run_ok("align", *FILES, "links.threshold=0.1", folder=folder).split("\n")[:-1]
    assert all(set(line.split()) <= set(other.split()) for line, other in zip(links, more, strict=True))
    run_ok("align", *FILES, "output=weights.jsonl", folder=folder)
    for line, record in zip(links, map(json.loads, read_lines(folder / "weights.jsonl")), strict=True):
        weights = record["weights"]
        assert len(weights) == len(record["target_words"]) and len(weights[0]) == len(record["source_words"])
        assert line == format_pharaoh(
            (s, t) for t, row in enumerate(weights) for s, weight in enumerate(row) if weight >= 0.5
        )


def test_empty_attached_and_very_many_words(folder: Path) -> None:
    odd = (("", "nothing"), ("DER HUND schläft!", "The dog sleeps."), ("Ein Hund", ""), ("", ""), ("ein " * 1_500,) * 2)
    for side, name in enumerate(("de", "en")):
        text = "".join(f"{pair[side]}\n" for pair in odd) + (folder / f"train.{name}").read_text(encoding="utf-8")
        (folder / f"odd.{name}").write_text(text, encoding="utf-8")
    done = run_nmt("align", "source=odd.de", "target=odd.en", folder=folder)
    links = done.stdout.decode().split("\n")[: len(odd)]
    assert [bool(line) for line in links] == [False, True, False, False, False] and "1-1" in links[1].split()
    assert "1 line of more than 1,000,000 pairs of words without links (first: 5)" in done.stderr.decode()


def test_words_and_marks_of_raw_text_with_their_places(tmp_path: Path) -> None:
    pairs = [
        ("Der Hund (dort) schläft.", "The dog (there) is sleeping."),
        ("  «Wo ist er?»", "“Where is he?”"),
        ("سلام، دنیا!", "Hello, world!"),
        ("他说：“狗在睡觉。”", "He said: “The dog is sleeping.”"),
        ("我 喜欢 苹果。", "(大學) 입니다."),
        ("", ""),
    ]
    for side, suffix in enumerate(("src", "tgt")):
        (tmp_path / f"raw.{suffix}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    files = ("source=raw.src", "target=raw.tgt", "tokenize=true")
    run_ok("align", *files, "output=a.jsonl", folder=tmp_path)
    records = [json.loads(line) for line in read_lines(tmp_path / "a.jsonl")]
    for pair, record in zip(pairs, records, strict=True):
        for side, line in zip(("source", "target"), pair, strict=True):
            words, spans = record[f"{side}_words"], record[f"{side}_spans"]
            assert [line[start:end] for start, end in spans] == words
            assert "".join(words) == "".join(line.split())
    assert records[0]["source_words"] == ["Der", "Hund", "(", "dort", ")", "schläft", "."]
    assert records[1]["source_words"][0] == "«" and records[2]["source_words"][1:] == ["،", "دنیا", "!"]
    assert records[3]["source_words"][-2:] == ["。", "”"]
    assert records[4]["source_words"] == ["我", "喜欢", "苹果", "。"]
    assert records[4]["target_words"][:3] == ["(", "大學", ")"]


@pytest.mark.parametrize("tokenize", ["false", "true"])
def test_gold_changes_nothing_but_what_is_printed(tokenize: str, tmp_path: Path) -> None:
    """Gold links count words between spaces, also where the aligner splits these words further."""
    pairs = [("狗在睡觉。 好的。", "The dog is sleeping. Okay."), ("Hund (da).", "dog (there).")] * 20
    for name, side in (("src", 0), ("tgt", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    (tmp_path / "gold").write_text("0-1 0-3 1-4\n0-0 1-1\n" * 20)
    files = ("source=src", "target=tgt", f"tokenize={tokenize}")
    run_ok("align", *files, "output=without.jsonl", folder=tmp_path)
    printed = run_ok("align", *files, "output=with.jsonl", "gold=gold", folder=tmp_path)
    assert (tmp_path / "with.jsonl").read_bytes() == (tmp_path / "without.jsonl").read_bytes()
    found, sure, both = 0, 0, 0
    for line, gold, pair in zip(read_lines(tmp_path / "with.jsonl"), read_lines(tmp_path / "gold"), pairs, strict=True):
        record, links = json.loads(line), set()
        places = [
            [sum(character == " " for character in text[:start]) for start, _ in record[f"{side}_spans"]]
            for side, text in zip(("source", "target"), pair, strict=True)
        ]
        for t, row in enumerate(record["weights"]):
            links |= {f"{places[0][s]}-{places[1][t]}" for s, weight in enumerate(row) if weight >= 0.5}
        found, sure = found + len(links), sure + len(gold.split())
        both += len(links & set(gold.split()))
    scores = dict(line.split() for line in printed.splitlines())
    assert float(scores["precision"]) == pytest.approx(both / found, abs=1e-4) and both > 40
    assert float(scores["recall"]) == pytest.approx(both / sure, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("target=train.en",), "source= and target= belong together"),
        (("source=train.de", "target=test.en"), "source=train.de has 800 lines, target=test.en has 50"),
        (("source=test.de", "target=none"), "target=none is not a file"),
        (("source=test.de", "target=test.en", "gold=train.gold"), "train.gold has 800 lines for 50 pairs"),
    ],
)
def test_invalid_settings_are_refused(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    assert message in run_error("align", *arguments, "output=refused", folder=folder)
    assert not (folder / "refused").exists()
