"""Warn of text that looks already segmented, tokenized, escaped or lowercased, and of pairs with identical sides.

Training on such text raises no error, but scores on it are not comparable to scores on plain text. Only a sample of
each text is matched against the patterns of `PROCESSING_KINDS`, so millions of lines cost no more than some thousands.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import SIDES, DataConfig
from nmt.data.corpus import describe_origins, take_rows
from nmt.data.mixing import list_corpora
from nmt.system.messages import clip_repr, pluralize

log = logging.getLogger("nmt")
SAMPLE_LINES = 20_000  # lines sampled from a text
MIN_IDENTICAL_SHARE = 0.1  # share of pairs with identical sides above which a warning is logged
MAX_LOWER_SHARE = 0.01  # maximum share of sentences with a capital in lowercased text
MIN_CASED_SHARE = 0.5  # minimum share of sentences with a capital in cased text
MIN_CASED_SENTENCES = 10  # sentences in cased scripts needed to judge the case of a text
TOKENIZED = "tokenized"
CASED_LETTER = r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Armenian}]"  # scripts whose sentences begin with a capital
# At least three words: shorter lines may be terms, which need no capital.
CASED_SENTENCE = rf"{CASED_LETTER}{{2}}\S* (.* )?{CASED_LETTER}{{2}}\S* (.* )?{CASED_LETTER}{{2}}"


class ProcessingKind(NamedTuple):
    """A kind of processing that leaves marks in the text."""

    description: str
    pattern: str  # regular expression (RE2 syntax) that matches lines with such a mark
    share: float  # share of marked lines above which a warning is logged
    remedy: str  # command or tool that undoes the processing


PROCESSING_KINDS = {
    "bpe": ProcessingKind("segmented by subword-nmt ('@@ ')", r"[^\s@]@@(\s|$)", 0.01, "sed -E 's/@@( |$)//g' < FILE"),
    "sentencepiece": ProcessingKind(
        "segmented by SentencePiece ('▁')", "▁", 0.01, "sed 's/ //g; s/▁/ /g; s/^ //' < FILE"
    ),
    "wordpiece": ProcessingKind("segmented by WordPiece ('##')", r"[^\s#] ##[^\s#]", 0.01, "sed 's/ ##//g' < FILE"),
    "joiner": ProcessingKind("segmented by OpenNMT's tokenizer ('￭')", "￭", 0.01, "sed 's/ *￭ *//g' < FILE"),
    "word end": ProcessingKind("segmented by BPE ('</w>')", r"\S</w>", 0.01, "sed 's/ //g; s|</w>| |g; s/ $//' < FILE"),
    "byte-level": ProcessingKind(  # Ġ is also a letter of Maltese
        "segmented by byte-level BPE ('Ġ')", r"(^|\s)Ġ\S.*\sĠ\S", 0.5, "the `decode` of the tokenizer that made it"
    ),
    "entities": ProcessingKind(
        "escaped as HTML or by Moses ('&amp;')",
        r"&(amp|quot|apos|lt|gt|nbsp|hellip|[nm]dash|[lr][sd]quo|[lr]aquo|copy|reg|euro|szlig"
        r"|[A-Za-z](acute|grave|circ|uml|tilde|cedil|ring|caron)|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});",
        0.01,
        """python -c 'import html, sys; sys.stdout.writelines(map(html.unescape, sys.stdin))' < FILE""",
    ),
    TOKENIZED: ProcessingKind(  # not ! ? ; : since French puts a space before them
        "tokenized (spaces before punctuation)",
        r" [.,。、，](\s|$)| '(s|t|re|ll|ve|m|d)\b| n't\b|@-@",
        0.2,
        "sacremoses -l LANGUAGE detokenize < FILE (pip install sacremoses)",
    ),
}


class TextSample(NamedTuple):
    """A sample of the lines of a text."""

    name: str
    lines: pa.Array
    numbers: npt.NDArray[np.int64]  # line numbers in the text, from 1
    total: int  # number of lines of the text

    def matches(self, pattern: str) -> npt.NDArray[np.bool_]:
        """Return which lines match the pattern."""
        return np.asarray(pc.match_substring_regex(self.lines, pattern))


# -------------------------------------------------------------------------------------------------------------- texts
def sample_sides(pairs: pa.Table, names: tuple[str, str], tag: str | None = None) -> tuple[TextSample, TextSample]:
    """Return evenly spaced samples of both sides, with `tag` removed from the sources."""
    total = len(pairs)
    rows = np.unique(np.linspace(0, total - 1, min(total, SAMPLE_LINES)).astype(np.int64))
    table = take_rows(pairs, rows)
    numbers = table["line"].to_numpy() if "line" in table.column_names else rows + 1
    source, target = (table[side].combine_chunks().cast(pa.large_string()) for side in SIDES)
    if tag is not None:
        source = pc.replace_substring_regex(source, f"^{tag} ", "")
    return TextSample(names[0], source, numbers, total), TextSample(names[1], target, numbers, total)


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
    samples = []
    start = 0
    for part, end in zip(list_corpora(data), ends, strict=True):
        if end > start:
            rows = pairs.slice(start, end - start)
            samples.append(sample_sides(rows, describe_origins(part.data, "train"), part.tag))
        start = end
    samples.append(sample_sides(valid, describe_origins(data, "valid")))
    warn_of_processing(*samples, leave_out={TOKENIZED} if words else ())


def warn_if_evaluation_is_preprocessed(
    data: DataConfig, pairs: pa.Table, further: Mapping[str, pa.Table], translations: Sequence[str]
) -> None:
    """Check an evaluation split, its further references (as from `load_further_references`) and its translations."""
    if data.format == "toy":
        return
    sides = sample_sides(pairs, describe_origins(data, data.split))
    rows = sides[0].numbers if sides[0].total == len(sides[0].lines) else np.arange(1, len(translations) + 1)
    lines = pa.array(translations, pa.large_string())
    others = [TextSample("the translations", lines, rows, len(translations))]
    for name, table in further.items():
        others.append(sample_sides(table, describe_origins(replace(data, target=name), data.split))[1])
    warn_of_processing(sides, others=others)


# ----------------------------------------------------------------------------------------------------------- warnings
def warn_of_processing(
    *pairs: tuple[TextSample, TextSample], others: Sequence[TextSample] = (), leave_out: Collection[str] = ()
) -> None:
    """Log a warning for each kind of processing, naming the texts that show it.

    Args:
        others: texts without a counterpart.
        leave_out: keys of `PROCESSING_KINDS` that are not checked.
    """
    texts = [*(text for sides in pairs for text in sides), *others]
    for name, kind in PROCESSING_KINDS.items():
        if name in leave_out:
            continue
        if descriptions := [marks for text in texts if (marks := describe_marks(text, kind))]:
            log.warning(
                f"the text looks {kind.description}: {'; '.join(descriptions)}; BLEU is only comparable on plain text, "
                f"and subwords are learned best from it. To undo it: {kind.remedy}"
            )
    if descriptions := [identical for source, target in pairs if (identical := describe_identical(source, target))]:
        log.warning(f"source and target are identical: {'; '.join(descriptions)}. Remove untranslated pairs")
    warn_of_case(texts)


def describe_marks(text: TextSample, kind: ProcessingKind) -> str:
    """Describe the lines with marks of a kind of processing; empty if they may be there by accident."""
    matches = text.matches(kind.pattern)
    if not is_frequent(matches, kind.share):
        return ""
    numbers, example = describe_matches(text, matches)
    return f"{numbers} of {text.name}, {example}"


def describe_identical(source: TextSample, target: TextSample) -> str:
    """Describe the pairs whose sides are equal up to case and surrounding spaces; empty if they are few."""
    left, right = (pc.utf8_trim_whitespace(pc.utf8_lower(text.lines)) for text in (source, target))
    matches = np.asarray(pc.and_(pc.equal(left, right), pc.not_equal(left, "")))
    if not is_frequent(matches, MIN_IDENTICAL_SHARE):
        return ""
    numbers, example = describe_matches(source, matches)
    return f"{source.name} and {target.name} in {numbers}, {example}"


def is_frequent(matches: npt.NDArray[np.bool_], share: float) -> bool:
    """Return whether more than this share of the lines match, and more than one line if there are several."""
    return bool(matches.sum() > share * len(matches)) and bool(matches.sum() >= min(2, len(matches)))


def describe_matches(text: TextSample, matches: npt.NDArray[np.bool_]) -> tuple[str, str]:
    """Return the count and share of the matching lines, and the first one."""
    first = int(np.argmax(matches))
    lines = pluralize(len(matches), "line")
    if len(matches) < text.total:
        lines += f" sampled (of {text.total:,})"
    numbers = f"{matches.sum():,} of {lines} ({matches.mean():.1%})"
    return numbers, f"first: {text.numbers[first]}, {clip_repr(text.lines[first].as_py())}"


def warn_of_case(texts: Sequence[TextSample]) -> None:
    """Warn if some texts lack capitals and others have them."""
    lowercased, cased = [], []
    for text in texts:
        sentences = text.matches(CASED_SENTENCE)
        count = int(sentences.sum())
        if count < MIN_CASED_SENTENCES or count <= 0.2 * len(sentences):
            continue
        with_capitals = int((sentences & text.matches(r"\p{Lu}")).sum())
        description = f"{with_capitals:,} of {pluralize(count, 'sentence')} of {text.name}"
        if with_capitals <= MAX_LOWER_SHARE * count:
            lowercased.append(f"{description} (first: {text.numbers[int(np.argmax(sentences))]})")
        if with_capitals >= MIN_CASED_SHARE * count:
            cased.append(description)
    if lowercased and cased:
        log.warning(
            f"some text looks lowercased and other text does not; capitals occur in {'; '.join(lowercased)}, but in "
            f"{'; '.join(cased)}. BLEU is cased: use the text before lowercasing"
        )
