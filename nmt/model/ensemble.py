"""Ensembles: several models that translate as one, with the mean of their probabilities at every step.

Shapes are as in `decoder.py`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import Parts
from nmt.model.seq2seq import Seq2Seq


class Ensemble:
    """Several models with the same vocabularies, behind the interface that search expects of a single model."""

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        self.members = members
        self.dtype = members[0].dtype
        self.is_fast = all(member.is_fast for member in members)
        self.attends = any(member.attends for member in members)
        limits = (member.max_source_positions for member in members)
        self.max_source_positions = min((limit for limit in limits if limit is not None), default=None)

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Parts, Parts]:
        """Encode with all members. Return their memories and initial decoder states."""
        memories, states = zip(*(member.start(source_BS, length_B) for member in self.members), strict=True)
        return Parts(memories), Parts(states)

    def decode(self, tokens_NT: Tensor, state: Parts, memory: Parts) -> tuple[Tensor, Tensor | None, Parts]:
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
        known = [member_weights for member_weights in weights if member_weights is not None]
        mean_NTS = torch.stack(known).mean(0) if known else None
        return torch.cat(features, 2), mean_NTS, Parts(states)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logarithm of the mean probability. It is normalized, so log-softmax leaves it unchanged."""
        sizes = [member.features for member in self.members]
        parts = zip(self.members, features.split(sizes, -1), strict=True)
        logp = [
            torch.log_softmax(member.logits(part), -1, dtype=accumulation_dtype(part.dtype)) for member, part in parts
        ]
        return torch.logsumexp(torch.stack(logp), 0) - math.log(len(logp))
