"""Read a corpus while it is trained on, repeatedly and without caching (`data.streaming`).

It comes in windows of `data.buffer` pairs, each of which is shuffled, sorted by length and trained on like a corpus.
Every process reads and tokenizes all text, so that windows do not depend on the number of processes.
"""

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from nmt.config import SIDES, DataConfig, TrainRun
from nmt.data.corpus import read_shards, stream_pairs
from nmt.data.encoding import (
    TOKENIZER_SAMPLE,
    EncodedPairs,
    EncodedSide,
    concatenate_ids,
    encode_texts,
    make_no_pairs_error,
    order_pairs,
    to_list,
)
from nmt.data.mixing import MixturePart, list_corpora, name_corpus_in_errors, prepend_tag
from nmt.data.readers import LINE_READERS, TEXT_SCHEMA
from nmt.data.resampling import sample_ids
from nmt.data.splits import find_files
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.system.distributed import run_on_some_ranks

log = logging.getLogger("nmt")
StreamOffset = list[int]  # position in a corpus: [epochs completed, pairs read in the current epoch]


class Window(NamedTuple):
    """The pairs that are trained on at a time."""

    pairs: EncodedPairs
    offsets: list[StreamOffset]  # where the window begins in each corpus


def stream_windows(run: TrainRun, tokenizer: Tokenizer, offsets: list[StreamOffset]) -> Iterator[Window]:
    """Yield windows without end, starting at these offsets; reading the next window overlaps with training on one.

    offsets: one for each corpus; empty to start at the beginning.

    Raises:
        UserError: the text is invalid, or no pair of a window can be trained on.
    """
    with ThreadPoolExecutor(1) as pool:
        windows = read_windows(run, tokenizer, offsets)
        future = pool.submit(next, windows)
        while True:
            window = run_on_some_ranks(future.result, runs_here=True)
            assert window is not None
            future = pool.submit(next, windows)
            yield window


def read_windows(run: TrainRun, tokenizer: Tokenizer, offsets: list[StreamOffset]) -> Iterator[Window]:
    """Yield windows, as `stream_windows` does."""
    parts = list_corpora(run.data)
    size = run.data.buffer
    starts = offsets or [[0, 0]] * len(parts)
    readers = [CorpusReader(part, starts[number], run.seed, number) for number, part in enumerate(parts)]
    counts = pairs_per_corpus(run.data, size)
    if not all(counts):
        raise UserError(
            f"data.buffer={size} is too small for the weights of data.corpora: a window would have no pair of "
            f"{parts[counts.index(0)].data.path}"
        )
    while True:
        start = [[reader.epoch, reader.row] for reader in readers]
        table = pa.concat_tables([reader.take(count) for reader, count in zip(readers, counts, strict=True)])
        yield Window(encode_window(table, run, tokenizer, str(start)), start)


def encode_window(table: pa.Table, run: TrainRun, tokenizer: Tokenizer, start: str) -> EncodedPairs:
    """Return the pairs of a window, sorted by length; those with an empty or overlong side are dropped and counted.

    `start` is where the window begins, as a seed of subword sampling.
    """
    limit, sampling = run.data.max_length, run.tokenizer.sampling
    sides = []
    for name, side in zip(SIDES, (tokenizer.source, tokenizer.target), strict=True):
        texts = table[name].combine_chunks()
        ids, lengths = encode_texts(texts, side, limit, threads=1)
        if sampling:
            best = np.split(ids, np.cumsum(lengths)[:-1])
            ids, lengths = concatenate_ids(
                sample_ids(to_list(texts), best, side, sampling, limit, f"{run.seed} {start} {name}", 0), side
            )
        sides.append(EncodedSide.build(ids, lengths))
    order, runs, message = order_pairs(np.stack([np.diff(side.offsets) for side in sides]), limit)
    log.info(message)
    if not len(order):
        raise make_no_pairs_error(limit)
    source, target = sides
    return EncodedPairs("", table, tokenizer, source, target, order, runs, limit)


def pairs_per_corpus(data: DataConfig, pairs: int) -> list[int]:
    """Divide a number of pairs among the corpora in proportion to their weights."""
    ends = np.cumsum([0.0, *(part.weight for part in list_corpora(data))])
    return np.diff(np.round(ends / ends[-1] * pairs).astype(int)).tolist()


def build_empty_pairs(run: TrainRun, tokenizer: Tokenizer) -> EncodedPairs:
    """Return the placeholder for the training pairs until the first window is loaded."""
    side = EncodedSide(np.zeros(0, np.int32), np.zeros(1, np.int64))
    order, runs, _ = order_pairs(np.zeros((2, 0), np.int64), run.data.max_length)
    key, pairs = compute_stream_key(run.data, tokenizer), TEXT_SCHEMA.empty_table()
    return EncodedPairs(key, pairs, tokenizer, side, side, order, runs, run.data.max_length)


class CorpusReader:
    """Reads one corpus repeatedly; `epoch` and `row` are the offset of the next pair."""

    def __init__(self, part: MixturePart, offset: StreamOffset, seed: int, number: int) -> None:
        self.epoch, self.row = offset
        self.number = number  # index of the corpus
        self.tables = repeat_corpus(part, seed, *offset)
        self.rest = TEXT_SCHEMA.empty_table()

    def take(self, count: int) -> pa.Table:
        """Return the next `count` pairs."""
        slices = [TEXT_SCHEMA.empty_table()]
        while count:
            if not len(self.rest):
                with name_corpus_in_errors(self.number):
                    epoch, self.rest = next(self.tables)
                self.row = self.row if epoch == self.epoch else 0
                self.epoch = epoch
            slices.append(self.rest[:count])
            self.rest = self.rest[count:]
            self.row += len(slices[-1])
            count -= len(slices[-1])
        return pa.concat_tables(slices)


def repeat_corpus(part: MixturePart, seed: int, epoch: int, skip: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield tables of pairs without end, with their epoch; the first `skip` pairs of the first epoch are left out."""
    while True:
        pairs = 0
        for table in read_corpus_once(part, seed, epoch):
            pairs += len(table)
            if len(table) > skip:
                yield epoch, table[skip:]
            skip = max(0, skip - len(table))
        if not pairs:
            raise UserError(f"the split train of data.path={part.data.path} is empty")
        epoch += 1
        skip = 0


def read_corpus_once(part: MixturePart, seed: int, epoch: int) -> Iterator[pa.Table]:
    """Yield all training pairs of a corpus, or the first `data.limit`.

    The shards of line-based files are shuffled again for each epoch, unless there is a limit.
    """
    data = part.data
    files = find_files(data, "train")
    if files is None or data.format not in LINE_READERS:
        tables = stream_pairs(data, "train")
    else:
        shards = files.shards
        if data.limit is None:
            order = np.random.default_rng((seed, epoch)).permutation(len(shards))
            shards = [shards[i] for i in order]
        tables = (pa.Table.from_batches([batch]) for batch in read_shards(files._replace(shards=shards), data))
    left = data.limit or sys.maxsize
    for table in tables:
        yield prepend_tag(table[:left], part.tag)
        left -= len(table)
        if left <= 0:
            return


def sample_stream(run: TrainRun) -> pa.Table:
    """Return the first pairs of each corpus for tokenizer training: its share of a million, or all it has."""
    samples = []
    counts = pairs_per_corpus(run.data, TOKENIZER_SAMPLE)
    for number, (part, count) in enumerate(zip(list_corpora(run.data), counts, strict=True)):
        with name_corpus_in_errors(number):
            for table in read_corpus_once(part, run.seed, 0):
                samples.append(table[:count])
                count -= len(samples[-1])
                if not count:
                    break
    if not any(map(len, samples)):
        raise UserError(f"the training text of data.path={run.data.path} is empty")
    return pa.concat_tables(samples)


def compute_stream_key(data: DataConfig, tokenizer: Tokenizer) -> str:
    """Return a key made of the tokenizer and the names and sizes of the files that are read.

    Changes of a dataset on the hub are only detected by `data.revision`.
    """
    sources: list[Any] = [tokenizer.fingerprint]
    for number, part in enumerate(list_corpora(data)):
        with name_corpus_in_errors(number):
            found = find_files(part.data, "train")
        files = found.paths if found else sorted(filter(Path.is_file, Path(str(part.data.path)).rglob("*")))
        hub = [part.data.path, part.data.subset, *filter(None, [part.data.revision])]
        sources += [(file.name, file.stat().st_size) for file in files] or hub
    return xxh3_128(repr(sources).encode()).hexdigest()
