"""Fixtures for all tests: restored logging, kernels, a small corpus and a small trained run."""

import logging
import os
import random
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, NO_CHROMIUM, Browser
from builders import ROOT, TINY_SIZES, run_ok, write_corpus
from filelock import FileLock
from hypothesis import settings

from nmt.model.kernels import KERNELS

# With models this small, synchronizing threads takes longer than the work, especially beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Put this checkout first, also for the process that others are forked from, which imports tests/preload.py, and keep
# the folders set by the caller.
folders = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
# Commands run with other home folders, in each of which matplotlib would take seconds to list the fonts.
os.environ.setdefault("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))

settings.register_profile("nmt", deadline=None)  # timings are unreliable beside other processes
settings.load_profile("nmt")


# Reasons to skip a test of which a machine may lack the means. Everything else can be installed.
EXPECTED_SKIPS = ("no GPU", "the CPU has no exact int8", "needs real corpora")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--precision", default="fp32", help="what precision=auto stands for in all tests: fp32 or bf16")
    parser.addoption("--complete", action="store_true", help="fail if a test is skipped whose means can be installed")
    parser.addoption(
        "--shuffle", type=int, help="seed of a random order of the files, and of the tests in each of them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests. Those of a file stay together, because they share servers and browsers."""
    if (seed := config.getoption("shuffle")) is not None:
        generator = random.Random(seed)
        order: dict[Path, float] = defaultdict(generator.random)
        items.sort(key=lambda item: (order[item.path], generator.random()))


def pytest_configure(config: pytest.Config) -> None:
    """Compute in one precision on every processor. Commands and servers that tests start inherit it."""
    os.environ["NMT_PRECISION"] = config.getoption("precision")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--complete`, fail if a test was skipped for a reason that is not expected."""
    if not session.config.getoption("complete") or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])}
    if missing := sorted(reason for reason in reasons if not reason.startswith(EXPECTED_SKIPS)):
        reporter.write_line("\n--complete does not accept: " + "; ".join(missing), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def restore_logging_and_signals() -> Iterator[None]:
    """Restore what commands change when they run inside a test."""
    log = logging.getLogger("nmt")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    signal_handler = signal.getsignal(signal.SIGTERM)
    yield
    torch.set_flush_denormal(False)
    log.handlers[:], log.level, log.propagate = handlers, level, propagate
    signal.signal(signal.SIGTERM, signal_handler)


@pytest.fixture(params=["fast", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the fast kernels, and again with every model built from `nmt/model/reference.py`."""
    monkeypatch.setitem(KERNELS, "fast", KERNELS[request.param])
    return str(request.param)


def build_once(name: str, build: Callable[[Path], object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the first process of the tests builds, and all others share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared_{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of small line-aligned text files."""
    return build_once("corpus", lambda part: write_corpus(part, train=600, valid=40, test=30), tmp_path_factory)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of fewer lines, for tests in which nothing depends on what a model learns."""
    return build_once("small_corpus", lambda part: write_corpus(part, train=200, valid=8, test=6), tmp_path_factory)


@pytest.fixture(scope="session")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder with runs/mine, trained for two epochs.

    Its scores are the same to the last bit in batches of any size, which those of `model=luong` are not in fp32.
    """
    settings = ("model=bahdanau", *TINY_SIZES, "train.max_epochs=2")
    arguments = ("name=mine", "data=text", f"data.path={corpus}", *settings)
    trained = build_once("home", lambda part: run_ok("train", *arguments, folder=part), tmp_path_factory)
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("home") / "home"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
