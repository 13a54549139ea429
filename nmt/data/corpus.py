"""Sentence pairs from any source, as a `datasets.Dataset` with the columns `source` and `target`; those from a file of
lines for each side, or one for both, have `line`, too, the number of the line.

What reads text here names the file and the line in a complaint, and keeps nothing of a file that it refuses.
"""

import errno
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
import pyarrow as pa
from datasets import Dataset, DatasetDict
from datasets.table import InMemoryTable
from xxhash import xxh3_128

from nmt.config import DataConfig
from nmt.data.cache import DIGESTS, cache_folder, digest, get_or_build, is_valid, unwritable, write_digests
from nmt.data.readers import LINE_READERS, SCHEMA, TEXTS, BadLine, clipped, listed
from nmt.data.splits import VALID, called, existing_folder, files_of, is_text, names_of, parquet_files
from nmt.data.toy import corpus as toy
from nmt.data.word_links import read_gold
from nmt.errors import UserError, suggest
from nmt.runtime.lines import FIRST, NOT_TEXT, PACKED, count_of, describe_decode_error, first_few, split_on_spaces

log = logging.getLogger("nmt")
CHUNK = 10_000  # pairs in memory at a time
PAIRS, REPORT = "pairs.arrow", "report.json"  # what was read of files of lines, and what was left out
LAYOUT = 1  # of these two; another one gets another key
TEXT_TYPES = (  # of Arrow; a file's strings are bytes where its writer did not say that they are text
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary),
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_pairs(data: DataConfig, split: str) -> Dataset:
    """The sentence pairs of a split: train, valid or test, or a name that the corpus itself uses.

    Pairs with an empty side are kept. `data.limit` applies to the split train. Where there are gold links (the built-in
    corpus has them, `data.alignments` names those of text), two more columns, `sure` and `possible`, are lists of links
    [source word, target word], from 0.

    Raises:
        UserError: when there is no such split, or something in it is not a pair of texts.
    """
    with quiet():
        pairs = READERS[data.format](data, split)
    if not len(pairs):
        raise UserError(f"the split {split} of data.path={data.path} is empty")
    if data.alignments is not None:
        pairs = with_gold(pairs, data, split)
    if split == "train" and data.limit is not None:
        pairs = pairs.select(range(min(data.limit, len(pairs))))
    return pairs


def column(pairs: Dataset, name: str) -> Iterator[str]:
    """The texts of a column in order, with few in memory (iterating over `pairs[name]` is ten times slower)."""
    for batch in pairs.select_columns(name).iter(CHUNK):
        yield from batch[name]


# ---------------------------------------------------------------------------------------------------- files of lines
def read_files(data: DataConfig, split: str) -> Dataset:
    """The pairs of files of lines, in the cache under a key made of the files' bytes; and what was left out of them, in
    the log, also where that was found out before."""
    found = files_of(data, split)
    assert found is not None
    kind, shards, columns = found
    files = [file for shard in shards for file in shard]

    def key() -> str:
        parts = (LAYOUT, kind, columns, data.invalid, [digest(file) for file in files])
        return xxh3_128(repr(parts).encode()).hexdigest()

    def fill(part: Path) -> None:
        bad: dict[tuple[Path, str], list[int]] = defaultdict(lambda: [0])
        rows = 0
        with open(part / PAIRS, "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for shard in shards:
                for item in LINE_READERS[kind](*shard, *columns):
                    if isinstance(item, BadLine):
                        note(item, bad, data)
                    else:
                        rows += len(item)
                        writer.write_batch(item)
        report = [(files.index(path), trouble, *counts) for (path, trouble), counts in bad.items()]
        if not rows:
            tell(report, files)
            raise UserError(f"{files[0]} has no pair of texts")
        if key() != begun:
            raise UserError(f"{files[0]} changed while it was read; repeat the command")
        (part / REPORT).write_text(json.dumps(report), encoding="utf-8")

    begun = key()
    folder = get_or_build(cache_folder(data) / "text" / begun, fill)
    tell(json.loads((folder / REPORT).read_bytes()), files)
    pairs = Dataset.from_file(str(folder / PAIRS))
    return pairs if len(shards) == 1 else pairs.remove_columns("line")  # of which of them?


def note(line: BadLine, bad: dict[tuple[Path, str], list[int]], data: DataConfig) -> None:
    """Refuse a line, or count it, and keep the numbers of the first."""
    if data.invalid == "refuse":
        whole = ""
        if line.kind == NOT_TEXT:
            whole = "; if the whole file has another encoding, make UTF-8 of it: iconv -f LATIN1 -t UTF-8"
        raise UserError(
            f"{line.file}:{line.number}: {line.reason}; mend the line, or leave such lines out: "
            f"data.invalid=drop{whole}"
        )
    counts = bad[line.file, line.kind]
    counts[0] += 1
    counts += [line.number] * (len(counts) <= FIRST)


def tell(report: list[Any], files: list[Path]) -> None:
    """Which lines were left out: the place of their file, the trouble, how many, the first numbers."""
    for place, trouble, count, *first in report:
        tell_of(files[place], trouble, count, *first)


def tell_of(file: Path, trouble: str, count: int, *first: int) -> None:
    log.warning(f"data.invalid=drop: left out {count_of(count, 'line')} of {file}: {trouble} ({first_few(first)})")


def origins(data: DataConfig, split: str) -> tuple[str, str]:
    """What to call source and target of a split in a message: their files, or one and the columns."""
    if split == "train" and data.corpora:
        where = f"data.path={data.path} and data.corpora"
    elif (files := files_of(data, split)) is None:
        where = data.path or "the built-in corpus"
    elif files[0] == "text":
        source, target = (called(list(side)) for side in zip(*files[1], strict=True))
        return source, target
    else:
        where = called([file for (file,) in files[1]])
    return f"{where}, {data.source}", f"{where}, {data.target}"


def with_gold(pairs: Dataset, data: DataConfig, split: str) -> Dataset:
    """The same with the gold links of DIR/SPLIT.<data.alignments>, packed or not, where there is such a file."""
    names = [f"{name}.{data.alignments}{packed}" for name in names_of(split) for packed in ("", *PACKED)]
    paths = [existing_folder(data) / name for name in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        log.warning(f"data.alignments={data.alignments}: there is no {paths[0]}, so {split} has no gold links")
        return pairs
    sources, targets = (list(column(pairs, side)) for side in ("source", "target"))
    gold = read_gold(path, 0, [line.split() for line in sources], [line.split() for line in targets])
    places = [(words_around(source), words_around(target)) for source, target in zip(sources, targets, strict=True)]
    for name in ("sure", "possible"):
        links = (
            [(s[i], t[j]) for i, j in sorted(getattr(one, name))] for one, (s, t) in zip(gold, places, strict=True)
        )
        pairs = pairs.add_column(name, list(links))
    return pairs


def words_around(line: str) -> list[int]:
    """For each word of a line the place of the word between spaces that it is in: pieces know these alone, and gold
    links count what any white space divides, a no-break space for one."""
    return [place for place, word in enumerate(split_on_spaces(line)) for _ in word.split()]


# ----------------------------------------------------------------------------------------------------- parquet and hub
def read_parquet(data: DataConfig, split: str) -> Dataset:
    files, cache = parquet_files(data, split), cache_folder(data) / "parquet"
    with reading(data, ", ".join(files), cache):
        table = through_cache(cache, "parquet", data_files=list(map(escape, files)), split="train")
    return two_columns(table, ", ".join(files), data)


def read_hub(data: DataConfig, split: str) -> Dataset:
    """A dataset of the hub, or a local folder that is laid out like one, or that holds text."""
    if is_text(data, split):
        return read_files(data, split)
    if data.streaming:
        return Dataset(InMemoryTable(pa.concat_tables([TEXTS.empty_table(), *streamed(data, split)])))
    path = hub_path(data)
    cache = cache_folder(data) / "hub" if path.is_dir() else None  # else the hub's own
    log.info(f"loading {path}" if cache else f"loading {path} from the hub")
    with reading(data, "", cache):
        table = through_cache(cache, str(path), data.subset, revision=data.revision)
    return two_columns(split_of(table, split, data), f"the split {split} of {path}", data)


def streamed(data: DataConfig, split: str) -> Iterator[pa.Table]:
    """The pairs of Parquet files, or of a split of a dataset of the hub, as the datasets library reads them; nothing is
    kept, and of other splits nothing fetched."""
    files = parquet_files(data, split) if data.format == "parquet" else []
    where, row = ", ".join(files) or f"the split {split} of {data.path}", 0
    with reading(data, ", ".join(files)):
        if files:
            load = partial(datasets.load_dataset, "parquet", data_files=list(map(escape, files)), split="train")
        else:
            load = partial(datasets.load_dataset, str(hub_path(data)), data.subset, revision=data.revision)
        with quiet():
            found = load(streaming=True)
        rows = found if files else split_of(found, split, data)
        for table in rows.with_format("arrow").iter(CHUNK):
            table = flat(table)
            check_columns(table.column_names, where, data)
            pairs = pa.table({"source": table[data.source], "target": table[data.target]})
            yield as_texts(pairs, where, row, data)
            row += len(pairs)


def hub_path(data: DataConfig) -> Path:
    """A dataset's name on the hub, or a folder, refused where the library would read others for it."""
    path = Path(str(data.path))
    if path.is_dir() and (whole := str(path.resolve())) != escape(whole):
        raise UserError(f"data.path={path}: the datasets library takes *, ? and [ in {whole} for a pattern; rename it")
    return path


def flat(table: pa.Table) -> pa.Table:
    """With nested columns as in `translation.de`, however deep."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


@contextmanager
def reading(data: DataConfig, files: str, cache: Path | None = None) -> Iterator[None]:
    """Where the datasets library fails, at these files, at the hub, or because this cache has no room, say so in a
    line: the first one of the innermost cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # they have no common one: whatever the library, the network or the hub may say
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cache and isinstance(cause, OSError) and cause.errno in FULL:
            raise unwritable(cache, cause) from error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        if files:
            raise UserError(f"{files} cannot be read: {reason}") from error
        keys = "".join(f" data.{key}={value}" for key in ("subset", "revision") if (value := getattr(data, key)))
        raise UserError(
            f"data.path={data.path}{keys} cannot be loaded: {reason}. Check the name, the subset, the revision and the "
            "connection; a folder on this machine does as well: data.path=FOLDER"
        ) from error


def split_of(table: Any, split: str, data: DataConfig) -> Any:
    name = next((name for name in names_of(split) if name in table), None)
    if name is None:
        raise UserError(f"data.path={data.path} has no split {split}; it has {listed(list(table))}")
    return table[name]


def through_cache(cache: Path | None, *arguments: Any, **others: Any) -> Any:
    """What the datasets library loads. In a cache of ours, what is damaged is made anew: the library itself notices
    at most that a file is cut short."""
    load = partial(datasets.load_dataset, *arguments, **others, keep_in_memory=False)
    if cache is None:
        return load(cache_dir=None)
    load = partial(load, cache_dir=str(cache))
    try:
        table = load()
    except Exception:
        if all([is_valid(file.parent) for file in list(cache.rglob(DIGESTS))]):
            raise
        table = load()
    splits = list(table.values()) if isinstance(table, DatasetDict) else [table]
    folders = {Path(file["filename"]).parent for split in splits for file in split.cache_files}
    if not all([is_valid(folder) for folder in folders if (folder / DIGESTS).exists()]):
        return through_cache(cache, *arguments, **others)
    for folder in folders:
        if not (folder / DIGESTS).exists():
            write_digests(folder)
    return table


def two_columns(table: Dataset, where: str, data: DataConfig) -> Dataset:
    """The columns `data.source` and `data.target`, which may be nested as in `translation.de`, checked to be texts.

    Strings stay where they are; other types of text, such as views or bytes, are rewritten as strings in the cache.
    """
    table = table.flatten()
    check_columns(table.column_names, where, data)
    names = {data.source: "source", data.target: "target"}
    pairs = table.select_columns(list(names)).rename_columns(names)

    def texts() -> Iterator[pa.Table]:
        rows = 0
        for batch in pairs.with_format("arrow").iter(CHUNK):
            yield as_texts(batch, where, rows, data)
            rows += len(batch)

    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in pairs.data.schema.types):
        for _ in texts():
            pass
        return pairs

    def fill(part: Path) -> None:
        with open(part / PAIRS, "wb") as file, pa.ipc.new_stream(file, TEXTS) as writer:
            for batch in texts():
                writer.write_table(batch)

    parts = (LAYOUT, *names, [digest(Path(file["filename"])) for file in pairs.cache_files])
    key = xxh3_128(repr(parts).encode()).hexdigest()
    return Dataset.from_file(str(get_or_build(cache_folder(data) / "text" / key, fill) / PAIRS))


def check_columns(names: list[str], where: str, data: DataConfig) -> None:
    for key, name in (("source", data.source), ("target", data.target)):
        if name not in names:
            raise UserError(f"data.{key}={name}: {where} has no such column but {listed(names)}{suggest(name, names)}")


def as_texts(table: pa.Table, where: str, rows: int, data: DataConfig) -> pa.Table:
    """A table of pairs as strings, whatever Arrow type holds their text; before it there were `rows` rows.

    Raises:
        UserError: a value is null, of a type that holds no text, or not UTF-8.
    """
    columns = []
    for key, name in (("source", data.source), ("target", data.target)):
        column, kind = table[key], table[key].type
        if encoded := pa.types.is_dictionary(kind):
            kind = kind.value_type
        texts = any(holds(kind) for holds in TEXT_TYPES)
        if texts and encoded:
            chunks = [chunk.dictionary.cast(pa.large_binary()).take(chunk.indices) for chunk in column.chunks]
            column = pa.chunked_array(chunks, pa.large_binary())
        if not texts or column.null_count:
            row = column.to_pylist().index(None) if texts else 0
            value = clipped(column[row].as_py()) + ("" if texts else f", of type {table[key].type}")
            raise UserError(f"{where}: row {rows + row + 1} has no text in '{name}' but {value}")
        try:
            columns.append(column.cast(pa.string()))
            columns[-1].validate(full=True)  # whoever wrote a column of strings may have put any bytes there
        except pa.ArrowInvalid:
            for row, value in enumerate(column.cast(pa.large_binary())):
                try:
                    value.as_py().decode()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{where}: row {rows + row + 1} has no text in '{name}', of type {table[key].type}: "
                        f"{describe_decode_error(error)}; write the column as strings in UTF-8"
                    ) from None
            raise
    return pa.table(columns, schema=TEXTS)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and notices away from the screen."""
    with ExitStack() as after:
        for library, notices in ((datasets, datasets.logging), (huggingface_hub.utils, huggingface_hub.utils.logging)):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                after.callback(library.enable_progress_bars)
            after.callback(notices.set_verbosity, notices.get_verbosity())
            notices.set_verbosity(logging.CRITICAL)
        yield


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
    "text": read_files,
    "tsv": read_files,
    "jsonl": read_files,
    "parquet": read_parquet,
    "hub": read_hub,
}
