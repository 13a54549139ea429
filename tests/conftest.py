"""What several test files need: the commands as real processes, and a small trained run."""

import importlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from nmt.data.toy.corpus import generate

# With models as small as these, threads wait for each other longer than they work, above all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

settings.register_profile("nmt", deadline=None)  # other work may be done beside the tests
settings.load_profile("nmt")

ROOT = Path(__file__).resolve().parent.parent
# This checkout comes first, also for the process that others are forked from; what the caller has named stays.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo.
CONTEXT.set_forkserver_preload(["pytest", "nmt.train", "nmt.evaluate", "nmt.translate", "nmt.align", "torch._dynamo"])
TINY = (
    "tokenizer.vocab_size=500", "model.embed=16", "model.hidden=32", "model.dropout=0.1", "train.batch_tokens=400",
    "train.log_every=5", "optim.lr=0.005",
)  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """What a command run in `folder` sees: a cache of its own."""
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}


def fresh(
    command: str, *arguments: object, folder: Path, text: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m nmt.<command> arguments` in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", f"nmt.{command}", *map(str, arguments)],
        cwd=folder, input=text, capture_output=True, timeout=300, env=environment(folder),
    )  # fmt: skip


def program(command: str, *arguments: str) -> None:
    """The command in this process, to its end."""
    sys.argv = [command, *arguments]
    getattr(importlib.import_module(f"nmt.{command}"), command)()


def in_folder(folder: Path, seen: dict[str, str], streams: list[Path], command: str, *arguments: str) -> None:
    """The command in this environment, with these files as standard input, output and error."""
    os.chdir(folder)
    os.environ |= seen
    for number, path in enumerate(streams):
        with open(path, "wb" if number else "rb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # multiprocessing has closed it
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    program(command, *arguments)


def nmt(
    command: str, *arguments: object, folder: Path, text: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The same in a process that has imported everything, which is several times faster."""
    given = [command, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        streams = [Path(place, name) for name in ("in", "out", "err")]
        streams[0].write_bytes(text or b"")
        process = CONTEXT.Process(target=in_folder, args=(folder, environment(folder), streams, *given))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(given, 300)
        return subprocess.CompletedProcess(given, process.exitcode, *(path.read_bytes() for path in streams[1:]))


def works(command: str, *arguments: object, folder: Path, text: bytes | None = None) -> str:
    done = nmt(command, *arguments, folder=folder, text=text)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def refused(command: str, *arguments: object, folder: Path, text: bytes | None = None) -> str:
    """The message of a command that must fail as users should see it."""
    done = nmt(command, *arguments, folder=folder, text=text)
    message = done.stderr.decode()
    assert done.returncode == 1 and "Traceback" not in message, message
    assert not done.stdout
    return message.splitlines()[-1]


def ends_in_returns(text: bytes) -> bool:
    """Whether a file's lines end in carriage returns alone, as its beginning tells."""
    first, *more = re.sub(rb"\r?\n?\Z", b"", text[:8_192]).split(b"\n")
    return not more and first.count(b"\r") > 1


def peak() -> int:
    """Bytes of memory that this process has had at most since it was last asked; 0 where nobody counts them."""
    try:
        [found] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, ValueError):
        return 0
    return int(found) * 1024


def write_corpus(folder: Path, **sizes: int) -> Path:
    """Sentences of the built-in corpus as line-aligned files, so many in each split, with their gold links beside them:
    sure ones as 0-1, possible ones as 0?1."""
    for split, pairs in generate(1, sizes).items():
        links = (" ".join([f"{s}-{t}" for s, t in p.sure] + [f"{s}?{t}" for s, t in p.possible]) for p in pairs)
        sides = {"de": (p.german for p in pairs), "en": (p.english for p in pairs), "links": links}
        for ending, lines in sides.items():
            (folder / f"{split}.{ending}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A command that runs within a test sets the log and a signal to its own liking."""
    log = logging.getLogger("nmt")
    before = log.handlers[:], log.level, log.propagate, signal.getsignal(signal.SIGTERM)
    yield
    log.handlers[:], log.level, log.propagate = before[:3]
    signal.signal(signal.SIGTERM, before[3])


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small line-aligned text files."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=600, valid=40, test=30)


@pytest.fixture(scope="session")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/mine is trained for two epochs."""
    folder = tmp_path_factory.mktemp("home")
    settings = ("name=mine", "data=text", f"data.path={corpus}", *TINY, "train.max_epochs=2")
    done = fresh("train", *settings, folder=folder)
    assert done.returncode == 0, done.stderr.decode()
    return folder
