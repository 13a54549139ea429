"""Read sentence pairs from TMX, the XML format of translation memories (TMX 1.4b), as a stream.

Only text within `seg` is used. Codes of the original format (`bpt`, `ept`, `ph`, `it`, `ut`) are left out. Nothing but
the file itself is read, and the XML parser refuses entities that expand to gigabytes.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from nmt.data.readers import BadLine, LinePair
from nmt.errors import UserError
from nmt.system.text import open_binary

CODES = {"bpt", "ept", "ph", "it", "ut"}
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def matches_language(tag: str, language: str) -> bool:
    """Return whether a language tag of TMX, such as DE-AT, is a language, such as de."""
    tag, language = (name.replace("_", "-").casefold() for name in (tag, language))
    return tag == language or tag.startswith(f"{language}-")


def read_tmx_pairs(path: Path, source: str, target: str) -> Iterator[LinePair | BadLine]:
    """Yield the pair of each translation unit, and units without a text in both languages as bad lines.

    Of several texts in the same language the first is used. Numbers count the units of the file.

    Raises:
        UserError: the file is not well-formed XML or not TMX.
    """
    number = 0
    with open_binary(path) as file:
        try:
            events = ElementTree.iterparse(file, ("start", "end"))
            _, root = next(events)
            if root.tag != "tmx":
                raise UserError(f"{path} is not TMX: its first element is <{root.tag[:80]}>")
            for event, element in events:
                if event == "end" and element.tag == "tu":
                    number += 1
                    yield read_unit(element, path, number, (source, target))
                    element.clear()
        except (ElementTree.ParseError, LookupError, ValueError) as error:  # also an encoding that Python does not know
            raise UserError(f"{path}: {error}; repair the XML, or convert it to UTF-8") from None


def read_unit(unit: ElementTree.Element, path: Path, number: int, languages: tuple[str, str]) -> LinePair | BadLine:
    texts: dict[str, str] = {}
    for version in unit.iter("tuv"):
        tag = version.get(LANGUAGE) or version.get("lang") or ""
        # With source=en target=en-GB, the longer one is meant by en-GB.
        language = max((name for name in languages if matches_language(tag, name)), key=len, default=None)
        segment = version.find("seg")
        if language is not None and segment is not None:
            texts.setdefault(language, "".join(read_text(segment)))
    if missing := [language for language in languages if language not in texts]:
        reason = f"no text in {' and '.join(missing)}"
        return BadLine(path, number, reason, reason)
    return LinePair(number, *(texts[language] for language in languages))


def read_text(element: ElementTree.Element) -> Iterator[str]:
    """Yield the text of an element without that of codes."""
    yield element.text or ""
    for child in element:
        if child.tag not in CODES:
            yield from read_text(child)
        yield child.tail or ""
