"""The server: its API, its batches, its limits, and how it starts and ends."""

import asyncio
import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_tokenizer, run_error, run_ok, run_program
from libretranslatepy import LibreTranslateAPI
from prometheus_client import generate_latest
from servers import DIRECTION, SERVE_SETTINGS, FakeTranslator, Running, ask, fake_service, listening, post, running

import nmt
from nmt.config import ModelConfig, SearchConfig
from nmt.data.words import find_glued_words
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator
from nmt.model.seq2seq import build_model
from nmt.runs.checkpoint import export_model, load_model
from nmt.serving import app, server, translation_request
from nmt.serving.app import Service, TextsSoFar, add_attention, build_app
from nmt.serving.batcher import JOIN_STEPS, Batcher, ClosedError, Group, QueueFullError
from nmt.serving.translation_request import parse_translation_request

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
        assert option["source_glued"] == find_glued_words(line, record.source_words)
        assert option["target_glued"] == find_glued_words(python.text, record.target_words)
        assert (option["ended"], got["parts"]) == (python.ended, python.source_pieces.count("</s>"))
        assert not got["beyond_reach"]
    assert max(got["parts"] for got in details) > 1 and empty["parts"] == 0
    assert "word_weights" not in str(ask(served.url, "Hund", details=True))


def test_attention_says_what_is_beyond_reach_and_leaves_out_huge_matrices() -> None:
    pieces = ["▁a", "▁b", "</s>"]

    def describe(reach: int | None, room: int) -> tuple[int, Any]:
        option = Translation("c d", pieces, ["▁c", "▁d", "</s>"], weights_TS=np.eye(3))
        details = {"source": "a b", "translations": [{"source_words": ["a", "b"], "target_words": ["c", "d"]}]}
        return add_attention(details, [option], reach, room), details

    assert [describe(reach, 4)[1]["beyond_reach"] for reach in (None, 2, 3)] == [False, True, False]
    for room, added, weights in ((4, 4, [[1, 0], [0, 1]]), (3, 0, None)):
        assert (
            describe(None, room)[0] == added and describe(None, room)[1]["translations"][0]["word_weights"] == weights
        )


def test_lines_of_an_answer_share_the_limit_on_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_WORD_WEIGHTS", 6)
    wanted = parse_translation_request({"q": ["a b", "c d\ne"], "attention": True} | DIRECTION, 100, 0)
    lines = [["▁a", "▁b", "</s>"], ["▁c", "▁d", "</s>"], ["▁e", "</s>"]]
    results = [[Translation("", line, line, 0, np.eye(len(line)))] for line in lines]
    with fake_service() as (service, _):
        answer = service.build_answer(wanted, results, service.batcher.translators[0])
    details = [line for text in answer["details"] for line in text]
    assert [line["translations"][0]["word_weights"] for line in details] == [[[1, 0], [0, 1]], None, [[1]]]


def test_libretranslate_client_works_unchanged(served: Running) -> None:
    client = LibreTranslateAPI(served.url)
    expected = ask(served.url, "Straße & Hund =\n😀")["translatedText"]
    assert client.translate("Straße & Hund =\n😀", "de", "en") == expected
    assert client.languages() == [{"code": "de", "name": "de", "targets": ["en"]}]
    with pytest.raises(urllib.error.HTTPError) as caught:
        client.detect("Hund")
    assert "does not detect languages" in json.load(caught.value)["error"]


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
    ({"q": 5} | DIRECTION, 422, "q is not a text or a list of texts"),
    ({"q": ["a", None]} | DIRECTION, 422, "q is not a text or a list of texts"),
    (b'{"q": "\\ud800", "source": "de", "target": "en"}', 422, "half of a surrogate pair"),
    ({"q": "a", "source": "de"}, 400, "target, the code of a language, is missing"),
    ({"q": "a", "source": "en", "target": "de"}, 400, "from en to de is not supported; available: de to en"),
    ({"q": "a", "source": "x" * 999, "target": "\x1b[2J\n"}, 400, "is not supported; available: de to en"),
    ({"q": "a", "format": "pdf"} | DIRECTION, 400, "format=pdf is not one of text, html"),
    ({"q": "a", "alternatives": 3} | DIRECTION, 400, "alternatives=3 is not a whole number from 0 to 2"),
    ({"q": "a", "alternatives": True} | DIRECTION, 400, "alternatives=True is not a whole number"),
    ({"q": "a", "details": "yes"} | DIRECTION, 400, "details=yes is neither true nor false"),
    ({"q": "a", "partial": True} | DIRECTION, 400, "partial=true has no effect without stream=true"),
    ({"q": "a" * 10_001} | DIRECTION, 413, "q has 10,001 characters, and a request may have 10,000"),
    ({"q": "a", "x": "a" * 200_000} | DIRECTION, 413, "the request has more than 136,384 bytes"),
    (b"[1]", 400, "not a JSON object"),
    (b'{"q": ', 400, "not valid application/json"),
    (b"[" * 100_000, 400, "not valid application/json"),
    (b'{"q": "\xff"}', 400, "not valid application/json"),
]


@pytest.mark.parametrize(("fields", "status", "reason"), BAD)
def test_bad_request_is_answered_with_a_reason(served: Running, fields: Any, status: int, reason: str) -> None:
    got, answer = post(served.url, fields)
    assert (got, list(answer)) == (status, ["error"]) and reason in answer["error"]


def test_other_endpoints_answer_json(served: Running) -> None:
    def get(path: str) -> Any:
        with urllib.request.urlopen(served.url + path) as response:
            return response.read()

    assert json.loads(get("/health")) == {"status": "ok"}
    settings = json.loads(get("/frontend/settings"))
    assert settings["charLimit"] == 10_000 and settings["language"]["target"]["code"] == "en"
    assert b"nmt_search_lines_bucket" in get("/metrics") and b"Content-Security-Policy" in get("/")
    assert post(served.url, b"x", "text/plain") == (
        415,
        {"error": "send JSON (Content-Type: application/json) or a form"},
    )
    for path, status in (("/translate", 405), ("/none", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(path)
        assert caught.value.code == status and json.load(caught.value)["error"]


def read_events(url: str, **fields: Any) -> list[tuple[str, Any]]:
    body = json.dumps(fields | DIRECTION | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/translate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = re.findall("event: (.*)\ndata: (.*)\n\n", response.read().decode())
    return [(name, json.loads(data)) for name, data in events]


def test_stream_sends_lines_and_then_the_answer(served: Running) -> None:
    text = "Die Frau liest ein Buch .\n\nDer Hund schläft ."
    events = read_events(served.url, q=text, alternatives=1)
    answer = ask(served.url, text, alternatives=1)
    parts = [data for name, data in events if name == "line"]
    assert [name for name, _ in events] == ["line", "line", "line", "done"] and events[-1][1] == answer
    assert [part["translatedText"] for part in parts] == answer["translatedText"].split("\n")
    assert [(part["index"], part["line"]) for part in parts] == [(0, 1), (0, 2), (0, 3)]


def test_partial_translations_grow_into_those_of_the_answer(served: Running) -> None:
    texts = ["Die Frau liest ein Buch . " * 12, "Der Hund ."] * 10  # more lines than are translated at a time
    events = read_events(served.url, q=texts, partial=True, attention=True)
    lines = [data for name, data in events if name == "line"]
    assert [line["index"] for line in lines] == list(range(20)) and events[-1] == ("done", ask(served.url, texts))
    assert all(line["details"][0]["translations"][0]["word_weights"] for line in lines)
    seen = [data["translatedText"] for name, data in events if name == "partial" and data["index"] == 0]
    assert 0 < len(seen) == len(set(seen)) and {data["line"] for name, data in events if name == "partial"} == {1}


def test_requests_that_arrive_together_share_batches(served: Running) -> None:
    texts = [" ".join(["Der Hund schläft", *["und die Frau liest"] * (i % 7), "."]) for i in range(40)]
    expected = ask(served.url, texts)["translatedText"]

    def count_batches() -> float:
        with urllib.request.urlopen(f"{served.url}/metrics") as response:
            return float(re.findall(rb"nmt_search_lines_count (\S+)", response.read())[0])

    before = count_batches()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda text: ask(served.url, text)["translatedText"], texts))
    assert answers == expected and count_batches() - before < 30


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
            assert post(started.url, {"q": "Hund"} | fields, path="/detect")[0] == 403
        client = LibreTranslateAPI(started.url, "kéy")
        assert client.translate("Hund", "de", "en") == client.translate("Hund", "en", "de")  # the same weights
        assert {language["code"]: language["targets"] for language in client.languages()} == {
            "de": ["en"],
            "en": ["de"],
        }
        assert (
            "from de to de is not supported; available: de to en, en to de"
            in (post(started.url, {"q": "x", "source": "de", "target": "de", "api_key": "kéy"})[1]["error"])
        )


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
        port = other.getsockname()[1]
        errors = {
            (
                f"port={port}",
                "checkpoint=runs/mine",
            ): f"port={port} cannot be used: Address already in use; use port=",
            ("host=192.0.2.1", "checkpoint=runs/mine"): "host=192.0.2.1 port=5000 cannot be used",
            ("host=no host", "checkpoint=runs/mine"): "host=no host is not the name or address of a machine",
            ("port=0", "checkpoint=runs/none"): "runs/none is not a folder",
            ("port=0", "checkpoint=[runs/mine,runs/mine]"): "both translate de to en",
            ("port=0",): "checkpoint is not set",
            ("port=70000", "checkpoint=runs/mine"): "port=70000 must be at least 0 and below 65,536",
        }
        for arguments, message in errors.items():
            assert message in run_error("serve", *arguments, folder=home)


def test_missing_extra_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("nmt.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit):
        run_program("serve", "checkpoint=x")
    assert 'install it with: pip install "attention-nmt[serve]"' in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- limits
async def call(service: Service, q: Any, disconnects: bool = False) -> tuple[int, Any]:
    """Call the app without a socket. Returns status and answer."""
    messages = [{"type": "http.request", "body": json.dumps({"q": q} | DIRECTION).encode()}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(0.1 if disconnects else 60)
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/translate", "headers": headers, "query_string": b""}
    await build_app(service)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"] or b"null")


async def wait_until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_full_queue_timeout_and_disconnect() -> None:
    async def scenario() -> None:
        with fake_service(max_waiting=3, timeout=0.5) as (service, translator):
            first = asyncio.create_task(call(service, "first"))
            await wait_until(lambda: translator.calls)
            gone = asyncio.create_task(call(service, "gone", disconnects=True))
            late = asyncio.create_task(call(service, "late"))
            await wait_until(lambda: len(service.batcher.jobs) == 3)
            assert await call(service, "x") == (429, {"error": "too many requests wait; try again later"})
            assert (await gone)[0] == 499
            assert await first == (504, {"error": "there was no translation within 0.5 seconds"})
            assert (await late)[0] == 504
            translator.gate.set()
            assert await call(service, "next") == (200, {"translatedText": "NEXT"})
            assert translator.calls == [["first"], ["next"]]  # nobody waited for the others
            service.batcher.close()
            assert await call(service, "x") == (503, {"error": "the server is being stopped"})

    asyncio.run(scenario())


def test_failing_line_fails_its_own_request_only() -> None:
    async def scenario() -> None:
        with fake_service() as (service, translator):
            tasks = [asyncio.create_task(call(service, text)) for text in ("block", "good", "bad", "cut")]
            await wait_until(lambda: len(service.batcher.jobs) == 4)
            translator.gate.set()
            _, good, bad, cut = await asyncio.gather(*tasks)
            assert good == (200, {"translatedText": "GOOD"})
            assert bad == (500, {"error": "out of memory for one line of 9 pieces"})
            assert cut[1]["warnings"] == ["text 1, line 1: cut at the maximum length"]

    asyncio.run(scenario())


def test_failing_stream_ends_with_an_error_and_lines_of_a_client_that_has_gone_are_not_translated() -> None:
    with fake_service(port=0) as (service, translator), listening(service) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"q": [f"line {i}" for i in range(40)], "stream": True, "partial": True} | DIRECTION)
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline() == b"event: partial\n"
        assert json.loads(response.readline()[6:]) == {"index": 0, "line": 1, "translatedText": "line 0 ..."}
        response.close()
        connection.close()
        deadline = time.monotonic() + 20
        while not all(future.cancelled() for job in service.batcher.jobs for future in job.futures):
            assert time.monotonic() < deadline
        translator.gate.set()
        error = {"error": "out of memory for one line of 9 pieces", "status": 500}
        good = ("line", {"index": 0, "line": 1, "translatedText": "GOOD"})
        assert read_events(f"http://127.0.0.1:{port}", q=["good", "bad", "bad"]) == [good, ("error", error)]
        assert translator.calls[0] == [f"line {i}" for i in range(app.STREAM_LINES)]
        assert translator.calls[1] == ["good", "bad", "bad"]


def test_an_error_after_the_last_line_does_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with fake_service(port=0) as (service, translator), listening(service) as port:
        translator.gate.set()
        for _ in range(2):
            assert post(f"http://127.0.0.1:{port}", {"q": "late bug"} | DIRECTION) == (
                200,
                {"translatedText": "LATE BUG"},
            )
        assert "a search failed after its last line was finished" in caplog.text


def test_stream_ends_with_an_error_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    with fake_service(port=0) as (service, translator), listening(service) as port:
        translator.gate.set()
        reason = "the server failed; its log says why"
        assert post(f"http://127.0.0.1:{port}", {"q": "bug"} | DIRECTION) == (500, {"error": reason})
        caplog.clear()
        events = read_events(f"http://127.0.0.1:{port}", q=["bug", "good"])
        assert events == [("error", {"error": reason, "status": 500})]
        assert "ZeroDivisionError" in caplog.text


def test_streams_are_counted_when_they_end_with_the_status_that_they_have_then() -> None:
    def read_counters() -> dict[str, float]:
        found = re.findall(
            r"^nmt_request(s_total\S+|_seconds_count|_seconds_sum) (\S+)$", generate_latest().decode(), re.M
        )
        return {name: float(value) for name, value in found}

    def count(**fields: Any) -> dict[str, float]:
        before = read_counters()
        assert read_events(url, **fields)
        return {
            name: value - before.get(name, 0) for name, value in read_counters().items() if value != before.get(name)
        }

    with fake_service(port=0, timeout=0.5) as (service, translator), listening(service) as port:
        url = f"http://127.0.0.1:{port}"
        late = count(q="a")
        assert late["_seconds_sum"] > 0.4 and late['s_total{status="504"}'] == late["_seconds_count"] == 1
        translator.gate.set()
        assert count(q=["a", "b"])['s_total{status="200"}'] == 1
        assert count(q="bad")['s_total{status="500"}'] == 1

    with fake_service(port=0) as (service, _), listening(service) as port:
        before = read_counters()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"q": "a", "stream": True, "partial": True} | DIRECTION)
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.readline()
        response.close()
        connection.close()
        deadline = time.monotonic() + 20
        while read_counters().get('s_total{status="499"}', 0) != before.get('s_total{status="499"}', 0) + 1:
            assert time.monotonic() < deadline


def translate_lines_one_by_one(service: Service) -> FakeTranslator:
    """Make every line a batch of its own. Returns the translator of the service."""
    translator: Any = service.batcher.translators[0]
    translator.config.batch_tokens = 1
    translator.gate.set()
    return translator


def test_stream_sends_each_line_when_it_is_translated_and_each_has_its_own_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes = []
    take = TextsSoFar.take
    monkeypatch.setattr(TextsSoFar, "take", lambda self: takes.append(self) or take(self))
    with fake_service(port=0, timeout=0.8) as (service, _), listening(service) as port:
        translate_lines_one_by_one(service).seconds = {"a": 0.4, "b": 0.4, "c": 0.4, "d": 1.5}
        events = read_events(f"http://127.0.0.1:{port}", q=list("abcd"))
    assert [data.get("translatedText") for _, data in events] == ["A", "B", "C", None]
    assert events[-1] == ("error", {"error": "there was no translation within 0.8 seconds", "status": 504})
    assert len(takes) < 12  # no polling


def test_stream_keeps_no_attention_of_lines_that_have_been_sent() -> None:
    matrices: list[weakref.ref[Any]] = []

    def translate_line(line: str) -> Translation:
        weights = np.zeros((1, 1))
        matrices.append(weakref.ref(weights))
        return Translation(line, weights_TS=weights)

    async def scenario() -> None:
        with fake_service() as (service, _):
            translator = translate_lines_one_by_one(service)
            translator.translate_line = translate_line  # type: ignore[method-assign]
            wanted = parse_translation_request({"q": ["a"] * 20, "stream": True} | DIRECTION, 100, 0)
            events = [event async for event in service.stream_events(wanted, Group(0, 1, True), 0.0) if keep(event)]
            assert len(events) == 21 and len(matrices) == 20

    def keep(event: str) -> bool:
        if event.startswith("event: done"):
            assert sum(matrix() is not None for matrix in matrices) < 5  # of the last chunk
        return True

    asyncio.run(scenario())


def test_partial_texts_are_sent_at_most_every_50_milliseconds_and_the_last_one_is() -> None:
    async def scenario() -> None:
        with fake_service() as (service, _):
            news, line = TextsSoFar(), asyncio.get_running_loop().create_future()

            def put_texts() -> None:
                for number in range(300):
                    news.put(0, str(number))
                    time.sleep(0.001)

            thread = threading.Thread(target=put_texts)
            start_time = time.monotonic()
            thread.start()
            seen = []
            async for _, text in service.follow(line, news):
                seen.append(int(text))
                if text == "299":
                    line.set_result([])
            thread.join()
            seconds = time.monotonic() - start_time
            assert seen == sorted(set(seen)) and 2 < len(seen) <= seconds / app.PARTIAL_SECONDS + 2

    asyncio.run(scenario())


def test_large_answer_is_built_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    started, finished = threading.Event(), threading.Event()
    build_answer = Service.build_answer

    def build_slowly(*arguments: Any) -> Any:
        started.set()
        assert finished.wait(20)
        return build_answer(*arguments)

    monkeypatch.setattr(Service, "build_answer", build_slowly)
    with fake_service(port=0) as (service, translator), listening(service) as port, ThreadPoolExecutor(2) as pool:
        translator.gate.set()
        url = f"http://127.0.0.1:{port}"
        answers = [pool.submit(ask, url, "a", attention=True), pool.submit(read_events, url, q="a")]
        assert started.wait(20)
        with urllib.request.urlopen(f"{url}/health", timeout=20) as response:
            assert response.status == 200
        assert not any(answer.done() for answer in answers)
        finished.set()
        assert answers[0].result()["translatedText"] == "A" and answers[1].result()[-1][0] == "done"


def test_searches_begin_with_lines_for_one_batch_in_order() -> None:
    translator = FakeTranslator(SearchConfig(beam=2, batch_tokens=50))  # 4 x 25 characters
    batcher = Batcher([translator], 100)  # type: ignore[list-item]
    plain, other = Group(0, 1, False), Group(0, 2, False)
    futures = [batcher.submit(plain, ["a" * 9] * 25), batcher.submit(other, ["b"]), batcher.submit(plain, ["c"])]
    translator.gate.set()
    results = [[future.result(20)[0].text for future in lines] for lines in futures]
    assert results == [["A" * 9] * 25, ["B"], ["C"]]
    assert [len(call) for call in translator.calls] == [10, 10, 6, 1]
    batcher.max_waiting = 0
    with pytest.raises(QueueFullError):
        batcher.submit(plain, ["x"])
    batcher.close()
    with pytest.raises(ClosedError):
        batcher.submit(plain, ["x"])


def test_waiting_lines_join_a_search_if_they_are_many_or_late() -> None:
    class JoiningTranslator(FakeTranslator):
        joined: list[list[str]] = []

        def translate(self, lines: list[str], *arguments: Any, **options: Any) -> None:
            assert self.gate.wait(20)
            for number, (enough, room) in enumerate(asked):
                if number in on_call:
                    on_call.pop(number)()
                more = options["get_more"](enough, room)
                self.joined.append(more)
                lines += more
            super().translate(lines, *arguments, **options)

    translator = JoiningTranslator()
    asked = [(4, 9), (3, 2), (1, 9)]
    on_call: dict[int, Callable[[], object]] = {}
    batcher = Batcher([translator], 100)  # type: ignore[list-item]
    plain, other = Group(0, 1, False), Group(0, 2, False)
    first = batcher.submit(plain, ["a"])
    while not batcher.jobs[0].taken:
        time.sleep(0.01)
    futures = [*first, *batcher.submit(plain, ["b", "c"]), *batcher.submit(plain, ["d"])]
    translator.gate.set()
    assert [future.result(20)[0].text for future in futures] == ["A", "B", "C", "D"]
    assert translator.joined == [[], ["b", "c"], ["d"]]

    translator.gate.clear()
    asked = [(2, 9)] * (JOIN_STEPS + 2)
    translator.joined.clear()
    first = batcher.submit(plain, ["a"])
    while not batcher.jobs[-1].taken:
        time.sleep(0.01)
    late = batcher.submit(plain, ["b"])
    translator.gate.set()
    assert [future.result(20)[0].text for future in [*first, *late]] == ["A", "B"]
    assert translator.joined == [*[[]] * JOIN_STEPS, ["b"], []]

    translator.gate.clear()
    asked = [(1, 9)]
    translator.joined.clear()
    first = batcher.submit(plain, ["a"])
    while not batcher.jobs[-1].taken:
        time.sleep(0.01)
    last = [*batcher.submit(other, ["b"]), *batcher.submit(plain, ["c"])]
    translator.gate.set()
    assert [future.result(20)[0].text for future in [*first, *last]] == ["A", "B", "C"]
    assert translator.joined == [[], [], []]  # nothing joins while lines of another group wait

    translator.gate.clear()
    translator.joined.clear()
    first = batcher.submit(plain, ["a"])
    while not batcher.jobs[-1].taken:
        time.sleep(0.01)
    [cancelled], last = batcher.submit(other, ["b"]), batcher.submit(plain, ["c"])
    cancelled.cancel()
    translator.gate.set()
    assert [future.result(20)[0].text for future in [*first, *last]] == ["A", "C"]
    assert translator.joined == [["c"]]  # for the cancelled line nobody waits

    translator.gate.clear()
    asked = [(9, 9)] * (JOIN_STEPS + 1) + [(9, 1)] * (JOIN_STEPS + 2)
    translator.joined.clear()
    futures = [*batcher.submit(plain, ["a"])]
    while not batcher.jobs[-1].taken:
        time.sleep(0.01)
    [cancelled] = batcher.submit(plain, ["b"])
    on_call |= {3: cancelled.cancel, 5: lambda: futures.extend(batcher.submit(plain, ["c", "d"]))}
    translator.gate.set()
    assert futures[0].result(20)[0].text == "A"
    assert [future.result(20)[0].text for future in futures] == ["A", "C", "D"]
    # The wait of the cancelled line is not that of those after it, and lines for which there is no room wait again.
    assert [lines for lines in translator.joined if lines] == [["c"]]
    assert translator.joined.index(["c"]) == 5 + JOIN_STEPS
    batcher.close()


def test_idle_server_returns_memory_to_the_system_once(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr("nmt.serving.batcher.release_memory", lambda: released.append(True))
    monkeypatch.setattr("nmt.serving.batcher.RELEASE_SECONDS", 0.1)
    translator = FakeTranslator()
    batcher = Batcher([translator], 100)  # type: ignore[list-item]
    translator.gate.set()
    for count in (1, 2):
        [future] = batcher.submit(Group(0, 1, False), ["a"])
        assert future.result(20)[0].text == "A"
        while len(released) < count:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(released) == count
    batcher.close()


@pytest.mark.parametrize("num_lines", [1, 3])
def test_search_stops_when_nobody_waits_for_any_of_its_lines(num_lines: int) -> None:
    tokenizer = make_tokenizer("bpe")
    torch.manual_seed(1)
    model = build_model(ModelConfig(embed=8, hidden=8), tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    search = SearchConfig(beam=2, min_length=40, max_length=40)
    batcher = Batcher([Translator(model.eval(), tokenizer, search, torch.device("cpu"))], 100)
    steps: list[str] = []
    submitted = threading.Event()

    def show(_: int, text: str) -> None:
        assert submitted.wait(20)
        steps.append(text)
        if len(steps) == 10:
            for future in futures:
                future.cancel()

    futures = batcher.submit(Group(0, 1, False), ["Hund"] * num_lines, show)
    submitted.set()
    [other] = batcher.submit(Group(0, 2, False), ["Hund"])
    assert len(other.result(60)) == 2
    assert all(future.cancelled() for future in futures) and len(steps) < 10 + num_lines
    batcher.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server with a fake model that waits 0.3 seconds for what clients send."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(translation_request, "BODY_SECONDS", 0.3)
    with fake_service(port=0) as (service, translator), listening(service) as port:
        translator.gate.set()
        yield port


def test_slow_and_half_closed_clients_are_dropped(impatient: int) -> None:
    request = json.dumps({"q": "a"} | DIRECTION).encode()
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    whole = head % len(request) + request

    def connect(*parts: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", impatient), timeout=20)
        for part in parts:
            connection.sendall(part)
        return connection

    def read_all(connection: socket.socket) -> bytes:
        received = b""
        while data := connection.recv(1000):
            received += data
        return received

    nothing, trickle, body = connect(), connect(b"POST /tra"), connect(head % 999, b"{")
    long_head = connect(b"GET /health HTTP/1.1\r\n", b"X: " + b"x" * (server.MAX_HEAD_BYTES + 1))
    half_closed, endless = connect(whole), connect(head % 10**9)
    half_closed.shutdown(socket.SHUT_WR)
    again = connect(whole)  # a second request on the same connection
    received = b""
    while b'{"translatedText":"A"}' not in received:
        received += again.recv(1000)
    again.sendall(b"POST /tra")
    assert ask(f"http://127.0.0.1:{impatient}", "b") == {"translatedText": "B"}
    try:
        while True:
            endless.sendall(b" " * 2**16)
    except OSError:
        pass  # the server has closed it
    for connection in (nothing, trickle, again):
        assert read_all(connection) == b""
    assert b"408" in read_all(body)
    assert b"400 Bad Request" in read_all(long_head)
    half_closed.settimeout(20)
    read_all(half_closed)
    assert ask(f"http://127.0.0.1:{impatient}", "c") == {"translatedText": "C"}
