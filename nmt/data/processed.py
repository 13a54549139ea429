"""Signs that text was segmented, tokenized, escaped or lower-cased before it came here, or that both sides are one.

Such text trains without an error, and scores of it mean something else than scores of plain text. A sample of each text
is matched against the patterns of `KINDS`, so millions of lines cost no more than some thousands.
"""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from nmt.config import DataConfig
from nmt.data.corpus import origins
from nmt.data.mixing import corpora_of
from nmt.data.readers import clipped
from nmt.runtime.lines import count_of

log = logging.getLogger("nmt")
LOOKED_AT = 20_000  # lines of a text
IDENTICAL = 0.1  # share of pairs whose sides are equal, from which on this is no accident
LOWER, CASED = 0.01, 0.5  # shares of lines with a capital: in lower-cased text at most, in cased text at least
FEW = 10  # sentences of scripts that have capitals, below which nothing is said of them
TOKENIZED = "tokenized"
LETTER = r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Armenian}]"  # scripts whose sentences begin with a capital
SENTENCE = rf"{LETTER}{{2}}\S* (.* )?{LETTER}{{2}}\S* (.* )?{LETTER}{{2}}"  # three words; a term may have no capital


class Kind(NamedTuple):
    """A kind of processing that leaves its marks in the text."""

    what: str
    pattern: str  # of a line that has such a mark, in RE2's syntax
    share: float  # of lines: with fewer than that, or with only one, it may be an accident
    undo: str


KINDS = {
    "bpe": Kind("segmented by subword-nmt ('@@ ')", r"[^\s@]@@(\s|$)", 0.01, "sed -E 's/@@( |$)//g' < FILE"),
    "sentencepiece": Kind("segmented by SentencePiece ('▁')", "▁", 0.01, "sed 's/ //g; s/▁/ /g; s/^ //' < FILE"),
    "wordpiece": Kind("segmented by WordPiece ('##')", r"[^\s#] ##[^\s#]", 0.01, "sed 's/ ##//g' < FILE"),
    "joiner": Kind("segmented by OpenNMT's tokenizer ('￭')", "￭", 0.01, "sed 's/ *￭ *//g' < FILE"),
    "word end": Kind("segmented by BPE ('</w>')", r"\S</w>", 0.01, "sed 's/ //g; s|</w>| |g; s/ $//' < FILE"),
    "byte-level": Kind(  # Ġ is a letter of Maltese, too
        "segmented by byte-level BPE ('Ġ')", r"(^|\s)Ġ\S.*\sĠ\S", 0.5, "the `decode` of the tokenizer that made it"
    ),
    "entities": Kind(
        "escaped as HTML or by Moses ('&amp;')",
        r"&(amp|quot|apos|lt|gt|nbsp|hellip|[nm]dash|[lr][sd]quo|[lr]aquo|copy|reg|euro|szlig"
        r"|[A-Za-z](acute|grave|circ|uml|tilde|cedil|ring|caron)|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});",
        0.01,
        """python -c 'import html, sys; sys.stdout.writelines(map(html.unescape, sys.stdin))' < FILE""",
    ),
    TOKENIZED: Kind(  # no mark that some language spells with a space before it, as French does with ! ? ; :
        "tokenized (spaces before punctuation)",
        r" [.,。、，](\s|$)| '(s|t|re|ll|ve|m|d)\b| n't\b|@-@",
        0.2,
        "sacremoses -l LANGUAGE detokenize < FILE (pip install sacremoses)",
    ),
}


class Text(NamedTuple):
    """A sample of the lines of a text."""

    name: str
    lines: pa.Array
    numbers: npt.NDArray[np.int64]  # of these lines in the text, from 1
    total: int  # lines that the text has

    def matches(self, pattern: str) -> npt.NDArray[np.bool_]:
        """Which lines have a match of the pattern."""
        return np.asarray(pc.match_substring_regex(self.lines, pattern))


# -------------------------------------------------------------------------------------------------------------- texts
def sides_of(pairs: Dataset, names: tuple[str, str], tag: str | None = None) -> tuple[Text, Text]:
    """A sample of pairs; `tag` is left out of the sources."""
    total = len(pairs)
    rows = np.unique(np.linspace(0, total - 1, min(total, LOOKED_AT)).astype(np.int64))
    table = pairs.select(rows).with_format("arrow")[:]
    numbers = table["line"].to_numpy() if "line" in table.column_names else rows + 1
    source, target = (table[side].combine_chunks().cast(pa.large_string()) for side in ("source", "target"))
    if tag is not None:
        source = pc.replace_substring_regex(source, f"^{tag} ", "")
    return Text(names[0], source, numbers, total), Text(names[1], target, numbers, total)


def warn_of_training_text(
    data: DataConfig, pairs: Dataset, ends: Sequence[int], valid: Dataset, words: bool = False
) -> None:
    """Look at the training pairs, those of each corpus by themselves, and at the validation pairs.

    Args:
        ends: the row of `pairs` at which each corpus ends.
        words: whether words are meant to stand between spaces, as gold links and a vocabulary of words ask for.
    """
    if data.format == "toy":  # made with words and marks set apart
        return
    found, start = [], 0
    for part, end in zip(corpora_of(data), ends, strict=True):
        if end > start:
            rows = pairs.select(range(start, end))
            found.append(sides_of(rows, origins(part.data, "train"), part.tag))
        start = end
    warn(*found, sides_of(valid, origins(data, "valid")), leave_out={TOKENIZED} if words else ())


def warn_of_evaluation(data: DataConfig, pairs: Dataset, translations: Sequence[str]) -> None:
    """Look at a split that is measured on, and at its translations."""
    if data.format == "toy":
        return
    sides = sides_of(pairs, origins(data, data.split))
    rows = sides[0].numbers if sides[0].total == len(sides[0].lines) else np.arange(1, len(translations) + 1)
    warn(sides, others=[Text("the translations", pa.array(translations, pa.large_string()), rows, len(translations))])


# ----------------------------------------------------------------------------------------------------------- warnings
def warn(*pairs: tuple[Text, Text], others: Sequence[Text] = (), leave_out: Collection[str] = ()) -> None:
    """Log a warning for each kind of processing that texts show, with the texts that do."""
    texts = [*(text for sides in pairs for text in sides), *others]
    for name, kind in KINDS.items():
        if name not in leave_out and (shown := [said for text in texts if (said := marks(text, kind))]):
            effect = "; BLEU compares with plain text elsewhere, and pieces are learned best from it"
            log.warning(f"the text looks {kind.what}: {'; '.join(shown)}{effect}. To undo it: {kind.undo}")
    if shown := [said for source, target in pairs if (said := identical(source, target))]:
        log.warning(f"source and target are the same: {'; '.join(shown)}. Leave out what is not translated")
    warn_of_case(texts)


def marks(text: Text, kind: Kind) -> str:
    """What there is to say of lines with the marks of a kind; nothing if they may be there by accident."""
    found = text.matches(kind.pattern)
    return described(text, found, "of") if often(found, kind.share) else ""


def identical(source: Text, target: Text) -> str:
    """The same of pairs whose sides are equal but for case and spaces around them."""
    left, right = (pc.utf8_trim_whitespace(pc.utf8_lower(text.lines)) for text in (source, target))
    found = np.asarray(pc.and_(pc.equal(left, right), pc.not_equal(left, "")))
    return described(source, found, f"and {target.name} in") if often(found, IDENTICAL) else ""


def often(found: npt.NDArray[np.bool_], share: float) -> bool:
    return bool(found.sum() > share * len(found)) and bool(found.sum() >= min(2, len(found)))


def described(text: Text, found: npt.NDArray[np.bool_], joined: str) -> str:
    """Count and share of the lines that were found, and the first one."""
    first = int(np.argmax(found))
    looked = count_of(len(found), "line") + (f" looked at (of {text.total:,})" if len(found) < text.total else "")
    numbers = f"{found.sum():,} of {looked} ({found.mean():.1%})"
    shown = f"first: {text.numbers[first]}, {clipped(text.lines[first].as_py())}"
    return f"{numbers} of {text.name}, {shown}" if joined == "of" else f"{text.name} {joined} {numbers}, {shown}"


def warn_of_case(texts: Sequence[Text]) -> None:
    """Warn where texts without capitals stand beside others that have them."""
    lower, cased = [], []
    for text in texts:
        sentences, capitals = text.matches(SENTENCE), text.matches(r"\p{Lu}")
        count = int(sentences.sum())
        if count >= FEW and count > 0.2 * len(sentences):
            having = int((sentences & capitals).sum())
            said = f"{text.name} in {having:,} of {count_of(count, 'sentence')}"
            lower += [f"{said} (first: {text.numbers[int(np.argmax(sentences))]})"] if having <= LOWER * count else []
            cased += [said] if having >= CASED * count else []
    if lower and cased:
        log.warning(
            f"some text looks lower-cased beside text that is not; there are capitals of {'; '.join(lower)}, but of "
            f"{'; '.join(cased)}. BLEU is cased: take the text before it was lower-cased"
        )
