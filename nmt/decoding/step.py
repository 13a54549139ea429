"""One step of the search: `advance`, a function of state, hypotheses, memory and inputs.

It decodes a token of each hypothesis, masks tokens that are not allowed (`filter_logits`), and then either samples one
(`sample_tokens`) or expands each hypothesis and selects the best ones (`beam_step`). A finished hypothesis stays in the
beam while it is among the K best. A sentence is done (`is_done`) when none of its unfinished hypotheses can outrank
those that would be returned, so a beam of 1 is greedy search, and stopping early does not change the result.

On a GPU a step is a CUDA graph, so nothing in it may wait for the GPU.

Shapes: B sentences, K hypotheses of each, C continuations of a hypothesis, N = B x K rows (sentence-major), S source
and T target positions, V vocabulary, G blocks of the vocabulary, P prefix positions, M literal pieces.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from nmt.config import BOS, EOS, PAD, SearchConfig
from nmt.decoding.beams import Beams, SearchInputs, apply_penalties
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import select_rows

TOKENS_PER_BLOCK = 64  # `top_continuations` first compares the maxima of blocks of this many tokens


class SearchModel(Protocol):
    """The interface of a model to the search.

    The encoder memory and the decoder state are opaque nested tuples of tensors with a row for each sentence, or for
    each hypothesis. The memory has `positions`, the state `make_room(positions)`, which `decode` needs from the second
    call on.
    """

    dtype: torch.dtype
    attends: bool  # whether the model has attention
    max_source_positions: int | None  # later ones get no attention; None: unlimited

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Any, Any]: ...
    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> tuple[Tensor, Tensor | None, Any]: ...
    def logits(self, features: Tensor) -> Tensor: ...


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """Return logp_NV of the next tokens, at least fp32. `<s>` and padding get -inf, so they are never chosen."""
    logp_NV = torch.log_softmax(logits_NV, 1, dtype=accumulation_dtype(logits_NV.dtype))
    logp_NV[:, PAD : BOS + 1 : BOS - PAD].fill_(float("-inf"))  # both columns with one strided slice
    return logp_NV


def filter_logits(logp_BKV: Tensor, beams: Beams, inputs: SearchInputs) -> Tensor:
    """Set the log-probabilities of tokens that are not allowed at this step to -inf.

    Within its prefix, a hypothesis may only follow the prefix.
    """
    last = inputs.prefix_BP.shape[1] - 1
    # Reading `step_B` synchronizes with a GPU, so there the prefix is always applied.
    has_prefix = last > 0 and (logp_BKV.device.type != "cpu" or bool((beams.step_B < last).any()))
    filtered_BKV = logp_BKV
    if inputs.literal_BM.shape[1] > 0:
        filtered_BKV = require_literals(logp_BKV, beams, inputs)
    if has_prefix:
        forced_B11 = inputs.prefix_BP.gather(1, beams.step_B.clamp(max=last).unsqueeze(1)).unsqueeze(2)
        is_other_B1V = torch.arange(logp_BKV.shape[2], device=logp_BKV.device) != forced_B11
        forced_BKV = logp_BKV.masked_fill(is_other_B1V, float("-inf"))
        filtered_BKV = torch.where(forced_B11 == PAD, filtered_BKV, forced_BKV)
    return filtered_BKV


def require_literals(logp_BKV: Tensor, beams: Beams, inputs: SearchInputs) -> Tensor:
    """Allow only the literal pieces that a hypothesis still has to write, and `</s>` only after all of them.

    Where `</s>` would be the most likely token, or no more steps are left than it takes to write them, nothing else is
    allowed: a hypothesis that wants to end would go on with anything.
    """
    literal_M, filtered_BKV = inputs.literal_BM[0], logp_BKV.clone()
    if logp_BKV.device.type == "cpu" and not inputs.wanted_BM.any():  # elsewhere, reading this would synchronize
        filtered_BKV[..., literal_M] = float("-inf")
        return filtered_BKV
    written_BKM = (beams.tokens_BKT.unsqueeze(3) == literal_M).any(2)
    missing_BKM = inputs.wanted_BM.unsqueeze(1) & ~written_BKM
    missing_BK1 = missing_BKM.sum(2, keepdim=True)
    steps_left_B = inputs.max_length_B - beams.step_B
    wants_to_end_BK1 = filtered_BKV.argmax(2, keepdim=True) == EOS
    is_due_BK1 = wants_to_end_BK1 | (missing_BK1 + 1 >= steps_left_B.view(-1, 1, 1))
    filtered_BKV.masked_fill_((missing_BK1 > 0) & is_due_BK1, float("-inf"))
    filtered_BKV[..., EOS].masked_fill_(missing_BK1.squeeze(2) > 0, float("-inf"))
    filtered_BKV[..., literal_M] = torch.where(missing_BKM, logp_BKV[..., literal_M], float("-inf"))
    return filtered_BKV


def update_coverage(beams: Beams, weights_BKS: Tensor) -> Beams:
    """Add the attention weights of a step to the coverage of unfinished hypotheses.

    The log coverage is sum_s log min(sum_t a_ts, 1) (Wu et al. 2016, eq. 14), where each sum over t is at least e^-20.
    """
    assert beams.coverage_BKS is not None
    coverage_BKS = beams.coverage_BKS + weights_BKS * ~beams.finished_BK.unsqueeze(2)
    log_coverage_BK = coverage_BKS.clamp(max=1).log().clamp(min=-20).sum(2)
    return beams._replace(coverage_BKS=coverage_BKS, log_coverage_BK=log_coverage_BK)


def record_weights(beams: Beams, weights_BKS: Tensor) -> Beams:
    """Write the attention weights of a step to the place of its token."""
    assert beams.weights_BKTS is not None
    sentences, slots, _, positions = beams.weights_BKTS.shape
    position_BK1S = beams.step_B.view(-1, 1, 1, 1).expand(-1, slots, 1, positions)
    weights_BK1S = weights_BKS.expand(-1, slots, -1).unsqueeze(2)
    return beams._replace(weights_BKTS=beams.weights_BKTS.scatter(2, position_BK1S, weights_BK1S))


def top_continuations(x_BKV: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row, in descending order of value.

    They are in the k blocks with the largest maxima, or in the remainder after the last whole block. Searching only
    those takes half the time of `topk` or less.
    """
    size = x_BKV.shape[2]
    blocks = size // TOKENS_PER_BLOCK
    if blocks < k:
        return x_BKV.topk(k).indices
    largest_BKG = x_BKV[..., : blocks * TOKENS_PER_BLOCK].unflatten(2, (blocks, TOKENS_PER_BLOCK)).amax(3)
    first_BKC = largest_BKG.topk(k).indices * TOKENS_PER_BLOCK
    index_BKV = (first_BKC.unsqueeze(3) + torch.arange(TOKENS_PER_BLOCK, device=x_BKV.device)).flatten(2)
    if size % TOKENS_PER_BLOCK:
        start = size - size % TOKENS_PER_BLOCK
        rest_BKV = torch.arange(start, size, device=x_BKV.device).expand(*x_BKV.shape[:2], -1)
        index_BKV = torch.cat([index_BKV, rest_BKV], 2)
    return index_BKV.gather(2, x_BKV.gather(2, index_BKV).topk(k).indices)


def expand_hypotheses(logp_BKV: Tensor, beams: Beams) -> tuple[Tensor, Tensor]:
    """Return the best continuations of each hypothesis: score_BKC and token_BKC.

    The only continuation of a finished hypothesis is itself, with the token PAD.
    """
    choices = min(logp_BKV.shape[1], logp_BKV.shape[2])
    token_BKC = top_continuations(logp_BKV, choices)
    logp_BKC = logp_BKV.gather(2, token_BKC)
    finished_BK1 = beams.finished_BK.unsqueeze(2)
    logp_BKC[:, :, 0].masked_fill_(beams.finished_BK, 0)
    logp_BKC[:, :, 1:].masked_fill_(finished_BK1, float("-inf"))
    return beams.score_BK.unsqueeze(2) + logp_BKC, torch.where(finished_BK1, PAD, token_BKC)


def append_tokens(beams: Beams, parent_BK: Tensor | None, token_BK: Tensor, score_BK: Tensor) -> Beams:
    """Append a token to the parent hypothesis of each slot (PAD if it is finished).

    If `parent_BK` is None, each slot continues its own hypothesis.
    """
    if parent_BK is not None:
        rows_B1 = torch.arange(len(parent_BK), device=parent_BK.device).unsqueeze(1)
        beams = beams._replace(
            tokens_BKT=beams.tokens_BKT[rows_B1, parent_BK],
            length_BK=beams.length_BK.gather(1, parent_BK),
            finished_BK=beams.finished_BK.gather(1, parent_BK),
            log_coverage_BK=None if beams.log_coverage_BK is None else beams.log_coverage_BK.gather(1, parent_BK),
            coverage_BKS=None if beams.coverage_BKS is None else beams.coverage_BKS[rows_B1, parent_BK],
            weights_BKTS=None if beams.weights_BKTS is None else beams.weights_BKTS[rows_B1, parent_BK],
        )
    position_BK1 = beams.step_B.view(-1, 1, 1).expand(*token_BK.shape, 1)
    return beams._replace(
        tokens_BKT=beams.tokens_BKT.scatter(2, position_BK1, token_BK.unsqueeze(2)),
        last_token_BK=token_BK,
        score_BK=score_BK,
        length_BK=beams.length_BK + ~beams.finished_BK,
        finished_BK=beams.finished_BK | (token_BK == EOS),
        step_B=beams.step_B + 1,
    )


def beam_step(logp_BKV: Tensor, beams: Beams, config: SearchConfig) -> tuple[Beams, Tensor | None]:
    """Select the K best of all continuations of a sentence.

    Returns the new beams, and parent_BK, the slot of the hypothesis that each of them continues; None with a beam of 1.
    """
    if config.width == 1:
        logp_B1, token_B1 = logp_BKV.max(2)
        score_B1 = beams.score_BK + logp_B1.masked_fill(beams.finished_BK, 0)
        return append_tokens(beams, None, token_B1.masked_fill(beams.finished_BK, PAD), score_B1), None
    score_BKC, token_BKC = expand_hypotheses(logp_BKV, beams)
    slots, choices = score_BKC.shape[1:]
    length_BK1 = (beams.length_BK + ~beams.finished_BK).unsqueeze(2)
    log_coverage_BK1 = None if beams.log_coverage_BK is None else beams.log_coverage_BK.unsqueeze(2)
    ranking_score_BKC = apply_penalties(score_BKC, length_BK1, log_coverage_BK1, config)
    best_BK = ranking_score_BKC.flatten(1).topk(slots, dim=1).indices
    parent_BK = best_BK // choices
    token_BK = token_BKC.flatten(1).gather(1, best_BK)
    score_BK = score_BKC.flatten(1).gather(1, best_BK)
    return append_tokens(beams, parent_BK, token_BK, score_BK), parent_BK


def sample_tokens(logp_BKV: Tensor, beams: Beams, config: SearchConfig, uniform_BK: Tensor) -> Beams:
    """Append a token to each hypothesis, sampled from softmax(logp / temperature) of the `top_k` most likely ones.

    `uniform_BK` holds uniform random numbers in [0, 1).
    """
    size = logp_BKV.shape[2]
    sorted_logp_BKV, token_BKV = logp_BKV.topk(min(config.top_k or size, size))
    p_BKV = torch.softmax((sorted_logp_BKV - sorted_logp_BKV[:, :, :1]) / config.temperature, 2)
    cumulative_BKV = p_BKV.cumsum(2)
    threshold_BK1 = uniform_BK.unsqueeze(2) * cumulative_BKV[:, :, -1:]
    index_BK1 = (cumulative_BKV <= threshold_BK1).sum(2, keepdim=True)
    last_index_BK1 = (p_BKV > 0).sum(2, keepdim=True) - 1  # rounding may put the threshold beyond the last candidate
    index_BK1 = torch.minimum(index_BK1, last_index_BK1).clamp(min=0)
    token_BK = token_BKV.gather(2, index_BK1).squeeze(2)
    logp_BK = logp_BKV.gather(2, token_BK.unsqueeze(2)).squeeze(2)
    score_BK = beams.score_BK + logp_BK.masked_fill(beams.finished_BK, 0)
    return append_tokens(beams, None, token_BK.masked_fill(beams.finished_BK, PAD), score_BK)


def is_done(beams: Beams, config: SearchConfig, inputs: SearchInputs) -> Tensor:
    """Return done_B: whether the search of each sentence is over.

    It is over when hypotheses have reached their maximum length, or when no unfinished hypothesis can outrank those
    that would be returned.
    """
    is_longest_B = inputs.max_length_B <= beams.step_B  # always true of idle rows
    if beams.finished_BK.device.type == "cpu" and not beams.finished_BK.any():
        return is_longest_B  # what follows would take time and change nothing
    returned = config.width if config.sample else config.n_best
    ranking_score_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.log_coverage_BK, config)
    # Upper bound: scores can only decrease, dividing by a longer length raises them, and coverage may become complete.
    bound_BK = apply_penalties(beams.score_BK, inputs.max_length_B.unsqueeze(1), None, config)
    bound_B = bound_BK.masked_fill(beams.finished_BK, float("-inf")).amax(1)
    all_finished_B = beams.finished_BK[:, :returned].all(1)
    worst_B = ranking_score_BK[:, :returned].amin(1)
    return all_finished_B & (worst_B >= bound_B) | is_longest_B


def advance(
    model: SearchModel, config: SearchConfig, state: Any, beams: Beams, memory: Any, inputs: SearchInputs
) -> tuple[Any, Beams, Tensor, Tensor]:
    """Decode one token of each hypothesis.

    Return the new state and hypotheses, done_B, whether the search of each sentence is over, and the number of
    sentences for which it is. The next step may overwrite the latter two.

    State and hypotheses must have room for it, except for the first token. Before that all hypotheses of a sentence are
    equal, and the state has one row for each sentence.
    """
    sentences, slots = beams.last_token_BK.shape
    is_first_token = beams.tokens_BKT.shape[2] == 0
    last_token_BK = beams.last_token_BK[:, :1] if is_first_token else beams.last_token_BK
    if is_first_token:
        beams = beams.make_room(1)
    features_NTD, weights, state = model.decode(last_token_BK.reshape(-1, 1), state, memory)
    logp_BKV = log_probabilities(model.logits(features_NTD[:, 0])).unflatten(0, (sentences, -1)).expand(-1, slots, -1)
    logp_BKV = filter_logits(logp_BKV, beams, inputs)
    if weights is not None:
        weights_BKS = weights.view(sentences, -1, memory.positions)
        if config.coverage_penalty:
            beams = update_coverage(beams, weights_BKS)
        if beams.weights_BKTS is not None:
            beams = record_weights(beams, weights_BKS)
    parent_BK = None
    if inputs.uniform_BTK is not None:
        step_B = beams.step_B.clamp(max=inputs.uniform_BTK.shape[1] - 1)  # sentences beyond the last step are done
        uniform_BK = inputs.uniform_BTK[torch.arange(sentences, device=step_B.device), step_B]
        beams = sample_tokens(logp_BKV, beams, config, uniform_BK)
    else:
        beams, parent_BK = beam_step(logp_BKV, beams, config)
    if is_first_token and slots > 1:
        state = select_rows(state, torch.arange(sentences, device=logp_BKV.device).repeat_interleave(slots))
    elif parent_BK is not None:
        first_row_B1 = torch.arange(sentences, device=logp_BKV.device).unsqueeze(1) * slots
        state = select_rows(state, (first_row_B1 + parent_BK).flatten())
    done_B = is_done(beams, config, inputs)
    beams = beams._replace(finished_BK=beams.finished_BK | done_B.unsqueeze(1))  # sentences may stay in the batch
    return state, beams, done_B, done_B.sum()
