"""Learning rates, optimizers, gradient clipping, and updates that are not finite."""

import math

import pytest
import torch

from nmt.config import LR_SCHEDULES as SCHEDULE_NAMES
from nmt.config import OPTIMIZER_NAMES as NAMES
from nmt.config import OptimConfig
from nmt.training.optim import OPTIMIZERS, SCHEDULES, build_optimizer, compute_learning_rate, step_if_finite


def test_implementations_match_config_choices() -> None:
    assert tuple(OPTIMIZERS) == NAMES and tuple(SCHEDULES) == SCHEDULE_NAMES


@pytest.mark.parametrize(
    ("schedule", "step", "decays", "expected"),
    [
        ("constant", 1, 0, 0.1),
        ("constant", 10, 0, 1.0),
        ("constant", 90, 3, 1.0),
        ("inverse_sqrt", 5, 0, 0.5),
        ("inverse_sqrt", 40, 0, 0.5),
        ("cosine", 10, 0, 1.0),
        ("cosine", 55, 0, 0.5),
        ("cosine", 100, 0, 0.0),
        ("cosine", 120, 0, 0.0),
        ("plateau", 50, 3, 0.125),
        ("plateau", 5, 1, 0.25),
    ],
)
def test_learning_rate_schedules(schedule: str, step: int, decays: int, expected: float) -> None:
    config = OptimConfig(lr=1.0, schedule=schedule, warmup=10)
    assert compute_learning_rate(config, step, 100, decays) == pytest.approx(expected, abs=1e-12)


@pytest.fixture(params=[True, False], ids=["fused", "as on Apple GPUs"])
def fused_and_unfused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with and without kernels that clip gradients and skip updates themselves."""
    if not request.param:
        monkeypatch.setattr("nmt.training.optim.FUSED_DEVICES", ())


@pytest.mark.usefixtures("fused_and_unfused")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_gradient_clipping_matches_torch(name: str, norm: float) -> None:
    torch.manual_seed(1)
    starts = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(3)]

    def run(ours: bool) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        parameters.append(torch.nn.Parameter(torch.ones(2)))  # has no gradient
        optimizer = build_optimizer(OptimConfig(name=name, lr=0.1), parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=False):
                parameter.grad = gradient.clone()
            if ours:
                assert not step_if_finite(optimizer, norm, torch.tensor(1.0))
            else:
                torch.nn.utils.clip_grad_norm_(parameters, norm)
                optimizer.step()
        return [parameter.detach() for parameter in parameters]

    torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=0)  # PyTorch adds 1e-6 to the norm


@pytest.mark.usefixtures("fused_and_unfused")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0)])
def test_non_finite_updates_change_nothing(name: str, loss: float, gradient: float) -> None:
    x = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.1), [x])
    results = []
    for steps in ((False, True), (True, False, True)):
        with torch.no_grad():
            x.copy_(torch.tensor([3.0, -2.0]))
        optimizer = build_optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.1), [x])
        for failing in steps:
            x.grad = torch.tensor([0.5, gradient if failing else 2.0])
            value = torch.tensor(loss if failing else 1.0)
            assert step_if_finite(optimizer, None, value).item() == failing
        results.append((x.detach().clone(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_zero_before_first_update(name: str) -> None:
    x = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.1), [x])
    assert x.tolist() == [3, -2] and optimizer.param_groups[0]["weight_decay"] == 0.1
    for slots in optimizer.state.values():
        assert not any(value.any() for value in slots.values() if value is not None)
