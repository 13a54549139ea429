"""A self-contained HTML report of an evaluation: scores, BLEU by source length, and sentence pairs, worst first.

The page loads nothing from the network. Its structure, style and script are in `report.html` in this folder, which is
filled in with escaped text and with a block of JSON that the script renders.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.words import find_words_without_space
from nmt.decoding.alignment import restore_unknown_words
from nmt.decoding.translation import Translation
from nmt.evaluation.heads import WordWeights
from nmt.evaluation.metrics import METRIC_NAMES, BleuByRange, bleu_by_length, sentence_chrf
from nmt.system.page_template import dump_script_json, fill_template

MAX_REPORT_PAIRS = 1000  # sentence pairs on a page
MAX_PAIRS_WITH_HEADS = 100  # of them, those that have the attention weights of each layer and head
MAX_MATRIX_CELLS = 10_000  # larger matrices are left out
REPORT_SCORE_NAMES = METRIC_NAMES | {"aer": "AER"}  # scores shown in large type


def build_report(
    title: str,
    measures: dict[str, Any],
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[Translation],
    choices: Sequence[WordWeights] = (),
) -> str:
    """Return the HTML page.

    Args:
        measures: content of `metrics.json`, `signatures` included.
        sources, references, translations: all of the corpus, in order. Of more than `MAX_REPORT_PAIRS` pairs, the worst
            by chrF are shown.
        choices: weights that the reader can choose to see instead of those of `translations`.
    """
    texts = [translation.text for translation in translations]
    chrf = sentence_chrf(texts, references)
    pairs = [
        build_pair(row + 1, sources[row], references[row], translations[row], chrf[row], choices)
        for row in sort_worst_first(chrf)[:MAX_REPORT_PAIRS]
    ]
    numbers = {name: value for name, value in measures.items() if not isinstance(value, dict)}
    if numbers.get("aer", 0) is None:
        del numbers["aer"]  # the corpus has no gold links
    scores = {label: numbers.pop(name) for name, label in REPORT_SCORE_NAMES.items() if name in numbers}
    signatures = {REPORT_SCORE_NAMES.get(name, name): text for name, text in measures["signatures"].items()}
    ranges = bleu_by_length(sources, texts, references, measures.get("bleu_tokenizer", "auto"))
    parts = {
        "TITLE": escape(title),
        "SCORES": format_definitions(scores),
        "MEASURES": format_definitions({name.replace("_", " "): value for name, value in numbers.items()}),
        "SIGNATURES": format_definitions(signatures),
        "CHART": draw_length_chart(ranges),
        "CHOICES": write_choices(choices),
        "NOTE": write_note(len(chrf), pairs),
        "DATA": dump_script_json(pairs),
    }
    return fill_template(Path(__file__).with_suffix(".html"), parts)


def sort_worst_first(chrf: Sequence[float]) -> list[int]:
    return sorted(range(len(chrf)), key=chrf.__getitem__)


def build_pair(
    line: int, source: str, reference: str, translation: Translation, chrf: float, choices: Sequence[WordWeights] = ()
) -> dict[str, Any]:
    """Return the data of a sentence pair, in the format that is described in the script of `report.html`."""
    record = translation.record
    source_words = restore_unknown_words(source, record.source_words)
    target_words = restore_unknown_words(translation.text, record.target_words)
    pair = {
        "line": line,
        "source": source_words,
        "reference": reference,
        "translation": target_words,
        "chrf": round(chrf, 2),
        "score": round(translation.score, 3) if math.isfinite(translation.score) else None,
    }
    no_space_before = [
        find_words_without_space(source, source_words),
        find_words_without_space(translation.text, target_words),
    ]
    if any(no_space_before):
        pair["noSpaceBefore"] = no_space_before
    if 0 < len(source_words) * len(target_words) <= MAX_MATRIX_CELLS:
        matrices = [record.word_weights(), *(choice.weights.get(line - 1) for choice in choices)]
        rows, *others = [None if matrix is None else round_to_percent(matrix) for matrix in matrices]
        pair |= {"rows": rows} if rows is not None else {}
        pair |= {"choices": others} if any(others) else {}
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


def write_choices(choices: Sequence[WordWeights]) -> str:
    """Return an HTML select element with the weights that can be shown; nothing if there is no choice."""
    options = "".join(f'<option value="{index}">{choice.label}</option>' for index, choice in enumerate(choices))
    default = '<option value="">Attention as in alignments.jsonl</option>'
    return f'<select id="shown" aria-label="Weights to show">{default}{options}</select>' if choices else ""


def write_note(sentences: int, pairs: list[dict[str, Any]]) -> str:
    """Return a note on how to read a matrix, and on what is left out of the page."""
    note = ""
    if len(pairs) < sentences:
        note = f"The {len(pairs):,} worst of {sentences:,} sentence pairs by chrF are shown. "
    if any(pair.keys() & {"rows", "choices"} for pair in pairs):
        note += (
            "Rows of a matrix are translated words, columns are source words. The stronger the color of a cell, the "
            "larger the attention weight. Hover over a word or a cell, or move through a matrix with Tab and the arrow "
            f"keys. Weights are rounded, and matrices of more than {MAX_MATRIX_CELLS:,} cells are left out; "
            "alignments.jsonl has all weights."
        )
    return note


BAR_HEIGHT = 110  # of the highest bar of the chart, in pixels, as all below


def draw_length_chart(ranges: BleuByRange) -> str:
    """Return an HTML figure with a bar chart of BLEU by source length."""
    full = max([1.0, *(score for _, _, score in ranges)])
    columns = []
    for column, (name, sentences, score) in enumerate(ranges):
        height = BAR_HEIGHT * score / full
        columns.append(
            f'<g text-anchor="middle" transform="translate({78 + 60 * column} 130)">'
            f'<rect class="bar" x="-17" y="{-height:.1f}" width="34" height="{height:.1f}" rx="2"/>'
            f'<text y="{-height - 6:.1f}">{format_measure(score)}</text><text y="16">{name}</text>'
            f'<text class="soft" y="32">{sentences:,}</text></g>'
        )
    width = 48 + 60 * len(ranges)
    label = "; ".join(f"{name} words: BLEU {format_measure(score)} (pairs: {count:,})" for name, count, score in ranges)
    return (
        f'<figure class="chart"><figcaption>BLEU by source length</figcaption><svg role="img" aria-label="{label}" '
        f'width="{width}" height="170"><text class="soft" y="146">words</text><text class="soft" y="162">pairs</text>'
        f'{"".join(columns)}<line x1="48" x2="{width}" y1="130" y2="130"/></svg></figure>'
    )
