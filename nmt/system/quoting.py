"""Quoting of settings for command lines, OmegaConf and YAML, such that they read back unchanged."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf._utils import OmegaConfDumper
from omegaconf.basecontainer import get_yaml_loader  # the module that defines it differs between versions

from nmt.errors import UserError

MAX_YAML_DEPTH = 9  # nesting levels of settings
MAX_YAML_EVENTS = 20_000  # parser events of a settings file
MAX_VALUE_LENGTH = 4_096  # characters
UNQUOTED_TEXT = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w./-]*|/", re.ASCII)  # needs no quotes in Hydra and shells
HYDRA_KEYWORDS = ("true", "false", "null", "nan", "inf")  # not strings if unquoted


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8; Python decodes invalid bytes of arguments as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in all strings of a value, which OmegaConf would read as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    return [escape_interpolations(item) for item in value] if isinstance(value, list | tuple) else value


def quote_for_hydra(text: str) -> str:
    """Quote a string for Hydra's grammar, unless it needs no quotes."""
    if UNQUOTED_TEXT.fullmatch(text) and text.lower() not in HYDRA_KEYWORDS:
        return text

    def escape(match: re.Match[str]) -> str:
        backslashes, quote = match.groups()
        return 2 * backslashes + (rf"\{quote}" if quote else "")

    escaped = re.sub(r'(\\*)("|\Z)', escape, escape_interpolations(text))
    return f'"{escaped}"'


def quote_setting(key: str, value: str | Sequence[str]) -> str:
    """Return `key=value`, with a list for several values, that can be pasted into sh, bash and zsh."""
    text = quote_for_hydra(value) if isinstance(value, str) else f"[{','.join(map(quote_for_hydra, value))}]"
    return quote_for_shell(f"{key}={text}")


def quote_for_shell(argument: str) -> str:
    """Quote an argument such that it can be pasted into sh, bash and zsh as one line."""
    if argument.isprintable() or argument.endswith("\n"):  # $() would drop a final line break
        return shlex.quote(argument)
    # Escape line breaks and control characters, which would break the line or not survive a terminal.
    octal = ""
    for char in argument:
        if char.isprintable() and char not in "\\!":
            octal += char
        else:
            octal += "".join(f"\\0{byte:03o}" for byte in char.encode())
    return f"\"$(printf '%b' {shlex.quote(octal)})\""


class _Dumper(OmegaConfDumper):
    """OmegaConf's YAML dumper that escapes line breaks and control characters, some of which YAML reads as spaces."""

    def represent_text(self, value: str) -> yaml.ScalarNode:
        if value.isprintable():
            return OmegaConfDumper.str_representer(self, value)
        return self.represent_scalar("tag:yaml.org,2002:str", value, style='"')


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def from_yaml(text: str) -> Any:
    """Invert `to_yaml`. Interpolations are read as plain strings.

    Raises:
        UserError: the text has aliases or exceeds the size limits of settings.
        YAMLError, ValueError: the text is not YAML.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        value = getattr(event, "value", "")
        is_too_large = depth > MAX_YAML_DEPTH or number > MAX_YAML_EVENTS or len(value) > MAX_VALUE_LENGTH
        if is_too_large or isinstance(event, yaml.AliasEvent):
            raise UserError(
                f"settings must not have aliases (*name), more than {MAX_YAML_DEPTH} levels, more than "
                f"{MAX_YAML_EVENTS:,} items, or values of more than {MAX_VALUE_LENGTH} characters"
            )
    return yaml.load(text, Loader=get_yaml_loader())  # a SafeLoader, which creates plain values only
