"""Files, standard streams, pipes and terminals as inputs and outputs; signals; locales."""

import gzip
import io
import json
import os
import re
import select
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders import CONTEXT, command_environment, run_error, run_in_folder, run_in_new_process, run_ok
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import TranslateRun
from nmt.data.readers import read_tsv_pairs
from nmt.errors import UserError
from nmt.system import text as text_module
from nmt.system.text import LineReader, TextInput, open_output, read_chunks, resolve_standard_streams

FAST = ("checkpoint=runs/mine", "search.beam=2", "search.max_length=20", "precision=fp32")


# ------------------------------------------------------------------------------------------------------------- writing
def write_to(path: object, text: bytes) -> None:
    with open_output(str(path)) as file:
        file.write(text)


def test_output_is_replaced_when_complete_through_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to("file")
    with open(file, "rb") as open_file, open_output(str(link)) as stream:
        stream.write(b"new")
        stream.flush()
        assert file.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError), open_output(str(file)) as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert file.read_bytes() == b"new" and open_file.closed
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert {*tmp_path.iterdir()} == {file, link}


@pytest.mark.parametrize("name", ["folder", "file/x", "missing/x"])
def test_output_error_names_the_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{tmp_path}/{name} cannot be written: "):
        write_to(tmp_path / name, b"x")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
def test_output_to_named_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with ThreadPoolExecutor() as pool:
        received = pool.submit((tmp_path / name).read_bytes)
        write_to(tmp_path / name, b"text")
        text = received.result(20)
    assert (gzip.decompress(text) if name.endswith("gz") else text) == b"text"
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)


def test_output_to_open_file_is_appended(tmp_path: Path) -> None:
    with open(tmp_path / "all.txt", "wb", buffering=0) as file:
        file.write(b"first\n")
        write_to(f"/dev/fd/{file.fileno()}", b"second\n")
    assert (tmp_path / "all.txt").read_bytes() == b"first\nsecond\n"


# ------------------------------------------------------------------------------------------------------------ settings
def test_dash_means_standard_stream() -> None:
    keys = ("input", "target", "prefix"), ("output", "alignments")
    command = TranslateRun("runs/mine", alignments="links")
    resolve_standard_streams(command, *keys)
    assert (command.input, command.output, command.alignments) == ("/dev/stdin", "/dev/stdout", "links")
    for first, second in (("input=-", "prefix=/dev/stdin"), ("output=-", "alignments=-"), ("input=a", "output=./a")):
        values = dict(setting.split("=") for setting in (first, second))
        with pytest.raises(UserError, match=f"{second} is the same file as {first}; give another one"):
            resolve_standard_streams(TranslateRun("runs/mine", **values), *keys)


# ------------------------------------------------------------------------------------------------------------- reading
class ScriptedReads(io.RawIOBase):
    """A file whose content arrives in the given parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = [part for part in parts if part]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self.parts.pop(0) if self.parts else b""
        buffer[: len(part)] = part
        return len(part)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xef", b"\xbb\xbf", b" "])))
def test_line_reader_is_independent_of_read_sizes(parts: list[bytes]) -> None:
    text = b"".join(parts)
    reader = LineReader(io.BufferedReader(ScriptedReads(parts)), "x")
    whole = list(LineReader(io.BufferedReader(io.BytesIO(text)), "x"))
    assert list(reader) == whole
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
        pipe.close()
        assert list(chunks) == [[("last",)]]


@pytest.mark.parametrize("name", ["x", "x.gz", "x.zst"])
def test_readers_reject_endless_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "MAX_LINE_BYTES", 100_000)
    path = tmp_path / name
    compressions = {".gz": gzip.compress, ".zst": lambda text: pa.compress(text, "zstd", asbytes=True)}
    compress = compressions.get(path.suffix, bytes)
    path.write_bytes(compress(b"a line\n" + b"x" * 100_000 + b"\n"))
    assert [len(line) for line in TextInput(str(path))] == [6, 100_000]
    path.write_bytes(compress(b"a line\n" + b"x" * 10**7))
    message = re.escape(f"{path}:2: the line has more than 100,000 bytes; write one sentence per line")
    with pytest.raises(UserError, match=message):
        list(TextInput(str(path)))
    with pytest.raises(UserError, match=message):
        list(read_tsv_pairs(path, "1", "2"))


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
    for name in ("stdin", "stdout"):
        os.mkfifo(home / name)
    yield home
    for name in ("stdin", "stdout"):
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


@pytest.mark.parametrize("format", ["text", "links"])
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
    assert process.exitcode == 0 and output.decode() == expected
    assert (pipes / "one_by_one").read_bytes() == (pipes / "at_once").read_bytes()


def test_align_reads_and_writes_standard_streams(home: Path, corpus: Path) -> None:
    source, target = corpus / "test.de", f"target={corpus / 'test.en'}"
    piped = run_ok("align", "checkpoint=runs/mine", "source=-", target, folder=home, text=source.read_bytes())
    from_files = run_ok("align", "checkpoint=runs/mine", f"source={source}", target, "output=-", folder=home)
    assert piped == from_files and piped.count("\n") == 30
    gold = ("gold=-", "output=links")
    assert "aer" in run_ok("align", "checkpoint=runs/mine", *gold, folder=home, text=b"0-0\n" * 30)
    message = run_error("align", "checkpoint=runs/mine", "source=-", "target=-", folder=home, text=b"x\n")
    assert "target=- is the same file as source=-; give another one" in message


# ------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_keeps_finished_translations(number: signal.Signals, pipes: Path) -> None:
    with (
        start_command(pipes, pipes / "stdin", pipes / "stdout", "translate", *FAST) as process,
        open(pipes / "stdin", "wb", buffering=0) as stdin,
        open(pipes / "stdout", "rb", buffering=0) as stdout,
    ):
        stdin.write(b"Der Hund .\nDie Frau .\nDas")
        assert read_lines(stdout.fileno(), 2).count(b"\n") == 2
        os.kill(process.pid, number)
        assert stdout.read() == b""
        process.join(60)
    assert process.exitcode == 128 + number
    assert ("interrupted" in (pipes / "err").read_text()) == (number == signal.SIGINT)


# -------------------------------------------------------------------------------------------------------------- locale
def test_commands_are_independent_of_locale(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and streams are UTF-8 even where Python would use another encoding."""
    for key, value in {"LC_ALL": "C", "PYTHONIOENCODING": "cp1252"}.items():
        monkeypatch.setenv(key, value)
    text = "Ein größerer Hund .\n"
    done = run_in_new_process("translate", *FAST, "format=jsonl", folder=home, text=text.encode())
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == text.strip()
    done = run_in_new_process("translate", 'checkpoint="runs/ü"', folder=home)
    assert done.returncode == 1 and "runs/ü is not a folder" in done.stderr.decode()
