"""Interrupt training and check the guarantees of docs/reliability.md.

faults.py kill=100    kill training at 100 random moments (SIGKILL), and resume it each time
faults.py term=100    the same with SIGTERM

All works on the built-in corpus, in a temporary folder or in folder=DIR, which is kept. A violated guarantee ends the
program with exit code 1.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not pay off for such a small model
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # a killed process leaves semaphores

from nmt.data.toy.corpus import generate  # noqa: E402  after the number of threads
from nmt.runs.checkpoint import find_last_intact_checkpoint  # noqa: E402
from nmt.system.text import use_utf8  # noqa: E402

SMALL_SETTINGS = (
    "tokenizer.vocab_size=500",
    "model.embed=16",
    "model.hidden=32",
    "model.dropout=0.1",
    "train.batch_tokens=400",
    "optim.lr=0.005",
    "device=cpu",
    "precision=fp32",
)
AUDIT_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audited by Python before they happen
CONTEXT = multiprocessing.get_context("forkserver")  # with all imports preloaded, a process starts within a second


def kill_at_operation(number: int) -> None:
    """Kill this process just before its file operation `number`, counted from 1."""
    count = 0

    def audit(event: str, _: tuple[Any, ...]) -> None:
        nonlocal count
        if event in AUDIT_EVENTS:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def run_program(name: str, arguments: tuple[str, ...], folder: Path) -> None:
    """Run `python -m nmt.<name>` in this process, in a folder, with output appended to the file `output`."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with open("output", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [name, *arguments]
    module = __import__(f"nmt.{name}", fromlist=[name])
    getattr(module, name)()


def start_program(name: str, *arguments: str, folder: Path) -> Any:
    process = CONTEXT.Process(target=run_program, args=(name, arguments, folder))
    process.start()
    return process


def run_to_exit(name: str, *arguments: str, folder: Path) -> int:
    process = start_program(name, *arguments, folder=folder)
    process.join()
    return process.exitcode


def write_corpus(folder: Path, **sizes: int) -> str:
    """Write text of the built-in corpus, and return the data.path setting."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for split, pairs in generate(1, sizes).items():
        for side, texts in {"de": [p.german for p in pairs], "en": [p.english for p in pairs]}.items():
            (folder / "text" / f"{split}.{side}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return f"data.path={folder / 'text'}"


# ---------------------------------------------------------------------------------------------------------------- kill
@cache
def train_uninterrupted(settings: tuple[str, ...], folder: Path) -> tuple[dict[str, Any], float, float]:
    """Train once without interruption; return the results, and the seconds for all and for the start alone."""
    shutil.rmtree(folder / "runs" / "whole", ignore_errors=True)  # of other settings, for another number of trials
    start = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0, (folder / "output").read_text()
    whole_seconds = time.monotonic() - start
    start = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0
    startup_seconds = time.monotonic() - start
    print(f"uninterrupted: {whole_seconds:.1f} s, of which {startup_seconds:.1f} s to start")
    return read_results(folder / "runs" / "whole"), whole_seconds, startup_seconds


def check_kills(times: int, folder: Path, number: signal.Signals) -> None:
    """Check that training killed `times` times ends with the same files as uninterrupted training."""
    rng = random.Random(1)
    settings = (
        "data=text",
        write_corpus(folder, train=400, valid=6, test=2),
        *SMALL_SETTINGS,
        f"train.max_steps={6 * times + 12}",
        "train.max_epochs=null",
        "train.save_minutes=1e-6",
        "train.validate_every=8",
        "train.log_every=10",
        "resume=auto",
    )
    expected, whole_seconds, startup_seconds = train_uninterrupted(settings, folder)
    kills, trainings = 0, 0
    run = folder / "runs" / "killed"
    while kills < times:
        trainings += 1
        shutil.rmtree(run, ignore_errors=True)
        finished = False
        while not finished:
            process = start_program("train", "name=killed", *settings, folder=folder)
            if kills < times:
                longest = startup_seconds + min(3 / times, 0.7) * (whole_seconds - startup_seconds)
                process.join(rng.uniform(0.5 * startup_seconds, longest))
            else:
                process.join()
            codes = [0]
            if process.exitcode is None:
                if kills % 2:  # every second one during or just after writing a checkpoint
                    wait_for_checkpoint_write(run, process, rng.uniform(0, 0.02))
                if process.is_alive():
                    os.kill(process.pid, number)
                process.join()
                kills += 1
                codes += [-number, 128 + number]
            output = (folder / "output").read_text()[-2000:]
            require(process.exitcode in codes, f"exit code {process.exitcode}:\n{output}")
            finished = process.exitcode == 0
        actual = read_results(run)
        different = [name for name in actual | expected if actual.get(name) != expected.get(name)]
        require(not different, f"not identical: {', '.join(different)}")
    print(f"{kills} x {number.name} in {trainings} trainings: checkpoints and validations are identical")


def wait_for_checkpoint_write(run: Path, process: Any, seconds: float) -> None:
    """Wait until a checkpoint is being written, and `seconds` more."""
    deadline = time.monotonic() + 5
    while process.is_alive() and time.monotonic() < deadline and not any(run.glob("checkpoints/.step_*.new")):
        time.sleep(0.0005)
    time.sleep(seconds)


def read_results(run: Path) -> dict[str, Any]:
    """Read the best and last checkpoints and the validations of a run, which do not depend on interruptions."""
    best = (run / "checkpoints" / "best").read_text()
    results: dict[str, Any] = {"best": best}
    for folder in sorted({run / "checkpoints" / best.strip(), find_last_intact_checkpoint(run)}):
        results |= {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return results | {"validations": [event for event in events if event["event"] == "validate"]}


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {message}")


SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


def run_trials() -> None:
    """Run the trials given on the command line, in a temporary folder or in folder=DIR."""
    use_utf8()
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if not options.keys() & SIGNALS or options.keys() - {*SIGNALS, "folder"}:
        sys.exit(sys.modules["__main__"].__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.pop("folder", temporary)).resolve()
        for name, times in options.items():
            check_kills(int(times), folder, SIGNALS[name])


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["nmt.train", "torch._dynamo"])
    run_trials()
