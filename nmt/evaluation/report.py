"""A self-contained HTML report of an evaluation: scores, and sentence pairs, worst first.

The page loads nothing from the network. Its structure, style and script are in `report.html` in this folder, which is
filled in with escaped text and with a block of JSON that the script renders.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.references import References
from nmt.data.words import find_glued_words
from nmt.decoding.alignment import restore_unknown_words
from nmt.decoding.translation import Translation
from nmt.evaluation.metrics import METRIC_NAMES, sentence_chrf
from nmt.system.page_template import dump_script_json, fill_template

MAX_REPORT_PAIRS = 1000  # sentence pairs on a page
MAX_MATRIX_CELLS = 10_000  # larger matrices are left out
REPORT_SCORE_NAMES = METRIC_NAMES | {"aer": "AER"}  # scores shown in large type


def build_report(
    title: str,
    measures: dict[str, Any],
    sources: Sequence[str],
    references: References,
    translations: Sequence[Translation],
) -> str:
    """Return the HTML page.

    Args:
        measures: content of `metrics.json`, `signatures` included.
        sources, references, translations: all of the corpus, in order. Of more than `MAX_REPORT_PAIRS` pairs, the worst
            by chrF are shown.
    """
    texts = [translation.text for translation in translations]
    chrf = sentence_chrf(texts, references)
    pairs = [
        build_pair(row + 1, sources[row], references[row], translations[row], chrf[row])
        for row in sorted(range(len(chrf)), key=chrf.__getitem__)[:MAX_REPORT_PAIRS]
    ]
    scores = {label: measures[name] for name, label in REPORT_SCORE_NAMES.items() if name in measures}
    if scores.get("AER", 0) is None:
        del scores["AER"]  # the corpus has no gold links
    other_measures = {
        name.replace("_", " "): value
        for name, value in measures.items()
        if name not in REPORT_SCORE_NAMES and not isinstance(value, dict)
    }
    other_measures |= {
        f"{kind} kept": f"{counts['kept']:,} of {counts['in_source']:,}"
        for kind, counts in measures.get("literals", {}).items()
    }
    signatures = {REPORT_SCORE_NAMES.get(name, name): text for name, text in measures["signatures"].items()}
    parts = {
        "TITLE": escape(title),
        "SCORES": format_definitions(scores),
        "MEASURES": format_definitions(other_measures),
        "SIGNATURES": format_definitions(signatures),
        "NOTE": write_note(len(chrf), pairs),
        "DATA": dump_script_json(pairs),
    }
    return fill_template(Path(__file__).with_suffix(".html"), parts)


def build_pair(
    line: int,
    source: str,
    references: list[str],
    translation: Translation,
    chrf: float,
) -> dict[str, Any]:
    """Return the data of a sentence pair, in the format that is described in the script of `report.html`."""
    record = translation.record
    source_words = restore_unknown_words(source, record.source_words)
    target_words = restore_unknown_words(translation.text, record.target_words)
    pair = {
        "line": line,
        "source": source_words,
        "references": references,
        "translation": target_words,
        "chrf": round(chrf, 2),
        "score": round(translation.score, 3) if math.isfinite(translation.score) else None,
    }
    glued = [find_glued_words(source, source_words), find_glued_words(translation.text, target_words)]
    if any(glued):
        pair["glued"] = glued
    if 0 < len(source_words) * len(target_words) <= MAX_MATRIX_CELLS:
        weights_TS = record.word_weights()
        pair |= {} if weights_TS is None else {"rows": round_to_percent(weights_TS)}
    return pair


def round_to_percent(weights: np.ndarray) -> list[list[int]]:
    """Return [source word, percent, source word, percent, ...] of each translated word, without zeros."""
    percent = np.nan_to_num(np.rint(100 * weights), posinf=0, neginf=0).astype(int)
    return [[int(x) for s in np.flatnonzero(row) for x in (s, row[s])] for row in percent]


def format_definitions(values: dict[str, Any]) -> str:
    """Return names and values as the content of a `dl` element."""
    items = [f"<dt>{escape(name)}</dt><dd>{escape(format_measure(value))}</dd>" for name, value in values.items()]
    return "".join(f"<div>{item}</div>" for item in items)


def format_measure(value: Any) -> str:
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, float):
        return f"{value:.4f}" if 0 < abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_note(sentences: int, pairs: list[dict[str, Any]]) -> str:
    """Return a note on how to read a matrix, and on what is left out of the page."""
    parts = []
    if len(pairs) < sentences:
        parts.append(f"The {len(pairs):,} worst of {sentences:,} sentence pairs by chrF are shown.")
    if any("rows" in pair for pair in pairs):
        parts.append(
            "Rows of a matrix are translated words, columns are source words. The stronger the color of a cell, the "
            "larger the attention weight. Hover over a word or a cell, or move through a matrix with Tab and the arrow "
            f"keys. Weights are rounded, and matrices of more than {MAX_MATRIX_CELLS:,} cells are left out; "
            "alignments.jsonl has all weights."
        )
    return " ".join(parts)
