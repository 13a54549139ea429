"""Translations of an HTML or XML document's units, with the tags of the unit around the words that they belong to.

`restore_unit` puts the tags of a unit around the target words that are linked to the source words which they enclosed.
All of it takes time in proportion to the document.
"""

import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os.path import commonprefix

from nmt.data.html_document import HtmlDocument, Node, Span, Unit
from nmt.data.word_links import Link


@dataclass(frozen=True, slots=True)
class Alignment:
    """A translation of a unit, with the words of both sides and the links between them."""

    text: str
    source_words: Sequence[Span]  # in the text of the unit; they do not overlap
    target_words: Sequence[Span]  # in `text`
    links: Sequence[Link]  # strongest first
    weak_links: Sequence[Link] = ()  # of which an element without links gets the first


def restore_tags(document: HtmlDocument, translations: Iterable[Alignment]) -> str:
    """Return a document with translations, one for each unit."""
    remaining = iter(translations)
    return "".join(part if isinstance(part, str) else restore_unit(part, next(remaining)) for part in document.parts)


def restore_unit(unit: Unit, alignment: Alignment) -> str:
    """Return the translation of a unit as mark-up, with the tags of the unit.

    An element encloses the fewest words of the translation, in a row, that include those linked to its own words. An
    element around all words of its parent stays so. Elements stay within their parent. Where those of siblings would
    overlap, `choose_spans` decides. An element without linked words, and what is not an element, follows the words
    that are linked to the word before it.
    """
    alignment = split_at_tags(alignment, unit)
    targets_of: list[list[int]] = [[] for _ in alignment.source_words]
    for source, target in alignment.links:
        targets_of[source].append(target)
    weak_links_of: list[list[tuple[int, int]]] = [[] for _ in alignment.source_words]
    for number, (source, target) in enumerate(alignment.weak_links):
        weak_links_of[source].append((number, target))
    starts = [start for start, _ in alignment.source_words]
    writer = Writer(alignment)
    # What remains to be written, last first. Not recursive, since elements may be nested thousands deep.
    remaining: list[str | Span | Placed | Group] = [
        Group(unit.nodes, (0, len(starts)), (0, len(alignment.target_words)))
    ]
    while remaining:
        item = remaining.pop()
        if isinstance(item, str):
            writer.write_closing(item)
        elif isinstance(item, Group):
            pieces: list[str | Span | Placed | Group] = []
            end = item.target[0]
            for placed in place_nodes(item, starts, targets_of, weak_links_of):
                pieces += [(end, placed.target[0]), placed]
                end = placed.target[1]
            remaining += reversed([*pieces, (end, item.target[1])])
        elif isinstance(item, Placed):
            node = item.node
            if node.closing is None:
                writer.write_point(node, item.target)
                writer.write_words(item.target, skipped={t for s in range(*item.source) for t in targets_of[s][:1]})
            else:
                writer.write_opening(node.opening)
                remaining += [node.closing, Group(node.children, item.source, item.target)]
        else:
            writer.write_words(item)
    return "".join(writer.slices)


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings, and the words of both sides between the tags of their parent."""

    nodes: Sequence[Node]
    source: Span
    target: Span


@dataclass(frozen=True, slots=True)
class Placed:
    """A node, its source words, and the target words that it encloses or replaces; none if it stands between words."""

    node: Node
    source: Span
    target: Span


class Writer:
    """Writes a translation as mark-up.

    White space between words is written late: after the end tags, and before the start tags, that stand between them.
    """

    def __init__(self, alignment: Alignment) -> None:
        self.text = alignment.text
        self.words = alignment.target_words
        self.slices: list[str] = []
        self.gap = ""  # white space that is not written yet

    def write_opening(self, markup: str) -> None:
        self.slices += [self.gap, markup]
        self.gap = ""

    def write_closing(self, tag: str) -> None:
        self.slices.append(tag)

    def write_point(self, node: Node, replaced: Span) -> None:
        """Write what is not an element in the place of words, or beside the word to which it was closer."""
        if replaced[0] < replaced[1]:
            self.write_opening(node.opening)
        elif node.after_space:
            self.write_opening(node.opening)
            self.gap = " " if node.before_space else ""
        else:
            self.write_closing(node.opening)

    def write_words(self, span: Span, skipped: Iterable[int] = ()) -> None:
        """Write the words of a span, except for those that are skipped."""
        for index in range(*span):
            start, end = self.words[index]
            if index not in skipped:
                self.write_opening(escape_text(self.text[start:end]))
            next_start = self.words[index + 1][0] if index + 1 < len(self.words) else end
            self.gap = escape_text(self.text[end:next_start])


def escape_text(text: str) -> str:
    return escape(text, quote=False).replace("\u00a0", "&#160;")


def place_nodes(
    group: Group,
    starts: Sequence[int],
    targets_of: Sequence[Sequence[int]],
    weak_links_of: Sequence[Sequence[tuple[int, int]]],
) -> list[Placed]:
    """Return the nodes of a group, in the order in which they are written.

    Args:
        starts: where each source word starts in the text of the unit.
        targets_of: the target words that are linked to each source word.
        weak_links_of: number and target word of the weak links of each source word.
    """
    low, high = group.target
    sources = [(bisect_left(starts, node.start), bisect_left(starts, node.end)) for node in group.nodes]
    votes: dict[int, Counter[int]] = {}  # by target word: how many links it has to the words of each node
    for index, (node, source) in enumerate(zip(group.nodes, sources, strict=True)):
        limit = None if node.is_element else 1  # a source word that is kept replaces one target word
        found = [t for targets in targets_of[slice(*source)] for t in targets[:limit] if low <= t < high]
        if not found and node.is_element:
            weak = (link for links in weak_links_of[slice(*source)] for link in links if low <= link[1] < high)
            found = [target for _, target in sorted(weak)[:1]]
        for target in found:
            votes.setdefault(target, Counter())[index] += 1
    linked: list[list[int]] = [[] for _ in group.nodes]  # target words of each node
    for target in sorted(votes):
        linked[votes[target].most_common(1)[0][0]].append(target)
    spans = choose_spans(group, sources, linked)
    taken = sorted((span, index) for index, span in enumerate(spans) if span is not None)
    taken_starts = [span[0] for span, _ in taken]
    first, last = low, high
    for node, span in zip(group.nodes, spans, strict=True):
        if span is not None and node.is_element and not node.opening:
            first = span[1]
        if span is not None and node.is_element and not node.closing:
            last = span[0]
    position, word = low, group.source[0]
    placed = []
    for index, (node, source, span) in enumerate(zip(group.nodes, sources, spans, strict=True)):
        for targets in targets_of[word : source[0]]:
            position = max((target + 1 for target in targets if low <= target < high), default=position)
        word = source[1]
        if span is None:
            point = min(max(position, first), last)
            around = bisect_left(taken_starts, point) - 1
            if around >= 0 and taken[around][0][1] > point:  # a word in the middle of a sibling
                point = taken[around][0][taken[around][1] < index]
            span = point, point
        else:
            position = span[1]
        placed.append((span, index, Placed(node, source, span)))
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]


def choose_spans(group: Group, sources: Sequence[Span], linked: Sequence[Sequence[int]]) -> list[Span | None]:
    """Return the target words that each node of a group encloses; None for nodes that stand between words.

    Nodes with more links come first. A node loses words at the edge of its own between which and the others there are
    more words of siblings, and then all but the most between two siblings that came before it.

    Args:
        linked: the target words that are linked to each node, ascending; no word twice.
    """
    low, high = group.target
    rank = {target: number for number, target in enumerate(sorted(itertools.chain.from_iterable(linked)))}
    runs = [find_run(targets, rank) for targets in linked]
    spans: list[Span | None] = [None] * len(linked)
    taken: list[Span] = []  # ascending
    for index, (node, source) in enumerate(zip(group.nodes, sources, strict=True)):
        if node.is_element and source == group.source and source[0] < source[1]:
            spans[index] = group.target
            return spans

    def is_anchored(node: Node) -> bool:
        """Return whether a node is an element whose other tag is in front of all siblings, or behind them."""
        return node.is_element and not (node.opening and node.closing)

    for index in sorted(range(len(linked)), key=lambda index: (not is_anchored(group.nodes[index]), -runs[index][0])):
        node, targets = group.nodes[index], runs[index][1]
        by_gap: dict[int, list[int]] = {}  # by how many siblings are before it
        for target in targets:
            gap = bisect_right(taken, (target, high))
            if not gap or taken[gap - 1][1] <= target:
                by_gap.setdefault(gap, []).append(target)
        most = max(by_gap.values(), key=len, default=[])
        start, end = (most[0], most[-1] + 1) if most else (high, low)
        if is_anchored(node) and not node.opening:
            start, end = low, max(end, low)
        elif is_anchored(node):
            start, end = min(start, high), high
        if start <= end:
            spans[index] = start, end
            insort(taken, (start, end))
    return spans


def find_run(targets: Sequence[int], rank: Mapping[int, int]) -> tuple[int, list[int]]:
    """Return the run of a node's target words that maximizes its own words minus those of siblings between them.

    Args:
        targets: its target words, ascending.
        rank: the number of each target word of the node and its siblings.

    Returns:
        This maximum and the words; of several, the first and shortest.
    """
    best, best_run = 0, (0, 0)
    score = start = 0
    for index, target in enumerate(targets):
        if index:
            score -= rank[target] - rank[targets[index - 1]] - 1
        if score <= 0:
            score, start = 0, index
        score += 1
        if score > best:
            best, best_run = score, (start, index + 1)
    return best, list(targets[slice(*best_run)])


def split_at_tags(alignment: Alignment, unit: Unit) -> Alignment:
    """Split words at tags within them, as in `H<sub>2</sub>O`.

    Where a target word begins like the source word, it is split at the same places, and the parts are linked one by
    one. Of the other parts of a source word, those with letters get its links.
    """
    places = sorted({place for node in iterate(unit.nodes) for place in (node.start, node.end)})
    source_cuts = []
    for start, end in alignment.source_words:
        inner = places[bisect_right(places, start) : bisect_left(places, end)]
        source_cuts.append([0, *(place - start for place in inner), end - start])
    if all(len(cuts) == 2 for cuts in source_cuts):
        return alignment
    copied: dict[Link, int] = {}  # number of characters with which both words begin
    target_cuts = [{0, end - start} for start, end in alignment.target_words]
    for source, target in alignment.links:
        if len(source_cuts[source]) > 2:
            words = (
                unit.text[slice(*alignment.source_words[source])],
                alignment.text[slice(*alignment.target_words[target])],
            )
            copied[source, target] = len(commonprefix(words))
            target_cuts[target] |= {
                cut for cut in source_cuts[source] if cut <= min(copied[source, target], len(words[1]))
            }
    source_parts = [list(itertools.pairwise(cuts)) for cuts in source_cuts]
    target_parts = [list(itertools.pairwise(sorted(cuts))) for cuts in target_cuts]
    source_numbers = [*itertools.accumulate(map(len, source_parts), initial=0)]
    target_numbers = [*itertools.accumulate(map(len, target_parts), initial=0)]
    links: list[Link] = []
    for (source, target), length in copied.items():
        for number, part in enumerate(source_parts[source], source_numbers[source]):
            if part[1] <= length and part in target_parts[target]:
                links.append((number, target_numbers[target] + target_parts[target].index(part)))
    copied_sources, copied_targets = ({link[side] for link in links} for side in (0, 1))
    source_words, target_words = (
        [
            (start + part[0], start + part[1])
            for (start, _), parts in zip(words, parts_of_words, strict=True)
            for part in parts
        ]
        for words, parts_of_words in ((alignment.source_words, source_parts), (alignment.target_words, target_parts))
    )

    def link_parts(links: Iterable[Link]) -> Iterator[Link]:
        for source, target in links:
            parts = range(*source_numbers[source : source + 2])
            spelled = [part for part in parts if any(map(str.isalpha, unit.text[slice(*source_words[part])]))]
            yield from itertools.product(
                [part for part in spelled or parts if part not in copied_sources],
                [part for part in range(*target_numbers[target : target + 2]) if part not in copied_targets],
            )

    links += link_parts(alignment.links)
    return Alignment(alignment.text, source_words, target_words, links, [*link_parts(alignment.weak_links)])


def iterate(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes and all nodes within them."""
    remaining = [*nodes]
    while remaining:
        node = remaining.pop()
        yield node
        remaining += node.children
