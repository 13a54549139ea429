"""CUDA graphs, mostly on a CPU: `fake_capture_graph` stands in for a capture, with the shapes and counts of a GPU."""

import itertools
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from builders import (
    SEARCH_OPTIONS,
    fake_capture_graph,
    make_attention_model,
    make_model,
    make_ragged_batch,
    search,
    sharpen,
)
from torch.nn import functional as F

from nmt.config import SearchConfig
from nmt.decoding.search import (
    AsyncCounter,
    Literals,
    choose_first_size,
    round_up_batch_size,
    round_up_length,
    search_translations,
)
from nmt.model.ensemble import Ensemble
from nmt.model.kernels.cuda_graphs import MAX_GRAPHS, GraphedCallable, GraphedModel, list_tensors
from nmt.model.out_of_memory import run_unless_out_of_memory
from nmt.system.memory import is_out_of_memory

GPU = torch.device("cuda")
SENTENCES = (12, 9, 8, 8, 5, 5, 3, 3, 2, 2, 1, 1)
LITERALS = Literals([10, 11], [[], [10], [11, 10]] * 4)
OPTIONS: dict[str, dict[str, Any]] = {
    **SEARCH_OPTIONS,
    "greedy": {"beam": 1, "n_best": 1},
    "long": {
        "max_length": 40,
        "max_ratio": 20.0,
        "length_penalty": 9.0,
    },  # more tokens than fit at first
}
MODELS: dict[str, Callable[[], Any]] = {
    "bahdanau": lambda: sharpen(make_model("bahdanau", "gru")),
    "luong": lambda: sharpen(make_model("luong")),
    "gnmt": lambda: sharpen(make_model("gnmt")),
    "local_m, coverage": lambda: sharpen(
        make_attention_model("input feeding", 0, score="additive", window="local_m", coverage=True), 1.5
    ),
    "local_p": lambda: sharpen(make_attention_model("bahdanau", 1, window="local_p", score="dot"), 1.5),
    "none": lambda: sharpen(make_attention_model("input feeding", 2, score="none"), 1.5),
    "transformer": lambda: sharpen(make_model("transformer")),
    "transformer, local_m, coverage": lambda: sharpen(
        make_attention_model("transformer", 3, score="additive", window="local_m", coverage=True), 1.5
    ),
    "two models": lambda: Ensemble([sharpen(make_model()), sharpen(make_model("gnmt", "gru"))]),
    "two kinds of models": lambda: Ensemble([sharpen(make_model("transformer")), sharpen(make_model("luong"))]),
}


def make_config(options: str) -> SearchConfig:
    return SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | OPTIONS[options])


def search_all(model: Any, config: SearchConfig, literals: Literals | None, batch_size: int | None = None) -> Any:
    """Search on all sentences at once, or on `batch_size` at a time."""
    prefixes = [[], [5], [], [7, 7], [], [], [4, 5, 6], [], [9], [], [], []]
    source_BS, length_B, _ = make_ragged_batch(SENTENCES)
    return search(model, source_BS, length_B, config, True, prefixes, literals, batch_size)


def assert_same_hypotheses(expected: Any, other: Any, config: SearchConfig, literals: Literals | None) -> None:
    """Compare results with those of `other` on a few sentences at a time and on all at once."""
    for batch_size in (3, 12):
        actual = search_all(other, config, literals, batch_size)
        for hypotheses, references, length in zip(actual, expected, SENTENCES, strict=True):
            assert [hypothesis.tokens for hypothesis in hypotheses] == [hypothesis.tokens for hypothesis in references]
            for one, another in zip(hypotheses, references, strict=True):
                assert one.score == pytest.approx(another.score, abs=1e-9)
                if one.weights_TS is not None and another.weights_TS is not None:
                    weights = one.weights_TS[:, :length], another.weights_TS[:, :length]
                    torch.testing.assert_close(*weights, rtol=0, atol=1e-9)


def use_gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make searches on a CPU use the shapes and counts of a GPU."""
    for function in (choose_first_size, round_up_batch_size, round_up_length):
        monkeypatch.setattr(
            f"nmt.decoding.search.{function.__name__}", lambda n, _, function=function: function(n, GPU)
        )
    monkeypatch.setattr("nmt.decoding.search.AsyncCounter", lambda delayed: AsyncCounter(delayed=True))


SEARCHES = sorted({*itertools.product(MODELS, OPTIONS)} - {("none", "coverage")})


@pytest.mark.parametrize(  # all pairs of the three
    ("name", "options", "max_graphs"), [(*case, (MAX_GRAPHS, 2)[sum(map(len, case)) % 2]) for case in SEARCHES]
)
def test_graphed_search_matches_eager_search(
    name: str, options: str, max_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for target positions grows during the search."""
    model, config, literals = MODELS[name](), make_config(options), LITERALS if max_graphs == 2 else None
    expected = search_all(model, config, literals)
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.MAX_GRAPHS", max_graphs)
    monkeypatch.setattr("nmt.model.parts.ROOM_MULTIPLE", 3)
    graphed = GraphedModel(model)
    use_gpu_shapes(monkeypatch)
    assert_same_hypotheses(expected, graphed, config, literals)
    [[step]] = graphed.unused_graphs.values()
    assert 0 < len(step.graphs) <= max_graphs and step.replays
    rooms = {graph.arguments[1].tokens_BKT.shape[2] for graph in step.graphs.values()}
    assert len(rooms) > 1 or max_graphs == 2


def test_out_of_memory_frees_graphs_and_retries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    graphed, counts = GraphedCallable(torch.clone), []

    def function(fits_without_graphs: bool) -> str:
        counts.append(graphed.count_graphs())
        if fits_without_graphs and not graphed.graphs:
            return "done"
        raise MemoryError

    for fits_without_graphs, expected in ((False, None), (True, "done")):
        for _ in range(3):
            graphed(torch.ones(1))
        assert run_unless_out_of_memory(partial(function, fits_without_graphs)) == expected
    assert counts == [1, 0, 1, 0]


def make_fake_pool() -> Callable[..., tuple[Any, Callable[[], None]]]:
    """Return an imitation of `capture_graph` in which a replay overwrites whatever others left in their memory pool.

    Results are in the pool unless the warm-up returned the same tensors.
    """
    in_pool: list[torch.Tensor] = []

    def capture(work: partial[Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
        arguments = list_tensors(work.args)
        values = [argument.clone() for argument in arguments]
        before = list_tensors(work())
        for argument, value in zip(arguments, values, strict=True):
            argument.copy_(value)  # the warm-up has overwritten those that are fed back
        results, replay = fake_capture_graph(work, device)
        in_pool.extend(one for one in list_tensors(results) if all(one is not another for another in before))

        def replay_in_pool() -> None:
            for one in in_pool:
                one.fill_(1)
            replay()

        return results, replay_in_pool

    return capture


def test_searches_at_the_same_time_use_different_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones with settings that give the same steps use the same graphs again."""
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch(SENTENCES)
    configs = [SearchConfig(beam=3, max_length=30), SearchConfig(beam=3, max_length=30, batch_tokens=100)]
    expected = [
        sorted(search_translations(model, source_BS, length_B, config), key=itemgetter(0)) for config in configs
    ]
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", make_fake_pool())
    use_gpu_shapes(monkeypatch)
    graphed = GraphedModel(model)
    for _ in range(3):
        searches = [search_translations(graphed, source_BS, length_B, config) for config in configs]
        found: list[list[Any]] = [[], []]
        for results in itertools.zip_longest(*searches):  # a result of each in turn
            for several, result in zip(found, results, strict=True):
                several.append(result)
        assert [sorted(several, key=itemgetter(0)) for several in found] == expected
    [steps] = graphed.unused_graphs.values()
    assert len(steps) == 2 and all(step.replays for step in steps)
    assert not any(step.last_arguments for step in steps)  # which would keep the last batch in memory


def test_failed_capture_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    monkeypatch.setattr(
        "nmt.model.kernels.cuda_graphs.capture_graph", lambda function, device: attempts.append(function)
    )
    graphed = GraphedCallable(lambda x: x + 1)
    for step in range(5):
        assert graphed(torch.tensor([step])).item() == step + 1
    assert len(attempts) == 1 and not graphed.count_graphs()  # one attempt per shape
    assert not graphed.last_arguments  # which would hold memory
    assert (graphed.calls, graphed.replays) == (5, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("short", ["before", "during"])
def test_capture_out_of_memory_falls_back_to_eager(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is found too small before the capture, or runs out during it. Random numbers are the same."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = torch.cuda.mem_get_info(device)[1]
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.MEMORY_MARGIN", 10**9 if short == "before" else 0)

    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and short == "during":
            torch.empty(2 * size, dtype=torch.uint8, device=device)
        return F.dropout(x, 0.5) + 1

    graphed, others = GraphedCallable(function), GraphedCallable(lambda x: F.dropout(x, 0.5))
    x = torch.ones(100, device=device)
    for _ in range(3):
        others(x[:50])
    torch.manual_seed(1)
    first = [graphed(x) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(graphed(x), y) for y in first)
    assert not graphed.count_graphs() and (graphed.calls, graphed.replays) == (6, 0)
    torch.manual_seed(2)
    expected = F.dropout(x[:50], 0.5)
    for _ in range(3):
        torch.manual_seed(2)
        assert torch.equal(others(x[:50]), expected)


def with_context(error: Exception, first: Exception) -> Exception:
    """Return an error that was raised while `first` was being handled."""
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), True),
        (RuntimeError("... Search for `cudaErrorStreamCaptureInvalidated' in https://docs.nvidia.com ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("could not create a primitive"), True),
        (MemoryError(), True),
        (with_context(RuntimeError("... cudaErrorStreamCaptureInvalidated ..."), RuntimeError("not permitted")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("Storage size calculation overflowed with sizes=[10000000000, 10000000000]"), True),
    ],
)
def test_is_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_gpu_shapes_are_rounded_up() -> None:
    assert {round_up_batch_size(live, GPU) for live in range(513)} == {0, *(2**n for n in range(10))}
    assert {round_up_length(positions, GPU) for positions in range(1, 65)} == {16, 32, 48, 64}
    assert all(round_up_batch_size(live, GPU) >= live and round_up_length(live, GPU) >= live for live in range(100))
