"""Ensembles: several models that translate as one, with the mean of their probabilities at every step.

Shapes are as in `decoder.py`.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nmt.model.attention import AttentionWeights
from nmt.model.decoder import DecoderState
from nmt.model.numerics import accumulation_dtype
from nmt.model.seq2seq import Seq2Seq
from nmt.model.windows import Memory

MemberPartT = TypeVar("MemberPartT", Memory, DecoderState)


class EnsembleState(tuple[MemberPartT, ...]):
    """A tuple of the members' memories or decoder states, with the same methods as a single one."""

    def select(self, rows: Tensor) -> "EnsembleState[MemberPartT]":
        return EnsembleState(part.select(rows) for part in self)

    def scatter_rows(self, rows: Tensor, new_rows: "EnsembleState[MemberPartT]") -> "EnsembleState[MemberPartT]":
        return EnsembleState(part.scatter_rows(rows, new) for part, new in zip(self, new_rows, strict=True))

    def trim_source(self, positions: int) -> "EnsembleState[MemberPartT]":
        return EnsembleState(part.trim_source(positions) for part in self)


class Ensemble:
    """Several models with the same vocabularies, behind the interface that search expects of a single model."""

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        self.members = members
        self.dtype = members[0].dtype
        self.is_fast = all(member.is_fast for member in members)
        self.attends = any(member.attends for member in members)
        # Number of source positions that all members can attend to; None: unlimited.
        self.reach = min((member.reach for member in members if member.reach is not None), default=None)

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[EnsembleState[Memory], EnsembleState[DecoderState]]:
        """Encode with all members. Return their memories and initial decoder states."""
        memories, states = zip(*(member.start(source_BS, length_B) for member in self.members), strict=True)
        return EnsembleState(memories), EnsembleState(states)

    def decode(
        self, tokens_NT: Tensor, state: EnsembleState[DecoderState], memory: EnsembleState[Memory]
    ) -> tuple[Tensor, AttentionWeights | None, EnsembleState[DecoderState]]:
        """Return the features of all members, concatenated, the mean attention weights, and the new state.

        The mean is over the members that have attention, and None if there are none.
        """
        features, weights, states = zip(
            *(
                member.decode(tokens_NT, member_state, member_memory)
                for member, member_state, member_memory in zip(self.members, state, memory, strict=True)
            ),
            strict=True,
        )
        positions = memory[0].values_BHSM.shape[2]
        dense = [member_weights.dense(positions) for member_weights in weights if member_weights is not None]
        mean = AttentionWeights(torch.stack(dense).mean(0), None) if dense else None
        return torch.cat(features, 2), mean, EnsembleState(states)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logarithm of the mean probability. It is normalized, so log-softmax leaves it unchanged."""
        sizes = [member.features for member in self.members]
        parts = zip(self.members, features.split(sizes, -1), strict=True)
        logp = [
            torch.log_softmax(member.logits(part), -1, dtype=accumulation_dtype(part.dtype)) for member, part in parts
        ]
        return torch.logsumexp(torch.stack(logp), 0) - math.log(len(logp))
