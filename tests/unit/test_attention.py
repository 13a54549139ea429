"""The attention family against its equations, written out in NumPy, and every combination of it in every decoder."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from builders import ATTENTION_STYLES, REACH, VOCABULARY, make_attention_model, make_ragged_batch, randomize_
from torch import Tensor

from nmt.config import BOS, EOS, PAD, AttentionConfig, ModelConfig, SearchConfig
from nmt.config import model as schema
from nmt.decoding.search import score_targets, search
from nmt.decoding.translator import warn_if_out_of_reach
from nmt.model.attention import SCORE_CLASSES, Attention
from nmt.model.encoder import Encoder
from nmt.model.loss import coverage_loss
from nmt.model.normalizers import NORMALIZER_FNS
from nmt.model.recurrence import CELL_SPECS
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.model.windows import MAX_WINDOWS_TO_MASK, WINDOW_CLASSES

OWN_SCORES = [score for score in SCORE_CLASSES if score != "concat"]  # which is `additive` under another name
FAMILY = [
    {"score": score, "window": window, "normalizer": normalizer, "heads": heads, "coverage": coverage}
    for score, window, normalizer, heads, coverage in itertools.product(
        OWN_SCORES, WINDOW_CLASSES, NORMALIZER_FNS, (1, 2), (False, True)
    )
]


def name(kind: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in kind.items())


def attention_of(half_width: int, hidden: int = 8, **kind: Any) -> Attention:
    settings = AttentionConfig(half_width=half_width, max_positions=REACH, **kind)
    attention = Attention(ModelConfig(embed=6, hidden=hidden, attention=settings)).double()
    randomize_(attention, 1.0)
    return attention


def threshold(z: np.ndarray, power: int) -> np.ndarray:
    """max(z - tau, 0)^power with tau such that it sums to 1, by bisection."""
    low, high = z.max() - 1, z.max()
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if (np.maximum(z - tau, 0) ** power).sum() > 1 else (low, tau)
    return np.maximum(z - low, 0) ** power


EQUATIONS = {
    "softmax": lambda z: np.exp(z) / np.exp(z).sum(),
    "sparsemax": lambda z: threshold(z, 1),
    "entmax15": lambda z: threshold(z / 2, 2),
}


def equation(
    p: dict[str, np.ndarray], kind: AttentionConfig, head: int, q: np.ndarray, h: np.ndarray, s: int, c: float
):
    """The score of one query and the encoder output h at position s, which has had weight c so far."""
    share = lambda x: np.split(x, kind.heads)[head]  # noqa: E731
    if kind.score == "additive":
        seen = p["score.coverage"][head, 0] * c if kind.coverage else 0
        inner = share(p["score.query.weight"]) @ q + share(p["score.key.weight"]) @ h + share(p["score.key.bias"])
        return share(p["score.v"]) @ np.tanh(inner + seen)
    seen = p["score.coverage"][head, 0, 0] * c if kind.coverage else 0
    if kind.score == "location":
        return (share(p["score.query.weight"]) @ q)[s] + seen if s < REACH else None
    if kind.heads > 1:
        q, h = share(p["score.query.weight"]) @ q, share(p["score.key.weight"]) @ h
    elif kind.score == "general":
        h = p["score.key.weight"] @ h
    scale = np.sqrt(len(q)) if kind.score in ("scaled_dot", "general") else 1  # general keeps its W times this
    return q @ h / scale + seen


def attend(p: dict[str, np.ndarray], kind: AttentionConfig, q: np.ndarray, h: np.ndarray, t: int, c: np.ndarray):
    """Context and weights of one query, over a sentence of h_1 .. h_S."""
    S, D = len(h), kind.half_width
    point, gain = t, np.ones(S)
    if kind.window == "local_p":
        point = S / (1 + np.exp(-p["window.v"] / np.sqrt(len(q)) @ np.tanh(p["window.point.weight"] @ q)))
        gain = np.exp(-((np.arange(S) - point) ** 2) / (2 * (D / 2) ** 2))
    center = min(int(np.floor(point)), S - 1)
    window = [s for s in range(S) if kind.window == "global" or abs(s - center) <= D]
    contexts, weights = [], np.zeros(S)
    for head in range(kind.heads):
        scores = {s: equation(p, kind, head, q, h[s], s, c[s]) for s in window}
        scores = {s: score for s, score in scores.items() if score is not None}
        own = np.zeros(S)
        if scores:
            own[list(scores)] = EQUATIONS[kind.normalizer](np.array(list(scores.values())))
        own *= gain
        weights += own / kind.heads
        values = h if kind.heads == 1 else h @ np.split(p["value.weight"], kind.heads)[head].T
        contexts.append(own @ values)
    context = np.concatenate(contexts)
    return context if kind.heads == 1 else p["output.weight"] @ context, weights, window


@pytest.mark.parametrize("window", WINDOW_CLASSES)
@pytest.mark.parametrize("score", OWN_SCORES)
def test_attention_is_the_equations_of_the_papers(score: str, window: str) -> None:
    """Three queries a sentence at chosen places; windows that are cut at both ends, and one wider than any sentence;
    what stands at padding is noise."""
    generator = torch.Generator().manual_seed(1)
    length_B, position_BQ = torch.tensor([6, 3, 5, 1]), torch.tensor([[0, 2, 7], [5, 1, 2], [3, 4, 0], [0, 1, 9]])
    values_BSM = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    query_BQD = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    coverage_BQS = torch.rand(4, 3, 6, generator=generator, dtype=torch.float64)
    empty = cut = 0
    for kind, half_width in itertools.product(FAMILY, (1, 2, 4)):
        if (kind["score"], kind["window"]) != (score, window):
            continue
        attention = attention_of(half_width, **kind)
        settings = AttentionConfig(half_width=half_width, **kind)
        parameters = {key: value.numpy() for key, value in attention.state_dict().items()}
        look = attention.prepare_steps(attention.project_memory(values_BSM, length_B), torch.float64)
        context_BQM, weights = look(query_BQD, position_BQ, coverage_BQS if settings.coverage else None)
        whole = window == "global" or MAX_WINDOWS_TO_MASK * (2 * half_width + 1) >= 6
        assert weights is not None and weights.weights_BQW.shape[2] == (6 if whole else 2 * half_width + 1)
        dense_BQS = weights.dense(6).detach().numpy()
        for b, q in itertools.product(range(4), range(3)):
            S = int(length_B[b])
            expected = attend(
                parameters,
                settings,
                query_BQD[b, q].numpy(),
                values_BSM[b, :S].numpy(),
                int(position_BQ[b, q]),
                coverage_BQS[b, q].numpy(),
            )
            np.testing.assert_allclose(
                context_BQM[b, q].detach().numpy(), expected[0], atol=1e-10, rtol=0, err_msg=name(kind)
            )
            np.testing.assert_allclose(dense_BQS[b, q, :S], expected[1], atol=1e-10, rtol=0, err_msg=name(kind))
            assert not np.delete(dense_BQS[b, q], expected[2]).any()  # exactly 0 outside the window, and at padding
            empty += not expected[1].any()
            cut += len(expected[2]) < min(S, 2 * half_width + 1)
    assert (empty > 0) == (score == "location" and window != "global")  # nothing to see there
    assert (cut > 0) == (window != "global")


@pytest.mark.parametrize("window", [window for window in WINDOW_CLASSES if window != "global"])
@pytest.mark.parametrize("score", OWN_SCORES)
def test_a_local_window_is_the_same_cut_out_or_in_its_place(
    score: str, window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts, weights and all gradients."""
    length_B, position_BQ = torch.tensor([7, 4, 1]), torch.tensor([[0, 3], [6, 1], [2, 0]])
    generator = torch.Generator().manual_seed(4)
    values_BSM = torch.randn(3, 7, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    query_BQD = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    coverage_BQS = torch.rand(3, 2, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    for kind in FAMILY:
        if (kind["score"], kind["window"]) != (score, window):
            continue
        attention = attention_of(2, **kind)
        covered = [coverage_BQS] if kind["coverage"] else []
        inputs = [values_BSM, query_BQD, *covered, *attention.parameters()]
        ways = []
        for whole in (0, 2):
            monkeypatch.setattr("nmt.model.windows.MAX_WINDOWS_TO_MASK", whole)
            look = attention.prepare_steps(attention.project_memory(values_BSM, length_B), torch.float64)
            context_BQM, weights = look(query_BQD, position_BQ, coverage_BQS if covered else None)
            assert weights is not None and (weights.first_BQ is None) == (whole > 0)
            dense_BQS = weights.dense(7)
            loss = context_BQM.square().sum() + dense_BQS.square().sum()
            ways.append([context_BQM, dense_BQS, *torch.autograd.grad(loss, inputs, materialize_grads=True)])
        for one, other in zip(*ways, strict=True):
            torch.testing.assert_close(one, other, msg=name(kind))


@pytest.mark.parametrize("normalizer", NORMALIZER_FNS)
def test_normalizers_sum_to_one_and_see_no_masked_score(normalizer: str) -> None:
    torch.manual_seed(3)
    scores = torch.randn(5, 40, dtype=torch.float64) * torch.tensor([[0.01], [0.3], [1], [10], [1000]])
    scores[:, ::7] = float("-inf")
    scores[0, 1:4] = 2.0  # equal ones
    for dtype in (torch.float64, torch.float32):
        weights = NORMALIZER_FNS[normalizer](scores.to(dtype))
        expected = np.array([EQUATIONS[normalizer](row - row.max()) for row in scores.numpy()])
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-12 if dtype == torch.float64 else 1e-6)
        assert (weights.sum(1) - 1).abs().max() < 1e-5 and not weights[:, ::7].any()
    finite = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(NORMALIZER_FNS[normalizer], finite)
    assert NORMALIZER_FNS[normalizer](torch.full((2, 4), float("nan"))).isnan().all()  # and no index out of range


@pytest.mark.parametrize("window", WINDOW_CLASSES)
@pytest.mark.parametrize("score", OWN_SCORES)
def test_attention_passes_gradcheck(score: str, window: str) -> None:
    """Contexts and weights with respect to queries, encoder outputs, coverage and all parameters, over two steps."""
    length_B, position_BQ = torch.tensor([6, 3]), torch.tensor([[5, 2], [0, 1]])
    generator = torch.Generator().manual_seed(2)
    for kind in FAMILY:
        if (kind["score"], kind["window"]) != (score, window):
            continue
        attention = attention_of(1, hidden=4, **kind)
        query_BQD = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        values_BSM = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        coverage_BQS = torch.rand(2, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)

        def run(*inputs: Tensor, attention: Attention = attention, covered: bool = kind["coverage"]) -> Any:
            query_BQD, values_BSM, coverage_BQS = inputs[:3]
            look = attention.prepare_steps(attention.project_memory(values_BSM, length_B), torch.float64)
            results = []
            for step in range(2):
                context_BQM, weights = look(query_BQD + step, position_BQ - step, coverage_BQS if covered else None)
                assert weights is not None
                results += [context_BQM, weights.weights_BQW]
            return tuple(results)

        inputs = (query_BQD, values_BSM, coverage_BQS, *attention.parameters())
        assert torch.autograd.gradcheck(run, inputs, fast_mode=True), name(kind)


@pytest.mark.parametrize("heads", [1, 2])
def test_additive_scores_by_rows_equal_those_at_once(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their gradients; a batch as large as here is otherwise done at once."""
    score = attention_of(1, score="additive", heads=heads).score
    generator = torch.Generator().manual_seed(3)
    size = score.size // heads
    query_RHQA, keys_RHWA = (
        torch.randn(5, heads, count, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (3, 4)
    )
    weights_RHQW = torch.randn(5, heads, 3, 4, generator=generator, dtype=torch.float64)

    def run() -> tuple[Tensor, ...]:
        scores_RHQW = score(query_RHQA, keys_RHWA, torch.arange(4).unsqueeze(0), None)
        return scores_RHQW, *torch.autograd.grad(scores_RHQW, (query_RHQA, keys_RHWA, score.v), weights_RHQW)

    at_once = run()
    monkeypatch.setattr("nmt.model.attention.CACHE_NUMEL", 2 * query_RHQA[0].numel() * 4)
    torch.testing.assert_close(run(), at_once)


def in_styles(kinds: list[dict[str, Any]]) -> list[Any]:
    """Each style with each kind of attention, and a number by which other settings vary."""
    pairs = itertools.product(ATTENTION_STYLES, [*kinds, {"score": "none"}])
    return [(style, number, kind) for number, (style, kind) in enumerate(pairs)]


PAIRWISE = [kind for number, kind in enumerate(FAMILY) if number % 4 == number // 4 % 4]  # heads and coverage in turn


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_every_attention_decodes_alike_in_every_way(style: str) -> None:
    """All positions at once equal one at a time; hypotheses share the memory of their sentence; neighbors and padding
    change nothing."""
    source_BS, length_B, target_BT = make_ragged_batch(target=3)
    for own, number, kind in in_styles(FAMILY):
        if own != style:
            continue
        model = make_attention_model(style, number, **kind)
        with torch.no_grad():
            memory, start = model.start(source_BS, length_B)
            together, weights, last = model.decode(target_BT, start, memory)
            dense = None if weights is None else weights.dense(6)
            assert (dense is None) == (kind["score"] == "none")

            state = start
            for t in range(target_BT.shape[1]):
                features, step_weights, state = model.decode(target_BT[:, t : t + 1], state, memory)
                torch.testing.assert_close(features[:, 0], together[:, t], msg=name(kind))
                if dense is not None:
                    torch.testing.assert_close(step_weights.dense(6)[:, 0], dense[:, t], msg=name(kind))
            for expected, found in zip(flat(last), flat(state), strict=True):
                torch.testing.assert_close(found, expected, msg=name(kind))

            rows_N = torch.arange(4).repeat_interleave(2)
            tokens_NT = torch.cat([target_BT, target_BT.flip(1)], 1).view(8, -1)
            shared, _, _ = model.decode(tokens_NT, start.select(rows_N), memory)
            copied, _, _ = model.decode(tokens_NT, start.select(rows_N), memory.select(rows_N))
            torch.testing.assert_close(shared, copied, msg=name(kind))

            memory, state = model.start(source_BS[1:2, :3], length_B[1:2])
            alone, own_weights, _ = model.decode(target_BT[1:2], state, memory)
            torch.testing.assert_close(alone[0], together[1], msg=name(kind))
            if dense is not None:
                torch.testing.assert_close(dense[1, :, :3], own_weights.dense(3)[0], msg=name(kind))
                assert not dense[1, :, 3:].any()


def flat(state: Any) -> list[Tensor]:
    """All tensors of a decoder state."""
    parts = [*itertools.chain(*state.cells), *state[1:]]
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_every_attention_is_searched_and_forced(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and beam search run, and forced decoding of what they found gives the same scores and weights."""
    monkeypatch.setattr("nmt.decoding.search.SHAPE_MULTIPLE", 1)  # sentences leave as soon as they are done
    source_BS, length_B, _ = make_ragged_batch()
    ended = 0
    for own, number, kind in in_styles(PAIRWISE):
        if own != style:
            continue
        model = make_attention_model(style, number, **kind)
        with torch.no_grad():
            model.output.bias[EOS] += 1
        for beam in (1, 3):
            config = SearchConfig(beam=beam, n_best=beam, max_length=5)
            found = search(model, source_BS, length_B, config, keep_weights=True)
            [best, *_] = zip(*found, strict=True)
            target_BT = torch.full((4, 6), PAD)
            for row, hypothesis in enumerate(best):
                target_BT[row, : len(hypothesis.tokens) + 1] = torch.tensor([BOS, *hypothesis.tokens])
            for one, other in zip(best, score_targets(model, source_BS, length_B, target_BT), strict=True):
                assert one.tokens == other.tokens and one.score == pytest.approx(other.score, abs=1e-9), name(kind)
                ended += one.tokens[-1] == EOS
                assert (one.weights_TS is None) == (other.weights_TS is None) == (kind["score"] == "none")
                if one.weights_TS is not None:
                    torch.testing.assert_close(one.weights_TS, other.weights_TS, msg=name(kind))
    assert ended > 20


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_neighbors_change_no_translation(style: str) -> None:
    """In fp32, the n best of each sentence in a batch and alone: scores to 1e-5, texts where the next best is more than
    1e-4 behind (with equal scores either may come first)."""
    source_BS, length_B, _ = make_ragged_batch((9, 2, 6, 1, 7))
    equal = 0
    for own, number, kind in in_styles(PAIRWISE):
        if own != style:
            continue
        model = make_attention_model(style, number, **kind).float()
        model.dtype = torch.float32
        with torch.no_grad():
            model.output.bias[EOS] += 1
        for beam in (1, 3):
            config = SearchConfig(beam=beam, n_best=beam, max_length=6)
            together = search(model, source_BS, length_B, config)
            for row, length in enumerate(length_B.tolist()):
                [alone] = search(model, source_BS[row : row + 1, :length], length_B[row : row + 1], config)
                for one, other in zip(together[row], alone, strict=True):
                    assert one.score == pytest.approx(other.score, abs=1e-5), name(kind)
                scores = [hypothesis.score for hypothesis in alone]
                if all(ahead - behind > 1e-4 for ahead, behind in itertools.pairwise(scores)):
                    assert [one.tokens for one in together[row]] == [one.tokens for one in alone], name(kind)
                    equal += 1
    assert equal > 400


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_gradients_of_every_attention_equal_finite_differences(style: str) -> None:
    """Of all parameters at once in a random direction, coverage loss included."""
    batch = make_ragged_batch()
    generator = torch.Generator().manual_seed(0)
    for own, number, kind in in_styles(PAIRWISE):
        if own != style:
            continue
        model = make_attention_model(style, number, **kind)
        coverage = 0.5 if kind.get("coverage") else 0.0

        def loss(model: Seq2Seq = model, coverage: float = coverage) -> Tensor:
            found, weights = model.loss(*batch, smoothing=0.1)
            if not coverage or weights is None:
                return found.smoothed
            return found.smoothed + coverage * coverage_loss(weights.dense(6), batch[2][:, 1:] != PAD)

        loss().backward()
        parameters = list(model.parameters())
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        for parameter, direction in zip(parameters, directions, strict=True):
            if len(parameter) == VOCABULARY and parameter.shape[1:] == (6,):
                direction[PAD] = 0  # the row of padding is not learned as an input
        expected = 0.0
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                torch._foreach_add_(parameters, directions, alpha=step)
                expected += loss().item() / (2 * step)
                torch._foreach_add_(parameters, directions, alpha=-step)
        found = sum(
            (p.grad * d).sum().item() for p, d in zip(parameters, directions, strict=True) if p.grad is not None
        )
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), f"{number} {name(kind)}"


def test_half_precision_stays_near_double() -> None:
    batch = make_ragged_batch()
    for style, number, kind in in_styles(PAIRWISE):
        losses, gradients = [], []
        for dtype in (torch.float64, torch.bfloat16):
            model = make_attention_model(style, number, **kind)
            model.to(torch.promote_types(dtype, torch.float32)).dtype = dtype
            loss, weights = model.loss(*batch, smoothing=0.1)
            loss.smoothed.backward()
            assert weights is None or weights.weights_BQW.dtype == torch.promote_types(dtype, torch.float32)
            losses.append(loss.smoothed.item())
            gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
        assert losses[1] == pytest.approx(losses[0], rel=0.01), name(kind)
        assert torch.cosine_similarity(*gradients, dim=0) > 0.99, name(kind)


def cell_step(rnn: Any, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """torch's own cells."""
    parameters = (rnn.weight_ih, rnn.weight_hh, rnn.bias_ih, rnn.bias_hh)
    return (
        torch.lstm_cell(x, state, *parameters) if rnn.num_states == 2 else (torch.gru_cell(x, state[0], *parameters),)
    )


@pytest.mark.parametrize("cell", CELL_SPECS)
@pytest.mark.parametrize(
    ("style", "readout"), [*((style, "tanh") for style in ATTENTION_STYLES), ("bahdanau", "maxout")]
)
@pytest.mark.parametrize("kind", [{}, {"window": "local_m", "half_width": 1}, {"coverage": True}], ids=name)
def test_styles_are_the_equations_of_the_papers(style: str, cell: str, readout: str, kind: dict[str, Any]) -> None:
    """One step after the other, as docs/models.md writes them; three layers with residual sums. Maxout is a readout
    of bahdanau alone: the configuration refuses it elsewhere. Attention knows the position and the weights so far."""
    changes = ATTENTION_STYLES[style] | {"cell": cell, "readout": readout, "decoder_layers": 3}
    config = ModelConfig(embed=6, hidden=8, dropout=0.0, residual=True, attention=AttentionConfig(**kind), **changes)
    model = build_model(config, VOCABULARY, VOCABULARY).double()
    model.dtype = torch.float64
    randomize_(model, 0.4)
    decoder, (source_BS, length_B, target_BT) = model.decoder, make_ragged_batch()
    with torch.no_grad():
        memory, state = model.start(source_BS, length_B)
        features, _, _ = model.decode(target_BT, state, memory)
        attend, cells = decoder.attention.prepare_steps(memory, torch.float64), list(state.cells)
        feed, so_far = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 1, 6, dtype=torch.float64)

        def look(query: Tensor) -> Any:
            nonlocal so_far
            seen = so_far if config.attention.coverage else None
            context, weights = attend(query.unsqueeze(1), torch.full((4, 1), t), seen)
            assert weights is not None
            so_far = so_far + weights.dense(6)
            return context.squeeze(1)

        for t, y in enumerate(model.target_embedding(target_BT).unbind(1)):
            before = cells[-1][0]
            context = look(before) if style == "bahdanau" else None
            fed = {"bahdanau": [context], "input feeding": [feed], "luong": [], "gnmt": []}[style]
            cells[0] = cell_step(decoder.layers[0], torch.cat([y, *fed], 1), cells[0])
            x = cells[0][0]
            if style == "gnmt":
                context = look(x)
            for depth in (1, 2):
                inputs = torch.cat([x, context], 1) if style == "gnmt" else x
                cells[depth] = cell_step(decoder.layers[depth], inputs, cells[depth])
                x = cells[depth][0] if style == "gnmt" and depth == 1 else cells[depth][0] + x
            if style == "bahdanau":
                seen = torch.cat([context, before if readout == "maxout" else x, y], 1)
                inner = seen @ decoder.readout.weight.T + decoder.readout.bias
                x = torch.tanh(inner) if readout == "tanh" else torch.maximum(inner[:, ::2], inner[:, 1::2])
            elif style != "gnmt":
                x = feed = torch.tanh(torch.cat([look(x), x], 1) @ decoder.readout.weight.T)
            torch.testing.assert_close(features[:, t], x, atol=1e-10, rtol=0)


@pytest.mark.parametrize("style", ["luong", "gnmt"])
def test_many_positions_attend_a_few_at_a_time(style: str) -> None:
    """Where no gradient is wanted; more than twice `decoder.MAX_QUERIES_AT_ONCE`."""
    for kind in PAIRWISE:
        model = make_attention_model(style, **kind)
        source_BS, length_B, target_BT = make_ragged_batch(target=38)
        features, weights, _ = model.decode(target_BT, *reversed(model.start(source_BS, length_B)))
        with torch.no_grad():
            parts, parts_weights, _ = model.decode(target_BT, *reversed(model.start(source_BS, length_B)))
        torch.testing.assert_close(parts, features, msg=name(kind))
        torch.testing.assert_close(parts_weights.dense(6), weights.dense(6), msg=name(kind))


def test_the_shortcut_adds_each_piece_to_its_output() -> None:
    torch.manual_seed(1)
    config = ModelConfig(embed=6, hidden=8, shortcut=True)
    encoder, (source_BS, length_B, _) = Encoder(config).double(), make_ragged_batch()
    embedded_BSE = torch.randn(*source_BS.shape, 6, dtype=torch.float64)
    found, lasts = encoder(embedded_BSE, length_B)
    assert encoder.shortcut is not None
    expected = embedded_BSE @ encoder.shortcut.weight.T
    encoder.shortcut = None
    outputs, same = encoder(embedded_BSE, length_B)
    for row, length in enumerate(length_B.tolist()):
        torch.testing.assert_close(found[row, :length], (outputs + expected)[row, :length])
        assert not found[row, length:].any()
    torch.testing.assert_close(same, lasts)
    config.attention = AttentionConfig(score="none")
    assert Encoder(config).shortcut is None  # nothing would read it


def test_coverage_loss_counts_what_was_attended_to_before() -> None:
    """See et al. 2017, eq. 12, over the target pieces that are not padding."""
    model = make_attention_model("bahdanau", score="additive", window="local_p", coverage=True)
    source_BS, length_B, target_BT = make_ragged_batch()
    _, weights = model.loss(source_BS, length_B, target_BT)
    loss = coverage_loss(weights.dense(6), target_BT[:, 1:] != PAD)
    expected = 0.0
    for target_T, weights_TS in zip(target_BT, weights.dense(6).detach().numpy(), strict=True):
        for t in range(int((target_T != PAD).sum()) - 1):
            expected += np.minimum(weights_TS[t], weights_TS[:t].sum(0)).sum()
    assert loss.item() == pytest.approx(expected) and expected > 0.1


def test_choices_are_those_of_the_configuration() -> None:
    assert (*SCORE_CLASSES, "none") == schema.ATTENTION_SCORES
    assert tuple(WINDOW_CLASSES) == schema.ATTENTION_WINDOWS and tuple(NORMALIZER_FNS) == schema.ATTENTION_NORMALIZERS
    assert SCORE_CLASSES["concat"] is SCORE_CLASSES["additive"]  # so that it needs no test of its own


def test_sources_beyond_reach_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_out_of_reach(make_attention_model("luong", score="location"), [2, REACH, REACH + 1, 9], "lines")
    warn_if_out_of_reach(make_attention_model("luong", score="dot"), [9], "lines")
    warn_if_out_of_reach(make_attention_model("luong", score="none"), [9], "lines")
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"2 of 4 lines have more than model.attention.max_positions={REACH} source pieces; the pieces beyond get no "
        "attention"
    ]


@pytest.mark.parametrize("window", WINDOW_CLASSES)
def test_a_diverged_model_looks_nowhere_out_of_range(window: str) -> None:
    torch.manual_seed(1)
    for normalizer in NORMALIZER_FNS:
        attention = attention_of(1, score="dot", window=window, normalizer=normalizer)
        memory = attention.project_memory(torch.randn(2, 5, 8).double(), torch.tensor([5, 2]))
        query_BQD = torch.full((2, 1, 8), float("nan"), dtype=torch.float64)
        context_BQM, _ = attention.prepare_steps(memory, torch.float64)(query_BQD, torch.tensor([[3], [9]]), None)
        assert context_BQM.isnan().all()
