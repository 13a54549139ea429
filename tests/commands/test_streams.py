"""Where commands read from and write to: pipes, terminals, descriptors, links; signals while they do; any locale."""

import errno
import gzip
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from builders import (
    CONTEXT,
    TINY_SETTINGS,
    command_environment,
    run_error,
    run_in_folder,
    run_in_new_process,
    run_ok,
    run_program,
)
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import AlignRun, TranslateRun
from nmt.data.readers import read_jsonl_pairs, read_text_pairs, read_tsv_pairs
from nmt.decoding.translator import split_long_line
from nmt.errors import UserError
from nmt.runtime import lines as lines_module
from nmt.runtime.lines import LineReader, open_decompressed
from nmt.runtime.streams import check_file_arguments, find_own_descriptor, get_file_identity, is_regular_file
from nmt.runtime.text_io import TextInput, open_output, read_chunks

FAST = ("checkpoint=runs/mine", "search.beam=2", "search.max_length=20", "precision=fp32")


# ------------------------------------------------------------------------------------------------------------- writing
@contextmanager
def as_descriptor(number: int, path: Path, flags: int) -> Iterator[None]:
    """A file as the shell opens it: `> path` with O_TRUNC, `>> path` with O_APPEND."""
    before = os.dup(number) if number < 3 else None
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        if before is None:
            os.close(number)
        else:
            os.dup2(before, number)
            os.close(before)


def write_to(path: object, text: bytes) -> None:
    with open_output(str(path)) as file:
        file.write(text)


DESCRIPTORS = ["/dev/stdout", "/dev/stderr", "/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}"]


@pytest.mark.parametrize("name", [*DESCRIPTORS, "/proc/{pid}/fd/{}", "link"])
@pytest.mark.parametrize("flags", [os.O_APPEND, os.O_TRUNC])
def test_a_descriptor_is_written_as_it_was_opened(
    name: str, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115  not what pytest makes of it
    number = {"/dev/stdout": 1, "/dev/stderr": 2}.get(name, 77)
    path = name.format(number, pid=os.getpid())
    if name == "link":
        (tmp_path / "one").symlink_to("/dev/fd")
        (tmp_path / "link").symlink_to(f"one/{number}")
        path = str(tmp_path / "link")
    file = tmp_path / "all.txt"
    file.write_bytes(b"before\n")
    with as_descriptor(number, file, flags):
        os.write(number, b"first\n")
        write_to(path, b"second\n")
        os.write(number, b"third\n")
        assert find_own_descriptor(path) == number and not is_regular_file(path)
    assert file.read_bytes() == (b"before\n" if flags == os.O_APPEND else b"") + b"first\nsecond\nthird\n"
    assert not list(tmp_path.glob(".*"))


def test_a_descriptor_of_another_process_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    file.write_bytes(b"before\n")
    with open(file, "ab") as held:
        child = os.fork()
        if not child:
            write_to(f"/proc/{os.getppid()}/fd/{held.fileno()}", b"other\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert file.read_bytes() == b"before\nother\n"


@pytest.mark.parametrize("number", [78, 79])
def test_a_closed_descriptor_is_refused(number: int, tmp_path: Path) -> None:
    """One of our own files is not what `3>file` of the shell would be."""
    own = os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT)
    if number == 79:
        os.dup2(own, number, inheritable=False)
    with pytest.raises(UserError, match=f"/dev/fd/{number}: descriptor {number} is closed; give a file"):
        write_to(f"/dev/fd/{number}", b"x")
    os.close(own)


@pytest.mark.parametrize("target", ["target", "other/target", "absolute", "second"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_replaced(target: str, there: bool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "second").symlink_to("other/third")
    leads = str(tmp_path / "other" / "absolute") if target == "absolute" else target
    (tmp_path / "link").symlink_to(leads)
    file = tmp_path / "link"
    real = Path(os.path.realpath(file))
    if there:
        real.write_bytes(b"old")
    before = real.stat().st_ino if there else None
    with open_output(str(file)) as stream:
        stream.write(b"new")
        stream.flush()
        assert not there or real.read_bytes() == b"old"
        assert there or not real.exists()
    assert os.readlink(file) == leads and real.read_bytes() == b"new" and real.stat().st_ino != before
    assert not [path for path in tmp_path.rglob(".*")]


def test_who_has_a_file_open_keeps_what_was_in_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with open(file, "rb") as held:
        write_to(file, b"new")
        assert held.read() == b"old" and file.read_bytes() == b"new"


def test_all_names_of_a_file_see_what_is_written(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"old and long")
    other.hardlink_to(file)
    with open_output(str(file)) as stream:
        stream.write(b"new")
        stream.flush()
        assert other.read_bytes() == b"old and long"
    assert file.read_bytes() == other.read_bytes() == b"new" and file.samefile(other)
    with pytest.raises(ZeroDivisionError), open_output(str(file)) as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert other.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 2


def test_where_only_the_content_can_be_replaced_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written, as a user who is not root finds it; a file that is a mount point."""
    file = tmp_path / "file"
    file.write_bytes(b"old and long")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        with open_output(str(file)) as stream:
            assert [path.name for path in tmp_path.iterdir()] == ["file"]
            stream.write(b"new")
    assert file.read_bytes() == b"new"

    def busy(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "replace", busy)
    write_to(file, b"newer")
    assert file.read_bytes() == b"newer" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_permissions_stay_and_a_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o640)
    with open_output(str(file)) as stream:
        [new] = tmp_path.glob(".file.*")
        assert stat.S_IMODE(new.stat().st_mode) == 0o640
        stream.write(b"new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)  # as a user who is not root finds it
    with pytest.raises(UserError, match="file cannot be written: Permission denied"):
        write_to(file, b"x")
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["loop", "folder", "file/x", "missing/x"])
def test_what_cannot_be_written_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{tmp_path}/.* cannot be written: "):
        write_to(tmp_path / name, b"x")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
def test_a_named_pipe_is_written_through(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / name).read_bytes()))
    reader.start()
    write_to(tmp_path / name, b"text")
    reader.join(20)
    [text] = found
    assert (gzip.decompress(text) if name.endswith("gz") else text) == b"text"
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)


# ------------------------------------------------------------------------------------------------------------ settings
def translating(**settings: str) -> TranslateRun:
    """The settings of `nmt.translate` as it uses them."""
    command = TranslateRun("runs/mine", **settings)
    check_file_arguments(command, ("input", "target", "prefix"), ("output", "alignments"))
    return command


def aligning(**settings: str) -> AlignRun:
    """The settings of `nmt.align` as it uses them."""
    command = AlignRun("runs/mine", **settings)
    check_file_arguments(command, ("source", "target", "gold"), ("output",))
    return command


def test_a_dash_is_a_standard_stream(tmp_path: Path) -> None:
    command = translating()
    assert (command.input, command.output) == ("/dev/stdin", "/dev/stdout")
    command = translating(input="in", prefix="-", output="out", alignments="-")
    assert (command.prefix, command.alignments) == ("/dev/stdin", "/dev/stdout")
    command = translating(mode="score", input="in", target="-")
    assert command.target == "/dev/stdin"
    for key in ("source", "target"):
        other = {"source": "target", "target": "source"}[key]
        assert getattr(aligning(**{key: "-", other: "in"}), key) == "/dev/stdin"
    assert aligning(gold="-").gold == "/dev/stdin"


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix": "-"},
        {"prefix": "/dev/fd/0"},
        {"input": "/proc/self/fd/0", "prefix": "/dev/stdin"},
        {"mode": "score", "target": "-"},
        {"alignments": "-"},
        {"alignments": "/dev/fd/1"},
        {"input": "file", "output": "file"},
        {"input": "file", "output": "hard"},
        {"input": "soft", "output": "file"},
        {"input": "in", "output": "new", "alignments": "./new"},
    ],
)
def test_a_stream_is_not_for_two_settings(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("hard").hardlink_to("file")
    Path("soft").symlink_to("file")
    with pytest.raises(UserError, match="is the same file as .*; give another one"):
        translating(**settings)


def test_the_message_names_both_settings() -> None:
    for settings, message in (
        ({"input": "a", "output": "./a"}, "output=./a is the same file as input=a"),
        ({"output": "a", "alignments": "a"}, "alignments=a is the same file as output=a"),
    ):
        with pytest.raises(UserError, match=message):
            translating(**settings)
    with pytest.raises(UserError, match="output=b is the same file as target=b"):
        aligning(source="a", target="b", output="b")


def test_what_is_read_is_not_what_standard_output_replaces(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x\n")
    with as_descriptor(1, tmp_path / "file", os.O_APPEND):
        assert get_file_identity("/dev/stdout") == get_file_identity(str(tmp_path / "file"))
        for settings in ({"input": str(tmp_path / "file")}, {"alignments": str(tmp_path / "file")}):
            with pytest.raises(UserError, match="is the same file as"):
                translating(**settings)
    translating(output="/dev/null", alignments="/dev/null")


# ------------------------------------------------------------------------------------------------------------- reading
class Parts(io.RawIOBase):
    """A file that gives what there is in these parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = [part for part in parts if part]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self.parts.pop(0) if self.parts else b""
        count = min(len(part), len(buffer))
        buffer[:count] = part[:count]
        if part[count:]:
            self.parts.insert(0, part[count:])
        return count


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xef", b"\xbb\xbf", b" "])))
def test_lines_do_not_depend_on_how_they_arrive(parts: list[bytes]) -> None:
    text = b"".join(parts)
    reader = LineReader(io.BufferedReader(Parts(parts)), "x")
    whole = list(LineReader(io.BufferedReader(io.BytesIO(text)), "x"))
    assert list(reader) == whole and reader.count == len(whole)
    ended = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert whole == [line.removesuffix(b"\r") for line in ended[:-1]] + [line for line in ended[-1:] if line]


def test_what_has_arrived_is_a_chunk() -> None:
    ours, theirs = os.pipe()
    with open(ours, "rb") as file, open(theirs, "wb", buffering=0) as pipe:
        reader = LineReader(file, "pipe")
        rows = read_chunks(((line.decode(),) for line in reader), reader.has_more)
        for text, found in ((b"one\n", ["one"]), (b"two\r\nthree\nfo", ["two", "three"]), (b"ur\n\n", ["four", ""])):
            pipe.write(text)
            assert next(rows) == [(line,) for line in found]
        pipe.write(b"last")
        assert reader.count == 5
        pipe.close()
        assert [*rows] == [[("last",)]]


def test_a_fast_pipe_gives_large_chunks_and_a_slow_one_soon() -> None:
    ours, theirs = os.pipe()
    text = b"".join(b"%d\n" % number for number in range(20_000))

    def feed() -> None:
        with open(theirs, "wb") as pipe:
            pipe.write(text)
            for number in range(100):
                time.sleep(0.01)
                pipe.write(b"slow %d\n" % number)
                pipe.flush()

    threading.Thread(target=feed).start()
    with open(ours, "rb") as file:
        reader = LineReader(file, "pipe")
        found = list(read_chunks(((line.decode(),) for line in reader), reader.has_more))
    assert [len(chunk) for chunk in found[:4]] == [4096] * 4
    assert len(found) > 5 and sum(map(len, found)) == 20_100
    assert b"".join(row.encode() + b"\n" for [row] in itertools.chain(*found)).startswith(text)


def test_long_lines_make_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.runtime.text_io.MAX_CHUNK_CHARACTERS", 10)
    rows = [("a" * 6,), ("b" * 6,), ("c" * 20,), ("d",)]
    assert [len(chunk) for chunk in read_chunks(rows, lambda since: True)] == [2, 1, 1]


@pytest.mark.parametrize("name", ["x", "x.gz", "x.zst", "/dev/zero"])
def test_a_line_without_end_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100_000)
    path = tmp_path / name
    content = b"a line\n" + b"x" * 100_000 + b"\n"

    def write(text: bytes) -> None:
        packed = {".gz": gzip.compress, ".zst": lambda text: pa.compress(text, "zstd", asbytes=True)}
        path.write_bytes(packed.get(path.suffix, bytes)(text))

    if name != "/dev/zero":
        write(content)
        assert [len(line) for line in TextInput(str(path))] == [6, 100_000]
        write(content[:-1] + b"x" * 10**7)
    other = tmp_path / f"other{path.suffix}"
    other.symlink_to(path)
    number = 1 if name == "/dev/zero" else 2
    message = re.escape(f"{path}:{number}: the line has more than 100,000 bytes; write one sentence per line")
    with pytest.raises(UserError, match=message):
        list(TextInput(str(path)))
    readers = (
        read_text_pairs,
        lambda left, _: read_tsv_pairs(left, "1", "2"),
        lambda left, _: read_jsonl_pairs(left, "a", "b"),
    )
    for reader in readers:
        with pytest.raises(UserError, match=message):
            list(reader(path, other))


def test_a_long_line_is_read_and_split_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab . " * 2_000_000)
    with open_decompressed(tmp_path / "x") as file:
        [line] = LineReader(file, "x")
    pieces = ["▁ab", "▁."] * 2_000_000
    began = time.process_time()
    parts = split_long_line(list(range(len(pieces))), pieces, 100)
    assert time.process_time() - began < 20  # quadratic copies took minutes
    assert len(line) == 10_000_000 and sum(map(len, parts)) == len(pieces) and max(map(len, parts)) <= 100


# ------------------------------------------------------------------------------------------------------------ commands
@contextmanager
def started(folder: Path, stdin: Path, stdout: Path, command: str, *arguments: str) -> Iterator[CONTEXT.Process]:
    """A command with these files, pipes or terminals as standard input and output; standard error goes to `err`."""
    streams = [stdin, stdout, folder / "err"]
    process = CONTEXT.Process(
        target=run_in_folder, args=(folder, command_environment(folder), streams, command, *arguments)
    )
    process.start()
    try:
        yield process
    finally:
        process.join(60)
        if process.exitcode is None:
            process.kill()


@pytest.fixture
def pipes(home: Path) -> Iterator[Path]:
    """Named pipes in the folder of the run."""
    names = ("stdin", "stdout", "prefix", "links.jsonl")
    for name in names:
        (home / name).unlink(missing_ok=True)
        os.mkfifo(home / name)
    yield home
    for name in names:
        (home / name).unlink()


def answer(file: int, lines: int) -> bytes:
    """So many lines of what comes next."""
    text = b""
    while text.count(b"\n") < lines:
        assert select.select([file], [], [], 60)[0], text
        part = os.read(file, 100_000)
        assert part, text
        text += part
    return text


LINES = [b"Die Frau liest ein Buch .\n", b"\r\n", b"Der Hund schl\xc3\xa4ft .\r\n", b"zwei\ndrei\n", b"ohne Ende"]


@pytest.mark.parametrize("format", ["text", "jsonl", "links"])
def test_a_program_may_wait_for_each_translation(format: str, pipes: Path) -> None:
    at_once = run_ok("translate", *FAST, f"format={format}", "alignments=at_once", folder=pipes, text=b"".join(LINES))
    settings = (*FAST, f"format={format}", "alignments=one_by_one", "input=-", "output=-")
    with (
        started(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process,
        open(pipes / "stdin", "wb", buffering=0) as text,
        open(pipes / "stdout", "rb", buffering=0) as found,
    ):
        said = b""
        for line in LINES[:-1]:
            text.write(line[:2])
            text.write(line[2:])
            said += answer(found.fileno(), line.count(b"\n") * (2 if format == "links" else 1))
        text.write(LINES[-1])
        text.close()
        said += found.read()
    rounded = [re.sub(r'("(?:ranking_)?score": -\d+\.\d{3})\d*', r"\1", shown) for shown in (said.decode(), at_once)]
    assert process.exitcode == 0 and rounded[0] == rounded[1]
    assert (pipes / "one_by_one").read_bytes() == (pipes / "at_once").read_bytes()


def test_all_streams_of_a_command_may_be_pipes(pipes: Path) -> None:
    """A line, how its translation begins, and its alignment, one after the other."""
    settings = (*FAST, "prefix=prefix", "alignments=links.jsonl")
    with started(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process:
        text, found = os.open(pipes / "stdin", os.O_WRONLY), os.open(pipes / "stdout", os.O_RDONLY)
        os.write(text, b"Der Hund .\n")
        links, begun = os.open(pipes / "links.jsonl", os.O_RDONLY), os.open(pipes / "prefix", os.O_WRONLY)
        for word in ("The", "A"):
            if word == "A":
                os.write(text, b"Der Hund .\n")
            os.write(begun, f"{word}\n".encode())
            assert answer(found, 1).decode().startswith(word)
            assert json.loads(answer(links, 1))["target_words"][0].startswith(word)
        for file in (text, begun, found, links):
            os.close(file)
    assert process.exitcode == 0


def test_scores_come_one_by_one_too(pipes: Path) -> None:
    (pipes / "same").write_bytes(b"The dog .\n" * 2)
    settings = ("checkpoint=runs/mine", "mode=score", "input=-", "target=same", "precision=fp32")
    with (
        started(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process,
        open(pipes / "stdin", "wb", buffering=0) as text,
        open(pipes / "stdout", "rb", buffering=0) as found,
    ):
        scores = []
        for _ in range(2):
            text.write(b"Der Hund .\n")
            scores.append(float(answer(found.fileno(), 1)))
    assert process.exitcode == 0 and scores[0] == scores[1] < 0


def test_lines_typed_at_a_terminal_are_translated_where_the_output_goes_elsewhere(pipes: Path) -> None:
    ours, theirs = pty.openpty()
    with started(pipes, Path(os.ttyname(theirs)), pipes / "stdout", "translate", *FAST) as process:
        found = os.open(pipes / "stdout", os.O_RDONLY)
        for _ in range(2):
            os.write(ours, b"Der Hund .\n")
            answer(found, 1)
        os.write(ours, b"\x04")
        assert os.read(found, 10) == b""
    assert process.exitcode == 0
    for file in (ours, theirs, found):
        os.close(file)


def test_align_reads_and_writes_standard_streams(home: Path, corpus: Path) -> None:
    sources, target = (corpus / "test.de").read_bytes(), corpus / "test.en"
    piped = run_ok("align", "checkpoint=runs/mine", "source=-", f"target={target}", folder=home, text=sources)
    given = run_ok(
        "align", "checkpoint=runs/mine", f"source={corpus}/test.de", f"target={target}", "output=-", folder=home
    )
    assert piped == given and piped.count("\n") == 30
    (home / "gold").write_text("\n" * 30)
    gold = ("gold=-", "output=links")
    assert "aer" in run_ok("align", "checkpoint=runs/mine", *gold, folder=home, text=b"0-0\n" * 30)
    message = run_error("align", "checkpoint=runs/mine", "source=-", "target=-", folder=home, text=b"x\n")
    assert "target=- is the same file as source=-" in message


def test_output_is_appended_where_the_shell_appends(home: Path) -> None:
    (home / "all.txt").write_bytes(b"before\n")
    command = f"{sys.executable} -m nmt.translate {' '.join(FAST)}"
    line = f"cd '{home}' && echo 'Der Hund .' | {command} output=/dev/stdout >> all.txt"
    assert os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", line], command_environment(home)) == 0
    found = (home / "all.txt").read_bytes()
    assert found.startswith(b"before\n") and found.count(b"\n") == 2


# ------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_translated(number: signal.Signals, pipes: Path) -> None:
    lines = "".join(f"{i} Der Hund schläft .\n" for i in range(6000)).encode()
    whole = run_ok("translate", *FAST, folder=pipes, text=lines)
    with (
        started(pipes, pipes / "stdin", pipes / "stdout", "translate", *FAST) as process,
        open(pipes / "stdin", "wb", buffering=0) as text,
        open(pipes / "stdout", "rb", buffering=0) as found,
    ):
        text.write(lines[: 10 * len(lines) // 6000])
        said = answer(found.fileno(), 1)
        feeder = threading.Thread(target=feed, args=(text, lines[10 * len(lines) // 6000 :]))
        feeder.start()
        time.sleep(0.7)
        os.kill(process.pid, number)
        said += found.read()
        process.join(60)
        feeder.join(60)
    assert process.exitcode == 128 + number
    assert whole.encode().startswith(said) and said.endswith(b"\n")
    [message] = re.findall(r"stopped: ([\d,]+) lines? translated; ([\d,]+) lines? read", (pipes / "err").read_text())
    assert int(message[0].replace(",", "")) == said.count(b"\n") < 6000
    assert 0 <= int(message[1].replace(",", "")) <= 6000 - said.count(b"\n")


def feed(file: io.RawIOBase, text: bytes) -> None:
    try:
        while text:
            text = text[file.write(text) :]
    except BrokenPipeError:
        pass


def test_a_signal_while_waiting_for_a_line_loses_nothing(pipes: Path) -> None:
    with started(pipes, pipes / "stdin", pipes / "stdout", "translate", *FAST) as process:
        text, found = os.open(pipes / "stdin", os.O_WRONLY), os.open(pipes / "stdout", os.O_RDONLY)
        os.write(text, b"Der Hund .\nno end")
        answer(found, 1)
        os.kill(process.pid, signal.SIGINT)
        assert os.read(found, 100) == b""
        process.join(60)
    os.close(text)
    os.close(found)
    said = (pipes / "err").read_text()
    assert process.exitcode == 130 and "stopped: 1 line translated; 1 line read but not translated" in said
    assert "Traceback" not in said


# -------------------------------------------------------------------------------------------------------------- locale
def in_ascii(folder: Path, command: str, *arguments: str) -> None:
    """A command that finds streams that are ASCII, as PYTHONIOENCODING=ascii makes them."""
    run = run_program

    def ascii_program(*given: str) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]
        run(*given)

    import conftest

    conftest.program = ascii_program
    run_in_folder(
        folder, command_environment(folder), [Path(os.devnull), folder / "out", folder / "err"], command, *arguments
    )


@pytest.mark.parametrize(
    ("command", "arguments", "code", "shown"),
    [
        ("evaluate", ("checkpoint=runs/mine", "search.beam=1", "search.max_length=9", "pictures=0"), 0, "ä"),
        ("evaluate", ("--help",), 0, "±|ä|a run"),
        ("translate", ("--help",), 0, "schläft"),
        ("train", ("--help",), 0, ""),
        ("align", ("--help",), 0, ""),
        ("translate", ('checkpoint="runs/ü"',), 1, "runs/ü is not a folder"),
        ("align", ("checkpoint=runs/mine", "data.split=valid", "gold=gibt_es_nicht_ä"), 1, "ä is not a file|ä"),
        ("translate", ("checkpoint=runs/mine", "input=umlaut", "format=jsonl", "search.max_length=9"), 0, "schläft"),
    ],
)
def test_nothing_depends_on_the_encoding_of_streams(
    command: str, arguments: tuple[str, ...], code: int, shown: str, home: Path
) -> None:
    (home / "umlaut").write_text("Der Hund schläft .\n", encoding="utf-8")
    process = CONTEXT.Process(target=in_ascii, args=(home, command, *arguments))
    process.start()
    process.join(200)
    out, err = ((home / name).read_bytes().decode() for name in ("out", "err"))
    assert process.exitcode == code and "Traceback" not in err, err
    assert re.search(shown, err if code else out)


def test_nothing_depends_on_the_locale(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, arguments, files and output, where Python takes the locale's encoding for all of them."""
    folder = tmp_path / "größe"
    folder.mkdir()
    for path in corpus.glob("*.??"):
        (folder / path.name).write_bytes(path.read_bytes())
    for key, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}.items():
        monkeypatch.setenv(key, value)
    settings = ('name="größe"', "data=text", 'data.path="../größe"', *TINY_SETTINGS, "train.max_steps=1")
    done = run_in_new_process("train", *settings, folder=folder)
    assert done.returncode == 0, done.stderr.decode()
    assert "größe" in (folder / "runs" / "größe" / "config.yaml").read_text(encoding="utf-8")
    assert "größe" in done.stderr.decode() and (folder / "runs" / "größe" / "train.log").read_text(encoding="utf-8")
    text = "Ein größerer Hund .\n"
    done = run_in_new_process("translate", 'checkpoint="runs/größe"', "format=jsonl", folder=folder, text=text.encode())
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == text.strip()
