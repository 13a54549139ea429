"""What a run has written about its progress, also while it trains. Needs no PyTorch.

Both files have one JSON object per line, an event, with the keys `event` (`train` or `validate`), `step` and `epoch`:

metrics.jsonl: loss, speed and scores, one event for each report and each validation.
samples.jsonl: `pairs`, the first validation pairs with their translations and attention, one event for each validation.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nmt.system.files import write_atomically

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
MAX_POINTS = 2_000  # of a curve; a longer one is thinned
CURVES = {
    "train": ("loss", "lr", "tokens_per_second"),
    "validate": ("loss", "bleu", "accuracy", "aer", "entropy"),
}


class Event(NamedTuple):
    """A line of a file of events."""

    position: tuple[int, bool]  # step, and whether it is a validation, which comes after the training of its step
    content: dict[str, Any]


def parse_event(line: str) -> Event | None:
    """Return the event of a line, or None if the line is incomplete or damaged."""
    try:
        content = json.loads(line)
        step, is_validation = content["step"], content["event"] == "validate"
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_whole = line.endswith("}\n") and type(step) is int and 0 <= step < 2**53
    return Event((step, is_validation), content) if is_whole else None


def read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a file by increasing step, and the number of damaged lines.

    A last line without a line break is being written and does not count. An event at an earlier step than the one
    before it begins again from there: what the file has of later steps is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        lines = [line for line in file if line.endswith("\n")]
    kept: list[Event] = []
    damaged = 0
    for event in map(parse_event, lines):
        if event is None:
            damaged += 1
            continue
        while kept and kept[-1].position >= event.position:
            kept.pop()
        kept.append(event)
    return [event.content for event in kept], damaged


def truncate_events(path: Path, step: int, with_validation: bool) -> None:
    """Remove the events of a file after a step, without `with_validation` its validation as well, and damaged lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    last = step, with_validation
    write_atomically(path, (line for line in lines if (event := parse_event(line)) and event.position <= last))


def build_curves(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """Return a column for the steps and one for each of `CURVES`, by kind of event. What is no finite number is None.

    Of more than `MAX_POINTS` events of a kind, every nth is kept, counted from the last.
    """
    columns = {}
    events = list(events)
    for kind, keys in CURVES.items():
        chosen = [event for event in events if event["event"] == kind]
        chosen = chosen[:: -max(1, math.ceil(len(chosen) / MAX_POINTS))][::-1]
        columns[kind] = {key: [to_number(event.get(key)) for event in chosen] for key in ("step", *keys)}
    return columns


def to_number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -1e300 < value < 1e300 else None
