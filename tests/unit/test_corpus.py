"""Sentence pairs from every kind of source, and what is said of bad ones."""

import io
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import SHARED, command_environment, has_carriage_return_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config import DataConfig
from nmt.config.data import DataOverride
from nmt.data import cache, corpus, readers
from nmt.data.cache import cache_folder
from nmt.data.corpus import cast_to_text, describe_origins, iter_column, load_pairs, stream_pairs
from nmt.data.readers import LINE_READERS, build_string_array
from nmt.data.splits import VALID_SPLITS
from nmt.data.toy import corpus as toy
from nmt.errors import UserError
from nmt.runtime.lines import LineReader, read_lines

REAL = SHARED
Read = Any


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write files to a folder, then read a split of it as lists of sources and targets."""

    def read(files: dict[str, str | bytes], split: str = "train", format: str = "text", **others: Any) -> Any:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        data = DataConfig(**{"format": format, "path": str(folder), "cache": str(tmp_path / "cache"), **others})
        pairs = load_pairs(data, split)
        assert pairs.column_names in (["source", "target"], ["source", "target", "line"])
        read.lines = list(pairs["line"]) if "line" in pairs.column_names else None  # type: ignore[attr-defined]
        return list(pairs["source"]), list(pairs["target"])

    return read


# -------------------------------------------------------------------------------------------------------------- lines
@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))), st.booleans())
def test_lines_end_at_line_feeds_only(lines: list[str], crlf: bool) -> None:
    end = "\r\n" if crlf else "\n"
    lines = [line.removeprefix("\ufeff").rstrip("\r") for line in lines]
    file = io.BufferedReader(io.BytesIO("".join(line + end for line in lines).encode()))
    assert list(read_lines(LineReader(file, "x"))) == lines


@pytest.mark.parametrize(
    "content, lines",
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\nc\n", ["a\rb", "c"]),
        (b"a\r\r\n", ["a\r"]),
        (b"a\nb\r", ["a", "b\r"]),
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\n".encode(), ["a\u2028b\x85c\x0bd\x0ce\x1cf"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\0\n", ["\0"]),
    ],
)
def test_lines_of_a_file(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with open(file, "rb") as stream:
        assert list(read_lines(LineReader(stream, file))) == lines


def test_bad_bytes_are_refused_or_replaced_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> LineReader:
        return LineReader(io.BufferedReader(io.BytesIO(b"a\n\xff\nb\nx\xe4y\n")), "in.txt")

    with pytest.raises(UserError, match="^in.txt:2: not UTF-8 .byte 0xFF at position 1.$"):
        list(read_lines(lines()))
    assert list(read_lines(lines(), "replace")) == ["a", "\ufffd", "b", "x\ufffdy"]
    assert "in.txt: 2 lines are not UTF-8 (first: 2, 4)" in caplog.text


# --------------------------------------------------------------------------------------------------------------- text
def test_text(read: Read) -> None:
    files = {"train.de": "ein Hund\n\nzwei\u2028 Hunde\r\n", "train.en": "\ufeffa dog\ntwo  dogs\n \rx"}
    assert read(files) == (["ein Hund", "", "zwei\u2028 Hunde"], ["a dog", "two  dogs", " \rx"])


@pytest.mark.parametrize("name", VALID_SPLITS)
@pytest.mark.parametrize("asked", VALID_SPLITS)
def test_the_validation_split_has_several_names(read: Read, name: str, asked: str) -> None:
    assert read({f"{name}.de": "a\n", f"{name}.en": "b\n"}, split=asked) == (["a"], ["b"])


def test_limit_is_for_training(read: Read) -> None:
    files = {f"{split}.{side}": "1\n2\n3\n" for split in ("train", "test") for side in ("de", "en")}
    assert read(files, limit=2)[0] == ["1", "2"]
    assert read(files, limit=5)[0] == ["1", "2", "3"]
    assert read(files, limit=2, split="test")[0] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.de": "a\nb\nc\n", "train.en": "a\n"}, r"train.de has 3 lines and .*train.en has 1;"),
        ({"train.de": "a\n", "train.en": "a\nb\nc"}, r"train.de has 1 line and .*train.en has 3;"),
        ({"train.de": "a\n", "train.en": "\n\n\n\n"}, r"train.de has 1 line and .*train.en has 4;"),
        ({"train.de": "", "train.en": "a\n"}, r"train.de has 0 lines and .*train.en has 1;"),
        ({"train.de": "a\nb\n", "train.en": b"a\n\xe4\n"}, r"train.en:2: not UTF-8 \(byte 0xE4 at position 1\); fix"),
        ({"train.de": b"ab\xfc\n", "train.en": b"\xe4\n"}, r"train.de:1: not UTF-8 \(byte 0xFC at position 3\); fix"),
        ({"train.de": "", "train.en": ""}, "train.de has no sentence pairs"),
        ({"train.de": "a\n"}, r"train.en does not exist; .*data.source=de data.target=en.* The folder has train.de$"),
        ({"train.fr": "a\n"}, r"train.de does not exist; .*The folder has train.fr$"),
        ({}, r"train.de does not exist; .*The folder has nothing$"),
    ],
)
def test_bad_text_is_refused(read: Read, files: dict[str, str | bytes], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(files)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^data.path=nowhere is not a folder in /.+$"):
        load_pairs(DataConfig(format="text", path="nowhere", cache=str(tmp_path)), "train")


def test_bad_lines_are_dropped_on_both_sides_and_counted_each_time(
    read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"train.de": b"a\n\xff\nc\nd\n\xff\n\nf", "train.en": b"A\nB\nC\n\xe4\n\xe4\nE\nF"}
    for _ in range(2):
        caplog.clear()
        assert read(files, invalid="drop") == (["a", "c", "", "f"], ["A", "C", "E", "F"])
        assert read.lines == [1, 3, 6, 7]
        assert "data.invalid=drop: left out 2 lines of " in caplog.text
        assert "train.de: not UTF-8 (first: 2, 5)" in caplog.text and "train.en: not UTF-8 (first: 4, 5)" in caplog.text
    with pytest.raises(UserError, match="has no sentence pairs"):
        read({"train.de": b"\xff", "train.en": b"a"}, invalid="drop")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_another_encoding_is_named(read: Read, ending: str) -> None:
    for invalid in ("refuse", "drop"):
        with pytest.raises(UserError, match=f"train.de{ending} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"):
            text = packed("ä\nb\n".encode("utf-16"), ending) if ending else "ä\nb\n".encode("utf-16")
            read({f"train.de{ending}": text, "train.en": b"x\ny\n"}, invalid=invalid)
    with pytest.raises(UserError, match="train.en:1: not UTF-8 .*whole file has another encoding, .*: iconv -f LATIN1"):
        read({"train.de": b"x\n", "train.en": "ä\n".encode("latin-1")})


@pytest.mark.parametrize(
    "format, sides, lines, trouble",
    [
        ("tsv", ("1", "2"), [b"a\tb", b"c", b"c\td", b"\xff\tb", b"", b"\t"], {"too few columns": [2, 5]}),
        ("tsv", ("1", "2"), [b"a\tb\tc", b"c\td", b"c\td\te\tf"], {"too many columns": [3]}),
        ("tsv", ("x", "y"), [b"x\ty", b"c", b"a\tb", b"c"], {"too few columns": [2, 4]}),
        ("tsv", ("x", "y"), [b"x\ty", b"a\ta\tb", b"a\tb"], {"too many columns": [2]}),
        (
            "jsonl",
            ("x", "y"),
            [
                b'{"x": "a", "y": "b"}',
                b"",
                b"{",
                b"[" * 100_000,
                b'{"x": 1, "y": "b"}',
                b"1" * 5_000,
                b"\xff",
                b'{"x": "a"}',
            ],
            {"not JSON": [3, 4, 6], "no text under 'x'": [5], "no text under 'y'": [8], "not UTF-8": [7]},
        ),
    ],
)
def test_each_kind_of_trouble_has_its_count_and_its_lines(
    read: Read,
    caplog: pytest.LogCaptureFixture,
    format: str,
    sides: tuple[str, str],
    lines: list[bytes],
    trouble: dict[str, list[int]],
) -> None:
    """The number of a line is that in its file, after a first line of names, bad lines and empty ones."""
    end = {"tsv": b"\nn\tm\n", "jsonl": b'\n{"x": "n", "y": "m"}\n'}[format]
    files = {f"train.{format}": b"\n".join(lines) + end}
    sources, targets = read(files, format=format, source=sides[0], target=sides[1], invalid="drop")
    assert (sources[-1], targets[-1], read.lines[-1]) == ("n", "m", len(lines) + 1)
    for kind, numbers in trouble.items():
        count = "1 line" if len(numbers) == 1 else f"{len(numbers)} lines"
        first = ", ".join(map(str, numbers))
        assert f"left out {count} of " in caplog.text and f"train.{format}: {kind} (first: {first})" in caplog.text


@settings(max_examples=25)
@given(good=st.lists(st.booleans(), min_size=1, max_size=30), block=st.integers(1, 5))
def test_lines_keep_their_numbers_whatever_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, good: list[bool], block: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    data = DataConfig(format="text", path=str(folder), cache=str(folder / "cache"), invalid="drop")
    expected = [number for number, fine in enumerate(good, 1) if fine]
    texts = [str(number).encode() if fine else b"\xff" for number, fine in enumerate(good, 1)]
    (folder / "train.de").write_bytes(b"\n".join(texts))
    (folder / "train.en").write_bytes(b"\n".join([b"x"] * len(good)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "TEXT_BLOCK_BYTES", block)
        if not expected:
            with pytest.raises(UserError, match="has no sentence pairs"):
                load_pairs(data, "train")
            return
        pairs = load_pairs(data, "train")
    assert list(pairs["line"]) == expected and list(map(int, pairs["source"])) == expected


def test_sides_are_called_by_their_files_or_columns(tmp_path: Path) -> None:
    for name in ("train.de", "train.en", "dev.jsonl", "only/news.de", "only/news.en"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path = str(tmp_path)
    text = (f"{path}/train.de", f"{path}/train.en")
    assert describe_origins(DataConfig(format="text", path=path), "train") == text
    assert describe_origins(DataConfig(format="hub", path=path, source="translation.de"), "train") == text
    news = (f"{path}/only/news.de", f"{path}/only/news.en")  # a recipe of the hub, judged on a folder of no more
    assert describe_origins(DataConfig(format="hub", path=f"{path}/only"), "news") == news
    dev = (f"{path}/dev.jsonl, de", f"{path}/dev.jsonl, en")
    assert describe_origins(DataConfig(format="jsonl", path=path), "valid") == dev
    assert describe_origins(DataConfig(format="hub", path="own/er"), "train") == ("own/er, de", "own/er, en")
    assert describe_origins(DataConfig(), "train") == ("the built-in corpus, de", "the built-in corpus, en")


def test_changed_text_is_read_anew_and_same_text_is_not(read: Read, tmp_path: Path) -> None:
    source = tmp_path / "data" / "train.de"
    assert read({"train.de": "a\nb\n", "train.en": "x\ny\n"})[0] == ["a", "b"]
    stamp = source.stat()
    source.write_text("a\nc\n")
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert read({})[0] == ["a", "c"]
    before = list((tmp_path / "cache").rglob("*.arrow"))
    assert read({})[0] == ["a", "c"]
    assert list((tmp_path / "cache").rglob("*.arrow")) == before


# -------------------------------------------------------------------------------------------------------------- cache
TEXT: dict[str, str | bytes] = {"train.de": "a\nb\n" * 1_000, "train.en": "x\ny\n" * 1_000}
PAIRS = (["a", "b"] * 1_000, ["x", "y"] * 1_000)


def test_a_cache_cut_short_is_not_used(read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = LINE_READERS["text"]

    def breaks_while_storing(*paths: Path) -> Any:
        yield next(whole(*paths))
        raise KeyboardInterrupt

    monkeypatch.setitem(LINE_READERS, "text", breaks_while_storing)
    with pytest.raises(KeyboardInterrupt):
        read(TEXT)
    assert not list((tmp_path / "cache" / "text").iterdir())
    monkeypatch.setitem(LINE_READERS, "text", whole)
    assert read(TEXT) == PAIRS


@pytest.mark.parametrize("gone", [True, False])
def test_text_that_goes_or_changes_while_it_is_read_is_no_corpus(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: bool
) -> None:
    whole = LINE_READERS["text"]

    def changes(*paths: Path) -> Any:
        yield from whole(*paths)
        paths[0].unlink()
        if not gone:
            paths[0].write_text("b\na\n" * 1_000)

    monkeypatch.setitem(LINE_READERS, "text", changes)
    with pytest.raises(OSError if gone else UserError, match="train.de" if gone else "changed while it was read"):
        read(TEXT)
    assert not list((tmp_path / "cache" / "text").iterdir())


KILLED = """
import os, signal, sys
from nmt.config import DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.readers import LINE_READERS
text = LINE_READERS["text"]
def dies(*files):
    yield next(text(*files))
    os.kill(os.getpid(), signal.SIGKILL)
LINE_READERS["text"] = dies
load_pairs(DataConfig(format="text", path=sys.argv[1], cache=sys.argv[2]), "train")
"""


def test_killed_while_preparing_and_started_again(read: Read, tmp_path: Path) -> None:
    assert read({"train.de": "0\n", "train.en": "1\n"}) == (["0"], ["1"])  # writes the folder
    for name, text in TEXT.items():
        (tmp_path / "data" / name).write_text(str(text))
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "data"), str(tmp_path / "cache")]
    done = subprocess.run(arguments, env=command_environment(tmp_path))
    assert done.returncode == -signal.SIGKILL
    left = {path.suffix for path in (tmp_path / "cache" / "text").iterdir()}
    assert left == {"", ".part", ".lock"}
    assert read({}) == PAIRS
    assert {path.suffix for path in (tmp_path / "cache" / "text").iterdir()} == {""}


SLOW = """
import sys, time
from pathlib import Path
from nmt.data.cache import get_or_build
from nmt.runtime.logging import log_to_stderr
def fill(part):
    (part / "who").write_text(sys.argv[2])
    with open(Path(sys.argv[1]).parent / "times", "a") as file:
        file.write("once\\n")
    time.sleep(0.5)
log_to_stderr()
import nmt.data.cache
nmt.data.cache.LOCK_NOTICE_DELAY = 0.1
get_or_build(Path(sys.argv[1]), fill)
"""


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW, str(tmp_path / "thing"), str(number)],
            env=command_environment(tmp_path), stderr=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert (tmp_path / "times").read_text() == "once\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "times"]
    assert {text for text in said if text} <= {f"waiting for another process that prepares {tmp_path}/thing\n"}


def test_without_locks_it_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(cache.FileLock, "acquire", unsupported)
    folder = cache.get_or_build(tmp_path / "thing", lambda part: (part / "x").touch())
    assert (folder / "x").exists() and cache.is_valid(folder)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pattern", ["pairs.arrow", "digests.json"])
def test_a_damaged_cache_is_made_anew(
    read: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, pattern: str
) -> None:
    assert read(TEXT) == PAIRS
    [file] = (tmp_path / "cache").rglob(pattern)
    DAMAGES[damage](file)
    assert read(TEXT) == PAIRS and "the cache is damaged" in caplog.text
    caplog.clear()
    assert read(TEXT) == PAIRS and not caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pattern", ["*.arrow", "dataset_info.json"])
def test_a_damaged_cache_of_the_library_is_made_anew(read: Read, tmp_path: Path, damage: str, pattern: str) -> None:
    parquet(tmp_path, "train.parquet", {"de": PAIRS[0], "en": PAIRS[1]})
    assert read({}, format="parquet") == PAIRS
    [file] = (tmp_path / "cache").rglob(pattern)
    DAMAGES[damage](file)
    assert read({}, format="parquet") == PAIRS
    assert read({}, format="parquet") == PAIRS


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may become larger, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("format", ["text", "parquet", "hub"])
def test_a_full_disk_is_named_and_leaves_no_half_of_a_cache(read: Read, tmp_path: Path, format: str) -> None:
    files = TEXT if format == "text" else {}
    if not files:
        parquet(tmp_path, "train.parquet", {"de": PAIRS[0], "en": PAIRS[1]})
    message = f"^the cache {tmp_path}/cache/{format} cannot be written .File too large.; make room .*data.cache=FOLDER$"
    with files_up_to(10_000), pytest.raises(UserError, match=message):
        read(files, format=format)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.suffix != ".lock"]
    assert read({}, format=format) == PAIRS


def test_what_killed_processes_left_is_removed_and_what_is_being_filled_stays(read: Read, tmp_path: Path) -> None:
    """However old either is."""
    text = tmp_path / "cache" / "text"
    names = f"left.{'a' * 32}.part", "somebody's.part"
    left, other = (text / name for name in names)
    for part in (left, other):
        part.mkdir(parents=True)
        (part / "pairs.arrow").touch()
    litter = [text / f".left.{'a' * 32}.digests.json.12ab.new", text / f"{'c' * 32}.lock"]
    for path in litter:
        path.touch()
    with cache.build_folder(text / "busy") as busy:
        os.utime(busy, (0, 0))
        assert read(TEXT) == PAIRS
        assert busy.exists() and other.exists() and not any(path.exists() for path in (left, *litter))
    assert cache.is_valid(text / "busy")


def test_a_cache_is_open_to_whom_its_folder_is(read: Read, tmp_path: Path) -> None:
    assert read(TEXT) == PAIRS
    modes = {path.stat().st_mode for path in (tmp_path / "cache", *(tmp_path / "cache" / "text").iterdir())}
    assert len(modes) == 1


# ------------------------------------------------------------------------------------------------ large, packed, parted
def slowly(source: bytes, target: bytes, drop: bool) -> list[tuple[int, str, str]] | str:
    """The pairs line by line, with their numbers; or what the refusal begins with."""
    sides = [list(LineReader(io.BufferedReader(io.BytesIO(side)), "x")) for side in (source, target)]
    found = []
    for number, (left, right) in enumerate(itertools.zip_longest(*sides), 1):
        if left is None or right is None:
            return f"train.de has {len(sides[0])} line"
        try:
            found.append((number, left.decode(), right.decode()))
        except UnicodeDecodeError:
            if not drop:
                side = "de" if left.decode(errors="replace").encode() != left else "en"
                return f"train.{side}:{number}: not UTF-8"
    return found or "train.de has no sentence pairs"


bytes_of_text = st.lists(
    st.sampled_from(
        [b"\n", b"\n", b"\r", b"\r\n", b"a", b"bc", "ä€".encode(), b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\0"]
    )
).map(b"".join)


@settings(max_examples=200)
@given(source=bytes_of_text, target=bytes_of_text, drop=st.booleans(), block=st.integers(1, 9))
def test_blocks_hold_what_lines_do(
    tmp_path_factory: pytest.TempPathFactory, source: bytes, target: bytes, drop: bool, block: int
) -> None:
    if source.count(b"\n") > target.count(b"\n"):  # as many lines on both sides, mostly
        target += b"x\n" * (source.count(b"\n") - target.count(b"\n"))
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "train.de").write_bytes(source)
    (folder / "train.en").write_bytes(target)
    data = DataConfig(
        format="text", path=str(folder), cache=str(folder / "cache"), invalid="drop" if drop else "refuse"
    )
    old = [side for side, text in (("de", source), ("en", target)) if has_carriage_return_lines(text)]
    expected = f"train.{old[0]}: lines end in a carriage return" if old else slowly(source, target, drop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "TEXT_BLOCK_BYTES", block)
        try:
            pairs = load_pairs(data, "train")
            found: Any = list(zip(pairs["line"], pairs["source"], pairs["target"], strict=True))
        except UserError as error:
            found = str(error).removeprefix(f"{folder}/")
    assert found == expected if isinstance(expected, list) else found.startswith(expected)


def packed(text: bytes, ending: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {".gz": "gzip", ".zst": "zstd"}[ending]) as stream:
        stream.write(text)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files(read: Read, ending: str) -> None:
    text = "ä\nb\r\n".encode() * 5_000
    files = {f"train.de{ending}": packed(text, ending), "train.en": b"x\ny\n" * 5_000}
    assert read(files) == (["ä", "b"] * 5_000, ["x", "y"] * 5_000)
    assert read({f"valid.tsv{ending}": packed(b"a\tb\n", ending)}, "valid", "tsv", source="1", target="2")[1] == ["b"]
    assert read({f"dev.jsonl{ending}": packed(b'{"de": "a", "en": "b"}\n', ending)}, "dev", "jsonl")[0] == ["a"]
    with pytest.raises(UserError, match=f"train.de{ending}:10001: not UTF-8 .byte 0xFF"):
        read({f"train.de{ending}": packed(text + b"\xff", ending), "train.en": b"x\ny\n" * 5_000 + b"z"})
    with pytest.raises(UserError, match=f"train.de{ending} has 10,000 lines and .*train.en has 1;"):
        read({f"train.de{ending}": packed(text, ending), "train.en": "x\n"})
    with pytest.raises(UserError, match=f"train.de{ending} cannot be read: "):
        read({f"train.de{ending}": packed(text, ending)[:-20]})
    with pytest.raises(UserError, match=f"train.de{ending} cannot be read: "):
        read({f"train.de{ending}": text})
    with pytest.raises(UserError, match=f"train.de{ending} cannot be read: "):  # and not the other side
        read({f"train.de{ending}": packed(text, ending)[:-20], f"train.en{ending}": packed(text, ending)})
    assert read({"train.de": "1\n"}) == (["1"], ["x"])  # before the packed one


@pytest.mark.parametrize("names", [(".00", ".01", ".10"), ("-00000-of-00003", "-00001-of-00003", "-00002-of-00003")])
def test_shards(read: Read, names: tuple[str, ...], tmp_path: Path) -> None:
    files = {f"train{name}.{side}": f"{side}{i}\n{i}\n" for i, name in enumerate(names) for side in ("de", "en")}
    files |= {"train.tok.de": "another file", "trainer.00.de": "another, too"}
    assert read(files) == (["de0", "0", "de1", "1", "de2", "2"], ["en0", "0", "en1", "1", "en2", "2"])
    assert read.lines is None  # which would not say of which of them
    first, last = (tmp_path / "data" / f"train{name}" for name in (names[0], names[2]))
    data = DataConfig(format="text", path=str(tmp_path / "data"))
    assert describe_origins(data, "train") == (f"{first}.de to {last.name}.de", f"{first}.en to {last.name}.en")
    with pytest.raises(UserError, match=f"train{names[1]}.en has 3 lines|train{names[1]}.de has 2 lines and .* has 3;"):
        read({f"train{names[1]}.en": "a\nb\nc"})
    with pytest.raises(UserError, match=f"train{names[1]}.en:2: not UTF-8"):
        read({f"train{names[1]}.en": b"a\n\xff"})
    with pytest.raises(UserError, match=f"has train.de and train{names[0]}.de: the split train as a whole and in sha"):
        read({"train.de": "a\n"})
    (tmp_path / "data" / "train.de").unlink()
    (tmp_path / "data" / f"train{names[1]}.en").unlink()
    with pytest.raises(UserError, match=f"train{names[1]}.en does not exist; "):
        read({})
    (tmp_path / "data" / f"train{names[1]}.de").unlink()
    if "-of-" in names[1]:
        with pytest.raises(UserError, match="data has 2 of the 3 shards of train"):
            read({})
    else:
        assert read({}) == (["de0", "0", "de2", "2"], ["en0", "0", "en2", "2"])


def test_shards_of_tables(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    files: dict[str, str | bytes] = {"train.0.tsv": "a\tb\nc\n", "train.1.tsv": b"d\te\n\xff\n"}
    assert read(files, format="tsv", source="1", target="2", invalid="drop") == (["a", "d"], ["b", "e"])
    assert "train.0.tsv: too few columns (first: 2)" in caplog.text and "train.1.tsv: not UTF-8" in caplog.text
    lines = {f"train.{i}.jsonl": lines_of({"de": f"{i}", "en": "x"}) for i in range(2)}
    assert read(lines, format="jsonl")[0] == ["0", "1"]


def test_pairs_are_written_some_at_a_time(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PARSE_BATCH_SIZE", 3)
    table = "".join(f"{i}\t{-i}\n" for i in range(20))
    assert read({"train.tsv": table}, format="tsv", source="1", target="2")[0] == [str(i) for i in range(20)]
    assert read.lines == list(range(1, 21))


# ---------------------------------------------------------------------------------------------------------------- tsv
def test_tsv_by_number_and_by_name(read: Read) -> None:
    table = '1\tein "Hund\ta dog\r\n2\t\tnothing\n3\tab\rc\tx\tmore'
    assert read({"train.tsv": table.removesuffix("\tmore")}, format="tsv", source="2", target="3") == (
        ['ein "Hund', "", "ab\rc"],
        ["a dog", "nothing", "x"],
    )
    assert read({"train.tsv": "id\ten\tde\tnote\r\n" + table}, format="tsv", source="de", target="en") == (
        ["a dog", "nothing", "x"],
        ['ein "Hund', "", "ab\rc"],
    )


@pytest.mark.parametrize(
    "table, columns, message",
    [
        (b"a\tb\nc\n", ("1", "2"), "train.tsv:2: 1 column, but 2 are needed; fix"),
        (b"de\ten\na\tb\nc\n", ("de", "en"), "train.tsv:3: 1 column, but 2 are needed; fix"),
        (b"a\tb\n\xff\tb\n", ("1", "2"), "train.tsv:2: not UTF-8"),
        (b"a\tb\n", ("0", "1"), "counted from 1"),
        (
            b"german\tenglish\n",
            ("german", "englisch"),
            "no column 'englisch' .* german, english; did you mean 'english'",
        ),
        (b"de\ten\n", ("de", "en"), "no sentence pairs"),
        (b"", ("de", "en"), "no column 'de'"),
    ],
)
def test_bad_tsv_is_refused(read: Read, table: bytes, columns: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read({"train.tsv": table}, format="tsv", source=columns[0], target=columns[1])


def test_bad_tsv_lines_are_dropped(read: Read) -> None:
    table = b"a\tb\nc\n\xff\tb\n\nd\te\n"
    assert read({"train.tsv": table}, format="tsv", source="1", target="2", invalid="drop") == (["a", "d"], ["b", "e"])


# -------------------------------------------------------------------------------------------------------------- jsonl
def lines_of(*records: Any) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


@pytest.mark.parametrize("keys", [("de", "en"), ("translation.de", "translation.en"), ("a.b.de", "en")])
def test_jsonl(read: Read, keys: tuple[str, str]) -> None:
    """Texts stay as they are, even where they look like something else."""
    texts = [("2020-01-01", "1"), ("a\u2028\0\r\nb", "\ufeff"), ("", " ")]
    records = []
    for pair in texts:
        record: dict[str, Any] = {"other": [1]}
        for key, text in zip(keys, pair, strict=True):
            *outer, name = key.split(".")
            inner = record
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[name] = text
        records.append(record)
    sources, targets = read({"train.jsonl": lines_of(*records, "")}, format="jsonl", source=keys[0], target=keys[1])
    assert list(zip(sources, targets, strict=True)) == texts


def test_a_dotted_key_is_taken_as_it_stands(read: Read) -> None:
    files = {"dev.jsonl": lines_of({"x.de": "a", "x": {"de": "no", "en": "b"}})}
    assert read(files, "valid", "jsonl", source="x.de", target="x.en") == (["a"], ["b"])


@pytest.mark.parametrize(
    "line, message",
    [
        ({"de": "a"}, "train.jsonl:2: expected text under 'en', got None; the line has de; fix"),
        (
            [{"de": "a", "en": "b"}],
            r"train.jsonl:2: expected a JSON object with 'de' and 'en', got a JSON array, \[\{.*; .*: "
            r"jq -c '.\[\]' FILE; fix",
        ),
        (5, "train.jsonl:2: expected a JSON object with 'de' and 'en', got a JSON value, 5; fix"),
        ("null", "train.jsonl:2: expected a JSON object .* got a JSON value, None;"),
        ("[", r"not JSON \(.*\); each line must hold one object: jq -c '.\[\]' FILE"),
        ("{", r"not JSON \(.*\); each line must hold one object: jq -c . FILE"),
        ({"de": 1, "en": "b"}, "train.jsonl:2: expected text under 'de', got 1;"),
        ({"de": {"x": "y"}, "en": "b"}, "train.jsonl:2: expected text under 'de', got {'x': 'y'};"),
        (["a", "b"], r"train.jsonl:2: expected a JSON object with 'de' and 'en', got a JSON array, \['a', 'b'\]; fix"),
        ('{"de": oops', r"train.jsonl:2: not JSON \(Expecting value at position 8\)"),
        (r'{"de": "\ud800", "en": "b"}', "train.jsonl:2: .*surrogates not allowed"),
    ],
)
def test_bad_jsonl_is_refused_or_dropped(read: Read, line: Any, message: str) -> None:
    files = {"train.jsonl": lines_of({"de": "a", "en": "b"}, line)}
    with pytest.raises(UserError, match=message):
        read(files, format="jsonl")
    assert read(files, format="jsonl", invalid="drop") == (["a"], ["b"])


@pytest.mark.parametrize("end", [b"", b"\r", b"\n", b"\r\n"])
@pytest.mark.parametrize("form, names", [("text", ("de", "en")), ("tsv", ("1", "2")), ("jsonl", ("de", "en"))])
@pytest.mark.parametrize("invalid", ["refuse", "drop"])
def test_lines_that_end_in_carriage_returns_are_refused(
    read: Read, form: str, names: tuple[str, str], end: bytes, invalid: str
) -> None:
    """Of one side or of both, also where the last line ends as it should."""
    lines = {"text": [b"a", b"b", b"c"], "tsv": [b"a\tb"] * 3, "jsonl": [b'{"de": "a", "en": "b"}'] * 3}[form]
    old, new = b"\r".join(lines) + end, b"\n".join(lines)
    source, target = names
    given = {"format": form, "source": source, "target": target, "invalid": invalid}
    for files in [{"de": old, "en": old}, {"de": new, "en": old}] if form == "text" else [{form: old}]:
        with pytest.raises(UserError, match=r"train\.\w+: lines end in a carriage return \(CR.* tr '.r' '.n' < FILE"):
            read({f"train.{ending}": text for ending, text in files.items()}, **given)


# ---------------------------------------------------------------------------------------------------- parquet and hub
def parquet(tmp_path: Path, name: str, table: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(table), tmp_path / "data" / name)


def test_parquet(read: Read, tmp_path: Path) -> None:
    parquet(tmp_path, "validation-00001.parquet", {"translation": [{"de": "c", "en": "d"}], "n": [1]})
    parquet(tmp_path, "validation-00000.parquet", {"translation": [{"de": "a\r", "en": "b"}], "n": [2]})
    nested = {"source": "translation.de", "target": "translation.en"}
    assert read({}, "valid", "parquet", **nested) == (["a\r", "c"], ["b", "d"])
    parquet(tmp_path, "validation-00000.parquet", {"translation": [{"de": "x", "en": "b"}], "n": [2]})
    assert read({}, "valid", "parquet", **nested) == (["x", "c"], ["b", "d"])
    with pytest.raises(UserError, match="data.source=de: .* no such column; it has translation.de, translation.en, n"):
        read({}, "valid", "parquet")
    with pytest.raises(UserError, match="train.*parquet does not exist"):
        read({}, "train", "parquet")
    parquet(tmp_path, "test_2017.parquet", {"de": ["a"], "en": ["b"]})
    parquet(tmp_path, "test.parquet", {"de": ["c"], "en": ["d"]})
    assert read({}, "test", "parquet") == (["c"], ["d"])
    parquet(tmp_path, "train-00000-of-00002-0123456789abcdef.parquet", {"de": ["a"], "en": ["b"]})
    with pytest.raises(UserError, match="data has 1 of the 2 shards of train"):
        read({}, "train", "parquet")
    parquet(tmp_path, "train-00001-of-00002-fedcba9876543210.parquet", {"de": ["c"], "en": ["d"]})
    assert read({}, "train", "parquet") == (["a", "c"], ["b", "d"])


@pytest.mark.parametrize(
    "table, message",
    [
        ({"de": ["a"] * 10_001 + [None], "en": ["b"] * 10_002}, "row 10002: expected text in 'de', got None"),
        ({"de": ["a"], "en": [3]}, "row 1: expected text in 'en', got 3, of type int64"),
        (
            {"de": ["a"], "en": pa.array([3]).dictionary_encode()},
            "row 1: expected text in 'en', got 3, of type int64",
        ),
        ({"de": ["a"], "en": [["b"]]}, r"row 1: expected text in 'en', got \['b'\], of type list<"),
        ({"de": ["a", "b"], "en": pa.array(["c", None], pa.string_view())}, "row 2: expected text in 'en', got None"),
        (
            {"de": ["a", "b"], "en": pa.array([b"c", b"d\xff"])},
            r"row 2: 'en', of type binary, is not UTF-8 \(byte 0xFF at position 2\); write the column",
        ),
        (
            {"de": ["a", "b"], "en": build_string_array(np.array([0, 1, 3]), b"cd\xff")},
            r"row 2: 'en', of type string, is not UTF-8 \(byte 0xFF at position 2\)",
        ),
    ],
)
def test_what_is_not_text_is_refused(read: Read, tmp_path: Path, table: dict[str, Any], message: str) -> None:
    parquet(tmp_path, "train.parquet", table)
    with pytest.raises(UserError, match=message):
        read({}, format="parquet")


TEXTUAL = (
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int8(), kind) for kind in (pa.string(), pa.large_string(), pa.binary())),
)


@pytest.mark.parametrize("kind", TEXTUAL, ids=str)
def test_every_type_of_arrow_that_holds_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["Hund", "ä€😀\r\n and more than twelve bytes", "", "Hund"]
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array(texts).cast(values)
    array = array if values is kind else pa.array(texts).dictionary_encode().cast(kind)
    nested = pa.StructArray.from_arrays([array, pa.array(["a", "b", "c", "d"])], ["de", "en"])
    tables = {"flat": {"de": array, "en": ["a", "b", "c", "d"]}, "nested": {"translation": nested}}
    for name, table in tables.items():
        parquet(tmp_path / name, "train.parquet", table)
        sides = {side: f"translation.{value}" for side, value in (("source", "de"), ("target", "en"))}
        for streaming, form in ((False, "parquet"), (False, "hub"), (True, "hub")):
            data = DataConfig(
                format=form, path=str(tmp_path / name / "data"), cache=str(tmp_path / "cache"), streaming=streaming,
                **(sides if name == "nested" else {}),
            )  # fmt: skip
            for _ in range(2):  # read, and found in the cache
                pairs = load_pairs(data, "train")
                assert (pairs["source"][:], pairs["target"][:]) == (texts, ["a", "b", "c", "d"])
        [found] = stream_pairs(replace(data, format="parquet"), "train")
        assert found["source"].to_pylist() == texts


def test_a_dictionary_of_views_is_decoded() -> None:
    """Which pyarrow reads from Arrow files and does not write into Parquet."""
    values = pa.array(["Hund", "more than twelve bytes", None], pa.string_view())
    table = pa.table(
        {side: pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), values) for side in ("source", "target")}
    )
    assert cast_to_text(table, "x", 0, DataConfig())["source"].to_pylist() == ["Hund", "more than twelve bytes", "Hund"]
    table = pa.table({side: pa.DictionaryArray.from_arrays(pa.array([0, 2]), values) for side in ("source", "target")})
    with pytest.raises(UserError, match="x: row 12: expected text in 'de', got None"):
        cast_to_text(table, "x", 10, DataConfig())


def test_columns_may_have_each_others_names(read: Read, tmp_path: Path) -> None:
    parquet(tmp_path, "train.parquet", {"source": ["a"], "target": ["b"]})
    assert read({}, format="parquet", source="target", target="source") == (["b"], ["a"])


def test_a_folder_may_be_called_like_a_pattern(tmp_path: Path) -> None:
    """The datasets library takes names for patterns, and would read what is beside it."""
    for name in ("x1", "x[1]"):
        (tmp_path / name / "data").mkdir(parents=True)
        for file in ("valid.parquet", "data/validation-00000-of-00001.parquet"):
            pq.write_table(pa.table({"de": [name], "en": ["b"]}), tmp_path / name / file)
    for streaming in (False, True):
        given = {"path": str(tmp_path / "x[1]"), "streaming": streaming, "cache": str(tmp_path / "cache")}
        assert load_pairs(DataConfig(format="parquet", **given), "valid")["source"][:] == ["x[1]"]
        with pytest.raises(UserError, match="as a pattern; rename it"):
            load_pairs(DataConfig(format="hub", **given), "valid")


def test_of_a_streamed_hub_dataset_other_splits_are_not_fetched(read: Read, tmp_path: Path) -> None:
    columns = [{"de": "a", "en": "b"}, {"de": "c", "en": "d"}]
    files = {"train.jsonl": "no JSON", "validation.jsonl": "".join(map(lines_of, columns))}
    assert read(files, "valid", "hub", streaming=True) == (["a", "c"], ["b", "d"])
    assert DataOverride().apply_to(DataConfig(format="hub", path=str(tmp_path), streaming=True)).streaming
    with pytest.raises(UserError, match="has no split test; it has train, validation"):
        read(files, "test", "hub", streaming=True)


def test_a_broken_parquet_file_is_named(read: Read) -> None:
    with pytest.raises(UserError, match="train.parquet cannot be read: "):
        read({"train.parquet": "PAR1"}, format="parquet")


def test_a_folder_laid_out_like_a_hub_dataset(read: Read) -> None:
    files = {"train.jsonl": lines_of({"de": "a", "en": "b"}), "validation.jsonl": lines_of({"de": "c", "en": "d"})}
    assert read(files, "train", "hub") == (["a"], ["b"])
    assert read(files, "valid", "hub") == (["c"], ["d"])
    with pytest.raises(UserError, match="has no split test; it has train, validation"):
        read(files, "test", "hub")


def test_a_folder_of_text_takes_the_place_of_a_hub_dataset(read: Read) -> None:
    files = {f"{split}.{side}": f"{split} {side}\n" for split in ("train", "valid") for side in ("de", "en")}
    expected = (["valid de"], ["valid en"])
    assert read(files, "valid", "hub") == expected
    assert read(files, "valid", "hub", source="translation.de", target="translation.en") == expected
    with pytest.raises(UserError, match="test.de does not exist"):
        read(files, "test", "hub")


def test_an_unreachable_dataset_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(path: str, subset: str | None, revision: str | None, cache_dir: str | None, **_: Any) -> None:
        assert (subset, revision) == ("de-en", "a1b2")
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    data = DataConfig(format="hub", path="nobody/nothing", subset="de-en", revision="a1b2", cache=str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"data.path=nobody/nothing data.subset=de-en data.revision=a1b2 .*Enabled\)\. .*data.path=FOLDER$",
    ):
        load_pairs(data, "train")


# ---------------------------------------------------------------------------------------------------------------- toy
@pytest.mark.parametrize("source, target", [("de", "en"), ("en", "de")])
def test_toy(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"train": 20, "valid": 10, "test": 0}
    monkeypatch.setattr(corpus, "generate_toy_splits", lambda seed: toy.generate(seed, sizes))
    data = DataConfig(source=source, target=target, seed=3)
    pairs, known = load_pairs(data, "validation"), corpus.generate_toy_splits(3)["valid"]
    assert len(pairs) == len(known) == 10
    for row, pair in zip(pairs, known, strict=True):
        assert {row["source"], row["target"]} == {pair.german, pair.english}
        assert row["source"] == (pair.german if source == "de" else pair.english)
        german = 0 if source == "de" else 1
        for links, gold in ((row["sure"], pair.sure), (row["possible"], pair.possible)):
            assert [(link[german], link[1 - german]) for link in links] == list(gold)
            for left, right in links:
                assert left < len(row["source"].split()) and right < len(row["target"].split())
    assert len(load_pairs(DataConfig(seed=3, limit=7), "train")) == 7
    with pytest.raises(UserError, match="no split dev2; it has train, valid, test"):
        load_pairs(data, "dev2")


# -------------------------------------------------------------------------------------------------------------- rest
def test_a_column_is_read_in_order(read: Read, tmp_path: Path) -> None:
    lines = [str(i) for i in range(25_000)]
    text = "\n".join(lines)
    read({"train.de": text, "train.en": text})
    data = DataConfig(format="text", path=str(tmp_path / "data"), cache=str(tmp_path / "cache"), limit=20_001)
    assert list(iter_column(load_pairs(data, "train"), "target")) == lines[:20_001]


def test_the_cache_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / "home" / ".cache" / "nmt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(DataConfig()) == tmp_path / "xdg" / "nmt"
    assert cache_folder(DataConfig(cache=str(tmp_path / "own"))) == tmp_path / "own"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="write data.cache=FOLDER"):
        cache_folder(DataConfig(cache=str(tmp_path / "file" / "x")))


def test_endings_are_whole(read: Read) -> None:
    files = {"train.de": "a\n", "train.en": "b\n", "train.tok.de": "c\n", "train.tok.en": "d\n"}
    assert read(files, source="tok.de", target="tok.en") == (["c"], ["d"])
    files = {"train.src.txt": "e\n", "train.tgt.txt": "f\n", "train.txt": "g\n"}
    assert read(files, source="src.txt", target="tgt.txt") == (["e"], ["f"])


def test_nothing_is_printed(read: Read, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parquet(tmp_path, "train.parquet", {"de": ["a"], "en": ["b"]})
    read({}, format="parquet")
    with pytest.raises(UserError):
        read({"train.parquet": "x"}, format="parquet")
    read({"train.de": "a", "train.en": "b"})
    read({"train.jsonl": lines_of({"de": "a", "en": "b"})}, format="jsonl")
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == logging.WARNING
