"""The hypotheses of a search: how they are initialized, stored, ranked and finalized.

Shapes: B sentences, K hypotheses of each, N = B x K rows (sentence-major), S source and T target positions, P prefix
positions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.config import BOS, PAD, SearchConfig
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import resize_last, round_up_room


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished or truncated translation of one sentence, as token ids."""

    tokens: list[int]  # ends with `</s>`, unless truncated at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights, a row for each token and at least one column for each source piece;
    # None if they were not kept or the model has no attention
    ranking_score: float | None = None  # score after penalties (`apply_penalties`); None if nothing was ranked
    token_scores: list[float] | None = None  # log-probability of each token; only of given targets


def select_rows(tensors: Iterable[Tensor | None], rows: Tensor) -> list[Any]:
    """Return the given rows of each tensor. None stays None."""
    return [None if tensor is None else tensor[rows] for tensor in tensors]


def scatter_rows(tensors: Iterable[Any], rows: Tensor, new: Iterable[Any]) -> list[Any]:
    """Return a copy of each tensor with the corresponding new ones in the given rows. None stays None."""
    pairs = zip(tensors, new, strict=True)
    return [None if tensor is None else tensor.index_copy(0, rows, update) for tensor, update in pairs]


class Beams(NamedTuple):
    """The hypotheses of all sentences in the batch, best first in each sentence (in each group, for diverse search).

    These are the tensors that a step of the search changes; `SearchInputs` has those that it does not.
    """

    tokens_BKT: Tensor  # the tokens of the hypothesis without `<s>`, then PAD; T is the room for tokens
    last_token_BK: Tensor  # `<s>` at first; PAD if the hypothesis had ended before the last step
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens, `</s>` included
    finished_BK: Tensor  # whether the hypothesis has ended, or the search of its sentence is over
    log_coverage_BK: Tensor | None  # the sum of logarithms in the coverage penalty, at most 0; None without the penalty
    coverage_BKS: Tensor | None  # attention weight that each source position has received; None without the penalty
    step_B: Tensor  # steps taken, which is the length of an unfinished hypothesis

    def select(self, rows_B: Tensor) -> "Beams":
        """Return the beams of the given sentences."""
        return Beams(*select_rows(self, rows_B))

    def scatter_rows(self, rows_B: Tensor, new: "Beams") -> "Beams":
        """Replace the sentences in these rows by new ones, which have taken fewer steps."""
        new = new._replace(tokens_BKT=resize_last(new.tokens_BKT, self.tokens_BKT.shape[2], PAD))
        return Beams(*scatter_rows(self, rows_B, new))

    def make_room(self, tokens: int) -> "Beams":
        """Return beams with room for this many tokens."""
        if tokens <= self.tokens_BKT.shape[2]:
            return self
        return self._replace(tokens_BKT=resize_last(self.tokens_BKT, round_up_room(tokens), PAD))

    def resize_source(self, positions: int) -> "Beams":
        """Return a copy with this many source positions. Room that only longer translations needed is dropped."""
        tokens_BKT = self.tokens_BKT[:, :, : int(self.step_B.max())]
        coverage_BKS = resize_last(self.coverage_BKS, positions, value=1)  # padding counts as covered
        return self._replace(tokens_BKT=tokens_BKT, coverage_BKS=coverage_BKS)

    def state_rows(self, rows_B: Tensor) -> Tensor:
        """Return the rows of the decoder state that belong to all hypotheses of the given sentences."""
        width = self.score_BK.shape[1]
        return (rows_B.unsqueeze(1) * width + torch.arange(width, device=rows_B.device)).flatten()

    def slice_hypotheses(self, slots: slice) -> "Beams":
        """Return the same slots of every sentence."""
        tensors: Any = (part if part is None or part.dim() == 1 else part[:, slots] for part in self)
        return Beams(*tensors)


class SearchInputs(NamedTuple):
    """What is given for the search of each sentence in the batch, besides the source."""

    literal_M: Tensor  # the literal pieces of the vocabulary, for all sentences; none if there is nothing to copy
    sentence_B: Tensor  # index of the sentence among all sentences of the search; -1: the row is idle
    source_length_B: Tensor  # length of the source in pieces
    min_length_B: Tensor  # minimum tokens of a hypothesis, `</s>` included
    max_length_B: Tensor  # maximum tokens of a hypothesis, `</s>` included
    literals_BM: Tensor  # whether translations must have the literal piece, exactly once; else they must not have it
    prefix_BP: Tensor  # tokens that translations start with, and PAD after the prefix, at least in the last column
    uniform_BTK: Tensor | None  # random numbers in [0, 1) for sampling, for each step and sample

    def select(self, rows_B: Tensor) -> "SearchInputs":
        """Return the inputs of the given sentences."""
        return SearchInputs(self.literal_M, *select_rows(self[1:], rows_B))

    def scatter_rows(self, rows_B: Tensor, new: "SearchInputs") -> "SearchInputs":
        """Replace the sentences in these rows by new ones."""
        columns = max(self.prefix_BP.shape[1], new.prefix_BP.shape[1])
        steps = max(0 if part.uniform_BTK is None else part.uniform_BTK.shape[1] for part in (self, new))
        old, new = (part.pad(columns, steps) for part in (self, new))
        return SearchInputs(self.literal_M, *scatter_rows(old[1:], rows_B, new[1:]))

    def pad(self, columns: int, steps: int) -> "SearchInputs":
        """Return inputs with prefixes of this many columns and random numbers for this many steps."""
        uniform_BTK = self.uniform_BTK
        if uniform_BTK is not None:
            uniform_BTK = F.pad(uniform_BTK, (0, 0, 0, steps - uniform_BTK.shape[1]))
        return self._replace(prefix_BP=resize_last(self.prefix_BP, columns, PAD), uniform_BTK=uniform_BTK)


class ActiveBatch(NamedTuple):
    """The sentences that are being searched: encoder memory, decoder state, hypotheses and inputs."""

    memory: Any
    state: Any
    beams: Beams
    inputs: SearchInputs
    returned_B: Tensor  # whether the hypotheses have been returned, since the search is over

    def select(self, rows_B: Tensor) -> "ActiveBatch":
        """Return the given sentences."""
        return ActiveBatch(self.memory.select(rows_B), *self.select_all_but_memory(rows_B))

    def select_all_but_memory(self, rows_B: Tensor) -> tuple[Any, Beams, SearchInputs, Tensor]:
        """Return the other fields for the given sentences."""
        state = self.state.select(self.beams.state_rows(rows_B))
        return state, self.beams.select(rows_B), self.inputs.select(rows_B), self.returned_B[rows_B]

    def shrink(self, rows_B: Tensor) -> "ActiveBatch":
        """Return the given sentences, each of which stays in its row or comes from a row beyond the last one returned.

        The old memory is overwritten in place, since copying it takes as long as a good part of a step.
        """
        moved_B = (rows_B != torch.arange(len(rows_B), device=rows_B.device)).nonzero().squeeze(1)
        memory = self.memory.scatter_rows(moved_B, self.memory.select(rows_B[moved_B])).keep_first(len(rows_B))
        return ActiveBatch(memory, *self.select_all_but_memory(rows_B))

    def scatter_rows(self, rows_B: Tensor, new: "ActiveBatch") -> "ActiveBatch":
        """Replace the sentences in these rows by new ones. The old memory is overwritten in place."""
        return ActiveBatch(
            self.memory.scatter_rows(rows_B, new.memory),
            self.state.scatter_rows(self.beams.state_rows(rows_B), new.state),
            self.beams.scatter_rows(rows_B, new.beams),
            self.inputs.scatter_rows(rows_B, new.inputs),
            self.returned_B.index_copy(0, rows_B, new.returned_B),
        )

    def mark_idle(self, is_idle_B: Tensor) -> "ActiveBatch":
        """Return the batch with some rows idle: they count as done and returned, and can be replaced."""
        return self._replace(
            beams=self.beams._replace(finished_BK=self.beams.finished_BK | is_idle_B.unsqueeze(1)),
            inputs=self.inputs._replace(
                sentence_B=self.inputs.sentence_B.masked_fill(is_idle_B, -1),
                max_length_B=self.inputs.max_length_B.masked_fill(is_idle_B, 0),
            ),
            returned_B=self.returned_B | is_idle_B,
        )

    def make_room(self, tokens: int) -> "ActiveBatch":
        """Return the batch with room for this many target tokens of each hypothesis."""
        return self._replace(state=self.state.make_room(tokens), beams=self.beams.make_room(tokens))

    def resize_source(self, positions: int) -> "ActiveBatch":
        """Return the batch with this many source positions, the last ones padding. No sentence may be longer.

        Room for target tokens that only earlier sentences needed is dropped, once their rows have other sentences.
        """
        has_same_positions = positions == self.memory.positions
        if has_same_positions and self.beams.tokens_BKT.shape[2] <= round_up_room(int(self.beams.step_B.max())):
            return self
        return self._replace(
            memory=self.memory if has_same_positions else self.memory.resize_source(positions),
            state=self.state.resize_source(positions),
            beams=self.beams.resize_source(positions),
        )


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Back-pointers and attention weights of one search step, for each sentence in the batch."""

    sentence_B: Tensor  # the sentences; -1: the row is idle
    parent_BK: Tensor | None  # the hypotheses that were continued; None: each slot continued its own
    weights_BKS: Tensor


@dataclass(slots=True)
class History:
    """The attention weights of all steps, from which those of a hypothesis are traced back."""

    first_weights: dict[int, Tensor] = field(default_factory=dict)  # at the first token, of sentences in the search
    steps: list[BeamStep] = field(default_factory=list)  # the following ones; empty if no weights are kept

    def add_first(self, sentence_B: Tensor, weights_BS: Tensor) -> None:
        """Record the weights at the first token of sentences."""
        self.first_weights.update(zip(sentence_B.tolist(), weights_BS, strict=True))

    def add(self, sentence_B: Tensor, parent_BK: Tensor | None, weights_BKS: Tensor) -> None:
        """Record one step of the batch, as copies: the next step may overwrite its results."""
        parent_BK = None if parent_BK is None else parent_BK.clone()
        self.steps.append(BeamStep(sentence_B, parent_BK, weights_BKS.clone()))


def init_beams(length_B: Tensor, positions: int, config: SearchConfig, dtype: torch.dtype) -> Beams:
    """Return beams without tokens, for sources of `length_B` pieces padded to `positions`.

    The slots of a group start out equal, so all but its first get a score of -inf. Samples are independent: each slot
    counts.
    """
    shape_BK = len(length_B), config.width
    device = length_B.device
    # Scores are sums of many terms, so they are fp64. MPS has no fp64.
    score_dtype = accumulation_dtype(dtype) if device.type == "mps" else torch.float64
    score_BK = torch.zeros(shape_BK, dtype=score_dtype, device=device)
    if not config.sample:
        group_size = config.width // config.groups
        score_BK[:, torch.arange(config.width, device=device) % group_size > 0] = float("-inf")
    log_coverage_BK = coverage_BKS = None
    if config.coverage_penalty:
        log_coverage_BK = torch.zeros(shape_BK, dtype=accumulation_dtype(dtype), device=device)
        padding_BS = torch.arange(positions, device=device) >= length_B.unsqueeze(1)  # counts as covered
        coverage_BKS = padding_BS.to(accumulation_dtype(dtype)).unsqueeze(1).repeat(1, config.width, 1)
    return Beams(
        tokens_BKT=torch.zeros((*shape_BK, 0), dtype=torch.int64, device=device),
        last_token_BK=torch.full(shape_BK, BOS, device=device),
        score_BK=score_BK,
        length_BK=torch.zeros(shape_BK, dtype=torch.int64, device=device),
        finished_BK=torch.zeros(shape_BK, dtype=torch.bool, device=device),
        log_coverage_BK=log_coverage_BK,
        coverage_BKS=coverage_BKS,
        step_B=torch.zeros_like(length_B),
    )


def limit_lengths(length_B: Tensor, prefix_BP: Tensor, config: SearchConfig) -> tuple[Tensor, Tensor]:
    """Return min_length_B and max_length_B, the limits of `SearchInputs`, for sources of `length_B` pieces."""
    prefix_length_B = (prefix_BP != PAD).sum(1)
    ratio_limit_B = (config.max_ratio * length_B + 20).clamp(max=config.max_length).long() + prefix_length_B
    ratio_minimum_B = (config.min_ratio * length_B).clamp(max=config.max_length).ceil().long()
    min_length_B = ratio_minimum_B.clamp(min=config.min_length)
    return min_length_B, ratio_limit_B.maximum(min_length_B).clamp(max=config.max_length)


def apply_penalties(score: Tensor, length: Tensor, log_coverage: Tensor | None, config: SearchConfig) -> Tensor:
    """Return the ranking score log P / lp + cp (Wu et al. 2016, eq. 14), where lp is ((5 + n) / 6)^alpha or n^alpha."""
    base = (5 + length) / 6 if config.penalty == "gnmt" else length.clamp(min=1)
    ranking_score = score / base**config.length_penalty
    if log_coverage is not None:
        ranking_score = ranking_score + config.coverage_penalty * log_coverage
    return ranking_score


# ------------------------------------------------------------------------------------------------------------ results
def trace_back_weights(history: History, beams: Beams, sentence_B: Tensor) -> Tensor:
    """Return weights_BKTS of the hypotheses of sentences that are done, by following the parents from the last step.

    The rows are aligned at the end: of a sentence that took n steps, only the last n rows are valid. The weights at the
    first token are removed from the history.
    """
    slot_BK = torch.arange(beams.score_BK.shape[1], device=beams.score_BK.device).expand_as(beams.score_BK)
    positions = history.steps[-1].weights_BKS.shape[2]
    first_step = len(history.steps) + 1 - int(beams.step_B.max())
    weights = []
    for step in reversed(history.steps[first_step:]):
        # Sentences that joined the search later have no row; any will do, since their hypotheses are shorter.
        row_B1 = (sentence_B.unsqueeze(1) == step.sentence_B).int().argmax(1, keepdim=True)
        if step.parent_BK is not None:
            slot_BK = step.parent_BK[row_B1, slot_BK]
        weights.append(resize_last(step.weights_BKS[row_B1, slot_BK], positions))
    weights_BKTS = F.pad(torch.stack(weights[::-1], 2), (0, 0, 1, 0))
    rows_B = torch.arange(len(weights_BKTS), device=slot_BK.device)
    first_weights = [resize_last(history.first_weights.pop(sentence), positions) for sentence in sentence_B.tolist()]
    weights_BKTS[rows_B, :, -beams.step_B] = torch.stack(first_weights).unsqueeze(1)
    return weights_BKTS.cpu()


def finalize_hypotheses(
    beams: Beams, sentence_B: Tensor, history: History, config: SearchConfig
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the index of each sentence and its n best hypotheses, best first.

    There are fewer than n if the search found fewer distinct ones. Samples keep the order in which they were drawn.
    """
    weights_BKTS = trace_back_weights(history, beams, sentence_B) if history.steps else None
    ranking_score_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.log_coverage_BK, config)
    if config.sample:
        ranking_score_BK = torch.zeros_like(ranking_score_BK)
    order_BK = ranking_score_BK.argsort(dim=1, descending=True, stable=True)[:, : config.n_best]
    rows_B1 = torch.arange(len(order_BK), device=order_BK.device).unsqueeze(1)
    columns = [
        order_BK.tolist(),
        beams.tokens_BKT[rows_B1, order_BK].tolist(),
        beams.score_BK[rows_B1, order_BK].tolist(),
        ranking_score_BK[rows_B1, order_BK].tolist(),
    ]
    steps = beams.step_B.tolist()
    sentences = sentence_B.tolist()
    for row, candidates in enumerate(zip(*columns, strict=True)):
        hypotheses = []
        for slot, tokens, score, ranking_score in zip(*candidates, strict=True):
            if score == float("-inf"):
                continue
            ids = [token for token in tokens if token != PAD]
            weights_TS = None if weights_BKTS is None else weights_BKTS[row, slot, -steps[row] :][: len(ids)]
            hypotheses.append(Hypothesis(ids, score, weights_TS, None if config.sample else ranking_score))
        yield sentences[row], hypotheses
