"""Check that results do not depend on the number of ranks, nor on ranks that are killed.

ranks.py curve=200    compare losses, BLEU and translations of 200 updates on 1, 2 and 3 ranks
ranks.py kill=10    kill one of two ranks at 10 random moments, with and without restarts
ranks.py bytes=100    compare the bytes sent by 2 and by 3 ranks in 100 updates with theory
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

from faults import SMALL_SETTINGS, read_results, require, run_trials, write_corpus

from nmt import train
from nmt.training import loop

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
CPU = ("device=cpu", "precision=fp32")
ENDLESS = ("train.max_epochs=null", "overwrite=true")
BYTES_SENT = 200  # offset of tcpi_bytes_sent, 8 bytes, in Linux's `struct tcp_info`


def start_processes(
    count: int, program: tuple[str, ...], *arguments: str, folder: Path, threads: int = 1, restarts: int = 0
) -> Any:
    """Start a command with `count` ranks of `threads` threads each in a folder, with output to the file `said`."""
    launcher: tuple[str, ...] = (sys.executable,)
    if count > 1:
        launcher = (*TORCHRUN, f"--nproc-per-node={count}", f"--max-restarts={restarts}")
    folder.mkdir(parents=True, exist_ok=True)
    place = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": str(threads)}
    with open(folder / "said", "wb") as said:
        command = [*launcher, *program, *arguments]
        return subprocess.Popen(command, cwd=folder, env=os.environ | place, stdout=said, stderr=said)


def run_processes(count: int, name: str, *arguments: str, folder: Path, threads: int = 1) -> None:
    """Run `python -m nmt.<name>` with `count` ranks."""
    code = start_processes(count, ("-m", f"nmt.{name}"), *arguments, folder=folder, threads=threads).wait()
    require(code == 0, f"exit code {code}:\n{(folder / 'said').read_text()[-4000:]}")


def read_values(run: Path, kind: str, key: str) -> list[float]:
    """Read a value from all events of a kind."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event[key] for event in found if event["event"] == kind]


# --------------------------------------------------------------------------------------------------------------- curve
def check_curve(steps: int, folder: Path) -> None:
    """Check that 1, 2 and 3 ranks, and 2 that resume as 1, give the same losses, BLEU and translations."""
    for precision, most in (("fp32", 1e-5), ("fp64", 1e-9)):
        settings = (
            "device=cpu", f"precision={precision}", "model.dropout=0", "optim.lr=0.001", "optim.warmup=0",
            "optim.schedule=constant", "train.log_every=1", f"train.validate_every={steps // 2}",
            "train.max_epochs=null",
        )  # fmt: skip
        made: dict[str, Path] = {}
        for name, counts in {"1": (1,), "2": (2,), "3": (3,), "2 then 1": (2, 1)}.items():
            made[name] = folder / "runs" / f"{precision}_{name.replace(' ', '_')}"
            shutil.rmtree(made[name], ignore_errors=True)
            for part, count in enumerate(counts, 1):
                last = f"train.max_steps={steps * part // len(counts)}"
                run_processes(count, "train", f"name={made[name].name}", "resume=auto", *settings, last, folder=folder)
            run_processes(counts[-1], "evaluate", f"checkpoint={made[name]}", *CPU, "pictures=0", folder=folder)
        for name in list(made)[1:]:
            print_differences(f"{precision}, {name} beside 1", made["1"], made[name], most)
        same = [translate_with_ranks(made["1"], count, folder) for count in (1, 2, 3)]
        require(len({*same}) == 1, "translations of one model by 1, 2 and 3 processes differ")
        lines = len(same[0].splitlines())
        print(f"{precision}: {lines:,} translations of one model by 1, 2 and 3 processes are equal bytes")


def print_differences(what: str, one: Path, other: Path, most: float) -> None:
    """Print the differences between two runs, and require that losses differ by less than `most`."""
    gaps = {}
    for kind in ("train", "validate"):
        pairs = list(zip(read_values(one, kind, "loss"), read_values(other, kind, "loss"), strict=True))
        gaps[kind] = max(abs(first - second) / first for first, second in pairs)
        require(gaps[kind] < most, f"{what}: {kind} loss differs by {gaps[kind]:.1e}")
    bleu = [read_values(path, "validate", "bleu") for path in (one, other)]
    texts = [(path / "eval" / "test" / "translations.txt").read_text().splitlines() for path in (one, other)]
    others = sum(first != second for first, second in zip(*texts, strict=True))
    scores = [json.loads((path / "eval" / "test" / "metrics.json").read_text())["bleu"] for path in (one, other)]
    print(
        f"{what}: {len(read_values(one, 'train', 'loss'))} updates, loss at most {gaps['train']:.1e} away (relative), "
        f"validation loss {gaps['validate']:.1e}, BLEU in validation {bleu[0]} and {bleu[1]}, of the test split "
        f"{scores[0]:.4f} and {scores[1]:.4f}; {others} of {len(texts[0]):,} translations differ"
    )


def translate_with_ranks(run_folder: Path, count: int, folder: Path) -> bytes:
    """Translate the sources of the test split with `count` ranks."""
    found = map(json.loads, (run_folder / "eval" / "test" / "alignments.jsonl").read_text().splitlines())
    (folder / "sources").write_text("".join(" ".join(record["source_words"]) + "\n" for record in found))
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
        "data=text", write_corpus(folder, train=400, valid=20, test=2), *SMALL_SETTINGS, "train.max_steps=200",
        "train.max_epochs=null", "train.save_every=20", "train.validate_every=50", "resume=auto",
    )  # fmt: skip
    run_processes(2, "train", "name=warm", *settings, folder=folder)  # reads, tokenizes
    began = time.monotonic()
    run_processes(2, "train", "name=whole", *settings, folder=folder)
    whole = time.monotonic() - began
    wanted = read_results(folder / "runs" / "whole")
    for attempt in range(times):
        shutil.rmtree(folder / "runs" / "torn", ignore_errors=True)
        restarts, victim, moment = attempt % 2, rng.randrange(2), rng.uniform(0.05, 0.9) * whole
        launcher = start_processes(2, ("-m", "nmt.train"), "name=torn", *settings, folder=folder, restarts=restarts)
        time.sleep(moment)
        while launcher.poll() is None and (found := find_worker(launcher.pid, victim)) is None:
            time.sleep(0.01)
        killed = launcher.poll() is None
        if killed and found:
            os.kill(found, signal.SIGKILL)
        began = time.monotonic()
        code, said = launcher.wait(), (folder / "said").read_text()
        took = time.monotonic() - began
        require(
            not re.search('File ".*nmt/(?!.*site-packages)', said), said[-4000:]
        )  # torchrun prints tracebacks itself
        steps = sum(line.startswith("step ") for line in said.splitlines())
        print(f"process {victim} killed after {moment:.1f} s: exit code {code} {took:.1f} s later, {steps} reports")
        if killed and not restarts:
            require(code != 0 and took < 30, f"exit code {code} after {took:.0f} s:\n{said[-4000:]}")
            run_processes(2, "train", "name=torn", *settings, folder=folder)
        require(code == 0 or not restarts, said[-4000:])
        seconds["restarted" if restarts else "ended"].append(took)
        torn = read_results(folder / "runs" / "torn")
        for key in wanted.keys() | torn.keys():
            require(wanted.get(key) == torn.get(key), f"{key} differs")
    print(
        f"one of 2 processes killed {times} times: the job ended at most {max(seconds['ended']):.1f} s later, with "
        f"restarts it was done at most {max(seconds['restarted']):.1f} s later ({whole:.1f} s undisturbed); weights, "
        "optimizer and validations equal"
    )


def find_worker(launcher: int, rank: int) -> int | None:
    """Return the process id of a rank that torchrun has started, or None."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    return None


# --------------------------------------------------------------------------------------------------------------- bytes
def check_bytes(steps: int, folder: Path) -> None:
    """Compare the bytes sent per update with a ring all-reduce by R ranks: 2 n (R - 1) / R each for n bytes."""
    few = (*CPU, *ENDLESS, f"train.max_steps={steps + 20}", f"train.log_every={2 * steps + 20}")
    for count in (2, 3):
        code = start_processes(count, (str(Path(__file__).resolve()),), "name=sent", *few, folder=folder).wait()
        require(code == 0, (folder / "said").read_text()[-4000:])
        for rank in range(count):
            found = json.loads((folder / f"sent.{rank}").read_text())
            each = (found["sent"][steps + 10] - found["sent"][10]) / steps
            numbers, ring = found["parameters"] + 5, 2 * (count - 1) / count
            wanted = ring * (4 * numbers + 8)
            sum_ = f"{ring:.4g} x (4 x {numbers:,} + 8) = {wanted:,.1f}"
            print(f"process {rank} of {count}: {each:,.1f} bytes an update; {sum_}; ratio {each / wanted:.6f}")
            require(abs(each / wanted - 1) < 0.01, "the arithmetic is wrong")


def train_and_count_bytes() -> None:
    """Run `nmt.train` as one rank, and record the bytes sent before each update."""
    found: dict[str, Any] = {"sent": []}
    update = loop.train_step

    def counted(state: Any, *others: Any) -> Any:
        found["parameters"] = sum(parameter.numel() for parameter in state.model.parameters())
        found["sent"].append(read_bytes_sent())
        Path(f"sent.{os.environ['RANK']}").write_text(
            json.dumps(found)
        )  # at each update, because the process does not return from train
        return update(state, *others)

    loop.train_step = counted  # type: ignore[assignment]
    train.train()


def read_bytes_sent() -> int:
    """Return the bytes that this process has sent by TCP, as counted by Linux."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # a file that is closed by now; a socket of another kind
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


# --------------------------------------------------------------------------------------------------------------- speed
def measure_speed(rounds: int, folder: Path) -> None:
    """Measure target tokens/s of one rank and of two, in turn, `rounds` times."""
    ways = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    few = (*CPU, *ENDLESS, "train.max_steps=60", "train.log_every=10", "name=speed")
    run_processes(1, "train", *few, folder=folder)  # reads, tokenizes
    for _ in range(rounds):
        for way, (count, threads) in ways.items():
            run_processes(count, "train", *few, folder=folder, threads=threads)
            speeds = read_values(folder / "runs" / "speed", "train", "target_tokens_per_second")
            found[way].append(statistics.median(speeds[1:]))
    for way, speeds in found.items():
        print(f"{way}: {statistics.median(speeds):,.0f} target tokens/s ({', '.join(f'{one:,.0f}' for one in speeds)})")


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
