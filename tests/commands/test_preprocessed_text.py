"""Tests of the warnings about text that looks segmented, tokenized or escaped."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from builders import TINY_SETTINGS, run_nmt, write_corpus

from nmt.config import DataConfig
from nmt.data.preprocessed_text import PROCESSING_KINDS, TOKENIZED, warn_if_preprocessed

ENGLISH = [f"The dog sees {number} old books, doesn't it? Yes." for number in range(40)]
NORMAL_TEXT = {
    "French": ["Qui est là ? Personne !", "Il a dit : « Bonjour » ; puis il est parti.", "Où vas-tu, mon ami ?"],
    "German": ["Der Hund sagt: „Ja.“", "Das kostet 3,50 Euro o. ä. ...", "'tis 'real' \"text\"", "Es kostet .5"],
    "Chinese": ["狗今天看见3本红书，和4本旧书。", "你好 我是小明", "他说：“好！”"],
    "Arabic": ["الكلب يرى الكتب.", "مرحبا ، كيف حالك ؟"],
    "messages": ["usage: %s [options] <file> &amp", "Press &File; to see them ## or @@ -1,2 @@"],
    "empty lines": ["", " "],
}


@pytest.fixture
def get_warnings(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns the warnings about two sides of `a.de` and `a.en`."""

    def get_warnings(source: list[str], target: list[str], may_be_tokenized: bool = False) -> list[str]:
        caplog.clear()
        for side in ("de", "en"):
            (tmp_path / f"train.{side}").touch()
        data = DataConfig(format="text", path=str(tmp_path))
        warn_if_preprocessed(data, pa.table({"source": source, "target": target}), "train", may_be_tokenized)
        return caplog.messages

    return get_warnings


@pytest.mark.parametrize("language", NORMAL_TEXT)
def test_normal_text_gives_no_warning(get_warnings: Callable[..., list[str]], language: str) -> None:
    lines = (NORMAL_TEXT[language] * 40)[:40]
    assert get_warnings(lines, ENGLISH) == get_warnings(ENGLISH, lines) == []


def split_words(line: str, mark: Callable[[str, str], str]) -> str:
    """Split each word of more than four characters in two, and mark the parts of each word."""
    return " ".join(mark(word[:3], word[3:]) if len(word) > 4 else mark(word, "") for word in line.split())


BPE, PIECES, ENTITIES = list(PROCESSING_KINDS)[:3]
PROCESSORS = {
    BPE: lambda line: split_words(line, lambda first, rest: f"{first}@@ {rest}" if rest else first),
    PIECES: lambda line: split_words(line, lambda first, rest: f"▁{first} {rest}".rstrip()),
    ENTITIES: lambda line: line.replace("'", "&#39;").replace(",", "&#x2C;"),
    TOKENIZED: lambda line: line.replace(",", " ,").replace("n't", " n't").replace("?", " ?").replace(".", " ."),
}


@pytest.mark.parametrize("name", PROCESSING_KINDS)
def test_processed_text_warning_and_its_remedy(
    get_warnings: Callable[..., list[str]], name: str, tmp_path: Path
) -> None:
    original = ["", *(f"Er sagt's, und Hunderte laufen {number}." for number in range(1, 40))]
    processed = ["", *map(PROCESSORS[name], original[1:])]
    [message] = get_warnings(processed, ENGLISH)
    assert message.startswith(f"{tmp_path}/train.de looks {name}: 97.5% of the lines, such as {processed[1]!r}")
    remedy = PROCESSING_KINDS[name][2]
    assert message.endswith(f"To undo it: {remedy}")
    [message] = get_warnings(original, [PROCESSORS[name](line) for line in ENGLISH])
    assert message.startswith(f"{tmp_path}/train.en looks {name}: 100.0%")
    assert len(get_warnings(processed, ENGLISH, may_be_tokenized=True)) == (name != TOKENIZED)
    command = remedy.removesuffix(" < FILE")
    if command != remedy and shutil.which(command.split()[0]):
        text = "\n".join(processed) + "\n"
        done = subprocess.run(command, shell=True, input=text, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == original


def test_single_processed_line_gives_no_warning(get_warnings: Callable[..., list[str]]) -> None:
    normal = [f"Das Wort {number}." for number in range(400)]
    for name, process in PROCESSORS.items():
        lines = [process("Hunderte laufen, und's regnet?"), *normal]
        assert get_warnings(lines, normal[:1] + ["An other one"] * 400) == [], name


def test_identical_sides_give_a_warning(get_warnings: Callable[..., list[str]], tmp_path: Path) -> None:
    [message] = get_warnings(["x", *ENGLISH[:19]], ["y", *(line.upper() for line in ENGLISH[:19])])
    assert message.startswith(f"{tmp_path}/train.de and {tmp_path}/train.en are identical in 95.0% of the lines, such")


def test_training_warns_of_processed_text(tmp_path: Path) -> None:
    """From files and from a stream."""
    folder = write_corpus(tmp_path, train=200, valid=25, test=25)
    for path in folder.glob("*.en"):
        path.write_text("".join(PROCESSORS[BPE](line) + "\n" for line in path.read_text().splitlines()))
    common = ("data=text", f"data.path={folder}", *TINY_SETTINGS, "train.max_steps=1", "data.buffer=150")
    for name, settings in {"a": (), "b": ("data.streaming=true", "train.validate_every=1")}.items():
        message = run_nmt("train", f"name={name}", *common, *settings, folder=tmp_path).stderr.decode()
        for split in ("train", "valid"):
            assert message.count(f"{folder}/{split}.en looks segmented by subword-nmt ('@@ '): ") == 1
            assert message.count(f"{folder}/{split}.en looks tokenized (spaces before punctuation): ") == 1
    message = run_nmt("train", "name=c", *common, "tokenizer.type=word", folder=tmp_path).stderr.decode()
    assert "segmented by subword-nmt" in message and "looks tokenized" not in message
