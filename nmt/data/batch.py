"""A batch: the padded ids of sentence pairs.

Shapes: B pairs, S source positions (including `</s>`), T target positions (including `<s>` and `</s>`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from nmt.config import BOS, EOS, PAD

SHAPE_MULTIPLE = 8  # sizes are rounded to multiples of it, since libraries compile a kernel for each new shape
TokenIds = Sequence[int] | npt.NDArray[Any]


def round_down_to_shape(sentences: int) -> int:
    """Return the largest multiple of `SHAPE_MULTIPLE` up to a number of sentences; a smaller number as it is."""
    return sentences if sentences < SHAPE_MULTIPLE else sentences - sentences % SHAPE_MULTIPLE


class Batch(NamedTuple):
    """Padded ids of B pairs, int64."""

    source_BS: torch.Tensor  # x1 .. xn </s>, then padding
    source_length_B: torch.Tensor  # n + 1
    target_BT: torch.Tensor  # <s> y1 .. yn </s>, then padding; shape (B, 0) without targets
    target_length_B: torch.Tensor  # n + 1: number of predicted pieces
    alignment_BTS: torch.Tensor  # fp32: gold attention of each predicted piece; shape (B, 0, 0) without gold links

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(to_device(tensor, device) for tensor in self))

    def duplicate(self) -> "Batch":
        """Repeat all pairs once, after the last one."""
        return Batch(*(torch.cat([tensor, tensor]) for tensor in self))

    def pad_to(self, pairs: int, source: int, target: int) -> "Batch":
        """Pad to the given numbers of pairs, source positions and predicted target positions.

        An added pair has only `</s>` as its source and nothing to predict.
        """
        rows = pairs - len(self.source_BS)
        columns = source - self.source_BS.shape[1]
        steps = target + 1 - self.target_BT.shape[1]
        source_BS = F.pad(self.source_BS, (0, columns, 0, rows), value=PAD)
        source_BS[len(self.source_BS) :, 0] = EOS
        alignment_BTS = self.alignment_BTS
        if alignment_BTS.numel():
            alignment_BTS = F.pad(alignment_BTS, (0, columns, 0, steps, 0, rows))
        return Batch(
            source_BS=source_BS,
            source_length_B=F.pad(self.source_length_B, (0, rows), value=1),
            target_BT=F.pad(self.target_BT, (0, steps, 0, rows), value=PAD),
            target_length_B=F.pad(self.target_length_B, (0, rows)),
            alignment_BTS=alignment_BTS,
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. Copies to a GPU are asynchronous, from pinned memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def make_batch(sources: Sequence[TokenIds], targets: Sequence[TokenIds] | None = None) -> Batch:
    """Create a batch from the ids of sentences, given without `<s>` and `</s>`."""
    source_BS, source_length_B = pad_sentences(sources, 0)
    no_alignment_BTS = torch.zeros(len(sources), 0, 0)
    if targets is None:
        return Batch(source_BS, source_length_B, source_BS[:, :0], torch.zeros_like(source_length_B), no_alignment_BTS)
    target_BT, target_length_B = pad_sentences(targets, 1)
    target_BT[:, 0] = BOS
    return Batch(source_BS, source_length_B, target_BT, target_length_B, no_alignment_BTS)


def pad_sentences(sentences: Sequence[TokenIds], first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ids, placed from column `first` on and followed by `</s>`; also return the lengths, including `</s>`."""
    lengths = np.array([len(ids) + 1 for ids in sentences])
    padded = np.full((len(sentences), first + lengths.max()), PAD, dtype=np.int64)
    for row, ids in zip(padded, sentences, strict=True):
        row[first : first + len(ids)] = ids
        row[first + len(ids)] = EOS
    return torch.from_numpy(padded), torch.from_numpy(lengths)
