"""The report of a corpus preparation: what was read, dropped and written, with examples."""

from dataclasses import asdict
from typing import Any

from nmt.config import PrepareRun
from nmt.data.prepare.pipeline import MAX_EXAMPLES, Pair, Preparation

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
