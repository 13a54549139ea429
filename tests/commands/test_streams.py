"""Standard streams, pipes, terminals, descriptors and links as inputs and outputs; signals; locales."""

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
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import builders
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
)
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import AlignRun, TranslateRun
from nmt.data.readers import read_jsonl_pairs, read_text_pairs, read_tsv_pairs
from nmt.decoding.line_parts import split_long_line
from nmt.errors import UserError
from nmt.system import lines as lines_module
from nmt.system.lines import LineReader, open_decompressed
from nmt.system.standard_streams import check_file_arguments, find_own_descriptor, get_file_identity, is_regular_file
from nmt.system.text_io import TextInput, open_output, read_chunks

FAST = ("checkpoint=runs/mine", "search.beam=2", "search.max_length=20", "precision=fp32")


# ------------------------------------------------------------------------------------------------------------- writing
@contextmanager
def as_descriptor(number: int, path: Path, flags: int) -> Iterator[None]:
    """Open a file as descriptor `number`, as the shell does: `> path` with O_TRUNC, `>> path` with O_APPEND."""
    saved = os.dup(number) if number < 3 else None
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        if saved is None:
            os.close(number)
        else:
            os.dup2(saved, number)
            os.close(saved)


def write_to(path: object, text: bytes) -> None:
    with open_output(str(path)) as file:
        file.write(text)


DESCRIPTORS = ["/dev/stdout", "/dev/stderr", "/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}"]


@pytest.mark.parametrize("name", [*DESCRIPTORS, "/proc/{pid}/fd/{}", "link"])
@pytest.mark.parametrize("flags", [os.O_APPEND, os.O_TRUNC])
def test_output_to_descriptor_keeps_its_open_mode(
    name: str, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115  pytest replaces sys.stdout
    number = {"/dev/stdout": 1, "/dev/stderr": 2}.get(name, 77)
    path = name.format(number, pid=os.getpid())
    if name == "link":
        (tmp_path / "folder").symlink_to("/dev/fd")
        (tmp_path / "link").symlink_to(f"folder/{number}")
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


def test_output_to_descriptor_of_other_process_appends(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    file.write_bytes(b"before\n")
    with open(file, "ab") as open_file:
        path = f"/proc/{os.getpid()}/fd/{open_file.fileno()}"
        child = builders.CONTEXT.Process(target=write_to, args=(path, b"other\n"))
        child.start()
        child.join()
        assert child.exitcode == 0
    assert file.read_bytes() == b"before\nother\n"


@pytest.mark.parametrize("number", [78, 79])
def test_output_rejects_closed_descriptor(number: int, tmp_path: Path) -> None:
    """A descriptor that this process opened itself, which is not inheritable, counts as closed."""
    own = os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT)
    if number == 79:
        os.dup2(own, number, inheritable=False)
    with pytest.raises(UserError, match=f"/dev/fd/{number}: descriptor {number} is closed; give a file"):
        write_to(f"/dev/fd/{number}", b"x")
    os.close(own)


@pytest.mark.parametrize("target", ["target", "other/target", "absolute", "second"])
@pytest.mark.parametrize("exists", [True, False])
def test_output_through_symlink_replaces_target(target: str, exists: bool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "second").symlink_to("other/third")
    link, link_text = tmp_path / "link", str(tmp_path / "other" / "absolute") if target == "absolute" else target
    link.symlink_to(link_text)
    real = Path(os.path.realpath(link))
    if exists:
        real.write_bytes(b"old")
    old_inode = real.stat().st_ino if exists else None
    with open_output(str(link)) as stream:
        stream.write(b"new")
        stream.flush()
        assert not exists or real.read_bytes() == b"old"
        assert exists or not real.exists()
    assert os.readlink(link) == link_text and real.read_bytes() == b"new" and real.stat().st_ino != old_inode
    assert not [path for path in tmp_path.rglob(".*")]


def test_output_does_not_change_open_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with open(file, "rb") as open_file:
        write_to(file, b"new")
        assert open_file.read() == b"old" and file.read_bytes() == b"new"


def test_output_to_hard_link_updates_all_names(tmp_path: Path) -> None:
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


def test_output_overwrites_in_place_if_rename_is_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is read-only (simulated, because root can write everywhere), or the file is a mount point."""
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


def test_output_keeps_permissions_and_rejects_protected_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o640)
    with open_output(str(file)) as stream:
        [new] = tmp_path.glob(".file.*")
        assert stat.S_IMODE(new.stat().st_mode) == 0o640
        stream.write(b"new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)  # root can write every file
    with pytest.raises(UserError, match="file cannot be written: Permission denied"):
        write_to(file, b"x")
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["loop", "folder", "file/x", "missing/x"])
def test_output_error_names_the_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{tmp_path}/.* cannot be written: "):
        write_to(tmp_path / name, b"x")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
def test_output_to_named_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / name).read_bytes()))
    reader.start()
    write_to(tmp_path / name, b"text")
    reader.join(20)
    [text] = received
    assert (gzip.decompress(text) if name.endswith("gz") else text) == b"text"
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)


# ------------------------------------------------------------------------------------------------------------ settings
def make_translate_run(**settings: str) -> TranslateRun:
    """Return the settings of `nmt.translate` after its checks of files."""
    command = TranslateRun("runs/mine", **settings)
    check_file_arguments(command, ("input", "target", "prefix"), ("output", "alignments"))
    return command


def make_align_run(**settings: str) -> AlignRun:
    """Return the settings of `nmt.align` after its checks of files."""
    command = AlignRun("runs/mine", **settings)
    check_file_arguments(command, ("source", "target", "gold"), ("output",))
    return command


def test_dash_means_standard_stream(tmp_path: Path) -> None:
    command = make_translate_run()
    assert (command.input, command.output) == ("/dev/stdin", "/dev/stdout")
    command = make_translate_run(input="in", prefix="-", output="out", alignments="-")
    assert (command.prefix, command.alignments) == ("/dev/stdin", "/dev/stdout")
    command = make_translate_run(mode="score", input="in", target="-")
    assert command.target == "/dev/stdin"
    assert make_align_run(source="-", target="in").source == "/dev/stdin"
    assert make_align_run(target="-", source="in").target == "/dev/stdin"
    assert make_align_run(gold="-").gold == "/dev/stdin"


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
def test_two_settings_cannot_share_a_stream(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("hard").hardlink_to("file")
    Path("soft").symlink_to("file")
    with pytest.raises(UserError, match="is the same file as .*; give another one"):
        make_translate_run(**settings)


def test_shared_file_error_names_both_settings() -> None:
    for settings, message in (
        ({"input": "a", "output": "./a"}, "output=./a is the same file as input=a"),
        ({"output": "a", "alignments": "a"}, "alignments=a is the same file as output=a"),
    ):
        with pytest.raises(UserError, match=message):
            make_translate_run(**settings)
    with pytest.raises(UserError, match="output=b is the same file as target=b"):
        make_align_run(source="a", target="b", output="b")


def test_input_cannot_be_the_file_behind_standard_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x\n")
    with as_descriptor(1, tmp_path / "file", os.O_APPEND):
        assert get_file_identity("/dev/stdout") == get_file_identity(str(tmp_path / "file"))
        for settings in ({"input": str(tmp_path / "file")}, {"alignments": str(tmp_path / "file")}):
            with pytest.raises(UserError, match="is the same file as"):
                make_translate_run(**settings)
    make_translate_run(output="/dev/null", alignments="/dev/null")


# ------------------------------------------------------------------------------------------------------------- reading
class ScriptedReads(io.RawIOBase):
    """A file whose content arrives in the given parts."""

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
def test_line_reader_is_independent_of_read_sizes(parts: list[bytes]) -> None:
    text = b"".join(parts)
    reader = LineReader(io.BufferedReader(ScriptedReads(parts)), "x")
    whole = list(LineReader(io.BufferedReader(io.BytesIO(text)), "x"))
    assert list(reader) == whole and reader.count == len(whole)
    *lines, last = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert whole == [line.removesuffix(b"\r") for line in lines] + ([last] if last else [])


def test_read_chunks_yields_lines_received_so_far() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as file, open(write_end, "wb", buffering=0) as pipe:
        reader = LineReader(file, "pipe")
        chunks = read_chunks(((line.decode(),) for line in reader), reader.has_more)
        for text, expected in (
            (b"one\n", ["one"]),
            (b"two\r\nthree\nfo", ["two", "three"]),
            (b"ur\n\n", ["four", ""]),
        ):
            pipe.write(text)
            assert next(chunks) == [(line,) for line in expected]
        pipe.write(b"last")
        assert reader.count == 5
        pipe.close()
        assert list(chunks) == [[("last",)]]


def test_read_chunks_sizes_for_fast_and_slow_pipes() -> None:
    read_end, write_end = os.pipe()
    text = b"".join(b"%d\n" % number for number in range(20_000))

    def feed() -> None:
        with open(write_end, "wb") as pipe:
            pipe.write(text)
            for number in range(100):
                time.sleep(0.01)
                pipe.write(b"slow %d\n" % number)
                pipe.flush()

    threading.Thread(target=feed).start()
    with open(read_end, "rb") as file:
        reader = LineReader(file, "pipe")
        chunks = list(read_chunks(((line.decode(),) for line in reader), reader.has_more))
    assert [len(chunk) for chunk in chunks[:4]] == [4096] * 4
    assert len(chunks) > 5 and sum(map(len, chunks)) == 20_100
    assert b"".join(row.encode() + b"\n" for [row] in itertools.chain(*chunks)).startswith(text)


def test_read_chunks_limits_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.system.text_io.MAX_CHUNK_CHARACTERS", 10)
    rows = [("a" * 6,), ("b" * 6,), ("c" * 20,), ("d",)]
    assert [len(chunk) for chunk in read_chunks(rows, lambda since: True)] == [2, 1, 1]


@pytest.mark.parametrize("name", ["x", "x.gz", "x.zst", "/dev/zero"])
def test_readers_reject_endless_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100_000)
    path = tmp_path / name
    content = b"a line\n" + b"x" * 100_000 + b"\n"

    def write_compressed(text: bytes) -> None:
        if path.suffix == ".gz":
            text = gzip.compress(text)
        elif path.suffix == ".zst":
            text = pa.compress(text, "zstd", asbytes=True)
        path.write_bytes(text)

    if name != "/dev/zero":
        write_compressed(content)
        assert [len(line) for line in TextInput(str(path))] == [6, 100_000]
        write_compressed(content[:-1] + b"x" * 10**7)
    other = tmp_path / f"other{path.suffix}"
    other.symlink_to(path)
    number = 1 if name == "/dev/zero" else 2
    message = re.escape(f"{path}:{number}: the line has more than 100,000 bytes; write one sentence per line")
    with pytest.raises(UserError, match=message):
        list(TextInput(str(path)))
    readers = (
        read_text_pairs,
        lambda source, _: read_tsv_pairs(source, "1", "2"),
        lambda source, _: read_jsonl_pairs(source, "a", "b"),
    )
    for reader in readers:
        with pytest.raises(UserError, match=message):
            list(reader(path, other))


def test_long_line_is_read_and_split_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab . " * 2_000_000)
    with open_decompressed(tmp_path / "x") as file:
        [line] = LineReader(file, "x")
    pieces = ["▁ab", "▁."] * 2_000_000
    start = time.process_time()
    parts = split_long_line(list(range(len(pieces))), pieces, 100)
    assert time.process_time() - start < 20  # quadratic copying took minutes
    assert len(line) == 10_000_000 and sum(map(len, parts)) == len(pieces) and max(map(len, parts)) <= 100


# ------------------------------------------------------------------------------------------------------------ commands
def run_interruptible(*arguments: Any) -> None:
    """Run a command with the default action of SIGINT, which is ignored where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_in_folder(*arguments)


@contextmanager
def start_command(folder: Path, stdin: Path, stdout: Path, command: str, *arguments: str) -> Iterator[CONTEXT.Process]:
    """Start a command with files, pipes or terminals as standard input and output. Standard error goes to `err`."""
    streams = [stdin, stdout, folder / "err"]
    process = CONTEXT.Process(
        target=run_interruptible, args=(folder, command_environment(folder), streams, command, *arguments)
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
    """Create named pipes in the `home` folder, and return the folder."""
    names = ("stdin", "stdout", "prefix", "links.jsonl")
    for name in names:
        (home / name).unlink(missing_ok=True)
        os.mkfifo(home / name)
    yield home
    for name in names:
        (home / name).unlink()


def read_lines(file: int, lines: int) -> bytes:
    """Read until there are `lines` lines."""
    text = b""
    while text.count(b"\n") < lines:
        assert select.select([file], [], [], 60)[0], text
        part = os.read(file, 100_000)
        assert part, text
        text += part
    return text


LINES = [b"Die Frau liest ein Buch .\n", b"\r\n", b"Der Hund schl\xc3\xa4ft .\r\n", b"zwei\ndrei\n", b"ohne Ende"]


@pytest.mark.parametrize("format", ["text", "jsonl", "links"])
def test_translate_answers_each_line_over_pipes(format: str, pipes: Path) -> None:
    expected = run_ok("translate", *FAST, f"format={format}", "alignments=at_once", folder=pipes, text=b"".join(LINES))
    settings = (*FAST, f"format={format}", "alignments=one_by_one", "input=-", "output=-")
    with (
        start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process,
        open(pipes / "stdin", "wb", buffering=0) as stdin,
        open(pipes / "stdout", "rb", buffering=0) as stdout,
    ):
        output = b""
        for line in LINES[:-1]:
            stdin.write(line[:2])
            stdin.write(line[2:])
            output += read_lines(stdout.fileno(), line.count(b"\n") * (2 if format == "links" else 1))
        stdin.write(LINES[-1])
        stdin.close()
        output += stdout.read()

    def round_scores(text: str) -> str:
        return re.sub(r'("(?:score|ranking_score|confidence)": -?\d+\.\d{3})\d*', r"\1", text)

    assert process.exitcode == 0 and round_scores(output.decode()) == round_scores(expected)
    assert (pipes / "one_by_one").read_bytes() == (pipes / "at_once").read_bytes()


def test_translate_with_all_files_as_pipes(pipes: Path) -> None:
    settings = (*FAST, "prefix=prefix", "alignments=links.jsonl")
    with start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process:
        stdin, stdout = os.open(pipes / "stdin", os.O_WRONLY), os.open(pipes / "stdout", os.O_RDONLY)
        os.write(stdin, b"Der Hund .\n")
        alignments, prefixes = os.open(pipes / "links.jsonl", os.O_RDONLY), os.open(pipes / "prefix", os.O_WRONLY)
        for word in ("The", "A"):
            if word == "A":
                os.write(stdin, b"Der Hund .\n")
            os.write(prefixes, f"{word}\n".encode())
            assert read_lines(stdout, 1).decode().startswith(word)
            assert json.loads(read_lines(alignments, 1))["target_words"][0].startswith(word)
        for file in (stdin, prefixes, stdout, alignments):
            os.close(file)
    assert process.exitcode == 0


def test_scoring_answers_each_line_over_pipes(pipes: Path) -> None:
    (pipes / "targets").write_bytes(b"The dog .\n" * 2)
    settings = ("checkpoint=runs/mine", "mode=score", "input=-", "target=targets", "precision=fp32")
    with (
        start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *settings) as process,
        open(pipes / "stdin", "wb", buffering=0) as stdin,
        open(pipes / "stdout", "rb", buffering=0) as stdout,
    ):
        scores = []
        for _ in range(2):
            stdin.write(b"Der Hund .\n")
            scores.append(float(read_lines(stdout.fileno(), 1)))
    assert process.exitcode == 0 and scores[0] == scores[1] < 0


def test_translate_reads_terminal_and_writes_pipe(pipes: Path) -> None:
    terminal, child_end = pty.openpty()
    with start_command(pipes, Path(os.ttyname(child_end)), pipes / "stdout", "translate", *FAST) as process:
        stdout = os.open(pipes / "stdout", os.O_RDONLY)
        for _ in range(2):
            os.write(terminal, b"Der Hund .\n")
            read_lines(stdout, 1)
        os.write(terminal, b"\x04")
        assert os.read(stdout, 10) == b""
    assert process.exitcode == 0
    for file in (terminal, child_end, stdout):
        os.close(file)


def test_align_reads_and_writes_standard_streams(home: Path, corpus: Path) -> None:
    source, target = corpus / "test.de", f"target={corpus / 'test.en'}"
    piped = run_ok("align", "checkpoint=runs/mine", "source=-", target, folder=home, text=source.read_bytes())
    from_files = run_ok("align", "checkpoint=runs/mine", f"source={source}", target, "output=-", folder=home)
    assert piped == from_files and piped.count("\n") == 30
    gold = ("gold=-", "output=links")
    assert "aer" in run_ok("align", "checkpoint=runs/mine", *gold, folder=home, text=b"0-0\n" * 30)
    message = run_error("align", "checkpoint=runs/mine", "source=-", "target=-", folder=home, text=b"x\n")
    assert "target=- is the same file as source=-" in message


def test_translate_output_appends_after_shell_redirect(home: Path) -> None:
    (home / "all.txt").write_bytes(b"before\n")
    command = f"'{sys.executable}' -m nmt.translate {' '.join(FAST)}"
    script = f"cd '{home}' && echo 'Der Hund .' | {command} output=/dev/stdout >> all.txt"
    subprocess.run(["sh", "-c", script], env=command_environment(home), check=True, timeout=120)
    content = (home / "all.txt").read_bytes()
    assert content.startswith(b"before\n") and content.count(b"\n") == 2


# ------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_keeps_finished_translations(number: signal.Signals, pipes: Path) -> None:
    text = "".join(f"{i} Der Hund schläft .\n" for i in range(6000)).encode()
    expected = run_ok("translate", *FAST, folder=pipes, text=text)
    with (
        start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *FAST) as process,
        open(pipes / "stdin", "wb", buffering=0) as stdin,
        open(pipes / "stdout", "rb", buffering=0) as stdout,
    ):
        first_part = 10 * len(text) // 6000
        stdin.write(text[:first_part])
        output = read_lines(stdout.fileno(), 1)
        feeder = threading.Thread(target=feed, args=(stdin, text[first_part:]))
        feeder.start()
        time.sleep(0.7)
        os.kill(process.pid, number)
        output += stdout.read()
        process.join(60)
        feeder.join(60)
    assert process.exitcode == 128 + number
    assert expected.encode().startswith(output) and output.endswith(b"\n")
    [counts] = re.findall(r"stopped: ([\d,]+) lines? translated; ([\d,]+) lines? read", (pipes / "err").read_text())
    translated, untranslated = (int(count.replace(",", "")) for count in counts)
    assert translated == output.count(b"\n") < 6000
    assert 0 <= untranslated <= 6000 - output.count(b"\n")


def feed(file: io.RawIOBase, text: bytes) -> None:
    try:
        while text:
            text = text[file.write(text) :]
    except BrokenPipeError:
        pass


def test_signal_while_waiting_for_input_loses_nothing(pipes: Path) -> None:
    with start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *FAST) as process:
        stdin, stdout = os.open(pipes / "stdin", os.O_WRONLY), os.open(pipes / "stdout", os.O_RDONLY)
        os.write(stdin, b"Der Hund .\nno end")
        read_lines(stdout, 1)
        os.kill(process.pid, signal.SIGINT)
        assert os.read(stdout, 100) == b""
        process.join(60)
    os.close(stdin)
    os.close(stdout)
    errors = (pipes / "err").read_text()
    assert process.exitcode == 130 and "stopped: 1 line translated; 1 line read but not translated" in errors
    assert "Traceback" not in errors


# -------------------------------------------------------------------------------------------------------------- locale
def run_with_ascii_streams(folder: Path, command: str, *arguments: str) -> None:
    """Run a command with ASCII as the encoding of its standard streams, as with PYTHONIOENCODING=ascii."""
    run_program = builders.run_program

    def set_encoding_and_run(*arguments: str) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]
        run_program(*arguments)

    builders.run_program = set_encoding_and_run  # called by run_in_folder, in this process alone
    streams = [Path(os.devnull), folder / "out", folder / "err"]
    run_in_folder(folder, command_environment(folder), streams, command, *arguments)


@pytest.mark.parametrize(
    ("command", "arguments", "code", "pattern"),
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
def test_commands_are_independent_of_stream_encoding(
    command: str, arguments: tuple[str, ...], code: int, pattern: str, home: Path
) -> None:
    (home / "umlaut").write_text("Der Hund schläft .\n", encoding="utf-8")
    process = CONTEXT.Process(target=run_with_ascii_streams, args=(home, command, *arguments))
    process.start()
    process.join(200)
    out, err = ((home / name).read_bytes().decode() for name in ("out", "err"))
    assert process.exitcode == code and "Traceback" not in err, err
    assert re.search(pattern, err if code else out)


def test_commands_are_independent_of_locale(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, arguments, files and output are UTF-8 even where Python would use the locale's encoding."""
    folder = tmp_path / "größe"
    folder.mkdir()
    for path in small_corpus.glob("*.??"):
        (folder / path.name).write_bytes(path.read_bytes())
    for key, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}.items():
        monkeypatch.setenv(key, value)
    settings = ('name="größe"', "data=text", 'data.path="../größe"', *TINY_SETTINGS, "train.max_steps=1")
    done = run_in_new_process("train", *settings, folder=folder)
    assert done.returncode == 0, done.stderr.decode()
    assert "größe" in (folder / "runs" / "größe" / "config.yaml").read_text(encoding="utf-8")
    assert "größe" in done.stderr.decode() and (folder / "runs" / "größe" / "train.log").read_text(encoding="utf-8")
    text = "Ein größerer Hund .\n"
    translate = ('checkpoint="runs/größe"', "format=jsonl", "search.max_length=9")
    done = run_in_new_process("translate", *translate, folder=folder, text=text.encode())
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == text.strip()
