"""What search does on a GPU, on a processor: a stand-in records and replays, shapes are filled up, counts come late."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SEARCH_OPTIONS, fake_capture_graph, make_model, make_ragged_batch, sharpen
from builders import make_attention_model as attentive
from torch.nn import functional as F

from nmt.config import SearchConfig
from nmt.decoding.search import AsyncCounter, round_up_batch_size, round_up_source_length, search
from nmt.model.ensemble import Ensemble
from nmt.model.kernels import cuda_graphs as replay
from nmt.model.kernels.cuda_graphs import GraphedCallable, GraphedModel
from nmt.model.out_of_memory import try_or_oom
from nmt.runtime.memory import is_out_of_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SENTENCES = (12, 9, 8, 8, 5, 5, 3, 3, 2, 2, 1, 1)
MODELS: dict[str, Callable[[], Any]] = {
    "bahdanau": lambda: sharpen(make_model("bahdanau", "gru")),
    "luong": lambda: sharpen(make_model("luong")),
    "gnmt": lambda: sharpen(make_model("gnmt")),
    "local_m, coverage": lambda: sharpen(
        attentive("input feeding", 0, score="additive", window="local_m", coverage=True), 1.5
    ),
    "local_p": lambda: sharpen(attentive("bahdanau", 1, window="local_p", score="dot"), 1.5),
    "none": lambda: sharpen(attentive("input feeding", 2, score="none"), 1.5),
    "two models": lambda: Ensemble([sharpen(make_model()), sharpen(make_model("gnmt", "gru"))]),
}


def compare(model: Any, other: Any, config: SearchConfig, device: torch.device = CPU, **near: float) -> None:
    """What search finds with a model, all sentences at once, and with another, some at a time."""
    prefixes = [[], [5], [], [7, 7], [], [], [4, 5, 6], [], [9], [], [], []]
    source_BS, length_B, _ = make_ragged_batch(SENTENCES)
    wanted = search(model, source_BS, length_B, config, keep_weights=True, prefixes=prefixes)
    for max_active in (3, 12):
        found = search(other, source_BS.to(device), length_B.to(device), config, True, prefixes, max_active)
        for own, expected, length in zip(found, wanted, SENTENCES, strict=True):
            assert [hypothesis.tokens for hypothesis in own] == [hypothesis.tokens for hypothesis in expected]
            for one, another in zip(own, expected, strict=True):
                assert one.score == pytest.approx(another.score, **(near or {"abs": 1e-9}))
                if one.weights_TS is not None and another.weights_TS is not None:
                    weights = one.weights_TS[:, :length], another.weights_TS[:, :length]
                    torch.testing.assert_close(*weights, rtol=0, atol=near.get("abs", 1e-9))


@pytest.mark.parametrize(
    ("name", "options"), sorted({*itertools.product(MODELS, [*SEARCH_OPTIONS, "greedy"])} - {("none", "coverage")})
)
def test_replayed_steps_find_the_same(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"beam": 1, "n_best": 1} if options == "greedy" else SEARCH_OPTIONS[options]
    model, config = MODELS[name](), SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | own)
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    for most in (replay.MAX_GRAPHS, 2):
        monkeypatch.setattr("nmt.model.kernels.cuda_graphs.MAX_GRAPHS", most)
        replayed = GraphedModel(model)
        with monkeypatch.context() as late:
            late.setattr("nmt.decoding.search.round_up_batch_size", lambda live, _: round_up_batch_size(live, GPU))
            late.setattr(
                "nmt.decoding.search.round_up_source_length",
                lambda positions, _: round_up_source_length(positions, GPU),
            )
            late.setattr("nmt.decoding.search.AsyncCounter", lambda delayed: AsyncCounter(delayed=True))
            compare(model, replayed, config)
        assert 0 < len(replayed.step.graphs) <= most


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_finds_the_same(name: str) -> None:
    for device in {torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)}:
        model, other = MODELS[name](), MODELS[name]()
        for member in getattr(other, "members", [other]):
            member.to(device)
        replayed = GraphedModel(other)
        compare(model, replayed, SearchConfig(beam=4, n_best=4, max_length=9), device, abs=1e-6)
        assert replayed.step.graphs


def test_where_memory_is_short_graphs_are_freed_and_the_work_is_tried_once_more() -> None:
    replayed = GraphedModel(make_model())
    replayed.step.graphs[()] = None

    held: list[int] = []

    def work() -> str | None:
        held.append(len(replayed.step.graphs))
        if smaller and not replayed.step.graphs:
            return "done"
        raise MemoryError

    smaller = False
    assert try_or_oom(work) is None and held == [1, 0]
    replayed.step.graphs[()] = None
    smaller = True  # than all memory: it suffices without graphs
    assert try_or_oom(work) == "done" and held == [1, 0, 1, 0]


def test_an_argument_that_stays_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is the same object at each step of search, and a new one where sentences come or go."""
    copies: list[int] = []
    recorded = GraphedCallable(lambda state, memory: memory[0] + state)
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, new: copies.append(id(new)) or copy(own, new))
    memories = [(torch.ones(3),), (torch.full((3,), 5.0),)]
    for memory, other in zip(memories, ((torch.ones(2),), (torch.ones(2),)), strict=True):
        for step in range(4):
            if step == 2:  # another shape in between
                recorded(torch.ones(2), other)
            state = torch.full((3,), float(step))
            assert recorded(state, memory).tolist() == (memory[0] + step).tolist()
    first, second = (copies.count(id(memory[0])) for memory in memories)
    assert first == 1 and second == 2  # the second also after a replay of the other shape
    assert recorded.calls == 10 and recorded.replays == 8


def test_where_memory_might_not_suffice_work_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", lambda work, device: attempts.append(work))
    recorded = GraphedCallable(lambda x: x + 1)
    for step in range(5):
        assert recorded(torch.tensor([step])).item() == step + 1
    assert len(attempts) == 1 and not recorded.graphs  # it is tried once for a shape
    assert (recorded.calls, recorded.replays) == (5, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("short", ["before", "during"])
def test_a_gpu_with_too_little_memory_goes_on_without_a_graph(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that is seen before a capture or an allocation fails during it; random numbers go on, too."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = torch.cuda.mem_get_info(device)[1]
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.MEMORY_MARGIN", 10**9 if short == "before" else 0)

    def work(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and short == "during":
            torch.empty(2 * size, dtype=torch.uint8, device=device)
        return F.dropout(x, 0.5) + 1

    recorded, others = GraphedCallable(work), GraphedCallable(lambda x: F.dropout(x, 0.5))
    x = torch.ones(100, device=device)
    for _ in range(3):
        others(x[:50])
    torch.manual_seed(1)
    first = [recorded(x) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(recorded(x), own) for own in first)
    assert not recorded.graphs and (recorded.calls, recorded.replays) == (6, 0)
    torch.manual_seed(2)
    expected = F.dropout(x[:50], 0.5)
    for _ in range(3):
        torch.manual_seed(2)
        assert torch.equal(others(x[:50]), expected)


def after(error: Exception, first: Exception) -> Exception:
    """An error that was raised while another one was handled."""
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
        (after(RuntimeError("... cudaErrorStreamCaptureInvalidated ..."), torch.OutOfMemoryError("CUDA")), True),
        (after(RuntimeError("... cudaErrorStreamCaptureInvalidated ..."), RuntimeError("not permitted")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_a_late_count_is_that_of_the_call_before() -> None:
    counts = [torch.arange(5) < count for count in (1, 2, 4)]
    assert [*map(AsyncCounter(delayed=False), counts)] == [1, 2, 4]
    late = AsyncCounter(delayed=True)
    assert [*map(late, counts)] == [0, 1, 2]
    late.reset()
    assert late(counts[0]) == 0


def test_a_gpu_meets_few_shapes() -> None:
    assert {round_up_batch_size(live, GPU) for live in range(513)} == {0, *(2**n for n in range(10))}
    assert {round_up_source_length(positions, GPU) for positions in range(1, 65)} == {16, 32, 48, 64}
    assert all(
        round_up_batch_size(live, GPU) >= live and round_up_source_length(live, GPU) >= live for live in range(100)
    )


def test_the_log_says_how_much_ran_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = GraphedCallable(lambda x: x + 1)
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    for size in (1, 1, 2, 1):
        recorded(torch.zeros(size))
    expected = "2 of 4 steps ran without a CUDA graph; shapes captured: 1, too large for the memory: 0"
    assert recorded.summarize("steps") == expected
