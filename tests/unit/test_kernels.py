"""Fast kernels against the reference, graphed updates against eager ones, padded batches against plain ones."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import MODEL_VARIANTS, build_padded_batch, fake_capture_graph, make_training_state
from torch import Tensor

from nmt.config import TrainConfig
from nmt.data.batching import collate, epoch_batches
from nmt.model.kernels import KERNELS, REFERENCE
from nmt.model.kernels.linear import Dropout
from nmt.model.kernels.loss import MAX_FP32_LOGITS
from nmt.model.kernels.recurrence import RNN
from nmt.training.backward import GraphedBackward, backward
from nmt.training.state import TrainState
from nmt.training.step import train_step

VERSIONS = ("fast", "reference")


def use_small_chunks(patch: pytest.MonkeyPatch) -> None:
    """Split into several chunks what would be one in a model as small as these."""
    patch.setattr("nmt.model.kernels.additive.CACHE_NUMEL", 200)
    patch.setitem(MAX_FP32_LOGITS, "cpu", 100)
    patch.setattr("nmt.model.kernels.loss.ROWS_PER_PRODUCT", 7)


def compute_gradients(state: TrainState) -> dict[str, Tensor]:
    batch = collate(state.data.pairs, np.arange(12)).duplicate()
    torch.manual_seed(1)
    loss, weights = state.model.loss(
        batch.source_BS, batch.source_length_B, batch.target_BT, 0.1, state.run.train.r_drop
    )
    (loss.smoothed + weights.square().sum()).backward()
    results = {name: parameter.grad for name, parameter in state.model.named_parameters()}
    return results | {"smoothed": loss.smoothed.detach(), "nats": loss.nats, "correct": loss.correct}


def loss_curve(state: TrainState, epochs: int = 3) -> list[float]:
    """Train for some epochs of five updates and return the loss of each update."""
    batches = epoch_batches(state.data.pairs, state.run.train, 1, 0)
    return [train_step(state, batches[step % 5], 100).sums.smoothed.item() for step in range(5 * epochs)]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_fast_kernels_match_the_reference(name: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch)
    monkeypatch.setitem(KERNELS, "reference", REFERENCE._replace(Dropout=Dropout))  # the same random numbers
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        fast, reference = (make_training_state(name, cell, dtype, kernels=kernels) for kernels in VERSIONS)
        actual, expected = compute_gradients(fast), compute_gradients(reference)
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=tolerance, atol=tolerance * value.abs().max().item())


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_graphed_updates_match_eager_updates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with `fake_capture_graph`. Dropout draws the same numbers."""
    captures = []
    monkeypatch.setattr(
        "nmt.model.kernels.cuda_graphs.capture_graph",
        lambda *given: captures.append(given) or fake_capture_graph(*given),
    )
    state, graphed = make_training_state(name, "lstm", torch.float64), make_training_state(name, "lstm", torch.float64)
    graphed.graphed_backward = GraphedBackward(graphed.run, graphed.model)
    monkeypatch.setattr("nmt.training.step.build_batch", build_padded_batch)
    assert loss_curve(graphed, 2) == loss_curve(state, 2)  # shapes are captured in the first epoch
    assert 0 < len(captures) <= 4  # few shapes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_flat_weights_match_separate_weights(cell: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are the same with weights in one buffer, which cuDNN needs, cast in each call or once."""
    torch.manual_seed(1)
    rnn = RNN(cell, 5, 7).to(torch.promote_types(dtype, torch.float32))
    x_BTI, results = torch.randn(3, 4, 5).to(dtype), []
    state = rnn.init_state(x_BTI)
    for flat in ((), ("cpu",)):
        monkeypatch.setattr("nmt.model.kernels.recurrence.FLAT_WEIGHT_DEVICES", flat)
        h_BTD, last = rnn(x_BTI, state)
        results.append([h_BTD, *last, *torch.autograd.grad(h_BTD.float().square().sum(), list(rnn.parameters()))])
    assert all(torch.equal(actual, other) for actual, other in zip(*results, strict=True))

    rnn.to(dtype).prepare_layer_for_inference()
    start = rnn.weight_ih.data_ptr()
    for parameter in rnn.parameters():  # w_ih, w_hh, b_ih, b_hh, one after the other
        assert parameter.data_ptr() == start
        start += parameter.numel() * parameter.element_size()
    torch.testing.assert_close(rnn(x_BTI, state)[0], results[0][0])


def test_r_drop_of_equal_passes_is_the_single_pass_loss() -> None:
    """Guided alignment and the coverage loss are computed for both passes, too."""
    state = make_training_state("coverage", "lstm", torch.float64, dropout=0.0)
    batch = collate(state.data.pairs, np.arange(12))
    batch = batch._replace(
        alignment_BTS=torch.rand(12, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1]).double()
    )
    results = []
    for r_drop in (0.0, 3.0):
        train = TrainConfig(guided_alignment=0.3, coverage_loss=0.2, r_drop=r_drop)
        update_2 = torch.tensor([50, 0.5]).double()
        loss, gradients = backward(replace(state.run, train=train), state.model, batch, update_2)
        results.append([*loss, *gradients])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_padding_a_batch_does_not_change_loss_or_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With longer pairs and more of them, and padding dropped before the output layer or masked in the loss."""
    state = make_training_state(name, "gru", torch.float64, dropout=0.0)
    batch = collate(state.data.pairs, np.arange(12))
    alignment_BTS = torch.rand(12, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1], dtype=torch.float64)
    batch = batch._replace(alignment_BTS=alignment_BTS)
    padded = batch.pad_to(16, 15, 17)
    assert padded.alignment_BTS.shape == (16, 17, 15) and padded.alignment_BTS.sum() == pytest.approx(
        batch.alignment_BTS.sum()
    )
    assert padded.target_BT.shape == (16, 18) and padded.source_BS.shape == (16, 15)
    coverage_loss = 0.2 * state.run.model.attention.coverage
    train = replace(state.run.train, guided_alignment=0.3, coverage_loss=coverage_loss)
    update_2, results = torch.tensor([50, 0.5]).double(), []
    for actual, dropping in ((batch, ("cpu",)), (padded, ("cpu",)), (padded, ())):
        monkeypatch.setattr("nmt.model.seq2seq.PADDING_DROP_DEVICES", dropping)
        loss, gradients = backward(replace(state.run, train=train), state.model, actual, update_2)
        results.append([*loss, *gradients])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_graphs_are_freed_with_their_owner() -> None:
    """They hold much GPU memory, so they must not wait for garbage collection."""
    state = make_training_state("bahdanau", "lstm", torch.float64)
    graphed = GraphedBackward(state.run, state.model)
    gone = weakref.ref(graphed.callable)
    del graphed
    assert gone() is None
