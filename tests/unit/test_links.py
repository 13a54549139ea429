"""Word links: gold links, symmetrization, and the alignment error rate."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.data.corpus import get_gold_links
from nmt.data.word_links import (
    SYMMETRIZATIONS,
    GoldLinks,
    parse_gold_links,
)
from nmt.evaluation.metrics import LinkCounts

WORDS = 5
link_sets = st.sets(st.tuples(st.integers(0, WORDS - 1), st.integers(0, WORDS - 1)))


def parse_links(text):
    return {tuple(map(int, link.split("-"))) for link in text.split()}


# --- gold links
@given(link_sets, link_sets, st.sampled_from([0, 1]), st.sampled_from("p?"), st.randoms())
def test_parsed_gold_links_match_original(sure, possible, base, sign, random):
    texts = [f"{s + base}-{t + base}" for s, t in sure] + [f"{s + base}{sign}{t + base}" for s, t in possible]
    random.shuffle(texts)
    gold = parse_gold_links(" ".join(texts), base, WORDS, WORDS)
    assert gold == GoldLinks(frozenset(sure), frozenset(sure | possible)) == GoldLinks.from_pairs(sure, possible)


@pytest.mark.parametrize(
    ("line", "base", "message"),
    [
        ("0-0 1", 0, "'1' is not a link; write 0-1 for a sure link, 0p1 or 0?1 for a possible link"),
        ("0-0,1-1", 0, "'0-0,1-1' is not a link"),
        ("-1-0", 0, "'-1-0' is not a link"),
        ("0-0-0", 0, "'0-0-0' is not a link"),
        ("\u0661-0", 0, "'\u0661-0' is not a link"),  # a digit outside of ASCII
        ("3-0", 0, "'3-0' is out of range: counted from 0, the source sentence has 3 words"),
        ("0p2", 0, "'0p2' is out of range: counted from 0, the target sentence has 2 words"),
        ("0-1", 1, "'0-1' is out of range: counted from 1, the source sentence has 3 words"),
        ("1?3", 1, "'1?3' is out of range: counted from 1, the target sentence has 2 words"),
    ],
)
def test_invalid_reference_alignments_raise(line, base, message):
    with pytest.raises(ValueError) as error:
        parse_gold_links(line, base, 3, 2)
    assert str(error.value).startswith(message)


def test_gold_links_of_dataset():
    columns = {"source": ["a b", ""], "target": ["c", ""], "sure": [[[0, 0]], []], "possible": [[[1, 0]], []]}
    gold = [GoldLinks.from_pairs({(0, 0)}, {(1, 0)}), GoldLinks.from_pairs((), ())]
    assert get_gold_links(pa.table(columns)) == gold
    assert get_gold_links(pa.table({"source": ["a"], "target": ["b"]})) is None


# --- symmetrization
def reference_grow_diag_final_and(e2f, f2e):
    """Run GROW-DIAG-FINAL-AND exactly as written in the Moses manual; links are (f, e)."""
    alignment = {link for link in e2f if link in f2e}
    union = e2f | f2e

    def e_aligned(e):
        return any(link[1] == e for link in alignment)

    def f_aligned(f):
        return any(link[0] == f for link in alignment)

    added = True
    while added:
        added = False
        for e in range(WORDS):
            for f in range(WORDS):
                if (f, e) in alignment:
                    for de, df in ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
                        e_new, f_new = e + de, f + df
                        if (not e_aligned(e_new) or not f_aligned(f_new)) and (f_new, e_new) in union:
                            alignment.add((f_new, e_new))
                            added = True
    for direction in (e2f, f2e):
        for e_new in range(WORDS):
            for f_new in range(WORDS):
                if not e_aligned(e_new) and not f_aligned(f_new) and (f_new, e_new) in direction:
                    alignment.add((f_new, e_new))
    return alignment


@given(link_sets, link_sets)
def test_symmetrization_matches_reference_algorithms(forward, backward):
    links = {name: symmetrize(forward, backward) for name, symmetrize in SYMMETRIZATIONS.items()}
    intersection, union, grown = links["intersection"], links["union"], links["grow_diag_final_and"]
    assert intersection == {link for link in forward if link in backward}
    assert union == {*forward, *backward}
    assert grown == reference_grow_diag_final_and(forward, backward)
    assert intersection <= grown <= union
    for side in (0, 1):  # grow-diag-final-and leaves a word without a link only if all its candidates have links
        unlinked = {link[side] for link in union} - {link[side] for link in grown}
        linked_others = {link[1 - side] for link in grown}
        assert all(link[1 - side] in linked_others for link in union if link[side] in unlinked)
    assert all(symmetrize(forward, forward) == forward for symmetrize in SYMMETRIZATIONS.values())


# --- alignment error rate
@pytest.mark.parametrize(
    ("links", "gold", "precision", "recall", "aer"),
    [
        ("0-0 1-1", "0-0 1-1", 1, 1, 0),
        ("0-0", "0-0 1-1", 1, 1 / 2, 1 - 2 / 3),
        ("0-0 1-1", "0-0 1p1", 1, 1, 0),
        ("0-0", "0-0 1p1", 1, 1, 0),  # missing possible links are no errors
        ("0-0 1-1 0-1", "0-0 1p1", 2 / 3, 1, 1 - 3 / 4),
        ("1-0", "0-0", 0, 0, 1),
        ("1-1", "0-0 1p1", 1, 0, 1 - 1 / 2),
        ("", "0-0", None, 0, 1),
        ("0-0", "", 0, None, 1),
        ("0-0", "0p0", 1, None, 0),
        ("", "0p0", None, None, None),
    ],
)
def test_alignment_error_rate(links, gold, precision, recall, aer):
    counts = LinkCounts()
    counts.add(parse_links(links), parse_gold_links(gold, 0, 2, 2))
    assert counts.scores() == pytest.approx({"precision": precision, "recall": recall, "aer": aer})


def test_alignment_error_rate_pools_counts_over_corpus():
    counts = LinkCounts()
    counts.add([(0, 0), (0, 0)], parse_gold_links("0-0 1-1 2-2", 0, 3, 3))  # duplicates count once
    counts.add([(0, 0), (1, 0)], parse_gold_links("0-0 0p1", 0, 2, 2))
    assert counts.scores() == pytest.approx({"precision": 2 / 3, "recall": 2 / 4, "aer": 1 - (2 + 2) / (3 + 4)})
