"""Find the files of a split: under its name or a synonym of `valid`, compressed or not, in one file or in shards."""

import re
from pathlib import Path
from typing import NamedTuple

from nmt.config import DataConfig
from nmt.errors import UserError
from nmt.system.messages import list_names

VALID_SPLITS = ("valid", "validation", "val", "dev")  # names of the validation split
SHARD_PATTERN = r"([.-]\d[\w-]*)?"  # train.00.de, train-00.de, train-00000-of-00010.de


class SplitFiles(NamedTuple):
    """The files of a split."""

    shards: list[tuple[Path, ...]]  # the files of each shard: of both sides, or one
    columns: tuple[str, ...]  # the columns to read from them, none for text

    @property
    def paths(self) -> list[Path]:
        return [path for shard in self.shards for path in shard]


def find_files(data: DataConfig, split: str) -> SplitFiles | None:
    """Return the files of a split, by the names of their shards; None for the built-in corpus and for data.format=hub.

    Raises:
        UserError: a file or a shard is missing, or the split exists both as one file and in shards.
    """
    if data.format in ("toy", "hub"):
        return None
    folder = Path(str(data.path))
    if not folder.is_dir():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"data.path={folder} is not a folder{where}")
    columns = (data.source, data.target)
    endings = columns if data.format == "text" else (data.format,)
    file_names = sorted(path.name for path in folder.iterdir())
    found = {name: [match_shards(file_names, name, end) for end in endings] for name in list_split_names(split)}
    name = next((name for name in found if any(found[name])), split)
    shards = sorted({shard for side in found[name] for shard in side}) or [""]
    if len(shards) > 1 and not shards[0]:
        raise UserError(f"data.path={folder} has the split {name} both as a whole and in shards; keep only one")
    for shard in shards:
        total = re.search(r"-of-0*(\d+)", shard)
        if total and len(shards) != int(total[1]):
            raise UserError(f"data.path={folder} has {len(shards)} of the {total[1]} shards of {name}")
        for end, side in zip(endings, found[name], strict=True):
            if shard not in side:
                raise UserError(
                    f"{folder / f'{name}{shard}.{end}'} does not exist; data.format={data.format} with "
                    f"data.source={data.source} data.target={data.target} needs it. The folder has "
                    f"{list_names(file_names)}"
                )
    return SplitFiles(
        [tuple(folder / side[shard] for side in found[name]) for shard in shards],
        () if data.format == "text" else columns,
    )


def match_shards(file_names: list[str], name: str, ending: str) -> dict[str, str]:
    """Return the file names of a split by shard, which is empty for an unsharded file.

    Of the sorted names, an uncompressed file comes before a compressed one, and is used.
    """
    pattern = re.compile(rf"{re.escape(name)}{SHARD_PATTERN}\.{re.escape(ending)}(\.gz|\.zst)?")
    shards: dict[str, str] = {}
    for match in filter(None, map(pattern.fullmatch, file_names)):
        shards.setdefault(match[1] or "", match[0])
    return shards


def list_split_names(split: str) -> list[str]:
    """Return the names under which a split may be stored, its own first."""
    if split not in VALID_SPLITS:
        return [split]
    return [split, *(name for name in VALID_SPLITS if name != split)]
