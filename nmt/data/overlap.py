"""Find sentences of one text that occur in another, exactly or with one word changed.

Sentences are compared as lists of normalized words, so case, punctuation and white space do not count. Two sentences
are nearly the same if one word was replaced, inserted or deleted, and the longer has at least `MIN_WORDS`. Every such
pair is found: sentences are compared by 64-bit hashes of all words and of all words but one.

Shapes: N sentences, W words of all sentences.
"""

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import regex
from tqdm import tqdm
from xxhash import xxh3_128

from nmt.config import SIDES, DataConfig
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.corpus import READ_BATCH_SIZE, iter_column, load_pairs
from nmt.data.encoding import text_key
from nmt.data.words import UNSPACED_CHARACTER, may_be_unspaced
from nmt.errors import UserError
from nmt.system.messages import clip_repr

log = logging.getLogger("nmt")
OVERLAP_CACHE_VERSION = 2  # of the comparison; part of the cache key
KINDS_FILE = "kinds.npy"
MAX_REMEMBERED_WORDS = 1_000_000
MIN_WORDS = 3  # of the longer of two nearly equal sentences; with fewer words, most are one word apart
UNSEEN, NEAR, EXACT = 0, 1, 2  # how a sentence occurs in the other text
EMPTY = 0  # the hash of a sentence without words, which tells nothing about where it comes from
WORD = regex.compile(r"\w+")  # letters with their marks, digits and underscores
WORD_OR_UNSPACED = regex.compile(rf"{UNSPACED_CHARACTER}\p{{M}}*|(?:(?!{UNSPACED_CHARACTER})\w)+")
BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
INVERSE_BASE = pow(BASE, -1, 2**64)

Hashes = npt.NDArray[np.uint64]


def normalize_words(text: str) -> list[str]:
    """Return the words of a sentence without case and punctuation, each character of a script without spaces as one.

    A sentence of punctuation only is a single word.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    if not folded.isascii():
        folded = unicodedata.normalize("NFKC", folded)  # folding may leave marks that can be composed
    pattern = WORD_OR_UNSPACED if may_be_unspaced(folded) else WORD
    return pattern.findall(folded) or list(filter(None, ["".join(folded.split())]))


class SentenceHashes(NamedTuple):
    """Hashes of sentences. Those with a word left out exist for sentences of at least `MIN_WORDS` words."""

    whole_N: Hashes
    shortened_W: Hashes  # of a sentence without one of its words
    replaced_W: Hashes  # the same, and the position of that word: equal if another word takes its place
    sentence_W: npt.NDArray[np.int64]  # sentence that a word belongs to


class SentenceHasher:
    """Hashes sentences, and remembers the hashes of words."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def __call__(self, texts: Iterable[str]) -> SentenceHashes:
        """Return sum_i h(w_i) b^i of each sentence, modulo 2^64, and the same without its k-th word for each k."""
        sentences = [normalize_words(text) for text in texts]
        lengths_N = np.fromiter(map(len, sentences), np.int64, len(sentences))
        ends_N = lengths_N.cumsum()
        starts_N = ends_N - lengths_N
        total = int(lengths_N.sum())
        values_W = np.fromiter((self.hash_word(word) for words in sentences for word in words), np.uint64, total)
        sentence_W = np.repeat(np.arange(len(sentences)), lengths_N)
        position_W = np.arange(total) - starts_N[sentence_W]
        powers = compute_powers(int(lengths_N.max(initial=0)) + 1)
        sums = np.concatenate([np.zeros(1, np.uint64), (values_W * powers[position_W]).cumsum(dtype=np.uint64)])
        whole_N = sums[ends_N] - sums[starts_N]
        before_W = sums[:-1] - sums[starts_N][sentence_W]
        after_W = sums[ends_N][sentence_W] - sums[1:]
        shortened_W = before_W + after_W * np.uint64(INVERSE_BASE)
        is_long_W = lengths_N[sentence_W] >= MIN_WORDS
        # The length is part of it, as the same words may be left after the k-th of n and of more.
        place_W = (position_W + (lengths_N[sentence_W] << 20)).astype(np.uint64)
        replaced_W = mix(shortened_W ^ mix(place_W))
        return SentenceHashes(whole_N, shortened_W[is_long_W], replaced_W[is_long_W], sentence_W[is_long_W])

    def hash_word(self, word: str) -> int:
        value = self.words.get(word)
        if value is None:
            if len(self.words) == MAX_REMEMBERED_WORDS:
                self.words.clear()
            value = self.words[word] = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
        return value


def compute_powers(count: int) -> Hashes:
    """Return b^0, b^1, ... modulo 2^64."""
    factors = np.full(count, BASE, np.uint64)
    factors[:1] = 1
    return factors.cumprod(dtype=np.uint64)


def mix(x: Hashes) -> Hashes:
    """Spread the bits of 64-bit numbers (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HashIndex:
    """A set of hashes, with a mark for each that was found in other text."""

    def __init__(self, hashes: Hashes) -> None:
        self.unique, self.slot = np.unique(hashes, return_inverse=True)
        self.found = np.zeros(len(self.unique), dtype=bool)

    def find(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return which hashes are in the set, and mark those."""
        if not len(self.unique):
            return np.zeros(len(hashes), dtype=bool)
        slots = np.searchsorted(self.unique, hashes).clip(max=len(self.unique) - 1)
        is_found = self.unique[slots] == hashes
        self.found[slots[is_found]] = True
        return is_found

    def marks(self) -> npt.NDArray[np.bool_]:
        """Return whether each of the hashes that the index was made of has been found."""
        return self.found[self.slot]


class OverlapIndex:
    """The sentences of one text, usually a small one, to be found in other text that is read in parts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.hash = SentenceHasher()
        self.own = self.hash(texts)
        self.same = HashIndex(self.own.whole_N)  # found as a whole
        self.longer = HashIndex(self.own.whole_N)  # found in a sentence that has one word more
        self.shorter = HashIndex(self.own.shortened_W)  # found as a sentence that has one word less
        self.replaced = HashIndex(self.own.replaced_W)  # found with another word in its place

    def find(self, texts: Sequence[str]) -> npt.NDArray[np.int8]:
        """Return how each sentence occurs in the index, `UNSEEN`, `NEAR` or `EXACT`, and mark what was found there."""
        other = self.hash(texts)
        kinds_N = np.zeros(len(other.whole_N), dtype=np.int8)
        kinds_N[self.shorter.find(other.whole_N)] = NEAR
        kinds_N[other.sentence_W[self.longer.find(other.shortened_W)]] = NEAR
        kinds_N[other.sentence_W[self.replaced.find(other.replaced_W)]] = NEAR
        kinds_N[self.same.find(other.whole_N)] = EXACT
        kinds_N[other.whole_N == EMPTY] = UNSEEN
        return kinds_N

    def kinds(self) -> npt.NDArray[np.int8]:
        """Return how each sentence of the index has occurred in the text that was searched so far."""
        kinds_N = np.zeros(len(self.own.whole_N), dtype=np.int8)
        kinds_N[self.longer.marks()] = NEAR
        for index in (self.shorter, self.replaced):
            kinds_N[self.own.sentence_W[index.marks()]] = NEAR
        kinds_N[self.same.marks()] = EXACT
        kinds_N[self.own.whole_N == EMPTY] = UNSEEN
        return kinds_N


def find_overlap(pairs: pa.Table, train: pa.Table, data: DataConfig) -> npt.NDArray[np.int8]:
    """Return how each pair occurs in the training text, by its source or its target: `UNSEEN`, `NEAR` or `EXACT`.

    The result is cached, because reading the training text takes seconds for each 100,000 pairs.
    """
    key = xxh3_128(f"{OVERLAP_CACHE_VERSION} {text_key(pairs)} {text_key(train)}".encode()).hexdigest()

    def fill(part: Path) -> None:
        indices = {side: OverlapIndex(list(iter_column(pairs, side))) for side in SIDES}
        with tqdm(
            total=len(train), desc="comparing with training text", unit=" pairs", leave=False, disable=None
        ) as bar:
            for batch in train.select(SIDES).to_batches(READ_BATCH_SIZE):
                for side, index in indices.items():
                    index.find(batch.column(side).to_pylist())
                bar.update(len(batch))
        np.save(part / KINDS_FILE, np.maximum(*(index.kinds() for index in indices.values())))

    kinds: npt.NDArray[np.int8] = np.load(get_or_build(cache_folder(data) / "overlap" / key, fill) / KINDS_FILE)
    return kinds


def warn_of_overlap(data: DataConfig, train: pa.Table, valid: pa.Table) -> None:
    """Warn if the very same sentences are in the training text and in the validation or test split."""
    splits = {"valid": valid}
    with suppress(UserError):  # there may be no test split
        splits["test"] = load_pairs(data, "test")
    found: dict[str, dict[str, pa.Array]] = {split: {} for split in splits}
    for side in SIDES:
        texts = {split: pa.array(iter_column(pairs, side), pa.string()) for split, pairs in splits.items()}
        held_out = pa.concat_arrays(list(texts.values())).unique()
        common = set[str]()
        for batch in train.select([side]).to_batches(READ_BATCH_SIZE):
            column = batch.column(side).cast(pa.string())
            common.update(column.filter(pc.is_in(column, value_set=held_out)).to_pylist())
        common.discard("")
        for split, column in texts.items():
            found[split][side] = pc.is_in(column, value_set=pa.array(common, pa.string()))
    for split, sides in found.items():
        is_common = pc.or_(*sides.values())
        count = pc.sum(is_common).as_py()
        if not count:
            continue
        row = pc.index(is_common, True).as_py()
        side = next(side for side, found_rows in sides.items() if found_rows[row].as_py())
        log.warning(
            f"{count:,} of {len(is_common):,} pairs of the split {split} have a source or target that is also in the "
            f"training text, such as {clip_repr(splits[split][side][row].as_py())}; scores on these pairs measure "
            "memorization. nmt.evaluate scores them separately, and nmt.prepare makes splits without them"
        )
