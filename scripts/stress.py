"""Repeat tests in random order beside busy cores, to find those that pass only when nothing else runs.

    python scripts/stress.py                    20 rounds of the tests that start processes, servers or browsers
    python scripts/stress.py rounds=3 busy=4 tests=tests/commands/test_serve.py

A round runs each test once, beside `busy` endless loops (by default one for each core). Its seed is printed;
`seed=N rounds=1` repeats the order. The exit code is 1 if a test failed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from common import parse_settings

# What a file of tests mentions if it starts other processes.
STARTS_PROCESSES = re.compile(r"\b(CONTEXT|subprocess|nbclient|browser|running\(|listening\(|run_in_new_process)")
PYTEST = (sys.executable, "-m", "pytest", "--quiet", "--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")


def find_tests() -> list[str]:
    """Return the files of tests/robustness, and those that start processes, servers or browsers."""
    files = sorted(Path("tests").glob("*/test_*.py"))
    return [str(f) for f in files if f.parent.name == "robustness" or STARTS_PROCESSES.search(f.read_text("utf-8"))]


def main() -> None:
    settings = parse_settings(rounds="20", busy=str(os.cpu_count()), seed="1", tests="all")
    files = find_tests() if settings["tests"] == "all" else settings["tests"].split(",")
    first_seed, failures = int(settings["seed"]), 0
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(settings["busy"]))]
    try:
        for seed in range(first_seed, first_seed + int(settings["rounds"])):
            start = time.monotonic()
            result = subprocess.run([*PYTEST, f"--shuffle={seed}", *files], capture_output=True, text=True)
            failures += result.returncode != 0
            summary = result.stdout.splitlines()[-1] if result.stdout else result.stderr
            print(f"seed {seed}: {summary} ({time.monotonic() - start:.0f} s)", flush=True)
            if result.returncode:
                print(result.stdout, flush=True)
    finally:
        for loop in loops:
            loop.kill()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
