"""Measure time and memory of nmt.prepare on a large corpus.

python scripts/bench_prepare.py data=DIR pairs=1000000

Each pair joins two random pairs of DIR/train.{de,en}; other languages: source=xx target=yy. Text and result are written
to a temporary folder in folder=DIR, by default that of the system, and deleted.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from settings import parse_settings


def write_pairs(data: Path, folder: Path, languages: tuple[str, str], count: int) -> None:
    """Write `count` pairs, each of two random pairs of the training text."""
    sides = [(data / f"train.{language}").read_text("utf-8").splitlines() for language in languages]
    draw = random.Random(1)
    with open(folder / f"all.{languages[0]}", "w") as source, open(folder / f"all.{languages[1]}", "w") as target:
        for _ in range(count):
            first, second = draw.randrange(len(sides[0])), draw.randrange(len(sides[0]))
            source.write(f"{sides[0][first]} {sides[0][second]}\n")
            target.write(f"{sides[1][first]} {sides[1][second]}\n")


def main() -> None:
    settings = parse_settings(data="", pairs="1000000", source="de", target="en", folder=tempfile.gettempdir())
    if not settings["data"]:
        sys.exit(__doc__)
    languages = settings["source"], settings["target"]
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as name:
        folder = Path(name, "raw")
        folder.mkdir()
        write_pairs(Path(settings["data"]), folder, languages, int(settings["pairs"]))
        arguments = (f"input={folder}", f"output={name}/corpus", f"source={languages[0]}", f"target={languages[1]}")
        start_time = time.perf_counter()
        subprocess.run([sys.executable, "-m", "nmt.prepare", *arguments], check=True)
        seconds = time.perf_counter() - start_time
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{int(settings['pairs']):,} pairs: {seconds:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of processor "
            f"time, {usage.ru_maxrss / 2**20:.2f} GiB at most"
        )


if __name__ == "__main__":
    main()
