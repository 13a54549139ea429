"""Tests of the comparison of systems and its printed form."""

import math

import pytest

from nmt.evaluation.comparison import MIN_RELIABLE_SENTENCES, compare_systems, format_comparison
from nmt.evaluation.metrics import bleu


def test_compare_systems_marks_significant_differences() -> None:
    """Ranges depend on the sources, scores on each system's translations. The first system has no p-value."""
    sources = ["ein", "ein Hund ein ein ein ein", "Yak"] * 30
    references = [f"the cat sat on the mat number {n} and a dog" for n in range(90)]
    worse = [text.replace("dog", "cow") if n % 2 else text for n, text in enumerate(references)]
    systems = {"best": [references], "same": [list(references)], "worse": [worse]}
    comparison = compare_systems(systems, sources, references)
    [scores, by_length, legend] = format_comparison(comparison).split("\n\n")
    rows = {line.split()[0]: line for line in scores.splitlines()[1:]}
    assert "(" not in rows["best"] and "*" not in rows["same"] and rows["worse"].count("*") == 3
    assert [(name, count) for name, count, _ in comparison.by_length["best"]] == [("up to 5", 60), ("6-10", 30)]
    assert all(math.isclose(score, 100) for *_, score in comparison.by_length["best"])
    long_sources = slice(1, None, 3)
    worse_score = comparison.by_length["worse"][1][2]
    assert worse_score == bleu(worse[long_sources], references[long_sources])
    assert by_length.splitlines()[0] == "BLEU by source words" and legend.startswith("± half of the 95% confidence")
    assert by_length.splitlines()[3].split() == ["6-10", "30", "100.00", "100.00", f"{worse_score:.2f}"]


def test_compare_systems_warns_of_few_sentences(caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"the cat sat on mat {n}" for n in range(MIN_RELIABLE_SENTENCES)]
    for count in (MIN_RELIABLE_SENTENCES, MIN_RELIABLE_SENTENCES - 1):
        few = texts[:count]
        compare_systems({"a": [few], "b": [few]}, few, few)
        assert (f"from {count} sentences are not reliable" in caplog.text) == (count < MIN_RELIABLE_SENTENCES)


def test_compare_systems_over_seeds() -> None:
    references = [f"the cat sat on the mat number {n} and a dog" for n in range(120)]
    runs = [
        [text if (n + seed) % 3 else text.replace("dog", "cow") for n, text in enumerate(references)]
        for seed in range(3)
    ]
    systems = {"worse": runs, "best": [references, references]}
    comparison = compare_systems(systems, ["ein"] * 120, references)
    rows = format_comparison(comparison).split("\n\n")[0].splitlines()
    assert rows[1].split()[:4] == ["worse", f"{comparison.scores['worse']['bleu'].mean:.2f}", "±", "0.00"]
    assert rows[3].startswith("best - worse") and rows[3].count("*") == 3
    assert rows[4].split() == ["seeds", "needed", "2", "2", "2"]
    mean = sum(bleu(texts, references) for texts in runs) / 3
    assert math.isclose(comparison.by_length["worse"][0][2], mean)
