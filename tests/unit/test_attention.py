"""Attention compared with a NumPy reference, and all attention configurations in all decoder styles."""

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from builders import (
    ATTENTION_STYLES,
    LOCATION_POSITIONS,
    VOCABULARY,
    make_attention_model,
    make_ragged_batch,
    randomize_,
    search,
)
from torch import Tensor

from nmt.config import BOS, EOS, PAD, AttentionConfig, ModelConfig, SearchConfig
from nmt.config import model as schema
from nmt.decoding.search import score_targets
from nmt.decoding.translator import warn_of_long_sources
from nmt.model.attention import SCORE_CLASSES, Attention
from nmt.model.encoder import RecurrentEncoder
from nmt.model.kernels import KERNELS
from nmt.model.kernels.cuda_graphs import list_tensors
from nmt.model.normalizers import NORMALIZER_FNS
from nmt.model.parts import select_rows
from nmt.model.reference import CELL_SPECS
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.model.windows import WINDOW_CLASSES
from nmt.training.backward import coverage_loss

pytestmark = pytest.mark.usefixtures("kernels")

DISTINCT_SCORES = [score for score in SCORE_CLASSES if score != "concat"]  # "concat" is an alias of "additive"
ATTENTION_CONFIGS = [
    {"score": score, "window": window, "normalizer": normalizer, "heads": heads, "coverage": coverage}
    for score, window, normalizer, heads, coverage in itertools.product(
        DISTINCT_SCORES, WINDOW_CLASSES, NORMALIZER_FNS, (1, 2), (False, True)
    )
]


RECURRENT_STYLES = ["bahdanau", "input feeding", "luong", "gnmt"]


def describe(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items())


def make_attention(half_width: int, hidden: int = 8, **options: Any) -> Attention:
    config = AttentionConfig(half_width=half_width, **options)
    with patch("nmt.model.attention.LOCATION_POSITIONS", LOCATION_POSITIONS):
        attention = Attention(config, hidden, hidden, KERNELS["fast"]).double()
    randomize_(attention, 1.0)
    return attention


def threshold_by_bisection(z: np.ndarray, power: int) -> np.ndarray:
    """Return max(z - tau, 0)^power, with tau found by bisection such that the result sums to 1."""
    low, high = z.max() - 1, z.max()
    for _ in range(60):
        tau = (low + high) / 2
        low, high = (tau, high) if (np.maximum(z - tau, 0) ** power).sum() > 1 else (low, tau)
    return np.maximum(z - low, 0) ** power


REFERENCE_NORMALIZERS = {
    "softmax": lambda z: np.exp(z) / np.exp(z).sum(),
    "sparsemax": lambda z: threshold_by_bisection(z, 1),
    "entmax15": lambda z: threshold_by_bisection(z / 2, 2),
}


def reference_score(
    p: dict[str, np.ndarray], config: AttentionConfig, head: int, q: np.ndarray, h: np.ndarray, s: int, c: float
) -> float | None:
    """Return the score of query q and encoder output h at position s, with coverage c; None if it has none."""

    def head_slice(x: np.ndarray) -> np.ndarray:
        return np.split(x, config.heads)[head]

    if config.score == "additive":
        coverage_term = p["score.coverage"][head, 0] * c if config.coverage else 0
        projected_query = head_slice(p["score.query.weight"]) @ q
        projected_key = head_slice(p["score.key.weight"]) @ h + head_slice(p["score.key.bias"])
        return head_slice(p["score.v"]) @ np.tanh(projected_query + projected_key + coverage_term)
    coverage_term = p["score.coverage"][head, 0, 0] * c if config.coverage else 0
    if config.score == "location":
        return (head_slice(p["score.query.weight"]) @ q)[s] + coverage_term if s < LOCATION_POSITIONS else None
    if config.heads > 1:
        q, h = head_slice(p["score.query.weight"]) @ q, head_slice(p["score.key.weight"]) @ h
    elif config.score == "general":
        h = p["score.key.weight"] @ h
    # The stored weight of "general" is scaled up by sqrt(len(q)).
    scale = np.sqrt(len(q)) if config.score in ("scaled_dot", "general") else 1
    return q @ h / scale + coverage_term


def reference_attention(
    p: dict[str, np.ndarray], config: AttentionConfig, q: np.ndarray, h: np.ndarray, t: int, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return context, weights and window positions of query q at target position t over encoder outputs h."""
    S, D = len(h), config.half_width
    point, gain = t, np.ones(S)
    if config.window == "local_p":
        point = S / (1 + np.exp(-p["window.v"] / np.sqrt(len(q)) @ np.tanh(p["window.point.weight"] @ q)))
        gain = np.exp(-((np.arange(S) - point) ** 2) / (2 * (D / 2) ** 2))
    center = min(int(np.floor(point)), S - 1)
    window = [s for s in range(S) if config.window == "global" or abs(s - center) <= D]
    contexts, weights = [], np.zeros(S)
    for head in range(config.heads):
        all_scores = {s: reference_score(p, config, head, q, h[s], s, c[s]) for s in window}
        scores = {s: score for s, score in all_scores.items() if score is not None}
        head_weights = np.zeros(S)
        if scores:
            head_weights[list(scores)] = REFERENCE_NORMALIZERS[config.normalizer](np.array(list(scores.values())))
        head_weights *= gain
        weights += head_weights / config.heads
        values = h if config.heads == 1 else h @ np.split(p["value.weight"], config.heads)[head].T
        contexts.append(head_weights @ values)
    context = np.concatenate(contexts)
    return context if config.heads == 1 else p["output.weight"] @ context, weights, window


@pytest.mark.parametrize("window", WINDOW_CLASSES)
@pytest.mark.parametrize("score", DISTINCT_SCORES)
def test_attention_matches_reference_equations(score: str, window: str, kernels: str) -> None:
    """Use three queries per sentence, windows clipped at either end or wider than the sentence, and noisy padding."""
    generator = torch.Generator().manual_seed(1)
    length_B, position_BQ = torch.tensor([6, 3, 5, 1]), torch.tensor([[0, 2, 7], [5, 1, 2], [3, 4, 0], [0, 1, 9]])
    values_BSM = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    query_BQD = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    coverage_BQS = torch.rand(4, 3, 6, generator=generator, dtype=torch.float64)
    num_empty = num_clipped = 0
    half_widths = (1,) if window == "global" else (1, 2, 4)
    for options, half_width in itertools.product(choose_configs(score, window, kernels), half_widths):
        attention = make_attention(half_width, **options)
        config = AttentionConfig(half_width=half_width, **options)
        parameters = {key: value.numpy() for key, value in attention.state_dict().items()}
        memory = attention.project_memory(values_BSM, length_B)
        coverage = coverage_BQS if config.coverage else None
        context_BQM, weights_BQS = attention(query_BQD, memory, position_BQ, coverage)
        for b, q in itertools.product(range(4), range(3)):
            S = int(length_B[b])
            expected_context, expected_weights, positions = reference_attention(
                parameters,
                config,
                query_BQD[b, q].numpy(),
                values_BSM[b, :S].numpy(),
                int(position_BQ[b, q]),
                coverage_BQS[b, q].numpy(),
            )
            np.testing.assert_allclose(
                context_BQM[b, q].detach().numpy(), expected_context, atol=1e-10, rtol=0, err_msg=describe(options)
            )
            np.testing.assert_allclose(
                weights_BQS[b, q, :S].detach().numpy(), expected_weights, atol=1e-10, rtol=0, err_msg=describe(options)
            )
            assert not np.delete(
                weights_BQS[b, q].detach().numpy(), positions
            ).any()  # exactly 0 outside the window and at padding
            num_empty += not expected_weights.any()
            num_clipped += len(positions) < min(S, 2 * half_width + 1)
    assert (num_empty > 0) == (score == "location" and window != "global")  # windows beyond all positions
    assert (num_clipped > 0) == (window != "global")


@pytest.mark.parametrize("normalizer", NORMALIZER_FNS)
def test_normalizers_match_reference_and_ignore_masked_scores(normalizer: str) -> None:
    torch.manual_seed(3)
    scores = torch.randn(5, 40, dtype=torch.float64) * torch.tensor([[0.01], [0.3], [1], [10], [1000]])
    scores[:, ::7] = float("-inf")
    scores[0, 1:4] = 2.0  # ties
    for dtype in (torch.float64, torch.float32):
        weights = NORMALIZER_FNS[normalizer](scores.to(dtype))
        expected = np.array([REFERENCE_NORMALIZERS[normalizer](row - row.max()) for row in scores.numpy()])
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-12 if dtype == torch.float64 else 1e-6)
        assert (weights.sum(1) - 1).abs().max() < 1e-5 and not weights[:, ::7].any()
    finite = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(NORMALIZER_FNS[normalizer], finite)
    assert NORMALIZER_FNS[normalizer](torch.full((2, 4), float("nan"))).isnan().all()  # no index error


def combine_with_style(style: str, kernels: str) -> list[tuple[int, dict[str, Any]]]:
    """Return (number, attention options), others for each style. Other settings of the model vary with the number.

    The reference kernels take every third one, because `test_kernels.py` compares them with the fast ones, too.
    """
    start = list(ATTENTION_STYLES).index(style)
    configs = [*ATTENTION_CONFIGS[start::13], {"score": "none"}]
    numbered = [(number, options) for number, options in enumerate(configs, start) if is_possible(style, options)]
    return numbered if kernels == "fast" else numbered[start % 3 :: 3]


def choose_configs(score: str, window: str, kernels: str) -> list[dict[str, Any]]:
    """Return the twelve configurations with a score and window, or for the reference kernels three of them.

    Each normalizer, number of heads and choice of coverage occurs in the three.
    """
    configs = [options for options in ATTENTION_CONFIGS if (options["score"], options["window"]) == (score, window)]
    return configs if kernels == "fast" else configs[::5]


def is_possible(style: str, options: dict[str, Any]) -> bool:
    """Return whether a decoder may have this attention: a Transformer needs some, and `dot` equal sizes."""
    if not style.startswith("transformer"):
        return True
    is_dot = options["score"] in ("dot", "scaled_dot") and options["heads"] == 1
    return options["score"] != "none" and not (style == "transformer decoder" and is_dot)


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_decoding_is_independent_of_step_size_memory_sharing_and_padding(style: str, kernels: str) -> None:
    """Compare all positions at once with one at a time, shared with copied memory, and a batch with one sentence."""
    source_BS, length_B, target_BT = make_ragged_batch(target=2)
    for number, options in combine_with_style(style, kernels):
        model = make_attention_model(style, number, **options)
        with torch.no_grad():
            memory, start = model.start(source_BS, length_B)
            all_features, weights, last = model.decode(target_BT, start, memory)
            assert (weights is None) == (options["score"] == "none")

            state = start
            for t in range(target_BT.shape[1]):
                features, step_weights, state = model.decode(target_BT[:, t : t + 1], state.make_room(t + 1), memory)
                torch.testing.assert_close(features[:, 0], all_features[:, t], msg=describe(options))
                if weights is not None:
                    torch.testing.assert_close(step_weights[:, 0], weights[:, t], msg=describe(options))
            # A Transformer's state has more room after single steps.
            last = last.make_room(target_BT.shape[1])
            states = list_tensors(last), list_tensors(state)
            torch.testing.assert_close(*states, msg=describe(options))

            rows_N = torch.arange(4).repeat_interleave(2)
            tokens_NT = torch.cat([target_BT, target_BT.flip(1)], 1).view(8, -1)
            shared, _, _ = model.decode(tokens_NT, select_rows(start, rows_N), memory)
            copied, _, _ = model.decode(tokens_NT, select_rows(start, rows_N), select_rows(memory, rows_N))
            torch.testing.assert_close(shared, copied, msg=describe(options))

            memory, state = model.start(source_BS[1:2, :3], length_B[1:2])
            single_features, single_weights, _ = model.decode(target_BT[1:2], state, memory)
            torch.testing.assert_close(single_features[0], all_features[1], msg=describe(options))
            if weights is not None:
                torch.testing.assert_close(weights[1, :, :3], single_weights[0], msg=describe(options))
                assert not weights[1, :, 3:].any()


def choose_beam(kernels: str, number: int) -> int:
    """Return the beam of a configuration: greedy search with one of the kernels, and beam search with the other."""
    return (1, 3)[(number + (kernels == "fast")) % 2]


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_forced_decoding_reproduces_search_results(style: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare scores and weights of greedy and beam search with forced decoding of the same tokens."""
    monkeypatch.setattr("nmt.decoding.search.SHAPE_MULTIPLE", 1)  # remove each sentence as soon as it is done
    source_BS, length_B, _ = make_ragged_batch()
    num_ended, configs = 0, combine_with_style(style, kernels)
    for number, options in configs:
        model = make_attention_model(style, number, **options)
        with torch.no_grad():
            model.output.bias[EOS] += 1
        beam = choose_beam(kernels, number)
        results = search(model, source_BS, length_B, SearchConfig(beam=beam, n_best=beam, max_length=5), True)
        best = [hypotheses[0] for hypotheses in results]
        target_BT = torch.full((4, 6), PAD)
        for row, hypothesis in enumerate(best):
            target_BT[row, : len(hypothesis.tokens) + 1] = torch.tensor([BOS, *hypothesis.tokens])
        for actual, forced in zip(best, score_targets(model, source_BS, length_B, target_BT), strict=True):
            assert actual.tokens == forced.tokens, describe(options)
            assert actual.score == pytest.approx(forced.score, abs=1e-9), describe(options)
            num_ended += actual.tokens[-1] == EOS
            assert (actual.weights_TS is None) == (forced.weights_TS is None) == (options["score"] == "none")
            if actual.weights_TS is not None:
                torch.testing.assert_close(actual.weights_TS, forced.weights_TS, msg=describe(options))
    assert num_ended > len(configs) / 4


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_gradients_match_finite_differences(style: str, kernels: str) -> None:
    """Move all parameters at once in a random direction; the coverage loss is included."""
    batch = make_ragged_batch()
    generator = torch.Generator().manual_seed(0)
    for number, options in combine_with_style(style, kernels):
        model = make_attention_model(style, number, **options)
        coverage_weight = 0.5 if options.get("coverage") else 0.0

        def loss(model: Seq2Seq = model, coverage_weight: float = coverage_weight) -> Tensor:
            losses, weights = model.loss(*batch, smoothing=0.1)
            if not coverage_weight or weights is None:
                return losses.smoothed
            return losses.smoothed + coverage_weight * coverage_loss(weights, batch[2][:, 1:] != PAD)

        loss().backward()
        parameters = list(model.parameters())
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        for parameter, direction in zip(parameters, directions, strict=True):
            if len(parameter) == VOCABULARY and parameter.shape[1:] == (6,):
                direction[PAD] = 0  # the padding row gets no gradient as an input embedding
        expected = 0.0
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                torch._foreach_add_(parameters, directions, alpha=step)
                expected += loss().item() / (2 * step)
                torch._foreach_add_(parameters, directions, alpha=-step)
        actual = sum(
            (p.grad * d).sum().item() for p, d in zip(parameters, directions, strict=True) if p.grad is not None
        )
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5), f"{number} {describe(options)}"


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_bfloat16_loss_and_gradients_are_close_to_float64(style: str, kernels: str) -> None:
    batch = make_ragged_batch((6, 3, 1), target=2)
    for number, options in combine_with_style(style, kernels):
        losses, gradients = [], []
        for dtype in (torch.float64, torch.bfloat16):
            model = make_attention_model(style, number, **options)
            model.to(torch.promote_types(dtype, torch.float32)).dtype = dtype
            loss, weights = model.loss(*batch, smoothing=0.1)
            loss.smoothed.backward()
            assert weights is None or weights.dtype == torch.promote_types(dtype, torch.float32)
            losses.append(loss.smoothed.item())
            gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
        assert losses[1] == pytest.approx(losses[0], rel=0.01), describe(options)
        assert torch.cosine_similarity(*gradients, dim=0) > 0.99, describe(options)


def cell_step(rnn: Any, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run one step with PyTorch's cell functions."""
    parameters = (rnn.weight_ih, rnn.weight_hh, rnn.bias_ih, rnn.bias_hh)
    if rnn.num_states == 2:
        return torch.lstm_cell(x, state, *parameters)
    return (torch.gru_cell(x, state[0], *parameters),)


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize(
    ("style", "readout"), [*((style, "tanh") for style in [*RECURRENT_STYLES, "hybrid"]), ("bahdanau", "maxout")]
)
@pytest.mark.parametrize("options", [{}, {"window": "local_m", "half_width": 1}, {"coverage": True}], ids=describe)
def test_decoder_styles_match_reference_equations(style: str, cell: str, readout: str, options: dict[str, Any]) -> None:
    """Run the equations of docs/models.md step by step, in three layers with residual connections.

    Only style bahdanau has a maxout readout.
    """
    overrides = ATTENTION_STYLES[style] | {"cell": cell, "readout": readout, "decoder_layers": 3}
    attention_config = AttentionConfig(**options)
    config = ModelConfig(embed=6, hidden=8, dropout=0.0, residual=True, attention=attention_config, **overrides)
    model = build_model(config, VOCABULARY, VOCABULARY).double()
    model.dtype = torch.float64
    randomize_(model, 0.4)
    decoder, (source_BS, length_B, target_BT) = model.decoder, make_ragged_batch()
    with torch.no_grad():
        memory, state = model.start(source_BS, length_B)
        features, _, _ = model.decode(target_BT, state, memory)
        cells = list(state.cells)
        feed, total_weights = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 1, 6, dtype=torch.float64)

        def compute_context(query: Tensor) -> Any:
            nonlocal total_weights
            coverage = total_weights if config.attention.coverage else None
            context, weights = decoder.attention(query.unsqueeze(1), memory, torch.full((4, 1), t), coverage)
            assert weights is not None
            total_weights = total_weights + weights
            return context.squeeze(1)

        for t, y in enumerate(model.target_embedding(target_BT).unbind(1)):
            previous = cells[-1][0]
            context = compute_context(previous) if style == "bahdanau" else None
            extra_inputs = {"bahdanau": [context], "input feeding": [feed]}.get(style, [])
            cells[0] = cell_step(decoder.layers[0], torch.cat([y, *extra_inputs], 1), cells[0])
            x = cells[0][0]
            if style == "gnmt":
                context = compute_context(x)
            for depth in (1, 2):
                inputs = torch.cat([x, context], 1) if style == "gnmt" else x
                cells[depth] = cell_step(decoder.layers[depth], inputs, cells[depth])
                x = cells[depth][0] if style == "gnmt" and depth == 1 else cells[depth][0] + x
            if style == "bahdanau":
                inputs = torch.cat([context, previous if readout == "maxout" else x, y], 1)
                z = inputs @ decoder.readout.weight.T + decoder.readout.bias
                x = torch.tanh(z) if readout == "tanh" else torch.maximum(z[:, ::2], z[:, 1::2])
            elif style != "gnmt":
                x = feed = torch.tanh(torch.cat([compute_context(x), x], 1) @ decoder.readout.weight.T)
            torch.testing.assert_close(features[:, t], x, atol=1e-10, rtol=0)


@pytest.mark.parametrize("style", ["luong", "gnmt", "transformer"])
def test_chunked_attention_without_gradients_matches_unchunked(style: str, kernels: str) -> None:
    """Use more than twice as many positions as `attention.MAX_QUERIES_AT_ONCE`."""
    for number, options in combine_with_style(style, kernels):
        if options["score"] == "none":
            continue
        model = make_attention_model(style, number, **options)
        source_BS, length_B, target_BT = make_ragged_batch(target=38)
        features, weights, _ = model.decode(target_BT, *reversed(model.start(source_BS, length_B)))
        with torch.no_grad():
            chunked, chunked_weights, _ = model.decode(target_BT, *reversed(model.start(source_BS, length_B)))
        torch.testing.assert_close(chunked, features, msg=describe(options))
        torch.testing.assert_close(chunked_weights, weights, msg=describe(options))


def test_shortcut_adds_projected_embeddings_to_encoder_outputs() -> None:
    torch.manual_seed(1)
    config = ModelConfig(embed=6, hidden=8, shortcut=True)
    encoder, (source_BS, length_B, _) = RecurrentEncoder(config).double(), make_ragged_batch()
    embedded_BSE = torch.randn(*source_BS.shape, 6, dtype=torch.float64)
    actual, last_states = encoder(embedded_BSE, length_B)
    assert encoder.shortcut is not None
    projected = embedded_BSE @ encoder.shortcut.weight.T
    encoder.shortcut = None
    outputs, last_states_without = encoder(embedded_BSE, length_B)
    for row, length in enumerate(length_B.tolist()):
        torch.testing.assert_close(actual[row, :length], (outputs + projected)[row, :length])
        assert not actual[row, length:].any()
    torch.testing.assert_close(last_states_without, last_states)
    config.attention = AttentionConfig(score="none")
    assert RecurrentEncoder(config).shortcut is None  # without attention nothing reads encoder outputs


def test_implementations_match_config_choices() -> None:
    assert (*SCORE_CLASSES, "none") == schema.ATTENTION_SCORES
    assert tuple(WINDOW_CLASSES) == schema.ATTENTION_WINDOWS and tuple(NORMALIZER_FNS) == schema.ATTENTION_NORMALIZERS
    assert SCORE_CLASSES["concat"] is SCORE_CLASSES["additive"]  # tested as "additive"


def test_warning_counts_sources_longer_than_location_can_score(caplog: pytest.LogCaptureFixture) -> None:
    for score in ("location", "dot", "none"):
        warn_of_long_sources(make_attention_model("luong", score=score), [2, 3, 4, 9], "lines")
    [record] = caplog.records
    assert record.message.startswith("2 of 4 lines have more than 3 source pieces")
