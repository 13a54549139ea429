"""Search: greedy, beam and diverse beam search, sampling, and forced decoding of a given target.

It knows a model only by `dtype`, `start`, `decode` and `logits`, and by how rows of what they return are taken and put.
A step is a few named parts: `filter_logits`, `expand` or `sample` each hypothesis, `select` the best, see which are
`done`. A finished hypothesis stays in the beam while it is among the K best; a sentence is done when
none of its live hypotheses can still beat those that would be returned, so beam 1 is greedy search and stopping early
changes nothing. Where sentences are done, others take their places, so that nearly all steps are of full batches.

Shapes: B sentences, K hypotheses of each, C continuations of a hypothesis, N = B x K rows (sentence-major), S source
and T target positions, V vocabulary, P positions of a given beginning.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from nmt.config import EOS, PAD, SearchConfig
from nmt.data.batching import SHAPE_MULTIPLE
from nmt.decoding.hypotheses import ActiveBatch, Beams, History, Hypothesis, apply_penalties, begin, read_back
from nmt.model.attention import Weights
from nmt.model.kernels.linear import accumulation_dtype
from nmt.model.logits import log_probabilities, top_continuations

BUCKET = 16  # source positions
SHARE = 16  # where one in so many sentences is over, others take their places: each time costs some copies


class Model(Protocol):
    """Memory and state are the model's own affair; both have `select(rows)`, `put(rows, others)`, after which what it
    was called on is not used again, and `narrow(positions)`."""

    dtype: torch.dtype
    attends: bool
    reach: int | None  # how many positions of a source attention can reach; None: all

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Any, Any]: ...
    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> tuple[Tensor, Weights | None, Any]: ...
    def logits(self, features: Tensor) -> Tensor: ...


# ------------------------------------------------------------------------------------------------------------- a step
def filter_logits(logp_BKV: Tensor, beams: Beams, config: SearchConfig, given_BP: Tensor) -> Tensor:
    """The same with -inf for what may not be written now. Where nothing may be, a hypothesis may end. The last column
    of `given_BP` is PAD: nothing is given any more."""
    last = given_BP.shape[1] - 1
    giving = last > 0 and (logp_BKV.device.type != "cpu" or bool((beams.age_B < last).any()))  # a GPU need not wait
    if not (config.min_length or config.min_ratio or config.no_repeat_ngram or giving):
        return logp_BKV
    allowed_BKV = logp_BKV.clone()
    allowed_BKV[..., EOS].masked_fill_((beams.age_B + 1 < beams.least_B).unsqueeze(1), float("-inf"))
    if config.no_repeat_ngram:
        allowed_BKV.scatter_(2, repeating(beams.tokens_BKT, config.no_repeat_ngram), float("-inf"))
    stuck_BK = allowed_BKV.amax(2) == float("-inf")
    allowed_BKV[..., EOS] = torch.where(stuck_BK, logp_BKV[..., EOS], allowed_BKV[..., EOS])
    if giving:
        wanted_B11 = given_BP[beams.sentence_B, beams.age_B.clamp(max=last)].view(-1, 1, 1)
        others_BKV = torch.arange(logp_BKV.shape[2], device=logp_BKV.device) != wanted_B11
        given_BKV = logp_BKV.masked_fill(others_BKV, float("-inf"))
        allowed_BKV = torch.where(wanted_B11 == PAD, allowed_BKV, given_BKV)
    return allowed_BKV


def repeating(tokens_BKT: Tensor, n: int) -> Tensor:
    """The tokens with which a hypothesis would write n tokens that it has written before; PAD in between."""
    written = tokens_BKT.shape[2]
    if written < n:
        return tokens_BKT[:, :, :0]
    ngrams_BKTn = tokens_BKT.unfold(2, n, 1)
    again_BKT = (ngrams_BKTn[..., :-1] == tokens_BKT[:, :, None, written - n + 1 :]).all(3)
    return ngrams_BKTn[..., -1].where(again_BKT, PAD)


def cover(beams: Beams, weights: Weights) -> Beams:
    """Add a step's weights to what live hypotheses have covered: sum_s log min(sum_t a_ts, 1) (Wu et al. 2016, eq. 14),
    where no position counts for less than e^-20."""
    assert beams.coverage_BKS is not None
    step_BKS = weights.dense(beams.coverage_BKS.shape[2]).view(len(beams.coverage_BKS), -1, beams.coverage_BKS.shape[2])
    coverage_BKS = beams.coverage_BKS + step_BKS * ~beams.finished_BK.unsqueeze(2)
    covered_BK = coverage_BKS.clamp(max=1).log().clamp(min=-20).sum(2)
    return replace(beams, coverage_BKS=coverage_BKS, covered_BK=covered_BK)


def expand(logp_BKV: Tensor, beams: Beams, handicap_BV: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best continuations of each hypothesis: score_BKC, token_BKC, and what each is ranked lower by, None for
    nothing; of a finished hypothesis only itself."""
    choices = min(logp_BKV.shape[1], logp_BKV.shape[2])
    token_BKC = top_continuations(logp_BKV if handicap_BV is None else logp_BKV - handicap_BV.unsqueeze(1), choices)
    logp_BKC = logp_BKV.gather(2, token_BKC)
    finished_BK1 = beams.finished_BK.unsqueeze(2)
    logp_BKC[:, :, 0].masked_fill_(beams.finished_BK, 0)
    logp_BKC[:, :, 1:].masked_fill_(finished_BK1, float("-inf"))
    score_BKC = beams.score_BK.unsqueeze(2) + logp_BKC
    handicap_BKC = None
    if handicap_BV is not None:
        handicap_BKC = handicap_BV.unsqueeze(1).expand_as(logp_BKV).gather(2, token_BKC).masked_fill(finished_BK1, 0)
    return score_BKC, torch.where(finished_BK1, PAD, token_BKC), handicap_BKC


def select(
    score_BKC: Tensor, token_BKC: Tensor, handicap_BKC: Tensor | None, beams: Beams, config: SearchConfig
) -> tuple[Beams, Tensor]:
    """The K best of all continuations, and the hypothesis that each came from, parent_BK."""
    slots, choices = score_BKC.shape[1:]
    length_BK1 = (beams.length_BK + ~beams.finished_BK).unsqueeze(2)
    covered_BK1 = None if beams.covered_BK is None else beams.covered_BK.unsqueeze(2)
    ranked_BKC = apply_penalties(
        score_BKC if handicap_BKC is None else score_BKC - handicap_BKC, length_BK1, covered_BK1, config
    )
    best_BK = ranked_BKC.flatten(1).topk(slots, dim=1).indices
    parent_BK = best_BK // choices
    token_BK = token_BKC.flatten(1).gather(1, best_BK)
    score_BK = score_BKC.flatten(1).gather(1, best_BK)
    return append(beams, parent_BK, token_BK, score_BK), parent_BK


def append(beams: Beams, parent_BK: Tensor | None, token_BK: Tensor, score_BK: Tensor) -> Beams:
    """Each slot's new hypothesis: a token more for one of the old ones (its own where `parent_BK` is None), PAD for one
    that was finished."""
    if parent_BK is not None:
        rows_B1 = torch.arange(len(parent_BK), device=parent_BK.device).unsqueeze(1)
        beams = replace(
            beams,
            tokens_BKT=beams.tokens_BKT[rows_B1, parent_BK],
            length_BK=beams.length_BK.gather(1, parent_BK),
            finished_BK=beams.finished_BK.gather(1, parent_BK),
            covered_BK=None if beams.covered_BK is None else beams.covered_BK.gather(1, parent_BK),
            coverage_BKS=None if beams.coverage_BKS is None else beams.coverage_BKS[rows_B1, parent_BK],
        )
    return replace(
        beams,
        tokens_BKT=torch.cat([beams.tokens_BKT, token_BK.unsqueeze(2)], 2),
        score_BK=score_BK,
        length_BK=beams.length_BK + ~beams.finished_BK,
        finished_BK=beams.finished_BK | (token_BK == EOS),
        age_B=beams.age_B + 1,
    )


def beam_step(logp_BKV: Tensor, beams: Beams, config: SearchConfig) -> tuple[Beams, Tensor | None]:
    """A step of beam search, and the hypothesis that each came from, None where there is but one. Several groups go one
    after the other, and a token costs a group `diversity` for each hypothesis of an earlier group that takes it now
    (Vijayakumar et al. 2016, with Hamming diversity)."""
    if config.width == 1:
        logp_B1, token_B1 = logp_BKV.max(2)
        score_B1 = beams.score_BK + logp_B1.masked_fill(beams.finished_BK, 0)
        return append(beams, None, token_B1.masked_fill(beams.finished_BK, PAD), score_B1), None
    if config.groups == 1:
        return select(*expand(logp_BKV, beams), beams, config)
    size = config.width // config.groups
    taken_BV = torch.zeros_like(logp_BKV[:, 0])
    grown, parents = [], []
    for first in range(0, config.width, size):
        own = slice(first, first + size)
        group = beams.slots(own)
        group, parent_BK = select(*expand(logp_BKV[:, own], group, config.diversity * taken_BV), group, config)
        last_BK = group.tokens_BKT[:, :, -1]
        taken_BV.scatter_add_(1, last_BK, torch.ones_like(last_BK, dtype=taken_BV.dtype))
        grown.append(group)
        parents.append(parent_BK + first)
    together = (
        parts[0] if parts[0] is None or parts[0].dim() == 1 else torch.cat(parts, 1)
        for parts in zip(*(group.parts() for group in grown), strict=True)
    )
    return Beams(*together), torch.cat(parents, 1)


def sample(logp_BKV: Tensor, beams: Beams, config: SearchConfig, draw_BK: Tensor) -> Beams:
    """One token for each hypothesis, drawn from softmax(logp / temperature) among the `top_k` likeliest, and of these
    the likeliest that together have a probability of `top_p` (Holtzman et al. 2020). `draw_BK` is uniform in 0..1."""
    size = logp_BKV.shape[2]
    ranked_BKV, token_BKV = logp_BKV.topk(min(config.top_k or size, size))
    p_BKV = torch.softmax((ranked_BKV - ranked_BKV[:, :, :1]) / config.temperature, 2)
    before_BKV = p_BKV.cumsum(2) - p_BKV
    p_BKV = p_BKV.masked_fill(before_BKV >= config.top_p, 0)
    sums_BKV = p_BKV.cumsum(2)
    place_BK1 = (sums_BKV <= draw_BK.unsqueeze(2) * sums_BKV[:, :, -1:]).sum(2, keepdim=True)
    last_BK1 = (p_BKV > 0).sum(2, keepdim=True) - 1
    token_BK = token_BKV.gather(2, torch.minimum(place_BK1, last_BK1).clamp(min=0)).squeeze(2)
    logp_BK = logp_BKV.gather(2, token_BK.unsqueeze(2)).squeeze(2)
    score_BK = beams.score_BK + logp_BK.masked_fill(beams.finished_BK, 0)
    return append(beams, None, token_BK.masked_fill(beams.finished_BK, PAD), score_BK)


def done(beams: Beams, config: SearchConfig) -> Tensor:
    """done_B: none may grow, or no live hypothesis can still come before those that would be returned."""
    limit_B1 = beams.limit_B.unsqueeze(1)
    returned = config.width if config.groups > 1 or config.sample else config.n_best
    ranked_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.covered_BK, config)
    # Scores only fall, length penalties only grow, and coverage may become whole.
    bound_BK = apply_penalties(beams.score_BK, limit_B1, None, config)
    bound_B = bound_BK.masked_fill(beams.finished_BK, float("-inf")).amax(1)
    settled_B = beams.finished_BK[:, :returned].all(1) & (ranked_BK[:, :returned].amin(1) >= bound_B)
    return settled_B | (beams.limit_B <= beams.age_B)


def kept(live: int, device: torch.device) -> int:
    """With how many rows search goes on when so many sentences are live: none, or a multiple of `SHAPE_MULTIPLE`; on a
    GPU a power of two, for each new shape costs it far more than idle rows do."""
    return (
        1 << (live - 1).bit_length() if live and device.type == "cuda" else -(-live // SHAPE_MULTIPLE) * SHAPE_MULTIPLE
    )


def bucket(positions: int, device: torch.device) -> int:
    """How many source positions there are room for: on a GPU a multiple of `BUCKET`, for the same reason."""
    return -(-positions // BUCKET) * BUCKET if device.type == "cuda" else positions


class AsyncCounter:
    """Counts what is True. On a GPU it tells the count of the call before, which is known by now, so that nothing waits
    for the present one."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.counts: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def __call__(self, over_B: Tensor) -> int:
        if not self.late:
            return int(over_B.sum())
        count = over_B.sum().to("cpu", non_blocking=True)
        self.counts.append((count, torch.cuda.current_stream(over_B.device).record_event() if over_B.is_cuda else None))
        if len(self.counts) == 1:
            return 0
        count, copied = self.counts.pop(0)
        if copied is not None:
            copied.synchronize()
        return int(count)

    def forget(self) -> None:
        """What was counted has changed."""
        self.counts.clear()


# ----------------------------------------------------------------------------------------------------------- the loop
def draws(source_BS: Tensor, length_B: Tensor, steps: int, config: SearchConfig) -> Tensor:
    """Uniform numbers for `sample`, draw_BTK: functions of the seed and the sentence, whatever stands beside it."""
    sentences = (ids[:length] for ids, length in zip(source_BS.tolist(), length_B.tolist(), strict=True))
    found = [np.random.default_rng([config.seed, *ids]).random((steps, config.width)) for ids in sentences]
    return torch.from_numpy(np.stack(found))


def search(
    model: Model, source_BS: Tensor, length_B: Tensor, config: SearchConfig, keep_weights: bool = False,
    given: Sequence[Sequence[int]] | None = None, at_once: int | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """What `stream` yields, in the order of the sentences: for whoever has one batch, as tests and benchmarks."""
    found = dict(stream(model, source_BS, length_B, config, keep_weights, given, at_once))
    return [found[sentence] for sentence in range(len(found))]


@torch.inference_mode()
def stream(
    model: Model, source_BS: Tensor, length_B: Tensor, config: SearchConfig, keep_weights: bool = False,
    given: Sequence[Sequence[int]] | None = None, at_once: int | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:  # fmt: skip
    """The number of each sentence and its n best hypotheses, best first, as soon as it is over: by beam search, greedy
    search with `config.beam` = 1; or n samples.

    `given` are the tokens with which each sentence's hypotheses begin. So many sentences as `at_once` are in search at
    a time (None: all), in their order, which had better be by falling length: source positions that no sentence has any
    more are dropped.
    """
    sentences, device = len(source_BS), source_BS.device
    positions = bucket(source_BS.shape[1], device)
    source_BS = F.pad(source_BS, (0, positions - source_BS.shape[1]), value=PAD)
    at_once = min(at_once or sentences, sentences)
    beginnings = [torch.tensor(ids, dtype=torch.int64) for ids in given or [[]] * sentences]
    given_BP = F.pad(pad_sequence(beginnings, batch_first=True, padding_value=PAD), (0, 1), value=PAD).to(device)
    everyone = begin(length_B, positions, given_BP, config, model.dtype)
    shortest = int(everyone.limit_B.min())
    draw_BTK = None
    if config.sample:
        draw_BTK = draws(source_BS, length_B, int(everyone.limit_B.max()), config).to(
            device, accumulation_dtype(model.dtype)
        )

    history = History(torch.zeros(sentences, positions, dtype=accumulation_dtype(model.dtype), device=device), [])

    def encode(first: int, positions: int) -> ActiveBatch:
        """The next sentences, and the first token of their hypotheses."""
        rows_B = torch.arange(first, min(first + at_once, sentences), device=device)
        memory, state = model.start(source_BS[rows_B, :positions], length_B[rows_B])
        live = ActiveBatch(memory, state, everyone.of(rows_B).trim_source(positions))
        live, _, weights = advance(model, live, config, given_BP, draw_BTK)
        if keep_weights and weights is not None:
            history.first_BS[rows_B, :positions] = weights.dense(positions)[:, 0]
        live.beams.finished_BK |= done(live.beams, config).unsqueeze(1)
        return live

    tally = AsyncCounter(late=device.type == "cuda")
    live = waiting = encode(0, positions)
    entered = encoded = at_once  # so many sentences have come into search; so many have a memory
    steps = 1
    while len(live.beams.sentence_B):
        steps += 1
        live, parent_BK, weights = advance(model, live, config, given_BP, draw_BTK)
        if keep_weights and weights is not None:
            history.add(live.beams.sentence_B, parent_BK, weights.dense(positions))
        if device.type == "cpu" and steps < shortest and not live.beams.finished_BK.any():
            continue
        over_B = done(live.beams, config)
        live.beams.finished_BK |= over_B.unsqueeze(1)  # a sentence that is done but stays a while changes no more
        over = tally(over_B)
        if entered == sentences:
            if (rows := kept(len(over_B) - over, device)) < len(over_B):
                stay_B = over_B.int().argsort(stable=True)[:rows].sort().values
                leaves_B = torch.ones_like(over_B).index_fill(0, stay_B, False)
                yield from read_back(live.beams.of(leaves_B), history, config)
                live = live.of(stay_B)
                tally.forget()
        elif over >= max(1, at_once // SHARE):
            if entered == encoded:
                positions = bucket(int(torch.cat([length_B[live.beams.sentence_B], length_B[entered:]]).max()), device)
                live = waiting = live.trim_source(positions)  # those waiting have all come in: their memory is free
                waiting = encode(entered, positions)
                encoded += len(waiting.beams.sentence_B)
                del history.steps[: -int(live.beams.age_B.max())]
            rows_B = over_B.nonzero().squeeze(1)[: encoded - entered]
            yield from read_back(live.beams.of(rows_B), history, config)
            next_B = torch.arange(entered, entered + len(rows_B), device=device)
            live = live.scatter_rows(rows_B, waiting.of(next_B - waiting.beams.sentence_B[0]))
            entered += len(rows_B)
            tally.forget()


def advance(
    model: Model, live: ActiveBatch, config: SearchConfig, given_BP: Tensor, draw_BTK: Tensor | None
) -> tuple[ActiveBatch, Tensor | None, Weights | None]:
    """One token more for each hypothesis. Returns which hypothesis of before it continues, None for itself, and where
    those of before looked. Before the first token hypotheses are alike: a sentence has one row of `live.state`."""
    memory, state, beams = live
    sentences, slots = beams.score_BK.shape
    alike = beams.tokens_BKT.shape[2] == 1
    last_BK1 = beams.tokens_BKT[:, : 1 if alike else slots, -1:]
    features_NTD, weights, state = model.decode(last_BK1.flatten(0, 1), state, memory)
    logp_BKV = log_probabilities(model.logits(features_NTD[:, 0])).unflatten(0, (sentences, -1)).expand(-1, slots, -1)
    logp_BKV = filter_logits(logp_BKV, beams, config, given_BP)
    if config.coverage_penalty:
        assert weights is not None
        beams = cover(beams, weights)
    parent_BK = None
    if draw_BTK is not None:
        step_B = beams.age_B.clamp(max=draw_BTK.shape[1] - 1)  # older ones are over
        beams = sample(logp_BKV, beams, config, draw_BTK[beams.sentence_B, step_B])
    else:
        beams, parent_BK = beam_step(logp_BKV, beams, config)
    if alike and slots > 1:
        state = state.select(torch.arange(sentences, device=logp_BKV.device).repeat_interleave(slots))
    elif parent_BK is not None:
        first_B1 = torch.arange(sentences, device=logp_BKV.device).unsqueeze(1) * slots
        state = state.select((first_B1 + parent_BK).flatten())
    return ActiveBatch(memory, state, beams), parent_BK, weights


@torch.inference_mode()
def score_targets(
    model: Model, source_BS: Tensor, length_B: Tensor, target_BT: Tensor, keep_weights: bool = True
) -> list[Hypothesis]:
    """Score given targets, `<s> y_1 ... </s>` and padding, and align them: forced decoding."""
    memory, state = model.start(source_BS, length_B)
    features_BTD, weights, _ = model.decode(target_BT[:, :-1], state, memory)
    wanted_BT = target_BT[:, 1:]
    dense_BTS = weights.dense(source_BS.shape[1]).cpu() if keep_weights and weights is not None else None
    found = []
    for row, (features_TD, wanted_T) in enumerate(zip(features_BTD, wanted_BT, strict=True)):
        ids_T = wanted_T[wanted_T != PAD]
        logp_T1 = log_probabilities(model.logits(features_TD[: len(ids_T)])).gather(1, ids_T.unsqueeze(1))
        score = sum(logp_T1.flatten().tolist())  # in fp64, as in search
        weights_TS = None if dense_BTS is None else dense_BTS[row, : len(ids_T)]
        found.append(Hypothesis(ids_T.tolist(), score, weights_TS))
    return found
