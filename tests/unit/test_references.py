"""Scores that use several references for each sentence."""

import random

import pytest
from builders import WORDS
from sacrebleu.metrics import BLEU, CHRF, TER

from nmt.evaluation.metrics import (
    OVERLAP_KINDS,
    bleu_by_length,
    compute_scores,
    paired_bootstrap,
    score_by_overlap,
    sentence_chrf,
)
from nmt.evaluation.seeds import compare_over_seeds

METRICS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}


def make_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(count)]


def make_corpus(most: int) -> tuple[list[str], list[list[str]]]:
    """Return translations, and up to `most` references of each."""
    rng = random.Random(most)
    further = [make_texts(60, seed) for seed in range(2, most + 2)]
    return make_texts(60, 1), [list(own[: rng.randint(1, most)]) for own in zip(*further, strict=True)]


# ------------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize("most", [1, 2, 4])
def test_scores_are_those_of_sacrebleu(most: int) -> None:
    translations, references = make_corpus(most)
    streams = [[own[n] if n < len(own) else None for own in references] for n in range(most)]
    scores = compute_scores(translations, references)
    for name, build in METRICS.items():
        metric = build()
        assert scores[name] == metric.corpus_score(translations, streams).score  # type: ignore[arg-type]
        assert scores["signatures"][name] == str(metric.get_signature())
    assert f"nrefs:{1 if most == 1 else 'var'}|" in scores["signatures"]["bleu"]
    kinds = [kind for kind in OVERLAP_KINDS.values() for _ in range(20)]
    for number, part in enumerate(score_by_overlap(kinds, translations, references, "13a").values()):
        rows = slice(20 * number, 20 * number + 20)
        own_streams = [stream[rows] for stream in streams]
        for name in ("bleu", "chrf"):
            assert part[name] == METRICS[name]().corpus_score(translations[rows], own_streams).score
    [(_, count, score)] = bleu_by_length(["x"] * 60, translations, references)
    assert (count, score) == (60, scores["bleu"])


def test_order_of_references_does_not_change_scores() -> None:
    translations, references = make_corpus(4)
    scores = compute_scores(translations, references)
    for seed in range(5):
        rng = random.Random(seed)
        shuffled = [rng.sample(own, len(own)) for own in references]
        assert compute_scores(translations, shuffled) == scores
        assert sentence_chrf(translations, shuffled) == sentence_chrf(translations, references)


def test_comparisons_use_all_references() -> None:
    translations, references = make_corpus(3)
    better = [
        own[-1] if row % 2 else text for row, (text, own) in enumerate(zip(translations, references, strict=True))
    ]
    expected = {"a": compute_scores(translations, references), "b": compute_scores(better, references)}
    by_runs, signatures = paired_bootstrap({"a": translations, "b": better}, references)
    by_seeds, signatures_by_seeds = compare_over_seeds({"a": [translations, better], "b": [better]}, references)
    for name in METRICS:
        for system, scores in expected.items():
            assert by_runs[system][name].score == pytest.approx(scores[name])
            assert by_seeds[system][name].scores[0] == pytest.approx(scores[name])
        assert "nrefs:var" in signatures[name] and "nrefs:var" in signatures_by_seeds[name]
    assert by_runs["b"]["bleu"].p_value is not None and by_runs["b"]["bleu"].p_value < 0.01
