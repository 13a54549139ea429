"""Warn of text that looks already segmented, tokenized or escaped, and of pairs with identical sides.

Training on such text raises no error, but scores on it are not comparable to scores on plain text.
"""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import SIDES, DataConfig
from nmt.data.corpus import take_rows
from nmt.system.messages import clip_repr

log = logging.getLogger("nmt")
SAMPLE_LINES = 10_000  # evenly spaced lines of each text that are looked at
MAX_IDENTICAL_SHARE = 0.1  # of pairs with identical sides
TOKENIZED = "tokenized (spaces before punctuation)"
# By kind: a regular expression (RE2 syntax) that matches marked lines, the share of such lines that plain text may
# have, and what undoes the processing.
PROCESSING_KINDS = {
    "segmented by subword-nmt ('@@ ')": (r"[^\s@]@@(\s|$)", 0.01, "sed -E 's/@@( |$)//g' < FILE"),
    "segmented by SentencePiece ('▁')": ("▁", 0.01, "sed 's/ //g; s/▁/ /g; s/^ //' < FILE"),
    "escaped as HTML or by Moses ('&amp;')": (
        r"&(amp|quot|apos|lt|gt|nbsp|[A-Za-z](acute|grave|circ|uml|tilde|cedil)|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});",
        0.01,
        """python -c 'import html, sys; sys.stdout.writelines(map(html.unescape, sys.stdin))' < FILE""",
    ),
    TOKENIZED: (  # not ! ? ; : since French puts a space before them
        r" [.,。、，](\s|$)| '(s|t|re|ll|ve|m|d)\b| n't\b|@-@",
        0.2,
        "sacremoses -l LANGUAGE detokenize < FILE (pip install sacremoses)",
    ),
}


def warn_if_preprocessed(data: DataConfig, pairs: pa.Table, split: str, may_be_tokenized: bool) -> None:
    """Log a warning for each kind of processing that a sample of the pairs of a split shows."""
    if data.format == "toy":  # generated as tokenized text
        return
    rows = np.unique(np.linspace(0, len(pairs) - 1, min(len(pairs), SAMPLE_LINES)).astype(np.int64))
    source, target = (take_rows(pairs, rows)[side].combine_chunks().cast(pa.large_string()) for side in SIDES)
    names = [f"{data.path}/{split}.{side}" for side in (data.source, data.target)]
    for kind, (pattern, max_share, remedy) in PROCESSING_KINDS.items():
        for name, lines in zip(names, (source, target), strict=True):
            marks = describe_marks(lines, pc.match_substring_regex(lines, pattern), max_share)
            if marks and not (may_be_tokenized and kind == TOKENIZED):
                log.warning(
                    f"{name} looks {kind}: {marks}; BLEU is only comparable on plain text, and subwords are learned "
                    f"best from it. To undo it: {remedy}"
                )
    left, right = (pc.utf8_trim_whitespace(pc.utf8_lower(lines)) for lines in (source, target))
    is_same = pc.and_(pc.equal(left, right), pc.not_equal(left, ""))
    if marks := describe_marks(source, is_same, MAX_IDENTICAL_SHARE):
        log.warning(f"{names[0]} and {names[1]} are identical in {marks}. Remove untranslated pairs")


def describe_marks(lines: pa.Array, is_marked: pa.Array, max_share: float) -> str:
    """Describe the marked lines; empty if they may be there by accident."""
    count, total = pc.sum(is_marked).as_py() or 0, len(lines)
    if count <= max_share * total or count < min(2, total):
        return ""
    return f"{count / total:.1%} of the lines, such as {clip_repr(lines[pc.index(is_marked, True).as_py()].as_py())}"
