"""Load sentence pairs from any source as a memory-mapped Arrow table with the columns `source` and `target`.

Pairs from line-based files also have the column `line`, the line number, unless the split is in shards. Errors name the
file and line, and nothing of a refused file is cached.
"""

import errno
import importlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_128

from nmt.config import SIDES, DataConfig
from nmt.data.cache import (
    DIGESTS_FILE,
    cache_folder,
    digest_file,
    get_or_build,
    is_valid,
    make_cache_write_error,
    write_digests,
)
from nmt.data.readers import LINE_READERS, LINE_SCHEMA, TEXT_SCHEMA, BadLine
from nmt.data.splits import (
    VALID_SPLITS,
    describe_shards,
    find_line_files,
    find_parquet_files,
    has_text_files,
    list_split_names,
    require_folder,
)
from nmt.data.toy import corpus as toy
from nmt.data.word_links import GoldLinks, read_gold_links
from nmt.errors import UserError, extra_command, suggest
from nmt.system.messages import MAX_LISTED_LINES, clip_repr, first_line, format_first_lines, list_names, pluralize
from nmt.system.text import COMPRESSION_BY_SUFFIX, NOT_UTF8, describe_decode_error, split_on_spaces

log = logging.getLogger("nmt")
READ_BATCH_SIZE = 10_000  # pairs in memory at a time
PAIRS_FILE = "pairs.arrow"
DROPPED_LINES_FILE = "report.json"  # the lines of files that were dropped, next to PAIRS_FILE in the cache
TEXT_CACHE_VERSION = 1  # layout of these files; part of their cache key
TEXT_TYPE_CHECKS = (  # Arrow types that may hold text; some writers store strings as bytes
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
LINKS_TYPE = pa.list_(pa.list_(pa.int64()))  # [source word, target word] of each link of a pair
DroppedLines = dict[tuple[Path, str], list[int]]  # by file and kind of problem: the count, then first line numbers
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_pairs(data: DataConfig, split: str) -> pa.Table:
    """Load the sentence pairs of a split: train, valid or test, or a name that the corpus itself uses.

    Pairs with an empty side are kept. `data.limit` applies to the split train. If there are gold links (of the built-in
    corpus, or in the files that `data.alignments` names), the columns `sure` and `possible` are lists of links
    [source word, target word], from 0.

    Raises:
        UserError: there is no such split, it is empty, or something in it is not a pair of texts.
    """
    pairs = PAIR_READERS[data.format](data, split)
    if not len(pairs):
        raise UserError(f"the split {split} of data.path={data.path} is empty")
    if data.alignments is not None:
        pairs = add_gold_links(pairs, data, split)
    if split == "train" and data.limit is not None:
        pairs = pairs.slice(0, data.limit)
    return pairs


def iter_column(pairs: pa.Table, name: str) -> Iterator[str]:
    """Yield the texts of a column, converting few at a time."""
    for batch in pairs.select([name]).to_batches(READ_BATCH_SIZE):
        yield from batch.column(name).to_pylist()


def get_gold_links(pairs: pa.Table) -> list[GoldLinks] | None:
    """Return the gold links of each pair of a corpus, or None if it has none."""
    if "sure" not in pairs.column_names:
        return None
    links = zip(pairs["sure"].to_pylist(), pairs["possible"].to_pylist(), strict=True)
    return [GoldLinks.from_pairs(sure, possible) for sure, possible in links]


def take_rows(pairs: pa.Table, rows: Iterable[int]) -> pa.Table:
    """Return the pairs in these rows. `Table.take` may copy whole columns first."""
    return pa.concat_tables([pairs.slice(0, 0), *(pairs.slice(int(row), 1) for row in rows)])


def map_table(path: Path) -> pa.Table:
    """Return the table in a file of Arrow's stream format, memory-mapped."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


# ---------------------------------------------------------------------------------------------------- line-based files
def read_files(data: DataConfig, split: str) -> pa.Table:
    """Read the pairs of line-based files, cached under a digest of the files, and log which lines were dropped.

    Dropped lines are also logged if the pairs come from the cache.
    """
    line_files = find_line_files(data, split)
    assert line_files is not None
    kind, shards, columns = line_files
    files = [file for shard in shards for file in shard]

    def compute_key() -> str:
        parts = (TEXT_CACHE_VERSION, kind, columns, data.invalid, [digest_file(file) for file in files])
        return xxh3_128(repr(parts).encode()).hexdigest()

    def fill(part: Path) -> None:
        dropped: DroppedLines = defaultdict(lambda: [0])
        rows = 0
        with open(part / PAIRS_FILE, "wb") as file, pa.ipc.new_stream(file, LINE_SCHEMA) as writer:
            for batch in read_shards(kind, shards, columns, dropped, data):
                rows += len(batch)
                writer.write_batch(batch)
        report = [(files.index(path), problem, *counts) for (path, problem), counts in dropped.items()]
        if not rows:
            warn_of_report(report, files)
            raise UserError(f"{files[0]} has no sentence pairs")
        if compute_key() != key:
            raise UserError(f"{files[0]} changed while it was read; repeat the command")
        (part / DROPPED_LINES_FILE).write_text(json.dumps(report), encoding="utf-8")

    key = compute_key()
    folder = get_or_build(cache_folder(data) / "text" / key, fill)
    warn_of_report(json.loads((folder / DROPPED_LINES_FILE).read_bytes()), files)
    pairs = map_table(folder / PAIRS_FILE)
    return pairs if len(shards) == 1 else pairs.drop_columns("line")  # ambiguous in shards


def read_shards(
    kind: str, shards: list[tuple[Path, ...]], columns: tuple[str, ...], dropped: DroppedLines, data: DataConfig
) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of line-based files, found by `find_line_files`, and count invalid lines in `dropped`."""
    for shard in shards:
        for item in LINE_READERS[kind](*shard, *columns):
            if isinstance(item, BadLine):
                refuse_or_count(item, dropped, data)
            else:
                yield item


def refuse_or_count(line: BadLine, dropped: DroppedLines, data: DataConfig) -> None:
    """Raise a `UserError` for a bad line, or with data.invalid=drop count it and note the first line numbers."""
    if data.invalid == "refuse":
        encoding_hint = ""
        if line.kind == NOT_UTF8:
            encoding_hint = "; if the whole file has another encoding, convert it to UTF-8: iconv -f LATIN1 -t UTF-8"
        raise UserError(
            f"{line.file}:{line.number}: {line.reason}; fix the line, or drop such lines: "
            f"data.invalid=drop{encoding_hint}"
        )
    counts = dropped[line.file, line.kind]
    counts[0] += 1
    if len(counts) <= MAX_LISTED_LINES:
        counts.append(line.number)


def warn_of_report(report: list[Any], files: list[Path]) -> None:
    """Log dropped lines, given as index of the file, kind of problem, count of lines and first line numbers."""
    for index, problem, count, *first in report:
        warn_of_dropped_lines(files[index], problem, count, *first)


def warn_of_dropped_lines(file: Path, problem: str, count: int, *first: int) -> None:
    lines = pluralize(count, "line")
    log.warning(f"data.invalid=drop: left out {lines} of {file}: {problem} ({format_first_lines(first)})")


def describe_origins(data: DataConfig, split: str) -> tuple[str, str]:
    """Return how messages refer to the source and target of a split: their files, or the common file and columns."""
    if split == "train" and data.corpora:
        where = f"data.path={data.path} and data.corpora"
    elif (line_files := find_line_files(data, split)) is None:
        where = data.path or "the built-in corpus"
    elif line_files[0] == "text":
        source, target = (describe_shards(list(side)) for side in zip(*line_files[1], strict=True))
        return source, target
    else:
        where = describe_shards([file for (file,) in line_files[1]])
    return f"{where}, {data.source}", f"{where}, {data.target}"


def add_gold_links(pairs: pa.Table, data: DataConfig, split: str) -> pa.Table:
    """Add the gold links of DIR/SPLIT.<data.alignments>, which may be compressed, if there is such a file."""
    names = [
        f"{name}.{data.alignments}{suffix}"
        for name in list_split_names(split)
        for suffix in ("", *COMPRESSION_BY_SUFFIX)
    ]
    paths = [require_folder(data) / name for name in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        log.warning(f"data.alignments={data.alignments}: {paths[0]} does not exist, so {split} has no gold links")
        return pairs
    sources, targets = (list(iter_column(pairs, side)) for side in SIDES)
    gold = read_gold_links(path, 0, [line.split() for line in sources], [line.split() for line in targets])
    word_maps = [
        (map_to_space_words(source), map_to_space_words(target))
        for source, target in zip(sources, targets, strict=True)
    ]
    for name in ("sure", "possible"):
        links = [
            [(source_map[i], target_map[j]) for i, j in sorted(getattr(pair_links, name))]
            for pair_links, (source_map, target_map) in zip(gold, word_maps, strict=True)
        ]
        pairs = pairs.append_column(name, pa.array(links, LINKS_TYPE))
    return pairs


def map_to_space_words(line: str) -> list[int]:
    """Return for each word of a line the index of the space-separated word that contains it.

    Gold links count words separated by any white space, such as a no-break space, but pieces only know words separated
    by U+0020.
    """
    return [index for index, word in enumerate(split_on_spaces(line)) for _ in word.split()]


# ----------------------------------------------------------------------------------------------------------- parquet
def read_parquet(data: DataConfig, split: str) -> pa.Table:
    """Return the pairs of Parquet files, converted to text in the cache."""
    files = find_parquet_files(data, split)
    parts = (TEXT_CACHE_VERSION, "parquet", data.source, data.target, [digest_file(Path(file)) for file in files])
    return cache_tables(iterate_parquet(files, data), repr(parts), data)


def iterate_parquet(files: list[str], data: DataConfig) -> Iterator[pa.Table]:
    """Yield the pairs of Parquet files as checked text."""
    for file in files:
        with convert_read_errors(file):
            reader = pq.ParquetFile(file)
            columns = flatten_structs(reader.schema_arrow.empty_table()).column_names
        check_columns(columns, file, data)
        batches = reader.iter_batches(READ_BATCH_SIZE, columns=[data.source, data.target])
        row = 0
        while True:
            with convert_read_errors(file):
                batch = next(batches, None)
            if batch is None:
                break
            table = flatten_structs(pa.Table.from_batches([batch]))
            yield cast_to_text(rename_sides(table, data), file, row, data)
            row += len(table)


@contextmanager
def convert_read_errors(file: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error


def flatten_structs(table: pa.Table) -> pa.Table:
    """Flatten nested columns, however deep, to names such as `translation.de`."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def rename_sides(table: pa.Table, data: DataConfig) -> pa.Table:
    """Return the columns `data.source` and `data.target` under the names `source` and `target`."""
    return pa.table({"source": table[data.source], "target": table[data.target]})


def cache_tables(tables: Iterable[pa.Table], key: str, data: DataConfig) -> pa.Table:
    """Return the pairs of these tables, memory-mapped from a file of the cache that is found by the key."""

    def fill(part: Path) -> None:
        with open(part / PAIRS_FILE, "wb") as file, pa.ipc.new_stream(file, TEXT_SCHEMA) as writer:
            for table in tables:
                writer.write_table(table)

    folder = cache_folder(data) / "text" / xxh3_128(key.encode()).hexdigest()
    return map_table(get_or_build(folder, fill) / PAIRS_FILE)


def check_columns(names: list[str], where: str, data: DataConfig) -> None:
    for key, name in (("source", data.source), ("target", data.target)):
        if name not in names:
            raise UserError(
                f"data.{key}={name}: {where} has no such column; it has {list_names(names)}{suggest(name, names)}"
            )


def cast_to_text(table: pa.Table, where: str, rows: int, data: DataConfig) -> pa.Table:
    """Convert a table of pairs to strings, whatever Arrow type holds their text.

    rows: number of rows before this table, for messages.

    Raises:
        UserError: a value is null, of a type that holds no text, or not UTF-8.
    """
    columns = []
    for key, name in (("source", data.source), ("target", data.target)):
        column = table[key]
        kind = column.type
        is_dictionary = pa.types.is_dictionary(kind)
        if is_dictionary:
            kind = kind.value_type
        is_text = any(check(kind) for check in TEXT_TYPE_CHECKS)
        if is_text and is_dictionary:
            chunks = [chunk.dictionary.cast(pa.large_binary()).take(chunk.indices) for chunk in column.chunks]
            column = pa.chunked_array(chunks, pa.large_binary())
        if not is_text or column.null_count:
            row = column.to_pylist().index(None) if is_text else 0
            value = clip_repr(column[row].as_py()) + ("" if is_text else f", of type {table[key].type}")
            raise UserError(f"{where}: row {rows + row + 1}: expected text in '{name}', got {value}")
        try:
            columns.append(column.cast(pa.string()))
            columns[-1].validate(full=True)  # a column of strings may contain any bytes
        except pa.ArrowInvalid:
            for row, value in enumerate(column.cast(pa.large_binary())):
                try:
                    value.as_py().decode()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{where}: row {rows + row + 1}: '{name}', of type {table[key].type}, is "
                        f"{describe_decode_error(error)}; store the column as UTF-8 strings"
                    ) from None
            raise
    return pa.table(columns, schema=TEXT_SCHEMA)


# --------------------------------------------------------------------------------------------------------------- hub
def read_hub(data: DataConfig, split: str) -> pa.Table:
    """Read a dataset of the hub, or a local folder with the layout of one or with text files."""
    if has_text_files(data, split):
        return read_files(data, split)
    if data.streaming:
        return pa.concat_tables([TEXT_SCHEMA.empty_table(), *stream_pairs(data, split)])
    path = resolve_hub_path(data)
    cache = cache_folder(data) / "hub" if path.is_dir() else None  # None: the cache of the datasets library
    log.info(f"loading {path}" if cache else f"loading {path} from the hub")
    with convert_hub_errors(data, cache):
        splits = load_with_cache(cache, str(path), data.subset, revision=data.revision)
    rows = select_split(splits, split, data)
    files = [Path(file["filename"]) for file in rows.cache_files]
    return select_text_columns(rows.data.table, f"the split {split} of {path}", files, data)


def stream_pairs(data: DataConfig, split: str) -> Iterator[pa.Table]:
    """Yield the pairs of Parquet files or of a split on the hub without caching them or downloading other splits."""
    if data.format == "parquet":
        yield from iterate_parquet(find_parquet_files(data, split), data)
        return
    datasets = import_datasets()
    where = f"the split {split} of {data.path}"
    row = 0
    with convert_hub_errors(data):
        with silence_libraries():
            splits = datasets.load_dataset(
                str(resolve_hub_path(data)), data.subset, revision=data.revision, streaming=True
            )
        for table in select_split(splits, split, data).with_format("arrow").iter(READ_BATCH_SIZE):
            table = flatten_structs(table)
            check_columns(table.column_names, where, data)
            yield cast_to_text(rename_sides(table, data), where, row, data)
            row += len(table)


def import_datasets() -> ModuleType:
    """Import the datasets library, which takes a second and is only needed for datasets of the hub.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise UserError(
            f"data.format=hub needs the datasets library; install it with: {extra_command('hub')}"
        ) from None


def resolve_hub_path(data: DataConfig) -> Path:
    """Return the name of a dataset on the hub or a local folder.

    Raises:
        UserError: the path of the folder contains characters that the library reads as a glob pattern.
    """
    path = Path(str(data.path))
    if path.is_dir() and (full_path := str(path.resolve())) != escape(full_path):
        raise UserError(
            f"data.path={path}: the datasets library reads *, ? and [ in {full_path} as a pattern; rename it"
        )
    return path


@contextmanager
def convert_hub_errors(data: DataConfig, cache: Path | None = None) -> Iterator[None]:
    """Convert errors of the datasets library to a `UserError` with the first line of the innermost cause.

    `cache` is where the library writes, to report a full disk.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library, the network and the hub raise errors without a common base class
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cache and isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:
            raise make_cache_write_error(cache, cause) from error
        keys = "".join(f" data.{key}={value}" for key in ("subset", "revision") if (value := getattr(data, key)))
        raise UserError(
            f"data.path={data.path}{keys} cannot be loaded: {first_line(cause)}. Check the name, the subset, the "
            "revision and the connection, or use a local folder: data.path=FOLDER"
        ) from error


def select_split(splits: Any, split: str, data: DataConfig) -> Any:
    name = next((name for name in list_split_names(split) if name in splits), None)
    if name is None:
        raise UserError(f"data.path={data.path} has no split {split}; it has {list_names(list(splits))}")
    return splits[name]


def load_with_cache(cache: Path | None, *args: Any, **kwargs: Any) -> Any:
    """Call `datasets.load_dataset` and rebuild damaged entries of this cache.

    The library itself notices at most that a file is truncated. `cache` is None for the library's own cache, which is
    not checked.
    """
    load = partial(import_datasets().load_dataset, *args, **kwargs, keep_in_memory=False)
    with silence_libraries():
        if cache is None:
            return load(cache_dir=None)
        load = partial(load, cache_dir=str(cache))
        try:
            splits = load()
        except Exception:
            # A list, since each check removes a damaged folder.
            if all([is_valid(file.parent) for file in list(cache.rglob(DIGESTS_FILE))]):
                raise
            splits = load()
    folders = {Path(file["filename"]).parent for rows in splits.values() for file in rows.cache_files}
    if not all([is_valid(folder) for folder in folders if (folder / DIGESTS_FILE).exists()]):
        return load_with_cache(cache, *args, **kwargs)
    for folder in folders:
        if not (folder / DIGESTS_FILE).exists():
            write_digests(folder)
    return splits


def select_text_columns(table: pa.Table, where: str, files: list[Path], data: DataConfig) -> pa.Table:
    """Return the columns `data.source` and `data.target`, which may be nested as in `translation.de`, as checked text.

    Columns of strings are used in place; other types of text, such as views or bytes, are converted in the cache.

    Args:
        files: the files that the table is mapped from.
    """
    table = flatten_structs(table)
    check_columns(table.column_names, where, data)
    pairs = rename_sides(table, data)

    def cast_batches() -> Iterator[pa.Table]:
        for row in range(0, len(pairs), READ_BATCH_SIZE):
            yield cast_to_text(pairs.slice(row, READ_BATCH_SIZE), where, row, data)

    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in pairs.schema.types):
        for _ in cast_batches():  # only to check the texts
            pass
        return pairs
    parts = (TEXT_CACHE_VERSION, data.source, data.target, [digest_file(file) for file in files])
    return cache_tables(cast_batches(), repr(parts), data)


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Disable the progress bars and log messages of the libraries that read the hub."""
    datasets = import_datasets()
    utils = importlib.import_module("huggingface_hub.utils")
    with ExitStack() as stack:
        for library, logger in ((datasets, datasets.logging), (utils, utils.logging)):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                stack.callback(library.enable_progress_bars)
            stack.callback(logger.set_verbosity, logger.get_verbosity())
            logger.set_verbosity(logging.CRITICAL)
        yield


# ---------------------------------------------------------------------------------------------------------------- toy
generate_toy_splits = lru_cache(maxsize=1)(toy.generate)  # takes seconds, and a run reads two splits


def read_toy(data: DataConfig, split: str) -> pa.Table:
    split = "valid" if split in VALID_SPLITS else split
    if split not in toy.SPLIT_SIZES:
        raise UserError(f"the built-in corpus has no split {split}; it has {list_names(list(toy.SPLIT_SIZES))}")
    pairs = generate_toy_splits(data.seed)[split]
    from_german = data.source == "de"

    def orient_links(links: Iterable[tuple[int, int]]) -> list[list[int]]:
        return [[german, english] if from_german else [english, german] for german, english in links]

    return pa.table(
        {
            "source": [pair.german if from_german else pair.english for pair in pairs],
            "target": [pair.english if from_german else pair.german for pair in pairs],
            "sure": pa.array([orient_links(pair.sure) for pair in pairs], LINKS_TYPE),
            "possible": pa.array([orient_links(pair.possible) for pair in pairs], LINKS_TYPE),
        }
    )


PAIR_READERS = {
    "toy": read_toy,
    "text": read_files,
    "tsv": read_files,
    "jsonl": read_files,
    "parquet": read_parquet,
    "hub": read_hub,
}
