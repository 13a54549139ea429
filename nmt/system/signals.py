"""Deferred handling of SIGINT and SIGTERM."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from nmt.system.torchrun import LAUNCH_ENV

STOP_MESSAGE = "finishing this step, then saving; send it again to stop immediately"


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list that gets the first SIGINT or SIGTERM, which does not end the process. A second one does."""
    received: list[int] = []

    def handle_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in previous_handlers:
            signal.signal(other, signal.SIG_DFL)
        if not LAUNCH_ENV["RANK"]:
            line_break = "\n" if os.isatty(2) else ""  # ends a progress bar
            with contextlib.suppress(OSError):  # standard error is closed
                # Not through Python's stream, whose write the signal may have interrupted.
                os.write(2, f"{line_break}{signal.Signals(number).name}: {STOP_MESSAGE}\n".encode())

    previous_handlers = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
