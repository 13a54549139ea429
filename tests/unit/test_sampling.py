"""Subword regularization: what is drawn for an epoch."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from nmt.config import DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data import subword_sampling as sampling
from nmt.data.batching import epoch_batches, padding_waste
from nmt.data.encoding import EncodedPairs, encode_corpus, sort_by_length
from nmt.data.subword_sampling import resample_subwords
from nmt.data.tokenizer import train_tokenizer

WORDS = ["ab", "cd", "ef", "gh", "abcd", "efgh"]


@pytest.fixture(params=["bpe", "unigram"])
def encoded(tmp_path: Path, request: pytest.FixtureRequest) -> EncodedPairs:
    """Sixty pairs, and some that are left out: the limit is 30 pieces."""
    rng = random.Random(1)
    texts = [[" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(60)] for _ in range(2)]
    texts[0][5], texts[1][40], texts[0][50] = "", " ", "ab " * 90
    config = TokenizerConfig(type=request.param, vocab_size=275, joint=False, sampling=0.3)
    run = TrainRun(data=DataConfig(cache=str(tmp_path), max_length=30), tokenizer=config)
    pairs = Dataset.from_dict({"source": texts[0], "target": texts[1]})
    return encode_corpus(pairs, train_tokenizer(*texts, config), run)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling, "TEXTS_PER_SEED", 7)
    yield


def test_an_epoch_has_the_same_text_in_other_pieces(encoded: EncodedPairs) -> None:
    first, second, again = (
        resample_subwords(encoded, 1, 0),
        resample_subwords(encoded, 1, 1),
        resample_subwords(encoded, 1, 0),
    )
    assert sorted(first.order) == sorted(encoded.order) and len(first) == 57
    for name, tokenizer in (("source", encoded.tokenizer.source), ("target", encoded.tokenizer.target)):
        best, one, other, same = (getattr(pairs, name) for pairs in (encoded, first, second, again))
        assert [tokenizer.decode(one[row].tolist()) for row in first.order] == first.pairs[first.order][name]
        assert one.ids.tolist() == same.ids.tolist() != other.ids.tolist()
        assert one.ids.dtype == best.ids.dtype
        assert any(one[row].tolist() != best[row].tolist() for row in first.order)


def test_batches_are_cut_by_what_was_drawn(encoded: EncodedPairs) -> None:
    first = resample_subwords(encoded, 1, 0)
    rows = np.sort(first.order).astype(np.int64)
    order, runs = sort_by_length(first.lengths(rows))
    assert first.order.tolist() == rows[order].tolist() and first.runs.tolist() == runs.tolist()
    assert first.order.dtype == encoded.order.dtype
    batches = epoch_batches(first, TrainConfig(batch_tokens=60), 1, 0)
    waste = padding_waste(first, batches)
    assert waste < padding_waste(first, epoch_batches(encoded, TrainConfig(batch_tokens=60), 1, 0))


def test_a_sentence_that_gets_too_long_keeps_its_best_pieces(encoded: EncodedPairs) -> None:
    longest = int(encoded.lengths(np.sort(encoded.order).astype(np.int64)).max()) - 1
    drawn = resample_subwords(
        replace(encoded, sampling=0.01 if not encoded.tokenizer.source.is_bpe else 0.99, max_length=longest), 1, 0
    )
    rows = [row for row in encoded.order if len(encoded.source[row]) == longest]
    assert drawn.lengths(np.sort(drawn.order).astype(np.int64)).max() == longest + 1
    assert all(drawn.source[row].tolist() == encoded.source[row].tolist() for row in rows)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_any_number_of_processes_draws_the_same(
    encoded: EncodedPairs, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    alone, shares = resample_subwords(encoded, 1, 0), []

    def give(own: object) -> None:
        shares.append(own)
        raise StopIteration

    monkeypatch.setattr(sampling, "world_size", lambda: count)
    monkeypatch.setattr(sampling, "all_gather", give)
    for number in range(count):
        monkeypatch.setattr(sampling, "rank", lambda number=number: number)
        with pytest.raises(StopIteration):
            resample_subwords(encoded, 1, 0)
    monkeypatch.setattr(sampling, "all_gather", lambda own: shares)
    found = resample_subwords(encoded, 1, 0)
    for name in ("source", "target"):
        one, other = getattr(alone, name), getattr(found, name)
        assert one.ids.tolist() == other.ids.tolist() and one.offsets.tolist() == other.offsets.tolist()
    assert alone.order.tolist() == found.order.tolist()
