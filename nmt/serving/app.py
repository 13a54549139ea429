"""The endpoints of the server: those of LibreTranslate's API, with more fields on request.

POST /translate answers `{"translatedText": ...}`; `Service.build_answer` has the other fields. Errors are
`{"error": reason}`.
"""

import asyncio
import hmac
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
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
from nmt.system.logging import log
from nmt.system.page_template import dump_script_json, fill_template

STREAM_LINES = 16  # lines of a streamed request that are translated at a time
PARTIAL_SECONDS = 0.05  # between two events with what is translated so far
WEIGHT_DIGITS = 4
MAX_WORD_WEIGHTS = 2**18  # of an answer or an event; the JSON of more would hold up the other requests
KEY_FIELD = '<input id="key" type="password" placeholder="API key" aria-label="API key" autocomplete="off">'
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second is for nginx


class Direction(NamedTuple):
    """The languages that a model translates between, as its training data names them."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a request, and where it is."""

    index: int  # of the text, from 0
    number: int  # of the line in the text, from 1
    line: str

    def names(self) -> dict[str, int]:
        """Return the fields of an event that say which line it is about."""
        return {"index": self.index, "line": self.number}


class TextsSoFar:
    """The best translations so far of lines. The translation thread puts them, and the event loop takes them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.texts: dict[int, str] = {}
        self.taken: dict[int, str] = {}

    def put(self, index: int, text: str) -> None:
        """Set the text of a line."""
        self.texts[index] = text
        if not self.changed.is_set():
            self.loop.call_soon_threadsafe(self.changed.set)

    def announce(self, _: object) -> None:
        """Wake up who waits for news, without a text."""
        self.changed.set()

    def take(self) -> list[tuple[int, str]]:
        """Return (index, text) for each text that has changed since the last call."""
        self.changed.clear()
        changed = {index: text for index, text in self.texts.copy().items() if self.taken.get(index) != text}
        self.taken |= changed
        return sorted(changed.items())


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
        response: Response | None = None
        try:
            response = await self.answer(request, start_time)
            status = response.status_code
        except HTTPException as error:
            status = error.status_code
            raise
        except ClientDisconnect:
            status = 499
            raise
        finally:
            if not isinstance(response, StreamingResponse):  # of which `stream_events` counts the end
                count_request(status, start_time)
        return response

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
    async def answer(self, request: Request, start_time: float) -> Response:
        """Return the response to a request for a translation.

        Args:
            start_time: of the request, as `time.perf_counter` gives it.

        Raises:
            HTTPException: the request is not valid, or it cannot be answered now.
            ClientDisconnect: the client has gone, and its lines are not translated any further.
        """
        fields = await read_fields(request, self.command.max_characters)
        self.check_key(fields)
        wanted = parse_translation_request(fields, self.command.max_characters, self.command.search.beam - 1)
        model = self.find_model(wanted)
        translator = self.batcher.translators[model]
        if wanted.documents and not translator.model.attends:
            raise HTTPException(400, "format=html needs a model with attention; send plain text with format=text")
        group = Group(model, 1 + wanted.alternatives, wanted.details or bool(wanted.documents))
        if wanted.stream:
            events = self.stream_events(wanted, group, start_time)
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        lines = [line for lines in wanted.lines() for line in lines]
        results = await self.translate_lines(group, lines, request)
        if not (wanted.details or wanted.documents):
            return JSONResponse(self.build_answer(wanted, results, translator))
        return await asyncio.to_thread(
            lambda: JSONResponse(self.build_answer(wanted, results, translator))
        )  # takes long

    async def stream_events(self, wanted: TranslationRequest, group: Group, start_time: float) -> AsyncIterator[str]:
        """Yield an event `line` for each line, in order, and an event `done` with the answer; if it fails, `error`.

        With `partial`, events `partial` have the best translation so far of lines that are being translated. Lines are
        submitted a few at a time, so that a long text neither fills the queue nor is translated for nobody when the
        client has gone.
        """
        places = [
            Place(index, number, line)
            for index, lines in enumerate(wanted.lines())
            for number, line in enumerate(lines, 1)
        ]
        translator = self.batcher.translators[group.translator]
        results: list[list[Translation]] = []
        status = 499  # unless it ends
        try:
            for first in range(0, len(places), STREAM_LINES):
                chunk = places[first : first + STREAM_LINES]
                news = TextsSoFar()
                futures = self.submit(group, [place.line for place in chunk], news.put if wanted.partial else None)
                try:
                    for place, future in zip(chunk, futures, strict=True):
                        async for row, text in self.follow(future, news):
                            if not futures[row].done():
                                yield format_event("partial", {**chunk[row].names(), "translatedText": text})
                        options = future.result()
                        LINES.inc()
                        event = await asyncio.to_thread(self.build_line_event, wanted, place, options, translator)
                        if not wanted.documents:  # which need the attention weights in the end
                            options = [Translation(option.text, ended=option.ended) for option in options]
                        results.append(options)
                        yield event
                finally:
                    cancel(futures)
            answer = await asyncio.to_thread(self.build_answer, replace(wanted, details=False), results, translator)
            status = 200
            yield format_event("done", answer)
        except Exception as error:
            if not isinstance(error, (HTTPException, UserError)):
                log.exception("a request failed")
            failure = to_http_exception(error)
            status = failure.status_code
            yield format_event("error", {"error": failure.detail, "status": status})
        finally:
            count_request(status, start_time)

    async def follow(
        self, future: "asyncio.Future[list[Translation]]", news: TextsSoFar
    ) -> AsyncIterator[tuple[int, str]]:
        """Yield (index, text) for each text that is new, until a line has been translated.

        Raises:
            HTTPException: that takes longer than `timeout`.
        """
        deadline = time.monotonic() + self.command.timeout
        future.add_done_callback(news.announce)
        while not future.done():
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise self.make_timeout_error()
            with suppress(TimeoutError):
                await asyncio.wait_for(news.changed.wait(), seconds)
            for item in news.take():
                yield item
            await asyncio.wait({future}, timeout=PARTIAL_SECONDS)

    def build_line_event(
        self, wanted: TranslationRequest, place: Place, options: list[Translation], translator: Translator
    ) -> str:
        """Return the event with the translations of a line."""
        wanted_line = replace(wanted, texts=[place.line], documents=[], is_list=False)
        answer = self.build_answer(wanted_line, [options], translator)
        return format_event("line", {**place.names(), **answer})

    async def translate_lines(self, group: Group, lines: Sequence[str], request: Request) -> list[list[Translation]]:
        """Return the `n_best` translations of each line, best first.

        Raises:
            HTTPException: the lines are not accepted, or not translated in time.
            ClientDisconnect: the client of the request, whose body must have been read, has gone.
        """
        futures = self.submit(group, lines)
        translating = asyncio.ensure_future(wait_for_all(futures))
        leaving = asyncio.ensure_future(request.receive())  # nothing but the end of the connection can follow
        try:
            done, _ = await asyncio.wait(
                {translating, leaving}, timeout=self.command.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if translating in done:
                results = translating.result()
                LINES.inc(len(lines))
                return results
        finally:
            cancel([translating, leaving, *futures])
        if done:
            raise ClientDisconnect
        raise self.make_timeout_error()

    def submit(
        self, group: Group, lines: Sequence[str], show: Callable[[int, str], object] | None = None
    ) -> "list[asyncio.Future[list[Translation]]]":
        """Submit lines to the batcher, and return a future for each.

        Raises:
            HTTPException: they are not accepted.
        """
        try:
            return [*map(asyncio.wrap_future, self.batcher.submit(group, lines, show))]
        except QueueFullError:
            raise HTTPException(429, "too many requests wait; try again later", {"Retry-After": "1"}) from None
        except ClosedError:
            raise HTTPException(503, "the server is being stopped") from None

    def make_timeout_error(self) -> HTTPException:
        return HTTPException(504, f"there was no translation within {self.command.timeout:g} seconds")

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
                        room -= add_attention(described, line, translator.model.reach, room)
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


def count_request(status: int, start_time: float) -> None:
    """Count a request that has been answered, or left by its client."""
    REQUESTS.labels(status).inc()
    SECONDS.observe(time.perf_counter() - start_time)


async def wait_for_all(futures: "list[asyncio.Future[list[Translation]]]") -> list[list[Translation]]:
    return [await future for future in futures]


def cancel(futures: "Iterable[asyncio.Future[Any]]") -> None:
    """Cancel futures that nobody waits for any more."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()  # asyncio logs exceptions that nobody has asked for


def format_event(name: str, data: dict[str, Any]) -> str:
    """Return a server-sent event. JSON has no raw line breaks, so the data is one line."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def to_http_exception(error: Exception) -> HTTPException:
    """Return an exception with the status and the reason that a client gets."""
    if isinstance(error, HTTPException):
        return error
    return HTTPException(500, str(error) if isinstance(error, UserError) else "the server failed; its log says why")


async def show_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    answer = to_http_exception(error)
    return JSONResponse({"error": answer.detail}, answer.status_code, answer.headers)


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
