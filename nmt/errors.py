"""Errors that users can fix, and checks of settings that raise them."""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# C0 and C1 control characters without tab and line feed, and bidirectional controls.
CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROL_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROL_CODES}


def escape_controls(text: str) -> str:
    """Escape control characters, which could move the cursor of a terminal or reverse the text direction.

    Line breaks and tabs are kept.
    """
    return text.translate(CONTROL_ESCAPES)


class UserError(Exception):
    """An error that the user can fix. Its message, shown without a traceback, says what is wrong and what to do.

    Usually all ranks raise the same error and rank 0 reports it. With `any_rank` the rank that raises it reports it.
    """

    def __init__(self, message: str, any_rank: bool = False) -> None:
        super().__init__(message)
        self.any_rank = any_rank


@contextmanager
def with_filename(path: str | Path) -> Iterator[None]:
    """Set the file name of any OSError raised inside, which has none if, for example, the disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest choice, by dotted name or its last part, or `""` if none is."""
    choices = list(choices)
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if not matches:
        choice_by_leaf = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
        leaves = difflib.get_close_matches(word.rpartition(".")[2], choice_by_leaf, n=1)
        matches = [choice_by_leaf[leaf] for leaf in leaves]
    return f"; did you mean '{matches[0]}'?" if matches else ""


def extra_command(extra: str) -> str:
    """Return the command that installs an extra. Double quotes work in every shell, also on Windows."""
    return f'pip install "attention-nmt[{extra}]"'


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise UserError(f"{key}={value} is not one of {', '.join(choices)}{suggest(value, choices)}")


def check_choices(section: str, settings: object, **choices: Iterable[str]) -> None:
    """Raise a `UserError` unless the value of each key is None or one of its choices.

    `section` is the prefix of the keys in messages, empty or ending in a dot, here and below.
    """
    for key, values in choices.items():
        if (value := getattr(settings, key)) is not None:
            check_choice(f"{section}{key}", value, values)


def check_at_least(low: float, section: str, settings: object, *keys: str) -> None:
    """Raise a `UserError` unless the value of each key is None, or at least `low` and below 2^63."""
    for key in keys:
        value = getattr(settings, key)
        if value is not None and not low <= value < 2**63:
            raise UserError(f"{section}{key}={value} must be at least {low} and below 2^63")


def check_above_zero(section: str, settings: object, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{section}{key}={value} must be greater than 0")


def check_fraction(section: str, settings: object, *keys: str) -> None:
    for key in keys:
        if not 0 <= getattr(settings, key) < 1:
            raise UserError(f"{section}{key}={getattr(settings, key)} must be at least 0 and below 1")
