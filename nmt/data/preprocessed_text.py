"""Warn of text that looks already segmented, tokenized or escaped, and of pairs with identical sides.

Training on such text raises no error, but scores on it are not comparable to scores on plain text. Only a sample of
each text is matched against the patterns of `PROCESSING_KINDS`, so millions of lines cost no more than some thousands.
"""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import SIDES, DataConfig
from nmt.data.corpus import describe_origins, take_rows
from nmt.data.mixing import list_corpora
from nmt.system.messages import clip_repr

log = logging.getLogger("nmt")
SAMPLE_LINES = 20_000  # lines sampled from a text
MIN_IDENTICAL_SHARE = 0.1  # share of pairs with identical sides above which a warning is logged
TOKENIZED = "tokenized (spaces before punctuation)"


class ProcessingKind(NamedTuple):
    """A kind of processing that leaves marks in the text."""

    pattern: str  # regular expression (RE2 syntax) that matches lines with such a mark
    share: float  # share of marked lines above which a warning is logged
    remedy: str  # command or tool that undoes the processing


PROCESSING_KINDS = {
    "segmented by subword-nmt ('@@ ')": ProcessingKind(r"[^\s@]@@(\s|$)", 0.01, "sed -E 's/@@( |$)//g' < FILE"),
    "segmented by SentencePiece ('▁')": ProcessingKind("▁", 0.01, "sed 's/ //g; s/▁/ /g; s/^ //' < FILE"),
    "escaped as HTML or by Moses ('&amp;')": ProcessingKind(
        r"&(amp|quot|apos|lt|gt|nbsp|[A-Za-z](acute|grave|circ|uml|tilde|cedil)|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});",
        0.01,
        """python -c 'import html, sys; sys.stdout.writelines(map(html.unescape, sys.stdin))' < FILE""",
    ),
    TOKENIZED: ProcessingKind(  # not ! ? ; : since French puts a space before them
        r" [.,。、，](\s|$)| '(s|t|re|ll|ve|m|d)\b| n't\b|@-@",
        0.2,
        "sacremoses -l LANGUAGE detokenize < FILE (pip install sacremoses)",
    ),
}


class TextSample(NamedTuple):
    """A sample of the lines of a text."""

    name: str
    lines: pa.Array

    def describe_marks(self, matches: pa.Array, share: float) -> str:
        """Describe the lines that match; empty if they may be there by accident."""
        count, total = pc.sum(matches).as_py() or 0, len(matches)
        if count <= share * total or count < min(2, total):
            return ""
        example = clip_repr(self.lines[pc.index(matches, True).as_py()].as_py())
        return f"{count / total:.1%} of {self.name}, such as {example}"


def sample_sides(pairs: pa.Table, names: tuple[str, str], tag: str | None = None) -> list[TextSample]:
    """Return evenly spaced samples of both sides, with `tag` removed from the sources."""
    rows = np.unique(np.linspace(0, len(pairs) - 1, min(len(pairs), SAMPLE_LINES)).astype(np.int64))
    table = take_rows(pairs, rows)
    source, target = (table[side].combine_chunks().cast(pa.large_string()) for side in SIDES)
    if tag is not None:
        source = pc.replace_substring_regex(source, f"^{tag} ", "")
    return [TextSample(names[0], source), TextSample(names[1], target)]


def warn_if_training_text_is_preprocessed(
    data: DataConfig, pairs: pa.Table, ends: Sequence[int], valid: pa.Table, words: bool = False
) -> None:
    """Check the training pairs of each corpus and the validation pairs.

    Args:
        ends: end row of each corpus in `pairs`.
        words: whether tokenized text is expected, as for gold links and a vocabulary of words.
    """
    if data.format == "toy":  # generated as tokenized text
        return
    texts = []
    start = 0
    for part, end in zip(list_corpora(data), ends, strict=True):
        if end > start:
            rows = pairs.slice(start, end - start)
            texts += sample_sides(rows, describe_origins(part.data, "train"), part.tag)
        start = end
    texts += sample_sides(valid, describe_origins(data, "valid"))
    warn_of_processing(texts, leave_out={TOKENIZED} if words else ())
    for source, target in zip(texts[::2], texts[1::2], strict=True):
        left, right = (pc.utf8_trim_whitespace(pc.utf8_lower(text.lines)) for text in (source, target))
        is_same = pc.and_(pc.equal(left, right), pc.not_equal(left, ""))
        if marks := source.describe_marks(is_same, MIN_IDENTICAL_SHARE):
            log.warning(f"source and target are identical: {marks}, and {target.name}. Remove untranslated pairs")


def warn_if_evaluation_is_preprocessed(data: DataConfig, pairs: pa.Table, translations: Sequence[str]) -> None:
    """Check an evaluation split and its translations."""
    if data.format == "toy":
        return
    texts = sample_sides(pairs, describe_origins(data, data.split))
    texts.append(TextSample("the translations", pa.array(translations, pa.large_string())))
    warn_of_processing(texts)


def warn_of_processing(texts: Sequence[TextSample], leave_out: Collection[str] = ()) -> None:
    """Log a warning for each kind of processing but those to leave out, naming the texts that show it."""
    for name, kind in PROCESSING_KINDS.items():
        found = [text.describe_marks(pc.match_substring_regex(text.lines, kind.pattern), kind.share) for text in texts]
        descriptions = [*filter(None, found)]
        if name in leave_out or not descriptions:
            continue
        log.warning(
            f"the text looks {name}: {'; '.join(descriptions)}; BLEU is only comparable on plain text, and subwords "
            f"are learned best from it. To undo it: {kind.remedy}"
        )
