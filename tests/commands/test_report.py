"""Tests of the HTML report: its contents, its escaping, and its behavior in a browser."""

import re

import numpy as np
import pytest
from browser import check_policy, check_same_code
from builders import HOSTILE, PageReader
from hypothesis import example, given
from hypothesis import strategies as st

from nmt.data.tokenizer import group_by_words
from nmt.decoding.translation import Translation
from nmt.evaluation import report
from nmt.evaluation.heads import WordWeights
from nmt.evaluation.metrics import bleu, compute_scores
from nmt.evaluation.report import build_report

NO_SCORES = {"signatures": {}}


def make_translation(source, target, weights="diagonal"):
    """Make a translation in which each word is one piece and attention is diagonal."""
    pieces = [[*("▁" + word for word in text.split(" ") if word), "</s>"] for text in (source, target)]
    if isinstance(weights, str):
        weights = np.eye(len(pieces[1]), len(pieces[0]))
    return Translation(target, *pieces, score=-1.5, weights_TS=weights)


def build_page(pairs, **options):
    """Build the report of (source, reference, translation) texts."""
    sources, references, texts = zip(*pairs, strict=True) if pairs else ((), (), ())
    translations = [make_translation(source, text, **options) for source, text in zip(sources, texts, strict=True)]
    return build_report("toy, test", compute_scores(texts, references), sources, references, translations)


def test_rows_are_word_weights_in_percent():
    weights = np.array([[0.104, 0.5, 0.396, 0], [0.3, 0.5, 0.2, 0], [0, 0, 0.004, 0.996], [0, 0, 0, 1]])
    translation = Translation("New York", ["▁Neu", "yo", "rk", "</s>"], ["▁New", "▁Y", "ork", "</s>"], -1.0, weights)
    [pair] = PageReader(build_report("x", NO_SCORES, ["Neuyork"], ["New York"], [translation])).data
    assert pair["source"] == ["Neuyork"] and pair["translation"] == ["New", "York"]
    assert pair["rows"] == [[0, 100], [0, 50]]  # a sum over source pieces, a mean over target pieces
    weights = np.array([[0.004, 0.996, 0, 0], [np.nan, np.inf, 0.25, 0.75], [0, 0, 0, 1]])
    translation = make_translation("a b c", "x y", weights)
    [pair] = PageReader(build_report("x", NO_SCORES, ["a b c"], ["x y"], [translation])).data
    assert pair["rows"] == [[1, 100], [2, 25]]


def test_report_without_attention_of_empty_sentences_and_of_nothing():
    page = PageReader(build_page([("eins zwei", "one two", "one")], weights=None))
    [pair] = page.data
    assert pair["source"] == ["eins", "zwei"] and "rows" not in pair and "matrix" not in page.text["p"]
    assert PageReader(build_page([])).data == []
    translations = [Translation(""), make_translation("ja", "")]
    pairs = PageReader(build_report("x", NO_SCORES, ["", "ja"], ["", "yes"], translations)).data
    assert [pair["source"] for pair in pairs] == [[], ["ja"]] and not any("rows" in pair for pair in pairs)


def test_report_states_its_limits(monkeypatch):
    monkeypatch.setattr(report, "MAX_REPORT_PAIRS", 3)
    monkeypatch.setattr(report, "MAX_MATRIX_CELLS", 4)
    text = build_page(
        [("a", "x", "x"), ("b", "of", "off"), ("a b", "x", "y z"), ("c", "of", "if"), ("a b c", "x", "p q")]
    )
    pairs = PageReader(text).data
    assert [pair["line"] for pair in pairs] == [3, 5, 4]  # worst first
    assert ["rows" in pair for pair in pairs] == [True, False, True]
    assert pairs[2]["chrf"] == pytest.approx(compute_scores(["if"], ["of"])["chrf"], abs=0.006)
    assert "The 3 worst of 5 sentence pairs" in text and "more than 4 cells" in text


def test_report_header_lists_scores_and_signatures():
    metrics = {"loss": 0.5, "ppl": 1234.5678, "bleu": 12.346, "ter": None, "aer": 0.0123, "beam_size": 5}
    text = build_report("toy, test", metrics | {"signatures": {"bleu": "nrefs:1|tok:13a"}}, [], [], [])
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text) == [
        ("BLEU", "12.35"),
        ("TER", "–"),
        ("AER", "0.0123"),
        ("loss", "0.5000"),
        ("ppl", "1,234.57"),
        ("beam size", "5"),
        ("BLEU", "nrefs:1|tok:13a"),
    ]
    assert "AER" not in build_report("mine, test", {"aer": None, "signatures": {}}, [], [], [])


def test_chart_of_bleu_by_length():
    full, part = "one two three four", "one two four"
    text = build_page([("a " * 5, full, full)] * 3 + [("a " * 6, full, part)])
    score = bleu([part], [full])
    assert f'aria-label="up to 5 words: BLEU 100.00 (pairs: 3); 6-10 words: BLEU {score:.2f} (pairs: 1)"' in text
    heights = [float(height) for height in re.findall('class="bar".*? height="(.*?)"', text)]
    assert heights[0] == report.BAR_HEIGHT and heights[1] < heights[0]


def read_page_with(title, name, value, reference, pieces):
    translation = Translation("".join(pieces), pieces, pieces, -1.0, np.ones((len(pieces), len(pieces))))
    scores = {"any " + name: value}  # the prefix avoids names of known metrics
    return PageReader(build_report(title, scores | {"signatures": scores}, ["x"], [reference], [translation]))


PLAIN_PAGE = read_page_with("x", "x", "x", "x", ["▁x"])
LABEL = st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=20)


@given(LABEL, LABEL, LABEL, st.text(max_size=20), st.lists(st.text(max_size=8), min_size=1, max_size=4))
@example(*HOSTILE[1:4], HOSTILE[0], HOSTILE)
def test_any_text_is_escaped(title, name, value, reference, pieces):
    page = read_page_with(title, name, value, reference, pieces)
    check_same_code(page, PLAIN_PAGE)
    [pair] = page.data
    assert pair["reference"] == reference
    assert pair["source"] == pair["translation"] == group_by_words(pieces)[0]
    assert page.text["title"].strip() == page.text["h1"].strip() == title.strip()
    assert value in page.text["dd"] and name.replace("_", " ") in page.text["dt"]


PAIRS = [
    ("Der Hund schläft", "The dog sleeps", "zzz qqq vvv"),  # the lowest score
    *((f"{text} zwei", f"{text} two", f"two {text.replace(' ', '')}") for text in HOSTILE),
    *((f"Satz {i}", f"sentence {i}", f"sentence {i}") for i in range(20)),
]
PAIR_WITHOUT_ATTENTION = len(PAIRS) - 1
WEIGHTS = np.array([[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0], [0.1, 0, 0.9, 0], [0, 0, 0, 1]])
FIRST_ARTICLE = "article:first-child "
TOOLTIP = "tip.hidden ? null : tip.textContent"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a report."""
    sources, references, texts = zip(*PAIRS, strict=True)
    translations = [make_translation(source, text) for source, text in zip(sources, texts, strict=True)]
    translations[0] = make_translation(sources[0], texts[0], WEIGHTS)
    choices = [
        WordWeights("swapped", {0: WEIGHTS[[1, 0, 2]][:, :3]}),
        WordWeights("same", {0: WEIGHTS[:3, :3], 1: None, PAIR_WITHOUT_ATTENTION: np.ones((2, 2))}),
    ]
    text = build_report(HOSTILE[6], compute_scores(texts, references), sources, references, translations, choices)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The browser, in which the report has been opened."""
    browser.open(address)
    return browser


def get_highlights(page):
    """Return the highlighted words with their strength, which must be equal in the text and at the matrix."""
    query = "[...document.querySelectorAll('[style*=glow]')].map(n => [n.tagName, n.textContent, n.style.cssText])"
    strengths = {"SPAN": {}, "TH": {}}
    for tag, text, css in page.evaluate(query):
        strengths.setdefault(tag, {})[text] = float(re.search("glow: ?([^;]*)", css)[1])
    assert strengths["SPAN"] == strengths["TH"]
    return {text: strength for text, strength in strengths["SPAN"].items() if strength}


def get_focused_cell(page):
    return page.evaluate("{...document.activeElement.dataset}")


def test_page_opens_without_messages_or_requests(page, address):
    check_policy(PLAIN_PAGE)
    assert page.evaluate("document.querySelectorAll('article').length") == 20
    assert page.requests() == [address]


def test_hostile_text_is_displayed_and_not_executed(page):
    while page.evaluate("more.hidden || append() && false") is False:
        pass
    shown = page.evaluate("[...document.querySelectorAll('article dl')].map(n => n.children[3].textContent)")
    assert sorted(shown) == sorted(reference for _, reference, _ in PAIRS)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.evaluate("document.scripts.length") == 2 and page.evaluate("document.images.length") == 0
    assert page.evaluate("document.title") == HOSTILE[6]


def test_hovering_word_highlights_other_side_by_weight(page):
    for place in ("dd span", "th"):
        page.hover(f"{FIRST_ARTICLE}{place}[data-t='1']")
        assert get_highlights(page) == {"qqq": 1, "Hund": 0.5, "schläft": 0.5}
        page.hover(f"{FIRST_ARTICLE}{place}[data-s='0']")
        assert get_highlights(page) == {"Der": 1, "zzz": 0.75, "vvv": 0.1}
    page.hover(FIRST_ARTICLE + "td[data-s='1'][data-t='0']")
    assert get_highlights(page) == {"Hund": 1, "zzz": 1} and page.evaluate(TOOLTIP) == "Hund → zzz0.25"
    page.hover("h1")
    assert get_highlights(page) == {} and page.evaluate(TOOLTIP) is None


def test_keyboard_navigation_of_matrix(page):
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.press("Tab", "Tab", "Tab")
    assert get_focused_cell(page) == {"s": "0", "t": "0"} and page.evaluate(TOOLTIP) == "Der → zzz0.75"
    page.press("ArrowRight", "ArrowDown")
    assert get_focused_cell(page) == {"s": "1", "t": "1"} and get_highlights(page) == {"Hund": 1, "qqq": 1}
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Escape")
    assert page.evaluate(TOOLTIP) is None
    page.press("ArrowUp", "ArrowUp")
    assert get_focused_cell(page) == {"s": "1"} and get_highlights(page) == {"Hund": 1, "zzz": 0.25, "qqq": 0.5}
    page.press("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")  # not past the edge, nor into the corner
    assert get_focused_cell(page) == {"s": "0"}
    page.evaluate('document.querySelector(\'td[data-s="2"][data-t="1"]\').focus()')  # as a click does
    assert page.evaluate("document.querySelectorAll('article:first-child [tabindex=\"0\"]').length") == 1
    page.press("Tab")
    assert page.evaluate("[...list.children].indexOf(document.activeElement.closest('article'))") == 1


def test_filter_order_and_more_controls(page):
    def lines():
        return page.evaluate("[...document.querySelectorAll('h2')].map(n => +n.textContent.slice(5))")

    assert lines()[0] == 1 and page.evaluate("count.textContent") == f"{len(PAIRS)} of {len(PAIRS)} pairs"
    page.evaluate("more.focus()")
    page.press("Enter")
    assert len(lines()) == 40 and page.evaluate("[...list.children].indexOf(document.activeElement)") == 20
    page.evaluate("order.value = 'corpus', order.dispatchEvent(new Event('change'))")
    assert lines() == list(range(1, 21))
    page.evaluate("order.value = 'longest', order.dispatchEvent(new Event('change'))")
    longest = sorted(range(len(PAIRS)), key=lambda row: -len(PAIRS[row][0].split(" ")))
    assert lines() == [row + 1 for row in longest[:20]]
    page.evaluate("filter.focus()")
    page.type("SCHLÄFT")
    assert lines() == [1] and page.evaluate("count.textContent") == f"1 of {len(PAIRS)} pairs"
    page.hover(FIRST_ARTICLE + "td[data-s='0']")
    assert page.evaluate(TOOLTIP) == "Der → zzz0.75"
    page.type("no such text")
    assert lines() == [] and page.evaluate(TOOLTIP) is None
    assert page.evaluate("getComputedStyle(more).display") == "none"


def test_reader_chooses_weights(page):
    labels = ["Attention as in alignments.jsonl", "swapped", "same"]
    assert page.evaluate("[...shown.options].map(option => option.text)") == labels
    expected = {"": WEIGHTS[0], "0": WEIGHTS[1], "1": WEIGHTS[0]}
    for value, weights in expected.items():
        page.evaluate(f"shown.value = '{value}', shown.dispatchEvent(new Event('change'))")
        cells = page.evaluate("[...document.querySelector('tbody tr').cells].slice(1).map(n => n.ariaLabel)")
        assert [float(cell) for cell in cells] == list(weights[:3])
        shown_pairs = {"": len(PAIRS), "0": 1, "1": 2}[value]  # the other pairs have no such weights
        assert page.evaluate("count.textContent") == f"{shown_pairs} of {len(PAIRS)} pairs"
    page.evaluate("shown.value = '1', shown.dispatchEvent(new Event('change'))")
    assert page.evaluate("document.querySelectorAll('.matrix').length") == 2  # also of the pair without attention
