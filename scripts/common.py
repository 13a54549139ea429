"""What scripts share: settings on the command line, files of lines, and Eole 0.6.4, the successor of OpenNMT-py."""

import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from nmt.data.tokenizer import Tokenizer
from nmt.system.text import use_utf8

SCRIPTS_DIR = Path(__file__).resolve().parent


def parse_settings(**defaults: str) -> dict[str, str]:
    """Return the default settings updated by those of the command line, key=value, and make the script print UTF-8.

    An unknown or empty setting ends the program with the docstring of the script.
    """
    use_utf8()
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if given.keys() - defaults.keys() or not all(given.values()):
        sys.exit(sys.modules["__main__"].__doc__)
    return defaults | given


def run_command(*command: str | Path, log: Path) -> float:
    """Run a command with its output in a log file, and return its run time in seconds."""
    started = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed; see {log}")
    return time.perf_counter() - started


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write_lines(path: Path, text: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return path


def install_eole(folder: Path) -> Path:
    """Install Eole in a separate virtual environment, and return the path of its command."""
    eole = folder / "env" / "bin" / "eole"
    if not eole.exists():
        print("installing Eole", flush=True)
        run_command(sys.executable, "-m", "venv", folder / "env", log=folder / "install.log")
        torch = f"torch=={version('torch').partition('+')[0]}"  # the version that nmt runs with
        packages = torch, "eole==0.6.4", "aiohttp"  # Eole imports aiohttp but does not declare it
        run_command(eole.parent / "python", "-m", "pip", "install", *packages, log=folder / "install.log")
    return eole


def write_eole_config(eole: Path, folder: Path, steps: int, report_every: int, epoch: int | None = None) -> Path:
    """Write Eole's settings, eole.yaml, for the files of pieces in a folder, and return the path.

    Eole keeps a checkpoint every `epoch` steps.
    """
    filled = {"FOLDER": folder, "STEPS": steps, "EVERY": report_every, "EPOCH": epoch or steps, "DECAY": steps * 5 // 9}
    filled |= {"PAIRS": len(read_lines(folder / "train.source"))}
    text = (SCRIPTS_DIR / "eole.yaml").read_text(encoding="utf-8").splitlines()
    config = "\n".join(line for line in text if not line.startswith("#"))
    config = re.sub("|".join(filled), lambda word: str(filled[word[0]]), config)
    path = write_lines(folder / "eole.yaml", config.splitlines())
    if not (folder / "vocabulary").exists():
        run_command(eole, "build_vocab", "-config", path, "-n_sample", "-1", log=folder / "vocabulary.log")
    return path


def write_pieces(tokenizer: Tokenizer, data: Path, source: str, target: str, folder: Path) -> None:
    """Write the text of all splits as pieces, which Eole reads."""
    for split in ("train", "valid", "test"):
        for name, side, language in (("source", tokenizer.source, source), ("target", tokenizer.target, target)):
            ids = side.encode(read_lines(data / f"{split}.{language}"))
            write_lines(folder / f"{split}.{name}", [" ".join(side.pieces(line)) for line in ids])


def join_pieces(pieces: list[str]) -> list[str]:
    """Join each line of pieces into text."""
    return ["".join(line.split()).replace("▁", " ").strip() for line in pieces]


def build_predict_command(
    eole: Path, model: Path, source: Path, output: Path, beam: int, max_length: int, penalty: str
) -> list[str | Path]:
    """Return the command that translates a file of pieces, 64 sentences per batch."""
    files: list[str | Path] = ["-model_path", model, "-src", source, "-output", output]
    search = ["-beam_size", str(beam), "-max_length", str(max_length), "-length_penalty", penalty]
    return [eole, "predict", *files, *search, "-batch_size", "64", "-batch_type", "sents", "-world_size", "0"]
