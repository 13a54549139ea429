"""The model against slow twins and finite differences, in float64, for every style, cell and depth."""

import itertools
from typing import Any

import pytest
import torch
from builders import STYLES, make_model, make_ragged_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from nmt.config import PAD, ModelConfig
from nmt.config.model import BRIDGE_TYPES, TIE_MODES
from nmt.model.decoder import DecoderState
from nmt.model.encoder import Encoder, compute_reverse_order, reverse_sentences
from nmt.model.kernels.linear import Dropout, linear_for_steps
from nmt.model.loss import MAX_FP32_LOGITS, cross_entropy
from nmt.model.recurrence import CELL_SPECS, RNN

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("bridge", ["bridge", "last", "mean", "zero"])
def test_padding_and_neighbors_change_nothing(style: str, cell: str, bridge: str) -> None:
    model = make_model(style, cell, bridge=bridge).eval()
    source_BS, length_B, target_BT = make_ragged_batch()
    memory, state = model.start(source_BS, length_B)
    together, weights, _ = model.decode(target_BT, state, memory)
    for row, length in enumerate(length_B.tolist()):
        memory, state = model.start(source_BS[row : row + 1, :length], length_B[row : row + 1])
        alone, own_weights, _ = model.decode(target_BT[row : row + 1], state, memory)
        torch.testing.assert_close(alone[0], together[row])
        torch.testing.assert_close(own_weights.weights_BQW[0], weights.weights_BQW[row, :, :length])
        assert not weights.weights_BQW[row, :, length:].any()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("tie", ["none", "two", "three"])
def test_gradients_equal_finite_differences(style: str, cell: str, tie: str) -> None:
    model = make_model(style, cell, tie=tie, bridge="mean" if tie == "none" else "bridge")
    source_BS, length_B, target_BT = make_ragged_batch()

    def loss() -> Tensor:
        return model.loss(source_BS, length_B, target_BT, smoothing=0.1)[0].smoothed

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("embedding.weight"):
            direction[PAD] = 0  # the row of padding is not learned as an input
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                values.append(loss().item())
                parameter.sub_(direction, alpha=step)
        assert parameter.grad is not None, name
        expected, found = (values[0] - values[1]) / 2e-5, (parameter.grad * direction).sum().item()
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("cell", CELL_SPECS)
def test_a_step_is_torchs_own_cell_and_a_loop_of_steps_its_layer(cell: str) -> None:
    torch.manual_seed(1)
    rnn = RNN(cell, 5, 7).double()
    reference = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell}[cell](5, 7).double()
    with torch.no_grad():
        rnn.bias_hh.normal_()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(reference, name).copy_(getattr(rnn, name))
    x_BTI = torch.randn(3, 4, 5, dtype=torch.float64)
    state = expected = tuple(torch.randn(3, 7, dtype=torch.float64) for _ in range(rnn.num_states))
    outputs, last = rnn(x_BTI, state)
    for projected in (0, 3, 5):
        rnn.num_projected = projected
        step, now, wanted = rnn.prepare_steps(torch.float64), state, expected
        inputs_BTG = rnn.project(x_BTI[:, :, :projected]) if projected else None
        for t in range(4):
            now = step(x_BTI[:, t, projected:], now, None if inputs_BTG is None else inputs_BTG[:, t])
            wanted = reference(x_BTI[:, t], wanted if cell == "lstm" else wanted[0])
            wanted = wanted if cell == "lstm" else (wanted,)
            torch.testing.assert_close(now, tuple(wanted))
            torch.testing.assert_close(outputs[:, t], now[0])
        torch.testing.assert_close(last, now)


def packed_layer(cell: str, directions: Any, x_BSE: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """outputs_BSM and last_BM of torch's own layer over packed sentences."""
    kind, both = {"lstm": nn.LSTM, "gru": nn.GRU}[cell], len(directions) == 2
    layer = kind(x_BSE.shape[2], directions[0].hidden, batch_first=True, bidirectional=both, dtype=torch.float64)
    for rnn, ending in zip(directions, ("", "_reverse"), strict=False):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(layer, f"{name}_l0{ending}").data.copy_(getattr(rnn, name))
    outputs, last = layer(pack_padded_sequence(x_BSE, length_B, batch_first=True, enforce_sorted=False))
    ends = last[0] if cell == "lstm" else last
    return pad_packed_sequence(outputs, batch_first=True)[0], torch.cat(list(ends), 1)


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_encoder_is_a_stack_of_torchs_own_layers(cell: str, bidirectional: bool, layers: int) -> None:
    """With residual sums and without; what stands at padding is noise."""
    generator, length_B = torch.Generator().manual_seed(1), torch.tensor([6, 3, 5, 1])
    embedded_BSE = torch.randn(4, 6, 6, generator=generator, dtype=torch.float64)
    sizes: dict[str, Any] = dict(cell=cell, embed=6, hidden=8, bidirectional=bidirectional, encoder_layers=layers)
    for residual in (False, True):
        encoder = Encoder(ModelConfig(**sizes, residual=residual)).double().eval()
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.normal_(std=0.5, generator=generator)
            x_BSM, ends = embedded_BSE, []
            for depth, directions in enumerate(encoder.layers):
                h_BSM, end_BM = packed_layer(cell, directions, x_BSM, length_B)
                x_BSM = h_BSM + x_BSM if depth and residual else h_BSM
                ends.append(end_BM)
            torch.testing.assert_close(encoder(embedded_BSE, length_B), (x_BSM, ends))


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("bridge", BRIDGE_TYPES)
@pytest.mark.parametrize(("layers", "beside"), [((3, 2), (1, 2)), ((2, 3), (0, 0, 1))])
def test_bridges_are_their_equations(cell: str, bridge: str, layers: tuple[int, int], beside: tuple[int, ...]) -> None:
    model = make_model(cell=cell, bridge=bridge, encoder_layers=layers[0], decoder_layers=layers[1]).eval()
    source_BS, length_B, _ = make_ragged_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)  # seeded in model_of
        found = model.start(source_BS, length_B)[1].cells
        outputs_BSM, lasts = model.encoder(model.source_embedding(source_BS), length_B)
    if bridge == "bridge":
        affine = model.decoder.bridge.map
        tensors = torch.tanh(lasts[-1] @ affine.weight.T + affine.bias).chunk(layers[1] * len(found[0]), 1)
    else:
        zero = torch.zeros(4, 8, dtype=torch.float64)
        mean = torch.stack([row[:length].mean(0) for row, length in zip(outputs_BSM, length_B, strict=True)])
        first = {"last": [lasts[i] for i in beside], "mean": [mean] * layers[1], "zero": [zero] * layers[1]}[bridge]
        tensors = tuple(itertools.chain(*((h, zero)[: len(found[0])] for h in first)))
    assert [len(state) for state in found] == [2 if cell == "lstm" else 1] * layers[1]
    torch.testing.assert_close(tuple(itertools.chain(*found)), tensors)


@pytest.mark.parametrize("cell", CELL_SPECS)
def test_an_lstm_begins_by_remembering(cell: str) -> None:
    """Other biases of layers, and the output layer's, begin at 0."""
    model = make_model(cell=cell)
    layers = [module for module in model.modules() if isinstance(module, RNN)]
    assert len(layers) == 6
    for rnn in layers:
        remember = [0.0, 1.0, 0.0, 0.0] if cell == "lstm" else [0.0] * 3
        assert rnn.bias_ih.tolist() == [bias for bias in remember for _ in range(rnn.hidden)]
        assert not rnn.bias_hh.any()
    assert not model.output.bias.any()


@pytest.mark.parametrize("tie", TIE_MODES)
def test_tied_embeddings_are_the_same_tensor(tie: str) -> None:
    for embed in (6, 8):  # other than hidden, and equal
        model = make_model(tie=tie, embed=embed)
        assert (model.output.weight is model.target_embedding.weight) == (tie != "none")
        assert (model.source_embedding is model.target_embedding) == (tie == "three")


@pytest.mark.parametrize("cell", CELL_SPECS)
def test_cells_pass_gradcheck(cell: str) -> None:
    torch.manual_seed(1)
    step, gates, states = CELL_SPECS[cell]
    inputs = [torch.randn(2, 3 * gates, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    state = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(states)]
    assert torch.autograd.gradcheck(lambda a, b, *s: step(a, lambda h, plus=0: b + plus, s), (*inputs, *state))


def test_deferred_weight_gradients_equal_ordinary_ones() -> None:
    torch.manual_seed(1)
    x_TNI = torch.randn(4, 3, 5, dtype=torch.float64)
    weight, bias = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def run(deferred: bool) -> tuple[Tensor, ...]:
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        linear = linear_for_steps(w, b, torch.float64) if deferred else lambda x: F.linear(x, w, b)
        h = torch.zeros(3, 5, dtype=torch.float64)
        for x in x_TNI:
            h = torch.tanh(linear(h, x) if deferred else linear(h) + x)
        h.square().sum().backward()
        assert w.grad is not None and b.grad is not None
        return h.detach(), w.grad, b.grad

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torchs(smoothing: float) -> None:
    torch.manual_seed(2)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((150, 6), (11, 6), (11,)))
    target = torch.randint(0, 11, (150,))
    logits = F.linear(x, weight, bias)
    expected = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    found = cross_entropy(x, weight, bias, target, smoothing)
    torch.testing.assert_close(found.smoothed, expected)
    torch.testing.assert_close(found.nats, F.cross_entropy(logits, target, reduction="sum"))
    assert found.correct == (logits.argmax(1) == target).sum()
    scale = torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found.smoothed * scale, (x, weight, bias)),
        torch.autograd.grad(expected * scale, (x, weight, bias)),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_r_drop_equals_torchs(smoothing: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liang et al. 2021, eq. 2 to 4; in parts, the second half of the rows being the other pass."""
    monkeypatch.setitem(MAX_FP32_LOGITS, device, 100)
    torch.manual_seed(2)
    sizes = (150, 6), (11, 6), (11,)
    leaves = [torch.randn(size, dtype=torch.float64).to(device).requires_grad_() for size in sizes]
    target = torch.randint(0, 11, (75,)).repeat(2).to(device)
    logits = F.linear(*leaves)
    p, q = F.log_softmax(logits, 1).chunk(2)
    apart = F.kl_div(p, q, reduction="sum", log_target=True) + F.kl_div(q, p, reduction="sum", log_target=True)
    expected = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing) + 3.0 * apart / 2
    gradients = torch.autograd.grad(expected, leaves)
    found = cross_entropy(*leaves, target, smoothing, r_drop=3.0).smoothed
    torch.testing.assert_close((found, *torch.autograd.grad(found, leaves)), (expected, *gradients))
    half = cross_entropy(leaves[0].bfloat16(), *leaves[1:], target, smoothing, r_drop=3.0).smoothed
    assert half.item() == pytest.approx(expected.item(), rel=0.01)
    for low, high in zip(torch.autograd.grad(half, leaves), gradients, strict=True):
        assert F.cosine_similarity(low.flatten(), high.flatten(), dim=0) > 0.999


def test_no_gradient_of_r_drop_overflows_fp16() -> None:
    """One pass has no idea of the piece, the other is sure of a wrong one."""
    vocabulary = 120_000
    x, weight, bias = torch.tensor([[0.0], [30.0]]), torch.zeros(vocabulary, 1), torch.zeros(vocabulary)
    weight[7] = 1
    found, expected = (
        cross_entropy(x.to(dtype).requires_grad_(), weight.requires_grad_(), bias, torch.tensor([3, 3]), 0.1, 20.0)
        for dtype in (torch.float16, torch.float32)
    )
    torch.testing.assert_close(found.smoothed, expected.smoothed)
    gradients = [torch.autograd.grad(loss.smoothed, weight)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=3e-2, atol=1e-5)


def test_no_gradient_of_a_large_vocabulary_overflows_fp16() -> None:
    """Nor any loss, where all pieces are alike."""
    vocabulary = 120_000
    x, weight, bias = torch.ones(2, 4), torch.zeros(vocabulary, 4), torch.zeros(vocabulary)
    found, expected = (
        cross_entropy(x.to(dtype).requires_grad_(), weight.requires_grad_(), bias, torch.tensor([3, 5]), 0.1)
        for dtype in (torch.float16, torch.float32)
    )
    torch.testing.assert_close(found.smoothed, expected.smoothed)
    gradients = [torch.autograd.grad(loss.smoothed, weight)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_half_precision_stays_near_double() -> None:
    for style, cell in itertools.product(STYLES, CELL_SPECS):
        model = make_model(style, cell)
        batch = make_ragged_batch()
        losses, gradients = [], []
        for dtype in (torch.float64, torch.bfloat16):
            model.to(torch.float64 if dtype == torch.float64 else torch.float32).dtype = dtype
            model.zero_grad()
            loss = model.loss(*batch, smoothing=0.1)[0].smoothed
            loss.backward()
            losses.append(loss.item())
            gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
        assert losses[1] == pytest.approx(losses[0], rel=0.01)
        assert F.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.99


def test_reverse_is_its_own_inverse() -> None:
    x_BSE, length_B = torch.arange(24.0).view(2, 6, 2), torch.tensor([6, 4])
    order_R = compute_reverse_order(length_B, 6)
    backwards = reverse_sentences(x_BSE, order_R)
    assert backwards[1, :, 0].tolist() == [18, 16, 14, 12, 20, 22]
    torch.testing.assert_close(reverse_sentences(backwards, order_R), x_BSE)
    x_BSE.requires_grad_()
    [gradient] = torch.autograd.grad(reverse_sentences(x_BSE, order_R), x_BSE, backwards)
    torch.testing.assert_close(gradient, x_BSE.detach())


def test_state_select_takes_rows_in_order() -> None:
    state = DecoderState(((torch.arange(4.0).unsqueeze(1),),), torch.arange(4.0).unsqueeze(1) * 10)
    chosen = state.select(torch.tensor([2, 2, 0]))
    assert chosen.cells[0][0].flatten().tolist() == [2, 2, 0]
    assert chosen.feed_ND is not None and chosen.feed_ND.flatten().tolist() == [20, 20, 0]


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    for share in (0.1, 0.5, 0.7):
        dropout, x = Dropout(share), torch.ones(301, 1001)
        y = dropout(x)
        assert (y == 0).double().mean() == pytest.approx(share, abs=0.005)
        assert y.double().mean() == pytest.approx(1, abs=0.01)
        assert set(y.unique().tolist()) == {0.0, x[0, 0].div(1 - share).item()}
        assert (y[:, :-1] * y[:, 1:] == 0).double().mean() == pytest.approx(1 - (1 - share) ** 2, abs=0.005)
        assert dropout.eval()(x) is x


@pytest.mark.parametrize("style", STYLES)
def test_dropout_is_on_embeddings_between_layers_and_before_the_output(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training only; what each returns is used."""
    model, batch = make_model(style, dropout=0.3, encoder_layers=3, decoder_layers=3), make_ragged_batch()
    names, forward = {module: name for name, module in model.named_modules()}, Dropout.forward

    def run(halved: int) -> tuple[list[tuple[Any, ...]], float]:
        """Who drops what share of what shape, and the loss if instead one of them halves it and others do nothing."""
        places: list[tuple[Any, ...]] = []

        def dropped(self: Dropout, x: Tensor) -> Tensor:
            if forward(self, x) is x:
                return x
            places.append((names[self], self.p, *x.shape))
            return x / 2 if len(places) == halved else x

        monkeypatch.setattr(Dropout, "forward", dropped)
        return places, model.loss(*batch)[0].smoothed.item()

    looped = style in ("bahdanau", "luong, input feeding")  # one draw for all steps and layers
    upper = [("decoder.dropout", 0.3, 5, 2, 4, 8)] if looped else [("decoder.dropout", 0.3, 4, 5, 8)] * 2
    encoder = [("dropout", 0.3, 4, 6, 6), *[("encoder.dropout", 0.3, 4, 6, 8)] * 2]
    pieces = int((batch[2][:, 1:] != PAD).sum())
    places, plain = run(0)
    assert places == [*encoder, ("dropout", 0.3, 4, 5, 6), *upper, ("dropout", 0.3, pieces, 8)]
    assert len({run(halved)[1] for halved in range(len(places) + 1)}) == len(places) + 1
    model.eval()
    assert run(1) == ([], plain)
