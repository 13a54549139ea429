"""Deferred handling of SIGINT and SIGTERM."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from nmt.system.torchrun import LAUNCH_ENV

STDERR_FD = 2
STOP_MESSAGE = "finishing this step, then saving; send it again to stop immediately"


@contextlib.contextmanager
def deferred_signals(message: str = STOP_MESSAGE) -> Iterator[list[int]]:
    """Yield a list that gets the first SIGINT or SIGTERM, which does not end the process. A second one does.

    The handler writes `message` directly to the file descriptor: it may interrupt a write to the log or to a buffer of
    Python, which must not be entered again.
    """
    received: list[int] = []

    def handle_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in previous_handlers:
            signal.signal(other, signal.SIG_DFL)
        if message and not LAUNCH_ENV["RANK"]:
            line_break = "\n" if os.isatty(STDERR_FD) else ""  # ends a progress bar
            with contextlib.suppress(OSError):  # standard error is closed
                os.write(STDERR_FD, f"{line_break}{signal.Signals(number).name}: {message}\n".encode())

    previous_handlers = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM take effect at the end of the block only."""
    with deferred_signals("") as received:
        yield
    for number in received:
        signal.raise_signal(number)
