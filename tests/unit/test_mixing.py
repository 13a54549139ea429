"""Mixtures of corpora: repetition of pairs by weight, tags, and training runs."""

import dataclasses
import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import (
    SMALL_SETTINGS,
    Pair,
    list_pairs,
    load_last_weights,
    make_pairs,
    make_random_pairs,
    make_run,
    read_events,
    run_ranks,
    run_ranks_ok,
    take_windows,
    train_until_signal,
    write_corpus,
    write_files,
)
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import EOS, DataConfig, TokenizerConfig, TrainConfig
from nmt.config.data import CorpusConfig, DataOverride
from nmt.data.batching import count_repetitions, epoch_batches, padding_waste
from nmt.data.corpus import load_pairs
from nmt.data.encoding import get_or_train_tokenizer
from nmt.data.mixing import MixturePart, check_tags, list_corpora, load_mixture
from nmt.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from nmt.errors import UserError

sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0.001, 0.1, 0.5, 1.0, 1.5, 2.5, 3.0])), min_size=1
)


def make_shares(sizes: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return (end, weight) of each corpus from its (size, weight)."""
    ends = np.cumsum([size for size, _ in sizes]).tolist()
    return [(end, weight) for end, (_, weight) in zip(ends, sizes, strict=True)]


# --- repetitions
@given(sizes=sizes_and_weights, epochs=st.integers(1, 30), dtype=st.sampled_from([np.uint32, np.int64]))
def test_repetitions_over_epochs_match_weights(sizes: list[tuple[int, float]], epochs: int, dtype: Any) -> None:
    shares = make_shares(sizes)
    weights = np.repeat([weight for _, weight in sizes], [size for size, _ in sizes])
    rows, total = np.arange(shares[-1][0]).astype(dtype), 0
    for epoch in range(epochs):
        counts = count_repetitions(rows, shares, epoch)
        assert set(counts.tolist()) <= {math.floor(weight + extra) for weight in weights for extra in (0, 1)}
        total = total + counts.astype(int)  # type: ignore[assignment]
        assert np.abs(total - (epoch + 1) * weights).max() < 1
    shuffled = np.random.default_rng(0).permutation(rows)
    expected = count_repetitions(rows, shares, epochs)[shuffled]
    assert count_repetitions(shuffled, shares, epochs).tolist() == expected.tolist()


@given(
    lengths=st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=2, max_size=60),
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.5, 3.0]), min_size=2, max_size=2),
    first_share=st.floats(0, 1),
    budget=st.integers(1, 200),
    by_sentences=st.booleans(),
)
def test_epoch_batches_repeat_pairs_by_weight(
    lengths: list[tuple[int, int]], weights: list[float], first_share: float, budget: int, by_sentences: bool
) -> None:
    count = len(lengths)
    shares = [(1 + int(first_share * (count - 2)), 1.0), (count, weights[0])]
    encoded = dataclasses.replace(make_pairs(*map(list, zip(*lengths, strict=True))), mixture_weights=shares)
    config = TrainConfig(batch_sentences=budget) if by_sentences else TrainConfig(batch_tokens=budget)
    batch_counts = set()
    for epoch in range(4):
        batches = epoch_batches(encoded, config, 5, epoch)
        expected = count_repetitions(np.arange(count), shares, epoch)
        actual = Counter(row for batch in batches for row in batch.tolist())
        assert [actual[row] for row in range(count)] == expected.tolist()
        batch_counts.add(len(batches))
        for batch in batches:
            sizes = [max(lengths[row]) for row in batch]
            assert len(batch) <= budget if by_sentences else len(batch) == 1 or sum(sizes) <= budget
        assert 0 <= padding_waste(encoded, batches) < 1
    if weights[0] == int(weights[0]):
        assert len(batch_counts) == 1


# --- corpora
def make_data_config(path: Path, *corpora: CorpusConfig, **data: Any) -> DataConfig:
    settings = {"format": "text", "path": str(path), "cache": str(path.parent / "cache"), "corpora": list(corpora)}
    return DataConfig(**settings | data)


def load_mixture_pairs(data: DataConfig) -> tuple[list[Pair], list[tuple[int, float]]]:
    pairs, shares = load_mixture(data)
    return list(zip(pairs["source"].to_pylist(), pairs["target"].to_pylist(), strict=True)), shares


def test_corpora_inherit_data_settings() -> None:
    other = CorpusConfig("y", 0.5, "bt", "tsv", source="1", target="2")
    data = DataConfig("text", "x", limit=3, corpora=[CorpusConfig("z"), other])
    first = dataclasses.replace(data, corpora=[])
    second = dataclasses.replace(first, path="z", limit=None)
    third = dataclasses.replace(first, path="y", limit=None, format="tsv", source="1", target="2")
    assert list_corpora(data) == [
        MixturePart(first, 1.0, None),
        MixturePart(second, 1.0, None),
        MixturePart(third, 0.5, "<bt>"),
    ]
    assert list_corpora(DataConfig()) == [MixturePart(DataConfig(), 1.0, None)]


def test_corpora_are_concatenated_with_tags(tmp_path: Path) -> None:
    """Combine formats and Arrow text types; empty sources get no tag."""
    first, second = make_random_pairs(5), [("a b", "A"), ("", "B"), (" \t\u2028", "C"), (" d", " D"), ("e", "")]
    write_files(tmp_path / "x", first)
    write_files(tmp_path / "y", second)
    (tmp_path / "z").mkdir()
    texts = [list(side) for side in zip(*second, strict=True)]
    table = pa.table({"to": pa.array(texts[1]), "n": [1] * 5, "from": pa.array(texts[0], pa.large_string())})
    pq.write_table(table, tmp_path / "z" / "train.parquet")
    columns = {"format": "parquet", "source": "from", "target": "to"}
    corpora = [
        CorpusConfig(str(tmp_path / "y"), 0.5, "bt"),
        CorpusConfig(str(tmp_path / "z"), 2.5, None, **columns),
        CorpusConfig(str(tmp_path / "z"), 1.0, "zß2", **columns),
    ]
    tagged = [("<bt> a b", "A"), *second[1:3], ("<bt>  d", " D"), ("<bt> e", "")]
    other_tag = [(source.replace("<bt>", "<zß2>"), target) for source, target in tagged]
    expected = [*first[:3], *tagged, *second, *other_tag]
    for limit in (3, 10):
        data = make_data_config(tmp_path / "x", *corpora, limit=limit)
        size = min(limit, 5)
        shares = [(size, 1.0), (size + 5, 0.5), (size + 10, 2.5), (size + 15, 1.0)]
        assert load_mixture_pairs(data) == ([*first[:size], *expected[3:]], shares)
    run = make_run(tmp_path / "x", buffer=36, corpora=corpora, limit=3)
    texts = [list(side) for side in zip(*expected, strict=True)]
    tokenizer = train_tokenizer(*texts, TokenizerConfig(type="char", vocab_size=400))  # type: ignore[misc]
    [window] = take_windows(run, tokenizer, 1)
    streamed = list_pairs(window)  # a fifth of 36 is 7.2, a tenth 3.6
    assert [streamed[0:3], streamed[7:11], streamed[11:16], streamed[29:34]] == [
        first[:3],
        tagged[:4],
        second,
        other_tag,
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_errors_name_files_of_additional_corpora(tmp_path: Path, streaming: bool) -> None:
    data = make_data_config(
        write_files(tmp_path / "x", make_random_pairs(3)), CorpusConfig(str(tmp_path / "y"), 1.0, "bt")
    )
    run = make_run(tmp_path / "x", buffer=4, corpora=data.corpora, streaming=streaming)
    tokenizer = make_tagged_tokenizer("char", True)

    def read() -> Any:
        return take_windows(run, tokenizer, 1) if streaming else load_mixture(run.data)

    with pytest.raises(UserError, match=rf"data.corpora\[0\].path={tmp_path}/y is not a folder"):
        read()
    write_files(tmp_path / "y", [("a", "b"), ("c", "d")])
    (tmp_path / "y" / "train.en").write_bytes(b"b\n\xff\n")
    with pytest.raises(UserError, match=f"{tmp_path}/y/train.en:2: not UTF-8"):
        read()
    (tmp_path / "y" / "train.de").unlink()
    with pytest.raises(UserError, match=f"{tmp_path}/y/train.de does not exist"):
        read()


def test_invalid_corpora_settings_raise() -> None:
    for values, message in (
        ({"path": ""}, "a corpus in data.corpora has no path"),
        ({"weight": 0.0}, "data.corpora: weight=0.0 must be greater than 0"),
        ({"format": "toy"}, "data.corpora: format=toy is not one of"),
        ({"tag": "b t"}, "data.corpora: tag='b t' must consist of letters and digits"),
    ):
        with pytest.raises(UserError, match=message):
            CorpusConfig(**{"path": "x"} | values)
    corpora = [CorpusConfig("y")]
    for data in ({}, {"format": "text", "path": "x", "alignments": "links"}):
        with pytest.raises(UserError, match="data.corpora does not support the built-in corpus or gold links"):
            DataConfig(**data, corpora=corpora)


# --- tags
TAGS = ("<bt>", "<Web2>")
TYPES = ("bpe", "unigram", "char", "word")


@lru_cache
def make_tagged_tokenizer(type: str, joint: bool, normalization: str = "identity") -> Tokenizer:
    """Train a tokenizer on text with tags in two thirds of all lines."""
    pairs = make_random_pairs(200)
    sources = [f"{tag} {source}" for (source, _), tag in zip(pairs, [*TAGS, "bt >"] * 200, strict=False)]
    config = TokenizerConfig(type=type, vocab_size=284, joint=joint, normalization=normalization)
    return train_tokenizer(sources, [target for _, target in pairs], config, 100, TAGS)


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("type", TYPES)
def test_tag_is_a_single_piece(tmp_path: Path, type: str, joint: bool, normalization: str) -> None:
    tokenizer = make_tagged_tokenizer(type, joint, normalization)
    tokenizer.save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for sampling in (0.0, 0.4) if type == "bpe" else (0.0,):
        for tag in TAGS:
            [[piece]] = tokenizer.source.encode([tag], sampling)
            assert tokenizer.source.pieces([piece]) == [f"\u2581{tag}"] and piece > EOS
            for text in (f"{tag} ab cd abcd", f"{tag} 0 1 199 gh", f"ab {tag} cd"):
                [ids] = tokenizer.source.encode([text], sampling)
                assert ids.count(piece) == 1 and tokenizer.source.decode(ids) == text
                assert tokenizer.source.word_indices(text, ids)[0] == 0
    assert (tokenizer.target.encode(["<bt>"]) == tokenizer.source.encode(["<bt>"])) == joint


def test_tag_missing_from_parent_tokenizer_raises() -> None:
    def data(tag: str) -> DataConfig:
        return make_data_config(Path("x"), CorpusConfig("y", 1.0, tag))

    check_tags(data("bt"), make_tagged_tokenizer("bpe", True))
    with pytest.raises(UserError, match="the tokenizer of init_from has no piece <new>; remove .* data.path=y"):
        check_tags(data("new"), make_tagged_tokenizer("bpe", True))


def test_trained_tokenizer_contains_tags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    folders = [write_files(tmp_path / name, make_random_pairs(100, seed)) for seed, name in enumerate("xy")]
    run = make_run(folders[0], streaming=False)
    run.tokenizer.vocab_size = 290
    text = load_pairs(run.data, "train")
    plain = get_or_train_tokenizer(text, run)
    run.data.corpora = [CorpusConfig(str(folders[1]), 1.0, tag) for tag in ("b", "a", "b", None)]
    tagged = get_or_train_tokenizer(text, run)
    assert not plain.source.symbols and tagged.source.pieces(range(4, 6)) == ["\u2581<a>", "\u2581<b>"]
    run.data.corpora = run.data.corpora[:2]
    assert get_or_train_tokenizer(text, run) == tagged and "using the cached " in caplog.text


# --- runs
SETTINGS = (
    "name=x",
    "data=text",
    *SMALL_SETTINGS,
    "train.log_every=1",
    "tokenizer.sampling=0.1",
    "model.dropout=0.1",
    "train.max_steps=16",
    "train.validate_every=8",
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three corpora, the first with gold links."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, size in (("main", 70), ("bt", 50), ("web", 30)):
        (folder / name).mkdir()
        write_corpus(folder / name, train=size, valid=3, test=3)
    lines = [(folder / "web" / f"train.{side}").read_text().splitlines() for side in ("en", "de")]
    (folder / "web" / "train.tsv").write_text("".join("\t".join(pair) + "\n" for pair in zip(*lines, strict=True)))
    return folder


@pytest.mark.parametrize("streaming", ["data.streaming=false", "data.streaming=true"])
def test_train_resume_and_evaluate_on_several_corpora(corpora: Path, tmp_path: Path, streaming: str) -> None:
    others = f"{{path:{corpora}/bt,weight:2,tag:bt}},{{path:{corpora}/web,weight:0.5,format:tsv,source:2,target:1}}"
    arguments = (*SETTINGS, f"data.path={corpora}/main", f"data.corpora=[{others}]", streaming, "data.buffer=60")
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    run_ranks_ok(1, uninterrupted, "train", *arguments)
    code, output = run_ranks(1, resumed, train_until_signal, 10, 1, *arguments)
    assert code == 143 and "stopped at step 11" in output
    run_ranks_ok(1, resumed, "train", *arguments, "resume=auto")
    expected, actual = uninterrupted / "runs" / "x", resumed / "runs" / "x"
    torch.testing.assert_close(load_last_weights(actual), load_last_weights(expected), rtol=0, atol=0)
    assert read_events(actual, "validate") == read_events(expected, "validate")
    assert [event["loss"] for event in read_events(actual, "train")] == [
        event["loss"] for event in read_events(expected, "train")
    ]

    assert load_tokenizer(expected).source.symbols == {"\u2581<bt>": 4}
    (uninterrupted / "in.de").write_text("<bt> der Hund schläft .\nder Hund schläft .\n")
    short = ("search.beam=1", "search.max_length=20")
    run_ranks_ok(1, uninterrupted, "translate", "checkpoint=runs/x", "input=in.de", "output=out.de", *short)
    assert len((uninterrupted / "out.de").read_text().splitlines()) == 2
    evaluation = ("checkpoint=runs/x", "data.alignments=links", *short)
    run_ranks_ok(1, uninterrupted, "evaluate", *evaluation)
    assert json.loads((expected / "eval" / "test" / "metrics.json").read_text())["aer"] is not None


def test_evaluation_data_ignores_corpora_and_streaming(corpora: Path) -> None:
    """Use settings that training does not support together with corpora or streaming."""
    others = [CorpusConfig(str(corpora / "bt"))]
    for run in (make_data_config(corpora / "main", *others), make_run(corpora / "main").data):
        data = DataOverride(alignments="links").apply_to(run)
        assert (data.streaming, data.corpora, data.path) == (False, [], run.path)
        assert DataOverride(format="toy").apply_to(run).format == "toy"
        assert DataOverride(split="valid").apply_to(run).split == "valid"
