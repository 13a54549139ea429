import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.alignment import Record, links, pharaoh, word_weights


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
    words = word_weights(*pair)
    assert words.shape == (max(target) + 1, max(source) + 1)
    np.testing.assert_allclose(words, np.reshape(slow_word_weights(*pair), words.shape), atol=1e-12)
    assert links(*pair) == slow_links(*pair)


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
    assert links(np.array(weights), source, target) == expected


def test_nothing_was_translated():
    assert links(np.zeros((0, 3)), [0, 1, -1], []) == []
    assert word_weights(np.zeros((0, 3)), [0, 1, -1], []).shape == (0, 2)


def test_pharaoh_is_in_the_order_of_the_source():
    assert pharaoh([(2, 0), (0, 1), (0, 10), (0, 2)]) == "0-1 0-2 0-10 2-0"
    assert pharaoh([]) == ""


def record(weights, score=-1.5):
    return Record(["▁Ja", "</s>"], ["▁Yes\u2028", "</s>"], ["Ja"], ["Yes\u2028"], weights, score)


def test_a_record_reads_back_exactly():
    weights = np.random.default_rng(1).dirichlet(np.ones(2), size=2)
    line = record(weights).to_json()
    assert "\n" not in line and "▁Ja" in line
    read = json.loads(line)
    assert list(read) == ["source_pieces", "target_pieces", "source_words", "target_words", "weights", "score"]
    assert np.array_equal(read["weights"], weights)
    single = json.loads(record(weights.astype(np.float32)).to_json())["weights"]
    assert np.array_equal(np.array(single, dtype=np.float32), weights.astype(np.float32))


def test_what_is_not_finite_becomes_null():
    read = json.loads(record(np.array([[math.nan, 1.0], [math.inf, 0.0]]), -math.inf).to_json())
    assert read["weights"] == [[None, 1.0], [None, 0.0]] and read["score"] is None
    assert json.loads(record(None).to_json())["weights"] is None
