"""Listening on a port: sockets, time limits of connections, and the end."""

import asyncio
import logging
import socket
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nmt.config import ServeRun
from nmt.errors import UserError
from nmt.system.logging import log

HEAD_SECONDS = 10.0  # within which a client must send the first line and the headers of a request
MAX_HEAD_BYTES = 2**16  # of these
IDLE_SECONDS = 10  # after which a connection without a request is closed
BACKLOG = 1024  # connections that wait to be accepted


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 that closes connections on which no complete head of a request arrives in time, or one that is too long.

    Uvicorn has such a limit only for connections that are idle after a response.
    """

    timer: asyncio.TimerHandle | None = None
    head_bytes = 0  # received of a head that is not complete

    def is_waiting(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def start_timer(self) -> None:
        self.timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        if self.timer is None and self.is_waiting():
            self.start_timer()
        super().data_received(data)
        if not self.is_waiting():
            self.stop_timer()
            self.head_bytes = 0
            return
        self.head_bytes += len(data)
        if self.head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {MAX_HEAD_BYTES:,} bytes.")

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)


def bind(command: ServeRun) -> socket.socket:
    """Return a socket that is bound to `host` and `port`.

    Raises:
        UserError: the host is not an address of this machine, or the port is in use or not allowed.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            command.host, command.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"host={command.host} is not the name or address of a machine ({error})") from None
    server = socket.socket(family, kind)
    try:
        if sys.platform != "win32":
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that was killed is free
        server.bind(address)
    except OSError as error:
        server.close()
        raise UserError(
            f"host={command.host} port={command.port} cannot be used: {error.strerror}; use port=PORT for another "
            "port, and host=127.0.0.1 or host=0.0.0.0"
        ) from None
    return server


def build_server(app: Starlette, command: ServeRun) -> uvicorn.Server:
    """Return a server. Its `run` ends after SIGINT or SIGTERM: it refuses new requests, and answers those it has."""
    for name in ("uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).handlers = [*log.handlers]
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).propagate = False
    settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "loop": "asyncio", "http": TimedProtocol}
    config = uvicorn.Config(
        app,
        **settings,
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(command.timeout) + 1,
    )
    return uvicorn.Server(config)
