"""The tokenized corpus: made once, mapped from files, never read whole.

A row is the number of a pair in the corpus, whatever is left out.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sentencepiece
from datasets import Dataset
from tqdm import tqdm
from xxhash import xxh3_128

from nmt.config import TrainRun
from nmt.data.batch_encode import Array, Indices, as_list, encode_texts, kind_of
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.corpus import origins
from nmt.data.tokenizer import LanguageTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from nmt.data.word_links import gold_links
from nmt.errors import UserError
from nmt.runtime.lines import FIRST, count_of, first_few
from nmt.runtime.memory import release_memory

log = logging.getLogger("nmt")
CHUNK = 40_000  # pairs in memory at a time, some for each core that tokenizes
BITE = 2**20  # numbers of a file in memory at a time
SAMPLE = 1_000_000  # lines of a side that a tokenizer is trained on; a random sample where there are more
SIDES = ["source", "target"]
ORDER, RUNS, REPORT = "order", "runs", "report.json"
T = TypeVar("T")
U = TypeVar("U")
Ids = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


# --------------------------------------------------------------------------------------------------------------- pairs
@dataclass(frozen=True)
class EncodedSide:
    """The ids of all sentences of one side, end to end, mapped from a file."""

    ids: Ids
    offsets: Indices  # row i is ids[offsets[i] : offsets[i + 1]]

    def __getitem__(self, row: int) -> Ids:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def lengths(self, rows: Rows) -> Indices:
        """Pieces of these rows, `</s>` included."""
        return self.offsets[rows + 1] - self.offsets[rows] + 1


@dataclass(frozen=True)
class EncodedPairs:
    """The pairs that are trained on."""

    key: str  # of all texts and the tokenizer
    pairs: Dataset
    tokenizer: Tokenizer
    source: EncodedSide
    target: EncodedSide
    order: Rows  # of the pairs that are trained on, `by_length`; mapped from a file
    runs: Indices  # of pairs of equal size, in that order: pieces of the source, of the target, and how many pairs
    max_length: int  # pieces
    sampling: float  # of subwords, anew for each epoch
    guided: bool  # batches say where to look, by the gold links of the pairs
    shares: Sequence[tuple[int, float]] = ()  # of several corpora: the row at which each ends, and its weight

    def __len__(self) -> int:
        return len(self.order)

    def lengths(self, rows: Rows) -> Indices:
        """Source and target pieces of these rows, `</s>` included: one row of numbers for each side."""
        return np.stack([self.source.lengths(rows), self.target.lengths(rows)])

    @property
    def source_lengths(self) -> Indices:
        """Source pieces of all pairs in `order`, `</s>` included; eight bytes a pair, so only for what needs all."""
        return np.repeat(self.runs[0], self.runs[2])


def by_length(lengths: Array) -> tuple[Indices, Indices]:
    """Places of pairs by the longer side, among equals by the difference of the sides, among equals as they come; and
    the runs of pairs of equal size.

    The differences rise and fall in turn: where a batch goes from one length to the next, they are alike, too.
    lengths: of source and target, `</s>` included.
    """
    most = int(lengths.max())
    several = 2 * most + 1  # differences
    size = np.empty(lengths.shape[1], np.uint16 if (most + 1) * several <= 2**16 else np.int64)  # 16 bits sort quickly
    for start in range(0, len(size), BITE):
        source, target = lengths[:, start : start + BITE].astype(np.int64)
        longer, difference = np.maximum(source, target), source - target
        size[start : start + BITE] = longer * several + most + np.where(longer % 2, difference, -difference)
    order = np.argsort(size, kind="stable")
    size = size[order]
    starts = np.flatnonzero(np.append(True, size[1:] != size[:-1]))
    counts = np.diff(np.append(starts, len(size)))
    return order, np.stack([*lengths[:, order[starts]].astype(np.int64), counts])


# ------------------------------------------------------------------------------------------------------------ encoding
def encode_corpus(
    pairs: Dataset, tokenizer: Tokenizer, run: TrainRun, shares: Sequence[tuple[int, float]] = ()
) -> EncodedPairs:
    """Tokenize the training pairs, or take what was tokenized before of the same text with the same tokenizer.

    Pairs with a side that is empty, or nothing but white space, and those with more than `data.max_length` pieces on a
    side are left out; the log has their number, and for each side the first lines that are so.

    Raises:
        UserError: when no pair is left, or the cache cannot be written.
    """
    guided = run.train.guided_alignment > 0
    if guided and "sure" not in pairs.column_names:
        raise UserError(
            f"train.guided_alignment={run.train.guided_alignment} needs gold links of the training text: "
            "data.alignments=ENDING for data.path/train.ENDING, a line of links as 0-0 1-2 for each pair"
        )
    key, limit = content_key(pairs, tokenizer), run.data.max_length
    sides = dict(zip(SIDES, (tokenizer.source, tokenizer.target), strict=True))

    def fill(part: Path) -> None:
        for name, side in sides.items():
            encode_side(part, name, pairs, side, limit, cores(run.data.num_proc))
        release_memory()
        arrange(part, limit)

    # The limit belongs to the name, for what is far longer is not tokenized.
    folder = get_or_build(cache_folder(run.data) / "ids" / f"{key}.{limit}", fill)
    report = json.loads((folder / REPORT).read_bytes())
    tell_dropped(len(pairs), report["kept"], report["empty"], limit)
    for trouble, number, count, first in report["left out"]:
        tell(origins(run.data, "train")[number], SIDES[number], trouble, count, first, pairs)
    if not report["kept"]:
        raise none_left(limit)
    source, target = (
        EncodedSide(mapped(folder / f"{name}.ids", kind_of(side)), mapped(folder / f"{name}.offsets", np.int64))
        for name, side in sides.items()
    )
    order, runs = mapped(folder / ORDER, rows_of(len(pairs))), mapped(folder / RUNS, np.int64).reshape(3, -1)
    sampling = run.tokenizer.sampling
    return EncodedPairs(key, pairs, tokenizer, source, target, order, runs, limit, sampling, guided, shares)


def cores(given: int | None) -> int:
    """How many to use: by default all that this process may."""
    if given is not None:
        return given
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows_of(count: int) -> type[np.uint32] | type[np.int64]:
    """The numbers that rows of so many pairs are kept as."""
    return np.uint32 if count <= 2**32 else np.int64


def mapped(path: Path, kind: type[np.generic]) -> Array:
    return np.asarray(np.memmap(path, kind, "r"))


def encode_side(
    folder: Path, name: str, pairs: Dataset, side: LanguageTokenizer, max_length: int, threads: int
) -> None:
    """Write the ids of one side, and where each row begins. Chunks are encoded by several threads, SentencePiece being
    no Python, and written in their order."""
    encode = partial(encode_texts, side=side, max_length=max_length, known={})
    with (
        open(folder / f"{name}.ids", "wb") as ids_file,
        open(folder / f"{name}.offsets", "wb") as offsets_file,
        tqdm(total=len(pairs), desc=f"tokenizing {name}", unit=" lines", leave=False, disable=None) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        end = np.zeros(1, dtype=np.int64)
        offsets_file.write(end.tobytes())
        for ids, lengths in in_order(pool, encode, texts_of(pairs, name), 2 * threads):
            ends = end[-1] + np.cumsum(lengths)
            ids_file.write(ids.tobytes())
            offsets_file.write(ends.tobytes())
            end = ends
            bar.update(len(lengths))


def in_order(pool: ThreadPoolExecutor, work: Callable[[T], U], items: Iterable[T], ahead: int) -> Iterator[U]:
    """What becomes of the items, in their order, with so many taken ahead."""
    waiting: deque[Future[U]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def arrange(folder: Path, limit: int) -> None:
    """Write which rows are kept, in which order, and what was left out, so that no later start has to look again."""
    lengths = np.stack([lengths_in(folder / f"{name}.offsets", limit + 1) for name in SIDES])
    empty, longer = lengths == 0, lengths > limit
    without, kept = empty.any(axis=0), ~(empty | longer).any(axis=0)
    left_out = []
    for trouble, sides in (
        ("empty, or nothing but white space", empty),
        (f"longer than data.max_length={limit} pieces", longer),
    ):
        for number, side in enumerate(sides):
            if side.any():
                left_out.append((trouble, number, int(side.sum()), np.flatnonzero(side)[:FIRST].tolist()))
    report = {"kept": int(kept.sum()), "empty": int(without.sum()), "left out": left_out}
    (folder / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
    rows = np.flatnonzero(kept).astype(rows_of(len(kept)))
    lengths = lengths[:, kept]
    lengths += 1
    order, runs = by_length(lengths) if len(rows) else (rows, np.zeros((3, 0), dtype=np.int64))
    (folder / ORDER).write_bytes(rows[order].data)
    (folder / RUNS).write_bytes(runs.tobytes())


def lengths_in(path: Path, most: int) -> npt.NDArray[np.int32]:
    """How many ids each row has by the file of their offsets, or `most` where there are more."""
    offsets = mapped(path, np.int64)
    lengths = np.empty(len(offsets) - 1, dtype=np.int32)
    for start in range(0, len(lengths), BITE):
        lengths[start : start + BITE] = np.minimum(np.diff(offsets[start : start + BITE + 1]), most)
    return lengths


def tell_dropped(pairs: int, kept: int, empty: int, limit: int) -> None:
    """How many of the training pairs are left out and why, in the log."""
    too_long = f"{pairs - kept - empty:,} longer than data.max_length={limit} pieces"
    log.info(f"train: {pairs:,} pairs, dropped {empty:,} with an empty side, {too_long}")


def none_left(limit: int) -> UserError:
    return UserError(
        f"no training pair is left: all have an empty side, or one longer than data.max_length={limit} pieces; look at "
        "the text, or raise the length"
    )


def tell(where: str, side: str, trouble: str, count: int, first: list[int], pairs: Dataset) -> None:
    """Which lines of a side are left out, in the log; of what is not read from lines, which pairs."""
    lines = "line" in pairs.column_names
    numbers = pairs[first]["line"] if lines else [row + 1 for row in first]
    log.info(f"left out {count_of(count, 'line' if lines else 'pair')} of {where}: {trouble} ({first_few(numbers)})")
    returns = [number for number, row in zip(numbers, pairs[first][side], strict=True) if row.count("\r") > 1]
    if returns:
        log.warning(
            f"{where}: there are carriage returns (CR, \\r) within these ({first_few(returns)}); if lines end "
            "there, make line ends of them: tr '\\r' '\\n' < FILE"
        )


# ----------------------------------------------------------------------------------------------------------- tokenizer
def cached_tokenizer(pairs: Dataset, run: TrainRun) -> Tokenizer:
    """The tokenizer that the settings ask for, trained on the training pairs, now or before. Of a side with more than a
    million lines a random sample of a million is used.

    Raises:
        UserError: for vocabulary sizes that the text does not allow, or when there is no text.
    """
    config, limit = run.tokenizer, run.data.max_length
    settings = dataclasses.replace(config, sampling=0.0)  # of which nothing is known in training it
    tags = sorted({f"<{corpus.tag}>" for corpus in run.data.corpora if corpus.tag})
    parts = (text_key(pairs), settings, limit, tags, SAMPLE, sentencepiece.__version__)
    sizes = dict.fromkeys((config.size("source"), config.size("target")))
    what = f"{config.type} tokenizer of {' and '.join(f'{size:,}' for size in sizes)} pieces"
    trained = []

    def fill(part: Path) -> None:
        log.info(f"training a {what}")
        source, target = sampled(pairs, "source"), sampled(pairs, "target")
        trained.append(train_tokenizer(source, target, config, limit, tags))
        trained[0].save(part)
        release_memory()

    folder = get_or_build(cache_folder(run.data) / "tokenizers" / xxh3_128(repr(parts).encode()).hexdigest(), fill)
    if not trained:
        log.info(f"the {what} was trained on this text before")
    return load_tokenizer(folder)


def sampled(pairs: Dataset, name: str) -> Iterator[str]:
    """The texts of a side; of more than `SAMPLE` a random sample, always the same: one of each of as many parts."""
    if len(pairs) <= SAMPLE:
        rows = np.arange(len(pairs))
    else:
        places = np.arange(SAMPLE) + np.random.default_rng(0).random(SAMPLE)
        rows = np.unique((places * (len(pairs) / SAMPLE)).astype(np.int64))
    start = 0
    for texts in texts_of(pairs, name):
        first, last = np.searchsorted(rows, (start, start + len(texts)))
        yield from as_list(texts.take(pa.array(rows[first:last] - start)))
        start += len(texts)


# ---------------------------------------------------------------------------------------------------------------- keys
def content_key(pairs: Dataset, tokenizer: Tokenizer) -> str:
    """A key made of all texts and of the tokenizer."""
    return xxh3_128(f"{text_key(pairs)} {tokenizer.fingerprint}".encode()).hexdigest()


def text_key(pairs: Dataset) -> str:
    """A key made of all texts of both sides, whatever files they are from."""
    keys = []
    for name in SIDES:
        letters, lengths = xxh3_128(), xxh3_128()
        for texts in texts_of(pairs, name):
            offsets, data = buffers_of(texts)
            lengths.update(np.diff(offsets).data)
            letters.update(data)
        keys += [lengths.hexdigest(), letters.hexdigest()]
    return " ".join(keys)


def gold_key(pairs: Dataset) -> str:
    """A key made of all gold links; empty where there are none."""
    gold = gold_links(pairs)
    if gold is None:
        return ""
    links = [(sorted(one.sure), sorted(one.possible)) for one in gold]
    return hashlib.sha256(repr(links).encode()).hexdigest()[:32]


def texts_of(pairs: Dataset, name: str) -> Iterator[pa.Array]:
    """The texts of a side, some at a time, as they lie in the file."""
    for table in pairs.select_columns(name).with_format("arrow").iter(CHUNK):
        yield table[name].combine_chunks()


def buffers_of(texts: pa.Array) -> tuple[Indices, memoryview]:
    """Where each text begins and the last one ends; and their letters, in UTF-8."""
    texts = texts.cast(pa.large_string())
    _, offsets, letters = texts.buffers()
    places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return places, memoryview(letters or b"")[places[0] : places[-1]]
