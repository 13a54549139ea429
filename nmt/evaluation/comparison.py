"""Comparison of several systems on the same sentences: significance tests, and BLEU by sentence length."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from nmt.evaluation.metrics import METRIC_NAMES, BleuByRange, SystemScore, bleu_by_length, paired_bootstrap
from nmt.evaluation.seeds import SeedComparison, compare_over_seeds
from nmt.system.logging import log
from nmt.system.messages import pluralize

MIN_RELIABLE_SENTENCES = 100  # with fewer sentences, a warning is logged
SIGNIFICANCE_LEVEL = 0.05  # differences with a lower p-value are marked
RUNS_LEGEND = "± half of the 95% confidence interval; p: probability of as large a difference in this direction by luck"
SEEDS_LEGEND = (
    "mean ± standard deviation over runs; difference ± half of its 95% confidence interval; p: probability of a "
    "difference as large by chance; seeds needed: runs of each system to find it (p < 0.05) in 4 of 5 experiments"
)


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
        log.warning(
            f"intervals and p-values from {pluralize(len(sources), 'sentence')} are not reliable; use at least "
            f"{MIN_RELIABLE_SENTENCES}"
        )
    scores: Mapping[str, Mapping[str, SystemScore | SeedComparison]]
    if any(len(runs) > 1 for runs in systems.values()):
        scores, signatures = compare_over_seeds(systems, references, tokenizer)
    else:
        scores, signatures = paired_bootstrap(systems, references, tokenizer)
    return Comparison(scores, signatures, by_length)


def average_ranges(runs: Sequence[BleuByRange]) -> BleuByRange:
    """Return the mean BLEU of several runs in each range."""
    return [(*ranges[0][:2], fmean(score for _, _, score in ranges)) for ranges in zip(*runs, strict=True)]


def format_comparison(comparison: Comparison) -> str:
    """Return the comparison as plain-text tables with a legend."""
    rows = [["", *(METRIC_NAMES[metric] for metric in comparison.signatures)]]
    for system, scores in comparison.scores.items():
        rows.append([system, *map(format_score, scores.values())])
    first = next(iter(comparison.scores))
    for system, scores in comparison.scores.items():
        tests = [test for test in scores.values() if isinstance(test, SeedComparison) and test.difference is not None]
        if tests:
            rows.append([f"{system} - {first}", *map(format_difference, tests)])
            rows.append(["  seeds needed", *map(format_seeds_needed, tests)])
    ranges = [["", "sentences", *comparison.by_length]]
    for scores_of_range in zip(*comparison.by_length.values(), strict=True):
        name, sentences, _ = scores_of_range[0]
        ranges.append([name, f"{sentences:,}", *(f"{score:.2f}" for _, _, score in scores_of_range)])
    has_seeds = any(isinstance(score, SeedComparison) for score in comparison.scores[first].values())
    legend = SEEDS_LEGEND if has_seeds else RUNS_LEGEND
    return f"{align_columns(rows)}\n\nBLEU by source words\n{align_columns(ranges)}\n\n{legend}; * p < 0.05\n"


def format_score(score: SystemScore | SeedComparison) -> str:
    if isinstance(score, SeedComparison):
        return format_value(f"{score.mean:.2f}", score.deviation)
    return format_value(f"{score.score:.2f}", score.interval, score.p_value)


def format_difference(test: SeedComparison) -> str:
    return format_value(f"{test.difference:+.2f}", test.interval, test.p_value)


def format_seeds_needed(test: SeedComparison) -> str:
    if not test.difference:
        return "-"
    return "more sentences" if test.seeds_needed is None else str(test.seeds_needed)


def format_value(value: str, spread: float | None, p_value: float | None = None) -> str:
    """Return a value with its spread and the p-value of a difference, with a star if that is significant."""
    text = value if spread is None else f"{value} ± {spread:.2f}"
    return text if p_value is None else f"{text} (p = {p_value:.3f}){'*' if p_value < SIGNIFICANCE_LEVEL else ''}"


def align_columns(rows: list[list[str]]) -> str:
    """Return rows as a table whose first column is left-aligned and whose other columns are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
