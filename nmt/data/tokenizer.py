"""Subword pieces: a SentencePiece model for both sides, or one for each.

Text survives: under the identity normalization and with byte fallback (every type but `word`) `decode(encode(line))`
is the line again, whatever is in it. The exceptions are U+2581, SentencePiece's sign for a space, and line breaks
within a line; all of them come back as spaces. `word` keeps the words that it knows, one space apart.

SentencePiece segments, we sample: its random generators cannot be seeded for good (0.2.3 salts them in each process
and encodes a list in several threads), so BPE dropout and the sampling of unigram segmentations are done here.
"""

import hashlib
import io
import itertools
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp, isfinite, log
from operator import add
from pathlib import Path

import sentencepiece

from nmt.config import BOS, EOS, PAD, UNK, TokenizerConfig
from nmt.data.words import may_be_unspaced, split_words
from nmt.errors import UserError
from nmt.runtime.files import open_regular, write_atomically
from nmt.runtime.lines import split_on_spaces

SPECIALS = ("<pad>", "▁<unk>", "<s>", "</s>")  # an unknown word is a word: it brings its space
SPACE = "▁"
WORD = re.compile("▁[^▁]*")
JOINT = "\U0010fffd"  # private use, so it is no part of text: between words that no space divides
UNDECODED = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of bytes that are no UTF-8
BYTE_PIECES = 256  # they follow the specials and the tags
CHUNK = 1_000  # characters; SentencePiece leaves out lines over 4,192 bytes, so longer ones are given in parts
FEW = 32  # lines that SentencePiece encodes sooner one by one than in its threads
LONGEST_PIECE = 16  # characters, by SentencePiece's default
LARGEST = 2**28  # bytes of a model that is read: no real one is nearly so large
REPLACEMENT = 256  # bytes that normalization may make of a character: Unicode's longest, U+FDFA, has 33 in NFKC
UNKNOWN_PENALTY = 10.0  # of a character without a piece, below the worst piece, as in SentencePiece


@dataclass(frozen=True)
class LanguageTokenizer:
    """The tokenizer of one language."""

    model: bytes  # as SentencePiece serializes it

    @cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    @cached_property
    def vocab_size(self) -> int:
        """Number of pieces, the four specials included."""
        return len(self.processor)

    @cached_property
    def bytes_fall_back(self) -> bool:
        return bool(self.processor.piece_to_id("<0x00>") != UNK)

    @cached_property
    def tags(self) -> dict[str, int]:
        """The ids of tags, which follow the specials; a model of words has them among these."""
        end = self.processor.piece_to_id("<0x00>") if self.bytes_fall_back else len(SPECIALS)
        return {self.processor.id_to_piece(i): i for i in range(len(SPECIALS), end)}

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The ids of ordinary pieces: no specials, tags or bytes."""
        first = len(SPECIALS) + len(self.tags) + BYTE_PIECES * self.bytes_fall_back
        return {self.processor.id_to_piece(i): i for i in range(first, self.vocab_size)}

    @cached_property
    def scores(self) -> dict[str, float]:
        """Log-probabilities of ordinary pieces, or the negative ranks of BPE's merges."""
        return {piece: self.processor.get_score(i) for piece, i in self.vocabulary.items()}

    @cached_property
    def merges(self) -> bool:
        """Whether this is a BPE model: SentencePiece does not tell, but only a merge's rank can be 0."""
        return max(self.scores.values(), default=0.0) == 0.0

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest ordinary piece."""
        return max(map(len, self.vocabulary), default=1)

    @cached_property
    def word_by_word(self) -> bool:
        """Whether the ids of a line are those of its words, where one space stands between each two and none around
        them: no merge knows a space within, and no normalization looks at neighbors. (A unigram model rounds sums of
        scores, which may decide otherwise in a line than in a word.)"""
        text = " \uff58  \ufb01 "  # two letters that nmt_nfkc would make others
        as_it_is = self.processor.normalize(text) == SPACE + text.replace(" ", SPACE)
        return self.bytes_fall_back and self.merges and as_it_is and not any(SPACE in p[1:] for p in self.vocabulary)

    def surely_longer(self, line: str, limit: int) -> bool:
        """Whether a line has more than `limit` pieces for certain, as its characters tell: no piece has more than
        `longest_piece` of them. A word has any number (type `word`), so there nothing is certain."""
        most = self.longest_piece * limit
        return self.bytes_fall_back and len(line) > most and len(self.processor.normalize(line)) > most

    def encode(
        self, lines: list[str], sampling: float = 0.0, seed: int | str = 0, threads: int | None = None
    ) -> list[list[int]]:
        """Ids of each line, without `<s>` and `</s>`; an empty list for an empty line.

        sampling: 0 for the best segmentation, else BPE's dropout (Provilkov et al. 2020), or the exponent on the
            probability of a unigram segmentation (Kudo 2018: smaller is more random).
        seed: of the sampling; the same lines, sampling and seed give the same ids, anywhere.
        threads: of SentencePiece, for many lines without sampling; by default one for each core.
        """
        if self.bytes_fall_back and not sampling:
            if len(lines) < FEW:  # a list goes to several threads, which takes longer to begin with
                return [self.processor.encode(line) for line in lines]
            return self.processor.encode(lines, num_threads=threads)
        texts = [WORD.findall(text) for text in self.processor.normalize(lines)]
        if not self.bytes_fall_back:  # SentencePiece itself would make one of unknown words that are neighbors
            return [[self.vocabulary.get(word, UNK) for word in text if word != SPACE] for text in texts]
        rng = random.Random(seed)
        return [[piece for word in text for piece in self._sample(word, sampling, rng)] for text in texts]

    def encode_words(self, lines: Sequence[Sequence[str]]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of lines given as words, and for each id the index of its word, whatever is in the word.

        No piece spans two words, so these are the ids of the words one space apart, except where a word has spaces in
        it, by U+2581 or by normalization: it stays one word here. Words with `JOINT` between them have no space between
        them; no piece spans these either.
        """
        encoded = iter(self.encode([word for line in lines for word in line]))
        words = [[part for _ in line for part in self.at_joints(next(encoded))] for line in lines]
        ids = [[i for word in line for i in word] for line in words]
        return ids, [[index for index, word in enumerate(line) for _ in word] for line in words]

    @cached_property
    def joint(self) -> list[int]:
        """The ids of `JOINT`: its bytes, for no text has it, so no piece does; none in a model of words."""
        return self.processor.encode(JOINT)[-len(JOINT.encode()) :] if self.bytes_fall_back else []

    def at_joints(self, ids: list[int]) -> list[list[int]]:
        """The ids between those of `JOINT`."""
        parts: list[list[int]] = [[]]
        size = len(self.joint)
        for i in ids:
            parts[-1].append(i)
            if size and parts[-1][-size:] == self.joint:
                del parts[-1][-size:]
                parts.append([])
        return parts

    def spelled(self, line: str) -> list[str]:
        """The words of a line as they are encoded, one for each id of a tokenizer of type `word`."""
        [text] = self.processor.normalize([line])
        return [word.removeprefix(SPACE) for word in WORD.findall(text) if word != SPACE]

    def words_of(self, line: str, ids: Sequence[int]) -> list[int]:
        """For each id of a segmentation of a line the index of its word between spaces in the line as it stands, of
        which normalization and U+2581 may have made several, or none; -1: of no word, like `</s>`."""
        encoded = self.encode(split_on_spaces(line))
        counts = [len(words(self.pieces(word))[0]) for word in encoded]
        originals = [index for index, count in enumerate(counts) for _ in range(count)]
        return [-1 if owner < 0 else originals[owner] for owner in words(self.pieces(ids))[1]]

    def _sample(self, word: str, sampling: float, rng: random.Random) -> list[int]:
        if word in self.tags:
            return [self.tags[word]]
        if self.merges:
            pieces = drop_merges(word, self.vocabulary, sampling, rng)
        else:
            pieces = draw_segmentation(word, segmentations(self, word, sampling), rng)
        ids = []
        for piece in pieces:
            known = self.vocabulary.get(piece)
            ids += [len(SPECIALS) + len(self.tags) + byte for byte in piece.encode()] if known is None else [known]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces of ids as strings, specials included; a space is shown as U+2581, a byte as `<0xE2>`."""
        return self.processor.id_to_piece(list(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids: specials are left out, line breaks become spaces, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(surface, self.pieces(ids))).removeprefix(b" ").decode("utf-8", "replace")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizers of both sides; a joint one is the same on either."""

    source: LanguageTokenizer
    target: LanguageTokenizer

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the models, in hexadecimal."""
        return hashlib.sha256(self.source.model + self.target.model).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` if joint, else `tokenizer.source.model` and `tokenizer.target.model`, into a folder
        that holds no other tokenizer."""
        if self.source == self.target:
            write_atomically(folder / "tokenizer.model", [self.source.model])
        else:
            write_atomically(folder / "tokenizer.source.model", [self.source.model])
            write_atomically(folder / "tokenizer.target.model", [self.target.model])


# ---------------------------------------------------------------------------------------------------- pieces to words
def surface(piece: str) -> bytes:
    """The bytes that a piece stands for: none for a special one, a space for U+2581 and for a line break."""
    if piece in ("<pad>", "<s>", "</s>"):
        return b""
    if len(piece) == 6 and piece.startswith("<0x"):
        text = bytes([int(piece[3:5], 16)])
    else:
        text = piece.replace(SPACE, " ").encode()
    return text.translate(bytes.maketrans(b"\n\r", b"  "))


def words(pieces: Sequence[str]) -> tuple[list[str], list[int]]:
    """The words of a text in pieces, and for each piece the index of its word.

    Words are those of `split_on_spaces` of the decoded text. A piece of nothing but a space belongs to the word that
    follows it directly; specials and superfluous spaces belong to none: -1.
    """
    surfaces = [surface(piece) for piece in pieces]
    text = b"".join(surfaces)
    found = list(re.finditer(rb"[^ ]+", text))
    starts = [match.start() for match in found]
    owners, end = [], 0
    for part in surfaces:
        letter = end + len(part) - len(part.lstrip(b" "))
        end += len(part)
        nowhere = not part or text[letter : letter + 1] in (b"", b" ")
        owners.append(-1 if nowhere else bisect_right(starts, letter) - 1)
    return [match.group().decode("utf-8", "replace") for match in found], owners


def split_at_words(pieces: Sequence[str]) -> tuple[list[str], list[int]]:
    """The same, but words of scripts without spaces (`data/words.py`) are words of their own.

    A piece belongs to the word in which it begins, and a word is the text of its pieces: one piece is never divided.
    """
    found, owners = words(pieces)
    if not any(map(may_be_unspaced, found)):
        return found, owners
    rows_of: list[list[int]] = [[] for _ in found]
    for row, owner in enumerate(owners):
        if owner >= 0:
            rows_of[owner].append(row)
    letters_of = [[surface(pieces[row]).lstrip(b" ") for row in rows] for rows in rows_of]
    texts = [b"".join(letters).decode("utf-8", "surrogateescape") for letters in letters_of]
    parts_of = split_words([UNDECODED.sub("\ufffd", text) for text in texts])
    divided, new_owners = [], [-1] * len(pieces)
    for word, rows, letters, text, parts in zip(found, rows_of, letters_of, texts, parts_of, strict=True):
        groups = begun_in(letters, text, parts)
        for group in groups:
            whole = b"".join(letters[place] for place in group).decode("utf-8", "replace")
            divided.append(word if len(groups) == 1 else whole)
            for place in group:
                new_owners[rows[place]] = len(divided) - 1
    return divided, new_owners


def begun_in(letters: Sequence[bytes], text: str, parts: Sequence[str]) -> list[list[int]]:
    """The places of the pieces that begin in each part of a text, if any do; all together where a piece has a space
    within it."""
    if " " in text or len(parts) == 1:
        return [list(range(len(letters)))]
    bounds = itertools.pairwise(itertools.accumulate(map(len, parts), initial=0))
    sizes = [len(text[start:end].encode("utf-8", "surrogateescape")) for start, end in bounds]
    ends = list(itertools.accumulate(sizes))[:-1]
    starts = itertools.accumulate(map(len, letters), initial=0)
    places = enumerate(bisect_right(ends, start) for start, _ in zip(starts, letters, strict=False))
    return [[place for place, _ in group] for _, group in itertools.groupby(places, lambda entry: entry[1])]


# ----------------------------------------------------------------------------------------------------------- sampling
def drop_merges(word: str, vocabulary: dict[str, int], dropout: float, rng: random.Random) -> list[str]:
    """BPE in which each possible merge is left out with probability `dropout` at every step.

    `vocabulary` has the merges in the order in which they were learned, by id.
    """
    pieces = list(word)
    while True:
        best, place = None, 0
        for i, pair in enumerate(map(add, pieces, pieces[1:])):
            merge = vocabulary.get(pair)
            if merge is not None and (best is None or merge < best) and rng.random() >= dropout:
                best, place = merge, i
        if best is None:
            return pieces
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@lru_cache(maxsize=1 << 16)
def segmentations(side: LanguageTokenizer, word: str, exponent: float) -> list[tuple[list[int], list[float]]]:
    """For each end 1..len(word) of a last piece: where it may start, and the cumulative probabilities of these starts.

    Forward sums over all segmentations, the probability of each raised to `exponent`.
    """
    unknown = min(side.scores.values()) - UNKNOWN_PENALTY
    forward = [0.0]
    choices = []
    for end in range(1, len(word) + 1):
        starts = [i for i in range(end) if word[i:end] in side.scores or i == end - 1]
        logits = [forward[i] + exponent * side.scores.get(word[i:end], unknown) for i in starts]
        top = max(logits)
        cumulative = list(itertools.accumulate(exp(logit - top) for logit in logits))
        forward.append(top + log(cumulative[-1]))
        choices.append((starts, cumulative))
    return choices


def draw_segmentation(word: str, choices: list[tuple[list[int], list[float]]], rng: random.Random) -> list[str]:
    pieces, end = [], len(word)
    while end:
        starts, cumulative = choices[end - 1]
        start = rng.choices(starts, cum_weights=cumulative)[0]
        pieces.append(word[start:end])
        end = start
    return pieces[::-1]


# --------------------------------------------------------------------------------------------------- training, loading
def train_tokenizer(
    source_lines: Iterable[str], target_lines: Iterable[str], config: TokenizerConfig, max_length: int | None = None,
    tags: Sequence[str] = (),
) -> Tokenizer:  # fmt: skip
    """Train on text. Each tag is a piece wherever it stands at the beginning of a word.

    The same lines give the same models, on any number of cores. The vocabulary size is exact for bpe and unigram, an
    upper limit for char and word. Lines of over 16 characters for each of `max_length` pieces are left out: they are
    not trained on either, and a few of them can outweigh all others.

    Raises:
        UserError: for vocabulary sizes that the text does not allow, on both sides at once, or when there is no text.
    """
    longest = LONGEST_PIECE * max_length if max_length else sys.maxsize
    source, target = ((line for line in lines if len(line) <= longest) for lines in (source_lines, target_lines))
    if config.joint:
        joint = train_side(itertools.chain(source, target), config, "source", tags)
        return Tokenizer(joint, joint)
    sides: list[LanguageTokenizer] = []
    troubles: list[str] = []
    for name, lines, own_tags in (("source", source, tags), ("target", target, ())):
        try:
            sides.append(train_side(lines, config, name, own_tags))
        except UserError as error:
            troubles.append(str(error))
    if troubles:
        raise UserError("; and ".join(troubles))
    return Tokenizer(*sides)


def train_side(lines: Iterable[str], config: TokenizerConfig, side: str, tags: Sequence[str] = ()) -> LanguageTokenizer:
    """Train the model of the `source` or the `target`, or of both if it is a joint one."""
    byte_fallback, size = config.type != "word", config.size(side)
    smallest = len(SPECIALS) + len(tags) + BYTE_PIECES + 1
    if byte_fallback and size < smallest:
        raise UserError(
            f"tokenizer.{config.size_key(side)}={size} is too small: there are {len(SPECIALS)} special pieces and "
            f"{BYTE_PIECES} bytes, and characters come on top; write {key_to_set(config, side)}={smallest} or more"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=trainable(lines),
            model_writer=model,
            model_type=config.type,
            user_defined_symbols=[SPACE + tag for tag in tags],
            vocab_size=size,
            hard_vocab_limit=config.type in ("bpe", "unigram"),
            byte_fallback=byte_fallback,
            character_coverage=1.0,
            normalization_rule_name=config.normalization,
            remove_extra_whitespaces=config.normalization != "identity",
            num_threads=16,  # the pieces of a unigram model depend on this number
            minloglevel=2,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            unk_piece=SPECIALS[UNK],
        )
    except RuntimeError as error:
        raise UserError(explain(str(error), config, side)) from error
    return LanguageTokenizer(model.getvalue())


def trainable(lines: Iterable[str]) -> Iterator[str]:
    """Lines as SentencePiece's trainer takes them: it would leave out long ones and those with its reserved U+2585."""
    for line in lines:
        line = line.replace("\u2585", " ")
        for start in range(0, len(line), CHUNK):
            yield line[start : start + CHUNK]


def key_to_set(config: TokenizerConfig, side: str) -> str:
    return "tokenizer.vocab_size" if config.joint else f"tokenizer.{side}_vocab_size"


def explain(error: str, config: TokenizerConfig, side: str) -> str:
    """Say what SentencePiece complains of: the key, its value, and one that works for this side."""
    name = "both sides" if config.joint else f"the {side} side"
    given, remedy = f"tokenizer.{config.size_key(side)}={config.size(side)}", key_to_set(config, side)
    if largest := re.search(r"too high .* <= (\d+)", error):
        return (
            f"{given} is more than the text of {name} allows for tokenizer.type={config.type}; "
            f"write {remedy}={largest[1]} or less, or use tokenizer.type=word or char, which take what there is"
        )
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return (
            f"{given} is too small for the text of {name}: {len(SPECIALS)} special pieces, {BYTE_PIECES} bytes and "
            f"each character of the text need a place; write {remedy}={smallest[1]} or more"
        )
    if "!sentences_.empty()" in error or "all_chars_count" in error:
        trouble = "all lines are empty, or far longer than data.max_length pieces"
        return f"there is no text on {name} to train a tokenizer on: {trouble}"
    return f"SentencePiece cannot train a tokenizer on the text of {name}: {error}"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `folder` holds.

    Raises:
        UserError: when it holds none, or a file that is not a SentencePiece model.
    """
    joint = folder / "tokenizer.model"
    if joint.exists():
        side = load_side(joint)
        return Tokenizer(side, side)
    return Tokenizer(load_side(folder / "tokenizer.source.model"), load_side(folder / "tokenizer.target.model"))


def load_side(path: Path) -> LanguageTokenizer:
    try:
        with open(path, "rb", opener=open_regular) as file:
            side = LanguageTokenizer(file.read(LARGEST))
    except OSError as error:
        raise UserError(
            f"no tokenizer in {path.parent}: neither tokenizer.model nor {path.name} can be read ({error.strerror})"
        ) from error
    try:
        if (longest := longest_replacement(side.model)) > REPLACEMENT:
            raise UserError(
                f"{path}: its normalization would make {longest:,} bytes of one character; {REPLACEMENT} are allowed"
            )
        if side.model and sound(side):
            scores = map(side.processor.get_score, range(side.vocab_size))
            if broken := [number for number, score in enumerate(scores) if not isfinite(score)]:
                piece = side.processor.id_to_piece(broken[0])
                raise UserError(f"{path} is not a tokenizer of this program: the score of {piece!r} is not finite")
            return side
    except (RuntimeError, IndexError, ValueError):
        pass
    raise UserError(f"{path} is not a tokenizer of this program: not a SentencePiece model, or one with other ids")


def longest_replacement(model: bytes) -> int:
    """Bytes that the normalization of a SentencePiece model makes of a character, or of a few, at most. A
    `NormalizerSpec` has the replacements end to end, behind an index of what they replace and the length of that."""
    specs = [content for number, content in messages(model) if number in (3, 5)]  # (de)normalizer_spec
    maps = [content for spec in specs for number, content in messages(spec) if number == 2]  # precompiled_charsmap
    ends = [4 + int.from_bytes(content[:4], "little") for content in maps]
    texts = [text for content, end in zip(maps, ends, strict=True) for text in content[end:].split(b"\0")]
    return max(map(len, texts), default=0)


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protocol buffer that are texts, bytes or messages: their numbers and contents.

    Raises:
        ValueError: it is none.
    """
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while shift < 70 and place < len(data):
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
        raise ValueError("no number where one should be")

    while place < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 2:
            size = varint()
            if size > len(data) - place:
                raise ValueError("a field is longer than what is there")
            yield number, data[place : place + size]
        elif kind == 0:
            size = 0
            varint()
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        place += size


def sound(side: LanguageTokenizer) -> bool:
    """Whether specials and bytes have their ids, and are nothing special as text.

    Raises:
        ValueError: a piece is not UTF-8.
        RuntimeError: this is no model.
    """
    first = [*SPECIALS, *side.tags, *(f"<0x{byte:02X}>" for byte in range(BYTE_PIECES * side.bytes_fall_back))]
    text = " ".join(piece.removeprefix(SPACE) for piece in first)
    [ids] = side.encode([text])
    survives = side.decode(ids) == text if side.bytes_fall_back else len(ids) == len(first)
    pieces = side.pieces(range(side.vocab_size))
    return pieces[: len(first)] == first and survives
