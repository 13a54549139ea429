"""Metrics of translations and of word alignments.

BLEU, chrF and TER are computed by sacreBLEU, so that numbers are comparable with published ones. Word alignments are
measured by precision, recall and alignment error rate (AER).

Hypotheses and references are plain text, cased and not tokenized, with one reference for each sentence. Scores are
0-100 (TER may exceed 100); None means undefined. `tokenizer` is the name of a BLEU tokenizer of sacreBLEU, or `auto`:
chosen by the script of the references.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from operator import eq
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer
from sacrebleu.utils import SACREBLEU_DIR

from nmt.data.word_links import GoldLinks, Link
from nmt.data.words import detect_script, segment_words, segmenter_name
from nmt.errors import UserError, extra_command

log = logging.getLogger("nmt")
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}  # for display
LENGTH_BOUNDS = (5, 10, 15, 20, 25, 30, 40, 50)  # `bleu_by_length`: inclusive upper bounds of ranges, in source words
BleuByRange = list[tuple[str, int, float]]  # name of the range as "6-10", number of sentences, BLEU


# -------------------------------------------------------------------------------------------------------- tokenizers
TOKENIZER_BY_SCRIPT = {None: "13a", "han": "zh", "kana": "ja-mecab", "other": "char"}  # keys as from `detect_script`


@cache
def find_tokenizer_problem(tokenizer: str) -> str | None:
    """Return why a BLEU tokenizer cannot be used here, or None if it can."""
    try:
        BLEU(tokenize=tokenizer)
    except (Exception, SystemExit) as error:  # an import or a download can fail in many ways
        if tokenizer in ("ja-mecab", "ko-mecab"):
            return f"needs MeCab and a dictionary, which are not installed: {extra_command('cjk')}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"needs a model that sacreBLEU downloads to {SACREBLEU_DIR}/models, but the download failed ({reason})"
    return None


def choose_bleu_tokenizer(tokenizer: str, references: Sequence[str], is_logged: bool = False) -> str:
    """Return the BLEU tokenizer to use; for `auto`, the one for the script of the references.

    That is 13a for text with spaces between words; zh for Chinese; ja-mecab for Japanese, or char if the extra `cjk` is
    not installed; char for Thai, Khmer and other scripts without spaces.

    Raises:
        UserError: the given tokenizer cannot be used here.
    """
    chosen, reason = tokenizer, f"bleu_tokenizer={tokenizer}"
    if tokenizer == "auto":
        chosen, reason = TOKENIZER_BY_SCRIPT[detect_script(references)], "chosen by the writing system"
        if problem := find_tokenizer_problem(chosen):
            chosen, reason = "char", f"{reason}; {chosen}, the usual choice for it, {problem}"
    elif problem := find_tokenizer_problem(tokenizer):
        raise UserError(f"bleu_tokenizer={tokenizer} {problem}; or choose another one, such as bleu_tokenizer=char")
    if is_logged:
        log.info(f"BLEU uses sacreBLEU's tokenizer {chosen} ({reason})")
    return chosen


class WordTokenizer(TercomTokenizer):
    """The tokenizer of TER for text without spaces between words."""

    def __call__(self, sent: str) -> str:  # type: ignore[override]  # the superclass wraps it in a cache
        return str(super().__call__(" ".join(segment_words(sent))))

    def signature(self) -> str:
        return f"{super().signature()}-{segmenter_name()}"


def build_metrics(tokenizer: str, references: Sequence[str]) -> dict[str, Metric]:
    """Return BLEU, chrF and TER.

    TER counts words. In text without spaces they are those of `segment_words`, which its signature states.
    """
    ter = TER()
    if detect_script(references) is not None:
        ter.tokenizer = WordTokenizer()
        ter.tokenizer_signature = ter.tokenizer.signature()
    return {"bleu": build_bleu_metric(tokenizer, references), "chrf": CHRF(), "ter": ter}


def build_bleu_metric(tokenizer: str, references: Sequence[str]) -> BLEU:
    # `force` silences sacreBLEU's warning about tokenized text; nmt/data/preprocessed_text.py warns of it, once.
    return BLEU(force=True, tokenize=choose_bleu_tokenizer(tokenizer, references))


# ------------------------------------------------------------------------------------------------------------ scores
def score_corpus(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """Return the corpus score; None if there are no sentences or the score is undefined."""
    assert len(hypotheses) == len(references)
    if not hypotheses:
        return None
    score = float(metric.corpus_score(hypotheses, [references]).score)
    return score if math.isfinite(score) else None


def format_number(value: float, decimals: int = 2) -> str:
    """Format a metric, in scientific notation if it is very large, as a perplexity after divergence."""
    return f"{value:.{decimals}f}" if value < 1e6 else f"{value:.2e}"


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto") -> float | None:
    """Return cased corpus BLEU."""
    return score_corpus(build_bleu_metric(tokenizer, references), hypotheses, references)


def compute_scores(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto") -> dict[str, Any]:
    """Return `{"bleu", "chrf", "ter", "exact_match", "signatures": {"bleu", "chrf", "ter"}}`.

    `exact_match` is the percentage of translations that equal the reference; the signatures are sacreBLEU's. Without
    sentences the scores are None and `signatures` is empty.
    """
    metrics = build_metrics(tokenizer, references)
    scores = {name: score_corpus(metric, hypotheses, references) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()} if hypotheses else {}
    matches = sum(map(eq, hypotheses, references))
    exact_match = 100 * matches / len(references) if references else None
    return {**scores, "exact_match": exact_match, "signatures": signatures}


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return chrF of each sentence, 0-100, to rank sentences. The mean is not corpus chrF."""
    metric = CHRF()
    return [metric.sentence_score(text, [own]).score for text, own in zip(hypotheses, references, strict=True)]


def bleu_by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "auto"
) -> BleuByRange:
    """Return BLEU by source length in words, as in figure 2 of Bahdanau et al. 2014; only ranges with sentences."""
    metric = build_bleu_metric(tokenizer, references)  # by all references, so that ranges use the same tokenizer
    names = [f"up to {LENGTH_BOUNDS[0]}", *(f"{low + 1}-{high}" for low, high in pairwise(LENGTH_BOUNDS))]
    names.append(f"over {LENGTH_BOUNDS[-1]}")
    ranges = [bisect_left(LENGTH_BOUNDS, len(segment_words(source))) for source in sources]
    found: BleuByRange = []
    for index in sorted(set(ranges)):
        rows = [row for row, own_range in enumerate(ranges) if own_range == index]
        texts, own_references = ([lines[row] for row in rows] for lines in (hypotheses, references))
        found.append((names[index], len(rows), score_corpus(metric, texts, own_references) or 0.0))
    return found


class SystemScore(NamedTuple):
    """A system's score, and its comparison with the first system."""

    score: float
    interval: float  # half the width of the 95% confidence interval
    p_value: float | None  # probability of a difference at least this large by chance; None for the first system


def paired_bootstrap(
    systems: Mapping[str, Sequence[Sequence[str]]], references: Sequence[str], tokenizer: str = "auto"
) -> tuple[dict[str, dict[str, SystemScore]], dict[str, str]]:
    """Compare systems by paired bootstrap resampling with 1,000 samples (Koehn 2004), as implemented by sacreBLEU.

    Args:
        systems: the translations of the one run of each system, by name.

    Returns:
        Scores by system and metric, and the signatures by metric.
    """
    metrics = build_metrics(tokenizer, references)
    test = PairedTest([(name, list(texts)) for name, [texts] in systems.items()], metrics, [references], "bs")
    signatures, results = test()
    results_of_metrics: list[Any] = [*results.values()][1:]  # the first entry holds the names of the systems
    scores: dict[str, dict[str, SystemScore]] = {system: {} for system in systems}
    for name, results_of_systems in zip(metrics, results_of_metrics, strict=True):
        first = results_of_systems[0]
        for system, result in zip(systems, results_of_systems, strict=True):
            p_value = None if result.p_value is None else float(result.p_value)
            # sacreBLEU reports its smallest p-value if samples do not vary, whatever the texts are.
            if p_value is not None and (result.score == first.score or not result.ci and not first.ci):
                p_value = 1.0
            scores[system][name] = SystemScore(float(result.score), float(result.ci), p_value)
    return scores, {name: str(signature) for name, signature in zip(metrics, signatures.values(), strict=True)}


def load_scipy(purpose: str) -> Any:
    """Return the module `scipy.stats`. Raises a `UserError` with this purpose if scipy is not installed."""
    try:
        from scipy import stats
    except ImportError:
        raise UserError(f"{purpose} needs scipy; install it with: {extra_command('stats')}") from None
    return stats


# -------------------------------------------------------------------------------------------------------- alignments
@dataclass(slots=True)
class LinkCounts:
    """Counts of links summed over sentences, from which the alignment error rate is computed.

    A are the predicted links, S the sure gold links, and P the possible gold links, which include S.
    """

    predicted: int = 0  # |A|
    sure: int = 0  # |S|
    predicted_sure: int = 0  # |A n S|
    predicted_possible: int = 0  # |A n P|

    def add(self, links: Iterable[Link], gold: GoldLinks) -> None:
        """Add the links of a sentence."""
        predicted = set(links)
        self.predicted += len(predicted)
        self.sure += len(gold.sure)
        self.predicted_sure += len(predicted & gold.sure)
        self.predicted_possible += len(predicted & gold.possible)

    def __add__(self, other: "LinkCounts") -> "LinkCounts":
        return LinkCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def scores(self) -> dict[str, float | None]:
        """Return precision |A n P| / |A|, recall |A n S| / |S|, and AER = 1 - (|A n S| + |A n P|) / (|A| + |S|).

        They are defined in Och and Ney 2003, section 5, and range from 0 to 1. None replaces 0 / 0.
        """
        total = self.predicted + self.sure
        return {
            "precision": self.predicted_possible / self.predicted if self.predicted else None,
            "recall": self.predicted_sure / self.sure if self.sure else None,
            "aer": 1 - (self.predicted_sure + self.predicted_possible) / total if total else None,
        }
