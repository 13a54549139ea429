"""One page of HTML for an evaluation: its scores, BLEU by source length, and sentence pairs, the worst first.

The page asks nothing of the network. Its frame, style and script are `report.html` beside this file. Filled in are
escaped text and a block of JSON, which the script turns into elements; a content security policy names that style and
that script by their digests, so nothing that came with the data can run.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nmt.decoding.alignment import as_written
from nmt.decoding.translator import Translation
from nmt.evaluation.metrics import NAMES, bleu_by_length, sentence_chrf

PAIRS = 1000  # sentence pairs on a page
CELLS = 10_000  # of a matrix; larger ones are left out
SCORES = NAMES | {"aer": "AER"}  # in large type
SLOT = re.compile(r"<!--([A-Z]+)-->")


def page(
    title: str,
    measures: dict[str, Any],
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[Translation],
) -> str:
    """The page, whole.

    Args:
        measures: numbers and words by name, as in `metrics.json`, `signatures` among them.
        sources, references, translations: of the corpus, in its order. Of more than `PAIRS` the worst are shown.
    """
    texts = [translation.text for translation in translations]
    chrf = sentence_chrf(texts, references)
    worst = sorted(range(len(chrf)), key=chrf.__getitem__)[:PAIRS]
    pairs = [pair(row + 1, sources[row], references[row], translations[row], chrf[row]) for row in worst]
    scores = {SCORES[name]: measures[name] for name in SCORES if name in measures}
    if scores.get("AER", 0) is None:
        del scores["AER"]  # there are no gold links
    rest = {name.replace("_", " "): x for name, x in measures.items() if name not in SCORES and not isinstance(x, dict)}
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    parts = {
        "POLICY": policy(template),
        "TITLE": escape(title),
        "SCORES": definitions(scores),
        "MEASURES": definitions(rest),
        "SIGNATURES": definitions({SCORES.get(name, name): text for name, text in measures["signatures"].items()}),
        "CHART": chart(bleu_by_length(sources, texts, references, measures.get("bleu_tokenizer", "auto"))),
        "NOTE": note(len(chrf), pairs),
        "DATA": block(pairs),
    }
    return SLOT.sub(lambda slot: parts[slot[1]], template)  # in one pass: what is filled in is not searched


def pair(line: int, source: str, reference: str, translation: Translation, chrf: float) -> dict[str, Any]:
    """What the script in `report.html` reads; it says there what `rows` are."""
    record = translation.record
    words = as_written(source, record.source_words), as_written(translation.text, record.target_words)
    found = {
        "line": line,
        "source": words[0],
        "reference": reference,
        "translation": words[1],
        "chrf": round(chrf, 2),
        "score": round(translation.score, 3) if math.isfinite(translation.score) else None,
    }
    glued = [glued_words(source, words[0]), glued_words(translation.text, words[1])]
    if any(glued):
        found["glued"] = glued
    weights = record.word_weights()
    if weights is not None and 0 < weights.size <= CELLS:
        percent = np.nan_to_num(np.rint(100 * weights), posinf=0, neginf=0).astype(int)
        found["rows"] = [[int(x) for s in np.flatnonzero(row) for x in (s, row[s])] for row in percent]
    return found


def glued_words(text: str, words: Sequence[str]) -> list[int]:
    """Which words of a text follow the one before them without a space, as in Chinese."""
    found, end = [], 0
    for number, word in enumerate(words):
        start = text.find(word, end)
        if start == end > 0:
            found.append(number)
        end = end if start < 0 else start + len(word)
    return found


def block(value: Any) -> str:
    """JSON that can stand in a script element: no end of it, no comment, no line that JavaScript would break."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def policy(template: str) -> str:
    """Nothing may load or run but the template's own style and script."""

    def digest(tag: str) -> str:
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; "
        "base-uri 'none'; form-action 'none'"
    )


def definitions(values: dict[str, Any]) -> str:
    """Names and values, as the inside of a `dl`."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(shown(value))}</dd>" for name, value in values.items())
    return "".join(f"<div>{row}</div>" for row in rows)


def shown(value: Any) -> str:
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, float):
        return f"{value:.4f}" if 0 < abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def note(sentences: int, pairs: list[dict[str, Any]]) -> str:
    """What the reader should know: how to read a matrix, and what is not on the page."""
    parts = []
    if len(pairs) < sentences:
        parts.append(f"The {len(pairs):,} worst of {sentences:,} sentence pairs by chrF are shown.")
    if any("rows" in pair for pair in pairs):
        parts.append(
            "A row of a matrix is a translated word, a column a source word: the stronger the cell, the more the model "
            "attended there. Hover over a word or a cell, or walk through a matrix with Tab and the arrow keys. "
            f"Weights are rounded, matrices of more than {CELLS:,} cells left out; alignments.jsonl has all."
        )
    return " ".join(parts)


# -------------------------------------------------------------------------------------------------------------- chart
COLUMN, BAR, TALL = 60, 34, 110  # pixels
LEFT, TOP, BELOW = 48, 20, 40


def chart(ranges: list[tuple[str, int, float | None]]) -> str:
    """Bars of BLEU by source length, with their numbers."""
    full = max([1.0, *(score or 0 for _, _, score in ranges)])
    base = TOP + TALL
    marks = [f'<text class="soft" y="{base + 16}">words</text><text class="soft" y="{base + 32}">pairs</text>']
    for column, (name, sentences, score) in enumerate(ranges):
        middle, tall = LEFT + COLUMN * column + COLUMN / 2, TALL * (score or 0) / full
        marks.append(
            f'<rect class="bar" x="{middle - BAR / 2}" y="{base - tall:.1f}" width="{BAR}" height="{tall:.1f}" rx="2"/>'
            f'<g text-anchor="middle"><text x="{middle}" y="{base - tall - 6:.1f}">{shown(score)}</text>'
            f'<text x="{middle}" y="{base + 16}">{name}</text>'
            f'<text class="soft" x="{middle}" y="{base + 32}">{sentences:,}</text></g>'
        )
    width, height = LEFT + COLUMN * len(ranges), base + BELOW
    said = "; ".join(f"{name} words: BLEU {shown(score)} (pairs: {sentences:,})" for name, sentences, score in ranges)
    return (
        f'<figure class="chart"><figcaption>BLEU by source length</figcaption><svg role="img" aria-label="{said}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(marks)}'
        f'<line x1="{LEFT}" x2="{width}" y1="{base}" y2="{base}"/></svg></figure>'
    )
