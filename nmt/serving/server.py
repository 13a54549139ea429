"""Listening on a port, and the end."""

import logging
import socket
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette

from nmt.config import ServeRun
from nmt.errors import UserError
from nmt.system.logging import log

IDLE_SECONDS = 10  # after which a connection without a request is closed
BACKLOG = 1024  # connections that wait to be accepted


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
    settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "loop": "asyncio", "http": "httptools"}
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
