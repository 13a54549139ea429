"""Encoding and decoding, grouping pieces into words, BPE dropout, and errors about vocabulary sizes."""

import random
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from builders import SUBWORDS, TOKENIZER_TYPES, WORDS, make_sentences, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import BOS, EOS, PAD, UNK, TokenizerConfig
from nmt.data import tokenizer as module
from nmt.data.encoding import encode_texts
from nmt.data.tokenizer import Tokenizer, group_by_spaces, load_tokenizer, train_tokenizer
from nmt.errors import UserError

unusual_text = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\r▁"),
        st.sampled_from("  \t\0\u2028\u2029\x85\x1c\x7f\u00a0\u200d\u200f\ufeff\ufffd\u2585äﬁשמ😀🏽ａ"),
        st.sampled_from(["<s>", "</s>", "<pad>", "<unk>", "<0x41>", "Hund", "der ", " ⁇ "]),
    )
).map("".join)


@pytest.mark.parametrize("type", SUBWORDS)
@given(text=unusual_text)
def test_encoding_and_decoding_restores_text(type: str, text: str) -> None:
    side = make_tokenizer(type).source
    [ids] = side.encode([text])
    assert side.decode(ids) == text
    assert side.processor.decode(ids) == text
    assert side.decode([BOS, *ids, EOS, PAD, PAD]) == text
    assert (ids == []) == (text == "")


@given(text=unusual_text, sampling=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 2**64))
def test_sampled_encoding_and_decoding_restores_text(text: str, sampling: float, seed: int) -> None:
    side = make_tokenizer("bpe").source
    [ids] = side.encode([text], sampling, seed)
    assert side.decode(ids) == text


@pytest.mark.parametrize("type", SUBWORDS)
def test_line_breaks_and_word_markers_decode_to_spaces(type: str) -> None:
    side = make_tokenizer(type).source
    lines = ["a\nb", "a\r\nb\r", "▁a ▁b"]
    assert [side.decode(ids) for ids in side.encode(lines)] == ["a b", "a  b ", " a  b"]


def test_normalization_is_applied_if_configured() -> None:
    side = make_tokenizer("bpe", normalization="nmt_nfkc").source
    [ids] = side.encode(["  ｄｅｒ   ﬁx\u00a0 "])
    assert side.decode(ids) == "der fix"


@pytest.mark.parametrize("type", ("bpe", "unigram"))
@pytest.mark.parametrize("split_digits", [True, False])
def test_digits_are_pieces_of_their_own_if_configured(type: str, split_digits: bool) -> None:
    lines = [f"{line}, am {day}. Mai {1900 + day} ２０２４" for day, line in enumerate(make_sentences(200))]
    config = TokenizerConfig(type=type, vocab_size=320, split_digits=split_digits)
    side = train_tokenizer(lines, lines, config).source
    with_digit = {piece for piece in side.vocabulary if re.search(r"\d", piece)}
    assert all(len(piece) == 1 for piece in with_digit) == split_digits
    for sampling in (0.0, 0.3 * side.is_bpe):
        [ids] = side.encode(["7 und 1913 und 98765 und ２０"], sampling, seed=1)
        pieces = [piece for piece in side.pieces(ids) if re.search(r"^(?!<0x).*\d", piece)]
        assert not split_digits or pieces == list("7191398765２０")
        assert side.decode(ids) == "7 und 1913 und 98765 und ２０"


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_special_ids_and_vocabulary_size(type: str) -> None:
    side = make_tokenizer(type).source
    assert side.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "▁<unk>", "<s>", "</s>"]
    assert len(side.vocabulary) + len(module.SPECIALS) + 256 * (type != "word") == side.vocab_size
    for ids in side.encode(make_sentences(50)):
        assert not {PAD, UNK, BOS, EOS} & set(ids) and max(ids) < side.vocab_size
    assert side.encode([]) == []


def test_unknown_word_is_one_piece_and_one_word() -> None:
    side = make_tokenizer("word").source
    [ids] = side.encode([" der xyz abc Hund  xyz "])
    pieces = side.pieces(ids)
    assert pieces == ["▁der", "▁<unk>", "▁<unk>", "▁Hund", "▁<unk>"]
    assert side.decode(ids) == "der <unk> <unk> Hund <unk>"
    assert group_by_spaces(pieces) == (["der", "<unk>", "<unk>", "Hund", "<unk>"], [0, 1, 2, 3, 4])
    known = make_sentences(50)
    assert [side.decode(ids) for ids in side.encode(known)] == known


def test_group_pieces_into_words() -> None:
    pieces = ["▁", "▁Ein", "▁H", "und", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "▁", "▁", "▁.", "▁", "</s>"]
    assert group_by_spaces(pieces) == (["Ein", "Hund", "€5", "."], [-1, 0, 1, 1, 2, 2, 2, 2, 2, -1, -1, 3, -1, -1])
    assert group_by_spaces(["</s>"]) == ([], [-1])
    assert group_by_spaces([]) == ([], [])
    assert group_by_spaces(["▁", "a", "</s>", "b", "<0x0A>", "c"]) == (["ab", "c"], [0, 0, -1, 0, 1, 1])
    assert group_by_spaces(["a", "<0x20>", "b", "<0xE2>"]) == (["a", "b\ufffd"], [0, 1, 1, 1])


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@given(text=unusual_text)
def test_words_of_encoded_text_match_split(type: str, text: str) -> None:
    side = make_tokenizer(type).source
    [ids] = side.encode([text])
    words, word_indices = group_by_spaces([*side.pieces(ids), "</s>"])
    expected = [word for word in text.split(" ") if word]
    assert words == expected if type != "word" else len(words) == len(expected)
    assert len(word_indices) == len(ids) + 1 and word_indices[-1] == -1


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@given(lines=st.lists(unusual_text.map(str.split), max_size=4))
def test_encoding_by_word_matches_encoding_of_line(type: str, lines: list[list[str]]) -> None:
    side = make_tokenizer(type).source
    expected = side.encode([" ".join(line) for line in lines])
    actual, word_indices = side.encode_words([[[word] for word in line] for line in lines])
    assert actual == expected
    assert word_indices == [group_by_spaces(side.pieces(ids))[1] for ids in expected]


@pytest.mark.parametrize(("type", "normalization"), [("bpe", "identity"), ("unigram", "identity"), ("bpe", "nmt_nfkc")])
@given(texts=st.lists(st.lists(st.one_of(unusual_text, st.sampled_from(["▁", " ", "ein "]))).map("".join), min_size=1))
def test_many_texts_are_encoded_like_each_line(type: str, normalization: str, texts: list[str]) -> None:
    side = make_tokenizer(type, normalization=normalization).source
    ids, lengths = encode_texts(pa.array(texts), side, max_length=1000)
    expected = [[] if text.isspace() else side.processor.encode(text) for text in texts]
    assert [list(part) for part in np.split(ids, np.cumsum(lengths)[:-1])] == expected


@pytest.mark.parametrize(("type", "normalization"), [("bpe", "identity"), ("word", "identity"), ("bpe", "nmt_nfkc")])
def test_words_with_special_characters_stay_one_word(type: str, normalization: str) -> None:
    line = ["▁", "a▁b", "▁▁c▁", "\u00b4", "\x07", "\u1680", "Hund"]
    # NFKC turns U+00B4 into a space and an accent, and removes U+0007 and U+1680.
    [ids], [word_indices] = make_tokenizer(type, normalization=normalization).source.encode_words(
        [[[word] for word in line]]
    )
    assert len(word_indices) == len(ids) and word_indices == sorted(word_indices)
    assert {1, 2, 6} <= set(word_indices) <= set(range(7))


def test_sampling_is_determined_by_seed() -> None:
    side, lines = make_tokenizer("bpe").source, make_sentences(50)
    best, sampled = side.encode(lines), side.encode(lines, 0.3, 1)
    assert sampled == side.encode(lines, 0.3, 1) != side.encode(lines, 0.3, 2)
    assert sum(map(len, sampled)) > sum(map(len, best))
    with pytest.raises(UserError, match="tokenizer.sampling needs a BPE tokenizer"):  # which init_from or path may lack
        make_tokenizer("unigram").source.encode(lines, 0.3, 1)


def test_bpe_without_dropout_matches_sentencepiece() -> None:
    side, rng = make_tokenizer("bpe").source, random.Random(0)
    for word in {word for line in make_sentences(100) for word in line.split()} | {"unbekannt", "ß", "Größenhäuser"}:
        pieces = module.segment_with_bpe_dropout("▁" + word, side.vocabulary, 0.0, rng)
        known = [piece for piece in pieces if piece in side.vocabulary]
        assert known == [piece for piece in side.pieces(side.encode([word])[0]) if piece in side.vocabulary]
    assert module.segment_with_bpe_dropout("▁Hund", side.vocabulary, 0.99999999, rng) == list("▁Hund")


@pytest.mark.parametrize("joint", [True, False])
def test_saved_tokenizer_can_be_loaded(tmp_path: Path, joint: bool) -> None:
    config = TokenizerConfig(vocab_size=300, joint=joint)
    tokenizer = train_tokenizer(iter(make_sentences(100)), iter(WORDS * 20), config)
    tokenizer.save(tmp_path)
    names = ["tokenizer.model"] if joint else ["tokenizer.source.model", "tokenizer.target.model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = load_tokenizer(tmp_path)
    assert loaded == tokenizer and loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.source is loaded.target) == joint


TRAIN_SCRIPT = """
import os, sys
from pathlib import Path
from nmt.config import TokenizerConfig
from nmt.data.tokenizer import train_tokenizer
if sys.argv[2:] and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
lines = Path(sys.argv[1]).read_text(encoding="utf-8").split("\\n")
for type in ("bpe", "unigram"):
    tokenizer = train_tokenizer(lines, lines, TokenizerConfig(type=type, vocab_size=300))
    print(tokenizer.fingerprint, tokenizer.source.encode(lines, 0.2 * (type == "bpe"), 5)[:20])
"""


def test_training_is_reproducible_on_one_core(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("\n".join(make_sentences(300)), encoding="utf-8")
    outputs = {
        subprocess.check_output([sys.executable, "-c", TRAIN_SCRIPT, str(tmp_path / "lines"), *one_core], text=True)
        for one_core in ((), ("one core",))
    }
    assert len(outputs) == 1


def test_training_keeps_long_lines() -> None:
    """SentencePiece by itself would drop lines that are long."""
    lines = [" ".join(["Fernsehturm"] * 2000), "Rathaus\0 Rathaus Rathaus"] * 3
    config = TokenizerConfig(type="word", vocab_size=100)
    side = train_tokenizer(lines, [], config).source
    assert {"▁Fernsehturm", "▁Rathaus"} <= set(side.vocabulary)
    train_tokenizer(["x" * 100_000], ["y"], TokenizerConfig(type="bpe", vocab_size=264))


@pytest.mark.parametrize("joint, name", [(True, "both sides"), (False, "the source side")])
@pytest.mark.parametrize("type", ["bpe", "unigram"])
def test_vocabulary_size_suggested_by_error_works(type: str, joint: bool, name: str) -> None:
    for size, pattern in ((50_000, "more than .* or less"), (9, "too small .* or more"), (264, "too small .* or more")):
        with pytest.raises(UserError, match=f"^tokenizer.vocab_size={size} is {pattern}") as error:
            train_tokenizer(WORDS * 9, WORDS * 9, TokenizerConfig(type, size, joint))
        match = re.search(rf"{name}.* use tokenizer.vocab_size=(\d+)", str(error.value))
        assert match is not None
        config = TokenizerConfig(type=type, joint=joint, vocab_size=int(match[1]))
        assert train_tokenizer(WORDS * 9, WORDS * 9, config).source.vocab_size == int(match[1])


def test_char_and_word_vocabularies_are_limited_by_text() -> None:
    for type, size in (("char", 4 + 256 + 1 + len(set("".join(WORDS)))), ("word", 4 + len(set(WORDS)))):
        assert train_tokenizer(WORDS, WORDS, TokenizerConfig(type, 8000)).source.vocab_size == size


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_empty_text_raises(type: str, lines: list[str]) -> None:
    with pytest.raises(UserError, match="no text on the target side"):
        train_tokenizer(make_sentences(300), lines, TokenizerConfig(type, 300, joint=False))


def test_missing_tokenizer_file_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in .*: neither tokenizer.model nor tokenizer.source.model"):
        load_tokenizer(tmp_path)
    make_tokenizer("bpe", joint=False).save(tmp_path)
    (tmp_path / "tokenizer.target.model").unlink()
    with pytest.raises(UserError, match="tokenizer.target.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", make_tokenizer("bpe").source.model[:-50]])
def test_invalid_tokenizer_file_raises(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match="tokenizer.model is not a tokenizer of this program"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


# --- user-defined symbols
LITERAL_PIECES = ("\U000f0000", "\U000f0001", "\U000f0002")
PARTS = [*LITERAL_PIECES, "der", "Hund", " ", "  ", "é", "@", "\U000f0003"]


@lru_cache
def make_tokenizer_with_symbols(type: str, joint: bool) -> Tokenizer:
    config = TokenizerConfig(type=type, vocab_size=310, joint=joint, literals=len(LITERAL_PIECES))
    return train_tokenizer(make_sentences(300), make_sentences(300), config)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("type", SUBWORDS)
@given(parts=st.lists(st.sampled_from(PARTS)), sampling=st.sampled_from([0.0, 0.3]))
def test_user_defined_symbols_are_single_pieces(type: str, joint: bool, parts: list[str], sampling: float) -> None:
    tokenizer = make_tokenizer_with_symbols(type, joint)
    text = "".join(parts)
    for side in (tokenizer.source, tokenizer.target):
        assert side.pieces(side.literal_ids) == list(LITERAL_PIECES)
        [ids] = side.encode([text], sampling * side.is_bpe)
        assert side.decode(ids) == text
        pieces = side.pieces(ids)
        for symbol in LITERAL_PIECES:
            assert pieces.count(symbol) == text.count(symbol)
