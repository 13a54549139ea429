"""How many operations a GPU is given: each is a launch, or several, and small ones take longer to launch than to run.

Counted on PyTorch's device `meta`, on which nothing is computed, and all that is not for a CPU alone runs as on a GPU.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_padded_batch, fake_capture_graph, make_training_state
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.config import ModelConfig
from nmt.model.seq2seq import build_model
from nmt.training.step import GraphedBackward, train_step

META = torch.device("meta")
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "promote_types"}  # launch nothing


class Launches(TorchDispatchMode):
    """Count operations by name; those that only look at a tensor in another way launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        returned = [part.alias_info for part in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in returned)
        name = function._schema.name.removeprefix("aten::")
        self.counts[name] += not view and name not in FREE
        return function(*arguments, **named or {})


def launches(config: ModelConfig, steps: int) -> Counter[str]:
    """Of one batch with so many target positions, forward and backward, in bf16."""
    model = build_model(config, 50, 50).to(META)
    model.dtype = torch.bfloat16
    source_BS = torch.ones(8, 6, dtype=torch.int64, device=META)
    with Launches() as found:
        loss, _ = model.loss(source_BS, source_BS[:, 0], torch.ones(8, steps + 1, dtype=torch.int64, device=META))
        loss.smoothed.backward()
    return found.counts


def one_call(rnn: Any, weights: Any, x_BTI: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A layer as cuDNN has it, one call; on `meta` PyTorch would loop over positions."""
    h_BTD = x_BTI @ weights[0][: rnn.hidden].t()
    return (h_BTD, *(h_BTD[:, :1].transpose(0, 1) for _ in state))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"style": "bahdanau"}, 45),
        ({"style": "bahdanau", "cell": "gru"}, 46),
        ({"style": "bahdanau", "decoder_layers": 4}, 114),
        ({"style": "luong"}, 50),
        ({"style": "luong", "decoder_layers": 4}, 119),
        ({"style": "luong", "input_feeding": False}, 0),
        ({"style": "gnmt", "decoder_layers": 4}, 0),
    ],
)
def test_a_step_of_training(settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one more target position costs. Where attention does not feed the recurrence, nothing."""
    monkeypatch.setattr("nmt.model.kernels.recurrence.RNN.torch_layer", one_call)
    longer, shorter = (launches(ModelConfig(embed=16, hidden=16, **settings), steps) for steps in (6, 5))
    longer.subtract(shorter)
    assert sum(longer.values()) == expected, longer


def test_an_update_outside_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembling the batch counts too; the number of parameters does not matter."""
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
        with Launches() as found:
            train_step(state, rows, 100)
        totals.append(sum(found.counts.values()))
    assert totals == [36, 36], found.counts


@pytest.mark.parametrize(("settings", "expected"), [({"style": "bahdanau"}, 26), ({"style": "luong"}, 25)])
def test_a_step_of_search(settings: dict[str, Any], expected: int) -> None:
    """One token of each hypothesis, by prepared weights, without the output layer."""
    model = build_model(ModelConfig(embed=16, hidden=16, **settings), 50, 50).to(META, torch.bfloat16).eval()
    model.dtype = torch.bfloat16
    model.prepare_for_inference(int8=False)
    source_BS = torch.ones(8, 6, dtype=torch.int64, device=META)
    with torch.no_grad():
        memory, state = model.start(source_BS, source_BS[:, 0])
        with Launches() as found:
            model.decode(source_BS[:, :1], state, memory)
    assert sum(found.counts.values()) == expected, found.counts
