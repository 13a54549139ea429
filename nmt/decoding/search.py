"""Search: the loop of steps over a batch of sentences, which gets smaller as sentences are done.

`search_translations` is the loop for beam search, greedy search and sampling; `advance` in `step.py` is one step.
`score_targets` reads given translations instead, which is forced decoding.

Shapes: B sentences, K hypotheses of each, S source and T target positions, P prefix positions, M literal pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmt.config import PAD, SearchConfig
from nmt.data.batch import SHAPE_MULTIPLE
from nmt.decoding.beams import ActiveBatch, Hypothesis, SearchInputs, finalize_hypotheses, init_beams
from nmt.decoding.step import SearchModel, advance, log_probabilities
from nmt.model.kernels.cuda_graphs import GraphedModel
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import resize_last, select_rows

LENGTH_MULTIPLE = 16  # on a GPU, lengths are padded to a multiple of this number of positions


class Literals(NamedTuple):
    """The literal pieces that translations must have, each exactly once, and no others."""

    vocabulary: Sequence[int]  # all literal pieces
    of_sentences: Sequence[Sequence[int]]


# ------------------------------------------------------------------------------------------------------------ the loop
@torch.inference_mode()
def search_translations(
    model: SearchModel,
    source_BS: Tensor,
    length_B: Tensor,
    config: SearchConfig,
    keep_weights: bool = False,
    prefixes: Sequence[Sequence[int]] | None = None,
    literals: Literals | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Translate sentences, and yield the index of each and its n best hypotheses, best first, once it is done.

    Args:
        length_B: source lengths in pieces.
        keep_weights: whether hypotheses get attention weights.
        prefixes: target tokens that the hypotheses of each sentence start with.
        literals: the literal pieces that the hypotheses of each sentence must have.
    """
    device = source_BS.device
    inputs = init_inputs(source_BS, length_B, config, model.dtype, prefixes, literals)
    batch = encode_sentences(model, source_BS, inputs, config, keep_weights)
    count_done = AsyncCounter(delayed=device.type == "cuda")
    steps = 1
    graphed_step: AbstractContextManager[Callable[..., Any]] = nullcontext(partial(advance, model, config))
    if isinstance(model, GraphedModel):
        graphed_step = model.graphed(advance, replace(config, seed=1, batch_tokens=None))  # without what a step ignores
    with graphed_step as step:
        while True:
            steps += 1
            batch = batch.make_room(steps)
            state, beams, done_B, num_done = step(batch.state, batch.beams, batch.memory, batch.inputs)
            batch = batch._replace(state=state, beams=beams)
            if round_up_batch_size(len(done_B) - count_done(num_done), device) >= len(done_B):
                continue
            yield from return_hypotheses(batch, done_B, config)
            size = round_up_batch_size(len(done_B) - int(done_B.sum()), device)  # `count_done` may be late
            if not size:
                return
            if size < len(done_B):  # some that are done may stay in the batch, behind the others
                batch = batch.select(done_B.int().argsort(stable=True)[:size])
            count_done.reset()


def return_hypotheses(
    batch: ActiveBatch, done_B: Tensor, config: SearchConfig
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the results of sentences that are done, and mark them as returned."""
    rows_B = (done_B & (batch.sentence_B >= 0)).nonzero().squeeze(1)
    if len(rows_B):
        yield from finalize_hypotheses(batch.select(rows_B), config)
        batch.sentence_B[rows_B] = -1


def encode_sentences(
    model: SearchModel, source_BS: Tensor, inputs: SearchInputs, config: SearchConfig, keep_weights: bool
) -> ActiveBatch:
    """Encode sentences and decode the first token of their hypotheses.

    On a GPU, idle copies of a sentence fill up the batch, since a new shape costs more there.
    """
    count, device = len(source_BS), source_BS.device
    sentence_B = torch.arange(choose_first_size(count, device), device=device)
    is_idle_B, rows_B = sentence_B >= count, sentence_B.clamp(max=count - 1)
    inputs = select_rows(inputs, rows_B)
    inputs = inputs._replace(max_length_B=inputs.max_length_B.masked_fill(is_idle_B, 0))
    positions = round_up_length(int(inputs.source_length_B.max()), device)
    memory, state = model.start(resize_last(source_BS[rows_B], positions, PAD), inputs.source_length_B)
    beams = init_beams(inputs.source_length_B, positions, config, keep_weights and model.attends, model.dtype)
    state, beams, *_ = advance(model, config, state, beams, memory, inputs)
    return ActiveBatch(sentence_B.masked_fill(is_idle_B, -1), memory, state, beams, inputs)


def init_inputs(
    source_BS: Tensor,
    length_B: Tensor,
    config: SearchConfig,
    dtype: torch.dtype,
    prefixes: Sequence[Sequence[int]] | None,
    literals: Literals | None,
) -> SearchInputs:
    """Return what is given for the search of sentences."""
    device = source_BS.device
    prefix_tokens = [torch.tensor(ids, dtype=torch.int64) for ids in prefixes or [[]] * len(source_BS)]
    prefix_BP = pad_sequence(prefix_tokens, batch_first=True, padding_value=PAD)
    prefix_BP = resize_last(prefix_BP, round_up_length(prefix_BP.shape[1], device) + 1, PAD).to(device)
    ratio_limit_B = (config.max_ratio * length_B + 20).clamp(max=config.max_length).long()
    max_length_B = (ratio_limit_B + (prefix_BP != PAD).sum(1)).clamp(max=config.max_length)
    literal_M = source_BS.new_tensor(literals.vocabulary if literals else [])
    wanted = literals.of_sentences if literals else [[]] * len(source_BS)
    uniform_BTK = None
    if config.sample:
        steps = round_up_length(int(max_length_B.max()), device)
        uniform_BTK = draw_uniform_numbers(source_BS, length_B, steps, config).to(device, accumulation_dtype(dtype))
    return SearchInputs(
        source_length_B=length_B,
        max_length_B=max_length_B,
        literal_BM=literal_M.repeat(len(source_BS), 1),
        wanted_BM=torch.stack([torch.isin(literal_M, source_BS.new_tensor(ids)) for ids in wanted]),
        prefix_BP=prefix_BP,
        uniform_BTK=uniform_BTK,
    )


def draw_uniform_numbers(source_BS: Tensor, length_B: Tensor, steps: int, config: SearchConfig) -> Tensor:
    """Return uniform_BTK, random numbers in [0, 1) for sampling.

    They depend on the seed and the source sentence only, so samples do not depend on the rest of the batch.
    """
    sentences = [ids[:length] for ids, length in zip(source_BS.tolist(), length_B.tolist(), strict=True)]
    numbers = [np.random.default_rng([config.seed, *ids]).random((steps, config.width)) for ids in sentences]
    return torch.from_numpy(np.stack(numbers))


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
        self.reset()

    def reset(self) -> None:
        """Discard the pending count, after the batch has changed."""
        self.pending: tuple[Tensor, torch.cuda.Event | None] = torch.tensor(0), None

    def __call__(self, count: Tensor) -> int:
        if not self.delayed:
            return int(count)
        previous, copied = self.pending
        copy = count.to("cpu", non_blocking=True, copy=True)
        self.pending = copy, torch.cuda.current_stream(count.device).record_event() if count.is_cuda else None
        if copied is not None:
            copied.synchronize()
        return int(previous)


# ----------------------------------------------------------------------------------------------------- forced decoding
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
    hypotheses, lengths = [], length_B.tolist()
    for row, (features_TD, labels_T) in enumerate(zip(features_BTD, labels_BT, strict=True)):
        labels_T = labels_T[labels_T != PAD]
        logp_T1 = log_probabilities(model.logits(features_TD[: len(labels_T)])).gather(1, labels_T.unsqueeze(1))
        token_scores = logp_T1.flatten().tolist()
        weights_TS = None if weights_BTS is None else weights_BTS[row, : len(labels_T), : lengths[row]].clone()
        score = sum(token_scores)  # in fp64, as in the search
        hypotheses.append(Hypothesis(labels_T.tolist(), score, weights_TS, token_scores=token_scores))
    return hypotheses
