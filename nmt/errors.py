"""What users can mend: the error that tells them, and the checks of values that raise it."""

import difflib
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CONTROLS = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPED = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROLS}


def printable(text: str) -> str:
    """Text for a terminal or a log: control characters, which move the cursor or turn the direction of the text, are
    escaped, but for line breaks and tabs."""
    return text.translate(ESCAPED)


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do; it is shown alone. The
    processes of a job find the same, and the first reports it; but what is `any_rank` only one of them has found."""

    def __init__(self, message: str, any_rank: bool = False) -> None:
        super().__init__(message)
        self.any_rank = any_rank


def exit_silently() -> NoReturn:
    """End this process of a job without a word, where another one says why: torchrun then ends it, or it does so itself
    after the time that torchrun would give it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which training puts off
    time.sleep(30)
    sys.exit(1)


@contextmanager
def with_filename(path: str | Path) -> Iterator[None]:
    """What the system cannot do here is said with the name of this file: it says none where a disk becomes full."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def suggest(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the choice nearest to `word` by its dotted name or the last part of it, else `""`."""
    choices = list(choices)
    leaves = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    near = near or [leaves[leaf] for leaf in difflib.get_close_matches(word.rpartition(".")[2], leaves, n=1)]
    return f"; did you mean '{near[0]}'?" if near else ""


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise UserError(f"{key}={value} is not one of {', '.join(choices)}{suggest(value, choices)}")


def check_at_least(low: float, section: str, settings: object, *keys: str) -> None:
    """Refuse each of these keys whose value is below `low`, or more than an integer of torch holds; None means unset.
    `section` ends in a dot, or is empty."""
    for key in keys:
        value = getattr(settings, key)
        if value is not None and not low <= value < 2**63:
            raise UserError(f"{section}{key}={value} must be a number of at least {low} and below 2^63")


def check_above_zero(section: str, settings: object, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{section}{key}={value} must be a number greater than 0")


def check_share(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{key}={value} must be at least 0 and below 1")
