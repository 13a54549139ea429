"""Corpus encoding and its cache, dropped pairs, the order of an epoch, and batches."""

import dataclasses
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import make_pairs
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import BOS, EOS, DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data import batching, encoding
from nmt.data.batch import make_batch
from nmt.data.batching import (
    NO_SHAPES,
    choose_shapes,
    collate,
    count_positions,
    epoch_batches,
    padding_waste,
    pick_shape,
)
from nmt.data.corpus import load_pairs
from nmt.data.encoding import (
    EncodedPairs,
    encode_corpus,
    get_or_train_tokenizer,
    sample_texts,
    sort_by_length,
    text_key,
)
from nmt.data.tokenizer import LanguageTokenizer, Tokenizer, train_tokenizer
from nmt.errors import UserError


def make_corpus(sources: list[str], targets: list[str]) -> pa.Table:
    return pa.table({"source": sources, "target": targets})


def make_random_corpus(size: int, seed: int = 0) -> pa.Table:
    rng = random.Random(seed)

    def side() -> list[str]:
        return [" ".join(rng.choices(["ab", "cd", "ef", "gh", "abcd"], k=rng.randint(1, 12))) for _ in range(size)]

    return make_corpus(side(), side())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pairs = make_random_corpus(300)
    return train_tokenizer(
        pairs["source"].to_pylist(), pairs["target"].to_pylist(), TokenizerConfig(vocab_size=280, joint=False)
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainRun]:
    def run(**data: Any) -> TrainRun:
        return TrainRun(data=DataConfig(cache=str(tmp_path), **data))

    return run


Run = Callable[..., TrainRun]


def get_kept_rows(encoded: EncodedPairs) -> list[int]:
    return sorted(encoded.order.tolist())


def test_make_batch_pads_and_adds_special_tokens() -> None:
    batch = make_batch([[5, 6, 7], np.array([8], dtype=np.int32), []], [[9], [10, 11], []])
    assert batch.source_BS.tolist() == [[5, 6, 7, EOS], [8, EOS, 0, 0], [EOS, 0, 0, 0]]
    assert batch.source_length_B.tolist() == [4, 2, 1]
    assert batch.target_BT.tolist() == [[BOS, 9, EOS, 0], [BOS, 10, 11, EOS], [BOS, EOS, 0, 0]]
    assert batch.target_length_B.tolist() == [2, 3, 1]
    assert all(tensor.dtype == torch.int64 for tensor in batch[:4]) and batch.alignment_BTS.shape == (3, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(batch, batch.to(torch.device("cpu")), strict=True))


def test_encode_corpus_matches_tokenizer(run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = make_random_corpus(50)
    monkeypatch.setattr(encoding, "ENCODING_CHUNK", 7)
    encoded = encode_corpus(pairs, tokenizer, run())
    assert len(encoded) == 50 and encoded.source.ids.dtype == np.uint16 and encoded.order.dtype == np.uint32
    for i, row in enumerate(pairs.to_pylist()):
        assert encoded.source[i].tolist() == tokenizer.source.encode([row["source"]])[0]
        assert encoded.target[i].tolist() == tokenizer.target.encode([row["target"]])[0]
        assert encoded.lengths(np.array([i])).tolist() == [[len(encoded.source[i]) + 1], [len(encoded.target[i]) + 1]]
    assert encoded.source_lengths.tolist() == encoded.lengths(encoded.order)[0].tolist()
    batch = collate(encoded, np.array([3, 1]))
    expected = make_batch(*([side[3], side[1]] for side in (encoded.source, encoded.target)))
    assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def test_dropped_pairs_are_counted_in_log(run: Run, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sources = ["ab", "", "ab", " \t", "ab " * 9, "ab " * 10, "ab", "cd"]
    targets = ["ab", "ab", " ", "ab", "ab", "ab", "ab " * 40, "gh"]
    encoded = encode_corpus(make_corpus(sources, targets), tokenizer, run(max_length=10))
    assert get_kept_rows(encoded) == [0, 4, 7]
    assert (
        "train: 8 pairs; dropped 3 with an empty side and 2 longer than data.max_length=10 pieces "
        "(first: 2, 3, 4, 6, 7)" in caplog.text
    )
    batch = collate(encoded, np.array([7]))
    assert batch.source_BS.tolist() == [[*tokenizer.source.encode(["cd"])[0], EOS]]

    encoded = encode_corpus(make_corpus(sources, targets), tokenizer, run(max_length=100))
    assert get_kept_rows(encoded) == [0, 4, 5, 6, 7]


@pytest.mark.parametrize("sources, targets", [(["", " "], ["a", "b"]), (["ab"], ["ab " * 20]), (["", ""], ["", ""])])
def test_corpus_without_usable_pairs_raises(
    run: Run, tokenizer: Tokenizer, sources: list[str], targets: list[str]
) -> None:
    with pytest.raises(UserError, match="no training pair is left: .*data.max_length=10 pieces"):
        encode_corpus(make_corpus(sources, targets), tokenizer, run(max_length=10))


def test_main_corpus_without_usable_pairs_raises(run: Run, tokenizer: Tokenizer) -> None:
    """Without its pairs an epoch may be empty, since others have fractional weights."""
    pairs = make_corpus(["ab " * 20, "ab", "cd"], ["ab", "ab", "cd"])
    with pytest.raises(UserError, match="no training pair of data.path is left: .*data.max_length=10 pieces"):
        encode_corpus(pairs, tokenizer, run(max_length=10), [(1, 1.0), (3, 0.1)])


def test_cache_key_depends_on_content(run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def count_folders() -> int:
        return sum(path.is_dir() for path in (tmp_path / "pairs").iterdir())

    pairs = make_random_corpus(20)
    first = encode_corpus(pairs, tokenizer, run())
    second = encode_corpus(pa.concat_tables([pairs[:7], pairs[7:]]), tokenizer, run())
    assert count_folders() == 1 and first.key == second.key and first.source.ids.tolist() == second.source.ids.tolist()
    for targets in (["gh", "x"], ["g", "hx"]):  # the same letters in other places
        encode_corpus(make_corpus(["ab", "cd ef"], targets), tokenizer, run())
    encode_corpus(pairs, Tokenizer(tokenizer.target, tokenizer.source), run())
    assert count_folders() == 4
    assert encode_corpus(pairs, tokenizer, run(max_length=5)).key == first.key
    assert count_folders() == 5


def test_large_vocabularies_use_int32_ids(run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = make_random_corpus(30)
    small = encode_corpus(pairs, tokenizer, run())
    monkeypatch.setattr(encoding, "id_dtype", lambda side: np.int32)
    large = encode_corpus(pairs, tokenizer, run(max_length=99))
    assert large.source.ids.dtype == np.int32 and large.source.ids.tolist() == small.source.ids.tolist()


def test_text_key_is_independent_of_format_and_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = [("Äa", "b"), ("", "c\u2028 d"), ("efg", "")] * 20
    folder = tmp_path / "data"
    folder.mkdir()
    for side, ending in enumerate(("de", "en")):
        (folder / f"train.{ending}").write_text("".join(pair[side] + "\n" for pair in texts))
    (folder / "train.tsv").write_text("".join("\t".join(pair) + "\n" for pair in texts))
    columns = [list(side) for side in zip(*texts, strict=True)]
    pq.write_table(pa.table(dict(zip(("de", "en"), columns, strict=True))), folder / "train.parquet", row_group_size=7)
    (folder / "train.jsonl").write_text("".join(json.dumps({"de": s, "en": t}) + "\n" for s, t in texts))
    data = DataConfig(format="text", path=str(folder), cache=str(tmp_path / "cache"))
    keys = [text_key(make_corpus(*columns))]
    for format in ("text", "tsv", "jsonl", "parquet"):
        sides = {"source": "1", "target": "2"} if format == "tsv" else {}
        pairs = load_pairs(dataclasses.replace(data, format=format, **sides), "train")
        for chunk in (10_000, 4):
            monkeypatch.setattr(encoding, "ENCODING_CHUNK", chunk)
            keys.append(text_key(pairs))
    assert len(set(keys)) == 1
    assert text_key(make_corpus(columns[1], columns[0])) != keys[0]
    assert text_key(pa.concat_tables([pairs.slice(1), pairs.slice(0, 1)])) != keys[0]
    pairs = pairs.append_column("possible", [[[]] * 60])
    links = [pairs.append_column("sure", [[sure] * 60]) for sure in ([[0, 1]], [])]
    assert len({text_key(table) for table in (pairs, *links)}) == 3


@pytest.fixture(scope="module", params=["identity", "nmt_nfkc"])
def side(request: pytest.FixtureRequest) -> LanguageTokenizer:
    pairs = make_random_corpus(300)
    config = TokenizerConfig(vocab_size=280, normalization=request.param)
    return train_tokenizer(pairs["source"].to_pylist(), pairs["target"].to_pylist(), config).source


@given(
    text=st.text(st.sampled_from("abcdefghx \t\u2581\u200b\u0301\ufdfaö"), max_size=80)
    | st.sampled_from(["abcd " * 20, "abcd" * 20, " " * 80, "\u200b" * 80, "e\u0301" * 40]),
    limit=st.integers(1, 9),
)
def test_must_exceed_has_no_false_positives(side: LanguageTokenizer, text: str, limit: int) -> None:
    if side.must_exceed(text, limit):
        assert len(side.encode([text])[0]) > limit


def test_very_long_lines_are_excluded_from_tokenizer_training() -> None:
    pairs, long_lines = make_random_corpus(300), ["zy" * 50_000, "x " * 801]
    sources, targets = pairs["source"].to_pylist(), pairs["target"].to_pylist()
    config = TokenizerConfig(vocab_size=280)
    with_long_lines = train_tokenizer(sources + long_lines, long_lines + targets, config, 100)
    assert with_long_lines == train_tokenizer(sources, targets, config)
    with pytest.raises(UserError, match="no text .*all lines are empty, or far longer than data.max_length pieces"):
        train_tokenizer(long_lines, long_lines, config, 100)


def test_tokenizer_is_cached_by_text_and_settings(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pairs, config = make_random_corpus(300), run()
    config.tokenizer.vocab_size = 280
    first = get_or_train_tokenizer(pairs, config)
    assert first == train_tokenizer(
        pairs["source"].to_pylist(), pairs["target"].to_pylist(), config.tokenizer, config.data.max_length
    )
    config.tokenizer.sampling = 0.1
    assert get_or_train_tokenizer(make_random_corpus(300), config) == first
    assert caplog.messages == [
        "training a bpe tokenizer of 280 pieces",
        "using the cached bpe tokenizer of 280 pieces, trained on the same text",
    ]
    config.tokenizer.joint = False
    assert get_or_train_tokenizer(pairs, config) != first
    assert caplog.messages[2:] == ["training a bpe tokenizer of 280 pieces"]


def test_tokenizer_text_of_large_corpora_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE", 2_000)
    monkeypatch.setattr(encoding, "ENCODING_CHUNK", 999)
    lines = [str(i) for i in range(20_000)]
    pairs = make_corpus(lines, lines[::-1])
    assert list(sample_texts(pairs.slice(0, 2_000), "target")) == lines[::-1][:2_000]
    sample = list(sample_texts(pairs, "source"))
    assert len(set(sample)) == 2_000 and sample == list(sample_texts(pairs, "source"))
    assert sample == sorted(sample, key=int)
    quarters = Counter(int(line) // 5_000 for line in sample)
    assert all(400 < quarters[quarter] < 600 for quarter in range(4))


sizes = st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=60)


@given(sizes=sizes, budget=st.integers(1, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_epoch_has_each_pair_once_within_token_budget(
    sizes: list[tuple[int, int]], budget: int, seed: int, epoch: int
) -> None:
    source, target = (list(side) for side in zip(*sizes, strict=True))
    encoded = make_pairs(source, target)
    batches = epoch_batches(encoded, TrainConfig(batch_tokens=budget), seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) == 1 or sum(max(sizes[i]) for i in batch) <= budget
    assert 0 <= padding_waste(encoded, batches) < 1

    batches = epoch_batches(encoded, TrainConfig(batch_sentences=budget), seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert sorted(map(len, batches))[1:] == [budget] * (len(batches) - 1) and 1 <= min(map(len, batches)) <= budget


@given(lengths=st.lists(st.integers(1, 30), min_size=1), budget=st.integers(1, 100))
def test_batch_boundaries_match_greedy_loop(lengths: list[int], budget: int) -> None:
    lengths = sorted(lengths)
    ends, start = [0], 0
    while start < len(lengths):
        count = 1
        while start + count < len(lengths) and sum(lengths[start : start + count + 1]) <= budget:
            count += 1
        start += (
            count if count <= batching.SHAPE_MULTIPLE else count // batching.SHAPE_MULTIPLE * batching.SHAPE_MULTIPLE
        )
        ends.append(start)
    sizes, counts = np.unique(lengths, return_counts=True)
    assert batching.batch_boundaries(sizes, counts, budget).tolist() == ends
    repeated = np.repeat(sizes, counts)  # consecutive runs may have the same size
    assert batching.batch_boundaries(repeated, np.ones(len(repeated), dtype=np.int64), budget).tolist() == ends


def sort_key(source: int, target: int) -> tuple[int, int]:
    longer, difference = max(source, target), source - target
    return longer, difference if longer % 2 else -difference


@given(sizes=sizes, long_sources=st.booleans())
def test_pairs_are_sorted_by_longer_side_then_difference(sizes: list[tuple[int, int]], long_sources: bool) -> None:
    if long_sources:
        sizes = [(source + 400, target) for source, target in sizes]
    order, runs = sort_by_length(np.array(sizes, dtype=np.int32).T)
    assert order.tolist() == sorted(range(len(sizes)), key=lambda row: sort_key(*sizes[row]))
    expected = [
        (*sizes[rows[0]], len(rows)) for rows in (list(g) for _, g in itertools.groupby(order, lambda row: sizes[row]))
    ]
    assert list(zip(*runs.tolist(), strict=True)) == expected


def test_order_is_determined_by_seed_and_epoch() -> None:
    rng = random.Random(0)
    encoded = make_pairs([rng.randint(2, 9) for _ in range(200)], [rng.randint(2, 9) for _ in range(200)])

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in epoch_batches(encoded, TrainConfig(batch_tokens=60), seed, epoch)]

    assert order(1, 0) == order(1, 0)
    different = [order(1, 0), order(1, 1), order(2, 0), order(2, 1), order(0, 1)]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert len({len(batches) for batches in different}) == 1
    assert {frozenset(batch) for batch in order(1, 0)} != {frozenset(batch) for batch in order(1, 1)}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    max_shapes=st.integers(1, 6),
    waste=st.sampled_from([0.01, 0.1, 0.3]),
)
def test_few_shapes_fit_all_batches(sizes: list[tuple[int, int, int]], max_shapes: int, waste: float) -> None:
    sizes_N3 = np.array(sizes)
    pieces = int(count_positions(sizes_N3).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MAX_SHAPE_WASTE", waste)
        patch.setattr(batching, "MAX_SHAPE_EXCESS", 100)
        shapes_K3 = choose_shapes(sizes_N3, pieces, max_shapes)
        padded_N3 = np.array([pick_shape(size, shapes_K3) for size in sizes])
        unlimited_shapes = choose_shapes(sizes_N3, pieces, len(sizes))
    assert (padded_N3 >= sizes_N3).all()
    assert {*map(tuple, padded_N3.tolist())} <= {*map(tuple, shapes_K3.tolist())}
    assert len(shapes_K3) <= max_shapes
    assert len(shapes_K3) == 1 or len(shapes_K3) <= len(unlimited_shapes)
    within_limit = len({*sizes}) <= max_shapes
    assert not within_limit or count_positions(padded_N3).sum() <= pieces / (1 - waste)


def test_shape_merging_matches_naive_greedy_search() -> None:
    """Compare with trying all pairs of shapes at each step and merging the pair that adds the least padding."""
    rng = np.random.default_rng(0)
    sizes_N3 = rng.integers([64, 5, 5], [9999, 999, 999], (50, 3))  # a range without ties between costs
    shapes = Counter(map(tuple, sizes_N3.tolist()))
    while len(shapes) > 9:
        candidates = []
        for a, b in itertools.combinations(shapes, 2):
            merged = Counter({shape: count for shape, count in shapes.items() if shape not in (a, b)})
            merged[tuple(map(max, a, b))] += shapes[a] + shapes[b]
            cost = sum(count * pairs * (source + target) for (pairs, source, target), count in merged.items())
            candidates.append((cost, merged))
        shapes = min(candidates, key=lambda candidate: candidate[0])[1]
    actual = choose_shapes(sizes_N3, 1, 9)  # with a total of one piece, all padding exceeds the allowed waste
    assert {*map(tuple, actual.tolist())} == shapes.keys()


def test_batch_much_smaller_than_all_shapes_gets_its_own_shape() -> None:
    shapes_K3 = np.array([[64, 30, 30], [64, 20, 22]])
    assert pick_shape((64, 19, 22), shapes_K3) == [64, 20, 22]
    assert pick_shape((64, 19, 23), shapes_K3) == [64, 30, 30]
    assert pick_shape((64, 9, 23), shapes_K3) == [64, 16, 24]  # 64 x 60 positions are too many for 64 x 32 pieces
    assert pick_shape((32, 19, 22), shapes_K3) == [32, 24, 24]  # half a batch, split for lack of memory
    assert pick_shape((64, 31, 30), shapes_K3) == [64, 32, 32]  # longer than all shapes
    assert pick_shape((7, 3, 9), NO_SHAPES) == [7, 8, 16]
