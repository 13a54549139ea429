"""Logging of a command to standard error and to a file of the run."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from nmt.errors import escape_controls, with_filename
from nmt.system.torchrun import LAUNCH_ENV

log = logging.getLogger("nmt")


class _StderrHandler(logging.Handler):
    """Writes to standard error without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a closed standard error must not end training
            tqdm.write(escape_controls(self.format(record)), file=sys.stderr)


class _RunLogHandler(logging.FileHandler):
    """Writes to a file and raises errors, such as a full disk, instead of printing them."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  overrides a method of logging.Handler
        with with_filename(self.baseFilename):
            raise  # noqa: PLE0704  logging calls this method in an except block


def log_to_stderr() -> None:
    """Send log messages to standard error; standard output is for results.

    All ranks log the same messages, so ranks other than 0 show only messages marked `any_rank`.
    """
    # tqdm's default lock is one for several processes. For it Python 3.14 starts a resource tracker, which warns of a
    # leak where a command ends with os._exit.
    tqdm.set_lock(threading.RLock())
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = _StderrHandler()
    handler.addFilter(lambda record: not getattr(record, "quiet", False))
    if rank := LAUNCH_ENV["RANK"]:
        handler.addFilter(lambda record: getattr(record, "any_rank", False))
        handler.setFormatter(logging.Formatter(f"process {rank}: %(message)s"))
    log.addHandler(handler)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[logging.Handler]:
    """Append log messages to a file as well, with the time."""
    handler = _RunLogHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()
