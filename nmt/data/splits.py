"""Which files hold a split: by its name or another of the validation split's, as they are or packed, whole or in
shards."""

import re
from pathlib import Path

from nmt.config.data import DataConfig, last_component
from nmt.data.readers import listed
from nmt.errors import UserError
from nmt.runtime.lines import PACKED

VALID = ("valid", "validation", "val", "dev")  # the validation split's names
# train.00.de, train-00.de, train-00000-of-00010.de; the hub may add a digest.
SHARD = r"(\.\d+|-\d+(?:-of-\d+(?:-[0-9a-f]+)?)?|)"


def find_files(data: DataConfig, split: str, endings: list[str]) -> list[tuple[Path, ...]]:
    """The files of a split, in the order of their names: of each shard one for each ending.

    Raises:
        UserError: one is missing, of all that a shard's name counts too; or there are shards beside the whole.
    """
    folder = existing_folder(data)
    held = sorted(path.name for path in folder.iterdir() if path.is_file())
    names = names_of(split)
    found = {name: [shards(held, name, ending) for ending in endings] for name in names}
    name = next((name for name in names if any(found[name])), names[0])
    marks = sorted({mark for side in found[name] for mark in side}) or [""]
    if marks[0] == "" and len(marks) > 1:
        both = " and ".join(next(side[mark] for side in found[name] if mark in side) for mark in marks[:2])
        raise UserError(f"data.path={folder} has {both}: the split {split} as a whole and in shards; leave one")
    for mark in marks:
        total = re.search(r"-of-(\d+)", mark)
        if total and len(marks) != int(total[1]):
            raise UserError(f"data.path={folder} has {len(marks)} of the {int(total[1])} shards of {name}")
        for side, ending in zip(found[name], endings, strict=True):
            if mark not in side:
                raise missing(folder / f"{name}{mark}{ending}", data)
    return [tuple(folder / side[mark] for side in found[name]) for mark in marks]


def shards(held: list[str], name: str, ending: str) -> dict[str, str]:
    """Of the names of files those of a split, by what tells a shard from others: nothing, of a whole one. A file that
    is not packed goes before one that is."""
    pattern = re.compile(re.escape(name) + SHARD + re.escape(ending) + f"({'|'.join(map(re.escape, PACKED))}|)")
    found: dict[str, str] = {}
    for file in held:
        if match := pattern.fullmatch(file):
            found.setdefault(match[1], file)
    return found


def files_of(data: DataConfig, split: str) -> tuple[str, list[tuple[Path, ...]], tuple[str, ...]] | None:
    """The kind of a split's files of lines, those of each shard, and the columns in them; None where it has no such."""
    if is_text(data, split):
        sides = [side if data.format == "text" else last_component(side) for side in (data.source, data.target)]
        return "text", find_files(data, split, [f".{side}" for side in sides]), ()
    if data.format in ("tsv", "jsonl"):
        return data.format, find_files(data, split, [f".{data.format}"]), (data.source, data.target)
    return None


def parquet_files(data: DataConfig, split: str) -> list[str]:
    return [str(file) for (file,) in find_files(data, split, [".parquet"])]


def is_text(data: DataConfig, split: str) -> bool:
    """Whether the sides have files of their own: a folder of text, of that split or of others too, may take the place
    of a dataset of the hub."""
    folder = Path(str(data.path))
    if data.format != "hub" or not folder.is_dir():
        return data.format == "text"
    held = sorted(path.name for path in folder.iterdir())
    return any(shards(held, name, f".{last_component(data.source)}") for name in ("train", *names_of(split)))


def called(files: list[Path]) -> str:
    """What to call the shards of one side."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} to {files[-1].name}"


def existing_folder(data: DataConfig) -> Path:
    folder = Path(str(data.path))
    if not folder.is_dir():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"data.path={folder} is not a folder{where}")
    return folder


def missing(file: Path, data: DataConfig) -> UserError:
    held = sorted(path.name for path in file.parent.iterdir())
    return UserError(
        f"{file} does not exist; data.format={data.format} with data.source={data.source} data.target={data.target} "
        f"needs it. The folder has {listed(held)}"
    )


def names_of(split: str) -> list[str]:
    return [split, *(name for name in VALID if name != split)] if split in VALID else [split]
