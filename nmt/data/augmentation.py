"""Random changes of training pairs, which make a model translate what its training text has too little of.

Both sides of a pair are changed alike, but letter case on the source side only: whoever writes in lowercase wants a
translation as good as any. Links are positions of words that translate each other, with no other word between them:
(source start, source end, target start, target end), in characters.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from nmt.config import AugmentConfig
from nmt.data.letter_case import to_lower, to_title
from nmt.data.literals import PATTERNS, find_literals
from nmt.data.tokenizer import FIRST_LITERAL_PIECE

MAX_REPLACED = 3  # words of a pair that literal pieces replace
ENCLOSED = 0.5  # share of these words that are enclosed instead
MAX_DIGITS = 8  # of a number in place of a word
FINAL_MARKS = ".!?。．！？؟۔।॥…"
DIGIT = regex.compile(r"\d")
Link = tuple[int, int, int, int]


class Edit(NamedTuple):
    """New text for a link."""

    link: Link
    source: str
    target: str


class PairLinks(NamedTuple):
    """The links of all pairs of a corpus."""

    links: npt.NDArray[np.int32]  # of all pairs one after the other, shape (links, 4)
    offsets: npt.NDArray[np.int64]  # pair i has links[offsets[i] : offsets[i + 1]]

    @classmethod
    def build(cls, links: Sequence[Sequence[Link]]) -> "PairLinks":
        offsets = np.append(0, np.cumsum([len(pair) for pair in links])).astype(np.int64)
        return cls(np.array([link for pair in links for link in pair], np.int32).reshape(-1, 4), offsets)

    def of_pair(self, row: int) -> list[Link]:
        return [tuple(link) for link in self.links[self.offsets[row] : self.offsets[row + 1]].tolist()]


class Augmenter(NamedTuple):
    """What changes of pairs need to know."""

    config: AugmentConfig
    literal_pieces: int  # of the tokenizer
    language: str  # code of the source
    links: PairLinks
    names: Sequence[str]  # of the corpus; see `find_names`
    tags: Sequence[str]  # of `data.corpora`, each with the space after it; they stay as they are


def find_names(sources: Iterable[str], targets: Iterable[str], links: PairLinks) -> list[str]:
    """Return the names in a corpus, each once: words that are the same on both sides."""
    names = {
        source[link[0] : link[1]]: None
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
        for link in links.of_pair(row)
        if is_shared_name(source, target, link)
    }
    return list(names)


def split_tag(source: str, tags: Sequence[str]) -> tuple[str, str]:
    """Return the tag of a source, empty if it has none, and the rest."""
    tag = next((tag for tag in tags if source.startswith(tag)), "")
    return tag, source[len(tag) :]


def augment_pair(
    source: str, target: str, links: Sequence[Link], augmenter: Augmenter, rng: random.Random
) -> list[str]:
    """Return source and target with each change of `augment.*` made at its rate, but `concatenate`."""
    config = augmenter.config
    edits: list[Edit] = []
    if rng.random() < config.literals:
        edits += replace_by_literal_pieces(source, target, links, augmenter.literal_pieces, rng)
    if rng.random() < config.numbers:
        edits += replace_numbers(source, target, links, rng)
    if rng.random() < config.names and augmenter.names:
        edits += replace_names(source, target, links, augmenter.names, rng)
    sides = apply_edits(source, target, edits)
    if rng.random() < config.final_mark:
        sides = remove_final_marks(sides)
    if rng.random() < config.lower_case:
        sides[0] = to_lower(sides[0], augmenter.language)
    elif rng.random() < config.title:
        sides[0] = to_title(sides[0], augmenter.language)
    return sides


def apply_edits(source: str, target: str, edits: Sequence[Edit]) -> list[str]:
    """Return source and target after edits; one that overlaps an earlier one is not made."""
    made: list[Edit] = []
    for edit in edits:
        if not any(overlap(edit.link, other.link) for other in made):
            made.append(edit)
    for edit in sorted(made, key=lambda edit: -edit.link[0]):
        source = source[: edit.link[0]] + edit.source + source[edit.link[1] :]
    for edit in sorted(made, key=lambda edit: -edit.link[2]):
        target = target[: edit.link[2]] + edit.target + target[edit.link[3] :]
    return [source, target]


def overlap(a: Link, b: Link) -> bool:
    """Return whether two links have a character of either side in common."""
    return (a[0] < b[1] and b[0] < a[1]) or (a[2] < b[3] and b[2] < a[3])


def find_shared_literals(source: str, target: str, kinds: Sequence[str] = tuple(PATTERNS)) -> list[Link]:
    """Return links of the literals of these kinds that both sides have exactly once."""
    found = [[literal for literal in find_literals(text) if literal.kind in kinds] for text in (source, target)]
    counts = [Counter((literal.kind, literal.text) for literal in literals) for literals in found]
    return [
        (literal.start, literal.end, other.start, other.end)
        for literal in found[0]
        for other in found[1]
        if literal[:2] == other[:2] and counts[0][literal[:2]] == counts[1][literal[:2]] == 1
    ]


def replace_by_literal_pieces(
    source: str, target: str, links: Sequence[Link], pieces: int, rng: random.Random
) -> list[Edit]:
    """Replace literals that both sides have, and some linked words, by different literal pieces.

    One of two linked words stays, between two pieces, as between the tags `<b>` and `</b>`.
    """
    shared = find_shared_literals(source, target)
    others = [link for link in links if not any(overlap(link, literal) for literal in shared)]
    wanted = min(rng.randint(1, MAX_REPLACED), len(others) + len(shared), pieces)
    chosen = [*shared, *rng.sample(others, min(len(others), max(0, wanted - len(shared))))][:pieces]
    symbols = [chr(FIRST_LITERAL_PIECE + i) for i in rng.sample(range(pieces), pieces)]
    edits = []
    for link in chosen:
        if len(symbols) >= 2 and link in others and rng.random() < ENCLOSED:
            before, after = symbols.pop(), symbols.pop()
            words = source[link[0] : link[1]], target[link[2] : link[3]]
            edits.append(Edit(link, *(f"{before}{word}{after}" for word in words)))
        elif symbols:
            edits.append(Edit(link, *[symbols.pop()] * 2))
    return edits


def replace_numbers(source: str, target: str, links: Sequence[Link], rng: random.Random) -> list[Edit]:
    """Replace the digits of numbers that both sides have; without such a number, replace a linked word by one."""
    edits = []
    for link in find_shared_literals(source, target, ["numbers"]):
        old = source[link[0] : link[1]], target[link[2] : link[3]]
        digits = draw_digits(len(DIGIT.findall(old[0])), rng)
        edits.append(Edit(link, *(replace_digits(text, digits) for text in old)))
    if not edits and links:
        number = draw_digits(rng.randint(1, MAX_DIGITS), rng)
        edits.append(Edit(rng.choice(links), number, number))
    return edits


def draw_digits(count: int, rng: random.Random) -> str:
    """Return random digits, the first of them not zero."""
    return str(rng.randint(10 ** (count - 1), 10**count - 1))


def replace_digits(text: str, digits: str) -> str:
    """Replace the digits of a text one by one, and keep what is between them."""
    new = iter(digits)
    return DIGIT.sub(lambda _: next(new), text)


def replace_names(
    source: str, target: str, links: Sequence[Link], names: Sequence[str], rng: random.Random
) -> list[Edit]:
    """Replace each name by another one of the corpus, or an invented one."""
    replacements: dict[str, str] = {}
    edits = []
    for link in links:
        if is_shared_name(source, target, link):
            new = replacements.setdefault(source[link[0] : link[1]], draw_name(names, rng))
            edits.append(Edit(link, new, new))
    return edits


def draw_name(names: Sequence[str], rng: random.Random) -> str:
    """Return a name, or one invented from the beginning of a name and the end of another."""
    first, second = rng.choice(names), rng.choice(names)
    return first[: rng.randint(min(2, len(first)), len(first))] + second[rng.randint(1, len(second)) :]


def is_shared_name(source: str, target: str, link: Link) -> bool:
    """Return whether linked words may be a name: the same letters on both sides, only the first of them a capital."""
    word = source[link[0] : link[1]]
    return word == target[link[2] : link[3]] and word.isalpha() and word.istitle()


def remove_final_marks(sides: list[str]) -> list[str]:
    """Remove the marks at the ends of both sides, if both have one."""
    if all(text[-1:] in FINAL_MARKS and text[-2:-1] not in FINAL_MARKS for text in sides):
        return [text[:-1].rstrip() for text in sides]
    return sides
