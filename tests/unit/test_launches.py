"""Number of operations that a GPU has to launch. Small ones take longer to launch than to run.

They are counted on PyTorch's `meta` device, which computes nothing and takes the same code paths as a GPU.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    build_padded_batch,
    fake_capture_graph,
    make_model,
    make_ragged_batch,
    make_training_state,
    search,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nmt.config import EOS, ModelConfig, SearchConfig
from nmt.decoding.hypotheses import ActiveBatch
from nmt.decoding.search import AsyncCounter, NewSentences, advance, prepare_sentences, prepare_step
from nmt.model.ensemble import Ensemble
from nmt.model.kernels import KERNELS
from nmt.model.kernels.cuda_graphs import GraphedModel
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.training.step import GraphedBackward, train_step

META = torch.device("meta")
FREE_OPERATIONS = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "_unsafe_view",
    "promote_types",
}  # launch nothing


class LaunchCounter(TorchDispatchMode):
    """Count operations by name, without views, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        name = function._schema.name.removeprefix("aten::")
        self.counts[name] += not is_view and name not in FREE_OPERATIONS
        return function(*args, **kwargs or {})


def test_launches_of_cross_entropy() -> None:
    """Forward and backward with the output layer, in bf16."""
    inputs = [torch.empty(shape, device=META, requires_grad=True) for shape in ((48, 16), (50, 16), (50,))]
    target_R = torch.ones(48, dtype=torch.int64, device=META)
    with LaunchCounter() as counter:
        loss = KERNELS["fast"].cross_entropy(inputs[0].bfloat16(), *inputs[1:], target_R, 0.1, pad=0)
        loss.smoothed.backward()
    assert sum(counter.counts.values()) == 58, counter.counts


def count_launches(config: ModelConfig, steps: int) -> Counter[str]:
    """Count the launches of one forward and backward pass in bf16, with the given number of target positions."""
    model = build_model(config, 50, 50).to(META)
    model.dtype = torch.bfloat16
    source_BS = torch.ones(8, 6, dtype=torch.int64, device=META)
    with LaunchCounter() as counter:
        loss, _ = model.loss(source_BS, source_BS[:, 0], torch.ones(8, steps + 1, dtype=torch.int64, device=META))
        loss.smoothed.backward()
    return counter.counts


def fake_torch_layer(rnn: Any, weights: Any, x_BTI: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Imitate cuDNN, which runs a layer in one call; on `meta` PyTorch would loop over positions."""
    h_BTD = x_BTI @ weights[0][: rnn.hidden].t()
    return (h_BTD, *(h_BTD[:, :1].transpose(0, 1) for _ in state))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"style": "bahdanau"}, 47),
        ({"style": "bahdanau", "cell": "gru"}, 48),
        ({"style": "bahdanau", "decoder_layers": 4}, 116),
        ({"style": "luong"}, 52),
        ({"style": "luong", "decoder_layers": 4}, 121),
        ({"style": "luong", "input_feeding": False}, 0),
        ({"style": "gnmt", "decoder_layers": 4}, 0),
    ],
)
def test_launches_per_target_position_in_training(
    settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more target position launches nothing if attention does not feed the recurrence."""
    monkeypatch.setattr("nmt.model.kernels.recurrence.RNN.torch_layer", fake_torch_layer)
    longer, shorter = (count_launches(ModelConfig(embed=16, hidden=16, **settings), steps) for steps in (6, 5))
    longer.subtract(shorter)
    assert sum(longer.values()) == expected, longer


def test_launches_per_update_outside_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Include the assembly of the batch; the number of parameters must not matter."""
    monkeypatch.setattr(
        "nmt.model.kernels.cuda_graphs.capture_graph",
        lambda work, device: (fake_capture_graph(work, device)[0], lambda: None),
    )
    monkeypatch.setattr("nmt.training.step.build_batch", build_padded_batch)
    totals = []
    for name in ("bahdanau", "bahdanau, two layers"):
        state = make_training_state(name, "lstm", torch.float32)
        state.run.train.accumulate = 1
        state.graphed_backward = GraphedBackward(state.run, state.model)
        rows = np.arange(8)
        for _ in range(2):
            train_step(state, rows, 100)
        with LaunchCounter() as counter:
            train_step(state, rows, 100)
        totals.append(sum(counter.counts.values()))
    assert totals == [36, 36], counter.counts


def make_meta_model(**settings: Any) -> Seq2Seq:
    """Return a bf16 model with weights prepared for inference."""
    model = build_model(ModelConfig(embed=16, hidden=16, **settings), 50, 50).to(META, torch.bfloat16).eval()
    model.dtype = torch.bfloat16
    model.prepare_for_inference(int8=False)
    return model


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"style": "bahdanau"}, 26),
        ({"style": "luong"}, 25),
    ],
)
def test_launches_per_search_step(settings: dict[str, Any], expected: int) -> None:
    """Decode one token of each hypothesis with weights prepared for inference, without the output layer."""
    model = make_meta_model(**settings)
    source_BS = torch.ones(8, 6, dtype=torch.int64, device=META)
    with torch.no_grad():
        memory, state = model.start(source_BS, source_BS[:, 0])
        with LaunchCounter() as counter:
            model.decode(source_BS[:, :1], state, memory)
    assert sum(counter.counts.values()) == expected, counter.counts


@torch.inference_mode()
@pytest.mark.parametrize(
    ("settings", "beam", "expected"),
    [
        ({"style": "bahdanau"}, 1, 66),
        ({"style": "bahdanau"}, 5, 88),
        ({"style": "luong"}, 1, 66),
        ({"style": "luong"}, 5, 89),
    ],
)
def test_launches_per_search_step_in_cuda_graph(
    settings: dict[str, Any], beam: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count those of a whole step. When the results of a step are passed to the next one, nothing is copied."""
    inside = LaunchCounter()

    def capture(work: Callable[[], Any], _: torch.device) -> tuple[Any, Callable[[], None]]:
        work()  # the warm-up
        with inside:
            return work(), lambda: None

    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", capture)
    model, config = make_meta_model(**settings), SearchConfig(beam=beam)
    source_BS = torch.ones(8, 6, dtype=torch.int64, device=META)
    _, beams, inputs = prepare_sentences(NewSentences(source_BS, source_BS[:, 0]), config, torch.bfloat16, 0)
    with LaunchCounter() as outside, prepare_step(GraphedModel(model), config, False) as step:
        memory, state = model.start(source_BS, source_BS[:, 0])
        state, beams, _ = advance(model, config, False, state, beams, memory, inputs)
        for _ in range(3):
            outside.counts.clear()
            state, beams, _ = step(state, beams, memory, inputs)
    assert (sum(inside.counts.values()), sum(outside.counts.values())) == (expected, 0), inside.counts


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(
    ("keep_weights", "beam", "expected"), [(False, 1, 1), (False, 5, 1), (True, 1, 2), (True, 5, 3)]
)
def test_launches_per_search_step_outside_cuda_graph(
    keep_weights: bool, beam: int, expected: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count those of a step of the loop. One of them copies the number of sentences that are done to the CPU."""

    def capture(work: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
        with _disable_current_modes():
            results, replay = fake_capture_graph(work, device)

        def replay_uncounted() -> None:
            with _disable_current_modes():
                replay()

        return results, replay_uncounted

    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", capture)
    monkeypatch.setattr("nmt.decoding.search.AsyncCounter", lambda delayed: AsyncCounter(delayed=True))
    models, counts = [make_model() for _ in range(members)], []
    for model in models:
        torch.nn.init.constant_(model.output.bias.detach()[EOS], -1e4)  # translations get the maximum length
    graphed = GraphedModel(Ensemble(models) if members > 1 else models[0])
    source_BS, length_B, _ = make_ragged_batch()
    with LaunchCounter() as counter:

        def count_step(_: ActiveBatch) -> None:
            counts.append(counter.counts.copy())

        config = SearchConfig(beam=beam, max_length=9)
        search(graphed, source_BS, length_B, config, keep_weights, on_step=count_step)
    counts[-1].subtract(counts[-2])
    assert sum(counts[-1].values()) == expected, counts[-1]
