"""CUDA graphs: the kernels of a function are captured once per input shape, and then launched together.

A step of search consists of 50 to 90 small kernels, and the gradient of a training batch of many more. Launching them
one by one takes longer than running them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from nmt.model.parts import map_tensors
from nmt.system.memory import get_device_index, get_free_device_memory, is_out_of_memory, measure_peak_allocation

Shapes = tuple[torch.Size, ...]
MAX_GRAPHS = 192  # of one graphed callable
MEMORY_MARGIN = 1.2  # a shape is captured only if this many times the memory of an eager run is free
GRAPHED_CALLABLES: "WeakSet[GraphedCallable]" = WeakSet()  # all that exist, of all threads
CAPTURE_POOLS: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}  # see `get_stream_and_pool`
# Held while a graph is captured, replayed or freed: all calls of a graph share its input and result tensors, and all
# graphs of a device share memory for intermediate results.
LOCK = threading.RLock()


class CapturedGraph(NamedTuple):
    """A function captured for one set of input shapes."""

    device: torch.device
    arguments: tuple[Any, ...]  # the tensors that a replay reads its inputs from
    results: Any  # the tensors that a replay writes its results to
    replay: Callable[[], None]


def get_stream_and_pool(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """Return the stream to capture on, and the memory pool that all graphs of a device share.

    Sharing is safe because only one of them runs at a time, and nothing in the pool is read after that: results are
    either outside of the pool or copied (`GraphedCallable`). PyTorch frees a pool with its last graph, so the next
    graph starts a new one.
    """
    graphs = [graph for graphed in GRAPHED_CALLABLES for graph in graphed.graphs.values()]
    stream_and_pool = CAPTURE_POOLS.get(device)
    if stream_and_pool is None or not any(graph and graph.device == device for graph in graphs):
        with torch.cuda.device(device):
            stream_and_pool = CAPTURE_POOLS[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    return stream_and_pool


def capture_graph(function: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]] | None:
    """Capture `function` as a CUDA graph.

    Returns its results and a function that replays it into the same tensors, or None if memory is too small or might
    be: an allocation that fails during a capture cannot be retried.
    """
    stream, pool = get_stream_and_pool(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # A warm-up: libraries initialize in their first calls, which cannot be captured.
            needed = measure_peak_allocation(function, device)
        torch.cuda.current_stream().wait_stream(stream)
        if get_free_device_memory(device) < MEMORY_MARGIN * needed:
            return None
        try:
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                results = function()
            return results, graph.replay
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    # Only here, after the except block, are the exception and the tensors that its traceback refers to freed.
    del graph
    clean_up_after_capture(device, pool)
    return None


def clean_up_after_capture(device: torch.device, pool: Any) -> None:
    """Restore the allocator and the random number generator after a failed capture.

    PyTorch keeps the pool of a failed capture (pytorch/pytorch#190348), and before 2.12 the allocator and the generator
    wait for the end of the capture (#180395). So the generator gets a new state, graphs that refer to the old state are
    dropped, and the pool is released.
    """
    index = get_device_index(device)
    # AttributeError: these functions are private and may go.
    with contextlib.suppress(RuntimeError, AttributeError):  # the capture has already ended
        torch._C._cuda_endAllocateToPool(index, pool)
    new_generator = torch.Generator(torch.device("cuda", index))
    torch.cuda.default_generators[index].graphsafe_set_state(new_generator.graphsafe_get_state())
    drop_graphs()
    torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError, AttributeError):  # the pool was released with its graph
        torch._C._cuda_releasePool(index, pool)
    torch.cuda.empty_cache()


def free_graphs() -> int:
    """Free all graphs once no other thread is replaying one, and return how many there were."""
    count = drop_graphs()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def drop_graphs() -> int:
    """Drop all graphs, and return how many there were. Later captures use a new memory pool."""
    with LOCK:
        count = sum(graphed.count_graphs() for graphed in GRAPHED_CALLABLES)
        for graphed in GRAPHED_CALLABLES:
            graphed.graphs.clear()
            graphed.forget_arguments()
        CAPTURE_POOLS.clear()
    return count


def list_tensors(tree: Any) -> list[Tensor]:
    """Return all tensors of nested (named) tuples, in order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, tree)
    return tensors


def copy_tensors(targets: Any, sources: Any) -> None:
    """Copy the tensors of one tree to those of another with the same structure."""
    for target, source in zip(list_tensors(targets), list_tensors(sources), strict=True):
        target.copy_(source)


class GraphedCallable:
    """A function of nested tuples of tensors that runs as CUDA graphs.

    The first `MAX_GRAPHS` shapes that occur a second time are captured if memory allows. All other calls run eagerly,
    since capturing a shape takes longer than running it.

    With `num_fed_back`, the first so many results are what the next call takes as its first so many arguments. The
    graph itself writes them to the tensors that it reads these arguments from, so that they are not copied if the
    caller passes on the objects that were returned. Such a result must not contain an argument in another place. The
    graph writes its other results to tensors of its own. So all results are valid until the next call of this object,
    whatever else runs. Without `num_fed_back`, results are copies.

    The caller must not modify an argument in place: an argument that is the same object as in the previous call is not
    copied again.
    """

    def __init__(self, function: Callable[..., Any], num_fed_back: int = 0) -> None:
        self.function = function
        self.num_fed_back = num_fed_back
        self.seen_shapes: set[Shapes] = set()
        self.graphs: dict[Shapes, CapturedGraph | None] = {}  # by the shapes of all tensors; None: did not fit
        self.forget_arguments()
        self.calls = 0
        self.replays = 0
        with LOCK:
            GRAPHED_CALLABLES.add(self)

    def forget_arguments(self) -> None:
        """Let go of the arguments of the last call."""
        self.last_graph: CapturedGraph | None = None
        self.last_arguments: tuple[Any, ...] = ()  # the objects whose values are in the tensors that it reads

    def count_graphs(self) -> int:
        return sum(graph is not None for graph in self.graphs.values())

    def __call__(self, *arguments: Any) -> Any:
        tensors = list_tensors(arguments)
        shapes = tuple(tensor.shape for tensor in tensors)
        self.calls += 1
        with LOCK:
            if shapes in self.seen_shapes and shapes not in self.graphs and len(self.graphs) < MAX_GRAPHS:
                self.graphs[shapes] = self.capture(arguments, tensors[0].device)
            self.seen_shapes.add(shapes)
            graph = self.graphs.get(shapes)
            if graph is not None:
                self.replays += 1
                return self.replay(graph, arguments)
        return self.function(*arguments)

    def capture(self, arguments: tuple[Any, ...], device: torch.device) -> CapturedGraph | None:
        """Capture a graph for arguments of these shapes. Return None if memory is too small."""
        static_arguments = tuple(map_tensors(torch.clone, argument) for argument in arguments)
        outputs: list[Any] = []
        # Restore the generators after the warm-up: the random numbers of this call are drawn by the replay.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            captured = capture_graph(partial(self.run_and_write, static_arguments, outputs), device)
        return None if captured is None else CapturedGraph(device, static_arguments, *captured)

    def run_and_write(self, arguments: tuple[Any, ...], outputs: list[Any]) -> Any:
        """Call the function. If it feeds back, write the results to where they are valid until the next call.

        Those that are fed back are written to the arguments, and others to `outputs`, which the first call creates: it
        is the warm-up, whose tensors are outside of the memory pool that graphs share.
        """
        results = self.function(*arguments)
        if not self.num_fed_back:
            return results
        fed_back, others = arguments[: self.num_fed_back], results[self.num_fed_back :]
        if outputs:
            copy_tensors(outputs, others)
        else:
            outputs.extend(map_tensors(torch.clone, others))
        copy_tensors(fed_back, results[: self.num_fed_back])
        return (*fed_back, *outputs)

    def replay(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Any:
        """Replay a graph. Return copies of its results, since other graphs overwrite them, unless it feeds back."""
        unchanged = self.last_arguments if graph is self.last_graph else (None,) * len(arguments)
        for static, argument, last in zip(graph.arguments, arguments, unchanged, strict=True):
            if argument is not last:
                copy_tensors(static, argument)
        graph.replay()
        # What is fed back was overwritten by the graph, which then returns its own argument.
        self.last_graph = graph
        self.last_arguments = (*graph.arguments[: self.num_fed_back], *arguments[self.num_fed_back :])
        return graph.results if self.num_fed_back else map_tensors(torch.clone, graph.results)


class GraphedModel:
    """The interface of a model that search uses, with its steps as CUDA graphs. Its weights must not change."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype = model.dtype
        self.attends = model.attends
        self.max_source_positions = model.max_source_positions
        self.start = model.start
        self.decode = model.decode
        self.logits = model.logits
        self.unused_graphs: dict[str, list[GraphedCallable]] = {}  # by settings, steps that no search uses now

    @contextlib.contextmanager
    def graphed(self, step: Callable[..., tuple[Any, ...]], settings: Any) -> Iterator[GraphedCallable]:
        """Give a search the function `step(model, settings, state, beams, ...)`, which returns both anew, as graphs.

        Graphs hold the state of a search from step to step, so no other search may use them meanwhile: one that runs at
        the same time gets others. The next one with the same settings gets the same.
        """
        unused_graphs = self.unused_graphs.setdefault(repr(settings), [])
        try:
            graphed = unused_graphs.pop()
        except IndexError:
            graphed = GraphedCallable(partial(step, self.model, settings), num_fed_back=2)
        try:
            yield graphed
        finally:
            graphed.forget_arguments()
            unused_graphs.append(graphed)


def with_cuda_graphs(model: Any, device: torch.device) -> Any:
    """Return the model for search, on a GPU as a `GraphedModel` unless it has `model.kernels=reference`.

    Its weights must not change.
    """
    return GraphedModel(model) if device.type == "cuda" and model.is_fast else model
