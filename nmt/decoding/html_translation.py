"""Translation of HTML and XML documents: blocks of text are translated as lines, and their tags put back."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from nmt.config import UNK
from nmt.data.html_document import HtmlDocument, Span, parse_document
from nmt.data.html_tags import Alignment, restore_tags
from nmt.data.tokenizer import SPACE_SYMBOL, SPECIALS, Tokenizer, piece_to_bytes
from nmt.data.word_links import Link
from nmt.data.words import find_spans, split_tokens
from nmt.decoding.alignment import EOS_PIECE, pool_to_words
from nmt.decoding.translation import Translation, check_scores, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.system.lines import split_on_spaces

UNKNOWN_PIECE = SPECIALS[UNK]
SPACES = " " + SPACE_SYMBOL


def translate_html(translator: Translator, document: str, progress: bool = False) -> str:
    """Return a document with its text translated. In warnings, a line is a block of text.

    Raises:
        UserError: the model has no attention, a score is NaN, or as in `Translator.translate`.
    """
    if not translator.model.attends:
        raise UserError(
            "a model without attention cannot translate HTML, since attention says where tags belong; use a model with "
            "attention, or plain text"
        )
    parsed = parse_document(document)
    results = translator.translate(parsed.texts, keep_weights=True, progress=progress)
    best = [options[0] for options in results]
    check_scores(best, 1)
    warn_if_truncated(best, translator.config, 1)
    return restore_document(parsed, best, translator.tokenizer)


def restore_document(document: HtmlDocument, translations: Iterable[Translation], tokenizer: Tokenizer) -> str:
    """Return a document with translations of its texts, which should have attention weights."""
    pairs = zip(document.texts, translations, strict=True)
    return restore_tags(document, (align_text(text, translation, tokenizer) for text, translation in pairs))


def align_text(text: str, translation: Translation, tokenizer: Tokenizer) -> Alignment:
    """Return the links between words and punctuation marks of a text and its translation.

    Without attention weights, which very long lines lack, words are linked by their relative positions.
    """
    source_words = find_spans(text, split_tokens(text))
    target_words = find_spans(translation.text, split_tokens(translation.text))
    if translation.weights_TS is None:
        step = len(source_words) / max(1, len(target_words))
        links = [(int((target + 0.5) * step), target) for target in range(len(target_words)) if source_words]
        return Alignment(translation.text, source_words, target_words, links)
    normalized, offsets = tokenizer.source.processor.normalize(text, with_offsets=True)
    source_pieces, target_pieces = translation.restored_pieces
    source_owners = find_owners(source_pieces, normalized, offsets, source_words)
    target_owners = find_owners(target_pieces, translation.text, range(len(translation.text)), target_words)
    weights_TS = np.zeros((len(target_words), len(source_words)))
    pooled = pool_to_words(translation.weights_TS, source_owners, target_owners)[:-1, :-1]
    weights_TS[: pooled.shape[0], : pooled.shape[1]] = pooled  # the last words may have no pieces
    source_is_word, target_is_word = (
        [any(map(str.isalnum, line[start:end])) for start, end in words]
        for line, words in ((text, source_words), (translation.text, target_words))
    )
    is_same_kind_TS = np.equal.outer(target_is_word, source_is_word)
    return Alignment(translation.text, source_words, target_words, *link_words(weights_TS, is_same_kind_TS))


def link_words(weights_TS: np.ndarray, allowed_TS: np.ndarray) -> tuple[list[Link], list[Link]]:
    """Return links (source word, target word), the strongest first: of each target word, and of each source word.

    Weights are compared as shares of what a source word gets from all target words. Otherwise the words that many
    others look at, such as names and verbs, would get links that belong to their neighbors. A word is linked to the one
    with the largest share, among those that are allowed.
    """
    if not weights_TS.size:
        return [], []
    shares_TS = weights_TS / np.maximum(weights_TS.sum(axis=0, keepdims=True), np.finfo(float).tiny)
    shares_TS *= allowed_TS
    of_targets = [(int(s), t) for t, s in enumerate(shares_TS.argmax(axis=1))]
    of_sources = [(s, int(t)) for s, t in enumerate(shares_TS.argmax(axis=0))]
    of_targets, of_sources = (
        sorted((link for link in links if shares_TS[link[::-1]] > 0), key=lambda link: -shares_TS[link[::-1]])
        for links in (of_targets, of_sources)
    )
    return of_targets, of_sources


def find_owners(pieces: Sequence[str], text: str, offsets: Sequence[int], words: Sequence[Span]) -> list[int]:
    """Return for each piece the index of the word in which it begins, or -1 for `</s>`.

    Args:
        pieces: of the text; those of a word tokenizer may be unknown.
        text: what the pieces spell, apart from spaces.
        offsets: where each character of `text` is in the text that has the words.
        words: first and last (exclusive) character of each word.
    """
    visible = [(character, offset) for character, offset in zip(text, offsets, strict=False) if character not in SPACES]
    offset_of_byte = [offset for character, offset in visible for _ in character.encode()]
    starts = [start for start, _ in words]
    spelled = iter(spell_pieces(pieces, text))
    owners = []
    position = 0
    for piece in pieces:
        if piece == EOS_PIECE or not offset_of_byte:
            owners.append(-1)
            continue
        owners.append(bisect_right(starts, offset_of_byte[min(position, len(offset_of_byte) - 1)]) - 1)
        position += next(spelled)
    return owners


def spell_pieces(pieces: Sequence[str], text: str) -> list[int]:
    """Return the number of bytes of each piece but `</s>`, without spaces; an unknown word has those of its word."""
    pieces = [piece for piece in pieces if piece != EOS_PIECE]
    words = split_on_spaces(text.replace(SPACE_SYMBOL, " "))
    if UNKNOWN_PIECE in pieces and len(words) == len(pieces):
        pieces = words
    return [len(piece_to_bytes(piece).replace(b" ", b"")) for piece in pieces]
