"""References: the translations by people that the translations of a model are compared with."""

from collections.abc import Sequence

import pyarrow as pa

from nmt.data.corpus import iter_column

References = Sequence[list[str]]  # of each sentence, at least one


def collect_references(*tables: pa.Table) -> list[list[str]]:
    """Return the references of each pair: its targets in these tables, which have the same sources.

    An empty line is not a reference, unless the pair has no other.
    """
    sides = [iter_column(table, "target") for table in tables]
    return [[text for text in texts if text.strip()] or [texts[0]] for texts in zip(*sides, strict=True)]
