"""Measure training speed on an idle machine and alongside a busy process, by how long OpenMP threads spin at a barrier.

python scripts/bench_busy.py                                     # takes 15 minutes on two cores
python scripts/bench_busy.py windows=99 updates=4 busy=4 precision=bf16 spins=0,1000,10000

Each OpenMP setting gets its own process, which trains on the built-in corpus with the default sizes. The processes take
turns: a window of `updates` updates each on the idle machine, then one of `busy` updates each alongside a process that
keeps one core busy. The script prints the median, minimum and maximum of the windows in tokens/s of both sides, and
their number. Windows in which other processes used the processor are discarded, so on a shared machine use many short
windows.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from settings import parse_settings

BUSY_LOOP = "while True: pass"
MAX_OTHER_CORES = 0.08  # cores used by other processes in a window that counts
OPENMP_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def read_cpu_seconds() -> float:
    """Return the processor seconds of all processes since the machine was booted."""
    line = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, (*line[1:4], *line[6:8]))) / os.sysconf("SC_CLK_TCK")


def serve_updates(connection: Connection, precision: str) -> None:
    """Answer each requested number of updates with (tokens/s, cores used by other processes)."""
    import torch
    from bench_training import System, make_update
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from nmt.config import TrainRun
    from nmt.data.batching import epoch_batches
    from nmt.data.corpus import load_pairs
    from nmt.data.encoding import encode_corpus, get_or_train_tokenizer
    from nmt.system.command_line import CONFIG_DIR, to_dataclasses
    from nmt.system.device import choose_precision

    ConfigStore.instance().store(name="train_schema", node=TrainRun)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        run: TrainRun = to_dataclasses(compose("train", ["model=bahdanau"]))
    pairs, device = load_pairs(run.data, "train"), torch.device("cpu")
    tokenizer = get_or_train_tokenizer(pairs, run)
    encoded = encode_corpus(pairs, tokenizer, run)
    batches, done = epoch_batches(encoded, run.train, run.seed, 0), 0
    system = System("nmt", run.model, choose_precision(precision, device), 0)
    update = make_update(system, tokenizer.source.vocab_size, encoded, device)
    connection.send(torch.get_num_threads())
    while count := connection.recv():
        chosen = [batches[(done + number) % len(batches)] for number in range(count)]
        before, own, started = read_cpu_seconds(), time.process_time(), time.perf_counter()
        for indices in chosen:
            update(indices)
        seconds = time.perf_counter() - started
        others = read_cpu_seconds() - before - (time.process_time() - own)
        done += count
        connection.send((sum(int(encoded.lengths(indices).sum()) for indices in chosen) / seconds, others / seconds))


def start_server(given: dict[str, str], precision: str) -> Connection:
    """Start a server process with these environment variables, which OpenMP reads when it is loaded."""
    for name in OPENMP_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(given)
    spawn = multiprocessing.get_context("spawn")
    end, other = spawn.Pipe()
    spawn.Process(target=serve_updates, args=(other, precision), daemon=True).start()
    print(f"{given or 'system default'}: {end.recv()} threads", flush=True)
    return end


def start_busy_process() -> subprocess.Popen[bytes]:
    """Start a process that keeps the first available core busy."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\n{BUSY_LOOP}"
    return subprocess.Popen([sys.executable, "-c", code])


def main() -> None:
    settings = parse_settings(windows="5", updates="12", busy="4", precision="auto", spins="0,1000,3000,10000,30000")
    tried: dict[str, dict[str, str]] = {"system default": {"GOMP_SPINCOUNT": "300000"}}
    tried |= {f"GOMP_SPINCOUNT={spins}": {"GOMP_SPINCOUNT": spins} for spins in settings["spins"].split(",")}
    tried |= {"OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"}, "one thread": {"OMP_NUM_THREADS": "1"}}
    ends = {name: start_server(given, settings["precision"]) for name, given in tried.items()}
    speeds: dict[tuple[str, bool], list[float]] = {}
    for window in range(int(settings["windows"]) + 1):  # the first is a warm-up: kernels are compiled
        print(f"window {window}, load {Path('/proc/loadavg').read_text().split()[0]}", flush=True)
        for busy in (False, True):
            neighbor = start_busy_process() if busy else None
            for name, end in ends.items():
                end.send(int(settings["busy" if busy else "updates"]))
                speed, others = end.recv()
                if counts := window > 0 and others < busy + MAX_OTHER_CORES:
                    speeds.setdefault((name, busy), []).append(speed)
                what = f"{'busy' if busy else 'idle'} {name}: {speed:,.0f}, others {others:.2f} cores"
                print(f"  {what}{'' if counts else ' (discarded)'}", flush=True)
            if neighbor is not None:
                neighbor.kill()
                neighbor.wait()
    print("\n|  | Idle | from - to (windows) | Alongside a busy core | from - to (windows) |\n|---|---|---|---|---|")
    for name in tried:
        cells = []
        for own in (speeds.get((name, busy), []) for busy in (False, True)):
            cells.append(f"{median(own):,.0f} | {min(own):,.0f} - {max(own):,.0f} ({len(own)})" if own else " | (0)")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
