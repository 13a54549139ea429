"""Settings from a YAML file: `config=FILE`."""

import dataclasses
import logging
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.errors import UserError, suggest
from nmt.runtime.command_line import (
    COMMAND_ONLY_KEYS,
    CONFIG_DIR,
    describe_os_error,
    explain_hydra_error,
    list_key_types,
    parse_override,
)
from nmt.runtime.quoting import escape_interpolations, from_yaml, quote_for_hydra, quote_setting

MAX_SETTINGS_BYTES = 2**22  # bytes of a file of settings


def read_settings_file(argument: str, schema: type, groups: list[str]) -> tuple[str, dict[str, Any]]:
    """The path of `config=FILE`, and the settings in the file by dotted key.

    Raises:
        UserError: there is no such file, it is no YAML, or a key or a value of it is none of this command.
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
            raise UserError(f"it has more than {MAX_SETTINGS_BYTES:,} bytes")
        tree = from_yaml(content.decode())
    except OSError as error:
        raise UserError(f"config={describe_os_error(error)}") from None
    except UserError as error:
        raise UserError(f"config={path}: {error}") from None
    except Exception as error:  # YAML's own errors and those of types that it makes have no common base
        reason = " ".join((str(error) or repr(error)).split())
        raise UserError(f"config={path} is not YAML: {reason[:200]}") from None
    known = list_key_types(schema)
    found: dict[str, Any] = {}

    def collect(tree: Any, prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in groups and not isinstance(value, dict):
                raise UserError(
                    f"config={path}: {key}: {value} is a choice for the command line; write the keys of {key}"
                )
            if key not in known:
                raise UserError(f"config={path}: there is no key '{key}'{suggest(key, known)}; --help lists them all")
            if not dataclasses.is_dataclass(known[key]):
                found[key] = value
            elif isinstance(value, dict):
                collect(value, f"{key}.")
            elif value is not None:
                raise UserError(f"config={path}: {key} is a section; write its keys below it")

    if not isinstance(tree, dict):
        raise UserError(f"config={path} holds no settings: a line for each is KEY: VALUE")
    collect(tree, "")
    config = OmegaConf.structured(schema)
    try:
        for key, value in found.items():
            OmegaConf.update(config, key, escape_interpolations(value), merge=False)
    except OmegaConfBaseException as error:
        raise UserError(f"config={path}: {explain_hydra_error(error)}") from None
    return path, found


def extract_config_file(arguments: list[str], schema: type, groups: list[str]) -> tuple[list[str], dict[str, Any]]:
    """A command line without `config=FILE`, and the settings of the file; what Hydra has to know of them before a job
    begins, which is the name of a run and what kind of corpus is the default, in the place of it.

    Raises:
        UserError: as `read_settings_file`; or the command line chooses one of the groups, too.
    """
    places = [place for place, argument in enumerate(arguments) if argument.startswith("config=")]
    if not places:
        return arguments, {}
    if len(places) > 1:
        raise UserError(f"{arguments[places[1]]}: config= is there already; give one file")
    [place] = places
    path, found = read_settings_file(arguments[place], schema, groups)
    written = {argument.partition("=")[0] for argument in arguments}
    if both := sorted(written & set(groups)):
        raise UserError(
            f"{both[0]}= and config={path} both say what many keys are; leave out {both[0]}=, and write single keys, "
            "which win over those of the file"
        )
    for key in COMMAND_ONLY_KEYS:
        if (value := found.pop(key, None)) not in (None, False, "false"):
            logging.getLogger("nmt").warning(f"{path}: {key}: {value} is not taken over; write {key}= yourself")
    early = []
    if "data" in groups and (CONFIG_DIR / "data" / f"{found.get('data.format')}.yaml").is_file():
        early.append(f"data={found['data.format']}")
    if isinstance(found.get("name"), str) and not written & {"name", "hydra.run.dir"}:
        early.append(f"name={quote_for_hydra(found['name'])}")
    return [*arguments[:place], *early, *arguments[place + 1 :]], found


def apply_file_settings(settings: dict[str, Any], config: DictConfig, written: set[str]) -> None:
    """Set what a file has, but for keys that are `written` on the command line."""
    for key, value in settings.items():
        if not any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in written):
            OmegaConf.update(config, key, escape_interpolations(value), merge=False)
