"""From attention weights to word alignments, and the files that hold them.

Rows are target pieces or words (T), columns source pieces or words (S). Which word a piece belongs to is given as a
list of word indices from 0, with -1 for pieces of no word: `</s>` and superfluous spaces.
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
from nmt.data.word_links import Link, pharaoh
from nmt.runtime.lines import PACKED, split_on_spaces

NULL = np.array(None)  # where a number cannot be written
END = "</s>"


def pool(
    weights_TS: np.ndarray, source_word_of_piece: Sequence[int], target_word_of_piece: Sequence[int]
) -> np.ndarray:
    """Weights between words, (target words + 1) x (source words + 1): the last row and column stand for no word.

    The sum over a source word's pieces, for attention is shared out among them; the mean over a target word's pieces,
    for each of them shares out its own.
    """
    source, target = np.asarray(source_word_of_piece, dtype=int), np.asarray(target_word_of_piece, dtype=int)
    pooled_TS = np.zeros((target.max(initial=-1) + 2, source.max(initial=-1) + 2))
    pieces_T = np.zeros(len(pooled_TS))
    np.add.at(pooled_TS, np.ix_(target, source), weights_TS)  # index -1 is the last one
    np.add.at(pieces_T, target, 1)
    return pooled_TS / np.maximum(pieces_T, 1)[:, None]


def extract_links(
    weights_TS: np.ndarray,
    source_word_of_piece: Sequence[int],
    target_word_of_piece: Sequence[int],
    threshold: float | None = None,
) -> list[Link]:
    """Links (source word, target word), in the order of the target.

    Without a threshold each target word is linked with the source word of most weight, or with none where pieces of no
    word (`</s>`) weigh more, or where nothing has weight. With one, it is linked with all source words of at least
    this weight.
    """
    pooled_TS = pool(weights_TS, source_word_of_piece, target_word_of_piece)[:-1]
    if threshold is not None:
        return [(int(s), int(t)) for t, s in np.argwhere(pooled_TS[:, :-1] >= threshold)]
    best_T = pooled_TS.argmax(axis=1)  # the first of equals: a word comes before no word
    no_word = pooled_TS.shape[1] - 1
    return [(int(s), t) for t, s in enumerate(best_T) if s != no_word and pooled_TS[t, s] > 0]


# ---------------------------------------------------------------------------------------------------------- artifact
@dataclass(frozen=True, slots=True)
class Record:
    """A pair of sentences, and where the model looked at each target piece. A line of `alignments.jsonl`."""

    source_pieces: list[str]  # with `</s>`
    target_pieces: list[str]  # with `</s>`, unless the translation was cut at its maximum length
    source_words: list[str]
    target_words: list[str]
    source_word_of_piece: list[int]  # -1: of no word
    target_word_of_piece: list[int]
    weights: np.ndarray | None  # target pieces x source pieces; None for a model without attention
    score: float  # summed log-probability, `</s>` included

    def word_weights(self) -> np.ndarray | None:
        """Target words x source words."""
        if self.weights is None:
            return None
        weights = np.zeros((len(self.target_words), len(self.source_words)))
        pooled = pool(self.weights, self.source_word_of_piece, self.target_word_of_piece)[:-1, :-1]
        weights[: pooled.shape[0], : pooled.shape[1]] = pooled  # the last words may have no pieces
        return weights

    def links(self, config: LinksConfig | None = None) -> list[Link]:
        """Links between words, or between pieces other than `</s>`; none for a model without attention."""
        if self.weights is None:
            return []
        config = config or LinksConfig()
        if config.unit == "words":
            owners = self.source_word_of_piece, self.target_word_of_piece
        else:
            owners = piece_index(self.source_pieces), piece_index(self.target_pieces)
        return extract_links(self.weights, *owners, config.threshold)

    def to_json(self) -> str:
        """One line without its end; numbers are exact, those that are not finite become null."""
        weights = None if self.weights is None else np.where(np.isfinite(self.weights), self.weights, NULL).tolist()
        score = self.score if math.isfinite(self.score) else None
        fields = {name: getattr(self, name) for name in self.__slots__} | {"weights": weights, "score": score}
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def as_written(text: str, words: list[str]) -> list[str]:
    """The words of a text's pieces, but for unknown ones, which are `<unk>` there: those of the text, if as many."""
    found = split_on_spaces(text)
    return found if "<unk>" in words and len(found) == len(words) else words


def piece_index(pieces: Sequence[str]) -> list[int]:
    """Each piece as a word of its own, but for `</s>`."""
    return [-1 if piece == END else i for i, piece in enumerate(pieces)]


# ------------------------------------------------------------------------------------------------------------- files
Write = Callable[[Record, list[Link]], object]


@contextmanager
def pharaoh_lines(file: BinaryIO) -> Iterator[Write]:
    """The links, a line for each pair."""
    yield lambda record, links: file.write(f"{pharaoh(links)}\n".encode())


@contextmanager
def json_lines(file: BinaryIO) -> Iterator[Write]:
    """The records, a line for each pair."""
    yield lambda record, links: file.write(f"{record.to_json()}\n".encode())


@contextmanager
def arrays(file: BinaryIO) -> Iterator[Write]:
    """The records as NumPy arrays, `NUMBER/FIELD` for each field of the pair NUMBER, from 0: what `numpy.load` reads
    without pickle, and without the NUL characters that a word may end in. A model without attention has no
    `weights`."""
    with zipfile.ZipFile(file, "w") as archive:
        number = 0

        def write(record: Record, links: list[Link]) -> None:
            nonlocal number
            for name in Record.__slots__:
                value = getattr(record, name)
                if value is not None:
                    buffer = io.BytesIO()
                    kind = str if name.endswith(("words", "pieces")) else int if name.endswith("of_piece") else None
                    array = np.array(value, dtype=kind)
                    np.lib.format.write_array(buffer, array, allow_pickle=False)
                    entry = zipfile.ZipInfo(f"{number}/{name}.npy")  # without a time: the same pairs, the same bytes
                    archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_DEFLATED)
            number += 1

        yield write


WRITERS: dict[str, Callable[[BinaryIO], AbstractContextManager[Write]]] = {".jsonl": json_lines, ".npz": arrays}


def writer(path: str, file: BinaryIO) -> AbstractContextManager[Write]:
    """How alignments are written to a file: by the ending of its name, but for `.gz` and `.zst`, Pharaoh lines unless
    that is in `WRITERS`."""
    name = Path(path)
    return WRITERS.get(Path(name.stem if name.suffix in PACKED else name).suffix, pharaoh_lines)(file)
