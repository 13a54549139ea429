"""Alignment records: links between words or pieces, and their file formats."""

import itertools
import json
import math

import numpy as np
import pytest
from builders import write_alignments
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import LinksConfig
from nmt.data.word_links import GoldLinks, alignment_targets, format_pharaoh
from nmt.decoding.alignment import Record, extract_links, pool_to_words
from nmt.decoding.translation import Translation
from nmt.evaluation.metrics import LinkCounts


def naive_word_weights(weights, source_index, target_index):
    """Return for each target word the weight of each source word, and that of -1, no word."""
    table = []
    for t in range(max([*target_index, -1]) + 1):
        rows = [row for row, word in zip(weights, target_index, strict=True) if word == t]
        table.append(dict.fromkeys(source_index, 0))
        for w, word in itertools.chain(*(zip(row, source_index, strict=True) for row in rows)):
            table[-1][word] += w / len(rows)
    return table


def word_index(pieces_of_word):
    """Return the word of each piece, and -1 for `</s>`: [2, 1] -> [0, 0, 1, -1]."""
    return [word for word, pieces in enumerate(pieces_of_word) for _ in range(pieces)] + [-1]


@st.composite
def random_weights(draw):
    source, target = (word_index(draw(st.lists(st.integers(1, 3), max_size=5))) for _ in range(2))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).dirichlet(np.ones(len(source)), size=len(target)), source, target


@given(random_weights())
def test_word_weights_and_links_match_naive_implementation(pair):
    weights, source, target = pair
    words = pool_to_words(*pair)[:-1, :-1]
    assert words.shape == (max(target) + 1, max(source) + 1)
    expected = naive_word_weights(*pair)
    for row, weight_of_word in zip(words, expected, strict=True):
        np.testing.assert_allclose(row, [weight_of_word[s] for s in range(len(row))], atol=1e-12)
    best = [max(weight_of_word, key=weight_of_word.get) for weight_of_word in expected]
    assert extract_links(*pair) == [(s, t) for t, s in enumerate(best) if s != -1 and expected[t][s] > 0]
    for threshold in (0.1, 0.5, 1.0):
        expected = [(s, t) for t in range(len(words)) for s in range(words.shape[1]) if words[t, s] >= threshold]
        assert extract_links(*pair, threshold) == expected


@pytest.mark.parametrize(
    ("weights", "source", "target", "expected"),
    [
        pytest.param([[0.4, 0.6]], [0, -1], [0], [], id="no link if </s> has the largest weight"),
        pytest.param([[0.5, 0.5]], [0, -1], [0], [(0, 0)], id="a word wins a tie with </s>"),
        pytest.param([[0.5, 0.5]], [0, 1], [0], [(0, 0)], id="the first word wins a tie"),
        pytest.param([[0.0, 0.0]], [0, -1], [0], [], id="no link if all weights are 0"),
        pytest.param([[math.nan, 1.0], [1.0, 0.0]], [0, 1], [0, 1], [(0, 1)], id="no link if a weight is NaN"),
        pytest.param([[1.0, 0.0], [1.0, 0.0]], [0, -1], [0, -1], [(0, 0)], id="</s> of the target has no link"),
        pytest.param([[1.0]], [-1], [-1], [], id="empty sentences"),
    ],
)
def test_extract_links(weights, source, target, expected):
    assert extract_links(np.array(weights), source, target) == expected


def test_empty_translation_has_no_links():
    for threshold in (None, 0.5):
        assert extract_links(np.zeros((0, 3)), [0, 1, -1], [], threshold) == []
    assert pool_to_words(np.zeros((0, 3)), [0, 1, -1], []).shape == (1, 3)


@given(random_weights(), st.data())
def test_weights_from_gold_links_give_no_alignment_errors(pair, data):
    """Use at most one sure link per target word."""
    _, source, target = pair
    source_words, target_words = max(source) + 1, max(target) + 1
    word = st.integers(0, source_words - 1)
    choices = st.tuples(st.none() | word, st.sets(word)) if source_words else st.just((None, set()))
    drawn = [data.draw(choices) for _ in range(target_words)]
    sure = {(s, t) for t, (s, _) in enumerate(drawn) if s is not None}
    gold = GoldLinks.from_pairs(sure, {(s, t) for t, (_, possible) in enumerate(drawn) for s in possible})
    weights = alignment_targets(gold, source, target)
    np.testing.assert_allclose(weights.sum(1), 1)
    links = extract_links(weights, source, target)
    assert sure <= set(links) <= gold.possible
    assert {t for _, t in links} == {t for _, t in gold.possible}
    counts = LinkCounts()
    counts.add(links, gold)
    assert counts.scores()["aer"] in (0.0, None)


def test_target_word_with_two_sure_links():
    gold = GoldLinks.from_pairs({(0, 0), (2, 0)}, {(1, 0)})
    weights = alignment_targets(gold, [0, 0, 1, 2, -1], [0, -1])
    np.testing.assert_allclose(weights, [[0.25, 0.25, 0, 0.5, 0], [0, 0, 0, 0, 1]])
    assert extract_links(weights, [0, 0, 1, 2, -1], [0, -1]) == [(0, 0)]
    assert extract_links(weights, [0, 0, 1, 2, -1], [0, -1], 0.4) == [(0, 0), (2, 0)]


PIECES = ["▁Ja", "woh", "l", "▁</w>\u2028", "<0xF0>", "</s>"], ["▁Yes", "▁\U0001f600", "</s>"]


def make_record(weights, score=-1.5):
    return Translation("Yes", *PIECES, score, weights).record


def make_random_record(seed=1):
    return make_record(np.random.default_rng(seed).dirichlet(np.ones(6), size=3))


def test_record_has_pieces_words_and_word_weights():
    record = make_random_record()
    assert record.source_words == ["Jawohl", "</w>\u2028\ufffd"] and record.target_words == ["Yes", "\U0001f600"]
    assert record.source_word_of_piece == [0, 0, 0, 1, 1, -1] and record.target_word_of_piece == [0, 1, -1]
    assert record.word_weights().shape == (2, 2)
    assert make_record(None).word_weights() is None and make_record(None).links(LinksConfig()) == []


def test_links_between_words():
    weights = np.array([[0.1, 0.2, 0.2, 0.3, 0.2, 0.0], [0, 0, 0, 0.4, 0, 0.6], [0.9, 0, 0, 0, 0, 0.1]])
    assert make_record(weights).links(LinksConfig()) == [(0, 0)]
    assert make_record(weights).links(LinksConfig(threshold=0.4)) == [(0, 0), (1, 0), (1, 1)]


def test_json_record_preserves_all_values():
    line = make_random_record().to_json()
    assert "\n" not in line and "▁Ja" in line
    loaded = json.loads(line)
    assert list(loaded) == [name for name in Record.__slots__ if not name.endswith("_spans")]
    weights = make_random_record().weights
    assert np.array_equal(loaded["weights"], weights)
    fp32_weights = json.loads(make_record(weights.astype(np.float32)).to_json())["weights"]
    assert np.array_equal(np.array(fp32_weights, dtype=np.float32), weights.astype(np.float32))


def test_non_finite_values_become_null_in_json():
    loaded = json.loads(make_record(np.array([[math.nan, 1.0], [math.inf, 0.0]]), -math.inf).to_json())
    assert loaded["weights"] == [[None, 1.0], [None, 0.0]] and loaded["score"] is None
    assert json.loads(make_record(None).to_json())["weights"] is None


def test_file_suffix_selects_alignment_format():
    records = [make_random_record(1), Translation("").record, make_random_record(2)]
    lines = write_alignments("a/b.jsonl", records).decode().split("\n")
    assert lines == [record.to_json() for record in records] + [""]
    for path in ("-", "links", "x.jsonl/links.pharaoh", "links.txt"):
        lines = write_alignments(path, records).decode().split("\n")
        assert lines == [format_pharaoh(record.links(LinksConfig())) for record in records] + [""]
    assert lines[0] and not lines[1]
