"""HTML and XML documents: find the text to translate, and put translations back between the tags.

A document is cut into slices, each a tag, a text, a comment and so on, which joined are the document again. Between two
tags of blocks, such as paragraphs and table cells, is the text of a block, with the tags of inline elements in it, such
as links and bold text. Only this text is replaced; all other slices are written as they are, so nothing can get lost.

Shapes: S words of the text of a block, T words of its translation.
"""

import html
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]  # first and end (exclusive)

# The tags of all other elements, and of those that HTML does not have, end a block.
INLINE = re.compile(
    "|a|abbr|acronym|b|bdi|bdo|big|br|cite|code|data|del|dfn|em|embed|font|i|img|input|ins|kbd|label|map|mark|math|meter"
    "|nobr|output|picture|progress|q|rb|rp|rt|ruby|s|samp|small|span|strike|strong|style|script|sub|sup|svg|time|tt|u"
    "|var|wbr"
)
VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr")  # have no end tag
UNTRANSLATED = re.compile("code|iframe|kbd|math|noframes|pre|samp|script|style|svg|textarea|var|xmp")
WITHOUT_WORDS = {"math", "script", "style", "sup", "svg"}  # what is written in them is not part of the sentence
SEPARATORS = dict.fromkeys(("embed", "img", "input", "math", "svg"), " ") | {"br": "\n"}  # stand between words
LINE_END = re.compile(r"(?:[.!?:;…。！？；]\W*|\n\s*|\A\s*)\Z")  # text after which `br` ends a block
MAX_CHARACTERS = 4_000  # of a block with inline elements; more words could not be compared with all of the translation
MAX_DEPTH = 50  # of inline elements; more of them are no text formatting
MAX_KEPT_CHARACTERS = 200  # of code or the like that is part of a sentence


@dataclass(slots=True)
class Slice:
    """A part of a document."""

    kind: str  # start | end | text | other
    start: int = 0  # in the document
    name: str = ""  # of a tag
    text: str = ""  # what the model sees of it
    raw: str = ""  # as it is written


class Slicer(HTMLParser):
    """Cuts a document into slices. An element that is not translated is one; without an end tag it has all the rest."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.lines = [0, *(match.end() for match in re.finditer("\n", document))]  # where each begins
        self.slices = [Slice("other")]
        self.depth = 0  # of elements with the name of the one that is not translated
        self.feed(document)
        self.close()
        for piece, after in pairwise([*self.slices, Slice("other", len(document))]):
            piece.raw = document[piece.start : after.start]
            if piece.kind == "text":
                piece.text = html.unescape(piece.raw)
            elif piece.kind == "other" and (piece.name in WITHOUT_WORDS or len(piece.text) > MAX_KEPT_CHARACTERS):
                piece.text = SEPARATORS.get(piece.name, "")

    def add(self, kind: str, name: str = "", text: str = "") -> None:
        if self.depth:
            self.depth += (name == self.slices[-1].name) * {"start": 1, "end": -1}.get(kind, 0)
            self.slices[-1].text += text
        else:
            line, column = self.getpos()
            self.slices.append(Slice(kind, self.lines[line - 1] + column, name, text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        is_marked = values.get("translate") == "no" or "notranslate" in (values.get("class") or "").split()
        is_note = tag == "a" and self.slices[-1].kind == "start" and self.slices[-1].name == "sup"
        if VOID.fullmatch(tag):
            self.handle_startendtag(tag, attrs)
        elif is_note and not self.depth:  # the link in `sup` is the number of a note
            self.slices[-1].kind, self.depth = "other", 1
        elif not self.depth and (is_marked or UNTRANSLATED.fullmatch(tag)):
            self.add("other", tag)
            self.depth = 1
        else:
            self.add("start", tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.add("other", tag, SEPARATORS.get(tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.add("end", tag)

    def handle_data(self, data: str) -> None:
        self.add("text", text=data)

    def handle_comment(self, data: str) -> None:
        self.add("other")

    handle_pi = unknown_decl = handle_comment

    def handle_decl(self, decl: str) -> None:
        self.add("other")


# ------------------------------------------------------------------------------------------------------------- blocks
@dataclass(slots=True)
class Node:
    """An inline element of a block, or what is written as it is: an image, a comment, code."""

    opening: str
    start: int  # in the text of the block, in characters
    end: int = 0
    closing: str | None = None  # None: the node has no tags, and replaces the translation of the text that it covers
    children: "list[Node]" = field(default_factory=list)

    def write(self) -> str:
        """Return its markup, without text."""
        return self.opening + "".join(child.write() for child in self.children) + (self.closing or "")


@dataclass(frozen=True, slots=True)
class Block:
    """Text that is translated as one line, and the inline markup in it."""

    text: str
    nodes: list[Node]
    places: set[int]  # where the markup is, in characters


def parse_document(document: str) -> list[str | Block]:
    """Return a document as markup that is kept and blocks that are translated.

    An inline tag without a partner in its block ends the block.
    """
    parts: list[str | Block] = []
    pending: list[Slice] = []  # of the block that has begun
    open_tags: list[int] = []  # of these, start tags that have no end tag yet
    characters = 0
    for piece in [*Slicer(document).slices, Slice("other", name="end of the document")]:
        has_no_partner = piece.kind == "end" and not (open_tags and pending[open_tags[-1]].name == piece.name)
        is_line_end = piece.name == "br" and LINE_END.search("".join(item.text for item in pending[-3:]))
        is_too_deep = piece.kind == "start" and len(open_tags) == MAX_DEPTH
        is_boundary = not INLINE.fullmatch(piece.name) or has_no_partner or is_line_end or is_too_deep
        if is_boundary or (piece.kind == "text" and characters + len(piece.text) > MAX_CHARACTERS):
            for before, index in pairwise([-1, *open_tags, len(pending)]):
                parts += build_parts(pending[before + 1 : index])
                parts += [tag.raw for tag in pending[index : index + 1]]
            pending, open_tags, characters = [], [], 0
        if is_boundary:
            parts.append(piece.raw)
            continue
        if piece.kind == "end":
            open_tags.pop()
        elif piece.kind == "start":
            open_tags.append(len(pending))
        pending.append(piece)
        characters += len(piece.text) + 1
    return parts


def build_parts(slices: Sequence[Slice]) -> list[str | Block]:
    """Return slices, whose tags are paired, as a block and the white space around it; as markup if it has no letter."""
    if not any(piece.kind == "text" and any(map(str.isalpha, piece.text)) for piece in slices):
        return ["".join(piece.raw for piece in slices)]
    path = [Node("", 0)]  # elements that are open
    places = set()
    text = ""
    for previous, piece in zip([None, *slices], slices, strict=False):
        added = re.sub(r"\s+", " ", piece.text.replace("\u00ad", ""))  # soft hyphens
        if text[-1:] in ("", " ") and added.startswith(" "):
            added = added[1:]
            if previous is not None and previous.kind == "other":
                path[-1].children[-1].opening += " "  # on both sides of an image
        if piece.kind == "end":
            path[-1].closing, path[-1].end = piece.raw, len(text)
            path.pop()
        elif piece.kind != "text":
            node = Node(piece.raw, len(text), len(text + added))
            path[-1].children.append(node)
            path += [node] * (piece.kind == "start")
        places |= {len(text), len(text + added)}
        text += added
    first, last = (piece.text if piece.kind == "text" else "" for piece in (slices[0], slices[-1]))
    return [
        first.removesuffix(first.lstrip()),
        Block(text.rstrip(), path[0].children, places),
        last[len(last.rstrip()) :],
    ]


# ------------------------------------------------------------------------------------------------------- translations
def restore_block(
    block: Block, source: Sequence[Span], translation: str, target: Sequence[Span], shares_TS: npt.NDArray[np.float64]
) -> str:
    """Return the translation of a block with the tags of the block.

    Args:
        source, target: where the words of both are; they do not overlap.
        shares_TS: how much of each source word belongs to a target word.
    """
    words = [html.escape(translation[start:end], quote=False) for start, end in target]
    gaps = ["", *(html.escape(translation[end:start]) for (_, end), (start, _) in pairwise(target)), ""]
    after: list[list[str]] = [[] for _ in range(len(words) + 1)]  # markup between a word and the gap after it
    before: list[list[str]] = [[] for _ in range(len(words) + 1)]  # markup between a gap and the word after it
    starts = [start for start, _ in source]

    def add_nodes(nodes: Sequence[Node], source: Span, target: Span) -> None:
        covered = [(bisect_left(starts, node.start), bisect_left(starts, node.end)) for node in nodes]
        spans = place_nodes(covered, shares_TS[slice(*target)], source)
        for span, number in sorted(zip(spans, range(len(nodes)), strict=True)):
            node, start, end = nodes[number], target[0] + span[0], target[0] + span[1]
            if start == end:
                is_after = start > target[0] and (start == target[1] or block.text[node.start - 1 : node.start] != " ")
                (after if is_after else before)[start].append(node.write())
            elif node.closing is None:
                words[start:end] = [node.opening, *[""] * (end - start - 1)]
                gaps[start + 1 : end] = [""] * (end - start - 1)
            else:
                before[start].append(node.opening)
                add_nodes(node.children, covered[number], (start, end))
                after[end].append(node.closing)

    add_nodes(block.nodes, (0, len(source)), (0, len(target)))
    slices = zip(after, gaps, before, [*words, ""], strict=False)
    return "".join("".join([*closed, gap, *opened, word]) for closed, gap, opened, word in slices)


def place_nodes(covered: Sequence[Span], shares_TS: npt.NDArray[np.float64], source: Span) -> list[Span]:
    """Return the target words that each node encloses or replaces; none, in a place between words, for an image.

    A node encloses words in a row. They have the highest sum of what belongs to it, minus half of all else in them.
    Nodes to which more belongs come first. What covers no words follows the target word that has most of the word
    before it in the source.

    Args:
        covered: the source words of each node.
        shares_TS: of the target words among which the nodes are.
        source: the source words among which the nodes are.
    """
    total_T = shares_TS[:, slice(*source)].sum(axis=1)
    belongs_NT = [shares_TS[:, slice(*words)].sum(axis=1) for words in covered]
    spans: dict[int, Span] = {}
    is_free_T = np.ones(len(shares_TS), dtype=bool)
    for number in sorted(range(len(covered)), key=lambda number: -belongs_NT[number].sum()):
        if covered[number] == source:
            spans[number] = 0, len(shares_TS)
        elif np.any(belongs_NT[number] * is_free_T):
            spans[number] = find_best_run(np.where(is_free_T, 1.5 * belongs_NT[number] - 0.5 * total_T, -1e9))
            is_free_T[slice(*spans[number])] = False
    position = 0
    for number, words in enumerate(covered):
        if number not in spans:
            if words[0] > source[0] and len(shares_TS):
                position = int(shares_TS[:, words[0] - 1].argmax()) + 1
            position = next((end for start, end in spans.values() if start < position < end), position)
            spans[number] = position, position
        position = spans[number][1]
    return [spans[number] for number in range(len(covered))]


def find_best_run(gains: npt.NDArray[np.float64]) -> Span:
    """Return the run of numbers with the highest sum: of several, the first that ends, and its shortest part."""
    sums = np.append(0.0, np.cumsum(gains))
    end = int((sums[1:] - np.minimum.accumulate(sums)[:-1]).argmax()) + 1
    return end - 1 - int(sums[:end][::-1].argmin()), end
