"""Work that a GPU replays: kernels are recorded once for each shape, and then launched as one CUDA graph.

A step of a decoder is dozens of small kernels, and as many on the way back; to launch them one by one takes longer than
to run them.
"""

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

T = TypeVar("T")
GRAPHS = 64  # kept at most
SHORT = re.compile(
    "allocate memory|out of memory|ALLOC_FAILED|bad_alloc|could not (create|execute) a (memory object|primitive)$"
)
RECORDED: "WeakSet[Recorded]" = WeakSet()  # all there are


@cache
def lock_of(device: torch.device) -> threading.Lock:
    """For a device one at a time: a graph's inputs and results have one place for all, and what lies between shares its
    memory with other graphs."""
    return threading.Lock()


@cache
def stream_and_pool(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """A stream on which to record, and memory that all graphs of a device share, for none runs beside another."""
    with torch.cuda.device(device):
        return torch.cuda.Stream(), torch.cuda.graph_pool_handle()


def record(work: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """The work as a CUDA graph: its results, and what does it again, with the results in the same place."""
    stream, pool = stream_and_pool(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in their first calls, which cannot be recorded
            work()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
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


class Recorded:
    """Work on nested tuples of tensors. The first `GRAPHS` shapes that are met a second time are recorded; others run
    as they are, since to record takes longer than to run."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        RECORDED.add(self)
        self.met: set[tuple[torch.Size, ...]] = set()
        self.graphs: dict[tuple[torch.Size, ...], Any] = {}  # by the shapes of what goes in

    def __call__(self, *given: Any) -> Any:
        parts = tensors(given)
        shapes, device = tuple(part.shape for part in parts), parts[0].device
        if shapes not in self.graphs and (shapes not in self.met or len(self.graphs) >= GRAPHS):
            self.met.add(shapes)
            return self.work(*given)
        with lock_of(device):
            if shapes not in self.graphs:
                inputs = mapped(torch.clone, given)
                with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the replay draws the numbers
                    self.graphs[shapes] = tensors(inputs), *record(lambda: self.work(*inputs), device)
            places, results, again = self.graphs[shapes]
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)
            again()
            return mapped(torch.clone, results)  # the next replay overwrites them


class Replayed:
    """What search knows of a model, of one whose weights no longer change."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype, self.attends, self.reach = model.dtype, model.attends, model.reach
        self.start, self.logits = model.start, model.logits
        self.step = Recorded(model.decode)

    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> Any:
        """One token in is replayed. A whole target is one call for many tokens, and hardly two are of a length."""
        decode = self.step if tokens_NT.shape[1] == 1 else self.model.decode
        return decode(tokens_NT, state, memory)


def fastest(model: Any, device: torch.device) -> Any:
    """A model whose weights no longer change as search should see it on a device."""
    return Replayed(model) if device.type == "cuda" else model


def within_memory(work: Callable[[], T]) -> T | None:
    """What this work returns; None where memory does not suffice for it: what it held, and what was recorded, is free
    again then."""
    try:
        return work()
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:  # not all allocators have a class of their own for it
        if not (SHORT.search(str(error)) or isinstance(error.__context__, torch.OutOfMemoryError)):
            raise
    with ExitStack() as held:
        for number in range(torch.cuda.device_count()):
            held.enter_context(lock_of(torch.device("cuda", number)))
        for recorded in list(RECORDED):
            recorded.graphs.clear()
        stream_and_pool.cache_clear()  # what is recorded from now on gets memory of its own
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
