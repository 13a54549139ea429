"""Make a corpus for training from raw files: clean pairs, divided into splits that share no sentence.

python -m nmt.prepare input=downloads output=data/mine source=de target=en
python -m nmt.prepare input=corpus.tmx output=data/mine source=de target=en test=newstest.tsv
python -m nmt.prepare --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import json
from pathlib import Path

from nmt.config import PrepareRun
from nmt.data.prepare.pipeline import Preparation, prepare_corpus
from nmt.data.prepare.report import RULES, build_summary
from nmt.errors import UserError
from nmt.system.cli import main
from nmt.system.files import replacing_folder
from nmt.system.logging import log
from nmt.system.messages import pluralize
from nmt.system.quoting import quote_setting
from nmt.system.text import echo

MAX_LEAK_SHARE = 0.1  # of the cleaned pairs; more is worth a warning


@main("prepare")
def prepare(command: PrepareRun) -> None:
    output = Path(str(command.output))
    check_output(output)
    with replacing_folder(output) as folder:
        done = prepare_corpus(command, folder)
        summary = json.dumps(build_summary(command, done), indent=1, ensure_ascii=False)
        # Names of files may hold bytes that are not UTF-8.
        (folder / "report.json").write_text(f"{summary}\n", "utf-8", errors="backslashreplace", newline="\n")
        check_output(output)  # another program may have written into an empty folder
    leaks, train = done.dropped["leaks"] + done.dropped["near_leaks"], done.splits["train"]
    if leaks > MAX_LEAK_SHARE * (leaks + train) or train < done.splits.total() - train:
        log.warning(
            f"{pluralize(leaks, 'pair')} left out of the training text, which has {train:,}, for a sentence that is "
            "nearly the same as one of valid or test; a smaller valid_size=N test_size=N, or near=false, keeps more"
        )
    print_preparation(command, done)


def check_output(output: Path) -> None:
    """Raise a `UserError` if the output exists and is not an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir()) or output.samefile(Path.cwd())):
        raise UserError(f"output={output} exists; give the name of a new folder, or remove it")


def print_preparation(command: PrepareRun, done: Preparation) -> None:
    rows = [("read", done.read.total(), "pairs")]
    rows += [("dropped", done.dropped[rule], f"{rule}: {text}") for rule, text in RULES.items() if done.dropped[rule]]
    rows += [(split, done.splits[split], "pairs") for split in ("train", "valid", "test")]
    for name, count, text in rows:
        echo(f"{name:<12}{count:>12,} {text}")
    echo(f"{'report':<12}{Path(str(command.output), 'report.json')}")
    data = {"data.path": str(command.output), "data.source": command.source, "data.target": command.target}
    settings = " ".join(quote_setting(key, value) for key, value in data.items())
    if done.splits["valid"]:  # which training needs
        echo(f"{'next':<12}python -m nmt.train experiment=small {settings} name=mine resume=auto")


if __name__ == "__main__":
    prepare()
