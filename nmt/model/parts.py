"""Memories and decoder states that consist of several, of the layers of a decoder or the members of an ensemble."""

from typing import Any, overload

from torch import Tensor
from torch.nn import functional as F

ROOM_MULTIPLE = 32  # target positions by which the room for them grows while a translation is written


@overload
def resize_last(x: Tensor, size: int, value: float = 0) -> Tensor: ...
@overload
def resize_last(x: None, size: int, value: float = 0) -> None: ...
def resize_last(x: Tensor | None, size: int, value: float = 0) -> Tensor | None:
    """Cut the last dimension, or fill it up with `value`. None stays None."""
    return None if x is None else F.pad(x, (0, size - x.shape[-1]), value=value)


def round_up_room(positions: int) -> int:
    """Return the room to make for this many target positions, so that CUDA graphs see few shapes."""
    return -(-positions // ROOM_MULTIPLE) * ROOM_MULTIPLE


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

    def keep_first(self, rows: int) -> "Parts":
        return Parts(part.keep_first(rows) for part in self)

    def make_room(self, positions: int) -> "Parts":
        parts = Parts(part.make_room(positions) for part in self)
        # CUDA graphs copy a state that is not the object that the last step returned.
        return self if all(new is part for new, part in zip(parts, self, strict=True)) else parts

    def resize_source(self, positions: int) -> "Parts":
        return Parts(part.resize_source(positions) for part in self)
