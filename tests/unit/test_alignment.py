"""None"""

import io
import json
import math

import numpy as np
import pytest
from builders import write_alignments
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import LinksConfig
from nmt.data.word_links import GoldLinks, alignment_targets, format_pharaoh
from nmt.decoding.alignment import ALIGNMENT_WRITERS, Record, extract_links, pool_to_words
from nmt.decoding.translator import Translation
from nmt.evaluation.metrics import LinkCounts


def slow_word_weights(weights, source_index, target_index):
    """The definition, word by word."""
    matrix = []
    for t in range(max([*target_index, -1]) + 1):
        rows = [row for row, word in zip(weights, target_index, strict=True) if word == t]
        matrix.append([])
        for s in range(max([*source_index, -1]) + 1):
            sums = [sum(w for w, word in zip(row, source_index, strict=True) if word == s) for row in rows]
            matrix[-1].append(sum(sums) / len(sums))
    return matrix


def slow_links(weights, source_index, target_index):
    found = []
    for t in range(max([*target_index, -1]) + 1):
        rows = [row for row, word in zip(weights, target_index, strict=True) if word == t]
        mass = {}
        for row in rows:
            for w, word in zip(row, source_index, strict=True):
                mass[word] = mass.get(word, 0) + w / len(rows)
        best = max(mass, key=lambda word: mass[word])
        if best != -1 and mass[best] > 0:
            found.append((best, t))
    return found


def word_index(pieces_of_word):
    """[2, 1] -> [0, 0, 1, -1]"""
    return [word for word, pieces in enumerate(pieces_of_word) for _ in range(pieces)] + [-1]


@st.composite
def weighted_pairs(draw):
    source, target = (word_index(draw(st.lists(st.integers(1, 3), max_size=5))) for _ in range(2))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).dirichlet(np.ones(len(source)), size=len(target)), source, target


@given(weighted_pairs())
def test_word_weights_and_links_are_what_they_are_defined_to_be(pair):
    weights, source, target = pair
    words = pool_to_words(*pair)[:-1, :-1]
    assert words.shape == (max(target) + 1, max(source) + 1)
    np.testing.assert_allclose(words, np.reshape(slow_word_weights(*pair), words.shape), atol=1e-12)
    assert extract_links(*pair) == slow_links(*pair)
    for threshold in (0.1, 0.5, 1.0):
        linked = [(s, t) for t in range(len(words)) for s in range(words.shape[1]) if words[t, s] >= threshold]
        assert extract_links(*pair, threshold) == linked


@pytest.mark.parametrize(
    ("weights", "source", "target", "expected"),
    [
        pytest.param([[0.3, 0.3, 0.4]], [0, 0, 1], [0], [(0, 0)], id="a word's source pieces add up"),
        pytest.param([[0.9, 0.1], [0.0, 1.0]], [0, 1], [0, 0], [(1, 0)], id="its target pieces are averaged"),
        pytest.param([[0.4, 0.6]], [0, -1], [0], [], id="no link where </s> weighs most"),
        pytest.param([[0.4, 0.3, 0.3]], [0, -1, -1], [0], [], id="all that is no word counts together"),
        pytest.param([[0.5, 0.5]], [0, -1], [0], [(0, 0)], id="a word comes before no word"),
        pytest.param([[0.5, 0.5]], [0, 1], [0], [(0, 0)], id="the first of equals"),
        pytest.param([[0.0, 0.0]], [0, -1], [0], [], id="no link where nothing has weight"),
        pytest.param([[math.nan, 1.0], [1.0, 0.0]], [0, 1], [0, 1], [(0, 1)], id="nor where a weight is no number"),
        pytest.param([[1.0, 0.0], [1.0, 0.0]], [0, -1], [0, -1], [(0, 0)], id="</s> of the target has no link"),
        pytest.param([[1.0]], [-1], [-1], [], id="empty sentences"),
    ],
)
def test_links(weights, source, target, expected):
    assert extract_links(np.array(weights), source, target) == expected


def test_nothing_was_translated():
    for threshold in (None, 0.5):
        assert extract_links(np.zeros((0, 3)), [0, 1, -1], [], threshold) == []
    assert pool_to_words(np.zeros((0, 3)), [0, 1, -1], []).shape == (1, 3)


@given(weighted_pairs(), st.data())
def test_who_knows_the_gold_links_is_read_as_knowing_them(pair, data):
    """One sure link for each target word at most: the links read off ideal weights make no error."""
    _, source, target = pair
    source_words, target_words = max(source) + 1, max(target) + 1
    word = st.integers(0, source_words - 1)
    choices = st.tuples(st.none() | word, st.sets(word)) if source_words else st.just((None, set()))
    chosen = [data.draw(choices) for _ in range(target_words)]
    sure = {(s, t) for t, (s, _) in enumerate(chosen) if s is not None}
    gold = GoldLinks.from_pairs(sure, {(s, t) for t, (_, others) in enumerate(chosen) for s in others})
    weights = alignment_targets(gold, source, target)
    np.testing.assert_allclose(weights.sum(1), 1)
    links = extract_links(weights, source, target)
    assert sure <= set(links) <= gold.possible
    assert {t for _, t in links} == {t for _, t in gold.possible}
    counts = LinkCounts()
    counts.add(links, gold)
    assert counts.scores()["aer"] in (0.0, None)


def test_of_two_sure_links_of_a_target_word_the_best_one_is_read_or_both_over_a_threshold():
    gold = GoldLinks.from_pairs({(0, 0), (2, 0)}, {(1, 0)})
    weights = alignment_targets(gold, [0, 0, 1, 2, -1], [0, -1])
    np.testing.assert_allclose(weights, [[0.25, 0.25, 0, 0.5, 0], [0, 0, 0, 0, 1]])
    assert extract_links(weights, [0, 0, 1, 2, -1], [0, -1]) == [(0, 0)]
    assert extract_links(weights, [0, 0, 1, 2, -1], [0, -1], 0.4) == [(0, 0), (2, 0)]


PIECES = ["▁Ja", "woh", "l", "▁</w>\u2028", "<0xF0>", "</s>"], ["▁Yes", "▁\U0001f600", "</s>"]


def record(weights, score=-1.5):
    return Translation("Yes", *PIECES, score, weights).record


def a_record(seed=1):
    return record(np.random.default_rng(seed).dirichlet(np.ones(6), size=3))


def test_a_translation_becomes_a_record_of_pieces_and_words():
    found = a_record()
    assert found.source_words == ["Jawohl", "</w>\u2028\ufffd"] and found.target_words == ["Yes", "\U0001f600"]
    assert found.source_word_of_piece == [0, 0, 0, 1, 1, -1] and found.target_word_of_piece == [0, 1, -1]
    assert found.word_weights().shape == (2, 2)
    assert record(None).word_weights() is None and record(None).links(LinksConfig()) == []


def test_links_of_words_and_of_pieces():
    weights = np.array([[0.1, 0.2, 0.2, 0.3, 0.2, 0.0], [0, 0, 0, 0.4, 0, 0.6], [0.9, 0, 0, 0, 0, 0.1]])
    assert record(weights).links(LinksConfig()) == [(0, 0)]
    assert record(weights).links(LinksConfig(threshold=0.4)) == [(0, 0), (1, 0), (1, 1)]
    assert record(weights).links(LinksConfig(unit="pieces")) == [(3, 0)]
    assert record(weights).links(LinksConfig(unit="pieces", threshold=0.3)) == [(3, 0), (3, 1)]


def test_a_record_reads_back_exactly():
    line = a_record().to_json()
    assert "\n" not in line and "▁Ja" in line
    read = json.loads(line)
    assert list(read) == [
        *("source_pieces", "target_pieces", "source_words", "target_words"),
        *("source_word_of_piece", "target_word_of_piece", "weights", "score"),
    ]
    assert np.array_equal(read["weights"], a_record().weights)
    single = json.loads(record(a_record().weights.astype(np.float32)).to_json())["weights"]
    assert np.array_equal(np.array(single, dtype=np.float32), a_record().weights.astype(np.float32))


def test_what_is_not_finite_becomes_null():
    read = json.loads(record(np.array([[math.nan, 1.0], [math.inf, 0.0]]), -math.inf).to_json())
    assert read["weights"] == [[None, 1.0], [None, 0.0]] and read["score"] is None
    assert json.loads(record(None).to_json())["weights"] is None


def test_a_file_is_what_its_ending_says():
    assert set(ALIGNMENT_WRITERS) == {".jsonl", ".npz"}
    records = [a_record(1), Translation("").record, a_record(2)]
    lines = write_alignments("a/b.jsonl", records).decode().split("\n")
    assert lines == [one.to_json() for one in records] + [""]
    for path in ("-", "links", "x.jsonl/links.pharaoh", "links.txt"):
        lines = write_alignments(path, records).decode().split("\n")
        assert lines == [format_pharaoh(one.links(LinksConfig())) for one in records] + [""]
    assert lines[0] and not lines[1]


@pytest.mark.parametrize("path", [".jsonl", "x.npz", "links"])
def test_no_pairs_make_a_file_too(path):
    assert len(write_alignments(path, [])) == (22 if path.endswith("npz") else 0)  # an empty archive has its end


def test_arrays_are_loaded_without_pickle():
    records = [a_record(1), record(None), Translation("").record, a_record(2)]
    assert write_alignments("x.npz", records) == write_alignments("x.npz", records)
    with np.load(io.BytesIO(write_alignments("x.npz", records)), allow_pickle=False) as arrays:
        for number, one in enumerate(records):
            for name in Record.__slots__:
                value = getattr(one, name)
                if value is None:
                    assert f"{number}/{name}" not in arrays
                else:
                    assert arrays[f"{number}/{name}"].tolist() == np.asarray(value).tolist()
                    assert arrays[f"{number}/{name}"].dtype == int or not name.endswith("of_piece")
        assert (
            "4/score" not in arrays
            and arrays["0/source_words"].dtype.kind == arrays["2/source_words"].dtype.kind == "U"
        )
