"""Text that is copied instead of translated, and terms with a given translation."""

import re
from pathlib import Path

import pytest
import torch
from builders import make_sentences
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import EOS, ModelConfig, SearchConfig, TokenizerConfig
from nmt.data.tokenizer import LITERAL_PIECE, group_by_words, train_tokenizer
from nmt.decoding.rewriting import (
    LineRewriter,
    restore_literals,
)
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.model.seq2seq import build_model

TOKENIZER = train_tokenizer(make_sentences(200), make_sentences(200), TokenizerConfig(vocab_size=310, literals=4))
A, B, C, D = (chr(0xF0000 + i) for i in range(4))


def make_rewriter(folder: Path | None = None, terms: str = "", **settings: object) -> LineRewriter:
    if folder is not None:
        (folder / "terms.tsv").write_text(terms, encoding="utf-8")
        settings["terms"] = str(folder / "terms.tsv")
    return LineRewriter(SearchConfig(**settings), TOKENIZER, ("de", "en"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("Zimmer 4711 hat 1 Bett.", f"Zimmer {A} hat 1 Bett."),
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
    rewritten = make_rewriter(protect=True).rewrite(line)
    assert rewritten.text == expected and rewritten.left_out == 0
    assert (
        restore_literals(rewritten.text, rewritten.originals)
        == restore_literals(rewritten.text, rewritten.translations)
        == line
    )


@given(st.lists(st.sampled_from(["4711", "<b>", "der", " ", "12", "a@b.org", "{x}", A, "犬", "1 000"]), max_size=12))
def test_any_line_comes_back(parts: list[str]) -> None:
    line = "".join(parts)
    rewritten = make_rewriter(protect=True).rewrite(line)
    assert restore_literals(rewritten.text, rewritten.originals) == line
    assert all(rewritten.text.count(piece) == 1 for piece in rewritten.originals)
    assert not rewritten.originals.keys() & set(LITERAL_PIECE.findall(line))


def test_more_literals_than_pieces_are_left_out_and_counted() -> None:
    rewritten = make_rewriter(protect=True).rewrite("<a> <b> <c> 300 a@b.org 4711")
    assert rewritten.text == f"{A} {B} {C} {D} a@b.org 4711" and rewritten.left_out == 2


def test_terms_come_back_as_their_translations(tmp_path: Path) -> None:
    terms = "Hund\tdoggy\nkleiner Hund\tlittle doggy\n犬\tdog\nC++\tC plus plus\n"
    rewriter = make_rewriter(tmp_path, terms)
    rewritten = rewriter.rewrite("Ein kleiner Hund, ein Hund, Hundehütte, 小犬が C++ 4711.")
    assert rewritten.text == f"Ein {A}, ein {B}, Hundehütte, 小{C}が {D} 4711."
    assert restore_literals(rewritten.text, rewritten.translations) == (
        "Ein little doggy, ein doggy, Hundehütte, 小dogが C plus plus 4711."
    )


def test_required_pieces_of_sentences() -> None:
    rewriter = make_rewriter(protect=True)
    ids = TOKENIZER.source.encode([f"der {B} {A}", "der"])
    found = rewriter.find_required(ids, ["", ""])
    assert [sorted(wanted) for wanted in found.of_sentences] == [TOKENIZER.target.literal_ids[:2], []]
    assert found.vocabulary == TOKENIZER.target.literal_ids


def test_model_without_literal_pieces_raises() -> None:
    plain = train_tokenizer(make_sentences(200), make_sentences(200), TokenizerConfig(vocab_size=300))
    with pytest.raises(UserError, match="search.protect=true needs a model with pieces that stand for literals"):
        LineRewriter(SearchConfig(protect=True), plain, ("", ""))


@pytest.mark.parametrize(
    "line, languages, expected, finished",
    [
        ("DER HUND SCHLÄFT.", ("de", "en"), "der hund schläft.", "THE BEACH 1."),
        ("IRMAK İYİ MI", ("tr", "en"), "ırmak iyi mı", "THE BEACH 1."),
        ("THE DOG SLEEPS", ("en", "tr"), "the dog sleeps", "THE BEACH 1."),
        ("ZIMMER 4711", ("de", "en"), f"zimmer {A}", "THE BEACH 1."),
        ("NASA", ("de", "en"), "NASA", "The beach 1."),
        ("OK! 犬", ("ja", "en"), "OK! 犬", "The beach 1."),
        ("Der HUND SCHLÄFT.", ("de", "en"), "Der HUND SCHLÄFT.", "The beach 1."),
        ("他今天很好", ("zh", "en"), "他今天很好", "The beach 1."),
    ],
)
def test_line_in_capitals_is_translated_in_small_letters(
    line: str, languages: tuple[str, str], expected: str, finished: str
) -> None:
    rewriter = LineRewriter(SearchConfig(protect=True), TOKENIZER, languages)
    rewritten = rewriter.rewrite(line)
    assert rewritten.text == expected
    assert rewritten.undo("The beach 1.") == finished
    assert LineRewriter(SearchConfig(capitals=False), TOKENIZER, languages).rewrite(line).text == line


def test_capitals_of_translation_follow_its_language() -> None:
    rewriter = LineRewriter(SearchConfig(protect=True), TOKENIZER, ("en", "tr"))
    rewritten = rewriter.rewrite("ROOM 4711 IS a.b@example.org")
    assert rewritten.text == f"room {A} is {B}"
    assert rewritten.undo(f"iyi {B} {A}") == "İYİ a.b@example.org 4711"


def test_words_are_those_of_the_line_and_its_translation() -> None:
    rewriter = LineRewriter(SearchConfig(protect=True), TOKENIZER, ("de", "en"))
    rewritten = rewriter.rewrite('STRASSE <a href="x"> 犬 LIEGT')
    ids = TOKENIZER.source.encode([rewritten.text, f"street {A} é"])
    pieces = (TOKENIZER.source.pieces([*i, EOS]) for i in ids)
    restored = rewritten.restore_pieces(*pieces)
    words = [group_by_words(side)[0] for side in restored]
    assert words == [["STRASSE", "<a", 'href="x">', "犬", "LIEGT"], ["STREET", "<a", 'href="x">', "é"]]


def test_special_pieces_are_not_put_in_capitals() -> None:
    rewriter = LineRewriter(SearchConfig(), TOKENIZER, ("de", "en"))
    rewritten = rewriter.rewrite("DER XYZQ <B> LÄUFT")
    specials = ["▁<unk>", "<0xC3>", "<0xA4>", "</s>"]
    assert rewritten.restore_pieces(["▁der", "<b", *specials], ["▁the", *specials]) == (
        ["▁DER", "<B", *specials],
        ["▁THE", *specials],
    )
    assert rewritten.undo("the <unk> dog <unk>") == "THE <unk> DOG <unk>"


@pytest.mark.parametrize(
    "line, prefix, text, expected",
    [
        ("DER HUND LÄUFT", "the dog", "DER HUND LÄUFT", "the dog"),
        ("DER HUND LÄUFT", "THE DÖG", "der hund läuft", "the dög"),
        ("DER HUND LÄUFT", "THE STRAẞE", "DER HUND LÄUFT", "THE STRAẞE"),
        ("DER HUND LÄUFT", "1 %", "der hund läuft", "1 %"),
        ("Der Mann läuft", "THE MAN", "Der Mann läuft", "THE MAN"),
        ("ZIMMER 4711", "ROOM 4711 IS", f"zimmer {A}", f"room {A} is"),
        ("1.000 und 4711", "4,711 and 1,000", f"{A} und {B}", f"{B} and {A}"),
        ("1.5 und 15", "15 and", f"{A} und {B}", f"{B} and"),
        ("4711 und 4711", "4711, 4711 and 4711", f"{A} und {B}", f"{A}, {B} and 4711"),
        ("47 und 4711", "0.47 14711 <b>", f"{A} und {B}", "0.47 14711 <b>"),
        (f"so {B} 4711", f"so {A} {B} 4711", f"so {B} {C}", f"so {A} {B} {C}"),
        ("Hund 4711", "The doggy C plus 4711 doggy", f"{A} {B}", f"The {A} C plus {B} doggy"),
    ],
)
def test_prefix_is_rewritten_as_the_line_and_shown_as_given(
    line: str, prefix: str, text: str, expected: str, tmp_path: Path
) -> None:
    rewritten = make_rewriter(tmp_path, "Hund\tdoggy\n", protect=True).rewrite(line, prefix)
    assert (rewritten.text, rewritten.prefix) == (text, expected)
    assert rewritten.undo(rewritten.prefix + " i") == prefix + (" I" if rewritten.in_capitals else " i")


@pytest.mark.parametrize("max_source", [None, 8])
def test_translation_begins_with_its_prefix_and_has_each_literal_once(max_source: int | None) -> None:
    torch.manual_seed(1)
    model = build_model(ModelConfig(embed=8, hidden=8), TOKENIZER.source.vocab_size, TOKENIZER.target.vocab_size).eval()
    config = SearchConfig(protect=True, beam=2, max_length=30, max_source=max_source)
    translator = Translator(model, TOKENIZER, config, torch.device("cpu"), ("de", "en"))
    pairs = [
        ("DER HUND LÄUFT", "the dog"),
        ("DER HUND LÄUFT 4711", "THE 4711"),
        ("der Hund 2019 läuft 4711", "in 2019 the"),
        ("der Hund läuft 2.019 und a@b.org", "in 2,019 a@b.org"),
    ]
    lines, prefixes = zip(*pairs, strict=True)
    for line, prefix, [best] in zip(lines, prefixes, translator.translate(lines, prefixes=prefixes), strict=True):
        assert best.text.startswith(prefix)
        assert len(re.findall(r"2.?019|4711|a@b", best.text)) == len(re.findall(r"2.?019|4711|a@b", line))
