"""Parts of messages: counts, lists of names, clipped values, errors of libraries."""

from collections.abc import Sequence
from typing import Any

MAX_LISTED_LINES = 5  # line numbers in a message
MAX_NAMES_SHOWN = 20  # names in a message
MAX_VALUE_CHARS = 100  # characters of a name or value shown in a message
MAX_ERROR_CHARS = 300  # characters of an error of a library shown in a message


def pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_first_lines(numbers: Sequence[int]) -> str:
    return f"first: {', '.join(map(str, numbers[:MAX_LISTED_LINES]))}"


def clip_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def list_names(names: list[str]) -> str:
    """Return the first names, comma-separated, for a message; long and unprintable ones are clipped and escaped."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    shown = (name[:MAX_VALUE_CHARS] if name.isprintable() else clip_repr(name) for name in names[:MAX_NAMES_SHOWN])
    return ", ".join(shown) + more if names else "nothing"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop, or the name of the error if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:MAX_ERROR_CHARS]
