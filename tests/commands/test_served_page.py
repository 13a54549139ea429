"""The page at `/` of `nmt.serve`, in a browser."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browser import Browser, TranslatingPage, check_policy, check_same_code
from builders import HOSTILE, PageReader
from servers import FakeTranslator, Running, fake_service, listening, running

from nmt.serving import app, batcher, translation_request
from nmt.serving.app import build_app

LINES = ["Der Hund schläft .", "", "Die Frau liest ein Buch ."]


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Running]:
    with running(home, "checkpoint=runs/mine") as started:
        yield started


@pytest.fixture
def page(browser: Browser, served: Running) -> TranslatingPage:
    return TranslatingPage(browser, f"{served.url}/")


@contextmanager
def fake_page(browser: Browser, **options: Any) -> Iterator[tuple[TranslatingPage, FakeTranslator]]:
    """The page of a server with a fake model, whose gate is closed."""
    with fake_service(**options) as (service, translator), listening(service) as port:
        try:
            yield TranslatingPage(browser, f"http://127.0.0.1:{port}/"), translator
        finally:
            translator.gate.set()
            browser.open("about:blank")


def test_attention_alternatives_and_notes_are_shown_by_requests_to_its_server_only(page: TranslatingPage) -> None:
    long_line = "Der Hund schläft und die Frau liest . " * 30
    [first, _, _, _] = page.write("\n".join([*LINES, long_line]))
    assert page.browser.requests() == [page.url, f"{page.url}translate"]
    assert page.texts("#source-name") == ["German"] and page.texts("#translation-name") == ["English"]
    page.evaluate("translation.children[0].focus()")
    assert page.texts("#options span")[0] == first and len(page.texts("#options span")) > 1
    assert page.texts("#matrix thead bdi") == LINES[0].split()
    page.browser.hover("#matrix td[data-s='1'][data-t='0']")
    assert page.highlights()["mirror"] == {"Hund": 1}
    page.browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
    assert any("Line 4 is long; it was translated in" in note for note in page.texts("#notes li"))
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"


def test_new_text_ends_the_request_of_the_old_and_known_lines_are_not_sent_again(browser: Browser) -> None:
    with fake_page(browser) as (page, translator):
        page.evaluate("source.focus()")
        for text in ("old", "er", "est"):
            browser.type(text)
            time.sleep(0.4)  # longer than the pause after which a text is translated
        translator.gate.set()
        assert page.wait() == ["OLDEREST"]
        assert translator.calls == [["old"], ["olderest"]]  # the request between was given up in the queue
        assert page.write("olderest\nnew\nnew") == ["OLDEREST", "NEW", "NEW"] and translator.calls[-1] == ["new"]


def test_errors_are_sentences_in_the_status_line(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ANSWER_SECONDS", 1.0)
    for module in (app, translation_request):
        monkeypatch.setattr(module, "MAX_CHARACTERS", 20)
    with fake_page(browser) as (page, translator):
        assert page.write("late") == [""]
        assert page.evaluate("state.textContent") == "The server took too long."
        with monkeypatch.context() as patch:
            patch.setattr(batcher, "MAX_WAITING", 0)
            page.write("waiting")
        assert page.evaluate("state.textContent") == "The server is busy. Try again in a moment."
        translator.gate.set()
        assert page.write("good") == ["GOOD"]
        assert page.write("good\n" + "w" * 30) == ["GOOD", ""]
        message = "The text is too long: this server takes 20 characters at a time."
        assert page.evaluate("state.textContent") == message and page.evaluate("copy.disabled")
        assert page.write("cut") == ["CUT"]
        assert page.texts("#notes li") == ["The text: the translation was cut at its maximum length."]
        page.write("bad")
        assert page.texts("#notes li") == []
        message = "The server reports an error: out of memory for one line of 9 pieces"
        assert page.evaluate("state.textContent") == message


def test_lost_server_is_reported(browser: Browser) -> None:
    with fake_service() as (service, translator):
        translator.gate.set()
        with listening(service) as port:
            page = TranslatingPage(browser, f"http://127.0.0.1:{port}/")
            assert page.write("here") == ["HERE"]
        page.write("gone")
        assert page.evaluate("state.textContent") == "The server cannot be reached."
        assert page.write("here") == ["HERE"] and page.evaluate("!copy.disabled")  # it is known


def test_languages_and_key_are_chosen_in_the_page(browser: Browser) -> None:
    directions = [("de", "en"), ("ar", "ja"), (HOSTILE[0], HOSTILE[7])]
    with fake_page(browser, directions=directions, api_key="kéy") as (page, translator):
        translator.gate.set()
        names = ["German → English", "Arabic → Japanese", f"{HOSTILE[0]} → {HOSTILE[7]}"]
        assert page.texts("#model option") == names and page.evaluate("!model.hidden && key.type === 'password'")
        page.write("hund")
        assert page.evaluate("state.textContent") == "The API key is missing or wrong."
        page.evaluate("(key.value = 'kéy', key.dispatchEvent(new Event('change')))")
        assert page.wait() == ["HUND"]
        for index, (source, target) in enumerate([("Arabic", "Japanese"), (HOSTILE[0], HOSTILE[7])], 1):
            page.evaluate(f"(model.value = {index}, model.dispatchEvent(new Event('change')))")
            assert page.wait() == ["HUND"] and len(translator.calls) == index + 1
            assert page.texts("#source-name") == [source] and page.texts("#translation-name") == [target]
        assert page.evaluate("typeof hacked") == "undefined" and page.evaluate("document.images.length") == 0
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=False)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        browser.call("Emulation.clearDeviceMetricsOverride")


def read_page(*directions: tuple[str, str]) -> PageReader:
    with fake_service(directions) as (service, _):
        request: Any = SimpleNamespace(app=build_app(service))
        return PageReader(bytes(asyncio.run(app.page(request)).body).decode())


def test_names_of_languages_cannot_change_the_page() -> None:
    plain = read_page(("de", "en"))
    check_policy(plain)
    assert plain.policy.endswith("connect-src 'self'; base-uri 'none'; form-action 'none'")
    for text in HOSTILE:
        page = read_page((text, text + "x"))
        check_same_code(page, plain)
        assert page.text["title"].strip() == page.text["h1"].strip() == f"{text} → {text}x".strip()
        assert page.data["models"][0]["languages"] == {"source": text, "target": text + "x"}
