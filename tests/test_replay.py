"""What search does on a GPU, on a processor: a stand-in records and replays, shapes are filled up, counts come late."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attention import model_of as attentive
from test_model import model_of, ragged_batch
from test_search import OPTIONS, sharp

from nmt.config import SearchConfig
from nmt.model import replay
from nmt.model.ensemble import Ensemble
from nmt.model.replay import Replayed, tensors, within_memory
from nmt.search import Tally, bucket, kept, search

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SENTENCES = (12, 9, 8, 8, 5, 5, 3, 3, 2, 2, 1, 1)
MODELS: dict[str, Callable[[], Any]] = {
    "bahdanau": lambda: sharp(model_of("bahdanau", "gru")),
    "luong": lambda: sharp(model_of("luong")),
    "gnmt": lambda: sharp(model_of("gnmt")),
    "local_m, coverage": lambda: sharp(
        attentive("input feeding", 0, score="additive", window="local_m", coverage=True), 1.5
    ),
    "local_p": lambda: sharp(attentive("bahdanau", 1, window="local_p", score="dot"), 1.5),
    "none": lambda: sharp(attentive("input feeding", 2, score="none"), 1.5),
    "two models": lambda: Ensemble([sharp(model_of()), sharp(model_of("gnmt", "gru"))]),
}


def stand_in(work: Callable[[], Any], _: torch.device) -> tuple[Any, Callable[[], None]]:
    """As `replay.record`: what the work returned, and its repetition in the same place."""
    results = work()

    def again() -> None:
        for place, part in zip(tensors(results), tensors(work()), strict=True):
            place.copy_(part)

    for place in tensors(results):
        place.fill_(7)  # what a recording leaves behind is not to be used
    return results, again


def compare(model: Any, other: Any, config: SearchConfig, device: torch.device = CPU, **near: float) -> None:
    """What search finds with a model, all sentences at once, and with another, some at a time."""
    given = [[], [5], [], [7, 7], [], [], [4, 5, 6], [], [9], [], [], []]
    source_BS, length_B, _ = ragged_batch(SENTENCES)
    wanted = search(model, source_BS, length_B, config, keep_weights=True, given=given)
    for at_once in (3, 12):
        found = search(other, source_BS.to(device), length_B.to(device), config, True, given, at_once)
        for own, expected, length in zip(found, wanted, SENTENCES, strict=True):
            assert [hypothesis.tokens for hypothesis in own] == [hypothesis.tokens for hypothesis in expected]
            for one, another in zip(own, expected, strict=True):
                assert one.score == pytest.approx(another.score, **(near or {"abs": 1e-9}))
                if one.weights_TS is not None and another.weights_TS is not None:
                    weights = one.weights_TS[:, :length], another.weights_TS[:, :length]
                    torch.testing.assert_close(*weights, rtol=0, atol=near.get("abs", 1e-9))


@pytest.mark.parametrize(
    ("name", "options"), sorted({*itertools.product(MODELS, [*OPTIONS, "greedy"])} - {("none", "coverage")})
)
def test_replayed_steps_find_the_same(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"beam": 1, "n_best": 1} if options == "greedy" else OPTIONS[options]
    model, config = MODELS[name](), SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | own)
    monkeypatch.setattr("nmt.model.replay.record", stand_in)
    for most in (replay.GRAPHS, 2):
        monkeypatch.setattr("nmt.model.replay.GRAPHS", most)
        replayed = Replayed(model)
        with monkeypatch.context() as late:
            late.setattr("nmt.search.kept", lambda live, _: kept(live, GPU))
            late.setattr("nmt.search.bucket", lambda positions, _: bucket(positions, GPU))
            late.setattr("nmt.search.Tally", lambda late: Tally(late=True))
            compare(model, replayed, config)
        assert 0 < len(replayed.step.graphs) <= most


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_finds_the_same(name: str) -> None:
    for device in {torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)}:
        model, other = MODELS[name](), MODELS[name]()
        for member in getattr(other, "members", [other]):
            member.to(device)
        replayed = Replayed(other)
        compare(model, replayed, SearchConfig(beam=4, n_best=4, max_length=9), device, abs=1e-6)
        assert replayed.step.graphs


def test_where_memory_is_short_nothing_stays_recorded() -> None:
    replayed = Replayed(model_of())
    replayed.step.graphs[()] = None

    def work() -> None:
        raise MemoryError

    assert within_memory(work) is None and not replayed.step.graphs


def test_a_late_count_is_that_of_the_call_before() -> None:
    counts = [torch.arange(5) < count for count in (1, 2, 4)]
    assert [*map(Tally(late=False), counts)] == [1, 2, 4]
    late = Tally(late=True)
    assert [*map(late, counts)] == [0, 1, 2]
    late.forget()
    assert late(counts[0]) == 0


def test_a_gpu_meets_few_shapes() -> None:
    assert {kept(live, GPU) for live in range(513)} == {0, *(2**n for n in range(10))}
    assert {bucket(positions, GPU) for positions in range(1, 65)} == {16, 32, 48, 64}
    assert all(kept(live, GPU) >= live and bucket(live, GPU) >= live for live in range(100))
