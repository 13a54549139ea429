"""SIGINT and SIGTERM, put off until they can be answered."""

import contextlib
import os
import signal
from collections.abc import Iterator

from nmt.runtime.launch import LAUNCH_ENV

STDERR_FD = 2  # its file descriptor


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM instead of dying of it; a second one ends the process at once.

    It is answered past the log and Python's buffers: they cannot be written to where it comes while they are.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        if LAUNCH_ENV["RANK"]:
            return
        below = "\n" * os.isatty(STDERR_FD)  # a progress bar
        answer = f"{signal.Signals(number).name}: finishing this step, then saving; once more stops at once\n"
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(STDERR_FD, (below + answer).encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Put off the first SIGINT or SIGTERM until what is done here is done; a second one is not put off."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for other, handler in before.items():
            signal.signal(other, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
        for number in received:
            signal.raise_signal(number)
