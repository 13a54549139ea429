"""The endpoints of the server: those of LibreTranslate's API, with more fields on request.

POST /translate answers `{"translatedText": ...}`; `build_answer` has the other fields. Errors are `{"error": reason}`.
"""

import asyncio
import hmac
from dataclasses import dataclass
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nmt.config import LinksConfig, ServeRun
from nmt.data.words import find_words_without_space
from nmt.decoding.alignment import EOS_PIECE
from nmt.decoding.translation import Translation, describe_translations
from nmt.errors import UserError
from nmt.page.export import FOLDER as PAGE_FOLDER
from nmt.serving.batcher import Batcher, Group, Results
from nmt.serving.translation_request import MAX_CHARACTERS, TranslationRequest, parse_translation_request, read_fields
from nmt.system.page_template import dump_script_json, fill_template

ANSWER_SECONDS = 60.0  # within which lines must be translated
MAX_WORD_WEIGHTS = 2**18  # of an answer, divided evenly among its translations
KEY_FIELD = '<input id="key" type="password" placeholder="API key" aria-label="API key" autocomplete="off">'


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints share. Model i of the batcher translates in direction i, (source, target)."""

    command: ServeRun
    directions: list[tuple[str, str]]
    batcher: Batcher
    api_key: str | None


# ------------------------------------------------------------------------------------------------------- translation
async def translate(request: Request) -> Response:
    """POST /translate"""
    service: Service = request.app.state.service
    fields = await read_fields(request)
    given_key = str(fields.get("api_key", "")).encode(errors="replace")
    if service.api_key and not hmac.compare_digest(given_key, service.api_key.encode()):
        raise HTTPException(403, "api_key is missing or not valid; ask whoever runs this server for a key")
    wanted = await asyncio.to_thread(parse_translation_request, fields, service.command.search.beam - 1)
    model = find_model(wanted, service.directions)
    if wanted.documents and not service.batcher.translators[model].model.attends:
        raise HTTPException(400, "format=html needs a model with attention; send plain text with format=text")
    group = Group(model, 1 + wanted.alternatives, wanted.details or bool(wanted.documents))
    translating = service.batcher.submit(group, [line for lines in wanted.lines for line in lines])
    results = await wait_for(translating, request)
    return await asyncio.to_thread(lambda: JSONResponse(build_answer(wanted, results, service.command.links)))


def find_model(wanted: TranslationRequest, directions: list[tuple[str, str]]) -> int:
    """Return the index of the model for the languages of a request.

    The source `auto` stands for the only language from which there is a model into the target: nothing is detected.
    """
    matches = [
        index
        for index, (source, target) in enumerate(directions)
        if target == wanted.target and wanted.source in (source, "auto")
    ]
    if len(matches) != 1:
        what = "could be from several languages" if matches else "is not supported"
        served = ", ".join(f"{source} to {target}" for source, target in directions)
        languages = f"{wanted.source:.40} to {wanted.target:.40}"
        raise HTTPException(400, f"translation from {languages} {what}; available: {served}")
    return matches[0]


async def wait_for(translating: asyncio.Future[Results], request: Request) -> Results:
    """Return the result of a future.

    Raises:
        HTTPException: it does not come in time, or the client of the request, whose body has been read, has gone.
    """
    leaving = asyncio.ensure_future(request.receive())  # nothing but the end of the connection can follow
    events: set[asyncio.Future[Any]] = {translating, leaving}
    done, _ = await asyncio.wait(events, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if translating in done:
        return translating.result()
    translating.cancel()
    if done:
        raise HTTPException(499, "the client has gone")
    raise HTTPException(504, f"there was no translation within {ANSWER_SECONDS:g} seconds")


def build_answer(wanted: TranslationRequest, results: Results, links: LinksConfig) -> dict[str, Any]:
    """Return the JSON of an answer, given the translations of the lines of all texts.

    `alternatives` has the second best translations and so on; where a line has fewer than another, its best one is
    repeated. `details` has an object for each line, as written by `nmt.translate format=jsonl`, and with `attention`
    also what `add_attention` adds. `warnings` says which lines were cut at the maximum length.
    """
    remaining = iter(results)
    max_weights = MAX_WORD_WEIGHTS // max(1, sum(map(len, results)))
    texts, alternatives, details, warnings = [], [], [], []
    for index, lines in enumerate(wanted.lines):
        options = [next(remaining) for _ in lines]
        best, *others = [
            wanted.restore(index, [line[number] if number < len(line) else line[0] for line in options])
            for number in range(max(map(len, options), default=1))
        ]
        texts.append(best)
        alternatives.append(others)
        if wanted.details:
            described = [describe_translations(*pair, links) for pair in zip(lines, options, strict=True)]
            if wanted.attention:
                described = [add_attention(*pair, max_weights) for pair in zip(described, options, strict=True)]
            details.append(described)
        cut = [str(number) for number, line in enumerate(options, 1) if not line[0].ended]
        if cut:
            warnings.append(f"text {index + 1}, line {', '.join(cut)}: cut at the maximum length")
    answer: dict[str, Any] = {"translatedText": texts}
    if wanted.alternatives:
        answer["alternatives"] = alternatives
    if wanted.details:
        answer["details"] = details
    if not wanted.is_list:
        answer = {name: values[0] for name, values in answer.items()}
    return answer | ({"warnings": warnings} if warnings else {})


def add_attention(details: dict[str, Any], options: list[Translation], max_weights: int) -> dict[str, Any]:
    """Return the details of a line, as from `describe_translations`, with what it takes to show its attention.

    The line gets `parts`, the number of parts that it was split into. Each translation gets `word_weights`, [target
    word][source word], or None where there are none or more than `max_weights`; the indices of words that follow
    the word before them without a space, `source_no_space_before` and `target_no_space_before`; and `ended`, whether it
    was not cut at its maximum length.
    """
    details["parts"] = options[0].source_pieces.count(EOS_PIECE)
    for option, described in zip(options, details["translations"], strict=True):
        weights = option.record.word_weights()
        if weights is not None and weights.size > max_weights:
            weights = None
        described |= {
            "word_weights": None if weights is None else weights.round(4).tolist(),
            "source_no_space_before": find_words_without_space(details["source"], described["source_words"]),
            "target_no_space_before": find_words_without_space(option.text, described["target_words"]),
            "ended": option.ended,
        }
    return details


# --------------------------------------------------------------------------------------------------- other endpoints
async def languages(request: Request) -> Response:
    """GET or POST /languages: the source languages, each with its targets. Names are codes, as in `data.source`."""
    targets: dict[str, list[str]] = {}
    for source, target in sorted(request.app.state.service.directions):
        targets.setdefault(source, []).append(target)
    return JSONResponse([{"code": code, "name": code, "targets": found} for code, found in targets.items()])


async def frontend_settings(request: Request) -> Response:
    """GET /frontend/settings: what web clients ask first."""
    service: Service = request.app.state.service
    source, target = ({"code": code, "name": code} for code in service.directions[0])
    settings = {
        "apiKeys": service.api_key is not None,
        "charLimit": MAX_CHARACTERS,
        "filesTranslation": False,
        "frontendTimeout": 500,
        "keyRequired": service.api_key is not None,
        "language": {"source": source, "target": target},
        "suggestions": False,
        "supportedFilesFormat": [],
    }
    return JSONResponse(settings)


async def health(request: Request) -> Response:
    """GET /health"""
    return JSONResponse({"status": "ok"})


async def page(request: Request) -> Response:
    """GET /"""
    service: Service = request.app.state.service
    models = [
        {"languages": {"source": source, "target": target}, "attends": translator.model.attends}
        for (source, target), translator in zip(service.directions, service.batcher.translators, strict=True)
    ]
    data = {"models": models, "alternatives": service.command.search.beam - 1, "maxCharacters": MAX_CHARACTERS}
    title = " \N{RIGHTWARDS ARROW} ".join(service.directions[0]) if len(models) == 1 else "Translation"
    parts = {"TITLE": escape(title), "KEY": KEY_FIELD if service.api_key else "", "DATA": dump_script_json(data)}
    return HTMLResponse(fill_template(PAGE_FOLDER / "served.html", parts))


async def show_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        reason = str(error) if isinstance(error, UserError) else "the server failed; its log says why"
        error = HTTPException(500, reason)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def build_app(service: Service) -> Starlette:
    routes = [
        Route("/", page),
        Route("/translate", translate, methods=["POST"]),
        Route("/languages", languages, methods=["GET", "POST"]),
        Route("/frontend/settings", frontend_settings),
        Route("/health", health),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ClientDisconnect, UserError, Exception), show_error)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    return app
