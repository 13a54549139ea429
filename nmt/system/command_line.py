"""From a command line to checked dataclasses, and one-line explanations of what is wrong with it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.errors import UserError, extra_command, suggest
from nmt.system.quoting import escape_interpolations, quote_setting

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"  # in a wheel
if not CONFIG_DIR.is_dir():
    CONFIG_DIR = CONFIG_DIR.parents[1] / "configs"  # in a checkout
HYDRA_OPTION = re.compile(
    "-(h|m|c|p|i|cd|sc)|--(help|hydra-help|version|multirun|cfg|package|info|config-dir|shell-completion)"
)
SWEEP_PLUGINS = ("joblib", "submitit_local", "submitit_slurm")  # installed by the extra `sweep`


def list_keys(schema: type, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a schema by the dotted names of the keys."""
    keys: dict[str, dataclasses.Field[Any]] = {}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(item.type):
            keys |= list_keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


def list_config_groups() -> dict[str, list[str]]:
    """Return the choices of each config group, such as `model`.

    Groups such as `data_model` are not among them: their files are chosen by the choices in two other groups.
    """
    folders = sorted(path for path in CONFIG_DIR.iterdir() if path.is_dir() and "_" not in path.name)
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def check_arguments(arguments: list[str], schema: type) -> None:
    """Check the names in a command line, since Hydra suggests none for those that do not exist.

    Raises:
        UserError: an argument is invalid; the message names it and says what to use instead.
    """
    keys, groups = list_keys(schema), list_config_groups()
    known = [*keys, *groups]
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+~")
        if argument.startswith("-") and not HYDRA_OPTION.fullmatch(name):
            if key in known:
                raise UserError(f"{argument}: settings are written without dashes: {key}={value or 'VALUE'}")
            raise UserError(f"there is no option {name}; use key=value{suggest_key(key, keys)}")
        if not equals or argument.startswith("-") or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set its keys, as in {key}.KEY=VALUE")
        if key not in known:
            raise UserError(f"there is no key '{key}'{suggest_key(key, keys)}; --help lists all keys")
        if not value or key in groups and value == "null":  # often an unset shell variable
            raise UserError(f"{argument}: the value is missing; set {key}=VALUE or remove {key}")


def suggest_key(key: str, keys: dict[str, dataclasses.Field[Any]]) -> str:
    """Return `"; did you mean 'x'?"` for a key that is called otherwise in other toolkits, or spelled similarly.

    Of `beam_size` one word is a key, and all words of `learning_rate` are in the help text of a key.
    """
    words = re.findall("[a-z0-9]+", key.rpartition(".")[2].lower())
    named = [name for name in keys if name.rpartition(".")[2] in words]
    texts = {name: field.metadata.get("help", "") for name, field in keys.items()}
    described = [name for name in keys if words and all(re.search(rf"\b{word}", texts[name]) for word in words)]
    if named or described:
        return f"; did you mean '{(named or described)[0]}'?"
    return suggest(key, [*keys, *list_config_groups()])


def describe_error(error: Exception) -> str:
    """Return the message of an error that is not a bug, in one line that begins with its argument, key or file."""
    if isinstance(error, MissingConfigException) and error.options:  # an OSError, too
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if choice in SWEEP_PLUGINS:
            return f"{group}={choice} needs a missing plug-in; install it with: {extra_command('sweep')}"
        return f"{group}={choice} is not one of {', '.join(error.options)}{suggest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"quote values with special characters: {quote_setting(key, value)}" if value else "use key=value"
        if value.startswith("~/"):
            remedy = f"the shell did not expand ~; use {key}=$HOME{value[1:]}"
        elif value.startswith("["):
            remedy = f"""quote the list, and items with special characters: '{key}=["A","B"]'"""
        return f"{error.override} cannot be read; {remedy}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = str(error.__cause__ or error)
        place = re.search("Error merging override (.+)", str(error)) or re.search("full_key: (.+)", text)
        lines = [line.strip(" .") for line in text.splitlines() if not re.match(r"\s*(\w+_type=|full_key:|$)", line)]
        return f"{place[1]}: {'; '.join(lines)}" if place else "; ".join(lines)
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    if isinstance(error, MemoryError):
        return f"out of memory; process less text at a time ({str(error) or 'no details'})"
    return str(error)


def to_dataclasses(config: DictConfig) -> Any:
    """Convert a composed configuration to checked dataclasses.

    Raises:
        UserError: a value is not allowed; the message has the key, the value and the allowed values.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(describe_error(error)) from error


def build_config(schema: type, values: dict[str, Any]) -> DictConfig:
    """Build an OmegaConf configuration from a dict of settings, whose strings are literal, even with `${` in them.

    Raises:
        UserError: a key does not exist, or its value has the wrong type.
    """
    config = OmegaConf.structured(schema)
    try:
        config.merge_with(escape_interpolations(values))
    except OmegaConfBaseException as error:
        raise UserError(describe_error(error)) from error
    return config
