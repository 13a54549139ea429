import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.evaluation.metrics import (
    bleu,
    bleu_by_length,
    compute_scores,
    format_number,
    paired_bootstrap,
    sentence_chrf,
)

CAT = "the cat sat on the mat"


# BLEU computed by hand: the geometric mean of the n-gram precisions, times exp(1 - r / c) for c < r words. The k-th
# order without a match counts as 1 / 2^k matches, unless no word matches. TER: edits and shifts per reference word.
@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected_bleu", "expected_ter"),
    [
        (CAT, CAT, 100.0, 0.0),
        ("a dog sat down", "the cat sat there", 100 * (1 / 4 * 1 / 6 * 1 / 8 * 1 / 8) ** 0.25, 75.0),
        ("the cat sat on the", CAT, 100 * math.exp(1 - 6 / 5), 100 / 6),
        ("The cat sat on the mat", CAT, 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25, 0.0),  # TER ignores case
        (CAT, "", 0.0, 100.0),
        ("", "", 0.0, 0.0),
    ],
)
def test_bleu_and_ter_of_one_sentence(hypothesis, reference, expected_bleu, expected_ter):
    scores = compute_scores([hypothesis], [reference])
    assert scores["bleu"] == bleu([hypothesis], [reference]) == pytest.approx(expected_bleu)
    assert scores["ter"] == pytest.approx(expected_ter)


@given(st.lists(st.integers(0, 70), max_size=30))
def test_length_buckets_partition_sentences(lengths):
    sources = ["a " * length for length in lengths]
    references = [f"{length} b c d e" for length in lengths]
    buckets = bleu_by_length(sources, references, references)
    assert sum(count for _, count, _ in buckets) == len(lengths)
    for name, count, score in buckets:
        low, high = {"up to 5": (0, 5), "over 50": (51, 70)}.get(name) or map(int, name.split("-"))
        assert count == sum(low <= length <= high for length in lengths) > 0 and score == pytest.approx(100)


def test_chrf_of_sentences_is_that_of_their_corpora():
    texts, references = ["abc", "", "the dog ran"], ["abd", "x", "a dog runs"]
    expected = [compute_scores([text], [own])["chrf"] for text, own in zip(texts, references, strict=True)]
    assert sentence_chrf(texts, references) == pytest.approx(expected)
    assert expected[0] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)  # F_2 of the means over n-grams up to 3


def test_exact_matches_signatures_and_empty_corpus(caplog):
    lines = ["1", "0", "1", "1 ", *["Hello , world ."] * 200]  # of which sacreBLEU warns by default
    scores = compute_scores(lines, ["1", "1", "1", "1", *lines[4:]])
    assert scores["exact_match"] == 100 * 202 / 204 and not caplog.records
    assert "case:mixed" in scores["signatures"]["bleu"] and "tok:13a" in scores["signatures"]["bleu"]
    assert set(scores["signatures"]) == {"bleu", "chrf", "ter"}
    empty = {"bleu": None, "chrf": None, "ter": None, "exact_match": None, "signatures": {}}
    assert compute_scores([], []) == empty and bleu([], []) is None


def test_format_number():
    values = [1.0, 12.345, 999_999.0, math.exp(700), math.inf, math.nan]
    expected = ["1.00", "12.35", "999999.00", "1.01e+304", "inf", "nan"]
    assert [format_number(value) for value in values] == expected


def test_paired_bootstrap_detects_differences():
    references = [f"{CAT} number {n} and a dog" for n in range(60)]
    worse = [text.replace("dog", "cow") if n % 2 else text for n, text in enumerate(references)]
    systems = {"best": [references], "worse": [worse], "same": [references]}
    results, signatures = paired_bootstrap(systems, references)
    assert {name: results["worse"][name].score for name in signatures} == pytest.approx(
        {name: compute_scores(worse, references)[name] for name in signatures}
    )
    assert results["best"]["bleu"].p_value is None and results["best"]["bleu"].interval == 0
    assert results["worse"]["bleu"].p_value < 0.01 < 0.5 < results["same"]["bleu"].p_value
    assert 0 < results["worse"]["bleu"].interval < 10 and "bs:1000" in signatures["bleu"]
    one_sentence, _ = paired_bootstrap({"best": [[CAT]], "worse": [["the cat sat on a mat"]]}, [CAT])
    assert one_sentence["worse"]["bleu"].p_value == 1  # one sentence shows no significant difference
