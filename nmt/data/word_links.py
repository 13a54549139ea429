"""Sets of word links: as text, as gold standard, and two directions made one.

A link is (source word, target word), from 0.
"""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nmt.data.words import script_of
from nmt.errors import UserError
from nmt.runtime.lines import LineReader, open_unpacked, read_lines

if TYPE_CHECKING:
    from datasets import Dataset

Link = tuple[int, int]
Sentences = list[list[str]]  # as words
GOLD_LINK = re.compile(r"(\d{1,9})([-p?])(\d{1,9})", re.ASCII)
NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # (target, source), as in Moses


def pharaoh(links: Iterable[Link]) -> str:
    """Links as `source-target` from 0, in the order of the source, as in `0-0 1-2 2-1`."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def transpose_links(links: Iterable[Link]) -> set[Link]:
    """The same links seen from the other side."""
    return {(target, source) for source, target in links}


# -------------------------------------------------------------------------------------------------------------- gold
@dataclass(frozen=True, slots=True)
class GoldLinks:
    """What people say of a pair of sentences (Och and Ney 2003, section 5): sure links, which must be found, and
    possible ones, which may be. Sure links are possible, too."""

    sure: frozenset[Link]
    possible: frozenset[Link]

    @classmethod
    def of(cls, sure: Iterable[Iterable[int]], possible: Iterable[Iterable[int]]) -> "GoldLinks":
        """From pairs of numbers; `possible` may leave out the sure ones."""
        certain = frozenset((s, t) for s, t in sure)
        return cls(certain, certain | {(s, t) for s, t in possible})

    def turned(self) -> "GoldLinks":
        """For a model of the other direction."""
        return GoldLinks(frozenset(transpose_links(self.sure)), frozenset(transpose_links(self.possible)))


def parse_gold(line: str, base: int, source_words: int, target_words: int) -> GoldLinks:
    """The gold links of a line: `i-j` is sure, `ipj` or `i?j` possible, for source word i and target word j.

    Args:
        base: the number of a sentence's first word, 0 or 1.

    Raises:
        ValueError: something is no link, or names a word that is not there.
    """
    links: dict[str, list[Link]] = {"-": [], "p": [], "?": []}
    for text in line.split():
        match = GOLD_LINK.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:40]!r} is no link; a sure one is written 0-1, a possible one 0p1 or 0?1")
        link = int(match[1]) - base, int(match[3]) - base
        for side, word, words in zip(("source", "target"), link, (source_words, target_words), strict=True):
            if not 0 <= word < words:
                numbers = f"words {base} to {words - 1 + base}" if words else "no words"
                trouble = f"{text[:40]!r} is out of range: counted from {base}, the {side} sentence has {numbers}"
                remedy = "" if base else "; only for gold= of nmt.align gold_base=1 says that words count from 1"
                raise ValueError(trouble + remedy)
        links[match[2]].append(link)
    return GoldLinks.of(links["-"], links["p"] + links["?"])


def gold_links(pairs: "Dataset") -> list[GoldLinks] | None:
    """The gold links of each pair of a corpus, None where it has none."""
    if "sure" not in pairs.column_names:
        return None
    return [GoldLinks.of(pair["sure"], pair["possible"]) for pair in pairs.select_columns(["sure", "possible"])]


def read_gold(path: Path, base: int, sources: Sentences, targets: Sentences) -> list[GoldLinks]:
    """The gold links of each pair.

    Raises:
        UserError: file:line and what is wrong there, or another number of lines than there are pairs.
    """
    with open_unpacked(path) as file:
        lines = list(read_lines(LineReader(file, path)))
    if len(lines) != len(sources):
        raise UserError(f"{path} has {len(lines):,} lines for {len(sources):,} pairs of sentences")
    found = []
    for number, (line, source, target) in enumerate(zip(lines, sources, targets, strict=True), 1):
        try:
            found.append(parse_gold(line, base, len(source), len(target)))
        except ValueError as error:
            unspaced = script_of(source) or script_of(target)
            remedy = "; they count what stands between spaces: write spaces between the words of the text" * bool(
                unspaced
            )
            raise UserError(f"{path}:{number}: {error}{remedy}") from None
    return found


def alignment_targets(
    gold: GoldLinks, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """The attention weights_TS of one who knows the gold links.

    Each target piece looks at the sure source words of its word, at all alike and at their pieces alike; where there
    are none, at the possible ones; where there are none either, at the pieces of no word.
    """
    source, target = np.asarray(source_word_of_piece, dtype=int), np.asarray(target_word_of_piece, dtype=int)
    weights_TS = np.zeros((len(target), len(source)))
    for weights_S, word in zip(weights_TS, target, strict=True):
        sure, possible = ([s for s, t in links if t == word] for links in (gold.sure, gold.possible))
        pieces_of = [source == s for s in sure or possible or [-1]]
        for pieces_S in pieces_of:
            weights_S[pieces_S] += 1 / len(pieces_of) / max(1, pieces_S.sum())
    return weights_TS


# ---------------------------------------------------------------------------------------------------- symmetrization
def intersection(forward: Set[Link], backward: Set[Link]) -> set[Link]:
    """What both directions say."""
    return set(forward & backward)


def union(forward: Set[Link], backward: Set[Link]) -> set[Link]:
    """What either direction says."""
    return set(forward | backward)


def grow_diag_final_and(forward: Set[Link], backward: Set[Link]) -> set[Link]:
    """One of Moses's heuristics; its default ends without the `and` (Koehn et al. 2005).

    Begin with the intersection. Grow-diag: add links of the union that lie beside a link found, diagonally too, and
    bring in a word that had none, until there are no more. Final-and: add links of either direction between two words
    that have none. Where this depends on the order, it goes by target word, then source word, `forward` first.
    """
    candidates = sorted(forward | backward, key=lambda link: (link[1], link[0]))
    found = intersection(forward, backward)
    sources, targets = {source for source, _ in found}, {target for _, target in found}

    def add(link: Link) -> None:
        found.add(link)
        sources.add(link[0])
        targets.add(link[1])

    grown = -1
    while grown < len(found):
        grown = len(found)
        for source, target in candidates:
            if (source, target) not in found:
                continue
            for down, across in NEIGHBORS:
                new = source + across, target + down
                if (new in forward or new in backward) and (new[0] not in sources or new[1] not in targets):
                    add(new)
    for direction in (forward, backward):
        for link in candidates:
            if link in direction and link[0] not in sources and link[1] not in targets:
                add(link)
    return found


SYMMETRIZATIONS = {"intersection": intersection, "union": union, "grow_diag_final_and": grow_diag_final_and}
