"""How good translations are: BLEU, chrF and TER through sacreBLEU, so that numbers compare with published ones; and how
good word links are: precision, recall and alignment error rate.

Hypotheses and references are plain text, cased and not tokenised. Scores are 0-100 (TER may pass 100); None stands for
one that is undefined.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer

from nmt.links import Gold, Link

REMEMBERING = (Tokenizer13a, TokenizerRegexp, TercomTokenizer)  # 2^16 lines each, for a metric that is gone: a leak
METRICS: dict[str, Callable[[], Metric]] = {"bleu": partial(BLEU, force=True), "chrf": CHRF, "ter": TER}
NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}  # of these, for readers
TOKENIZER = Tokenizer13a()
LENGTHS = (5, 10, 15, 20, 25, 30, 40, 50)  # source words: the longest of each range of `bleu_by_length` but the last
FREQUENCIES = (0, 1, 5, 20, 100, 1000)  # the same of `bleu_by_rarity`
Ranges = list[tuple[str, int, float | None]]  # of each that has sentences: name, as in "6-10", sentences, their BLEU


def corpus_score(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """The score of all sentences together, or None where there is nothing to score."""
    assert len(hypotheses) == len(references)
    if not hypotheses:
        return None
    score = float(metric.corpus_score(hypotheses, [references]).score)
    forget()
    return score if math.isfinite(score) else None


def in_short(perplexity: float) -> str:
    """As people read it, also of a model that has gone astray."""
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"


def forget() -> None:
    for tokenizer in REMEMBERING:
        tokenizer.__call__.cache_clear()


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """Corpus BLEU alone: cased, sacreBLEU's 13a tokenisation."""
    return corpus_score(BLEU(force=True), hypotheses, references)  # `data.processed` is what warns, once


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """`{"bleu", "chrf", "ter", "signatures": {"bleu", "chrf", "ter"}}`; a signature says exactly what was computed.

    With no sentences there is nothing to say: the scores are None and `signatures` is empty.
    """
    metrics = {name: make() for name, make in METRICS.items()}
    values = {name: corpus_score(metric, hypotheses, references) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()} if hypotheses else {}
    return {**values, "signatures": signatures}


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF of each sentence by itself, 0-100: for ranking sentences; their mean is not chrF of the corpus."""
    metric = CHRF()
    return [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]


def bleu_by_length(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> Ranges:
    """BLEU of sentences of like source length in words, as in figure 2 of Bahdanau et al. 2014."""
    return bleu_by([len(source.split()) for source in sources], LENGTHS, hypotheses, references)


def bleu_by_rarity(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], counts: Mapping[str, int]
) -> Ranges:
    """BLEU of sentences by how often their rarest source word is in the training text, whose words `counts` has."""
    rarest = [min((counts.get(word, 0) for word in tokens_13a(source)), default=0) for source in sources]
    return bleu_by(rarest, FREQUENCIES, hypotheses, references)


def tokens_13a(text: str) -> list[str]:
    """Words and punctuation marks as BLEU counts them (13a)."""
    return TOKENIZER(text).split()


def bleu_by(
    values: Sequence[int], bounds: Sequence[int], hypotheses: Sequence[str], references: Sequence[str]
) -> Ranges:
    """BLEU of the sentences of each range of a number that each has: up to the first bound, ..., over the last."""
    names = [f"{low + 1}-{high}" if low + 1 < high else str(high) for low, high in pairwise(bounds)]
    names = [f"up to {bounds[0]}" if bounds[0] else "0", *names, f"over {bounds[-1]}"]
    rows_of: dict[str, list[int]] = {name: [] for name in names}
    for row, value in enumerate(values):
        rows_of[names[bisect_left(bounds, value)]].append(row)
    return [
        (name, len(rows), bleu([hypotheses[row] for row in rows], [references[row] for row in rows]))
        for name, rows in rows_of.items()
        if rows
    ]


class Compared(NamedTuple):
    """A score of a system, beside that of the first one."""

    score: float
    interval: float  # half of the 95% confidence interval
    p_value: float | None  # of a difference in this direction as large as this by chance; None: it is the first system


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]], references: Sequence[str]
) -> tuple[dict[str, dict[str, Compared]], dict[str, str]]:
    """Scores of several systems' translations of the same sentences, by system and by metric, and the metrics'
    signatures. sacreBLEU's own test, with 1,000 samples (Koehn 2004)."""
    test = PairedTest(
        [(name, list(texts)) for name, texts in systems.items()],
        {name: make() for name, make in METRICS.items()},
        [references],
        "bs",
    )
    signatures, results = test()
    columns: list[Any] = [*results.values()][1:]  # the first are the systems' names
    found: dict[str, dict[str, Compared]] = {system: {} for system in systems}
    for name, scored in zip(METRICS, columns, strict=True):
        for system, result in zip(systems, scored, strict=True):
            p_value = None if result.p_value is None else float(result.p_value)
            if p_value is not None and (result.score == scored[0].score or not result.ci and not scored[0].ci):
                p_value = 1.0  # where samples do not differ, the test has its smallest value, whatever it was given
            found[system][name] = Compared(float(result.score), float(result.ci), p_value)
    forget()
    return found, {name: str(signature) for name, signature in zip(METRICS, signatures.values(), strict=True)}


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
