"""Several models beside each other on the same sentences: whether a difference is chance, and where it comes from."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmt.config.data import DataConfig
from nmt.data.corpus import column
from nmt.data.mixing import load_mixture
from nmt.errors import UserError
from nmt.evaluation.metrics import (
    NAMES,
    Compared,
    Ranges,
    bleu_by_length,
    bleu_by_rarity,
    paired_bootstrap,
    words_and_marks,
)
from nmt.evaluation.plot import curves
from nmt.runtime.files import replacing_files, write_atomically
from nmt.runtime.logging import log

FEW, MANY = 100, 20_000  # sentences: the test takes 72 KB of memory for each
ALPHA = 0.05  # a difference that chance makes less often than that is marked
RAREST = "the rarest source word's count in training"


class Comparison(NamedTuple):
    """What can be said of each system; the first is the one that others are compared with."""

    scores: dict[str, dict[str, Compared]]  # by metric
    signatures: dict[str, str]  # of each metric
    by_length: dict[str, Ranges]
    by_rarity: dict[str, Ranges]  # nothing where the training text is not at hand


def compare(
    systems: Mapping[str, Sequence[str]], sources: Sequence[str], references: Sequence[str], data: DataConfig,
    tokenizer: str = "auto",
) -> Comparison:  # fmt: skip
    """Compare translations of the same sources. Words are rare in `data`, which the first system was trained on; BLEU
    is by this tokenizer."""
    by_length = {name: bleu_by_length(sources, texts, references, tokenizer) for name, texts in systems.items()}
    by_rarity, counts = {}, word_counts(data)
    if counts is not None:
        by_rarity = {
            name: bleu_by_rarity(sources, texts, references, counts, tokenizer) for name, texts in systems.items()
        }
    if len(sources) < FEW:
        log.warning(
            f"{len(sources)} sentences are few: intervals and p-values of less than {FEW} are not to be trusted"
        )
    return Comparison(*paired_bootstrap(systems, references, tokenizer), by_length, by_rarity)


def word_counts(data: DataConfig) -> Counter[str] | None:
    """How often each source word is in the training text; None, with a warning, if that cannot be read here."""
    without = "BLEU by rarity of words is left out"
    if data.streaming:
        log.warning(f"{without}: the training text is a stream, whose end nobody has seen")
        return None
    try:
        pairs = load_mixture(data)[0]
        log.info(f"counting the source words of {len(pairs):,} training pairs")
        return Counter(word for text in column(pairs, "source") for word in words_and_marks(text))
    except (UserError, OSError) as error:  # a model may have come without it
        log.warning(f"{without}: {error}")
        return None


def show(found: Comparison) -> str:
    """Tables of plain text."""
    rows = [["", *map(NAMES.__getitem__, found.signatures)]]
    for system, scores in found.scores.items():
        rows.append([system, *map(in_words, scores.values())])
    tables = [aligned(rows)]
    for title, systems in (("source words", found.by_length), (RAREST, found.by_rarity)):
        if systems:
            rows = [["", "sentences", *systems]]
            for ranges in zip(*systems.values(), strict=True):
                name, sentences, _ = ranges[0]
                bleu = ("-" if score is None else f"{score:.2f}" for _, _, score in ranges)
                rows.append([name, f"{sentences:,}", *bleu])
            tables.append(f"BLEU by {title}\n{aligned(rows)}")
    return "\n\n".join(tables)


def in_words(score: Compared) -> str:
    shown = f"{score.score:.2f} ± {score.interval:.2f}"
    if score.p_value is None:
        return shown
    return f"{shown} (p = {score.p_value:.3f})" + "*" * (score.p_value < ALPHA)


def aligned(rows: list[list[str]]) -> str:
    """Cells under each other, the first column to the left."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def write(found: Comparison, settings: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write `comparison.json`, with the settings that each system translated by, and where matplotlib is installed two
    pictures. Returns the paths."""
    scores = {name: {metric: score._asdict() for metric, score in own.items()} for name, own in found.scores.items()}
    text = json.dumps(found._asdict() | {"scores": scores, "settings": settings}, indent=1, ensure_ascii=False)
    names = ["comparison.json"]
    with replacing_files(folder, names[0], "comparison_by_*.png") as new:
        write_atomically(new / names[0], [text, "\n"])
        try:
            for name, across, systems in (
                ("length", "source words", found.by_length),
                ("rarity", RAREST, found.by_rarity),
            ):
                if systems:
                    curves(new / f"comparison_by_{name}.png", systems, across, "BLEU")
                    names.append(f"comparison_by_{name}.png")
        except UserError as error:  # matplotlib is an extra; everything else is written
            log.warning(f"no pictures: {error}")
    return [folder / name for name in names]
