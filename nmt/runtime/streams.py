"""Standard streams and other open descriptors: which paths lead to them, and UTF-8 whatever the locale says."""

import os
import re
import stat
import sys
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

from nmt.errors import UserError

STDIN_PATH, STDOUT_PATH = "/dev/stdin", "/dev/stdout"
STANDARD_DESCRIPTORS = {STDIN_PATH: 0, STDOUT_PATH: 1, "/dev/stderr": 2}
CLOSED_STREAM_MESSAGES = {
    0: "standard input is closed; write input=FILE",
    1: "standard output is closed; write output=FILE",
}
MAX_LINKS = 40  # symbolic links that are followed, as many as Linux follows
PROC_FD = re.compile(r"/proc/(\d+)/(?:task/\d+/)?fd")


def resolve_descriptor(path: str) -> tuple[int, int] | None:
    """The process and the descriptor that a path leads to, through symbolic links, as `/dev/stdout`, `/dev/fd/3` and
    `/proc/self/fd/3` do; None for any other path.

    Opening such a path again would begin at the start of the file and truncate it. Resolving its links would lead to
    the file behind the descriptor, and lose how it was opened (`>>`).
    """
    for _ in range(MAX_LINKS):
        if path in STANDARD_DESCRIPTORS:
            return os.getpid(), STANDARD_DESCRIPTORS[path]
        folder, name = os.path.split(os.path.abspath(path))
        folder = os.path.realpath(folder)
        if name.isdecimal() and folder == "/dev/fd":  # not a link into /proc on every system
            return os.getpid(), int(name)
        if name.isdecimal() and (process := PROC_FD.fullmatch(folder)):
            return int(process[1]), int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def find_own_descriptor(path: str) -> int | None:
    """The descriptor of this process that a path leads to."""
    found = resolve_descriptor(path)
    return found[1] if found and found[0] == os.getpid() else None


def open_descriptor(path: str, number: int, mode: str) -> AbstractContextManager[BinaryIO]:
    """A descriptor that this process was started with, to which `path` leads, for reading ("rb") or writing ("wb"). It
    keeps its offset, and appends where it was opened so.

    Raises:
        UserError: it is closed.
    """
    if number in CLOSED_STREAM_MESSAGES:
        stream, at_start = ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__))[number]
        if at_start is None:
            raise UserError(CLOSED_STREAM_MESSAGES[number])
        return nullcontext(stream.buffer)
    try:
        inherited = os.get_inheritable(number)  # Python's own files are not, whose numbers may be those of closed ones
    except OSError:
        inherited = False
    if not inherited:
        raise UserError(f"{path}: descriptor {number} is closed; give a file")
    return open(os.dup(number), mode)  # type: ignore[return-value]


def is_stdin(path: str) -> bool:
    return find_own_descriptor(path) == STANDARD_DESCRIPTORS[STDIN_PATH]


def is_stdout(path: str) -> bool:
    return find_own_descriptor(path) == STANDARD_DESCRIPTORS[STDOUT_PATH]


def is_regular_file(path: str) -> bool:
    """Whether a path leads to a regular file, or to none yet, by its name and not by an open descriptor."""
    if resolve_descriptor(path) is not None:
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def get_file_identity(path: str) -> Hashable:
    """What is equal for two paths of the same regular file, whether it exists or not; None for a pipe or a device."""
    number = find_own_descriptor(path)
    try:
        status = os.stat(path if number is None else number)
    except OSError:
        return os.path.realpath(path) if number is None else None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def check_file_arguments(command: Any, read: Sequence[str], written: Sequence[str]) -> None:
    """Replace `-` in these keys by the path of standard input or output, and refuse what cannot be: a stream that is
    read by two keys, a file that is written by two or is read as well, two outputs mixed in standard output."""
    taken: dict[Hashable, str] = {}
    for key in (*read, *written):
        given = getattr(command, key)
        if given == "-":
            setattr(command, key, STDIN_PATH if key in read else STDOUT_PATH)
        if not (path := getattr(command, key)):
            continue
        number, file = find_own_descriptor(path), get_file_identity(path)
        stream = number if key in read or number == 1 else None  # other pipes and devices may get several outputs
        for place in (stream, file):
            other = taken.get(place)
            if place is not None and other and (place == stream or key in written):
                raise UserError(f"{key}={given} is the same file as {other}; give another one")
        taken |= {place: f"{key}={given}" for place in (stream, file) if place is not None}


def use_utf8() -> None:
    """Make all input and output of this program UTF-8.

    The encoding of file names and arguments is fixed when Python starts. Where the locale has another one, the program
    is started again in Python's UTF-8 mode, which the processes that it starts inherit.
    """
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, os.environ | {"PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
