"""Write a table of trained runs to docs/recipes.md, from the files of the runs.

python scripts/results.py runs/ablation      # a sweep's folder of runs: seed=1, seed=2, model.cell=gru,seed=1 ...

Runs whose names differ only in the seed are one row, with mean and standard deviation. Settings in all names, such as
experiment=small, are listed once. Runs named only by a seed are the recipe, with which the others are compared seed by
seed. BLEU on the validation split is the best of a run's validations, by greedy search. BLEU on the test split is given
if all seeds were evaluated, in the same way. Time is from the first to the last line of a run's log; it is left out for
runs that were stopped and resumed, and for rows whose runs had different numbers of threads. The table replaces that of
an earlier call for the same folder, in docs/recipes.md or experiments/*.md, or is appended to docs/recipes.md.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

PAGE = Path("docs/recipes.md")
LOG_LINE_PATTERN = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (.*)")
SEED_PATTERN = re.compile(r"(?:^|,)seed=(\d+)")


@dataclass(slots=True)
class Run:
    """What the log and the metrics of a run say."""

    valid: float  # the best BLEU of its validations
    minutes: float | None  # of training, None if it was resumed
    where: str  # device, precision and threads
    signature: str  # beam and sacreBLEU signature
    test: dict[str, Any] | None  # metrics of the test split
    tested: str  # settings of the evaluation


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
    valid, where = 0.0, ""
    for line in lines:
        if judged := re.search(r"^validation at .* BLEU ([\d.]+)", line[2]):
            valid = max(valid, float(judged[1]))
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
    # What influences test metrics, apart from the model.
    tested = json.dumps([test["data"] | {"cache": None}, test["search"], test["precision"]]) if test else ""
    return Run(valid, minutes, where, signature, test, tested)


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
    is_timed = all(run.minutes for run in runs.values()) and len({run.where for run in runs.values()}) == 1
    cells = [
        f"`{label.replace(',', ' ')}`" if label else "the recipe",
        ", ".join(map(str, sorted(runs))),
        format_mean_and_deviation([run.valid for run in runs.values()]),
        better,
        *(
            format_mean_and_deviation([test[name] for test in tests]) if whole else ""
            for name in ("bleu", "chrf", "ter")
        ),
        format_mean_and_deviation([run.minutes or 0 for run in runs.values()], 1) if is_timed else "",
    ]
    return f"| {' | '.join(cells)} |"


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
    page = target.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    target.write_text(before.rstrip() + "\n\n" + "\n".join([begin, *lines, end]) + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
