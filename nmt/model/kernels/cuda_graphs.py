"""CUDA graphs: the kernels of a function are captured once per input shape, and then launched together.

A decoder step consists of dozens of small kernels, and its backward pass of as many. Launching them one by one takes
longer than running them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from nmt.runtime.memory import get_device_index, get_free_device_memory, is_out_of_memory, measure_peak_allocation

T = TypeVar("T")
Shapes = tuple[torch.Size, ...]
MAX_GRAPHS = 192  # per `GraphedCallable`
MEMORY_MARGIN = 1.2  # a shape is captured only if this many times the memory of an eager run is free
GRAPHED_CALLABLES: "WeakSet[GraphedCallable]" = WeakSet()  # all that exist
CAPTURE_POOLS: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}  # see `get_stream_and_pool`


class CapturedGraph(NamedTuple):
    """A function captured for one set of input shapes."""

    device: torch.device
    arguments: tuple[Any, ...]  # the tensors that a replay reads its inputs from
    results: Any  # the tensors that a replay writes its results to
    replay: Callable[[], None]


@cache
def get_device_lock(device: torch.device) -> threading.Lock:
    """Return the lock that lets one graph of a device run at a time.

    All calls of a graph share its input and result tensors, and all graphs of a device share memory for intermediate
    results.
    """
    return threading.Lock()


def get_stream_and_pool(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """Return the stream to capture on, and the memory pool that all graphs of a device share.

    Sharing is safe because only one of them runs at a time. PyTorch frees a pool with its last graph, so the next graph
    starts a new one.
    """
    has_graphs = any(graph.device == device for graphed in list(GRAPHED_CALLABLES) for graph in graphed.graphs.values())
    if not has_graphs or device not in CAPTURE_POOLS:
        with torch.cuda.device(device):
            CAPTURE_POOLS[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    return CAPTURE_POOLS[device]


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


@cache
def get_second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of `run_on_two_streams`."""
    return torch.cuda.Stream(device)


def run_on_two_streams(functions: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Return the results of one or two functions, which a CUDA graph runs at the same time, as it does their backward.

    They draw no random numbers, and neither reads what the other computes. Outside of a capture they run one after the
    other: there the launches take longer than the kernels.
    """
    if len(functions) == 1 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [function() for function in functions]
    first, second = functions
    main, side = torch.cuda.current_stream(device), get_second_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        second_result = second()
    first_result = first()
    main.wait_stream(side)
    return [first_result, second_result]


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
    with contextlib.ExitStack() as locks:
        for index in range(torch.cuda.device_count()):
            locks.enter_context(get_device_lock(torch.device("cuda", index)))
        count = drop_graphs()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def drop_graphs() -> int:
    """Drop all graphs without waiting, and return how many there were. Later captures use a new memory pool."""
    count = 0
    for graphed in list(GRAPHED_CALLABLES):
        count += len(graphed.graphs)
        graphed.graphs.clear()
        graphed.too_large.clear()
        graphed.last_call = None
    CAPTURE_POOLS.clear()
    return count


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to each tensor of nested (named) tuples. None stays None."""
    if isinstance(tree, Tensor):
        return function(tree)
    if tree is None:
        return None
    items = [map_tensors(function, item) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


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
    caller passes on the objects that were returned. All results are then valid only until the next call. Such a result
    must not contain an argument in another place.

    The caller must not modify an argument in place: an argument that is the same object as in the previous call is not
    copied again.
    """

    def __init__(self, function: Callable[..., Any], num_fed_back: int = 0) -> None:
        self.function = function
        self.num_fed_back = num_fed_back
        GRAPHED_CALLABLES.add(self)
        self.seen_shapes: set[Shapes] = set()
        self.too_large: set[Shapes] = set()  # shapes whose capture did not fit into memory
        self.graphs: dict[Shapes, CapturedGraph] = {}  # by the shapes of all argument tensors
        # The last graph that was replayed, and the objects whose tensors it has now as arguments.
        self.last_call: tuple[CapturedGraph, tuple[Any, ...]] | None = None
        self.calls = 0
        self.replays = 0

    def __call__(self, *arguments: Any) -> Any:
        tensors = list_tensors(arguments)
        shapes, device = tuple(tensor.shape for tensor in tensors), tensors[0].device
        self.calls += 1
        with get_device_lock(device):
            graph = self.graphs.get(shapes) or self.capture(shapes, arguments, device)
            if graph is not None:
                self.replays += 1
                return self.replay(graph, arguments)
        return self.function(*arguments)

    def capture(self, shapes: Shapes, arguments: tuple[Any, ...], device: torch.device) -> CapturedGraph | None:
        """Capture a graph for these shapes, or return None if this call should run eagerly."""
        if shapes not in self.seen_shapes or shapes in self.too_large or len(self.graphs) >= MAX_GRAPHS:
            self.seen_shapes.add(shapes)
            return None
        static_arguments = map_tensors(torch.clone, arguments)
        # Restore the generators after the warm-up: the random numbers of this call are drawn by the replay.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            captured = capture_graph(partial(self.run_and_feed_back, static_arguments), device)
        if captured is None:
            self.too_large.add(shapes)
            return None
        self.graphs[shapes] = CapturedGraph(device, static_arguments, *captured)
        return self.graphs[shapes]

    def run_and_feed_back(self, arguments: tuple[Any, ...]) -> Any:
        """Call the function, and write the results that are fed back to the arguments, which then are the results."""
        results = self.function(*arguments)
        if not self.num_fed_back:
            return results
        fed_back = arguments[: self.num_fed_back]
        copy_tensors(fed_back, results[: self.num_fed_back])
        return (*fed_back, *results[self.num_fed_back :])

    def replay(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Any:
        """Replay a graph. Return copies of its results, since the next replay overwrites them, unless it feeds back."""
        known_arguments: tuple[Any, ...] = (None,) * len(arguments)
        if self.last_call and self.last_call[0] is graph:
            known_arguments = self.last_call[1]
        for static, argument, known in zip(graph.arguments, arguments, known_arguments, strict=True):
            if argument is not known:
                copy_tensors(static, argument)
        self.last_call = graph, (*graph.arguments[: self.num_fed_back], *arguments[self.num_fed_back :])
        graph.replay()
        return graph.results if self.num_fed_back else map_tensors(torch.clone, graph.results)

    def summarize(self, noun: str) -> str:
        """Return a log line with the number of calls (named `noun`, plural) that ran eagerly."""
        eager = f"{self.calls - self.replays:,} of {self.calls:,} {noun} ran without a CUDA graph"
        return f"{eager}; shapes captured: {len(self.graphs):,}, too large for the memory: {len(self.too_large):,}"


class GraphedModel:
    """The interface of a model that search uses, with its steps as CUDA graphs. Its weights must not change."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype = model.dtype
        self.attends = model.attends
        self.reach = model.reach
        self.start = model.start
        self.decode = model.decode
        self.logits = model.logits
        self.steps: dict[str, list[GraphedCallable]] = {}  # by settings, those that no search uses

    @contextlib.contextmanager
    def lend_graphs(self, step: Callable[..., tuple[Any, ...]], *settings: Any) -> Iterator[GraphedCallable]:
        """Lend a search the function `step(model, *settings, state, beams, ...)`, which returns both anew, as graphs.

        Graphs hold the state of a search from step to step, so no other search may use them meanwhile: one that runs at
        the same time gets others. The next one with the same settings gets the same.
        """
        unused = self.steps.setdefault(repr(settings), [])
        try:
            graphed = unused.pop()
        except IndexError:
            graphed = GraphedCallable(partial(step, self.model, *settings), num_fed_back=2)
        try:
            yield graphed
        finally:
            unused.append(graphed)


def with_cuda_graphs(model: Any, device: torch.device) -> Any:
    """Return the model for search, on a GPU as a `GraphedModel` unless it has `model.kernels=reference`.

    Its weights must not change.
    """
    return GraphedModel(model) if device.type == "cuda" and model.is_fast else model
