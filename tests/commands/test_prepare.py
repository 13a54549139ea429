"""nmt.prepare: from raw files to splits without leaks."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from builders import command_environment, run_error, run_nmt, run_ok

from nmt.data.overlap import MIN_WORDS, normalize_words

WORDS = ["der", "hund", "sieht", "eine", "katze", "und", "den", "vogel", "im", "garten", "am", "abend", "mit", "dem"]
SPLITS = ("train", "valid", "test")


def write_pairs(folder: Path, pairs: Iterable[tuple[str, str]], name: str = "raw") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sides = zip(*pairs, strict=True)
    for language, texts in zip(("de", "en"), sides, strict=True):
        (folder / f"{name}.{language}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return folder


def make_pairs(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """Return short random pairs, many of which share a sentence or nearly do."""
    draw = random.Random(seed)

    def make() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, 7)))

    return [(make(), make().upper()) for _ in range(count)]


def read_splits(folder: Path) -> dict[str, list[tuple[str, str]]]:
    return {
        split: list(
            zip(
                *((folder / f"{split}.{language}").read_text("utf-8").splitlines() for language in ("de", "en")),
                strict=True,
            )
        )
        for split in SPLITS
    }


def is_near(left: list[str], right: list[str]) -> bool:
    """Return whether two sentences are equal or differ in one word."""
    if left == right:
        return True
    short, long = sorted((left, right), key=len)
    if len(long) < MIN_WORDS or len(long) - len(short) > 1:
        return False
    start = len(os.path.commonprefix([short, long]))
    return short[start:] == long[start + 1 :] or short[start + 1 :] == long[start + 1 :]


def count_leaks(splits: dict[str, list[tuple[str, str]]]) -> int:
    """Return how many pairs have a sentence that is near one of another split, comparing all with all."""
    words = {split: [[normalize_words(text) for text in pair] for pair in pairs] for split, pairs in splits.items()}
    return sum(
        any(is_near(*sides) for sides in zip(left, right, strict=True))
        for a, b in itertools.combinations(SPLITS, 2)
        for left in words[a]
        for right in words[b]
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 900 pairs, a third of them duplicates, prepared in out/."""
    folder = tmp_path_factory.mktemp("with space")
    pairs = make_pairs(600)
    write_pairs(folder / "raw", [*pairs, *random.Random(2).choices(pairs, k=300)])
    run_ok("prepare", "input=raw", "output=out", "valid_size=20", "test_size=30", folder=folder)
    return folder


def test_splits_have_no_leaks(prepared: Path) -> None:
    splits = read_splits(prepared / "out")
    assert (len(splits["valid"]), len(splits["test"])) == (20, 30) and len(splits["train"]) > 200
    assert count_leaks(splits) == 0
    raw = set(make_pairs(600))
    assert all(set(pairs) <= raw and len(set(pairs)) == len(pairs) for pairs in splits.values())
    held_out = {*splits["valid"], *splits["test"]}
    dropped = raw - set(splits["train"]) - held_out
    report = json.loads((prepared / "out" / "report.json").read_text("utf-8"))["pairs_dropped"]
    assert len(dropped) == sum(count for rule, count in report.items() if rule != "duplicates")
    leaks = [pair for pair in dropped if count_leaks({"train": [pair], "valid": [], "test": list(held_out)})]
    assert len(leaks) >= report["leaks"] + report["near_leaks"] > 30  # no pair was dropped in vain


def test_report_counts_every_pair(prepared: Path) -> None:
    report = json.loads((prepared / "out" / "report.json").read_text("utf-8"))
    splits = read_splits(prepared / "out")
    assert report["pairs_written"] == {split: len(splits[split]) for split in SPLITS}
    assert report["pairs_read"] == 900 == sum(report["pairs_dropped"].values()) + sum(report["pairs_written"].values())
    assert report["pairs_dropped"]["duplicates"] == 900 - len(set(make_pairs(600)))
    assert all(0 < len(examples) <= 10 for examples in report["examples"].values())
    example = report["examples"]["duplicates"][0]
    lines = (prepared / "raw" / "raw.de").read_text("utf-8").splitlines()
    assert example["file"] == "raw/raw.de and raw/raw.en" and lines[example["line"] - 1] == example["source"]


def test_splits_depend_on_content_only(prepared: Path) -> None:
    """Shuffling the input changes no split, and 5% more pairs replace few of the test pairs."""
    pairs = make_pairs(600)
    write_pairs(prepared / "shuffled", random.Random(3).sample(pairs, k=600))
    write_pairs(prepared / "more", [*pairs, *make_pairs(30, seed=4)])
    for name in ("shuffled", "more"):
        run_ok("prepare", f"input={name}", f"output=out_{name}", "valid_size=20", "test_size=30", folder=prepared)
    old, same, more = (read_splits(prepared / name) for name in ("out", "out_shuffled", "out_more"))
    assert {split: sorted(pairs) for split, pairs in old.items()} == {
        split: sorted(pairs) for split, pairs in same.items()
    }
    assert len(set(old["test"]) & set(more["test"])) >= 25


def test_training_text_is_cleaned_of_existing_test_set(prepared: Path) -> None:
    test = [*make_pairs(600)[:5], ("eins  zwei\u00a0drei", "ONE TWO THREE"), ("", "X")]
    escaped = ("&quot;Das ist &amp; bleibt&quot; sagte er", "&quot;This is &amp; remains&quot; he said")
    write_pairs(prepared / "escaped", [*make_pairs(600), escaped])
    write_pairs(prepared, [escaped], name="escaped_test")
    run_ok("prepare", "input=escaped", "output=out_escaped", "test=escaped_test", "valid_size=20", folder=prepared)
    assert not any("sagte" in source for source, _ in read_splits(prepared / "out_escaped")["train"])
    write_pairs(prepared, test, name="mytest")
    arguments = ("input=raw", "output=out_given", "test=mytest", "valid_size=20")
    run_ok("prepare", *arguments, folder=prepared)
    splits = read_splits(prepared / "out_given")
    assert splits["test"] == test  # as it is
    assert count_leaks({**splits, "test": test[:-1]}) == 0


def test_little_training_text_is_reported(prepared: Path) -> None:
    sizes = "valid_size=250", "test_size=250"
    result = run_nmt("prepare", "input=raw", "output=out_little", *sizes, folder=prepared)
    assert (
        b"the same as one of valid or test" in result.stderr and b"a smaller valid_size=N test_size=N" in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("input=raw", "output=out"), "error: output=out exists; give the name of a new folder"),
        (
            ("input=raw", "output=o", "test_size=2000"),
            "test_size=2,000: of the 600 pairs left (dropped: duplicates 300), only",
        ),
        (
            ("input=raw", "output=o", "test_size=30", "valid_size=570"),
            "can be held out, without a sentence in common; use a smaller",
        ),
        (
            ("input=raw", "output=o", "test=raw", "valid=raw"),
            "no pairs are left for training (dropped: duplicates 300, leaks 600)",
        ),
        (("output=o",), "error: input is not set"),
        (("input=raw",), "error: output is not set"),
        (("input=raw", "output=o", "clean.max_ratio=1"), "error: clean.max_ratio=1.0 must be above 1"),
        (("input=raw", "output=o", "target=fr"), "error: input=raw has no files that end in .de and .fr"),
        ((f"input={'a' * 300}", "output=o"), f"error: input={'a' * 300} cannot be read: File name too long"),
        (("input=raw", "output=o", "columns=[a]"), "error: columns=[a] must be two different columns"),
    ],
)
def test_errors(prepared: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in run_error("prepare", *arguments, folder=prepared)
    assert not (prepared / "o").exists() and not list(prepared.glob(".o*"))


def test_bad_lines_and_unused_files_are_reported(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", make_pairs(100))
    text = (tmp_path / "raw" / "raw.de").read_bytes().split(b"\n")
    text[6] = b"\xff\xfe"
    (tmp_path / "raw" / "raw.de").write_bytes(b"\n".join(text))
    (tmp_path / "raw" / "LICENSE").write_text("free")
    (tmp_path / "raw" / os.fsdecode(b"caf\xe9")).touch()
    (tmp_path / "raw" / "linked").symlink_to(tmp_path)
    result = run_nmt("prepare", "input=raw", "output=out", "valid_size=2", "test_size=2", folder=tmp_path)
    errors = result.stderr.decode()
    assert "left out 1 line of raw/raw.de: not UTF-8 (first: 7)" in errors and "raw/LICENSE was not read" in errors
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert report["pairs_read"] == 99 and report["unused_files"] == [
        "raw/LICENSE",
        "raw/caf\udce9",
    ]
    assert report["bad_lines"] == [{"file": "raw/raw.de", "problem": "not UTF-8", "lines": 1, "first": [7]}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_preparation_leaves_nothing_after_the_next(tmp_path: Path, number: int) -> None:
    write_pairs(tmp_path / "raw", make_pairs(3_000))
    command = [sys.executable, "-m", "nmt.prepare", "input=raw", "output=out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=command_environment(tmp_path), stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".out.*/pairs.arrow")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) in (-number, 128 + number)
    assert not (tmp_path / "out").exists()
    assert bool(list(tmp_path.glob(".out*"))) == (number == signal.SIGKILL)
    arguments = ("input=raw", "output=out", "valid_size=20", "test_size=20")
    run_ok("prepare", *arguments, folder=tmp_path)
    assert (tmp_path / "out" / "report.json").exists() and not list(tmp_path.glob(".out*"))
