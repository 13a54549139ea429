"""How good translations are: BLEU, chrF and TER through sacreBLEU, so that numbers compare with published ones; and how
good word links are: precision, recall and alignment error rate.

Hypotheses and references are plain text, cased and not tokenised. Scores are 0-100 (TER may pass 100); None stands for
one that is undefined.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric

from nmt.links import Gold, Link

TOKENISED = re.compile(r" [.,](?= |$)| '(s|t|re|ll|ve|m|d)\b| n't\b|&(apos|quot|amp);|@-@")


def corpus_score(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """The score of all sentences together, or None where there is nothing to score."""
    assert len(hypotheses) == len(references)
    if not hypotheses:
        return None
    score = float(metric.corpus_score(hypotheses, [references]).score)
    return score if math.isfinite(score) else None


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """Corpus BLEU alone: cased, sacreBLEU's 13a tokenisation."""
    return corpus_score(BLEU(force=True), hypotheses, references)  # `looks_tokenised` is what warns, once


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """`{"bleu", "chrf", "ter", "signatures": {"bleu", "chrf", "ter"}}`; a signature says exactly what was computed.

    With no sentences there is nothing to say: the scores are None and `signatures` is empty.
    """
    metrics: dict[str, Metric] = {"bleu": BLEU(force=True), "chrf": CHRF(), "ter": TER()}
    values = {name: corpus_score(metric, hypotheses, references) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()} if hypotheses else {}
    return {**values, "signatures": signatures}


def looks_tokenised(lines: Iterable[str]) -> bool:
    """Whether over a fifth of the lines have punctuation set apart, as `Hello , world .`, or a tokeniser's escapes.

    BLEU of tokenised references is higher than, and does not compare with, BLEU of plain text.
    """
    found = [TOKENISED.search(line) is not None for line in lines]
    return sum(found) > len(found) / 5


@dataclass(slots=True)
class LinkCounts:
    """What the alignment error rate is made of, added up over sentences: A are the links found, S the sure links of the
    gold standard, P its possible ones with S among them."""

    found: int = 0  # |A|
    sure: int = 0  # |S|
    found_sure: int = 0  # |A n S|
    found_possible: int = 0  # |A n P|

    def add(self, links: Iterable[Link], gold: Gold) -> None:
        found = set(links)
        self.found += len(found)
        self.sure += len(gold.sure)
        self.found_sure += len(found & gold.sure)
        self.found_possible += len(found & gold.possible)

    def scores(self) -> dict[str, float | None]:
        """Och and Ney 2003, section 5: precision |A n P| / |A|, recall |A n S| / |S|, and
        AER = 1 - (|A n S| + |A n P|) / (|A| + |S|), all 0-1; None where it would be 0 / 0."""
        both = self.found + self.sure
        return {
            "precision": self.found_possible / self.found if self.found else None,
            "recall": self.found_sure / self.sure if self.sure else None,
            "aer": 1 - (self.found_sure + self.found_possible) / both if both else None,
        }
