"""Find and read the input of corpus preparation: aligned files, tables, Parquet, TMX, and zip files of these."""

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from nmt.config import DataConfig, PrepareRun
from nmt.data.corpus import cast_to_text, check_columns, flatten_structs
from nmt.data.prepare.tmx import read_tmx_pairs
from nmt.data.readers import (
    LINE_SCHEMA,
    PARSE_BATCH_SIZE,
    BadLine,
    batch_line_pairs,
    read_jsonl_pairs,
    read_text_pairs,
    read_tsv_pairs,
)
from nmt.errors import UserError
from nmt.system.lines import COMPRESSION_BY_SUFFIX, make_read_error, member_path, open_binary
from nmt.system.messages import first_line, list_names

TABLE_KINDS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet", ".tmx": "tmx"}  # by suffix


class InputFile(NamedTuple):
    """One file with both sides, or two aligned files."""

    kind: str  # text | tsv | jsonl | parquet | tmx
    paths: tuple[Path, ...]  # inside a zip: a.zip/b.txt

    def __str__(self) -> str:
        return " and ".join(map(str, self.paths))


class FoundInputs(NamedTuple):
    """What `input` names."""

    files: list[InputFile]
    unused: list[Path]  # files of a folder or a zip that are no pairs


def find_inputs(key: str, paths: Sequence[str], command: PrepareRun) -> FoundInputs:
    """Return the files with sentence pairs that a setting names: files, folders, zips, or names without the language.

    Raises:
        UserError: a path does not exist, has an unknown format, lacks its other side, or holds no pairs.
    """
    files: dict[tuple[Path, ...], InputFile] = {}  # by absolute paths: each file is read once
    unused: list[Path] = []
    for path in map(Path, paths):
        try:
            if path.is_dir():
                regular, others = list_folder(path)
                found = find_in_container(regular, command)
                found.unused.extend(others)
            elif path.suffix == ".zip" and path.is_file():
                found = find_in_container(list_members(path), command)
            else:
                found = FoundInputs([find_single(key, path, command)], [])
        except OSError as error:
            raise UserError(f"{key}={path} cannot be read: {error.strerror}") from error
        if not found.files:
            names = list_names([str(file.relative_to(path)) for file in found.unused])
            raise UserError(
                f"{key}={path} has no files that end in .{command.source} and .{command.target}, nor in "
                f"{', '.join(TABLE_KINDS)}; it has {names}"
            )
        for input_file in found.files:
            files.setdefault(tuple(part.resolve() for part in input_file.paths), input_file)
        unused += found.unused
    return FoundInputs(list(files.values()), unused)


def find_single(key: str, path: Path, command: PrepareRun) -> InputFile:
    """Return the input that a path names: a file, one of two aligned files, or their name without the language."""
    if path.is_file():
        siblings = [found for found in path.parent.iterdir() if found.is_file()]
        if (found := classify(path, siblings, command)) is not None:
            return found
        other = command.target if strip_compression(path).suffix == f".{command.source}" else command.source
        if strip_compression(path).suffix in (f".{command.source}", f".{command.target}"):
            raise UserError(f"{key}={path}: there is no file with the same name that ends in .{other}")
        raise UserError(
            f"{key}={path} is of an unknown format; use two files that end in .{command.source} and "
            f".{command.target}, or one that ends in {', '.join(TABLE_KINDS)} or .zip"
        )
    for suffix in ("", *COMPRESSION_BY_SUFFIX):
        side = path.with_name(f"{path.name}.{command.source}{suffix}")
        if side.is_file():
            return find_single(key, side, command)
    raise UserError(f"{key}={path} does not exist, nor does {path}.{command.source}")


def find_in_container(paths: Sequence[Path], command: PrepareRun) -> FoundInputs:
    """Return the inputs among the files of a folder or a zip, and of zips in a folder."""
    files: dict[InputFile, None] = {}
    unused = []
    for path in paths:
        if path.suffix == ".zip" and path.is_file():
            found = find_in_container(list_members(path), command)
            files |= dict.fromkeys(found.files)
            unused += found.unused
        elif (file := classify(path, paths, command)) is not None:
            files[file] = None
        else:
            unused.append(path)
    return FoundInputs(list(files), unused)


def classify(path: Path, siblings: Sequence[Path], command: PrepareRun) -> InputFile | None:
    """Return the input that a file belongs to, or None. `siblings` are files that may be its other side."""
    plain = strip_compression(path)
    if plain.suffix in TABLE_KINDS:
        return InputFile(TABLE_KINDS[plain.suffix], (path,))
    endings = f".{command.source}", f".{command.target}"
    if not plain.name.endswith(endings):
        return None
    is_source = plain.name.endswith(endings[0])
    stem = plain.name.removesuffix(endings[0] if is_source else endings[1])
    other = plain.with_name(stem + (endings[1] if is_source else endings[0]))
    suffixes = dict.fromkeys((path.name.removeprefix(plain.name), "", *COMPRESSION_BY_SUFFIX))
    candidates = [other.with_name(other.name + suffix) for suffix in suffixes]
    for candidate in candidates:
        if candidate in siblings:
            return InputFile("text", (path, candidate) if is_source else (candidate, path))
    return None


def strip_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSION_BY_SUFFIX else path


def list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder and its subfolders; and what is no file, such as links to folders.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    paths = []
    for name, subfolders, files in os.walk(folder, onerror=fail):
        links = [subfolder for subfolder in subfolders if os.path.islink(os.path.join(name, subfolder))]
        paths += [Path(name, entry) for entry in [*files, *links]]
    paths = sorted(path for path in paths if not is_hidden(path.relative_to(folder)))
    return [path for path in paths if path.is_file()], [path for path in paths if not path.is_file()]


def list_members(archive: Path) -> list[Path]:
    try:
        with zipfile.ZipFile(archive) as file:
            paths = [member_path(archive, info.filename) for info in file.infolist() if not info.is_dir()]
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise make_read_error(archive, error) from error
    return [path for path in paths if not is_hidden(path.relative_to(archive))]


def is_hidden(path: Path) -> bool:
    """Return whether a file is hidden, or one of those that macOS adds to zip files."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def read_input(file: InputFile, command: PrepareRun) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of an input as record batches with line numbers, and invalid lines.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    names = command.columns or [command.source, command.target]
    try:
        if file.kind == "text":
            yield from read_text_pairs(*file.paths)
        elif file.kind == "tmx":
            yield from batch_line_pairs(read_tmx_pairs(file.paths[0], command.source, command.target))
        else:
            yield from TABLE_READERS[file.kind](file.paths[0], *names)
    except OSError as error:
        raise make_read_error(error.filename or file, error) from error


def read_parquet_pairs(path: Path, source: str, target: str) -> Iterator[pa.RecordBatch | BadLine]:
    """Yield the pairs of a Parquet file; columns may be nested as in `translation.de`. Numbers are those of rows."""
    data = DataConfig(format="parquet", path=str(path), source=source, target=target)
    rows = 0
    with open_binary(path) as file:
        try:
            batches = pq.ParquetFile(file).iter_batches(PARSE_BATCH_SIZE)
            for batch in batches:
                table = flatten_structs(pa.Table.from_batches([batch]))
                check_columns(table.column_names, str(path), data)
                if max(map(table.column_names.count, (source, target))) > 1:
                    raise UserError(f"{path} has several columns named {source} or {target}; rename them")
                numbers = range(rows + 1, rows + len(table) + 1)
                table = pa.table({"source": table[source], "target": table[target], "line": pa.array(numbers)})
                complete = table.drop_null()
                if len(complete) < len(table):
                    valid = set(complete["line"].to_pylist())
                    yield from (BadLine(path, row, "no text", "no text") for row in numbers if row not in valid)
                if len(complete):
                    texts = cast_to_text(complete, str(path), rows, data)
                    yield from texts.append_column("line", complete["line"]).cast(LINE_SCHEMA).to_batches()
                rows += len(table)
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} cannot be read: {first_line(error)}") from error


TABLE_READERS: dict[str, Callable[..., Iterator[pa.RecordBatch | BadLine]]] = {
    "tsv": partial(read_tsv_pairs, numbers_hint="columns=[1,2]"),
    "jsonl": read_jsonl_pairs,
    "parquet": read_parquet_pairs,
}
