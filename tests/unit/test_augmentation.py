"""Random changes of training pairs."""

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import AugmentConfig, DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data.augmentation import Augmenter, PairLinks, augment_pair, find_names
from nmt.data.encoding import EncodedPairs, encode_corpus
from nmt.data.literals import find_literals
from nmt.data.resampling import resample_pairs
from nmt.data.tokenizer import LITERAL_PIECE, train_tokenizer
from nmt.errors import UserError
from nmt.training.aligned_words import align_pairs, build_augmenter, select_single_links

NO_LINKS = PairLinks.build([])
ALWAYS = 0.999999


def augment(
    source: str,
    target: str,
    links: list[tuple[int, int, int, int]],
    seed: int = 1,
    language: str = "de",
    **rates: float,
) -> list[str]:
    augmenter = Augmenter(AugmentConfig(**rates), 4, language, NO_LINKS, ["Anna", "Bob"], [])
    return augment_pair(source, target, links, augmenter, random.Random(seed))


def link_words(source: str, target: str) -> list[tuple[int, int, int, int]]:
    """Return links between the first words of both sides, between the second, and so on."""
    spans = ([match.span() for match in re.finditer(r"\w+", text)] for text in (source, target))
    return [(*s, *t) for s, t in zip(*spans, strict=False)]


def test_links_of_few_pairs(tmp_path: Path) -> None:
    """Words that occur once or twice are not frequent, and no link at all is no error, with the cache and without."""
    sources, targets = (["Hund", "Katze", "Haus"] * 2, ["dog", "cat", "house"] * 2)
    assert len(align_pairs(sources, targets).links) == 6
    run = make_run(tmp_path, numbers=0.3)
    for _ in range(2):
        augmenter = build_augmenter(run, pa.table({"source": ["ja"] * 9, "target": ["yes"] * 9}))
        assert augmenter is not None and not len(augmenter.links.links)


@given(
    words=st.lists(
        st.sampled_from(["Hund", "4711", "<b>", "a@b.org", "die", "犬", "كلب", "İ"]), min_size=1, max_size=9
    ),
    seed=st.integers(0, 10**6),
)
def test_literal_pieces_stand_on_both_sides_once(words: list[str], seed: int) -> None:
    source, target = " ".join(words) + ".", "The " + " ".join(words)
    links = link_words(source, target.replace("The", "   "))
    new = augment(source, target, links, seed, literals=ALWAYS)
    counts = [Counter(LITERAL_PIECE.findall(text)) for text in new]
    assert counts[0] == counts[1] and set(counts[0].values()) <= {1}
    assert 0 < len(counts[0]) <= 4 or not links
    for text, old in zip(new, (source, target), strict=True):
        pattern = LITERAL_PIECE.sub("(.*)", re.escape(text))
        assert re.fullmatch(pattern, old)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_stay_equal_and_keep_their_separators(seed: int) -> None:
    source, target = augment("Er hat 1.234 Hunde und 17 Katzen.", "17 cats and 1,234 dogs.", [], seed, numbers=ALWAYS)
    assert re.fullmatch(r"Er hat [1-9]\.\d{3} Hunde und [1-9]\d Katzen\.", source)
    assert re.fullmatch(r"[1-9]\d cats and [1-9],\d{3} dogs\.", target)
    numbers = [sorted(literal.text for literal in find_literals(text)) for text in (source, target)]
    assert numbers[0] == numbers[1]


def test_number_replaces_word_where_there_is_none() -> None:
    source, target = "Der Hund schläft.", "The dog sleeps."
    new = {tuple(augment(source, target, [(4, 8, 4, 7)], seed, numbers=ALWAYS)) for seed in range(50)}
    assert len(new) > 40 and max(len(text) for text, _ in new) == len("Der 12345678 schläft.")
    for new_source, new_target in new:
        found = re.fullmatch(r"Der ([1-9]\d*) schläft\.", new_source)
        assert found and new_target == f"The {found[1]} sleeps."
    assert augment(source, target, [], numbers=ALWAYS) == [source, target]


def test_names_are_replaced_alike() -> None:
    source, target = "Tom mag Toms Haus, sagt Tom.", "Tom likes Tom's house, says Tom."
    links = [(0, 3, 0, 3), (24, 27, 28, 31), (13, 17, 16, 21)]
    new = {tuple(augment(source, target, links, seed, names=ALWAYS)) for seed in range(500)}
    for new_source, new_target in new:
        found = re.fullmatch(r"(\w+) mag Toms Haus, sagt (\1)\.", new_source)
        assert found and new_target == f"{found[1]} likes Tom's house, says {found[1]}."
    names = {new_source.split()[0] for new_source, _ in new}
    assert {"Anna", "Bob", "Bonna", "Anob"} <= names and len(names) > 8
    pair_links = PairLinks.build([links, []])
    assert find_names([source, "Eva"], [target, "Eva"], pair_links) == ["Tom"]


@pytest.mark.parametrize(
    "rates, pair, expected",
    [
        ({"lower_case": ALWAYS}, ("Groß ist I.", "The dog"), ["groß ist i.", "The dog"]),
        ({"title": ALWAYS}, ("ein  kleiner Hund.", "a small dog."), ["Ein  Kleiner Hund.", "a small dog."]),
        ({"title": ALWAYS}, ("ﬁn ßtrasse ǆep 犬", "x"), ["Fin Sstrasse ǅep 犬", "x"]),
        ({"lower_case": ALWAYS, "title": ALWAYS}, ("ein Hund", "a Dog"), ["ein hund", "a Dog"]),
        ({"final_mark": ALWAYS}, ("Ein Hund .", "A dog!"), ["Ein Hund", "A dog"]),
        ({"final_mark": ALWAYS}, ("犬だ。", "A dog."), ["犬だ", "A dog"]),
        ({"final_mark": ALWAYS}, ("هل هذا؟", "Is it?"), ["هل هذا", "Is it"]),
        ({"final_mark": ALWAYS}, ("Ein Hund", "A dog."), ["Ein Hund", "A dog."]),
        ({"final_mark": ALWAYS}, ("Ein Hund...", "A dog..."), ["Ein Hund...", "A dog..."]),
        ({}, ("Ein Hund", "A dog."), ["Ein Hund", "A dog."]),
    ],
)
def test_case_and_final_marks(rates: dict[str, float], pair: tuple[str, str], expected: list[str]) -> None:
    assert augment(*pair, [], **rates) == expected


def test_single_links() -> None:
    assert select_single_links([(0, 0), (1, 1), (1, 2), (3, 4), (5, 4), (6, 6)]) == [(0, 0), (6, 6)]


WORDS = {"hund": "dog", "katze": "cat", "haus": "house", "baum": "tree", "vogel": "bird", "auto": "car"}


def make_pairs(count: int) -> pa.Table:
    rng = random.Random(1)
    chosen = [rng.sample([*WORDS], rng.randint(2, 4)) for _ in range(count)]
    sources = ["Tom " + " ".join(words) + "." * (i % 2) for i, words in enumerate(chosen)]
    targets = ["Tom " + " ".join(WORDS[word] for word in words) + "." * (i % 2) for i, words in enumerate(chosen)]
    return pa.table({"source": sources, "target": targets})


def make_run(folder: Path, **rates: float) -> TrainRun:
    tokenizer = TokenizerConfig(vocab_size=300, joint=False, literals=4)
    return TrainRun(
        data=DataConfig(cache=str(folder), max_length=40), tokenizer=tokenizer, augment=AugmentConfig(**rates)
    )


def test_aligner_finds_words_and_leaves_out_frequent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = make_pairs(300)
    sources, targets = pairs["source"].to_pylist(), pairs["target"].to_pylist()
    for frequency, expected in ((2.0, {*WORDS, "Tom"}), (0.005, {"Tom"})):
        monkeypatch.setattr("nmt.training.aligned_words.MAX_FREQUENCY", frequency)
        links = align_pairs(sources, targets)
        found = Counter(
            (source[link[0] : link[1]], target[link[2] : link[3]])
            for row, (source, target) in enumerate(zip(sources, targets, strict=True))
            for link in links.of_pair(row)
        )
        right = {pair: count for pair, count in found.items() if {**WORDS, "Tom": "Tom"}[pair[0]] == pair[1]}
        assert {source for source, _ in right} == expected
        assert sum(right.values()) > 0.95 * sum(found.values())


@pytest.fixture
def encoded(tmp_path: Path) -> EncodedPairs:
    run = make_run(tmp_path, literals=0.5, numbers=0.3, lower_case=0.2, final_mark=0.3)
    pairs = make_pairs(200)
    texts = pairs["source"].to_pylist(), pairs["target"].to_pylist()
    encoded = encode_corpus(pairs, train_tokenizer(*texts, run.tokenizer), run)
    return replace(encoded, augmenter=build_augmenter(run, pairs))


def decode(pairs: EncodedPairs) -> list[tuple[str, str]]:
    sides = (pairs.tokenizer.source, pairs.source), (pairs.tokenizer.target, pairs.target)
    texts = ([tokenizer.decode(side[row].tolist()) for row in sorted(pairs.order)] for tokenizer, side in sides)
    return list(zip(*texts, strict=True))


@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_epochs_differ_and_are_reproducible(encoded: EncodedPairs, sampling: float) -> None:
    encoded = replace(encoded, sampling=sampling)
    first, second, again, other_seed = (
        decode(resample_pairs(encoded, seed, epoch)) for seed, epoch in ((1, 0), (1, 1), (1, 0), (2, 0))
    )
    original = decode(encoded)
    assert first == again and len(first) == 200
    assert first != second and first != other_seed
    changed = sum(a != b for a, b in zip(first, original, strict=True))
    assert 0.7 < changed / 200 < 1
    symbols = Counter(piece for pair in first for piece in LITERAL_PIECE.findall(pair[0]))
    assert set(symbols) == {chr(0xF0000 + i) for i in range(4)}


def test_concatenated_pairs_are_two_pairs_of_the_corpus(tmp_path: Path) -> None:
    run = make_run(tmp_path, concatenate=0.5)
    pairs = make_pairs(200)
    texts = pairs["source"].to_pylist(), pairs["target"].to_pylist()
    encoded = replace(
        encode_corpus(pairs, train_tokenizer(*texts, run.tokenizer), run), augmenter=build_augmenter(run, pairs)
    )
    original = decode(encoded)
    new = decode(resample_pairs(replace(encoded, max_length=1_000), 1, 0))
    others = [second for first, second in zip(original, new, strict=True) if first != second]
    assert 70 < len(others) < 130
    for first, second in zip(original, new, strict=True):
        rest = tuple(text.removeprefix(beginning).lstrip() for text, beginning in zip(second, first, strict=True))
        assert first == second or (rest in original and second == (f"{first[0]} {rest[0]}", f"{first[1]} {rest[1]}"))


def test_tags_of_corpora_stay_at_the_beginning(tmp_path: Path) -> None:
    run = make_run(tmp_path, lower_case=0.3, literals=0.3, concatenate=0.5)
    pairs = make_pairs(200)
    sources = [f"<BT> {text}" if i % 2 else text for i, text in enumerate(pairs["source"].to_pylist())]
    pairs = pairs.set_column(0, "source", pa.array(sources))
    tokenizer = train_tokenizer(sources, pairs["target"].to_pylist(), run.tokenizer, tags=["<BT>"])
    encoded = encode_corpus(pairs, tokenizer, run)
    augmenter = build_augmenter(run, pairs)
    assert augmenter is not None and augmenter.tags == []
    augmenter = augmenter._replace(tags=["<BT> "])
    new = decode(resample_pairs(replace(encoded, max_length=1_000, augmenter=augmenter), 1, 0))
    assert sum(a != b[0] for a, b in zip(sources, new, strict=True)) > 100
    for i, (source, _) in enumerate(new):
        assert source.count("<BT>") == i % 2 and source.startswith("<BT> ") == bool(i % 2)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"augment": AugmentConfig(literals=0.1)}, "augment.literals=0.1 needs .*tokenizer.literals=16"),
        (
            {"augment": AugmentConfig(lower_case=0.1), "train": TrainConfig(guided_alignment=1.0)},
            "augment.\\* cannot be used with train.guided_alignment",
        ),
    ],
)
def test_settings_that_contradict_augmentation_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainRun(**settings)
