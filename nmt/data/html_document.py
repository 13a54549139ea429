"""HTML and XML documents: find the text to translate. `html_tags.py` puts translations back between the tags.

A document is cut into verbatim slices and units. A unit is text that belongs together, such as that of a paragraph or a
table cell, without the tags of inline elements within it, such as links and bold text. Everything else is kept as it
is written: block tags, attributes, comments, scripts, white space between blocks. Nothing is built anew from a parsed
tree, so nothing can get lost, however damaged the mark-up.

Python's `html.parser` is not used: versions that nmt supports take quadratic time on damaged mark-up, and they differ
in what they report. The rules here are those of the HTML standard's tokenizer, except for a `<` that no `>` follows and
`</` before anything but a letter, which are text. All of it takes time in proportion to the document.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from html import unescape

Span = tuple[int, int]  # first and end (exclusive)


def split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# All others, and those that HTML does not have, end a unit.
INLINE = split_names(
    """
    a abbr acronym b bdi bdo big br cite code data del dfn em embed font i img input ins kbd label map mark math meter
    nobr output picture progress q rb rp rt ruby s samp script small span strike strong style sub sup svg time tt u var
    wbr
    """
)
VOID = split_names("area base br col embed hr img input link meta param source track wbr")  # have no end tag
RAW = split_names("iframe noembed noframes script style textarea xmp")  # have text that is not mark-up
UNTRANSLATED = split_names("code kbd math pre samp svg var")
WITHOUT_WORDS = split_names("math svg")  # what is written in them is not part of the sentence
SEPARATING = split_names("br embed img input math svg")  # stand between words, never within one
OPTIONAL_END = split_names("dd dt li option p td th tr")  # the next one ends it
UNFINISHED = "<"  # the name of mark-up without an end, which has to stay where it is

ATTRIBUTE = r"""(?:[\s/]++|[^\s/>=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^\s>"'][^\s>]*+)?+)"""
TAG = re.compile(rf"<(?P<end>/?)(?P<name>[A-Za-z][^\s/>]*+){ATTRIBUTE}*+(?P<last>>|\Z)")
TEXT = re.compile(r"(?:[^<]++|<(?![A-Za-z!?]|/[A-Za-z]))++")
COMMENT = re.compile(r"<!--(?:(?=-?>)|.*?(?=--!?>|\Z))-{0,2}!?(?P<last>>|\Z)", re.DOTALL)
SPACE = re.compile(r"[ \t\n\r\f\u00a0]+")  # no-break spaces included: models have rarely seen them
SOFT_HYPHEN = "\u00ad"
BLANKS = re.compile(r"((?:[ \t\n\r\f\u00a0\ufeff]|&(?:nbsp|\#160|\#[xX][aA]0);)+)")
LONG_NUMBER = re.compile(r"&#(?:[0-9]{9,}|[xX][0-9a-fA-F]{9,});?")  # of no character; Python refuses very long ones
MAX_UNIT_CHARACTERS = 4_000  # longer text is cut: it is several sentences, and its links would fill memory
MAX_DEPTH = 50  # tags without a partner in their unit so far; more of them are no text formatting, and end the unit
MAX_CODE_CHARACTERS = 200  # longer code or the like is not part of a sentence
MAX_ENTITY_CHARACTERS = 40
CLOSING_MARKS = " \t\n\r\f\u00a0\"'”“’»)]"  # may follow the end of a sentence
END_MARKS = tuple(".!?:;…。！？；")
SENTENCE_END = re.compile(r"[.!?;:…]\s+|[。！？；]\s*")


# ------------------------------------------------------------------------------------------------------------- tokens
class Kind(Enum):
    """What a token is."""

    TEXT = "text"
    OPEN = "start tag"
    CLOSE = "end tag"
    OTHER = "an element without content, a comment, a script and so on"


@dataclass(frozen=True, slots=True)
class Token:
    """A slice of a document."""

    kind: Kind
    raw: str  # as it is written
    name: str = ""  # of a tag, in small letters
    words: str = ""  # OTHER: the text of an element that is part of a sentence but not translated, such as code


def tokenize(document: str) -> Iterator[Token]:
    """Yield the tokens of a document. Joined, their slices are the document."""
    ends = {mark: document.rfind(mark) for mark in (">", "?>", "]]>")}  # so that no search for them is in vain
    position = 0
    while position < len(document):
        if match := TEXT.match(document, position):
            token = Token(Kind.TEXT, match[0])
        elif position > ends[">"] and not document.startswith("<!--", position):
            token = Token(Kind.TEXT, "<", UNFINISHED)
        elif match := TAG.match(document, position):
            token = make_tag(document, match)
        elif match := COMMENT.match(document, position):
            token = Token(Kind.OTHER, match[0], "" if match["last"] else UNFINISHED)
        else:  # a document type, a processing instruction, a CDATA section, or nothing of these
            mark = (
                "]]>" if document.startswith("<![CDATA[", position) else "?>" if document[position + 1] == "?" else ">"
            )
            name = "" if position < ends[mark] else UNFINISHED
            mark = mark if position < ends[mark] else ">"
            token = Token(Kind.OTHER, document[position : document.index(mark, position) + len(mark)], name)
        yield token
        position += len(token.raw)


def make_tag(document: str, match: re.Match[str]) -> Token:
    """Return the token of a tag. An element with raw text, such as a script, is a token as a whole."""
    raw, name = match[0], match["name"].lower()
    if not match["last"]:
        return Token(Kind.OTHER, raw, UNFINISHED)
    if match["end"]:
        return Token(Kind.CLOSE, raw, name)
    # A slash after an attribute without quotes belongs to the attribute.
    if name in VOID or raw.endswith("/>") and (raw[-3] in "\"' \t\n\r\f" or "=" not in raw):
        return Token(Kind.OTHER, raw, name)
    if name in RAW:
        end_tag = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(document, match.end())
        end = document.find(">", end_tag.end()) if end_tag else -1
        if end < 0:
            return Token(Kind.OTHER, document[match.start() :], UNFINISHED)
        return Token(Kind.OTHER, document[match.start() : end + 1], name)
    return Token(Kind.OPEN, raw, name)


def is_untranslated(tag: Token) -> bool:
    """Return whether a start tag says that its element is not to be translated."""
    if tag.name in UNTRANSLATED:
        return True
    if "translate" not in tag.raw.lower():
        return False
    parts = [part for part in re.findall(ATTRIBUTE, tag.raw.lower()) if part.strip("/ \t\n\r\f")]
    attributes = {name: value[1:].strip().strip("\"'") for name, value in itertools.pairwise(parts) if value[0] == "="}
    return attributes.get("translate") == "no" or "notranslate" in attributes.get("class", "").split()


def find_element_end(tokens: Sequence[Token], start: int) -> int:
    """Return the index after the last token of the element whose start tag is `tokens[start]`."""
    open_names: list[str] = []
    counts: Counter[str] = Counter()
    for index in range(start, len(tokens)):
        kind, name = tokens[index].kind, tokens[index].name
        if kind == Kind.OPEN:
            if name in OPTIONAL_END and open_names[-1:] == [name]:
                counts[open_names.pop()] -= 1
                if not open_names:
                    return index
            open_names.append(name)
            counts[name] += 1
        elif kind == Kind.CLOSE and counts[name]:
            last = ""
            while last != name:
                last = open_names.pop()
                counts[last] -= 1
            if not open_names:
                return index + 1
        elif kind == Kind.CLOSE and not (name in INLINE and tokens[start].name not in INLINE):
            return index  # the end of an element around this one
        elif name == UNFINISHED:
            return index
    return len(tokens)


def decode(raw: str) -> str:
    """Return the characters that a slice of text stands for."""
    return unescape(LONG_NUMBER.sub("\ufffd", raw)).replace(SOFT_HYPHEN, "")


# -------------------------------------------------------------------------------------------------------------- units
@dataclass(slots=True)
class Node:
    """An inline element of a unit, or whatever else in it is not text.

    Of an element, a tag is empty if it is in another unit or missing. What is not an element has no closing tag, and is
    verbatim in `opening`: an image, a comment, code. If it covers text, it replaces the translation of that text.
    """

    opening: str
    start: int  # in the text of the unit, in characters
    end: int
    closing: str | None = None
    children: "list[Node]" = field(default_factory=list)
    after_space: bool = False
    before_space: bool = False

    @property
    def is_element(self) -> bool:
        return self.closing is not None


@dataclass(frozen=True, slots=True)
class Unit:
    """Text that is translated as one line, and the inline mark-up in it."""

    text: str
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class HtmlDocument:
    """A document as slices that are kept and units that are translated."""

    parts: list[str | Unit]

    @property
    def texts(self) -> list[str]:
        """The text of each unit."""
        return [part.text for part in self.parts if isinstance(part, Unit)]


def parse_document(document: str) -> HtmlDocument:
    """Find the units of a document."""
    parts: list[str | Unit] = []
    pending: list[Token] = []  # of the unit that has begun
    characters = depth = 0
    open_tags: Counter[str] = Counter()

    def finish_unit() -> None:
        nonlocal characters, depth
        parts.extend(build_parts(pending))
        pending.clear()
        open_tags.clear()
        characters = depth = 0

    tokens = [*tokenize(document)]
    index = 0
    while index < len(tokens):
        token = tokens[index]
        end = index + 1
        if token.kind == Kind.TEXT:
            raw = token.raw
            while characters + len(raw) > MAX_UNIT_CHARACTERS:
                size = find_cut(raw, MAX_UNIT_CHARACTERS - characters)
                pending.append(Token(Kind.TEXT, raw[:size]))
                finish_unit()
                raw = raw[size:]
            pending.append(Token(Kind.TEXT, raw))
            characters += len(raw)
        else:
            is_note = token.name == "sup" and any(following.name == "a" for following in tokens[index + 1 : index + 2])
            if token.kind == Kind.OPEN and (is_note or is_untranslated(token)):
                end = find_element_end(tokens, index)
                token = join_element(tokens[index:end], is_note)
            if token.name == "br" and is_complete(pending) or token.name and token.name not in INLINE:
                finish_unit()
                parts.append(token.raw)
            else:
                if token.kind == Kind.CLOSE and open_tags[token.name]:
                    open_tags[token.name] -= 1
                    depth -= 1
                elif token.kind != Kind.OTHER:
                    open_tags[token.name] += token.kind == Kind.OPEN
                    depth += 1
                if depth > MAX_DEPTH:
                    finish_unit()
                pending.append(token)
                characters += len(token.words)
        index = end
    finish_unit()
    return HtmlDocument(parts)


def is_complete(tokens: Sequence[Token]) -> bool:
    """Return whether a line break after these tokens stands between two sentences or paragraphs."""
    last = next((token for token in reversed(tokens) if token.name == "br" or not is_blank(token)), None)
    return last is not None and (last.name == "br" or decode(last.raw).rstrip(CLOSING_MARKS).endswith(END_MARKS))


def join_element(tokens: Sequence[Token], is_note: bool) -> Token:
    """Return an element that is not translated as one token. It has to stay where it is if it has no end tag.

    Args:
        is_note: whether it is the number of a note, which is not part of the sentence.
    """
    name = tokens[0].name if tokens[-1].kind == Kind.CLOSE else UNFINISHED
    words = "".join(token.raw for token in tokens if token.kind == Kind.TEXT)
    is_part_of_sentence = not is_note and name not in WITHOUT_WORDS and len(words) <= MAX_CODE_CHARACTERS
    return Token(Kind.OTHER, "".join(token.raw for token in tokens), name, words if is_part_of_sentence else "")


def find_cut(raw: str, limit: int) -> int:
    """Return where to cut text that is too long: after a sentence, else after a word, else anywhere.

    Never within an entity; 0 if there is no good place in the first `limit` characters, but further on.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(raw, limit // 2, limit)]
    if not ends:
        ends = [match.end() for match in SPACE.finditer(raw, limit // 2, limit)]
    if ends or limit < MAX_UNIT_CHARACTERS:
        return ends[-1] if ends else 0
    entity = raw.rfind("&", limit - MAX_ENTITY_CHARACTERS, limit)
    return limit if entity < 0 or ";" in raw[entity:limit] else entity


def build_parts(tokens: list[Token]) -> list[str | Unit]:
    """Return the slices and the unit of the tokens between two block tags. Without a letter, there is no unit.

    Mark-up around all words is not part of the unit.
    """
    raws = [token.raw for token in tokens]
    if not any(token.kind == Kind.TEXT and any(map(str.isalpha, decode(token.raw))) for token in tokens):
        return ["".join(raws)]
    partners = find_partners(tokens)
    worded = [index for index, token in enumerate(tokens) if not is_blank(token)]
    first, last = worded[0], worded[-1]
    # The tags before all words whose partners are not between the words, and those after all words.
    start, end = 0, len(tokens)
    while start < first and not first < partners.get(start, start) < last:
        start += 1
    while end - 1 > last and not start <= partners.get(end - 1, end) < last:
        end -= 1
    before, after, inner = raws[:start], raws[end:], tokens[start:end]
    if inner[0].kind == Kind.TEXT:
        blank, raw = split_blank(inner[0].raw, 0)
        before.append(blank)
        inner[0] = Token(Kind.TEXT, raw)
    if inner[-1].kind == Kind.TEXT:
        blank, raw = split_blank(inner[-1].raw, -1)
        after.insert(0, blank)
        inner[-1] = Token(Kind.TEXT, raw)
    return ["".join(before), build_unit(inner), "".join(after)]


def is_blank(token: Token) -> bool:
    text = token.raw if token.kind == Kind.TEXT else token.words
    return not decode(text).replace("\ufeff", " ").strip()


def split_blank(raw: str, end: int) -> tuple[str, str]:
    """Return the white space at an end of a slice of text (0: the left one, -1: the right one), and the rest."""
    slices = BLANKS.split(raw)  # text and white space in turns, first and last text
    if slices[end] or len(slices) == 1:
        return "", raw
    return (slices[1], "".join(slices[2:])) if end == 0 else (slices[-2], "".join(slices[:-2]))


def find_partners(tokens: Sequence[Token]) -> dict[int, int]:
    """Return for each start tag the index of its end tag, and the other way around, where there is one.

    An end tag belongs to the last open start tag of its name; those opened after it have no partner.
    """
    partners: dict[int, int] = {}
    open_tags: list[int] = []
    counts: Counter[str] = Counter()
    for index, token in enumerate(tokens):
        if token.kind == Kind.OPEN:
            open_tags.append(index)
            counts[token.name] += 1
        elif token.kind == Kind.CLOSE and counts[token.name]:
            last = open_tags.pop()
            counts[tokens[last].name] -= 1
            while tokens[last].name != token.name:
                last = open_tags.pop()
                counts[tokens[last].name] -= 1
            partners[last], partners[index] = index, last
    return partners


def build_unit(tokens: Sequence[Token]) -> Unit:
    """Return the unit of text and inline mark-up.

    A start tag without an end tag encloses all that follows within the same parent. An end tag without a start tag
    encloses all before it within the same parent. So the elements of a unit are a tree in any case.
    """
    partners = find_partners(tokens)
    root = Node("", 0, 0, "")
    path = [root]  # elements that are open
    node_of_tag: dict[int, Node] = {}
    points: list[Node] = []  # what is not an element, since the last text
    texts: list[str] = []
    length = 0
    spaced = True  # whether the text so far is empty or ends with a space

    def add_text(text: str) -> None:
        nonlocal length, spaced
        text = SPACE.sub(" ", text)
        for point in points if text else ():
            point.before_space = text.startswith(" ")
        if text:
            points.clear()
        if spaced:
            text = text.removeprefix(" ")
        if text:
            texts.append(text)
            length += len(text)
            spaced = text.endswith(" ")

    def close_last(closing: str) -> None:
        path[-1].end, path[-1].closing = length, closing
        path.pop()

    for index, token in enumerate(tokens):
        parent = path[-1]
        if token.kind == Kind.TEXT:
            add_text(decode(token.raw))
        elif token.kind == Kind.OPEN:
            node_of_tag[index] = Node(token.raw, length, length, "")
            parent.children.append(node_of_tag[index])
            path.append(node_of_tag[index])
        elif token.kind == Kind.CLOSE and index in partners:
            while path[-1] is not node_of_tag[partners[index]]:
                close_last("")
            close_last(token.raw)
        elif token.kind == Kind.CLOSE:
            parent.children = [Node("", parent.start, length, token.raw, parent.children)]
        else:
            point = Node(token.raw, length, length, after_space=spaced)
            parent.children.append(point)
            add_text(decode(token.words))
            point.end = length
            points.append(point)
            if token.name in SEPARATING and not spaced:
                texts.append(" ")
                length += 1
                spaced = True
    while len(path) > 1:
        close_last("")
    return Unit("".join(texts), root.children)
