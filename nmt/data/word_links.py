"""Word links: text format, gold standards, and symmetrization of two directions.

A link is a pair (source word, target word) of indices from 0.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmt.config import SIDES
from nmt.errors import UserError
from nmt.system.text import TextInput

Link = tuple[int, int]
Sentences = list[list[str]]  # words of each sentence
GOLD_LINK = re.compile(r"(\d{1,9})([-p?])(\d{1,9})", re.ASCII)
NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # (target, source), as in Moses


def format_pharaoh(links: Iterable[Link]) -> str:
    """Format links in Pharaoh format, `source-target` from 0, sorted by source word: `0-0 1-2 2-1`."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


# -------------------------------------------------------------------------------------------------------------- gold
@dataclass(frozen=True, slots=True)
class GoldLinks:
    """Manual alignment of a sentence pair (Och and Ney 2003, section 5).

    Sure links must be found, possible links may be found. Sure links are also possible.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    @classmethod
    def from_pairs(cls, sure: Iterable[Iterable[int]], possible: Iterable[Iterable[int]]) -> "GoldLinks":
        """Create from pairs of word indices; `possible` need not include the sure links."""
        sure_links = frozenset((s, t) for s, t in sure)
        return cls(sure_links, sure_links | {(s, t) for s, t in possible})


def parse_gold_links(line: str, base: int, source_words: int, target_words: int) -> GoldLinks:
    """Parse the gold links of a line: `i-j` is sure, `ipj` or `i?j` possible, for source word i and target word j.

    Args:
        base: index of a sentence's first word, 0 or 1.

    Raises:
        ValueError: an item is not a link, or the index of a word is out of range.
    """
    links: dict[str, list[Link]] = {"-": [], "p": [], "?": []}
    for text in line.split():
        match = GOLD_LINK.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:40]!r} is not a link; write 0-1 for a sure link, 0p1 or 0?1 for a possible link")
        link = int(match[1]) - base, int(match[3]) - base
        for side, word, words in zip(SIDES, link, (source_words, target_words), strict=True):
            if not 0 <= word < words:
                raise ValueError(
                    f"{text[:40]!r} is out of range: counted from {base}, the {side} sentence has {words} words "
                    "between spaces; if words are counted from 1, nmt.align accepts gold_base=1 for its gold file"
                )
        links[match[2]].append(link)
    return GoldLinks.from_pairs(links["-"], links["p"] + links["?"])


def read_gold_links(path: Path, base: int, sources: Sentences, targets: Sentences) -> list[GoldLinks]:
    """Read the gold links of each pair from a file.

    Raises:
        UserError: a line is invalid (file:line), or the numbers of lines and pairs differ.
    """
    lines = list(TextInput(str(path)))
    if len(lines) != len(sources):
        raise UserError(f"{path} has {len(lines):,} lines for {len(sources):,} pairs of sentences")
    gold = []
    for number, (line, source, target) in enumerate(zip(lines, sources, targets, strict=True), 1):
        try:
            gold.append(parse_gold_links(line, base, len(source), len(target)))
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
    return gold


def threshold_links(weights_TS: np.ndarray | None, threshold: float) -> list[Link]:
    """Return the links (source word, target word) with at least this weight, sorted by target word; none for None."""
    return [] if weights_TS is None else [(s, t) for t, s in np.argwhere(weights_TS >= threshold).tolist()]


def alignment_targets(
    gold: GoldLinks, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Return the attention weights_TS given by the gold links.

    The weight of a target piece is divided evenly among the sure source words of its word, and the weight of a source
    word evenly among its pieces. Without sure words, possible words are used; without these, the pieces of no word.
    """
    source = np.asarray(source_word_of_piece, dtype=int)
    target = np.asarray(target_word_of_piece, dtype=int)
    weights_TS = np.zeros((len(target), len(source)))
    for weights_S, word in zip(weights_TS, target, strict=True):
        sure = [s for s, t in gold.sure if t == word]
        possible = [s for s, t in gold.possible if t == word]
        pieces_of = [source == s for s in sure or possible or [-1]]
        for pieces_S in pieces_of:
            weights_S[pieces_S] += 1 / len(pieces_of) / max(1, pieces_S.sum())
    return weights_TS


# ---------------------------------------------------------------------------------------------------- symmetrization
def grow_diag_final_and(forward: set[Link], backward: set[Link]) -> set[Link]:
    """Symmetrize by grow-diag-final-and, as in Moses, whose default is grow-diag-final (Koehn et al. 2005).

    Start from the intersection. Grow-diag: add links of the union that are adjacent to a link of the result, also
    diagonally, and have at least one word that is still unlinked, until there are no more. Final-and: add links of
    either direction between two words without links. Links are processed by target word, then source word; `forward`
    comes first.
    """
    candidates = sorted(forward | backward, key=lambda link: (link[1], link[0]))
    links = forward & backward
    sources = {source for source, _ in links}
    targets = {target for _, target in links}

    def add(link: Link) -> None:
        links.add(link)
        sources.add(link[0])
        targets.add(link[1])

    previous_size = -1
    while previous_size < len(links):
        previous_size = len(links)
        for source, target in candidates:
            if (source, target) not in links:
                continue
            for down, across in NEIGHBORS:
                new = source + across, target + down
                if (new in forward or new in backward) and (new[0] not in sources or new[1] not in targets):
                    add(new)
    for direction in (forward, backward):
        for link in candidates:
            if link in direction and link[0] not in sources and link[1] not in targets:
                add(link)
    return links


SYMMETRIZATIONS: dict[str, Callable[[set[Link], set[Link]], set[Link]]] = {
    "intersection": set.intersection,
    "union": set.union,
    "grow_diag_final_and": grow_diag_final_and,
}
