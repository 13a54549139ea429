"""What search does on a GPU, on a processor: a stand-in records and replays, shapes are filled up, counts come late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attention import model_of as attentive
from test_model import model_of, ragged_batch
from test_search import sharp

from nmt.config import SearchConfig
from nmt.model import replay
from nmt.model.ensemble import Ensemble
from nmt.model.replay import Replayed, tensors
from nmt.search import Tally, bucket, kept, search

GPU = torch.device("cuda")
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


def stand_in(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """As `replay.record`: what the work returned, and its repetition in the same place."""
    results = work()

    def again() -> None:
        for place, part in zip(tensors(results), tensors(work()), strict=True):
            place.copy_(part)

    for place in tensors(results):
        place.fill_(7)  # what a capture leaves behind is not to be used
    return results, again


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{"beam": 4, "n_best": 2}, {"beam": 1}, {"beam": 3, "n_best": 3, "sample": True}], ids=str
)
def test_replayed_steps_find_the_same(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = MODELS[name](), SearchConfig(**{"max_length": 9} | options)
    source_BS, length_B, _ = ragged_batch(SENTENCES)
    wanted = search(model, source_BS, length_B, config, keep_weights=True)
    monkeypatch.setattr("nmt.model.replay.record", stand_in)
    monkeypatch.setattr("nmt.search.kept", lambda live, _: kept(live, GPU))
    monkeypatch.setattr("nmt.search.bucket", lambda positions, _: bucket(positions, GPU))
    monkeypatch.setattr("nmt.search.Tally", lambda late: Tally(late=True))
    for most in (replay.GRAPHS, 2):
        monkeypatch.setattr("nmt.model.replay.GRAPHS", most)
        replayed = Replayed(model)
        for at_once in (3, 12):
            found = search(replayed, source_BS, length_B, config, keep_weights=True, at_once=at_once)
            assert 0 < len(replayed.graphs) <= most
            for own, expected, length in zip(found, wanted, SENTENCES, strict=True):
                assert [hypothesis.tokens for hypothesis in own] == [hypothesis.tokens for hypothesis in expected]
                for one, other in zip(own, expected, strict=True):
                    assert one.score == pytest.approx(other.score, abs=1e-9)
                    if one.weights_TS is not None and other.weights_TS is not None:
                        torch.testing.assert_close(one.weights_TS[:, :length], other.weights_TS[:, :length])


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
