"""Model layers, losses and gradients compared with PyTorch and finite differences in float64."""

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
from nmt.model import reference
from nmt.model.encoder import RecurrentEncoder
from nmt.model.kernels import KERNELS
from nmt.model.kernels.linear import Dropout
from nmt.model.kernels.loss import MAX_FP32_LOGITS, cross_entropy
from nmt.model.reference import CELL_SPECS

pytestmark = pytest.mark.usefixtures("kernels")

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tie", ["two", "three"])
def test_gradients_of_tied_embeddings_match_finite_differences(style: str, tie: str) -> None:
    """Other parameters are tested in `test_attention.py`."""
    model, batch = make_model(style, tie=tie), make_ragged_batch()
    model.loss(*batch, smoothing=0.1)[0].smoothed.backward()
    for embedding in {model.source_embedding.weight, model.target_embedding.weight}:
        direction = torch.randn_like(embedding)
        direction[PAD] = 0  # the padding row gets no gradient as an input embedding
        losses = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                embedding.add_(direction, alpha=step)
                losses.append(model.loss(*batch, smoothing=0.1)[0].smoothed.item())
        embedding.detach().add_(direction, alpha=1e-5)
        actual = (embedding.grad * direction).sum().item()
        assert actual == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-6)


def run_packed_torch_layer(cell: str, directions: Any, x_BSE: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs_BSM and last_BM of a PyTorch layer with the same weights, run on packed sentences."""
    layer_class = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
    layer = layer_class(
        x_BSE.shape[2],
        directions[0].hidden,
        batch_first=True,
        bidirectional=len(directions) == 2,
        dtype=torch.float64,
    )
    for rnn, suffix in zip(directions, ("", "_reverse"), strict=False):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(layer, f"{name}_l0{suffix}").data.copy_(getattr(rnn, name))
    outputs, state = layer(pack_padded_sequence(x_BSE, length_B, batch_first=True, enforce_sorted=False))
    last_hidden = state[0] if cell == "lstm" else state
    return pad_packed_sequence(outputs, batch_first=True)[0], torch.cat(list(last_hidden), 1)


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_encoder_matches_stack_of_packed_torch_layers(cell: str, bidirectional: bool, layers: int) -> None:
    """Test with and without residual connections, and with noise as padding."""
    generator, length_B = torch.Generator().manual_seed(1), torch.tensor([6, 3, 5, 1])
    embedded_BSE = torch.randn(4, 6, 6, generator=generator, dtype=torch.float64)
    sizes: dict[str, Any] = dict(cell=cell, embed=6, hidden=8, bidirectional=bidirectional, encoder_layers=layers)
    for residual in (False, True):
        encoder = RecurrentEncoder(ModelConfig(**sizes, residual=residual)).double().eval()
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.normal_(std=0.5, generator=generator)
            x_BSM, last_hidden = embedded_BSE, []
            for depth, directions in enumerate(encoder.layers):
                h_BSM, last_BM = run_packed_torch_layer(cell, directions, x_BSM, length_B)
                x_BSM = h_BSM + x_BSM if depth and residual else h_BSM
                last_hidden.append(last_BM)
            torch.testing.assert_close(encoder(embedded_BSE, length_B), (x_BSM, last_hidden))


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize("bridge", BRIDGE_TYPES)
@pytest.mark.parametrize(
    ("encoder_layers", "decoder_layers", "layer_map"),  # layer_map: the encoder layer that each decoder layer reads
    [(3, 2, (1, 2)), (2, 3, (0, 0, 1))],
)
def test_bridges_match_reference_equations(
    cell: str, bridge: str, encoder_layers: int, decoder_layers: int, layer_map: tuple[int, ...]
) -> None:
    model = make_model(cell=cell, bridge=bridge, encoder_layers=encoder_layers, decoder_layers=decoder_layers).eval()
    source_BS, length_B, _ = make_ragged_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)  # make_model has set the seed
        actual = model.start(source_BS, length_B)[1].cells
        outputs_BSM, last_hidden = model.encoder(model.source_embedding(source_BS), length_B)
    num_states = 2 if cell == "lstm" else 1
    if bridge == "learned":
        affine = model.decoder.bridge.map
        expected = torch.tanh(last_hidden[-1] @ affine.weight.T + affine.bias).chunk(decoder_layers * num_states, 1)
    else:
        zero = torch.zeros(4, 8, dtype=torch.float64)
        mean = torch.stack([row[:length].mean(0) for row, length in zip(outputs_BSM, length_B, strict=True)])
        hidden = {
            "last": [last_hidden[i] for i in layer_map],
            "mean": [mean] * decoder_layers,
            "zero": [zero] * decoder_layers,
        }[bridge]
        expected = tuple(itertools.chain(*((h, zero)[:num_states] for h in hidden)))
    assert [len(state) for state in actual] == [num_states] * decoder_layers
    torch.testing.assert_close(tuple(itertools.chain(*actual)), expected)


@pytest.mark.parametrize("cell", CELL_SPECS)
def test_biases_start_at_zero_except_lstm_forget_gates(cell: str) -> None:
    model = make_model(cell=cell)
    layers = [module for module in model.modules() if isinstance(module, reference.RNN)]
    assert len(layers) == 6
    for rnn in layers:
        gate_biases = [0.0, 1.0, 0.0, 0.0] if cell == "lstm" else [0.0] * 3
        assert rnn.bias_ih.tolist() == [bias for bias in gate_biases for _ in range(rnn.hidden)]
        assert not rnn.bias_hh.any()
    assert not model.output.bias.any()


@pytest.mark.parametrize("tie", TIE_MODES)
def test_tied_embeddings_share_one_tensor(tie: str) -> None:
    for embed in (6, 8):  # different from hidden, and equal to it
        model = make_model(tie=tie, embed=embed)
        assert (model.output.weight is model.target_embedding.weight) == (tie != "none")
        assert (model.source_embedding is model.target_embedding) == (tie == "three")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(("smoothing", "r_drop"), [(0.0, 0.0), (0.1, 0.0), (0.0, 3.0), (0.1, 3.0)])
def test_losses_and_gradients_match_torch(
    smoothing: float, r_drop: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare R-Drop with Liang et al. 2021, eq. 2 to 4; the second half of the rows is the second pass."""
    monkeypatch.setitem(MAX_FP32_LOGITS, device, 100)
    torch.manual_seed(2)
    shapes = (150, 6), (11, 6), (11,)
    leaves = [torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for shape in shapes]
    target = torch.randint(0, 11, (75,)).repeat(2).to(device)
    logits = F.linear(*leaves)
    p, q = F.log_softmax(logits, 1).chunk(2)
    divergence = F.kl_div(p, q, reduction="sum", log_target=True) + F.kl_div(q, p, reduction="sum", log_target=True)
    expected = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing) + r_drop * divergence / 2
    gradients = torch.autograd.grad(expected, leaves, retain_graph=True)
    actual = cross_entropy(*leaves, target, smoothing, r_drop=r_drop)
    torch.testing.assert_close((actual[0], *torch.autograd.grad(actual[0], leaves)), (expected, *gradients))
    torch.testing.assert_close(actual.nats, F.cross_entropy(logits, target, reduction="sum"))
    assert actual.correct == (logits.argmax(1) == target).sum()
    bf16_loss = cross_entropy(leaves[0].bfloat16(), *leaves[1:], target, smoothing, r_drop=r_drop).smoothed
    assert bf16_loss.item() == pytest.approx(expected.item(), rel=0.01)
    for bf16_gradient, gradient in zip(torch.autograd.grad(bf16_loss, leaves), gradients, strict=True):
        assert F.cosine_similarity(bf16_gradient.flatten(), gradient.flatten(), dim=0) > 0.999


def test_dropout_zeroes_expected_fraction_and_preserves_mean() -> None:
    torch.manual_seed(0)
    for p in (0.1, 0.5, 0.7):
        dropout, x = Dropout(p), torch.ones(301, 1001)
        y = dropout(x)
        assert (y == 0).double().mean() == pytest.approx(p, abs=0.005)
        assert y.double().mean() == pytest.approx(1, abs=0.01)
        assert set(y.unique().tolist()) == {0.0, x[0, 0].div(1 - p).item()}
        assert (y[:, :-1] * y[:, 1:] == 0).double().mean() == pytest.approx(1 - (1 - p) ** 2, abs=0.005)
        assert dropout.eval()(x) is x


# The calls of dropout in three encoder and three decoder layers: of both embeddings, between layers (a step loop draws
# one mask for all steps and layers), in Transformer layers of what each part adds and within the feed-forward part, and
# before the output layer.
DROPOUT_CALLS = {
    "bahdanau": 3 + 2 + 1,
    "luong, input feeding": 3 + 2 + 1,
    "luong": 3 + 2 + 2,
    "gnmt": 3 + 2 + 2,
    "hybrid": 3 + 3 * 3 + 2,
    "transformer": 3 + 3 * 3 + 3 * 4,
}


@pytest.mark.parametrize("style", STYLES)
def test_dropout_is_applied_to_embeddings_between_layers_and_before_output(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that dropout runs in training only, and that the loss depends on the result of each call."""
    model, batch = make_model(style, dropout=0.3, encoder_layers=3, decoder_layers=3), make_ragged_batch()
    dropout_class = KERNELS["fast"].Dropout

    def run(halved_call: int) -> tuple[int, float]:
        """Return the number of calls in training, and the loss if only one call halves its input."""
        calls: list[Any] = []

        def fake_forward(self: Any, x: Tensor) -> Tensor:
            if not self.training:
                return x
            calls.append(self)
            assert self.p == 0.3
            return x / 2 if len(calls) == halved_call else x

        monkeypatch.setattr(dropout_class, "forward", fake_forward)
        loss = model.loss(*batch)[0].smoothed.item()
        return len(calls), loss

    count, plain_loss = run(0)
    assert count == DROPOUT_CALLS[style]
    assert len({run(halved_call)[1] for halved_call in range(count + 1)}) == count + 1
    model.eval()
    assert run(1) == (0, plain_loss)
