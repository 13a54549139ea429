"""Sentences that occur in other text: keys against a comparison word by word."""

from pathlib import Path

import pytest
from builders import write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config import DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.overlap import EXACT, MIN_WORDS, NEAR, UNSEEN, OverlapIndex, normalize_words, warn_of_overlap


def compare_words(a: list[str], b: list[str]) -> int:
    """Return how two sentences compare, word by word. Empty ones are not compared."""
    if not a or not b:
        return UNSEEN
    if a == b:
        return EXACT
    short, long = sorted((a, b), key=len)
    if len(long) - len(short) > 1 or len(short) < (MIN_WORDS if len(short) == len(long) else MIN_WORDS - 1):
        return UNSEEN
    for k in range(len(long)):
        rest = long[:k] + long[k + 1 :]
        if rest == (short if len(short) < len(long) else short[:k] + short[k + 1 :]):
            return NEAR
    return UNSEEN


sentences = st.lists(st.text("abc", min_size=1, max_size=1), max_size=6).map(" ".join)


@settings(max_examples=300)
@given(index=st.lists(sentences, max_size=8), texts=st.lists(sentences, max_size=18))
def test_overlap_matches_word_by_word_comparison(index: list[str], texts: list[str]) -> None:
    expected = [max((compare_words(x.split(), y.split()) for y in index), default=UNSEEN) for x in texts]
    assert OverlapIndex(index).find(texts).tolist() == expected


def test_normalized_words() -> None:
    assert normalize_words("  The DOG, the “dog”! ") == ["the", "dog", "the", "dog"]
    assert normalize_words("狗看见3本书。") == ["狗", "看", "见", "3", "本", "书"]
    assert normalize_words("كتابٌ جديدٌ؟") == ["كتابٌ", "جديدٌ"]
    assert normalize_words("İstanbul'da ı") == normalize_words("i̇stanbul'da ı")
    assert normalize_words(" ?! ") == ["?!"] and normalize_words("") == []


def test_training_warns_of_sentences_of_other_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = write_corpus(tmp_path, train=20, valid=12, test=12)
    for side, common in (("de", slice(0, 3)), ("en", slice(2, 5))):
        lines = (corpus / f"train.{side}").read_text("utf-8").splitlines()[common]
        lines += (corpus / f"test.{side}").read_text("utf-8").splitlines()[len(lines) : 11]
        (corpus / f"test.{side}").write_text("".join(f"{line}\n" for line in [*lines, ""]), "utf-8")
    data = DataConfig(format="text", path=str(corpus), cache=str(tmp_path / "cache"))
    warn_of_overlap(data, load_pairs(data, "train"), load_pairs(data, "valid"))
    [message] = caplog.messages
    assert message.startswith("3 of 12 pairs of the split test have a source or target that is also in the training")
