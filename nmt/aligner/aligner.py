"""Train a statistical aligner on sentence pairs, and align with it.

Two hidden Markov models, of opposite directions, are trained together: in each round of EM the expected number of links
between two words is the product of the two posterior probabilities (Liang et al. 2006, section 3.2). So the directions
agree, and one lexicon serves both. Rounds of the simpler IBM model 1 come first.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nmt.aligner.hmm import INITIAL_JUMPS, Counts, Floats, Posteriors, infer_independent_links, infer_links
from nmt.aligner.lexicon import Ids, Indices, Lexicon, Values, Vocabulary, WordPairs, normalize_word, sort_unique
from nmt.data.word_links import Sentences
from nmt.errors import UserError

MODEL_1_ROUNDS = 3
HMM_ROUNDS = 8
LINK_THRESHOLD = 0.5  # of the geometric mean of the two posterior probabilities
SMOOTHING = 0.01  # added to the expected number of NULL links of each word
JUMP_SMOOTHING = 0.5  # added to the expected number of jumps of each distance
CELLS_PER_BATCH = 150_000  # pairs of words in memory at a time
MAX_CELLS = 1_000_000  # of a sentence pair; larger ones get no links
BYTES_PER_CELL = 4  # of memory; a cell is a pair of words of a sentence pair
BYTES_PER_WORD_PAIR = 220  # of memory, at the peak; a pair of words that stand in several sentence pairs counts once
PADDING = np.iinfo(np.int64).max  # code of a pair of words, one of which is padding


class Aligner:
    """The parameters of both directions."""

    def __init__(self, source: Vocabulary, target: Vocabulary) -> None:
        self.lexicon = Lexicon(source, target)
        self.null_target = np.full(len(target.counts[-1]) + 1, 1.0)  # NULL links of each target word; last: unknown
        self.null_source = np.full(len(source.counts[-1]) + 1, 1.0)
        self.jumps_forward = INITIAL_JUMPS  # of the model whose states are source words
        self.jumps_backward = INITIAL_JUMPS


class SentenceBatch(NamedTuple):
    """Sentence pairs of similar lengths."""

    rows: list[int]  # of the corpus
    pairs_BST: Indices  # index of each pair of words in `WordPairs`; at padding that after the last
    source_BS: Ids  # id of each word in the vocabulary; that of unknown words at padding
    target_BT: Ids
    source_length_B: Counts
    target_length_B: Counts


def train_aligner(sources: Sentences, targets: Sentences) -> Aligner:
    """Train an aligner on sentence pairs, given as lists of words."""
    aligner = Aligner(Vocabulary(sources), Vocabulary(targets))
    batches, pairs = index_corpus(aligner, sources, targets, progress=True)
    rounds = [False] * MODEL_1_ROUNDS + [True] * HMM_ROUNDS
    with tqdm(total=len(rounds) * len(batches), desc="training the aligner", unit=" batches", disable=None) as bar:
        for is_hmm in rounds:
            run_em_round(aligner, batches, pairs, is_hmm, bar)
    return aligner


def run_em_round(
    aligner: Aligner, batches: list[SentenceBatch], pairs: WordPairs, is_hmm: bool, bar: "tqdm[Any]"
) -> None:
    """Replace the parameters by those of the expected links under the current ones."""
    links_P = np.zeros(len(pairs.levels[-1].codes_Q) + 1)
    null_target, null_source = np.zeros_like(aligner.null_target), np.zeros_like(aligner.null_source)
    jumps_forward, jumps_backward = np.zeros_like(aligner.jumps_forward), np.zeros_like(aligner.jumps_backward)
    for batch, forward, backward in infer_both(aligner, batches, pairs, is_hmm):
        both_BST = forward.links_BTS.transpose(0, 2, 1) * backward.links_BTS
        np.add.at(links_P, batch.pairs_BST.ravel(), both_BST.ravel().astype(np.float64))
        count_null(null_target, batch.target_BT, batch.target_length_B, both_BST.sum(1))
        count_null(null_source, batch.source_BS, batch.source_length_B, both_BST.sum(2))
        jumps_forward += forward.jumps
        jumps_backward += backward.jumps
        bar.update()
    pairs.count_links(links_P[:-1])
    aligner.null_target, aligner.null_source = null_target + SMOOTHING, null_source + SMOOTHING
    if is_hmm:
        aligner.jumps_forward = jumps_forward + JUMP_SMOOTHING
        aligner.jumps_backward = jumps_backward + JUMP_SMOOTHING


def count_null(counts: Values, words_BX: Ids, length_B: Counts, links_BX: Floats) -> None:
    """Add to the NULL links of each word what its occurrences have no links for."""
    is_word_BX = np.arange(words_BX.shape[1]) < length_B[:, None]
    missing_BX = np.clip(1 - links_BX, 0, 1) * is_word_BX
    counts += np.bincount(words_BX.ravel(), missing_BX.ravel(), len(counts))


def infer_both(
    aligner: Aligner, batches: list[SentenceBatch], pairs: WordPairs, is_hmm: bool
) -> Iterator[tuple[SentenceBatch, Posteriors, Posteriors]]:
    """Yield each batch with the posteriors of the two directions: links_BTS and, for the other one, links_BST."""
    forward_P, backward_P = (np.append(values, 0).astype(np.float32) for values in pairs.probabilities())
    null_target, null_source = (
        (counts / counts.sum()).astype(np.float32) for counts in (aligner.null_target, aligner.null_source)
    )
    for batch in batches:
        forward_BTS = np.ascontiguousarray(forward_P[batch.pairs_BST].transpose(0, 2, 1))
        backward_BST = backward_P[batch.pairs_BST]
        null_BT, null_BS = null_target[batch.target_BT], null_source[batch.source_BS]
        lengths = batch.source_length_B, batch.target_length_B
        if is_hmm:
            forward = infer_links(forward_BTS, null_BT, aligner.jumps_forward, *lengths)
            backward = infer_links(backward_BST, null_BS, aligner.jumps_backward, *reversed(lengths))
        else:
            none = np.zeros_like(aligner.jumps_forward)
            forward = Posteriors(infer_independent_links(forward_BTS, null_BT, lengths[0]), none)
            backward = Posteriors(infer_independent_links(backward_BST, null_BS, lengths[1]), none)
        yield batch, forward, backward


def index_corpus(
    aligner: Aligner, sources: Sentences, targets: Sentences, progress: bool = False
) -> tuple[list[SentenceBatch], WordPairs]:
    """Index the words and pairs of words of sentence pairs. Empty sentences and very long ones are left out."""
    source_index, source_words = number_words(sources)
    target_index, target_words = number_words(targets)
    rows = [row for row, s in enumerate(source_index) if 0 < len(s) * len(target_index[row]) <= MAX_CELLS]
    rows.sort(key=lambda row: (len(source_index[row]), len(target_index[row])))
    groups = list(group_rows(rows, source_index, target_index))

    def encode(group: list[int]) -> Ids:  # the code of each pair of words, as in `WordPairs`
        source_BS, target_BT = pad_rows(source_index, group), pad_rows(target_index, group)
        code_BST = source_BS[:, :, None] * len(target_words) + target_BT[:, None, :]
        code_BST[(source_BS < 0)[:, :, None] | (target_BT < 0)[:, None, :]] = PADDING
        return code_BST

    cells = sum(len(source_index[row]) * len(target_index[row]) for row in rows)
    check_memory(0, cells)
    with tqdm(total=2 * len(groups), desc="indexing", unit=" batches", disable=None if progress else True) as bar:
        codes_P, new, num_new = np.zeros(0, np.int64), [], 0
        for group in groups:
            new.append(sort_unique(encode(group)))
            num_new += len(new[-1])
            if num_new > len(codes_P) or group is groups[-1]:
                codes_P, new, num_new = sort_unique(np.concatenate([codes_P, *new])), [], 0
            bar.update()
        codes_P = codes_P[codes_P < PADDING]
        check_memory(len(codes_P), cells)
        # -1, of padding, finds the last id, of unknown words.
        source_ids = np.append(aligner.lexicon.source.find(source_words, -1), len(aligner.null_source) - 1)
        target_ids = np.append(aligner.lexicon.target.find(target_words, -1), len(aligner.null_target) - 1)
        batches = []
        for group in groups:
            batches.append(
                SentenceBatch(
                    rows=group,
                    pairs_BST=np.searchsorted(codes_P, encode(group)).astype(np.int32),
                    source_BS=source_ids[pad_rows(source_index, group)],
                    target_BT=target_ids[pad_rows(target_index, group)],
                    source_length_B=np.array([len(source_index[row]) for row in group]),
                    target_length_B=np.array([len(target_index[row]) for row in group]),
                )
            )
            bar.update()
    return batches, WordPairs(aligner.lexicon, source_words, target_words, codes_P)


def check_memory(word_pairs: int, cells: int) -> None:
    """Raise a `UserError` if the index of a corpus is larger than the memory of the machine, where that is known."""
    names = "SC_PAGE_SIZE", "SC_PHYS_PAGES"
    needed = cells * BYTES_PER_CELL + word_pairs * BYTES_PER_WORD_PAIR
    if set(names) <= getattr(os, "sysconf_names", {}).keys() and needed > math.prod(map(os.sysconf, names)):
        raise UserError(
            f"the text needs {needed / 1e9:,.0f} GB of memory, more than there is; align the lines in parts"
        )


def number_words(sentences: Sentences) -> tuple[list[Ids], list[str]]:
    """Return the index of each word of each sentence, and the different words, normalized."""
    index: dict[str, int] = {}
    numbered = [
        np.array([index.setdefault(normalize_word(word), len(index)) for word in words], np.int64)
        for words in sentences
    ]
    return numbered, list(index)


def group_rows(rows: Sequence[int], sources: Sequence[Ids], targets: Sequence[Ids]) -> Iterator[list[int]]:
    """Group rows, sorted by source length, into batches of up to `CELLS_PER_BATCH` pairs of words, padding included."""
    group: list[int] = []
    longest_target = 0
    for row in rows:
        longest_target = max(longest_target, len(targets[row]))
        if group and (len(group) + 1) * len(sources[row]) * longest_target > CELLS_PER_BATCH:
            yield group
            group, longest_target = [], len(targets[row])
        group.append(row)
    if group:
        yield group


def pad_rows(index: Sequence[Ids], rows: Sequence[int]) -> Ids:
    """Return the words of some rows, -1 at padding."""
    padded = np.full((len(rows), max(len(index[row]) for row in rows)), -1, np.int64)
    for words, row in zip(padded, rows, strict=True):
        words[: len(index[row])] = index[row]
    return padded


def align_sentences(aligner: Aligner, sources: Sentences, targets: Sentences) -> list[np.ndarray | None]:
    """Return weights_TS of the words of each sentence pair: the geometric mean of the posteriors of both directions.

    None stands for a pair of more than `MAX_CELLS` pairs of words.
    """
    weights: list[np.ndarray | None] = [
        np.zeros((len(target), len(source)), np.float32) if len(source) * len(target) <= MAX_CELLS else None
        for source, target in zip(sources, targets, strict=True)
    ]
    batches, pairs = index_corpus(aligner, sources, targets)
    for batch, forward, backward in infer_both(aligner, batches, pairs, is_hmm=True):
        mean_BTS = np.sqrt(forward.links_BTS * backward.links_BTS.transpose(0, 2, 1))
        for row, mean_TS, source, target in zip(
            batch.rows, mean_BTS, batch.source_length_B, batch.target_length_B, strict=True
        ):
            weights[row] = mean_TS[:target, :source]
    return weights
