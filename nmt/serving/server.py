"""Listening on a port, and the end."""

import logging
import socket
import sys

import uvicorn
from starlette.applications import Starlette

from nmt.errors import UserError
from nmt.serving.app import ANSWER_SECONDS
from nmt.system.logging import log

IDLE_SECONDS = 10  # after which a connection without a request is closed


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port.

    Raises:
        UserError: the host is not an address of this machine, or the port is in use or not allowed.
    """
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if sys.platform != "win32":
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that was killed is free
        server.bind((host, port))
    except (OSError, UnicodeError) as error:
        server.close()
        raise UserError(
            f"host={host} port={port} cannot be used ({error}); use another port=PORT, and host=127.0.0.1 or 0.0.0.0"
        ) from None
    return server


def build_server(app: Starlette) -> uvicorn.Server:
    """Return a server. Its `run` ends after SIGINT or SIGTERM: it refuses new requests, and answers those it has."""
    logging.getLogger("uvicorn").handlers = [*log.handlers]
    logging.getLogger("uvicorn").propagate = False
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(ANSWER_SECONDS) + 1,
    )
    return uvicorn.Server(config)
