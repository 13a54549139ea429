"""`nmt.export`: errors, and the page in a browser."""

import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from browser import Browser, TranslatingPage, check_policy, check_same_code
from builders import (
    HOSTILE,
    ODD_LINES,
    PageReader,
    make_sentences,
    make_tokenizer,
    round_weights,
    run_error,
    run_in_new_process,
    run_ok,
)

import nmt
from nmt.config import AttentionConfig, DataConfig, ModelConfig, SearchConfig, TrainRun
from nmt.decoding.translator import Translator
from nmt.model.seq2seq import build_model
from nmt.page.export import build_page
from nmt.runs.checkpoint import load_model

LINES = ["Der Hund schläft .", "", "Die Frau liest ein Buch ."]
SEARCH = SearchConfig(beam=3, max_length=12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=runs/none", "output=x.html"], "runs/none is not a folder; give a run"),
        (["checkpoint=runs/mine", "output=none/x.html"], "none/x.html cannot be written: No such file or directory"),
        (["checkpoint=runs/mine", "output=folder.html"], "folder.html cannot be written: Is a directory"),
        (["checkpoint=runs/mine", "output=runs"], "runs already exists; give the name of a new folder"),
        (["checkpoint=runs/mine", "output=x.html", "average=9"], "average=9: runs/mine has only 2 checkpoints"),
        (["checkpoint=runs/mine", "output=x.html", "search.sample=true"], "search.sample=True does not work in a page"),
    ],
)
def test_invalid_arguments_are_refused(home: Path, arguments: list[str], message: str) -> None:
    (home / "folder.html").mkdir(exist_ok=True)
    assert message in run_error("export", *arguments, folder=home)
    assert not (home / "x.html").exists()


def test_command_writes_page_or_folder(home: Path) -> None:
    (home / "a b.html").write_text("old")
    process = run_in_new_process("export", "checkpoint=runs/mine", "output=a b.html", "average=2", folder=home)
    assert process.returncode == 0 and not process.stdout
    page = PageReader((home / "a b.html").read_text(encoding="utf-8"))
    assert page.text["h1"].strip() == "de → en" and page.data["search"]["beam"] == 5
    nmt.load(home / "runs/mine", average=2).export(home / "from_python.html")
    assert (home / "from_python.html").read_bytes() == (home / "a b.html").read_bytes()
    with pytest.raises(nmt.UserError, match="export each model"):
        nmt.load([home / "runs/mine"] * 2).export(home / "both.html")
    run_ok("export", "checkpoint=runs/mine", "output=shared", folder=home)
    assert nmt.load(home / "shared").translate(LINES) == nmt.load(home / "runs" / "mine").translate(LINES)
    run_ok(
        "export", "checkpoint=runs/mine", "output=api.HTML", "search.beam=2", "search.length_penalty=0.5", folder=home
    )
    page = PageReader((home / "api.HTML").read_text(encoding="utf-8"))
    assert (page.data["search"]["beam"], page.data["search"]["length_penalty"]) == (2, 0.5)


def make_page(score: str = "additive", **data: Any) -> str:
    """Return the page of a random model."""
    tokenizer = make_tokenizer("bpe", joint=False)
    run = TrainRun(
        data=DataConfig(format="text", path="x", max_length=9, **data),
        model=ModelConfig(embed=8, hidden=16, attention=AttentionConfig(score=score)),
    )
    torch.manual_seed(1)
    with patch("nmt.model.attention.LOCATION_POSITIONS", 6):
        model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    return build_page(model.eval(), tokenizer, run, SEARCH)


PLAIN = PageReader(make_page())


def test_page_loads_and_sends_nothing_and_texts_cannot_change_it() -> None:
    check_policy(PLAIN)
    assert "worker-src blob:; base-uri 'none'; form-action 'none'" in PLAIN.policy
    assert "fetch" not in PLAIN.text["script"] + PLAIN.text["worker"]
    for text in HOSTILE:
        page = PageReader(make_page(source=text, target=text + "x"))
        check_same_code(page, PLAIN)
        titles = [page.text["title"], page.text["h1"], page.data["title"]]
        assert {title.strip() for title in titles} == {f"{text} → {text}x".strip()}
        assert page.data["languages"] == {"source": text, "target": text + "x"}


# ------------------------------------------------------------------------------------------------------------- browser
@pytest.fixture(scope="module")
def folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages with spaces")


@pytest.fixture(scope="module")
def trained(home: Path, folder: Path) -> Path:
    """The page of a trained model."""
    path = folder / "mine.html"
    run_ok("export", "checkpoint=runs/mine", f"output={path}", "search.beam=3", "search.max_length=20", folder=home)
    return path


@pytest.fixture
def page(browser: Browser, trained: Path) -> TranslatingPage:
    return TranslatingPage(browser, trained.as_uri())


def open_random(browser: Browser, folder: Path, **options: Any) -> TranslatingPage:
    path = folder / "random.html"
    path.write_text(make_page(**options), encoding="utf-8")
    return TranslatingPage(browser, path.as_uri())


def test_page_opens_without_messages_or_requests(page: TranslatingPage) -> None:
    assert all(page.write("\n".join(LINES))[::2])
    urls = page.browser.requests()
    assert [url for url in urls if not url.startswith("blob:")] == [page.url] and len(urls) <= 2
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"


def test_translations_and_attention_match_python(page: TranslatingPage, home: Path) -> None:
    model, tokenizer, config, *_ = load_model(str(home / "runs" / "mine"))
    round_weights(model)
    lines = [*LINES, "DIE FRAU LIEST GROSSE BÜCHER .", *make_sentences(12)]
    lines += [line[:200] for line in ODD_LINES if "\r" not in line]
    for beam in (1, 3):
        search = SearchConfig(beam=beam, n_best=beam, max_length=20).with_source_limit_of(config.data)
        translator = Translator(model, tokenizer, search, torch.device("cpu"), ("de", "en"))
        text = json.dumps("\n".join(lines))
        actual = page.evaluate(f"(beam.value = {beam}, translator.translate({text}, () => {{}}))")
        for line, options, result in zip(lines, translator.translate(lines, keep_weights=True), actual, strict=True):
            texts = [option.text for option in options if line.strip()]
            assert [option["text"] for option in result["options"]] == texts
            for option, python in zip(result["options"], options, strict=False):
                assert option["score"] == pytest.approx(python.score, abs=1e-2)
                weights = python.record.word_weights()
                if weights is not None and option["words"] == python.record.target_words:
                    assert result["source"]["words"] == python.record.source_words
                    np.testing.assert_allclose(np.array(option["weights"]).reshape(weights.shape), weights, atol=1e-2)


def test_translation_appears_while_it_is_written(page: TranslatingPage) -> None:
    observer = "new MutationObserver(() => (globalThis.seen ??= new Set()).add(translation.textContent))"
    page.evaluate(f"({observer}.observe(translation, {{ childList: true, subtree: true }}))")
    [text] = page.write(LINES[2])
    seen = page.evaluate("[...seen]")
    assert text in seen and len(seen) >= 3


def test_hovering_shows_where_the_model_looked(page: TranslatingPage) -> None:
    page.write("\n".join(LINES))
    page.browser.hover("#translation p:nth-child(3) .word")
    found = page.highlights()
    weights = page.evaluate("results[2].options[0].weights[0]")
    assert page.evaluate("current") == 2 and max(found["translation"].values()) == 1
    assert list(found["mirror"].values()) == pytest.approx(weights, abs=1e-6)
    assert list(found["mirror"]) == LINES[2].split()
    page.browser.hover("#mirror div:nth-child(1) .word:nth-of-type(2)")  # the text field lies above it
    assert page.highlights()["mirror"] == {"Hund": 1} and page.evaluate("current") == 0
    page.browser.hover("h1")
    assert page.highlights() == {"mirror": {}, "translation": {}}


def test_alternatives_replace_the_translation(page: TranslatingPage) -> None:
    [best] = page.write(LINES[0])
    options = page.texts("#options span")
    assert 1 < len(options) <= 3 and options[0] == best
    page.evaluate("options.children[1].firstChild.click()")
    assert page.texts("#translation p") == [options[1].strip()]
    assert page.texts("[aria-pressed=true] span") == [options[1]]
    assert page.texts("#matrix tbody th") == options[1].split()
    page.evaluate("(beam.value = 1, beam.dispatchEvent(new Event('change')))")
    page.wait()
    assert page.evaluate("options.parentNode.hidden")


def test_new_text_ends_the_translation_of_the_old_and_is_translated_once(page: TranslatingPage) -> None:
    texts = "['Der Hund . '.repeat(50), 'Der Hund']"
    old, last = page.evaluate(f"Promise.all({texts}.map(text => translator.translate(text, () => {{}})))")
    assert old is None and len(last) == 1
    page.write("der")
    page.evaluate(
        "(globalThis.starts = 0, new MutationObserver(() => starts++).observe(translation, "
        "{ attributes: true, attributeFilter: ['aria-busy'] }))"
    )
    page.evaluate("(source.value = 'der Hund', source.dispatchEvent(new Event('input')), translate())")
    page.wait()
    time.sleep(0.5)  # twice the pause after which a text that was typed is translated
    assert page.evaluate("starts") == 2  # busy, and no longer


def test_copy_button_copies_all_lines(page: TranslatingPage) -> None:
    assert page.evaluate("copy.disabled")
    lines = page.write("\n".join(LINES))
    page.browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.evaluate("copy.focus()")
    page.browser.press("Enter")
    page.wait_until("state.textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "\n".join(lines)


def test_keyboard_reaches_everything(page: TranslatingPage) -> None:
    assert page.evaluate("document.activeElement.id") == "source"
    page.write("\n".join(LINES))
    reached: list[str] = []
    while "matrix" not in reached:
        page.browser.press("Tab")
        reached.append(page.evaluate("(node => node.id || node.closest('[id]').id)(document.activeElement)"))
    assert list(dict.fromkeys(reached)) == ["clear", "translation", "copy", "beam", "options", "matrix"]
    page.evaluate("translation.children[2].focus()")
    assert page.evaluate("translation.children[2].getAttribute('aria-current')") == "true"
    names = page.evaluate("[source.labels[0].textContent, beam.ariaLabel, translation.getAttribute('aria-live')]")
    assert names == ["German", "Search", "polite"]
    page.evaluate("clear.click()")
    assert page.evaluate("document.activeElement.id") == "source" and page.wait() == [""]
    assert page.evaluate("detail.hidden && copy.disabled")


def test_hostile_text_is_displayed_and_not_executed(page: TranslatingPage) -> None:
    lines = [text for text in HOSTILE if len(text) < 50]
    page.evaluate(f"(source.value = {json.dumps(chr(10).join(lines))}, source.dispatchEvent(new Event('input')))")
    assert len(page.wait()) == len(lines)
    assert page.texts("#mirror div") == lines
    assert page.evaluate("typeof hacked") == "undefined" and page.evaluate("document.images.length") == 0


def test_long_lines_are_split_and_cut_with_a_note(browser: Browser, folder: Path) -> None:
    page = open_random(browser, folder, score="location")
    page.write("der Hund läuft schnell . " * 8 + "\nder")
    notes = page.texts("#notes li")
    assert re.fullmatch(r"Line 1 is long; it was translated in \d+ parts\.", notes[0])
    assert notes[1] == "Line 1: the translation was cut at its maximum length."
    assert notes[2] == "Line 1 is longer than the model can look: its end gets no attention."
    page.write("der")
    assert not any("parts" in note for note in page.texts("#notes li"))


def test_model_without_attention(browser: Browser, folder: Path) -> None:
    page = open_random(browser, folder, score="none", source="1", target="2")
    assert page.write("der Hund")[0]
    assert page.evaluate("grid.parentNode.hidden") and "no attention" in page.evaluate("about.textContent")
    page.browser.hover("#translation .word")
    assert page.highlights()["mirror"] == {"der": 0, "Hund": 0}
    assert page.texts("#source-name") == ["1"] and page.evaluate("document.title") == "1 → 2"


def test_right_to_left_text_and_narrow_window(page: TranslatingPage) -> None:
    page.write("مرحبا بالعالم\nDer Hund " + "w" * 200)
    directions = "[...mirror.children].map(node => getComputedStyle(node).direction)"
    assert page.evaluate(directions) == ["rtl", "ltr"] and page.evaluate("source.dir") == "auto"
    heights = page.evaluate("[source.clientHeight, source.scrollHeight]")
    assert heights[0] == heights[1]  # the field grows with the text
    page.browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.browser.call("Emulation.clearDeviceMetricsOverride")
