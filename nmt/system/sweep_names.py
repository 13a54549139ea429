"""Run names of a sweep."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from nmt.system.command_line import KEYS_NOT_IN_RUN_NAMES, is_swept, parse_override

MAX_RUN_NAME_BYTES = 150  # file systems allow 255
EXCLUDE_KEYS_SETTING = "hydra.job.config.override_dirname.exclude_keys"


def build_run_name(overrides: list[str], excluded_keys: list[str]) -> str:
    """Return the folder name of a job, `key=value,key=value`, in characters that all file systems allow.

    If the name is too long, keys are shortened to their last parts. If anything is cut or replaced, a digest of all
    settings is appended, so that different settings have different names.
    """
    parsed = [parse_override(override) for override in sorted(overrides)]
    swept = [override for override in parsed if override and override.key_or_group not in excluded_keys]
    keys = [override.key_or_group for override in swept]
    values = [override.value() for override in swept]
    texts = [format_for_name(value) for value in values]
    is_exact = texts == [format_value(value) for value in values if not isinstance(value, list | dict)]
    name = ",".join(f"{key}={text}" for key, text in zip(keys, texts, strict=True))
    if len(name) > MAX_RUN_NAME_BYTES:
        name = ",".join(f"{shorten_key(key, keys)}={text}" for key, text in zip(keys, texts, strict=True))
    if is_exact and len(name) <= MAX_RUN_NAME_BYTES:
        return name
    digest = hashlib.sha256(",".join(str(override.input_line) for override in swept).encode()).hexdigest()
    return f"{name[: MAX_RUN_NAME_BYTES - 9].rstrip(',')}-{digest[:8]}"


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}-{format_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "+".join(map(format_value, value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_for_name(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", format_value(value), flags=re.ASCII)[:40]


def shorten_key(key: str, others: Iterable[str]) -> str:
    """Return as few of the last parts of a dotted key as distinguish it from the other keys."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        suffix = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{suffix}") for other in others) == 1:
            return suffix
    return key


def exclude_constant_keys(arguments: list[str]) -> list[str]:
    """Exclude settings that are the same in all jobs of a sweep from the run names.

    Returns the command line unchanged if no setting has several values, as in a search.
    """
    indices = [index for index, argument in enumerate(arguments) if not argument.startswith("-")]
    constant = [argument for argument in (arguments[index] for index in indices) if not is_swept(argument)]
    constant_keys = [argument.partition("=")[0].lstrip("+~") for argument in constant]
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    if not is_sweep or len(constant) == len(indices) or EXCLUDE_KEYS_SETTING in constant_keys:
        return arguments
    excluded_keys = ",".join([*KEYS_NOT_IN_RUN_NAMES, *constant_keys])
    end = indices[-1] + 1  # Hydra needs all settings in one row
    return [*arguments[:end], f"{EXCLUDE_KEYS_SETTING}=[{excluded_keys}]", *arguments[end:]]


OmegaConf.register_new_resolver("run_name", build_run_name, replace=True)
