"""The page of an evaluation: what is in it, that data stays data, and how it behaves in a real browser."""

import base64
import hashlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from builders import PageReader
from hypothesis import example, given
from hypothesis import strategies as st

from nmt.data.tokenizer import group_by_words
from nmt.decoding.translator import Translation
from nmt.evaluation import report
from nmt.evaluation.metrics import bleu, compute_scores
from nmt.evaluation.report import build_report

HOSTILE = [
    "<script>hacked=1</script>", "</script><script>hacked=1</script>", "</script x", "<!--<script>", "-->", "]]>",
    "</title><b>", "<img src=x onerror=hacked=1>", "\" onfocus='hacked=1' autofocus=\"", "&lt;b&gt;&amp;",
    "\u2028hacked=1//", "\u202eright\u202cto\u2066left", "<!--DATA-->", "<!--TITLE-->", "\\", "\\u003c", "\x00\x1b[31m",
    "${hacked=1}", "__proto__", "constructor", "مرحبا", "👩‍👩‍👧", "w" * 300,
]  # fmt: skip
BARE = {"signatures": {}}


def translation(source, target, weights="diagonal"):
    """Of texts whose every word is a piece; a target word looks at the source word of its own place."""
    pieces = [[*("▁" + word for word in text.split(" ") if word), "</s>"] for text in (source, target)]
    if isinstance(weights, str):
        weights = np.eye(len(pieces[1]), len(pieces[0]))
    return Translation(target, *pieces, score=-1.5, weights_TS=weights)


def corpus(pairs, **given):
    """The page of (source, reference, translation)s."""
    sources, references, texts = zip(*pairs, strict=True) if pairs else ((), (), ())
    found = [translation(source, text, **given) for source, text in zip(sources, texts, strict=True)]
    return build_report("toy, test", compute_scores(texts, references), sources, references, found)


def read(*arguments, **given):
    return PageReader(corpus(*arguments, **given))


def test_the_worst_come_first_each_with_its_own_score():
    pairs = [("eins", "one", "one"), ("zwei drei", "two three", "xx"), ("vier", "four", "fort")]
    found = read(pairs).data
    assert [pair["line"] for pair in found] == [2, 3, 1]
    for pair in found:
        _, reference, text = pairs[pair["line"] - 1]
        assert pair["reference"] == reference and pair["translation"] == text.split()
        assert pair["chrf"] == pytest.approx(compute_scores([text], [reference])["chrf"], abs=0.006)


def test_rows_are_the_weights_between_words_in_percent():
    weights = np.array([[0.104, 0.5, 0.396, 0], [0.3, 0.5, 0.2, 0], [0, 0, 0.004, 0.996], [0, 0, 0, 1]])
    given = Translation("New York", ["▁Neu", "yo", "rk", "</s>"], ["▁New", "▁Y", "ork", "</s>"], -1.0, weights)
    [pair] = PageReader(build_report("x", BARE, ["Neuyork"], ["New York"], [given])).data
    assert pair["source"] == ["Neuyork"] and pair["translation"] == ["New", "York"]
    assert pair["rows"] == [[0, 100], [0, 50]]  # a sum over source pieces, a mean over target pieces
    given = translation("a b c", "x y", np.array([[0.004, 0.996, 0, 0], [np.nan, np.inf, 0.25, 0.75], [0, 0, 0, 1]]))
    [pair] = PageReader(build_report("x", BARE, ["a b c"], ["x y"], [given])).data
    assert pair["rows"] == [[1, 100], [2, 25]]


def test_unknown_words_are_shown_as_they_were_written():
    known = translation("ein <unk> <unk>", "a lynx")
    data = PageReader(build_report("x", BARE, ["ein  Luchs gähnt"], ["a lynx yawns"], [known])).data
    assert (data[0]["source"], data[0]["translation"]) == (["ein", "Luchs", "gähnt"], ["a", "lynx"])
    data = PageReader(build_report("x", BARE, ["ein Luchs"], ["a lynx yawns"], [known])).data
    assert data[0]["source"] == ["ein", "<unk>", "<unk>"]


def test_without_attention_there_are_pairs_and_no_matrix():
    found = read([("eins zwei", "one two", "one")], weights=None)
    [pair] = found.data
    assert pair["source"] == ["eins", "zwei"] and "rows" not in pair and "matrix" not in found.text["p"]


def test_empty_sentences_and_an_empty_corpus():
    assert read([]).data == []
    pairs = PageReader(build_report("x", BARE, ["", "ja"], ["", "yes"], [Translation(""), translation("ja", "")])).data
    assert [pair["source"] for pair in pairs] == [[], ["ja"]] and not any("rows" in pair for pair in pairs)


def test_a_page_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(report, "MAX_REPORT_PAIRS", 3)
    monkeypatch.setattr(report, "MAX_MATRIX_CELLS", 4)
    text = corpus([("a", "x", "x")] * 2 + [("a b", "x", "y z")] * 2 + [("a b c", "x", "p q")])
    assert [pair["line"] for pair in PageReader(text).data] == [3, 4, 5]
    assert ["rows" in pair for pair in PageReader(text).data] == [True, True, False]
    assert "The 3 worst of 5 sentence pairs" in text and "more than 4 cells" in text


def test_scores_and_signatures_stand_at_the_head():
    measures = {"loss": 0.5, "ppl": 1234.5678, "bleu": 12.346, "ter": None, "aer": 0.0123, "beam_size": 5}
    text = build_report("toy, test", measures | {"signatures": {"bleu": "nrefs:1|tok:13a"}}, [], [], [])
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text) == [
        ("BLEU", "12.35"), ("TER", "–"), ("AER", "0.0123"), ("loss", "0.5000"), ("ppl", "1,234.57"), ("beam size", "5"),
        ("BLEU", "nrefs:1|tok:13a"),
    ]  # fmt: skip
    assert "AER" not in build_report("mine, test", {"aer": None, "signatures": {}}, [], [], [])


def test_the_chart_shows_each_range_of_lengths_with_its_number_of_pairs():
    full, part = "one two three four", "one two four"
    text = corpus([("a " * 5, full, full)] * 3 + [("a " * 6, full, part)])
    score = bleu([part], [full])
    assert f'aria-label="up to 5 words: BLEU 100.00 (pairs: 3); 6-10 words: BLEU {score:.2f} (pairs: 1)"' in text
    heights = [float(height) for height in re.findall('class="bar".*? height="(.*?)"', text)]
    assert heights[0] == report.BAR_AREA_HEIGHT and heights[1] < heights[0]


def one(title, name, value, reference, pieces):
    given = Translation("".join(pieces), pieces, pieces, -1.0, np.ones((len(pieces), len(pieces))))
    named = {"any " + name: value}  # not a name that has its place
    return build_report(title, named | {"signatures": named}, ["x"], [reference], [given])


PLAIN = PageReader(one("x", "x", "x", "x", ["▁x"]))
LABEL = st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=20)


@given(LABEL, LABEL, LABEL, st.text(max_size=20), st.lists(st.text(max_size=8), min_size=1, max_size=4))
@example(*HOSTILE[1:4], HOSTILE[0], HOSTILE)
def test_text_stays_text_whatever_is_in_it(title, name, value, reference, pieces):
    found = PageReader(one(title, name, value, reference, pieces))
    assert found.elements == PLAIN.elements and found.policy == PLAIN.policy
    [pair] = found.data
    assert pair["reference"] == reference and not re.search("[<>&\u2028\u2029]", found.text["data"])
    assert pair["source"] == pair["translation"] == group_by_words(pieces)[0]
    assert found.text["style"] == PLAIN.text["style"] and found.text["script"] == PLAIN.text["script"]
    assert found.text["title"].strip() == found.text["h1"].strip() == title.strip()
    assert value in found.text["dd"] and name.replace("_", " ") in found.text["dt"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_words_read_back(text):
    [pair] = PageReader(one("x", "x", "x", text, ["▁" + text.replace(" ", "")])).data
    assert pair["reference"] == text and pair["source"] == [text.replace(" ", "")]


def test_the_policy_allows_the_page_and_nothing_else():
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(PLAIN.text[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in PLAIN.policy
    assert PLAIN.policy.startswith("default-src 'none';") and "unsafe" not in PLAIN.policy
    attributes = {name for _, names in PLAIN.elements for name in names}
    assert not attributes & {"src", "href", "srcset", "action", "style"}
    assert not re.search(r"https?:|//\w+\.|@import|url\(|innerHTML|eval\(", PLAIN.text["style"] + PLAIN.text["script"])


PAIRS = [
    ("Der Hund schläft", "The dog sleeps", "zzz qqq vvv"),  # the worst by far
    *((f"{text} zwei", f"{text} two", f"two {text.replace(' ', '')}") for text in HOSTILE),
    *((f"Satz {i}", f"sentence {i}", f"sentence {i}") for i in range(20)),
]
WEIGHTS = np.array([[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0], [0.1, 0, 0.9, 0], [0, 0, 0, 1]])
FIRST = "article:first-child "


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("page")
    sources, references, texts = zip(*PAIRS, strict=True)
    found = [translation(source, text) for source, text in zip(sources, texts, strict=True)]
    found[0] = translation(sources[0], texts[0], WEIGHTS)
    path = folder / "report.html"
    text = build_report(HOSTILE[6], compute_scores(texts, references), sources, references, found)
    path.write_text(text, encoding="utf-8")
    browser = Browser(folder / "profile")
    yield SimpleNamespace(browser=browser, path=path)
    browser.close()


@pytest.fixture
def browser(started):
    started.browser.open(started.path)
    return started.browser


def glowing(browser):
    """Words that are lit up, with how much, in the text and at the matrix."""
    nodes = "[...document.querySelectorAll('[style*=glow]')].map(n => [n.tagName, n.textContent, n.style.cssText])"
    found = [(tag, text, float(re.search("glow: ?([^;]*)", css)[1])) for tag, text, css in browser.evaluate(nodes)]
    words, headers = ({text: glow for tag, text, glow in found if tag == kind} for kind in ("SPAN", "TH"))
    assert words == headers
    return {text: glow for text, glow in words.items() if glow}


def focused(browser):
    return browser.evaluate("{...document.activeElement.dataset}")


def tip(browser):
    return browser.evaluate("tip.hidden ? null : tip.textContent")


def test_the_page_opens_in_silence_and_asks_for_nothing(browser, started):
    assert browser.evaluate("document.querySelectorAll('article').length") == 20
    noise = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert not [event for event in browser.events if event["method"] in noise]
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert requests == [started.path.as_uri()]


def test_hostile_text_is_shown_and_does_nothing(browser):
    while browser.evaluate("more.hidden || append() && false") is False:
        pass
    shown = browser.evaluate("[...document.querySelectorAll('article dl')].map(n => n.children[3].textContent)")
    assert sorted(shown) == sorted(reference for _, reference, _ in PAIRS)
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("document.scripts.length") == 2 and browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.title") == HOSTILE[6]


def test_hovering_a_cell_lights_up_its_two_words_and_shows_its_weight(browser):
    browser.hover(FIRST + "td[data-s='1'][data-t='0']")
    assert glowing(browser) == {"Hund": 1, "zzz": 1}
    assert tip(browser) == "Hund → zzz0.25"
    browser.hover("h1")
    assert glowing(browser) == {} and tip(browser) is None


@pytest.mark.parametrize("place", ["dd span", "th"])
def test_hovering_a_word_lights_up_the_other_side_by_weight(browser, place):
    browser.hover(f"{FIRST}{place}[data-t='1']")
    assert glowing(browser) == {"qqq": 1, "Hund": 0.5, "schläft": 0.5}
    browser.hover(f"{FIRST}{place}[data-s='0']")
    assert glowing(browser) == {"Der": 1, "zzz": 0.75, "vvv": 0.1}


def test_a_matrix_is_one_stop_of_tab_and_arrows_walk_through_it(browser):
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "filter"
    browser.press("Tab", "Tab")
    assert focused(browser) == {"s": "0", "t": "0"} and tip(browser) == "Der → zzz0.75"
    browser.press("ArrowRight", "ArrowDown")
    assert focused(browser) == {"s": "1", "t": "1"} and glowing(browser) == {"Hund": 1, "qqq": 1}
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Escape")
    assert tip(browser) is None
    browser.press("ArrowUp", "ArrowUp")
    assert focused(browser) == {"s": "1"} and glowing(browser) == {"Hund": 1, "zzz": 0.25, "qqq": 0.5}
    browser.press("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")  # not past the edge, nor into the corner
    assert focused(browser) == {"s": "0"}
    browser.evaluate('document.querySelector(\'td[data-s="2"][data-t="1"]\').focus()')  # as a click does
    assert browser.evaluate("document.querySelectorAll('article:first-child [tabindex=\"0\"]').length") == 1
    browser.press("Tab")
    assert browser.evaluate("[...list.children].indexOf(document.activeElement.closest('article'))") == 1


def test_filter_order_and_more(browser):
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
    browser.hover(FIRST + "td[data-s='0']")
    assert tip(browser) == "Der → zzz0.75"
    browser.type("no such text")
    assert lines() == [] and browser.evaluate("getComputedStyle(more).display") == "none" and tip(browser) is None


def test_light_and_dark_and_narrow(browser):
    def brightness(name):
        red, green, blue = re.findall(r"[\d.]+", browser.evaluate(f"getComputedStyle(document.documentElement).{name}"))
        return (int(red) + int(green) + int(blue)) / 765

    for scheme, sign in (("light", 1), ("dark", -1)):
        browser.scheme(scheme)
        assert sign * (brightness("backgroundColor") - brightness("color")) > 0.7
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.scheme("light")


def test_what_gets_in_all_the_same_cannot_run_or_send(browser):
    browser.evaluate(
        "(() => { const made = document.createElement('script'); made.textContent = 'hacked = 1'; document.body.append("
        "made); document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hacked=1>'); })()"
    )
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
