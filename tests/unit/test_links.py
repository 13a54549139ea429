"""Sets of links: gold, symmetrization against the textbook's loops, and the alignment error rate."""

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from nmt.data.word_links import (
    SYMMETRIZATIONS,
    GoldLinks,
    format_pharaoh,
    get_gold_links,
    grow_diag_final_and,
    parse_gold_links,
    transpose_links,
)
from nmt.evaluation.metrics import LinkCounts

WORDS = 5
link_sets = st.sets(st.tuples(st.integers(0, WORDS - 1), st.integers(0, WORDS - 1)))


def read(text):
    return {tuple(map(int, link.split("-"))) for link in text.split()}


def test_pharaoh_is_in_the_order_of_the_source():
    assert format_pharaoh([(2, 0), (0, 1), (0, 10), (0, 2)]) == "0-1 0-2 0-10 2-0"
    assert format_pharaoh([]) == ""


# -------------------------------------------------------------------------------------------------------------- gold
@given(link_sets, link_sets, st.sampled_from([0, 1]), st.sampled_from("p?"), st.randoms())
def test_gold_reads_back(sure, possible, base, sign, random):
    texts = [f"{s + base}-{t + base}" for s, t in sure] + [f"{s + base}{sign}{t + base}" for s, t in possible]
    random.shuffle(texts)
    gold = parse_gold_links(" ".join(texts), base, WORDS, WORDS)
    assert gold == GoldLinks(frozenset(sure), frozenset(sure | possible)) == GoldLinks.from_pairs(sure, possible)
    assert gold.transpose().transpose() == gold and gold.transpose().sure == transpose_links(sure)


@pytest.mark.parametrize(
    ("line", "base", "complaint"),
    [
        ("0-0 1", 0, "'1' is not a link; write 0-1 for a sure link, 0p1 or 0?1 for a possible link"),
        ("0-0,1-1", 0, "'0-0,1-1' is not a link"),
        ("0:0", 0, "'0:0' is not a link"),
        ("0--1", 0, "'0--1' is not a link"),
        ("-1-0", 0, "'-1-0' is not a link"),
        ("0-0-0", 0, "'0-0-0' is not a link"),
        ("0 - 0", 0, "'0' is not a link"),
        ("0P0", 0, "'0P0' is not a link"),
        ("\u0661-0", 0, "'\u0661-0' is not a link"),  # a digit, but not one of ASCII
        ("9999999999-0", 0, "'9999999999-0' is not a link"),
        ("3-0", 0, "'3-0' is out of range: counted from 0, the source sentence has words 0 to 2"),
        ("0p2", 0, "'0p2' is out of range: counted from 0, the target sentence has words 0 to 1"),
        ("0-1", 1, "'0-1' is out of range: counted from 1, the source sentence has words 1 to 3"),
        ("4-1", 1, "'4-1' is out of range"),
        ("1?3", 1, "'1?3' is out of range: counted from 1, the target sentence has words 1 to 2"),
    ],
)
def test_what_is_no_gold_is_named(line, base, complaint):
    with pytest.raises(ValueError) as error:
        parse_gold_links(line, base, 3, 2)
    assert str(error.value).startswith(complaint)


def test_an_empty_sentence_has_no_words_to_link():
    assert parse_gold_links("", 0, 0, 0) == GoldLinks.from_pairs((), ())
    with pytest.raises(ValueError, match="the target sentence has no words"):
        parse_gold_links("0-0", 0, 1, 0)


@given(st.text(alphabet="019-p? \tx\u0660", max_size=12), st.sampled_from([0, 1]))
def test_a_line_is_gold_or_refused(line, base):
    try:
        gold = parse_gold_links(line, base, 2, 3)
    except ValueError:
        return
    assert all(s in range(2) and t in range(3) for s, t in gold.possible) and gold.sure <= gold.possible
    assert len(gold.possible) <= len(line.split())


def test_the_gold_of_a_corpus():
    columns = {"source": ["a b", ""], "target": ["c", ""], "sure": [[[0, 0]], []], "possible": [[[1, 0]], []]}
    gold = [GoldLinks.from_pairs({(0, 0)}, {(1, 0)}), GoldLinks.from_pairs((), ())]
    assert get_gold_links(Dataset.from_dict(columns)) == gold
    assert get_gold_links(Dataset.from_dict({"source": ["a"], "target": ["b"]})) is None


# ---------------------------------------------------------------------------------------------------- symmetrization
def textbook(e2f, f2e):
    """GROW-DIAG-FINAL-AND, line by line as the manual of Moses has it; links are (f, e)."""
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
def test_symmetrization_is_what_the_textbook_says(forward, backward):
    found = {name: symmetrize(forward, backward) for name, symmetrize in SYMMETRIZATIONS.items()}
    assert found["intersection"] == {link for link in forward if link in backward}
    assert found["union"] == {*forward, *backward}
    assert found["grow_diag_final_and"] == textbook(forward, backward)
    assert found["intersection"] <= found["grow_diag_final_and"] <= found["union"]
    for position in (0, 1):  # what grow-diag-final-and leaves without a link has one in neither direction with another
        left = {link[position] for link in found["union"]} - {link[position] for link in found["grow_diag_final_and"]}
        others = {link[1 - position] for link in found["grow_diag_final_and"]}
        assert all(link[1 - position] in others for link in found["union"] if link[position] in left)
    assert all(symmetrize(forward, forward) == forward for symmetrize in SYMMETRIZATIONS.values())


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        pytest.param("0-0 1-1", "0-0 1-1", "0-0 1-1", id="agreement"),
        pytest.param("0-0 1-1", "0-0", "0-0 1-1", id="a neighbor on the diagonal"),
        pytest.param("0-0 0-1 0-2", "0-0", "0-0 0-1 0-2", id="growing on what has grown"),
        pytest.param("0-0 1-1 0-1", "0-0 1-1", "0-0 1-1", id="both words have a link already"),
        pytest.param("0-0 3-3", "0-0", "0-0 3-3", id="far away, but between two free words"),
        pytest.param("0-0 0-3", "0-0", "0-0", id="far away, and one word is taken"),
        pytest.param("0-2", "0-0", "0-2", id="with nothing common: forward comes first"),
        pytest.param("0-0 2-0", "", "0-0", id="the first of equals"),
        pytest.param("", "", "", id="nothing"),
    ],
)
def test_grow_diag_final_and(forward, backward, expected):
    assert grow_diag_final_and(read(forward), read(backward)) == read(expected)


# --------------------------------------------------------------------------------------------- alignment error rate
@pytest.mark.parametrize(
    ("links", "gold", "precision", "recall", "aer"),
    [
        ("0-0 1-1", "0-0 1-1", 1, 1, 0),
        ("0-0", "0-0 1-1", 1, 1 / 2, 1 - 2 / 3),
        ("0-0 1-1", "0-0 1p1", 1, 1, 0),
        ("0-0", "0-0 1p1", 1, 1, 0),  # possible links need not be found
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
    counts.add(read(links), parse_gold_links(gold, 0, 2, 2))
    assert counts.scores() == pytest.approx({"precision": precision, "recall": recall, "aer": aer})


def test_the_error_rate_sums_over_the_corpus_before_it_divides():
    counts = LinkCounts()
    counts.add([(0, 0), (0, 0)], parse_gold_links("0-0 1-1 2-2", 0, 3, 3))  # the same link twice is one
    counts.add([(0, 0), (1, 0)], parse_gold_links("0-0 0p1", 0, 2, 2))
    assert counts.scores() == pytest.approx({"precision": 2 / 3, "recall": 2 / 4, "aer": 1 - (2 + 2) / (3 + 4)})


@given(link_sets, link_sets, link_sets)
def test_error_rates_are_shares(links, sure, possible):
    counts = LinkCounts()
    counts.add(links, GoldLinks.from_pairs(sure, possible))
    assert all(value is None or 0 <= value <= 1 for value in counts.scores().values())
    if links and links == sure:
        assert counts.scores()["aer"] == 0
