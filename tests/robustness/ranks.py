"""Check that results do not depend on the number of ranks, nor on ranks that are killed.

ranks.py curve=200    compare losses, BLEU and translations of 200 updates on 1, 2 and 3 ranks
ranks.py kill=10    kill one of two ranks at 10 random moments, with and without restarts
ranks.py bytes=100    compare the bytes sent by 2 and by 3 ranks in 100 updates with the expected number
ranks.py speed=3    measure tokens/s of one rank with 1 and 2 threads, and of two ranks: medians of 3 rounds

Several can be given. All work on the built-in corpus on CPUs, in a temporary folder or in folder=DIR, which is kept,
and print their results. A violated guarantee ends the program with exit code 1.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import SMALL_SETTINGS, check_equal, read_results, require, run_trials, write_corpus

from nmt import train
from nmt.training import loop

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
CPU = ("device=cpu", "precision=fp32")
ENDLESS = ("train.max_epochs=null", "overwrite=true")
BYTES_SENT = 200  # offset of tcpi_bytes_sent, 8 bytes, in Linux's `struct tcp_info`


def start_processes(
    count: int, program: tuple[str, ...], *arguments: str, folder: Path, threads: int = 1, restarts: int = 0
) -> Any:
    """Start a command with `count` ranks of `threads` threads each in a folder, with output to the file `output`."""
    launcher: tuple[str, ...] = (sys.executable,)
    if count > 1:
        launcher = (*TORCHRUN, f"--nproc-per-node={count}", f"--max-restarts={restarts}")
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": str(threads)}
    with open(folder / "output", "wb") as output:
        command = [*launcher, *program, *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def run_processes(count: int, name: str, *arguments: str, folder: Path, threads: int = 1) -> None:
    """Run `python -m nmt.<name>` with `count` ranks."""
    code = start_processes(count, ("-m", f"nmt.{name}"), *arguments, folder=folder, threads=threads).wait()
    require(code == 0, f"exit code {code}:\n{(folder / 'output').read_text()[-4000:]}")


def read_values(run: Path, kind: str, key: str) -> list[float]:
    """Read a value from all events of a kind."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event[key] for event in events if event["event"] == kind]


# --------------------------------------------------------------------------------------------------------------- curve
def check_curve(steps: int, folder: Path) -> None:
    """Check that 1, 2 and 3 ranks, and 2 that resume as 1, give the same losses, BLEU and translations."""
    for precision, tolerance in (("fp32", 1e-5), ("fp64", 1e-9)):
        settings = (
            "device=cpu",
            f"precision={precision}",
            "model.dropout=0",
            "optim.lr=0.001",
            "optim.warmup=0",
            "optim.schedule=constant",
            "train.log_every=1",
            f"train.validate_every={steps // 2}",
            "train.max_epochs=null",
        )
        runs: dict[str, Path] = {}
        for name, counts in {"1 rank": (1,), "2 ranks": (2,), "3 ranks": (3,), "2 ranks, then 1": (2, 1)}.items():
            run = runs[name] = folder / "runs" / f"{precision}_{'_'.join(map(str, counts))}"
            shutil.rmtree(run, ignore_errors=True)
            for part, count in enumerate(counts, 1):
                max_steps = f"train.max_steps={steps * part // len(counts)}"
                arguments = (f"name={run.name}", "resume=auto", *settings, max_steps)
                run_processes(count, "train", *arguments, folder=folder)
            run_processes(counts[-1], "evaluate", f"checkpoint={run}", *CPU, "pictures=0", folder=folder)
        for name in list(runs)[1:]:
            print_differences(f"{precision}, {name} against 1 rank", runs["1 rank"], runs[name], tolerance)
        translations = [translate_with_ranks(runs["1 rank"], count, folder) for count in (1, 2, 3)]
        require(len(set(translations)) == 1, "translations of one model by 1, 2 and 3 ranks differ")
        lines = len(translations[0].splitlines())
        print(f"{precision}: {lines:,} translations of one model by 1, 2 and 3 ranks are byte-identical")


def print_differences(title: str, reference: Path, run: Path, tolerance: float) -> None:
    """Print the differences between two runs, and require that losses differ by less than `tolerance` (relative)."""
    differences = {}
    for kind in ("train", "validate"):
        pairs = list(zip(read_values(reference, kind, "loss"), read_values(run, kind, "loss"), strict=True))
        differences[kind] = max(abs(first - second) / first for first, second in pairs)
        require(differences[kind] < tolerance, f"{title}: {kind} loss differs by {differences[kind]:.1e}")
    both = (reference, run)
    bleu = [read_values(path, "validate", "bleu") for path in both]
    texts = [(path / "eval" / "test" / "translations.txt").read_text().splitlines() for path in both]
    changed = sum(first != second for first, second in zip(*texts, strict=True))
    scores = [json.loads((path / "eval" / "test" / "metrics.json").read_text())["bleu"] for path in both]
    print(
        f"{title}: {len(read_values(reference, 'train', 'loss'))} updates; largest relative difference of the training "
        f"loss {differences['train']:.1e}, of the validation loss {differences['validate']:.1e}; validation BLEU "
        f"{bleu[0]} and {bleu[1]}, test BLEU {scores[0]:.4f} and {scores[1]:.4f}; {changed} of {len(texts[0]):,} "
        "translations differ"
    )


def translate_with_ranks(run_folder: Path, count: int, folder: Path) -> bytes:
    """Translate the sources of the test split with `count` ranks."""
    records = map(json.loads, (run_folder / "eval" / "test" / "alignments.jsonl").read_text().splitlines())
    (folder / "sources").write_text("".join(" ".join(record["source_words"]) + "\n" for record in records))
    run_processes(count, "translate", f"checkpoint={run_folder}", *CPU, "input=sources", "output=out", folder=folder)
    return (folder / "out").read_bytes()


# ---------------------------------------------------------------------------------------------------------------- kill
def check_kills(times: int, folder: Path) -> None:
    """Check that a job of two ranks survives the death of one.

    The job must end within 30 seconds, and resume when it is started again, or torchrun must restart it. Either way the
    results must be those of an uninterrupted job.
    """
    rng, seconds = random.Random(1), {"ended": [0.0], "restarted": [0.0]}
    settings = (
        "data=text",
        write_corpus(folder, train=400, valid=20, test=2),
        *SMALL_SETTINGS,
        "train.max_steps=200",
        "train.max_epochs=null",
        "train.save_every=20",
        "train.validate_every=50",
        "resume=auto",
    )
    run_processes(2, "train", "name=warm", *settings, folder=folder)  # fills the cache
    start = time.monotonic()
    run_processes(2, "train", "name=whole", *settings, folder=folder)
    whole_seconds = time.monotonic() - start
    expected = read_results(folder / "runs" / "whole")
    for attempt in range(times):
        shutil.rmtree(folder / "runs" / "killed", ignore_errors=True)
        restarts, victim, delay = attempt % 2, rng.randrange(2), rng.uniform(0.05, 0.9) * whole_seconds
        launcher = start_processes(2, ("-m", "nmt.train"), "name=killed", *settings, folder=folder, restarts=restarts)
        time.sleep(delay)
        while launcher.poll() is None and (worker := find_worker(launcher.pid, victim)) is None:
            time.sleep(0.01)
        killed = launcher.poll() is None
        if killed and worker:
            os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        code, output = launcher.wait(), (folder / "output").read_text()
        duration = time.monotonic() - start
        # torchrun prints tracebacks of its own files
        require(not re.search('File ".*nmt/(?!.*site-packages)', output), output[-4000:])
        reports = sum(line.startswith("step ") for line in output.splitlines())
        print(
            f"rank {victim} killed after {delay:.1f} s: exit code {code} after another {duration:.1f} s; "
            f"{reports} reports of steps"
        )
        if killed and not restarts:
            require(code != 0 and duration < 30, f"exit code {code} after {duration:.0f} s:\n{output[-4000:]}")
            run_processes(2, "train", "name=killed", *settings, folder=folder)
        require(code == 0 or not restarts, output[-4000:])
        seconds["restarted" if restarts else "ended"].append(duration)
        check_equal(read_results(folder / "runs" / "killed"), expected)
    print(
        f"one of 2 ranks killed {times} times: without restarts the job ended within {max(seconds['ended']):.1f} s, "
        f"with restarts it finished within {max(seconds['restarted']):.1f} s ({whole_seconds:.1f} s uninterrupted); "
        "weights, optimizer and validations are identical"
    )


def find_worker(launcher: int, rank: int) -> int | None:
    """Return the process id of a rank that torchrun has started, or None."""
    with contextlib.suppress(OSError):  # a process has ended meanwhile
        for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    return None


# --------------------------------------------------------------------------------------------------------------- bytes
def check_bytes(steps: int, folder: Path) -> None:
    """Compare the bytes sent per update with a ring all-reduce by R ranks: 2 n (R - 1) / R each for n bytes."""
    settings = (*CPU, *ENDLESS, f"train.max_steps={steps + 20}", f"train.log_every={2 * steps + 20}")
    for count in (2, 3):
        code = start_processes(count, (str(Path(__file__).resolve()),), "name=sent", *settings, folder=folder).wait()
        require(code == 0, (folder / "output").read_text()[-4000:])
        for rank in range(count):
            measured = json.loads((folder / f"sent.{rank}").read_text())
            actual = (measured["sent"][steps + 10] - measured["sent"][10]) / steps
            numbers, ring = measured["parameters"] + 5, 2 * (count - 1) / count
            expected = ring * (4 * numbers + 8)
            formula = f"{ring:.4g} x (4 x {numbers:,} + 8) = {expected:,.1f}"
            ratio = actual / expected
            print(f"rank {rank} of {count}: {actual:,.1f} bytes per update; expected {formula}; ratio {ratio:.6f}")
            require(abs(ratio - 1) < 0.01, "the number of bytes is not the expected one")


def train_and_count_bytes() -> None:
    """Run `nmt.train` as one rank, and record the bytes sent before each update."""
    measured: dict[str, Any] = {"sent": []}
    train_step = loop.train_step

    def train_step_with_count(state: Any, *others: Any) -> Any:
        measured["parameters"] = sum(parameter.numel() for parameter in state.model.parameters())
        measured["sent"].append(read_bytes_sent())
        # Written at each update, because the process does not return from train().
        Path(f"sent.{os.environ['RANK']}").write_text(json.dumps(measured))
        return train_step(state, *others)

    loop.train_step = train_step_with_count  # type: ignore[assignment]
    train.train()


def read_bytes_sent() -> int:
    """Return the bytes that this process has sent by TCP, as counted by Linux."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the file was closed meanwhile, or the socket is not TCP
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as tcp_socket:
                    info = tcp_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


# --------------------------------------------------------------------------------------------------------------- speed
def measure_speed(rounds: int, folder: Path) -> None:
    """Measure target tokens/s of one rank and of two, in turn, `rounds` times."""
    setups = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}
    medians: dict[str, list[float]] = {setup: [] for setup in setups}
    settings = (*CPU, *ENDLESS, "train.max_steps=60", "train.log_every=10", "name=speed")
    run_processes(1, "train", *settings, folder=folder)  # fills the cache
    for _ in range(rounds):
        for setup, (count, threads) in setups.items():
            run_processes(count, "train", *settings, folder=folder, threads=threads)
            speeds = read_values(folder / "runs" / "speed", "train", "target_tokens_per_second")
            medians[setup].append(statistics.median(speeds[1:]))
    for setup, speeds in medians.items():
        rounds_text = ", ".join(f"{speed:,.0f}" for speed in speeds)
        print(f"{setup}: {statistics.median(speeds):,.0f} target tokens/s ({rounds_text})")


TRIALS: dict[str, Callable[[int, Path], None]] = {
    "curve": check_curve,
    "kill": check_kills,
    "bytes": check_bytes,
    "speed": measure_speed,
}


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by `check_bytes`
        train_and_count_bytes()
    else:
        run_trials(TRIALS)
