"""Command-line programs: Hydra composes the settings, checked dataclasses hold them, and errors take one line each."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nmt.config import COMMANDS
from nmt.errors import UserError, escape_controls, exit_silently
from nmt.system.command_line import (
    CONFIG_DIR,
    check_command_line,
    describe_os_error,
    explain_hydra_error,
    list_config_groups,
    list_key_types,
    to_dataclasses,
)
from nmt.system.settings_file import apply_file_settings, extract_config_file
from nmt.system.sweep_names import exclude_constant_keys
from nmt.system.text import discard_output, echo, use_utf8
from nmt.system.torchrun import LAUNCH_ENV

failures: list[str] = []  # error messages of the jobs of this command, including those of other processes
given_keys: set[str] = set()  # dotted keys of the current job that were set on the command line or in config=FILE


def collect_help_texts(schema: type, prefix: str = "") -> dict[str, str]:
    """Return the help text of each key of a schema by dotted name."""
    texts: dict[str, str] = {}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(item.type):
            texts |= collect_help_texts(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        elif "help" in item.metadata:
            texts[prefix + item.name] = item.metadata["help"]
    return texts


def build_help_page(command: str, schema: type, overrides: list[str]) -> str:
    """Return the help page of a command, with the current value and the help text of each key.

    Hydra would print the page too, but takes a second to list the config groups.
    """
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra.compose(command, overrides)
    page = OmegaConf.load(CONFIG_DIR / f"{command}.yaml").hydra.help.template
    texts, path, lines = collect_help_texts(schema), [""], []
    for line in OmegaConf.to_yaml(config).splitlines():
        key = re.fullmatch(r"((?:  )*)(\w+):.*", line)
        path = [*path[: len(key[1]) // 2], key[2]] if key else path
        text = texts.get(".".join(path)) if key else None
        lines.append(f"{line:<31} # {text}" if text else line)
    groups = {
        name: sorted(path.stem for path in CONFIG_DIR.glob(f"{name}/*.yaml")) for name in list_config_groups(command)
    }
    page = page.replace("$APP_CONFIG_GROUPS", "\n".join(f"{name}: {', '.join(groups[name])}" for name in groups))
    return escape_controls(page.replace("$CONFIG", "\n".join(lines)))


def report_failure(message: str, any_rank: bool = False) -> None:
    """Print an error message on standard error and record it.

    Other ranks than 0 exit silently, since rank 0 reports the same error, unless the error is of this rank only
    (`any_rank`).
    """
    rank = LAUNCH_ENV["RANK"]
    if rank and not any_rank:
        exit_silently()
    failures.append(message)
    prefix = f"process {rank}: " if rank else ""
    with contextlib.suppress(OSError):  # standard error is closed
        print(f"error: {prefix}{escape_controls(message)}", file=sys.stderr, flush=True)


class Failure:
    """The result of a failed job.

    It is not a number, by which a search recognizes it (Optuna's plug-in fails on NaN). A failure in another process is
    reported by the main process, when it unpickles the result.
    """

    def __init__(self, message: str, report: bool = True, any_rank: bool = False) -> None:
        self.message = message
        if report:
            report_failure(message, any_rank)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Failure, (self.message,)


def show_sweeper_log() -> None:
    """Show the log of Optuna's plug-in, except warnings about failed jobs, which are reported already."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno < logging.WARNING)
    log = logging.getLogger("hydra_plugins.hydra_optuna_sweeper")
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)


def resend_signal(number: int) -> None:
    """Send this process a signal again after a short delay, because it arrived when it could not end the process."""
    # Only a signal to the process interrupts the main thread while it waits. On Windows os.kill would end the process.
    send = signal.raise_signal if sys.platform == "win32" else functools.partial(os.kill, os.getpid())
    timer = threading.Timer(0.05, send, (number,))
    timer.daemon = True
    timer.start()


def open_streams() -> None:
    """Open the null device for standard streams that were closed when Python started, as by `2>&-`.

    Otherwise the next file would get such a descriptor, and messages of libraries would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def flush_streams(code: Any) -> Any:
    """Flush standard output and error. Returns the exit code, which is 1 if standard output cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            discard_output(stream.fileno())
            if stream is sys.stdout:
                code = code or 1
                if not isinstance(error, BrokenPipeError):
                    report_failure(f"standard output: {error.strerror}")
    return code


def remove_empty_folders(folder: Path) -> None:
    """Remove the run folder, which Hydra creates before the checks, and its parents, if they are empty."""
    with contextlib.suppress(OSError):  # not empty, or already removed by another rank
        while folder.is_relative_to(Path.cwd()) and folder != Path.cwd():
            folder.rmdir()
            folder = folder.parent


@contextlib.contextmanager
def exit_on_sigterm(exit_signals: list[int]) -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that unfinished files are removed, and note the signal in `exit_signals`.

    After that, SIGTERM is ignored: nothing is left to clean up.
    """

    def handle_sigterm(number: int, _: object) -> None:
        if isinstance(sys.exception(), UserError):  # report the error first
            resend_signal(number)
            return
        exit_signals.append(number)
        sys.exit(128 + number)

    def handle_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
        # Python drops exceptions that are raised in a destructor.
        if isinstance(unraisable.exc_value, SystemExit) and exit_signals:
            resend_signal(exit_signals.pop())
        elif isinstance(unraisable.exc_value, KeyboardInterrupt):
            resend_signal(signal.SIGINT)
        else:
            sys.__unraisablehook__(unraisable)

    signal.signal(signal.SIGTERM, handle_sigterm)
    sys.unraisablehook = handle_unraisable
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.unraisablehook = sys.__unraisablehook__


def is_expected(error: Exception) -> bool:
    """Return whether a job may fail with this error without a bug in nmt."""
    is_cluster_timeout = type(error).__module__.startswith("submitit.")
    return is_cluster_timeout or isinstance(error, UserError | OSError | MemoryError)


def describe_failure(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, MemoryError):
        return f"out of memory; process less text at a time ({str(error) or 'no details'})"
    return str(error)


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """Let the CPU round numbers below 1.2e-38 to 0, in this thread and in those that it starts meanwhile.

    Attention weights get that small, and CPUs are slow with such numbers: a Transformer trained at two thirds of its
    speed. Only commands do this, since `nmt.load` must not change how other code of its process computes.
    """
    torch = sys.modules.get("torch")  # imported by commands that compute
    if torch is None:
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@dataclasses.dataclass
class ProgramState:
    """State shared by the parts of a program. A launcher may run jobs in other processes, with a copy of it."""

    main_pid: int = 0  # process ID of the command
    in_job: bool = False  # in a job an unexpected exception is a bug; outside, it is about the command line
    file_settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of config=FILE, by dotted key
    exit_signals: list[int] = dataclasses.field(default_factory=list)  # signals that are ending the process


def accept_hydra_options() -> None:
    """Let Hydra 1.3 define its options on Python 3.14, which refuses a help text that is not a string.

    Hydra 1.4 does the same. The text is only shown by `--hydra-help`.
    """
    if sys.version_info >= (3, 14):
        argparse.ArgumentParser._check_help = lambda self, action: None


def main(command: str) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of the settings of a command into a command-line program, as in `@main("train")`.

    The program is configured by `configs/<command>.yaml`. Errors that the user can fix end it with a one-line message
    and exit code 1. In a sweep (`-m`) a failed job is reported that way, wherever it runs; the other jobs still run,
    and the exit code is 1 at the end.
    """
    schema = COMMANDS[command]

    def decorate(function: Callable[[Any], float | None]) -> Callable[[], None]:
        state = ProgramState()

        # Launchers pickle this function by value together with `function`, so that both see the same `given_keys`. A
        # method or module-level function would be pickled by reference and see another one.
        def job(config: DictConfig) -> float | Failure | None:
            state.in_job = True
            overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            command_line_keys = {argument.lstrip("+~").partition("=")[0] for argument in overrides}
            apply_file_settings(state.file_settings, config, command_line_keys - set(list_config_groups(command)))
            given_keys.clear()
            given_keys.update(command_line_keys, state.file_settings)
            try:
                with flush_denormals():
                    result: float | Failure | None = function(to_dataclasses(config))
            except Exception as error:
                is_main_process = os.getpid() == state.main_pid
                if not is_expected(error):
                    if not is_main_process:  # exceptions lose their traceback on the way to the main process
                        error.add_note(traceback.format_exc())
                    raise
                if state.exit_signals:  # a library replaced SystemExit by another exception
                    sys.exit(128 + state.exit_signals[0])
                remove_empty_folders(Path(HydraConfig.get().runtime.output_dir))
                any_rank = getattr(error, "any_rank", False)
                result = Failure(describe_failure(error), report=is_main_process, any_rank=any_rank)
            state.in_job = False
            return result

        def run_hydra() -> None:
            key_types = list_key_types(schema) | {"config": str}
            groups = list_config_groups(command)
            check_command_line(sys.argv[1:], key_types, groups)
            arguments, state.file_settings = extract_config_file(sys.argv[1:], schema, groups)
            check_command_line(arguments, key_types, groups)
            sys.argv[1:] = exclude_constant_keys(arguments)
            if {"-h", "--help"} & set(arguments):
                overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
                echo(build_help_page(command, schema, overrides))
                return
            accept_hydra_options()
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=command)(job)()

        def run_and_report() -> None:
            use_utf8()
            state.main_pid = os.getpid()
            failures.clear()
            os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise errors instead of printing them
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            ConfigStore.instance().store(name=f"{command}_schema", node=schema)
            show_sweeper_log()
            with exit_on_sigterm(state.exit_signals):
                try:
                    run_hydra()
                except KeyboardInterrupt:
                    report_failure("interrupted")
                    sys.exit(130)
                except Exception as error:
                    if state.exit_signals:
                        sys.exit(128 + state.exit_signals[0])
                    if isinstance(error, BrokenPipeError):  # the reader of standard output, as in `| head`
                        sys.exit(1)
                    if state.in_job or hasattr(error, "__notes__"):
                        raise
                    if isinstance(error, OSError) and not isinstance(error, HydraException):
                        error.filename = error.filename or "standard output"
                        report_failure(describe_os_error(error))
                    else:
                        report_failure(str(error) if isinstance(error, UserError) else explain_hydra_error(error))
            if failures:
                sys.exit(1)

        def run() -> None:
            if not gc.isenabled():  # see startup.py
                gc.freeze()
                gc.enable()
            open_streams()
            code: Any = 0
            try:
                run_and_report()
            except SystemExit as error:
                code = error.code
            code = flush_streams(code)
            if LAUNCH_ENV["WORLD_SIZE"] > 1:
                # All work is done, and threads of gloo sometimes abort a process that ends in the usual way.
                os._exit(code or 0)
            if code:
                sys.exit(code)

        return run

    return decorate
