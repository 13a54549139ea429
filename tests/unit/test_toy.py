"""The built-in corpus: reproducibility, unique translations, vocabulary and links.

`data/toy_pairs.tsv` has the first 100 training pairs of seed 1 with their links, which somebody has reviewed. After a
change of the grammar or the lexicon, write it again with `PYTHONPATH=tests python tests/unit/test_toy.py` and review
it.
"""

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from nmt.data.toy.corpus import SPLIT_SIZES, Pair, generate

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ROOT / "tests" / "data" / "toy_pairs.tsv"
DO_FORMS = {"do", "does", "did", "Do", "Does", "Did"}


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[Pair]]:
    return generate(1)


@pytest.fixture(scope="module")
def train(corpus: dict[str, list[Pair]]) -> list[Pair]:
    return corpus["train"]


def format_links(pair: Pair) -> str:
    """Return links in Pharaoh format: `i-j` for a sure link, `i?j` for a possible one."""
    links = [(i, j, "-") for i, j in pair.sure] + [(i, j, "?") for i, j in pair.possible]
    return " ".join(f"{i}{mark}{j}" for i, j, mark in sorted(links))


def format_rows(pairs: list[Pair]) -> list[str]:
    return [f"{pair.german}\t{pair.english}\t{format_links(pair)}" for pair in pairs]


def test_pairs_match_reviewed_file(train):
    assert format_rows(train[:100]) == PAIRS.read_text(encoding="utf-8").splitlines()


def test_corpus_is_determined_by_seed(train):
    """Also in another interpreter, whose hashes of strings differ."""
    first, second = (format_rows(generate(seed, {"train": 300})["train"]) for seed in (1, 4))
    assert first == format_rows(train[:300]) and first != second
    program = "from nmt.data.toy.corpus import generate; print(*generate(1, {'train': 300})['train'], sep='\\n')"
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert output.splitlines() == [str(pair) for pair in train[:300]]


def test_split_sizes_and_unique_sentences(corpus):
    assert {name: len(pairs) for name, pairs in corpus.items()} == SPLIT_SIZES
    for side in ("german", "english"):
        sentences = [getattr(pair, side) for pairs in corpus.values() for pair in pairs]
        assert len(set(sentences)) == len(sentences) == sum(SPLIT_SIZES.values())


def test_translations_are_one_to_one(corpus):
    english, german = defaultdict(set), defaultdict(set)
    pairs = [pair for split in corpus.values() for pair in split]
    for seed in (2, 3):
        pairs += generate(seed, {"train": 5_000})["train"]
    for pair in pairs:
        english[pair.german].add(pair.english)
        german[pair.english].add(pair.german)
    assert len(pairs) > 30_000
    assert not [entry for table in (english, german) for entry in table.items() if len(entry[1]) > 1]


def test_links_are_valid_and_consistent(train):
    for pair in train:
        german, english = pair.german.split(), pair.english.split()
        assert len({*pair.sure, *pair.possible}) == len(pair.sure) + len(pair.possible)
        for i, j in pair.sure + pair.possible:
            assert 0 <= i < len(german) and 0 <= j < len(english)
            assert (german[i] in ",.?") == (english[j] in ",.?")
            assert german[i] not in ",.?" or german[i] == english[j]
        linked_german = {i for i, _ in pair.sure + pair.possible}
        linked_english = {j for _, j in pair.sure + pair.possible}
        assert all((word in DO_FORMS) == (j not in linked_english) for j, word in enumerate(english))
        assert all(word == "," for i, word in enumerate(german) if i not in linked_german)
        assert pair.german.count(",") - pair.english.count(",") == len(german) - len(linked_german)
        sure_german = Counter(i for i, _ in pair.sure)
        assert max(sure_german.values()) == max(Counter(j for _, j in pair.sure).values()) == 1
        assert all(sure_german[i] for i, word in enumerate(german) if i and word[0].isupper() or i == len(german) - 1)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("im", {"in- the?", "at- the?"}),
        ("Haustür", {"front? door-"}),
        ("räumt", {"is? tidying- up?", "tidies- up?", "tidy- up?"}),
        ("möchte", {"would? like- to?"}),
        ("keinen", {"not- a?", "not- an?", "not- any?"}),
        ("nicht", {"not-", "cannot?"}),
        ("dem", {"the-", "to? the-", "who-"}),
    ],
)
def test_links_of_german_words(train, word, expected):
    """Compare all groups of English words that a German word is linked to, in the order of the English sentence."""
    actual = set()
    for pair in train:
        german, english = pair.german.split(), pair.english.split()
        for i in (i for i, other in enumerate(german) if other == word):
            marks = {j: "-" for k, j in pair.sure if k == i} | {j: "?" for k, j in pair.possible if k == i}
            actual.add(" ".join(english[j] + marks[j] for j in sorted(marks)))
    assert actual == expected


if __name__ == "__main__":
    PAIRS.write_text("\n".join(format_rows(generate(1, {"train": 100})["train"])) + "\n", encoding="utf-8")
