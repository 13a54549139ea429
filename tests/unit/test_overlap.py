"""Sentences that occur in other text: keys against a comparison word by word."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.data.overlap import EXACT, MIN_WORDS, NEAR, UNSEEN, OverlapIndex, normalize_words


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
@given(index=st.lists(sentences, max_size=8), parts=st.lists(st.lists(sentences, max_size=6), max_size=3))
def test_overlap_matches_word_by_word_comparison(index: list[str], parts: list[list[str]]) -> None:
    overlap = OverlapIndex(index)
    for part in parts:
        expected = [max((compare_words(x.split(), y.split()) for y in index), default=UNSEEN) for x in part]
        assert overlap.find(part).tolist() == expected
    texts = [text for part in parts for text in part]
    expected = [max((compare_words(x.split(), y.split()) for y in texts), default=UNSEEN) for x in index]
    assert overlap.kinds_N.tolist() == expected


def test_normalized_words() -> None:
    assert normalize_words("  The DOG, the “dog”! ") == ["the", "dog", "the", "dog"]
    assert normalize_words("狗看见3本书。") == ["狗", "看", "见", "3", "本", "书"]
    assert normalize_words("كتابٌ جديدٌ؟") == ["كتابٌ", "جديدٌ"]
    assert normalize_words("İstanbul'da ı") == normalize_words("i̇stanbul'da ı")
    assert normalize_words(" ?! ") == ["?!"] and normalize_words("") == []
