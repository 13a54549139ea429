"""Uppercase, lowercase and titlecase of a language."""

import regex

WORD = regex.compile(r"\S+")
LETTERS = regex.compile(r"\p{Lu}|\p{Ll}")
MIN_LETTERS = 6  # of a line in capitals; fewer may be an abbreviation
DOTTED_LANGUAGES = ("tr", "az")  # the capital of i is İ, that of ı is I


def to_upper(text: str, language: str) -> str:
    """Return a text in capitals. `language` is a code such as `de`."""
    return dot_capitals(text, language).upper()


def to_lower(text: str, language: str) -> str:
    """Return a text in lowercase. `language` is a code such as `de`."""
    if language in DOTTED_LANGUAGES:
        text = text.replace("İ", "i").replace("I", "ı")
    return text.lower()


def to_title(text: str, language: str) -> str:
    """Return a text with a capital at the beginning of each word. Of a ligature only the first letter is one: ﬁ, Fi."""
    return WORD.sub(lambda match: dot_capitals(match[0][0], language).title() + match[0][1:], text)


def dot_capitals(text: str, language: str) -> str:
    """Return a text in which each i is its capital, if that has a dot in the language."""
    return text.replace("i", "İ") if language in DOTTED_LANGUAGES else text


def is_in_capitals(text: str) -> bool:
    """Return whether a line has several words, and at least `MIN_LETTERS` letters with case, all of them capitals."""
    letters = LETTERS.findall(text)
    return len(letters) >= MIN_LETTERS and " " in text.strip() and text == text.upper()
