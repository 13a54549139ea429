"""Search: greedy and beam search, and forced decoding of a given target.

It knows a model only by `start`, `decode`, `logits`, and what they return by `select`. A finished hypothesis keeps its
slot; a sentence is done when none of its live hypotheses can still beat those that would be returned, so beam 1 is
greedy search and stopping early changes nothing.

Shapes: B sentences, K hypotheses of each, C continuations of a hypothesis, N = B x K rows (sentence-major), S source
and T target positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nmt.config import BOS, EOS, PAD, STEP, SearchConfig
from nmt.model.attention import Memory, Weights
from nmt.model.decoder import DecoderState


class Model(Protocol):
    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Memory, DecoderState]: ...
    def decode(
        self, tokens_NT: Tensor, state: DecoderState, memory: Memory
    ) -> tuple[Tensor, Weights | None, DecoderState]: ...
    def logits(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: list[int]  # with `</s>`, unless cut at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights, a row for each token; None where not kept, or without attention


@dataclass(slots=True)
class Beams:
    """The hypotheses of the sentences still in search, best first in each sentence."""

    token_BK: Tensor  # the last token
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens so far, `</s>` included
    finished_BK: Tensor
    limit_B: Tensor  # the most tokens that a sentence may have
    sentence_B: Tensor  # which row of the whole batch each sentence is


@dataclass(frozen=True, slots=True)
class Step:
    """What one step appended, kept until hypotheses are read back; rows are slots of the whole batch."""

    parent_N: Tensor
    token_N: Tensor
    weights_NS: Tensor | None


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax in fp32 at least; `<s>` and padding can never be chosen."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    logp[..., [PAD, BOS]] = float("-inf")
    return logp


def length_penalty(length: Tensor, alpha: float) -> Tensor:
    """((5 + length) / 6)^alpha, Wu et al. 2016, eq. 14; a score is divided by it."""
    return ((5 + length) / 6) ** alpha


def expand(logp_BKV: Tensor, beams: Beams) -> tuple[Tensor, Tensor]:
    """The best continuations of each hypothesis, score_BKC and token_BKC; of a finished one only itself."""
    logp_BKC, token_BKC = logp_BKV.topk(min(logp_BKV.shape[1], logp_BKV.shape[2]), dim=2)
    finished_BK1 = beams.finished_BK.unsqueeze(2)
    itself_C = torch.full_like(logp_BKC[0, 0], float("-inf"))
    itself_C[0] = 0
    score_BKC = beams.score_BK.unsqueeze(2) + torch.where(finished_BK1, itself_C, logp_BKC)
    return score_BKC, torch.where(finished_BK1, PAD, token_BKC)


def select(score_BKC: Tensor, token_BKC: Tensor, beams: Beams, alpha: float) -> tuple[Beams, Tensor]:
    """The K best of all continuations by penalised score, and the hypothesis that each came from, parent_BK."""
    slots, choices = score_BKC.shape[1:]
    length_BK = beams.length_BK + ~beams.finished_BK
    ranked_BX = (score_BKC / length_penalty(length_BK, alpha).unsqueeze(2)).flatten(1)
    best_BK = ranked_BX.topk(slots, dim=1).indices
    parent_BK = best_BK // choices
    token_BK = token_BKC.flatten(1).gather(1, best_BK)
    finished_BK = beams.finished_BK.gather(1, parent_BK) | (token_BK == EOS)
    score_BK = score_BKC.flatten(1).gather(1, best_BK)
    length_BK = length_BK.gather(1, parent_BK)
    return Beams(token_BK, score_BK, length_BK, finished_BK, beams.limit_B, beams.sentence_B), parent_BK


def done(beams: Beams, steps: int, config: SearchConfig) -> Tensor:
    """done_B: none may grow, or no live hypothesis can still come before those that would be returned."""
    limit_B1 = beams.limit_B.unsqueeze(1)
    ranked_BK = beams.score_BK / length_penalty(beams.length_BK, config.length_penalty)
    bound_BK = beams.score_BK / length_penalty(limit_B1, config.length_penalty)  # scores only fall, penalties grow
    bound_B = bound_BK.masked_fill(beams.finished_BK, float("-inf")).amax(1)
    kept = slice(0, config.n_best)
    settled_B = beams.finished_BK[:, kept].all(1) & (ranked_BK[:, kept].amin(1) >= bound_B)
    return settled_B | (beams.limit_B <= steps)


def staying(over_B: Tensor) -> Tensor:
    """The rows that go on: those that are not over, filled up to a multiple of `STEP`, none when all are over."""
    live = int((~over_B).sum())
    return over_B.int().argsort(stable=True)[: -(-live // STEP) * STEP].sort().values


@torch.inference_mode()
def search(
    model: Model, source_BS: Tensor, length_B: Tensor, config: SearchConfig, keep_weights: bool = False
) -> list[list[Hypothesis]]:
    """Beam search; with `config.beam` = 1 greedy search. Returns the n best hypotheses of each sentence, best first."""
    sentences, width, device = len(source_BS), config.beam, source_BS.device
    memory, state = model.start(source_BS, length_B)
    state = state.select(torch.arange(sentences, device=device).repeat_interleave(width))
    score_BK = torch.zeros(
        sentences, width, device=device, dtype=torch.promote_types(memory.values_BHSM.dtype, torch.float32)
    )
    score_BK[:, 1:] = float("-inf")  # all slots begin alike: one of them counts
    beams = Beams(
        token_BK=torch.full((sentences, width), BOS, device=device),
        score_BK=score_BK,
        length_BK=torch.zeros(sentences, width, dtype=torch.int64, device=device),
        finished_BK=torch.zeros(sentences, width, dtype=torch.bool, device=device),
        limit_B=(2 * length_B + 20).clamp(max=config.max_length),
        sentence_B=torch.arange(sentences, device=device),
    )
    slots_K = torch.arange(width, device=device)
    history: list[Step] = []
    final_score_BK = score_BK.clone()
    while len(beams.sentence_B):
        features_NTD, weights, state = model.decode(beams.token_BK.view(-1, 1), state, memory)
        logp_BKV = log_probabilities(model.logits(features_NTD[:, 0])).view(*beams.token_BK.shape, -1)
        rows_BK = beams.sentence_B.unsqueeze(1) * width + slots_K  # slots of the whole batch
        beams, parent_BK = select(*expand(logp_BKV, beams), beams, config.length_penalty)
        history.append(
            record(rows_BK, parent_BK, beams.token_BK, weights if keep_weights else None, sentences, source_BS.shape[1])
        )
        final_score_BK[beams.sentence_B] = beams.score_BK
        over_B = done(beams, len(history), config)
        beams.finished_BK |= over_B.unsqueeze(1)  # a sentence that is done but stays a while changes no more
        offsets_B1 = torch.arange(len(over_B), device=device).unsqueeze(1) * width
        stay_B = staying(over_B)
        if len(stay_B) < len(over_B):
            memory = memory.select(stay_B)
            beams = Beams(*(getattr(beams, name)[stay_B] for name in Beams.__slots__))
            parent_BK, offsets_B1 = parent_BK[stay_B], offsets_B1[stay_B]
        state = state.select((offsets_B1 + parent_BK).flatten())
    return read_back(history, final_score_BK, config.n_best)


def record(
    rows_BK: Tensor, parent_BK: Tensor, token_BK: Tensor, weights: Weights | None, sentences: int, positions: int
) -> Step:
    """One step of the sentences in search, laid out over the slots of the whole batch."""
    slots = sentences * rows_BK.shape[1]
    parent_N = torch.arange(slots, device=rows_BK.device)
    parent_N[rows_BK.flatten()] = rows_BK.gather(1, parent_BK).flatten()
    token_N = torch.full((slots,), PAD, device=rows_BK.device)
    token_N[rows_BK.flatten()] = token_BK.flatten()
    if weights is None:
        return Step(parent_N, token_N, None)
    dense_NS = weights.dense(positions)[:, 0]
    weights_NS = dense_NS.new_zeros(slots, positions)
    weights_NS[rows_BK.flatten()] = dense_NS
    return Step(parent_N, token_N, weights_NS)


def read_back(history: list[Step], score_BK: Tensor, n_best: int) -> list[list[Hypothesis]]:
    """Follow each slot's parents from the last step to the first."""
    slot_N = torch.arange(score_BK.numel(), device=score_BK.device)
    tokens, weights = [], []
    for step in reversed(history):
        tokens.append(step.token_N[slot_N])
        slot_N = step.parent_N[slot_N]
        if step.weights_NS is not None:
            weights.append(step.weights_NS[slot_N])
    tokens_NT = torch.stack(tokens[::-1], 1).cpu()
    weights_NTS = torch.stack(weights[::-1], 1).cpu() if weights else None
    width = score_BK.shape[1]
    found: list[list[Hypothesis]] = []
    for row, scores in enumerate(score_BK[:, :n_best].tolist()):
        found.append([])
        for slot, score in enumerate(scores):
            if score == float("-inf"):
                continue  # fewer distinct hypotheses than slots
            ids = [token for token in tokens_NT[row * width + slot].tolist() if token != PAD]
            rows_TS = None if weights_NTS is None else weights_NTS[row * width + slot, : len(ids)]
            found[-1].append(Hypothesis(ids, score, rows_TS))
    return found


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
        logp_TV = log_probabilities(model.logits(features_TD[: len(ids_T)]))
        score = logp_TV.gather(1, ids_T.unsqueeze(1)).sum().item()
        weights_TS = None if dense_BTS is None else dense_BTS[row, : len(ids_T)]
        found.append(Hypothesis(ids_T.tolist(), score, weights_TS))
    return found
