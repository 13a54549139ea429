"""Sentence pairs from any source, as a `datasets.Dataset` with the columns `source` and `target`.

Lines of text end at `\\n` alone; a `\\r` before it is dropped, and so is a byte order mark at the start of a file. What
reads text here looks at every line before it stores any, so that a complaint names the file and the line.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
from datasets import Dataset, DatasetDict, Features, Value

from nmt.config import DataConfig
from nmt.data import toy
from nmt.errors import UserError, nearest

log = logging.getLogger("nmt")
VALID = ("valid", "validation", "val", "dev")  # the validation split's names
BOM = b"\xef\xbb\xbf"
CHUNK = 10_000  # pairs in memory at a time
SHOWN = 20  # names in a message

Pair = tuple[str, str]


def load_pairs(data: DataConfig, split: str) -> Dataset:
    """The sentence pairs of a split: train, valid or test, or a name that the corpus itself uses.

    Pairs with an empty side are kept. `data.limit` applies to the split train. The built-in corpus has two more
    columns, `sure` and `possible`: lists of links [source word, target word], from 0.

    Raises:
        UserError: when there is no such split, or something in it is not a pair of texts.
    """
    with quiet():
        pairs = READERS[data.format](data, split)
    if not len(pairs):
        raise UserError(f"the split {split} of data.path={data.path} is empty")
    if split == "train" and data.limit is not None:
        pairs = pairs.select(range(min(data.limit, len(pairs))))
    return pairs


def column(pairs: Dataset, name: str) -> Iterator[str]:
    """The texts of a column in order, with few in memory (iterating over `pairs[name]` is ten times slower)."""
    for batch in pairs.select_columns(name).iter(CHUNK):
        yield from batch[name]


def cache_folder(data: DataConfig) -> Path:
    """Where the read and the tokenised corpus are kept; made if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(data.cache) if data.cache else Path(base) / "nmt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be made ({error.strerror}); write data.cache=FOLDER") from error
    return folder


# -------------------------------------------------------------------------------------------------------------- lines
def raw_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file opened in binary, or of standard input's buffer, without their ends."""
    for number, line in enumerate(file):
        if number == 0:
            line = line.removeprefix(BOM)
        yield line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line


def read_lines(file: Iterable[bytes], name: object, invalid: str = "refuse") -> Iterator[str]:
    """The lines of a file opened in binary, or of standard input's buffer.

    invalid: what to do with a line that is not UTF-8: "refuse" it, or "replace" its bad bytes by U+FFFD and warn, once,
        after the last line, of how many there were.

    Raises:
        UserError: name:line, for a line that is refused.
    """
    replaced = []
    for number, line in enumerate(raw_lines(file), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            if invalid == "refuse":
                raise not_utf8(name, number, error) from None
            replaced.append(number)
            yield line.decode(errors="replace")
    if replaced:
        log.warning(f"{name}: {count_lines(replaced)} not UTF-8; U+FFFD stands for the bad bytes")


def not_utf8(name: object, number: int, error: UnicodeDecodeError) -> UserError:
    return UserError(
        f"{name}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02X} at column {error.start + 1}); convert the "
        "file, for example with iconv -f LATIN1 -t UTF-8, or leave such lines out: data.invalid=drop"
    )


def count_lines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"1 line ({shown}) is" if len(numbers) == 1 else f"{len(numbers):,} lines ({shown}) are"


# ------------------------------------------------------------------------------------------------------- text and tsv
def text_pairs(source: Path, target: Path) -> Iterator[Pair | UserError]:
    """The pairs of two line-aligned files; in the place of a bad one, what is wrong with it."""
    with open(source, "rb") as source_file, open(target, "rb") as target_file:
        lines = zip_longest(raw_lines(source_file), raw_lines(target_file))
        for number, (left, right) in enumerate(lines, 1):
            if left is None or right is None:
                longer = number + sum(1 for _ in lines)
                counts = (number - 1, longer) if left is None else (longer, number - 1)
                raise UserError(
                    f"{source} has {counts[0]:,} lines, {target} has {counts[1]:,}; line n of one must translate "
                    "line n of the other"
                )
            path = source
            try:
                text = left.decode()
                path = target
                yield text, right.decode()
            except UnicodeDecodeError as error:
                yield not_utf8(path, number, error)


def tsv_pairs(path: Path, source: str, target: str) -> Iterator[Pair | UserError]:
    """The pairs of a file of columns, by names in its first line or, where both are numbers, by these, from 1."""
    with open(path, "rb") as file:
        lines = enumerate(raw_lines(file), 1)
        if source.isdecimal() and target.isdecimal():
            columns = [int(source) - 1, int(target) - 1]
        else:
            names = next(lines, (1, b""))[1].decode(errors="replace").split("\t")
            columns = [index_of(name, names, path) for name in (source, target)]
        needed = max(columns) + 1
        for number, line in lines:
            try:
                cells = line.decode().split("\t")
            except UnicodeDecodeError as error:
                yield not_utf8(path, number, error)
                continue
            if len(cells) >= needed:
                yield cells[columns[0]], cells[columns[1]]
            else:
                yield UserError(
                    f"{path}:{number}: {len(cells)} columns, but {needed} are needed; mend the line, or leave such "
                    "lines out: data.invalid=drop"
                )


def index_of(name: str, names: list[str], path: Path) -> int:
    if name not in names:
        raise UserError(
            f"{path}: no column '{name}' in the first line, which has {listed(names)}{nearest(name, names)}; where it "
            "names no columns, give their numbers: data.source=1 data.target=2"
        )
    return names.index(name)


LINE_READERS = {"text": text_pairs, "tsv": tsv_pairs}


def stored(kind: str, arguments: tuple[Any, ...], data: DataConfig) -> Dataset:
    """Check all pairs, then keep them in the cache, under a key made of the pairs themselves."""
    key, bad = hashlib.sha256(), []
    for item in LINE_READERS[kind](*arguments):
        if isinstance(item, tuple):
            key.update("\n".join((*item, "")).encode())
        elif data.invalid == "refuse":
            raise item
        else:
            bad.append(item)
    if bad:
        log.warning(f"dropped {len(bad):,} lines that cannot be read, the first of them {str(bad[0]).split('; ')[0]}")
    folder = cache_folder(data)
    return Dataset.from_generator(
        generate,
        gen_kwargs={"kind": kind, "arguments": arguments, "key": key.hexdigest()},
        features=Features({"source": Value("string"), "target": Value("string")}),
        cache_dir=str(folder / "text"),
    )


def generate(kind: str, arguments: tuple[Any, ...], key: str) -> Iterator[dict[str, str]]:
    for item in LINE_READERS[kind](*arguments):
        if isinstance(item, tuple):
            yield {"source": item[0], "target": item[1]}


def read_text(data: DataConfig, split: str) -> Dataset:
    endings = [ending.rpartition(".")[2] for ending in (data.source, data.target)]
    return stored("text", find_files(data, split, [f".{ending}" for ending in endings]), data)


def read_tsv(data: DataConfig, split: str) -> Dataset:
    return stored("tsv", (*find_files(data, split, [".tsv"]), data.source, data.target), data)


def find_files(data: DataConfig, split: str, endings: list[str]) -> tuple[Path, ...]:
    """The files of a split, one for each ending; their common name is the split's, or one of `VALID` for valid."""
    folder = existing_folder(data)
    for name in names_of(split):
        files = tuple(folder / f"{name}{ending}" for ending in endings)
        if any(file.exists() for file in files):
            break
    else:
        files = tuple(folder / f"{split}{ending}" for ending in endings)
    for file in files:
        if not file.is_file():
            raise missing(file, data)
    return files


def missing(file: Path, data: DataConfig) -> UserError:
    held = sorted(path.name for path in file.parent.iterdir())
    return UserError(
        f"{file} does not exist; data.format={data.format} with data.source={data.source} data.target={data.target} "
        f"needs it. In this folder there is {listed(held)}"
    )


def existing_folder(data: DataConfig) -> Path:
    folder = Path(str(data.path))
    if not folder.is_dir():
        raise UserError(f"data.path={folder} is not a folder")
    return folder


def names_of(split: str) -> list[str]:
    return [split, *(name for name in VALID if name != split)] if split in VALID else [split]


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "nothing"


# ------------------------------------------------------------------------------------------------ jsonl, parquet, hub
def read_jsonl(data: DataConfig, split: str) -> Dataset:
    return load("json", [str(file) for file in find_files(data, split, [".jsonl"])], data)


def read_parquet(data: DataConfig, split: str) -> Dataset:
    folder = existing_folder(data)
    found = [sorted(folder.glob(f"{name}*.parquet")) for name in names_of(split)]
    files = next((files for files in found if files), None)
    if files is None:
        raise missing(folder / f"{split}*.parquet", data)
    return load("parquet", [str(file) for file in files], data)


def load(builder: str, files: list[str], data: DataConfig) -> Dataset:
    try:
        table = datasets.load_dataset(
            builder, data_files={"all": files}, split="all", cache_dir=str(cache_folder(data) / builder)
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise UserError(f"{', '.join(files)}: {reason(error)}") from error
    return two_columns(table, ", ".join(files), data)


def read_hub(data: DataConfig, split: str) -> Dataset:
    """A dataset of the hub, or a local folder that is laid out like one, or that holds text."""
    path = Path(str(data.path))
    if any((path / f"{name}.{data.source.rpartition('.')[2]}").is_file() for name in (*names_of(split), "train")):
        return read_text(data, split)
    local = str(cache_folder(data) / "hub") if path.is_dir() else None
    log.info(f"loading {data.path}" + ("" if local else " from the hub"))
    try:
        table = datasets.load_dataset(str(data.path), data.subset, cache_dir=local)
    except Exception as error:  # whatever the library, the network or the hub may say
        raise UserError(
            f"data.path={data.path} data.subset={data.subset} cannot be loaded: {reason(error)}. Look at the name, the "
            "subset and the connection; a folder on this machine does as well: data.path=FOLDER"
        ) from error
    assert isinstance(table, DatasetDict)
    name = next((name for name in names_of(split) if name in table), None)
    if name is None:
        raise UserError(f"data.path={data.path} has no split {split}; it has {listed(list(table))}")
    return two_columns(table[name], f"the split {name} of {data.path}", data)


def reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def two_columns(table: Dataset, where: str, data: DataConfig) -> Dataset:
    """The columns `data.source` and `data.target`, which may be nested as in `translation.de`, checked to be texts."""
    table = table.flatten()
    for key, name in (("data.source", data.source), ("data.target", data.target)):
        if name not in table.column_names:
            names = table.column_names
            raise UserError(f"{key}={name}: no such column in {where}, which has {listed(names)}{nearest(name, names)}")
    pairs = table.select_columns([data.source, data.target])
    pairs = pairs.rename_columns({data.source: "source", data.target: "target"})
    first_row = 1
    for batch in pairs.with_format("arrow").iter(CHUNK):
        for key, name in (("source", data.source), ("target", data.target)):
            kind = str(batch[key].type)
            if kind not in ("string", "large_string") or batch[key].null_count:
                row = next(i for i, cell in enumerate(batch[key].to_pylist()) if not isinstance(cell, str))
                raise UserError(
                    f"{where}: row {first_row + row} has {batch[key][row].as_py()!r} for {name}, which is not a text"
                )
        first_row += len(batch)
    return pairs


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and notices away from the screen."""
    bars = not datasets.are_progress_bars_disabled(), not huggingface_hub.utils.are_progress_bars_disabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars[0]:
            datasets.enable_progress_bars()
        if bars[1]:
            huggingface_hub.utils.enable_progress_bars()


# ---------------------------------------------------------------------------------------------------------------- toy
toy_splits = lru_cache(maxsize=1)(toy.generate)  # takes seconds, and a run reads two splits


def read_toy(data: DataConfig, split: str) -> Dataset:
    split = "valid" if split in VALID else split
    if split not in toy.SPLITS:
        raise UserError(f"the built-in corpus has no split {split}; it has {listed(list(toy.SPLITS))}")
    pairs = toy_splits(data.seed)[split]
    german = data.source == "de"

    def links(links: Iterable[tuple[int, int]]) -> list[list[int]]:
        return [[g, e] if german else [e, g] for g, e in links]

    return Dataset.from_dict(
        {
            "source": [pair.german if german else pair.english for pair in pairs],
            "target": [pair.english if german else pair.german for pair in pairs],
            "sure": [links(pair.sure) for pair in pairs],
            "possible": [links(pair.possible) for pair in pairs],
        }
    )


READERS = {
    "toy": read_toy,
    "text": read_text,
    "tsv": read_tsv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hub": read_hub,
}
