"""From a command line to checked dataclasses, by way of Hydra; whatever a user can mend is answered in one line."""

import contextlib
import dataclasses
import inspect
import io
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
from nmt.errors import UserError, exit_silently, printable
from nmt.runtime.command_line import (
    CONFIGS,
    check_command_line,
    config_groups,
    describe_os_error,
    explain,
    schema_keys,
    to_dataclasses,
)
from nmt.runtime.settings_file import apply_file_settings, with_file
from nmt.runtime.streams import use_utf8
from nmt.runtime.sweep_names import name_by_varying_keys

failures: list[str] = []  # messages of this command's jobs, in whatever process they ran
given_keys: set[str] = set()  # dotted keys that the present job has been given, on the command line or in a file


def meanings(schema: type, prefix: str = "") -> dict[str, str]:
    """The comment beside each key of a schema, by dotted name."""
    lines = re.findall(r"^ {4}(\w+): .*?  # (.*)", inspect.getsource(schema), re.MULTILINE)
    comments = {prefix + name: comment for name, comment in lines}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(item.type):
            comments |= meanings(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return comments


@contextlib.contextmanager
def explained(schema: type) -> Iterator[None]:
    """Add to each key on the help page, which Hydra prints as YAML, what it means."""
    page = io.StringIO()
    try:
        with contextlib.redirect_stdout(page):
            yield
    finally:  # Hydra leaves by SystemExit
        comments, path = meanings(schema), [""]
        for line in page.getvalue().splitlines():
            key = re.fullmatch(r"((?:  )*)(\w+):.*", line)
            path = [*path[: len(key[1]) // 2], key[2]] if key else path
            comment = comments.get(".".join(path)) if key else None
            print(printable(f"{line:<31} # {comment}" if comment else line))


def report_failure(message: str, any_rank: bool = False) -> None:
    """Report a failure. Of the processes of a job the first does so, but for what is another one's `any_rank`."""
    number = int(os.environ.get("RANK", "0"))
    if number and not any_rank:
        exit_silently()
    failures.append(message)
    with contextlib.suppress(OSError):  # nobody reads
        print(f"error: {f'process {number}: ' if number else ''}{printable(message)}", file=sys.stderr, flush=True)


class Failure:
    """What a failed job returns: no number, by which a search knows it (over NaN Optuna's plug-in stumbles). One from
    another process is reported by the first process when it comes there, which is when it is unpickled."""

    def __init__(self, message: str, report: bool = True, any_rank: bool = False) -> None:
        self.message = message
        if report:
            report_failure(message, any_rank)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Failure, (self.message,)


def show_sweeper_log() -> None:
    """Show what Optuna's plug-in says, its results above all; failed jobs, of which it warns, are reported already."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno < logging.WARNING)
    log = logging.getLogger("hydra_plugins.hydra_optuna_sweeper")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def resend_signal(number: int) -> None:
    """Send this process a signal a little later, which came when it could not end it."""
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def open_streams() -> None:
    """Open the null device for standard streams that were closed when Python started, as by `2>&-`. Otherwise the next
    file would get such a number, and what libraries report would be written into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  until the end


def flush_streams(code: Any) -> Any:
    """Write out what was printed. Returns the exit code, 1 where that cannot be done."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else Python complains once more
            if stream is sys.stdout:
                code = code or 1
                if not isinstance(error, BrokenPipeError):
                    report_failure(f"standard output: {error.strerror}")
    return code


def remove_empty(folder: Path) -> None:
    """Take back the run's folder, which Hydra makes before the checks, unless there is something in it."""
    with contextlib.suppress(OSError):  # not empty, or another rank was here first
        while folder.is_relative_to(Path.cwd()) and folder != Path.cwd():
            folder.rmdir()
            folder = folder.parent


def program(command: str, schema: type) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of checked dataclasses into a command-line program, configured by `configs/<command>.yaml`.

    Whatever the user can mend ends the program with its message alone and exit code 1. In a sweep (`-m`) a failing job
    is reported so, wherever it runs, the others still run, and the exit code is 1 at the end.
    """

    def decorate(function: Callable[[Any], float | None]) -> Callable[[], None]:
        ended: list[int] = []  # signals
        inside = False  # the job, where an unforeseen exception is a bug of ours; outside it is about the command line
        first = 0  # process, of the command; a launcher may run a job in another one, with copies of all this
        settings: dict[str, Any] = {}  # of config=FILE

        def end(number: int, _: object) -> None:
            if isinstance(sys.exception(), UserError):
                resend_signal(number)
                return  # the message first
            ended.append(number)
            sys.exit(128 + number)  # on the way out what is half done is cleared away

        def lost(what: "sys.UnraisableHookArgs") -> None:
            if isinstance(what.exc_value, SystemExit) and ended:
                resend_signal(ended.pop())  # Python drops what is raised in a destructor
            elif isinstance(what.exc_value, KeyboardInterrupt):
                resend_signal(signal.SIGINT)
            else:
                sys.__unraisablehook__(what)

        def job(config: DictConfig) -> float | Failure | None:
            nonlocal inside
            inside = True
            overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            written = {argument.lstrip("+~").partition("=")[0] for argument in overrides}
            apply_file_settings(settings, config, written - set(config_groups(command)))
            given_keys.clear()
            given_keys.update(written, settings)
            try:
                score: float | Failure | None = function(to_dataclasses(config))
            except Exception as error:
                late = type(error).__module__.startswith("submitit.")  # the cluster's time for the job is up
                if not late and not isinstance(error, UserError | OSError | MemoryError):
                    if os.getpid() != first:  # from where an exception comes without its traceback
                        error.add_note(traceback.format_exc())
                    raise
                if ended:  # a library has made another error of the exit
                    sys.exit(128 + ended[0])
                message = describe_os_error(error) if isinstance(error, OSError) else str(error)
                if isinstance(error, MemoryError):
                    message = f"out of memory; give less text at a time ({message or 'no details'})"
                remove_empty(Path(HydraConfig.get().runtime.output_dir))
                score = Failure(message, report=os.getpid() == first, any_rank=getattr(error, "any_rank", False))
            inside = False
            return score

        def run() -> None:
            open_streams()
            try:
                work()
                code: Any = 0
            except SystemExit as error:
                code = error.code
            code = flush_streams(code)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Where processes were joined, threads of gloo now and then abort one that ends as usual, with all done.
                os._exit(code or 0)
            if code:
                sys.exit(code)

        def work() -> None:
            nonlocal first, settings
            use_utf8()
            first = os.getpid()
            failures.clear()  # of an earlier call
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing in its own way
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            ConfigStore.instance().store(name=f"{command}_schema", node=schema)
            show_sweeper_log()
            signal.signal(signal.SIGTERM, end)
            sys.unraisablehook = lost
            try:
                known, choices = schema_keys(schema) | {"config": str}, config_groups(command)
                check_command_line(sys.argv[1:], known, choices)
                arguments, settings = with_file(sys.argv[1:], schema, choices)
                check_command_line(arguments, known, choices)
                sys.argv[1:] = name_by_varying_keys(arguments)
                with explained(schema) if {"-h", "--help"} & set(sys.argv) else contextlib.nullcontext():
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=command)(job)()
            except KeyboardInterrupt:
                report_failure("interrupted")
                sys.exit(130)
            except Exception as error:
                if ended:
                    sys.exit(128 + ended[0])
                if inside or hasattr(error, "__notes__"):
                    raise
                if isinstance(error, OSError) and not isinstance(error, HydraException):
                    error.filename = error.filename or "standard output"
                    report_failure(describe_os_error(error))
                else:
                    report_failure(str(error) if isinstance(error, UserError) else explain(error))
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to be cleared away
                sys.unraisablehook = sys.__unraisablehook__
            if failures:
                sys.exit(1)

        return run

    return decorate


def main(command: str) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of a command's checked dataclasses into a program: `@main("train")`."""
    return program(command, COMMANDS[command])
