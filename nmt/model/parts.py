"""Memories and decoder states that consist of several, of the layers of a decoder or the members of an ensemble."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

ROOM_MULTIPLE = 32  # target positions by which the room for them grows while a translation is written


def resize_last(x: Tensor, size: int, value: float = 0) -> Tensor:
    """Cut the last dimension, or fill it up with `value`."""
    return F.pad(x, (0, size - x.shape[-1]), value=value)


def round_up_room(positions: int) -> int:
    """Return the room to make for this many target positions, so that CUDA graphs see few shapes."""
    return -(-positions // ROOM_MULTIPLE) * ROOM_MULTIPLE


def map_tensors(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to each tensor of nested (named) tuples, or to those in the same place. None stays None."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return function(*trees)
    items = [map_tensors(function, *parts) for parts in zip(*trees, strict=True)]
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def select_rows(tree: Any, rows: Tensor) -> Any:
    """Return the given rows of each tensor of nested tuples, in the given order. Rows may repeat."""
    return map_tensors(lambda tensor: tensor.index_select(0, rows), tree)


class Parts(tuple[Any, ...]):
    """A tuple of memories or decoder states, with the same methods as a single one."""

    @property
    def positions(self) -> int:
        """The number of source positions of memories."""
        return int(self[0].positions)

    def make_room(self, positions: int) -> "Parts":
        parts = Parts(part.make_room(positions) for part in self)
        # CUDA graphs copy a state that is not the object that the last step returned.
        return self if all(new is part for new, part in zip(parts, self, strict=True)) else parts
