"""Sentence pairs from any source, as a `datasets.Dataset` with the columns `source` and `target`.

What reads text here looks at every line before it stores any, so that a complaint names the file and the line.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
from datasets import Dataset, Features, Value

from nmt.config import DataConfig
from nmt.data import toy
from nmt.data.gold import read_gold
from nmt.data.lines import bad_line, raw_lines
from nmt.errors import UserError, nearest

log = logging.getLogger("nmt")
VALID = ("valid", "validation", "val", "dev")  # the validation split's names
CHUNK = 10_000  # pairs in memory at a time
SHOWN = 20  # names in a message

Pair = tuple[str, str]


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


def cache_folder(data: DataConfig) -> Path:
    """Where the read and the tokenised corpus are kept; made if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(data.cache) if data.cache else Path(base) / "nmt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be made ({error.strerror}); write data.cache=FOLDER") from error
    return folder


# ---------------------------------------------------------------------------------------------------- files of lines
def text_pairs(source: Path, target: Path) -> Iterator[Pair | UserError]:
    """The pairs of two line-aligned files; in the place of a bad one, what is wrong with it."""
    with open(source, "rb") as source_file, open(target, "rb") as target_file:
        lines = zip_longest(raw_lines(source_file), raw_lines(target_file))
        for number, (left, right) in enumerate(lines, 1):
            if left is None or right is None:
                longer = number + sum(1 for _ in lines)
                counts = (number - 1, longer) if left is None else (longer, number - 1)
                raise UserError(
                    f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; each line of one must translate "
                    "the same line of the other"
                )
            file = source
            try:
                text = left.decode()
                file = target
                yield text, right.decode()
            except UnicodeDecodeError as error:
                yield bad_line(file, number, error)


def parsed(path: Path, parse: Callable[[str], Pair | None], skip: int = 0) -> Iterator[Pair | UserError]:
    """The pairs that `parse` finds in the lines of a file; in the place of a bad one, what is wrong with it."""
    with open(path, "rb") as file:
        for number, line in enumerate(raw_lines(file), 1):
            if number <= skip:
                continue
            try:
                pair = parse(line.decode())
            except ValueError as error:
                yield bad_line(path, number, error)
            else:
                if pair is not None:
                    yield pair


def tsv_pairs(path: Path, source: str, target: str) -> Iterator[Pair | UserError]:
    """The pairs of a table: columns by their names in the first line or, if both are numbers, by these, from 1."""
    header = not (source.isdecimal() and target.isdecimal())
    if header:
        with open(path, "rb") as file:
            names = next(raw_lines(file), b"").decode(errors="replace").split("\t")
        for name in (source, target):
            if name not in names:
                raise UserError(
                    f"{path}: no column '{name}' in the first line, which has {listed(names)}{nearest(name, names)}; "
                    "if it names no columns, give their numbers: data.source=1 data.target=2"
                )
        left, right = names.index(source), names.index(target)
    else:
        left, right = int(source) - 1, int(target) - 1
        if min(left, right) < 0:
            raise UserError(f"data.source={source} data.target={target}: columns are counted from 1")

    def parse(line: str) -> Pair:
        cells = line.split("\t")
        if len(cells) <= max(left, right):
            raise ValueError(f"{len(cells)} columns, but {max(left, right) + 1} are needed")
        return cells[left], cells[right]

    return parsed(path, parse, skip=int(header))


def jsonl_pairs(path: Path, source: str, target: str) -> Iterator[Pair | UserError]:
    """The pairs of a file of JSON objects, one a line; keys may be nested as in `translation.de`."""

    def parse(line: str) -> Pair | None:
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at position {error.pos + 1})") from None
        texts = dig(record, source), dig(record, target)
        for key, text in zip((source, target), texts, strict=True):
            if not isinstance(text, str):
                held = listed(list(record)) if isinstance(record, dict) else type(record).__name__
                raise ValueError(f"no text under '{key}' but {text!r}; the line has {held}")
            text.encode()  # half a surrogate pair is no text
        return texts

    return parsed(path, parse)


def dig(record: Any, key: str) -> Any:
    """The value of a key in a JSON object, or in an object within it; else None."""
    if not isinstance(record, dict):
        return None
    head, dot, rest = key.partition(".")
    return dig(record.get(head), rest) if dot and key not in record else record.get(key)


LINE_READERS: dict[str, Callable[..., Iterator[Pair | UserError]]] = {
    "text": text_pairs,
    "tsv": tsv_pairs,
    "jsonl": jsonl_pairs,
}


def stored(kind: str, arguments: tuple[Any, ...], data: DataConfig) -> Dataset:
    """Check all pairs, then keep them in the cache, under a key made of the pairs themselves."""
    key, count, bad = hashlib.sha256(), 0, []
    for item in LINE_READERS[kind](*arguments):
        if isinstance(item, UserError):
            bad.append(str(item))
            if data.invalid == "refuse":
                raise UserError(f"{item}; mend the line, or leave such lines out: data.invalid=drop")
        else:
            key.update(f"{len(item[0])} {len(item[1])} {item[0]}{item[1]}".encode())
            count += 1
    if bad:
        log.warning(f"data.invalid=drop: left out {len(bad):,} lines, the first: {'; '.join(bad[:3])}")
    if not count:
        raise UserError(f"{arguments[0]} has no pair of texts")
    return Dataset.from_generator(
        generate,
        gen_kwargs={"kind": kind, "arguments": arguments, "key": key.hexdigest()},
        features=Features({"source": Value("string"), "target": Value("string")}),
        cache_dir=str(cache_folder(data) / "text"),
    )


def generate(kind: str, arguments: tuple[Any, ...], key: str) -> Iterator[dict[str, str]]:
    """What the cache holds; the key is an argument because `datasets` knows a cache by the arguments."""
    for item in LINE_READERS[kind](*arguments):
        if not isinstance(item, UserError):
            yield {"source": item[0], "target": item[1]}


def read_text(data: DataConfig, split: str) -> Dataset:
    return stored("text", find_files(data, split, [f".{last(data.source)}", f".{last(data.target)}"]), data)


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


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "nothing"


# ----------------------------------------------------------------------------------------------------- parquet and hub
def read_parquet(data: DataConfig, split: str) -> Dataset:
    folder = existing_folder(data)
    found = [sorted(folder.glob(f"{name}*.parquet")) for name in names_of(split)]
    files = next((files for files in found if files), None)
    if files is None:
        raise missing(folder / f"{split}*.parquet", data)
    where = ", ".join(map(str, files))
    cache = str(cache_folder(data) / "parquet")
    try:
        table = datasets.load_dataset("parquet", data_files=list(map(str, files)), split="train", cache_dir=cache)
    except Exception as error:  # the libraries have no common one for files that they cannot read
        raise UserError(f"{where} cannot be read: {reason(error)}") from error
    return two_columns(table, where, data)


def read_hub(data: DataConfig, split: str) -> Dataset:
    """A dataset of the hub, or a local folder that is laid out like one, or that holds text."""
    path = Path(str(data.path))
    if (path / f"train.{last(data.source)}").is_file():
        return read_text(data, split)
    cache = str(cache_folder(data) / "hub") if path.is_dir() else None  # else the hub's own
    log.info(f"loading {path}" if cache else f"loading {path} from the hub")
    try:
        table = datasets.load_dataset(str(path), data.subset, cache_dir=cache)
    except Exception as error:  # whatever the library, the network or the hub may say
        raise UserError(
            f"data.path={path} data.subset={data.subset} cannot be loaded: {reason(error)}. Check the name, the subset "
            "and the connection; a folder on this machine does as well: data.path=FOLDER"
        ) from error
    name = next((name for name in names_of(split) if name in table), None)
    if name is None:
        raise UserError(f"data.path={path} has no split {split}; it has {listed(list(table))}")
    return two_columns(table[name], f"the split {name} of {path}", data)


def reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


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
                raise UserError(f"{where}: row {row + 1} has no text in '{name}' but {pairs[row][key]!r}")
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
