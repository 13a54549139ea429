"""How good translations are: BLEU, chrF and TER through sacreBLEU, so that numbers compare with published ones; and how
good word links are: precision, recall and alignment error rate.

Hypotheses and references are plain text, cased and not tokenised. Scores are 0-100 (TER may pass 100); None stands for
one that is undefined.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer

from nmt.links import Gold, Link

TOKENISED = re.compile(r" [.,](?= |$)| '(s|t|re|ll|ve|m|d)\b| n't\b|&(apos|quot|amp);|@-@")
REMEMBERING = (Tokenizer13a, TokenizerRegexp, TercomTokenizer)  # 2^16 lines each, for a metric that is gone: a leak
LENGTHS = (5, 10, 15, 20, 25, 30, 40, 50)  # source words: the longest of each range of `bleu_by_length` but the last


def corpus_score(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """The score of all sentences together, or None where there is nothing to score."""
    assert len(hypotheses) == len(references)
    if not hypotheses:
        return None
    score = float(metric.corpus_score(hypotheses, [references]).score)
    for tokenizer in REMEMBERING:
        tokenizer.__call__.cache_clear()
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


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF of each sentence by itself, 0-100: for ranking sentences; their mean is not chrF of the corpus."""
    metric = CHRF()
    return [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]


def bleu_by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> list[tuple[str, int, float | None]]:
    """BLEU of sentences of like source length, as in figure 2 of Bahdanau et al. 2014.

    Returns:
        For each range of `LENGTHS` that has sentences, the shortest first: its name, as in "6-10" words, the number of
        its sentences, and their BLEU.
    """
    names = [f"up to {LENGTHS[0]}", *(f"{low + 1}-{high}" for low, high in pairwise(LENGTHS)), f"over {LENGTHS[-1]}"]
    rows_of: dict[str, list[int]] = {name: [] for name in names}
    for row, source in enumerate(sources):
        rows_of[names[bisect_left(LENGTHS, len(source.split()))]].append(row)
    return [
        (name, len(rows), bleu([hypotheses[row] for row in rows], [references[row] for row in rows]))
        for name, rows in rows_of.items()
        if rows
    ]


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

    def __add__(self, other: "LinkCounts") -> "LinkCounts":
        return LinkCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def scores(self) -> dict[str, float | None]:
        """Och and Ney 2003, section 5: precision |A n P| / |A|, recall |A n S| / |S|, and
        AER = 1 - (|A n S| + |A n P|) / (|A| + |S|), all 0-1; None where it would be 0 / 0."""
        both = self.found + self.sure
        return {
            "precision": self.found_possible / self.found if self.found else None,
            "recall": self.found_sure / self.sure if self.sure else None,
            "aer": 1 - (self.found_sure + self.found_possible) / both if both else None,
        }
