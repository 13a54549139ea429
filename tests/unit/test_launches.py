"""Number of operations that a GPU has to launch. Small ones take longer to launch than to run.

They are counted on PyTorch's `meta` device, which computes nothing and takes the same code paths as a GPU.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.config import ModelConfig
from nmt.model.seq2seq import build_model

META = torch.device("meta")
FREE_OPERATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "promote_types"}


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
        ({"style": "bahdanau", "decoder_layers": 4}, 116),
        ({"style": "luong"}, 52),
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
