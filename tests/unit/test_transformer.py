"""The Transformer against PyTorch's, against the equations of the paper, and its state."""

import itertools
import math
from typing import Any

import pytest
import torch
from builders import VOCABULARY, make_ragged_batch, randomize_
from torch import Tensor, nn

from nmt.config import AttentionConfig, ModelConfig, SelfAttentionConfig
from nmt.model.seq2seq import build_model
from nmt.model.transformer import TransformerEncoder, encode_positions

pytestmark = pytest.mark.usefixtures("kernels")


def make_encoder(**changes: Any) -> TransformerEncoder:
    settings = dict(encoder="transformer", embed=6, hidden=8, feed_forward=10, dropout=0.0, encoder_layers=3)
    self_attention = SelfAttentionConfig(**{"heads": 2} | changes)
    encoder = TransformerEncoder(ModelConfig(**settings, self_attention=self_attention)).double()
    randomize_(encoder, 0.4)
    return encoder


def test_positions_match_equation() -> None:
    for size in (1, 6, 7):
        actual = encode_positions(torch.tensor([[0, 3], [250, 1]]), size, torch.float64)
        assert actual.shape == (2, 2, size)
        for row, column, position in ((0, 0, 0), (0, 1, 3), (1, 0, 250)):
            for i in range(size):
                angle = position / 10000 ** (2 * (i // 2) / size)
                expected = math.cos(angle) if i % 2 else math.sin(angle)
                assert actual[row, column, i].item() == pytest.approx(expected, abs=1e-12)


def copy_to_torch(encoder: TransformerEncoder, heads: int, size: int) -> nn.TransformerEncoder:
    """Return PyTorch's encoder with the same weights."""
    layer = nn.TransformerEncoderLayer(size, heads, 10, dropout=0.0, batch_first=True, norm_first=True)
    expected = nn.TransformerEncoder(layer, len(encoder.layers), nn.LayerNorm(size), enable_nested_tensor=False)
    expected.double()
    with torch.no_grad():
        for ours, theirs in zip(encoder.layers, expected.layers, strict=True):
            score = ours.attention.score
            projections = torch.cat([score.query.weight, score.key.weight, ours.attention.value.weight])
            theirs.self_attn.in_proj_weight.copy_(projections)
            theirs.self_attn.out_proj.weight.copy_(ours.attention.output.weight)
            for bias in (theirs.self_attn.in_proj_bias, theirs.self_attn.out_proj.bias):
                bias.zero_()  # projections of attention have none here
            pairs = [
                (ours.attention_norm, theirs.norm1),
                (ours.feed_forward_norm, theirs.norm2),
                (ours.feed_forward.inner, theirs.linear1),
                (ours.feed_forward.outer, theirs.linear2),
            ]
            for module, other in pairs:
                other.load_state_dict(module.state_dict())
        expected.norm.load_state_dict(encoder.norm.state_dict())
    return expected


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_encoder_and_its_gradient_match_torch(heads: int) -> None:
    encoder, (source_BS, length_B, _) = make_encoder(heads=heads), make_ragged_batch()
    expected_encoder = copy_to_torch(encoder, heads, 8)
    embedded_BSE = torch.randn(*source_BS.shape, 6, dtype=torch.float64, requires_grad=True)
    padding_BS = torch.arange(source_BS.shape[1]) >= length_B.unsqueeze(1)

    def run_torch() -> Tensor:
        positions_SM = encode_positions(torch.arange(source_BS.shape[1]), 8, torch.float64)
        inputs_BSM = encoder.input.map(embedded_BSE * 6**0.5) + positions_SM
        outputs_BSM = expected_encoder(inputs_BSM, src_key_padding_mask=padding_BS)
        return outputs_BSM.masked_fill(padding_BS.unsqueeze(2), 0)

    outputs_BSM, [mean_BM] = encoder(embedded_BSE, length_B)
    torch.testing.assert_close(outputs_BSM, run_torch(), atol=1e-12, rtol=0)
    for row, length in enumerate(length_B.tolist()):
        torch.testing.assert_close(mean_BM[row], outputs_BSM[row, :length].mean(0))
    direction = torch.randn(outputs_BSM.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * direction).sum(), embedded_BSE)[0] for y in (outputs_BSM, run_torch())]
    torch.testing.assert_close(*gradients)


def test_shown_weights_of_layers_and_heads_average_to_the_mean() -> None:
    """With windows whose position each layer predicts, and with a single layer chosen, the other way round."""
    batch = make_ragged_batch()
    changes = {"score": "scaled_dot", "heads": 2, "window": "local_p"}

    def weights_of(layer: int | None, head: int | None) -> Tensor:
        attention = AttentionConfig(layer=layer, head=head, half_width=1, **changes)
        config = ModelConfig(style="transformer", embed=6, hidden=8, decoder_layers=2, attention=attention)
        model = build_model(config, VOCABULARY, VOCABULARY).double().eval()
        model.dtype = torch.float64
        randomize_(model, 0.4)
        _, weights = model.loss(*batch)
        return weights

    single = [weights_of(layer, head) for layer in (0, 1) for head in (0, 1)]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(single, 2))
    torch.testing.assert_close(weights_of(None, None), torch.stack(single).mean(0))
    torch.testing.assert_close(weights_of(1, None), torch.stack(single[2:]).mean(0))
    torch.testing.assert_close(weights_of(None, 0), (single[0] + single[2]) / 2)


def test_local_window_limits_what_a_position_sees() -> None:
    """With half width 1, each of three layers lets a position see one more neighbor on each side."""
    encoder = make_encoder(window="local_m", half_width=1)
    embedded_BSE = torch.randn(1, 12, 6, dtype=torch.float64, requires_grad=True)
    outputs_BSM, _ = encoder(embedded_BSE, torch.tensor([12]))
    [gradient] = torch.autograd.grad(outputs_BSM[0, 5].square().sum(), embedded_BSE)
    assert gradient[0].abs().sum(1).nonzero().flatten().tolist() == list(range(2, 9))
