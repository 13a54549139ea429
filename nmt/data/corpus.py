"""Sentence pairs from any source, as a `datasets.Dataset` with the columns `source` and `target`; those from files of
lines have `line`, too, the number of the line.

What reads text here looks at every line before it stores any, so that a complaint names the file and the line.
"""

import errno
import hashlib
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from datasets.arrow_writer import ArrowWriter

from nmt.config import DataConfig
from nmt.data import toy
from nmt.data.cache import DIGESTS, cache_folder, making, seal, unwritable, whole
from nmt.data.gold import read_gold
from nmt.data.lines import counted, first_of
from nmt.data.readers import LINE_READERS, BadLine, Line, clipped, listed
from nmt.errors import UserError, nearest

log = logging.getLogger("nmt")
VALID = ("valid", "validation", "val", "dev")  # the validation split's names
CHUNK = 10_000  # pairs in memory at a time
BLOCK = 1_000  # lines in memory at a time, some of which may be very long
FEATURES = Features({"source": Value("string"), "target": Value("string"), "line": Value("int64")})
PAIRS = "pairs.arrow"
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
def stored(kind: str, arguments: tuple[Any, ...], data: DataConfig) -> Dataset:
    """Check all lines, then keep the pairs in the cache, under a key made of themselves and of their lines' numbers."""
    bad: dict[tuple[Path, str], array[int]] = defaultdict(lambda: array("q"))

    def note(line: BadLine) -> None:
        if data.invalid == "refuse":
            raise UserError(
                f"{line.file}:{line.number}: {line.reason}; mend the line, or leave such lines out: data.invalid=drop"
            )
        bad[line.file, line.kind].append(line.number)

    key = digest(blocks(kind, arguments, note))
    for (file, trouble), numbers in bad.items():
        count = counted(len(numbers), "line")
        log.warning(f"data.invalid=drop: left out {count} of {file}: {trouble} ({first_of(numbers)})")
    if key == digest([]):
        raise UserError(f"{arguments[0]} has no pair of texts")
    folder = cache_folder(data) / "text" / key
    if not whole(folder):
        with making(folder) as part:
            if digest(written(blocks(kind, arguments, lambda line: None), part / PAIRS)) != key:
                raise UserError(f"{arguments[0]} changed while it was read; repeat the command")
    return Dataset.from_file(str(folder / PAIRS))


def blocks(kind: str, arguments: tuple[Any, ...], note: Callable[[BadLine], None]) -> Iterator[list[Line]]:
    """The pairs of files of lines, some at a time; `note` is told of lines that hold none."""
    block: list[Line] = []
    for item in LINE_READERS[kind](*arguments):
        if isinstance(item, BadLine):
            note(item)
            continue
        block.append(item)
        if len(block) == BLOCK:
            yield block
            block = []
    if block:
        yield block


def digest(blocks: Iterable[list[Line]]) -> str:
    key = hashlib.sha256()
    for block in blocks:
        sizes = [(line.number, len(line.source), len(line.target)) for line in block]
        key.update(np.array(sizes, dtype=np.int64).tobytes())
        key.update("".join([text for line in block for text in line[1:]]).encode())
    return key.hexdigest()


def written(blocks: Iterable[list[Line]], path: Path) -> Iterator[list[Line]]:
    """The same, and each is written to a file on its way."""
    with ArrowWriter(features=FEATURES, path=str(path)) as writer:
        for block in blocks:
            lines, sources, targets = zip(*block, strict=True)
            writer.write_batch({"source": list(sources), "target": list(targets), "line": list(lines)})
            yield block
        writer.finalize()


def read_text(data: DataConfig, split: str) -> Dataset:
    return stored("text", text_files(data, split), data)


def text_files(data: DataConfig, split: str) -> tuple[Path, ...]:
    return find_files(data, split, [f".{last(data.source)}", f".{last(data.target)}"])


def is_text(data: DataConfig) -> bool:
    """Whether the sides have files of their own: a folder of text may take the place of a dataset of the hub."""
    file = Path(str(data.path)) / f"train.{last(data.source)}"
    return data.format == "text" or (data.format == "hub" and file.is_file())


def origins(data: DataConfig, split: str) -> tuple[str, str]:
    """What to call source and target of a split in a message: their files, or one and the columns."""
    if is_text(data):
        source, target = text_files(data, split)
        return str(source), str(target)
    lines = data.format in LINE_READERS
    where = find_files(data, split, [f".{data.format}"])[0] if lines else data.path or "the built-in corpus"
    return f"{where}, {data.source}", f"{where}, {data.target}"


def with_gold(pairs: Dataset, data: DataConfig, split: str) -> Dataset:
    """The same with the gold links of DIR/SPLIT.<data.alignments>, where there is such a file."""
    paths = [existing_folder(data) / f"{name}.{data.alignments}" for name in names_of(split)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        log.warning(f"data.alignments={data.alignments}: there is no {paths[0]}, so {split} has no gold links")
        return pairs
    sources, targets = (list(column(pairs, side)) for side in ("source", "target"))
    gold = read_gold(path, 0, [line.split() for line in sources], [line.split() for line in targets])
    places = [(between_spaces(source), between_spaces(target)) for source, target in zip(sources, targets, strict=True)]
    for name in ("sure", "possible"):
        links = (
            [(s[i], t[j]) for i, j in sorted(getattr(one, name))] for one, (s, t) in zip(gold, places, strict=True)
        )
        pairs = pairs.add_column(name, list(links))
    return pairs


def between_spaces(line: str) -> list[int]:
    """For each word of a line the place of the word between spaces (U+0020) that it is in: pieces know these alone, and
    gold links count what any white space divides, a no-break space for one."""
    return [place for place, word in enumerate(filter(None, line.split(" "))) for _ in word.split()]


def read_tsv(data: DataConfig, split: str) -> Dataset:
    return stored("tsv", (*find_files(data, split, [".tsv"]), data.source, data.target), data)


def read_jsonl(data: DataConfig, split: str) -> Dataset:
    return stored("jsonl", (*find_files(data, split, [".jsonl"]), data.source, data.target), data)


def find_files(data: DataConfig, split: str, endings: list[str]) -> tuple[Path, ...]:
    """The files of a split, one for each ending; named after the split, or by another name of the validation split."""
    folder = existing_folder(data)
    sets = [tuple(folder / f"{name}{ending}" for ending in endings) for name in names_of(split)]
    files = next((files for files in sets if any(file.exists() for file in files)), sets[0])
    for file in files:
        if not file.is_file():
            raise missing(file, data)
    return files


def existing_folder(data: DataConfig) -> Path:
    folder = Path(str(data.path))
    if not folder.is_dir():
        raise UserError(f"data.path={folder} is not a folder")
    return folder


def missing(file: Path, data: DataConfig) -> UserError:
    held = sorted(path.name for path in file.parent.iterdir())
    return UserError(
        f"{file} does not exist; data.format={data.format} with data.source={data.source} data.target={data.target} "
        f"needs it. The folder has {listed(held)}"
    )


def names_of(split: str) -> list[str]:
    return [split, *(name for name in VALID if name != split)] if split in VALID else [split]


def last(name: str) -> str:
    """`de` of `translation.de`, so that text can take the place of a dataset that has nested columns."""
    return name.rpartition(".")[2]


# ----------------------------------------------------------------------------------------------------- parquet and hub
def read_parquet(data: DataConfig, split: str) -> Dataset:
    folder = existing_folder(data)
    found = [sorted(folder.glob(f"{name}*.parquet")) for name in names_of(split)]
    files = next((files for files in found if files), None)
    if files is None:
        raise missing(folder / f"{split}*.parquet", data)
    where = ", ".join(map(str, files))
    cache = cache_folder(data) / "parquet"
    try:
        table = through_cache(cache, "parquet", data_files=list(map(str, files)), split="train")
    except Exception as error:  # the libraries have no common one for files that they cannot read
        raise full_disk(cache, error) or UserError(f"{where} cannot be read: {reason(error)}") from error
    return two_columns(table, where, data)


def read_hub(data: DataConfig, split: str) -> Dataset:
    """A dataset of the hub, or a local folder that is laid out like one, or that holds text."""
    path = Path(str(data.path))
    if is_text(data):
        return read_text(data, split)
    cache = cache_folder(data) / "hub" if path.is_dir() else None  # else the hub's own
    log.info(f"loading {path}" if cache else f"loading {path} from the hub")
    try:
        table = through_cache(cache, str(path), data.subset)
    except Exception as error:  # whatever the library, the network or the hub may say
        raise full_disk(cache, error) or UserError(
            f"data.path={path} data.subset={data.subset} cannot be loaded: {reason(error)}. Check the name, the subset "
            "and the connection; a folder on this machine does as well: data.path=FOLDER"
        ) from error
    name = next((name for name in names_of(split) if name in table), None)
    if name is None:
        raise UserError(f"data.path={path} has no split {split}; it has {listed(list(table))}")
    return two_columns(table[name], f"the split {name} of {path}", data)


def through_cache(cache: Path | None, *arguments: Any, **others: Any) -> Any:
    """What the datasets library loads. In a cache of ours, what is damaged is made anew: the library itself notices
    at most that a file is cut short."""
    if cache is None:
        return datasets.load_dataset(*arguments, **others, cache_dir=None)
    load = partial(datasets.load_dataset, *arguments, **others, cache_dir=str(cache))
    try:
        table = load()
    except Exception:
        if all([whole(file.parent) for file in list(cache.rglob(DIGESTS))]):
            raise
        table = load()
    splits = list(table.values()) if isinstance(table, DatasetDict) else [table]
    folders = {Path(file["filename"]).parent for split in splits for file in split.cache_files}
    if not all([whole(folder) for folder in folders if (folder / DIGESTS).exists()]):
        return through_cache(cache, *arguments, **others)
    for folder in folders:
        if not (folder / DIGESTS).exists():
            seal(folder)
    return table


def innermost(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else innermost(error.__cause__)


def reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    error = innermost(error)
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def full_disk(cache: Path | None, error: BaseException) -> UserError | None:
    cause = innermost(error)
    return unwritable(cache, cause) if cache and isinstance(cause, OSError) and cause.errno in FULL else None


def two_columns(table: Dataset, where: str, data: DataConfig) -> Dataset:
    """The columns `data.source` and `data.target`, which may be nested as in `translation.de`, checked to be texts."""
    table = table.flatten()
    columns = {"source": data.source, "target": data.target}
    for key, name in columns.items():
        if name not in table.column_names:
            names = table.column_names
            raise UserError(f"data.{key}={name}: {where} has no such column but {listed(names)}{nearest(name, names)}")
    pairs = table.select_columns([data.source, data.target]).rename_columns(
        {name: key for key, name in columns.items()}
    )
    rows = 0
    for batch in pairs.with_format("arrow").iter(CHUNK):
        for key, name in columns.items():
            texts = str(batch[key].type) in ("string", "large_string")
            if not texts or batch[key].null_count:
                row = rows + (batch[key].to_pylist().index(None) if texts else 0)
                raise UserError(f"{where}: row {row + 1} has no text in '{name}' but {clipped(pairs[row][key])}")
        rows += len(batch)
    return pairs


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
    "text": read_text,
    "tsv": read_tsv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hub": read_hub,
}
