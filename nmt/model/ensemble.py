"""Several models that translate as one: the mean of their probabilities at every step. Shapes are as in `decoder`."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nmt.model.attention import Weights
from nmt.model.decoder import DecoderState
from nmt.model.kernels.linear import accumulation_dtype
from nmt.model.seq2seq import Seq2Seq
from nmt.model.windows import Memory

P = TypeVar("P", Memory, DecoderState)


class EnsembleState(tuple[P, ...]):
    """The memories or the states of all members."""

    def select(self, rows: Tensor) -> "EnsembleState[P]":
        return EnsembleState(part.select(rows) for part in self)

    def scatter_rows(self, rows: Tensor, others: "EnsembleState[P]") -> "EnsembleState[P]":
        return EnsembleState(own.scatter_rows(rows, its) for own, its in zip(self, others, strict=True))

    def trim_source(self, positions: int) -> "EnsembleState[P]":
        return EnsembleState(part.trim_source(positions) for part in self)


class Ensemble:
    """What search knows of a model, of several that have the same vocabularies."""

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        self.members = members
        self.dtype = members[0].dtype
        self.attends = any(member.attends for member in members)
        # How many positions of a source all of them can attend to; None: all.
        self.reach = min((member.reach for member in members if member.reach is not None), default=None)

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[EnsembleState[Memory], EnsembleState[DecoderState]]:
        memories, states = zip(*(member.start(source_BS, length_B) for member in self.members), strict=True)
        return EnsembleState(memories), EnsembleState(states)

    def decode(
        self, tokens_NT: Tensor, state: EnsembleState[DecoderState], memory: EnsembleState[Memory]
    ) -> tuple[Tensor, Weights | None, EnsembleState[DecoderState]]:
        """Features side by side, and the mean of the weights of those that attend."""
        members = zip(self.members, state, memory, strict=True)
        features, weights, states = zip(
            *(member.decode(tokens_NT, own, its) for member, own, its in members), strict=True
        )
        positions = memory[0].values_BHSM.shape[2]
        dense = [each.dense(positions) for each in weights if each is not None]
        mean = Weights(torch.stack(dense).mean(0), None) if dense else None
        return torch.cat(features, 2), mean, EnsembleState(states)

    def logits(self, features: Tensor) -> Tensor:
        """The logarithm of the mean probability, which is its own log softmax."""
        sizes = [member.features for member in self.members]
        parts = zip(self.members, features.split(sizes, -1), strict=True)
        logp = [
            torch.log_softmax(member.logits(part), -1, dtype=accumulation_dtype(part.dtype)) for member, part in parts
        ]
        return torch.logsumexp(torch.stack(logp), 0) - math.log(len(logp))
