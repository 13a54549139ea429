"""The server: its API, its batches, its limits, and how it starts and ends."""

import asyncio
import http.client
import json
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import run_error, run_ok, run_program
from libretranslatepy import LibreTranslateAPI
from servers import DIRECTION, SERVE_SETTINGS, FakeTranslator, Running, ask, fake_service, listening, post, running

import nmt
from nmt.config import SearchConfig
from nmt.data.words import find_words_without_space
from nmt.runs.checkpoint import export_model, load_model
from nmt.serving import app, batcher, translation_request
from nmt.serving.app import Service
from nmt.serving.batcher import Group

LINES = [
    "Die Frau liest ein Buch .",
    "",
    "  ",
    "Der Hund schläft .",
    "日本語 مرحبا 👩‍👩‍👧",
    "a\tb\x1b[31m\u2028c",
    "Der Hund ." * 30,
]


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Running]:
    with running(home, "checkpoint=runs/mine") as started:
        yield started


# ---------------------------------------------------------------------------------------------------------------- API
def test_answers_equal_nmt_translate(served: Running, home: Path) -> None:
    text = "".join(line + "\n" for line in LINES).encode()
    command = ("checkpoint=runs/mine", *SERVE_SETTINGS, "search.n_best=3", "format=jsonl")
    records = [json.loads(line) for line in run_ok("translate", *command, folder=home, text=text).split("\n")[:-1]]
    texts = [[option["text"] for option in record["translations"]] for record in records]
    answer = ask(served.url, LINES, alternatives=2, details=True)
    assert answer["translatedText"] == [options[0] for options in texts]
    assert answer["alternatives"] == [options[1:] for options in texts]
    for [got], expected in zip(answer["details"], records, strict=True):
        assert got["source"] == expected["source"]
        for ours, theirs in zip(got["translations"], expected["translations"], strict=True):
            names = ("score", "ranking_score", "confidence")
            scores = [pytest.approx(theirs.pop(name), abs=1e-4) for name in names]
            assert [ours.pop(name) for name in names] == scores
            assert ours == theirs
    assert ask(served.url, LINES) == {"translatedText": answer["translatedText"]}
    # One text keeps its line breaks.
    joined = "\r\n".join(LINES[:2]) + "\n\n" + "\n".join(LINES[2:]) + "\n"
    best = answer["translatedText"]
    assert ask(served.url, joined)["translatedText"] == "\r\n".join(best[:2]) + "\n\n" + "\n".join(best[2:]) + "\n"
    assert ask(served.url, [])["translatedText"] == [] and ask(served.url, "")["translatedText"] == ""


def test_attention_equals_that_of_nmt_translate(served: Running, home: Path) -> None:
    lines = [line for line in LINES if line.strip()]
    model = nmt.load(home / "runs" / "mine", precision="fp32", beam=3)  # as the server
    [details, [empty]] = ask(served.url, ["\n".join(lines), " "], attention=True)["details"]
    for line, got, python in zip(lines, details, model.translate(lines, weights=True), strict=True):
        [option], record = got["translations"], python.record
        weights = record.word_weights()
        assert weights is not None
        np.testing.assert_allclose(np.array(option["word_weights"]).reshape(weights.shape), weights, atol=1e-4)
        assert option["source_no_space_before"] == find_words_without_space(line, record.source_words)
        assert option["target_no_space_before"] == find_words_without_space(python.text, record.target_words)
        assert (option["ended"], got["parts"]) == (python.ended, python.source_pieces.count("</s>"))
    assert max(got["parts"] for got in details) > 1 and empty["parts"] == 0
    assert "word_weights" not in str(ask(served.url, "Hund", details=True))


def test_libretranslate_client_works_unchanged(served: Running) -> None:
    client = LibreTranslateAPI(served.url)
    expected = ask(served.url, "Straße & Hund =\n😀")["translatedText"]
    assert client.translate("Straße & Hund =\n😀", "de", "en") == expected
    assert client.languages() == [{"code": "de", "name": "de", "targets": ["en"]}]


def test_requests_are_json_or_forms(served: Running) -> None:
    expected = ask(served.url, "Straße")
    form = "application/x-www-form-urlencoded"
    assert post(served.url, "q=Straße&source=de&target=en".encode(), form) == (200, expected)  # as curl -d sends it
    assert post(served.url, b"q=Stra%C3%9Fe&source=auto&target=en&format=text&alternatives=0", form) == (200, expected)
    status, answer = post(served.url, b"q=Hund&q=Frau&source=de&target=en&alternatives=1", form)
    assert status == 200 and len(answer["translatedText"]) == len(answer["alternatives"]) == 2
    parts = {"q": "Straße", **DIRECTION}
    body = "".join(f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in parts.items())
    assert post(served.url, f"{body}--x--\r\n".encode(), "multipart/form-data; boundary=x") == (200, expected)


BAD = [
    ({"source": "de", "target": "en"}, 400, "q, the text to translate, is missing"),
    ({"q": ["a", None]} | DIRECTION, 422, "q is not a text or a list of texts"),
    (b'{"q": "\\ud800", "source": "de", "target": "en"}', 422, "half of a surrogate pair"),
    ({"q": "a", "source": "de"}, 400, "target, the code of a language, is missing"),
    ({"q": "a", "source": "en", "target": "de"}, 400, "from en to de is not supported; available: de to en"),
    ({"q": "a", "source": "x" * 999, "target": "\x1b[2J\n"}, 400, "is not supported; available: de to en"),
    ({"q": "a", "format": "pdf"} | DIRECTION, 400, "format=pdf is not one of text, html"),
    ({"q": "a", "alternatives": 3} | DIRECTION, 400, "alternatives=3 is not one of 0, 1, 2"),
    ({"q": "a", "details": "yes"} | DIRECTION, 400, "details=yes is not one of false, true"),
    ({"q": "a" * 10_001} | DIRECTION, 413, "q has 10,001 characters, and a request may have 10,000"),
    ({"q": "a", "x": "a" * 200_000} | DIRECTION, 413, "the request has more than 136,384 bytes"),
    (b"[1]", 400, "not a JSON object"),
    (b"[" * 100_000, 400, "not a JSON object"),
    (b'{"q": "\xff"}', 400, "not a JSON object"),
]


@pytest.mark.parametrize(("fields", "status", "reason"), BAD)
def test_bad_request_is_answered_with_a_reason(served: Running, fields: Any, status: int, reason: str) -> None:
    got, answer = post(served.url, fields)
    assert (got, list(answer)) == (status, ["error"]) and reason in answer["error"]


def test_other_endpoints_answer_json(served: Running) -> None:
    def get(path: str) -> Any:
        with urllib.request.urlopen(served.url + path) as response:
            return json.load(response)

    assert get("/health") == {"status": "ok"}
    settings = get("/frontend/settings")
    assert settings["charLimit"] == 10_000 and settings["language"]["target"]["code"] == "en"
    error = "send JSON (Content-Type: application/json) or a form"
    assert post(served.url, b"x", "text/plain") == (415, {"error": error})
    for path, status in (("/translate", 405), ("/none", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(path)
        assert caught.value.code == status and json.load(caught.value)["error"]


def test_log_has_no_text_of_requests(served: Running) -> None:
    for fields in ({"q": "secret\x1b[31m" * 50} | DIRECTION, {"q": "a", "source": "secret\x1b", "target": "secret\n"}):
        post(served.url, fields)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET /secret%0a%1b\x1b HTTP/1.1\r\n\x1bsecret: \r\r\n\r\n")
        connection.recv(1000)
    log = served.log.read_text()
    assert "secret" not in log and "\x1b" not in log and "Traceback" not in log


def test_direction_picks_the_model_and_key_is_required(home: Path, tmp_path: Path) -> None:
    model, tokenizer, config, *_ = load_model(str(home / "runs" / "mine"))
    data = config.data
    export_model(model, tokenizer, replace(config, data=replace(data, source="en", target="de")), tmp_path / "back")
    (tmp_path / "forth").symlink_to(home / "runs" / "mine")
    with running(tmp_path, "checkpoint=[forth,back]", NMT_API_KEY="kéy") as started:
        for fields in ({}, {"api_key": "wrong"}, {"api_key": 5}, {"api_key": "\ud800"}):
            assert post(started.url, {"q": "Hund"} | DIRECTION | fields)[0] == 403
        client = LibreTranslateAPI(started.url, "kéy")
        assert client.translate("Hund", "de", "en") == client.translate("Hund", "en", "de")  # the same weights
        assert [(each["code"], each["targets"]) for each in client.languages()] == [("de", ["en"]), ("en", ["de"])]
        _, answer = post(started.url, {"q": "x", "source": "de", "target": "de", "api_key": "kéy"})
        assert "from de to de is not supported; available: de to en, en to de" in answer["error"]


# ------------------------------------------------------------------------------------------------------ start and end
def test_server_finishes_its_work_on_sigterm_and_restarts_after_kill(home: Path) -> None:
    with running(home, "checkpoint=runs/mine") as started, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, started.url, ["Die Frau liest ein Buch und der Hund schläft ."] * 150)
        time.sleep(0.3)
        assert started.stop() == 0
        assert len(waiting.result()["translatedText"]) == 150
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", started.port))
    with running(home, "checkpoint=runs/mine") as killed:
        connection = http.client.HTTPConnection("127.0.0.1", killed.port)
        connection.request("GET", "/health")
        killed.stop(signal.SIGKILL)
    for sigint in (signal.default_int_handler, signal.SIG_IGN):  # ignored in the background of a script
        with running(home, "checkpoint=runs/mine", port=killed.port, sigint=sigint) as again:
            assert ask(again.url, "")["translatedText"] == "" and again.stop(signal.SIGINT) == 0
            assert again.log.read_text().splitlines()[-1] == "stopped"


def test_start_errors(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"port={other.getsockname()[1]}"
        in_use = f"{port} cannot be used ([Errno 98] Address already in use); use another port=PORT"
        errors = {
            (port, "checkpoint=runs/mine"): in_use,
            ("host=192.0.2.1", "checkpoint=runs/mine"): "host=192.0.2.1 port=5000 cannot be used",
            ("host=no host", "checkpoint=runs/mine"): "host=no host port=5000 cannot be used",
            ("port=0", "checkpoint=[runs/mine,runs/mine]"): "2 models translate de to en",
            ("port=70000", "checkpoint=runs/mine"): "port=70000 must be at least 0 and below 65,536",
        }
        for arguments, message in errors.items():
            assert message in run_error("serve", *arguments, folder=home)


def test_missing_extra_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("nmt.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit):
        run_program("serve", "checkpoint=x")
    assert 'install it with: pip install "attention-nmt[serve]"' in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- limits
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
BODY = json.dumps({"q": "a"} | DIRECTION).encode()
WHOLE = HEAD % len(BODY) + BODY


@contextmanager
def sending() -> Iterator[tuple[Service, FakeTranslator, int, Callable[[str], Any]]]:
    """A server with a fake model, its port, and a function that sends a text to it and returns the future answer."""
    with fake_service() as (service, translator), listening(service) as port, ThreadPoolExecutor(5) as pool:
        try:
            yield (
                service,
                translator,
                port,
                lambda q: pool.submit(post, f"http://127.0.0.1:{port}", {"q": q} | DIRECTION),
            )
        finally:
            translator.gate.set()


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


def test_full_queue_timeout_and_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "MAX_WAITING", 2)
    monkeypatch.setattr(app, "ANSWER_SECONDS", 1.0)
    with sending() as (service, translator, port, send):
        first = send("first")
        wait_until(lambda: translator.calls)
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(WHOLE)
            wait_until(lambda: service.batcher.waiting)
            late = send("late")
            wait_until(lambda: len(service.batcher.waiting) == 2)
            assert send("x").result() == (429, {"error": "too many requests wait; try again later"})
        timeout = 504, {"error": "there was no translation within 1 seconds"}
        assert first.result() == late.result() == timeout
        translator.gate.set()
        assert send("next").result() == (200, {"translatedText": "NEXT"})
        assert translator.calls == [["first"], ["next"]]  # nobody waited for the others


def test_failing_line_fails_its_own_request_only() -> None:
    """An error of ours does not end the server either."""
    with sending() as (service, translator, _, send):
        send("block")
        wait_until(lambda: translator.calls)
        good, bad, cut, bug = map(send, ("good", "bad", "cut", "bug"))
        wait_until(lambda: len(service.batcher.waiting) == 4)
        translator.gate.set()
        assert good.result() == (200, {"translatedText": "GOOD"})
        assert bad.result() == (500, {"error": "out of memory for one line of 9 pieces"})
        assert cut.result()[1]["warnings"] == ["text 1, line 1: cut at the maximum length"]
        assert bug.result() == (500, {"error": "the server failed; its log says why"})
        assert len(translator.calls) == 6


def test_jobs_of_a_group_share_a_batch_up_to_its_limit_in_the_order_of_their_arrival() -> None:
    plain, other = Group(0, 1, False), Group(0, 2, False)
    jobs = [(plain, ["a" * 40] * 2), (other, ["b"]), (plain, ["c"]), (plain, ["d"]), (other, ["e", "f"])]

    async def scenario() -> None:
        with fake_service() as (service, translator):
            translator.config = SearchConfig(beam=2, batch_tokens=5)  # 32 characters for each of 5 / 2 pieces
            first = service.batcher.submit(plain, ["first"])
            while not translator.calls:
                await asyncio.sleep(0.005)
            futures = [service.batcher.submit(*job) for job in jobs]
            futures.pop(3).cancel()
            translator.gate.set()
            results = await asyncio.gather(first, *futures)
            texts = [[options[0].text for options in result] for result in results]
            assert texts == [["FIRST"], ["A" * 40] * 2, ["B"], ["C"], ["E", "F"]]
            assert translator.calls == [["first"], ["a" * 40] * 2, ["b", "e", "f"], ["c"]]

    asyncio.run(scenario())


def test_slow_and_half_closed_clients_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_request, "BODY_SECONDS", 0.3)
    with sending() as (_, translator, port, send):
        translator.gate.set()

        def connect(*parts: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            for part in parts:
                connection.sendall(part)
            return connection

        def read_all(connection: socket.socket) -> bytes:
            return b"".join(iter(lambda: connection.recv(1000), b""))

        body = connect(HEAD % 999, b"{")
        half_closed, endless = connect(WHOLE), connect(HEAD % 10**9)
        half_closed.shutdown(socket.SHUT_WR)
        assert send("b").result() == (200, {"translatedText": "B"})
        with pytest.raises(OSError):  # the server has closed it
            while True:
                endless.sendall(b" " * 2**16)
        assert b"408" in read_all(body)
        read_all(half_closed)
        assert send("c").result() == (200, {"translatedText": "C"})
