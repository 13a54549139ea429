"""Comparison of several systems on the same sentences: significance tests, and BLEU by sentence length."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmt.errors import UserError
from nmt.evaluation.metrics import (
    METRIC_NAMES,
    BleuByRange,
    SystemScore,
    bleu_by_length,
    paired_bootstrap,
)
from nmt.evaluation.plot import draw_curves
from nmt.evaluation.seeds import SeedComparison, compare_over_seeds
from nmt.system.files import replacing_files, write_atomically
from nmt.system.logging import log
from nmt.system.messages import pluralize

MIN_RELIABLE_SENTENCES = 100  # with fewer sentences, a warning is logged
SIGNIFICANCE_LEVEL = 0.05  # differences with a lower p-value are marked


class Comparison(NamedTuple):
    """Scores by system. The first system is the baseline of the others."""

    scores: Mapping[str, Mapping[str, SystemScore | SeedComparison]]  # by system and metric
    signatures: dict[str, str]  # sacreBLEU's signature of each metric
    by_length: dict[str, BleuByRange]  # of several runs, the mean


def compare_systems(
    systems: Mapping[str, Sequence[Sequence[str]]],
    sources: Sequence[str],
    references: Sequence[str],
    tokenizer: str = "auto",
) -> Comparison:
    """Compare translations of the same sources.

    Args:
        systems: translations of each run by name of the system.
        tokenizer: BLEU tokenizer.
    """
    by_length = {
        name: average_ranges([bleu_by_length(sources, texts, references, tokenizer) for texts in runs])
        for name, runs in systems.items()
    }
    if len(sources) < MIN_RELIABLE_SENTENCES:
        are = "is" if len(sources) == 1 else "are"
        log.warning(
            f"{pluralize(len(sources), 'sentence')} {are} too few for reliable intervals and p-values; use at least "
            f"{MIN_RELIABLE_SENTENCES}"
        )
    scores: Mapping[str, Mapping[str, SystemScore | SeedComparison]]
    if has_seeds(systems):
        scores, signatures = compare_over_seeds(systems, references, tokenizer)
    else:
        scores, signatures = paired_bootstrap({name: run for name, [run] in systems.items()}, references, tokenizer)
    return Comparison(scores, signatures, by_length)


def has_seeds(systems: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether one of the systems has several runs."""
    return any(len(runs) > 1 for runs in systems.values())


def average_ranges(runs: Sequence[BleuByRange]) -> BleuByRange:
    """Return the mean BLEU of several runs in each range; None where a run has none."""
    averages: BleuByRange = []
    for ranges in zip(*runs, strict=True):
        name, sentences, _ = ranges[0]
        scores = [score for _, _, score in ranges if score is not None]
        averages.append((name, sentences, sum(scores) / len(scores) if len(scores) == len(ranges) else None))
    return averages


def format_comparison(comparison: Comparison) -> str:
    """Return the comparison as plain-text tables."""
    rows = [["", *(METRIC_NAMES[metric] for metric in comparison.signatures)]]
    for system, scores in comparison.scores.items():
        rows.append([system, *(format_score(score) for score in scores.values())])
    first = next(iter(comparison.scores))
    for system, scores in comparison.scores.items():
        tests = [
            score for score in scores.values() if isinstance(score, SeedComparison) and score.difference is not None
        ]
        if tests:
            rows.append([f"{system} - {first}", *map(format_difference, tests)])
            rows.append(["  seeds needed", *map(format_seeds_needed, tests)])
    ranges = [["", "sentences", *comparison.by_length]]
    for scores_of_range in zip(*comparison.by_length.values(), strict=True):
        name, sentences, _ = scores_of_range[0]
        ranges.append([name, f"{sentences:,}", *("-" if x is None else f"{x:.2f}" for _, _, x in scores_of_range)])
    return f"{align_columns(rows)}\n\nBLEU by source words\n{align_columns(ranges)}"


def format_score(score: SystemScore | SeedComparison) -> str:
    if isinstance(score, SeedComparison):
        return f"{score.mean:.2f}" if score.deviation is None else f"{score.mean:.2f} ± {score.deviation:.2f}"
    text = f"{score.score:.2f} ± {score.interval:.2f}"
    if score.p_value is not None:
        text += f" {format_p_value(score.p_value)}"
    return text


def format_difference(test: SeedComparison) -> str:
    assert test.p_value is not None
    return f"{test.difference:+.2f} ± {test.interval:.2f} {format_p_value(test.p_value)}"


def format_seeds_needed(test: SeedComparison) -> str:
    if not test.difference:
        return "-"
    return "more sentences" if test.seeds_needed is None else str(test.seeds_needed)


def format_p_value(p_value: float) -> str:
    return f"(p = {p_value:.3f}){'*' if p_value < SIGNIFICANCE_LEVEL else ''}"


def align_columns(rows: list[list[str]]) -> str:
    """Return rows as a table whose first column is left-aligned and whose other columns are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_comparison(comparison: Comparison, settings: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write `comparison.json`, with the settings of each system, and a plot if matplotlib is installed.

    Returns the paths of the files.
    """
    scores = {
        system: {metric: score._asdict() for metric, score in scores_by_metric.items()}
        for system, scores_by_metric in comparison.scores.items()
    }
    content = comparison._asdict() | {"scores": scores, "settings": settings}
    names = ["comparison.json"]
    with replacing_files(folder, names[0], "comparison_by_*.png") as new_folder:
        write_atomically(new_folder / names[0], [json.dumps(content, indent=1, ensure_ascii=False), "\n"])
        try:
            draw_curves(new_folder / "comparison_by_length.png", comparison.by_length, "source words", "BLEU")
            names.append("comparison_by_length.png")
        except UserError as error:  # matplotlib is optional
            log.warning(f"no plot was drawn: {error}")
    return [folder / name for name in names]
