"""When text looks segmented, tokenized, escaped or lower-cased, and when it does not."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from builders import SHARED, TINY_SETTINGS, run_nmt, write_corpus

from nmt.config import DataConfig
from nmt.config.data import CorpusConfig
from nmt.data import processed
from nmt.data.corpus import load_pairs
from nmt.data.mixing import load_mixture
from nmt.data.processed import (
    PROCESSING_KINDS,
    TOKENIZED,
    TextSample,
    warn_of_evaluation,
    warn_of_processing,
    warn_of_training_text,
)

REAL = SHARED
ENGLISH = [f"The dog sees {number} old books, doesn't it? Yes." for number in range(40)]
NORMAL = {
    "French": ["Qui est là ? Personne !", "Il a dit : « Bonjour » ; puis il est parti.", "Où vas-tu, mon ami ?"],
    "German": ["Der Hund sagt: „Ja.“", "Das kostet 3,50 Euro o. ä. ...", "'tis 'real' \"text\""],
    "Chinese": ["狗今天看见3本红书，和4本旧书。", "你好 我是小明", "他说：“好！”"],
    "Japanese": ["犬が本を見る。", "これは、何ですか？"],
    "Korean": ["개가 책을 봅니다.", "안녕하세요, 여러분!"],
    "Thai": ["สุนัขเห็นหนังสือ ๆ สีแดง", "วันนี้ ฝนตก"],
    "Khmer": ["ឆ្កែឃើញសៀវភៅ ។"],
    "Tibetan": ["ཁྱི་ཡིས་དཔེ་ཆ་མཐོང་། །"],
    "Arabic": ["الكلب يرى الكتب.", "مرحبا ، كيف حالك ؟"],
    "Hebrew": ["הכלב רואה את הספר הישן."],
    "Hindi": ["कुत्ता किताब देखता है ।", "यह क्या है ?"],
    "Georgian": ["ძაღლი ხედავს წიგნს დღეს.", "გამარჯობა მეგობარო როგორ ხარ?"],
    "Maltese": ["Ġorġ mar id-dar ma' Ġużeppi.", "Il-Ġimgħa li għaddiet kien hawn."],
    "terms": ["dog", "old book", "house"],
    "messages": [
        "usage: %s [options] <file> &amp",
        "cannot open file '%s' for writing",
        "Press &File; to see them ## or @@ -1,2 @@",
    ],
    "nothing": ["", " "],
}


def text(name: str, lines: list[str]) -> TextSample:
    return TextSample(name, pa.array(lines, pa.large_string()), np.arange(1, len(lines) + 1), len(lines))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """The warnings about a text and its translation."""

    def said(source: list[str], target: list[str]) -> list[str]:
        caplog.clear()
        warn_of_processing((text("a", source), text("b", target)))
        return caplog.messages

    return said


@pytest.mark.parametrize("language", NORMAL)
def test_normal_text_is_left_in_peace(said: Callable[..., list[str]], language: str) -> None:
    lines = (NORMAL[language] * 40)[:40]
    assert said(lines, ENGLISH) == said(ENGLISH, lines) == []


@pytest.mark.parametrize("name", ["multi30k", "tatoeba_deu"])
@pytest.mark.skipif(not REAL.exists(), reason="the corpora are not here")
def test_real_corpora_are_left_in_peace(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = DataConfig(format="text", path=str(REAL / name), cache=str(tmp_path))
    pairs, valid = load_pairs(data, "train"), load_pairs(data, "valid")
    warn_of_training_text(data, pairs, [len(pairs)], valid)
    assert not caplog.records


def cut(line: str, mark: Callable[[str, str], str]) -> str:
    """A line with each longer word cut in two, which are marked."""
    return " ".join(mark(word[:3], word[3:]) if len(word) > 4 else mark(word, "") for word in line.split())


MARKED = {
    "bpe": lambda line: cut(line, lambda first, rest: f"{first}@@ {rest}" if rest else first),
    "sentencepiece": lambda line: cut(line, lambda first, rest: f"▁{first} {rest}".rstrip()),
    "wordpiece": lambda line: cut(line, lambda first, rest: f"{first} ##{rest}" if rest else first),
    "joiner": lambda line: cut(line, lambda first, rest: f"{first} ￭{rest}" if rest else first),
    "word end": lambda line: cut(line, lambda first, rest: f"{first} {rest}</w>" if rest else f"{first}</w>"),
    "byte-level": lambda line: cut(line, lambda first, rest: f"Ġ{first} {rest}".rstrip()),
    "entities": lambda line: line.replace("'", "&#39;").replace(",", "&#x2C;"),
    TOKENIZED: lambda line: line.replace(",", " ,").replace("n't", " n't").replace("?", " ?").replace(".", " ."),
}


@pytest.mark.parametrize("name", PROCESSING_KINDS)
def test_processed_text_is_named_counted_and_undone(said: Callable[..., list[str]], name: str) -> None:
    plain = [f"Er sagt's, und Hunderte laufen {number}." for number in range(40)]
    marked = ["", *map(MARKED[name], plain[1:])]
    [message] = said(marked, ENGLISH)
    kind = PROCESSING_KINDS[name]
    said_of_a = f"the text looks {kind.description}: 39 of 40 lines (97.5%) of a, first: 2, {marked[1]!r}"
    assert message.startswith(said_of_a)
    assert message.endswith(f"To undo it: {kind.remedy}") and "of b" not in message
    both = said(marked, [MARKED[name](line) for line in ENGLISH])
    assert len(both) == 1 and "; 40 of 40 lines (100.0%) of b, first: 1" in both[0]
    command = kind.remedy.removesuffix(" < FILE")
    if command != kind.remedy and shutil.which(command.split()[0]):
        done = subprocess.run(
            command, shell=True, input="\n".join(marked) + "\n", capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == ["", *plain[1:]]


@pytest.mark.parametrize(
    ("line", "tokenized"),
    [
        ("Hello , world .", True),
        ("Two men , both in hats", True),
        ("It 's raining", True),
        ("They do n't know", True),
        ("a well @-@ known man", True),
        ("狗 看见 书 。", True),
        ("Hello, world.", False),
        ("He's here; they don't know: it costs 3.50 or .5 a piece ...", False),
        ("Qui est là ? Personne !", False),
        ("'tis 'real' \"text\"", False),
        ("", False),
    ],
)
def test_tokenized_lines(line: str, tokenized: bool) -> None:
    assert text("a", [line]).matches(PROCESSING_KINDS[TOKENIZED].pattern).tolist() == [tokenized]


def test_a_few_odd_lines_say_nothing_of_a_text(said: Callable[..., list[str]]) -> None:
    plain = [f"Das Wort {number}." for number in range(400)]
    for name, mark in MARKED.items():
        odd = [mark("Hunderte laufen, und's regnet?"), *plain]
        assert said(odd, plain[:1] + ["An other one"] * 400) == [], name


def test_sides_that_are_equal(said: Callable[..., list[str]]) -> None:
    lines = [f"Der Hund sieht {number} Bücher." for number in range(40)]
    [message] = said(lines, [line.upper() + " " for line in lines])
    assert message.startswith("source and target are identical: a and b in 40 of 40 lines (100.0%), first: 1, 'Der")
    assert "4 of 40 lines (10.0%)" not in " ".join(said(lines, lines[:4] + ENGLISH[:36]))
    [message] = said(lines, ENGLISH[:30] + lines[30:])
    assert "10 of 40 lines (25.0%), first: 31" in message


@pytest.mark.parametrize("sentence", ["Der Hund sieht ihn.", "Собака видит книгу.", "Ένας σκύλος βλέπει."])
def test_lower_case_beside_capitals(said: Callable[..., list[str]], sentence: str) -> None:
    lines = [sentence] * 40
    [message] = said([line.lower() for line in lines], ENGLISH)
    assert "capitals occur in 0 of 40 sentences of a (first: 1), but in 40 of 40 sentences of b" in message
    assert said([line.lower() for line in lines], [line.lower() for line in ENGLISH]) == []
    assert said(lines, ENGLISH) == []


def test_of_many_lines_a_sample_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: object) -> None:
    monkeypatch.setattr(processed, "SAMPLE_LINES", 50)
    for split, count in (("train", 1_000), ("valid", 20)):
        (tmp_path / f"{split}.de").write_text("".join(f"lov@@ es {number}\n" for number in range(count)))
        (tmp_path / f"{split}.en").write_text("".join(f"love {number}\n" for number in range(count)))
    data = DataConfig(format="text", path=str(tmp_path), cache=str(tmp_path / "cache"))
    pairs, valid = load_pairs(data, "train"), load_pairs(data, "valid")
    warn_of_training_text(data, pairs, [1_000], valid)
    [message] = caplog.messages  # type: ignore[attr-defined]
    assert f"50 of 50 lines sampled (of 1,000) (100.0%) of {tmp_path}/train.de, first: 1, 'lov@@ es 0'" in message
    assert f"20 of 20 lines (100.0%) of {tmp_path}/valid.de" in message


def test_each_corpus_of_a_mixture_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, count in (("one", 600), ("two", 20)):
        (tmp_path / name).mkdir()
        for split in ("train", "valid"):
            lines = [f"Der Hund sieht {number} Bücher." for number in range(count)]
            (tmp_path / name / f"{split}.de").write_text("\n".join(lines))
            other = lines if name == "two" else [f"The dog sees {number} books." for number in range(count)]
            (tmp_path / name / f"{split}.en").write_text("\n".join(other))
    two = CorpusConfig(path=str(tmp_path / "two"), tag="bt")
    data = DataConfig(format="text", path=str(tmp_path / "one"), cache=str(tmp_path / "cache"), corpora=[two])
    pairs, shares = load_mixture(data)
    warn_of_training_text(data, pairs, [end for end, _ in shares], load_pairs(data, "valid"))
    [message] = caplog.messages
    two_sides = f"{tmp_path}/two/train.de and {tmp_path}/two/train.en"
    assert f"source and target are identical: {two_sides} in 20 of 20" in message


def test_the_built_in_corpus_is_left_in_peace(caplog: pytest.LogCaptureFixture) -> None:
    data = DataConfig()
    valid = load_pairs(data, "valid")
    warn_of_training_text(data, valid, [len(valid)], valid)
    warn_of_evaluation(data, load_pairs(data, "test"), ["Ein Hund ."] * 1_000)
    assert not caplog.records


def test_commands_warn(tmp_path: Path) -> None:
    """Training, of a stream, too, and evaluation; the last also of what the model writes."""
    folder = write_corpus(tmp_path, train=600, valid=30, test=30)
    for path in folder.glob("*.en"):
        path.write_text("".join(MARKED["bpe"](line) + "\n" for line in path.read_text().splitlines()))
    common = ("data=text", f"data.path={folder}", *TINY_SETTINGS, "train.max_steps=2", "data.buffer=300")
    whole = run_nmt("train", "name=a", *common, folder=tmp_path).stderr.decode()
    stream = "data.streaming=true", "train.validate_every=2"
    streamed = run_nmt("train", "name=b", *common, *stream, folder=tmp_path).stderr.decode()
    for message, count in ((whole, 600), (streamed, 300)):
        assert message.count("the text looks segmented by subword-nmt ('@@ '): ") == 1
        assert f" of {count} lines (" in message and f"of {folder}/train.en, first: " in message
        assert message.count("the text looks tokenized (spaces before punctuation): ") == 1
        assert f"{folder}/valid.en" in message
    words = run_nmt("train", "name=c", *common, "tokenizer.type=word", folder=tmp_path).stderr.decode()
    assert "segmented by subword-nmt" in words and "looks tokenized" not in words
    measured = run_nmt("evaluate", "checkpoint=runs/a", folder=tmp_path).stderr.decode()
    assert measured.count("the text looks segmented by subword-nmt ('@@ '): ") == 1
    assert f"of {folder}/test.en, first: " in measured


def test_translations_are_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = {"de": [f"Der Hund sieht {number} Bücher." for number in range(30)], "en": ENGLISH[:30]}
    for side, texts in lines.items():
        (tmp_path / f"test.{side}").write_text("\n".join(texts))
    data = DataConfig(format="text", path=str(tmp_path), cache=str(tmp_path / "cache"))
    warn_of_evaluation(data, load_pairs(data, "test"), ENGLISH[:30])
    assert not caplog.records
    warn_of_evaluation(data, load_pairs(data, "test"), [MARKED["bpe"](line.lower()) for line in ENGLISH[:30]])
    segmented, lower = caplog.messages
    assert "30 of 30 lines (100.0%) of the translations, first: 1, " in segmented
    assert "capitals occur in 0 of 30 sentences of the translations" in lower
