"""Fixtures that all tests share: a clean log, a small corpus and a small trained run."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import ROOT, TINY_SETTINGS, run_in_new_process, write_corpus
from hypothesis import settings

from nmt.model.kernels import KERNELS

# With models as small as these, threads wait for each other longer than they work, above all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# This checkout comes first, also for the process that others are forked from; what the caller has named stays.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

settings.register_profile("nmt", deadline=None)  # other work may be done beside the tests
settings.load_profile("nmt")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A command that runs within a test sets the log and a signal to its own liking."""
    log = logging.getLogger("nmt")
    before = log.handlers[:], log.level, log.propagate, signal.getsignal(signal.SIGTERM)
    yield
    log.handlers[:], log.level, log.propagate = before[:3]
    signal.signal(signal.SIGTERM, before[3])


@pytest.fixture(params=["fast", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the fast kernels, and again with every model built from `nmt/model/reference.py`."""
    monkeypatch.setitem(KERNELS, "fast", KERNELS[request.param])
    return str(request.param)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small line-aligned text files."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=600, valid=40, test=30)


@pytest.fixture(scope="session")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/mine is trained for two epochs."""
    folder = tmp_path_factory.mktemp("home")
    given = ("name=mine", "data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_epochs=2")
    done = run_in_new_process("train", *given, folder=folder)
    assert done.returncode == 0, done.stderr.decode()
    return folder
