"""Every fast path of training against the plain one: PyTorch's own operations, one after the other, by autograd."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import MODEL_VARIANTS, SMALL_VOCABULARY, build_padded_batch, fake_capture_graph, make_training_state
from torch import Tensor
from torch.nn import functional as F

from nmt.config import TrainConfig
from nmt.data.batching import collate, epoch_batches
from nmt.model.loss import MAX_FP32_LOGITS, Loss, cross_entropy
from nmt.model.recurrence import RNN, RNNState
from nmt.training import step as update
from nmt.training.state import TrainState
from nmt.training.step import GraphedBackward, backward, train_step


def plain_bind(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Callable[..., Tensor]:
    bias = None if bias_O is None else bias_O.to(dtype)
    return lambda x_NI, plus=None: F.linear(x_NI, weight_OI.to(dtype), bias) + (0 if plus is None else plus)


def plain_lstm(gates_NG: Tensor, c_ND: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates_NG.chunk(4, 1)
    c = torch.sigmoid(f) * c_ND + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def plain_gru(inputs_NG: Tensor, hidden_NG: Tensor, h_ND: Tensor) -> Tensor:
    (r_i, z_i, n_i), (r_h, z_h, n_h) = inputs_NG.chunk(3, 1), hidden_NG.chunk(3, 1)
    z = torch.sigmoid(z_i + z_h)
    return (1 - z) * torch.tanh(n_i + torch.sigmoid(r_i + r_h) * n_h) + z * h_ND


def plain_layer(self: RNN, x_BTI: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
    outputs = []
    for x_BI in x_BTI.unbind(1):
        inputs, hidden = F.linear(x_BI, self.weight_ih, self.bias_ih), F.linear(state[0], self.weight_hh, self.bias_hh)
        state = (
            plain_lstm(inputs + hidden, state[1]) if self.num_states == 2 else (plain_gru(inputs, hidden, state[0]),)
        )
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def plain_loss(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, smoothing: float, r_drop: float, product: None, pad: int
) -> Loss:
    logits = F.linear(x, weight, bias)
    smoothed = F.cross_entropy(logits, target, label_smoothing=smoothing, ignore_index=pad, reduction="sum")
    if r_drop:
        p, q = F.log_softmax(logits[target != pad], 1).chunk(2)
        both = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))]
        smoothed = smoothed + r_drop / 2 * sum(both)
    nats = F.cross_entropy(logits, target, ignore_index=pad, reduction="sum")
    return Loss(smoothed, nats, (logits.argmax(1) == target)[target != pad].sum())


def plain_step(optimizer: torch.optim.Optimizer, norm: float, scale: Tensor, loss: Tensor) -> Tensor:
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"] if parameter.grad is not None]
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    for gradient in gradients:
        gradient.div_(np.float32(max(1.0, length / norm)))  # fused optimizers take the factor in fp32 whatever the rest
    optimizer.step()
    return torch.tensor(False)


def take_plain_paths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("nmt.model.kernels.linear.linear_for_steps", plain_bind)
    patch.setattr("nmt.model.recurrence.linear_for_steps", plain_bind)
    patch.setattr("nmt.model.recurrence._LSTMCell", SimpleNamespace(apply=plain_lstm))
    patch.setattr("nmt.model.recurrence._GRUCell", SimpleNamespace(apply=plain_gru))
    patch.setattr(RNN, "forward", plain_layer)
    patch.setattr("nmt.model.windows.values_for_steps", lambda values: lambda weights: weights @ values)
    patch.setattr("nmt.model.windows.rows_for_steps", lambda table: lambda index: table[index])
    patch.setattr("nmt.model.attention.CACHE_NUMEL", 2**40)  # all at once
    patch.setattr("nmt.model.seq2seq.cross_entropy", plain_loss)
    patch.setattr("nmt.training.step.step_if_finite", plain_step)


def take_fast_paths(patch: pytest.MonkeyPatch) -> None:
    """As they are, but in several parts where this small model would have one."""
    patch.setattr("nmt.model.attention.CACHE_NUMEL", 200)
    patch.setitem(MAX_FP32_LOGITS, "cpu", 100)
    patch.setattr("nmt.model.loss.ROWS_PER_PRODUCT", 7)


def gradients(state: TrainState) -> dict[str, Tensor]:
    batch = collate(state.train, np.arange(12)).duplicate()
    torch.manual_seed(1)
    loss, weights = state.model.loss(
        batch.source_BS, batch.source_length_B, batch.target_BT, 0.1, state.run.train.r_drop
    )
    (loss.smoothed + weights.weights_BQW.square().sum()).backward()
    found = {name: parameter.grad for name, parameter in state.model.named_parameters()}
    return found | {"smoothed": loss.smoothed.detach(), "nats": loss.nats, "correct": loss.correct}


def curve(state: TrainState) -> list[float]:
    """The loss of each update."""
    batches = epoch_batches(state.train, state.run.train, 1, 0)
    return [train_step(state, batches[step % len(batches)], 100).sums.smoothed.item() for step in range(20)]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_values_gradients_and_curves_are_those_of_the_plain_path(name: str, cell: str) -> None:
    for dtype, near in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        found = []
        for take in (take_fast_paths, take_plain_paths):
            with pytest.MonkeyPatch.context() as patch:
                take(patch)
                losses = curve(make_training_state(name, cell, dtype)) if dtype == torch.float64 else []
                found.append((gradients(make_training_state(name, cell, dtype)), losses))
        (fast, fast_curve), (plain, plain_curve) = found
        for key, expected in plain.items():
            torch.testing.assert_close(fast[key], expected, rtol=near, atol=near * expected.abs().max().item())
        if dtype == torch.float64:
            assert fast_curve == pytest.approx(plain_curve, rel=near)
            assert sum(fast_curve[-5:]) < 0.95 * sum(fast_curve[:5])  # the last epoch and the first


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_recorded_updates_are_those_that_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor, with a stand-in for the graph. Dropout draws the same numbers."""
    records = []
    monkeypatch.setattr(
        "nmt.model.kernels.cuda_graphs.capture_graph",
        lambda *given: records.append(given) or fake_capture_graph(*given),
    )
    state, recorded = make_training_state(name, "lstm", torch.float64), make_training_state(name, "lstm", torch.float64)
    recorded.graphed_backward = GraphedBackward(recorded.run, recorded.model)
    monkeypatch.setattr("nmt.training.step.build_batch", build_padded_batch)
    assert curve(recorded) == curve(state)
    assert 0 < len(records) <= 4  # shapes are few


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_weights_in_one_buffer_are_those_in_four(
    cell: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuDNN wants them: the same outputs and gradients, whether they are cast in each call or once and for all."""
    torch.manual_seed(1)
    rnn = RNN(cell, 5, 7).to(torch.promote_types(dtype, torch.float32))
    x_BTI, found = torch.randn(3, 4, 5).to(dtype), []
    state = rnn.init_state(x_BTI)
    for flat in ((), ("cpu",)):
        monkeypatch.setattr("nmt.model.recurrence.FLAT_WEIGHT_DEVICES", flat)
        h_BTD, last = rnn(x_BTI, state)
        found.append([h_BTD, *last, *torch.autograd.grad(h_BTD.float().square().sum(), list(rnn.parameters()))])
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))

    rnn.to(dtype).prepare_layer_for_inference()
    start = rnn.weight_ih.data_ptr()
    for parameter in rnn.parameters():  # w_ih, w_hh, b_ih, b_hh, one after the other
        assert parameter.data_ptr() == start
        start += parameter.numel() * parameter.element_size()
    torch.testing.assert_close(rnn(x_BTI, state)[0], found[0][0])


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_a_bias_may_be_added_outside_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for an LSTM; in training and by prepared weights."""
    found = []
    for fused in (("cpu",), ()):
        monkeypatch.setattr("nmt.model.recurrence.FUSED_BIAS_DEVICES", fused)
        state = make_training_state(name, "lstm", torch.float64)
        trained = [*gradients(state).values()]
        batch = collate(state.train, np.arange(12))
        state.model.eval().prepare_for_inference(int8=False)
        with torch.inference_mode():
            loss, _ = state.model.loss(batch.source_BS, batch.source_length_B, batch.target_BT)
        found.append([*trained, *loss])
    torch.testing.assert_close(found[1], found[0])


def test_two_passes_that_agree_have_the_loss_and_the_gradient_of_one() -> None:
    """Guided and with coverage, whose losses are of both passes too."""
    state = make_training_state("coverage", "lstm", torch.float64, dropout=0.0)
    batch = collate(state.train, np.arange(12))
    batch = batch._replace(
        alignment_BTS=torch.rand(12, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1]).double()
    )
    found = []
    for r_drop in (0.0, 3.0):
        train = TrainConfig(guided_alignment=0.3, coverage_loss=0.2, r_drop=r_drop)
        scales = torch.tensor([50, 0.5]).double(), torch.tensor(1.0).double()
        loss, gradients = backward(replace(state.run, train=train), state.model, batch, *scales)
        found.append([*loss, *gradients])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_padded_batches_have_the_same_loss_and_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pairs of padding, too, and whether the output layer sees padding or not."""
    state = make_training_state(name, "gru", torch.float64, dropout=0.0)
    batch = collate(state.train, np.arange(12))
    alignment_BTS = torch.rand(12, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1], dtype=torch.float64)
    batch = batch._replace(alignment_BTS=alignment_BTS)
    padded = batch.pad_to(16, 15, 17)
    assert padded.alignment_BTS.shape == (16, 17, 15) and padded.alignment_BTS.sum() == pytest.approx(
        batch.alignment_BTS.sum()
    )
    assert padded.target_BT.shape == (16, 18) and padded.source_BS.shape == (16, 15)
    coverage_loss = 0.2 * state.run.model.attention.coverage
    train = replace(state.run.train, guided_alignment=0.3, coverage_loss=coverage_loss)
    scales, found = (torch.tensor([50, 0.5]).double(), torch.tensor(1.0).double()), []
    for own, dropping in ((batch, ("cpu",)), (padded, ("cpu",)), (padded, ())):
        monkeypatch.setattr("nmt.model.seq2seq.PADDING_DROP_DEVICES", dropping)
        loss, gradients = backward(replace(state.run, train=train), state.model, own, *scales)
        found.append([*loss, *gradients])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_capture_that_fails_leaves_no_half_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in its backward pass; the same batch then runs without a graph, with the same gradient."""
    state = make_training_state("bahdanau", "lstm", torch.float64, dropout=0.0)
    batch, scales = (
        build_padded_batch(state, np.arange(8)),
        (torch.tensor([50, 0.5]).double(), torch.tensor(1.0).double()),
    )
    _, expected = backward(state.run, state.model, batch, *scales)

    def fails(work: Callable[[], Any], _: torch.device) -> None:
        seen: list[Tensor] = []

        def hook(parameter: Tensor) -> None:
            seen.append(parameter)
            if len(seen) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")

        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in state.model.parameters()]
        with pytest.raises(torch.OutOfMemoryError):
            work()
        for handle in handles:
            handle.remove()

    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fails)
    graphed = GraphedBackward(state.run, state.model)
    for _ in range(3):
        _, found = graphed(batch, *scales)
        torch.testing.assert_close(found, expected)


def test_graphs_go_with_what_they_are_of() -> None:
    """At once, not when the garbage is collected: they hold much memory of a GPU."""
    state = make_training_state("bahdanau", "lstm", torch.float64)
    graphed = GraphedBackward(state.run, state.model)
    gone = weakref.ref(graphed.callable)
    del graphed
    assert gone() is None


def test_padding_pairs_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_training_state("bahdanau", "lstm", torch.float64)
    rows = np.arange(8)
    sums = []
    for make in (update.build_batch, build_padded_batch):
        monkeypatch.setattr("nmt.training.step.build_batch", make)
        sums.append(train_step(state, rows, 100).sums)
    assert sums[0].source == sums[1].source == state.train.lengths(rows)[0].sum()
    assert sums[0].target == sums[1].target


def test_padding_that_is_not_dropped_has_no_loss_and_no_gradient() -> None:
    torch.manual_seed(1)
    x_RD, weight_VD = torch.randn(18, 4).double(), torch.randn(SMALL_VOCABULARY, 4).double()
    target_R, found = torch.tensor([3, 0, 5, 0, 0, 7, 9, 3, 0]).repeat(2), []
    for rows in (torch.arange(18), target_R.nonzero().squeeze(1)):
        leaves = [x_RD.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
        bias_V = torch.zeros(SMALL_VOCABULARY, dtype=torch.float64, requires_grad=True)
        loss = cross_entropy(leaves[0][rows], leaves[1], bias_V, target_R[rows], 0.1, r_drop=0.5, pad=0)
        loss.smoothed.backward()
        found.append([*loss, *(leaf.grad for leaf in (*leaves, bias_V))])
    torch.testing.assert_close(*found)


def test_what_is_recorded_knows_how_much_of_training_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled and with padding masked, against a batch as it is with padding dropped."""
    monkeypatch.setattr("nmt.model.kernels.cuda_graphs.capture_graph", fake_capture_graph)
    state = make_training_state("coverage", "lstm", torch.float64, dropout=0.0)
    run = replace(state.run, train=replace(state.run.train, guided_alignment=0.3, coverage_loss=0.2))
    batch = collate(state.train, np.arange(12))
    batch = batch._replace(
        alignment_BTS=torch.rand(12, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1]).double()
    )
    again = GraphedBackward(run, state.model)
    for share in (0.1, 0.5, 0.9):
        update_2 = torch.tensor([50, share], dtype=torch.float64)
        given = batch.pad_to(12, 16, 16), update_2, torch.tensor(4.0)
        expected = backward(run, state.model, batch, *given[1:])
        with monkeypatch.context() as patch:
            patch.setattr("nmt.model.seq2seq.PADDING_DROP_DEVICES", ())
            torch.testing.assert_close(again(*given), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_a_gpu_has_the_same_curve_and_waits_for_nothing(name: str) -> None:
    curves = [
        curve(make_training_state(name, "lstm", torch.float64, device, dropout=0.0)) for device in ("cpu", "cuda")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    state = make_training_state(name, "lstm", torch.float32, "cuda")
    state.model.dtype = torch.bfloat16
    batch, found = build_padded_batch(state, np.arange(8)).to(state.device), []
    update_2 = torch.tensor([50, 0.5], device=state.device)
    for again in (partial(backward, state.run, state.model), *[GraphedBackward(state.run, state.model)] * 3):
        torch.manual_seed(1)
        loss, gradients = again(batch, update_2, state.loss_scale.factor)
        found.append((loss, [None if gradient is None else gradient.clone() for gradient in gradients]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, np.arange(8), 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
