"""Reading sentence pairs from all formats, the cache of read text, and errors about invalid files."""

import itertools
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import CONTEXT

from nmt.config import DataConfig
from nmt.config.data import DataOverride
from nmt.data import cache, corpus
from nmt.data.cache import cache_folder
from nmt.data.corpus import load_pairs
from nmt.data.readers import LINE_READERS, BadLine
from nmt.data.splits import VALID_SPLITS
from nmt.data.toy import corpus as toy
from nmt.errors import UserError
from nmt.system.text import TextInput

Read = Any


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write files to a folder, then read a split of it as lists of sources and targets."""

    def read(files: dict[str, str | bytes], split: str = "train", format: str = "text", **settings: Any) -> Any:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        data = DataConfig(**{"format": format, "path": str(folder), "cache": str(tmp_path / "cache"), **settings})
        pairs = load_pairs(data, split)
        assert pairs.column_names == ["source", "target"]
        return pairs["source"].to_pylist(), pairs["target"].to_pylist()

    return read


# --- lines
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
def test_read_lines(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert list(TextInput(str(file))) == lines


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_bytes(b"a\n\xff\nb\nx\xe4y\n")
    assert list(TextInput(str(tmp_path / "in.txt"))) == ["a", "\ufffd", "b", "x\ufffdy"]
    assert "in.txt: 2 lines are not UTF-8 (first: 2, 4)" in caplog.text


# --- text
def test_read_text(read: Read) -> None:
    files = {"train.de": "ein Hund\n\nzwei\u2028 Hunde\r\n", "train.en": "\ufeffa dog\ntwo  dogs\n \rx"}
    assert read(files) == (["ein Hund", "", "zwei\u2028 Hunde"], ["a dog", "two  dogs", " \rx"])


@pytest.mark.parametrize("name", VALID_SPLITS)
@pytest.mark.parametrize("requested", VALID_SPLITS)
def test_validation_split_names_are_aliases(read: Read, name: str, requested: str) -> None:
    assert read({f"{name}.de": "a\n", f"{name}.en": "b\n"}, split=requested) == (["a"], ["b"])


def test_limit_applies_only_to_training_split(read: Read) -> None:
    files = {f"{split}.{side}": "1\n2\n3\n" for split in ("train", "test") for side in ("de", "en")}
    assert read(files, limit=2)[0] == ["1", "2"]
    assert read(files, limit=5)[0] == ["1", "2", "3"]
    assert read(files, limit=2, split="test")[0] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.de": "a\nb\nc\n", "train.en": "a\n"}, r"train.de has 3 lines and .*train.en has 1;"),
        ({"train.de": "", "train.en": "a\n"}, r"train.de has 0 lines and .*train.en has 1;"),
        (
            {"train.de": "a\nb\n", "train.en": b"a\n\xe4\n"},
            r"train.en:2: not UTF-8 \(byte 0xE4 at position 1\); fix .* nmt.prepare",
        ),
        ({"train.de": "a\n"}, r"train.en does not exist; .*data.source=de data.target=en.* The folder has train.de$"),
        ({}, r"train.de does not exist; .*The folder has nothing$"),
    ],
)
def test_invalid_text_files_raise(read: Read, files: dict[str, str | bytes], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(files)


def test_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^data.path=nowhere is not a folder in /.+$"):
        load_pairs(DataConfig(format="text", path="nowhere", cache=str(tmp_path)), "train")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_error_names_utf16(read: Read, ending: str) -> None:
    text = "ä\nb\n".encode("utf-16")
    with pytest.raises(UserError, match=f"train.de{ending} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"):
        read({f"train.de{ending}": compress(text, ending) if ending else text, "train.en": b"x\ny\n"})


@pytest.mark.parametrize(
    "format, sides, lines, expected",
    [
        (
            "tsv",
            ("1", "2"),
            [b"a\tb", b"c", b"c\td", b"\xff\tb", b"", b"\t"],
            {"too few columns": [2, 5], "not UTF-8": [4]},
        ),
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
def test_readers_report_invalid_lines(
    tmp_path: Path, format: str, sides: tuple[str, str], lines: list[bytes], expected: dict[str, list[int]]
) -> None:
    """Line numbers must count header lines, invalid lines and empty lines."""
    end = {"tsv": b"\nn\tm\n", "jsonl": b'\n{"x": "n", "y": "m"}\n'}[format]
    (tmp_path / "file").write_bytes(b"\n".join(lines) + end)
    items = list(LINE_READERS[format](tmp_path / "file", *sides))
    bad: dict[str, list[int]] = {}
    for item in items:
        if isinstance(item, BadLine):
            bad.setdefault(item.kind, []).append(item.number)
    assert bad == expected
    assert items[-1].to_pylist()[-1] == {"source": "n", "target": "m", "line": len(lines) + 1}


def test_cache_is_rebuilt_only_if_text_changes(read: Read, tmp_path: Path) -> None:
    source = tmp_path / "data" / "train.de"
    assert read({"train.de": "a\nb\n", "train.en": "x\ny\n"})[0] == ["a", "b"]
    stamp = source.stat()
    source.write_text("a\nc\n")
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert read({})[0] == ["a", "c"]
    before = list((tmp_path / "cache").rglob("*.arrow"))
    assert read({})[0] == ["a", "c"]
    assert list((tmp_path / "cache").rglob("*.arrow")) == before


# --- cache
TEXT: dict[str, str | bytes] = {"train.de": "a\nb\n" * 1_000, "train.en": "x\ny\n" * 1_000}
PAIRS = (["a", "b"] * 1_000, ["x", "y"] * 1_000)


def read_until_killed(data: DataConfig) -> None:
    """Read a corpus, and kill this process after its first pair."""
    text = LINE_READERS["text"]

    def killed_reader(*files: Any) -> Any:
        yield next(text(*files))
        os.kill(os.getpid(), signal.SIGKILL)

    LINE_READERS["text"] = killed_reader
    load_pairs(data, "train")


def test_killed_process_leaves_nothing_that_counts(read: Read, tmp_path: Path) -> None:
    read(TEXT)
    shutil.rmtree(tmp_path / "cache")
    data = DataConfig(format="text", path=str(tmp_path / "data"), cache=str(tmp_path / "cache"))
    process = CONTEXT.Process(target=read_until_killed, args=(data,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert {path.suffix for path in (tmp_path / "cache" / "text").iterdir()} == {".part", ".lock"}
    assert read({}) == PAIRS
    assert not [*(tmp_path / "cache" / "text").glob("*.part")]


def build_slowly(folder: Path, number: int) -> None:
    """Build a cache in half a second, and note that it was built."""

    def fill(part: Path) -> None:
        (part / "process").write_text(str(number))
        with open(folder.parent / "times", "a") as file:
            file.write("once\n")
        time.sleep(0.5)

    cache.get_or_build(folder, fill)


def test_concurrent_processes_build_cache_once(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "cached"
    folder.parent.mkdir()
    processes = [CONTEXT.Process(target=build_slowly, args=(folder, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (folder.parent / "times").read_text() == "once\n" and (folder / "process").exists()


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Make writing larger files fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("format", ["text", "parquet", "hub"])
def test_full_disk_raises_and_leaves_nothing_that_counts(read: Read, tmp_path: Path, format: str) -> None:
    files = TEXT if format == "text" else {}
    if not files:
        write_parquet(tmp_path, "train.parquet", {"de": PAIRS[0], "en": PAIRS[1]})
    message = f"{tmp_path}/cache.*File too large" if format == "text" else f"File too large.*{tmp_path}/cache"
    with limit_file_size(10_000), pytest.raises(UserError, match=message):
        read(files, format=format)
    assert read({}, format=format) == PAIRS


# --- compressed files, shards
def compress(text: bytes, ending: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {".gz": "gzip", ".zst": "zstd"}[ending]) as stream:
        stream.write(text)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_read_compressed_files(read: Read, ending: str) -> None:
    text = "ä\nb\r\n".encode() * 5_000
    files = {f"train.de{ending}": compress(text, ending), "train.en": b"x\ny\n" * 5_000}
    assert read(files) == (["ä", "b"] * 5_000, ["x", "y"] * 5_000)
    assert read({f"valid.tsv{ending}": compress(b"a\tb\n", ending)}, "valid", "tsv", source="1", target="2")[1] == ["b"]
    with pytest.raises(UserError, match=f"train.de{ending}:10001: not UTF-8 .byte 0xFF"):
        read({f"train.de{ending}": compress(text + b"\xff", ending), "train.en": b"x\ny\n" * 5_000 + b"z"})
    with pytest.raises(UserError, match=f"train.de{ending} cannot be read: "):  # the error names the damaged side
        read({f"train.de{ending}": compress(text, ending)[:-20], f"train.en{ending}": compress(text, ending)})
    assert read({"train.de": "1\n", "train.en": "x\n"}) == (["1"], ["x"])  # the uncompressed file takes precedence


@pytest.mark.parametrize("names", [(".00", ".01", ".10"), ("-00000-of-00003", "-00001-of-00003", "-00002-of-00003")])
def test_read_sharded_text(read: Read, names: tuple[str, ...], tmp_path: Path) -> None:
    files = {f"train{name}.{side}": f"{side}{i}\n{i}\n" for i, name in enumerate(names) for side in ("de", "en")}
    files |= {"train.tok.de": "unrelated", "trainer.00.de": "unrelated"}
    assert read(files) == (["de0", "0", "de1", "1", "de2", "2"], ["en0", "0", "en1", "1", "en2", "2"])
    with pytest.raises(UserError, match=f"train{names[1]}.de has 2 lines and .*train{names[1]}.en has 3;"):
        read({f"train{names[1]}.en": "a\nb\nc"})
    with pytest.raises(UserError, match="has the split train both as a whole and in shards"):
        read({"train.de": "a\n"})
    (tmp_path / "data" / "train.de").unlink()
    (tmp_path / "data" / f"train{names[1]}.en").unlink()
    with pytest.raises(UserError, match=f"train{names[1]}.en does not exist; "):
        read({})
    (tmp_path / "data" / f"train{names[1]}.de").unlink()
    if "of" in names[1]:
        with pytest.raises(UserError, match="has 2 of the 3 shards of train"):
            read({})


# --- tsv
def test_read_tsv_by_column_number_or_name(read: Read) -> None:
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
        (b"a\tb\n", ("0", "1"), "counted from 1"),
        (
            b"german\tenglish\n",
            ("german", "englisch"),
            "no column 'englisch' .* german, english; did you mean 'english'",
        ),
        (b"de\ten\n", ("de", "en"), "the split train of data.path=.* is empty"),
        (b"", ("de", "en"), "no column 'de'"),
    ],
)
def test_invalid_tsv_raises(read: Read, table: bytes, columns: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read({"train.tsv": table}, format="tsv", source=columns[0], target=columns[1])


def to_json_lines(*records: Any) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


@pytest.mark.parametrize("keys", [("de", "en"), ("translation.de", "translation.en"), ("a.b.de", "en")])
def test_read_jsonl(read: Read, keys: tuple[str, str]) -> None:
    """Check that texts which look like dates or numbers are not converted."""
    texts = [("2020-01-01", "1"), ("a\u2028\0\r\nb", "\ufeff"), ("", " ")]
    records = []
    for pair in texts:
        record: dict[str, Any] = {"other": [1]}
        for key, text in zip(keys, pair, strict=True):
            *parents, name = key.split(".")
            parent = record
            for part in parents:
                parent = parent.setdefault(part, {})
            parent[name] = text
        records.append(record)
    sources, targets = read(
        {"train.jsonl": to_json_lines(*records, "")}, format="jsonl", source=keys[0], target=keys[1]
    )
    assert list(zip(sources, targets, strict=True)) == texts


@pytest.mark.parametrize(
    "line, message",
    [
        ({"de": "a"}, "train.jsonl:2: expected text under 'en', got None; the line has de; fix"),
        (
            [{"de": "a"}],
            r"jsonl:2: expected a JSON object with 'de' and 'en', got \[\{.*; each line must .* jq -c '.\[\]'",
        ),
        ('{"de": oops', r"train.jsonl:2: not JSON \(Expecting value: line 1 column 8"),
        (r'{"de": "\ud800", "en": "b"}', r"train.jsonl:2: expected text under 'de', got '.ud800'"),
    ],
)
def test_invalid_jsonl_raises(read: Read, line: Any, message: str) -> None:
    files = {"train.jsonl": to_json_lines({"de": "a", "en": "b"}, line)}
    with pytest.raises(UserError, match=message):
        read(files, format="jsonl")


# --- parquet and hub
def write_parquet(tmp_path: Path, name: str, table: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(table), tmp_path / "data" / name)


def test_read_parquet(read: Read, tmp_path: Path) -> None:
    write_parquet(tmp_path, "validation-00001.parquet", {"translation": [{"de": "c", "en": "d"}], "n": [1]})
    write_parquet(tmp_path, "validation-00000.parquet", {"translation": [{"de": "a\r", "en": "b"}], "n": [2]})
    nested = {"source": "translation.de", "target": "translation.en"}
    assert read({}, "valid", "parquet", **nested) == (["a\r", "c"], ["b", "d"])
    write_parquet(tmp_path, "validation-00000.parquet", {"translation": [{"de": "x", "en": "b"}], "n": [2]})
    assert read({}, "valid", "parquet", **nested) == (["x", "c"], ["b", "d"])
    with pytest.raises(UserError, match="data.source=de: .* no such column; it has translation.de, translation.en, n"):
        read({}, "valid", "parquet")
    with pytest.raises(UserError, match="train.*parquet does not exist"):
        read({}, "train", "parquet")
    write_parquet(tmp_path, "test_2017.parquet", {"de": ["a"], "en": ["b"]})
    write_parquet(tmp_path, "test.parquet", {"de": ["c"], "en": ["d"]})
    assert read({}, "test", "parquet") == (["c"], ["d"])
    write_parquet(tmp_path, "train-00000-of-00002-0123456789abcdef.parquet", {"de": ["a"], "en": ["b"]})
    write_parquet(tmp_path, "train-00001-of-00002-fedcba9876543210.parquet", {"de": ["c"], "en": ["d"]})
    assert read({}, "train", "parquet") == (["a", "c"], ["b", "d"])


@pytest.mark.parametrize(
    "table, message",
    [
        ({"de": ["a"] * 10_001 + [None], "en": ["b"] * 10_002}, "row 10002: 'de' is None, of type string, not text"),
        ({"de": ["a"], "en": [3]}, "row 1: 'en' is 3, of type int64, not text"),
        ({"de": ["a"], "en": [["b"]]}, r"row 1: 'en' is \['b'\], of type list<"),
        ({"de": ["a", "b"], "en": pa.array(["c", None], pa.string_view())}, "row 2: 'en' is None"),
        ({"de": ["a", "b"], "en": pa.array([b"c", b"d\xff"])}, r"row 2: 'en' is not UTF-8 .byte 0xFF at position 2"),
        ({"de": ["a", "b"], "en": pa.array([b"c", b"d\xff"]).view(pa.string())}, "row 2: 'en' is not UTF-8"),
    ],
)
def test_non_text_columns_raise(read: Read, tmp_path: Path, table: dict[str, Any], message: str) -> None:
    write_parquet(tmp_path, "train.parquet", table)
    with pytest.raises(UserError, match=message):
        read({}, format="parquet")


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
]


@pytest.mark.parametrize("type", TEXT_TYPES, ids=str)
def test_all_arrow_text_types_are_read(tmp_path: Path, type: pa.DataType) -> None:
    texts = ["Hund", "ä€😀\r\n and more than twelve bytes", "", "Hund"]
    array = pa.array(texts).cast(type)
    nested = pa.StructArray.from_arrays([array, pa.array(["a", "b", "c", "d"])], ["de", "en"])
    write_parquet(tmp_path, "train.parquet", {"translation": nested})
    columns = {"source": "translation.de", "target": "translation.en"}
    for streaming, format in itertools.product((False, True), ("parquet", "hub")):
        path, cache = str(tmp_path / "data"), str(tmp_path / "cache")
        data = DataConfig(format=format, path=path, cache=cache, streaming=streaming, **columns)
        for _ in range(2):  # the second time from the cache
            pairs = load_pairs(data, "train")
            assert (pairs["source"].to_pylist(), pairs["target"].to_pylist()) == (texts, ["a", "b", "c", "d"])


def test_folder_names_with_glob_characters(tmp_path: Path) -> None:
    """The datasets library would treat the name as a pattern and read the folder beside it."""
    for name in ("x1", "x[1]"):
        (tmp_path / name / "data").mkdir(parents=True)
        for file in ("valid.parquet", "data/validation-00000-of-00001.parquet"):
            pq.write_table(pa.table({"de": [name], "en": ["b"]}), tmp_path / name / file)
    for streaming in (False, True):
        data = DataConfig(
            format="parquet", path=str(tmp_path / "x[1]"), streaming=streaming, cache=str(tmp_path / "cache")
        )
        assert load_pairs(data, "valid")["source"].to_pylist() == ["x[1]"]


def test_streamed_hub_dataset_fetches_only_requested_split(read: Read, tmp_path: Path) -> None:
    columns = [{"de": "a", "en": "b"}, {"de": "c", "en": "d"}]
    files = {"train.jsonl": "no JSON", "validation.jsonl": "".join(map(to_json_lines, columns))}
    assert read(files, "valid", "hub", streaming=True) == (["a", "c"], ["b", "d"])
    assert DataOverride().apply_to(DataConfig(format="hub", path=str(tmp_path), streaming=True)).streaming


def test_invalid_parquet_file_raises(read: Read) -> None:
    with pytest.raises(UserError, match="data cannot be loaded: Parquet file size is 4 bytes"):
        read({"train.parquet": "PAR1"}, format="parquet")


def test_read_folder_in_hub_layout(read: Read) -> None:
    files = {
        "train.jsonl": to_json_lines({"de": "a", "en": "b"}),
        "validation.jsonl": to_json_lines({"de": "c", "en": "d"}),
    }
    assert read(files, "train", "hub") == (["a"], ["b"])
    assert read(files, "valid", "hub") == (["c"], ["d"])
    with pytest.raises(UserError, match="has no split test; it has train, validation"):
        read(files, "test", "hub")


def test_unreachable_hub_dataset_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(path: str, subset: str | None, revision: str | None, **_: Any) -> None:
        assert (subset, revision) == ("de-en", "a1b2")
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr("datasets.load_dataset", offline)
    data = DataConfig(format="hub", path="nobody/nothing", subset="de-en", revision="a1b2", cache=str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"data.path=nobody/nothing cannot be loaded: .*Enabled\)\. Check data.path, data.subset, data.revision",
    ):
        load_pairs(data, "train")


@pytest.mark.parametrize("source, target", [("de", "en"), ("en", "de")])
def test_read_builtin_corpus(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"train": 20, "valid": 10, "test": 0}
    monkeypatch.setattr(corpus, "generate_toy_splits", lambda: toy.generate(3, sizes))
    data = DataConfig(source=source, target=target)
    pairs, expected = load_pairs(data, "validation"), corpus.generate_toy_splits()["valid"]
    assert len(pairs) == len(expected) == 10
    for row, pair in zip(pairs.to_pylist(), expected, strict=True):
        assert {row["source"], row["target"]} == {pair.german, pair.english}
        assert row["source"] == (pair.german if source == "de" else pair.english)
        german = 0 if source == "de" else 1
        for links, gold in ((row["sure"], pair.sure), (row["possible"], pair.possible)):
            assert [(link[german], link[1 - german]) for link in links] == list(gold)
            for left, right in links:
                assert left < len(row["source"].split()) and right < len(row["target"].split())
    assert len(load_pairs(DataConfig(limit=7), "train")) == 7
    with pytest.raises(UserError, match="no split dev2; it has train, valid, test"):
        load_pairs(data, "dev2")


# --- other


def test_cache_folder_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / "home" / ".cache" / "nmt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(DataConfig()) == tmp_path / "xdg" / "nmt"
    assert cache_folder(DataConfig(cache=str(tmp_path / "custom"))) == tmp_path / "custom"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="set data.cache=FOLDER"):
        cache_folder(DataConfig(cache=str(tmp_path / "file" / "x")))


def test_file_suffixes_match_completely(read: Read) -> None:
    files = {"train.de": "a\n", "train.en": "b\n", "train.tok.de": "c\n", "train.tok.en": "d\n"}
    assert read(files, source="tok.de", target="tok.en") == (["c"], ["d"])
    files = {"train.src.txt": "e\n", "train.tgt.txt": "f\n", "train.txt": "g\n"}
    assert read(files, source="src.txt", target="tgt.txt") == (["e"], ["f"])
