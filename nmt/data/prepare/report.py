"""The report of a corpus preparation, as JSON and as an HTML page that loads nothing from the network."""

from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from nmt.config import PrepareRun
from nmt.data.prepare.pipeline import MAX_EXAMPLES, Pair, Preparation
from nmt.system.page_template import fill_template

RULES = {  # what the rules drop, in the order in which they are applied
    "empty": "an empty side",
    "damaged": "the character U+FFFD, left by a decoding error",
    "copies": "the target is a copy of the source",
    "max_words": "too many words",
    "numbers": "different numbers on the two sides",
    "duplicates": "the same as an earlier pair",
    "max_ratio": "an unusual ratio of lengths",
    "min_script": "too few letters of the usual scripts",
    "leaks": "a sentence of the validation or test split",
    "near_leaks": "one word different from a sentence of the validation or test split",
}
SHOWN_TEXT = 500  # characters of a text in an example
SPLITS = ("train", "valid", "test")


def build_summary(command: PrepareRun, done: Preparation) -> dict[str, Any]:
    """Return the content of `report.json`."""
    return {
        "settings": asdict(command),
        "inputs": dict(done.read) | {str(file): 0 for file in done.inputs.files if str(file) not in done.read},
        "unused_files": list(map(str, done.inputs.unused)),
        "held_out_inputs": {split: list(map(str, found.files)) for split, found in done.held_out_inputs.items()},
        "bad_lines": [
            {"file": file, "problem": problem, "lines": len(numbers), "first": numbers[:MAX_EXAMPLES]}
            for (file, problem), numbers in done.bad_lines.items()
        ],
        "pairs_read": done.read.total(),
        "sentences_changed": done.changed,
        "pairs_dropped": {rule: done.dropped[rule] for rule in RULES},
        "pairs_written": {split: done.splits[split] for split in SPLITS},
        "examples": {
            rule: [pair._asdict() for pair in list_examples(done, rule)] for rule in RULES if done.dropped[rule]
        },
    }


def list_examples(done: Preparation, rule: str) -> list[Pair]:
    """Return dropped pairs, with an ellipsis for the rest of a long text."""
    pairs = done.examples.get(rule, {}).values()
    texts = ([text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…" for text in pair[:2]] for pair in pairs)
    return [pair._replace(source=source, target=target) for pair, (source, target) in zip(pairs, texts, strict=True)]


def build_report_page(command: PrepareRun, done: Preparation) -> str:
    """Return `report.html`."""
    counts = {"read": done.read.total()}
    counts["sentences changed by normalization"] = done.changed
    counts |= {f"dropped: {text}": done.dropped[rule] for rule, text in RULES.items()}
    counts |= {f"written to {split}": done.splits[split] for split in SPLITS}
    body = [
        "<h2>Pairs</h2>",
        format_counts("", "pairs", counts),
        "<h2>Input</h2>",
        format_counts("file", "pairs", {str(file): done.read[str(file)] for file in done.inputs.files}),
        "<h2>Examples of dropped pairs</h2>",
        *(format_examples(rule, text, done) for rule, text in RULES.items() if done.dropped[rule]),
    ]
    title = escape(f"{Path(str(command.output)).name}: {command.source}-{command.target}")
    return fill_template(Path(__file__).with_suffix(".html"), {"TITLE": title, "BODY": "\n".join(body)})


def format_counts(name: str, unit: str, counts: dict[str, int]) -> str:
    """Return a table of numbers."""
    rows = [f'<tr><td>{escape(left)}</td><td class="number">{count:,}</td></tr>' for left, count in counts.items()]
    header = f'<tr><th>{escape(name)}</th><th class="number">{escape(unit)}</th></tr>'
    return f'<div class="scroll"><table>{header}{"".join(rows)}</table></div>'


def format_examples(rule: str, text: str, done: Preparation) -> str:
    pairs = list_examples(done, rule)
    rows = [
        f'<tr><td class="text" dir="auto">{escape(pair.source)}</td>'
        f'<td class="text" dir="auto">{escape(pair.target)}</td>'
        f'<td class="place">{escape(pair.file)}:{pair.line}</td></tr>'
        for pair in pairs
    ]
    return (
        f"<details open><summary>{escape(text)}: {done.dropped[rule]:,}</summary>"
        f'<div class="scroll"><table>{"".join(rows)}</table></div></details>'
    )
