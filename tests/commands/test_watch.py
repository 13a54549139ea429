"""The page of `nmt.watch`: over HTTP, and in a browser."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, check_policy, check_same_code
from builders import HOSTILE, PageReader, run_error
from servers import Running, running

from nmt.config import SearchConfig
from nmt.decoding.translator import Translator
from nmt.evaluation.report import round_to_percent
from nmt.runs.checkpoint import load_model
from nmt.runs.history import CURVES
from nmt.system.device import prepare_model
from nmt.system.page_template import fill_template
from nmt.watch import TEMPLATE, describe_run, find_runs

LAST = "runs.length && runs.at(-1).curves.train.step.at(-1)"


def write_events(run: Path, *events: dict[str, Any], name: str = "metrics.jsonl") -> None:
    run.mkdir(parents=True, exist_ok=True)
    with open(run / name, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"epoch": 0} | event) + "\n" for event in events)


def make_events(*steps: int, **values: Any) -> list[dict[str, Any]]:
    return [{"event": "train", "step": step, "loss": 9 / (step + 1), "lr": 0.1} | values for step in steps]


def make_pair(source: str, translation: str) -> dict[str, Any]:
    words = source.split(), translation.split()
    rows = [[0, 100] for _ in words[1]]
    texts = {"source": words[0], "reference": translation, "translation": words[1]}
    return {"line": 1, **texts, "chrf": 50.0, "score": -1.5, "rows": rows}


def get(url: str, host: str | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class WatchingPage:
    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        browser.open(url)
        self.evaluate = browser.evaluate
        self.wait_until("answer !== ''")

    def wait_until(self, condition: str) -> None:
        deadline = time.monotonic() + 30
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, self.evaluate("document.body.innerText")

    def texts(self, selector: str) -> list[str]:
        texts: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)"
        )
        return texts


@pytest.fixture(scope="module")
def watched(home: Path) -> Iterator[Running]:
    with running(home, "checkpoint=runs/mine", command="watch") as started:
        yield started


@pytest.fixture
def page(browser: Browser, watched: Running) -> WatchingPage:
    return WatchingPage(browser, f"{watched.url}/")


# --------------------------------------------------------------------------------------------------------------- HTTP
def test_curves_are_the_numbers_in_the_file(watched: Running, home: Path) -> None:
    events = [json.loads(line) for line in (home / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    status, body = get(f"{watched.url}/runs")
    [run] = json.loads(body)
    assert status == 200 and run["name"] == "." and run["damaged"] == 0
    for kind, keys in CURVES.items():
        chosen = [event for event in events if event["event"] == kind]
        assert run["curves"][kind] == {key: [event[key] for event in chosen] for key in ("step", *keys)}
    assert run["samples"] == run["curves"]["validate"]["step"]


def test_samples_are_the_translations_of_the_last_model(watched: Running, home: Path) -> None:
    folder = home / "runs" / "mine"
    last = max((folder / "checkpoints").glob("step_*"))
    model, tokenizer, run, *_ = load_model(str(last))
    prepare_model(model, run.precision, torch.device("cpu"))
    step = int(last.name.removeprefix("step_"))
    pairs = json.loads(get(f"{watched.url}/samples?run=.&step={step}")[1])
    sources = (Path(run.data.path) / "valid.de").read_text(encoding="utf-8").splitlines()[:4]
    translator = Translator(model, tokenizer, SearchConfig(beam=1).with_source_limit_of(run.data), torch.device("cpu"))
    for pair, [expected] in zip(pairs, translator.translate(sources, keep_weights=True), strict=True):
        assert pair["source"] == expected.record.source_words and pair["translation"] == expected.record.target_words
        weights = expected.record.word_weights()
        assert weights is not None and pair.get("rows", []) == round_to_percent(weights)


def test_other_addresses_names_paths_and_methods_get_nothing(watched: Running) -> None:
    assert get(f"{watched.url}/")[0] == get(f"{watched.url}/", f"localhost:{watched.port}")[0] == 200
    for host in ("example.org", f"example.org:{watched.port}", "127.0.0.1.example.org", "[", "127.0.0.1@example.org"):
        assert get(f"{watched.url}/runs", host)[0] == 403
    for path in ("/../config.yaml", "/config.yaml", "/samples", "/samples?run=../mine&step=60", "/%2e%2e/x"):
        assert get(watched.url + path)[0] == 404
    assert get(f"{watched.url}/samples?run=.&step=1")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(f"{watched.url}/runs", b"x=1")
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", watched.port))
    assert watched.log.read_text().count("\n") == 1  # requests are not logged


def test_page_loads_nothing_and_its_title_cannot_change_it(watched: Running) -> None:
    page = read_page(get(f"{watched.url}/")[1].decode())
    check_policy(page)
    assert page.policy.endswith("connect-src 'self'; base-uri 'none'; form-action 'none'")
    for text in HOSTILE:
        other = read_page(fill_template(TEMPLATE, {"TITLE": escape(text)}))
        check_same_code(other, page)
        assert other.text["h1"].strip() == text.strip()


def read_page(text: str) -> PageReader:
    return PageReader(text.replace("</main>", '</main><i id="data">{}</i>', 1))


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write_events(tmp_path / "good", *make_events(1, 2))
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    folder, good = (describe_run(name, run) for name, run in find_runs(tmp_path).items())
    assert "metrics.jsonl" in folder["error"]
    assert good["curves"]["train"]["step"] == [1, 2]


def test_errors_name_what_to_give(home: Path) -> None:
    assert run_error("watch", folder=home).startswith("error: checkpoint is not set")
    assert "checkpoint=runs/none is not a folder; give a run" in run_error("watch", "checkpoint=runs/none", folder=home)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = run_error("watch", "checkpoint=runs/mine", f"port={port}", folder=home)
        assert message == f"error: port={port} cannot be used: Address already in use; use port=PORT for another"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it(number: int, tmp_path: Path) -> None:
    with running(tmp_path, "checkpoint=.", command="watch") as started:
        assert "there is no run in . yet" in started.log.read_text()
        assert json.loads(get(f"{started.url}/runs")[1]) == []
        assert started.stop(number) == 0 and started.log.read_text().endswith("\nstopped\n")


def test_no_torch_is_imported() -> None:
    program = "import nmt.watch, sys; sys.exit(bool({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ------------------------------------------------------------------------------------------------------------ browser
def test_page_shows_charts_and_samples(page: WatchingPage, home: Path) -> None:
    page.wait_until("list.childElementCount")
    assert page.texts("h1") == ["runs/mine"]
    names = page.evaluate("[...document.querySelectorAll('figcaption')].map(n => n.firstChild.textContent.trim())")
    assert names == ["Loss", "BLEU", "Accuracy", "Attention entropy", "Learning rate", "Speed"]  # no AER: no gold links
    events = [json.loads(line) for line in (home / "runs" / "mine" / "samples.jsonl").read_text().splitlines()]
    expected = [" ".join(pair["source"]) for pair in events[-1]["pairs"]]
    assert page.texts("article dl dd:nth-of-type(1)") == expected
    assert page.texts("#step") == ["step 120, validation 2 of 2"]
    page.evaluate("(validation.value = 0, validation.dispatchEvent(new Event('input')))")
    assert page.texts("#step") == ["step 60, validation 1 of 2"]
    expected = [" ".join(pair["translation"]) for pair in events[0]["pairs"]]
    page.wait_until(f"document.querySelector('article dl').lastChild.textContent === {json.dumps(expected[0])}")
    assert page.texts("article dl dd:nth-of-type(3)") == expected
    assert {url.split("/")[2] for url in page.browser.requests()} == {page.evaluate("location.host")}
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"


def test_page_follows_a_run_that_is_being_written(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path, "checkpoint=.", command="watch") as started:
        page = WatchingPage(browser, f"{started.url}/")
        assert page.texts("#notes li") == ["No run in this folder has written anything yet."]
        run = tmp_path / "runs" / "mine"
        write_events(run, *make_events(1))
        page.wait_until(f"{LAST} === 1")
        assert page.evaluate("charts.firstChild.querySelectorAll('circle:not(.mark)').length") == 1  # a single point
        line = json.dumps(make_events(2)[0]) + "\n"
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line[:20])
            file.flush()
            write_events(tmp_path / "runs" / "other", *make_events(7))
            page.wait_until("runs.length === 2")
            assert page.evaluate("runs[0].curves.train.step.at(-1)") == 1 and page.texts("#notes li") == []
            file.write(line[20:])
        page.wait_until("runs[0].curves.train.step.at(-1) === 2")
        # A validation appears, and the next one takes its place, unless the reader has gone back.
        for step in (2, 4):
            write_events(
                run,
                {"event": "validate", "step": step, "pairs": [make_pair("eins", f"one {step}")]},
                name="samples.jsonl",
            )
            page.wait_until(f"document.querySelector('article dd:last-child')?.textContent === 'one {step}'")
        page.evaluate("(validation.value = 0, validation.dispatchEvent(new Event('input')))")
        write_events(run, {"event": "validate", "step": 6, "pairs": [make_pair("eins", "one 6")]}, name="samples.jsonl")
        page.wait_until("runs[0].samples.length === 3")
        assert page.texts("#step") == ["step 2, validation 1 of 3"]
        # The run begins anew.
        (run / "samples.jsonl").unlink()
        (run / "metrics.jsonl").write_text("")
        page.wait_until("samples.hidden && runs[0].curves.train.step.length === 0")
        started.stop()
        page.wait_until("state.textContent === 'The server cannot be reached; is nmt.watch running?'")


def test_hostile_and_foreign_names_and_texts_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    names = ["a b", "Überprüfung 'x' \"y\"", "مرحبا"]
    names = sorted({*names, *(text.replace("/", "\u2215").replace("\0", "")[:60] for text in HOSTILE)})
    for number, name in enumerate(names):
        write_events(tmp_path / "wätch" / name, *make_events(1, number + 2, extra=name))
        pair = make_pair(f"{name} a", f"b {name}") | {"reference": HOSTILE[number % len(HOSTILE)]}
        write_events(tmp_path / "wätch" / name, {"event": "validate", "step": 1, "pairs": [pair]}, name="samples.jsonl")
    odd = [{"line": '"]', "source": ["<b>"], "translation": 5}, None]
    write_events(tmp_path / "wätch" / "~", {"event": "validate", "step": 1, "pairs": odd}, name="samples.jsonl")
    (tmp_path / "wätch" / "~" / "metrics.jsonl").write_text("<script>\nnull\n")
    with running(tmp_path, 'checkpoint="wätch"', command="watch") as started:
        page = WatchingPage(browser, f"{started.url}/")
        shown = page.texts("#runs span")
        assert sorted(shown) == sorted([*names, "~"]) and page.texts("#run option") == shown
        assert page.texts("#notes li") == ["~: 2 damaged lines are left out."]
        colors = page.evaluate("[...charts.querySelectorAll('g')].map(n => n.style.cssText)")
        assert len(set(colors)) == len(shown)  # each run has its own
        for number, name in enumerate(shown):
            page.evaluate(f"(run.selectedIndex = {number}, run.dispatchEvent(new Event('change')))")
            if name == "~":
                page.wait_until("list.textContent === 'The samples of this step cannot be read.'")
            else:
                page.wait_until(f"JSON.parse(shown)[0] === {json.dumps(name)} && list.childElementCount")
                page.wait_until(f"list.querySelector('dd').textContent === {json.dumps(' '.join(f'{name} a'.split()))}")
        assert page.evaluate("typeof hacked") == "undefined" and page.evaluate("document.images.length") == 0
        # Only the runs that are chosen have curves.
        before = page.evaluate("charts.firstChild.querySelectorAll('g').length")
        page.evaluate("runList.querySelector('input').click()")
        assert page.evaluate("charts.firstChild.querySelectorAll('g').length") == before - 2
