"""Checks that go on whatever comes of one of them: results as lines and as tables, limits of time, commands beside."""

import contextlib
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmt.runtime.text_io import finite_or_none

ROOT = Path(__file__).resolve().parent.parent

Values = dict[str, Any]
Work = Callable[["Setting"], Iterable[Values]]
Check = tuple[str, Work]


class Skipped(Exception):
    """Why a check was not made."""


@dataclass
class Setting:
    """Where checks run, and how long."""

    device: torch.device
    tiny: bool
    text: str
    folder: Path  # of results
    scratch: Path  # of everything else
    end: float = math.inf  # of the present section, on the monotonic clock

    def left(self) -> float:
        return self.end - time.monotonic()

    def hurry(self) -> None:
        if self.left() < 0:
            raise Skipped("the time of its section was over")

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise Skipped("no GPU")


class Report:
    """Results, written as soon as they are known."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "table.md", "errors.txt", "commands.txt"):
            (folder / name).unlink(missing_ok=True)
        self.folder, self.lock = folder, threading.Lock()
        self.results: list[Values] = []

    def add(self, section: str, check: str, status: str, **values: Any) -> None:
        result = {"section": section, "check": check, "status": status} | values
        with self.lock:
            self.results.append(result)
            with open(self.folder / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(finite_or_none(result)) + "\n")
        print(f"{section}: {check}: {status}", file=sys.stderr, flush=True)

    def close(self) -> bool:
        """Print the tables. Returns whether all is well."""
        with self.lock:
            text = "\n\n".join(tables(self.results)) + "\n"
            (self.folder / "table.md").write_text(text, encoding="utf-8")
            print(text, flush=True)
            return not any(result["status"] in ("failed", "error") for result in self.results)


def tables(results: list[Values]) -> Iterator[str]:
    """Results that have the same values, as one table."""
    parts: dict[tuple[str, ...], list[Values]] = {}
    for result in results:
        names = [name for name in result if name not in ("section", "seconds")]
        parts.setdefault((result["section"], *names), []).append(result)
    section = None
    for (name, *columns), rows in parts.items():
        if name != section:
            section = name
            yield f"### {name}"
        lines = [columns, ["---"] * len(columns), *([shown(row[column]) for column in columns] for row in rows)]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:120]


def run_section(
    name: str, checks: list[Check], setting: Setting, report: Report, before: Callable[[torch.device], None]
) -> None:
    """Each check by itself, `before` first: what goes wrong in one is a result, and the next begins."""
    for check, work in checks:
        started = time.perf_counter()
        try:
            setting.hurry()
            before(setting.device)
            for values in work(setting):
                right = values.pop("ok", None)
                status = "measured" if right is None else "ok" if right else "failed"
                report.add(name, check, status, **values, seconds=round(time.perf_counter() - started, 2))
        except Skipped as reason:
            report.add(name, check, f"skipped: {reason}")
        except Exception as error:
            with open(report.folder / "errors.txt", "a", encoding="utf-8") as file:
                file.write(f"{name}: {check}\n{traceback.format_exc()}\n")
            report.add(name, check, "error", error=f"{type(error).__name__}: {error}"[:400])


RUNNING: set[int] = set()  # process groups of commands


def limit_time(report: Report, total: float) -> None:
    """End the program even where a check hangs: after so many seconds with its tables, and where Python hangs too, some
    seconds later without them."""

    def stop() -> None:
        report.add("all", "time limit", "error", error="a check hangs: what comes after it is missing")
        report.close()
        for group in RUNNING.copy():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(1)

    timer = threading.Timer(total, stop)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(total + 5, exit=True)


@contextlib.contextmanager
def started(setting: Setting, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Python beside this one, gone at the end with all that it started."""
    seen = os.environ | {"XDG_CACHE_HOME": str(setting.scratch / "cache")}
    seen["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    with open(setting.folder / "commands.txt", "ab") as log:
        log.write(f"\n$ python {' '.join(words)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=setting.scratch, env=seen, stdout=log, stderr=log, start_new_session=True
        )
    RUNNING.add(process.pid)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        RUNNING.discard(process.pid)


def finish(process: subprocess.Popen[bytes], setting: Setting, codes: tuple[int, ...] = (0,)) -> None:
    """Wait for the end of a command."""
    try:
        code = process.wait(max(0.0, setting.left()))
    except subprocess.TimeoutExpired:
        raise Skipped("the time of its section was over") from None
    if code not in codes:
        raise RuntimeError(f"exit code {code}; {said(setting)}")


def said(setting: Setting) -> str:
    """The last line of what commands printed."""
    return (setting.folder / "commands.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
