"""Erasure: how much probability target words lose when a source word is left out (Li et al. 2016).

Attention is where the model looked; erasure is what its output depended on. The two need not agree.

Shapes: T target and S source words.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from nmt.data.word_links import GoldLinks
from nmt.decoding.alignment import Record, extract_links
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator
from nmt.evaluation.metrics import LinkCounts, load_scipy
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize
from nmt.system.text import split_on_spaces

MAX_ERASED_WORDS = 200  # of a source: it is decoded once without each of them


def measure_erasure(
    translator: Translator,
    translations: Sequence[Translation],
    sources: Sequence[str],
    references: Sequence[str],
    gold: Sequence[GoldLinks] | None,
) -> tuple[list[np.ndarray | None], dict[str, float | None]]:
    """Compare what the words of the translations depend on with attention and, on the references, with gold links.

    Returns the losses of each translation, as from `erase_words`, and two metrics. `erasure_tau` is Kendall's tau
    between the attention weights of a target word and its losses without each source word, averaged over the target
    words for which it is defined. `erasure_aer` is the alignment error rate of linking each target word to the source
    word without which it loses most, if it loses anything. Each is None if there is nothing to measure.
    """
    records = [translation.record for translation in translations]
    losses = erase_words(translator, records, "translation")
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for record, losses_TS in zip(records, losses, strict=True):
        weights_TS = record.word_weights()
        if losses_TS is not None and weights_TS is not None:
            rows += zip(weights_TS, losses_TS, strict=True)
    metrics: dict[str, float | None] = {"erasure_tau": average_tau(rows), "erasure_aer": None}
    if gold is not None:
        # Gold links count words between spaces of the text itself, as `aer` does.
        forced = translator.align([*map(split_on_spaces, sources)], [*map(split_on_spaces, references)])
        forced_losses = erase_words(translator, forced, "reference")
        metrics["erasure_aer"] = count_links(forced_losses, gold).scores()["aer"]
    return losses, metrics


def erase_words(translator: Translator, records: Sequence[Record], what: str) -> list[np.ndarray | None]:
    """Return losses_TS of each record, in nats.

    Target word t loses log p(t | y_<t, x) - log p(t | y_<t, x without s) without source word s. Log-probabilities are
    summed over the pieces of t, and all pieces of s are removed; the others stay as they are. A loss is negative where
    t becomes more likely. None stands for an empty line, one translated in parts, and one of more than
    `MAX_ERASED_WORDS` words.
    """
    rows: list[range] = []  # of each record: its source, and its source without each word; no rows if it is left out
    source_ids: list[list[int]] = []
    target_ids: list[list[int]] = []
    for record in records:
        start = len(source_ids)
        encoded = translator.encode_pieces(record.source_pieces, record.target_pieces)
        if encoded is not None and 0 < len(record.source_words) <= MAX_ERASED_WORDS:
            ids, owners = encoded[0], record.source_word_of_piece[:-1]
            for erased in (None, *range(len(record.source_words))):
                source_ids.append([piece for piece, owner in zip(ids, owners, strict=True) if owner != erased])
            target_ids += [encoded[1]] * (len(source_ids) - start)
        rows.append(range(start, len(source_ids)))
    hypotheses = translator.force_decode(source_ids, target_ids, progress=True, keep_weights=False)
    losses: list[np.ndarray | None] = []
    for record, record_rows in zip(records, rows, strict=True):
        if not record_rows:
            losses.append(None)
            continue
        words = np.array(record.target_word_of_piece)
        positions = np.flatnonzero(words >= 0)  # without `</s>`
        scores_SP = np.array([hypotheses[row].token_scores for row in record_rows])[:, positions]
        losses_TS = np.zeros((len(record.target_words), len(record.source_words)))
        np.add.at(losses_TS, words[positions], (scores_SP[0] - scores_SP[1:]).T)
        losses.append(losses_TS)
    left_out = [line for line, losses_TS in enumerate(losses, 1) if losses_TS is None]
    if left_out:
        log.warning(
            f"erase=true leaves out {pluralize(len(left_out), what)} of lines that are empty, were translated in parts "
            f"or have more than {MAX_ERASED_WORDS} words ({format_first_lines(left_out)})"
        )
    return losses


def average_tau(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Return the mean of Kendall's tau-b (Kendall 1945) of pairs of vectors, of those for which it is defined.

    Raises:
        UserError: scipy is not installed.
    """
    stats = load_scipy("erase=true")
    taus = [stats.kendalltau(x, y).statistic for x, y in pairs if len(x) > 1]
    defined = [tau for tau in taus if not math.isnan(tau)]
    return float(np.mean(defined)) if defined else None


def normalize_losses(losses_TS: np.ndarray) -> np.ndarray:
    """Return the share that each source word has in what a target word loses. Gains of probability count as 0."""
    positive_TS = np.maximum(losses_TS, 0)
    return positive_TS / np.maximum(positive_TS.sum(1, keepdims=True), np.finfo(positive_TS.dtype).tiny)


def count_links(losses: Iterable[np.ndarray | None], gold: Iterable[GoldLinks]) -> LinkCounts:
    """Count the links of each target word to the source word without which it loses most."""
    counts = LinkCounts()
    for losses_TS, links in zip(losses, gold, strict=True):
        if losses_TS is not None:
            target_words, source_words = losses_TS.shape
            counts.add(extract_links(np.maximum(losses_TS, 0), range(source_words), range(target_words)), links)
    return counts
