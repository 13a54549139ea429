"""A memory or decoder state that consists of several, of the layers of a decoder or the members of an ensemble."""

from typing import Any

from torch import Tensor


class Parts(tuple[Any, ...]):
    """A tuple of memories or decoder states, with the same methods as a single one."""

    @property
    def positions(self) -> int:
        """The number of source positions of memories."""
        return int(self[0].positions)

    def select(self, rows: Tensor) -> "Parts":
        return Parts(part.select(rows) for part in self)

    def scatter_rows(self, rows: Tensor, new_rows: "Parts") -> "Parts":
        return Parts(part.scatter_rows(rows, new) for part, new in zip(self, new_rows, strict=True))

    def make_room(self, steps: int) -> "Parts":
        return Parts(part.make_room(steps) for part in self)

    def trim_source(self, positions: int) -> "Parts":
        return Parts(part.trim_source(positions) for part in self)
