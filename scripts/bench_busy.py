"""Training speed on a quiet machine and beside one busy process, by how long OpenMP's threads spin at a barrier.

python scripts/bench_busy.py                                     a quarter of an hour on two cores
python scripts/bench_busy.py windows=99 updates=4 busy=4 precision=bf16 spins=0,1000,10000

Each setting is a process of its own, which trains the built-in corpus with the sizes of its recipe; they take turns, a
window of `updates` updates each, and of `busy` updates beside a process that keeps one core busy. Printed are the
medians of the windows in tokens/s of both sides, with the least and the most, and their number. Windows in which other
processes than these have taken time do not count: on a shared machine many short ones find the quiet moments.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from settings import settings_given

BUSY = "while True: pass"
NOISE = 0.08  # cores
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def used() -> float:
    """Seconds that all processes of the machine have computed so far."""
    line = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, (*line[1:4], *line[6:8]))) / os.sysconf("SC_CLK_TCK")


def serve(connection: Connection, precision: str) -> None:
    """A process of its own: for each number of updates asked for, tokens/s, and how many cores others have used."""
    import torch
    from bench_training import System, updates
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from nmt.config import TrainRun
    from nmt.data.batching import epoch_batches
    from nmt.data.corpus import load_pairs
    from nmt.data.encoding import cached_tokenizer, encode_corpus
    from nmt.runtime.command_line import CONFIGS, to_dataclasses
    from nmt.runtime.device import choose_precision

    ConfigStore.instance().store(name="train_schema", node=TrainRun)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        run: TrainRun = to_dataclasses(compose("train"))
    pairs, device = load_pairs(run.data, "train"), torch.device("cpu")
    tokenizer = cached_tokenizer(pairs, run)
    encoded = encode_corpus(pairs, tokenizer, run)
    batches, done = epoch_batches(encoded, run.train, run.seed, 0), 0
    system = System("nmt", run.model, choose_precision(precision, device), 0)
    update = updates(system, tokenizer.source.vocab_size, encoded, device)
    connection.send(torch.get_num_threads())
    while count := connection.recv():
        chosen = [batches[(done + number) % len(batches)] for number in range(count)]
        before, own, started = used(), time.process_time(), time.perf_counter()
        for indices in chosen:
            update(indices)
        seconds = time.perf_counter() - started
        others = used() - before - (time.process_time() - own)
        done += count
        connection.send((sum(int(encoded.lengths(indices).sum()) for indices in chosen) / seconds, others / seconds))


def begin(given: dict[str, str], precision: str) -> Connection:
    """Start a process with these variables in its environment, which OpenMP reads when it is loaded."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(given)
    spawn = multiprocessing.get_context("spawn")
    end, other = spawn.Pipe()
    spawn.Process(target=serve, args=(other, precision), daemon=True).start()
    print(f"{given or 'as the system has it'}: {end.recv()} threads", flush=True)
    return end


def keep_busy() -> subprocess.Popen[bytes]:
    """A process that computes on the first of the cores that this one may use, and there alone."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\n{BUSY}"
    return subprocess.Popen([sys.executable, "-c", code])


def main() -> None:
    settings = settings_given(windows="5", updates="12", busy="4", precision="auto", spins="0,1000,3000,10000,30000")
    tried: dict[str, dict[str, str]] = {"as the system has it": {"GOMP_SPINCOUNT": "300000"}}
    tried |= {f"GOMP_SPINCOUNT={spins}": {"GOMP_SPINCOUNT": spins} for spins in settings["spins"].split(",")}
    tried |= {"OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"}, "one thread": {"OMP_NUM_THREADS": "1"}}
    ends = {name: begin(given, settings["precision"]) for name, given in tried.items()}
    speeds: dict[tuple[str, bool], list[float]] = {}
    for window in range(int(settings["windows"]) + 1):  # the first does not count: kernels are compiled
        print(f"window {window}, load {Path('/proc/loadavg').read_text().split()[0]}", flush=True)
        for busy in (False, True):
            neighbor = keep_busy() if busy else None
            for name, end in ends.items():
                end.send(int(settings["busy" if busy else "updates"]))
                speed, others = end.recv()
                if counts := window > 0 and others < busy + NOISE:
                    speeds.setdefault((name, busy), []).append(speed)
                what = f"{'busy ' if busy else 'quiet'} {name}: {speed:,.0f}, others {others:.2f} cores"
                print(f"  {what}{'' if counts else ' (does not count)'}", flush=True)
            if neighbor is not None:
                neighbor.kill()
                neighbor.wait()
    print("\n|  | Quiet | from - to (windows) | Beside a busy core | from - to (windows) |\n|---|---|---|---|---|")
    for name in tried:
        cells = []
        for own in (speeds.get((name, busy), []) for busy in (False, True)):
            cells.append(f"{median(own):,.0f} | {min(own):,.0f} - {max(own):,.0f} ({len(own)})" if own else " | (0)")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
