"""Does attention help a classifier of sentences? Train one with and one without it on many divisions of the text.

python scripts/sentiment.py data=DIR seeds=20 folder=runs/sentiment

`data` has .tsv files with a sentence, a tab and a label in each line, such as the Sentiment Labelled Sentences
of the UCI Machine Learning Repository (Kotzias et al. 2015), renamed. For each seed, a fifth of the lines is held out
as the test split, and a tenth of the others as the validation split, by which the epoch is chosen. Both classifiers,
`experiment=sentiment` with `model.attention.score=additive` and `none`, are trained on the same division with the same
seed.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from peer import write_lines
from settings import parse_settings

from nmt.evaluation.seeds import find_t_quantile

SCORES = ("none", "additive")


def divide(lines: list[str], seed: int, folder: Path) -> None:
    """Write train.tsv, valid.tsv and test.tsv."""
    lines = random.Random(seed).sample(lines, len(lines))
    test, rest = lines[: len(lines) // 5], lines[len(lines) // 5 :]
    valid, train = rest[: len(rest) // 10], rest[len(rest) // 10 :]
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", train), ("valid", valid), ("test", test)):
        write_lines(folder / f"{split}.tsv", part)


def run(command: str, *arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", f"nmt.{command}", *arguments], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)


def measure(folder: Path, seed: int, score: str) -> float:
    """Train a classifier and return its accuracy on the test split, in percent."""
    path = folder / f"{score}{seed}"
    settings = ("experiment=sentiment", f"data.path={folder / 'text' / str(seed)}", f"model.attention.score={score}")
    run("train", *settings, f"seed={seed}", f"name={path.name}", f"hydra.run.dir={path}", "resume=auto")
    run("evaluate", f"checkpoint={path}", "pictures=0")
    return float(json.loads((path / "eval" / "test" / "metrics.json").read_text(encoding="utf-8"))["exact_match"])


def describe(values: np.ndarray) -> str:
    """Return the mean with its 95% confidence interval, by the t distribution."""
    half = find_t_quantile(0.95, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.2f} ± {half:.2f}"


def main() -> None:
    settings = parse_settings(data="", seeds="20", folder="runs/sentiment")
    folder, seeds = Path(settings["folder"]), int(settings["seeds"])
    files = sorted(Path(settings["data"]).glob("*.tsv"))
    if not files:
        sys.exit(f"error: data={settings['data']} has no .tsv files")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    accuracies: dict[str, list[float]] = {score: [] for score in SCORES}
    for seed in range(1, seeds + 1):
        divide(lines, seed, folder / "text" / str(seed))
        for score in SCORES:
            accuracies[score].append(measure(folder, seed, score))
        print(f"seed {seed}: " + ", ".join(f"{score} {accuracies[score][-1]:.2f}" for score in SCORES), flush=True)
    without, with_attention = (np.array(accuracies[score]) for score in SCORES)
    print(f"accuracy without attention {describe(without)}, with {describe(with_attention)}")
    print(f"difference {describe(with_attention - without)} (mean and 95% interval over {seeds} divisions)")


if __name__ == "__main__":
    main()
