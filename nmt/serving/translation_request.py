"""The fields of a request for translations: those of LibreTranslate's API, and those that nmt adds."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nmt.data.html_document import Block, parse_document
from nmt.decoding.html_translation import list_texts

BODY_SECONDS = 10.0  # within which a client must send the body of a request
BYTES_PER_CHARACTER = 12  # of a body: a character beyond U+FFFF as \ud83d\ude00 in JSON, or as %F0%9F%98%80 in a form
OTHER_FIELDS_BYTES = 2**14  # everything but the text
MAX_FORM_FIELDS = 1000
MAX_QUOTED_CHARS = 40  # of a value in an error message
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

    def lines(self) -> list[list[str]]:
        """Return the lines of each text, without line breaks; of HTML the text of each block."""
        if self.documents:
            return [list_texts(document) for document in self.documents]
        return [LINE_BREAK.split(text)[::2] for text in self.texts]


def restore_line_breaks(text: str, translations: list[str]) -> str:
    """Join the translations of the lines of a text by the line breaks of the text."""
    parts = LINE_BREAK.split(text)
    parts[::2] = translations
    return "".join(parts)


async def read_fields(request: Request, max_characters: int) -> dict[str, Any]:
    """Return the fields of a JSON object or form. In a form, fields that are repeated become lists.

    Raises:
        HTTPException: 408, 413, 415, or 400 if the body is not valid.
    """
    body = await read_body(request, BYTES_PER_CHARACTER * max_characters + OTHER_FIELDS_BYTES)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == "application/json":
            fields = json.loads(body)
        elif content_type == "application/x-www-form-urlencoded":
            form = parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FORM_FIELDS)
            fields = {name: values if len(values) > 1 else values[0] for name, values in form.items()}
        elif content_type == "multipart/form-data":
            fields = await parse_multipart(request, body)
        else:
            raise HTTPException(415, "send JSON (Content-Type: application/json) or a form")
    except (ValueError, RecursionError):
        raise HTTPException(400, f"the body of the request is not valid {content_type}") from None
    if not isinstance(fields, dict):
        raise HTTPException(400, 'the body of the request is not a JSON object; send {"q": TEXT, ...}')
    return fields


async def read_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise HTTPException(413, f"the request has more than {limit:,} bytes", CLOSE)
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} seconds", CLOSE) from None
    return bytes(body)


async def parse_multipart(request: Request, body: bytes) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    parser = Request(request.scope, receive)
    async with parser.form(max_files=0, max_fields=MAX_FORM_FIELDS, max_part_size=len(body)) as form:
        lists = {name: form.getlist(name) for name in form}
    return {name: values if len(values) > 1 else values[0] for name, values in lists.items()}


def parse_translation_request(fields: dict[str, Any], max_characters: int, max_alternatives: int) -> TranslationRequest:
    """Check the fields of a request.

    Raises:
        HTTPException: 400 if a field is missing or invalid, 413 if there is too much text, 422 if `q` is not text.
    """
    q = fields.get("q")
    if q is None:
        raise HTTPException(400, "q, the text to translate, is missing")
    texts = q if isinstance(q, list) else [q]
    for text in texts:
        if not isinstance(text, str):
            raise HTTPException(422, "q is not a text or a list of texts")
        if HALF_SURROGATE_PAIR.search(text):
            raise HTTPException(422, "q has half of a surrogate pair, which is not valid text")
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise HTTPException(413, f"q has {characters:,} characters, and a request may have {max_characters:,}")
    for name in ("source", "target"):
        if not isinstance(fields.get(name), str):
            raise HTTPException(400, f"{name}, the code of a language, is missing; /languages lists the codes")
    if fields.get("format") not in (None, "", "text", "html"):
        raise HTTPException(400, f"format={quote(fields['format'])} is not one of text, html")
    attention = parse_flag(fields, "attention")
    return TranslationRequest(
        texts=texts,
        is_list=isinstance(q, list),
        source=fields["source"],
        target=fields["target"],
        alternatives=parse_number(fields, "alternatives", max_alternatives),
        details=parse_flag(fields, "details") or attention,
        attention=attention,
        documents=[*map(parse_document, texts)] if fields.get("format") == "html" else [],
    )


def parse_number(fields: dict[str, Any], name: str, maximum: int) -> int:
    value = fields.get(name)
    if value in (None, "", False):
        return 0
    is_number = (
        isinstance(value, int) and value is not True or isinstance(value, str) and re.fullmatch(r"\d{1,9}", value)
    )
    if not is_number or not 0 <= int(value) <= maximum:
        raise HTTPException(400, f"{name}={quote(value)} is not a whole number from 0 to {maximum}")
    return int(value)


def parse_flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value in (None, False, "", "false", "0"):
        return False
    if value in (True, "true", "1"):
        return True
    raise HTTPException(400, f"{name}={quote(value)} is neither true nor false")


def quote(value: object) -> str:
    """Return a value of a request for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
