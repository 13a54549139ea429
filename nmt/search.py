"""Search: greedy, beam and diverse beam search, sampling, and forced decoding of a given target.

It knows a model only by `dtype`, `start`, `decode`, `logits`, and what they return by `select`. A step is a few named
parts: `forbid` what may not be written, `expand` or `sample` each hypothesis, `select` the best, find out who is
`done`. A finished hypothesis keeps its slot; a sentence is done when none of its live hypotheses can still beat those
that would be returned, so beam 1 is greedy search and stopping early changes nothing.

Shapes: B sentences, K hypotheses of each, C continuations of a hypothesis, N = B x K rows (sentence-major), S source
and T target positions, V vocabulary, P positions of a given beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmt.config import BOS, EOS, PAD, STEP, SearchConfig
from nmt.model.attention import Weights
from nmt.model.logits import Logits, largest, survey, top
from nmt.model.recurrence import wide


class Model(Protocol):
    """Memory and state are the model's own affair; both have `select(rows)`."""

    dtype: torch.dtype

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Any, Any]: ...
    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> tuple[Tensor, Weights | None, Any]: ...
    def logits(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: list[int]  # with `</s>`, unless cut at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights, a row for each token; None where not kept, or without attention


@dataclass(slots=True)
class Beams:
    """The hypotheses of the sentences still in search, best first in each sentence (in each group of it)."""

    tokens_BKT: Tensor  # `<s>` and what was written
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens so far, `</s>` included
    finished_BK: Tensor
    covered_BK: Tensor | None  # the logarithms in the coverage penalty, 0 at most; None without it
    coverage_BKS: Tensor | None  # the weight that each source position has had
    least_B: Tensor  # the fewest tokens that a sentence may have, `</s>` included
    limit_B: Tensor  # the most
    sentence_B: Tensor  # which row of the whole batch each sentence is

    def of(self, rows_B: Tensor) -> "Beams":
        """Those of some sentences."""
        parts: Any = (None if part is None else part[rows_B] for part in self.parts())
        return Beams(*parts)

    def slots(self, own: slice) -> "Beams":
        """Some hypotheses of every sentence."""
        return Beams(*(part if part is None or part.dim() == 1 else part[:, own] for part in self.parts()))

    def parts(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step appended, kept until hypotheses are read back; rows are slots of the whole batch."""

    parent_N: Tensor
    weights_NS: Tensor


def rank(score: Tensor, length: Tensor, covered: Tensor | None, config: SearchConfig) -> Tensor:
    """What is compared: log P / lp + cp (Wu et al. 2016, eq. 14), where lp is ((5 + n) / 6)^alpha or n^alpha."""
    base = (5 + length) / 6 if config.penalty == "gnmt" else length.clamp(min=1)
    ranked = score / base**config.length_penalty
    return ranked if covered is None else ranked + config.coverage_penalty * covered


# ------------------------------------------------------------------------------------------------------------- a step
def forbid(ahead: Logits, beams: Beams, config: SearchConfig, given_BP: Tensor) -> Logits:
    """The same with -inf for what may not be written now. Where nothing may be, a hypothesis may end."""
    written = beams.tokens_BKT.shape[2] - 1
    if not (config.min_length or config.min_ratio or config.no_repeat_ngram or written < given_BP.shape[1]):
        return ahead
    logits_BKV = ahead.logits_BKV
    allowed_BKV = logits_BKV.clone()
    allowed_BKV[..., EOS].masked_fill_((written + 1 < beams.least_B).unsqueeze(1), float("-inf"))
    if config.no_repeat_ngram:
        allowed_BKV.scatter_(2, repeating(beams.tokens_BKT[:, :, 1:], config.no_repeat_ngram), float("-inf"))
    stuck_BK = allowed_BKV.amax(2) == float("-inf")
    allowed_BKV[..., EOS] = torch.where(stuck_BK, logits_BKV[..., EOS], allowed_BKV[..., EOS])
    if written < given_BP.shape[1]:
        wanted_B11 = given_BP[:, written].view(-1, 1, 1)
        others_BKV = torch.arange(logits_BKV.shape[2], device=logits_BKV.device) != wanted_B11
        given_BKV = logits_BKV.masked_fill(others_BKV, float("-inf"))
        allowed_BKV = torch.where(wanted_B11 == PAD, allowed_BKV, given_BKV)
    return Logits(allowed_BKV, ahead.lse_BK, largest(allowed_BKV))


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
    step_BKS = weights.dense(beams.coverage_BKS.shape[2]).view(beams.coverage_BKS.shape)
    coverage_BKS = beams.coverage_BKS + step_BKS * ~beams.finished_BK.unsqueeze(2)
    covered_BK = coverage_BKS.clamp(max=1).log().clamp(min=-20).sum(2)
    return replace(beams, coverage_BKS=coverage_BKS, covered_BK=covered_BK)


def expand(ahead: Logits, beams: Beams, handicap_BV: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best continuations of each hypothesis: score_BKC, token_BKC, and what each is ranked lower by, None for
    nothing; of a finished hypothesis only itself."""
    logits_BKV, lse_BK, largest_BKG = ahead
    choices = min(logits_BKV.shape[1], logits_BKV.shape[2])
    if handicap_BV is None:
        token_BKC = top(logits_BKV, choices, largest_BKG)
    else:
        token_BKC = (logits_BKV - handicap_BV.unsqueeze(1)).topk(choices).indices
    logp_BKC = logits_BKV.gather(2, token_BKC) - lse_BK.unsqueeze(2)
    finished_BK1 = beams.finished_BK.unsqueeze(2)
    logp_BKC[:, :, 0].masked_fill_(beams.finished_BK, 0)
    logp_BKC[:, :, 1:].masked_fill_(finished_BK1, float("-inf"))
    score_BKC = beams.score_BK.unsqueeze(2) + logp_BKC
    handicap_BKC = None
    if handicap_BV is not None:
        handicap_BKC = handicap_BV.unsqueeze(1).expand_as(logits_BKV).gather(2, token_BKC).masked_fill(finished_BK1, 0)
    return score_BKC, torch.where(finished_BK1, PAD, token_BKC), handicap_BKC


def select(
    score_BKC: Tensor, token_BKC: Tensor, handicap_BKC: Tensor | None, beams: Beams, config: SearchConfig
) -> tuple[Beams, Tensor]:
    """The K best of all continuations, and the hypothesis that each came from, parent_BK."""
    slots, choices = score_BKC.shape[1:]
    length_BK1 = (beams.length_BK + ~beams.finished_BK).unsqueeze(2)
    covered_BK1 = None if beams.covered_BK is None else beams.covered_BK.unsqueeze(2)
    ranked_BKC = rank(score_BKC if handicap_BKC is None else score_BKC - handicap_BKC, length_BK1, covered_BK1, config)
    best_BK = ranked_BKC.flatten(1).topk(slots, dim=1).indices
    parent_BK = best_BK // choices
    token_BK = token_BKC.flatten(1).gather(1, best_BK)
    score_BK = score_BKC.flatten(1).gather(1, best_BK)
    return append(beams, parent_BK, token_BK, score_BK), parent_BK


def append(beams: Beams, parent_BK: Tensor, token_BK: Tensor, score_BK: Tensor) -> Beams:
    """Each slot's new hypothesis: a token more for one of the old ones, PAD for one that was finished."""
    rows_B1 = torch.arange(len(parent_BK), device=parent_BK.device).unsqueeze(1)
    finished_BK = beams.finished_BK.gather(1, parent_BK)
    return replace(
        beams,
        tokens_BKT=torch.cat([beams.tokens_BKT[rows_B1, parent_BK], token_BK.unsqueeze(2)], 2),
        score_BK=score_BK,
        length_BK=beams.length_BK.gather(1, parent_BK) + ~finished_BK,
        finished_BK=finished_BK | (token_BK == EOS),
        covered_BK=None if beams.covered_BK is None else beams.covered_BK.gather(1, parent_BK),
        coverage_BKS=None if beams.coverage_BKS is None else beams.coverage_BKS[rows_B1, parent_BK],
    )


def grow(ahead: Logits, beams: Beams, config: SearchConfig) -> tuple[Beams, Tensor]:
    """A step of beam search. With several groups one after the other, and a token costs a group `diversity` for each
    hypothesis of an earlier group that takes it now (Vijayakumar et al. 2016, with Hamming diversity)."""
    if config.groups == 1:
        return select(*expand(ahead, beams), beams, config)
    size = config.width // config.groups
    taken_BV = torch.zeros_like(ahead.logits_BKV[:, 0], dtype=ahead.lse_BK.dtype)
    grown, parents = [], []
    for first in range(0, config.width, size):
        own = slice(first, first + size)
        group = beams.slots(own)
        group, parent_BK = select(*expand(ahead.of(own), group, config.diversity * taken_BV), group, config)
        last_BK = group.tokens_BKT[:, :, -1]
        taken_BV.scatter_add_(1, last_BK, torch.ones_like(last_BK, dtype=taken_BV.dtype))
        grown.append(group)
        parents.append(parent_BK + first)
    together = (
        parts[0] if parts[0] is None or parts[0].dim() == 1 else torch.cat(parts, 1)
        for parts in zip(*(group.parts() for group in grown), strict=True)
    )
    return Beams(*together), torch.cat(parents, 1)


def sample(ahead: Logits, beams: Beams, config: SearchConfig, draw_BK: Tensor) -> tuple[Beams, Tensor]:
    """One token for each hypothesis, drawn from softmax(logp / temperature) among the `top_k` likeliest, and of these
    the likeliest that together have a probability of `top_p` (Holtzman et al. 2020). `draw_BK` is uniform in 0..1."""
    logits_BKV, lse_BK, _ = ahead
    size = logits_BKV.shape[2]
    ranked_BKV, token_BKV = logits_BKV.to(lse_BK.dtype).topk(min(config.top_k or size, size))
    p_BKV = torch.softmax((ranked_BKV - ranked_BKV[:, :, :1]) / config.temperature, 2)
    before_BKV = p_BKV.cumsum(2) - p_BKV
    p_BKV = p_BKV.masked_fill(before_BKV >= config.top_p, 0)
    sums_BKV = p_BKV.cumsum(2)
    place_BK1 = (sums_BKV <= draw_BK.unsqueeze(2) * sums_BKV[:, :, -1:]).sum(2, keepdim=True)
    last_BK1 = (p_BKV > 0).sum(2, keepdim=True) - 1
    token_BK = token_BKV.gather(2, torch.minimum(place_BK1, last_BK1).clamp(min=0)).squeeze(2)
    logp_BK = logits_BKV.gather(2, token_BK.unsqueeze(2)).squeeze(2) - lse_BK
    itself_BK = torch.arange(draw_BK.shape[1], device=draw_BK.device).expand_as(draw_BK)
    score_BK = beams.score_BK + logp_BK.masked_fill(beams.finished_BK, 0)
    return append(beams, itself_BK, token_BK.masked_fill(beams.finished_BK, PAD), score_BK), itself_BK


def done(beams: Beams, config: SearchConfig) -> Tensor:
    """done_B: none may grow, or no live hypothesis can still come before those that would be returned."""
    limit_B1 = beams.limit_B.unsqueeze(1)
    kept = config.width if config.groups > 1 or config.sample else config.n_best
    ranked_BK = rank(beams.score_BK, beams.length_BK, beams.covered_BK, config)
    # Scores only fall, length penalties only grow, and coverage may become whole.
    bound_BK = rank(beams.score_BK, limit_B1, None, config)
    bound_B = bound_BK.masked_fill(beams.finished_BK, float("-inf")).amax(1)
    settled_B = beams.finished_BK[:, :kept].all(1) & (ranked_BK[:, :kept].amin(1) >= bound_B)
    return settled_B | (beams.limit_B < beams.tokens_BKT.shape[2])


def staying(over_B: Tensor) -> Tensor | None:
    """The rows that go on: those that are not over, filled up to a multiple of `STEP`, none when all are over. None:
    all of them."""
    live = int((~over_B).sum())
    kept = -(-live // STEP) * STEP
    return None if kept >= len(over_B) else over_B.int().argsort(stable=True)[:kept].sort().values


# ----------------------------------------------------------------------------------------------------------- the loop
def begin(length_B: Tensor, positions: int, given_BP: Tensor, config: SearchConfig, dtype: torch.dtype) -> Beams:
    """Before the first token: all slots of a group are alike, so one of them counts; of samples each does."""
    slots = len(length_B), config.width
    on: dict[str, Any] = {"device": length_B.device}
    # Sums of many terms; Apple's GPUs have no fp64.
    score_BK = torch.zeros(slots, dtype=wide(dtype) if length_B.device.type == "mps" else torch.float64, **on)
    if not config.sample:
        score_BK[:, torch.arange(config.width, **on) % (config.width // config.groups) > 0] = float("-inf")
    longest_B = (config.max_ratio * length_B + 20).clamp(max=config.max_length).long() + (given_BP != PAD).sum(1)
    least_B = (config.min_ratio * length_B).clamp(max=config.max_length).ceil().long().clamp(min=config.min_length)
    limit_B = longest_B.maximum(least_B).clamp(max=config.max_length)
    covered_BK = coverage_BKS = None
    if config.coverage_penalty:
        covered_BK = torch.zeros(slots, dtype=wide(dtype), **on)
        padding_BS = torch.arange(positions, **on) >= length_B.unsqueeze(1)  # covered from the first
        coverage_BKS = padding_BS.to(wide(dtype)).unsqueeze(1).repeat(1, config.width, 1)
    return Beams(
        tokens_BKT=torch.full((*slots, 1), BOS, **on),
        score_BK=score_BK,
        length_BK=torch.zeros(slots, dtype=torch.int64, **on),
        finished_BK=torch.zeros(slots, dtype=torch.bool, **on),
        covered_BK=covered_BK,
        coverage_BKS=coverage_BKS,
        least_B=least_B,
        limit_B=limit_B,
        sentence_B=torch.arange(len(length_B), **on),
    )


def draws(source_BS: Tensor, length_B: Tensor, steps: int, config: SearchConfig) -> Tensor:
    """Uniform numbers for `sample`, draw_BTK: functions of the seed and the sentence, whatever stands beside it."""
    sentences = (ids[:length] for ids, length in zip(source_BS.tolist(), length_B.tolist(), strict=True))
    found = [np.random.default_rng([config.seed, *ids]).random((steps, config.width)) for ids in sentences]
    return torch.from_numpy(np.stack(found))


@torch.inference_mode()
def search(
    model: Model, source_BS: Tensor, length_B: Tensor, config: SearchConfig, keep_weights: bool = False,
    given: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """The n best hypotheses of each sentence, best first: by beam search, greedy search with `config.beam` = 1; or n
    samples. `given` are the tokens with which each sentence's hypotheses begin."""
    sentences, positions, device = *source_BS.shape, source_BS.device
    beginnings = [torch.tensor(ids, dtype=torch.int64) for ids in given or [[]] * sentences]
    given_BP = pad_sequence(beginnings, batch_first=True, padding_value=PAD).to(device)
    memory, state = model.start(source_BS, length_B)
    state = state.select(torch.arange(sentences, device=device).repeat_interleave(config.width))
    beams = begin(length_B, positions, given_BP, config, model.dtype)
    draw_BTK = None
    if config.sample:
        draw_BTK = draws(source_BS, length_B, int(beams.limit_B.max()), config).to(device, wide(model.dtype))
    shortest = int(beams.limit_B.min())
    slots_K = torch.arange(config.width, device=device)
    history: list[Step] = []
    over: list[Beams] = []
    while len(beams.sentence_B):
        step = beams.tokens_BKT.shape[2] - 1
        features_NTD, weights, state = model.decode(beams.tokens_BKT[:, :, -1:].flatten(0, 1), state, memory)
        ahead = survey(model.logits(features_NTD[:, 0]), config.width)
        ahead = forbid(ahead, beams, config, given_BP[beams.sentence_B])
        if config.coverage_penalty:
            assert weights is not None
            beams = cover(beams, weights)
        if draw_BTK is not None:
            beams, parent_BK = sample(ahead, beams, config, draw_BTK[beams.sentence_B, step])
        else:
            beams, parent_BK = grow(ahead, beams, config)
        if keep_weights and weights is not None:
            slots_BK = beams.sentence_B.unsqueeze(1) * config.width + slots_K  # of the whole batch
            history.append(record(slots_BK, parent_BK, weights, sentences, positions))
        rows_BK = torch.arange(len(parent_BK), device=device).unsqueeze(1) * config.width + parent_BK
        if step + 1 >= shortest or beams.finished_BK.any():
            over_B = done(beams, config)
            beams.finished_BK |= over_B.unsqueeze(1)  # a sentence that is done but stays a while changes no more
            if (stay_B := staying(over_B)) is not None:
                over.append(beams.of(torch.ones_like(over_B).index_fill(0, stay_B, False)))
                memory, beams, rows_BK = memory.select(stay_B), beams.of(stay_B), rows_BK[stay_B]
        if (config.width > 1 and not config.sample) or len(rows_BK) < len(parent_BK):
            state = state.select(rows_BK.flatten())
    return read_back(over, history, config)


def record(rows_BK: Tensor, parent_BK: Tensor, weights: Weights, sentences: int, positions: int) -> Step:
    """One step of the sentences in search, laid out over the slots of the whole batch."""
    slots = sentences * rows_BK.shape[1]
    parent_N = torch.arange(slots, device=rows_BK.device)
    parent_N[rows_BK.flatten()] = rows_BK.gather(1, parent_BK).flatten()
    dense_NS = weights.dense(positions)[:, 0]
    weights_NS = dense_NS.new_zeros(slots, positions)
    weights_NS[rows_BK.flatten()] = dense_NS
    return Step(parent_N, weights_NS)


def trace(history: list[Step]) -> Tensor:
    """weights_NTS of what each slot ended with: its parents are followed from the last step to the first."""
    slot_N = torch.arange(len(history[0].parent_N), device=history[0].parent_N.device)
    found = []
    for step in reversed(history):
        slot_N = step.parent_N[slot_N]
        found.append(step.weights_NS[slot_N])
    return torch.stack(found[::-1], 1).cpu()


def read_back(over: list[Beams], history: list[Step], config: SearchConfig) -> list[list[Hypothesis]]:
    """The n best hypotheses of each sentence, in order, fewer where there were fewer distinct ones than slots; samples
    as they were drawn."""
    weights_NTS = trace(history) if history else None
    found: dict[int, list[Hypothesis]] = {}
    for beams in over:
        ranked_BK = rank(beams.score_BK, beams.length_BK, beams.covered_BK, config)
        if config.sample:
            ranked_BK = torch.zeros_like(ranked_BK)
        order_BK = ranked_BK.argsort(dim=1, descending=True, stable=True)[:, : config.n_best]
        rows_B1 = torch.arange(len(order_BK), device=order_BK.device).unsqueeze(1)
        columns = beams.sentence_B, order_BK, beams.tokens_BKT[rows_B1, order_BK, 1:], beams.score_BK[rows_B1, order_BK]
        for sentence, *hypotheses in zip(*(column.tolist() for column in columns), strict=True):
            found[sentence] = []
            for slot, tokens, score in zip(*hypotheses, strict=True):
                if score == float("-inf"):
                    continue
                ids = [token for token in tokens if token != PAD]
                rows_TS = None if weights_NTS is None else weights_NTS[sentence * config.width + slot, : len(ids)]
                found[sentence].append(Hypothesis(ids, score, rows_TS))
    return [found[sentence] for sentence in range(len(found))]


@torch.inference_mode()
def force(model: Model, source_BS: Tensor, length_B: Tensor, target_BT: Tensor) -> list[Hypothesis]:
    """Score given targets, `<s> y_1 ... </s>` and padding, and align them: forced decoding."""
    memory, state = model.start(source_BS, length_B)
    features_BTD, weights, _ = model.decode(target_BT[:, :-1], state, memory)
    wanted_BT = target_BT[:, 1:]
    dense_BTS = None if weights is None else weights.dense(source_BS.shape[1]).cpu()
    found = []
    for row, (features_TD, wanted_T) in enumerate(zip(features_BTD, wanted_BT, strict=True)):
        ids_T = wanted_T[wanted_T != PAD]
        logits_T1V, lse_T1, _ = survey(model.logits(features_TD[: len(ids_T)]), 1)
        logp_T1 = logits_T1V.squeeze(1).gather(1, ids_T.unsqueeze(1)) - lse_T1
        score = sum(logp_T1.flatten().tolist())  # in fp64, as in search
        weights_TS = None if dense_BTS is None else dense_BTS[row, : len(ids_T)]
        found.append(Hypothesis(ids_T.tolist(), score, weights_TS))
    return found
