"""Word alignments from attention weights, and the files they are written to.

Rows are target pieces or words (T), columns source pieces or words (S). The words that pieces belong to are given as a
list of word indices from 0, with -1 for pieces that belong to no word: `</s>` and superfluous spaces.
"""

import io
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nmt.config import LinksConfig
from nmt.data.word_links import Link, format_pharaoh, threshold_links
from nmt.system.text import COMPRESSION_BY_SUFFIX, split_on_spaces

JSON_NULL = np.array(None)  # replaces numbers that JSON cannot represent
EOS_PIECE = "</s>"


def pool_to_words(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Return weights between words, (target words + 1) x (source words + 1).

    Weights are summed over the pieces of a source word and averaged over the pieces of a target word, so each target
    word still distributes a weight of 1. The last row and column are for pieces that belong to no word.
    """
    source = np.asarray(source_word_of_piece, dtype=int)
    target = np.asarray(target_word_of_piece, dtype=int)
    pooled_TS = np.zeros((target.max(initial=-1) + 2, source.max(initial=-1) + 2))
    pieces_T = np.zeros(len(pooled_TS))
    np.add.at(pooled_TS, np.ix_(target, source), weights_TS)  # index -1 is the last row or column
    np.add.at(pieces_T, target, 1)
    return pooled_TS / np.maximum(pieces_T, 1)[:, None]


def extract_links(
    weights_TS: np.ndarray,
    source_word_of_piece: Sequence[int],
    target_word_of_piece: Sequence[int],
    threshold: float | None = None,
) -> list[Link]:
    """Return links (source word, target word), sorted by target word.

    Without a threshold, each target word is linked to the source word with the largest weight. It has no link if the
    pieces that belong to no word (`</s>`) weigh more, or if all weights are 0. With a threshold, it is linked to every
    source word with at least that weight.
    """
    pooled_TS = pool_to_words(weights_TS, source_word_of_piece, target_word_of_piece)[:-1]
    if threshold is not None:
        return threshold_links(pooled_TS[:, :-1], threshold)
    best_T = pooled_TS.argmax(axis=1)  # the first of equal weights, so a word is preferred to no word
    no_word = pooled_TS.shape[1] - 1
    return [(int(s), t) for t, s in enumerate(best_T) if s != no_word and pooled_TS[t, s] > 0]


# ----------------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True, slots=True)
class Record:
    """A sentence pair with its attention weights; a line of `alignments.jsonl`."""

    source_pieces: list[str]  # with `</s>`
    target_pieces: list[str]  # with `</s>`, unless the translation was truncated at its maximum length
    source_words: list[str]
    target_words: list[str]
    source_word_of_piece: list[int]  # -1: of no word
    target_word_of_piece: list[int]
    weights: np.ndarray | None  # target pieces x source pieces; None for a model without attention
    score: float  # summed log-probability, `</s>` included
    source_spans: list[tuple[int, int]] | None = None  # start and end (exclusive) of each word in its line; None if the
    target_spans: list[tuple[int, int]] | None = None  # line itself is not known

    def word_weights(self) -> np.ndarray | None:
        """Return weights of target words x source words; None for a model without attention."""
        if self.weights is None:
            return None
        weights = np.zeros((len(self.target_words), len(self.source_words)))
        pooled = pool_to_words(self.weights, self.source_word_of_piece, self.target_word_of_piece)[:-1, :-1]
        weights[: pooled.shape[0], : pooled.shape[1]] = pooled  # the last words may have no pieces
        return weights

    def links(self, config: LinksConfig | None = None) -> list[Link]:
        """Return links between words, or between pieces other than `</s>`; none for a model without attention."""
        if self.weights is None:
            return []
        config = config or LinksConfig()
        if config.unit == "words":
            source_index, target_index = self.source_word_of_piece, self.target_word_of_piece
        else:
            source_index, target_index = number_pieces(self.source_pieces), number_pieces(self.target_pieces)
        return extract_links(self.weights, source_index, target_index, config.threshold)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without a line break.

        Numbers are written exactly. Infinities and NaN become null.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.source_spans is None:
            del fields["source_spans"], fields["target_spans"]
        if self.weights is not None:
            fields["weights"] = np.where(np.isfinite(self.weights), self.weights, JSON_NULL).tolist()
        if not math.isfinite(self.score):
            fields["score"] = None
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def restore_unknown_words(text: str, words: list[str]) -> list[str]:
    """Return `words` with each `<unk>` as it is spelled in `text`, if both have the same number of words."""
    text_words = split_on_spaces(text)
    return text_words if "<unk>" in words and len(text_words) == len(words) else words


def number_pieces(pieces: Sequence[str]) -> list[int]:
    """Return a word index for each piece, where every piece but `</s>` is a word of its own."""
    return [-1 if piece == EOS_PIECE else i for i, piece in enumerate(pieces)]


# ----------------------------------------------------------------------------------------------------------- writers
WriteRecord = Callable[[Record, list[Link]], object]


@contextmanager
def pharaoh_writer(file: BinaryIO) -> Iterator[WriteRecord]:
    """Write the links of each pair as a line in Pharaoh format."""
    yield lambda record, links: file.write(f"{format_pharaoh(links)}\n".encode())


@contextmanager
def weighted_pharaoh_writer(file: BinaryIO) -> Iterator[WriteRecord]:
    """Write the links between the words of each pair as a line, each with its weight: `0-0:0.98 1-2:0.71`."""

    def write_record(record: Record, links: list[Link]) -> None:
        weights_TS = record.word_weights()
        items = [f"{s}-{t}:{weights_TS[t, s]:.4g}" for s, t in sorted(links)] if weights_TS is not None else []
        file.write(f"{' '.join(items)}\n".encode())

    yield write_record


@contextmanager
def jsonl_writer(file: BinaryIO) -> Iterator[WriteRecord]:
    """Write each record as a line of JSON."""
    yield lambda record, links: file.write(f"{record.to_json()}\n".encode())


@contextmanager
def npz_writer(file: BinaryIO) -> Iterator[WriteRecord]:
    """Write records as NumPy arrays named `NUMBER/FIELD`, where NUMBER counts the pairs from 0.

    `numpy.load` reads them without pickle, but drops NUL characters at the ends of words. A model without attention has
    no `weights`.
    """
    with zipfile.ZipFile(file, "w") as archive:
        number = 0

        def write_record(record: Record, links: list[Link]) -> None:
            nonlocal number
            for name in Record.__slots__:
                value = getattr(record, name)
                if value is None:
                    continue
                dtype: type | None = None
                if name.endswith(("words", "pieces")):
                    dtype = str
                elif name.endswith(("of_piece", "spans")):
                    dtype = int
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, np.array(value, dtype=dtype), allow_pickle=False)
                entry = zipfile.ZipInfo(f"{number}/{name}.npy")  # has no time stamp, so equal pairs give equal bytes
                archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_DEFLATED)
            number += 1

        yield write_record


ALIGNMENT_WRITERS: dict[str, Callable[[BinaryIO], AbstractContextManager[WriteRecord]]] = {
    ".jsonl": jsonl_writer,
    ".npz": npz_writer,
}


def open_alignment_writer(path: str, file: BinaryIO, with_weights: bool = False) -> AbstractContextManager[WriteRecord]:
    """Return the writer in `ALIGNMENT_WRITERS` for the suffix of `path`, by default one of Pharaoh lines.

    A suffix of compression, `.gz` or `.zst`, is ignored. Lines of links have their weights with `with_weights`.
    """
    name = Path(path)
    suffix = Path(name.stem).suffix if name.suffix in COMPRESSION_BY_SUFFIX else name.suffix
    return ALIGNMENT_WRITERS.get(suffix, weighted_pharaoh_writer if with_weights else pharaoh_writer)(file)
