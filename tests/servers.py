"""Servers for tests: `nmt.serve` or `nmt.watch` in a process of its own, and with a fake model in a thread."""

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from builders import CONTEXT, command_environment, run_in_folder

from nmt.config import SearchConfig, ServeRun
from nmt.decoding.translation import Translation
from nmt.errors import UserError
from nmt.serving import server
from nmt.serving.app import Service, build_app
from nmt.serving.batcher import Batcher

SERVE_SETTINGS = ("device=cpu", "precision=fp32", "search.beam=3")
DIRECTION = {"source": "de", "target": "en"}


@dataclass
class Running:
    """A server process. Standard error goes to a file."""

    process: Any
    log: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        os.kill(self.process.pid, number)
        self.process.join(30)
        return int(self.process.exitcode)


def run_with_sigint(action: Any, *arguments: Any) -> None:
    """Run a command with this action of SIGINT, which is otherwise that of the process that runs the tests."""
    signal.signal(signal.SIGINT, action)
    run_in_folder(*arguments)


@contextmanager
def running(
    folder: Path,
    *arguments: str,
    port: int = 0,
    command: str = "serve",
    sigint: Any = signal.default_int_handler,
    **environment: str,
) -> Iterator[Running]:
    settings = SERVE_SETTINGS if command == "serve" else ()
    streams = [folder / f"server.{name}" for name in ("in", "out", "err")]
    for path in streams:
        path.write_bytes(b"")
    variables = command_environment(folder) | environment
    process = CONTEXT.Process(
        daemon=True,  # so that no failing test leaves it behind
        target=run_with_sigint,
        args=(sigint, folder, variables, streams, command, *settings, f"port={port}", *arguments),
    )
    process.start()
    while not (found := re.findall(r"at http://[^ ]*:(\d+); Ctrl-C ends it", streams[2].read_text())):
        assert process.is_alive(), streams[2].read_text()
        time.sleep(0.02)
    started = Running(process, streams[2], int(found[0]))
    try:
        yield started
    finally:
        if process.is_alive():
            started.stop(signal.SIGKILL)


def post(url: str, fields: Any, content_type: str = "application/json") -> tuple[int, Any]:
    """Send a request, and return status and answer."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    request = urllib.request.Request(f"{url}/translate", body, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(url: str, q: Any, **fields: Any) -> Any:
    status, answer = post(url, {"q": q} | DIRECTION | fields)
    assert status == 200, answer
    return answer


@dataclass
class FakeTranslator:
    """Translates to upper case, when the gate is open; fails for `bad` and, as by a mistake of ours, for `bug`."""

    config: SearchConfig = field(default_factory=SearchConfig)
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cpu"))
    model: Any = field(default_factory=lambda: SimpleNamespace(attends=True))
    gate: threading.Event = field(default_factory=threading.Event)
    calls: list[list[str]] = field(default_factory=list)

    def translate(self, lines: list[str], keep_weights: bool) -> list[list[Translation]]:
        self.calls.append(lines)
        assert self.gate.wait(20)
        if "bad" in lines:
            raise UserError("out of memory for one line of 9 pieces")
        if "bug" in lines:
            raise ZeroDivisionError
        return [[self.translate_line(line)] for line in lines]

    def translate_line(self, line: str) -> Translation:
        source, target = ([f"\u2581{word}" for word in text.split()] for text in (line, line.upper()))
        return Translation(line.upper(), [*source, "</s>"], [*target, "</s>"], ended=line != "cut")


@contextmanager
def fake_service(
    directions: Sequence[tuple[str, str]] = (("de", "en"),), api_key: str | None = None
) -> Iterator[tuple[Service, FakeTranslator]]:
    """A service whose models are all the same fake one."""
    translator = FakeTranslator()
    models: list[Any] = [translator for _ in directions]
    service = Service(ServeRun("runs/x"), [*directions], Batcher(models), api_key)
    try:
        yield service, translator
    finally:
        translator.gate.set()
        service.batcher.thread.shutdown()


@contextmanager
def listening(service: Service) -> Iterator[int]:
    """Run a server in a thread. Returns its port."""
    with server.bind("127.0.0.1", 0) as listener:
        instance = server.build_server(build_app(service))
        thread = threading.Thread(target=lambda: instance.run(sockets=[listener]))
        thread.start()
        while not instance.started:
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            instance.should_exit = True
            thread.join(20)
        assert not thread.is_alive()
