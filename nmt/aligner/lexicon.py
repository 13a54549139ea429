"""The probability of a target word given a source word, with back-off from words to shorter and shorter prefixes.

Half of the words of a small corpus occur once. What their inflected forms have in common is mostly a prefix, so counts
of links are kept for prefixes of several lengths. With c_k, the number of links between two prefixes of length k, and
s_k and t_k, the prefixes of words s and t:

    p_k(t_k | s_k) = (c_k(s_k, t_k) + m share_k(t) p_{k-1}(t_{k-1} | s_{k-1})) / (c_k(s_k) + m)

share_k(t) is how often t_k occurs for each occurrence of t_{k-1}, and m = BACKOFF the weight of the shorter prefixes,
in links (a Dirichlet prior; MacKay and Peto 1995). The longest prefix is the word itself. The shortest ones back off to
their frequency in the text, but hardly: frequent words would attract links otherwise.

Before training each pair of words that occur together counts as linked once, so a word is linked to each of its
partners with about the same probability. Pairs of punctuation and a word have less. Otherwise the comma before a
relative clause would be linked to a relative pronoun of a language that writes no comma there.

Shapes: P pairs of words that occur in a sentence pair together.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex

from nmt.data.word_links import Sentences
from nmt.data.words import FORMAT_CHARACTERS

Ids = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]  # where there are as many as pairs of words
Values = npt.NDArray[np.float64]

PREFIX_LENGTHS = (3, 4, 5, 6, None)  # in characters; None: the whole word
BACKOFF = 30.0
BASE_BACKOFF = 0.01  # in place of BACKOFF for the shortest prefixes
IDENTICAL_LINKS = 1.0  # added to the links between two equal words: names, numbers, punctuation
MIXED_PRIOR = 0.1  # before training: probability of links between punctuation and a word, relative to that of others
PUNCTUATION = regex.compile(r"\p{P}+")


@lru_cache(2**18)
def normalize_word(word: str) -> str:
    """Return a word as the lexicon knows it: case folded, without invisible characters and punctuation around it.

    What is nothing else stays. Composed and decomposed characters (NFC and NFD) are the same.
    """
    folded = unicodedata.normalize("NFKC", word).casefold().replace("i\u0307", "i")  # i with a dot: of Turkish İ
    normal = FORMAT_CHARACTERS.sub("", folded) or word
    start, end = 0, len(normal)
    while start < end and PUNCTUATION.match(normal[start]):
        start += 1
    while end > start and PUNCTUATION.match(normal[end - 1]):
        end -= 1
    return normal[start:end] or normal


class Vocabulary:
    """The words of one side, as returned by `normalize_word`, and their prefixes of each length."""

    def __init__(self, sentences: Sentences) -> None:
        words = [normalize_word(word) for sentence in sentences for word in sentence]
        self.counts = [Counter(word[:length] for word in words) for length in PREFIX_LENGTHS]  # of each prefix
        self.prefix_ids = [{prefix: index for index, prefix in enumerate(counts)} for counts in self.counts]

    def find(self, words: Sequence[str], level: int) -> Ids:
        """Return the id of each word's prefix; unknown prefixes share the first unused id."""
        ids, length = self.prefix_ids[level], PREFIX_LENGTHS[level]
        return np.array([ids.get(word[:length], len(ids)) for word in words], np.int64)

    def shares(self, level: int) -> Values:
        """Return how often each prefix occurs for each occurrence of the next shorter one, or of any word.

        Each prefix, and those that are unknown together, count as seen once more.
        """
        occurrences = np.array([*self.counts[level].values(), 0], np.float64) + 1
        if not level:
            return occurrences / occurrences.sum()
        shorter, length = self.prefix_ids[level - 1], PREFIX_LENGTHS[level - 1]
        parents = np.array([*(shorter[prefix[:length]] for prefix in self.prefix_ids[level]), len(shorter)], np.int64)
        return occurrences / np.bincount(parents, occurrences)[parents]


@dataclass(slots=True)
class LinkTable:
    """Links counted between the prefixes of one length.

    Words that both vocabularies have, such as names and numbers, count as linked `IDENTICAL_LINKS` times more. These
    links are in the sums only.
    """

    codes: Ids  # of pairs of prefixes, sorted: source id x (target prefixes + 1) + target id
    links: Values
    source_sums: Values  # links of each source prefix
    target_sums: Values

    def find(self, codes: Ids) -> Values:
        """Return the links of some pairs; 0 for those that are not in the table."""
        if codes is self.codes:  # in training
            return self.links
        if not len(self.codes):
            return np.zeros(len(codes))
        place = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return self.links[place] * (self.codes[place] == codes)


class Lexicon:
    """Counts of links between words, which both directions share."""

    def __init__(self, source: Vocabulary, target: Vocabulary) -> None:
        self.source = source
        self.target = target
        levels = range(len(PREFIX_LENGTHS))
        self.shares = [(source.shares(level), target.shares(level)) for level in levels]
        self.identical = [self.find_identical(level) for level in levels]
        self.tables: list[LinkTable] = []  # for each prefix length; none before training

    def find_identical(self, level: int) -> tuple[Ids, Values]:
        """Return the target prefix that equals each source prefix, or -1, and the links added between the two."""
        length, source_ids, target_ids = PREFIX_LENGTHS[level], self.source.prefix_ids, self.target.prefix_ids
        target_S = np.full(len(source_ids[level]) + 1, -1)  # last: unknown
        links_S = np.zeros(len(target_S))
        for word in source_ids[-1].keys() & target_ids[-1].keys():
            target_S[source_ids[level][word[:length]]] = target_ids[level][word[:length]]
            links_S[source_ids[level][word[:length]]] += IDENTICAL_LINKS
        return target_S, links_S

    def find_links(self, pairs: "PrefixPairs", level: int) -> Values:
        """Return the links of pairs of prefixes, those added to identical words included."""
        links_Q = self.tables[level].find(pairs.codes_Q)
        target_S, added_S = self.identical[level]
        added_Q = added_S[pairs.source_ids][pairs.source_Q]
        added_Q *= target_S[pairs.source_ids][pairs.source_Q] == pairs.target_ids[pairs.target_Q]
        return links_Q + added_Q

    def sum_links(self, level: int, codes: Ids, links: Values) -> LinkTable:
        """Return a table with the links of each source prefix and of each target prefix."""
        target_S, links_S = self.identical[level]
        source_ids, target_ids = np.divmod(codes, len(self.target.prefix_ids[level]) + 1)
        source_sums = np.bincount(source_ids, links, len(links_S)) + links_S
        target_sums = np.zeros(len(self.target.prefix_ids[level]) + 1)
        target_sums[target_S[target_S >= 0]] = links_S[target_S >= 0]
        target_sums += np.bincount(target_ids, links, len(target_sums))
        return LinkTable(codes, links, source_sums, target_sums)


@dataclass(slots=True)
class PrefixPairs:
    """The different pairs of prefixes of one length among the pairs of words of a text. Q: their number."""

    source_Q: Indices  # of the prefix among those of the text
    target_Q: Indices
    source_ids: Ids  # of each prefix of the text in the vocabulary; those that it does not have share the last one
    target_ids: Ids
    codes_Q: Ids  # as in `LinkTable`
    parent_Q: Indices  # index of the pair of next shorter prefixes; empty for the shortest


class WordPairs:
    """The pairs of words that occur together in some sentences, and their probabilities under a lexicon.

    Args:
        source_words, target_words: the different words of each side, normalized.
        codes_P: the pairs, sorted: source index x number of target words + target index.
    """

    def __init__(
        self, lexicon: Lexicon, source_words: Sequence[str], target_words: Sequence[str], codes_P: Ids
    ) -> None:
        self.lexicon = lexicon
        source_P, target_P = split_codes(codes_P, len(target_words))
        is_punctuation = [
            np.array([PUNCTUATION.fullmatch(word) is not None for word in words], bool)
            for words in (source_words, target_words)
        ]
        self.is_mixed_P = is_punctuation[0][source_P] != is_punctuation[1][target_P]
        # Equal words that the vocabularies do not have are linked as if they were there once.
        index_of_word = {word: index for index, word in enumerate(source_words)}
        equal_word = np.array([index_of_word.get(word, -1) for word in target_words], np.int64)
        is_unknown = lexicon.source.find(source_words, -1) == len(lexicon.source.prefix_ids[-1])
        self.unknown_pairs = np.flatnonzero((equal_word[target_P] == source_P) & is_unknown[source_P])
        self.levels: list[PrefixPairs] = []
        for level in reversed(range(len(PREFIX_LENGTHS))):
            source_ids, target_ids = lexicon.source.find(source_words, level), lexicon.target.find(target_words, level)
            codes_Q = source_ids[source_P] * (len(lexicon.target.prefix_ids[level]) + 1) + target_ids[target_P]
            pairs = PrefixPairs(source_P, target_P, source_ids, target_ids, codes_Q, np.zeros(0, np.int32))
            self.levels.insert(0, pairs)
            if level:
                source_parents, source_words = shorten(source_words, level - 1)
                target_parents, target_words = shorten(target_words, level - 1)
                parent_codes_P = source_parents[source_P] * len(target_words) + target_parents[target_P]
                codes_P = sort_unique(parent_codes_P)
                pairs.parent_Q = np.searchsorted(codes_P, parent_codes_P).astype(np.int32)
                source_P, target_P = split_codes(codes_P, len(target_words))

    def count_links(self, links_Q: Values) -> None:
        """Replace the tables of the lexicon by these links of each pair of words, for prefixes of all lengths."""
        tables: list[LinkTable] = []
        for level, pairs in reversed(list(enumerate(self.levels))):
            tables.insert(0, self.lexicon.sum_links(level, pairs.codes_Q, links_Q))
            if level:
                links_Q = np.bincount(pairs.parent_Q, links_Q, len(self.levels[level - 1].codes_Q)).astype(np.float64)
        self.lexicon.tables = tables

    def probabilities(self) -> tuple[Values, Values]:
        """Return p(target | source) and p(source | target) of each pair of words."""
        forward_Q = backward_Q = np.zeros(0)
        for level, pairs in enumerate(self.levels):
            weight = BACKOFF if level else BASE_BACKOFF
            source_share, target_share = self.lexicon.shares[level]
            if self.lexicon.tables:
                links_Q = self.lexicon.find_links(pairs, level)
                table = self.lexicon.tables[level]
                source_links, target_links = table.source_sums[pairs.source_ids], table.target_sums[pairs.target_ids]
            else:  # before training: one for each pair
                links_Q = np.ones(len(pairs.codes_Q))
                source_links, target_links = (
                    np.bincount(index_Q).astype(np.float64) for index_Q in (pairs.source_Q, pairs.target_Q)
                )
            shorter = (forward_Q[pairs.parent_Q], backward_Q[pairs.parent_Q]) if level else (1.0, 1.0)
            forward_Q = links_Q + (weight * target_share[pairs.target_ids])[pairs.target_Q] * shorter[0]
            forward_Q /= (source_links + weight)[pairs.source_Q]
            backward_Q = links_Q + (weight * source_share[pairs.source_ids])[pairs.source_Q] * shorter[1]
            backward_Q /= (target_links + weight)[pairs.target_Q]
        for values_P in (forward_Q, backward_Q):
            if not self.lexicon.tables:
                values_P[self.is_mixed_P] *= MIXED_PRIOR
            values_P[self.unknown_pairs] += IDENTICAL_LINKS / BACKOFF
        return forward_Q, backward_Q


def split_codes(codes: Ids, targets: int) -> tuple[Indices, Indices]:
    """Return the source index and the target index of codes of pairs."""
    source, target = np.divmod(codes, max(targets, 1))
    return source.astype(np.int32), target.astype(np.int32)


def sort_unique(codes: Ids) -> Ids:
    """Return the different codes, sorted, as does `np.unique`, which hashes and takes several times as long."""
    ordered = np.sort(codes, axis=None)
    return ordered[np.concatenate([ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1]])]


def shorten(prefixes: Sequence[str], level: int) -> tuple[Ids, list[str]]:
    """Return the index of each prefix's shorter prefix, and the different shorter prefixes."""
    index: dict[str, int] = {}
    parents = [index.setdefault(prefix[: PREFIX_LENGTHS[level]], len(index)) for prefix in prefixes]
    return np.array(parents, np.int64), list(index)
