"""Input formats of corpus preparation."""

import gzip
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nmt.config import PrepareRun
from nmt.data.prepare.inputs import find_inputs, read_input
from nmt.data.prepare.tmx import matches_language, read_tmx_pairs
from nmt.data.readers import BadLine, LinePair
from nmt.errors import UserError

TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="EN-US"><seg>A <bpt i="1">&lt;b></bpt>red<ept i="1">&lt;/b></ept> dog &amp; a cat</seg></tuv>
<tuv xml:lang="de"><seg>Ein <hi>roter</hi> Hund &#38; eine Katze</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>only English</seg></tuv></tu>
<tu><note>x</note><tuv lang="de"><seg>zwei
Zeilen</seg></tuv><tuv lang="en"><seg>first <ph>x</ph>text</seg></tuv><tuv lang="en-GB"><seg>second</seg></tuv></tu>
</body></tmx>
"""


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gzip"])
def test_tmx(tmp_path: Path, encoding: str) -> None:
    if encoding == "gzip":
        path = write(tmp_path / "a.tmx.gz", gzip.compress(TMX.encode()))
    else:
        path = write(tmp_path / "a.tmx", TMX.replace("UTF-8", encoding.upper()).encode(encoding))
    assert list(read_tmx_pairs(path, "de", "en")) == [
        LinePair(1, "Ein roter Hund & eine Katze", "A red dog & a cat"),
        BadLine(path, 2, "no text in de", "no text in de"),
        LinePair(3, "zwei\nZeilen", "first text"),
    ]


@pytest.mark.parametrize(
    ("tag", "language", "expected"),
    [("DE", "de", True), ("de-AT", "de", True), ("zh_CN", "zh-cn", True), ("den", "de", False), ("de", "de-AT", False)],
)
def test_tmx_languages(tag: str, language: str, expected: bool) -> None:
    assert matches_language(tag, language) is expected


UNIT = '<tu><tuv xml:lang="de"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>x</seg></tuv></tu>'
BOMB = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'<!DOCTYPE tmx [<!ENTITY l0 "ha">{BOMB}]><tmx>{UNIT.format("&l9;" * 9)}</tmx>', "amplification"),
        ('<!DOCTYPE tmx [<!ENTITY e SYSTEM "/etc/passwd">]><tmx>' + UNIT.format("&e;") + "</tmx>", "undefined entity"),
        (f"<tmx>\n{UNIT.format('a')}</tmx", "unclosed token: line 2, column .*; repair the XML"),
        ("<html></html>", "is not TMX: its first element is <html>"),
        ("<?xml version='1.0' encoding='nonsense'?><tmx/>", "unknown encoding.* convert it to UTF-8"),
    ],
)
def test_damaged_or_hostile_tmx_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path / "a.tmx", text)
    with pytest.raises(UserError, match=message):
        list(read_tmx_pairs(path, "de", "en"))


def read_all(path: Path | list[Path], **settings: object) -> tuple[list[tuple[str, str]], list[BadLine]]:
    """Return the pairs and bad lines of inputs."""
    paths = [str(item) for item in (path if isinstance(path, list) else [path])]
    command = PrepareRun(input=paths, output="out", **settings)
    pairs, bad_lines = [], []
    for file in find_inputs("input", paths, command).files:
        for batch in read_input(file, command):
            if isinstance(batch, BadLine):
                bad_lines.append(batch)
            else:
                pairs += zip(batch["source"].to_pylist(), batch["target"].to_pylist(), strict=True)
    return pairs, bad_lines


EXPECTED = [("a b", "A B"), ("c", "C")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with spaces in its name, with the same two pairs in each format."""
    folder = tmp_path / "my down [loads]"
    folder.mkdir()
    write(folder / "c.de", "a b\nc\n")
    write(folder / "c.en.gz", gzip.compress(b"A B\nC\n"))
    write(folder / "t.tsv", "x\tde\ten\n1\ta b\tA B\n2\tc\tC\n")
    write(folder / "n.tsv", "a b\tA B\nc\tC\n")
    write(folder / "j.jsonl", '{"t": {"de": "a b", "en": "A B"}}\n{"t": {"de": "c", "en": "C"}}\n')
    write(
        folder / "m.tmx",
        f"<tmx>{UNIT.format('a b').replace('>x<', '>A B<')}{UNIT.format('c').replace('>x<', '>C<')}</tmx>",
    )
    rows = [{"de": source, "en": target} for source, target in EXPECTED]
    pq.write_table(pa.Table.from_pylist([{"t": row} for row in rows]), folder / "p.parquet")
    with zipfile.ZipFile(folder / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README", "about")
        archive.writestr("OPUS.de-en.de", "a b\nc\n")
        archive.writestr("OPUS.de-en.en", "A B\nC\n")
        archive.writestr("OPUS.de-en.xml", "<x/>")
    return folder


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("c.de", []),
        ("c.en.gz", []),
        ("c", []),
        ("t.tsv", []),
        ("n.tsv", ["1", "2"]),
        ("j.jsonl", ["t.de", "t.en"]),
        ("m.tmx", []),
        ("p.parquet", ["t.de", "t.en"]),
        ("z.zip", []),
    ],
)
def test_formats(folder: Path, name: str, columns: list[str]) -> None:
    assert read_all(folder / name, columns=columns) == (EXPECTED, [])


def test_folder_is_read_in_order_of_names(folder: Path) -> None:
    for name in ("n.tsv", "j.jsonl", "p.parquet"):
        (folder / name).unlink()
    write(folder / "notes.txt", "no pairs")
    write(folder / ".hidden.de", "x\n")
    command = PrepareRun(input=str(folder), output="out")
    found = find_inputs("input", [str(folder), str(folder / "c.en.gz")], command)
    assert [file.kind for file in found.files] == ["text", "tmx", "tsv", "text"]
    assert sorted(path.name for path in found.unused) == ["OPUS.de-en.xml", "README", "notes.txt"]
    assert read_all(folder)[0] == EXPECTED * 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.de", b"a\n", "x.de: there is no file with the same name that ends in .en"),
        ("x.txt", b"a\n", "x.txt is of an unknown format; use two files that end in .de and .en, or one that ends in"),
        ("x.zip", b"no zip", "x.zip cannot be read: File is not a zip file"),
        ("x.tsv", b"a\tb\n", "no column 'de' in the first line, .* give the numbers of the columns: columns=\\[1,2\\]"),
        ("x.parquet", b"PAR1", "x.parquet cannot be read"),
        ("x.tmx.gz", b"no gzip", "x.tmx.gz cannot be read"),
    ],
)
def test_bad_inputs(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_all(write(tmp_path / name, text))


def test_missing_and_empty_inputs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="input=.*none does not exist, nor does .*none.de"):
        read_all(tmp_path / "none")
    with pytest.raises(UserError, match=r"has no files that end in .de and .en, nor in .*; it has nothing"):
        read_all(tmp_path)


def test_zip_members_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.de", "a\n" * 20_000)
        archive.writestr("a.en", b"\xff\n" + b"A\n" * 19_999)
    pairs, [bad] = read_all(path)
    assert len(pairs) == 19_999 and (str(bad.file), bad.number) == (str(path / "a.en"), 1)
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 0xFF
    with pytest.raises(UserError, match="x.zip/a.de cannot be read"):
        read_all(write(path, bytes(damaged)))


def test_zip_members_are_never_read_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "secret.tsv", "de\ten\nsecret\tSECRET\n")
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (f"{tmp_path}/secret.tsv", "../secret.tsv", "./dot.tsv", "__MACOSX/._dot.tsv"):
            archive.writestr(name, "de\ten\ninside\tINSIDE\n")
    assert read_all(path) == ([("inside", "INSIDE")] * 3, [])


def test_partner_is_the_file_of_the_same_name(tmp_path: Path) -> None:
    for name in ("m.de", "m.en", "m.en.de"):
        write(tmp_path / name, f"{name}\n")
    assert read_all(tmp_path / "m")[0] == read_all(tmp_path)[0] == [("m.de", "m.en")]


def test_parquet_rows_without_text_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"de": ["a", None, "c"], "en": ["A", "B", "C"]}), tmp_path / "x.parquet")
    pairs, [bad] = read_all(tmp_path / "x.parquet")
    assert pairs == [("a", "A"), ("c", "C")] and bad.number == 2
    with pytest.raises(UserError, match="x.parquet has no column 'fr'; it has de, en"):
        read_all(tmp_path / "x.parquet", columns=["fr", "en"])
