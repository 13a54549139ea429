"""How good translations are: BLEU, chrF and TER through sacreBLEU, so that numbers compare with published ones; and how
good word links are: precision, recall and alignment error rate.

Hypotheses and references are plain text, cased and not tokenized. Scores are 0-100 (TER may pass 100); None stands for
one that is undefined. `tokenizer` is one of sacreBLEU's by name, or `auto`: the one for the script of the references.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_base import BaseTokenizer
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer
from sacrebleu.utils import SACREBLEU_DIR

from nmt.data.word_links import GoldLinks, Link
from nmt.data.words import script_of, segmenter, words_in
from nmt.errors import UserError

log = logging.getLogger("nmt")
NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}  # of these, for readers
TOKENIZER = Tokenizer13a()
LENGTHS = (5, 10, 15, 20, 25, 30, 40, 50)  # source words: the longest of each range of `bleu_by_length` but the last
FREQUENCIES = (0, 1, 5, 20, 100, 1000)  # the same of `bleu_by_rarity`
Ranges = list[tuple[str, int, float | None]]  # of each that has sentences: name, as in "6-10", sentences, their BLEU


# -------------------------------------------------------------------------------------------------------- tokenizers
BY_SCRIPT = {None: "13a", "han": "zh", "kana": "ja-mecab", "other": "char"}  # BLEU's tokenizers by `script_of`
MECAB = ("ja-mecab", "ko-mecab")


@cache
def missing(tokenizer: str) -> str | None:
    """Why one of BLEU's tokenizers cannot be used here; None: it can."""
    try:
        BLEU(tokenize=tokenizer)
    except (Exception, SystemExit) as error:  # of a package, or of a download, of whatever kind
        if tokenizer in MECAB:
            return "needs MeCab and a dictionary, which are not installed: pip install 'nmt[cjk]'"
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"needs a model that sacreBLEU downloads into {SACREBLEU_DIR}/models, which failed ({reason})"
    return None


def choose_tokenizer(tokenizer: str, references: Sequence[str]) -> str:
    """BLEU's tokenizer for these references: the given one, or for `auto` that of their script. It is 13a where words
    have spaces between them; zh for Chinese; ja-mecab for Japanese, or char where the extra `cjk` is not installed;
    char for Thai, Khmer and other scripts without spaces.

    Raises:
        UserError: the given one cannot be used here.
    """
    if tokenizer == "auto":
        chosen = BY_SCRIPT[script_of(references)]
        return "char" if missing(chosen) else chosen
    if trouble := missing(tokenizer):
        raise UserError(f"bleu_tokenizer={tokenizer} {trouble}; or write another one, as bleu_tokenizer=char")
    return tokenizer


def resolve_tokenizer(tokenizer: str, references: Sequence[str]) -> str:
    """Choose BLEU's tokenizer and log it.

    Raises:
        UserError: the given one cannot be used here.
    """
    chosen, usual = choose_tokenizer(tokenizer, references), BY_SCRIPT[script_of(references)]
    why = "by the script of the references" if tokenizer == "auto" else f"bleu_tokenizer={tokenizer}"
    if tokenizer == "auto" and chosen != usual:
        why += f"; {usual}, which is usual for it, {missing(usual)}"
    log.info(f"BLEU by sacreBLEU's tokenizer {chosen} ({why})")
    return chosen


class WordTokenizer(TercomTokenizer):
    """TER's tokenizer, for text without spaces between words."""

    def __call__(self, sent: str) -> str:  # type: ignore[override]  # of which the superclass has a cache
        return str(super().__call__(" ".join(words_in(sent))))

    def signature(self) -> str:
        return f"{super().signature()}-{segmenter()}"


def metrics_for(tokenizer: str, references: Sequence[str]) -> dict[str, Metric]:
    """BLEU, chrF and TER. TER counts words; of text without spaces those of `words_in`, and its signature says so."""
    ter = TER()
    if script_of(references) is not None:
        ter.tokenizer = WordTokenizer()
        ter.tokenizer_signature = ter.tokenizer.signature()
    return {"bleu": bleu_metric(tokenizer, references), "chrf": CHRF(), "ter": ter}


def bleu_metric(tokenizer: str, references: Sequence[str]) -> BLEU:
    return BLEU(force=True, tokenize=choose_tokenizer(tokenizer, references))  # `data.processed` is what warns, once


# ------------------------------------------------------------------------------------------------------------- scores
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


def forget(kind: type[BaseTokenizer] = BaseTokenizer) -> None:
    """Clear the tokenizers' caches, which keep 2^16 lines each for a metric that is gone."""
    getattr(kind.__call__, "cache_clear", lambda: None)()
    for special in kind.__subclasses__():
        forget(special)


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto") -> float | None:
    """Corpus BLEU alone, cased."""
    return corpus_score(bleu_metric(tokenizer, references), hypotheses, references)


def scores(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto") -> dict[str, Any]:
    """`{"bleu", "chrf", "ter", "signatures": {"bleu", "chrf", "ter"}}`; a signature says exactly what was computed.

    With no sentences there is nothing to say: the scores are None and `signatures` is empty.
    """
    metrics = metrics_for(tokenizer, references)
    values = {name: corpus_score(metric, hypotheses, references) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()} if hypotheses else {}
    return {**values, "signatures": signatures}


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF of each sentence by itself, 0-100: for ranking sentences; their mean is not chrF of the corpus."""
    metric = CHRF()
    return [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]


def bleu_by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto"
) -> Ranges:
    """BLEU of sentences of like source length in words, as in figure 2 of Bahdanau et al. 2014."""
    return bleu_by([len(words_in(source)) for source in sources], LENGTHS, hypotheses, references, tokenizer)


def bleu_by_rarity(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], counts: Mapping[str, int],
    tokenizer: str = "auto",
) -> Ranges:  # fmt: skip
    """BLEU of sentences by how often their rarest source word is in the training text, whose words `counts` has."""
    rarest = [min((counts.get(word, 0) for word in words_and_marks(source)), default=0) for source in sources]
    return bleu_by(rarest, FREQUENCIES, hypotheses, references, tokenizer)


def words_and_marks(text: str) -> list[str]:
    """Words and punctuation marks: what 13a makes of `words_in`."""
    return TOKENIZER(" ".join(words_in(text))).split()


def bleu_by(
    values: Sequence[int], bounds: Sequence[int], hypotheses: Sequence[str], references: Sequence[str], tokenizer: str
) -> Ranges:
    """BLEU of the sentences of each range of a number that each has: up to the first bound, ..., over the last."""
    tokenizer = choose_tokenizer(tokenizer, references)  # by all of them, so that all ranges have the same
    names = [f"{low + 1}-{high}" if low + 1 < high else str(high) for low, high in pairwise(bounds)]
    names = [f"up to {bounds[0]}" if bounds[0] else "0", *names, f"over {bounds[-1]}"]
    rows_of: dict[str, list[int]] = {name: [] for name in names}
    for row, value in enumerate(values):
        rows_of[names[bisect_left(bounds, value)]].append(row)
    return [
        (name, len(rows), bleu([hypotheses[row] for row in rows], [references[row] for row in rows], tokenizer))
        for name, rows in rows_of.items()
        if rows
    ]


class Compared(NamedTuple):
    """A score of a system, beside that of the first one."""

    score: float
    interval: float  # half of the 95% confidence interval
    p_value: float | None  # of a difference in this direction as large as this by chance; None: it is the first system


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], tokenizer: str = "auto"
) -> tuple[dict[str, dict[str, Compared]], dict[str, str]]:
    """Scores of several systems' translations of the same sentences, by system and by metric, and the metrics'
    signatures. sacreBLEU's own test, with 1,000 samples (Koehn 2004)."""
    metrics = metrics_for(tokenizer, references)
    test = PairedTest([(name, list(texts)) for name, texts in systems.items()], metrics, [references], "bs")
    signatures, results = test()
    columns: list[Any] = [*results.values()][1:]  # the first are the systems' names
    found: dict[str, dict[str, Compared]] = {system: {} for system in systems}
    for name, scored in zip(metrics, columns, strict=True):
        for system, result in zip(systems, scored, strict=True):
            p_value = None if result.p_value is None else float(result.p_value)
            if p_value is not None and (result.score == scored[0].score or not result.ci and not scored[0].ci):
                p_value = 1.0  # where samples do not differ, the test has its smallest value, whatever it was given
            found[system][name] = Compared(float(result.score), float(result.ci), p_value)
    forget()
    return found, {name: str(signature) for name, signature in zip(metrics, signatures.values(), strict=True)}


@dataclass(slots=True)
class LinkCounts:
    """What the alignment error rate is made of, added up over sentences: A are the links found, S the sure links of the
    gold standard, P its possible ones with S among them."""

    found: int = 0  # |A|
    sure: int = 0  # |S|
    found_sure: int = 0  # |A n S|
    found_possible: int = 0  # |A n P|

    def add(self, links: Iterable[Link], gold: GoldLinks) -> None:
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
