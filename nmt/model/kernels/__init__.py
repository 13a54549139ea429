"""Optimized implementations of parts of the model.

Everything in `Kernels` has a readable version in `nmt/model/reference.py`. `model.kernels` chooses between the fast
parts and the readable ones; `cuda_graphs.py` and `inference_weights.py` only change how the fast ones are executed.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from nmt.model import reference
from nmt.model.kernels.additive import additive_score
from nmt.model.kernels.linear import Dropout, Linear
from nmt.model.kernels.loss import cross_entropy
from nmt.model.kernels.recurrence import RNN, permute_positions


class Kernels(NamedTuple):
    """The parts of a model that exist in several versions; `reference.py` documents them."""

    Linear: type[reference.Linear]
    Dropout: Callable[[float], nn.Module]
    RNN: type[reference.RNN]
    permute_positions: Callable[[Tensor, Tensor], Tensor]
    additive_score: Callable[..., Tensor]
    cross_entropy: Callable[..., reference.Loss]


FAST = Kernels(Linear, Dropout, RNN, permute_positions, additive_score, cross_entropy)
REFERENCE = Kernels(*(getattr(reference, name) for name in Kernels._fields))
KERNELS = {"fast": FAST, "reference": REFERENCE}
