"""Translation of HTML and XML documents: blocks of text are translated as lines, and their tags put back."""

import html
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from nmt.data.html_document import Block, Span, parse_document, restore_block
from nmt.data.tokenizer import piece_to_bytes
from nmt.data.words import find_spans, split_tokens
from nmt.decoding.alignment import EOS_PIECE, pool_to_words
from nmt.decoding.translation import Translation, check_scores, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError


def translate_html(translator: Translator, document: str, progress: bool = False) -> str:
    """Return a document with its text translated. In warnings, a line is a block of text.

    Raises:
        UserError: the model has no attention, a score is NaN, or as in `Translator.translate`.
    """
    if not translator.model.attends:
        raise UserError(
            "a model without attention cannot translate HTML, since attention says where tags belong; use plain text"
        )
    parts = parse_document(document)
    results = translator.translate(list_texts(parts), keep_weights=True, progress=progress)
    best = [options[0] for options in results]
    check_scores(best, 1)
    warn_if_truncated(best, translator.config, 1)
    return restore_document(parts, best)


def list_texts(parts: Iterable[str | Block]) -> list[str]:
    """Return the text of each block."""
    return [part.text for part in parts if isinstance(part, Block)]


def restore_document(parts: Iterable[str | Block], translations: Iterable[Translation]) -> str:
    """Return a document with translations of its blocks, which should have attention weights."""
    remaining = iter(translations)
    return "".join(part if isinstance(part, str) else restore(part, next(remaining)) for part in parts)


def restore(block: Block, translation: Translation) -> str:
    """Return the translation of a block with the tags of the block.

    A target word gets the share of a source word that is its part of the attention that all target words pay to it.
    Otherwise the words that many others look at, such as names and verbs, would draw their neighbors. Words belong to
    words and marks to marks. A number, name or mark that both sides have belongs to itself.
    """
    if not block.nodes:
        return html.escape(translation.text, quote=False)
    source_spans, target_spans = find_words(block.text, block.places), find_words(translation.text)
    source = [block.text[slice(*span)] for span in source_spans]
    target = [translation.text[slice(*span)] for span in target_spans]
    weights_TS = np.zeros((len(target), len(source)))
    if translation.weights_TS is None:  # of a very long line
        weights_TS[np.arange(len(target)), np.arange(len(target)) * len(source) // max(1, len(target))] = 1
    else:
        source_pieces, target_pieces = translation.restored_pieces
        source_index = index_pieces(source_pieces, block.text, source_spans)
        target_index = index_pieces(target_pieces, translation.text, target_spans)
        pooled_TS = pool_to_words(translation.weights_TS, source_index, target_index)[:-1, :-1]
        weights_TS[: pooled_TS.shape[0], : pooled_TS.shape[1]] = pooled_TS  # the last words may have no pieces
    source_is_word, target_is_word = ([any(map(str.isalnum, word)) for word in words] for words in (source, target))
    is_same_kind_TS = np.equal.outer(target_is_word, source_is_word)
    is_same_TS = np.array([[s == t and not s.islower() for s in source] for t in target]).reshape(weights_TS.shape)
    shares_TS = is_same_TS + is_same_kind_TS * weights_TS / np.maximum(weights_TS.sum(axis=0), np.finfo(float).tiny)
    return restore_block(block, source_spans, translation.text, target_spans, shares_TS)


def find_words(line: str, places: Collection[int] = ()) -> list[Span]:
    """Return where words and marks of a line are, split where markup is, and around digits, as in H<sub>2</sub>O."""
    tokens = split_tokens(line)
    spans: list[Span] = []
    for token, (first, end) in zip(tokens, find_spans(line, tokens), strict=True):
        around_digits = {first + match.start() for match in re.finditer(r"(?<=\d)(?=\D)|(?<=\D)(?=\d)", token)}
        spans += pairwise([first, *(i for i in range(first + 1, end) if i in places or i in around_digits), end])
    return spans


def index_pieces(pieces: Sequence[str], text: str, words: Sequence[Span]) -> list[int]:
    """Return for each piece the index of the word in which it begins, or -1 for `</s>`.

    Pieces spell the text apart from spaces. Where normalization or an unknown word has changed that, places are about
    right.
    """
    places = [place for place, character in enumerate(text) if character not in " ▁" for _ in character.encode()]
    sizes = [len(piece_to_bytes(piece).replace(b" ", b"")) for piece in pieces]
    scale = len(places) / max(1, sum(sizes))
    word_starts = [start for start, _ in words]
    index = []
    for piece, first in zip(pieces, accumulate(sizes, initial=0), strict=False):
        place = places[min(int(first * scale), len(places) - 1)] if places else 0
        index.append(-1 if piece == EOS_PIECE else bisect_right(word_starts, place) - 1)
    return index
