"""Read sentence pairs from TMX, the XML format of translation memories (TMX 1.4b), as a stream.

Only text within `seg` is used. Codes of the original format (`bpt`, `ept`, `ph`, `it`, `ut`) are left out, or replaced
with a space if they hold a line break. Nothing but the file itself is read: a document type declaration is allowed, but
its external part is not loaded, and a file that declares entities, which could expand to gigabytes, is refused.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from nmt.data.readers import BadLine, LinePair
from nmt.errors import UserError
from nmt.system.lines import MAX_LINE_BYTES, open_binary

READ_BLOCK_BYTES = 2**18
CODES = {"bpt", "ept", "ph", "it", "ut"}


def matches_language(tag: str, language: str) -> bool:
    """Return whether a language tag of TMX, such as DE-AT, is a language, such as de."""
    tag, language = (name.replace("_", "-").casefold() for name in (tag, language))
    return tag == language or tag.startswith(f"{language}-")


def read_tmx_pairs(path: Path, source: str, target: str) -> Iterator[LinePair | BadLine]:
    """Yield the pair of each translation unit, and units without a text in both languages as bad lines.

    Of several texts in the same language the first is used. Numbers are those of the line where a unit begins.

    Raises:
        UserError: the file is not well-formed XML or not TMX, declares entities, or has a tag of more than
            `MAX_LINE_BYTES`.
    """
    parser = TmxParser(path, source, target)
    with open_binary(path) as file:
        while block := file.read(READ_BLOCK_BYTES):
            yield from parser.feed(block)
    yield from parser.feed(b"", is_final=True)


class TmxParser:
    """Collects the units of a TMX file that is given in blocks."""

    def __init__(self, path: Path, source: str, target: str) -> None:
        self.path = path
        self.languages = source, target
        self.units: list[LinePair | BadLine] = []  # complete units
        self.line = 0  # where the current unit begins, 0 outside of a unit
        self.texts: dict[str, str] = {}  # of the current unit by language
        self.problem = ""  # what is wrong with the current unit
        self.language: str | None = None  # of the current `tuv`, if it is one of the two
        self.parts: list[str] | None = None  # text of the current `seg`
        self.length = 0  # of that text
        self.code_depth = 0  # number of open elements that hold codes instead of text
        self.fed_bytes = 0
        self.has_root = False
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self.start_element
        self.parser.EndElementHandler = self.end_element
        self.parser.CharacterDataHandler = self.add_text
        self.parser.EntityDeclHandler = self.refuse_entity
        self.parser.SkippedEntityHandler = self.skip_entity

    def feed(self, block: bytes, is_final: bool = False) -> list[LinePair | BadLine]:
        """Parse another block. Returns the units that it completes."""
        self.units = []
        self.fed_bytes += len(block)
        try:
            self.parser.Parse(block, is_final)
        except expat.ExpatError as error:
            raise UserError(f"{self.path}:{error.lineno}: {expat.ErrorString(error.code)}; repair the XML") from None
        except (LookupError, ValueError) as error:  # an encoding that Python does not know, or that is not allowed
            raise UserError(f"{self.path}: {error}; convert it to UTF-8") from None
        if self.fed_bytes - max(self.parser.CurrentByteIndex, 0) > MAX_LINE_BYTES:
            raise UserError(
                f"{self.path}:{self.parser.CurrentLineNumber}: a tag or comment has more than {MAX_LINE_BYTES:,} bytes"
            )
        return self.units

    def start_element(self, name: str, attributes: dict[str, str]) -> None:
        if not self.has_root:
            if name != "tmx":
                raise UserError(f"{self.path} is not TMX: its first element is <{name[:80]}>")
            self.has_root = True
        if name == "tu":
            if self.line:
                self.problem = self.problem or "a unit within another"
                self.finish_unit()
            self.line = self.parser.CurrentLineNumber
        elif name == "tuv":
            tag = attributes.get("xml:lang") or attributes.get("lang") or ""
            matches = [language for language in self.languages if matches_language(tag, language)]
            # With source=en target=en-GB, the longer one is meant by en-GB.
            self.language = max(matches, key=len, default=None)
        elif name == "seg" and self.line and self.language is not None and self.language not in self.texts:
            self.parts = []
            self.length = 0
            self.code_depth = 0
        elif name in CODES and self.parts is not None:
            self.code_depth += 1

    def end_element(self, name: str) -> None:
        if name == "seg" and self.parts is not None and self.language is not None:
            self.texts[self.language] = "".join(self.parts)
            self.parts = None
        elif name == "tuv":
            self.language = None
        elif name in CODES and self.parts is not None:
            self.code_depth -= 1
        elif name == "tu" and self.line:
            self.finish_unit()

    def add_text(self, text: str) -> None:
        if self.parts is None or self.problem:
            return
        if self.code_depth:
            text = " " * ("\n" in text)
        self.parts.append(text)
        self.length += len(text)
        if self.length > MAX_LINE_BYTES:
            self.problem = f"a text of more than {MAX_LINE_BYTES:,} characters"
            self.parts.clear()

    def refuse_entity(self, *_: object) -> None:
        raise UserError(
            f"{self.path}:{self.parser.CurrentLineNumber}: the file declares entities, which nmt refuses because they "
            "can expand to gigabytes; replace each entity with its text"
        )

    def skip_entity(self, name: str, _: bool) -> None:
        self.problem = self.problem or f"the entity &{name[:80]};, which is not defined in the file"

    def finish_unit(self) -> None:
        missing = [language for language in self.languages if language not in self.texts]
        if self.problem:
            kind = self.problem if len(self.problem) < 60 and "entity" not in self.problem else "an undefined entity"
            self.units.append(BadLine(self.path, self.line, kind, self.problem))
        elif missing:
            kind = f"no text in {' and '.join(missing)}"
            self.units.append(BadLine(self.path, self.line, kind, kind))
        else:
            source, target = self.languages
            self.units.append(LinePair(self.line, self.texts[source], self.texts[target]))
        self.line, self.texts, self.problem, self.language, self.parts = 0, {}, "", None, None
