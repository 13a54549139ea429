"""Settings from a YAML file: `config=FILE`."""

import dataclasses
import logging
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.errors import UserError, suggest
from nmt.system.command_line import (
    COMMAND_ONLY_KEYS,
    CONFIG_DIR,
    describe_os_error,
    explain_hydra_error,
    list_key_types,
    parse_override,
)
from nmt.system.messages import on_one_line
from nmt.system.quoting import escape_interpolations, from_yaml, quote_for_hydra, quote_setting

MAX_SETTINGS_BYTES = 2**22


def read_settings_file(argument: str, schema: type, groups: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the path in `config=FILE` and the settings in the file by dotted key.

    Raises:
        UserError: the file does not exist or is not YAML, or the command does not have a key or its value is invalid.
    """
    override = parse_override(argument)
    if override is None or override.is_sweep_override() or not isinstance(path := override.value(), str):
        remedy = quote_setting("config", argument.partition("=")[2])
        raise UserError(f"{argument}: config= takes one file; quote names with special characters: {remedy}")
    if os.path.isdir(path):
        raise UserError(
            f"{argument} is a folder; give the file: {quote_setting('config', os.path.join(path, 'config.yaml'))}"
        )
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SETTINGS_BYTES + 1)
        if len(content) > MAX_SETTINGS_BYTES:
            raise UserError(f"the file has more than {MAX_SETTINGS_BYTES:,} bytes")
        tree = from_yaml(content.decode())
    except OSError as error:
        raise UserError(f"config={describe_os_error(error)}") from None
    except UserError as error:
        raise UserError(f"config={path}: {error}") from None
    except Exception as error:  # errors of YAML and of the types it creates have no common base
        raise UserError(f"config={path} is not YAML: {on_one_line(error)}") from None
    key_types = list_key_types(schema)
    settings: dict[str, Any] = {}

    def collect(tree: Any, prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in groups and not isinstance(value, dict):
                raise UserError(
                    f"config={path}: {key}: {value} is for the command line only; set the keys of {key} instead"
                )
            if key not in key_types:
                suggestion = suggest(key, key_types)
                raise UserError(f"config={path}: there is no key '{key}'{suggestion}; --help lists all keys")
            if not dataclasses.is_dataclass(key_types[key]):
                settings[key] = value
            elif isinstance(value, dict):
                collect(value, f"{key}.")
            elif value is not None:
                raise UserError(f"config={path}: {key} is a section; write its keys below it")

    if not isinstance(tree, dict):
        raise UserError(f"config={path} has no settings; write KEY: VALUE, one per line")
    collect(tree, "")
    config = OmegaConf.structured(schema)
    try:
        for key, value in settings.items():
            OmegaConf.update(config, key, escape_interpolations(value), merge=False)
    except OmegaConfBaseException as error:
        raise UserError(f"config={path}: {explain_hydra_error(error)}") from None
    return path, settings


def extract_config_file(arguments: list[str], schema: type, groups: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Remove `config=FILE` from a command line and return the rest and the settings of the file.

    Hydra needs two of these settings before a job starts, the name of the run and the format of the corpus. They
    replace `config=FILE` in the command line.

    Raises:
        UserError: as in `read_settings_file`, or the command line chooses a config group as well.
    """
    indices = [index for index, argument in enumerate(arguments) if argument.startswith("config=")]
    if not indices:
        return arguments, {}
    if len(indices) > 1:
        raise UserError(f"{arguments[indices[1]]}: config= was already given; give one file only")
    [index] = indices
    path, settings = read_settings_file(arguments[index], schema, groups)
    command_line_keys = {argument.partition("=")[0] for argument in arguments}
    if chosen_groups := sorted(command_line_keys & set(groups)):
        group = chosen_groups[0]
        raise UserError(
            f"{group}= and config={path} both set many keys; remove {group}= and set single keys instead, which "
            "override the file"
        )
    for key in COMMAND_ONLY_KEYS:
        if (value := settings.pop(key, None)) not in (None, False, "false"):
            logging.getLogger("nmt").warning(f"{path}: {key}: {value} is ignored; set {key}= on the command line")
    early_settings = []
    if "data" in groups and (CONFIG_DIR / "data" / f"{settings.get('data.format')}.yaml").is_file():
        early_settings.append(f"data={settings['data.format']}")
    if isinstance(settings.get("name"), str) and not command_line_keys & {"name", "hydra.run.dir"}:
        early_settings.append(f"name={quote_for_hydra(settings['name'])}")
    return [*arguments[:index], *early_settings, *arguments[index + 1 :]], settings


def apply_file_settings(settings: dict[str, Any], config: DictConfig, overridden_keys: set[str]) -> None:
    """Set the keys of a file in `config`, except those that are overridden on the command line."""
    for key, value in settings.items():
        if not any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in overridden_keys):
            OmegaConf.update(config, key, escape_interpolations(value), merge=False)
