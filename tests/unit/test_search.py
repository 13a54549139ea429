"""Search against exhaustive enumeration, forced decoding and itself."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SEARCH_OPTIONS, STYLES, VOCABULARY, has_repeated_ngram, make_model, make_ragged_batch, sharpen
from builders import make_attention_model as attentive
from torch import Tensor

from nmt.config import BOS, EOS, PAD, SearchConfig
from nmt.decoding.hypotheses import init_beams
from nmt.decoding.search import beam_step, score_targets, search
from nmt.decoding.translator import choose_batch_size
from nmt.model import attention, logits
from nmt.model.ensemble import Ensemble
from nmt.model.kernels.linear import accumulation_dtype
from nmt.model.logits import log_probabilities, top_continuations


def expected_log_probabilities(logits: Tensor) -> Tensor:
    logp = torch.log_softmax(logits, -1)
    logp[..., PAD] = logp[..., BOS] = float("-inf")
    return logp


@pytest.mark.parametrize("size", [3, 63, 128, 129, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 3])
def test_the_largest_of_blocks_are_the_largest_of_all(size: int, dtype: torch.dtype, k: int) -> None:
    logits_NV = torch.randn(60, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits_NV[:9, -1], logits_NV[9:18, 0], logits_NV[18:27, 1] = 9, 9, 40  # the last are quite sure
    logits_NV[18:27, 0] = -300
    exact_NV = expected_log_probabilities(logits_NV.double())
    logp_NV = log_probabilities(logits_NV)
    assert logp_NV.dtype == accumulation_dtype(dtype) and (logp_NV <= 0).all()
    token_BKC = top_continuations(logp_NV.view(15, 4, size), min(k, size))
    wanted = exact_NV.topk(min(k, size)).values.view(15, 4, -1)
    found_BKC = logp_NV.view(15, 4, size).gather(2, token_BKC)
    torch.testing.assert_close(found_BKC.double(), wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 4e-6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_score_and_its_weights_equal_those_of_forced_decoding(style: str, beam: int) -> None:
    model = sharpen(make_model(style))
    source_BS, length_B, _ = make_ragged_batch()
    config = SearchConfig(beam=beam, n_best=beam, max_length=9)
    ended = 0
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config, keep_weights=True)):
        assert hypotheses
        for found in hypotheses:
            if found.tokens[-1] != EOS:
                continue
            ended += 1
            own = slice(row, row + 1)
            [forced] = score_targets(
                model, source_BS[own, : length_B[row]], length_B[own], torch.tensor([[BOS, *found.tokens]])
            )
            assert forced.score == pytest.approx(found.score, abs=1e-9)
            assert forced.tokens == found.tokens
            torch.testing.assert_close(found.weights_TS[:, : length_B[row]], forced.weights_TS)
            assert not found.weights_TS[:, length_B[row] :].any()
    assert ended >= 2


def test_a_few_rows_at_a_time_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in parts of one or two, and a vocabulary of several blocks."""
    model = sharpen(make_model("luong"))
    source_BS, length_B, _ = make_ragged_batch()
    config = SearchConfig(beam=3, n_best=3, max_length=9)
    plain = search(model, source_BS, length_B, config)
    monkeypatch.setattr(logits, "TOKENS_PER_BLOCK", 3)
    monkeypatch.setattr(logits, "CACHE_NUMEL", 2 * VOCABULARY)
    monkeypatch.setattr(attention, "CACHE_NUMEL", 100)
    for found, wanted in zip(search(model, source_BS, length_B, config), plain, strict=True):
        assert [h.tokens for h in found] == [h.tokens for h in wanted]
        assert [h.score for h in found] == pytest.approx([h.score for h in wanted], abs=1e-12)


def own(row: int, source_BS: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """One sentence of a batch, without padding."""
    return source_BS[row : row + 1, : length_B[row]], length_B[row : row + 1]


def ranked(score: float, weights_TS: Tensor, config: SearchConfig) -> float:
    """log P / lp + cp, Wu et al. 2016, eq. 14."""
    length = len(weights_TS)
    base = (5 + length) / 6 if config.penalty == "gnmt" else length
    covered = weights_TS.sum(0).clamp(max=1).log().clamp(min=-20).sum().item()
    return score / base**config.length_penalty + config.coverage_penalty * covered


@pytest.mark.parametrize(
    "settings",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 1.0},
        {"penalty": "mean"},
        {"coverage_penalty": 0.7},
        {"penalty": "mean", "length_penalty": 0.5, "coverage_penalty": 0.2},
        {"min_length": 3},
        {"no_repeat_ngram": 1},
        {"no_repeat_ngram": 2, "min_length": 2},
    ],
    ids=str,
)
def test_a_beam_as_large_as_the_space_is_exhaustive(settings: dict[str, Any]) -> None:
    model = sharpen(make_model(hidden=4, embed=4), 1.5)
    with torch.no_grad():
        model.output.bias[9:] = float("-inf")  # a vocabulary that can be enumerated
    source_BS, length_B, _ = make_ragged_batch()
    longest, words = 3, [1, *range(4, 9)]
    spaces = [prefix for n in range(longest) for prefix in itertools.product(words, repeat=n)]
    whole = [[*prefix, EOS] for prefix in spaces] + [list(cut) for cut in itertools.product(words, repeat=longest)]
    size = len(words) ** longest + 100
    config = SearchConfig(**{"beam": size, "n_best": 5, "max_length": longest, "length_penalty": 1.0} | settings)
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config)):
        target_BT = torch.full((len(whole), longest + 1), PAD)
        for place, tokens in enumerate(whole):
            target_BT[place, : len(tokens) + 1] = torch.tensor([BOS, *tokens])
        source, length = own(row, source_BS, length_B)
        forced = score_targets(model, source.expand(len(whole), -1), length.expand(len(whole)), target_BT)
        scored = [
            (ranked(one.score, one.weights_TS, config), one.tokens)
            for one in forced
            if one.weights_TS is not None
            and len(one.tokens) >= config.min_length
            and not (config.no_repeat_ngram and has_repeated_ngram(one.tokens, config.no_repeat_ngram))
        ]
        assert [found.tokens for found in hypotheses] == [tokens for _, tokens in sorted(scored, reverse=True)[:5]]


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
def test_hypotheses_are_in_the_order_of_the_ranking_score_that_they_carry(options: str) -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | SEARCH_OPTIONS[options])
    for row, found in enumerate(search(model, source_BS, length_B, config, keep_weights=True)):
        scores = [one.ranking_score for one in found]
        if config.sample:
            assert found and set(scores) == {None}
            continue
        wanted = [ranked(one.score, one.weights_TS[:, : length_B[row]], config) for one in found]  # type: ignore[index]
        assert scores == pytest.approx(wanted, rel=1e-6) and wanted == sorted(wanted, reverse=True)


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
@pytest.mark.parametrize("n_best", [1, 4])
def test_stopping_early_changes_nothing(options: str, n_best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": n_best, "max_length": 9} | SEARCH_OPTIONS[options])
    early = search(model, source_BS, length_B, config)
    monkeypatch.setattr("nmt.decoding.search.is_done", lambda beams, config: beams.max_length_B <= beams.step_B)
    for found, expected in zip(early, search(model, source_BS, length_B, config), strict=True):
        assert [(h.tokens, h.score) for h in found] == [(h.tokens, h.score) for h in expected]


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
def test_options_hold_for_each_sentence_whatever_is_beside_it(options: str) -> None:
    """Scores are those of forced decoding, samples and lengths those of the sentence alone, prefixes are kept."""
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | SEARCH_OPTIONS[options])
    prefixes = [[], [5], [7, 7], [4, 5, 6], [], [9]]
    together = search(model, source_BS, length_B, config, prefixes=prefixes)
    for row, hypotheses in enumerate(together):
        source, length = own(row, source_BS, length_B)
        [alone] = search(model, source, length, config, prefixes=prefixes[row : row + 1])
        assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]
        limit = min(config.max_length, int(config.max_ratio * length + 20) + len(prefixes[row]))
        least = min(max(config.min_length, math.ceil(config.min_ratio * length)), limit)
        for found, other in zip(hypotheses, alone, strict=True):
            [forced] = score_targets(model, source, length, torch.tensor([[BOS, *found.tokens]]))
            assert found.score == pytest.approx(other.score, abs=1e-9)
            assert found.score == pytest.approx(forced.score, abs=1e-9)
            assert found.tokens[: len(prefixes[row])] == prefixes[row]
            assert least <= len(found.tokens) <= limit and (found.tokens[-1] == EOS or len(found.tokens) == limit)
            if config.no_repeat_ngram:
                assert not has_repeated_ngram(found.tokens[max(0, len(prefixes[row]) - 1) :], config.no_repeat_ngram)


KINDS: dict[str, dict[str, Any]] = {
    "global": {"score": "additive"},
    "covered": {"score": "general", "coverage": True},
    "local_m": {"score": "dot", "window": "local_m", "heads": 2},
    "local_p": {"score": "additive", "window": "local_p", "coverage": True},
    "location": {"score": "location"},
    "none": {"score": "none"},
}


@pytest.mark.parametrize(
    ("kind", "options"), sorted({*itertools.product([*KINDS, "two models"], SEARCH_OPTIONS)} - {("none", "coverage")})
)
def test_sentences_that_take_the_places_of_others_are_translated_alike(
    options: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time, in any order of lengths, against all at once: tokens, scores, weights."""
    monkeypatch.setattr("nmt.decoding.search.REFILL_DIVISOR", 3)  # so that some wait until others are over too
    if kind == "two models":
        model: Any = Ensemble([sharpen(make_model()), sharpen(make_model("gnmt", "gru"))])
    else:
        model = sharpen(attentive("input feeding", list(KINDS).index(kind), **KINDS[kind]), 1.5)
    config = SearchConfig(**{"beam": 4, "n_best": 4, "max_length": 9} | SEARCH_OPTIONS[options])
    prefixes = [[], [5], [], [7, 7], [], [], [4, 5, 6], [], [9], [], [], []]
    falling, mixed = (12, 9, 8, 8, 5, 5, 3, 3, 2, 2, 1, 1), (2, 7, 1, 9, 3, 12, 5, 1, 8, 2, 6, 4)
    for lengths, counts in ((falling, (1, 5, 20)), (mixed, (3, 12))):
        source_BS, length_B, _ = make_ragged_batch(lengths)
        wanted = search(model, source_BS, length_B, config, keep_weights=True, prefixes=prefixes)
        assert len({len(hypotheses[0].tokens) for hypotheses in wanted}) > 2
        for max_active in counts:
            found = search(
                model, source_BS, length_B, config, keep_weights=True, prefixes=prefixes, max_active=max_active
            )
            for hypotheses, expected, length in zip(found, wanted, lengths, strict=True):
                assert [h.tokens for h in hypotheses] == [h.tokens for h in expected]
                assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], abs=1e-9)
                for one, other in zip(hypotheses, expected, strict=True):
                    assert (one.weights_TS is None) == (other.weights_TS is None) == (kind == "none")
                    if one.weights_TS is not None and other.weights_TS is not None:
                        torch.testing.assert_close(one.weights_TS[:, :length], other.weights_TS[:, :length])


def test_coverage_knows_padding_and_what_no_window_shows() -> None:
    """Ranks are those of forced decoding, in a batch and alone, with weights that are exactly 0."""
    config = SearchConfig(beam=4, n_best=4, max_length=7, coverage_penalty=0.3)
    source_BS, length_B, _ = make_ragged_batch((6, 3, 5, 1))
    for number, kind in enumerate(
        [
            {"score": "additive", "window": "local_p", "normalizer": "sparsemax"},
            {"score": "dot", "window": "local_m", "normalizer": "entmax15", "heads": 2},
        ]
    ):
        model = attentive("input feeding", number, **kind)
        for row, hypotheses in enumerate(search(model, source_BS, length_B, config)):
            source, length = own(row, source_BS, length_B)
            forced = [
                score_targets(model, source, length, torch.tensor([[BOS, *found.tokens]]))[0].weights_TS
                for found in hypotheses
            ]
            ranks = [
                ranked(found.score, weights, config)
                for found, weights in zip(hypotheses, forced, strict=True)
                if weights is not None
            ]
            assert ranks == sorted(ranks, reverse=True) and len(ranks) == 4
            [alone] = search(model, source, length, config)
            assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]


@pytest.mark.parametrize("options", SEARCH_OPTIONS)
def test_a_diverged_model_gives_something(options: str) -> None:
    model = make_model()
    with torch.no_grad():
        model.output.weight.fill_(float("nan"))
    source_BS, length_B, _ = make_ragged_batch()
    config = SearchConfig(**{"beam": 4, "n_best": 1, "max_length": 9} | SEARCH_OPTIONS[options])
    assert all(len(found) == 1 for found in search(model, source_BS, length_B, config))


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_without_end_is_cut_at_its_limit(ratio: float, beam: int) -> None:
    """Of the longest sentence at `max_length`, given tokens included; of others at a share of the source and 20."""
    model = make_model().eval()
    with torch.no_grad():
        model.output.bias[EOS] = -1e9
    lengths, prefixes = (45, 39, 6, 5, 1), [[], [4, 5, 6], [7, 7], [], [5]]
    source_BS, length_B, _ = make_ragged_batch(lengths)
    config = SearchConfig(beam=beam, max_length=100, max_ratio=ratio)
    found = [len(best.tokens) for [best] in search(model, source_BS, length_B, config, prefixes=prefixes)]
    assert found == ([42, 42, 25, 22, 21] if ratio == 0.5 else [100, 100, 34, 30, 23])


@pytest.mark.parametrize(
    ("longest", "width", "settings", "size"),
    [
        (9, 1, {}, 800),
        (9, 5, {}, 160),
        (10, 5, {}, 144),  # 145 fit: a multiple of SHAPE_MULTIPLE
        (9, 1, {"batch_tokens": 159}, 8),
        (9, 1, {"batch_tokens": 80}, 8),  # `</s>` counts
        (9, 1, {"batch_tokens": 79}, 7),
        (9, 2, {"batch_tokens": 79}, 3),
        (99, 5, {"batch_tokens": 10}, 1),
        (9, 5, {"batch_sentences": 3}, 3),
        (9, 5, {"batch_sentences": 13}, 13),
        (99, 5, {"batch_sentences": 13, "batch_tokens": 10}, 13),
    ],
)
def test_batches_are_as_large_as_they_may_be(longest: int, width: int, settings: dict[str, Any], size: int) -> None:
    assert choose_batch_size(longest, width, SearchConfig(**settings), torch.device("cpu")) == size


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_step_of_diverse_search_is_a_loop_over_groups(alpha: float) -> None:
    """Groups of two, some of whose hypotheses are finished and many of which take the same token."""
    generator, sentences, vocabulary = torch.Generator().manual_seed(1), 40, 9
    config = SearchConfig(beam=6, groups=3, diversity=0.7, length_penalty=alpha)
    logits_BKV = torch.randn(sentences, 6, vocabulary, generator=generator, dtype=torch.float64)
    logits_BKV += 2 * torch.randn(sentences, 1, vocabulary, generator=generator, dtype=torch.float64)
    logp_BKV = expected_log_probabilities(logits_BKV)
    finished_BK = torch.rand(sentences, 6, generator=generator) < 0.2
    beams = replace(
        init_beams(torch.full((sentences,), 5), 5, torch.full((sentences, 1), PAD), config, torch.float64),
        tokens_BKT=torch.randint(4, vocabulary, (sentences, 6, 4), generator=generator),
        score_BK=-3 * torch.rand(sentences, 6, generator=generator, dtype=torch.float64),
        length_BK=torch.where(finished_BK, 2, 3),
        finished_BK=finished_BK,
    )
    twice = 0
    grown, parent_BK = beam_step(logp_BKV, beams, config)
    for row in range(sentences):
        taken, wanted = [0] * vocabulary, []
        for first in (0, 2, 4):
            options = []
            for parent in (first, first + 1):
                score, length = beams.score_BK[row, parent].item(), int(beams.length_BK[row, parent])
                if finished_BK[row, parent]:
                    options.append((score / ((5 + length) / 6) ** alpha, parent, PAD, score))
                    continue
                for token, logp in enumerate(logp_BKV[row, parent].tolist()):
                    rank = (score + logp - 0.7 * taken[token]) / ((6 + length) / 6) ** alpha
                    options.append((rank, parent, token, score + logp))
            best = sorted(options, reverse=True)[:2]
            for _, _, token, _ in best:
                taken[token] += 1
            twice += best[0][2] == best[1][2] > PAD and first < 4
            wanted += best
        parents, tokens, scores = zip(*((parent, token, score) for _, parent, token, score in wanted), strict=True)
        assert parent_BK is not None and parent_BK[row].tolist() == list(parents)
        assert grown.tokens_BKT[row].tolist() == [
            [*beams.tokens_BKT[row, parent].tolist(), token] for parent, token in zip(parents, tokens, strict=True)
        ]
        assert grown.score_BK[row].tolist() == pytest.approx(scores, abs=1e-12)
    assert twice > 10


def test_groups_write_different_things() -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch()
    plain = SearchConfig(beam=4, n_best=4, max_length=8)
    for found, same in zip(
        search(model, source_BS, length_B, replace(plain, beam=2, n_best=2)),
        search(model, source_BS, length_B, replace(plain, groups=2, diversity=0.0)),
        strict=True,
    ):  # without diversity each group is a beam of its own
        assert [h.tokens for h in same] == [h.tokens for h in found for _ in range(2)]
    for hypotheses in search(model, source_BS, length_B, replace(plain, groups=4, diversity=1e6)):
        assert len({h.tokens[0] for h in hypotheses}) == 4


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7, "temperature": 2.0}]
)
def test_samples_come_as_often_as_they_should(settings: dict[str, Any]) -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch()
    many = 4000
    config = SearchConfig(n_best=many, max_length=1, sample=True, **settings)
    found = search(model, source_BS, length_B, config)
    again = search(model, source_BS, length_B, config)
    other = search(model, source_BS, length_B, replace(config, seed=2))
    for row, hypotheses in enumerate(found):
        source, length = own(row, source_BS, length_B)
        memory, state = model.start(source, length)
        features, _, _ = model.decode(torch.tensor([[BOS]]), state, memory)
        p = torch.softmax(expected_log_probabilities(model.logits(features[0, 0])) / config.temperature, 0)
        p, tokens = p.sort(descending=True)
        p = p[: config.top_k or None] / p[: config.top_k or None].sum()
        p = p[: int((p.cumsum(0) < config.top_p).sum()) + 1]
        p = p / p.sum()
        counts = torch.tensor([[h.tokens[0] for h in hypotheses].count(token) for token in tokens[: len(p)].tolist()])
        assert counts.sum() == many
        assert ((counts - many * p).abs() <= 5 * (many * p * (1 - p)).sqrt() + 1).all()
        assert [h.tokens for h in hypotheses] == [h.tokens for h in again[row]]
        assert [h.score for h in hypotheses] != [h.score for h in other[row]]


def test_several_models_are_one_by_the_mean_of_their_probabilities() -> None:
    source_BS, length_B, _ = make_ragged_batch()
    models = [
        sharpen(make_model(style, cell)) for style, cell in (("bahdanau", "lstm"), ("luong", "gru"), ("gnmt", "lstm"))
    ]
    config = SearchConfig(beam=3, n_best=3, max_length=7)
    alone, twice = (
        search(m, source_BS, length_B, config, keep_weights=True) for m in (models[0], Ensemble([models[0]] * 2))
    )
    for found, expected in zip(twice, alone, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens and one.score == pytest.approx(other.score, abs=1e-9)
            torch.testing.assert_close(one.weights_TS, other.weights_TS)
    for row, hypotheses in enumerate(search(Ensemble(models), source_BS, length_B, config)):
        for found in hypotheses:
            logp = []
            for model in models:
                memory, state = model.start(*own(row, source_BS, length_B))
                features, _, _ = model.decode(torch.tensor([[BOS, *found.tokens[:-1]]]), state, memory)
                steps = expected_log_probabilities(model.logits(features[0]))
                logp.append(steps.gather(1, torch.tensor(found.tokens).unsqueeze(1)))
            expected = torch.stack(logp).exp().mean(0).log().sum().item()
            assert found.score == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_beam_one_is_greedy(style: str) -> None:
    model = sharpen(make_model(style))
    source_BS, length_B, _ = make_ragged_batch()
    found = search(model, source_BS, length_B, SearchConfig(beam=1, max_length=9))
    for row, [hypothesis] in enumerate(found):
        memory, state = model.start(source_BS[row : row + 1, : length_B[row]], length_B[row : row + 1])
        tokens = [BOS]
        while tokens[-1] != EOS and len(tokens) <= 9:
            features, _, state = model.decode(torch.tensor([[tokens[-1]]]), state, memory)
            tokens.append(int(expected_log_probabilities(model.logits(features[0, 0])).argmax()))
        assert hypothesis.tokens == tokens[1:]


def test_hypotheses_are_distinct_ordered_and_without_specials() -> None:
    model = sharpen(make_model())
    source_BS, length_B, _ = make_ragged_batch()
    for alpha in (0.0, 1.0):
        config = SearchConfig(beam=6, n_best=6, max_length=8, length_penalty=alpha)
        for hypotheses in search(model, source_BS, length_B, config):
            ranks = [h.score / ((5 + len(h.tokens)) / 6) ** alpha for h in hypotheses]
            assert ranks == sorted(ranks, reverse=True)
            assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses) == 6
            assert not {PAD, BOS} & {token for h in hypotheses for token in h.tokens}
            assert all(EOS not in h.tokens[:-1] and len(h.tokens) <= 8 for h in hypotheses)
