"""Hypotheses in search: where they begin, how they are kept and ranked, and how they are read back.

Shapes: B sentences, K hypotheses of each, N = B x K rows (sentence-major), S source and T target positions, P positions
of a given beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.config import BOS, PAD, SearchConfig
from nmt.model.kernels.linear import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: list[int]  # with `</s>`, unless cut at the maximum length
    score: float  # summed log-probability, without penalties
    weights_TS: Tensor | None  # attention weights, a row for each token and a column for each source piece at least;
    # None where not kept, or without attention
    ranking_score: float | None = None  # what search ranks by (`apply_penalties`); None where nothing is ranked


@dataclass(slots=True)
class Beams:
    """The hypotheses of the sentences still in search, best first in each sentence (in each group of it)."""

    tokens_BKT: Tensor  # `<s>`, and then what was written; PAD before it in those that came later
    score_BK: Tensor  # summed log-probability
    length_BK: Tensor  # tokens so far, `</s>` included
    finished_BK: Tensor
    covered_BK: Tensor | None  # the logarithms in the coverage penalty, 0 at most; None without it
    coverage_BKS: Tensor | None  # the weight that each source position has had
    least_B: Tensor  # the fewest tokens that a sentence may have, `</s>` included
    limit_B: Tensor  # the most
    age_B: Tensor  # steps so far: as many tokens has a live hypothesis
    sentence_B: Tensor  # the number of each sentence among all

    def of(self, rows_B: Tensor) -> "Beams":
        """Those of some sentences."""
        parts: Any = (None if part is None else part[rows_B] for part in self.parts())
        return Beams(*parts)

    def scatter_rows(self, rows_B: Tensor, others: "Beams") -> "Beams":
        """Others, who are younger, in the place of these rows."""
        before = self.tokens_BKT.shape[2] - others.tokens_BKT.shape[2]
        others = replace(others, tokens_BKT=F.pad(others.tokens_BKT, (before, 0), value=PAD))
        both = zip(self.parts(), others.parts(), strict=True)
        parts: Any = (None if own is None else own.index_copy(0, rows_B, its) for own, its in both)
        return Beams(*parts)

    def trim_source(self, positions: int) -> "Beams":
        """Without columns in which no one has written, and with fewer source positions."""
        coverage_BKS = None if self.coverage_BKS is None else self.coverage_BKS[:, :, :positions]
        tokens_BKT = self.tokens_BKT[:, :, -int(self.age_B.max()) - 1 :]
        return replace(self, tokens_BKT=tokens_BKT, coverage_BKS=coverage_BKS)

    def rows(self, rows_B: Tensor) -> Tensor:
        """Rows of the state, of all hypotheses of some sentences."""
        width = self.score_BK.shape[1]
        return (rows_B.unsqueeze(1) * width + torch.arange(width, device=rows_B.device)).flatten()

    def slots(self, own: slice) -> "Beams":
        """Some hypotheses of every sentence."""
        return Beams(*(part if part is None or part.dim() == 1 else part[:, own] for part in self.parts()))

    def parts(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


class ActiveBatch(NamedTuple):
    """Sentences in search: what the model knows of them, and their hypotheses."""

    memory: Any
    state: Any
    beams: Beams

    def of(self, rows_B: Tensor) -> "ActiveBatch":
        """Some of them."""
        return ActiveBatch(
            self.memory.select(rows_B), self.state.select(self.beams.rows(rows_B)), self.beams.of(rows_B)
        )

    def scatter_rows(self, rows_B: Tensor, others: "ActiveBatch") -> "ActiveBatch":
        """Others in the place of these rows. The memory before is overwritten."""
        return ActiveBatch(
            self.memory.scatter_rows(rows_B, others.memory),
            self.state.scatter_rows(self.beams.rows(rows_B), others.state),
            self.beams.scatter_rows(rows_B, others.beams),
        )

    def trim_source(self, positions: int) -> "ActiveBatch":
        """With fewer source positions, where no sentence is longer."""
        return ActiveBatch(
            self.memory.trim_source(positions), self.state.trim_source(positions), self.beams.trim_source(positions)
        )


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step appended, kept until hypotheses are read back."""

    row_B: Tensor  # of each of all sentences, where it was in search
    parent_BK: Tensor  # of those in search, as is what follows
    weights_BKS: Tensor


@dataclass(frozen=True, slots=True)
class History:
    """Where all sentences looked."""

    first_BS: Tensor  # for their first tokens
    steps: list[BeamStep]  # for what followed; none without attention, or where weights are not asked for

    def add(self, sentence_B: Tensor, parent_BK: Tensor | None, weights_N1S: Tensor) -> None:
        """One step of the sentences in search."""
        device = sentence_B.device
        row_B = torch.zeros(len(self.first_BS), dtype=torch.int64, device=device)
        row_B[sentence_B] = torch.arange(len(sentence_B), device=device)
        weights_BKS = weights_N1S.view(len(sentence_B), -1, weights_N1S.shape[2])
        if parent_BK is None:
            parent_BK = torch.arange(weights_BKS.shape[1], device=device).expand(weights_BKS.shape[:2])
        self.steps.append(BeamStep(row_B, parent_BK, weights_BKS))


def begin(length_B: Tensor, positions: int, given_BP: Tensor, config: SearchConfig, dtype: torch.dtype) -> Beams:
    """Before the first token: all slots of a group are alike, so one of them counts; of samples each does."""
    slots = len(length_B), config.width
    on: dict[str, Any] = {"device": length_B.device}
    # Sums of many terms; Apple's GPUs have no fp64.
    score_BK = torch.zeros(
        slots, dtype=accumulation_dtype(dtype) if length_B.device.type == "mps" else torch.float64, **on
    )
    if not config.sample:
        score_BK[:, torch.arange(config.width, **on) % (config.width // config.groups) > 0] = float("-inf")
    longest_B = (config.max_ratio * length_B + 20).clamp(max=config.max_length).long() + (given_BP != PAD).sum(1)
    least_B = (config.min_ratio * length_B).clamp(max=config.max_length).ceil().long().clamp(min=config.min_length)
    limit_B = longest_B.maximum(least_B).clamp(max=config.max_length)
    covered_BK = coverage_BKS = None
    if config.coverage_penalty:
        covered_BK = torch.zeros(slots, dtype=accumulation_dtype(dtype), **on)
        padding_BS = torch.arange(positions, **on) >= length_B.unsqueeze(1)  # covered from the first
        coverage_BKS = padding_BS.to(accumulation_dtype(dtype)).unsqueeze(1).repeat(1, config.width, 1)
    return Beams(
        tokens_BKT=torch.full((*slots, 1), BOS, **on),
        score_BK=score_BK,
        length_BK=torch.zeros(slots, dtype=torch.int64, **on),
        finished_BK=torch.zeros(slots, dtype=torch.bool, **on),
        covered_BK=covered_BK,
        coverage_BKS=coverage_BKS,
        least_B=least_B,
        limit_B=limit_B,
        age_B=torch.zeros_like(limit_B),
        sentence_B=torch.arange(len(length_B), **on),
    )


def apply_penalties(score: Tensor, length: Tensor, covered: Tensor | None, config: SearchConfig) -> Tensor:
    """What is compared: log P / lp + cp (Wu et al. 2016, eq. 14), where lp is ((5 + n) / 6)^alpha or n^alpha."""
    base = (5 + length) / 6 if config.penalty == "gnmt" else length.clamp(min=1)
    ranked = score / base**config.length_penalty
    return ranked if covered is None else ranked + config.coverage_penalty * covered


# ----------------------------------------------------------------------------------------------------- what was found
def trace(history: History, beams: Beams) -> Tensor:
    """weights_BKTS of the hypotheses: their parents are followed from the last step back. Of sentences that came later
    only the last rows mean something, so many as they have tokens."""
    slot_BK = torch.arange(beams.score_BK.shape[1], device=beams.score_BK.device).expand_as(beams.score_BK)
    positions, found = history.steps[-1].weights_BKS.shape[2], []
    for step in reversed(history.steps[len(history.steps) + 1 - int(beams.age_B.max()) :]):
        row_B1 = step.row_B[beams.sentence_B].unsqueeze(1)
        slot_BK = step.parent_BK[row_B1, slot_BK]
        found.append(step.weights_BKS[row_B1, slot_BK, :positions])
    weights_BKTS = F.pad(torch.stack(found[::-1], 2), (0, 0, 1, 0))
    rows_B = torch.arange(len(weights_BKTS), device=slot_BK.device)
    weights_BKTS[rows_B, :, -beams.age_B] = history.first_BS[beams.sentence_B, :positions].unsqueeze(1)
    return weights_BKTS.cpu()


def read_back(beams: Beams, history: History, config: SearchConfig) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The number of each sentence and its n best hypotheses, in order, fewer where there were fewer distinct ones than
    slots; samples as they were drawn."""
    weights_BKTS = trace(history, beams) if history.steps else None
    ranked_BK = apply_penalties(beams.score_BK, beams.length_BK, beams.covered_BK, config)
    if config.sample:
        ranked_BK = torch.zeros_like(ranked_BK)
    order_BK = ranked_BK.argsort(dim=1, descending=True, stable=True)[:, : config.n_best]
    rows_B1 = torch.arange(len(order_BK), device=order_BK.device).unsqueeze(1)
    columns = (order_BK, *(part[rows_B1, order_BK] for part in (beams.tokens_BKT, beams.score_BK, ranked_BK)))
    ages, sentences = beams.age_B.tolist(), beams.sentence_B.tolist()
    for row, hypotheses in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        found = []
        for slot, tokens, score, ranking_score in zip(*hypotheses, strict=True):
            if score == float("-inf"):
                continue
            ids = [token for token in tokens if token not in (PAD, BOS)]
            rows_TS = None if weights_BKTS is None else weights_BKTS[row, slot, -ages[row] :][: len(ids)]
            found.append(Hypothesis(ids, score, rows_TS, None if config.sample else ranking_score))
        yield sentences[row], found
