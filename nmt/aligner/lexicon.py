"""The probability of a target word given a source word, with back-off from words to shorter and shorter prefixes.

Half of the words of a small corpus occur once. What their inflected forms have in common is mostly a prefix, so counts
of links are kept for prefixes of several lengths. With c_k, the number of links between two prefixes of length k, and
s_k and t_k, the prefixes of words s and t:

    p_k(t_k | s_k) = (c_k(s_k, t_k) + m share_k(t) p_{k-1}(t_{k-1} | s_{k-1})) / (c_k(s_k) + m)

share_k(t) is how often t_k occurs for each occurrence of t_{k-1}, and m = BACKOFF the weight of the shorter prefixes,
in links (a Dirichlet prior; MacKay and Peto 1995). The longest prefix is the word itself. The shortest ones back off to
their frequency in the text, but hardly: frequent words would attract links otherwise.

Before training all pairs of words are equally probable, except pairs of punctuation and a word. Otherwise the comma
before a relative clause would be linked to a relative pronoun of a language that writes no comma there.

Shapes: P pairs of words that occur in a sentence pair together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex

from nmt.data.words import FORMAT_CHARACTERS

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

PREFIX_LENGTHS = (3, 4, 5, 6, None)  # in characters; None: the whole word
BACKOFF = 30.0
BASE_BACKOFF = 0.01  # in place of BACKOFF for the shortest prefixes
IDENTICAL_LINKS = 1.0  # added to the links between two equal words: names, numbers, punctuation
MIXED_PRIOR = 0.1  # before training: probability of links between punctuation and a word, relative to that of others
PUNCTUATION = regex.compile(r"\p{P}+")


@lru_cache(2**18)
def normalize_word(word: str) -> str:
    """Return a word as the lexicon knows it: in lower case, without invisible characters and punctuation around it.

    What is nothing else stays.
    """
    normal = FORMAT_CHARACTERS.sub("", word.lower()) or word
    start, end = 0, len(normal)
    while start < end and PUNCTUATION.match(normal[start]):
        start += 1
    while end > start and PUNCTUATION.match(normal[end - 1]):
        end -= 1
    return normal[start:end] or normal


@dataclass(slots=True)
class Vocabulary:
    """The words of one side, as returned by `normalize_word`, and their prefixes of each length."""

    prefix_ids: list[dict[str, int]] = field(default_factory=lambda: [{} for _ in PREFIX_LENGTHS])
    counts: list[list[int]] = field(default_factory=lambda: [[] for _ in PREFIX_LENGTHS])  # occurrences of each prefix

    def add(self, words: Iterable[str]) -> None:
        """Count normalized words."""
        for word in words:
            for length, ids, counts in zip(PREFIX_LENGTHS, self.prefix_ids, self.counts, strict=True):
                prefix = word[:length]
                if prefix not in ids:
                    ids[prefix] = len(ids)
                    counts.append(0)
                counts[ids[prefix]] += 1

    def find(self, words: Sequence[str], level: int) -> Ids:
        """Return the id of each word's prefix; unknown prefixes share the first unused id."""
        ids, length = self.prefix_ids[level], PREFIX_LENGTHS[level]
        return np.array([ids.get(word[:length], len(ids)) for word in words], np.int64)

    def shares(self, level: int) -> Values:
        """Return how often each prefix occurs for each occurrence of the next shorter one, or of any word.

        Each prefix, and those that are unknown together, count as seen once more.
        """
        occurrences = np.array([*self.counts[level], 0], np.float64) + 1
        if not level:
            return occurrences / occurrences.sum()
        parents = self.parents(level)
        return occurrences / np.bincount(parents, occurrences)[parents]

    def parents(self, level: int) -> Ids:
        """Return the id of the next shorter prefix of each prefix, and an unused id for those that are unknown."""
        shorter, length = self.prefix_ids[level - 1], PREFIX_LENGTHS[level - 1]
        return np.array([*(shorter[prefix[:length]] for prefix in self.prefix_ids[level]), len(shorter)], np.int64)


@dataclass(slots=True)
class LinkTable:
    """Links counted between the prefixes of one length."""

    codes: Ids  # of pairs of prefixes, sorted: source id x (target prefixes + 1) + target id
    links: Values

    def find(self, codes: Ids) -> Values:
        """Return the links of some pairs; 0 for those that are not in the table."""
        if not len(self.codes):
            return np.zeros(len(codes))
        place = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return self.links[place] * (self.codes[place] == codes)


class Lexicon:
    """Counts of links between words, which both directions share.

    Words that both vocabularies have, such as names and numbers, count as linked `IDENTICAL_LINKS` times more. These
    links are not in the tables.
    """

    def __init__(self, source: Vocabulary, target: Vocabulary) -> None:
        self.source = source
        self.target = target
        self.tables: list[LinkTable] = []  # for each prefix length; none before training
        self.identical = [self.find_identical(level) for level in range(len(PREFIX_LENGTHS))]

    def find_identical(self, level: int) -> tuple[Ids, Values]:
        """Return the target prefix that equals each source prefix, or -1, and the links added between the two."""
        length, source_ids, target_ids = PREFIX_LENGTHS[level], self.source.prefix_ids, self.target.prefix_ids
        target_S = np.full(len(source_ids[level]) + 1, -1)  # last: unknown
        links_S = np.zeros(len(target_S))
        for word in source_ids[-1]:
            if word in target_ids[-1]:
                target_S[source_ids[level][word[:length]]] = target_ids[level][word[:length]]
                links_S[source_ids[level][word[:length]]] += IDENTICAL_LINKS
        return target_S, links_S

    def find_links(self, pairs: "PrefixPairs", level: int) -> Values:
        """Return the links of pairs of prefixes, those added to identical words included."""
        target_S, links_S = self.identical[level]
        is_identical_Q = target_S[pairs.source_Q] == pairs.target_Q
        return self.tables[level].find(pairs.codes_Q) + links_S[pairs.source_Q] * is_identical_Q

    def sum_links(self, level: int) -> tuple[Values, Values]:
        """Return the links of each source prefix and of each target prefix, those added included."""
        table, (target_S, links_S) = self.tables[level], self.identical[level]
        source_ids, target_ids = np.divmod(table.codes, len(self.target.prefix_ids[level]) + 1)
        source_links = np.bincount(source_ids, table.links, len(links_S)) + links_S
        target_links = np.zeros(len(self.target.prefix_ids[level]) + 1)
        target_links[target_S[target_S >= 0]] = links_S[target_S >= 0]
        target_links += np.bincount(target_ids, table.links, len(target_links))
        return source_links, target_links

    def encode_pairs(self, source_ids: Ids, target_ids: Ids, level: int) -> Ids:
        return source_ids * (len(self.target.prefix_ids[level]) + 1) + target_ids

    def list_links(self) -> Iterator[tuple[str, str, float]]:
        """Yield pairs of words with their expected number of links in the training text, most links first."""
        words = list(self.source.prefix_ids[-1]), list(self.target.prefix_ids[-1])
        table = self.tables[-1]
        source_ids, target_ids = np.divmod(table.codes, len(words[1]) + 1)
        for row in np.argsort(-table.links, kind="stable").tolist():
            yield words[0][source_ids[row]], words[1][target_ids[row]], float(table.links[row])


@dataclass(slots=True)
class PrefixPairs:
    """The different pairs of prefixes of one length among the pairs of words. Q: their number."""

    codes_Q: Ids
    index_P: Ids  # of each pair of words
    source_Q: Ids  # prefix ids
    target_Q: Ids
    parent_Q: Ids  # index of the pair of shorter prefixes; empty for the shortest
    source_share_Q: Values  # of the source prefix in occurrences of the next shorter one
    target_share_Q: Values


class WordPairs:
    """The pairs of words that occur together in some sentences, and their probabilities under a lexicon.

    Args:
        source_words, target_words: the different words of each side, normalized.
        codes_P: the pairs: source index x number of target words + target index.
    """

    def __init__(
        self, lexicon: Lexicon, source_words: Sequence[str], target_words: Sequence[str], codes_P: Ids
    ) -> None:
        self.lexicon = lexicon
        source_P, target_P = np.divmod(codes_P, len(target_words))
        index_of_word = {word: index for index, word in enumerate(source_words)}
        equal_word = np.array([index_of_word.get(word, -1) for word in target_words], np.int64)
        # Equal words that the vocabularies do not have are linked as if they were there once.
        is_unknown = lexicon.source.find(source_words, -1) == len(lexicon.source.prefix_ids[-1])
        is_punctuation = [
            np.array([PUNCTUATION.fullmatch(word) is not None for word in words], bool)
            for words in (source_words, target_words)
        ]
        is_mixed_P = is_punctuation[0][source_P] != is_punctuation[1][target_P]
        self.prior_P = np.where(is_mixed_P, MIXED_PRIOR, 1.0)
        self.bonus_P = (equal_word[target_P] == source_P) * is_unknown[source_P] * (IDENTICAL_LINKS / BACKOFF)
        self.levels: list[PrefixPairs] = []
        for level in range(len(PREFIX_LENGTHS)):
            source_prefix_P = lexicon.source.find(source_words, level)[source_P]
            target_prefix_P = lexicon.target.find(target_words, level)[target_P]
            codes_Q, first_Q, index_P = np.unique(
                lexicon.encode_pairs(source_prefix_P, target_prefix_P, level), return_index=True, return_inverse=True
            )
            self.levels.append(
                PrefixPairs(
                    codes_Q=codes_Q,
                    index_P=index_P,
                    source_Q=source_prefix_P[first_Q],
                    target_Q=target_prefix_P[first_Q],
                    parent_Q=self.levels[-1].index_P[first_Q] if self.levels else np.zeros(0, np.int64),
                    source_share_Q=lexicon.source.shares(level)[source_prefix_P[first_Q]],
                    target_share_Q=lexicon.target.shares(level)[target_prefix_P[first_Q]],
                )
            )

    def count_links(self, links_P: Values) -> list[LinkTable]:
        """Return the tables of the links between words, for prefixes of all lengths."""
        return [
            LinkTable(pairs.codes_Q, np.bincount(pairs.index_P, links_P, len(pairs.codes_Q)).astype(np.float64))
            for pairs in self.levels
        ]

    def probabilities(self) -> tuple[Values, Values]:
        """Return p(target | source) and p(source | target) of each pair of words."""
        source, target = self.lexicon.source, self.lexicon.target
        forward_Q = backward_Q = np.zeros(0)
        for level, pairs in enumerate(self.levels):
            if self.lexicon.tables:
                links_Q = self.lexicon.find_links(pairs, level)
                source_links, target_links = self.lexicon.sum_links(level)
            else:  # before training: the same for all pairs
                links_Q = np.ones(len(pairs.codes_Q))
                source_links = np.bincount(pairs.source_Q, minlength=len(source.counts[level]) + 1).astype(float)
                target_links = np.bincount(pairs.target_Q, minlength=len(target.counts[level]) + 1).astype(float)
            if level:
                forward_Q, backward_Q = forward_Q[pairs.parent_Q], backward_Q[pairs.parent_Q]
            else:
                forward_Q = backward_Q = np.ones(len(links_Q))
            weight = BACKOFF if level else BASE_BACKOFF
            forward_Q = (links_Q + weight * pairs.target_share_Q * forward_Q) / (source_links[pairs.source_Q] + weight)
            backward_Q = (links_Q + weight * pairs.source_share_Q * backward_Q) / (
                target_links[pairs.target_Q] + weight
            )
        index_P = self.levels[-1].index_P
        prior_P = 1.0 if self.lexicon.tables else self.prior_P
        return forward_Q[index_P] * prior_P + self.bonus_P, backward_Q[index_P] * prior_P + self.bonus_P
