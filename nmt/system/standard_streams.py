"""Standard streams and open file descriptors, the paths that refer to them, and UTF-8 regardless of the locale."""

import errno
import os
import re
import stat
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

from nmt.errors import UserError

STDIN_PATH = "/dev/stdin"
STDOUT_PATH = "/dev/stdout"
STANDARD_DESCRIPTORS = {STDIN_PATH: 0, STDOUT_PATH: 1, "/dev/stderr": 2}
CLOSED_STREAM_MESSAGES = {
    0: "standard input is closed; use input=FILE",
    1: "standard output is closed; use output=FILE",
}
MAX_LINKS = 40  # maximum depth of symbolic links, as on Linux
PROC_FD = re.compile(r"/proc/(\d+)/(?:task/\d+/)?fd")


def resolve_descriptor(path: str) -> tuple[int, int] | None:
    """Return the process ID and the file descriptor that a path refers to, or None if it does not refer to one.

    Such paths are `/dev/stdout`, `/dev/fd/3`, `/proc/self/fd/3` and symbolic links to them. Opening one again would
    start at the beginning of the file and truncate it. Resolving it to the file of the descriptor would lose its mode
    (`>>`).
    """
    for _ in range(MAX_LINKS):
        if path in STANDARD_DESCRIPTORS:
            return os.getpid(), STANDARD_DESCRIPTORS[path]
        folder, name = os.path.split(os.path.abspath(path))
        folder = os.path.realpath(folder)
        if name.isdecimal() and folder == "/dev/fd":  # a link to /proc on some systems only
            return os.getpid(), int(name)
        if name.isdecimal() and (process := PROC_FD.fullmatch(folder)):
            return int(process[1]), int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def find_own_descriptor(path: str) -> int | None:
    """Return the file descriptor of this process that a path refers to, or None."""
    descriptor = resolve_descriptor(path)
    if descriptor is None:
        return None
    process, number = descriptor
    return number if process == os.getpid() else None


def open_descriptor(path: str, number: int, mode: str) -> AbstractContextManager[BinaryIO]:
    """Open a file descriptor that this process inherited for reading ("rb") or writing ("wb").

    It keeps its offset and its append mode. `path` is for messages.

    Raises:
        UserError: the descriptor is closed.
    """
    if number in CLOSED_STREAM_MESSAGES:
        stream, original_stream = ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__))[number]
        if original_stream is None:
            raise UserError(CLOSED_STREAM_MESSAGES[number])
        return nullcontext(stream.buffer)
    try:
        is_inherited = os.get_inheritable(number)  # false for Python's own files, which reuse closed descriptors
    except OSError:
        is_inherited = False
    if not is_inherited:
        raise UserError(f"{path}: descriptor {number} is closed; give a file")
    return open(os.dup(number), mode)  # type: ignore[return-value]


def is_stdin(path: str) -> bool:
    return find_own_descriptor(path) == STANDARD_DESCRIPTORS[STDIN_PATH]


def is_stdout(path: str) -> bool:
    return find_own_descriptor(path) == STANDARD_DESCRIPTORS[STDOUT_PATH]


def is_regular_file(path: str) -> bool:
    """Return whether a path names a regular file or does not exist; False if it refers to an open descriptor."""
    if resolve_descriptor(path) is not None:
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def get_file_identity(path: str) -> Hashable:
    """Return a value that is equal for paths of the same regular file, existing or not; None for a pipe or device."""
    number = find_own_descriptor(path)
    try:
        status = os.stat(path if number is None else number)
    except OSError:
        return os.path.realpath(path) if number is None else None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def check_file_arguments(
    command: Any, read: Sequence[str], written: Sequence[str], saved: Mapping[str, str] | None = None
) -> None:
    """Replace `-` in keys of files by the path of standard input (keys to `read`) or output (those `written`).

    Args:
        saved: the file that is written in the folder of a key.

    Raises:
        UserError: two keys read the same stream, write the same file or standard output, or read and write a file.
    """
    used: dict[Hashable, str] = {}  # `key=value` by descriptor or file identity
    saved = saved or {}
    for key in (*read, *written, *saved):
        value = getattr(command, key)
        if value == "-" and key not in saved:
            setattr(command, key, STDIN_PATH if key in read else STDOUT_PATH)
        if not (path := saved.get(key) or getattr(command, key)):
            continue
        number = find_own_descriptor(path)
        file = get_file_identity(path)
        stream = number if key in read or number == 1 else None  # several outputs may share other pipes and devices
        for resource in (stream, file):
            other = used.get(resource)
            if resource is not None and other and (resource == stream or key not in read):
                raise UserError(f"{key}={value} is the same file as {other}; give another one")
        used |= {resource: f"{key}={value}" for resource in (stream, file) if resource is not None}


def is_closed_pipe(error: Exception) -> bool:
    """Return whether nobody reads a pipe any more, as in `| head`. Windows reports an invalid argument.

    An error with a file name is of something else: Windows reports an invalid name in the same way.
    """
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return isinstance(error, BrokenPipeError) or sys.platform == "win32" and error.errno == errno.EINVAL


def discard_output(number: int) -> None:
    """Let a descriptor write to the null device, so that flushing it when Python exits does not print an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def print_page(text: str) -> None:
    """Print a help page or a version. Ends the program if standard output cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        discard_output(sys.stdout.fileno())
        sys.exit(1 if is_closed_pipe(error) else f"error: standard output: {error.strerror}")


def use_utf8() -> None:
    """Use UTF-8 for all input and output of this process.

    The encoding of file names and arguments is fixed when Python starts. If the locale has another one, restart the
    program in Python's UTF-8 mode, which child processes inherit.
    """
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, os.environ | {"PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
