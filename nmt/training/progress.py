"""The progress of training, which a checkpoint stores as state.json."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from nmt.errors import UserError
from nmt.system.files import read_small
from nmt.system.messages import clip_repr
from nmt.system.quoting import quote_setting


class ValidatedCheckpoint(NamedTuple):
    """The validation scores of a checkpoint."""

    score: float  # of train.monitor
    loss: float  # nats per target token
    step: int


@dataclass(slots=True)
class Progress:
    """All that a checkpoint stores besides tensors.

    Randomness is stateless: torch's generator is reseeded at each micro-batch from (seed, step, micro-batch), and the
    order of the data is a function of (seed, epoch). So these positions are enough to resume exactly.
    """

    corpus: str  # key of the tokenized training and validation text
    step: int = 0  # updates made or skipped
    epoch: int = 0  # current epoch, from 0
    window: int = 0  # streaming: current window, from 0
    stream_offsets: list[list[int]] = field(default_factory=list)  # streaming: start of the window in each corpus
    position: int = 0  # batches done in the current epoch or window
    best: list[ValidatedCheckpoint] = field(default_factory=list)  # best checkpoints, best first
    validated_step: int = -1  # step of the last validation
    bad_validations: int = 0  # validations since the last improvement
    decays: int = 0  # plateaus of the learning rate
    skipped: int = 0  # updates skipped because loss or gradient was not finite
    skipped_in_a_row: int = 0  # skipped updates since the last one that was not


def read_progress(path: Path) -> Progress:
    """Read a state.json.

    Raises:
        UserError: it is damaged or from another version.
    """
    try:
        progress = Progress(**json.loads(read_small(path)))
        for item in fields(Progress):
            value = getattr(progress, item.name)
            if item.type in (int, float, str) and type(value) is not item.type:
                raise TypeError(f"{item.name} is {repr(value)[:40]}")
        progress.best = [ValidatedCheckpoint(float(a), float(b), int(step)) for a, b, step in progress.best]
        progress.stream_offsets = [[int(epoch), int(row)] for epoch, row in progress.stream_offsets]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        remedy = f"name=ANOTHER {quote_setting('init_from', str(path.parent))} starts a new run from its weights"
        raise UserError(f"{path} is damaged or from another version: {clip_repr(str(error))}; {remedy}") from None
    return progress
