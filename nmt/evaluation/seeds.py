"""Compare systems trained with several seeds: is a difference larger than chance variation in seeds and test sentences
would explain?

The score of run i of system a on the test sentences is modeled as

    score_ai = mean_a + sentences_a + seed_ai,

where `sentences_a` is due to the choice of test sentences, which all runs share, and `seed_ai`, with variance sigma^2,
to the seed. tau^2 is the variance of `sentences_a - sentences_b`. The difference d of the means of two systems with n_a
and n_b runs then has the variance

    var(d) = tau^2 + sigma^2 (1/n_a + 1/n_b).

sigma^2 is the pooled sample variance of the scores of the systems' runs. tau^2 comes from a bootstrap over sentences
(Koehn 2004): the variance of d over samples, less the part that is due to the runs reacting differently to the same
sentences, which sigma^2 already has. d / sqrt(var(d)) is compared with the t distribution whose degrees of freedom are
those of Satterthwaite 1946, so few seeds widen the interval as they should. A bootstrap that also draws seeds, with
replacement, from the few there are underestimates sigma^2 by the factor (n - 1) / n.

Shapes: R runs, N sentences, B samples.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric

from nmt.evaluation.metrics import build_metrics, load_scipy

SAMPLES = 1000  # of the bootstrap
SAMPLES_PER_BLOCK = 100  # samples whose sentence counts are in memory
POWER = 0.8  # probability to find the difference, for the number of seeds that it needs
MAX_SEEDS_NEEDED = 1000

Floats = npt.NDArray[np.float64]


class SeedComparison(NamedTuple):
    """Scores of a system's runs, and the comparison of their mean with that of the first system."""

    scores: list[float]  # of each run
    mean: float
    deviation: float | None  # sample standard deviation; None for one run
    difference: float | None = None  # of the mean from that of the first system; None for the first system, as below
    interval: float | None = None  # half the width of the 95% confidence interval of the difference
    p_value: float | None = None  # two-sided
    seeds_needed: int | None = None  # runs of each to detect it with `POWER`; None: more than `MAX_SEEDS_NEEDED`


def compare_over_seeds(
    systems: Mapping[str, Sequence[Sequence[str]]], references: Sequence[str], tokenizer: str = "auto"
) -> tuple[dict[str, dict[str, SeedComparison]], dict[str, str]]:
    """Compare systems by BLEU, chrF and TER.

    Args:
        systems: translations of each run by system. One of the systems must have several runs.
        references, tokenizer: as in `compute_scores`.

    Returns:
        Comparisons by system and metric, and sacreBLEU's signatures by metric.

    Raises:
        UserError: scipy is not installed.
    """
    comparisons: dict[str, dict[str, SeedComparison]] = {system: {} for system in systems}
    signatures = {}
    for name, metric in build_metrics(tokenizer, references).items():
        scores, samples = zip(*(score_samples(metric, runs, references) for runs in systems.values()), strict=True)
        signatures[name] = str(metric.get_signature())
        for system, comparison in zip(systems, compare_means(scores, samples), strict=True):
            comparisons[system][name] = comparison
    return comparisons, signatures


def score_samples(metric: Metric, runs: Sequence[Sequence[str]], references: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the scores of runs [R], and those on the same samples of the sentences, drawn with replacement [B, R]."""
    # sacreBLEU has no public access to the counts of a sentence. Its versions are bounded in pyproject.toml.
    counts = [np.array(metric._extract_corpus_statistics(texts, [references]), np.float64) for texts in runs]

    def score(sums: Floats) -> float:
        return float(metric._compute_score_from_stats(list(sums)).score)

    generator = np.random.default_rng(1)
    sentences = len(references)
    samples_BR = []
    for _ in range(0, SAMPLES, SAMPLES_PER_BLOCK):
        times_drawn_BN = generator.multinomial(sentences, np.full(sentences, 1 / sentences), SAMPLES_PER_BLOCK)
        sums = [times_drawn_BN @ run for run in counts]
        samples_BR += [[score(run_sums[row]) for run_sums in sums] for row in range(SAMPLES_PER_BLOCK)]
    return np.array([score(run.sum(0)) for run in counts]), np.array(samples_BR)


def compare_means(scores: Sequence[Floats], samples: Sequence[Floats]) -> list[SeedComparison]:
    """Compare the mean score of each system with that of the first one, by the method above.

    Args:
        scores: of the runs [R], by system; one of them has several runs.
        samples: their scores [B, R] on bootstrap samples of the sentences, by system.
    """
    t = load_scipy("comparing systems over seeds").t
    pooled_freedom = sum(len(scores_R) - 1 for scores_R in scores)
    sigma2 = sum(float(((scores_R - scores_R.mean()) ** 2).sum()) for scores_R in scores) / pooled_freedom
    # How differently runs of the same system react to the choice of sentences; part of sigma^2.
    reactions = sum(float((x_BR - x_BR.mean(1, keepdims=True)).var(0).sum()) for x_BR in samples) / pooled_freedom
    comparisons: list[SeedComparison] = []
    for scores_R, samples_BR in zip(scores, samples, strict=True):
        deviation = float(scores_R.std(ddof=1)) if len(scores_R) > 1 else None
        comparison = SeedComparison(scores_R.tolist(), float(scores_R.mean()), deviation)
        if comparisons:
            difference = float(scores_R.mean() - scores[0].mean())
            per_run = 1 / len(scores[0]) + 1 / len(scores_R)
            sampled_variance = float((samples_BR.mean(1) - samples[0].mean(1)).var())
            tau2 = max(0.0, sampled_variance - reactions * per_run)
            variance = tau2 + sigma2 * per_run
            rounding = 1e-12 * difference**2
            # If no sample differs from another, as with a single sentence, there is no evidence at all.
            varies = max(samples[0].var(0).max(), samples_BR.var(0).max()) > rounding
            interval, p_value = 0.0, 0.0 if difference and varies else 1.0
            if variance > rounding:
                # Satterthwaite, where the variance from the bootstrap counts as known.
                freedom = pooled_freedom * (variance / (sigma2 * per_run)) ** 2 if sigma2 else math.inf
                interval = float(t.ppf(0.975, freedom)) * math.sqrt(variance)
                p_value = 2 * float(t.sf(abs(difference) / math.sqrt(variance), freedom))
            comparison = comparison._replace(
                difference=difference,
                interval=interval,
                p_value=p_value,
                seeds_needed=count_seeds_needed(difference, sigma2, tau2),
            )
        comparisons.append(comparison)
    return comparisons


def count_seeds_needed(difference: float, seed_variance: float, sentence_variance: float) -> int | None:
    """Return the number of runs per system needed to detect this difference (p < 0.05) with probability `POWER`.

    None: `MAX_SEEDS_NEEDED` would not be enough.
    """
    t = load_scipy("comparing systems over seeds").t

    def suffices(count: int) -> bool:
        variance = sentence_variance + seed_variance * 2 / count
        freedom = 2 * (count - 1) * (variance / (seed_variance * 2 / count)) ** 2 if seed_variance else math.inf
        # The usual approximation: sums of quantiles of the t distribution.
        needed = float(t.ppf(0.975, freedom) + t.ppf(POWER, freedom))
        return abs(difference) >= needed * math.sqrt(variance)

    if not difference or not suffices(MAX_SEEDS_NEEDED):
        return None
    return bisect_left(range(2, MAX_SEEDS_NEEDED), True, key=suffices) + 2
