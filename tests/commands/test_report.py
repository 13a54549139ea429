"""Tests of the HTML report: its contents, its escaping, and its behavior in a browser."""

import base64
import hashlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser
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


def read_page(pairs, **options):
    return PageReader(build_page(pairs, **options))


def test_pairs_are_sorted_from_worst_score():
    pairs = [("eins", "one", "one"), ("zwei drei", "two three", "xx"), ("vier", "four", "fort")]
    data = read_page(pairs).data
    assert [pair["line"] for pair in data] == [2, 3, 1]
    for pair in data:
        _, reference, text = pairs[pair["line"] - 1]
        assert pair["reference"] == reference and pair["translation"] == text.split()
        assert pair["chrf"] == pytest.approx(compute_scores([text], [reference])["chrf"], abs=0.006)


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


def test_unknown_words_are_shown_as_in_source():
    translation = make_translation("ein <unk> <unk>", "a lynx")
    [pair] = PageReader(build_report("x", NO_SCORES, ["ein  Luchs gähnt"], ["a lynx yawns"], [translation])).data
    assert (pair["source"], pair["translation"]) == (["ein", "Luchs", "gähnt"], ["a", "lynx"])
    [pair] = PageReader(build_report("x", NO_SCORES, ["ein Luchs"], ["a lynx yawns"], [translation])).data
    assert pair["source"] == ["ein", "<unk>", "<unk>"]  # a source with another number of words


def test_report_without_attention_has_no_matrix():
    page = read_page([("eins zwei", "one two", "one")], weights=None)
    [pair] = page.data
    assert pair["source"] == ["eins", "zwei"] and "rows" not in pair and "matrix" not in page.text["p"]


def test_report_of_empty_sentences_and_empty_corpus():
    assert read_page([]).data == []
    translations = [Translation(""), make_translation("ja", "")]
    pairs = PageReader(build_report("x", NO_SCORES, ["", "ja"], ["", "yes"], translations)).data
    assert [pair["source"] for pair in pairs] == [[], ["ja"]] and not any("rows" in pair for pair in pairs)


def test_report_states_its_limits(monkeypatch):
    monkeypatch.setattr(report, "MAX_REPORT_PAIRS", 3)
    monkeypatch.setattr(report, "MAX_MATRIX_CELLS", 4)
    text = build_page([("a", "x", "x")] * 2 + [("a b", "x", "y z")] * 2 + [("a b c", "x", "p q")])
    assert [pair["line"] for pair in PageReader(text).data] == [3, 4, 5]
    assert ["rows" in pair for pair in PageReader(text).data] == [True, True, False]
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
    assert heights[0] == report.BAR_AREA_HEIGHT and heights[1] < heights[0]


def build_page_with(title, name, value, reference, pieces):
    translation = Translation("".join(pieces), pieces, pieces, -1.0, np.ones((len(pieces), len(pieces))))
    scores = {"any " + name: value}  # the prefix avoids names of known metrics
    return build_report(title, scores | {"signatures": scores}, ["x"], [reference], [translation])


PLAIN_PAGE = PageReader(build_page_with("x", "x", "x", "x", ["▁x"]))
LABEL = st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=20)


@given(LABEL, LABEL, LABEL, st.text(max_size=20), st.lists(st.text(max_size=8), min_size=1, max_size=4))
@example(*HOSTILE[1:4], HOSTILE[0], HOSTILE)
def test_any_text_is_escaped(title, name, value, reference, pieces):
    page = PageReader(build_page_with(title, name, value, reference, pieces))
    assert page.elements == PLAIN_PAGE.elements and page.policy == PLAIN_PAGE.policy
    [pair] = page.data
    assert pair["reference"] == reference and not re.search("[<>&\u2028\u2029]", page.text["data"])
    assert pair["source"] == pair["translation"] == group_by_words(pieces)[0]
    assert page.text["style"] == PLAIN_PAGE.text["style"] and page.text["script"] == PLAIN_PAGE.text["script"]
    assert page.text["title"].strip() == page.text["h1"].strip() == title.strip()
    assert value in page.text["dd"] and name.replace("_", " ") in page.text["dt"]


def test_content_security_policy():
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(PLAIN_PAGE.text[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in PLAIN_PAGE.policy
    assert PLAIN_PAGE.policy.startswith("default-src 'none';") and "unsafe" not in PLAIN_PAGE.policy
    attributes = {name for _, names in PLAIN_PAGE.elements for name in names}
    assert not attributes & {"src", "href", "srcset", "action", "style"}
    assert not re.search(
        r"https?:|//\w+\.|@import|url\(|innerHTML|eval\(", PLAIN_PAGE.text["style"] + PLAIN_PAGE.text["script"]
    )


PAIRS = [
    ("Der Hund schläft", "The dog sleeps", "zzz qqq vvv"),  # the lowest score
    *((f"{text} zwei", f"{text} two", f"two {text.replace(' ', '')}") for text in HOSTILE),
    *((f"Satz {i}", f"sentence {i}", f"sentence {i}") for i in range(20)),
]
PAIR_WITHOUT_ATTENTION = len(PAIRS) - 1
WEIGHTS = np.array([[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0], [0.1, 0, 0.9, 0], [0, 0, 0, 1]])
FIRST_ARTICLE = "article:first-child "


@pytest.fixture(scope="module")
def browser_session(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    folder = tmp_path_factory.mktemp("page")
    sources, references, texts = zip(*PAIRS, strict=True)
    translations = [make_translation(source, text) for source, text in zip(sources, texts, strict=True)]
    translations[0] = make_translation(sources[0], texts[0], WEIGHTS)
    path = folder / "report.html"
    choices = [
        WordWeights("swapped", {0: WEIGHTS[[1, 0, 2]][:, :3]}),
        WordWeights("same", {0: WEIGHTS[:3, :3], 1: None, PAIR_WITHOUT_ATTENTION: np.ones((2, 2))}),
    ]
    text = build_report(HOSTILE[6], compute_scores(texts, references), sources, references, translations, choices)
    path.write_text(text, encoding="utf-8")
    browser = Browser(folder / "profile")
    yield SimpleNamespace(browser=browser, path=path)
    browser.close()


@pytest.fixture
def browser(browser_session):
    browser_session.browser.open(browser_session.path.as_uri())
    return browser_session.browser


def get_highlights(browser):
    """Return the highlighted words with their strength, which must be equal in the text and at the matrix."""
    query = "[...document.querySelectorAll('[style*=glow]')].map(n => [n.tagName, n.textContent, n.style.cssText])"
    strengths = {"SPAN": {}, "TH": {}}
    for tag, text, css in browser.evaluate(query):
        strengths.setdefault(tag, {})[text] = float(re.search("glow: ?([^;]*)", css)[1])
    assert strengths["SPAN"] == strengths["TH"]
    return {text: strength for text, strength in strengths["SPAN"].items() if strength}


def get_focused_cell(browser):
    return browser.evaluate("{...document.activeElement.dataset}")


def get_tooltip(browser):
    return browser.evaluate("tip.hidden ? null : tip.textContent")


def test_page_opens_without_messages_or_requests(browser, browser_session):
    assert browser.evaluate("document.querySelectorAll('article').length") == 20
    messages = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert not [event for event in browser.events if event["method"] in messages]
    requests = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    assert [parameters["request"]["url"] for parameters in requests] == [browser_session.path.as_uri()]


def test_hostile_text_is_displayed_and_not_executed(browser):
    while browser.evaluate("more.hidden || append() && false") is False:
        pass
    shown = browser.evaluate("[...document.querySelectorAll('article dl')].map(n => n.children[3].textContent)")
    assert sorted(shown) == sorted(reference for _, reference, _ in PAIRS)
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("document.scripts.length") == 2 and browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.title") == HOSTILE[6]


def test_hovering_cell_highlights_words_and_shows_weight(browser):
    browser.hover(FIRST_ARTICLE + "td[data-s='1'][data-t='0']")
    assert get_highlights(browser) == {"Hund": 1, "zzz": 1}
    assert get_tooltip(browser) == "Hund → zzz0.25"
    browser.hover("h1")
    assert get_highlights(browser) == {} and get_tooltip(browser) is None


@pytest.mark.parametrize("place", ["dd span", "th"])
def test_hovering_word_highlights_other_side_by_weight(browser, place):
    browser.hover(f"{FIRST_ARTICLE}{place}[data-t='1']")
    assert get_highlights(browser) == {"qqq": 1, "Hund": 0.5, "schläft": 0.5}
    browser.hover(f"{FIRST_ARTICLE}{place}[data-s='0']")
    assert get_highlights(browser) == {"Der": 1, "zzz": 0.75, "vvv": 0.1}


def test_keyboard_navigation_of_matrix(browser):
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "filter"
    browser.press("Tab", "Tab", "Tab")
    assert get_focused_cell(browser) == {"s": "0", "t": "0"} and get_tooltip(browser) == "Der → zzz0.75"
    browser.press("ArrowRight", "ArrowDown")
    assert get_focused_cell(browser) == {"s": "1", "t": "1"} and get_highlights(browser) == {"Hund": 1, "qqq": 1}
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Escape")
    assert get_tooltip(browser) is None
    browser.press("ArrowUp", "ArrowUp")
    assert get_focused_cell(browser) == {"s": "1"} and get_highlights(browser) == {"Hund": 1, "zzz": 0.25, "qqq": 0.5}
    browser.press("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")  # not past the edge, nor into the corner
    assert get_focused_cell(browser) == {"s": "0"}
    browser.evaluate('document.querySelector(\'td[data-s="2"][data-t="1"]\').focus()')  # as a click does
    assert browser.evaluate("document.querySelectorAll('article:first-child [tabindex=\"0\"]').length") == 1
    browser.press("Tab")
    assert browser.evaluate("[...list.children].indexOf(document.activeElement.closest('article'))") == 1


def test_filter_order_and_more_controls(browser):
    def lines():
        return browser.evaluate("[...document.querySelectorAll('h2')].map(n => +n.textContent.slice(5))")

    assert lines()[0] == 1 and browser.evaluate("count.textContent") == f"{len(PAIRS)} of {len(PAIRS)} pairs"
    browser.evaluate("more.focus()")
    browser.press("Enter")
    assert len(lines()) == 40 and browser.evaluate("[...list.children].indexOf(document.activeElement)") == 20
    browser.evaluate("order.value = 'corpus', order.dispatchEvent(new Event('change'))")
    assert lines() == list(range(1, 21))
    browser.evaluate("order.value = 'longest', order.dispatchEvent(new Event('change'))")
    longest = sorted(range(len(PAIRS)), key=lambda row: -len(PAIRS[row][0].split(" ")))
    assert lines() == [row + 1 for row in longest[:20]]
    browser.evaluate("filter.focus()")
    browser.type("SCHLÄFT")
    assert lines() == [1] and browser.evaluate("count.textContent") == f"1 of {len(PAIRS)} pairs"
    browser.hover(FIRST_ARTICLE + "td[data-s='0']")
    assert get_tooltip(browser) == "Der → zzz0.75"
    browser.type("no such text")
    assert (
        lines() == [] and browser.evaluate("getComputedStyle(more).display") == "none" and get_tooltip(browser) is None
    )


def test_reader_chooses_weights(browser):
    assert browser.evaluate("[...shown.options].map(option => option.text)") == [
        "Attention as in alignments.jsonl",
        "swapped",
        "same",
    ]
    expected = {"": WEIGHTS[0], "0": WEIGHTS[1], "1": WEIGHTS[0]}
    for value, weights in expected.items():
        browser.evaluate(f"shown.value = '{value}', shown.dispatchEvent(new Event('change'))")
        cells = browser.evaluate("[...document.querySelector('tbody tr').cells].slice(1).map(n => n.ariaLabel)")
        assert [float(cell) for cell in cells] == list(weights[:3])
        shown_pairs = {"": len(PAIRS), "0": 1, "1": 2}[value]  # the other pairs have no such weights
        assert browser.evaluate("count.textContent") == f"{shown_pairs} of {len(PAIRS)} pairs"
    browser.evaluate("shown.value = '1', shown.dispatchEvent(new Event('change'))")
    assert browser.evaluate("document.querySelectorAll('.matrix').length") == 2  # also of the pair without attention


def test_policy_blocks_injected_scripts_and_requests(browser):
    browser.evaluate(
        "(() => { const made = document.createElement('script'); made.textContent = 'hacked = 1'; document.body.append("
        "made); document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hacked=1>'); })()"
    )
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
