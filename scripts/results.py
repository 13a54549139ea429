"""Write a table of trained runs to docs/recipes.md, from the files of the runs.

python scripts/results.py runs/ablation      # a sweep's folder of runs: seed=1, seed=2, model.cell=gru,seed=1 ...

Runs whose names differ only in the seed are one row, with mean and standard deviation. Settings in all names, such as
experiment=small, are listed once. Runs named only by a seed are the recipe, with which the others are compared seed by
seed. BLEU on the validation split is the best of a run's validations, by greedy search. BLEU on the test split is given
if all seeds were evaluated, in the same way. Time is from the first to the last line of a run's log; it is left out for
runs that were stopped and resumed, and for rows whose runs had different numbers of threads. The table, and a figure of
BLEU by time (the mean of each row, or all seeds of a single row), replace those of an earlier call for the same folder,
in docs/recipes.md or experiments/*.md, or are appended to docs/recipes.md.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

from nmt.system.text import use_utf8

PAGE = Path("docs/recipes.md")
LOG_LINE_PATTERN = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (.*)")
SEED_PATTERN = re.compile(r"(?:^|,)seed=(\d+)")


@dataclass(slots=True)
class Run:
    """The contents of a run's log and metrics."""

    curve: list[tuple[float, float]]  # minutes since the start and BLEU of each validation
    minutes: float | None  # of training, None if it was resumed
    where: str  # device, precision and threads
    signature: str  # beam and sacreBLEU signature
    test: dict[str, Any] | None  # metrics of the test split
    tested: str  # settings of the evaluation

    @property
    def valid(self) -> float:
        return max(bleu for _, bleu in self.curve)


def read_run(folder: Path) -> Run:
    """Read a run, and exit if it is not finished."""
    lines = [
        found for line in (folder / "train.log").read_text().splitlines() if (found := LOG_LINE_PATTERN.match(line))
    ]
    ends = [number for number, line in enumerate(lines, 1) if line[2].startswith("finished at")]
    if not ends:
        sys.exit(f"{folder} is not finished")
    lines = lines[: ends[0]]  # without the log of later commands
    times = [datetime.fromisoformat(line[1]) for line in lines]
    curve, where = [], ""
    for time, line in zip(times, lines, strict=True):
        if judged := re.search(r"^validation at .* BLEU ([\d.]+)", line[2]):
            curve.append(((time - times[0]).total_seconds() / 60, float(judged[1])))
        if built := re.search(r" parameters, (.*)", line[2]):
            where = built[1]
    whole = not any(line[2].startswith("resuming") for line in lines)
    path = folder / "eval" / "test" / "metrics.json"
    test = json.loads(path.read_text()) if path.is_file() else None
    best = folder / "checkpoints" / "best"
    if test and best.is_file() and test["checkpoint"] != best.read_text().strip():
        sys.exit(f"{path} is for {test['checkpoint']}, not for the best checkpoint; evaluate {folder} again")
    signature = f"beam {test['search']['beam']}, `{test['signatures']['bleu']}`" if test else ""
    minutes = (times[-1] - times[0]).total_seconds() / 60 if whole else None
    return Run(curve, minutes, where, signature, test, json.dumps(get_test_settings(test)) if test else "")


def get_test_settings(test: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that influence test metrics, apart from the model."""
    data = {key: value for key, value in test["data"].items() if key != "cache"}
    return {"data": data, "search": test["search"], "precision": test["precision"]}


def format_mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """Format mean and standard deviation."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def format_row(label: str, runs: dict[int, Run], recipe: dict[int, Run]) -> str:
    """Format a line of the table."""
    both = sorted(runs.keys() & recipe.keys())
    better = (
        format_mean_and_deviation([runs[seed].valid - recipe[seed].valid for seed in both]) if label and both else ""
    )
    tests = [run.test for run in runs.values() if run.test]
    whole = len(tests) == len(runs)
    cells = [
        f"`{label.replace(',', ' ')}`" if label else "the recipe",
        ", ".join(map(str, sorted(runs))),
        format_mean_and_deviation([run.valid for run in runs.values()]),
        better,
        *(
            format_mean_and_deviation([test[name] for test in tests]) if whole else ""
            for name in ("bleu", "chrf", "ter")
        ),
        format_mean_and_deviation([run.minutes or 0 for run in runs.values()], 1)
        if have_common_time(runs.values())
        else "",
    ]
    return f"| {' | '.join(cells)} |"


def have_common_time(runs: Collection[Run]) -> bool:
    """Whether the times of these runs can be averaged."""
    return all(run.minutes for run in runs) and len({run.where for run in runs}) == 1


def average_curves(runs: Collection[Run]) -> list[tuple[float, float]]:
    """Return the points of a curve, (mean minutes, mean BLEU), for validations that all runs have."""
    validations = zip(*(run.curve for run in runs), strict=False)
    return [(mean(minutes for minutes, _ in points), mean(bleu for _, bleu in points)) for points in validations]


def draw_curves(path: Path, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Draw BLEU by time as a PNG, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        sys.exit(f"the figure needs matplotlib ({error})")
    figure = Figure(figsize=(6, 3.2))
    axes = figure.add_subplot(xlabel="minutes", ylabel="BLEU, valid")
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), "-o", label=label, markersize=4)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit(__doc__)
    folder = Path(arguments[0])
    groups: dict[str, dict[int, Run]] = defaultdict(dict)
    for log in sorted(folder.rglob("train.log")):
        name = str(log.parent.relative_to(folder))
        if seed := SEED_PATTERN.search(name):
            groups[SEED_PATTERN.sub("", name).strip(",")][int(seed[1])] = read_run(log.parent)
        else:
            print(f"skipping {log.parent}: its name has no seed, as seed=1", file=sys.stderr)
    if not groups:
        sys.exit(f"{folder} has no runs named after a seed, as seed=1; python -m nmt.train -m seed=1,2,3 makes them")
    everywhere = set.intersection(*(set(label.split(",")) for label in groups)) - {""}  # such as experiment=NAME
    groups = {",".join(part for part in label.split(",") if part not in everywhere): groups[label] for label in groups}
    runs = [run for group in groups.values() for run in group.values()]
    if len({run.tested for run in runs} - {""}) > 1:
        sys.exit(f"the runs of {folder} were evaluated on different text or with different settings")
    trained = "; ".join(sorted({run.where for run in runs}))
    tested = "; ".join(sorted({run.signature for run in runs} - {""})) or "not read"
    said = f"All with `{' '.join(sorted(everywhere))}`. " if everywhere else ""
    lines = [
        fill(f"{said}Trained on: {trained}. Test: {tested}.", 120),
        "",
        "| Setting | Seeds | BLEU, valid | Better by | BLEU, test | chrF, test | TER, test | Minutes |",
        "|---" * 8 + "|",
        *(format_row(label, groups[label], groups.get("", {})) for label in sorted(groups)),
    ]
    begin, end = f"<!-- {folder}: written by scripts/results.py -->", f"<!-- end of {folder} -->"
    pages = [path for path in sorted(Path("experiments").glob("*.md")) if begin in path.read_text(encoding="utf-8")]
    target = pages[0] if pages else PAGE
    picture = PAGE.with_name("pictures") / f"results_{re.sub('[^A-Za-z0-9]+', '_', str(folder)).strip('_')}.png"
    drawn = {label or "the recipe": list(of_row.values()) for label, of_row in sorted(groups.items())}
    if len(drawn) == 1:
        [of_row] = groups.values()
        drawn = {f"seed {seed}": [run] for seed, run in sorted(of_row.items())}
    points = {
        label.replace(",", " "): average_curves(alike) for label, alike in drawn.items() if have_common_time(alike)
    }
    if points:
        draw_curves(picture, points)
        lines += ["", f"![BLEU against time]({Path(os.path.relpath(picture, target.parent)).as_posix()})"]
    page = target.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    target.write_text(before.rstrip() + "\n\n" + "\n".join([begin, *lines, end]) + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    use_utf8()
    main(sys.argv[1:])
