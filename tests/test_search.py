"""Search against exhaustive enumeration, forced decoding and itself."""

import itertools

import pytest
import torch
from test_model import STYLES, model_of, ragged_batch

from nmt.config import BOS, EOS, PAD, SearchConfig
from nmt.model.seq2seq import Seq2Seq
from nmt.search import force, log_probabilities, search


def sharp(model: Seq2Seq, factor: float = 3.0) -> Seq2Seq:
    """Larger weights: a random model with opinions, whose hypotheses end at different lengths."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
        model.output.bias[EOS] += 4
    return model.eval()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_score_and_its_weights_equal_those_of_forced_decoding(style: str, beam: int) -> None:
    model = sharp(model_of(style))
    source_BS, length_B, _ = ragged_batch()
    config = SearchConfig(beam=beam, n_best=beam, max_length=9)
    ended = 0
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config, keep_weights=True)):
        assert hypotheses
        for found in hypotheses:
            if found.tokens[-1] != EOS:
                continue
            ended += 1
            own = slice(row, row + 1)
            [forced] = force(
                model, source_BS[own, : length_B[row]], length_B[own], torch.tensor([[BOS, *found.tokens]])
            )
            assert forced.score == pytest.approx(found.score, abs=1e-9)
            assert forced.tokens == found.tokens
            torch.testing.assert_close(found.weights_TS[:, : length_B[row]], forced.weights_TS)
            assert not found.weights_TS[:, length_B[row] :].any()
    assert ended >= 2


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_as_large_as_the_space_is_exhaustive(alpha: float) -> None:
    model = sharp(model_of(hidden=4, embed=4), 1.5)
    with torch.no_grad():
        model.output.bias[9:] = float("-inf")  # a vocabulary that can be enumerated
    source_BS, length_B, _ = ragged_batch()
    longest, words = 3, [1, *range(4, 9)]
    spaces = [prefix for n in range(longest) for prefix in itertools.product(words, repeat=n)]
    whole = [[*prefix, EOS] for prefix in spaces] + [list(cut) for cut in itertools.product(words, repeat=longest)]
    config = SearchConfig(beam=len(words) ** longest + 100, n_best=5, max_length=longest, length_penalty=alpha)
    for row, hypotheses in enumerate(search(model, source_BS, length_B, config)):
        memory, state = model.start(source_BS[row : row + 1], length_B[row : row + 1])
        scored = []
        for tokens in whole:
            features, _, _ = model.decode(torch.tensor([[BOS, *tokens[:-1]]]), state, memory)
            logp = (
                log_probabilities(model.logits(features[0])).gather(1, torch.tensor(tokens).unsqueeze(1)).sum().item()
            )
            scored.append((logp / ((5 + len(tokens)) / 6) ** alpha, tokens))
        expected = [tokens for _, tokens in sorted(scored, reverse=True)[:5]]
        assert [found.tokens for found in hypotheses] == expected


@pytest.mark.parametrize("style", STYLES)
def test_beam_one_is_greedy(style: str) -> None:
    model = sharp(model_of(style))
    source_BS, length_B, _ = ragged_batch()
    found = search(model, source_BS, length_B, SearchConfig(beam=1, max_length=9))
    for row, [hypothesis] in enumerate(found):
        memory, state = model.start(source_BS[row : row + 1, : length_B[row]], length_B[row : row + 1])
        tokens = [BOS]
        while tokens[-1] != EOS and len(tokens) <= 9:
            features, _, state = model.decode(torch.tensor([[tokens[-1]]]), state, memory)
            tokens.append(int(log_probabilities(model.logits(features[0, 0])).argmax()))
        assert hypothesis.tokens == tokens[1:]


@pytest.mark.parametrize("beam", [1, 3])
def test_neighbours_and_their_order_change_nothing(beam: int) -> None:
    model = sharp(model_of())
    source_BS, length_B, _ = ragged_batch((6, 3, 5, 1, 4, 2))
    config = SearchConfig(beam=beam, n_best=beam, max_length=12)
    together = search(model, source_BS, length_B, config)
    order = torch.tensor([4, 1, 5, 0, 3, 2])
    shuffled = search(model, source_BS[order], length_B[order], config)
    for place, row in enumerate(order.tolist()):
        [alone] = search(model, source_BS[row : row + 1, : length_B[row]], length_B[row : row + 1], config)
        for other in (together[row], alone):
            assert [h.tokens for h in other] == [h.tokens for h in shuffled[place]]
            assert [h.score for h in other] == pytest.approx([h.score for h in shuffled[place]], abs=1e-9)


def test_hypotheses_are_distinct_ordered_and_without_specials() -> None:
    model = sharp(model_of())
    source_BS, length_B, _ = ragged_batch()
    for alpha in (0.0, 1.0):
        config = SearchConfig(beam=6, n_best=6, max_length=8, length_penalty=alpha)
        for hypotheses in search(model, source_BS, length_B, config):
            ranks = [h.score / ((5 + len(h.tokens)) / 6) ** alpha for h in hypotheses]
            assert ranks == sorted(ranks, reverse=True)
            assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses) == 6
            assert not {PAD, BOS} & {token for h in hypotheses for token in h.tokens}
            assert all(EOS not in h.tokens[:-1] and len(h.tokens) <= 8 for h in hypotheses)
