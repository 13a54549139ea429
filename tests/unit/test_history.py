"""Reading what a run has written about its progress."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import make_state, read_events
from hypothesis import given
from hypothesis import strategies as st

from nmt.runs import history
from nmt.runs.history import build_curves
from nmt.training.loop import fit


def make_line(step: int, kind: str = "train", **values: Any) -> str:
    return json.dumps({"event": kind, "step": step, "epoch": 0} | values) + "\n"


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    return path


def test_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    lines = make_line(5, loss=3.0), make_line(10, loss=2.0)
    for end in (0, 1, len(lines[1]) - 1, len(lines[1])):
        events, damaged = history.read_events(write_lines(tmp_path, lines[0], lines[1][:end]))
        assert [event["step"] for event in events] == [5, 10][: 1 + (end == len(lines[1]))] and damaged == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30))
def test_events_after_a_step_that_repeats_replace_the_later_ones(
    tmp_path_factory: pytest.TempPathFactory, positions: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = [make_line(step, "validate" if last else "train", n=n) for n, (step, last) in enumerate(positions)]
    events, damaged = history.read_events(write_lines(folder, *lines))
    # An event is current if everything after it is later.
    expected = [n for n, position in enumerate(positions) if all(position < later for later in positions[n + 1 :])]
    assert [event["n"] for event in events] == expected and damaged == 0


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    good = make_line(1, loss=1.0)
    bad = ["\n", "null\n", "[]\n", '"step"\n', "{}\n", "\udcff\n", "[" * 10**5 + "\n"]
    steps = ("-1", "1e400", "1" + 400 * "0", "1.5", "true", "NaN", '"5"')
    bad += [f'{{"event": "train", "step": {step}}}\n' for step in steps]
    events, damaged = history.read_events(write_lines(tmp_path, *bad, good, *bad))
    assert events == [json.loads(good)] and damaged == 2 * len(bad)


def test_only_finite_numbers_are_points() -> None:
    for value in (None, True, "1", [1], float("nan"), float("inf"), 10**400, {}):
        columns = build_curves([{"event": "validate", "step": 3, "bleu": value}, {"event": "other", "step": 4}])
        assert columns["validate"]["bleu"] == [None] and columns["validate"]["step"] == [3]
    json.dumps(columns, allow_nan=False)


def test_long_curves_keep_their_last_point_and_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_POINTS", 10)
    for size in range(100):
        steps = build_curves({"event": "train", "step": n} for n in range(size))["train"]["step"]
        assert min(size, 5) <= len(steps) <= 10 and steps[-1:] == [size - 1][: len(steps)]
        assert len({after - before for before, after in zip(steps, steps[1:], strict=False)}) <= 1


def test_validations_write_samples_that_a_resumed_run_keeps_in_step(small_corpus: Path, tmp_path: Path) -> None:
    state = make_state(small_corpus, tmp_path / "run", validate_every=2, max_steps=4)
    fit(state)
    path = tmp_path / "run" / history.SAMPLES_FILE
    written = path.read_text(encoding="utf-8")
    events, damaged = history.read_events(path)
    assert [event["step"] for event in events] == [2, 4] and damaged == 0
    sources = state.data.valid.column("source").to_pylist()
    for event in events:
        assert [pair["line"] for pair in event["pairs"]] == [1, 2, 3, 4]
        for pair, source in zip(event["pairs"], sources, strict=False):
            assert pair["source"] == source.split()
            assert len(pair.get("rows", pair["translation"])) == len(pair["translation"])
    # Killed during the validation of step 4, and after its samples were written.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    fit(make_state(small_corpus, tmp_path / "run", validate_every=2, max_steps=4))
    assert path.read_text(encoding="utf-8") == written
    assert [event["step"] for event in read_events(tmp_path / "run", "validate")] == [2, 4]
