"""Dataclass fields with help texts."""

import dataclasses
from typing import Any


def setting(default: Any, help_text: str) -> Any:
    """Return a dataclass field whose metadata holds the text that `--help` shows next to the key.

    Args:
        default: the default value; a type, such as `list` or `dict`, is the default factory.
        help_text: meaning, unit, choices as `a | b`, and what null stands for.
    """
    metadata = {"help": help_text}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
