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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nmt.errors import UserError, extra_command
from nmt.evaluation.metrics import build_metrics

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
    difference: float | None  # of the mean from that of the first system; None for the first system, as below
    interval: float | None  # half the width of the 95% confidence interval of the difference
    p_value: float | None  # two-sided
    seeds_needed: int | None  # runs of each system to detect it with `POWER`; None: more than `MAX_SEEDS_NEEDED`


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
        # sacreBLEU has no public access to the counts of a sentence. Its versions are bounded in pyproject.toml.
        count_sentences, score_counts = metric._extract_corpus_statistics, metric._compute_score_from_stats
        scores, samples = [], []
        for runs in systems.values():  # counts: [N, statistics] of each run
            counts = [np.array(count_sentences(texts, [references]), np.float64) for texts in runs]
            scores.append(np.array([score_counts(list(run.sum(0))).score for run in counts]))
            samples.append(bootstrap_scores(score_counts, counts))
        signatures[name] = str(metric.get_signature())
        pooled = pool_variances(scores, samples)
        for row, system in enumerate(systems):
            test = compare_means(scores[0], scores[row], samples[0], samples[row], pooled) if row else None
            comparisons[system][name] = describe_scores(scores[row], test)
    return comparisons, signatures


class MeanTest(NamedTuple):
    """The comparison of the means of two systems."""

    difference: float
    interval: float  # half the width of the 95% confidence interval
    p_value: float
    seed_variance: float  # sigma^2
    sentence_variance: float  # tau^2


def describe_scores(scores_R: Floats, test: MeanTest | None) -> SeedComparison:
    deviation = float(scores_R.std(ddof=1)) if len(scores_R) > 1 else None
    scores, mean = scores_R.tolist(), float(scores_R.mean())
    if test is None:
        return SeedComparison(scores, mean, deviation, None, None, None, None)
    seeds_needed = count_seeds_needed(test.difference, test.seed_variance, test.sentence_variance)
    return SeedComparison(scores, mean, deviation, test.difference, test.interval, test.p_value, seeds_needed)


def bootstrap_scores(compute_score: Callable[[list[float]], Any], statistics: Sequence[Floats]) -> Floats:
    """Return scores [B, R] of all runs on the same samples of the sentences, drawn with replacement.

    Args:
        compute_score: computes the score from sums of sufficient statistics.
        statistics: of each sentence [N, statistics], by run.
    """
    generator = np.random.default_rng(1)
    count = len(statistics[0])
    blocks = []
    for _ in range(0, SAMPLES, SAMPLES_PER_BLOCK):
        times_drawn = generator.multinomial(count, np.full(count, 1 / count), SAMPLES_PER_BLOCK)
        sums = [times_drawn @ run for run in statistics]
        blocks.append(
            [[compute_score(list(run_sums[row])).score for run_sums in sums] for row in range(len(times_drawn))]
        )
    return np.concatenate(blocks)


class PooledVariances(NamedTuple):
    """Variances within systems, and their degrees of freedom."""

    of_seeds: float  # sigma^2
    of_reactions: float  # how differently runs of the same system react to the choice of sentences; part of sigma^2
    freedom: int


def pool_variances(scores: Sequence[Floats], samples: Sequence[Floats]) -> PooledVariances:
    """Pool the variances of all systems, of which one has several runs.

    Args:
        scores: of the runs [R], by system.
        samples: their scores [B, R] on bootstrap samples of the sentences, by system.
    """
    freedom = sum(len(scores_R) - 1 for scores_R in scores)
    squares = [float(((scores_R - scores_R.mean()) ** 2).sum()) for scores_R in scores]
    reactions = [float((samples_BR - samples_BR.mean(1, keepdims=True)).var(0).sum()) for samples_BR in samples]
    return PooledVariances(sum(squares) / freedom, sum(reactions) / freedom, freedom)


def compare_means(
    scores_a: Floats, scores_b: Floats, samples_a: Floats, samples_b: Floats, pooled: PooledVariances
) -> MeanTest:
    """Compare the mean score of system b with that of system a, by the method above.

    Args:
        scores_a, scores_b: scores of the runs [R] of each system.
        samples_a, samples_b: their scores [B, R] on bootstrap samples of the sentences.
        pooled: variances of these and other systems.
    """
    difference = float(scores_b.mean() - scores_a.mean())
    per_run = 1 / len(scores_a) + 1 / len(scores_b)
    sampled_variance = float((samples_b.mean(1) - samples_a.mean(1)).var())
    sentence_variance = max(0.0, sampled_variance - pooled.of_reactions * per_run)
    seed_variance = pooled.of_seeds * per_run
    variance = sentence_variance + seed_variance
    rounding = 1e-12 * difference**2
    if variance <= rounding:
        # If no sample differs from another, as with a single sentence, there is no evidence at all.
        varies = samples_a.var(0).max() > rounding or samples_b.var(0).max() > rounding
        p_value = 0.0 if difference and varies else 1.0
        return MeanTest(difference, 0.0, p_value, pooled.of_seeds, sentence_variance)
    # Satterthwaite, where the variance from the bootstrap counts as known.
    freedom = pooled.freedom * (variance / seed_variance) ** 2 if seed_variance else math.inf
    t, error = load_t_distribution(), math.sqrt(variance)
    p_value = 2 * float(t.sf(abs(difference) / error, freedom))
    interval = float(t.ppf(0.975, freedom)) * error
    return MeanTest(difference, interval, p_value, pooled.of_seeds, sentence_variance)


def count_seeds_needed(difference: float, seed_variance: float, sentence_variance: float) -> int | None:
    """Return the number of runs per system needed to detect this difference (p < 0.05) with probability `POWER`.

    None: `MAX_SEEDS_NEEDED` would not be enough.
    """
    t = load_t_distribution()

    def suffices(count: int) -> bool:
        variance = sentence_variance + seed_variance * 2 / count
        freedom = 2 * (count - 1) * (variance / (seed_variance * 2 / count)) ** 2 if seed_variance else math.inf
        # The usual approximation: sums of quantiles of the t distribution.
        needed = float(t.ppf(0.975, freedom) + t.ppf(POWER, freedom))
        return abs(difference) >= needed * math.sqrt(variance)

    if not difference or not suffices(MAX_SEEDS_NEEDED):
        return None
    return bisect_left(range(2, MAX_SEEDS_NEEDED), True, key=suffices) + 2


def load_t_distribution() -> Any:
    """Return Student's t distribution of scipy.

    Raises:
        UserError: scipy is not installed.
    """
    try:
        from scipy.stats import t
    except ImportError:
        raise UserError(
            f"comparing systems over seeds needs scipy; install it with: {extra_command('stats')}"
        ) from None
    return t
