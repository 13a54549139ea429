"""The tokenized cache, what is left out, the order of an epoch, and batches."""

import dataclasses
import itertools
import json
import logging
import random
import resource
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from builders import SHARED, make_pairs
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import BOS, EOS, DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data import batch_encode as pieces
from nmt.data import batching, encoding
from nmt.data.batching import (
    NO_SHAPES,
    choose_shapes,
    collate,
    count_positions,
    epoch_batches,
    make_batch,
    padding_waste,
    pick_shape,
    split_into_micro_batches,
)
from nmt.data.corpus import load_pairs
from nmt.data.encoding import (
    EncodedPairs,
    EncodedSide,
    content_key,
    encode_corpus,
    get_or_train_tokenizer,
    sample_texts,
    sort_by_length,
    text_key,
)
from nmt.data.tokenizer import LanguageTokenizer, Tokenizer, train_tokenizer
from nmt.errors import UserError
from nmt.model.kernels.cuda_graphs import MAX_GRAPHS

MULTI30K = SHARED / "multi30k"
LETTERS = "abcdefgh"


def corpus(sources: list[str], targets: list[str]) -> Dataset:
    return Dataset.from_dict({"source": sources, "target": targets})


def random_corpus(size: int, seed: int = 0) -> Dataset:
    rng = random.Random(seed)

    def side() -> list[str]:
        return [" ".join(rng.choices(["ab", "cd", "ef", "gh", "abcd"], k=rng.randint(1, 12))) for _ in range(size)]

    return corpus(side(), side())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pairs = random_corpus(300)
    return train_tokenizer(pairs["source"], pairs["target"], TokenizerConfig(vocab_size=280, joint=False))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainRun]:
    def run(**data: Any) -> TrainRun:
        return TrainRun(data=DataConfig(cache=str(tmp_path), **data))

    return run


Run = Callable[..., TrainRun]


def kept(encoded: EncodedPairs) -> list[int]:
    return sorted(encoded.order.tolist())


def test_a_batch() -> None:
    batch = make_batch([[5, 6, 7], np.array([8], dtype=np.int32), []], [[9], [10, 11], []])
    assert batch.source_BS.tolist() == [[5, 6, 7, EOS], [8, EOS, 0, 0], [EOS, 0, 0, 0]]
    assert batch.source_length_B.tolist() == [4, 2, 1]
    assert batch.target_BT.tolist() == [[BOS, 9, EOS, 0], [BOS, 10, 11, EOS], [BOS, EOS, 0, 0]]
    assert batch.target_length_B.tolist() == [2, 3, 1]
    assert all(tensor.dtype == torch.int64 for tensor in batch[:4]) and batch.alignment_BTS.shape == (3, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(batch, batch.to(torch.device("cpu")), strict=True))


def test_a_batch_without_targets() -> None:
    batch = make_batch([[5, 6], [7]])
    assert batch.source_BS.tolist() == [[5, 6, EOS], [7, EOS, 0]]
    assert batch.target_BT.shape == (2, 0) and batch.target_length_B.tolist() == [0, 0]


def test_a_corpus_is_encoded(run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_corpus(50)
    monkeypatch.setattr(encoding, "ENCODING_CHUNK", 7)
    monkeypatch.setattr(encoding, "NUMBERS_PER_BLOCK", 9)
    encoded = encode_corpus(pairs, tokenizer, run())
    assert len(encoded) == 50 and encoded.source.ids.dtype == np.uint16 and encoded.order.dtype == np.uint32
    for i, row in enumerate(pairs):
        assert encoded.source[i].tolist() == tokenizer.source.encode([row["source"]])[0]
        assert encoded.target[i].tolist() == tokenizer.target.encode([row["target"]])[0]
        assert encoded.lengths(np.array([i])).tolist() == [[len(encoded.source[i]) + 1], [len(encoded.target[i]) + 1]]
    assert encoded.source_lengths.tolist() == encoded.lengths(encoded.order)[0].tolist()
    batch = collate(encoded, np.array([3, 1]))
    expected = make_batch(*([side[3], side[1]] for side in (encoded.source, encoded.target)))
    assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def test_what_is_left_out_is_counted(run: Run, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sources = ["ab", "", "ab", " \t", "ab " * 9, "ab " * 10, "ab", "cd"]
    targets = ["ab", "ab", " ", "ab", "ab", "ab", "ab " * 40, "gh"]
    encoded = encode_corpus(corpus(sources, targets), tokenizer, run(max_length=10))
    assert kept(encoded) == [0, 4, 7]
    assert "train: 8 pairs, dropped 3 with an empty side, 2 longer than data.max_length=10 pieces" in caplog.text
    for message in (
        "left out 2 pairs of the built-in corpus, de: empty or only white space (first: 2, 4)",
        "left out 1 pair of the built-in corpus, en: empty or only white space (first: 3)",
        "left out 1 pair of the built-in corpus, de: longer than data.max_length=10 pieces (first: 6)",
        "left out 1 pair of the built-in corpus, en: longer than data.max_length=10 pieces (first: 7)",
    ):
        assert message in caplog.text
    batch = collate(encoded, np.array([7]))
    assert batch.source_BS.tolist() == [[*tokenizer.source.encode(["cd"])[0], EOS]]

    encoded = encode_corpus(corpus(sources, targets), tokenizer, run(max_length=100))
    assert kept(encoded) == [0, 4, 5, 6, 7]


@pytest.mark.parametrize("sources, targets", [(["", " "], ["a", "b"]), (["ab"], ["ab " * 20]), (["", ""], ["", ""])])
def test_nothing_left_is_an_error(run: Run, tokenizer: Tokenizer, sources: list[str], targets: list[str]) -> None:
    with pytest.raises(UserError, match="no training pair is left: .*data.max_length=10 pieces"):
        encode_corpus(corpus(sources, targets), tokenizer, run(max_length=10))


def test_what_is_left_out_has_the_numbers_of_its_lines(
    run: Run, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Those of the file, though lines before them were left out when it was read; the first five."""
    caplog.set_level(logging.INFO)
    lines = [b"\xff", b"ab", b"", b"ab", b"\xff", *[b" "] * 7, b"ab " * 200, b"ab", b"cd"]
    (tmp_path / "train.de").write_bytes(b"\n".join(lines))
    (tmp_path / "train.en").write_bytes(b"ab\n" * 13 + b"\t\nef\n")
    config = run(format="text", path=str(tmp_path), invalid="drop")
    pairs = load_pairs(config.data, "train")
    encoded = encode_corpus(pairs, tokenizer, config)
    assert pairs[kept(encoded)]["line"] == [2, 4, 15]
    caplog.clear()
    assert encode_corpus(pairs, tokenizer, config).order.tolist() == encoded.order.tolist()
    for message in (
        "train: 13 pairs, dropped 9 with an empty side, 1 longer than data.max_length=100 pieces",
        "left out 8 lines of {}/train.de: empty or only white space (first: 3, 6, 7, 8, 9)",
        "left out 1 line of {}/train.en: empty or only white space (first: 14)",
        "left out 1 line of {}/train.de: longer than data.max_length=100 pieces (first: 13)",
    ):
        assert message.format(tmp_path) in caplog.text


def test_carriage_returns_are_named_where_they_make_a_line_too_long(
    run: Run, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A file of old Macs behind another one; a line that is long by itself is only counted."""
    caplog.set_level(logging.INFO)
    for side in ("de", "en"):
        lines = [*["ab"] * 3, "ab " * 200, "\r".join(["ab ab ab"] * 90)]
        (tmp_path / f"train.{side}").write_text("\n".join(lines), newline="")
    config = run(format="text", path=str(tmp_path))
    encode_corpus(load_pairs(config.data, "train"), tokenizer, config)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(":")[0] for message in warned] == [f"{tmp_path}/train.{side}" for side in ("de", "en")]
    assert all("(CR, \\r) in some of these lines (first: 5); if lines end there" in message for message in warned)


def test_the_cache_goes_by_content(run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def folders() -> int:
        return len(list((tmp_path / "ids").iterdir()))

    pairs = random_corpus(20)
    first = encode_corpus(pairs, tokenizer, run())
    lines = list(range(7, 27))
    same = Dataset.from_dict({"source": list(pairs["source"]), "target": list(pairs["target"]), "line": lines})
    again = encode_corpus(same, tokenizer, run())
    assert folders() == 1 and first.key == again.key and first.source.ids.tolist() == again.source.ids.tolist()
    moved = (
        corpus(["ab", "cd ef"], ["gh", "x"]),
        corpus(["abc", "d ef"], ["gh", "x"]),
        corpus(["ab", "cd"], ["efgh", "x"]),
    )
    for number, other in enumerate(moved, 2):
        encode_corpus(other, tokenizer, run())
        assert folders() == number
    encode_corpus(pairs, Tokenizer(tokenizer.target, tokenizer.source), run())
    assert folders() == 5
    assert encode_corpus(pairs, tokenizer, run(max_length=5)).key == first.key
    assert folders() == 6


def test_the_second_use_encodes_nothing(run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_corpus(random_corpus(20), tokenizer, run())
    monkeypatch.setattr(encoding, "encode_side", None)
    assert len(encode_corpus(random_corpus(20), tokenizer, run())) == 20


def test_a_cache_cut_short_is_not_used(
    run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, pairs = encoding.encode_side, random_corpus(20)

    def breaks(folder: Path, name: str, *rest: Any) -> None:
        if name == "target":
            raise KeyboardInterrupt
        whole(folder, name, *rest)

    monkeypatch.setattr(encoding, "encode_side", breaks)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(pairs, tokenizer, run())
    assert not list((tmp_path / "ids").iterdir())
    monkeypatch.setattr(encoding, "encode_side", whole)
    assert len(encode_corpus(pairs, tokenizer, run())) == 20


def test_the_number_of_cores_changes_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(encoding, "ENCODING_CHUNK", 40)
    sources, targets = (list(side) for side in (random_corpus(500)["source"], random_corpus(500, 1)["source"]))
    sources[7], targets[33] = " ", "x " * 9_000
    found = []
    for number in (None, 1, 2, 7):
        cache = tmp_path / str(number)
        encode_corpus(corpus(sources, targets), tokenizer, TrainRun(data=DataConfig(cache=str(cache), num_proc=number)))
        [folder] = (cache / "ids").iterdir()
        found.append((folder.name, {path.name: path.read_bytes() for path in folder.iterdir()}))
    assert found[1:] == found[:-1]


def test_white_space_is_what_it_is_to_python() -> None:
    letters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    assert pc.utf8_is_space(pa.array(letters)).to_pylist() == [letter.isspace() for letter in letters]


@lru_cache
def side_of(type: str, normalization: str) -> LanguageTokenizer:
    pairs = random_corpus(300)
    config = TokenizerConfig(type=type, vocab_size=270, normalization=normalization)
    return train_tokenizer(pairs["source"], pairs["target"], config).source


words = st.sampled_from(
    ["ab", "cd", "abcd", "abab", "", "", "\t", "\u2581", "a\u2581b", "\u00a0", "\0", "é", "gh" * 30]
)
lines = st.lists(words, max_size=9).map(" ".join) | st.text(st.sampled_from("abcd  \u2581\ufdfa<s>"), max_size=30)


@pytest.mark.parametrize(
    "type, normalization", [("bpe", "identity"), ("unigram", "identity"), ("bpe", "nmt_nfkc"), ("word", "identity")]
)
@given(texts=st.lists(lines, max_size=12), limit=st.sampled_from([3, 10]))
def test_word_by_word_is_line_by_line(type: str, normalization: str, texts: list[str], limit: int) -> None:
    side = side_of(type, normalization)
    assert side.can_encode_by_word == (type == "bpe" and normalization == "identity")
    known: dict[str, list[int]] = {}
    expected = [pieces.encode_lines([text], side, limit)[0].tolist() for text in texts]
    for _ in range(2):  # with words that are new, and with words that are known
        ids, lengths = pieces.encode_texts(pa.array(texts, pa.string()), side, limit, known)
        assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == expected


def test_large_vocabularies_take_more_room(run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_corpus(30)
    small = encode_corpus(pairs, tokenizer, run())
    for module in (encoding, pieces):
        monkeypatch.setattr(module, "id_dtype", lambda side: np.int32)
    large = encode_corpus(pairs, tokenizer, run(max_length=99))
    assert large.source.ids.dtype == np.int32 and large.source.ids.tolist() == small.source.ids.tolist()


def test_the_key_is_that_of_the_texts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever format they come in, and however that is parted."""
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
    keys = [text_key(corpus(*columns))]
    for format in ("text", "tsv", "jsonl", "parquet"):
        sides = {"source": "1", "target": "2"} if format == "tsv" else {}
        pairs = load_pairs(dataclasses.replace(data, format=format, **sides), "train")
        for chunk in (10_000, 4):
            monkeypatch.setattr(encoding, "ENCODING_CHUNK", chunk)
            keys.append(text_key(pairs))
    assert len(set(keys)) == 1
    assert text_key(pairs.select(range(len(pairs) - 1))) != keys[0]
    assert text_key(corpus(columns[1], columns[0])) != keys[0]
    assert text_key(pairs.select([*range(1, len(pairs)), 0])) != keys[0]
    assert content_key(pairs, tokenizer) != content_key(pairs, Tokenizer(tokenizer.target, tokenizer.source))


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
@pytest.mark.parametrize(
    "name",
    [
        "source.ids",
        "target.ids",
        "source.offsets",
        "target.offsets",
        "order",
        "runs",
        "report.json",
        "digests.json",
        "another",
    ],
)
def test_a_damaged_cache_is_made_anew(
    run: Run, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    pairs = random_corpus(20)
    first = encode_corpus(pairs, tokenizer, run())
    before = [first.source.ids.tolist(), first.target.ids.tolist(), first.order.tolist()]
    [folder] = (tmp_path / "ids").iterdir()
    content = (folder / name).read_bytes() if name != "another" else b"12"
    (folder / name).unlink(missing_ok=True)
    if damage != "gone" or name == "another":
        (folder / name).write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    again = encode_corpus(pairs, tokenizer, run())
    assert [again.source.ids.tolist(), again.target.ids.tolist(), again.order.tolist()] == before
    assert "the cache is damaged" in caplog.text
    caplog.clear()
    encode_corpus(pairs, tokenizer, run())
    assert not caplog.text


def test_a_full_disk_is_named_and_leaves_no_half_of_a_cache(run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs, (soft, hard) = random_corpus(200), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # larger files fail, as on a full disk
    try:
        with pytest.raises(
            UserError, match="^the cache .*ids cannot be written .File too large.; make room .*=FOLDER$"
        ):
            encode_corpus(pairs, tokenizer, run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "ids").iterdir())
    assert len(encode_corpus(pairs, tokenizer, run())) == 200


@pytest.fixture(scope="module", params=["identity", "nmt_nfkc"])
def side(request: pytest.FixtureRequest) -> LanguageTokenizer:
    pairs = random_corpus(300)
    config = TokenizerConfig(vocab_size=280, normalization=request.param)
    return train_tokenizer(pairs["source"], pairs["target"], config).source


@given(
    text=st.text(st.sampled_from("abcdefghx \t\u2581\u200b\u0301\ufdfaö"), max_size=80)
    | st.sampled_from(["abcd " * 20, "abcd" * 20, " " * 80, "\u200b" * 80, "e\u0301" * 40]),
    limit=st.integers(1, 9),
)
def test_what_is_surely_longer_is_longer(side: LanguageTokenizer, text: str, limit: int) -> None:
    if side.must_exceed(text, limit):
        assert len(side.encode([text])[0]) > limit


def test_endless_lines_are_not_tokenized(
    run: Run, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    encode, longest = LanguageTokenizer.encode, []

    def watched(side: LanguageTokenizer, lines: list[str], **others: Any) -> list[list[int]]:
        longest.append(max(map(len, lines)))
        return encode(side, lines, **others)

    monkeypatch.setattr(LanguageTokenizer, "encode", watched)
    encoded = encode_corpus(corpus(["ab", "x" * 100_000, "cd"], ["ab", "ef", "ab " * 40_000]), tokenizer, run())
    assert kept(encoded) == [0] and max(longest) == 2
    assert "dropped 0 with an empty side, 2 longer than data.max_length=100 pieces" in caplog.text


def test_endless_lines_train_no_tokenizer() -> None:
    pairs, endless = random_corpus(300), ["zy" * 50_000, "x " * 801]
    sources, targets = list(pairs["source"]), list(pairs["target"])
    config = TokenizerConfig(vocab_size=280)
    with_them = train_tokenizer(sources + endless, endless + targets, config, 100)
    assert with_them == train_tokenizer(sources, targets, config)
    with pytest.raises(UserError, match="no text .*all lines are empty, or far longer than data.max_length pieces"):
        train_tokenizer(endless, endless, config, 100)


def test_a_tokenizer_is_trained_once(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pairs, config = random_corpus(300), run()
    config.tokenizer.vocab_size = 280
    first = get_or_train_tokenizer(pairs, config)
    assert first == train_tokenizer(pairs["source"], pairs["target"], config.tokenizer, config.data.max_length)
    config.tokenizer.sampling = 0.1
    assert get_or_train_tokenizer(random_corpus(300), config) == first
    assert caplog.messages == [
        "training a bpe tokenizer of 280 pieces",
        "using the cached bpe tokenizer of 280 pieces, trained on the same text",
    ]
    config.tokenizer.joint = False
    assert get_or_train_tokenizer(pairs, config) != first
    assert get_or_train_tokenizer(random_corpus(299), config) != first
    assert caplog.messages[2:] == ["training a bpe tokenizer of 280 pieces"] * 2
    config.tokenizer.vocab_size = 9_000
    with pytest.raises(UserError, match="tokenizer.vocab_size=9000 is more than"):
        get_or_train_tokenizer(pairs, config)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 3


def test_large_corpora_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE", 2_000)
    monkeypatch.setattr(encoding, "ENCODING_CHUNK", 999)
    lines = [str(i) for i in range(20_000)]
    pairs = corpus(lines, lines[::-1])
    assert list(sample_texts(pairs.select(range(2_000)), "target")) == lines[::-1][:2_000]
    sample = list(sample_texts(pairs, "source"))
    assert len(set(sample)) == 2_000 and sample == list(sample_texts(pairs, "source"))
    assert sample == sorted(sample, key=int)
    quarters = Counter(int(line) // 5_000 for line in sample)
    assert all(400 < quarters[quarter] < 600 for quarter in range(4))
    digits = Counter(line[-1] for line in sample)
    assert all(140 < digits[digit] < 260 for digit in "0123456789")
    assert 1_300 < len(list(sample_texts(pairs.select(range(2_100)), "source"))) <= 2_000


sizes = st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=60)


@given(sizes=sizes, budget=st.integers(1, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_an_epoch_has_every_pair_once_within_the_budget(
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
def test_cuts_are_those_of_going_along(lengths: list[int], budget: int) -> None:
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
    again = np.repeat(sizes, counts)  # runs may be of the same size
    assert batching.batch_boundaries(again, np.ones(len(again), dtype=np.int64), budget).tolist() == ends


def size_of(source: int, target: int) -> tuple[int, int]:
    """What pairs are sorted by."""
    longer, difference = max(source, target), source - target
    return longer, difference if longer % 2 else -difference


@given(sizes=sizes, many=st.booleans())
def test_pairs_are_sorted_by_the_longer_side_then_by_the_difference(sizes: list[tuple[int, int]], many: bool) -> None:
    sizes = [(s + 400 * many, t) for s, t in sizes]

    order, runs = sort_by_length(np.array(sizes, dtype=np.int32).T)
    assert order.tolist() == sorted(range(len(sizes)), key=lambda row: size_of(*sizes[row]))
    expected = [
        (*sizes[rows[0]], len(rows)) for rows in (list(g) for _, g in itertools.groupby(order, lambda row: sizes[row]))
    ]
    assert list(zip(*runs.tolist(), strict=True)) == expected


def test_an_epoch_is_that_of_its_slow_twin() -> None:
    rng = random.Random(1)
    sizes = [(rng.randint(2, 12), rng.randint(2, 12)) for _ in range(3_000)]
    encoded = make_pairs(*(list(side) for side in zip(*sizes, strict=True)))
    rows, expected = sorted(range(3_000), key=lambda row: size_of(*sizes[row])), []
    while rows:
        count = 1
        while count < len(rows) and sum(max(sizes[row]) for row in rows[: count + 1]) <= 500:
            count += 1
        count -= count % batching.SHAPE_MULTIPLE
        expected.append([sizes[row] for row in rows[:count]])
        rows = rows[count:]
    batches = epoch_batches(encoded, TrainConfig(batch_tokens=500), 3, 4)
    found = [[sizes[row] for row in batch] for batch in batches]
    assert found != expected and sorted(found) == sorted(expected)
    assert batches[-1].tolist() == list(batches)[-1].tolist() and batches[0].dtype == np.int64


def test_an_epoch_takes_little_memory() -> None:
    """Less than eight bytes a pair, whatever is needed in between."""
    count, rng = 300_000, np.random.default_rng(0)
    lengths = rng.integers(5, 40, (2, count), dtype=np.int32)
    offsets = np.cumsum(np.pad(lengths - 1, ((0, 0), (1, 0))), axis=1, dtype=np.int64)
    sides = [EncodedSide(np.zeros(1, dtype=np.uint16), side) for side in offsets]
    order, runs = sort_by_length(lengths)
    nothing: Any = None
    encoded = EncodedPairs("", nothing, nothing, *sides, order.astype(np.uint32), runs, 100, 0.0, False)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        batches = epoch_batches(encoded, TrainConfig(batch_tokens=4_000), 1, 0)
        padding_waste(encoded, batches)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(batches) > 1_000 and peak < 8 * count


def test_waste_of_many_batches_is_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    encoded = make_pairs(*rng.integers(2, 60, (2, 5_000)).tolist())
    batches = epoch_batches(encoded, TrainConfig(batch_tokens=200), 1, 0)
    exact = padding_waste(encoded, batches)
    monkeypatch.setattr(batching, "SAMPLED_BATCHES", 200)
    assert len(batches) > 700 and padding_waste(encoded, batches) == pytest.approx(exact, rel=0.2)
    assert padding_waste(encoded, batches[:1]) < 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    rng = random.Random(0)
    encoded = make_pairs([rng.randint(2, 9) for _ in range(200)], [rng.randint(2, 9) for _ in range(200)])

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in epoch_batches(encoded, TrainConfig(batch_tokens=60), seed, epoch)]

    assert order(1, 0) == order(1, 0)
    different = [order(1, 0), order(1, 1), order(2, 0), order(2, 1), order(0, 1)]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert len({len(batches) for batches in different}) == 1
    assert {frozenset(batch) for batch in order(1, 0)} != {frozenset(batch) for batch in order(1, 1)}


def test_waste_is_what_a_batch_pads() -> None:
    rng = random.Random(0)
    encoded = make_pairs([rng.randint(2, 9) for _ in range(50)], [rng.randint(2, 9) for _ in range(50)])
    batches = epoch_batches(encoded, TrainConfig(batch_tokens=60), 0, 0)
    positions = padding = 0
    for batch in (collate(encoded, indices) for indices in batches):
        for ids, lengths in ((batch.source_BS, batch.source_length_B), (batch.target_BT[:, 1:], batch.target_length_B)):
            positions += ids.numel()
            padding += ids.numel() - int(lengths.sum())
    assert padding_waste(encoded, batches) == pytest.approx(padding / positions)


@given(size=st.integers(1, 50), parts=st.integers(1, 9))
def test_micro_batches(size: int, parts: int) -> None:
    indices = np.random.default_rng(0).permutation(size)
    found = split_into_micro_batches(indices, parts)
    assert np.concatenate(found).tolist() == indices.tolist()
    assert len(found) == min(size, parts)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    most=st.integers(1, 6),
    waste=st.sampled_from([0.01, 0.1, 0.3]),
)
def test_few_shapes_hold_every_batch(sizes: list[tuple[int, int, int]], most: int, waste: float) -> None:
    sizes_N3 = np.array(sizes)
    pieces = int(count_positions(sizes_N3).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MAX_SHAPE_WASTE", waste)
        patch.setattr(batching, "MAX_SHAPE_EXCESS", 100)
        shapes_K3 = choose_shapes(sizes_N3, pieces, most)
        found_N3 = np.array([pick_shape(size, shapes_K3) for size in sizes])
        each = choose_shapes(sizes_N3, pieces, len(sizes))
    assert (found_N3 >= sizes_N3).all()
    assert {*map(tuple, found_N3.tolist())} <= {*map(tuple, shapes_K3.tolist())}
    assert len(shapes_K3) <= most
    assert len(shapes_K3) == 1 or len(shapes_K3) <= len(each)
    few_enough = len({*sizes}) <= most
    assert not few_enough or count_positions(found_N3).sum() <= pieces / (1 - waste)


def test_shapes_that_add_the_least_padding_are_joined_first() -> None:
    """Against a search through all pairs of shapes, each time."""
    rng = np.random.default_rng(0)
    sizes_N3 = rng.integers([64, 5, 5], [9999, 999, 999], (50, 3))  # so different that no two pairs cost the same
    shapes = Counter(map(tuple, sizes_N3.tolist()))
    while len(shapes) > 9:
        joined = []
        for a, b in itertools.combinations(shapes, 2):
            both = Counter({shape: count for shape, count in shapes.items() if shape not in (a, b)})
            both[tuple(map(max, a, b))] += shapes[a] + shapes[b]
            joined.append((sum(count * s * (x + y) for (s, x, y), count in both.items()), both))
        shapes = min(joined, key=lambda one: one[0])[1]
    found = choose_shapes(sizes_N3, 1, 9)  # of one piece any padding is too much
    assert {*map(tuple, found.tolist())} == shapes.keys()


def test_a_batch_much_smaller_than_all_shapes_has_its_own() -> None:
    shapes_K3 = np.array([[64, 30, 30], [64, 20, 22]])
    assert pick_shape((64, 19, 22), shapes_K3) == [64, 20, 22]
    assert pick_shape((64, 19, 23), shapes_K3) == [64, 30, 30]
    assert pick_shape((64, 9, 23), shapes_K3) == [64, 16, 24]  # 64 x 60 positions are too many for 64 x 32
    assert pick_shape((32, 19, 22), shapes_K3) == [32, 24, 24]  # half a batch, where memory did not suffice
    assert pick_shape((64, 31, 30), shapes_K3) == [64, 32, 32]  # longer than all that were looked at
    assert pick_shape((7, 3, 9), NO_SHAPES) == [7, 8, 16]


@pytest.mark.parametrize(
    ("mean", "spread", "settings"),
    [
        (14, 0.15, {"batch_tokens": 1_000}),  # sentences as long as captions,
        (9, 0.2, {"batch_tokens": 4_000}),  # everyday sentences,
        (28, 0.12, {"batch_sentences": 128}),  # and news
        (28, 0.12, {"batch_sentences": 384}),
        (25, 0.25, {"batch_tokens": 3_000}),
    ],
)
def test_an_epoch_is_few_shapes_and_little_padding(mean: float, spread: float, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    source = np.clip(rng.gamma(5, mean / 5, 30_000), 3, 80).astype(np.int64)
    target = np.clip(source * rng.normal(1, spread, len(source)), 3, 80).astype(np.int64)
    encoded = make_pairs(source.tolist(), target.tolist())
    batches = epoch_batches(encoded, TrainConfig(**settings), 1, 0)
    sizes_N3 = np.array([[len(rows), *encoded.lengths(rows).max(axis=1)] for rows in batches])
    pieces = int(encoded.lengths(encoded.order).sum())
    shapes_K3 = choose_shapes(sizes_N3, pieces, MAX_GRAPHS)
    found_N3 = np.array([pick_shape(size, shapes_K3) for size in sizes_N3.tolist()])
    assert len(np.unique(found_N3, axis=0)) <= len(shapes_K3) <= MAX_GRAPHS
    assert 1 - pieces / count_positions(found_N3).sum() < 0.06


@pytest.mark.skipif(not MULTI30K.exists(), reason="Multi30k is not here")
def test_waste_on_multi30k(tmp_path: Path) -> None:
    run = TrainRun(data=DataConfig(format="text", path=str(MULTI30K), cache=str(tmp_path)))
    pairs = load_pairs(run.data, "train")
    tokenizer = get_or_train_tokenizer(pairs, run)
    encoded = encode_corpus(pairs, tokenizer, run)
    assert len(encoded) == 29_000
    assert padding_waste(encoded, epoch_batches(encoded, run.train, 1, 0)) < 0.025
    assert padding_waste(encoded, epoch_batches(encoded, TrainConfig(batch_tokens=4_000), 1, 0)) < 0.05
    batches = epoch_batches(encoded, TrainConfig(batch_tokens=1_000), 1, 0)
    sizes_N3 = np.array([[len(rows), *encoded.lengths(rows).max(axis=1)] for rows in batches])
    shapes_K3 = choose_shapes(sizes_N3, int(encoded.lengths(encoded.order).sum()), MAX_GRAPHS)
    assert len(shapes_K3) < 50  # and few of them, on a text such as this
