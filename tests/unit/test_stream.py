"""A corpus that is read while it is trained on: windows against a slow twin, places, what is refused, whole runs."""

import gzip
import itertools
import json
import re
import shutil
import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import (
    EXACT_SETTINGS,
    SCHEDULE,
    SMALL_SETTINGS,
    Pair,
    list_pairs,
    load_last_weights,
    make_random_pairs,
    make_run,
    read_events,
    run_in_new_process,
    run_ranks,
    run_ranks_error,
    run_ranks_ok,
    take_windows,
    train_until_signal,
    write_corpus,
    write_files,
)
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config import DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.config.data import CorpusConfig
from nmt.data import readers, stream
from nmt.data import subword_sampling as drawing
from nmt.data.batching import collate, epoch_batches
from nmt.data.encoding import encode_corpus, get_or_train_tokenizer
from nmt.data.stream import (
    compute_stream_key,
    merge_shares,
    pairs_per_corpus,
    read_windows,
    sample_stream,
    stream_windows,
)
from nmt.data.tokenizer import Tokenizer, train_tokenizer
from nmt.errors import UserError
from nmt.training.checkpoint import find_last_intact_checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [list(side) for side in zip(*make_random_pairs(300), strict=True)]
    return train_tokenizer(*texts, TokenizerConfig(vocab_size=290, joint=False))


def slow_turns(shards: list[list[Pair]], seed: int, limit: int | None) -> Iterator[Pair]:
    for turn in itertools.count():
        mixed = np.random.default_rng((seed, turn)).permutation(len(shards))
        order = mixed if limit is None else range(len(shards))  # the first pairs are the same in each turn
        yield from [pair for number in order for pair in shards[number]][:limit]


def slow_windows(corpora: list[list[list[Pair]]], counts: list[int], seed: int, limit: int | None) -> Iterator[Any]:
    turns = [slow_turns(shards, seed, limit if number == 0 else None) for number, shards in enumerate(corpora)]
    while True:
        yield [pair for turn, count in zip(turns, counts, strict=True) for pair in itertools.islice(turn, count)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=2, max_size=2),
    buffer=st.integers(9, 40),
    limit=st.none() | st.integers(1, 12),
    seed=st.integers(0, 9),
    block=st.sampled_from([1, 50, 2**20]),
    again=st.integers(0, 7),
)
def test_windows_are_those_of_a_slow_twin(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, sizes: list[list[int]], weights: list[float],
    buffer: int, limit: int | None, seed: int, block: int, again: int,
) -> None:  # fmt: skip
    """Over several turns; and they are the same from any place on."""
    folder, numbers = tmp_path_factory.mktemp("data"), itertools.count()
    corpora = [[make_random_pairs(size, next(numbers)) for size in shards] for shards in sizes]
    paths = [write_files(folder / str(number), *shards) for number, shards in enumerate(corpora)]
    more = [CorpusConfig(str(path), weight) for path, weight in zip(paths[1:], weights, strict=False)]
    run = make_run(paths[0], buffer=buffer, limit=limit, corpora=more, seed=seed)
    counts = pairs_per_corpus(run.data, buffer)
    shares = np.array([1.0, *weights[: len(more)]])
    assert sum(counts) == buffer and np.abs(np.array(counts) - buffer * shares / shares.sum()).max() <= 1
    expected = list(itertools.islice(slow_windows(corpora, counts, seed, limit), 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "TEXT_BLOCK_BYTES", block)
        found = take_windows(run, tokenizer, 8)
        assert [list_pairs(window) for window in found] == expected[:8]
        later = take_windows(run, tokenizer, 9 - again, found[again].offsets)
    assert [list_pairs(window) for window in later] == expected[again:]
    assert [window.offsets for window in later[: 8 - again]] == [window.offsets for window in found[again:]]


@pytest.mark.parametrize("format", ["tsv", "jsonl", "parquet", "hub"])
def test_windows_of_other_formats(tmp_path: Path, tokenizer: Tokenizer, format: str) -> None:
    """Of which those that the datasets library reads have their files in one order."""
    shards = [make_random_pairs(7, seed) for seed in range(3)]
    columns = {"source": "translation.de", "target": "translation.en"}
    for number, pairs in enumerate(shards):
        name = tmp_path / f"train-{number:05}-of-00003"
        records = [{"translation": {"de": source, "en": target}} for source, target in pairs]
        if format == "tsv":
            columns = {"source": "3", "target": "1"}
            name.with_suffix(".tsv").write_text("".join(f"{target}\tx\t{source}\n" for source, target in pairs))
        elif format == "jsonl":
            name.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        else:
            table, large = pa.Table.from_pylist(records), pa.struct({"de": pa.large_string(), "en": pa.string()})
            table = table.cast(pa.schema({"translation": large})) if number == 1 and format == "parquet" else table
            pq.write_table(table, name.with_suffix(".parquet"), row_group_size=4)
    found = take_windows(make_run(tmp_path, format=format, buffer=10, **columns), tokenizer, 6)
    if format in ("parquet", "hub"):
        shards = [[pair for pairs in shards for pair in pairs]]
    expected = slow_windows([shards], [10], 1, None)
    assert [list_pairs(window) for window in found] == list(itertools.islice(expected, 6))
    later = take_windows(make_run(tmp_path, format=format, buffer=10, **columns), tokenizer, 3, found[3].offsets)
    assert [list_pairs(window) for window in later] == [list_pairs(window) for window in found[3:]]


def test_packed_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shards = [make_random_pairs(20, seed) for seed in range(3)]
    folder = write_files(tmp_path / "data", *shards)
    plain = [list_pairs(window) for window in take_windows(make_run(folder, buffer=25), tokenizer, 5)]
    for number, side in ((0, "de"), (1, "en"), (1, "de")):
        file = folder / f"train.{number}.{side}"
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    file = folder / "train.2.de"
    with pa.output_stream(str(file) + ".zst", compression="zstd") as packed:
        packed.write(file.read_bytes())
    file.unlink()
    assert [list_pairs(window) for window in take_windows(make_run(folder, buffer=25), tokenizer, 5)] == plain


def test_each_pair_is_met_once_a_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also where a window is larger than the corpus."""
    pairs = make_random_pairs(30)
    folder = write_files(tmp_path / "data", pairs[:11], pairs[11:])
    for buffer, times in ((10, 3), (90, 1), (7, 30)):
        found = take_windows(make_run(folder, buffer=buffer), tokenizer, times)
        met = Counter(pair for window in found for pair in list_pairs(window))
        assert met == dict.fromkeys(pairs, buffer * times // 30)
    (folder / "train.0.de").write_text("")
    (folder / "train.0.en").write_text("")
    [window] = take_windows(make_run(folder, buffer=19), tokenizer, 1)
    assert sorted(list_pairs(window)) == sorted(pairs[11:])


def test_a_corpus_of_one_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = make_run(write_files(tmp_path / "data", [("ab", "cd")]), buffer=3)
    found = take_windows(run, tokenizer, 2)
    assert [list_pairs(window) for window in found] == [[("ab", "cd")] * 3] * 2
    assert found[1].offsets == [[2, 1]]
    assert sorted(row for rows in epoch_batches(found[0].pairs, run.train, 1, 0) for row in rows) == [0, 1, 2]


@pytest.mark.parametrize("type", ["bpe", "unigram", "word"])
def test_a_window_is_what_its_texts_are_as_a_corpus(
    tmp_path: Path, type: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nmt")
    pairs = make_random_pairs(60)
    texts = [list(side) for side in zip(*pairs, strict=True)]
    config = TokenizerConfig(type=type, vocab_size=282, joint=False)
    tokenizer = train_tokenizer(*texts, config)
    pairs[3:3] = [
        ("", "ab"),
        ("ab", " \t"),
        ("", "ab " * 40),
        (" ab  cd ", "\u00a0x"),
        ("ab " * 40, "cd"),
        ("é<s>", "ä ö"),
    ]
    run = make_run(write_files(tmp_path / "data", pairs), buffer=len(pairs), max_length=30)
    run.tokenizer = config
    [window] = take_windows(run, tokenizer, 1)
    found = window.pairs
    assert "train: 66 pairs, dropped 3 with an empty side, 1 longer than data.max_length=30" in caplog.text
    whole = encode_corpus(
        Dataset.from_list([{"source": source, "target": target} for source, target in pairs]), tokenizer, run
    )
    for one, other in ((found.source, whole.source), (found.target, whole.target)):
        assert one.ids.dtype == other.ids.dtype and one.offsets.tolist() == other.offsets.tolist()
        assert [one[row].tolist() for row in whole.order] == [other[row].tolist() for row in whole.order]
    assert found.order.tolist() == whole.order.tolist() and found.runs.tolist() == whole.runs.tolist()
    batches = [list(epoch_batches(encoded, TrainConfig(batch_tokens=50), 1, 2)) for encoded in (found, whole)]
    assert [rows.tolist() for rows in batches[0]] == [rows.tolist() for rows in batches[1]]
    for rows in batches[0][:3]:
        both = collate(found, rows), collate(whole, rows)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("sampling", [0.0, 0.3])
@pytest.mark.parametrize("buffer, count", [(20, 2), (20, 3), (2, 5), (1, 2)])
def test_windows_are_the_same_for_any_number_of_processes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, buffer: int, count: int, sampling: float
) -> None:
    """Also for more of them than pairs."""
    monkeypatch.setattr(drawing, "TEXTS_PER_SEED", 7)
    pairs = [*make_random_pairs(30), ("", "x"), ("y", " "), ("  ab", "cd  ef")]
    run = make_run(write_files(tmp_path / "data", pairs), buffer=buffer)
    run.tokenizer.sampling = sampling
    alone = take_windows(run, tokenizer, 2)
    monkeypatch.setattr(drawing, "world_size", lambda: count)
    shares = []
    for number in range(count):
        monkeypatch.setattr(drawing, "rank", lambda number=number: number)
        shares.append(list(itertools.islice(read_windows(run, tokenizer, []), 2)))
    for window, parts in zip(alone, zip(*shares, strict=True), strict=True):
        assert all(begin == window.offsets for begin, _, _ in parts)
        found = merge_shares(run, tokenizer, parts[0][1], [own for _, _, own in parts])
        for one, other in ((found.source, window.pairs.source), (found.target, window.pairs.target)):
            assert one.ids.tolist() == other.ids.tolist() and one.offsets.tolist() == other.offsets.tolist()
        assert found.order.tolist() == window.pairs.order.tolist()


def test_memory_does_not_grow(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shards = [make_random_pairs(500, seed) for seed in range(4)]
    endless = stream_windows(make_run(write_files(tmp_path / "data", *shards), buffer=300), tokenizer, [])
    held = []
    tracemalloc.start()
    try:
        for _ in range(41):
            next(endless)
            held.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())
    finally:
        tracemalloc.stop()
        endless.close()  # type: ignore[attr-defined]
    # The least of several: at any one moment the other thread may be in the middle of a shard.
    assert min(held[-10:]) < min(held[11:21]) + 300_000  # 20 windows have ten times as much


def test_the_tokenizer_is_trained_on_the_first_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [[make_random_pairs(40, seed) for seed in numbers] for numbers in ((0, 1), (2,))]
    paths = [write_files(tmp_path / str(number), *given) for number, given in enumerate(shards)]
    run = make_run(paths[0], corpora=[CorpusConfig(str(paths[1]), 0.5)])
    all_of_it = sample_stream(run)
    assert sorted(zip(all_of_it["source"], all_of_it["target"], strict=True)) == sorted(sum(sum(shards, []), []))
    monkeypatch.setattr(stream, "TOKENIZER_SAMPLE", 30)
    some = sample_stream(run)
    expected = next(slow_windows(shards, [20, 10], 1, None))
    assert list(zip(some["source"], some["target"], strict=True)) == expected
    run.tokenizer.vocab_size = 290
    assert get_or_train_tokenizer(some, run) == get_or_train_tokenizer(sample_stream(run), run)


BAD = {
    "text": ({"train.de": b"a\nb\nc\xff\nd\n", "train.en": b"A\nB\nC\nD\n"}, r"train\.de:3: not UTF-8 .byte 0xFF at"),
    "tsv": ({"train.tsv": b"de\ten\na\tA\nb\tB\nc\nd\tD\n"}, r"train\.tsv:4: 1 column, but 2 are needed"),
    "jsonl": (
        {"train.jsonl": b'{"de": "a", "en": "A"}\n{"de": "b", "en": "B"}\n{"de": 3}\n{"de": "d", "en": "D"}\n'},
        r"train\.jsonl:3: expected text under 'de', got 3",
    ),
}


@pytest.mark.parametrize("format", BAD)
def test_bad_lines_are_refused_or_dropped_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    files, message = BAD[format]
    (folder := tmp_path / "data").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{message}.*; fix the line, or drop such lines: data.invalid=drop"):
        take_windows(make_run(folder, format=format, buffer=2), tokenizer, 2)
    good = [("a", "A"), ("b", "B"), ("d", "D")]
    found = take_windows(make_run(folder, format=format, buffer=2, invalid="drop"), tokenizer, 3)
    assert [list_pairs(window) for window in found] == [good[:2], [good[2], good[0]], good[1:]]
    number = re.search(r":(\d)", message)[1]  # type: ignore[index]
    assert (
        f"data.invalid=drop: left out 1 line of {folder}/train." in caplog.text and f"(first: {number})" in caplog.text
    )


def test_nothing_is_read_after_the_limit_and_what_was_left_out_before_is_told(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readers, "TEXT_BLOCK_BYTES", 1)
    (tmp_path / "train.de").write_bytes(b"a\n\xff\nb\nc\n\xff\n")
    (tmp_path / "train.en").write_bytes(b"A\nX\nB\nC\n\xff\n")
    found = take_windows(make_run(tmp_path, buffer=3, limit=2, invalid="drop"), tokenizer, 1)
    assert list_pairs(found[0]) == [("a", "A"), ("b", "B"), ("a", "A")]
    assert f"left out 1 line of {tmp_path}/train.de: not UTF-8 (first: 2)" in caplog.text
    assert "train.en" not in caplog.text


def test_earlier_windows_come_before_a_complaint(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "TEXT_BLOCK_BYTES", 16)
    folder = write_files(tmp_path / "data", make_random_pairs(60))
    with open(folder / "train.en", "ab") as file:
        file.write(b"\xff\n")
    with open(folder / "train.de", "ab") as file:
        file.write(b"last\n")
    endless = stream_windows(make_run(folder, buffer=20), tokenizer, [])
    assert len(list_pairs(next(endless)) + list_pairs(next(endless))) == 40
    with pytest.raises(UserError, match=r"train\.en:61: not UTF-8"):
        for _ in range(2):
            next(endless)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.de": "", "train.en": ""}, "^the split train of data.path={} is empty$"),
        ({"train.de": "a\n", "train.en": "a\nb\n"}, "train.de has 1 line and .*train.en has 2;"),
        ({"train.de": "a\n"}, "train.en does not exist"),
        (
            {"train.de": "a\n" * 9, "train.en": "\n" * 9},
            "^no training pair is left: every pair has an empty side or a side longer than",
        ),
        (
            {"train.de": "x" * 999 + "\n", "train.en": "a\n"},
            "no training pair is left: .* longer than data.max_length=",
        ),
    ],
)
def test_text_without_pairs_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message.format(tmp_path)):
        take_windows(make_run(tmp_path, buffer=4), tokenizer, 3)


def test_a_window_without_a_pair_is_passed_over(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whatever number of processes finds it: here as a corpus that has three such windows in each reading."""
    pairs = make_random_pairs(30)
    run = make_run(
        write_files(tmp_path, [(a, b if not 5 <= row < 20 else "") for row, (a, b) in enumerate(pairs)]), buffer=5
    )
    found = take_windows(run, tokenizer, 5)
    assert [window.offsets[0] for window in found] == [[0, 0], [0, 20], [0, 25], [0, 30], [1, 20]]
    assert list_pairs(found[1]) == pairs[20:25]
    assert [list_pairs(window) for window in take_windows(run, tokenizer, 2, [[0, 10]])] == [pairs[20:25], pairs[25:]]


def test_a_window_is_the_same_however_much_is_tokenized_at_a_time(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(write_files(tmp_path, make_random_pairs(50)), buffer=40)
    run.tokenizer.sampling = 0.3
    found = []
    for chunk in (20, 100):  # of what is drawn from one seed, and of several
        monkeypatch.setattr("nmt.data.subword_sampling.TEXTS_PER_SEED", 10)
        monkeypatch.setattr("nmt.data.stream.ENCODING_CHUNK", chunk)
        [_, window] = take_windows(run, tokenizer, 2)
        found.append([window.pairs.source[row].tolist() for row in range(40)])
    assert found[0] == found[1]


def test_what_is_no_text_in_parquet_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pq.write_table(pa.table({"de": ["a", "b", None], "en": ["A", "B", "C"]}), tmp_path / "train.parquet")
    for columns, message in (
        ({}, r"train.parquet: row 3: expected text in 'de', got None"),
        ({"source": "dd"}, "data.source=dd: .*train.parquet has no such column; it has de, en"),
    ):
        with pytest.raises(UserError, match=message):
            take_windows(make_run(tmp_path, format="parquet", buffer=2, **columns), tokenizer, 2)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(UserError, match="train.parquet cannot be read: "):
        take_windows(make_run(tmp_path, format="parquet"), tokenizer, 1)
    with pytest.raises(UserError, match="has no split train; it has test"):
        (tmp_path / "train.parquet").unlink()
        pq.write_table(pa.table({"de": ["a"], "en": ["A"]}), tmp_path / "test.parquet")
        take_windows(make_run(tmp_path, format="hub"), tokenizer, 1)


def test_impossible_settings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = {"format": "text", "path": "x", "streaming": True}
    for data, train, message in (
        ({"streaming": True}, {}, "data.streaming=true does not support the built-in corpus or gold links"),
        (text | {"alignments": "links"}, {}, "data.streaming=true does not support the built-in corpus or gold links"),
        (text, {"max_steps": None}, "has no epochs; set train.max_steps=N and train.validate_every=N as well"),
        (text, {"validate_every": None}, "has no epochs"),
        (text | {"buffer": 0}, {}, "data.buffer=0"),
        (text, {"guided_alignment": 0.5}, "train.guided_alignment=0.5 needs gold links for the training text"),
    ):
        with pytest.raises(UserError, match=message):
            TrainRun(data=DataConfig(**data), train=TrainConfig(**SCHEDULE | train))
    run = make_run(write_files(tmp_path / "data", make_random_pairs(9)), buffer=1)
    run.data.corpora = [CorpusConfig(run.data.path or "")]
    with pytest.raises(UserError, match="data.buffer=1 is too small for the weights of data.corpora: .*no pair of "):
        take_windows(run, tokenizer, 1)


def test_the_key_is_that_of_names_and_sizes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = make_run(write_files(tmp_path / "data", make_random_pairs(9), make_random_pairs(9, 1)))
    key = compute_stream_key(run.data, tokenizer)
    (tmp_path / "data").rename(tmp_path / "moved")
    run.data.path = str(tmp_path / "moved")
    assert compute_stream_key(run.data, tokenizer) == key
    assert compute_stream_key(run.data, Tokenizer(tokenizer.target, tokenizer.source)) != key
    run.data.corpora = [CorpusConfig(run.data.path)]
    assert compute_stream_key(run.data, tokenizer) != key
    run.data.corpora = []
    with open(tmp_path / "moved" / "train.1.en", "a") as file:
        file.write(" ")
    assert compute_stream_key(run.data, tokenizer) != key


STEPS = 36
STREAM = (
    *(
        "data=text",
        "data.streaming=true",
        "data.buffer=60",
        *SMALL_SETTINGS,
        "train.batch_tokens=300",
        "train.log_every=1",
    ),
    *("tokenizer.sampling=0.1", f"train.max_steps={STEPS}", f"train.validate_every={STEPS}", "model.dropout=0.1"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus in shards."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), train=150, valid=7, test=2)
    for ending in ("de", "en"):
        lines = (folder / f"train.{ending}").read_text().splitlines()
        (folder / f"train.{ending}").unlink()
        for number, part in enumerate((lines[:40], lines[40:])):
            (folder / f"train.{number}.{ending}").write_text("".join(line + "\n" for line in part))
    return folder


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks_ok(1, folder, "train", "name=x", f"data.path={text}", *STREAM)
    return folder / "runs" / "x"


def state_in(run: Path) -> dict[str, Any]:
    return dict(json.loads((find_last_intact_checkpoint(run) / "state.json").read_text()))


def assert_equal(run: Path, undisturbed: Path) -> None:
    torch.testing.assert_close(load_last_weights(run), load_last_weights(undisturbed), rtol=0, atol=0)
    assert read_events(run, "validate") == read_events(undisturbed, "validate")
    losses = [[(event["step"], event["loss"]) for event in read_events(one, "train")] for one in (run, undisturbed)]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [*range(1, STEPS + 1)]


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(undisturbed: Path, text: Path, tmp_path: Path) -> None:
    """Stopped in the middle of windows, of the first turn and of a later one."""
    arguments, run = ("name=x", f"data.path={text}", *STREAM, "resume=auto"), tmp_path / "runs" / "x"
    windows = []
    for step in (3, 30):
        code, said = run_ranks(1, tmp_path, train_until_signal, step, 1, *arguments)
        assert code == 143 and f"stopped at step {step + 1}; the same command with resume=auto continues" in said
        assert "Exception" not in said and "Traceback" not in said
        windows.append(state_in(run))
    assert [window["window"] > 0 for window in windows] == [False, True]
    assert windows[1]["stream_offsets"][0][0] >= 1 and all(window["position"] for window in windows)
    said = run_ranks_ok(1, tmp_path, "train", *arguments)
    assert f"resuming {Path('runs/x')} at step 31" in said and "Exception" not in said
    assert_equal(run, undisturbed)


def test_a_second_signal_ends_a_run_at_once(text: Path, tmp_path: Path) -> None:
    code, said = run_ranks(1, tmp_path, train_until_signal, 3, 2, "name=x", f"data.path={text}", *STREAM)
    assert (
        code == -signal.SIGTERM
        and "SIGTERM: finishing this step, then saving; send it again to stop immediately" in said
    )
    assert not [*(tmp_path / "runs" / "x").rglob("step_*")]


def test_a_bad_line_ends_a_run_which_goes_on_without_it(text: Path, tmp_path: Path) -> None:
    """It came after the tokenizer had been trained; its shard is the last to be read."""
    folder, last = tmp_path / "data", np.random.default_rng((1, 0)).permutation(2)[-1]
    shutil.copytree(text, folder)
    arguments = ("name=x", f"data.path={folder}", *STREAM, "data.buffer=30", "resume=auto")
    assert run_ranks(1, tmp_path, train_until_signal, 2, 1, *arguments)[0] == 143
    bad = folder / f"train.{last}.en"
    lines = bad.read_bytes().split(b"\n")
    lines[37] = b"\xff" * len(lines[37])
    bad.write_bytes(b"\n".join(lines))
    done = run_in_new_process("train", *arguments, "train.save_every=1", folder=tmp_path)
    message = done.stderr.decode()
    assert done.returncode == 1 and "Traceback" not in message and "Exception" not in message
    assert message.splitlines()[-1].startswith(f"error: {bad}:38: not UTF-8 (byte 0xFF at position 1); fix the line")
    steps = [event["step"] for event in read_events(tmp_path / "runs" / "x", "train")]
    assert steps == [*range(1, len(steps) + 1)] and 3 < len(steps) < STEPS
    said = run_ranks_ok(1, tmp_path, "train", *arguments, "data.invalid=drop")
    assert f"resuming runs/x at step {len(steps)}" in said and f"finished at step {STEPS}" in said
    assert f"data.invalid=drop: left out 1 line of {bad}: not UTF-8 (first: 38)" in said


def test_a_run_on_parquet_and_a_run_on_more_processes(text: Path, tmp_path: Path) -> None:
    """In one process and in two the numbers are the same; and a run ends without noise."""
    for split in ("train.0", "train.1", "valid"):
        columns = {side: (text / f"{split}.{side}").read_text().splitlines() for side in ("de", "en")}
        pq.write_table(pa.table(columns), tmp_path / f"{split}.parquet")
    data = ("name=x", "data=text", "data.format=parquet", f"data.path={tmp_path}", "data.streaming=true")
    runs = []
    for count in (1, 2):
        said = run_ranks_ok(count, tmp_path / str(count), "train", *data, "data.buffer=65", *EXACT_SETTINGS)
        assert "Exception" not in said and "Traceback" not in said
        runs.append(tmp_path / str(count) / "runs" / "x")
    torch.testing.assert_close(load_last_weights(runs[0]), load_last_weights(runs[1]), rtol=1e-9, atol=1e-9)
    one, two = ([event["loss"] for event in read_events(run, "train")] for run in runs)
    assert len(one) == 20 and one == pytest.approx(two, rel=1e-9)
    assert state_in(runs[0])["stream_offsets"] == state_in(runs[1])["stream_offsets"] != [[0, 0]]


def test_a_stream_is_kept_nowhere(undisturbed: Path) -> None:
    cache = undisturbed.parents[1] / "cache"
    [kept] = cache.rglob("pairs.arrow")
    assert len(Dataset.from_file(str(kept))) == 7 and not list(cache.rglob("source.ids"))


def test_a_stream_without_an_end_is_refused(text: Path, tmp_path: Path) -> None:
    message = run_ranks_error(1, tmp_path, "train", "data=text", f"data.path={text}", "data.streaming=true")
    assert message.endswith("has no epochs; set train.max_steps=N and train.validate_every=N as well")
    assert not (tmp_path / "runs").exists()
