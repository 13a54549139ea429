"""Find the files of a split: under its name or a synonym of `valid`, compressed or not, in one file or in shards."""

import re
from pathlib import Path
from typing import NamedTuple

from nmt.config.data import DataConfig, last_component
from nmt.errors import UserError
from nmt.system.messages import list_names
from nmt.system.text import COMPRESSION_BY_SUFFIX

VALID_SPLITS = ("valid", "validation", "val", "dev")  # names of the validation split
# train.00.de, train-00.de, train-00000-of-00010.de; the hub may append a digest.
SHARD_PATTERN = r"(\.\d+|-\d+(?:-of-\d+(?:-[0-9a-f]+)?)?|)"


def find_shards(data: DataConfig, split: str, endings: list[str]) -> list[tuple[Path, ...]]:
    """Return the files of each shard of a split, one for each ending, sorted by the shards' names.

    Raises:
        UserError: a file or one of the shards counted in the names is missing, or the split exists both as one file
            and in shards.
    """
    folder = require_folder(data)
    file_names = sorted(path.name for path in folder.iterdir() if path.is_file())
    split_names = list_split_names(split)
    shards_by_name = {name: [match_shards(file_names, name, ending) for ending in endings] for name in split_names}
    name = next((name for name in split_names if any(shards_by_name[name])), split_names[0])
    sides = shards_by_name[name]
    shards = sorted({shard for side in sides for shard in side}) or [""]
    if shards[0] == "" and len(shards) > 1:
        both = " and ".join(next(side[shard] for side in sides if shard in side) for shard in shards[:2])
        raise UserError(f"data.path={folder} has {both}: the split {split} as a whole and in shards; keep only one")
    for shard in shards:
        total = re.search(r"-of-(\d+)", shard)
        if total and len(shards) != int(total[1]):
            raise UserError(f"data.path={folder} has {len(shards)} of the {int(total[1])} shards of {name}")
        for side, ending in zip(sides, endings, strict=True):
            if shard not in side:
                raise make_missing_file_error(folder / f"{name}{shard}{ending}", data)
    return [tuple(folder / side[shard] for side in sides) for shard in shards]


def match_shards(file_names: list[str], name: str, ending: str) -> dict[str, str]:
    """Return the file names of a split by shard suffix, which is empty for an unsharded file.

    An uncompressed file takes precedence over a compressed one.
    """
    suffixes = "|".join(map(re.escape, COMPRESSION_BY_SUFFIX))
    pattern = re.compile(re.escape(name) + SHARD_PATTERN + re.escape(ending) + f"({suffixes}|)")
    shards: dict[str, str] = {}
    for file_name in file_names:
        if match := pattern.fullmatch(file_name):
            shards.setdefault(match[1], file_name)
    return shards


class SplitFiles(NamedTuple):
    """The files of a split."""

    format: str  # text | tsv | jsonl | parquet
    shards: list[tuple[Path, ...]]  # the files of each shard: of both sides, or one
    columns: tuple[str, ...]  # the columns to read from them, none for text

    @property
    def files(self) -> list[Path]:
        return [file for shard in self.shards for file in shard]


def find_files(data: DataConfig, split: str) -> SplitFiles | None:
    """Return the files of a split; None for the built-in corpus and for what the datasets library finds.

    Raises:
        UserError: as `find_shards`.
    """
    columns = data.source, data.target
    if has_text_files(data, split):
        sides = columns if data.format == "text" else map(last_component, columns)
        return SplitFiles("text", find_shards(data, split, [f".{side}" for side in sides]), ())
    if data.format in ("tsv", "jsonl", "parquet"):
        return SplitFiles(data.format, find_shards(data, split, [f".{data.format}"]), columns)
    return None


def has_text_files(data: DataConfig, split: str) -> bool:
    """Return whether each side has files of its own.

    A folder with text of this split or of the training split may take the place of a dataset of the hub.
    """
    folder = Path(str(data.path))
    if data.format != "hub" or not folder.is_dir():
        return data.format == "text"
    file_names = sorted(path.name for path in folder.iterdir())
    ending = f".{last_component(data.source)}"
    return any(match_shards(file_names, name, ending) for name in ("train", *list_split_names(split)))


def describe_shards(files: list[Path]) -> str:
    """Return how messages refer to the shards of one side."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} to {files[-1].name}"


def require_folder(data: DataConfig) -> Path:
    folder = Path(str(data.path))
    if not folder.is_dir():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"data.path={folder} is not a folder{where}")
    return folder


def make_missing_file_error(file: Path, data: DataConfig) -> UserError:
    file_names = sorted(path.name for path in file.parent.iterdir())
    return UserError(
        f"{file} does not exist; data.format={data.format} with data.source={data.source} data.target={data.target} "
        f"needs it. The folder has {list_names(file_names)}"
    )


def list_split_names(split: str) -> list[str]:
    """Return the names under which a split may be stored, its own first."""
    if split not in VALID_SPLITS:
        return [split]
    return [split, *(name for name in VALID_SPLITS if name != split)]
