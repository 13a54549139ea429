"""Search: the loop of steps over a batch of sentences, in which waiting ones take the places of those that are done.

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
REFILL_DIVISOR = 16  # refill a batch when 1 / REFILL_DIVISOR of it is done; every refill copies tensors


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
    batch_size: int | None = None,
    literals: Literals | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Translate sentences, and yield the index of each and its n best hypotheses, best first, once it is done.

    Args:
        length_B: source lengths in pieces.
        keep_weights: whether hypotheses get attention weights.
        prefixes: target tokens that the hypotheses of each sentence start with.
        batch_size: sentences to search at a time; None: all. They are taken in order. Sort them by decreasing length,
            so that source positions can be dropped as sentences get shorter.
        literals: the literal pieces that the hypotheses of each sentence must have.
    """
    device = source_BS.device
    batch_size = min(batch_size or len(source_BS), len(source_BS))
    if batch_size == len(source_BS):  # no others wait for the idle rows that fill up the batch
        batch_size = choose_first_size(batch_size, device)
    inputs = init_inputs(source_BS, length_B, config, model.dtype, prefixes, literals)
    batches = encode_sentences(model, source_BS, inputs, config, keep_weights, batch_size)
    waiting = WaitingSentences(batches, max(batch_size, len(source_BS)))
    count_done = AsyncCounter(delayed=device.type == "cuda")
    batch = waiting.take(batch_size)
    most_steps = 1  # of all sentences in the batch
    graphed_step: AbstractContextManager[Callable[..., Any]] = nullcontext(partial(advance, model, config))
    if isinstance(model, GraphedModel):
        graphed_step = model.graphed(advance, replace(config, seed=1, batch_tokens=None))  # without what a step ignores
    with graphed_step as step:
        while True:
            most_steps += 1
            batch = batch.make_room(most_steps)
            state, beams, done_B, num_done = step(batch.state, batch.beams, batch.memory, batch.inputs)
            batch = batch._replace(state=state, beams=beams)
            num_active = len(done_B) - count_done(num_done)
            size = min(round_up_batch_size(num_active + len(waiting), device), batch_size)
            should_refill = len(waiting) > 0 and size - num_active >= max(1, size // REFILL_DIVISOR)
            if size == len(done_B) and not should_refill:
                continue
            yield from return_hypotheses(batch, done_B, config)
            num_active = len(done_B) - int(done_B.sum())  # `count_done` may be late
            size = min(round_up_batch_size(num_active + len(waiting), device), batch_size)
            if not size:
                return
            # Where too few sentences wait, some that are done stay in the batch, behind the others.
            num_new = min(size - num_active, len(waiting))
            rows_B = done_B.nonzero().squeeze(1)
            if size < len(done_B):
                batch = batch.select(done_B.int().argsort(stable=True)[:size])
                rows_B = torch.arange(num_active, size, device=device)
            if num_new:
                batch = replace_sentences(batch, rows_B, waiting.take(num_new))
            most_steps = int(batch.beams.step_B.max())
            count_done.reset()


def replace_sentences(batch: ActiveBatch, rows_B: Tensor, new: ActiveBatch) -> ActiveBatch:
    """Return a batch in which new sentences have the first of the given rows.

    It has as many source positions as the longest sentence needs. The tensors of the old batch are overwritten.
    """
    rows_B = rows_B[: len(new.sentence_B)]
    is_kept_B = torch.ones_like(batch.sentence_B, dtype=torch.bool).index_fill_(0, rows_B, False)
    longest = torch.cat([batch.inputs.source_length_B[is_kept_B], new.inputs.source_length_B]).max()
    positions = round_up_length(int(longest), rows_B.device)
    steps = batch.beams.tokens_BKT.shape[2]
    return batch.resize_source(positions).replace(rows_B, new.make_room(steps).resize_source(positions))


def return_hypotheses(
    batch: ActiveBatch, done_B: Tensor, config: SearchConfig
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the results of sentences that are done, and mark them as returned."""
    rows_B = (done_B & (batch.sentence_B >= 0)).nonzero().squeeze(1)
    if len(rows_B):
        yield from finalize_hypotheses(batch.select(rows_B), config)
        batch.sentence_B[rows_B] = -1


def encode_sentences(
    model: SearchModel,
    source_BS: Tensor,
    inputs: SearchInputs,
    config: SearchConfig,
    keep_weights: bool,
    batch_size: int,
) -> Iterator[ActiveBatch]:
    """Encode sentences, `batch_size` at a time, and yield them with the first token of their hypotheses decoded.

    If the batch is larger than all of them, idle copies of a sentence fill it up.
    """
    count, device = len(source_BS), source_BS.device
    for sentence_B in torch.arange(max(batch_size, count), device=device).split(batch_size):
        is_idle_B, rows_B = sentence_B >= count, sentence_B.clamp(max=count - 1)
        given = select_rows(inputs, rows_B)
        given = given._replace(max_length_B=given.max_length_B.masked_fill(is_idle_B, 0))
        length_B = given.source_length_B
        positions = round_up_length(int(length_B.max()), device)
        memory, state = model.start(resize_last(source_BS[rows_B], positions, PAD), length_B)
        beams = init_beams(length_B, positions, config, keep_weights and model.attends, model.dtype)
        state, beams, *_ = advance(model, config, state, beams, memory, given)
        yield ActiveBatch(sentence_B.masked_fill(is_idle_B, -1), memory, state, beams, given).make_room(1)


class WaitingSentences:
    """`count` sentences whose search has not begun, from the batches of `encode_sentences`."""

    def __init__(self, batches: Iterator[ActiveBatch], count: int) -> None:
        self.batches, self.count = batches, count
        self.batch: ActiveBatch | None = None  # the last one that was encoded
        self.row = 0  # its first sentence that waits

    def __len__(self) -> int:
        return self.count

    def take(self, count: int) -> ActiveBatch:
        """Return the next sentences, after their first step: at most `count`, and at least one."""
        if self.batch is None or self.row == len(self.batch.sentence_B):
            self.batch, self.row = next(self.batches), 0
        end = min(self.row + count, len(self.batch.sentence_B))
        taken = self.batch.select(torch.arange(self.row, end, device=self.batch.sentence_B.device))
        self.count -= end - self.row
        self.row = end
        return taken


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
