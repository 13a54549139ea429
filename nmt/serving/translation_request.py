"""The fields of a request for translations: those of LibreTranslate's API, and those that nmt adds."""

import asyncio
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nmt.data.html_document import Block, parse_document
from nmt.decoding.html_translation import list_texts, restore_document
from nmt.decoding.translation import Translation

MAX_CHARACTERS = 10_000  # of all texts of a request
MAX_BODY_BYTES = 12 * MAX_CHARACTERS + 2**14  # a character can be \ud83d\ude00 in JSON and %F0%9F%98%80 in a form
BODY_SECONDS = 10.0  # within which a client must send the body of a request
CLOSE = {"Connection": "close"}  # after an answer to a request that has not been read to its end
HALF_SURROGATE_PAIR = re.compile("[\ud800-\udfff]")
LINE_BREAK = re.compile(r"(\r?\n)")


@dataclass(frozen=True, slots=True)
class TranslationRequest:
    """A request for translations."""

    texts: list[str]  # each may have several lines
    is_list: bool  # whether `q` was a list, so that the answer has lists
    source: str
    target: str
    alternatives: int  # number of translations of each text besides the best one
    details: bool  # whether the answer has scores, pieces, words and word links
    attention: bool  # whether the details have attention weights between words, and what else it takes to show them
    documents: list[list[str | Block]]  # each text, if these are HTML; else empty

    @property
    def lines(self) -> list[list[str]]:
        """The lines of each text, without line breaks; of HTML the text of each block."""
        if self.documents:
            return [list_texts(document) for document in self.documents]
        return [LINE_BREAK.split(text)[::2] for text in self.texts]

    def restore(self, index: int, translations: list[Translation]) -> str:
        """Return a text with the translations of its lines in their place."""
        if self.documents:
            return restore_document(self.documents[index], translations)
        parts = LINE_BREAK.split(self.texts[index])
        parts[::2] = [translation.text for translation in translations]
        return "".join(parts)


async def read_fields(request: Request) -> dict[str, Any]:
    """Return the fields of a JSON object or form. In a form, fields that are repeated become lists.

    Raises:
        HTTPException: 408, 413, 415, or 400 if the body is not valid.
    """
    body = await read_body(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise HTTPException(400, 'the body of the request is not a JSON object; send {"q": TEXT, ...}')
        return fields
    if content_type == "application/x-www-form-urlencoded":  # with UTF-8 that is not encoded, as curl -d sends it
        body = quote(body, safe=string.printable).encode()
    elif content_type != "multipart/form-data":
        raise HTTPException(415, "send JSON (Content-Type: application/json) or a form")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    form = await Request(request.scope, receive).form(max_files=0)
    lists = {name: form.getlist(name) for name in form}
    return {name: values if len(values) > 1 else values[0] for name, values in lists.items()}


async def read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the request has more than {MAX_BODY_BYTES:,} bytes", CLOSE)
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} seconds", CLOSE) from None
    return bytes(body)


def parse_translation_request(fields: dict[str, Any], max_alternatives: int) -> TranslationRequest:
    """Check the fields of a request.

    Raises:
        HTTPException: 400 if a field is missing or invalid, 413 if there is too much text, 422 if `q` is not text.
    """
    q = fields.get("q")
    if q is None:
        raise HTTPException(400, "q, the text to translate, is missing")
    texts = q if isinstance(q, list) else [q]
    for text in texts:
        if not isinstance(text, str) or HALF_SURROGATE_PAIR.search(text):
            raise HTTPException(422, "q is not a text or a list of texts; a text has no half of a surrogate pair")
    characters = sum(map(len, texts))
    if characters > MAX_CHARACTERS:
        raise HTTPException(413, f"q has {characters:,} characters, and a request may have {MAX_CHARACTERS:,}")
    for name in ("source", "target"):
        if not isinstance(fields.get(name), str):
            raise HTTPException(400, f"{name}, the code of a language, is missing; /languages lists the codes")
    attention = is_set(fields, "attention")
    is_html = parse_choice(fields, "format", ["text", "html"]) == "html"
    return TranslationRequest(
        texts=texts,
        is_list=isinstance(q, list),
        source=fields["source"],
        target=fields["target"],
        alternatives=int(parse_choice(fields, "alternatives", [str(n) for n in range(max_alternatives + 1)])),
        details=is_set(fields, "details") or attention,
        attention=attention,
        documents=[*map(parse_document, texts)] if is_html else [],
    )


def is_set(fields: dict[str, Any], name: str) -> bool:
    return parse_choice(fields, name, ["false", "true", "0", "1"]) in ("true", "1")


def parse_choice(fields: dict[str, Any], name: str, choices: Sequence[str]) -> str:
    """Return the choice that a field names; the first one if the field is missing, null, empty or false."""
    value = fields.get(name)
    if value in (None, "", False):
        return choices[0]
    if str(value).lower() not in choices:
        raise HTTPException(400, f"{name}={value!s:.40} is not one of {', '.join(choices)}")
    return str(value).lower()
