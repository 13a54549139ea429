"""Comparison of systems that were trained with several seeds."""

import math

import numpy as np
import pytest

from nmt.evaluation.metrics import compute_scores
from nmt.evaluation.seeds import compare_means, compare_over_seeds, count_seeds_needed


def draw_runs(generator: np.random.Generator, count: int, seed_effect: float, reaction: float, sentences: np.ndarray):
    """Return scores [R, N] of each sentence for each run of a system."""
    runs = [
        generator.normal(0, seed_effect) + sentences + generator.normal(0, reaction, len(sentences))
        for _ in range(count)
    ]
    return np.array(runs)


def compare_drawn_runs(runs_a: np.ndarray, runs_b: np.ndarray, generator: np.random.Generator):
    """Compare systems by the mean of their sentences' scores."""
    count = runs_a.shape[1]
    weights = generator.multinomial(count, np.full(count, 1 / count), 200) / count
    return compare_means([runs_a.mean(1), runs_b.mean(1)], [weights @ runs_a.T, weights @ runs_b.T])[1]


@pytest.mark.parametrize(("runs", "seed_effect", "reaction"), [(2, 0.5, 20), (3, 0.2, 20), (3, 1, 5), (8, 1, 5)])
def test_equal_systems_are_called_different_in_5_percent(runs: int, seed_effect: float, reaction: float) -> None:
    generator = np.random.default_rng(1)
    trials = 600
    rejected = 0
    for _ in range(trials):
        sentences = generator.normal(0, 8, 200)
        a, b = (draw_runs(generator, runs, seed_effect, reaction, sentences) for _ in range(2))
        rejected += compare_drawn_runs(a, b, generator).p_value < 0.05
    assert 0.03 <= rejected / trials <= 0.07


def test_number_of_seeds_needed_gives_the_power() -> None:
    generator = np.random.default_rng(2)
    sentences = np.zeros(100)
    needed = count_seeds_needed(0.6, 0.5**2, 0.0)
    assert needed == 12  # tables of the two-sample t test: 11.9 for an effect of 1.2 deviations
    found = 0
    for _ in range(400):
        a, b = (draw_runs(generator, needed, 0.5, 0, sentences + shift) for shift in (0, 0.6))
        found += compare_drawn_runs(a, b, generator).p_value < 0.05
    assert 0.73 <= found / 400 <= 0.87
    assert count_seeds_needed(0.6, 0.5**2, 1.0) is None and count_seeds_needed(0.0, 1.0, 0.0) is None
    assert count_seeds_needed(5.0, 1e-6, 0.0) == 2


def test_without_any_variation_there_is_no_evidence() -> None:
    scores, samples = np.array([1.0, 1.0]), np.ones((10, 2))
    with_rounding = samples + 1 + 1e-15 * np.arange(20).reshape(10, 2)
    for shift, samples_b in ((0, samples), (1, samples + 1), (1, with_rounding)):
        _, comparison = compare_means([scores, scores + shift], [samples, samples_b])
        assert (comparison.difference, comparison.interval, comparison.p_value) == (shift, 0, 1)


def test_scores_are_those_of_sacrebleu() -> None:
    references = [f"the cat sat on mat {n} near the old dog" for n in range(60)]
    generator = np.random.default_rng(4)

    def make_run(errors: float) -> list[str]:
        return [text.replace("dog", "cow") if generator.random() < errors else text for text in references]

    systems = {"worse": [make_run(0.5) for _ in range(3)], "better": [make_run(0.1) for _ in range(2)]}
    comparisons, signatures = compare_over_seeds(systems, references)
    for name, runs in systems.items():
        expected = [compute_scores(texts, references) for texts in runs]
        for metric in ("bleu", "chrf", "ter"):
            assert comparisons[name][metric].scores == pytest.approx([scores[metric] for scores in expected])
            assert signatures[metric] == expected[0]["signatures"][metric]
    first, second = comparisons["worse"]["bleu"], comparisons["better"]["bleu"]
    assert first.difference is None and second.difference == pytest.approx(second.mean - first.mean)
    assert second.p_value is not None and second.p_value < 0.05 and second.seeds_needed in (2, 3)
    assert math.isclose(second.deviation or 0, np.std(second.scores, ddof=1))
    singles = {"a": [make_run(0.5)], "b": [make_run(0.1)], **systems}  # their variance is that of the others
    comparisons, _ = compare_over_seeds(singles, references)
    assert comparisons["b"]["bleu"].deviation is None and comparisons["b"]["bleu"].p_value < 0.05
