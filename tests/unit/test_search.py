"""Beam search and sampling, compared with exhaustive search and forced decoding."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    SEARCH_OPTIONS,
    STYLES,
    make_attention_model,
    make_model,
    make_ragged_batch,
    search,
    sharpen,
)
from torch import Tensor

from nmt.config import BOS, EOS, PAD, SearchConfig
from nmt.decoding import search as search_module
from nmt.decoding import step
from nmt.decoding.batches import choose_batch_size
from nmt.decoding.beams import Beams, Hypothesis
from nmt.decoding.search import Literals, score_targets
from nmt.decoding.step import log_probabilities, top_continuations
from nmt.model.ensemble import Ensemble
from nmt.model.numerics import accumulation_dtype

pytestmark = pytest.mark.usefixtures("kernels")


def expected_log_probabilities(logits: Tensor) -> Tensor:
    logp = torch.log_softmax(logits, -1)
    logp[..., PAD] = logp[..., BOS] = float("-inf")
    return logp


@pytest.mark.parametrize("size", [3, 63, 128, 129, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 3])
def test_log_probabilities_and_topk_match_torch(size: int, dtype: torch.dtype, k: int) -> None:
    logits_NV = torch.randn(60, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits_NV[:9, -1], logits_NV[9:18, 0], logits_NV[18:27, 1] = 9, 9, 40  # the last have probabilities near 1
    logits_NV[18:27, 0] = -300
    exact_NV = expected_log_probabilities(logits_NV.double())
    logp_NV = log_probabilities(logits_NV)
    assert logp_NV.dtype == accumulation_dtype(dtype) and (logp_NV <= 0).all()
    token_BKC = top_continuations(logp_NV.view(15, 4, size), min(k, size))
    expected_BKC = exact_NV.topk(min(k, size)).values.view(15, 4, -1)
    actual_BKC = logp_NV.view(15, 4, size).gather(2, token_BKC)
    atol = 1e-12 if dtype == torch.float64 else 4e-6
    torch.testing.assert_close(actual_BKC.double(), expected_BKC, rtol=0, atol=atol)


def single_sentence(row: int, source_BS: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return one sentence of a batch, without padding, and its length."""
    return source_BS[row : row + 1, : length_B[row]], length_B[row : row + 1]


def reference_ranking_score(score: float, weights_TS: Tensor, config: SearchConfig) -> float:
    """Return log P / lp + cp as in Wu et al. 2016, eq. 14."""
    length = len(weights_TS)
    coverage = weights_TS.sum(0).clamp(max=1).log().clamp(min=-20).sum().item()
    return score / ((5 + length) / 6) ** config.length_penalty + config.coverage_penalty * coverage


@pytest.mark.parametrize(
    "settings",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 1.0},
        {"coverage_penalty": 0.7},
        {"length_penalty": 0.5, "coverage_penalty": 0.2},
        {"literals": [5]},
        {"literals": [5, 8], "length_penalty": 0.0},
        {"literals": []},
        {"literals": [8], "coverage_penalty": 0.3},
    ],
    ids=str,
)
def test_large_beam_matches_exhaustive_search(settings: dict[str, Any]) -> None:
    model = sharpen(make_model(hidden=4, embed=4), 1.5)
    with torch.no_grad():
        model.output.bias[9:] = float("-inf")  # keep the vocabulary small enough to enumerate
    source_BS, length_B, _ = make_ragged_batch()
    max_length, vocabulary = 3, [1, *range(4, 9)]
    prefixes = [prefix for n in range(max_length) for prefix in itertools.product(vocabulary, repeat=n)]
    candidates = [[*prefix, EOS] for prefix in prefixes]
    candidates += [list(tokens) for tokens in itertools.product(vocabulary, repeat=max_length)]
    beam = len(vocabulary) ** max_length + 100
    wanted = settings.get("literals")
    literals = None if wanted is None else Literals([5, 6, 8], [wanted] * len(source_BS))
    settings = {key: value for key, value in settings.items() if key != "literals"}
    config = SearchConfig(**{"beam": beam, "n_best": 5, "max_length": max_length, "length_penalty": 1.0} | settings)
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config, literals=literals)):
        target_BT = torch.full((len(candidates), max_length + 1), PAD)
        for number, tokens in enumerate(candidates):
            target_BT[number, : len(tokens) + 1] = torch.tensor([BOS, *tokens])
        source, length = single_sentence(row, source_BS, length_B)
        forced = score_targets(model, source.expand(len(candidates), -1), length.expand(len(candidates)), target_BT)
        scored = [
            (reference_ranking_score(candidate.score, candidate.weights_TS, config), candidate.tokens)
            for candidate in forced
            if candidate.weights_TS is not None
            and (wanted is None or sorted(token for token in candidate.tokens if token in (5, 6, 8)) == wanted)
            and not (wanted and candidate.tokens[-1] in wanted)  # room is left for `</s>`
            and not (wanted and ignores_wish_to_end(model, source, length, candidate.tokens, wanted))
        ]
        assert [h.tokens for h in hypotheses] == [tokens for _, tokens in sorted(scored, reverse=True)[:5]]


def ignores_wish_to_end(model: Any, source: Tensor, length: Tensor, tokens: list[int], wanted: list[int]) -> bool:
    """Whether anything but a missing literal follows where `</s>` would be the most likely token."""
    memory, state = model.start(source, length)
    features_1TD, _, _ = model.decode(torch.tensor([[BOS, *tokens[:-1]]]), state, memory)
    likely_T = log_probabilities(model.logits(features_1TD[0])).argmax(1).tolist()
    missing = [{*wanted} - {*tokens[:step]} for step in range(len(tokens))]
    return any(
        best == EOS and left and token not in left for best, left, token in zip(likely_T, missing, tokens, strict=True)
    )


SPARSE_ATTENTION = {"score": "dot", "window": "local_m", "normalizer": "entmax15"}  # many weights are exactly 0


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
@pytest.mark.parametrize("attention", [{"score": "additive"}, SPARSE_ATTENTION])
def test_hypotheses_are_distinct_and_sorted_by_ranking_score(options: str, attention: dict[str, str]) -> None:
    model = sharpen(make_attention_model("input feeding", 0, **attention), 1.5)
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | SEARCH_OPTIONS[options])
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config, keep_weights=True)):
        assert hypotheses and not {PAD, BOS} & {token for h in hypotheses for token in h.tokens}
        assert all(EOS not in h.tokens[:-1] for h in hypotheses)
        scores = [h.ranking_score for h in hypotheses]
        if config.sample:
            assert set(scores) == {None}
            continue
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses) == 4
        length = length_B[row]
        expected = [
            reference_ranking_score(h.score, h.weights_TS[:, :length], config)  # type: ignore[index]
            for h in hypotheses
        ]
        assert scores == pytest.approx(expected, rel=1e-6) and expected == sorted(expected, reverse=True)


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
@pytest.mark.parametrize("n_best", [1, 4])
def test_early_stopping_does_not_change_results(options: str, n_best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": n_best, "max_length": 9} | SEARCH_OPTIONS[options])
    early = search(model, source_BS, length_B, config)
    monkeypatch.setattr("nmt.decoding.step.is_done", lambda beams, _, inputs: inputs.max_length_B <= beams.step_B)
    for actual, expected in zip(early, search(model, source_BS, length_B, config), strict=True):
        assert [(h.tokens, h.score) for h in actual] == [(h.tokens, h.score) for h in expected]


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
def test_search_options_apply_per_sentence_independent_of_batch(options: str) -> None:
    """Check scores against forced decoding, tokens against a batch of one, length limits and prefixes."""
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 7} | SEARCH_OPTIONS[options])
    prefixes = [[], [5], [7, 7], [4, 5, 6], [], [9]]
    wanted = [[], [10], [11, 12], [12], [], [10, 11, 12]]
    together = search(model, source_BS, length_B, config, prefixes=prefixes, literals=Literals([10, 11, 12], wanted))
    for row, hypotheses in enumerate(together):
        source, length = single_sentence(row, source_BS, length_B)
        given = {"prefixes": prefixes[row : row + 1], "literals": Literals([10, 11, 12], wanted[row : row + 1])}
        [alone] = search(model, source, length, config, **given)
        assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]
        max_length = min(config.max_length, int(config.max_ratio * length + 20) + len(prefixes[row]))
        for actual, expected in zip(hypotheses, alone, strict=True):
            tokens = actual.tokens
            [forced] = score_targets(model, source, length, torch.tensor([[BOS, *tokens]]))
            assert actual.score == pytest.approx(expected.score, abs=1e-9)
            assert actual.score == pytest.approx(forced.score, abs=1e-9)
            assert tokens[: len(prefixes[row])] == prefixes[row]
            assert sorted(token for token in tokens if token in (10, 11, 12)) == wanted[row]
            assert len(tokens) == max_length or len(tokens) < max_length and tokens[-1] == EOS


ATTENTION_OPTIONS: dict[str, dict[str, Any]] = {
    "global": {"score": "additive"},
    "covered": {"score": "general", "coverage": True},
    "local_m": {"score": "dot", "window": "local_m", "heads": 2},
    "local_p": {"score": "additive", "window": "local_p", "coverage": True},
    "location": {"score": "location"},
    "none": {"score": "none"},
}


BATCHED = sorted({*itertools.product([*ATTENTION_OPTIONS, "two models"], SEARCH_OPTIONS)} - {("none", "coverage")})


@pytest.mark.parametrize(
    ("kernels", "attention_name", "options"),
    [(("fast", "reference")[sum(map(len, case)) % 2], *case) for case in BATCHED],  # all pairs of the three
    indirect=["kernels"],
)
def test_batches_do_not_change_results(options: str, attention_name: str) -> None:
    """Compare tokens, scores and weights of searches in batches with a search of all sentences at once."""
    if attention_name == "two models":
        model: Any = Ensemble([sharpen(make_model()), sharpen(make_model("gnmt", "gru"))])
    else:
        number = list(ATTENTION_OPTIONS).index(attention_name)
        model = sharpen(make_attention_model("input feeding", number, **ATTENTION_OPTIONS[attention_name]), 1.5)
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | SEARCH_OPTIONS[options])
    prefixes = [[], [5], [], [7, 7], [], [], [4, 5, 6], [], [9], [], [], []]
    descending, mixed = (12, 9, 8, 8, 5, 5, 3, 3, 2, 2, 1, 1), (2, 7, 1, 9, 3, 12, 5, 1, 8, 2, 6, 4)
    for lengths, batch_size in ((descending, 5), (mixed, 3), ((5, 2, 7), 1)):
        source_BS, length_B, _ = make_ragged_batch(lengths)
        literals = Literals([10, 11], [[[], [10], [11, 10]][row % 3] for row in range(len(lengths))])
        given = {"keep_weights": True, "prefixes": prefixes[: len(lengths)], "literals": literals}
        unlimited = search(model, source_BS, length_B, config, **given)
        assert batch_size == 1 or len({len(hypotheses[0].tokens) for hypotheses in unlimited}) > 1
        assert_equal_results(search(model, source_BS, length_B, config, **given, batch_size=batch_size), unlimited)
        assert all((h.weights_TS is None) == (attention_name == "none") for one in unlimited for h in one)


def assert_equal_results(actual: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-9)
        torch.testing.assert_close([h.weights_TS for h in ours], [h.weights_TS for h in theirs])


@pytest.fixture
def gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the shapes of batches, and count sentences that are done, as on a GPU."""
    names = ["round_up_batch_size", "choose_first_size", "round_up_length"]
    for name, function in zip(names, [getattr(search_module, name) for name in names], strict=True):
        monkeypatch.setattr(search_module, name, lambda n, _, function=function: function(n, torch.device("cuda")))
    counter = search_module.AsyncCounter
    monkeypatch.setattr(search_module, "AsyncCounter", lambda delayed: counter(delayed=True))


@pytest.mark.usefixtures("gpu_shapes")
@pytest.mark.parametrize(("sentences", "batch_size"), [(30, 4), (30, 8), (5, 8), (3, None)])
def test_shapes_of_a_gpu_do_not_change_results(
    sentences: int, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches have a power of two of rows, also when the number of sentences that are done is known late."""
    numbers = random.Random(sentences)
    source_BS, length_B, _ = make_ragged_batch(tuple(numbers.randint(1, 14) for _ in range(sentences)))
    model, config = sharpen(make_model()), SearchConfig(beam=3, n_best=3, max_length=15, coverage_penalty=0.4)
    one_by_one = [
        hypotheses
        for row in range(sentences)
        for hypotheses in search(model, *single_sentence(row, source_BS, length_B), config, keep_weights=True)
    ]
    shapes = watch_tokens(monkeypatch)
    assert_equal_results(
        search(model, source_BS, length_B, config, keep_weights=True, batch_size=batch_size), one_by_one
    )
    assert {sentences for sentences, *_ in shapes} <= {1, 2, 4, 8}


def watch_tokens(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of the tokens of all hypotheses, BKT, at each step but the first."""
    shapes: list[tuple[int, ...]] = []

    def watch_and_advance(model: Any, config: SearchConfig, state: Any, beams: Beams, *given: Any) -> Any:
        shapes.extend([tuple(beams.tokens_BKT.shape)] if beams.tokens_BKT.shape[2] else [])
        return step.advance(model, config, state, beams, *given)

    monkeypatch.setattr(search_module, "advance", watch_and_advance)
    return shapes


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
def test_nan_model_still_returns_hypotheses(options: str) -> None:
    model = make_model()
    with torch.no_grad():
        model.output.weight.fill_(float("nan"))
    source_BS, length_B, _ = make_ragged_batch()
    config = SearchConfig(**{"beam": 4, "n_best": 1, "max_length": 9} | SEARCH_OPTIONS[options])
    assert all(len(hypotheses) == 1 for hypotheses in search(model, source_BS, length_B, config))


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("beam", [1, 3])
def test_unfinished_translations_stop_at_length_limit(ratio: float, beam: int) -> None:
    """The limit is the smaller of `max_length`, and `max_ratio` source lengths plus 20 plus the prefix."""
    model = make_model().eval()
    with torch.no_grad():
        model.output.bias[EOS] = -1e9
    lengths, prefixes = (45, 39, 6, 5, 1), [[], [4, 5, 6], [7, 7], [], [5]]
    source_BS, length_B, _ = make_ragged_batch(lengths)
    config = SearchConfig(beam=beam, max_length=100, max_ratio=ratio)
    actual = [len(best.tokens) for [best] in search(model, source_BS, length_B, config, prefixes=prefixes)]
    assert actual == ([42, 42, 25, 22, 21] if ratio == 0.5 else [100, 100, 34, 30, 23])


@pytest.mark.parametrize(
    ("source_length", "beam", "tokens", "expected"),
    [
        (9, 1, 8_000, 800),
        (9, 5, 8_000, 160),
        (10, 5, 8_000, 144),  # 145 would fit, but is no multiple of SHAPE_MULTIPLE
        (9, 1, 80, 8),  # `</s>` counts
        (9, 1, 79, 7),
        (9, 2, 79, 3),
        (99, 5, 10, 1),
    ],
)
def test_batch_size_is_largest_allowed_by_limits(source_length: int, beam: int, tokens: int, expected: int) -> None:
    assert choose_batch_size(source_length, beam, tokens) == expected


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_k": 5, "temperature": 2.0}])
def test_sampling_frequencies_match_probabilities(settings: dict[str, Any]) -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch()
    num_samples = 4000
    config = SearchConfig(n_best=num_samples, max_length=1, sample=True, **settings)
    samples = search(model, source_BS, length_B, config)
    same_seed = search(model, source_BS, length_B, config)
    other_seed = search(model, source_BS, length_B, replace(config, seed=2))
    for row, hypotheses in enumerate(samples):
        source, length = single_sentence(row, source_BS, length_B)
        memory, state = model.start(source, length)
        features, _, _ = model.decode(torch.tensor([[BOS]]), state, memory)
        p = torch.softmax(expected_log_probabilities(model.logits(features[0, 0])) / config.temperature, 0)
        p, tokens = p.sort(descending=True)
        p = p[: config.top_k or None] / p[: config.top_k or None].sum()
        counts = torch.tensor([[h.tokens[0] for h in hypotheses].count(token) for token in tokens[: len(p)].tolist()])
        assert counts.sum() == num_samples
        assert ((counts - num_samples * p).abs() <= 5 * (num_samples * p * (1 - p)).sqrt() + 1).all()
        assert [h.tokens for h in hypotheses] == [h.tokens for h in same_seed[row]]
        assert [h.score for h in hypotheses] != [h.score for h in other_seed[row]]


def test_ensemble_averages_probabilities() -> None:
    source_BS, length_B, _ = make_ragged_batch()
    models = [
        sharpen(make_model(style, cell)) for style, cell in (("bahdanau", "lstm"), ("luong", "gru"), ("gnmt", "lstm"))
    ]
    config = SearchConfig(beam=3, n_best=3, max_length=7)
    for row, hypotheses in enumerate(search(Ensemble(models), source_BS, length_B, config)):
        for hypothesis in hypotheses:
            logp = []
            for model in models:
                memory, state = model.start(*single_sentence(row, source_BS, length_B))
                features, _, _ = model.decode(torch.tensor([[BOS, *hypothesis.tokens[:-1]]]), state, memory)
                logp_TV = expected_log_probabilities(model.logits(features[0]))
                logp.append(logp_TV.gather(1, torch.tensor(hypothesis.tokens).unsqueeze(1)))
            expected_score = torch.stack(logp).exp().mean(0).log().sum().item()
            assert hypothesis.score == pytest.approx(expected_score, abs=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_beam_size_one_is_greedy_search(style: str) -> None:
    model = sharpen(make_model(style))
    source_BS, length_B, _ = make_ragged_batch()
    results = search(model, source_BS, length_B, SearchConfig(beam=1, max_length=9))
    for row, [hypothesis] in enumerate(results):
        memory, state = model.start(*single_sentence(row, source_BS, length_B))
        tokens = [BOS]
        while tokens[-1] != EOS and len(tokens) <= 9:
            state = state.make_room(len(tokens))
            features, _, state = model.decode(torch.tensor([[tokens[-1]]]), state, memory)
            tokens.append(int(expected_log_probabilities(model.logits(features[0, 0])).argmax()))
        assert hypothesis.tokens == tokens[1:]
