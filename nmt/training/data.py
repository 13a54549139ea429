"""The pairs that a run trains on: an epoch of a corpus, or a window of streamed text, at a time."""

import math
from collections.abc import Iterator, Sequence

import pyarrow as pa

from nmt.config import TrainRun
from nmt.data.batching import epoch_batches
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.resampling import resample_pairs
from nmt.data.stream import Window, stream_windows
from nmt.training.progress import Progress


class TrainingData:
    """The pairs and batches of the current epoch or window, and the validation pairs."""

    def __init__(self, run: TrainRun, corpus: EncodedPairs, valid: pa.Table, progress: Progress) -> None:
        """Load the epoch or window at which `progress` stands. A `corpus` that is streamed is empty."""
        self.run = run
        self.corpus = corpus  # before augmentation and subword sampling
        self.valid = valid
        self.pairs = corpus
        self.batches: Sequence[Indices] = []  # the rows of `pairs` of each update
        self.stream: Iterator[Window] | None = None
        if run.data.streaming:
            self.stream = stream_windows(run, corpus.tokenizer, progress.stream_offsets)
        self.load(progress)

    def load(self, progress: Progress) -> None:
        """Load the pairs of the current epoch, or the next window of a stream, and divide them into batches."""
        self.batches = []  # the batch orders of two epochs of a large corpus would take much memory
        number = progress.epoch
        if self.stream is None:
            self.pairs = self.get_epoch(number)
        else:
            self.pairs, progress.stream_offsets = next(self.stream)
            progress.epoch, number = progress.stream_offsets[0][0], progress.window
        self.batches = epoch_batches(self.pairs, self.run.train, self.run.seed, number)

    def load_next(self, progress: Progress) -> None:
        """Go to the next epoch, or to the next window of a stream."""
        progress.position = 0
        if self.stream is None:
            progress.epoch += 1
        else:
            progress.window += 1
        self.load(progress)

    def get_epoch(self, epoch: int) -> EncodedPairs:
        """Return the training pairs of an epoch. With `tokenizer.sampling` or `augment.*` they differ in each."""
        if self.corpus.sampling or self.corpus.augmenter:
            return resample_pairs(self.corpus, self.run.seed, epoch)
        return self.corpus

    def count_total_steps(self, epoch: int) -> int:
        """Return the number of the last update, by max_steps or max_epochs, whichever comes first.

        If epochs differ in length, all count like the first. The current one is `epoch`.
        """
        config, epoch_limit = self.run.train, math.inf
        if config.max_epochs is not None and self.stream is None:
            first = self.batches
            if epoch:
                first = epoch_batches(self.get_epoch(0), config, self.run.seed, 0)
            epoch_limit = config.max_epochs * len(first)
        return int(min(config.max_steps or math.inf, epoch_limit))
