"""A table of trained runs for docs/results.md, from the runs' own files.

python scripts/results.py runs/ablation      a sweep's folder of runs: seed=1, seed=2, model.cell=gru,seed=1 ...

Runs whose names differ in nothing but the seed are one row: mean and standard deviation. What all names have, such as
experiment=small, is said once. Those that have a seed and no more are the recipe; the others are compared with it seed
by seed. BLEU of the validation split is the best of a run's own validations, by greedy search; that of the test split
is there where all seeds were evaluated, in the same way. Time is from the first line of a run's log to its last; that
of a run which was stopped and resumed is not known, and runs with other numbers of threads have no common one. The
table, and a picture of BLEU against time (each row's mean, or the seeds of an only row), take the place of those that
an earlier call has written for the same folder, or stand at the end of the page.
"""

import json
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

from nmt.errors import UserError
from nmt.evaluation.plot import curves
from nmt.runtime.streams import use_utf8

PAGE = Path("docs/results.md")
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (.*)")
SEED = re.compile(r"(?:^|,)seed=(\d+)")


@dataclass(slots=True)
class Run:
    """What one run's files say."""

    curve: list[tuple[float, float]]  # minutes since its beginning and BLEU of each validation
    minutes: float | None
    where: str  # it was trained: device, precision, threads
    signature: str
    test: dict[str, Any] | None  # metrics of the test split
    tested: str  # how that was done

    @property
    def valid(self) -> float:
        return max(bleu for _, bleu in self.curve)


def read(folder: Path) -> Run:
    """Ends the program where a run is not finished."""
    lines = [found for line in (folder / "train.log").read_text().splitlines() if (found := STAMP.match(line))]
    ends = [number for number, line in enumerate(lines, 1) if line[2].startswith("finished at")]
    if not ends:
        sys.exit(f"{folder} is not finished")
    if len({lines[number - 1][2] for number in ends}) > 1:  # a run that is looked at again ends as it did
        sys.exit(f"{folder} went on after it had finished: its validations are of more than one training")
    lines = lines[: ends[0]]  # later commands may have read it
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
        sys.exit(f"{path} is of {test['checkpoint']}, not of the best checkpoint; evaluate {folder} once more")
    signature = f"beam {test['search']['beam']}, `{test['signatures']['bleu']}`" if test else ""
    minutes = (times[-1] - times[0]).total_seconds() / 60 if whole else None
    return Run(curve, minutes, where, signature, test, json.dumps(how(test)) if test else "")


def how(test: dict[str, Any]) -> dict[str, Any]:
    """What its metrics depend on, but for the model."""
    data = {key: value for key, value in test["data"].items() if key not in ("cache", "num_proc")}
    return {"data": data, "search": test["search"], "precision": test["precision"]}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def row(label: str, runs: dict[int, Run], recipe: dict[int, Run]) -> str:
    """One line of the table."""
    both = sorted(runs.keys() & recipe.keys())
    better = spread([runs[seed].valid - recipe[seed].valid for seed in both]) if label and both else ""
    tests = [run.test for run in runs.values() if run.test]
    whole = len(tests) == len(runs)
    cells = [
        f"`{label.replace(',', ' ')}`" if label else "the recipe",
        ", ".join(map(str, sorted(runs))),
        spread([run.valid for run in runs.values()]),
        better,
        *(spread([test[name] for test in tests]) if whole else "" for name in ("bleu", "chrf", "ter")),
        spread([run.minutes or 0 for run in runs.values()], 1) if timed(runs.values()) else "",
    ]
    return f"| {' | '.join(cells)} |"


def timed(runs: Collection[Run]) -> bool:
    """Whether they have a common time."""
    return all(run.minutes for run in runs) and len({run.where for run in runs}) == 1


def averaged(runs: Collection[Run]) -> list[tuple[float, int, float]]:
    """Mean minutes and BLEU of each validation that all have, as `curves` takes them."""
    points = []
    for at in zip(*(run.curve for run in runs), strict=False):
        minutes, bleu = zip(*at, strict=True)
        points.append((mean(minutes), len(at), mean(bleu)))
    return points


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit(__doc__)
    folder = Path(arguments[0])
    if not PAGE.is_file():
        sys.exit(f"there is no {PAGE} in {Path.cwd()}, which this writes to: run it in the checkout")
    groups: dict[str, dict[int, Run]] = defaultdict(dict)
    for log in sorted(folder.rglob("train.log")):
        name = str(log.parent.relative_to(folder))
        if seed := SEED.search(name):
            groups[SEED.sub("", name).strip(",")][int(seed[1])] = read(log.parent)
        else:
            print(f"left out {log.parent}: its name has no seed, as seed=1", file=sys.stderr)
    if not groups:
        sys.exit(f"{folder} has no runs named after a seed, as seed=1; python -m nmt.train -m seed=1,2,3 makes them")
    everywhere = set.intersection(*(set(label.split(",")) for label in groups)) - {""}  # such as a recipe's name
    groups = {",".join(part for part in label.split(",") if part not in everywhere): groups[label] for label in groups}
    runs = [run for group in groups.values() for run in group.values()]
    if len({run.tested for run in runs} - {""}) > 1:
        sys.exit(f"the runs of {folder} were not all evaluated on the same text, in the same way")
    trained = "; ".join(sorted({run.where for run in runs}))
    tested = "; ".join(sorted({run.signature for run in runs} - {""})) or "not read"
    said = f"All with `{' '.join(sorted(everywhere))}`. " if everywhere else ""
    lines = [
        fill(f"{said}Trained on: {trained}. Test: {tested}.", 120),
        "",
        "| Setting | Seeds | BLEU, valid | Better by | BLEU, test | chrF, test | TER, test | Minutes |",
        "|---" * 8 + "|",
        *(row(label, groups[label], groups.get("", {})) for label in sorted(groups)),
    ]
    picture = PAGE.with_name("pictures") / f"results_{re.sub('[^A-Za-z0-9]+', '_', str(folder)).strip('_')}.png"
    drawn = {label or "the recipe": list(of_row.values()) for label, of_row in sorted(groups.items())}
    if len(drawn) == 1:
        [of_row] = groups.values()
        drawn = {f"seed {seed}": [run] for seed, run in sorted(of_row.items())}
    several = len({run.where for run in runs}) > 1  # whose times do not compare
    points = {
        label.replace(",", " ") + (f", {alike[0].where}" if several else ""): averaged(alike)
        for label, alike in drawn.items()
        if timed(alike)
    }
    if points:
        try:
            curves(picture, points, "minutes", "BLEU, valid")
        except UserError as error:  # no matplotlib
            sys.exit(str(error))
        lines += ["", f"![BLEU against time](pictures/{picture.name})"]
    begin, end = f"<!-- {folder}: written by scripts/results.py -->", f"<!-- end of {folder} -->"
    page = PAGE.read_text(encoding="utf-8")
    before, begun, rest = page.partition(begin)
    if begun and end not in rest:
        sys.exit(f"{PAGE} has '{begin}' and no '{end}' after it")
    after = rest.partition(end)[2]
    PAGE.write_text(before.rstrip() + "\n\n" + "\n".join([begin, *lines, end]) + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    use_utf8()
    main(sys.argv[1:])
