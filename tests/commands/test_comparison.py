"""Several systems beside each other: what is measured of each, and how it is shown."""

import math
from pathlib import Path

import pytest

from nmt.config import DataConfig
from nmt.evaluation.comparison import MIN_RELIABLE_SENTENCES, compare_systems, count_training_words, format_comparison
from nmt.evaluation.metrics import bleu


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A training text in which "ein" is frequent, "Hund" rare, and "Yak" never."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.de").write_text("ein Hund\n" * 3 + "ein ein\n" * 5)
    (tmp_path / "train.en").write_text("a dog\n" * 8)
    return DataConfig("text", str(tmp_path), source="de", target="en")


def test_a_difference_is_marked_where_chance_hardly_makes_it(data: DataConfig) -> None:
    """Ranges are those of the sources, of each system's own translations; the first system has no p-value."""
    sources = ["ein", "ein Hund ein ein ein ein", "Yak"] * 30
    references = [f"the cat sat on the mat number {n} and a dog" for n in range(90)]
    worse = [text.replace("dog", "cow") if n % 2 else text for n, text in enumerate(references)]
    systems = {"best": references, "same": list(references), "worse": worse}
    found = compare_systems(systems, sources, references, data)
    rows = {line.split()[0]: line for line in format_comparison(found).split("\n\n")[0].splitlines()[1:]}
    assert "(" not in rows["best"] and "*" not in rows["same"] and rows["worse"].count("*") == 3
    assert [(name, count) for name, count, _ in found.by_length["best"]] == [("up to 5", 60), ("6-10", 30)]
    assert [(name, count) for name, count, _ in found.by_rarity["best"]] == [("0", 30), ("2-5", 30), ("6-20", 30)]
    of_length = {name: [score for *_, score in ranges] for name, ranges in found.by_length.items()}
    assert all(math.isclose(score, 100) for score in of_length["best"])
    long = slice(1, None, 3)
    assert of_length["worse"][1] == bleu(worse[long], references[long])
    [_, lengths, rarity] = format_comparison(found).split("\n\n")
    assert lengths.splitlines()[0] == "BLEU by source words"
    assert lengths.splitlines()[3].split() == ["6-10", "30", "100.00", "100.00", f"{of_length['worse'][1]:.2f}"]
    assert rarity.splitlines()[0] == "BLEU by the rarest source word's count in training"


def test_few_sentences_are_named(data: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"the cat sat on mat {n}" for n in range(MIN_RELIABLE_SENTENCES)]
    for count in (MIN_RELIABLE_SENTENCES, MIN_RELIABLE_SENTENCES - 1):
        compare_systems({"a": texts[:count], "b": texts[:count]}, texts[:count], texts[:count], data)
        assert (f"{count} sentences are too few" in caplog.text) == (count < MIN_RELIABLE_SENTENCES)


def test_words_are_counted_in_the_source(data: DataConfig) -> None:
    assert count_training_words(data) == {"ein": 13, "Hund": 3}
