"""Words of the training pairs that translate each other, for `augment.*`: found by the aligner, kept in the cache."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from nmt.aligner.aligner import LINK_THRESHOLD, align_sentences, train_aligner
from nmt.aligner.lexicon import normalize_word
from nmt.config import TrainRun
from nmt.data.augmentation import Augmenter, Link, PairLinks, find_names
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.corpus import iter_column
from nmt.data.encoding import map_file, text_key
from nmt.data.mixing import list_corpora
from nmt.data.word_links import threshold_links
from nmt.data.words import find_spans, segmenter_name, split_tokens
from nmt.system.logging import log
from nmt.system.messages import pluralize

TRAINING_PAIRS = 200_000  # on which the aligner is trained; more would take memory and help little
PAIRS_PER_CHUNK = 20_000  # aligned at a time
MAX_FREQUENCY = 0.005  # words that occur more often per pair, mostly function words, are left out
MIN_FREQUENT = 2  # ... but not those that occur only this often, in a small text
VERSION = 2  # of the links; raise it when they change


def build_augmenter(run: TrainRun, pairs: pa.Table) -> Augmenter | None:
    """Return what `augment.*` needs for these training pairs, or None if nothing is to be changed."""
    if not run.augment.is_on:
        return None
    links = get_or_align(run, pairs) if run.augment.needs_links else PairLinks.build([[]] * len(pairs))
    names = find_names(iter_column(pairs, "source"), iter_column(pairs, "target"), links) if run.augment.names else []
    tags = [f"{part.tag} " for part in list_corpora(run.data) if part.tag]
    return Augmenter(run.augment, run.tokenizer.literals, run.data.languages[0], links, names, tags)


def get_or_align(run: TrainRun, pairs: pa.Table) -> PairLinks:
    """Return the links of the training pairs, or load them from the cache if the same text was aligned before."""

    def write_links(folder: Path) -> None:
        log.info("aligning the words of the training text, for augment.*")
        links = align_pairs(list(iter_column(pairs, "source")), list(iter_column(pairs, "target")))
        (folder / "links").write_bytes(links.links.tobytes())
        (folder / "offsets").write_bytes(links.offsets.tobytes())

    key = f"{text_key(pairs)}.{segmenter_name()}.{VERSION}".replace(" ", "")
    folder = get_or_build(cache_folder(run.data) / "links" / key, write_links)
    links = PairLinks(map_file(folder / "links", np.int32).reshape(-1, 4), map_file(folder / "offsets", np.int64))
    log.info(f"{pluralize(len(links.links), 'pair')} of words translate each other alone")
    return links


def align_pairs(sources: list[str], targets: list[str]) -> PairLinks:
    """Return the links of words that have no other link.

    Words that occur more often than `MAX_FREQUENCY` times the number of pairs are left out, unless they are the same on
    both sides, like names.
    """
    chosen = np.unique(np.linspace(0, len(sources) - 1, min(len(sources), TRAINING_PAIRS), dtype=np.int64)).tolist()
    aligner = train_aligner(
        [split_tokens(sources[row]) for row in chosen], [split_tokens(targets[row]) for row in chosen]
    )
    limit = max(MIN_FREQUENT, MAX_FREQUENCY * len(chosen))
    source_frequent, target_frequent = (
        {word for word, count in vocabulary.counts[-1].items() if count > limit}
        for vocabulary in (aligner.lexicon.source, aligner.lexicon.target)
    )

    def may_be_replaced(source: str, target: str) -> bool:
        if not (any(map(str.isalnum, source)) and any(map(str.isalnum, target))):
            return False
        is_frequent = normalize_word(source) in source_frequent or normalize_word(target) in target_frequent
        return source == target or not is_frequent

    links: list[list[Link]] = []
    with tqdm(total=len(sources), desc="aligning", unit=" lines", leave=False, disable=None) as bar:
        for start in range(0, len(sources), PAIRS_PER_CHUNK):
            rows = slice(start, start + PAIRS_PER_CHUNK)
            words = [[split_tokens(line) for line in side[rows]] for side in (sources, targets)]
            for source, target, source_words, target_words, weights_TS in zip(
                sources[rows], targets[rows], *words, align_sentences(aligner, *words), strict=True
            ):
                single = [
                    (s, t)
                    for s, t in select_single_links(threshold_links(weights_TS, LINK_THRESHOLD))
                    if may_be_replaced(source_words[s], target_words[t])
                ]
                spans = find_spans(source, source_words), find_spans(target, target_words)
                links.append([(*spans[0][s], *spans[1][t]) for s, t in single])
            bar.update(len(words[0]))
    return PairLinks.build(links)


def select_single_links(links: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the links that are the only one of both their words."""
    sources, targets = (Counter(link[side] for link in links) for side in (0, 1))
    return [(s, t) for s, t in links if sources[s] == targets[t] == 1]
