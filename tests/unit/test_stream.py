"""Streamed corpora: windows, offsets, invalid files, and training runs."""

import itertools
import json
import shutil
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
    run_ranks_ok,
    take_windows,
    train_until_signal,
    write_corpus,
    write_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config import DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.config.data import CorpusConfig
from nmt.data import readers, stream
from nmt.data.batching import collate, epoch_batches
from nmt.data.encoding import encode_corpus, get_or_train_tokenizer
from nmt.data.stream import (
    compute_stream_key,
    pairs_per_corpus,
    sample_stream,
)
from nmt.data.tokenizer import Tokenizer, train_tokenizer
from nmt.errors import UserError
from nmt.runs.checkpoint import find_last_intact_checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [list(side) for side in zip(*make_random_pairs(300), strict=True)]
    return train_tokenizer(*texts, TokenizerConfig(vocab_size=290, joint=False))


def iterate_naively(shards: list[list[Pair]], seed: int, limit: int | None) -> Iterator[Pair]:
    """Yield the pairs of a corpus in an endless sequence of passes."""
    for number in itertools.count():
        shuffled = np.random.default_rng((seed, number)).permutation(len(shards))
        order = shuffled if limit is None else range(len(shards))  # with a limit all passes have the same pairs
        yield from [pair for shard in order for pair in shards[shard]][:limit]


def build_naive_windows(
    corpora: list[list[list[Pair]]], counts: list[int], seed: int, limit: int | None
) -> Iterator[Any]:
    """Yield windows with the given count of pairs from each corpus; the limit applies to the first corpus."""
    pairs = [iterate_naively(shards, seed, limit if number == 0 else None) for number, shards in enumerate(corpora)]
    while True:
        yield [pair for corpus, count in zip(pairs, counts, strict=True) for pair in itertools.islice(corpus, count)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=2, max_size=2),
    buffer=st.integers(20, 40),
    limit=st.none() | st.integers(1, 12),
    seed=st.integers(0, 9),
    batch_pairs=st.sampled_from([1, 4, 10_000]),
    start=st.integers(0, 7),
)
def test_windows_match_naive_implementation_from_any_offset(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    sizes: list[list[int]],
    weights: list[float],
    buffer: int,
    limit: int | None,
    seed: int,
    batch_pairs: int,
    start: int,
) -> None:
    """Compare several passes over the corpora, and windows read from the offsets of window `start`."""
    folder, seeds = tmp_path_factory.mktemp("data"), itertools.count()
    corpora = [[make_random_pairs(size, next(seeds)) for size in shards] for shards in sizes]
    paths = [write_files(folder / str(number), *shards) for number, shards in enumerate(corpora)]
    other_corpora = [CorpusConfig(str(path), weight) for path, weight in zip(paths[1:], weights, strict=False)]
    run = make_run(paths[0], buffer=buffer, limit=limit, corpora=other_corpora, seed=seed)
    counts = pairs_per_corpus(run.data, buffer)
    shares = np.array([1.0, *weights[: len(other_corpora)]])
    assert sum(counts) == buffer and np.abs(np.array(counts) - buffer * shares / shares.sum()).max() <= 1
    expected = list(itertools.islice(build_naive_windows(corpora, counts, seed, limit), 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BATCH_PAIRS", batch_pairs)
        windows = take_windows(run, tokenizer, 8)
        assert [list_pairs(window) for window in windows] == expected[:8]
        resumed = take_windows(run, tokenizer, 9 - start, windows[start].offsets)
    assert [list_pairs(window) for window in resumed] == expected[start:]
    assert [window.offsets for window in resumed[: 8 - start]] == [window.offsets for window in windows[start:]]


@pytest.mark.parametrize("format", ["tsv", "jsonl", "parquet", "hub"])
def test_windows_of_tsv_jsonl_parquet_and_hub(tmp_path: Path, tokenizer: Tokenizer, format: str) -> None:
    """The datasets library does not shuffle the files of formats that it reads."""
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
            table = pa.Table.from_pylist(records)
            if number == 1 and format == "parquet":
                mixed_types = pa.struct({"de": pa.large_string(), "en": pa.string()})
                table = table.cast(pa.schema({"translation": mixed_types}))
            pq.write_table(table, name.with_suffix(".parquet"), row_group_size=4)
    windows = take_windows(make_run(tmp_path, format=format, buffer=10, **columns), tokenizer, 6)
    if format in ("parquet", "hub"):
        shards = [[pair for pairs in shards for pair in pairs]]
    expected = build_naive_windows([shards], [10], 1, None)
    assert [list_pairs(window) for window in windows] == list(itertools.islice(expected, 6))
    resumed = take_windows(make_run(tmp_path, format=format, buffer=10, **columns), tokenizer, 3, windows[3].offsets)
    assert [list_pairs(window) for window in resumed] == [list_pairs(window) for window in windows[3:]]


@pytest.mark.parametrize("type", ["bpe", "unigram", "word"])
def test_window_is_encoded_like_a_corpus(tmp_path: Path, type: str, caplog: pytest.LogCaptureFixture) -> None:
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
    actual = window.pairs
    assert "train: 66 pairs; dropped 3 with an empty side and 1 longer than data.max_length=30" in caplog.text
    expected = encode_corpus(
        pa.Table.from_pylist([{"source": source, "target": target} for source, target in pairs]), tokenizer, run
    )
    for a, e in ((actual.source, expected.source), (actual.target, expected.target)):
        assert a.ids.dtype == e.ids.dtype and a.offsets.tolist() == e.offsets.tolist()
        assert [a[row].tolist() for row in expected.order] == [e[row].tolist() for row in expected.order]
    assert actual.order.tolist() == expected.order.tolist() and actual.runs.tolist() == expected.runs.tolist()
    batches = [list(epoch_batches(encoded, TrainConfig(batch_tokens=50), 1, 2)) for encoded in (actual, expected)]
    assert [rows.tolist() for rows in batches[0]] == [rows.tolist() for rows in batches[1]]
    for rows in batches[0][:3]:
        assert all(torch.equal(a, e) for a, e in zip(collate(actual, rows), collate(expected, rows), strict=True))


def test_tokenizer_is_trained_on_first_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = [[make_random_pairs(40, seed) for seed in seeds] for seeds in ((0, 1), (2,))]
    paths = [write_files(tmp_path / str(number), *shards) for number, shards in enumerate(corpora)]
    run = make_run(paths[0], corpora=[CorpusConfig(str(paths[1]), 0.5)])
    all_pairs = [pair for shards in corpora for shard in shards for pair in shard]
    sample = sample_stream(run)
    assert sorted(zip(sample["source"].to_pylist(), sample["target"].to_pylist(), strict=True)) == sorted(all_pairs)
    monkeypatch.setattr(stream, "TOKENIZER_SAMPLE", 30)
    sample = sample_stream(run)
    expected = next(build_naive_windows(corpora, [20, 10], 1, None))
    assert list(zip(sample["source"].to_pylist(), sample["target"].to_pylist(), strict=True)) == expected
    run.tokenizer.vocab_size = 290
    assert get_or_train_tokenizer(sample, run) == get_or_train_tokenizer(sample_stream(run), run)


def test_lines_after_limit_are_not_read(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_PAIRS", 1)
    (tmp_path / "train.de").write_bytes(b"a\nb\nc\n\xff\n")
    (tmp_path / "train.en").write_bytes(b"A\nB\nC\n\xff\n")
    [window] = take_windows(make_run(tmp_path, buffer=3, limit=2), tokenizer, 1)
    assert list_pairs(window) == [("a", "A"), ("b", "B"), ("a", "A")]


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.de": "", "train.en": ""}, "^the split train of data.path={} is empty$"),
        ({"train.de": "a\n", "train.en": "a\nb\n"}, "train.de has 1 line and .*train.en has 2;"),
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
def test_text_without_usable_pairs_raises(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message.format(tmp_path)):
        take_windows(make_run(tmp_path, buffer=4), tokenizer, 3)


def test_invalid_settings_raise(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = {"format": "text", "path": "x", "streaming": True}
    for data, train, message in (
        ({"streaming": True}, {}, "data.streaming does not support the built-in corpus or gold links"),
        (text, {"max_steps": None}, "has no epochs; set train.max_steps=N and train.validate_every=N"),
    ):
        with pytest.raises(UserError, match=message):
            TrainRun(data=DataConfig(**data), train=TrainConfig(**SCHEDULE | train))
    run = make_run(write_files(tmp_path / "data", make_random_pairs(9)), buffer=1)
    run.data.corpora = [CorpusConfig(run.data.path or "")]
    with pytest.raises(UserError, match="data.buffer=1 is too small for the weights of data.corpora: .*no pair of "):
        take_windows(run, tokenizer, 1)


def test_stream_key_depends_on_file_names_and_sizes(tmp_path: Path, tokenizer: Tokenizer) -> None:
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
STREAM_SETTINGS = (
    "data=text",
    "data.streaming=true",
    "data.buffer=60",
    *SMALL_SETTINGS,
    "train.batch_tokens=300",
    "train.log_every=1",
    "tokenizer.sampling=0.1",
    f"train.max_steps={STEPS}",
    f"train.validate_every={STEPS}",
    "model.dropout=0.1",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small sharded corpus."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), train=150, valid=3, test=2)
    for ending in ("de", "en"):
        lines = (folder / f"train.{ending}").read_text().splitlines()
        (folder / f"train.{ending}").unlink()
        for number, shard in enumerate((lines[:40], lines[40:])):
            (folder / f"train.{number}.{ending}").write_text("".join(line + "\n" for line in shard))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was trained without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks_ok(1, folder, "train", "name=x", f"data.path={text}", *STREAM_SETTINGS)
    return folder / "runs" / "x"


def read_state(run: Path) -> dict[str, Any]:
    return dict(json.loads((find_last_intact_checkpoint(run) / "state.json").read_text()))


def assert_runs_equal(actual: Path, expected: Path) -> None:
    torch.testing.assert_close(load_last_weights(actual), load_last_weights(expected), rtol=0, atol=0)
    assert read_events(actual, "validate") == read_events(expected, "validate")
    losses = [[(event["step"], event["loss"]) for event in read_events(run, "train")] for run in (actual, expected)]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [*range(1, STEPS + 1)]


def test_resumed_run_matches_uninterrupted_run(uninterrupted: Path, text: Path, tmp_path: Path) -> None:
    """Stop in the middle of a window of the first pass, then of a later one."""
    arguments, run = ("name=x", f"data.path={text}", *STREAM_SETTINGS, "resume=auto"), tmp_path / "runs" / "x"
    states = []
    for step in (3, 30):
        code, output = run_ranks(1, tmp_path, train_until_signal, step, 1, *arguments)
        assert code == 143 and f"stopped at step {step + 1}; run the same command with resume=auto" in output
        assert "Exception" not in output and "Traceback" not in output
        states.append(read_state(run))
    assert [state["window"] > 0 for state in states] == [False, True]
    assert states[1]["stream_offsets"][0][0] >= 1 and all(state["position"] for state in states)
    output = run_ranks_ok(1, tmp_path, "train", *arguments)
    assert f"resuming {Path('runs/x')} at step 31" in output and "Exception" not in output
    assert_runs_equal(run, uninterrupted)


def test_run_stops_at_invalid_line(text: Path, tmp_path: Path) -> None:
    """Damage a line after the tokenizer is trained, in the shard that is read last."""
    folder, last_shard = tmp_path / "data", np.random.default_rng((1, 0)).permutation(2)[-1]
    shutil.copytree(text, folder)
    arguments = ("name=x", f"data.path={folder}", *STREAM_SETTINGS, "data.buffer=30", "resume=auto")
    assert run_ranks(1, tmp_path, train_until_signal, 2, 1, *arguments)[0] == 143
    file = folder / f"train.{last_shard}.en"
    lines = file.read_bytes().split(b"\n")
    lines[37] = b"\xff" * len(lines[37])
    file.write_bytes(b"\n".join(lines))
    process = run_in_new_process("train", *arguments, "train.save_minutes=1e-6", folder=tmp_path)
    message = process.stderr.decode()
    assert process.returncode == 1 and "Traceback" not in message and "Exception" not in message
    assert message.splitlines()[-1].startswith(f"error: {file}:38: not UTF-8 (byte 0xFF at position 1); fix the line")
    steps = [event["step"] for event in read_events(tmp_path / "runs" / "x", "train")]
    assert steps == [*range(1, len(steps) + 1)] and 3 < len(steps) < STEPS


def test_two_processes_give_same_losses_on_parquet(text: Path, tmp_path: Path) -> None:
    """Check also that no run prints an exception at exit."""
    for split in ("train.0", "train.1", "valid"):
        columns = {side: (text / f"{split}.{side}").read_text().splitlines() for side in ("de", "en")}
        pq.write_table(pa.table(columns), tmp_path / f"{split}.parquet")
    data = ("name=x", "data=text", "data.format=parquet", f"data.path={tmp_path}", "data.streaming=true")
    runs = []
    for count in (1, 2):
        output = run_ranks_ok(count, tmp_path / str(count), "train", *data, "data.buffer=65", *EXACT_SETTINGS)
        assert "Exception" not in output and "Traceback" not in output
        runs.append(tmp_path / str(count) / "runs" / "x")
    torch.testing.assert_close(load_last_weights(runs[0]), load_last_weights(runs[1]), rtol=1e-9, atol=1e-9)
    losses_1, losses_2 = ([event["loss"] for event in read_events(run, "train")] for run in runs)
    assert len(losses_1) == 20 and losses_1 == pytest.approx(losses_2, rel=1e-9)
    assert read_state(runs[0])["stream_offsets"] == read_state(runs[1])["stream_offsets"] != [[0, 0]]


def test_streamed_text_is_not_cached(uninterrupted: Path) -> None:
    cache = uninterrupted.parents[1] / "cache"
    [cached_validation] = cache.rglob("pairs.arrow")
    assert len(pa.ipc.open_stream(cached_validation.read_bytes()).read_all()) == 3 and not list(
        cache.rglob("source.ids")
    )
