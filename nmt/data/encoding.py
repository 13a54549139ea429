"""The encoded training corpus: tokenized once, memory-mapped from files of the cache.

A row is the index of a pair in the corpus, including pairs that are left out of training.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece
from tqdm import tqdm
from xxhash import xxh3_128

from nmt.config import SIDES, UNK, TrainRun
from nmt.data.augmentation import Augmenter
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.tokenizer import LanguageTokenizer, Tokenizer, list_symbols, load_tokenizer, train_tokenizer
from nmt.data.tokenizer_import import import_tokenizer
from nmt.errors import UserError
from nmt.system.memory import release_memory
from nmt.system.messages import MAX_LISTED_LINES, format_first_lines

log = logging.getLogger("nmt")
ENCODING_CHUNK = 40_000  # texts in memory at a time while encoding a corpus
TOKENIZER_SAMPLE = 1_000_000  # lines per side for tokenizer training; larger corpora are sampled
MAX_KNOWN_WORDS = 2**18  # of a side; frequent words are met first
ORDER_FILE = "order"
RUNS_FILE = "runs"
MESSAGE_FILE = "message"
Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
IdArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
RowArray = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


# --------------------------------------------------------------------------------------------------------------- pairs
@dataclass(frozen=True)
class EncodedSide:
    """The concatenated ids of all sentences of one side, memory-mapped from a file."""

    ids: IdArray
    offsets: Indices  # row i is ids[offsets[i] : offsets[i + 1]]

    @classmethod
    def build(cls, ids: IdArray, lengths: Indices) -> "EncodedSide":
        """Create from the concatenated ids of sentences and the number of ids of each."""
        return cls(ids, np.append(0, np.cumsum(lengths)))

    def __getitem__(self, row: int) -> IdArray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def lengths(self, rows: RowArray) -> Indices:
        """Return the number of pieces of these rows, including `</s>`."""
        return self.offsets[rows + 1] - self.offsets[rows] + 1


@dataclass(frozen=True)
class EncodedPairs:
    """The training pairs."""

    key: str  # hash of all texts and the tokenizer
    pairs: pa.Table
    tokenizer: Tokenizer
    source: EncodedSide
    target: EncodedSide
    order: RowArray  # rows of the training pairs, sorted by `sort_by_length`; memory-mapped from a file
    runs: Indices  # runs of pairs of equal size in `order`: source pieces, target pieces, number of pairs
    max_length: int  # pieces
    sampling: float = 0.0  # subword sampling, repeated for each epoch
    guided: bool = False  # whether batches include the gold attention, given by the gold links of the pairs
    mixture_weights: Sequence[tuple[int, float]] = ()  # for several corpora: the end row and the weight of each
    augmenter: Augmenter | None = None  # random changes of the pairs, repeated for each epoch

    def __len__(self) -> int:
        return len(self.order)

    def lengths(self, rows: RowArray) -> Indices:
        """Return source and target pieces of these rows, including `</s>`; shape (2, rows)."""
        return np.stack([self.source.lengths(rows), self.target.lengths(rows)])

    @property
    def source_lengths(self) -> Indices:
        """Source pieces of all pairs in `order`, including `</s>`. Needs 8 bytes per pair."""
        return np.repeat(self.runs[0], self.runs[2])


def sort_by_length(lengths: Array) -> tuple[Indices, Indices]:
    """Return the stable order of pairs by length, and the runs of pairs of equal size in that order.

    Pairs are sorted by the length of the longer side, then by the difference between the sides. Differences rise and
    fall in turn from one length to the next, so that pairs in a batch across this boundary have similar differences.

    Args:
        lengths: source and target pieces including `</s>`, shape (2, pairs).
    """
    source, target = lengths.astype(np.int64)
    longer = np.maximum(source, target)
    difference = source - target
    sort_keys = 2 * longer * longer.max(initial=0) + np.where(longer % 2, difference, -difference)
    order = np.argsort(sort_keys, kind="stable")
    sort_keys = sort_keys[order]
    starts = np.flatnonzero(np.diff(sort_keys, prepend=-1))
    counts = np.diff(np.append(starts, len(sort_keys)))
    return order, np.stack([*lengths[:, order[starts]].astype(np.int64), counts])


# ------------------------------------------------------------------------------------------------------------ encoding
def encode_corpus(
    pairs: pa.Table, tokenizer: Tokenizer, run: TrainRun, mixture_weights: Sequence[tuple[int, float]] = ()
) -> EncodedPairs:
    """Encode the training pairs, or load them from the cache if the same texts were encoded with the same tokenizer.

    Pairs with a side that is empty or only white space, or has more than `data.max_length` pieces, are left out. The
    log has their number and where the first ones are.

    Raises:
        UserError: no pair is left, gold links are missing, or the cache cannot be written.
    """
    guided = run.train.guided_alignment > 0
    if guided and "sure" not in pairs.column_names:
        raise UserError(
            f"train.guided_alignment={run.train.guided_alignment} needs gold links for the training text; set "
            "data.alignments=EXTENSION for data.path/train.EXTENSION, a line of links like 0-0 1-2 for each pair"
        )
    key = content_key(pairs, tokenizer)
    limit = run.data.max_length
    sides = dict(zip(SIDES, (tokenizer.source, tokenizer.target), strict=True))

    def write_encoding(folder: Path) -> None:
        for name, side in sides.items():
            encode_side(folder, name, pairs, side, limit)
        release_memory()
        offsets = (map_file(folder / f"{name}.offsets", np.int64) for name in SIDES)
        order, runs, message = order_pairs(np.stack(list(map(np.diff, offsets))), limit)
        (folder / ORDER_FILE).write_bytes(order.data)
        (folder / RUNS_FILE).write_bytes(runs.tobytes())
        (folder / MESSAGE_FILE).write_text(message, encoding="utf-8")

    # The limit is part of the name, since lines that must exceed it are not tokenized.
    folder = get_or_build(cache_folder(run.data) / "pairs" / f"{key}.{limit}", write_encoding)
    log.info((folder / MESSAGE_FILE).read_text(encoding="utf-8"))
    order = map_file(folder / ORDER_FILE, np.uint32)
    main_pairs = mixture_weights[0][0] if mixture_weights else len(pairs)  # pairs of `data.corpora` come after these
    if not (order < main_pairs).any():
        raise make_no_pairs_error(limit, " of data.path" if mixture_weights else "")
    source, target = (
        EncodedSide(map_file(folder / f"{name}.ids", id_dtype(side)), map_file(folder / f"{name}.offsets", np.int64))
        for name, side in sides.items()
    )
    return EncodedPairs(
        key=key,
        pairs=pairs,
        tokenizer=tokenizer,
        source=source,
        target=target,
        order=order,
        runs=map_file(folder / RUNS_FILE, np.int64).reshape(3, -1),
        max_length=limit,
        sampling=run.tokenizer.sampling,
        guided=guided,
        mixture_weights=mixture_weights,
    )


def map_file(path: Path, dtype: type[np.generic]) -> Array:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # which cannot be mapped
    return np.asarray(np.memmap(path, dtype, "r"))


def encode_side(folder: Path, name: str, pairs: pa.Table, side: LanguageTokenizer, max_length: int) -> None:
    """Write the ids of one side and the offsets of its rows."""
    with (
        open(folder / f"{name}.ids", "wb") as ids_file,
        open(folder / f"{name}.offsets", "wb") as offsets_file,
        tqdm(total=len(pairs), desc=f"tokenizing {name}", unit=" lines", leave=False, disable=None) as bar,
    ):
        end = 0
        offsets_file.write(np.int64(0).tobytes())
        for texts in iterate_texts(pairs, name):
            ids, lengths = encode_texts(texts, side, max_length)
            ids_file.write(ids.tobytes())
            offsets_file.write((end + np.cumsum(lengths)).tobytes())
            end += len(ids)
            bar.update(len(lengths))


def encode_texts(
    texts: pa.Array, side: LanguageTokenizer, max_length: int, threads: int | None = None
) -> tuple[Array, Indices]:
    """Return the concatenated ids of texts, and the number of ids of each; none for a text that is only white space.

    Texts are encoded word by word where that gives the same ids: this is three times as fast, since most words have
    been met before. A text that must have more than `max_length` pieces is replaced by `max_length + 1` times `<unk>`,
    since encoding extremely long lines could take longer than the rest of the corpus. `threads` is for texts that are
    encoded by line, as in `LanguageTokenizer.encode`.
    """
    unfit = pc.or_(pc.match_substring_regex(texts, "^ |  | $"), pc.utf8_is_space(texts))
    unfit = pc.or_(unfit, pc.greater(pc.utf8_length(texts), side.longest_piece * max_length))
    by_line = unfit.to_numpy(zero_copy_only=False) | (not side.can_encode_by_word)
    parts = [
        encode_by_word(texts.filter(pa.array(~by_line)), side),
        encode_by_line(to_list(texts.filter(pa.array(by_line))), side, max_length, threads),
    ]
    ids, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    in_parts = np.argsort(by_line, kind="stable")  # the texts in the order of the parts
    starts, counts = np.empty((2, len(texts)), np.int64)
    starts[in_parts], counts[in_parts] = np.cumsum(lengths) - lengths, lengths
    return gather_ranges(ids, starts, counts), counts


def encode_by_word(texts: pa.Array, side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Encode texts of words separated by single spaces, like `encode_texts`."""
    split = pc.split_pattern(texts, " ")
    words = split.flatten().dictionary_encode()
    distinct_words, known = to_list(words.dictionary), side.known_words
    new = [word for word in distinct_words if word not in known]
    met = known | dict(zip(new, side.encode(new, threads=1), strict=True)) if new else known
    if len(known) < MAX_KNOWN_WORDS:
        known.update(met)
    ids, ids_per_word = concatenate_ids([met[word] for word in distinct_words], side)
    word_of_text = words.indices.to_numpy()
    counts = ids_per_word[word_of_text]
    lengths = np.diff(np.append(0, np.cumsum(counts))[split.offsets.to_numpy()])
    return gather_ranges(ids, (np.cumsum(ids_per_word) - ids_per_word)[word_of_text], counts), lengths


def encode_by_line(
    texts: list[str], side: LanguageTokenizer, max_length: int, threads: int | None
) -> tuple[Array, Indices]:
    """Encode any texts, like `encode_texts`."""
    too_long = [len(text) > max_length and side.must_exceed(text, max_length) for text in texts]
    to_encode = ["" if skip or text.isspace() else text for text, skip in zip(texts, too_long, strict=True)]
    encoded = side.encode(to_encode, threads=threads)
    placeholder = [UNK] * (max_length + 1)
    return concatenate_ids([placeholder if skip else ids for skip, ids in zip(too_long, encoded, strict=True)], side)


def gather_ranges(ids: Array, starts: Indices, lengths: Indices) -> Array:
    """Concatenate the ranges of `ids` with these starts and lengths."""
    offsets = np.cumsum(lengths) - lengths
    return ids[np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())]


def concatenate_ids(sequences: Sequence[Sequence[int] | Array], side: LanguageTokenizer) -> tuple[Array, Indices]:
    """Return the concatenated ids, and the length of each sequence."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return np.fromiter(itertools.chain.from_iterable(sequences), id_dtype(side), lengths.sum()), lengths


def id_dtype(side: LanguageTokenizer) -> type[np.uint16] | type[np.int32]:
    """Return the dtype in which ids are stored."""
    return np.uint16 if side.vocab_size <= 2**16 else np.int32


def order_pairs(lengths: Indices, limit: int) -> tuple[Array, Indices, str]:
    """Return the order and the runs of the pairs to train on, as in `EncodedPairs`, and a message about the others.

    Args:
        lengths: source and target pieces without `</s>`, shape (2, pairs).
    """
    is_empty = (lengths == 0).any(axis=0)
    is_dropped = is_empty | (lengths > limit).any(axis=0)
    dropped, empty = np.flatnonzero(is_dropped), int(is_empty.sum())
    message = (
        f"train: {len(is_dropped):,} pairs; dropped {empty:,} with an empty side and {len(dropped) - empty:,} longer "
        f"than data.max_length={limit} pieces"
    )
    if len(dropped):
        message += f" ({format_first_lines((dropped[:MAX_LISTED_LINES] + 1).tolist())})"
    rows = np.flatnonzero(~is_dropped).astype(np.uint32)
    order, runs = sort_by_length(lengths[:, rows] + 1)
    return rows[order], runs, message


def make_no_pairs_error(limit: int, where: str = "") -> UserError:
    return UserError(
        f"no training pair{where} is left: every pair has an empty side or a side longer than "
        f"data.max_length={limit} pieces; check the text or raise data.max_length"
    )


# ----------------------------------------------------------------------------------------------------------- tokenizer
def get_or_train_tokenizer(pairs: pa.Table, run: TrainRun) -> Tokenizer:
    """Train the configured tokenizer on the training pairs, or load it from the cache.

    For a side with more than `TOKENIZER_SAMPLE` lines, a random sample of that many is used.

    Raises:
        UserError: the text does not allow a vocabulary size, or there is no text.
    """
    config = run.tokenizer
    limit = run.data.max_length
    tags = sorted({f"<{corpus.tag}>" for corpus in run.data.corpora if corpus.tag})
    if config.path:
        tokenizer = import_tokenizer(config.path, list_symbols(config, tags))
        log.info(f"using the tokenizer of {config.path}, of {tokenizer.source.vocab_size:,} pieces")
        return tokenizer
    settings = dataclasses.replace(config, sampling=0.0)  # does not affect tokenizer training
    key_parts = (text_key(pairs), settings, limit, tags, TOKENIZER_SAMPLE, sentencepiece.__version__)
    key = xxh3_128(repr(key_parts).encode()).hexdigest()
    description = f"{config.type} tokenizer of {config.vocab_size:,} pieces"

    def train(folder: Path) -> None:
        train_tokenizer(sample_texts(pairs, "source"), sample_texts(pairs, "target"), config, limit, tags).save(folder)
        release_memory()

    folder = cache_folder(run.data) / "tokenizers" / key
    log.info(
        f"using the cached {description}, trained on the same text" if folder.is_dir() else f"training a {description}"
    )
    return load_tokenizer(get_or_build(folder, train))


def sample_texts(pairs: pa.Table, name: str) -> Iterator[str]:
    """Yield the texts of a side, or a sample of `TOKENIZER_SAMPLE` if there are more.

    The sample is deterministic and spread evenly: one random text of each of `TOKENIZER_SAMPLE` equal parts.
    """
    count = min(len(pairs), TOKENIZER_SAMPLE)
    positions = np.arange(count) + np.random.default_rng(0).random(count)
    rows = (positions * (len(pairs) / max(1, count))).astype(np.int64)
    rows = rows[np.diff(rows, prepend=-1) > 0]
    start = 0
    for texts in iterate_texts(pairs, name):
        first, last = np.searchsorted(rows, (start, start + len(texts)))
        yield from to_list(texts.take(pa.array(rows[first:last] - start)))
        start += len(texts)


# ---------------------------------------------------------------------------------------------------------------- keys
def content_key(pairs: pa.Table, tokenizer: Tokenizer) -> str:
    """Return a hash of all texts, gold links and the tokenizer."""
    return xxh3_128(f"{text_key(pairs)} {tokenizer.fingerprint}".encode()).hexdigest()


def text_key(pairs: pa.Table) -> str:
    """Return a hash of all texts of both sides, and of gold links, independent of the files they were read from."""
    keys = []
    for name in SIDES:
        text_hash = xxh3_128()
        length_hash = xxh3_128()
        for texts in iterate_texts(pairs, name):
            texts = texts.cast(pa.large_string())
            _, all_offsets, data = texts.buffers()
            offsets = np.frombuffer(all_offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
            length_hash.update(np.diff(offsets).data)
            text_hash.update(memoryview(data or b"")[offsets[0] : offsets[-1]])
        keys += [length_hash.hexdigest(), text_hash.hexdigest()]
    if "sure" in pairs.column_names:
        keys.append(xxh3_128(repr(pairs.select(["sure", "possible"]).to_pydict()).encode()).hexdigest())
    return " ".join(keys)


def iterate_texts(pairs: pa.Table, name: str) -> Iterator[pa.Array]:
    """Yield the texts of a side in chunks, in the order of the file."""
    for row in range(0, len(pairs), ENCODING_CHUNK):
        yield pairs[name].slice(row, ENCODING_CHUNK).combine_chunks()


def to_list(texts: pa.Array) -> list[str]:
    return texts.to_numpy(zero_copy_only=False).tolist()  # several times as fast as `to_pylist`
