"""Deferred handling of SIGINT and SIGTERM."""

import contextlib
import os
import signal
from collections.abc import Iterator

from nmt.system.torchrun import LAUNCH_ENV

STDERR_FD = 2


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list that gets the first SIGINT or SIGTERM, which does not end the process. A second one does.

    The handler writes its message directly to the file descriptor: it may interrupt a write to the log or to a buffer
    of Python, which must not be entered again.
    """
    received: list[int] = []

    def handle_signal(number: int, _: object) -> None:
        received.append(number)
        for other in previous_handlers:
            signal.signal(other, signal.SIG_DFL)
        if LAUNCH_ENV["RANK"]:
            return
        line_break = "\n" if os.isatty(STDERR_FD) else ""  # ends a progress bar
        name = signal.Signals(number).name
        message = f"{line_break}{name}: finishing this step, then saving; send it again to stop immediately\n"
        with contextlib.suppress(OSError):  # standard error is closed
            os.write(STDERR_FD, message.encode())

    previous_handlers = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Defer the first SIGINT or SIGTERM until the end of the block. A second one is not deferred."""
    received: list[int] = []

    def handle_signal(number: int, _: object) -> None:
        received.append(number)
        restore_handlers()

    def restore_handlers() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    previous_handlers = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore_handlers()
        for number in received:
            signal.raise_signal(number)
