"""Settings as text that reads back as exactly what it was: on a command line, in OmegaConf, in a YAML file."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf._utils import OmegaConfDumper, get_yaml_loader

from nmt.errors import UserError

DEEP, EVENTS, LONG = 9, 20_000, 4_096  # levels, parts of YAML, and characters of a value that settings have at most
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w./-]*|/", re.ASCII)  # what neither Hydra nor a shell reads otherwise
WORDS = ("true", "false", "null", "nan", "inf")  # no texts to Hydra


def literal(value: Any) -> Any:
    """The same value for OmegaConf, with `${` in its texts escaped: else it would be taken for an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list | tuple) else value


def quoted(text: str) -> str:
    """A text in Hydra's grammar, as it stands where it is plain, else in double quotes."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    return '"' + re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + "\\" * bool(end[2]) + end[2], literal(text)) + '"'


def quote_setting(key: str, value: str | Sequence[str]) -> str:
    """`key=value` in a form that can be pasted into sh, bash and zsh; of several values a list."""
    text = quoted(value) if isinstance(value, str) else f"[{','.join(map(quoted, value))}]"
    return shell_quoted(f"{key}={text}")


def shell_quoted(argument: str) -> str:
    """An argument in a form that can be pasted into sh, bash and zsh, in one line."""
    if argument.isprintable() or argument.endswith("\n"):  # which $() would drop
        return shlex.quote(argument)
    # Line breaks and control characters would neither stay in one line nor reach a terminal as they are.
    octal = (c if c.isprintable() and c not in "\\!" else "".join(f"\\0{b:03o}" for b in c.encode()) for c in argument)
    return f"\"$(printf '%b' {shlex.quote(''.join(octal))})\""


class _Dumper(OmegaConfDumper):
    """As OmegaConf writes YAML, but for texts with line breaks or control characters, some of which YAML would read as
    a space: they are escaped."""

    def text(self, value: str) -> yaml.ScalarNode:
        if value.isprintable():
            return OmegaConfDumper.str_representer(self, value)
        return self.represent_scalar("tag:yaml.org,2002:str", value, style='"')


_Dumper.add_representer(str, _Dumper.text)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def from_yaml(text: str) -> Any:
    """The inverse of `to_yaml`. What looks like an interpolation is text like any other.

    Raises:
        UserError: it would unfold to much more than it is, take long to read, or look elsewhere.
        YAMLError, ValueError: it is no YAML.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        value = getattr(event, "value", "")
        if isinstance(event, yaml.AliasEvent) or depth > DEEP or number > EVENTS or len(value) > LONG:
            raise UserError(
                f"settings hold no aliases (*name), no more than {DEEP} levels and {EVENTS:,} items, and "
                f"nothing of more than {LONG} characters"
            )
    return yaml.load(text, Loader=get_yaml_loader())  # a SafeLoader: it makes nothing but plain values
