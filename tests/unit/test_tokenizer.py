"""Text to pieces and back; pieces to words; sampled segmentations; what is said of impossible vocabularies."""

import itertools
import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from builders import SUBWORDS, TOKENIZER_TYPES, WORDS, make_sentences, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import BOS, EOS, PAD, UNK, TokenizerConfig
from nmt.data import tokenizer as module
from nmt.data.tokenizer import LanguageTokenizer, group_by_spaces, load_tokenizer, train_tokenizer
from nmt.errors import UserError

nasty = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\r▁"),
        st.sampled_from("  \t\0\u2028\u2029\x85\x1c\x7f\u00a0\u200d\u200f\ufeff\ufffd\u2585äﬁשמ😀🏽ａ"),
        st.sampled_from(["<s>", "</s>", "<pad>", "<unk>", "<0x41>", "Hund", "der ", " ⁇ "]),
    )
).map("".join)


@pytest.mark.parametrize("type", SUBWORDS)
@given(text=nasty)
def test_text_survives(type: str, text: str) -> None:
    side = make_tokenizer(type).source
    [ids] = side.encode([text])
    assert side.decode(ids) == text
    assert side.processor.decode(ids) == text
    assert side.decode([BOS, *ids, EOS, PAD, PAD]) == text
    assert (ids == []) == (text == "")


@pytest.mark.parametrize("type", ("bpe", "unigram"))
@given(text=nasty, sampling=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 2**64))
def test_text_survives_sampling(type: str, text: str, sampling: float, seed: int) -> None:
    side = make_tokenizer(type).source
    [ids] = side.encode([text], sampling, seed)
    assert side.decode(ids) == text


@pytest.mark.parametrize("type", SUBWORDS)
def test_what_comes_back_as_a_space(type: str) -> None:
    side = make_tokenizer(type).source
    lines = ["a\nb", "a\r\nb\r", "▁a ▁b"]
    assert [side.decode(ids) for ids in side.encode(lines)] == ["a b", "a  b ", " a  b"]


def test_normalization_when_asked() -> None:
    side = make_tokenizer("bpe", normalization="nmt_nfkc").source
    [ids] = side.encode(["  ｄｅｒ   ﬁx\u00a0 "])
    assert side.decode(ids) == "der fix"


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_ids(type: str) -> None:
    side = make_tokenizer(type).source
    assert side.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "▁<unk>", "<s>", "</s>"]
    assert len(side.vocabulary) + len(module.SPECIALS) + 256 * (type != "word") == side.vocab_size
    for ids in side.encode(make_sentences(50)):
        assert not {PAD, UNK, BOS, EOS} & set(ids) and max(ids) < side.vocab_size
    assert side.encode([]) == []


def test_an_unknown_word_is_one_piece_and_one_word() -> None:
    side = make_tokenizer("word").source
    [ids] = side.encode([" der xyz abc Hund  xyz "])
    pieces = side.pieces(ids)
    assert pieces == ["▁der", "▁<unk>", "▁<unk>", "▁Hund", "▁<unk>"]
    assert side.decode(ids) == "der <unk> <unk> Hund <unk>"
    assert group_by_spaces(pieces) == (["der", "<unk>", "<unk>", "Hund", "<unk>"], [0, 1, 2, 3, 4])
    known = make_sentences(50)
    assert [side.decode(ids) for ids in side.encode(known)] == known


def test_words() -> None:
    pieces = ["▁", "▁Ein", "▁H", "und", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "▁", "▁", "▁.", "▁", "</s>"]
    assert group_by_spaces(pieces) == (["Ein", "Hund", "€5", "."], [-1, 0, 1, 1, 2, 2, 2, 2, 2, -1, -1, 3, -1, -1])
    assert group_by_spaces(["</s>"]) == ([], [-1])
    assert group_by_spaces([]) == ([], [])
    assert group_by_spaces(["▁", "a", "</s>", "b", "<0x0A>", "c"]) == (["ab", "c"], [0, 0, -1, 0, 1, 1])
    assert group_by_spaces(["a", "<0x20>", "b", "<0xE2>"]) == (["a", "b\ufffd"], [0, 1, 1, 1])


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@given(text=nasty)
def test_words_of_a_text(type: str, text: str) -> None:
    side = make_tokenizer(type).source
    [ids] = side.encode([text])
    found, owners = group_by_spaces([*side.pieces(ids), "</s>"])
    there = [word for word in text.split(" ") if word]
    assert found == there if type != "word" else len(found) == len(there)
    assert len(owners) == len(ids) + 1 and owners[-1] == -1


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@given(data=st.data())
def test_words_of_whatever_a_model_generates(type: str, data: st.DataObject) -> None:
    side = make_tokenizer(type).source
    ids = data.draw(st.lists(st.one_of(st.integers(0, side.vocab_size - 1), st.integers(4, 259)), max_size=30))
    ids = [i for i in ids if i < side.vocab_size]
    pieces, text = side.pieces(ids), side.decode(ids)
    found, owners = group_by_spaces(pieces)
    assert found == [word for word in text.split(" ") if word]
    assert not set("\n\r") & set(text)
    assert sorted(set(owners) - {-1}) == list(range(len(found)))
    for number, word in enumerate(found):
        part = side.decode([i for i, owner in zip(ids, owners, strict=True) if owner == number])
        assert set(word) <= set(part) | {"\ufffd"}


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@given(lines=st.lists(nasty.map(str.split), max_size=4))
def test_words_encoded_by_themselves_make_the_line(type: str, lines: list[list[str]]) -> None:
    side = make_tokenizer(type).source
    whole = side.encode([" ".join(line) for line in lines])
    found, owners = side.encode_words(lines)
    assert found == whole
    assert owners == [group_by_spaces(side.pieces(ids))[1] for ids in whole]


@pytest.mark.parametrize(("type", "normalization"), [("bpe", "identity"), ("word", "identity"), ("bpe", "nmt_nfkc")])
def test_a_word_stays_one_word_whatever_is_in_it(type: str, normalization: str) -> None:
    line = ["▁", "a▁b", "▁▁c▁", "\u00b4", "\x07", "\u1680", "Hund"]  # nfkc: space and accent, nothing, nothing
    [ids], [owners] = make_tokenizer(type, normalization=normalization).source.encode_words([line])
    assert len(owners) == len(ids) and owners == sorted(owners)
    assert {1, 2, 6} <= set(owners) <= set(range(7))


@pytest.mark.parametrize("type", ("bpe", "unigram"))
def test_sampling_is_a_function_of_the_seed(type: str) -> None:
    side, lines = make_tokenizer(type).source, make_sentences(50)
    best = side.encode(lines)
    drawn = side.encode(lines, 0.3, 1)
    assert drawn == side.encode(lines, 0.3, 1)
    assert drawn != side.encode(lines, 0.3, 2) and drawn != best
    assert sum(map(len, drawn)) > sum(map(len, best))


def test_without_dropout_the_merges_are_those_of_sentencepiece() -> None:
    side, rng = make_tokenizer("bpe").source, random.Random(0)
    for word in {word for line in make_sentences(100) for word in line.split()} | {"unbekannt", "ß", "Größenhäuser"}:
        pieces = module.segment_with_bpe_dropout("▁" + word, side.vocabulary, 0.0, rng)
        known = [piece for piece in pieces if piece in side.vocabulary]
        assert known == [piece for piece in side.pieces(side.encode([word])[0]) if piece in side.vocabulary]
    assert module.segment_with_bpe_dropout("▁Hund", side.vocabulary, 0.99999999, rng) == list("▁Hund")


def all_segmentations(word: str) -> list[list[str]]:
    cuts = (itertools.compress(range(1, len(word)), keep) for keep in itertools.product((0, 1), repeat=len(word) - 1))
    return [[word[a:b] for a, b in itertools.pairwise([0, *cut, len(word)])] for cut in cuts]


@pytest.mark.parametrize("exponent", [0.2, 1.0])
@pytest.mark.parametrize("word", ["▁und", "▁Größe", "▁dX"])
def test_unigram_segmentations_have_their_probabilities(word: str, exponent: float) -> None:
    side, rng = make_tokenizer("unigram").source, random.Random(0)
    unknown = min(side.scores.values()) - 10
    expected = {
        tuple(parts): math.exp(exponent * sum(side.scores.get(part, unknown) for part in parts))
        for parts in all_segmentations(word)
        if all(part in side.scores or len(part) == 1 for part in parts)
    }
    total, draws = sum(expected.values()), 20_000
    choices = module.compute_start_distributions(side, word, exponent)
    found = Counter(tuple(module.sample_segmentation(word, choices, rng)) for _ in range(draws))
    assert set(found) <= set(expected)
    for parts, weight in expected.items():
        share = weight / total
        assert abs(found[parts] / draws - share) < 5 * math.sqrt(share * (1 - share) / draws) + 1e-9


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@pytest.mark.parametrize("joint", [True, False])
def test_a_tokenizer_is_found_again(tmp_path: Path, type: str, joint: bool) -> None:
    config = TokenizerConfig(type=type, vocab_size=300, joint=joint)
    tokenizer = train_tokenizer(iter(make_sentences(100)), iter(WORDS * 20), config)
    tokenizer.save(tmp_path)
    names = ["tokenizer.model"] if joint else ["tokenizer.source.model", "tokenizer.target.model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    again = load_tokenizer(tmp_path)
    assert again == tokenizer and again.fingerprint == tokenizer.fingerprint
    assert (again.source is again.target) == joint
    line = WORDS[4]
    assert again.target.encode([line]) == tokenizer.target.encode([line])


SCRIPT = """
import os, sys, hashlib
from pathlib import Path
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from nmt.config import TokenizerConfig
from nmt.data.tokenizer import train_tokenizer
lines = Path(sys.argv[1]).read_text(encoding="utf-8").split("\\n")
for type in ("bpe", "unigram"):
    tokenizer = train_tokenizer(lines, lines, TokenizerConfig(type=type, vocab_size=300))
    print(tokenizer.fingerprint, tokenizer.source.encode(lines, 0.2, 5)[:20])
"""


def test_another_process_on_one_core_gets_the_same(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("\n".join(make_sentences(300)), encoding="utf-8")
    here = []
    for type in ("bpe", "unigram"):
        config = TokenizerConfig(type=type, vocab_size=300)
        tokenizer = train_tokenizer(make_sentences(300), make_sentences(300), config)
        here.append(f"{tokenizer.fingerprint} {tokenizer.source.encode(make_sentences(300), 0.2, 5)[:20]}")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "lines")]
    there = subprocess.run(command, capture_output=True, text=True, check=True)
    assert there.stdout.splitlines() == here
    assert there.stderr == ""


def test_nothing_is_lost_in_training() -> None:
    """Neither long lines nor those with characters that SentencePiece keeps for itself."""
    lines = [" ".join(["Fernsehturm"] * 2000), "\u2585 Bahnhof \u2585 Bahnhof", "Rathaus\0 Rathaus Rathaus"] * 3
    config = TokenizerConfig(type="word", vocab_size=100)
    side = train_tokenizer(lines, [], config).source
    assert {"▁Fernsehturm", "▁Bahnhof", "▁Rathaus"} <= set(side.vocabulary)
    train_tokenizer(["x" * 100_000], ["y"], config)
    train_tokenizer(["x" * 100_000], ["y"], TokenizerConfig(type="bpe", vocab_size=264))


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_training_is_silent(type: str, capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(make_sentences(50), make_sentences(50), TokenizerConfig(type=type, vocab_size=300))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("joint, name", [(True, "both sides"), (False, "the source side")])
@pytest.mark.parametrize("type", ["bpe", "unigram"])
def test_the_size_that_is_advised_works(type: str, joint: bool, name: str) -> None:
    for size, advice in ((50_000, r"more than .*=(\d+) or less"), (264, r"too small .*=(\d+) or more")):
        with pytest.raises(UserError, match=f"^tokenizer.vocab_size={size} is .*{name}") as caught:
            train_tokenizer(WORDS * 9, WORDS * 9, TokenizerConfig(type, size, joint))
        advised = re.search(advice, str(caught.value))
        assert advised is not None
        config = TokenizerConfig(type, int(advised[1]), joint)
        assert train_tokenizer(WORDS * 9, WORDS * 9, config).source.vocab_size == int(advised[1])


@pytest.mark.parametrize("type", ["bpe", "unigram"])
@pytest.mark.parametrize("given", [{}, {"source_vocab_size": 50_000}, {"source_vocab_size": 50_000, "vocab_size": 10}])
def test_each_side_has_a_size_that_its_text_allows(type: str, given: dict[str, int]) -> None:
    """Few words on one side and many signs on the other ask for sizes of which none suits both."""
    signs = "".join(map(chr, range(0x4E00, 0x4E00 + 2_000)))
    few, many = WORDS * 9, [signs[start : start + 20] for start in range(0, 2_000, 10)] * 2
    config = TokenizerConfig(**{"type": type, "vocab_size": 1_000, "joint": False, **given})
    keys = [f"tokenizer.{config.size_key(side)}={config.size(side)}" for side in ("source", "target")]
    with pytest.raises(UserError) as caught:
        train_tokenizer(few, many, config)
    message = str(caught.value)
    advised = re.findall(r"use (tokenizer.(\w+)=(\d+)) or (less|more)", message)
    assert [key for _, key, *_ in advised] == ["source_vocab_size", "target_vocab_size"]
    assert message.startswith(f"{keys[0]} is more than the text of the source side allows for tokenizer.type={type}")
    assert f"; and {keys[1]} is too small" in message
    sizes = {key: int(size) for _, key, size, _ in advised}
    if config.size("target") > 260:
        assert sizes["target_vocab_size"] > 2_000
    else:  # fewer places than bytes are refused before the text is read
        sizes["target_vocab_size"] = 2_300
    tokenizer = train_tokenizer(few, many, replace(config, **sizes))
    assert tokenizer.source.vocab_size == sizes["source_vocab_size"]
    assert tokenizer.target.vocab_size == sizes["target_vocab_size"]


def test_characters_and_words_take_what_there_is() -> None:
    for type, size in (("char", 4 + 256 + 1 + len(set("".join(WORDS)))), ("word", 4 + len(set(WORDS)))):
        assert train_tokenizer(WORDS, WORDS, TokenizerConfig(type, 8000)).source.vocab_size == size


@pytest.mark.parametrize("type", SUBWORDS)
def test_bytes_need_their_places(type: str) -> None:
    with pytest.raises(UserError, match="^tokenizer.vocab_size=260 is too small: .* 256 bytes"):
        train_tokenizer(WORDS, WORDS, TokenizerConfig(type, 260))


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_no_text(type: str, lines: list[str]) -> None:
    with pytest.raises(UserError, match="no text on the target side"):
        train_tokenizer(make_sentences(300), lines, TokenizerConfig(type, 300, joint=False))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in .*: neither tokenizer.model nor tokenizer.source.model"):
        load_tokenizer(tmp_path)
    make_tokenizer("bpe", joint=False).save(tmp_path)
    (tmp_path / "tokenizer.target.model").unlink()
    with pytest.raises(UserError, match="tokenizer.target.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 100, make_tokenizer("bpe").source.model[:-50]])
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match="tokenizer.model is not a tokenizer of this program"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_side_is_known_by_its_model() -> None:
    model = make_tokenizer("bpe").source.model
    assert LanguageTokenizer(model) == LanguageTokenizer(model) and hash(LanguageTokenizer(model)) == hash(
        LanguageTokenizer(model)
    )
    assert make_tokenizer("bpe").source.is_bpe and not make_tokenizer("unigram").source.is_bpe
