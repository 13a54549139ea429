"""Names of the runs of a sweep."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from nmt.runtime.command_line import KEYS_NOT_IN_RUN_NAMES, is_swept, parse_override

MAX_RUN_NAME_BYTES = 150  # of a run's name in a sweep; file systems allow 255
EXCLUDE_KEYS_SETTING = "hydra.job.config.override_dirname.exclude_keys"


def build_run_name(overrides: list[str], unnamed: list[str]) -> str:
    """The folder of a job of a sweep: `key=value,key=value` of what is swept, in letters that every system allows.
    Where that is too long, keys go by the least of their ends that tells them apart. Where something is left out or
    replaced, a digest of all is at the end, so that other settings have other names."""
    swept = [found for found in map(parse_override, sorted(overrides)) if found and found.key_or_group not in unnamed]
    keys = [found.key_or_group for found in swept]
    values = [format_for_name(found.value()) for found in swept]
    exact = values == [format_value(found.value()) for found in swept if not isinstance(found.value(), list | dict)]
    name = ",".join(map("=".join, zip(keys, values, strict=True)))
    if len(name) > MAX_RUN_NAME_BYTES:
        name = ",".join(f"{shorten_key(key, keys)}={value}" for key, value in zip(keys, values, strict=True))
    if exact and len(name) <= MAX_RUN_NAME_BYTES:
        return name
    digest = hashlib.sha256(",".join(str(found.input_line) for found in swept).encode()).hexdigest()
    return f"{name[: MAX_RUN_NAME_BYTES - 9].rstrip(',')}-{digest[:8]}"


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}-{format_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "+".join(map(format_value, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_for_name(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", format_value(value), flags=re.ASCII)[:40]


def shorten_key(key: str, others: Iterable[str]) -> str:
    """The last parts of a dotted key, as many as tell it apart from the others."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in others) == 1:
            return end
    return key


def exclude_constant_keys(arguments: list[str]) -> list[str]:
    """The command line of a sweep, with what is the same in all its jobs left out of their names; as it is where no
    setting of it has several values, as in a search."""
    settings = [place for place, argument in enumerate(arguments) if not argument.startswith("-")]
    same = [arguments[place].partition("=")[0].lstrip("+~") for place in settings if not is_swept(arguments[place])]
    if not {"-m", "--multirun"} & set(arguments) or len(same) == len(settings) or EXCLUDE_KEYS_SETTING in same:
        return arguments
    last = settings[-1] + 1  # settings are one row
    return [
        *arguments[:last],
        f"{EXCLUDE_KEYS_SETTING}=[{','.join([*KEYS_NOT_IN_RUN_NAMES, *same])}]",
        *arguments[last:],
    ]


OmegaConf.register_new_resolver("run_name", build_run_name, replace=True)
