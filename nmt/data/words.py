"""Word segmentation for scripts written without spaces between words.

These are Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan and others. Everything that counts, aligns or shows
words uses this module.

With the extra `cjk`, ICU's dictionaries find the words; otherwise each character is a word. In Tibetan, which marks the
ends of syllables and has no dictionary in ICU, a word is a syllable. Latin words, numbers and the like within such text
stay whole. In other scripts, a word is all text between two spaces.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import regex

HAN = r"\p{Han}\p{Bopomofo}"
KANA = r"\p{Hiragana}\p{Katakana}\u30FC\uFF70"  # the last two lengthen a vowel of either
OTHER_SCRIPTS = (
    r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Tai_Le}\p{New_Tai_Lue}\p{Tai_Tham}\p{Tai_Viet}\p{Javanese}"
    r"\p{Balinese}"
)
# A character of a script without spaces. Its digits are excluded: they form numbers, as in any script.
UNSPACED_CHARACTER = rf"(?!\p{{Nd}})[{HAN}{KANA}{OTHER_SCRIPTS}]"
SPACED_LETTER = rf"(?:(?!{UNSPACED_CHARACTER})[\p{{L}}\p{{M}}\p{{N}}])"  # of another script, or a digit
UNSPACED_PATTERN = regex.compile(UNSPACED_CHARACTER)
# Includes marks and joiners that are shared with other scripts.
UNSPACED_RUN = regex.compile(rf"(?:{UNSPACED_CHARACTER}[\p{{M}}\u200B-\u200D\u2060]*)+")
# Numbers, words, command-line options, addresses: 3.5, don't, --help, %s, C++, a@b.org. Many signs in a row, as in a
# line that separates paragraphs, are not part of a word. Matching takes time in proportion to the text.
SIGN = r"[%$€£#@&~\\/+\-]"
LETTERS = rf"{SPACED_LETTER}(?:{SPACED_LETTER}|\p{{Cf}})*+"
SPACED_TOKEN = rf"(?:(?<!{SIGN}){SIGN}{{1,3}}+)?+{LETTERS}(?:['’.,:/@_&=?%+~#-]++{LETTERS})*+[%+#°]*+"
# A format character, such as a zero-width joiner or a mark of direction, is never a token by itself.
TOKEN_PATTERN = regex.compile(rf"\p{{Cf}}*(?:(?P<run>{UNSPACED_RUN.pattern})|{SPACED_TOKEN}|\X)\p{{Cf}}*+")
WORD_OR_MARK = regex.compile(r"\p{Cf}*+\p{P}\p{Cf}*+|\P{P}++")  # in what is a word of a script without spaces already
TIBETAN = regex.compile(r"\p{Tibetan}")
TIBETAN_SYLLABLE = regex.compile(r"[^\u0F0B-\u0F14]+[\u0F0B\u0F0C]*|.")
HANGUL = regex.compile(r"\p{Hangul}")
FORMAT_CHARACTERS = regex.compile(r"\p{Cf}+")
NO_SPACE_AFTER = regex.compile(rf"[{HAN}{KANA}\u3001-\u303F\uFF01-\uFF60]\Z")  # not Thai: spaces separate its sentences
FIRST_UNSPACED = "\u0e00"  # the lowest code point of these scripts
ALPHABETIC = rf"(?!{UNSPACED_CHARACTER}|\p{{Hangul}})"
SPACED_WORD = regex.compile(rf"{ALPHABETIC}\p{{L}}(?:{ALPHABETIC}[\p{{L}}\p{{M}}'’])*")
SCRIPT_KINDS = {
    "han": regex.compile(f"[{HAN}]"),
    "kana": regex.compile(f"[{KANA}]"),
    "other": regex.compile(f"[{OTHER_SCRIPTS}]"),
}
UNSPACED_LETTER = rf"(?=\p{{L}})[{HAN}{KANA}{OTHER_SCRIPTS}]"
ADJACENT_LETTERS = regex.compile(rf"(?<={UNSPACED_LETTER}\p{{M}}*){UNSPACED_LETTER}")
SEPARATED_LETTERS = regex.compile(rf"(?<={UNSPACED_LETTER}\p{{M}}*) (?={UNSPACED_LETTER})")  # a space between them
MAX_MEAN_WORD_LENGTH = 4  # letters per word up to which text counts as already segmented by spaces


@cache
def get_word_breaker() -> Callable[[str, str], Iterable[str]] | None:
    """Return ICU's word breaker, which splits a text given a locale, or None without the extra `cjk`."""
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        return None
    return WordBreaker


def segmenter_name() -> str:
    """Return the word segmenter for metric signatures: ICU with its version, or `characters`."""
    if get_word_breaker() is None:
        return "characters"
    from icu4py import icu_version

    return f"icu-{icu_version}"


def detect_script(lines: Sequence[str]) -> str | None:
    """Return the kind of script without spaces that a text is written in, or None if most of it is spaced.

    The kinds are "han" (Chinese), "kana" (Japanese) and "other" (Thai, Khmer, ...). A character of these scripts counts
    as much as a word of a spaced script or a Korean syllable.
    """
    unspaced_lines = [line for line in lines if may_be_unspaced(line)]
    counts = Counter(
        {kind: sum(len(pattern.findall(line)) for line in unspaced_lines) for kind, pattern in SCRIPT_KINDS.items()}
    )
    if not counts.total():
        return None
    spaced = sum(len(HANGUL.findall(line)) + len(SPACED_WORD.findall(line)) for line in lines)
    if counts.total() < spaced:
        return None
    if counts["other"] > counts["han"] + counts["kana"]:
        return "other"
    return "kana" if 10 * counts["kana"] > counts["han"] else "han"  # Chinese text occasionally borrows の


def segment_words(line: str) -> list[str]:
    """Return the words of a line: split at white space, and within scripts without spaces."""
    return [word for part in split_words(line.split()) for word in part]


def split_tokens(line: str) -> list[str]:
    """Return the words and punctuation marks of a line, also where no space separates them."""
    patterns = TOKEN_PATTERN, WORD_OR_MARK
    words = ((word, patterns[UNSPACED_PATTERN.search(word) is not None]) for word in segment_words(line))
    return [match[0] for word, pattern in words for match in pattern.finditer(word)]


def find_spans(line: str, words: Iterable[str]) -> list[tuple[int, int]]:
    """Return where each of the words, which stand in the line in this order, begins and ends, in characters."""
    spans: list[tuple[int, int]] = []
    end = 0
    for word in words:
        start = line.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return spans


def find_parts(line: str, words: Sequence[str]) -> list[int]:
    """Return which part of `line.split()` each of the words, into which the line is split, stands in."""
    parts = [part for part, text in enumerate(line.split()) for _ in text]
    starts = itertools.accumulate(map(len, words), initial=0)
    return [parts[start] for start in itertools.islice(starts, len(words))]


def join_sentences(texts: Iterable[str]) -> str:
    """Join texts with single spaces, but without a space after Chinese or Japanese."""
    joined = ""
    for text in texts:
        if text:
            separator = "" if not joined or NO_SPACE_AFTER.search(joined[-1:]) else " "
            joined += separator + text
    return joined


def find_words_without_space(text: str, words: Sequence[str]) -> list[int]:
    """Return the indices of words that follow the previous word without a space, as in Chinese."""
    no_space_before = []
    end = 0
    for index, word in enumerate(words):
        start = text.find(word, end)
        if start == end > 0:
            no_space_before.append(index)
        if start >= 0:
            end = start + len(word)
    return no_space_before


def split_words(parts: Sequence[str]) -> list[list[str]]:
    """Split each space-separated part of a line into words. Joined without spaces, they give the part again.

    A part stays whole if it has no character of a script without spaces. So do all parts of a Korean line, whose
    Chinese characters are in words between spaces, and of a line that has spaces between its words already.
    """
    line = " ".join(parts)
    is_spaced = not may_be_unspaced(line) or len(HANGUL.findall(line)) >= len(UNSPACED_PATTERN.findall(line))
    if is_spaced or is_segmented(line):
        return [[part] for part in parts]
    return [split_part(part) if UNSPACED_PATTERN.search(part) else [part] for part in parts]


def may_be_unspaced(line: str) -> bool:
    """Return whether a line has a character beyond those of most alphabets. This check is cheap."""
    return max(line, default="") >= FIRST_UNSPACED


def is_segmented(line: str) -> bool:
    """Return whether a line has a space for every few letters of scripts without spaces."""
    separated = len(SEPARATED_LETTERS.findall(line))
    return separated > 0 and len(ADJACENT_LETTERS.findall(line)) < MAX_MEAN_WORD_LENGTH * separated


def split_part(part: str) -> list[str]:
    words: list[str] = []
    for token in TOKEN_PATTERN.finditer(part):
        if token["run"]:
            words += split_run(token[0])
        else:
            words.append(token[0])
    return words


def split_run(run: str) -> list[str]:
    """Split a run of characters of scripts without spaces into words.

    A format character, such as a zero-width space, belongs to the word before it, or else to the first word.
    """
    word_breaker = get_word_breaker()
    if TIBETAN.search(run):
        segments = TIBETAN_SYLLABLE.findall(run)
    elif word_breaker is None:
        segments = regex.findall(r"\X", run)
    else:
        segments = list(word_breaker(run, "en"))
    words: list[str] = []
    for segment in segments:
        if words and (FORMAT_CHARACTERS.fullmatch(segment) or FORMAT_CHARACTERS.fullmatch(words[-1])):
            words[-1] += segment
        else:
            words.append(segment)
    return words
