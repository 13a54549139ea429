import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.evaluation.metrics import (
    bleu,
    bleu_by_length,
    bleu_by_rarity,
    compute_scores,
    format_perplexity,
    paired_bootstrap,
    sentence_chrf,
)

CAT = "the cat sat on the mat"


# BLEU by hand: the geometric mean of the n-gram precisions, times exp(1 - r / c) for c < r words; the k-th order
# without a match counts as 1 / 2^k matches, unless no word matches. TER: edits and shifts per reference word.
@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected_bleu", "expected_ter"),
    [
        (CAT, CAT, 100.0, 0.0),
        ("a dog ran off", "the cat sat there", 0.0, 100.0),
        ("a dog sat down", "the cat sat there", 100 * (1 / 4 * 1 / 6 * 1 / 8 * 1 / 8) ** 0.25, 75.0),
        ("the cat sat on the", CAT, 100 * math.exp(1 - 6 / 5), 100 / 6),
        (CAT + " .", CAT, 100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25, 100 / 6),
        ("on the mat the cat sat", CAT, 100 * (6 / 6 * 4 / 5 * 2 / 4 * (1 / 2) / 3) ** 0.25, 100 / 6),
        ("The cat sat on the mat", CAT, 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25, 0.0),  # TER ignores case
        ("", CAT, 0.0, 100.0),
        (CAT, "", 0.0, 100.0),
        ("", "", 0.0, 0.0),
    ],
)
def test_one_sentence(hypothesis, reference, expected_bleu, expected_ter):
    measured = compute_scores([hypothesis], [reference])
    assert measured["bleu"] == pytest.approx(expected_bleu)
    assert measured["ter"] == pytest.approx(expected_ter)
    assert measured["bleu"] == bleu([hypothesis], [reference])


# chrF by hand: F_2 of the mean precision and the mean recall over the orders 1 to 6 that there are.
@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("abcdef", "abcdef", 100.0),
        ("ab", "ab", 100.0),
        ("a b", "ab", 100.0),  # spaces do not count
        ("abc", "abd", 100 * (2 / 3 + 1 / 2 + 0) / 3),
        ("xyz", "abc", 0.0),
        ("", "abc", 0.0),
    ],
)
def test_chrf(hypothesis, reference, expected):
    assert compute_scores([hypothesis], [reference])["chrf"] == pytest.approx(expected, abs=1e-6)


def test_bleu_sums_over_the_corpus_before_it_divides():
    other = "a dog ran off"
    precisions = (6 + 2) / 10 * (5 + 1) / 8 * 4 / 6 * 3 / 4
    assert bleu([CAT, "a dog walked home"], [CAT, other]) == pytest.approx(100 * precisions**0.25)


@given(st.lists(st.integers(0, 70), max_size=30))
def test_ranges_of_lengths_hold_every_sentence_once(lengths):
    sources = ["a " * length for length in lengths]
    references = [f"{length} b c d e" for length in lengths]
    found = bleu_by_length(sources, references, references)
    assert sum(sentences for _, sentences, _ in found) == len(lengths)
    for name, sentences, score in found:
        low, high = {"up to 5": (0, 5), "over 50": (51, 70)}.get(name) or map(int, name.split("-"))
        assert sentences == sum(low <= length <= high for length in lengths) > 0 and score == pytest.approx(100)


def test_sentence_chrf_is_chrf_of_each_alone():
    texts, references = ["a cat", "", "the dog ran"], ["the cat", "x", "a dog runs"]
    expected = [compute_scores([text], [reference])["chrf"] for text, reference in zip(texts, references, strict=True)]
    assert sentence_chrf(texts, references) == pytest.approx(expected)


def test_signatures_say_how_it_was_computed():
    signatures = compute_scores([CAT], [CAT])["signatures"]
    assert set(signatures) == {"bleu", "chrf", "ter"}
    assert "case:mixed" in signatures["bleu"] and "tok:13a" in signatures["bleu"]
    assert all("version:" in signature for signature in signatures.values())


def test_no_sentences_have_no_score():
    assert compute_scores([], []) == {"bleu": None, "chrf": None, "ter": None, "signatures": {}}
    assert bleu([], []) is None


def test_a_perplexity_is_short_enough_to_be_read():
    assert [format_perplexity(value) for value in (1.0, 12.345, 999_999.0, math.exp(700), math.inf, math.nan)] == [
        *("1.00", "12.35", "999999.00", "1.01e+304", "inf", "nan")
    ]


def test_scoring_does_not_warn_by_itself(caplog):
    lines = ["Hello , world ."] * 200  # enough for sacreBLEU to complain
    compute_scores(lines, lines)
    assert not caplog.records


def test_sentences_are_grouped_by_their_rarest_word():
    counts = {"a": 2000, "rare": 3, ".": 5000}
    sources = ["a.", "a rare .", "a new rare .", "", "a a"]
    found = bleu_by_rarity(sources, [CAT] * 5, [CAT] * 5, counts)
    assert [(name, sentences) for name, sentences, _ in found] == [("0", 2), ("2-5", 1), ("over 1000", 2)]
    assert all(score == pytest.approx(100) for *_, score in found)


def test_the_bootstrap_tells_a_difference_from_none():
    references = [f"{CAT} number {n} and a dog" for n in range(60)]
    worse = [text.replace("dog", "cow") if n % 2 else text for n, text in enumerate(references)]
    found, signatures = paired_bootstrap({"best": references, "worse": worse, "same": references}, references)
    assert {name: found["worse"][name].score for name in signatures} == pytest.approx(
        {name: compute_scores(worse, references)[name] for name in signatures}
    )
    assert found["best"]["bleu"].p_value is None and found["best"]["bleu"].interval == 0
    assert found["worse"]["bleu"].p_value < 0.01 < 0.5 < found["same"]["bleu"].p_value
    alone, _ = paired_bootstrap({"best": [CAT], "worse": ["the cat sat on a mat"]}, [CAT])
    assert alone["worse"]["bleu"].p_value == 1  # of one sentence nothing can be said
    assert 0 < found["worse"]["bleu"].interval < 10 and "bs:1000" in signatures["bleu"]
