"""Names of the runs of a sweep."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from nmt.runtime.command_line import UNNAMED, is_swept, parse_override

NAME_BYTES = 150  # of a run's name in a sweep; file systems allow 255
UNNAMED_KEY = "hydra.job.config.override_dirname.exclude_keys"


def run_name(overrides: list[str], unnamed: list[str]) -> str:
    """The folder of a job of a sweep: `key=value,key=value` of what is swept, in letters that every system allows.
    Where that is too long, keys go by the least of their ends that tells them apart. Where something is left out or
    replaced, a digest of all is at the end, so that other settings have other names."""
    swept = [found for found in map(parse_override, sorted(overrides)) if found and found.key_or_group not in unnamed]
    keys = [found.key_or_group for found in swept]
    values = [in_name(found.value()) for found in swept]
    exact = values == [text_of(found.value()) for found in swept if not isinstance(found.value(), list | dict)]
    name = ",".join(map("=".join, zip(keys, values, strict=True)))
    if len(name) > NAME_BYTES:
        name = ",".join(f"{shortest(key, keys)}={value}" for key, value in zip(keys, values, strict=True))
    if exact and len(name) <= NAME_BYTES:
        return name
    digest = hashlib.sha256(",".join(str(found.input_line) for found in swept).encode()).hexdigest()
    return f"{name[: NAME_BYTES - 9].rstrip(',')}-{digest[:8]}"


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}-{text_of(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "+".join(map(text_of, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def in_name(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", text_of(value), flags=re.ASCII)[:40]


def shortest(key: str, others: Iterable[str]) -> str:
    """The last parts of a dotted key, as many as tell it apart from the others."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in others) == 1:
            return end
    return key


def name_by_varying_keys(arguments: list[str]) -> list[str]:
    """The command line of a sweep, with what is the same in all its jobs left out of their names; as it is where no
    setting of it has several values, as in a search."""
    settings = [place for place, argument in enumerate(arguments) if not argument.startswith("-")]
    same = [arguments[place].partition("=")[0].lstrip("+~") for place in settings if not is_swept(arguments[place])]
    if not {"-m", "--multirun"} & set(arguments) or len(same) == len(settings) or UNNAMED_KEY in same:
        return arguments
    last = settings[-1] + 1  # settings are one row
    return [*arguments[:last], f"{UNNAMED_KEY}=[{','.join([*UNNAMED, *same])}]", *arguments[last:]]


OmegaConf.register_new_resolver("run_name", run_name, replace=True)
