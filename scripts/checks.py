"""Run checks independently of each other, within time limits, and report their results as JSON lines and tables."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmt.system.text import replace_nonfinite

ROOT = Path(__file__).resolve().parent.parent

Values = dict[str, Any]
Work = Callable[["Setting"], Iterable[Values]]
Check = tuple[str, Work]


class CheckSkipped(Exception):
    """Raised by a check that cannot run; the message says why."""


@dataclass
class Setting:
    """The device, folders and time limit of checks."""

    device: torch.device
    tiny: bool
    text: str
    folder: Path  # for results
    scratch: Path  # for everything else
    end: float = math.inf  # of the current section, in time.monotonic() seconds

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def check_time(self) -> None:
        if self.seconds_left() < 0:
            raise CheckSkipped("no time left in its section")

    def require_gpu(self) -> None:
        if self.device.type != "cuda":
            raise CheckSkipped("no GPU")


class Report:
    """Results, each written to results.jsonl and table.md as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "table.md", "errors.txt", "commands.txt"):
            (folder / name).unlink(missing_ok=True)
        self.folder = folder
        self.results: list[Values] = []

    def add(self, section: str, check: str, status: str, **values: Any) -> None:
        result = {"section": section, "check": check, "status": status} | values
        self.results.append(result)
        with open(self.folder / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(replace_nonfinite(result)) + "\n")
        tables = "\n\n".join(format_tables(self.results))
        (self.folder / "table.md").write_text(tables + "\n", encoding="utf-8")
        print(f"{section}: {check}: {status}", file=sys.stderr, flush=True)


def format_tables(results: list[Values]) -> Iterator[str]:
    """Yield a table for each group of results of a section with the same columns."""
    parts: dict[tuple[str, ...], list[Values]] = {}
    for result in results:
        names = [name for name in result if name not in ("section", "seconds")]
        parts.setdefault((result["section"], *names), []).append(result)
    section = None
    for (name, *columns), rows in parts.items():
        if name != section:
            section = name
            yield f"### {name}"
        lines = [columns, ["---"] * len(columns), *([format_value(row[column]) for column in columns] for row in rows)]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:120]


def run_section(
    name: str, checks: list[Check], setting: Setting, report: Report, before: Callable[[torch.device], None]
) -> None:
    """Run each check after a call of `before`, and report an exception as a result of the check."""
    for check, work in checks:
        started = time.perf_counter()
        try:
            setting.check_time()
            before(setting.device)
            for values in work(setting):
                right = values.pop("ok", None)
                status = "measured" if right is None else "ok" if right else "failed"
                report.add(name, check, status, **values, seconds=round(time.perf_counter() - started, 2))
        except CheckSkipped as reason:
            report.add(name, check, f"skipped: {reason}")
        except Exception as error:
            with open(report.folder / "errors.txt", "a", encoding="utf-8") as file:
                file.write(f"{name}: {check}\n{traceback.format_exc()}\n")
            report.add(name, check, "error", error=f"{type(error).__name__}: {error}"[:400])


@contextlib.contextmanager
def start_python(setting: Setting, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python with these arguments in the background; its whole process group is killed at the end."""
    seen = os.environ | {"XDG_CACHE_HOME": str(setting.scratch / "cache")}
    seen["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    with open(setting.folder / "commands.txt", "ab") as log:
        log.write(f"\n$ python {' '.join(words)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=setting.scratch, env=seen, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_exit(process: subprocess.Popen[bytes], setting: Setting, codes: tuple[int, ...] = (0,)) -> None:
    """Wait until a command exits, and raise an exception unless its exit code is one of `codes`."""
    try:
        code = process.wait(max(0.0, setting.seconds_left()))
    except subprocess.TimeoutExpired:
        raise CheckSkipped("no time left in its section") from None
    if code not in codes:
        raise RuntimeError(f"exit code {code}; {read_last_output_line(setting)}")


def read_last_output_line(setting: Setting) -> str:
    """Return the last line that commands printed."""
    return (setting.folder / "commands.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
