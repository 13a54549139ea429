"""Greedy, beam and diverse beam search, sampling, and forced decoding.

The search uses a model through the `SearchModel` protocol. Each step of a batch is `advance`, a CUDA graph if the model
is a `GraphedModel`: decode, mask tokens that are not allowed (`filter_logits`), then either `sample_tokens` or
`beam_step`, which expands each hypothesis and selects the best ones. A finished hypothesis stays in the beam while it
is among the K best. A sentence is done (`is_done`) when none of its unfinished hypotheses can outrank those that would
be returned, so a beam of 1 is greedy search, and stopping early does not change the result. `stream_search` is the
loop. Finished sentences are replaced by waiting ones, so that nearly all steps run on full batches.

Shapes: B sentences, K hypotheses of each, C continuations of a hypothesis, N = B x K rows (sentence-major), S source
and T target positions, V vocabulary, P prefix positions.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmt.config import EOS, PAD, SearchConfig
from nmt.data.batch import SHAPE_MULTIPLE, round_down_to_shape
from nmt.decoding.hypotheses import (
    ActiveBatch,
    Beams,
    History,
    Hypothesis,
    SearchInputs,
    apply_penalties,
    finalize_hypotheses,
    init_beams,
    limit_lengths,
)
from nmt.model.kernels.cuda_graphs import GraphedModel
from nmt.model.logits import log_probabilities, top_continuations
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import resize_last

LENGTH_MULTIPLE = 16  # on a GPU, lengths are padded to a multiple of this number of positions
REFILL_DIVISOR = 16  # refill a batch when 1 / REFILL_DIVISOR of it is done; every refill copies tensors


class SearchModel(Protocol):
    """The interface of a model to the search.

    The encoder memory and the decoder state are opaque, but on a GPU nested tuples of tensors. Both have
    `select(rows)`; `scatter_rows(rows, others)`, which may overwrite the object it is called on; and
    `resize_source(positions)`. The memory has `positions` and `keep_first(rows)`, the state `make_room(positions)`,
    which `decode` needs from the second call on.
    """

    dtype: torch.dtype
    attends: bool  # whether the model has attention
    reach: int | None  # source positions that attention can reach; None: all

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Any, Any]: ...
    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> tuple[Tensor, Tensor | None, Any]: ...
    def logits(self, features: Tensor) -> Tensor: ...


class Literals(NamedTuple):
    """The literal pieces that translations must have, each exactly once, and no others."""

    vocabulary: Sequence[int]  # all literal pieces
    of_sentences: Sequence[Sequence[int]]


class NewSentences(NamedTuple):
    """Sentences that join a search."""

    source_BS: Tensor
    length_B: Tensor  # source lengths in pieces
    prefixes: Sequence[Sequence[int]] | None = None  # target tokens that the hypotheses of each sentence start with
    literals: Literals | None = None  # the literal pieces that the hypotheses of each sentence must have


class WaitingSentences(NamedTuple):
    """Sentences whose search has not started."""

    source_BS: Tensor
    beams: Beams
    inputs: SearchInputs


class StepOutput(NamedTuple):
    """What a step returns besides the new state and hypotheses. The next step may overwrite it."""

    done_B: Tensor  # whether the search of each sentence is over
    num_done: Tensor  # number of sentences that are done
    parent_BK: Tensor | None  # the hypotheses that were continued; None if each slot continues its own
    weights_BKS: Tensor | None  # the attention weights of the hypotheses before this step, if they are kept


StepFn = Callable[..., tuple[Any, Beams, StepOutput]]


# ----------------------------------------------------------------------------------------------------------- one step
def filter_logits(logp_BKV: Tensor, beams: Beams, config: SearchConfig, inputs: SearchInputs) -> Tensor:
    """Set the log-probabilities of tokens that are not allowed at this step to -inf.

    If no token is allowed, the hypothesis may end. Within its prefix, a hypothesis may only follow the prefix.
    """
    last = inputs.prefix_BP.shape[1] - 1
    # Reading `step_B` synchronizes with a GPU, so there the prefix is always applied.
    has_prefix = last > 0 and (logp_BKV.device.type != "cpu" or bool((beams.step_B < last).any()))
    has_literals = len(inputs.literal_M) > 0
    has_limits = config.min_length or config.min_ratio or config.no_repeat_ngram
    if not (has_limits or has_prefix or has_literals):
        return logp_BKV
    filtered_BKV = logp_BKV.clone()
    if has_limits:
        too_short_B = beams.step_B + 1 < inputs.min_length_B
        filtered_BKV[..., EOS].masked_fill_(too_short_B.unsqueeze(1), float("-inf"))
        if config.no_repeat_ngram:
            banned_BKT = find_banned_tokens(beams, config.no_repeat_ngram)
            filtered_BKV.scatter_(2, banned_BKT, float("-inf"))
        stuck_BK = filtered_BKV.amax(2) == float("-inf")
        filtered_BKV[..., EOS] = torch.where(stuck_BK, logp_BKV[..., EOS], filtered_BKV[..., EOS])
    if has_literals:
        filtered_BKV = require_literals(filtered_BKV, logp_BKV, beams, inputs)
    if has_prefix:
        forced_B11 = inputs.prefix_BP.gather(1, beams.step_B.clamp(max=last).unsqueeze(1)).unsqueeze(2)
        is_other_B1V = torch.arange(logp_BKV.shape[2], device=logp_BKV.device) != forced_B11
        forced_BKV = logp_BKV.masked_fill(is_other_B1V, float("-inf"))
        filtered_BKV = torch.where(forced_B11 == PAD, filtered_BKV, forced_BKV)
    return filtered_BKV


def require_literals(filtered_BKV: Tensor, logp_BKV: Tensor, beams: Beams, inputs: SearchInputs) -> Tensor:
    """Allow only the literal pieces that a hypothesis still has to write, and `</s>` only after all of them.

    Where `</s>` would be the most likely token, or no more steps are left than it takes to write them, nothing else is
    allowed: a hypothesis that wants to end would go on with anything.
    """
    literal_M = inputs.literal_M
    if logp_BKV.device.type == "cpu" and not inputs.literals_BM.any():  # elsewhere, reading this would synchronize
        filtered_BKV[..., literal_M] = float("-inf")
        return filtered_BKV
    written_BKM = (beams.tokens_BKT.unsqueeze(3) == literal_M).any(2)
    missing_BKM = inputs.literals_BM.unsqueeze(1) & ~written_BKM
    missing_BK1 = missing_BKM.sum(2, keepdim=True)
    steps_left_B = inputs.max_length_B - beams.step_B
    wants_to_end_BK1 = filtered_BKV.argmax(2, keepdim=True) == EOS
    is_due_BK1 = wants_to_end_BK1 | (missing_BK1 + 1 >= steps_left_B.view(-1, 1, 1))
    filtered_BKV.masked_fill_((missing_BK1 > 0) & is_due_BK1, float("-inf"))
    filtered_BKV[..., EOS].masked_fill_(missing_BK1.squeeze(2) > 0, float("-inf"))
    filtered_BKV[..., literal_M] = torch.where(missing_BKM, logp_BKV[..., literal_M], float("-inf"))
    return filtered_BKV


def find_banned_tokens(beams: Beams, n: int) -> Tensor:
    """Return the tokens that would complete an n-gram that the hypothesis already contains, with PAD in between."""
    tokens_BKT = beams.tokens_BKT
    if tokens_BKT.shape[2] < n:
        return tokens_BKT[:, :, :0]
    # With fewer than n - 1 tokens, the first one is repeated in front. No hypothesis so short has such an n-gram, so
    # nothing is banned.
    position_Bn = beams.step_B.unsqueeze(1) + torch.arange(1 - n, 0, device=tokens_BKT.device)
    position_BKn = position_Bn.clamp(min=0).unsqueeze(1).expand(-1, tokens_BKT.shape[1], -1)
    last_tokens_BK1n = tokens_BKT.gather(2, position_BKn).unsqueeze(2)
    ngrams_BKTn = tokens_BKT.unfold(2, n, 1)
    matches_BKT = (ngrams_BKTn[..., :-1] == last_tokens_BK1n).all(3)
    return ngrams_BKTn[..., -1].where(matches_BKT, PAD)


def update_coverage(beams: Beams, weights_BKS: Tensor) -> Beams:
    """Add the attention weights of a step to the coverage of unfinished hypotheses.

    The log coverage is sum_s log min(sum_t a_ts, 1) (Wu et al. 2016, eq. 14), where each sum over t is at least e^-20.
    """
    assert beams.coverage_BKS is not None
    coverage_BKS = beams.coverage_BKS + weights_BKS * ~beams.finished_BK.unsqueeze(2)
    log_coverage_BK = coverage_BKS.clamp(max=1).log().clamp(min=-20).sum(2)
    return beams._replace(coverage_BKS=coverage_BKS, log_coverage_BK=log_coverage_BK)


def expand_hypotheses(
    logp_BKV: Tensor, beams: Beams, penalty_BV: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the best continuations of each hypothesis: score_BKC, token_BKC and penalty_BKC.

    `penalty_BV` is subtracted for ranking only, not from the score; penalty_BKC is None without it. The only
    continuation of a finished hypothesis is itself, with the token PAD.
    """
    choices = min(logp_BKV.shape[1], logp_BKV.shape[2])
    ranked_BKV = logp_BKV if penalty_BV is None else logp_BKV - penalty_BV.unsqueeze(1)
    token_BKC = top_continuations(ranked_BKV, choices)
    logp_BKC = logp_BKV.gather(2, token_BKC)
    finished_BK1 = beams.finished_BK.unsqueeze(2)
    logp_BKC[:, :, 0].masked_fill_(beams.finished_BK, 0)
    logp_BKC[:, :, 1:].masked_fill_(finished_BK1, float("-inf"))
    score_BKC = beams.score_BK.unsqueeze(2) + logp_BKC
    penalty_BKC = None
    if penalty_BV is not None:
        penalty_BKC = penalty_BV.unsqueeze(1).expand_as(logp_BKV).gather(2, token_BKC).masked_fill(finished_BK1, 0)
    return score_BKC, torch.where(finished_BK1, PAD, token_BKC), penalty_BKC


def select_best(
    score_BKC: Tensor, token_BKC: Tensor, penalty_BKC: Tensor | None, beams: Beams, config: SearchConfig
) -> tuple[Beams, Tensor]:
    """Select the K best of all continuations of a sentence.

    Returns the new beams, and parent_BK, the slot of the hypothesis that each of them continues.
    """
    slots, choices = score_BKC.shape[1:]
    length_BK1 = (beams.length_BK + ~beams.finished_BK).unsqueeze(2)
    log_coverage_BK1 = None if beams.log_coverage_BK is None else beams.log_coverage_BK.unsqueeze(2)
    penalized_BKC = score_BKC if penalty_BKC is None else score_BKC - penalty_BKC
    ranking_score_BKC = apply_penalties(penalized_BKC, length_BK1, log_coverage_BK1, config)
    best_BK = ranking_score_BKC.flatten(1).topk(slots, dim=1).indices
    parent_BK = best_BK // choices
    token_BK = token_BKC.flatten(1).gather(1, best_BK)
    score_BK = score_BKC.flatten(1).gather(1, best_BK)
    return append_tokens(beams, parent_BK, token_BK, score_BK), parent_BK


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
        )
    position_BK1 = beams.step_B.view(-1, 1, 1).expand(*token_BK.shape, 1)
    return beams._replace(
        tokens_BKT=beams.make_room(1).tokens_BKT.scatter(2, position_BK1, token_BK.unsqueeze(2)),
        last_token_BK=token_BK,
        score_BK=score_BK,
        length_BK=beams.length_BK + ~beams.finished_BK,
        finished_BK=beams.finished_BK | (token_BK == EOS),
        step_B=beams.step_B + 1,
    )


def beam_step(logp_BKV: Tensor, beams: Beams, config: SearchConfig) -> tuple[Beams, Tensor | None]:
    """Take one step of beam search; with several groups, of diverse beam search.

    Groups take turns. A token costs a group `diversity` for each hypothesis of an earlier group that chose it at this
    step (Vijayakumar et al. 2016, with Hamming diversity). Returns the new beams, and parent_BK as in `select_best`;
    None with a beam of 1.
    """
    if config.width == 1:
        logp_B1, token_B1 = logp_BKV.max(2)
        score_B1 = beams.score_BK + logp_B1.masked_fill(beams.finished_BK, 0)
        return append_tokens(beams, None, token_B1.masked_fill(beams.finished_BK, PAD), score_B1), None
    if config.groups == 1:
        return select_best(*expand_hypotheses(logp_BKV, beams), beams, config)
    group_size = config.width // config.groups
    token_counts_BV = torch.zeros_like(logp_BKV[:, 0])
    groups, parents = [], []
    for first in range(0, config.width, group_size):
        slots = slice(first, first + group_size)
        group = beams.slice_hypotheses(slots)
        candidates = expand_hypotheses(logp_BKV[:, slots], group, config.diversity * token_counts_BV)
        group, parent_BK = select_best(*candidates, group, config)
        token_BK = group.last_token_BK
        token_counts_BV.scatter_add_(1, token_BK, torch.ones_like(token_BK, dtype=token_counts_BV.dtype))
        groups.append(group)
        parents.append(parent_BK + first)
    merged = (
        tensors[0] if tensors[0] is None or tensors[0].dim() == 1 else torch.cat(tensors, 1)
        for tensors in zip(*groups, strict=True)
    )
    return Beams(*merged), torch.cat(parents, 1)


def sample_tokens(logp_BKV: Tensor, beams: Beams, config: SearchConfig, uniform_BK: Tensor) -> Beams:
    """Append a token to each hypothesis, sampled from softmax(logp / temperature).

    Candidates are the `top_k` most likely tokens, and of these the smallest set of most likely ones with a probability
    of at least `top_p` (nucleus sampling, Holtzman et al. 2020). `uniform_BK` holds uniform random numbers in [0, 1).
    """
    size = logp_BKV.shape[2]
    sorted_logp_BKV, token_BKV = logp_BKV.topk(min(config.top_k or size, size))
    p_BKV = torch.softmax((sorted_logp_BKV - sorted_logp_BKV[:, :, :1]) / config.temperature, 2)
    p_before_BKV = p_BKV.cumsum(2) - p_BKV
    p_BKV = p_BKV.masked_fill(p_before_BKV >= config.top_p, 0)
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
    returned = config.width if config.groups > 1 or config.sample else config.n_best
    ranking_score_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.log_coverage_BK, config)
    # Upper bound: scores can only decrease, dividing by a longer length raises them, and coverage may become complete.
    bound_BK = apply_penalties(beams.score_BK, inputs.max_length_B.unsqueeze(1), None, config)
    bound_B = bound_BK.masked_fill(beams.finished_BK, float("-inf")).amax(1)
    all_finished_B = beams.finished_BK[:, :returned].all(1)
    worst_B = ranking_score_BK[:, :returned].amin(1)
    return all_finished_B & (worst_B >= bound_B) | is_longest_B


def advance(
    model: SearchModel,
    config: SearchConfig,
    keep_weights: bool,
    state: Any,
    beams: Beams,
    memory: Any,
    inputs: SearchInputs,
) -> tuple[Any, Beams, StepOutput]:
    """Decode one token of each hypothesis. Return the new state and hypotheses, and what else came of it.

    State and hypotheses must have room for it, except for the first token. Before that all hypotheses of a sentence are
    equal, and the state has one row for each sentence.
    """
    sentences, slots = beams.last_token_BK.shape
    is_first_token = beams.tokens_BKT.shape[2] == 0
    last_token_BK = beams.last_token_BK[:, :1] if is_first_token else beams.last_token_BK
    features_NTD, weights, state = model.decode(last_token_BK.reshape(-1, 1), state, memory)
    logp_BKV = log_probabilities(model.logits(features_NTD[:, 0])).unflatten(0, (sentences, -1)).expand(-1, slots, -1)
    logp_BKV = filter_logits(logp_BKV, beams, config, inputs)
    weights_BKS = None
    if weights is not None and (keep_weights or config.coverage_penalty):
        weights_BKS = weights.view(sentences, -1, memory.positions)
    if config.coverage_penalty:
        assert weights_BKS is not None
        beams = update_coverage(beams, weights_BKS)
    parent_BK = None
    if inputs.uniform_BTK is not None:
        step_B = beams.step_B.clamp(max=inputs.uniform_BTK.shape[1] - 1)  # sentences beyond the last step are done
        uniform_BK = inputs.uniform_BTK[torch.arange(sentences, device=step_B.device), step_B]
        beams = sample_tokens(logp_BKV, beams, config, uniform_BK)
    else:
        beams, parent_BK = beam_step(logp_BKV, beams, config)
    if is_first_token and slots > 1:
        state = state.select(torch.arange(sentences, device=logp_BKV.device).repeat_interleave(slots))
    elif parent_BK is not None:
        first_row_B1 = torch.arange(sentences, device=logp_BKV.device).unsqueeze(1) * slots
        state = state.select((first_row_B1 + parent_BK).flatten())
    done_B = is_done(beams, config, inputs)
    beams = beams._replace(finished_BK=beams.finished_BK | done_B.unsqueeze(1))  # sentences may stay in the batch
    return state, beams, StepOutput(done_B, done_B.sum(), parent_BK, weights_BKS if keep_weights else None)


def take_step(step: StepFn, active: ActiveBatch) -> tuple[ActiveBatch, StepOutput]:
    """Return the batch after `step`, which is `advance` with its first arguments, and what else the step returns."""
    state, beams, output = step(active.state, active.beams, active.memory, active.inputs)
    return active._replace(state=state, beams=beams), output


def prepare_step(model: SearchModel, config: SearchConfig, keep_weights: bool) -> AbstractContextManager[StepFn]:
    """Return a context with `advance` for this model and these settings: for a `GraphedModel` as CUDA graphs."""
    if not isinstance(model, GraphedModel):
        return nullcontext(partial(advance, model, config, keep_weights))
    settings = replace(config, seed=1, batch_tokens=None, batch_sentences=None)  # without those that a step ignores
    return model.lend_graphs(advance, settings, keep_weights)


# -------------------------------------------------------------------------------------------------------- batch shapes
def round_up_batch_size(sentences: int, device: torch.device) -> int:
    """Return the batch size to use for this many sentences: 0, or a multiple of `SHAPE_MULTIPLE`.

    On a GPU it is a power of two, since every new shape costs far more there than idle rows do.
    """
    if sentences and device.type == "cuda":
        return 1 << (sentences - 1).bit_length()
    return -(-sentences // SHAPE_MULTIPLE) * SHAPE_MULTIPLE


def choose_first_size(sentences: int, device: torch.device) -> int:
    """Return the number of rows of the first batch: on a GPU rounded up, since a new shape costs more there."""
    return round_up_batch_size(sentences, device) if device.type == "cuda" else sentences


def round_down_batch_size(sentences: int, device: torch.device) -> int:
    """Return the largest batch size that needs no idle rows for this many sentences."""
    if sentences and device.type == "cuda":
        return 1 << (sentences.bit_length() - 1)
    return round_down_to_shape(sentences)


def round_up_length(positions: int, device: torch.device) -> int:
    """Return a padded length, such as that of sources: on a GPU a multiple of `LENGTH_MULTIPLE`, to keep shapes few."""
    if device.type == "cuda":
        return -(-positions // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return positions


class AsyncCounter:
    """Reads counts from a device, optionally with a delay of one call.

    A delayed counter returns the count of the previous call (0 at first), so that the CPU does not wait for the GPU.
    """

    def __init__(self, delayed: bool) -> None:
        self.delayed = delayed
        self.counts: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def __call__(self, count: Tensor) -> int:
        if not self.delayed:
            return int(count)
        copy = count.to("cpu", non_blocking=True, copy=True)
        copied = torch.cuda.current_stream(count.device).record_event() if count.is_cuda else None
        self.counts.append((copy, copied))
        if len(self.counts) == 1:
            return 0
        count, copied = self.counts.pop(0)
        if copied is not None:
            copied.synchronize()
        return int(count)

    def reset(self) -> None:
        """Discard pending counts, after the batch has changed."""
        self.counts.clear()


# ------------------------------------------------------------------------------------------------------------ the loop
def draw_uniform_numbers(source_BS: Tensor, length_B: Tensor, steps: int, config: SearchConfig) -> Tensor:
    """Return uniform_BTK, random numbers in [0, 1) for sampling.

    They depend on the seed and the source sentence only, so samples do not depend on the rest of the batch.
    """
    sentences = [ids[:length] for ids, length in zip(source_BS.tolist(), length_B.tolist(), strict=True)]
    numbers = [np.random.default_rng([config.seed, *ids]).random((steps, config.width)) for ids in sentences]
    return torch.from_numpy(np.stack(numbers))


def prepare_sentences(
    sentences: NewSentences, config: SearchConfig, dtype: torch.dtype, first_sentence: int
) -> WaitingSentences:
    """Return the hypotheses and inputs of sentences at the beginning of their search."""
    source_BS, length_B, prefixes, literals = sentences
    device = source_BS.device
    prefix_tokens = [torch.tensor(ids, dtype=torch.int64) for ids in prefixes or [[]] * len(source_BS)]
    prefix_BP = pad_sequence(prefix_tokens, batch_first=True, padding_value=PAD)
    prefix_BP = resize_last(prefix_BP, round_up_length(prefix_BP.shape[1], device) + 1, PAD).to(device)
    min_length_B, max_length_B = limit_lengths(length_B, prefix_BP, config)
    literal_M = source_BS.new_tensor(literals.vocabulary if literals else [])
    wanted = literals.of_sentences if literals else [[]] * len(source_BS)
    literals_BM = torch.stack([torch.isin(literal_M, source_BS.new_tensor(ids)) for ids in wanted])
    uniform_BTK = None
    if config.sample:
        steps = round_up_length(int(max_length_B.max()), device)
        uniform_BTK = draw_uniform_numbers(source_BS, length_B, steps, config).to(device, accumulation_dtype(dtype))
    sentence_B = torch.arange(first_sentence, first_sentence + len(length_B), device=device)
    inputs = SearchInputs(
        literal_M, sentence_B, length_B, min_length_B, max_length_B, literals_BM, prefix_BP, uniform_BTK
    )
    return WaitingSentences(source_BS, init_beams(length_B, source_BS.shape[1], config, dtype), inputs)


@torch.inference_mode()
def stream_search(
    model: SearchModel,
    source_BS: Tensor,
    length_B: Tensor,
    config: SearchConfig,
    keep_weights: bool = False,
    prefixes: Sequence[Sequence[int]] | None = None,
    max_active: int | None = None,
    on_step: Callable[[ActiveBatch], object] | None = None,
    literals: Literals | None = None,
    get_more: Callable[[int, int], NewSentences | None] | None = None,
) -> Generator[tuple[int, list[Hypothesis]], None, None]:
    """Translate sentences, and yield the index of each and its n best hypotheses, best first, as soon as it is done.

    Args:
        length_B: source lengths in pieces.
        keep_weights: whether hypotheses get attention weights.
        prefixes: target tokens that the hypotheses of each sentence start with.
        max_active: sentences to search at a time; None: all. They are taken in order. Sort them by decreasing length,
            so that source positions can be dropped as sentences get shorter. On a GPU, idle rows may fill up the batch
            to the next power of two.
        on_step: called after each step with the batch, which the next step may overwrite. Rows that have been returned
            (`returned_B`) may be idle.
        literals: the literal pieces that the hypotheses of each sentence must have.
        get_more: called after each step if no sentence is waiting, with the number of sentences that are not done (on a
            GPU, at the step before) and the source positions of the batch. It returns sentences that the batch has room
            for, which join the search and are numbered after those before, or None.
    """
    device = source_BS.device
    waiting = prepare_sentences(NewSentences(source_BS, length_B, prefixes, literals), config, model.dtype, 0)
    encode_size = min(max_active or len(source_BS), len(source_BS))  # sentences to encode at a time
    positions = round_up_length(source_BS.shape[1], device)
    num_returned = 0  # rows of the batch whose hypotheses have been returned, idle ones included
    history = History()

    def encode(first: int, positions: int) -> ActiveBatch:
        """Encode the next waiting sentences, and decode the first token of their hypotheses."""
        rows_B = torch.arange(first, min(first + encode_size, len(waiting.source_BS)), device=device)
        beams, inputs = waiting.beams.select(rows_B), waiting.inputs.select(rows_B)
        needed = round_up_length(int(inputs.source_length_B.max()), device)
        memory, state = model.start(resize_last(waiting.source_BS[rows_B], needed, PAD), inputs.source_length_B)
        is_returned_B = torch.zeros(len(rows_B), dtype=torch.bool, device=device)
        batch = ActiveBatch(memory, state, beams.resize_source(needed), inputs, is_returned_B)
        batch, output = take_step(partial(advance, model, config, keep_weights), batch)
        if output.weights_BKS is not None:
            history.add_first(inputs.sentence_B, output.weights_BKS[:, 0])
        return batch.resize_source(positions)

    def finish(done_B: Tensor) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yield the results of sentences that are done, unless that has happened before."""
        nonlocal num_returned
        rows_B = (done_B & ~active.returned_B).nonzero().squeeze(1)
        if len(rows_B):
            beams, sentence_B = active.beams.select(rows_B), active.inputs.sentence_B[rows_B]
            yield from finalize_hypotheses(beams, sentence_B, history, config)
            active.returned_B[rows_B] = True
            num_returned += len(rows_B)

    count_done = AsyncCounter(delayed=device.type == "cuda")
    active = encoded = encode(0, positions)
    first_size = choose_first_size(encode_size, device)
    if encode_size == len(source_BS) < first_size:  # no sentence is waiting, which would take an idle row
        rows_B = torch.arange(first_size, device=device)
        active = encoded = active.select(rows_B.clamp(max=encode_size - 1)).mark_idle(rows_B >= encode_size)
    num_started = num_encoded = encode_size  # of those in `waiting`: whose search has started; that are encoded
    num_sentences = len(source_BS)
    num_returned = len(active.returned_B) - encode_size
    max_size = encode_size  # rows up to which the batch may grow
    most_steps = 1  # of all sentences in the batch
    with prepare_step(model, config, keep_weights) as step:
        while len(active.returned_B):
            most_steps += 1
            active, output = take_step(step, active.make_room(most_steps))
            inputs, done_B = active.inputs, output.done_B
            if output.weights_BKS is not None:
                history.add(inputs.sentence_B, output.parent_BK, output.weights_BKS)
            if on_step is not None:
                on_step(active)
            num_done = max(count_done(output.num_done), num_returned)
            if get_more is None and not num_done:
                continue
            if get_more is not None and num_done > num_returned:
                yield from finish(done_B)  # first, since whoever receives them may then have more sentences
            num_active = len(done_B) - num_done
            if get_more is not None and num_started == len(waiting.source_BS):
                new_sentences = get_more(num_active, positions)
                if new_sentences is not None:
                    waiting = prepare_sentences(new_sentences, config, model.dtype, num_sentences)
                    num_started = num_encoded = 0
                    num_sentences += len(waiting.source_BS)
                    encode_size = max(encode_size, len(waiting.source_BS))
                    max_size = num_active + len(waiting.source_BS)
            num_left = len(waiting.source_BS) - num_started
            num_ready = num_encoded - num_started or min(encode_size, num_left)
            grown_size = round_down_batch_size(min(max_size, num_active + num_ready), device)
            should_refill = num_ready > 0 and (
                grown_size > len(done_B) or num_done >= max(1, len(done_B) // REFILL_DIVISOR)
            )
            batch_size = round_up_batch_size(num_active + num_left, device)
            if batch_size < len(done_B):
                # A smaller batch is enough for all that are left.
                yield from finish(done_B)
                rows_B = fill_gaps(done_B.int().argsort(stable=True)[:batch_size])  # first those that are not done
                active, done_B = active.shrink(rows_B), done_B[rows_B]
                count_done.reset()
            if should_refill:
                # Replace sentences that are done by waiting ones, after encoding more of these if none is left.
                if num_started == num_encoded:
                    waiting_length_B = waiting.inputs.source_length_B[num_started:]
                    longest = torch.cat([active.inputs.source_length_B, waiting_length_B]).max()
                    positions = round_up_length(int(longest), device)
                    active = encoded = active.resize_source(positions)  # `encoded` is used up: this frees its memory
                    encoded = encode(num_started, positions)
                    num_encoded += len(encoded.returned_B)
                    del history.steps[:-most_steps]
                yield from finish(done_B)
                rows_B = done_B.nonzero().squeeze(1)
                num_active = len(done_B) - len(rows_B)  # `count_done` may be late
                grown_size = round_down_batch_size(min(max_size, num_active + num_ready), device)
                if grown_size > len(done_B):
                    # Repeat any sentence in the new rows, which waiting ones replace.
                    old_B = torch.arange(len(done_B), device=device)
                    new_B = torch.arange(len(done_B), grown_size, device=device)
                    active = active.select(torch.cat([old_B, torch.zeros_like(new_B)]))
                    rows_B = torch.cat([rows_B, new_B])
                # Rows for which no sentence is waiting become idle, and start again with one step: every row needs room
                # for as many tokens as the row with the most steps.
                first = num_started - num_encoded + len(encoded.returned_B)
                number_B = torch.arange(len(rows_B), device=device)
                new = encoded.select((first + number_B).clamp(max=len(encoded.returned_B) - 1))
                active = active.scatter_rows(rows_B, new.mark_idle(number_B >= num_ready))
                num_started += min(len(rows_B), num_ready)
                count_done.reset()
            if active.inputs is not inputs and len(active.returned_B):  # the batch has changed
                most_steps = int(active.beams.step_B.max())
                num_returned = int(active.returned_B.sum())


def fill_gaps(kept_B: Tensor) -> Tensor:
    """Return the given rows of a batch in an order that leaves as many as possible where they are."""
    rows_B = torch.arange(len(kept_B), device=kept_B.device)
    is_gap_B = ~torch.isin(rows_B, kept_B)
    rows_B[is_gap_B] = kept_B[kept_B >= len(kept_B)]
    return rows_B


@torch.inference_mode()
def score_targets(
    model: SearchModel, source_BS: Tensor, length_B: Tensor, target_BT: Tensor, keep_weights: bool = True
) -> list[Hypothesis]:
    """Score and align given targets by forced decoding. `target_BT` holds `<s> y_1 ... </s>` and padding."""
    memory, state = model.start(source_BS, length_B)
    features_BTD, weights, _ = model.decode(target_BT[:, :-1], state, memory)
    labels_BT = target_BT[:, 1:]
    weights_BTS = None
    if keep_weights and weights is not None:
        weights_BTS = weights.cpu()
    hypotheses = []
    for row, (features_TD, labels_T) in enumerate(zip(features_BTD, labels_BT, strict=True)):
        labels_T = labels_T[labels_T != PAD]
        logp_T1 = log_probabilities(model.logits(features_TD[: len(labels_T)])).gather(1, labels_T.unsqueeze(1))
        token_scores = logp_T1.flatten().tolist()
        weights_TS = None if weights_BTS is None else weights_BTS[row, : len(labels_T)]
        score = sum(token_scores)  # in fp64, as in the search
        hypotheses.append(Hypothesis(labels_T.tolist(), score, weights_TS, token_scores=token_scores))
    return hypotheses
