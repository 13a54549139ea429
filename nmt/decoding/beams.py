"""The hypotheses of a search: how they begin, how they are stored and ranked, and what is returned of them.

Shapes: B sentences, K hypotheses of each, N = B x K rows (sentence-major), S source and T target positions, P prefix
positions, M literal pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.config import BOS, PAD, SearchConfig
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import resize_last, round_up_room, select_rows


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished or truncated translation of one sentence, as token ids."""

    tokens: list[int]  # ends with `</s>`, unless truncated at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights of each token and source piece; None if they were not kept or the
    # model has no attention
    ranking_score: float | None = None  # score after penalties (`apply_penalties`); None if nothing was ranked
    token_scores: list[float] | None = None  # log-probability of each token; only of given targets


class Beams(NamedTuple):
    """The hypotheses of all sentences in the batch, best first in each sentence.

    These are the tensors that a step of the search changes; `SearchInputs` has those that it does not.
    """

    tokens_BKT: Tensor  # the tokens of the hypothesis without `<s>`, then PAD; T is the room for tokens
    last_token_BK: Tensor  # `<s>` at first; PAD if the hypothesis had ended before the last step
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens, `</s>` included
    finished_BK: Tensor  # whether the hypothesis has ended, or the search of its sentence is over
    log_coverage_BK: Tensor | None  # the sum of logarithms in the coverage penalty, at most 0; None without the penalty
    coverage_BKS: Tensor | None  # attention weight that each source position has received; None without the penalty
    weights_BKTS: Tensor | None  # attention weights of each token; None if they are not kept
    step_B: Tensor  # steps taken, which is the length of an unfinished hypothesis

    def make_room(self, tokens: int) -> "Beams":
        """Return beams with room for this many tokens, rounded up."""
        room = round_up_room(tokens)
        missing = room - self.tokens_BKT.shape[2]
        if not missing:
            return self
        weights_BKTS = None if self.weights_BKTS is None else F.pad(self.weights_BKTS, (0, 0, 0, missing))
        return self._replace(tokens_BKT=resize_last(self.tokens_BKT, room, PAD), weights_BKTS=weights_BKTS)


class SearchInputs(NamedTuple):
    """What is given for the search of each sentence in the batch, besides the source."""

    source_length_B: Tensor  # length of the source in pieces
    max_length_B: Tensor  # maximum tokens of a hypothesis, `</s>` included
    literal_BM: Tensor  # the literal pieces of the vocabulary, the same for all sentences; none if nothing is copied
    wanted_BM: Tensor  # whether translations must have the literal piece, exactly once; else they must not have it
    prefix_BP: Tensor  # tokens that translations start with, and PAD after the prefix, at least in the last column
    uniform_BTK: Tensor | None  # random numbers in [0, 1) for sampling, for each step and sample


class ActiveBatch(NamedTuple):
    """The sentences that are being searched: encoder memory, decoder state, hypotheses and inputs."""

    sentence_B: Tensor  # index of the sentence among all of the search; -1: idle, or its results have been returned
    memory: Any
    state: Any
    beams: Beams
    inputs: SearchInputs

    def select(self, rows_B: Tensor) -> "ActiveBatch":
        """Return the given sentences."""
        parts = zip(self._fields, self, strict=True)
        return ActiveBatch(*(select_rows(part, self.rows_of(name, rows_B)) for name, part in parts))

    def rows_of(self, name: str, rows_B: Tensor) -> Tensor:
        """Return the rows that a field has for the given sentences: the state has one for each hypothesis."""
        if name != "state":
            return rows_B
        slots = self.beams.score_BK.shape[1]
        return (rows_B.unsqueeze(1) * slots + torch.arange(slots, device=rows_B.device)).flatten()

    def make_room(self, tokens: int) -> "ActiveBatch":
        """Return the batch with room for this many target tokens of each hypothesis, rounded up."""
        return self._replace(state=self.state.make_room(tokens), beams=self.beams.make_room(tokens))


def init_beams(length_B: Tensor, positions: int, config: SearchConfig, keep_weights: bool, dtype: torch.dtype) -> Beams:
    """Return beams without tokens, for sources of `length_B` pieces padded to `positions` and a model of `dtype`.

    The slots of a sentence start out equal, so all but its first get a score of -inf. Samples are independent: each
    slot counts.
    """
    shape_BK = len(length_B), config.width
    device = length_B.device
    # Scores are sums of many terms, so they are fp64. MPS has no fp64.
    score_dtype = accumulation_dtype(dtype) if device.type == "mps" else torch.float64
    score_BK = torch.zeros(shape_BK, dtype=score_dtype, device=device)
    if not config.sample:
        score_BK[:, 1:] = float("-inf")
    log_coverage_BK = coverage_BKS = weights_BKTS = None
    if config.coverage_penalty:
        log_coverage_BK = torch.zeros(shape_BK, dtype=accumulation_dtype(dtype), device=device)
        padding_BS = torch.arange(positions, device=device) >= length_B.unsqueeze(1)  # counts as covered
        coverage_BKS = padding_BS.to(accumulation_dtype(dtype)).unsqueeze(1).repeat(1, config.width, 1)
    if keep_weights:
        weights_BKTS = torch.zeros((*shape_BK, 0, positions), dtype=accumulation_dtype(dtype), device=device)
    return Beams(
        tokens_BKT=torch.zeros((*shape_BK, 0), dtype=torch.int64, device=device),
        last_token_BK=torch.full(shape_BK, BOS, device=device),
        score_BK=score_BK,
        length_BK=torch.zeros(shape_BK, dtype=torch.int64, device=device),
        finished_BK=torch.zeros(shape_BK, dtype=torch.bool, device=device),
        log_coverage_BK=log_coverage_BK,
        coverage_BKS=coverage_BKS,
        weights_BKTS=weights_BKTS,
        step_B=torch.zeros_like(length_B),
    )


def apply_penalties(score: Tensor, length: Tensor, log_coverage: Tensor | None, config: SearchConfig) -> Tensor:
    """Return the ranking score log P / lp + cp, where lp is ((5 + n) / 6)^alpha (Wu et al. 2016, eq. 14)."""
    ranking_score = score / ((5 + length) / 6) ** config.length_penalty
    if log_coverage is not None:
        ranking_score = ranking_score + config.coverage_penalty * log_coverage
    return ranking_score


def finalize_hypotheses(batch: ActiveBatch, config: SearchConfig) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the index of each sentence and its n best hypotheses, best first.

    There are fewer than n if the search found fewer distinct ones. Samples keep the order in which they were drawn.
    """
    beams = batch.beams
    ranking_score_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.log_coverage_BK, config)
    if config.sample:
        ranking_score_BK = torch.zeros_like(ranking_score_BK)
    order_BK = ranking_score_BK.argsort(dim=1, descending=True, stable=True)[:, : config.n_best]
    rows_B1 = torch.arange(len(order_BK), device=order_BK.device).unsqueeze(1)
    weights_BKTS = None if beams.weights_BKTS is None else beams.weights_BKTS[rows_B1, order_BK].cpu()
    tensors = (beams.tokens_BKT, beams.score_BK, ranking_score_BK)
    columns = [tensor[rows_B1, order_BK].tolist() for tensor in tensors]
    lengths = batch.inputs.source_length_B.tolist()
    for row, (sentence, *candidates) in enumerate(zip(batch.sentence_B.tolist(), *columns, strict=True)):
        hypotheses = []
        for slot, (tokens, score, ranking_score) in enumerate(zip(*candidates, strict=True)):
            if score == float("-inf"):
                continue
            ids = [token for token in tokens if token != PAD]
            weights_TS = None
            if weights_BKTS is not None:  # a copy, since a view would keep the whole batch in memory
                weights_TS = weights_BKTS[row, slot, : len(ids), : lengths[row]].clone()
            hypotheses.append(Hypothesis(ids, score, weights_TS, None if config.sample else ranking_score))
        yield sentence, hypotheses
