"""Find and read the input of corpus preparation: aligned files, tables, Parquet, TMX, and zip files of these."""

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from nmt.config import PrepareRun
from nmt.data.prepare.tmx import read_tmx_pairs
from nmt.data.readers import (
    BadLine,
    LinePair,
    batch_line_pairs,
    get_nested,
    read_jsonl_pairs,
    read_text_pairs,
    read_tsv_pairs,
)
from nmt.errors import UserError
from nmt.system.messages import first_line, list_names
from nmt.system.text import COMPRESSION_BY_SUFFIX, make_read_error, member_path, open_binary

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
            members = list_files(path)
            if members is None:
                found = [find_single(key, path, command)]
            else:
                found = list(filter(None, (classify(member, members, command) for member in members)))
        except OSError as error:
            raise UserError(f"{key}={path} cannot be read: {error.strerror}") from error
        if not found:
            names = list_names([str(member.relative_to(path)) for member in members or ()])
            raise UserError(
                f"{key}={path} has no files that end in .{command.source} and .{command.target}, nor in "
                f"{', '.join(TABLE_KINDS)}; it has {names}"
            )
        for file in found:
            files.setdefault(tuple(part.resolve() for part in file.paths), file)
        used = {part for file in found for part in file.paths}
        unused += [member for member in members or () if member not in used]
    return FoundInputs(list(files.values()), unused)


def list_files(path: Path) -> list[Path] | None:
    """Return the files of a zip, or of a folder with its subfolders and zips, sorted by name; None for another file."""
    if path.suffix == ".zip" and path.is_file():
        try:
            with zipfile.ZipFile(path) as archive:
                found = [member_path(path, info.filename) for info in archive.infolist() if not info.is_dir()]
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise make_read_error(path, error) from error
    elif path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        found = [member for file in files for member in (list_files(file) if file.suffix == ".zip" else None) or [file]]
    else:
        return None
    # Hidden files, and those that macOS adds to zip files, are no text.
    parts = [(member, member.relative_to(path).parts) for member in found]
    return [member for member, names in parts if not any(name.startswith((".", "__MACOSX")) for name in names)]


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


def classify(path: Path, siblings: Sequence[Path], command: PrepareRun) -> InputFile | None:
    """Return the input that a file belongs to, or None. `siblings` are files that may be its other side."""
    plain = strip_compression(path)
    if plain.suffix in TABLE_KINDS:
        return InputFile(TABLE_KINDS[plain.suffix], (path,))
    endings = f".{command.source}", f".{command.target}"
    if not plain.name.endswith(endings):
        return None
    is_source = plain.name.endswith(endings[0])
    other = plain.name.removesuffix(endings[not is_source]) + endings[is_source]
    for suffix in (path.name.removeprefix(plain.name), "", *COMPRESSION_BY_SUFFIX):
        candidate = path.with_name(other + suffix)
        if candidate in siblings:
            return InputFile("text", (path, candidate) if is_source else (candidate, path))
    return None


def strip_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSION_BY_SUFFIX else path


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
        elif file.kind == "tsv":
            yield from read_tsv_pairs(file.paths[0], names[0], names[1], numbers_hint="columns=[1,2]")
        elif file.kind == "jsonl":
            yield from read_jsonl_pairs(file.paths[0], *names)
        else:
            yield from batch_line_pairs(read_parquet_pairs(file.paths[0], *names))
    except OSError as error:
        raise make_read_error(error.filename or file, error) from error


def read_parquet_pairs(path: Path, source: str, target: str) -> Iterator[LinePair | BadLine]:
    """Yield the pairs of a Parquet file; columns may be nested as in `translation.de`. Numbers are those of rows."""
    with open_binary(path) as file:
        try:
            table = pq.ParquetFile(file)
            columns = table.schema_arrow.names
            for name in (source, target):
                if not {name, name.partition(".")[0]} & {*columns}:
                    raise UserError(f"{path} has no column '{name}'; it has {list_names(columns)}")
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                texts = get_nested(row, source), get_nested(row, target)
                if all(isinstance(text, str) for text in texts):
                    yield LinePair(number, *texts)
                else:
                    yield BadLine(path, number, "no text", "no text")
        except (pa.ArrowInvalid, ValueError) as error:
            raise UserError(f"{path} cannot be read: {first_line(error)}") from error
