"""Tests of the warnings about text that looks segmented, tokenized or escaped."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from builders import TINY_SETTINGS, run_nmt, write_corpus

from nmt.config import DataConfig
from nmt.config.data import CorpusConfig
from nmt.data.corpus import load_pairs
from nmt.data.mixing import load_mixture
from nmt.data.preprocessed_text import (
    PROCESSING_KINDS,
    TOKENIZED,
    TextSample,
    warn_if_evaluation_is_preprocessed,
    warn_if_training_text_is_preprocessed,
    warn_of_processing,
)

ENGLISH = [f"The dog sees {number} old books, doesn't it? Yes." for number in range(40)]
NORMAL_TEXT = {
    "French": ["Qui est là ? Personne !", "Il a dit : « Bonjour » ; puis il est parti.", "Où vas-tu, mon ami ?"],
    "German": ["Der Hund sagt: „Ja.“", "Das kostet 3,50 Euro o. ä. ...", "'tis 'real' \"text\""],
    "Chinese": ["狗今天看见3本红书，和4本旧书。", "你好 我是小明", "他说：“好！”"],
    "Japanese": ["犬が本を見る。", "これは、何ですか？"],
    "Korean": ["개가 책을 봅니다.", "안녕하세요, 여러분!"],
    "Arabic": ["الكلب يرى الكتب.", "مرحبا ، كيف حالك ؟"],
    "Hindi": ["कुत्ता किताब देखता है ।", "यह क्या है ?"],
    "terms": ["dog", "old book", "house"],
    "messages": [
        "usage: %s [options] <file> &amp",
        "cannot open file '%s' for writing",
        "Press &File; to see them ## or @@ -1,2 @@",
    ],
    "empty lines": ["", " "],
}


def make_sample(name: str, lines: list[str]) -> TextSample:
    return TextSample(name, pa.array(lines, pa.large_string()))


@pytest.fixture
def get_warnings(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return a function that returns the warnings about a source text `a` and a target text `b`."""

    def get_warnings(source: list[str], target: list[str]) -> list[str]:
        caplog.clear()
        warn_of_processing([make_sample("a", source), make_sample("b", target)])
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
def test_processed_text_warning_and_its_remedy(get_warnings: Callable[..., list[str]], name: str) -> None:
    original = ["", *(f"Er sagt's, und Hunderte laufen {number}." for number in range(1, 40))]
    processed_lines = ["", *map(PROCESSORS[name], original[1:])]
    [message] = get_warnings(processed_lines, ENGLISH)
    kind = PROCESSING_KINDS[name]
    assert message.startswith(f"the text looks {name}: 97.5% of a, such as {processed_lines[1]!r}")
    assert message.endswith(f"To undo it: {kind.remedy}") and "of b" not in message
    both = get_warnings(processed_lines, [PROCESSORS[name](line) for line in ENGLISH])
    assert "; 100.0% of b, such as " in both[0]
    command = kind.remedy.removesuffix(" < FILE")
    if command != kind.remedy and shutil.which(command.split()[0]):
        text = "\n".join(processed_lines) + "\n"
        done = subprocess.run(command, shell=True, input=text, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == original


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
def test_tokenized_pattern(line: str, tokenized: bool) -> None:
    assert pc.match_substring_regex(line, PROCESSING_KINDS[TOKENIZED].pattern).as_py() == tokenized


def test_single_processed_line_gives_no_warning(get_warnings: Callable[..., list[str]]) -> None:
    normal = [f"Das Wort {number}." for number in range(400)]
    for name, process in PROCESSORS.items():
        lines = [process("Hunderte laufen, und's regnet?"), *normal]
        assert get_warnings(lines, normal[:1] + ["An other one"] * 400) == [], name


def test_each_corpus_of_mixture_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, count in (("one", 600), ("two", 20)):
        (tmp_path / name).mkdir()
        for split in ("train", "valid"):
            lines = [f"Der Hund sieht {number} Bücher." for number in range(count)]
            (tmp_path / name / f"{split}.de").write_text("\n".join(lines))
            targets = lines if name == "two" else [f"The dog sees {number} books." for number in range(count)]
            (tmp_path / name / f"{split}.en").write_text("\n".join(targets))
    second = CorpusConfig(path=str(tmp_path / "two"), tag="bt")
    data = DataConfig(format="text", path=str(tmp_path / "one"), cache=str(tmp_path / "cache"), corpora=[second])
    pairs, shares = load_mixture(data)
    warn_if_training_text_is_preprocessed(data, pairs, [end for end, _ in shares], load_pairs(data, "valid"))
    [message] = caplog.messages
    assert f"source and target are identical: 100.0% of {tmp_path}/two/train.de, such as 'Der Hund" in message


def test_commands_warn_of_processed_text(tmp_path: Path) -> None:
    """Training warns, from files and from a stream, and so does evaluation."""
    folder = write_corpus(tmp_path, train=200, valid=25, test=25)
    for path in folder.glob("*.en"):
        path.write_text("".join(PROCESSORS[BPE](line) + "\n" for line in path.read_text().splitlines()))
    common = ("data=text", f"data.path={folder}", *TINY_SETTINGS, "train.max_steps=1", "data.buffer=150")
    from_files = run_nmt("train", "name=a", *common, folder=tmp_path).stderr.decode()
    streaming = ("data.streaming=true", "train.validate_every=1")
    from_stream = run_nmt("train", "name=b", *common, *streaming, folder=tmp_path).stderr.decode()
    for message in (from_files, from_stream):
        assert message.count("the text looks segmented by subword-nmt ('@@ '): ") == 1
        assert f"of {folder}/train.en, such as " in message
        assert message.count("the text looks tokenized (spaces before punctuation): ") == 1
        assert f"{folder}/valid.en" in message
    message = run_nmt("train", "name=c", *common, "tokenizer.type=word", folder=tmp_path).stderr.decode()
    assert "segmented by subword-nmt" in message and "looks tokenized" not in message
    message = run_nmt("evaluate", "checkpoint=runs/a", "search.max_length=20", folder=tmp_path).stderr.decode()
    assert message.count("the text looks segmented by subword-nmt ('@@ '): ") == 1
    assert f"of {folder}/test.en, such as " in message


def test_translations_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = {"de": [f"Der Hund sieht {number} Bücher." for number in range(30)], "en": ENGLISH[:30]}
    for side, texts in lines.items():
        (tmp_path / f"test.{side}").write_text("\n".join(texts))
    data = DataConfig(format="text", path=str(tmp_path), cache=str(tmp_path / "cache"))
    warn_if_evaluation_is_preprocessed(data, load_pairs(data, "test"), ENGLISH[:30])
    assert not caplog.records
    warn_if_evaluation_is_preprocessed(
        data, load_pairs(data, "test"), [PROCESSORS[BPE](line.lower()) for line in ENGLISH[:30]]
    )
    [message] = caplog.messages
    assert "100.0% of the translations, such as " in message
