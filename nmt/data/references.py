"""References: the translations by people that the translations of a model are compared with."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from nmt.config import DataConfig
from nmt.data.corpus import iter_column, load_pairs
from nmt.errors import UserError

References = Sequence[list[str]]  # of each sentence, at least one


def load_further_references(data: DataConfig, names: Sequence[str]) -> dict[str, pa.Table]:
    """Load further references of `data.split`: by name, the pairs of its sources with that side as the target.

    names: file extensions or columns, as `data.target`.

    Raises:
        UserError: a name is that of a side of `data`, there is no such side, or its lines could be dropped.
    """
    if names and data.invalid == "drop":
        raise UserError(
            "data.references needs data.invalid=refuse: dropping lines would leave the references misaligned"
        )
    tables = {}
    for name in names:
        if name in (data.source, data.target):
            side = "source" if name == data.source else "target"
            raise UserError(
                f"data.references has {name}, which is data.{side}; list only the references besides data.target"
            )
        try:
            tables[name] = load_pairs(replace(data, target=name, alignments=None), data.split)
        except UserError as error:
            raise UserError(f"data.references=[{name}]: {error}") from error
    return tables


def collect_references(*tables: pa.Table) -> list[list[str]]:
    """Return the references of each pair: its targets in these tables, which have the same sources.

    An empty line is not a reference, unless the pair has no other.
    """
    sides = [iter_column(table, "target") for table in tables]
    return [[text for text in texts if text.strip()] or [texts[0]] for texts in zip(*sides, strict=True)]
