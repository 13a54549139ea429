"""The endpoints of the server: those of LibreTranslate's API, with more fields on request.

POST /translate answers `{"translatedText": ...}`; `Service.build_answer` has the other fields. Errors are
`{"error": reason}`.
"""

import asyncio
import hmac
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nmt.config import ServeRun
from nmt.data.words import find_glued_words
from nmt.decoding.alignment import EOS_PIECE
from nmt.decoding.html_translation import restore_document
from nmt.decoding.translation import Translation, describe_translations
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.page.export import FOLDER as PAGE_FOLDER
from nmt.serving.batcher import Batcher, ClosedError, Group, QueueFullError
from nmt.serving.prometheus import LINES, REQUESTS, SECONDS
from nmt.serving.translation_request import (
    TranslationRequest,
    parse_translation_request,
    quote,
    read_fields,
    restore_line_breaks,
)
from nmt.system.page_template import dump_script_json, fill_template

WEIGHT_DIGITS = 4
MAX_WORD_WEIGHTS = 2**18  # of an answer; the JSON of more would hold up the other requests
KEY_FIELD = '<input id="key" type="password" placeholder="API key" aria-label="API key" autocomplete="off">'


class Direction(NamedTuple):
    """The languages that a model translates between, as its training data names them."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Service:
    """The endpoints and what they share. Model i of the batcher translates in direction i."""

    command: ServeRun
    directions: list[Direction]
    batcher: Batcher
    api_key: str | None

    # ------------------------------------------------------------------------------------------------------ endpoints
    async def translate(self, request: Request) -> Response:
        """POST /translate"""
        start_time, status = time.perf_counter(), 500
        try:
            response = await self.answer(request)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        except ClientDisconnect:
            status = 499
            raise
        finally:
            REQUESTS.labels(status).inc()
            SECONDS.observe(time.perf_counter() - start_time)

    async def detect(self, request: Request) -> Response:
        """POST /detect"""
        self.check_key(await read_fields(request, self.command.max_characters))
        raise HTTPException(501, "this server does not detect languages; give source, one of those in /languages")

    async def languages(self, request: Request) -> Response:
        """GET or POST /languages: the source languages, each with its targets. Names are codes, as in `data.source`."""
        codes = sorted({direction.source for direction in self.directions})
        return JSONResponse(
            [
                {
                    "code": code,
                    "name": code,
                    "targets": sorted(target for source, target in self.directions if source == code),
                }
                for code in codes
            ]
        )

    async def frontend_settings(self, request: Request) -> Response:
        """GET /frontend/settings: what web clients ask first."""
        first = self.directions[0]
        return JSONResponse(
            {
                "apiKeys": self.api_key is not None,
                "charLimit": self.command.max_characters,
                "filesTranslation": False,
                "frontendTimeout": 500,
                "keyRequired": self.api_key is not None,
                "language": {side: {"code": code, "name": code} for side, code in first._asdict().items()},
                "suggestions": False,
                "supportedFilesFormat": [],
            }
        )

    async def health(self, request: Request) -> Response:
        """GET /health"""
        if not self.batcher.thread.is_alive():
            raise HTTPException(503, "the thread that translates has ended")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """GET /"""
        directions = [f"{source} \N{RIGHTWARDS ARROW} {target}" for source, target in self.directions]
        data = {
            "models": [
                {"languages": direction._asdict(), "attends": translator.model.attends}
                for direction, translator in zip(self.directions, self.batcher.translators, strict=True)
            ],
            "alternatives": self.command.search.beam - 1,
            "maxCharacters": self.command.max_characters,
        }
        parts = {
            "TITLE": escape(directions[0] if len(directions) == 1 else "Translation"),
            "KEY": KEY_FIELD if self.api_key else "",
            "DATA": dump_script_json(data),
        }
        return HTMLResponse(fill_template(PAGE_FOLDER / "served.html", parts))

    # -------------------------------------------------------------------------------------------------------- answers
    async def answer(self, request: Request) -> Response:
        """Return the response to a request for a translation.

        Raises:
            HTTPException: the request is not valid, or it cannot be answered now.
            ClientDisconnect: the client has gone.
        """
        fields = await read_fields(request, self.command.max_characters)
        self.check_key(fields)
        wanted = parse_translation_request(fields, self.command.max_characters, self.command.search.beam - 1)
        model = self.find_model(wanted)
        translator = self.batcher.translators[model]
        if wanted.documents and not translator.model.attends:
            raise HTTPException(400, "format=html needs a model with attention; send plain text with format=text")
        group = Group(model, 1 + wanted.alternatives, wanted.details or bool(wanted.documents))
        lines = [line for lines in wanted.lines() for line in lines]
        results = await self.translate_lines(group, lines, request)
        LINES.inc(len(lines))
        build = partial(self.build_answer, wanted, results, translator)
        return JSONResponse(await asyncio.to_thread(build) if wanted.details or wanted.documents else build())

    async def translate_lines(self, group: Group, lines: Sequence[str], request: Request) -> list[list[Translation]]:
        """Return the `n_best` translations of each line, best first.

        Raises:
            HTTPException: the lines are not accepted, or not translated in time.
            ClientDisconnect: the client of the request, whose body must have been read, has gone.
        """
        try:
            translating = asyncio.wrap_future(self.batcher.submit(group, lines))
        except QueueFullError:
            raise HTTPException(429, "too many requests wait; try again later", {"Retry-After": "1"}) from None
        except ClosedError:
            raise HTTPException(503, "the server is being stopped") from None
        leaving = asyncio.ensure_future(request.receive())  # nothing but the end of the connection can follow
        events: set[asyncio.Future[Any]] = {translating, leaving}
        done, _ = await asyncio.wait(events, timeout=self.command.timeout, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if translating in done:
            return translating.result()
        translating.cancel()  # without effect once it has begun
        if done:
            raise ClientDisconnect
        raise HTTPException(504, f"there was no translation within {self.command.timeout:g} seconds")

    def build_answer(
        self, wanted: TranslationRequest, results: list[list[Translation]], translator: Translator
    ) -> dict[str, Any]:
        """Return the JSON of an answer, given the translations of each line of the texts by a translator.

        `alternatives` has the second best translations and so on; where a line has fewer than another, its best one is
        repeated. `details` has an object for each line, as written by `nmt.translate format=jsonl`, and with
        `attention` also what `add_attention` adds, up to `MAX_WORD_WEIGHTS` in all. `warnings` says which lines were
        cut at the maximum length.
        """
        rows = iter(results)
        room = MAX_WORD_WEIGHTS
        texts, alternatives, details, warnings = [], [], [], []
        for index, (text, lines) in enumerate(zip(wanted.texts, wanted.lines(), strict=True)):
            options = [next(rows) for _ in lines]
            versions = []
            for number in range(max(map(len, options), default=1)):
                chosen = [line[number] if number < len(line) else line[0] for line in options]
                if wanted.documents:
                    versions.append(restore_document(wanted.documents[index], chosen))
                else:
                    versions.append(restore_line_breaks(text, [translation.text for translation in chosen]))
            texts.append(versions[0])
            alternatives.append(versions[1:])
            if wanted.details:
                details.append(
                    [describe_translations(*pair, self.command.links) for pair in zip(lines, options, strict=True)]
                )
                if wanted.attention:
                    for line, described in zip(options, details[-1], strict=True):
                        room -= add_attention(described, line, translator.model.max_source_positions, room)
            cut = [str(number) for number, line in enumerate(options, 1) if not line[0].ended]
            if cut:
                warnings.append(f"text {len(texts)}, line {', '.join(cut)}: cut at the maximum length")
        answer: dict[str, Any] = {"translatedText": texts}
        if wanted.alternatives:
            answer["alternatives"] = alternatives
        if wanted.details:
            answer["details"] = details
        if not wanted.is_list:
            answer = {name: values[0] for name, values in answer.items()}
        return answer | ({"warnings": warnings} if warnings else {})

    # --------------------------------------------------------------------------------------------------------- checks
    def check_key(self, fields: dict[str, Any]) -> None:
        given = fields.get("api_key")
        if self.api_key is None:
            return
        if not isinstance(given, str) or not given:
            raise HTTPException(403, "api_key is missing; ask whoever runs this server for a key")
        if not hmac.compare_digest(given.encode(errors="replace"), self.api_key.encode()):
            raise HTTPException(403, "api_key is not valid")

    def find_model(self, wanted: TranslationRequest) -> int:
        """Return the index of the model for the languages of a request.

        The source `auto` stands for the only language from which there is a model into the target: nothing is detected.
        """
        source, target = wanted.source, wanted.target
        matches = [
            index
            for index, direction in enumerate(self.directions)
            if direction.target == target and source in (direction.source, "auto")
        ]
        if len(matches) == 1:
            return matches[0]
        served = ", ".join(f"{direction.source} to {direction.target}" for direction in self.directions)
        what = f"translation from {quote(source)} to {quote(target)} is not supported"
        if len(matches) > 1:
            what = "source=auto could be several languages, and this server does not detect languages"
        raise HTTPException(400, f"{what}; available: {served}")


def add_attention(details: dict[str, Any], options: list[Translation], reach: int | None, max_weights: int) -> int:
    """Add to the details of a line, as returned by `describe_translations`, what it takes to show its attention.

    The line gets `parts`, the number of parts that it was split into, and `beyond_reach`, whether attention cannot
    reach the end of one of them. Each translation gets `word_weights`, [target word][source word], or None; the indices
    of words that follow the word before them without a space, `source_glued` and `target_glued`; and `ended`, whether
    it was not cut at its maximum length.

    Args:
        reach: number of source pieces that attention can reach; None: all.
        max_weights: how many weights may be added. Matrices for which there is no room are None.

    Returns:
        The number of weights that were added.
    """
    added = 0
    ends = [end for end, piece in enumerate(options[0].source_pieces, 1) if piece == EOS_PIECE]
    lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    for option, described in zip(options, details["translations"], strict=True):
        size = len(described["source_words"]) * len(described["target_words"])
        weights = option.record.word_weights() if added + size <= max_weights else None
        if weights is not None:
            added += size
        described |= {
            "word_weights": None if weights is None else weights.round(WEIGHT_DIGITS).tolist(),
            "source_glued": find_glued_words(details["source"], described["source_words"]),
            "target_glued": find_glued_words(option.text, described["target_words"]),
            "ended": option.ended,
        }
    details |= {"parts": len(lengths), "beyond_reach": reach is not None and max(lengths, default=0) > reach}
    return added


async def show_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if not isinstance(error, HTTPException):
        reason = str(error) if isinstance(error, UserError) else "the server failed; its log says why"
        error = HTTPException(500, reason)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def build_app(service: Service) -> Starlette:
    routes = [
        Route("/", service.page),
        Route("/translate", service.translate, methods=["POST"]),
        Route("/detect", service.detect, methods=["POST"]),
        Route("/languages", service.languages, methods=["GET", "POST"]),
        Route("/frontend/settings", service.frontend_settings),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ClientDisconnect, UserError, Exception), show_error)
    return Starlette(routes=routes, exception_handlers=handlers)
