"""Subword regularization: sampled segmentations of each epoch."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nmt.config import DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data import resampling as sampling
from nmt.data.batching import epoch_batches, padding_waste
from nmt.data.corpus import take_rows
from nmt.data.encoding import EncodedPairs, encode_corpus, sort_by_length
from nmt.data.resampling import resample_pairs
from nmt.data.tokenizer import train_tokenizer

WORDS = ["ab", "cd", "ef", "gh", "abcd", "efgh"]


@pytest.fixture
def encoded(tmp_path: Path) -> EncodedPairs:
    """Sixty pairs, of which three are dropped for an empty or too long side."""
    rng = random.Random(1)
    texts = [[" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(60)] for _ in range(2)]
    texts[0][5], texts[1][40], texts[0][50] = "", " ", "ab " * 90
    config = TokenizerConfig(vocab_size=275, joint=False, sampling=0.3)
    run = TrainRun(data=DataConfig(cache=str(tmp_path), max_length=30), tokenizer=config)
    pairs = pa.table({"source": texts[0], "target": texts[1]})
    return encode_corpus(pairs, train_tokenizer(*texts, config), run)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling, "TEXTS_PER_SEED", 7)
    yield


def test_each_epoch_has_same_text_in_different_pieces(encoded: EncodedPairs) -> None:
    epoch_0, epoch_1, epoch_0_again = (resample_pairs(encoded, 1, epoch) for epoch in (0, 1, 0))
    assert sorted(epoch_0.order) == sorted(encoded.order) and len(epoch_0) == 57
    for name, tokenizer in (("source", encoded.tokenizer.source), ("target", encoded.tokenizer.target)):
        best, first, second, repeated = (getattr(pairs, name) for pairs in (encoded, epoch_0, epoch_1, epoch_0_again))
        texts = take_rows(epoch_0.pairs, epoch_0.order)[name].to_pylist()
        assert [tokenizer.decode(first[row].tolist()) for row in epoch_0.order] == texts
        assert first.ids.tolist() == repeated.ids.tolist() != second.ids.tolist()
        assert first.ids.dtype == best.ids.dtype
        assert any(first[row].tolist() != best[row].tolist() for row in epoch_0.order)


def test_sampled_lengths_determine_batches(encoded: EncodedPairs) -> None:
    sampled = resample_pairs(encoded, 1, 0)
    rows = np.sort(sampled.order).astype(np.int64)
    order, runs = sort_by_length(sampled.lengths(rows))
    assert sampled.order.tolist() == rows[order].tolist() and sampled.runs.tolist() == runs.tolist()
    assert sampled.order.dtype == encoded.order.dtype
    batches = epoch_batches(sampled, TrainConfig(batch_tokens=60), 1, 0)
    waste = padding_waste(sampled, batches)
    assert waste < padding_waste(sampled, epoch_batches(encoded, TrainConfig(batch_tokens=60), 1, 0))


def test_sentence_that_would_be_too_long_keeps_best_segmentation(encoded: EncodedPairs) -> None:
    max_length = int(encoded.lengths(np.sort(encoded.order).astype(np.int64)).max()) - 1
    sampled = resample_pairs(replace(encoded, sampling=0.99, max_length=max_length), 1, 0)
    rows = [row for row in encoded.order if len(encoded.source[row]) == max_length]
    assert sampled.lengths(np.sort(sampled.order).astype(np.int64)).max() == max_length + 1
    assert all(sampled.source[row].tolist() == encoded.source[row].tolist() for row in rows)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_number_of_processes_does_not_change_samples(
    encoded: EncodedPairs, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    expected, shares = resample_pairs(encoded, 1, 0), []

    def record_share(share: object) -> None:
        shares.append(share)
        raise StopIteration

    monkeypatch.setattr(sampling, "world_size", lambda: count)
    monkeypatch.setattr(sampling, "all_gather", record_share)
    for rank in range(count):
        monkeypatch.setattr(sampling, "rank", lambda rank=rank: rank)
        with pytest.raises(StopIteration):
            resample_pairs(encoded, 1, 0)
    monkeypatch.setattr(sampling, "all_gather", lambda share: shares)
    actual = resample_pairs(encoded, 1, 0)
    for name in ("source", "target"):
        actual_side, expected_side = getattr(actual, name), getattr(expected, name)
        assert actual_side.ids.tolist() == expected_side.ids.tolist()
        assert actual_side.offsets.tolist() == expected_side.offsets.tolist()
    assert actual.order.tolist() == expected.order.tolist()
