"""The report of a corpus preparation, as JSON and as an HTML page that loads nothing from the network."""

from collections import Counter
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from nmt.config import PrepareRun
from nmt.data.prepare.inputs import FoundInputs
from nmt.data.prepare.pipeline import Pair, Preparation
from nmt.system.html import fill_template

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
CHANGES = {  # what the normalizations of a text replace
    "markup": "HTML tags and entities",
    "controls": "control characters",
    "unicode": "characters to compose",
    "white_space": "white space",
}
SPLITS = ("train", "valid", "test")
SHOWN_CHARACTERS = 60  # most frequent ones of each side
LENGTH_BINS = (1, 2, 3, 5, 8, 12, 17, 23, 30, 40, 60, 100)  # lower bounds, in words


def build_summary(command: PrepareRun, done: Preparation) -> dict[str, Any]:
    """Return the content of `report.json`."""
    return {
        "settings": asdict(command),
        "inputs": dict(done.read) | {str(file): 0 for file in done.inputs.files if str(file) not in done.read},
        "unused_files": list(map(str, done.inputs.unused)),
        "held_out_inputs": {split: list(map(str, found.files)) for split, found in done.held_out_inputs.items()},
        "bad_lines": [
            {"file": file, "problem": problem, "lines": count, "first": done.first_bad_lines[file, problem]}
            for (file, problem), count in done.bad_lines.items()
        ],
        "pairs_read": done.read.total(),
        "sentences_changed": {name: done.changed[name] for name in CHANGES},
        "pairs_dropped": {rule: done.dropped[rule] for rule in RULES},
        "pairs_written": {split: done.splits[split] for split in SPLITS},
        "examples": {
            rule: [pair._asdict() for pair in list_examples(done, rule)] for rule in RULES if done.dropped[rule]
        },
        "words_per_sentence": {
            language: {str(length): lengths[length] for length in sorted(lengths)}
            for language, lengths in zip((command.source, command.target), done.lengths, strict=True)
        },
        "characters": {
            language: dict(characters.most_common(SHOWN_CHARACTERS))
            for language, characters in zip((command.source, command.target), done.characters, strict=True)
        },
    }


def list_examples(done: Preparation, rule: str) -> list[Pair]:
    return [pair for _, pair in sorted(done.examples.get(rule, []), reverse=True)]


def build_report_page(command: PrepareRun, done: Preparation) -> str:
    """Return `report.html`."""
    languages = command.source, command.target
    counts = {"read": done.read.total()}
    counts |= {f"dropped: {text}": done.dropped[rule] for rule, text in RULES.items()}
    counts |= {f"written to {split}": done.splits[split] for split in SPLITS}
    body = [
        "<h2>Pairs</h2>",
        format_counts("", "pairs", counts),
        "<h2>Changed sentences</h2>",
        format_counts("removed or replaced", "sentences", {text: done.changed[key] for key, text in CHANGES.items()}),
        "<h2>Input</h2>",
        format_counts("file", "pairs", {str(file): done.read[str(file)] for file in done.inputs.files}),
        *format_bad_lines(done),
        *format_unused(done.inputs),
        "<h2>Examples of dropped pairs</h2>",
        *(format_examples(rule, text, done) for rule, text in RULES.items() if done.dropped[rule]),
        "<h2>Length of the training sentences, in words</h2>",
        '<div class="sides">',
        *(draw_histogram(language, lengths) for language, lengths in zip(languages, done.lengths, strict=True)),
        "</div>",
        "<h2>Most frequent characters</h2>",
        '<div class="sides">',
        *(format_characters(*side) for side in zip(languages, done.characters, strict=True)),
        "</div>",
    ]
    title = escape(f"{Path(str(command.output)).name}: {command.source}-{command.target}")
    return fill_template(Path(__file__).with_suffix(".html"), {"TITLE": title, "BODY": "\n".join(body)})


def format_counts(name: str, unit: str, counts: dict[str, int]) -> str:
    """Return a table of numbers."""
    rows = [f'<tr><td>{escape(left)}</td><td class="number">{count:,}</td></tr>' for left, count in counts.items()]
    header = f'<tr><th>{escape(name)}</th><th class="number">{escape(unit)}</th></tr>'
    return f'<div class="scroll"><table>{header}{"".join(rows)}</table></div>'


def format_bad_lines(done: Preparation) -> list[str]:
    if not done.bad_lines:
        return []
    counts = {
        f"{file}: {problem} (first: {', '.join(map(str, done.first_bad_lines[file, problem]))})": count
        for (file, problem), count in done.bad_lines.items()
    }
    return ["<h2>Lines without a pair</h2>", format_counts("problem", "lines", counts)]


def format_unused(found: FoundInputs) -> list[str]:
    if not found.unused:
        return []
    return ["<h2>Files that were not read</h2>", *(f"<p>{escape(str(path))}</p>" for path in found.unused)]


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


def draw_histogram(language: str, lengths: Counter[int]) -> str:
    """Return a bar chart of the numbers of sentences by length."""
    bins = Counter[int]()
    for length, count in lengths.items():
        bins[max((bound for bound in LENGTH_BINS if bound <= length), default=LENGTH_BINS[0])] += count
    highest = max(bins.values(), default=1)
    width, height = 36, 120
    bars = []
    for index, bound in enumerate(LENGTH_BINS):
        size = height * bins[bound] / highest
        center = width * index + width / 2
        bars.append(
            f'<rect x="{center - 13}" y="{height - size + 16:.1f}" width="26" height="{size:.1f}" rx="2"/>'
            f'<text x="{center}" y="{height - size + 12:.1f}" text-anchor="middle">{bins[bound]:,}</text>'
            f'<text x="{center}" y="{height + 30}" text-anchor="middle">{bound}+</text>'
        )
    total = width * len(LENGTH_BINS)
    label = escape("; ".join(f"{bound} words or more: {bins[bound]:,}" for bound in LENGTH_BINS), quote=True)
    return (
        f'<figure><figcaption>{escape(language)}</figcaption><svg role="img" aria-label="{label}" width="{total}" '
        f'height="{height + 36}" viewBox="0 0 {total} {height + 36}">{"".join(bars)}</svg></figure>'
    )


def format_characters(language: str, characters: Counter[str]) -> str:
    """Return a list of the most frequent characters, with their code points and shares."""
    total = characters.total()
    items = [
        f"<li>{escape(character)}<small>U+{ord(character):04X}</small><small>{100 * count / total:.2f}%</small></li>"
        for character, count in characters.most_common(SHOWN_CHARACTERS)
    ]
    caption = f"{escape(language)}: {len(characters):,} different characters"
    return f'<div><p>{caption}</p><ul class="characters">{"".join(items)}</ul></div>'
