"""Commands on systems that lack what only Linux has, simulated in a process from which it is taken away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, command_environment

from nmt.config import DataConfig
from nmt.data.cache import cache_folder
from nmt.errors import UserError

# Take from Python what Windows does not have, after the libraries have been imported, and before nmt is. Files that are
# open can be neither renamed nor removed, and a name that exists can be replaced only by `replace`.
WINDOWS = """
import asyncio, builtins, ctypes, os, select, signal, sys, types
import filelock, hydra, pyarrow.parquet, sacrebleu, sentencepiece, torch, tqdm, uvicorn
import torch._dynamo, torch.utils.data  # noqa

def is_open(path):
    real = os.path.realpath(path)
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:  # a file that is mapped into memory counts too
        files += [line.split(maxsplit=5)[5].rstrip("\\n") for line in maps if "/" in line]
    return any(file == real or file.startswith(real + os.sep) for file in files)

def refuse_open_files(function, replaces):
    def checked(path, *others, **options):
        if not options and is_open(path):
            raise PermissionError(13, "The process cannot access the file because it is in use", str(path))
        if others and not replaces and os.path.lexists(others[0]):
            raise FileExistsError(17, "Cannot create a file when that file already exists", str(others[0]))
        return function(path, *others, **options)
    return checked

for name in ("rename", "replace", "unlink", "remove"):
    setattr(os, name, refuse_open_files(getattr(os, name), name == "replace"))

real_open = os.open
def open_file(path, *arguments, **options):
    if os.path.isdir(path) and not sys._getframe(1).f_code.co_filename.endswith("shutil.py"):
        raise PermissionError(13, "Permission denied", str(path))
    return real_open(path, *arguments, **options)
os.open = open_file

def wait_for_sockets(*arguments):
    raise OSError(10038, "An operation was attempted on something that is not a socket")
select.select = wait_for_sockets

class NoSuchLibrary:
    def __new__(cls, name, *arguments):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        raise FileNotFoundError(f"Could not find module '{name}' (or one of its dependencies)")
ctypes.CDLL = NoSuchLibrary

for name in ("chown", "fork", "sched_getaffinity", "getuid", "mkfifo"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGALRM", "alarm"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
sys.platform = "win32"
asyncio.ProactorEventLoop = asyncio.SelectorEventLoop  # what uvicorn takes there

import importlib
def run(command, *arguments):
    sys.argv = [command, *arguments]
    getattr(importlib.import_module(f"nmt.{command}"), command)()

import _thread, http.client, socket, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if the tests were started in the background

def run_server(command, path, *arguments):
    # request a path of the server once it listens, and end it as Ctrl-C does
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

    def request():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:  # not urllib: from Python 3.12 on it reads the certificates of Windows even for http
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("GET", path)
                print(connection.getresponse().read().decode(), file=sys.stderr)
                break
            except OSError:
                time.sleep(0.1)
        _thread.interrupt_main()

    threading.Thread(target=request).start()
    run(command, *arguments, f"port={port}")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are looked up in /proc")
def test_commands_work_without_what_windows_lacks(small_corpus: Path, tmp_path: Path) -> None:
    settings = ["name=mine", "data=text", f"data.path={small_corpus}", *TINY_SETTINGS, "train.validate_every=2"]
    program = f"""
settings = {settings}
run("train", *settings, "train.max_steps=4")
run("train", *settings, "train.max_steps=6", "resume=auto", "train.keep=1")
run("evaluate", "checkpoint=runs/mine", "search.max_length=5")
run("evaluate", "checkpoint=runs/mine", "search.max_length=5")
run("translate", "checkpoint=runs/mine", "search.max_length=5", "output=out.txt")
run("translate", "checkpoint=runs/mine", "search.max_length=5", "input=out.txt", "output=out.txt.gz")
run("align", "source={small_corpus}/train.de", "target={small_corpus}/train.en", "output=links.pharaoh")
run("export", "checkpoint=runs/mine", "output=exported")
run("prepare", "input={small_corpus}", "output=prepared", "source=de", "target=en", "valid_size=4", "test_size=4")
run_server("watch", "/runs", "checkpoint=runs")
run_server("serve", "/health", "checkpoint=runs/mine")
"""
    text = "Der Hund schläft .\r\nDie Katze .\n".encode() * 3
    command, environment = [sys.executable, "-c", WINDOWS + program], command_environment(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=environment, input=text, capture_output=True, timeout=300)
    errors = done.stderr.decode()
    assert done.returncode == 0, errors
    assert '"name": "mine"' in errors and '{"status":"ok"}' in errors and errors.count("stopped") == 2
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 6
    assert (tmp_path / "links.pharaoh").read_bytes().count(b"\n") == 200
    assert (tmp_path / "exported" / "model.safetensors").is_file() and (tmp_path / "out.txt.gz").is_file()
    assert (tmp_path / "prepared" / "train.de").is_file()
    assert not [path for path in tmp_path.rglob(".*") if path.name.endswith((".new", ".old"))]


def test_cache_that_cannot_be_created_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(UserError, match="the cache /proc/none/nmt cannot be created .*; set data.cache=FOLDER"):
        cache_folder(DataConfig())
