"""Read a corpus while it is trained on, repeatedly and without caching (`data.streaming`).

It comes in windows of `data.buffer` pairs, each of which is shuffled, sorted by length and trained on like a corpus.
The windows do not depend on the number of processes: each rank reads all text, tokenizes its share and sends it to the
others.
"""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from nmt.config import SIDES, DataConfig, TrainRun
from nmt.data.batch_encode import concatenate_ids, encode_texts, to_list
from nmt.data.corpus import DroppedLines, read_shards, stream_pairs, warn_of_dropped_lines
from nmt.data.encoding import (
    ENCODING_CHUNK,
    TOKENIZER_SAMPLE,
    Array,
    EncodedPairs,
    EncodedSide,
    Indices,
    log_dropped,
    make_no_pairs_error,
    sort_by_length,
)
from nmt.data.mixing import MixturePart, list_corpora, name_corpus_in_errors, prepend_tag
from nmt.data.readers import TEXT_SCHEMA
from nmt.data.resampling import concatenate_parts, local_range, sample_ids
from nmt.data.splits import find_line_files, find_parquet_files
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.system.distributed import all_gather, run_on_some_ranks

StreamOffset = list[int]  # position in a corpus: [epochs completed, pairs read in the current epoch]
EncodedShare = list[tuple[Array, Indices]]  # for each side the concatenated ids, and the number of ids of each text


class Window(NamedTuple):
    """The pairs that are trained on at a time."""

    pairs: EncodedPairs
    offsets: list[StreamOffset]  # where the window begins in each corpus


def stream_windows(run: TrainRun, tokenizer: Tokenizer, offsets: list[StreamOffset]) -> Iterator[Window]:
    """Yield windows without end, starting at these offsets; reading the next window overlaps with training on one.

    Windows without a pair to train on are skipped.

    offsets: one for each corpus; empty to start at the beginning.

    Raises:
        UserError: the text is invalid, or no pair of it can be trained on.
    """
    first_empty: list[StreamOffset] | None = None  # start of the first of consecutive windows without pairs
    with ThreadPoolExecutor(1) as pool:
        windows = read_windows(run, tokenizer, offsets)
        future = pool.submit(next, windows)
        while True:
            window = run_on_some_ranks(future.result, runs_here=True)
            assert window is not None
            start, table, share = window
            future = pool.submit(next, windows)
            pairs = merge_shares(run, tokenizer, table, all_gather(share))
            if pairs is not None:
                first_empty = None
                yield Window(pairs, start)
            elif first_empty is None:
                first_empty = start
            elif all(epoch > empty_epoch + 1 for (epoch, _), (empty_epoch, _) in zip(start, first_empty, strict=True)):
                raise make_no_pairs_error(run.data.max_length)  # a whole epoch of each corpus had none


def read_windows(
    run: TrainRun, tokenizer: Tokenizer, offsets: list[StreamOffset]
) -> Iterator[tuple[list[StreamOffset], pa.Table, EncodedShare]]:
    """Yield the start of each window, its texts, and this rank's share of its ids."""
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
    limit = run.data.max_length
    sampling = run.tokenizer.sampling
    known_words: list[dict[str, list[int]]] = [{}, {}]  # ids of words of each side
    while True:
        start = [[reader.epoch, reader.row] for reader in readers]
        table = pa.concat_tables([reader.take(count) for reader, count in zip(readers, counts, strict=True)])
        first, last = local_range(size)
        share = []
        for name, side, known in zip(SIDES, (tokenizer.source, tokenizer.target), known_words, strict=True):
            chunks = []
            for begin in range(first, last, ENCODING_CHUNK):
                texts = table[name][begin : min(begin + ENCODING_CHUNK, last)].combine_chunks()
                ids, lengths = encode_texts(texts, side, limit, known)
                if sampling:
                    best = np.split(ids, np.cumsum(lengths)[:-1])
                    seed = f"{run.seed} {start} {name}"
                    ids, lengths = concatenate_ids(
                        sample_ids(to_list(texts), best, side, sampling, limit, seed, begin), side
                    )
                chunks.append((ids, lengths))
            share.append(concatenate_parts(chunks, side))
        yield start, table, share


def pairs_per_corpus(data: DataConfig, pairs: int) -> list[int]:
    """Divide a number of pairs among the corpora in proportion to their weights."""
    ends = np.cumsum([0.0, *(part.weight for part in list_corpora(data))])
    return np.diff(np.round(ends / ends[-1] * pairs).astype(int)).tolist()


def merge_shares(
    run: TrainRun, tokenizer: Tokenizer, table: pa.Table, shares: list[EncodedShare]
) -> EncodedPairs | None:
    """Return the pairs of a window, sorted by length, or None if there are none to train on.

    Pairs with an empty or overlong side are dropped and counted in the log.
    """
    limit = run.data.max_length
    sides = []
    for number, side in enumerate((tokenizer.source, tokenizer.target)):
        ids, lengths = concatenate_parts([share[number] for share in shares], side)
        sides.append(EncodedSide(ids, np.append(0, np.cumsum(lengths))))
    source, target = sides
    lengths = np.stack([np.diff(side.offsets) for side in sides])
    empty = (lengths == 0).any(axis=0)
    too_long = (lengths > limit).any(axis=0)
    rows = np.flatnonzero(~(empty | too_long))
    log_dropped(len(table), len(rows), int(empty.sum()), limit)
    if not len(rows):
        return None
    order, runs = sort_by_length(lengths[:, rows] + 1)
    return EncodedPairs("", table, tokenizer, source, target, rows[order], runs, limit, 0.0, guided=False)


def build_empty_pairs(run: TrainRun, tokenizer: Tokenizer) -> EncodedPairs:
    """Return the placeholder for the training pairs until the first window is loaded."""
    pairs = TEXT_SCHEMA.empty_table()
    no_rows = np.zeros(0, dtype=np.int64)
    side = EncodedSide(no_rows.astype(np.int32), no_rows)
    limit = run.data.max_length
    key = compute_stream_key(run.data, tokenizer)
    return EncodedPairs(key, pairs, tokenizer, side, side, no_rows, no_rows.reshape(3, 0), limit, 0.0, guided=False)


class CorpusReader:
    """Reads one corpus repeatedly; `epoch` and `row` are the offset of the next pair."""

    def __init__(self, part: MixturePart, offset: StreamOffset, seed: int, number: int) -> None:
        self.epoch, self.row = offset
        self.number = number  # index of the corpus
        self.tables = repeat_corpus(part, seed, *offset)
        self.rest = TEXT_SCHEMA.empty_table()

    def take(self, count: int) -> pa.Table:
        """Return the next `count` pairs."""
        slices = []
        while count:
            if not len(self.rest):
                with name_corpus_in_errors(self.number):
                    epoch, self.rest = next(self.tables)
                if epoch != self.epoch:
                    self.row = 0
                self.epoch = epoch
            slices.append(self.rest[:count])
            self.rest = self.rest[count:]
            self.row += len(slices[-1])
            count -= len(slices[-1])
        return pa.concat_tables(slices) if slices else TEXT_SCHEMA.empty_table()


def repeat_corpus(part: MixturePart, seed: int, epoch: int, skip: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield tables of pairs without end, with their epoch; the first `skip` pairs of the first epoch are left out."""
    limit = part.data.limit
    while True:
        end = 0
        for table in read_corpus_once(part.data, seed, epoch):
            start = end
            end += len(table)
            if limit is not None:
                table = table[: max(0, limit - start)]
                end = min(end, limit)
            if end > max(start, skip):
                yield epoch, prepend_tag(table[max(0, skip - start) :], part.tag)
            if end == limit:
                break
        if not end:
            raise UserError(f"the split train of data.path={part.data.path} is empty")
        epoch += 1
        skip = 0


def read_corpus_once(data: DataConfig, seed: int, epoch: int) -> Iterator[pa.Table]:
    """Yield all training pairs of a corpus.

    The shards of line-based files are shuffled again for each epoch, unless `data.limit` asks for the first pairs.
    Dropped lines are logged at the end, or when the iterator is closed.
    """
    if (line_files := find_line_files(data, "train")) is None:
        yield from stream_pairs(data, "train")
        return
    kind, shards, columns = line_files
    dropped: DroppedLines = defaultdict(lambda: [0])
    if data.limit is None:
        order = np.random.default_rng((seed, epoch)).permutation(len(shards))
        shards = [shards[i] for i in order]
    try:
        for batch in read_shards(kind, shards, columns, dropped, data):
            yield pa.Table.from_batches([batch]).select(SIDES)
    finally:
        for (file, problem), counts in dropped.items():
            warn_of_dropped_lines(file, problem, *counts)


def sample_stream(run: TrainRun) -> pa.Table:
    """Return the first pairs of each corpus for tokenizer training: its share of a million, or all it has."""
    tables = []
    counts = pairs_per_corpus(run.data, TOKENIZER_SAMPLE)
    for number, (part, count) in enumerate(zip(list_corpora(run.data), counts, strict=True)):
        with name_corpus_in_errors(number):
            for epoch, table in repeat_corpus(part, run.seed, 0, 0):
                if epoch or not count:
                    break
                tables.append(table[:count])
                count -= len(tables[-1])
    return pa.concat_tables(tables)


def compute_stream_key(data: DataConfig, tokenizer: Tokenizer) -> str:
    """Return a key made of the tokenizer and the names and sizes of the files that are read.

    Changes of a dataset on the hub are only detected by `data.revision`.
    """
    sources: list[Any] = [tokenizer.fingerprint]
    for number, part in enumerate(list_corpora(data)):
        with name_corpus_in_errors(number):
            line_files = find_line_files(part.data, "train")
        files = [file for shard in line_files[1] for file in shard] if line_files else []
        if part.data.format == "parquet":
            files = list(map(Path, find_parquet_files(part.data, "train")))
        if part.data.format == "hub" and not line_files:
            files = sorted(file for file in Path(str(part.data.path)).rglob("*") if file.is_file())
        hub = [part.data.path, part.data.subset, *filter(None, [part.data.revision])]
        sources += [(file.name, file.stat().st_size) for file in files] or hub
    return xxh3_128(repr(sources).encode()).hexdigest()
