"""Text that is copied instead of translated, and terms with a given translation."""

from pathlib import Path

import pytest
from builders import make_sentences
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import SearchConfig, TokenizerConfig
from nmt.data.tokenizer import LITERAL_PIECE, train_tokenizer
from nmt.decoding.protection import Protector, Replacement, compile_terms, restore, select_replacements
from nmt.errors import UserError

TOKENIZER = train_tokenizer(make_sentences(200), make_sentences(200), TokenizerConfig(vocab_size=310, literals=4))
A, B, C, D = (chr(0xF0000 + i) for i in range(4))


def make_protector(folder: Path | None = None, terms: str = "", **settings: object) -> Protector:
    if folder is not None:
        (folder / "terms.tsv").write_text(terms, encoding="utf-8")
        settings["terms"] = str(folder / "terms.tsv")
    return Protector(SearchConfig(**settings), TOKENIZER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("Zimmer 4711 hat 12 Betten.", f"Zimmer {A} hat 12 Betten."),
        ("Es kostet 1.234,50 Euro.", f"Es kostet {A} Euro."),
        ("Schreib an a@b.org, <b>sofort</b>!", f"Schreib an {A}, {B}sofort{C}!"),
        ("%s Dateien in {folder}", f"{A} Dateien in {B}"),
        ("在https://example.org/a，有4711个，写给a@b.org吧", f"在{A}，有{B}个，写给{C}吧"),
        ("رقم ٤٧١١ هنا", f"رقم {A} هنا"),
        ("Nichts.", "Nichts."),
        ("", ""),
        (f"so {B} hier: 4711 4712", f"so {B} hier: {A} {C}"),
    ],
)
def test_literals_are_replaced_and_come_back(line: str, expected: str) -> None:
    protected = make_protector(protect=True).protect(line)
    assert protected.text == expected and protected.left_out == 0
    assert restore(protected.text, protected.originals) == restore(protected.text, protected.translations) == line


@given(st.lists(st.sampled_from(["4711", "<b>", "der", " ", "12", "a@b.org", "{x}", A, "犬", "1 000"]), max_size=12))
def test_any_line_comes_back(parts: list[str]) -> None:
    line = "".join(parts)
    protected = make_protector(protect=True).protect(line)
    assert restore(protected.text, protected.originals) == line
    assert all(protected.text.count(piece) == 1 for piece in protected.originals)
    assert not protected.originals.keys() & set(LITERAL_PIECE.findall(line))


def test_more_literals_than_pieces_are_left_out_and_counted() -> None:
    protected = make_protector(protect=True).protect("<a> <b> <c> 300 a@b.org 4711")
    assert protected.text == f"{A} {B} {C} {D} a@b.org 4711" and protected.left_out == 2


def test_patterns_come_before_literals() -> None:
    protector = make_protector(protect=True, patterns=[r"[A-Z]+-\d+", r"x*"])
    protected = protector.protect("Teil AB-12345 und xx")
    assert protected.text == f"Teil {A} und {B}" and protected.originals == {A: "AB-12345", B: "xx"}


def test_terms_come_back_as_their_translations(tmp_path: Path) -> None:
    terms = "Hund\tdoggy\nkleiner Hund\tlittle doggy\n犬\tdog\nC++\tC plus plus\n"
    protector = make_protector(tmp_path, terms)
    protected = protector.protect("Ein kleiner Hund, ein Hund, Hundehütte, 小犬が C++ 4711.")
    assert protected.text == f"Ein {A}, ein {B}, Hundehütte, 小{C}が {D} 4711."
    assert restore(protected.text, protected.translations) == (
        "Ein little doggy, ein doggy, Hundehütte, 小dogが C plus plus 4711."
    )


def test_longest_term_is_found_first() -> None:
    pattern = compile_terms(["a", "a b", "b c", "a b c d"])
    assert [match[0] for match in pattern.finditer("a b c a b cd x a")] == ["a b", "a b", "a"]


def test_first_of_overlapping_replacements_counts() -> None:
    found = [Replacement(5, 9, "x"), Replacement(0, 6, "y"), Replacement(2, 2, "z"), Replacement(0, 5, "v")]
    assert select_replacements(found) == [Replacement(0, 5, "v"), Replacement(5, 9, "x")]


def test_required_pieces_of_sentences() -> None:
    protector = make_protector(protect=True)
    ids = TOKENIZER.source.encode([f"der {B} {A}", "der"])
    found = protector.find_required(ids)
    assert [sorted(wanted) for wanted in found.of_sentences] == [TOKENIZER.target.literal_ids[:2], []]
    assert found.vocabulary == TOKENIZER.target.literal_ids


def test_model_without_literal_pieces_raises() -> None:
    plain = train_tokenizer(make_sentences(200), make_sentences(200), TokenizerConfig(vocab_size=300))
    with pytest.raises(UserError, match="search.protect=true needs a model with pieces that stand for literals"):
        Protector(SearchConfig(protect=True), plain)


def test_broken_pattern_raises() -> None:
    with pytest.raises(UserError, match="search.patterns has '\\(', which is not a regular expression"):
        SearchConfig(protect=True, patterns=["("])
    with pytest.raises(UserError, match="search.patterns needs search.protect=true"):
        SearchConfig(patterns=["a"])
