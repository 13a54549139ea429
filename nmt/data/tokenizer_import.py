"""SentencePiece models of other programs (`tokenizer.path`).

Other programs give the special pieces other ids and names. Here they come first, then the user-defined symbols, then
the 256 bytes, then all other pieces in their old order, so that the same text is divided into the same pieces.
"""

from collections.abc import Sequence

from nmt.config import BOS, EOS, PAD, UNK
from nmt.data.tokenizer import (
    BPE,
    BYTE_PIECES,
    MAX_MODEL_BYTES,
    SPECIALS,
    LanguageTokenizer,
    Tokenizer,
    check_language_tokenizer,
    parse_model,
)
from nmt.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM = 1  # type of a SentencePiece model, as `BPE`


def import_tokenizer(path: str, symbols: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model file, for both sides.

    Args:
        symbols: user-defined symbols to add to those that the model has.

    Raises:
        UserError: there is no model, or it cannot be used.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MODEL_BYTES)
    except OSError as error:
        raise UserError(f"tokenizer.path={path} cannot be read: {error.strerror}") from None
    try:
        side = LanguageTokenizer(renumber_pieces(data, path, symbols))
    except ValueError:
        raise UserError(f"tokenizer.path={path} is not a SentencePiece model") from None
    check_language_tokenizer(side, path)
    return Tokenizer(side, side)


def renumber_pieces(data: bytes, path: str, symbols: Sequence[str]) -> bytes:
    """Return a model with the pieces in the order of this program.

    Raises:
        UserError: the model has no byte fallback, or is of an unsuitable type.
        ValueError: this is not a model.
    """
    model = parse_model(data)
    settings = model.trainer_spec
    if settings.model_type not in (UNIGRAM, BPE):
        raise UserError(f"tokenizer.path={path} is a model of words or characters; use a BPE or unigram one")
    pieces = {kind: [piece for piece in model.pieces if piece.type == kind] for kind in (USER_DEFINED, BYTE, NORMAL)}
    if len(pieces[BYTE]) != BYTE_PIECES:
        raise UserError(
            f"tokenizer.path={path} has no pieces for bytes, so it cannot encode characters that it does not know; "
            "train it with byte_fallback=true"
        )
    make_piece = type(model).SentencePiece
    special = [make_piece(piece=name, type=UNKNOWN if i == UNK else CONTROL) for i, name in enumerate(SPECIALS)]
    known = {piece.piece for piece in pieces[USER_DEFINED]}
    new = [make_piece(piece=symbol, type=USER_DEFINED) for symbol in symbols if symbol not in known]
    in_order = sorted(pieces[BYTE], key=lambda piece: piece.piece)
    renumbered = [*special, *pieces[USER_DEFINED], *new, *in_order, *pieces[NORMAL]]
    del model.pieces[:]
    model.pieces.extend(renumbered)
    settings.vocab_size = len(renumbered)
    settings.pad_id, settings.unk_id, settings.bos_id, settings.eos_id = PAD, UNK, BOS, EOS
    settings.pad_piece, settings.unk_piece, settings.bos_piece, settings.eos_piece = SPECIALS
    return bytes(model.SerializeToString())
