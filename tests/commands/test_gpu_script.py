"""scripts/gpu.py as it is run on a GPU, but tiny and on a processor: it comes to its end, and says what it left out."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import ROOT, write_corpus

ON_A_GPU = (
    "card", "driver", "graph, bahdanau", "no waiting, gnmt", "graphs after others are gone", "out of memory",
    "out of memory, in the capture", "out of memory, too little for a capture", "the suite's tests of a GPU",
)  # fmt: skip


def results(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Of the script, as a user runs it."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py"), "device=cpu", "size=tiny", f"folder={folder}"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=280)
    errors = folder / "errors.txt"
    said = done.stderr + (errors.read_text(encoding="utf-8") if errors.exists() else "")
    assert done.returncode == 0, said
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert done.stdout.strip().endswith(table.strip())
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for result in found:
        assert f"| {result['check']} | {result['status']} |" in table
    return found


@pytest.mark.slow
def test_it_comes_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    text = write_corpus(tmp_path, train=200, valid=8, test=8)
    found = results(tmp_path / "out", f"text={text}", "sections=facts,correct,speed")
    assert {result["section"] for result in found} == {"facts", "correct", "speed"}
    status = {result["check"]: result["status"] for result in found}
    assert {check for check in status if status[check] == "skipped: no GPU"} >= {*ON_A_GPU}
    assert set(status.values()) == {"ok", "measured", "skipped: no GPU"}
    assert status["training stopped and resumed"] == status["gradients, luong, feeding, lstm"] == "ok"
    assert any(result.get("tokens/s", 0) > 0 for result in found)
    assert any(result.get("sentences/s", 0) > 0 for result in found)


@pytest.mark.slow
def test_quality_is_measured_by_the_commands(tmp_path: Path) -> None:
    text = write_corpus(tmp_path, train=200, valid=8, test=8)
    found = results(tmp_path / "out", f"text={text}", "sections=quality")
    for check in ("the built-in corpus", "Multi30k"):
        *curve, last = [result for result in found if result["check"] == check]
        assert [result["status"] for result in (*curve, last)] == ["measured"] * (len(curve) + 1)
        assert curve and all(result["loss"] > 0 and result["after"] > 0 for result in curve)
        assert last["bleu"] >= 0 and last["training"] > 0


def test_a_check_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import checks

    def breaks(setting: Any) -> Iterator[dict[str, Any]]:
        yield {"first": 1, "ok": True}
        raise RuntimeError("a | b")

    def is_late(setting: Any) -> Iterator[dict[str, Any]]:
        setting.end = 0.0
        setting.check_time()
        yield {}

    report = checks.Report(tmp_path)
    setting = checks.Setting(torch.device("cpu"), True, "", tmp_path, tmp_path)
    wrong = [("wrong", lambda setting: [{"number": math.nan, "ok": False}])]
    checks.run_section("one", [("breaks", breaks), *wrong, ("late", is_late), ("next", breaks)], setting, report, id)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    late = "skipped: no time left in its section"
    assert [line["status"] for line in lines] == ["ok", "error", "failed", late, late]
    assert not report.close() and "| breaks | error | RuntimeError: a / b |" in capsys.readouterr().out
    assert "in breaks" in (tmp_path / "errors.txt").read_text(encoding="utf-8")


def test_a_check_that_hangs_ends_in_time(tmp_path: Path) -> None:
    hang = (
        "import checks, pathlib, time; report = checks.Report(pathlib.Path('.')); report.add('one', 'first', 'ok'); "
        "checks.limit_time(report, 0.5); time.sleep(100)"
    )
    seen = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run([sys.executable, "-c", hang], cwd=tmp_path, env=seen, capture_output=True, timeout=60)
    assert done.returncode == 1 and b"| first | ok |" in done.stdout
    assert "time limit" in (tmp_path / "results.jsonl").read_text(encoding="utf-8")
