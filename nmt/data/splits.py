"""Find the files of a split: under its name or a synonym of `valid`, compressed or not, in one file or in shards."""

import re
from pathlib import Path

from nmt.config.data import DataConfig, last_component
from nmt.errors import UserError
from nmt.system.messages import list_names
from nmt.system.text import COMPRESSION_BY_SUFFIX

VALID_SPLITS = ("valid", "validation", "val", "dev")  # names of the validation split
# train.00.de, train-00.de, train-00000-of-00010.de; the hub may append a digest.
SHARD_PATTERN = r"(\.\d+|-\d+(?:-of-\d+(?:-[0-9a-f]+)?)?|)"


def find_split_files(data: DataConfig, split: str, endings: list[str]) -> list[tuple[Path, ...]]:
    """Return the files of each shard of a split, one for each ending, sorted by the shards' names.

    Raises:
        UserError: a file or one of the shards counted in the names is missing, or the split exists both as one file
            and in shards.
    """
    folder = require_folder(data)
    file_names = sorted(path.name for path in folder.iterdir() if path.is_file())
    split_names = list_split_names(split)
    shards_by_name = {name: [find_shards(file_names, name, ending) for ending in endings] for name in split_names}
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


def find_shards(file_names: list[str], name: str, ending: str) -> dict[str, str]:
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


def find_line_files(data: DataConfig, split: str) -> tuple[str, list[tuple[Path, ...]], tuple[str, ...]] | None:
    """Return the format of a split's line-based files, the files of each shard and the columns to read from them.

    None if the split is not stored in line-based files.
    """
    if has_text_files(data, split):
        sides = [side if data.format == "text" else last_component(side) for side in (data.source, data.target)]
        return "text", find_split_files(data, split, [f".{side}" for side in sides]), ()
    if data.format in ("tsv", "jsonl"):
        return data.format, find_split_files(data, split, [f".{data.format}"]), (data.source, data.target)
    return None


def find_parquet_files(data: DataConfig, split: str) -> list[str]:
    return [str(file) for (file,) in find_split_files(data, split, [".parquet"])]


def has_text_files(data: DataConfig, split: str) -> bool:
    """Return whether each side has files of its own.

    A folder with text of this split or of the training split may take the place of a dataset of the hub.
    """
    folder = Path(str(data.path))
    if data.format != "hub" or not folder.is_dir():
        return data.format == "text"
    file_names = sorted(path.name for path in folder.iterdir())
    ending = f".{last_component(data.source)}"
    return any(find_shards(file_names, name, ending) for name in ("train", *list_split_names(split)))


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
