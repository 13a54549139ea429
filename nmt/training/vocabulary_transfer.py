"""Start a model from the weights of a parent that has another vocabulary (`init_from=` with `new_tokenizer=true`).

Everything but embeddings and output layer is copied. Pieces that the parent also has keep its rows. Any other piece
starts as the mean of the rows of the parent's pieces that it splits into, or, if there are none, with new random
values.
"""

from pathlib import Path

import torch

from nmt.config import SIDES
from nmt.data.tokenizer import SPECIALS, LanguageTokenizer, Tokenizer
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import MODEL_FILE, get_unique_parameters, read_tensors
from nmt.system.logging import log

SIDE_OF_PARAMETER = {
    "source_embedding.weight": "source",
    "target_embedding.weight": "target",
    "output.weight": "target",
    "output.bias": "target",
}


def match_pieces(child: LanguageTokenizer, parent: LanguageTokenizer) -> list[list[int]]:
    """Return for each piece of the child the ids of the parent's pieces that it consists of.

    This is one id if the parent has the piece. Otherwise the piece is cut into pieces of the parent, the longest first
    from the left, without characters that the parent does not have.
    """
    pieces = {parent.processor.id_to_piece(number): number for number in range(parent.vocab_size)}
    matches = []
    for number in range(child.vocab_size):
        piece = child.processor.id_to_piece(number)
        known = [number] if number < len(SPECIALS) else [pieces[piece]] if piece in pieces else None
        matches.append(split_into_pieces(piece, parent.vocabulary, parent.longest_piece) if known is None else known)
    return matches


def split_into_pieces(text: str, vocabulary: dict[str, int], longest: int) -> list[int]:
    """Return the ids of the longest pieces from the left; unknown characters are skipped."""
    ids = []
    start = 0
    while start < len(text):
        ends = range(min(len(text), start + longest), start, -1)
        end = next((end for end in ends if text[start:end] in vocabulary), None)
        if end is not None:
            ids.append(vocabulary[text[start:end]])
        start = end or start + 1
    return ids


def transfer_weights(model: Seq2Seq, tokenizer: Tokenizer, checkpoint: Path, parent: Tokenizer) -> None:
    """Load the weights of a parent with another vocabulary, and log how many pieces both have.

    Raises:
        UserError: the checkpoint does not fit the model's settings.
    """
    matches = {side: match_pieces(getattr(tokenizer, side), getattr(parent, side)) for side in SIDES}
    parameters = get_unique_parameters(model)
    expected = parameters | {
        name: parameters[name].new_empty((getattr(parent, side).vocab_size, *parameters[name].shape[1:]))
        for name, side in SIDE_OF_PARAMETER.items()
        if name in parameters
    }
    tensors = read_tensors(checkpoint / MODEL_FILE, expected, "the model's settings")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in SIDE_OF_PARAMETER:
                parameter.copy_(tensors[name])
                continue
            for row, parts in enumerate(matches[SIDE_OF_PARAMETER[name]]):
                if parts:  # others keep their random values
                    parameter[row] = tensors[name][parts].to(parameter.dtype).mean(0)
    for side, ids in matches.items():
        single, new = sum(len(parts) == 1 for parts in ids), ids.count([])
        log.info(
            f"{side} vocabulary: {len(ids):,} pieces, of which {single:,} start as one piece of the parent, "
            f"{len(ids) - single - new:,} as the mean of several, {new:,} randomly"
        )
