"""The log of a command: on standard error, and in a file of the run."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.errors import printable, with_filename
from nmt.runtime.files import open_regular
from nmt.runtime.launch import LAUNCHED

log = logging.getLogger("nmt")


class _Lines(logging.Handler):
    """Lines to standard error that do not break a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: that ends no training
            tqdm.write(printable(self.format(record)), file=sys.stderr)


class _File(logging.FileHandler):
    """Lines to a file that must not be lost: a full disk is an error, and not the complaint that logging prints."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_regular)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  its name in the library
        with with_filename(self.baseFilename):
            raise  # noqa: PLE0704  it is called where the exception is handled


def log_to_stderr() -> None:
    """Show what nmt reports on standard error; standard output is for results. The processes of a job find the same
    things; beside the first, one shows only what is its `any_rank`."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = _Lines()
    handler.addFilter(lambda record: not getattr(record, "quiet", False))
    if number := LAUNCHED["RANK"]:
        handler.addFilter(lambda record: getattr(record, "any_rank", False))
        handler.setFormatter(logging.Formatter(f"process {number}: %(message)s"))
    log.addHandler(handler)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[logging.Handler]:
    """Append all reports to a file too, with the time."""
    handler = _File(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()
