"""Subword tokenization with SentencePiece: one joint model, or one model for each language.

With identity normalization and byte fallback (every type but `word`), `decode(encode(line))` returns any line
unchanged, except that U+2581 (SentencePiece's symbol for a space) and line breaks within the line become spaces. Type
`word` keeps the words of its vocabulary, separated by single spaces.

BPE dropout is done here rather than in SentencePiece, whose random generators cannot be seeded reliably (0.2.3 salts
them in each process and encodes a list in several threads).
"""

import hashlib
import io
import itertools
import random
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from operator import add
from pathlib import Path
from typing import Any

import sentencepiece

from nmt.config import BOS, EOS, PAD, UNK, TokenizerConfig
from nmt.data.words import split_words
from nmt.errors import UserError
from nmt.system.files import write_atomically
from nmt.system.text import split_on_spaces

SPECIALS = ("<pad>", "▁<unk>", "<s>", "</s>")  # <unk> stands for a whole word, so it includes the space before it
SPACE_SYMBOL = "▁"
NORMALIZED_WORD = re.compile("▁[^▁]*")
JOIN_MARKER = "\U0010fffd"  # before a part of a word that follows another; private use, so no text contains it
FIRST_LITERAL_PIECE = 0xF0000  # the literal pieces are characters from here on; private use, so no text contains them
LITERAL_PIECE = re.compile("[\U000f0000-\U000f00ff]")
INVALID_BYTE = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, decoded with `surrogateescape`
BPE = 2  # type of a SentencePiece model
BYTE_PIECES = 256  # ids after the specials and the user-defined symbols
MAX_TRAINING_LINE = 1_000  # characters; longer lines are split, since SentencePiece skips lines over 4,192 bytes
MIN_LINES_FOR_THREADS = 32  # with fewer lines, SentencePiece is faster one by one than in its threads
DEFAULT_MAX_PIECE_LENGTH = 16  # characters, SentencePiece's default
TRAINING_ERRORS = {  # parts of SentencePiece's messages, and what they mean
    r"too high .* <= (\d+)": (
        "tokenizer.vocab_size={size} is more than the text of {name} allows for tokenizer.type={type}; use "
        "tokenizer.vocab_size={0} or less, or tokenizer.type=word or char, for which it is only an upper limit"
    ),
    r"smaller than required_chars\. \d+ vs (\d+)": (
        "tokenizer.vocab_size={size} is too small for the text of {name}: 256 bytes, special pieces and each character "
        "of the text must fit; use tokenizer.vocab_size={0} or more"
    ),
    r"!sentences_\.empty\(\)|all_chars_count": (
        "there is no text on {name} to train a tokenizer on: all lines are empty, or far longer than data.max_length "
        "pieces"
    ),
}
MAX_MODEL_BYTES = 2**28  # bytes read of a model file; far more than any real model
MAX_REPLACEMENT_BYTES = 256  # normalized form of a character; Unicode's longest in NFKC, U+FDFA, has 33


@dataclass(frozen=True)
class LanguageTokenizer:
    """The tokenizer of one language."""

    model: bytes  # serialized SentencePiece model

    @cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    @cached_property
    def vocab_size(self) -> int:
        """Number of pieces, including the four specials."""
        return len(self.processor)

    @cached_property
    def has_byte_fallback(self) -> bool:
        """Whether unknown characters are encoded as bytes (every type but `word`)."""
        return bool(self.processor.piece_to_id("<0x00>") != UNK)

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Ids of the user-defined symbols, which follow the specials: tags and literal pieces.

        Empty for type `word`, where tags are ordinary pieces.
        """
        end = self.processor.piece_to_id("<0x00>") if self.has_byte_fallback else len(SPECIALS)
        return {self.processor.id_to_piece(i): i for i in range(len(SPECIALS), end)}

    @cached_property
    def literal_ids(self) -> list[int]:
        """Ids of the literal pieces (`tokenizer.literals`)."""
        return [i for piece, i in self.symbols.items() if LITERAL_PIECE.fullmatch(piece)]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Ids of ordinary pieces, without specials, user-defined symbols and bytes."""
        first = len(SPECIALS) + len(self.symbols) + (BYTE_PIECES if self.has_byte_fallback else 0)
        return {self.processor.id_to_piece(i): i for i in range(first, self.vocab_size)}

    @cached_property
    def is_bpe(self) -> bool:
        """Whether this is a BPE model."""
        return bool(parse_model(self.model).trainer_spec.model_type == BPE)

    @cached_property
    def can_encode_by_word(self) -> bool:
        """Whether the ids of a line of words separated by single spaces are the concatenated ids of its words.

        This holds if no piece contains an inner space and normalization does not depend on context. Unigram models are
        excluded: they round sums of scores, so a line may be segmented differently than its words.
        """
        text = " \uff58  \ufb01 "  # nmt_nfkc would replace both letters
        is_identity = self.processor.normalize(text) == SPACE_SYMBOL + text.replace(" ", SPACE_SYMBOL)
        return self.is_bpe and is_identity and not any(SPACE_SYMBOL in piece[1:] for piece in self.vocabulary)

    @cached_property
    def known_words(self) -> dict[str, list[int]]:
        """Ids of words that were met while encoding a corpus."""
        return {}

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest ordinary piece."""
        return max(map(len, self.vocabulary), default=1)

    @cached_property
    def squeezes_spaces(self) -> bool:
        """Whether normalization removes spaces at the ends of a line and repeated ones."""
        return bool(self.processor.normalize(" a  b ") == "▁a▁b")

    @cached_property
    def character_map(self) -> bytes:
        """The normalization of characters as SentencePiece compiles it; empty if they stay as they are."""
        return bytes(parse_model(self.model).normalizer_spec.precompiled_charsmap)

    def must_exceed(self, line: str, limit: int) -> bool:
        """Return whether the length of a line alone implies that it has more than `limit` pieces.

        No piece has more than `longest_piece` characters. Always false for type `word`, where words have any length.
        """
        max_characters = self.longest_piece * limit
        return (
            self.has_byte_fallback
            and len(line) > max_characters
            and len(self.processor.normalize(line)) > max_characters
        )

    def encode(
        self, lines: list[str], sampling: float = 0.0, seed: int | str = 0, threads: int | None = None
    ) -> list[list[int]]:
        """Return the ids of each line, without `<s>` and `</s>`; an empty list for an empty line.

        Args:
            sampling: 0 for the best segmentation; otherwise the dropout of BPE (Provilkov et al. 2020).
            seed: of the sampling. The same lines, sampling and seed give the same ids on any machine.
            threads: of SentencePiece, for many lines without sampling; by default one per core.
        """
        if self.has_byte_fallback and not sampling:
            if len(lines) < MIN_LINES_FOR_THREADS:
                return [self.processor.encode(line) for line in lines]
            return self.processor.encode(lines, num_threads=threads)
        texts = [NORMALIZED_WORD.findall(text) for text in self.processor.normalize(lines)]
        if not self.has_byte_fallback:  # SentencePiece would merge adjacent unknown words into one
            return [[self.vocabulary.get(word, UNK) for word in text if word != SPACE_SYMBOL] for text in texts]
        if not self.is_bpe:
            raise UserError("tokenizer.sampling needs a BPE tokenizer, not a unigram one; set tokenizer.sampling=0")
        rng = random.Random(seed)
        return [[i for word in text for i in self._sample_word(word, sampling, rng)] for text in texts]

    def encode_words(self, lines: Sequence[Sequence[Sequence[str]]]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of lines whose words are given as parts, and for each id the index of its part in the line.

        No piece spans two parts, and there is no space between the parts of a word. If each word is one part, these are
        the ids of the words joined by single spaces. The exception is a word that contains spaces (by U+2581 or
        normalization): it counts as one here.
        """
        all_parts = [(number > 0, part) for line in lines for word in line for number, part in enumerate(word)]
        with_markers = self.encode([JOIN_MARKER * is_joined + part for is_joined, part in all_parts])
        marker_size = len(self.processor.encode(JOIN_MARKER))  # no piece contains it
        encoded = (ids[marker_size * is_joined :] for ids, (is_joined, _) in zip(with_markers, all_parts, strict=True))
        by_line = [[next(encoded) for word in line for _ in word] for line in lines]
        ids = [[i for part in parts for i in part] for parts in by_line]
        return ids, [[index for index, part in enumerate(parts) for _ in part] for parts in by_line]

    def word_indices(self, line: str, ids: Sequence[int]) -> list[int]:
        """Return for each id of a segmented line the index of its word in the line, or -1 for none, like `</s>`.

        Words are those between spaces in the original line; normalization and U+2581 may have split or removed some.
        """
        encoded = self.encode(split_on_spaces(line))
        counts = [len(group_by_spaces(self.pieces(word))[0]) for word in encoded]
        originals = [index for index, count in enumerate(counts) for _ in range(count)]
        owners = group_by_spaces(self.pieces(ids))[1]
        return [-1 if owner < 0 else originals[owner] for owner in owners]

    def _sample_word(self, word: str, dropout: float, rng: random.Random) -> list[int]:
        longest_first = sorted(map(re.escape, self.symbols), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", word) if self.symbols else [word]
        first_byte = len(SPECIALS) + len(self.symbols)
        ids: list[int] = []
        for part in filter(None, parts):
            is_symbol = part in self.symbols
            for piece in [part] if is_symbol else segment_with_bpe_dropout(part, self.vocabulary, dropout, rng):
                known = self.symbols.get(piece, self.vocabulary.get(piece))
                ids += [first_byte + byte for byte in piece.encode()] if known is None else [known]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return ids as strings, including specials. A space is shown as U+2581, a byte as `<0xE2>`."""
        return self.processor.id_to_piece(list(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without specials; line breaks become spaces, invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(piece_to_bytes, self.pieces(ids))).removeprefix(b" ").decode("utf-8", "replace")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizers of both sides; a joint tokenizer is the same on both."""

    source: LanguageTokenizer
    target: LanguageTokenizer

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the models, in hexadecimal."""
        return hashlib.sha256(self.source.model + self.target.model).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` if joint, otherwise `tokenizer.source.model` and `tokenizer.target.model`.

        The folder must not contain another tokenizer.
        """
        if self.source == self.target:
            write_atomically(folder / "tokenizer.model", [self.source.model])
        else:
            write_atomically(folder / "tokenizer.source.model", [self.source.model])
            write_atomically(folder / "tokenizer.target.model", [self.target.model])


# ---------------------------------------------------------------------------------------------------- pieces to words
def piece_to_bytes(piece: str) -> bytes:
    """Return the UTF-8 text of a piece: empty for a special, a space for U+2581 and for a line break."""
    if piece in ("<pad>", "<s>", "</s>"):
        return b""
    if len(piece) == 6 and piece.startswith("<0x"):
        text = bytes([int(piece[3:5], 16)])
    else:
        text = piece.replace(SPACE_SYMBOL, " ").encode()
    return text.translate(bytes.maketrans(b"\n\r", b"  "))


def group_by_spaces(pieces: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the words of a text given as pieces, and for each piece the index of its word.

    Words are those of `split_on_spaces` of the decoded text. A piece that is only a space belongs to the word directly
    after it; specials and superfluous spaces belong to none: -1.
    """
    return group_pieces(pieces, lambda words: [[word] for word in words])


def group_by_words(pieces: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the same as `group_by_spaces`, but also split text of scripts without spaces into words (`data/words.py`).

    A piece belongs to the word in which it begins, and a word is the text of its pieces: pieces are never divided.
    """
    return group_pieces(pieces, split_words)


def group_pieces(
    pieces: Sequence[str], split: Callable[[Sequence[str]], list[list[str]]]
) -> tuple[list[str], list[int]]:
    """Return the words of pieces, and for each piece the index of its word; `split` divides words between spaces."""
    surfaces = [piece_to_bytes(piece) for piece in pieces]
    text = b"".join(surfaces)
    ends = itertools.accumulate(map(len, surfaces))
    firsts = [end - len(surface.lstrip(b" ")) for end, surface in zip(ends, surfaces, strict=True)]  # of their letters
    begun = set(firsts)
    firsts_and_end = [*firsts, len(text)]
    spans = [match.span() for match in re.finditer(rb"[^ ]+", text)]
    words = [text[start:end].decode("utf-8", "surrogateescape") for start, end in spans]
    parts_by_word = split([INVALID_BYTE.sub("\ufffd", word) for word in words])
    bounds: list[tuple[int, int]] = []  # of all words, in bytes
    for (start, end), word, parts in zip(spans, words, parts_by_word, strict=True):
        cuts = [start]
        for length in itertools.accumulate(map(len, parts[:-1])):
            part_start = start + len(word[:length].encode("utf-8", "surrogateescape"))
            first = firsts_and_end[bisect_left(firsts, part_start)]  # of the first piece that begins there or later
            if start in begun and cuts[-1] < first < end:
                cuts.append(first)
        bounds += itertools.pairwise([*cuts, end])
    owners = [
        -1 if not surface or text[first : first + 1] in (b"", b" ") else bisect_right(bounds, (first, len(text))) - 1
        for surface, first in zip(surfaces, firsts, strict=True)
    ]
    return [text[start:end].decode("utf-8", "replace") for start, end in bounds], owners


# ----------------------------------------------------------------------------------------------------------- sampling
def segment_with_bpe_dropout(word: str, vocabulary: dict[str, int], dropout: float, rng: random.Random) -> list[str]:
    """Segment a word by BPE, skipping each possible merge with probability `dropout` at every step.

    Args:
        vocabulary: ids of the merges, in the order in which they were learned.
    """
    pieces = list(word)
    while True:
        best_id: int | None = None
        best_position = 0
        for position, pair in enumerate(map(add, pieces, pieces[1:])):
            merge_id = vocabulary.get(pair)
            if merge_id is not None and (best_id is None or merge_id < best_id) and rng.random() >= dropout:
                best_id = merge_id
                best_position = position
        if best_id is None:
            return pieces
        pieces[best_position : best_position + 2] = [pieces[best_position] + pieces[best_position + 1]]


# --------------------------------------------------------------------------------------------------- training, loading
def train_tokenizer(
    source_lines: Iterable[str],
    target_lines: Iterable[str],
    config: TokenizerConfig,
    max_length: int | None = None,
    tags: Sequence[str] = (),
) -> Tokenizer:
    """Train a tokenizer on text. Each tag becomes a piece wherever it stands at the beginning of a word, and each
    literal piece wherever it stands.

    The same lines give the same models on any number of cores. The vocabulary size is exact for bpe and unigram, an
    upper limit for char and word. Lines with more than 16 characters for each of `max_length` pieces are skipped: the
    model is not trained on them either, and a few of them can outweigh all others.

    Raises:
        UserError: the text does not allow a vocabulary size, or there is no text.
    """
    max_characters = DEFAULT_MAX_PIECE_LENGTH * max_length if max_length else sys.maxsize
    source, target = ((line for line in lines if len(line) <= max_characters) for lines in (source_lines, target_lines))
    if config.joint:
        joint = train_language_tokenizer(itertools.chain(source, target), config, "source", tags)
        return Tokenizer(joint, joint)
    return Tokenizer(
        train_language_tokenizer(source, config, "source", tags), train_language_tokenizer(target, config, "target")
    )


def train_language_tokenizer(
    lines: Iterable[str], config: TokenizerConfig, side: str, tags: Sequence[str] = ()
) -> LanguageTokenizer:
    """Train the model of side `source` or `target`, or a joint model."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                line[start : start + MAX_TRAINING_LINE]
                for line in lines
                for start in range(0, len(line), MAX_TRAINING_LINE)
            ),
            model_writer=model,
            model_type=config.type,
            user_defined_symbols=list_symbols(config, tags),
            vocab_size=config.vocab_size,
            hard_vocab_limit=config.type in ("bpe", "unigram"),
            byte_fallback=config.type != "word",
            character_coverage=1.0,
            normalization_rule_name=config.normalization,
            remove_extra_whitespaces=config.normalization != "identity",
            split_digits=config.split_digits,
            num_threads=16,  # fixed, since the pieces of a unigram model depend on it
            minloglevel=2,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            unk_piece=SPECIALS[UNK],
        )
    except RuntimeError as error:
        name = "both sides" if config.joint else f"the {side} side"
        for pattern, explanation in TRAINING_ERRORS.items():
            if match := re.search(pattern, str(error)):
                text = explanation.format(*match.groups(), name=name, size=config.vocab_size, type=config.type)
                raise UserError(text) from error
        raise UserError(f"SentencePiece cannot train a tokenizer on the text of {name}: {error}") from error
    return LanguageTokenizer(model.getvalue())


def list_symbols(config: TokenizerConfig, tags: Sequence[str]) -> list[str]:
    """Return the user-defined symbols of a tokenizer, in the order of their ids."""
    literal_pieces = [chr(FIRST_LITERAL_PIECE + i) for i in range(config.literals)]
    return [*(SPACE_SYMBOL + tag for tag in tags), *literal_pieces]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder.

    Raises:
        UserError: there is none, or a file is not a SentencePiece model of this program.
    """
    is_joint = (folder / "tokenizer.model").exists()
    names = ["tokenizer.model"] if is_joint else ["tokenizer.source.model", "tokenizer.target.model"]
    sides = [load_language_tokenizer(folder / name) for name in names]
    return Tokenizer(sides[0], sides[-1])


def load_language_tokenizer(path: Path) -> LanguageTokenizer:
    try:
        with open(path, "rb") as file:
            side = LanguageTokenizer(file.read(MAX_MODEL_BYTES))
    except OSError as error:
        raise UserError(
            f"no tokenizer in {path.parent}: neither tokenizer.model nor {path.name} can be read ({error.strerror})"
        ) from error
    check_language_tokenizer(side, str(path))
    return side


def check_language_tokenizer(side: LanguageTokenizer, path: str) -> None:
    """Raise a `UserError` if the model from a file is not usable: it may be damaged, or made to do harm.

    Special and byte pieces must have the expected ids, text that spells their names must be encoded as plain text, and
    the normalization must not replace a character by a long text.
    """
    try:
        model = parse_model(side.model)
        # A `NormalizerSpec` has the length of an index of what is replaced, the index, and the replacements end to end.
        maps = [spec.precompiled_charsmap for spec in (model.normalizer_spec, model.denormalizer_spec)]
        texts = [text for map_ in maps for text in map_[4 + int.from_bytes(map_[:4], "little") :].split(b"\0")]
        if max(map(len, texts)) <= MAX_REPLACEMENT_BYTES and all(isfinite(piece.score) for piece in model.pieces):
            byte_pieces = [f"<0x{byte:02X}>" for byte in range(BYTE_PIECES)] if side.has_byte_fallback else []
            first_pieces = [*SPECIALS, *side.symbols, *byte_pieces]
            text = " ".join(piece.removeprefix(SPACE_SYMBOL) for piece in first_pieces)
            [ids] = side.encode([text])
            survives = side.decode(ids) == text if side.has_byte_fallback else len(ids) == len(first_pieces)
            if survives and side.pieces(range(side.vocab_size))[: len(first_pieces)] == first_pieces:
                return
    except (RuntimeError, IndexError, ValueError):
        pass
    raise UserError(
        f"{path} is not a tokenizer of this program: it is no SentencePiece model, its ids differ, or it replaces a "
        "character by a long text"
    )


def parse_model(data: bytes) -> Any:
    """Return the `ModelProto` of a SentencePiece model.

    Raises:
        ValueError: this is not a model.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    try:
        model = proto.ModelProto.FromString(data)  # type: ignore[attr-defined]
    except DecodeError as error:
        raise ValueError(str(error)) from None
    if not model.pieces:
        raise ValueError("no pieces")
    return model
