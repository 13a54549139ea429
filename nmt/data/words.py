"""Words of text whose script is written without spaces between words: Chinese, Japanese, Thai, Lao, Khmer, Burmese,
Tibetan and others. Everything that counts, aligns or shows words asks here where they are.

Where the extra `cjk` is installed, ICU's dictionaries find the words; otherwise each character is a word. In Tibetan,
which marks the ends of syllables and has no dictionary in ICU, a word is a syllable. Latin words, numbers and the like
within such text stay whole. Text between spaces in other scripts is one word, whatever is in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import regex

HAN, KANA = r"\p{Han}\p{Bopomofo}", r"\p{Hiragana}\p{Katakana}\u30FC\uFF70"  # the last two lengthen a vowel of either
OTHERS = "".join(
    rf"\p{{{script}}}"
    for script in (
        *("Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet"),
        *("Javanese", "Balinese"),
    )
)
SIGN = rf"(?!\p{{Nd}})[{HAN}{KANA}{OTHERS}]"  # a character of these scripts; digits make numbers, as anywhere
LETTER = rf"(?:(?!{SIGN})[\p{{L}}\p{{M}}\p{{N}}])"  # of another script, or a digit
UNSPACED = regex.compile(SIGN)
RUN = regex.compile(rf"(?:{SIGN}[\p{{M}}\u200B-\u200D\u2060]*)+")  # with marks and joiners that other scripts share
# Numbers, words, names of options, addresses: 3.5, don't, --help, %s, C++, a@b.org.
WHOLE = rf"[%$€£#@&~\\/+\-]*{LETTER}+(?:['’.,:/@_&=?%+~#-]+{LETTER}+)*[%+#°]*"
TOKEN = regex.compile(rf"(?P<run>{RUN.pattern})|{WHOLE}|\X")
SYLLABLE = regex.compile(r"[^\u0F0B-\u0F14]+[\u0F0B\u0F0C]*|.")
TIBETAN, HANGUL, FORMAT = regex.compile(r"\p{Tibetan}"), regex.compile(r"\p{Hangul}"), regex.compile(r"\p{Cf}+")
NO_SPACE_AFTER = regex.compile(rf"[{HAN}{KANA}\u3001-\u303F\uFF01-\uFF60]\Z")  # Thai has spaces between sentences
FIRST = "\u0e00"  # the lowest of all these characters
ALPHABETIC = rf"(?!{SIGN}|\p{{Hangul}})"
SPACED_WORD = regex.compile(rf"{ALPHABETIC}\p{{L}}(?:{ALPHABETIC}[\p{{L}}\p{{M}}'’])*")
KINDS = {"han": regex.compile(f"[{HAN}]"), "kana": regex.compile(f"[{KANA}]"), "other": regex.compile(f"[{OTHERS}]")}
BASE = rf"(?=\p{{L}})[{HAN}{KANA}{OTHERS}]"
JOINED = regex.compile(rf"(?<={BASE}\p{{M}}*){BASE}")  # two letters of these scripts, side by side
APART = regex.compile(rf"(?<={BASE}\p{{M}}*) (?={BASE})")  # ... with a space between them
WORD_LENGTH = 4  # letters a word, in the mean and at most, of text that has spaces between its words already


@cache
def breaker() -> Callable[[str, str], Iterable[str]] | None:
    """ICU's word breaker, from a text and a locale to its parts; None where the extra `cjk` is not installed."""
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        return None
    return WordBreaker


def segmenter() -> str:
    """What finds the words, for signatures: ICU with its version, or `characters`."""
    if breaker() is None:
        return "characters"
    from icu4py import icu_version

    return f"icu-{icu_version}"


def script_of(lines: Sequence[str]) -> str | None:
    """The kind of script of a text: "han" (Chinese), "kana" (Japanese), "other" (Thai, Khmer, ...); None where most of
    it is written with spaces. A character of the former weighs as much as a word of the latter, or as a syllable of
    Korean."""
    counts = Counter({kind: sum(len(pattern.findall(line)) for line in lines if may_be_unspaced(line))
                      for kind, pattern in KINDS.items()})  # fmt: skip
    if not counts.total():
        return None
    spaced = sum(len(HANGUL.findall(line)) + len(SPACED_WORD.findall(line)) for line in lines)
    if counts.total() < spaced:
        return None
    if counts["other"] > counts["han"] + counts["kana"]:
        return "other"
    return "kana" if 10 * counts["kana"] > counts["han"] else "han"  # Chinese borrows a の here and there


def words_in(line: str) -> list[str]:
    """The words of a line: what stands between white space, divided where its script has no spaces."""
    return [word for part in split_words(line.split()) for word in part]


def join_sentences(texts: Iterable[str]) -> str:
    """Texts one after the other, a space between them, but none after Chinese or Japanese."""
    joined = ""
    for text in texts:
        gap = "" if not joined or NO_SPACE_AFTER.search(joined) else " "
        joined += gap + text if text else ""
    return joined


def split_words(parts: Sequence[str]) -> list[list[str]]:
    """For each of a line's parts between spaces its words; put together, these are the part again.

    A part stays whole if it has no sign of a script without spaces. So do all parts of a line in Korean, whose Chinese
    characters stand in words between spaces, and of one that has spaces between its words already.
    """
    line = " ".join(parts)
    if not may_be_unspaced(line) or is_korean(line) or is_segmented(line):
        return [[part] for part in parts]
    return [split_part(part) if UNSPACED.search(part) else [part] for part in parts]


def may_be_unspaced(line: str) -> bool:
    """Whether a line has a character beyond those of most alphabets; it costs little to know."""
    return max(line, default="") >= FIRST


def is_korean(line: str) -> bool:
    return len(HANGUL.findall(line)) >= len(UNSPACED.findall(line))


def is_segmented(line: str) -> bool:
    """Whether a line has a space for every few letters of scripts without spaces."""
    apart = len(APART.findall(line))
    return apart > 0 and len(JOINED.findall(line)) < WORD_LENGTH * apart


def split_part(part: str) -> list[str]:
    found: list[str] = []
    for token in TOKEN.finditer(part):
        found += split_run(token[0]) if token["run"] else [token[0]]
    return found


def split_run(run: str) -> list[str]:
    """The words of characters of scripts without spaces alone. A zero-width space or joiner belongs to the word before
    it."""
    make = breaker()
    if TIBETAN.search(run):
        found = SYLLABLE.findall(run)
    else:
        found = regex.findall(r"\X", run) if make is None else list(make(run, "en"))
    words: list[str] = []
    for word in found:
        if words and FORMAT.fullmatch(word):
            words[-1] += word
        else:
            words.append(word)
    return words
