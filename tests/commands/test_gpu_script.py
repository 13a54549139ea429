"""Tests of scripts/gpu.py in a tiny size on a CPU, where it must finish and report the checks it skipped.

The script and the commands that it starts are forked from processes that have imported everything.
"""

import contextlib
import json
import math
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT, ROOT, command_environment, run_in_folder, write_corpus

GPU_CHECKS = (
    "card",
    "graph, bahdanau",
    "no waiting, gnmt",
    "out of memory",
    "the suite's tests of a GPU",
)


@contextlib.contextmanager
def fork_python(setting: Any, option: str, module: str, *arguments: str) -> Iterator[SimpleNamespace]:
    """Fork a command where `checks.start_python` starts Python with the arguments `-m module arguments`."""
    assert option == "-m"
    log = setting.folder / "commands.txt"
    streams = [Path(os.devnull), Path(os.devnull), log]
    process = multiprocessing.get_context("fork").Process(
        target=run_in_folder,
        args=(setting.scratch, command_environment(setting.scratch), streams, module.removeprefix("nmt."), *arguments),
    )
    process.start()
    try:
        yield SimpleNamespace(
            poll=lambda: process.exitcode, wait=lambda timeout: process.join(timeout) or process.exitcode
        )
    finally:
        process.kill()
        process.join()


def run_main(folder: Path, *settings: str) -> None:
    """Run the script in this process, with its tables in the file `stdout`."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import checks

    checks.start_python = fork_python
    sys.argv = ["gpu.py", "device=cpu", "size=tiny", f"folder={folder}", *settings]
    with open(folder / "stdout", "w", encoding="utf-8") as sys.stdout:
        runpy.run_path(str(ROOT / "scripts" / "gpu.py"), run_name="__main__")


def run_script(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run the script and return its results."""
    folder.mkdir()
    process = CONTEXT.Process(target=run_main, args=(folder, *settings))
    process.start()
    process.join(280)
    errors = folder / "errors.txt"
    assert process.exitcode == 0, errors.read_text(encoding="utf-8") if errors.exists() else process.exitcode
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert (folder / "stdout").read_text(encoding="utf-8").strip().endswith(table.strip())
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for result in results:
        assert f"| {result['check']} | {result['status']} |" in table
    return results


@pytest.mark.slow
def test_script_runs_without_gpu(tmp_path: Path) -> None:
    text = write_corpus(tmp_path, train=200, valid=8, test=8)
    results = run_script(tmp_path / "out", f"text={text}", "sections=facts,correct,speed")
    assert {result["section"] for result in results} == {"facts", "correct", "speed"}
    status = {result["check"]: result["status"] for result in results}
    assert {check for check in status if status[check] == "skipped: no GPU"} >= {*GPU_CHECKS}
    assert set(status.values()) == {"ok", "measured", "skipped: no GPU"}
    assert status["training stopped and resumed"] == status["gradients, luong, feeding, lstm"] == "ok"
    assert any(result.get("tokens/s", 0) > 0 for result in results)
    assert any(result.get("sentences/s", 0) > 0 for result in results)


@pytest.mark.slow
def test_quality_section(tmp_path: Path) -> None:
    text = write_corpus(tmp_path, train=200, valid=8, test=8)
    results = run_script(tmp_path / "out", f"text={text}", "sections=quality")
    for check in ("the built-in corpus", "Multi30k"):
        *curve, last = [result for result in results if result["check"] == check]
        assert all(result["status"] == "measured" for result in (*curve, last))
        assert curve and all(result["loss"] > 0 for result in curve)
        assert last["bleu"] >= 0 and last["training"] > 0


def test_failing_check_does_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import checks

    def fail_after_result(setting: Any) -> Iterator[dict[str, Any]]:
        yield {"first": 1, "ok": True}
        raise RuntimeError("a | b")

    def return_failure(setting: Any) -> list[dict[str, Any]]:
        return [{"number": math.nan, "ok": False}]

    def exceed_time(setting: Any) -> Iterator[dict[str, Any]]:
        setting.end = 0.0
        setting.check_time()
        yield {}

    report = checks.Report(tmp_path)
    setting = checks.Setting(torch.device("cpu"), True, "", tmp_path, tmp_path)
    section = [
        ("raises", fail_after_result),
        ("fails", return_failure),
        ("late", exceed_time),
        ("next", fail_after_result),
    ]
    checks.run_section("one", section, setting, report, id)
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    late = "skipped: no time left in its section"
    assert [result["status"] for result in results] == ["ok", "error", "failed", late, late]
    assert "| raises | error | RuntimeError: a / b |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "in fail_after_result" in (tmp_path / "errors.txt").read_text(encoding="utf-8")
