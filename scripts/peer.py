"""Eole 0.6.4, the living successor of OpenNMT-py, for the benchmarks: installed, given text, called."""

import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from nmt.data.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent


def run(*command: str | Path, log: Path) -> float:
    """Run a command, its output into a file. Returns its seconds."""
    started = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed; see {log}")
    return time.perf_counter() - started


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write(path: Path, text: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return path


def install(folder: Path) -> Path:
    """Eole in an environment of its own; its command."""
    eole = folder / "env" / "bin" / "eole"
    if not eole.exists():
        print("installing Eole", flush=True)
        run(sys.executable, "-m", "venv", folder / "env", log=folder / "install.log")
        torch = f"torch=={version('torch').partition('+')[0]}"  # as ours
        packages = torch, "eole==0.6.4", "aiohttp"  # the last it needs without asking for it
        run(eole.parent / "python", "-m", "pip", "install", *packages, log=folder / "install.log")
    return eole


def configure(
    eole: Path, folder: Path, steps: int, report_every: int, epoch: int | None = None, start: Path | None = None
) -> Path:
    """Its settings, eole.yaml, for pieces in files of a folder; it keeps a checkpoint each `epoch` of so many steps,
    and goes on from the one at `start`."""
    filled = {"FOLDER": folder, "STEPS": steps, "EVERY": report_every, "EPOCH": epoch or steps, "DECAY": steps * 5 // 9}
    filled |= {"START": start or "null", "PAIRS": len(lines(folder / "train.source"))}
    text = (HERE / "eole.yaml").read_text(encoding="utf-8").splitlines()
    config = "\n".join(line for line in text if not line.startswith("#"))
    config = re.sub("|".join(filled), lambda word: str(filled[word[0]]), config)
    path = write(folder / "eole.yaml", config.splitlines())
    if not (folder / "vocabulary").exists():
        run(eole, "build_vocab", "-config", path, "-n_sample", "-1", log=folder / "vocabulary.log")
    return path


def write_pieces(tokenizer: Tokenizer, data: Path, source: str, target: str, folder: Path) -> None:
    """The text of all splits as Eole reads it."""
    for split in ("train", "valid", "test"):
        for name, side, language in (("source", tokenizer.source, source), ("target", tokenizer.target, target)):
            ids = side.encode(lines(data / f"{split}.{language}"))
            write(folder / f"{split}.{name}", [" ".join(side.pieces(line)) for line in ids])


def joined(pieces: list[str]) -> list[str]:
    """The text of lines of pieces."""
    return ["".join(line.split()).replace("▁", " ").strip() for line in pieces]


def predict(
    eole: Path, model: Path, source: Path, output: Path, beam: int, max_length: int, penalty: str
) -> list[str | Path]:
    """The command that translates a file of pieces, 64 sentences a batch."""
    return [
        *(eole, "predict", "-model_path", model, "-src", source, "-output", output),
        *("-beam_size", str(beam), "-batch_size", "64", "-batch_type", "sents", "-world_size", "0"),
        *("-max_length", str(max_length), "-length_penalty", penalty),
    ]
