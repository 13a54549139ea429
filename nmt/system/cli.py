"""Command-line programs: Hydra composes the settings, checked dataclasses hold them, and errors take one line each."""

import argparse
import contextlib
import functools
import gc
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.config import COMMANDS
from nmt.errors import UserError, escape_controls
from nmt.system.command_line import (
    CONFIG_DIR,
    check_arguments,
    describe_error,
    list_config_groups,
    list_keys,
    to_dataclasses,
)
from nmt.system.logging import log_to_stderr
from nmt.system.text import echo, use_utf8
from nmt.system.torchrun import LAUNCH_ENV

Command = Callable[[Any], float | None]  # a function of the settings; for sweeps, `train` returns its score
PARALLEL_COMMANDS = ("train", "evaluate", "translate")  # that several processes of torchrun can share
EXPECTED_ERRORS = (UserError, OSError, MemoryError, HydraException, OmegaConfBaseException)  # all others are bugs


def main(command: str) -> Callable[[Command], Callable[[], None]]:
    """Turn a function of the settings of a command into a command-line program, as in `@main("train")`.

    The program is configured by `configs/<command>.yaml`. Errors that the user can fix end it with a one-line message
    and exit code 1. In a sweep (`-m`) a failed job is reported that way; the other jobs still run, and the exit code is
    1 at the end.
    """
    return lambda function: functools.partial(run_program, command, function)


def run_program(command: str, function: Command) -> None:
    """Run a command, report its errors, and exit unless all went well."""
    gc.freeze()  # what was imported, by far the most objects, stays
    gc.enable()  # see startup.py
    use_utf8()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes unfinished files
    failures: list[Exception] = []
    main_pid = os.getpid()

    def job(config: DictConfig) -> float | None:
        """Call the function. In a process of its own, which a launcher may start, an error is raised as well."""
        log_to_stderr()
        try:
            # Let the CPU round numbers below 1.2e-38 to 0. Attention weights get that small, and it is slow with such
            # numbers: a Transformer trained at two thirds of its speed.
            if "torch" in sys.modules:
                sys.modules["torch"].set_flush_denormal(True)
            return function(to_dataclasses(config))
        except (UserError, OSError, MemoryError) as error:
            with contextlib.suppress(OSError, ValueError):  # the folder of a run has files, or is elsewhere
                os.removedirs(Path(HydraConfig.get().runtime.output_dir).relative_to(Path.cwd()))
            report_error(error)
            failures.append(error)
            if os.getpid() != main_pid:
                raise
            return None
        except Exception as error:  # a bug
            if os.getpid() != main_pid:
                error.add_note(traceback.format_exc())  # else lost on the way to the main process
            raise

    code: Any = 0
    try:
        if LAUNCH_ENV["WORLD_SIZE"] > 1 and command not in PARALLEL_COMMANDS:
            raise UserError(f"nmt.{command} runs in one process; start it without torchrun")
        run_hydra(command, job)
    except KeyboardInterrupt:
        report_error(UserError("interrupted"))
        code = 130
    except SystemExit as error:
        code = error.code
    except EXPECTED_ERRORS as error:
        report_error(error)
        failures.append(error)
    code = code or int(bool(failures))
    if LAUNCH_ENV["WORLD_SIZE"] > 1:
        # All work is done, and threads of gloo sometimes abort a process that ends in the usual way.
        os._exit(code)
    if code:
        sys.exit(code)


def run_hydra(command: str, job: Callable[[DictConfig], float | None]) -> None:
    """Let Hydra run a job, or those of a sweep, with the settings of the command line."""
    arguments = sys.argv[1:]
    check_arguments(arguments, COMMANDS[command])
    is_setting = re.compile("[^-].*=|~").match
    # Hydra would read name=2024_11_24 and name=1.10 as numbers, whose text is another.
    texts = {key for key, field in list_keys(COMMANDS[command]).items() if field.type in (str, str | None, Any)}
    number = re.compile(r"(?<=[=,\[])(?=[\d.+-])([+-]?[\d_.]+(?:e[+-]?\d+)?)(?=[],]|\Z)", re.IGNORECASE)
    settings = [argument for argument in arguments if is_setting(argument)]
    settings = [
        number.sub(r'"\1"', item) if item.partition("=")[0] in texts and '"' not in item else item for item in settings
    ]
    options = [argument for argument in arguments if not is_setting(argument)]
    ConfigStore.instance().store(name=f"{command}_schema", node=COMMANDS[command])
    if {"-h", "--help"} & set(options):
        echo(build_help_page(command, settings))
        return
    if {"-m", "--multirun"} & set(options):
        overrides = OverridesParser.create().parse_overrides(settings)
        constant_keys = ",".join(item.key_or_group for item in overrides if not item.is_sweep_override())
        settings.append(f"hydra.job.config.override_dirname.exclude_keys=[{constant_keys}]")  # from names of runs
    sys.argv[1:] = options + settings  # Hydra needs all settings in one row
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise errors instead of printing them
    warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
    if sys.version_info >= (3, 14):  # it refuses the help text of --shell-completion, which is not a string
        argparse.ArgumentParser._check_help = lambda self, action: None
    hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=command)(job)()


def report_error(error: Exception) -> None:
    """Print an error on standard error, in one line.

    All ranks raise the same error, and rank 0 reports it, unless it is of another rank only (`any_rank`).
    """
    rank = LAUNCH_ENV["RANK"]
    if rank and not getattr(error, "any_rank", False):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training defers it
        time.sleep(30)  # until torchrun ends this process; as long as it would wait itself
        sys.exit(1)
    prefix = f"process {rank}: " if rank else ""
    with contextlib.suppress(OSError):  # standard error is closed
        message = escape_controls(" ".join(describe_error(error).splitlines()))
        print(f"error: {prefix}{message}", file=sys.stderr, flush=True)


def build_help_page(command: str, settings: list[str]) -> str:
    """Return the help page of a command, with the current value and the help text of each key.

    Hydra would print the page too, but takes a second to list the config groups.
    """
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra.compose(command, settings)
    page = OmegaConf.load(CONFIG_DIR / f"{command}.yaml").hydra.help.template
    keys, path, lines = list_keys(COMMANDS[command]), [""], []
    for line in OmegaConf.to_yaml(config).splitlines():
        key = re.fullmatch(r"((?:  )*)(\w+):.*", line)
        path = [*path[: len(key[1]) // 2], key[2]] if key else path
        text = keys[name].metadata.get("help") if key and (name := ".".join(path)) in keys else None
        lines.append(f"{line:<31} # {text}" if text else line)
    groups = "\n".join(f"{name}: {', '.join(choices)}" for name, choices in list_config_groups().items())
    return str(page.replace("$APP_CONFIG_GROUPS", groups).replace("$CONFIG", "\n".join(lines)))
