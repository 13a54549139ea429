"""Quoting of settings for command lines, OmegaConf and YAML, such that they read back unchanged."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

UNQUOTED_TEXT = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w./-]*|/", re.ASCII)  # needs no quotes in Hydra and shells


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in all strings of a value, which OmegaConf would read as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    return [escape_interpolations(item) for item in value] if isinstance(value, list | tuple) else value


def quote_for_hydra(text: str) -> str:
    """Quote a string for Hydra's grammar, unless it needs no quotes."""
    if UNQUOTED_TEXT.fullmatch(text) and text.lower() not in ("true", "false", "null", "nan", "inf"):
        return text
    # Backslashes are doubled before a quotation mark, and only there.
    escaped = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + (match[2] and r"\""), escape_interpolations(text))
    return f'"{escaped}"'


def quote_setting(key: str, value: str | Sequence[str]) -> str:
    """Return `key=value`, with a list for several values, that can be pasted into a shell."""
    text = quote_for_hydra(value) if isinstance(value, str) else f"[{','.join(map(quote_for_hydra, value))}]"
    return shlex.quote(f"{key}={text}")


class PlainLoader(yaml.SafeLoader):
    """Creates plain values only, and no aliases: a small file with many of them would become any amount of data."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)


def from_yaml(text: str) -> Any:
    """Invert `to_yaml`.

    Raises:
        YAMLError, ValueError: the text is not YAML, or has aliases.
    """
    return yaml.load(text, PlainLoader)
