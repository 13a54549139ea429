"""A corpus that is read while it is trained on, over and over, and kept nowhere (`data.streaming`).

It comes in windows of `data.buffer` pairs, each shuffled, sorted by length and trained on like a corpus of its own. A
window is the same whatever the number of processes: each reads all text, tokenizes its share of it, and hands that to
the others.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.table import InMemoryTable
from xxhash import xxh3_128

from nmt.config import DataConfig, TrainRun
from nmt.data.batch_encode import as_list, encode_texts
from nmt.data.corpus import note, streamed, tell_of
from nmt.data.encoding import (
    CHUNK,
    SAMPLE,
    SIDES,
    Array,
    EncodedPairs,
    EncodedSide,
    Indices,
    by_length,
    none_left,
    tell_dropped,
)
from nmt.data.mixing import MixturePart, corpora_of, named_corpus, with_tag
from nmt.data.readers import LINE_READERS, TEXTS, BadLine
from nmt.data.splits import files_of, parquet_files
from nmt.data.subword_sampling import draw, own_share, together
from nmt.data.tokenizer import Tokenizer
from nmt.errors import UserError
from nmt.runtime.distributed import all_gather, run_where

log = logging.getLogger("nmt")
Place = list[int]  # in a corpus: how often it was read to its end, and the pairs read since
Encoded = list[tuple[Array, Indices]]  # of each side the ids, end to end, and how many each text has


class Window(NamedTuple):
    """What is trained on at a time."""

    pairs: EncodedPairs
    places: list[Place]  # where it begins, in each corpus


def stream_windows(run: TrainRun, tokenizer: Tokenizer, places: list[Place]) -> Iterator[Window]:
    """Without an end, from these places on, or from the start; those without a pair to train on are passed over. While
    one is trained on the next is read.

    Raises:
        UserError: something is wrong with the text; or no pair can be trained on.
    """
    since: list[Place] | None = None  # where the first of some windows without a pair began
    with ThreadPoolExecutor(1) as pool:
        coming = raw_windows(run, tokenizer, places)
        future = pool.submit(next, coming)
        while True:
            found = run_where(future.result, mine=True)
            assert found is not None
            begin, table, own = found
            future = pool.submit(next, coming)
            pairs = put_together(run, tokenizer, table, all_gather(own))
            if pairs is not None:
                since = None
                yield Window(pairs, begin)
            elif since is None:
                since = begin
            elif all(place[0] > first[0] + 1 for place, first in zip(begin, since, strict=True)):
                raise none_left(run.data.max_length)  # of a whole reading


def raw_windows(
    run: TrainRun, tokenizer: Tokenizer, places: list[Place]
) -> Iterator[tuple[list[Place], pa.Table, Encoded]]:
    """Where a window begins, its texts, and this process's share of its pieces."""
    parts, size = corpora_of(run.data), run.data.buffer
    starts = places or [[0, 0]] * len(parts)
    readers = [Reader(part, starts[number], run.seed, number) for number, part in enumerate(parts)]
    counts = pairs_per_corpus(run.data, size)
    if not all(counts):
        raise UserError(
            f"data.buffer={size} is too small for the weights of data.corpora: a window would have no pair of "
            f"{parts[counts.index(0)].data.path}"
        )
    known: list[dict[str, list[int]]] = [{}, {}]
    while True:
        begin = [[reader.turn, reader.row] for reader in readers]
        table = pa.concat_tables([reader.take(count) for reader, count in zip(readers, counts, strict=True)])
        first, last = own_share(size)
        own, limit, sampling = [], run.data.max_length, run.tokenizer.sampling
        for name, side, words in zip(SIDES, (tokenizer.source, tokenizer.target), known, strict=True):
            drawn = []
            for start in range(first, last, CHUNK):
                texts = table[name][start : min(start + CHUNK, last)].combine_chunks()
                ids, lengths = encode_texts(texts, side, limit, words)
                if sampling:
                    best = np.split(ids, np.cumsum(lengths)[:-1])
                    seed = f"{run.seed} {begin} {name}"
                    ids, lengths = draw(as_list(texts), best, side, sampling, limit, seed, start)
                drawn.append((ids, lengths))
            own.append(together(drawn, side))
        yield begin, table, own


def pairs_per_corpus(data: DataConfig, pairs: int) -> list[int]:
    """How many of so many pairs are from each corpus."""
    ends = np.cumsum([0.0, *(part.weight for part in corpora_of(data))])
    return np.diff(np.round(ends / ends[-1] * pairs).astype(int)).tolist()


def put_together(run: TrainRun, tokenizer: Tokenizer, table: pa.Table, shares: list[Encoded]) -> EncodedPairs | None:
    """The pairs of a window, sorted; those with an empty or overlong side are left out and counted in the log. None
    where no other is there."""
    limit, sides = run.data.max_length, []
    for number, side in enumerate((tokenizer.source, tokenizer.target)):
        ids, lengths = together([share[number] for share in shares], side)
        sides.append(EncodedSide(ids, np.append(0, np.cumsum(lengths))))
    source, target = sides
    lengths = np.stack([np.diff(side.offsets) for side in sides])
    empty, longer = (lengths == 0).any(axis=0), (lengths > limit).any(axis=0)
    kept = np.flatnonzero(~(empty | longer))
    tell_dropped(len(table), len(kept), int(empty.sum()), limit)
    if not len(kept):
        return None
    order, runs = by_length(lengths[:, kept] + 1)
    pairs = Dataset(InMemoryTable(table))
    return EncodedPairs("", pairs, tokenizer, source, target, kept[order], runs, limit, 0.0, guided=False)


def empty_corpus(run: TrainRun, tokenizer: Tokenizer) -> EncodedPairs:
    """Before the first window."""
    pairs, none = Dataset(InMemoryTable(TEXTS.empty_table())), np.zeros(0, dtype=np.int64)
    side, limit = EncodedSide(none.astype(np.int32), none), run.data.max_length
    key = stream_key(run.data, tokenizer)
    return EncodedPairs(key, pairs, tokenizer, side, side, none, none.reshape(3, 0), limit, 0.0, guided=False)


class Reader:
    """One corpus, over and over; its place is that of the next pair."""

    def __init__(self, part: MixturePart, place: Place, seed: int, number: int) -> None:
        self.turn, self.row = place
        self.number = number  # of the corpus
        self.tables = endless(part, seed, *place)
        self.rest = TEXTS.empty_table()

    def take(self, count: int) -> pa.Table:
        """The next pairs."""
        taken = []
        while count:
            if not len(self.rest):
                with named_corpus(self.number):
                    turn, self.rest = next(self.tables)
                self.row = self.row if turn == self.turn else 0
                self.turn = turn
            taken.append(self.rest[:count])
            self.rest = self.rest[count:]
            self.row += len(taken[-1])
            count -= len(taken[-1])
        return pa.concat_tables(taken) if taken else TEXTS.empty_table()


def endless(part: MixturePart, seed: int, turn: int, skipped: int) -> Iterator[tuple[int, pa.Table]]:
    """The pairs of a corpus some at a time, with how often it was read before."""
    while True:
        end = 0
        for table in once(part.data, seed, turn):
            start, end = end, end + len(table)
            if part.data.limit is not None:
                table, end = table[: max(0, part.data.limit - start)], min(end, part.data.limit)
            if end > max(start, skipped):
                yield turn, with_tag(table[max(0, skipped - start) :], part.tag)
            if end == part.data.limit:
                break
        if not end:
            raise UserError(f"the split train of data.path={part.data.path} is empty")
        turn, skipped = turn + 1, 0


def once(data: DataConfig, seed: int, turn: int) -> Iterator[pa.Table]:
    """All training pairs; shards of files of lines come in another order each time, but where `data.limit` asks for the
    first pairs. What was left out is told at the end, also where no more is asked for."""
    if (found := files_of(data, "train")) is None:
        yield from streamed(data, "train")
        return
    kind, shards, columns = found
    bad: dict[tuple[Path, str], list[int]] = defaultdict(lambda: [0])
    mixed = np.random.default_rng((seed, turn)).permutation(len(shards))
    try:
        for i in range(len(shards)) if data.limit is not None else mixed:
            for item in LINE_READERS[kind](*shards[i], *columns):
                if isinstance(item, BadLine):
                    note(item, bad, data)
                else:
                    yield pa.Table.from_batches([item]).select(SIDES)
    finally:
        for (file, trouble), counts in bad.items():
            tell_of(file, trouble, *counts)


def sample_stream(run: TrainRun) -> Dataset:
    """The first pairs, for the tokenizer to be trained on: of each corpus its share of a million, or all it has."""
    tables = []
    for number, (part, count) in enumerate(zip(corpora_of(run.data), pairs_per_corpus(run.data, SAMPLE), strict=True)):
        with named_corpus(number):
            for turn, table in endless(part, run.seed, 0, 0):
                if turn or not count:
                    break
                tables.append(table[:count])
                count -= len(tables[-1])
    return Dataset(InMemoryTable(pa.concat_tables(tables)))


def stream_key(data: DataConfig, tokenizer: Tokenizer) -> str:
    """A key made of what a stream is read from: of its files the names and sizes, and of the tokenizer. Of what is on
    the hub only `data.revision` can tell."""
    sources: list[Any] = [tokenizer.fingerprint]
    for number, part in enumerate(corpora_of(data)):
        with named_corpus(number):
            found = files_of(part.data, "train")
        files = [file for shard in found[1] for file in shard] if found else []
        if part.data.format == "parquet":
            files = list(map(Path, parquet_files(part.data, "train")))
        if part.data.format == "hub" and not found:
            files = sorted(file for file in Path(str(part.data.path)).rglob("*") if file.is_file())
        hub = [part.data.path, part.data.subset, *filter(None, [part.data.revision])]
        sources += [(file.name, file.stat().st_size) for file in files] or hub
    return xxh3_128(repr(sources).encode()).hexdigest()
