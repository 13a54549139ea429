"""What several test files need: the commands as real processes, and a small trained run."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nmt.data.toy import generate

# With models as small as these, threads wait for each other longer than they work, above all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "tokenizer.vocab_size=500", "model.embed=16", "model.hidden=32", "model.dropout=0.1", "train.batch_tokens=400",
    "train.log_every=5", "optim.lr=0.005",
)  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """What a command run in `folder` sees: this checkout, and a cache of its own."""
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}


def nmt(
    command: str, *arguments: object, folder: Path, text: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m nmt.<command> arguments` in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", f"nmt.{command}", *map(str, arguments)],
        cwd=folder, input=text, capture_output=True, timeout=300, env=environment(folder),
    )  # fmt: skip


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
    works("train", "name=mine", "data=text", f"data.path={corpus}", *TINY, "train.max_epochs=2", folder=folder)
    return folder
