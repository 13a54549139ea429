"""The hypotheses of a search: how they are initialized, stored, ranked and finalized.

Shapes: B sentences, K hypotheses of each, N = B x K rows (sentence-major), S source and T target positions, P prefix
positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.config import BOS, PAD, SearchConfig
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import resize_last


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished or truncated translation of one sentence, as token ids."""

    tokens: list[int]  # ends with `</s>`, unless truncated at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights, a row for each token and at least one column for each source piece;
    # None if they were not kept or the model has no attention
    ranking_score: float | None = None  # score after penalties (`apply_penalties`); None if nothing was ranked
    token_scores: list[float] | None = None  # log-probability of each token; only of given targets


@dataclass(slots=True)
class Beams:
    """The hypotheses of all sentences in the batch, best first in each sentence (in each group, for diverse search)."""

    tokens_BKT: Tensor  # `<s>` and the tokens of the hypothesis; left-padded with PAD in sentences that entered later
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens, `</s>` included
    finished_BK: Tensor  # whether the hypothesis has ended
    log_coverage_BK: Tensor | None  # the sum of logarithms in the coverage penalty, at most 0; None without the penalty
    coverage_BKS: Tensor | None  # attention weight that each source position has received; None without the penalty
    min_length_B: Tensor  # minimum tokens of a hypothesis, `</s>` included
    max_length_B: Tensor  # maximum tokens of a hypothesis, `</s>` included
    step_B: Tensor  # steps taken, which is the length of an unfinished hypothesis
    sentence_B: Tensor  # index of the sentence among all sentences of the search
    source_length_B: Tensor  # length of the source in pieces
    returned_B: Tensor  # whether the search is over, and its hypotheses have been returned

    def select(self, rows_B: Tensor) -> "Beams":
        """Return the beams of the given sentences."""
        tensors: Any = (None if tensor is None else tensor[rows_B] for tensor in self.tensors())
        return Beams(*tensors)

    def scatter_rows(self, rows_B: Tensor, new: "Beams") -> "Beams":
        """Replace the sentences in these rows by new ones, which have taken fewer steps."""
        padding = self.tokens_BKT.shape[2] - new.tokens_BKT.shape[2]
        new = replace(new, tokens_BKT=F.pad(new.tokens_BKT, (padding, 0), value=PAD))
        pairs = zip(self.tensors(), new.tensors(), strict=True)
        tensors: Any = (None if old is None else old.index_copy(0, rows_B, update) for old, update in pairs)
        return Beams(*tensors)

    def resize_source(self, positions: int) -> "Beams":
        """Return a copy with this many source positions, without token columns that are padding in every sentence."""
        tokens_BKT = self.tokens_BKT[:, :, -int(self.step_B.max()) - 1 :]
        coverage_BKS = resize_last(self.coverage_BKS, positions, value=1)  # padding counts as covered
        return replace(self, tokens_BKT=tokens_BKT, coverage_BKS=coverage_BKS)

    def state_rows(self, rows_B: Tensor) -> Tensor:
        """Return the rows of the decoder state that belong to all hypotheses of the given sentences."""
        width = self.score_BK.shape[1]
        return (rows_B.unsqueeze(1) * width + torch.arange(width, device=rows_B.device)).flatten()

    def slice_hypotheses(self, slots: slice) -> "Beams":
        """Return the same slots of every sentence."""
        return Beams(
            *(tensor if tensor is None or tensor.dim() == 1 else tensor[:, slots] for tensor in self.tensors())
        )

    def tensors(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


class SearchInputs(NamedTuple):
    """What is given for the search of each sentence in the batch, besides the source."""

    prefix_BP: Tensor  # tokens that translations start with, and PAD after the prefix, at least in the last column
    literal_M: Tensor  # the literal pieces of the vocabulary; none if there is nothing to copy
    literals_BM: Tensor  # whether translations must have the literal piece, exactly once; else they must not have it
    uniform_BTK: Tensor | None  # random numbers in [0, 1) for sampling, for each step and sample

    def select(self, rows_B: Tensor) -> "SearchInputs":
        """Return the inputs of the given sentences."""
        uniform_BTK = None if self.uniform_BTK is None else self.uniform_BTK[rows_B]
        return SearchInputs(self.prefix_BP[rows_B], self.literal_M, self.literals_BM[rows_B], uniform_BTK)

    def scatter_rows(self, rows_B: Tensor, new: "SearchInputs") -> "SearchInputs":
        """Replace the sentences in these rows by new ones."""
        columns = max(self.prefix_BP.shape[1], new.prefix_BP.shape[1])
        old_BP, new_BP = (resize_last(prefix_BP, columns, PAD) for prefix_BP in (self.prefix_BP, new.prefix_BP))
        literals_BM = self.literals_BM.index_copy(0, rows_B, new.literals_BM)
        uniform_BTK = None
        if self.uniform_BTK is not None and new.uniform_BTK is not None:
            steps = max(self.uniform_BTK.shape[1], new.uniform_BTK.shape[1])
            old_BTK, new_BTK = (F.pad(x, (0, 0, 0, steps - x.shape[1])) for x in (self.uniform_BTK, new.uniform_BTK))
            uniform_BTK = old_BTK.index_copy(0, rows_B, new_BTK)
        return SearchInputs(old_BP.index_copy(0, rows_B, new_BP), self.literal_M, literals_BM, uniform_BTK)


class ActiveBatch(NamedTuple):
    """The sentences that are being searched: encoder memory, decoder state, hypotheses and inputs."""

    memory: Any
    state: Any
    beams: Beams
    inputs: SearchInputs

    def select(self, rows_B: Tensor) -> "ActiveBatch":
        """Return the given sentences."""
        return ActiveBatch(
            self.memory.select(rows_B),
            self.state.select(self.beams.state_rows(rows_B)),
            self.beams.select(rows_B),
            self.inputs.select(rows_B),
        )

    def scatter_rows(self, rows_B: Tensor, new: "ActiveBatch") -> "ActiveBatch":
        """Replace the sentences in these rows by new ones. The old memory is overwritten in place."""
        return ActiveBatch(
            self.memory.scatter_rows(rows_B, new.memory),
            self.state.scatter_rows(self.beams.state_rows(rows_B), new.state),
            self.beams.scatter_rows(rows_B, new.beams),
            self.inputs.scatter_rows(rows_B, new.inputs),
        )

    def resize_source(self, positions: int) -> "ActiveBatch":
        """Return the batch with this many source positions, the last ones padding. No sentence may be longer."""
        if positions == self.memory.positions:
            return self._replace(beams=self.beams.resize_source(positions))
        return ActiveBatch(
            self.memory.resize_source(positions),
            self.state.resize_source(positions),
            self.beams.resize_source(positions),
            self.inputs,
        )


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Back-pointers and attention weights of one search step."""

    row_B: Tensor  # for every sentence of the search so far, its row in the batch at this step
    parent_BK: Tensor  # for each sentence in the batch, the hypotheses that were continued
    weights_BKS: Tensor  # for each sentence in the batch, the attention weights


@dataclass(slots=True)
class History:
    """The attention weights of all steps, from which those of a hypothesis are traced back."""

    first_weights_BS: Tensor  # weights at the first token of each sentence of the search so far
    steps: list[BeamStep]  # the following steps; empty without attention, or if weights are not kept

    def add_first(self, weights_BS: Tensor) -> None:
        """Record the weights at the first token of the next sentences."""
        positions = max(self.first_weights_BS.shape[1], weights_BS.shape[1])
        weights = (resize_last(part_BS, positions) for part_BS in (self.first_weights_BS, weights_BS))
        self.first_weights_BS = torch.cat([*weights])

    def add(self, sentence_B: Tensor, parent_BK: Tensor | None, weights_N1S: Tensor) -> None:
        """Record one step of the batch."""
        device = sentence_B.device
        row_B = torch.zeros(len(self.first_weights_BS), dtype=torch.int64, device=device)
        row_B[sentence_B] = torch.arange(len(sentence_B), device=device)
        weights_BKS = weights_N1S.view(len(sentence_B), -1, weights_N1S.shape[2])
        if parent_BK is None:
            parent_BK = torch.arange(weights_BKS.shape[1], device=device).expand(weights_BKS.shape[:2])
        self.steps.append(BeamStep(row_B, parent_BK, weights_BKS))


def init_beams(
    length_B: Tensor,
    positions: int,
    prefix_BP: Tensor,
    config: SearchConfig,
    dtype: torch.dtype,
    first_sentence: int = 0,
) -> Beams:
    """Return beams that hold only `<s>`, for sources of `length_B` pieces padded to `positions`.

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
    prefix_length_B = (prefix_BP != PAD).sum(1)
    ratio_limit_B = (config.max_ratio * length_B + 20).clamp(max=config.max_length).long() + prefix_length_B
    ratio_minimum_B = (config.min_ratio * length_B).clamp(max=config.max_length).ceil().long()
    min_length_B = ratio_minimum_B.clamp(min=config.min_length)
    max_length_B = ratio_limit_B.maximum(min_length_B).clamp(max=config.max_length)
    log_coverage_BK = coverage_BKS = None
    if config.coverage_penalty:
        log_coverage_BK = torch.zeros(shape_BK, dtype=accumulation_dtype(dtype), device=device)
        padding_BS = torch.arange(positions, device=device) >= length_B.unsqueeze(1)  # counts as covered
        coverage_BKS = padding_BS.to(accumulation_dtype(dtype)).unsqueeze(1).repeat(1, config.width, 1)
    return Beams(
        tokens_BKT=torch.full((*shape_BK, 1), BOS, device=device),
        score_BK=score_BK,
        length_BK=torch.zeros(shape_BK, dtype=torch.int64, device=device),
        finished_BK=torch.zeros(shape_BK, dtype=torch.bool, device=device),
        log_coverage_BK=log_coverage_BK,
        coverage_BKS=coverage_BKS,
        min_length_B=min_length_B,
        max_length_B=max_length_B,
        step_B=torch.zeros_like(max_length_B),
        sentence_B=torch.arange(first_sentence, first_sentence + len(length_B), device=device),
        source_length_B=length_B,
        returned_B=torch.zeros_like(length_B, dtype=torch.bool),
    )


def apply_penalties(score: Tensor, length: Tensor, log_coverage: Tensor | None, config: SearchConfig) -> Tensor:
    """Return the ranking score log P / lp + cp (Wu et al. 2016, eq. 14), where lp is ((5 + n) / 6)^alpha or n^alpha."""
    base = (5 + length) / 6 if config.penalty == "gnmt" else length.clamp(min=1)
    ranking_score = score / base**config.length_penalty
    if log_coverage is not None:
        ranking_score = ranking_score + config.coverage_penalty * log_coverage
    return ranking_score


# ------------------------------------------------------------------------------------------------------------ results
def trace_back_weights(history: History, beams: Beams) -> Tensor:
    """Return weights_BKTS of the hypotheses, by following the parents back from the last step.

    The rows are aligned at the end: of a sentence that took n steps, only the last n rows are valid.
    """
    slot_BK = torch.arange(beams.score_BK.shape[1], device=beams.score_BK.device).expand_as(beams.score_BK)
    positions = history.steps[-1].weights_BKS.shape[2]
    first_step = len(history.steps) + 1 - int(beams.step_B.max())
    weights = []
    for step in reversed(history.steps[first_step:]):
        # Sentences that joined the search later have no row; any will do, since their hypotheses are shorter.
        row_B1 = step.row_B[beams.sentence_B.clamp(max=len(step.row_B) - 1)].unsqueeze(1)
        slot_BK = step.parent_BK[row_B1, slot_BK]
        weights.append(resize_last(step.weights_BKS[row_B1, slot_BK], positions))
    weights_BKTS = F.pad(torch.stack(weights[::-1], 2), (0, 0, 1, 0))
    rows_B = torch.arange(len(weights_BKTS), device=slot_BK.device)
    first_weights_BS = resize_last(history.first_weights_BS[beams.sentence_B], positions)
    weights_BKTS[rows_B, :, -beams.step_B] = first_weights_BS.unsqueeze(1)
    return weights_BKTS.cpu()


def finalize_hypotheses(beams: Beams, history: History, config: SearchConfig) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the index of each sentence and its n best hypotheses, best first.

    There are fewer than n if the search found fewer distinct ones. Samples keep the order in which they were drawn.
    """
    weights_BKTS = trace_back_weights(history, beams) if history.steps else None
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
    sentences = beams.sentence_B.tolist()
    for row, candidates in enumerate(zip(*columns, strict=True)):
        hypotheses = []
        for slot, tokens, score, ranking_score in zip(*candidates, strict=True):
            if score == float("-inf"):
                continue
            ids = [token for token in tokens if token not in (PAD, BOS)]
            weights_TS = None if weights_BKTS is None else weights_BKTS[row, slot, -steps[row] :][: len(ids)]
            hypotheses.append(Hypothesis(ids, score, weights_TS, None if config.sample else ranking_score))
        yield sentences[row], hypotheses
