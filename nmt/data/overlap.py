"""Find sentences of one text that occur in another, exactly or with one word changed.

Sentences are compared as lists of normalized words, so case, punctuation and white space do not count. Two sentences
are nearly the same if one word was replaced, inserted or deleted, and the longer has at least `MIN_WORDS` and at most
`MAX_WORDS`. Every such pair is found: they have a key in common, which is a sentence without one of its words.
"""

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import regex

from nmt.config import SIDES, DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.words import UNSPACED_CHARACTER, may_be_unspaced
from nmt.errors import UserError
from nmt.system.messages import clip_repr

log = logging.getLogger("nmt")
MIN_WORDS = 3  # of the longer of two nearly equal sentences; with fewer words, most are one word apart
MAX_WORDS = 200  # longer sentences are only compared as they are
GAP = "-"  # never a word beside others
UNSEEN, NEAR, EXACT = 0, 1, 2  # how a sentence occurs in the other text
WORD = regex.compile(r"\w+")  # letters with their marks, digits and underscores
WORD_OR_UNSPACED = regex.compile(rf"{UNSPACED_CHARACTER}\p{{M}}*|(?:(?!{UNSPACED_CHARACTER})\w)+")


def normalize_words(text: str) -> list[str]:
    """Return the words of a sentence without case and punctuation, each character of a script without spaces as one.

    A sentence of punctuation only is a single word.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    if not folded.isascii():
        folded = unicodedata.normalize("NFKC", folded)  # folding may leave marks that can be composed
    pattern = WORD_OR_UNSPACED if may_be_unspaced(folded) else WORD
    return pattern.findall(folded) or list(filter(None, ["".join(folded.split())]))


def make_keys(text: str) -> tuple[str, set[str], set[str]]:
    """Return a sentence, and what it has in common with those that are nearly the same.

    These are the sentence without one of its words, and with a gap in the place of one. A sentence without words is
    empty: it tells nothing about where it comes from.
    """
    words = normalize_words(text)
    places = range(len(words)) if MIN_WORDS <= len(words) <= MAX_WORDS else ()
    shortened = {" ".join(words[:place] + words[place + 1 :]) for place in places}
    return " ".join(words), shortened, {" ".join([*words[:place], GAP, *words[place + 1 :]]) for place in places}


class OverlapIndex:
    """The sentences of one text, usually a small one, to be found in other text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.same: set[str] = set()
        self.near: set[str] = set()  # without a word of theirs, or with a gap in its place
        for whole, shortened, replaced in map(make_keys, texts):
            self.same.add(whole)
            self.near |= shortened | replaced
        self.same.discard("")

    def find(self, texts: Sequence[str]) -> npt.NDArray[np.int8]:
        """Return how each sentence occurs in the index: `UNSEEN`, `NEAR` or `EXACT`."""
        found_N = np.full(len(texts), UNSEEN, np.int8)
        for number, (whole, shortened, replaced) in enumerate(map(make_keys, texts)):
            if whole in self.same:
                found_N[number] = EXACT
            elif self.near & {whole, *replaced} or self.same & shortened:
                found_N[number] = NEAR
        return found_N


def warn_of_overlap(data: DataConfig, train: pa.Table, valid: pa.Table) -> None:
    """Warn if the very same sentences are in the training text and in the validation or test split."""
    splits = {"valid": valid}
    with suppress(UserError):  # there may be no test split
        splits["test"] = load_pairs(data, "test")
    for split, pairs in splits.items():
        is_common = pa.array(np.zeros(len(pairs), bool))
        examples: list[str] = []
        for side in SIDES:
            held_out = pairs[side].combine_chunks()
            common = train[side].filter(pc.is_in(train[side], value_set=held_out)).unique()
            common = common.filter(pc.not_equal(common, ""))
            is_common = pc.or_(is_common, pc.is_in(held_out, value_set=common))
            examples += common[:1].to_pylist()
        if examples:
            log.warning(
                f"{pc.sum(is_common).as_py():,} of {len(pairs):,} pairs of the split {split} have a source or target "
                f"that is also in the training text, such as {clip_repr(examples[0])}; scores on these pairs measure "
                "memorization. nmt.prepare makes splits without them"
            )
