"""SentencePiece models of other programs (`tokenizer.path`).

Other programs give the special pieces other ids and names. Here they come first, then the user-defined symbols, then
the 256 bytes, then all other pieces in their old order, so that the same text is divided into the same pieces.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from nmt.config import BOS, EOS, PAD, UNK
from nmt.data.protobuf import encode_field, read_fields
from nmt.data.tokenizer import (
    BYTE_PIECES,
    MAX_MODEL_BYTES,
    SPECIALS,
    LanguageTokenizer,
    Tokenizer,
    check_language_tokenizer,
    load_tokenizer,
)
from nmt.errors import UserError

PIECES, TRAINER_SPEC = 1, 2  # fields of a model
TEXT, SCORE, TYPE = 1, 2, 3  # fields of a piece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
MODEL_TYPE, VOCAB_SIZE = 3, 4  # fields of the trainer's settings
SPECIAL_IDS = {UNK: 40, BOS: 41, EOS: 42, PAD: 43}
SPECIAL_NAMES = {UNK: 45, BOS: 46, EOS: 47, PAD: 48}
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def import_tokenizer(path: str, symbols: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model file for both sides, or that of a run.

    Args:
        symbols: user-defined symbols to add to those that a file has. A run must have them.

    Raises:
        UserError: there is no model, or it cannot be used.
    """
    if Path(path).is_dir():
        tokenizer = load_tokenizer(Path(path))
        if missing := [symbol for symbol in symbols if symbol not in tokenizer.source.symbols]:
            raise UserError(
                f"tokenizer.path={path}: the tokenizer lacks {missing[0]!r}, one of the tags, tokenizer.symbols or "
                "pieces of tokenizer.literals of this run"
            )
        return tokenizer
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MODEL_BYTES)
    except OSError as error:
        raise UserError(f"tokenizer.path={path} cannot be read: {error.strerror}") from None
    try:
        if not len(sentencepiece.SentencePieceProcessor(model_proto=data)):  # of an empty file
            raise ValueError("no pieces")
        side = LanguageTokenizer(renumber_pieces(data, path, symbols))
    except (RuntimeError, ValueError, struct.error):
        raise UserError(f"tokenizer.path={path} is not a SentencePiece model") from None
    check_language_tokenizer(side, path)
    return Tokenizer(side, side)


def renumber_pieces(data: bytes, path: str, symbols: Sequence[str]) -> bytes:
    """Return a model with the pieces in the order of this program.

    Raises:
        UserError: the model has no byte fallback, or is of an unsuitable type.
        ValueError: this is not a model.
    """
    user_defined: dict[str, bytes] = {}
    others: list[bytes] = []
    bytes_by_name: dict[str, bytes] = {}
    rest = b""
    model_type = 1
    for field in read_fields(data):
        if field.number == PIECES and isinstance(field.value, bytes):
            text, kind = read_piece(field.value)
            if kind == USER_DEFINED:
                user_defined[text] = field.encoded
            elif kind == BYTE:
                bytes_by_name[text] = field.encoded
            elif kind not in (UNKNOWN, CONTROL, UNUSED):
                others.append(field.encoded)
        elif field.number == TRAINER_SPEC and isinstance(field.value, bytes):
            settings = {setting.number: setting.value for setting in read_fields(field.value)}
            model_type = int(settings.get(MODEL_TYPE, model_type))
            rest += field.encoded
        else:
            rest += field.encoded
    if MODEL_TYPES.get(model_type) not in ("unigram", "bpe"):
        raise UserError(
            f"tokenizer.path={path} is a model of type {MODEL_TYPES.get(model_type)}; use a BPE or unigram one"
        )
    if len(bytes_by_name) != BYTE_PIECES:
        raise UserError(
            f"tokenizer.path={path} has no pieces for bytes, so it cannot encode characters that it does not know; "
            "train it with byte_fallback=true"
        )
    for symbol in symbols:
        user_defined.setdefault(symbol, encode_piece(symbol, USER_DEFINED))
    kinds = {UNK: UNKNOWN}
    pieces = [encode_piece(name, kinds.get(i, CONTROL)) for i, name in enumerate(SPECIALS)]
    pieces += [*user_defined.values(), *(bytes_by_name[f"<0x{byte:02X}>"] for byte in range(BYTE_PIECES)), *others]
    changed = encode_field(VOCAB_SIZE, len(pieces))  # a later value of a field replaces an earlier one
    for i, name in enumerate(SPECIALS):
        changed += encode_field(SPECIAL_IDS[i], i) + encode_field(SPECIAL_NAMES[i], name.encode())
    return b"".join(pieces) + rest + encode_field(TRAINER_SPEC, changed)


def read_piece(message: bytes) -> tuple[str, int]:
    """Return the text and the type of a piece."""
    fields = {field.number: field.value for field in read_fields(message)}
    text, kind = fields.get(TEXT, b""), fields.get(TYPE, NORMAL)
    if not isinstance(text, bytes) or not isinstance(kind, int):
        raise ValueError("not a piece")
    return text.decode(), kind


def encode_piece(text: str, kind: int) -> bytes:
    score = struct.pack("<f", 0.0)
    return encode_field(
        PIECES, encode_field(TEXT, text.encode()) + bytes([SCORE << 3 | 5]) + score + encode_field(TYPE, kind)
    )
