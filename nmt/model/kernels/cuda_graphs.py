"""CUDA graphs: the kernels of some work are captured once for each shape, and then launched together.

A step of a decoder is dozens of small kernels, and as many in the backward pass; to launch them one by one takes longer
than to run them.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from nmt.runtime.memory import allocated_by, free_device_memory, index_of, is_out_of_memory

Shapes = tuple[torch.Size, ...]
MAX_GRAPHS = 192  # kept at most
MARGIN = 1.2  # a shape is captured only if this many times the memory of an eager run is free
GRAPHED: "WeakSet[GraphedCallable]" = WeakSet()  # all there are
POOLS: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}  # of each GPU: see `stream_and_pool`


class Graph(NamedTuple):
    """Work of one shape, captured."""

    device: torch.device
    arguments: tuple[Any, ...]  # where its inputs have to be
    results: Any  # where its results are after each replay
    replay: Callable[[], None]


@cache
def lock_of(device: torch.device) -> threading.Lock:
    """For a device one at a time: a graph's inputs and results have one place for all, and what lies between shares its
    memory with other graphs."""
    return threading.Lock()


def stream_and_pool(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """A stream to capture on, and memory that all graphs of a device share, since none runs beside another. With its
    last graph a pool is gone, so the next graph starts another."""
    alive = any(graph.device == device for recorded in list(GRAPHED) for graph in recorded.graphs.values())
    if not alive or device not in POOLS:
        with torch.cuda.device(device):
            POOLS[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    return POOLS[device]


def capture_graph(work: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]] | None:
    """Capture `work` as a CUDA graph. Return its results and a function that replays it into the same tensors, or None
    if memory is, or might be, too small: an allocation that fails during a capture cannot be retried."""
    stream, pool = stream_and_pool(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in their first calls, which no graph can hold
            needed = allocated_by(work, device)
        torch.cuda.current_stream().wait_stream(stream)
        if free_device_memory(device) < MARGIN * needed:
            return None
        try:
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                results = work()
            return results, graph.replay
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    # Here the exception is gone, and with it all tensors of the work that it kept.
    del graph
    clean_up_after_capture(device, pool)
    return None


def clean_up_after_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a capture that failed. PyTorch keeps its pool (pytorch/pytorch#190348), and before 2.12 the
    allocator and the random number generator wait for the end of the capture (#180395). So the generator gets another
    state, graphs that know the state of before are dropped, and the pool is released."""
    index = index_of(device)
    with contextlib.suppress(RuntimeError):  # it has ended
        torch._C._cuda_endAllocateToPool(index, pool)
    fresh = torch.Generator(torch.device("cuda", index))
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())
    drop_graphs()
    torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError):  # it was released with its graph
        torch._C._cuda_releasePool(index, pool)
    torch.cuda.empty_cache()


def free_graphs() -> int:
    """Free all graphs, when no other thread is replaying one, and return how many there were."""
    with contextlib.ExitStack() as held:
        for number in range(torch.cuda.device_count()):
            held.enter_context(lock_of(torch.device("cuda", number)))
        count = drop_graphs()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def drop_graphs() -> int:
    """Free all graphs and return how many there were. Those captured from now on get memory of their own."""
    count = 0
    for recorded in list(GRAPHED):
        count += len(recorded.graphs)
        recorded.graphs.clear()
        recorded.too_large.clear()
        recorded.last = None
    POOLS.clear()
    return count


def map_tensors(f: Callable[[Tensor], Any], parts: Any) -> Any:
    """f of each tensor of nested tuples, which may have None in them."""
    if isinstance(parts, Tensor):
        return f(parts)
    if parts is None:
        return None
    own = [map_tensors(f, part) for part in parts]
    return type(parts)(*own) if hasattr(parts, "_fields") else type(parts)(own)


def list_tensors(parts: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, parts)
    return found


class GraphedCallable:
    """Work on nested tuples of tensors, as CUDA graphs. The first `MAX_GRAPHS` shapes that are met a second time are
    captured, where memory allows it; others run as they are, since to capture takes longer than to run.

    The caller must not modify an argument in place: an argument that is the same object as in the previous call is not
    copied again.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        GRAPHED.add(self)
        self.met: set[Shapes] = set()
        self.too_large: set[Shapes] = set()  # for the memory there was
        self.graphs: dict[Shapes, Graph] = {}  # by the shapes of what goes in
        self.last: tuple[Graph, tuple[Any, ...]] | None = None  # replayed, with these arguments
        self.calls = self.replays = 0

    def __call__(self, *given: Any) -> Any:
        parts = list_tensors(given)
        shapes, device = tuple(part.shape for part in parts), parts[0].device
        self.calls += 1
        with lock_of(device):
            graph = self.graphs.get(shapes) or self.capture(shapes, given, device)
            if graph is not None:
                self.replays += 1
                return self.replay(graph, given)
        return self.work(*given)

    def capture(self, shapes: Shapes, given: tuple[Any, ...], device: torch.device) -> Graph | None:
        """A graph for these shapes, if they are to have one."""
        if shapes not in self.met or shapes in self.too_large or len(self.graphs) >= MAX_GRAPHS:
            self.met.add(shapes)
            return None
        arguments = map_tensors(torch.clone, given)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the replay draws the numbers
            found = capture_graph(lambda: self.work(*arguments), device)
        if found is None:
            self.too_large.add(shapes)
            return None
        self.graphs[shapes] = Graph(device, arguments, *found)
        return self.graphs[shapes]

    def replay(self, graph: Graph, given: tuple[Any, ...]) -> Any:
        """The results for these arguments, as copies: the next replay overwrites them."""
        before = self.last[1] if self.last and self.last[0] is graph else [None] * len(given)
        for place, argument, old in zip(graph.arguments, given, before, strict=True):
            if argument is not old:
                for own, new in zip(list_tensors(place), list_tensors(argument), strict=True):
                    own.copy_(new)
        self.last = graph, given
        graph.replay()
        return map_tensors(torch.clone, graph.results)

    def summary(self, what: str) -> str:
        """Describe for the log how many calls ran as graphs and how many eagerly."""
        eager = f"{self.calls - self.replays:,} of {self.calls:,} {what} ran without a CUDA graph"
        return f"{eager}; shapes captured: {len(self.graphs):,}, too large for the memory: {len(self.too_large):,}"


class GraphedModel:
    """What search knows of a model, of one whose weights no longer change."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype, self.attends, self.reach = model.dtype, model.attends, model.reach
        self.start, self.logits = model.start, model.logits
        self.step = GraphedCallable(model.decode)

    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> Any:
        """One token in is replayed. A whole target is one call for many tokens, and hardly two are of a length."""
        decode = self.step if tokens_NT.shape[1] == 1 else self.model.decode
        return decode(tokens_NT, state, memory)


def maybe_graph(model: Any, device: torch.device) -> Any:
    """A model whose weights no longer change as search should see it on a device."""
    return GraphedModel(model) if device.type == "cuda" else model
