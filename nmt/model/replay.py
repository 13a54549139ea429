"""A model whose steps a GPU replays: kernels are recorded once for each shape, and then launched as one CUDA graph.

A step of a decoder is dozens of small kernels; to launch them one by one takes longer than to run them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GRAPHS = 64  # kept at most: each holds all that its step computes


def record(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """The work as a CUDA graph: its results, and what does it again, with the results in the same place."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries set themselves up in their first calls, which cannot be recorded
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return results, graph.replay


def mapped(f: Callable[[Tensor], Any], parts: Any) -> Any:
    """f of each tensor of nested tuples, which may have None in them."""
    if isinstance(parts, Tensor):
        return f(parts)
    if parts is None:
        return None
    own = [mapped(f, part) for part in parts]
    return type(parts)(*own) if hasattr(parts, "_fields") else type(parts)(own)


def tensors(parts: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    found: list[Tensor] = []
    mapped(found.append, parts)
    return found


class Replayed:
    """What search knows of a model, of one whose weights no longer change."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype, self.attends, self.reach = model.dtype, model.attends, model.reach
        self.start, self.logits = model.start, model.logits
        self.graphs: dict[tuple[torch.Size, ...], Any] = {}  # by the shapes of what goes in

    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> Any:
        """One token in is replayed. A whole target is one call for many tokens, and hardly two are of a length."""
        if tokens_NT.shape[1] > 1:
            return self.model.decode(tokens_NT, state, memory)
        given = tensors((tokens_NT, state, memory))
        shapes = tuple(part.shape for part in given)
        if shapes not in self.graphs:
            if len(self.graphs) == GRAPHS:
                self.graphs.clear()
            inputs = mapped(torch.clone, (tokens_NT, state, memory))
            self.graphs[shapes] = tensors(inputs), *record(lambda: self.model.decode(*inputs))
        places, results, again = self.graphs[shapes]
        for place, part in zip(places, given, strict=True):
            place.copy_(part)
        again()
        return mapped(torch.clone, results)  # the next replay overwrites them
