"""Load sentence pairs from any source as a memory-mapped Arrow table with the columns `source` and `target`.

Parquet, folders and the hub are read by the `datasets` library, which also caches them. Line-based files have readers
of our own, whose errors name file and line. Nothing of a refused file is cached.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
from xxhash import xxh3_128

from nmt.config import SIDES, DataConfig
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.readers import LINE_READERS, TEXT_SCHEMA, BadLine
from nmt.data.splits import VALID_SPLITS, SplitFiles, find_files, list_split_names
from nmt.data.toy import corpus as toy
from nmt.data.word_links import GoldLinks, read_gold_links
from nmt.errors import UserError, suggest
from nmt.system.messages import clip_repr, first_line, list_names
from nmt.system.text import COMPRESSION_BY_SUFFIX, describe_decode_error, split_on_spaces

log = logging.getLogger("nmt")
READ_BATCH_SIZE = 10_000  # pairs in memory at a time
PAIRS_FILE = "pairs.arrow"
TEXT_CACHE_VERSION = 3  # of what is read from the same files; part of the cache key
# Arrow types that may hold text; some writers store strings as bytes.
TEXT_TYPES = [
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
]
LINKS_TYPE = pa.list_(pa.list_(pa.int64()))  # [source word, target word] of each link of a pair


def load_pairs(data: DataConfig, split: str) -> pa.Table:
    """Load the sentence pairs of a split: train, valid or test, or a name that the corpus itself uses.

    Pairs with an empty side are kept. `data.limit` applies to the split train. If there are gold links (of the built-in
    corpus, or in the files that `data.alignments` names), the columns `sure` and `possible` are lists of links
    [source word, target word], from 0.

    Raises:
        UserError: there is no such split, it is empty, or something in it is not a pair of texts.
    """
    if data.format == "toy":
        pairs = read_toy(data, split)
    elif data.format in LINE_READERS:
        pairs = read_lines(data, split)
    else:
        pairs = read_dataset(data, split)
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


# ---------------------------------------------------------------------------------------------------- line-based files
def read_lines(data: DataConfig, split: str) -> pa.Table:
    """Read the pairs of line-based files, or map them from the cache, which has them by a digest of the files."""
    files = find_files(data, split)
    assert files is not None

    def fill(part: Path) -> None:
        with pa.OSFile(str(part / PAIRS_FILE), "wb") as file, pa.ipc.new_stream(file, TEXT_SCHEMA) as writer:
            for batch in read_shards(files, data):
                writer.write_batch(batch)

    digests = [(str(path.resolve()), digest_file(path)) for path in files.paths]
    key = repr((TEXT_CACHE_VERSION, data.format, files.columns, digests))
    folder = get_or_build(cache_folder(data) / "text" / xxh3_128(key.encode()).hexdigest(), fill)
    return pa.ipc.open_stream(pa.memory_map(str(folder / PAIRS_FILE))).read_all()


def digest_file(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def read_shards(files: SplitFiles, data: DataConfig) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of line-based files.

    Raises:
        UserError: a line is invalid.
    """
    for shard in files.shards:
        for batch in LINE_READERS[data.format](*shard, *files.columns):
            if isinstance(batch, BadLine):
                raise UserError(
                    f"{batch.file}:{batch.number}: {batch.reason}; fix the line, or let nmt.prepare make a corpus "
                    "without such lines"
                )
            yield batch.select(SIDES)


def add_gold_links(pairs: pa.Table, data: DataConfig, split: str) -> pa.Table:
    """Add the gold links of DIR/SPLIT.<data.alignments>, which may be compressed, if there is such a file."""
    names = [f"{name}.{data.alignments}" for name in list_split_names(split)]
    paths = [Path(str(data.path), name + suffix) for name in names for suffix in ("", *COMPRESSION_BY_SUFFIX)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        log.warning(f"data.alignments={data.alignments}: {paths[0]} does not exist, so {split} has no gold links")
        return pairs
    sources, targets = ([split_on_spaces(line) for line in iter_column(pairs, side)] for side in SIDES)
    gold = read_gold_links(path, 0, sources, targets)
    for name in ("sure", "possible"):
        links = [[list(link) for link in sorted(getattr(pair_links, name))] for pair_links in gold]
        pairs = pairs.append_column(name, pa.array(links, LINKS_TYPE))
    return pairs


# ---------------------------------------------------------------------------------------------------- datasets library
def read_dataset(data: DataConfig, split: str) -> pa.Table:
    """Read Parquet files, a folder in another layout that the datasets library knows, or a dataset of the hub."""
    if data.streaming:
        return pa.concat_tables([TEXT_SCHEMA.empty_table(), *stream_pairs(data, split)])
    with convert_errors(data):
        return select_texts(open_dataset(data, split, streaming=False).data.table, 0, data, split)


def stream_pairs(data: DataConfig, split: str) -> Iterator[pa.Table]:
    """Yield the same pairs as `read_dataset` without caching them or downloading other splits."""
    row = 0
    with convert_errors(data):
        for table in open_dataset(data, split, streaming=True).with_format("arrow").iter(READ_BATCH_SIZE):
            yield select_texts(table, row, data, split)
            row += len(table)


def select_texts(table: pa.Table, first: int, data: DataConfig, split: str) -> pa.Table:
    """Return two columns, which may be nested as in `translation.de`, as checked text.

    first: the number of rows of the split before this table.

    Raises:
        UserError: there is no such column, or a value is null, of a type that holds no text, or not UTF-8.
    """
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()  # one level
    where = f"the split {split} of {data.path}"
    columns = []
    for key in SIDES:
        name, names = getattr(data, key), table.column_names
        if name not in names:
            raise UserError(
                f"data.{key}={name}: {where} has no such column; it has {list_names(names)}{suggest(name, names)}"
            )
        column = table[name]
        try:
            if column.type not in TEXT_TYPES or column.null_count:
                raise pa.ArrowInvalid
            columns.append(column.cast(pa.string()))
            columns[-1].validate(full=True)  # a column of strings may contain any bytes
        except pa.ArrowInvalid:
            reasons = ((row, check_text(value)) for row, value in enumerate(column, first + 1))
            row, reason = next((row, reason) for row, reason in reasons if reason)
            raise UserError(f"{where}: row {row}: '{name}' is {reason}") from None
    return pa.table(columns, schema=TEXT_SCHEMA)


def check_text(value: pa.Scalar) -> str:
    """Return why a value is not text, empty if it is."""
    try:
        text = value.as_py()
        text = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        return describe_decode_error(error)
    return "" if isinstance(text, str) else f"{clip_repr(text)}, of type {value.type}, not text"


def open_dataset(data: DataConfig, split: str, streaming: bool) -> Any:
    """Return a split as a `Dataset`, cached in data.cache, or as an `IterableDataset`.

    Raises:
        UserError: there is no such split.
    """
    load = partial(import_datasets().load_dataset, cache_dir=str(cache_folder(data) / "datasets"), streaming=streaming)
    if files := find_files(data, split):
        paths = [escape(str(path)) for path in files.paths]
        return load(data.format, data_files={split: paths}, split=split)
    log.info(f"loading {data.path}" + ("" if Path(str(data.path)).is_dir() else " from the hub"))
    splits = load(str(data.path), data.subset, revision=data.revision)
    name = next((name for name in list_split_names(split) if name in splits), None)
    if name is None:
        raise UserError(f"data.path={data.path} has no split {split}; it has {list_names(list(splits))}")
    return splits[name]


def import_datasets() -> ModuleType:
    """Import the datasets library, which takes a second, and turn off its progress bars and messages."""
    import datasets
    from huggingface_hub.utils import disable_progress_bars

    datasets.disable_progress_bars()
    disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request to the network, also for local files
    return datasets


@contextmanager
def convert_errors(data: DataConfig) -> Iterator[None]:
    """Convert errors of the datasets library to a `UserError` with the first line of the innermost cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library, the network and the hub raise errors without a common base class
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(
            f"data.path={data.path} cannot be loaded: {first_line(cause)}. Check data.path, data.subset, "
            f"data.revision, the connection, and whether the disk of the cache, {cache_folder(data)}, is full"
        ) from error


# ---------------------------------------------------------------------------------------------------------------- toy
generate_toy_splits = cache(partial(toy.generate, 1))  # takes seconds, and a run reads two splits


def read_toy(data: DataConfig, split: str) -> pa.Table:
    split = "valid" if split in VALID_SPLITS else split
    if split not in toy.SPLIT_SIZES:
        raise UserError(f"the built-in corpus has no split {split}; it has {list_names(list(toy.SPLIT_SIZES))}")
    pairs = generate_toy_splits()[split]
    is_from_german = data.source == "de"
    columns: dict[str, Any] = {
        side: [pair.german if is_german else pair.english for pair in pairs]
        for side, is_german in zip(SIDES, (is_from_german, not is_from_german), strict=True)
    }
    for name in ("sure", "possible"):
        links = [[list(link if is_from_german else link[::-1]) for link in getattr(pair, name)] for pair in pairs]
        columns[name] = pa.array(links, LINKS_TYPE)
    return pa.table(columns)
