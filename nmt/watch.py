"""Show curves and sample translations of runs in a browser, also while they train.

python -m nmt.watch checkpoint=runs/NAME
python -m nmt.watch checkpoint=runs/SWEEP      # all runs in a folder, with a curve for each
python -m nmt.watch --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything else
import json
import re
import socketserver
import sys
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from nmt.config import WatchRun
from nmt.errors import UserError
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE, build_curves, read_events
from nmt.system.cli import main
from nmt.system.command_line import describe_error
from nmt.system.logging import log
from nmt.system.page_template import fill_template

ADDRESS = "127.0.0.1"
TEMPLATE = Path(__file__).parent / "page" / "watch.html"


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the folders of the runs, at any depth, by their path in the watched folder, `.` for that itself."""
    folders = sorted(path.parent for path in folder.rglob(METRICS_FILE))
    return {run.relative_to(folder).as_posix(): run for run in folders}


def describe_run(name: str, run: Path) -> dict[str, Any]:
    """Return what the page shows of a run: its curves, and the steps that have samples; or why it cannot be read."""
    try:
        events, damaged = read_events(run / METRICS_FILE)
        samples, damaged_samples = read_samples(run)
        written = (run / METRICS_FILE).stat().st_mtime
    except OSError as error:
        return {"name": name, "error": describe_error(error)}
    return {
        "name": name,
        "written": written,
        "curves": build_curves(events),
        "reports": sum(event["event"] == "train" for event in events),
        "samples": [event["step"] for event in samples],
        "damaged": damaged + damaged_samples,
    }


def read_samples(run: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the validations of a run with their pairs, and the number of damaged lines."""
    return read_events(run / SAMPLES_FILE) if (run / SAMPLES_FILE).exists() else ([], 0)


def find_samples(folder: Path, name: str, step: str) -> list[Any] | None:
    """Return the pairs of a validation, or None if there are none."""
    events, _ = read_samples(find_runs(folder).get(name, folder / "none"))
    return next((event.get("pairs") for event in events if str(event["step"]) == step), None)


class Handler(BaseHTTPRequestHandler):
    """Answers `/` with the page, and its requests for `/runs` and `/samples` with JSON."""

    timeout = 10  # seconds within which a client must send its request
    server: "Server"

    def do_GET(self) -> None:  # noqa: N802  the name is that of the method of HTTP
        folder = self.server.folder
        path, _, fields = self.path.partition("?")
        query = dict(parse_qsl(fields, errors="surrogateescape"))
        # A page of another site could have its name resolved to this address, and then read what is here.
        if re.sub(r":\d*$", "", self.headers.get("Host", "")) not in (ADDRESS, "localhost"):
            self.send_error(403, "this server answers to 127.0.0.1 and localhost only")
        elif path == "/":
            self.answer("text/html", fill_template(TEMPLATE, {"TITLE": escape(str(folder))}))
        elif path == "/runs":
            described = [describe_run(name, run) for name, run in find_runs(folder).items()]
            self.answer("application/json", json.dumps(described))
        elif path == "/samples" and (pairs := find_samples(folder, query.get("run", ""), query.get("step", ""))):
            self.answer("application/json", json.dumps(pairs))
        else:
            self.send_error(404)

    def answer(self, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log no requests."""


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would let two servers share a port
    folder: Path  # of the runs

    def handle_error(self, request: Any, address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client has gone
            log.exception("a request failed")


@main("watch")
def watch(command: WatchRun) -> None:
    folder = Path(str(command.checkpoint))
    if not folder.is_dir():
        raise UserError(f"checkpoint={folder} is not a folder; give a run, or a folder of runs: checkpoint=runs/NAME")
    try:
        server = Server((ADDRESS, command.port), Handler)
    except OSError as error:
        raise UserError(f"port={command.port} cannot be used: {error.strerror}; use port=PORT for another") from None
    server.folder = folder
    with server:
        if not find_runs(folder):
            log.warning(f"there is no run in {folder} yet; the page shows each run once it has written {METRICS_FILE}")
        log.info(f"showing {folder} at http://{ADDRESS}:{server.server_address[1]}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt, SystemExit):
            server.serve_forever()
        log.info("stopped")


if __name__ == "__main__":
    watch()
