"""Several corpora as one: how often each pair is used, tags, and whole runs on both."""

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
    run_program,
    run_ranks,
    run_ranks_ok,
    take_windows,
    train_until_signal,
    write_corpus,
    write_files,
)
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import EOS, DataConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.config.data import CorpusConfig, DataOverride
from nmt.data import mixing
from nmt.data.batching import count_repetitions, epoch_batches, padding_waste
from nmt.data.corpus import load_pairs
from nmt.data.encoding import EncodedPairs, encode_corpus, get_or_train_tokenizer
from nmt.data.mixing import MixturePart, check_tags, list_corpora, load_mixture
from nmt.data.stream import sample_stream
from nmt.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from nmt.errors import UserError

shares_of = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.001, 0.1, 0.5, 1.0, 1.5, 2.5, 3.0])), min_size=1)


def ending(sizes: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Shares of corpora of these sizes and weights."""
    ends = np.cumsum([size for size, _ in sizes]).tolist()
    return [(end, weight) for end, (_, weight) in zip(ends, sizes, strict=True)]


# -------------------------------------------------------------------------------------------------------------- copies
@given(sizes=shares_of, epochs=st.integers(1, 30), kind=st.sampled_from([np.uint32, np.int64]))
def test_after_some_epochs_each_pair_was_used_as_often_as_its_weight_says(
    sizes: list[tuple[int, float]], epochs: int, kind: Any
) -> None:
    shares = ending(sizes)
    weight = np.repeat([weight for _, weight in sizes], [size for size, _ in sizes])
    rows, total = np.arange(shares[-1][0]).astype(kind), 0
    for epoch in range(epochs):
        times = count_repetitions(rows, shares, epoch)
        assert set(times.tolist()) <= {math.floor(w + whole) for w in weight for whole in (0, 1)}
        total = total + times.astype(int)  # type: ignore[assignment]
        assert np.abs(total - (epoch + 1) * weight).max() < 1
    shuffled = np.random.default_rng(0).permutation(rows)
    assert (
        count_repetitions(shuffled, shares, epochs).tolist()
        == count_repetitions(rows, shares, epochs)[shuffled].tolist()
    )


@pytest.mark.parametrize("weight", [0.01, 0.1, 0.5, 0.75, 2.5])
@pytest.mark.parametrize("first", [0, 3_000_000_000])
def test_pairs_are_chosen_evenly(weight: float, first: int) -> None:
    """In each stretch of a corpus as many as its weight says, give or take a few."""
    rows, shares = np.arange(first, first + 5_000), [(first + 5_000, weight)]
    for epoch in (0, 1, 7, 100):
        times = count_repetitions(rows, shares, epoch).astype(int)
        for length in (20, 100, 1_000):
            found = times.reshape(-1, length).sum(axis=1)
            assert np.abs(found - weight * length).max() < 4


@given(
    lengths=st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=2, max_size=60),
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.5, 3.0]), min_size=2, max_size=2),
    part=st.floats(0, 1),
    budget=st.integers(1, 200),
    by_sentences=st.booleans(),
)
def test_an_epoch_has_each_pair_as_often_as_it_is_due(
    lengths: list[tuple[int, int]], weights: list[float], part: float, budget: int, by_sentences: bool
) -> None:
    count = len(lengths)
    shares = [(1 + int(part * (count - 2)), 1.0), (count, weights[0])]
    encoded = dataclasses.replace(make_pairs(*map(list, zip(*lengths, strict=True))), mixture_weights=shares)
    config = TrainConfig(batch_sentences=budget) if by_sentences else TrainConfig(batch_tokens=budget)
    numbers = set()
    for epoch in range(4):
        batches = epoch_batches(encoded, config, 5, epoch)
        due = count_repetitions(np.arange(count), shares, epoch)
        found = Counter(row for batch in batches for row in batch.tolist())
        assert [found[row] for row in range(count)] == due.tolist()
        numbers.add(len(batches))
        for batch in batches:
            sizes = [max(lengths[row]) for row in batch]
            assert len(batch) <= budget if by_sentences else len(batch) == 1 or sum(sizes) <= budget
        assert 0 <= padding_waste(encoded, batches) < 1
    if weights[0] == int(weights[0]):
        assert len(numbers) == 1


def test_weights_of_one_are_no_weights() -> None:
    rng = np.random.default_rng(0)
    encoded = make_pairs(*rng.integers(2, 20, (2, 700)).tolist())
    weighted = dataclasses.replace(encoded, mixture_weights=[(200, 1.0), (700, 1.0)])
    for epoch in (0, 3, 1_000):
        pair = [epoch_batches(one, TrainConfig(batch_tokens=90), 1, epoch) for one in (encoded, weighted)]
        assert [rows.tolist() for rows in pair[0]] == [rows.tolist() for rows in pair[1]]


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.5])
def test_the_number_of_updates_goes_with_the_weight(weight: float) -> None:
    rng = np.random.default_rng(0)
    encoded = make_pairs(*rng.integers(2, 20, (2, 3_000)).tolist())
    alone = len(epoch_batches(encoded, TrainConfig(batch_tokens=200), 1, 0))
    encoded = dataclasses.replace(encoded, mixture_weights=[(1_500, 1.0), (3_000, weight)])
    found = [len(epoch_batches(encoded, TrainConfig(batch_tokens=200), 1, epoch)) for epoch in range(10)]
    assert max(found) - min(found) <= 2
    assert np.mean(found) == pytest.approx(alone * (1 + weight) / 2, rel=0.03)


# --------------------------------------------------------------------------------------------------------------- parts
def given_corpora(path: Path, *corpora: CorpusConfig, **data: Any) -> DataConfig:
    settings = {"format": "text", "path": str(path), "cache": str(path.parent / "cache"), "corpora": list(corpora)}
    return DataConfig(**settings | data)


def mixed(data: DataConfig) -> tuple[list[Pair], list[tuple[int, float]]]:
    pairs, shares = load_mixture(data)
    return list(zip(pairs["source"], pairs["target"], strict=True)), shares


def test_what_a_corpus_leaves_open_is_as_in_data() -> None:
    other = CorpusConfig("y", 0.5, "bt", "tsv", source="1", target="2")
    data = DataConfig("text", "x", limit=3, invalid="drop", corpora=[CorpusConfig("z"), other])
    alone = dataclasses.replace(data, corpora=[])
    more = dataclasses.replace(alone, path="z", limit=None)
    tsv = dataclasses.replace(alone, path="y", limit=None, format="tsv", source="1", target="2")
    assert list_corpora(data) == [
        MixturePart(alone, 1.0, None),
        MixturePart(more, 1.0, None),
        MixturePart(tsv, 0.5, "<bt>"),
    ]
    assert list_corpora(DataConfig()) == [MixturePart(DataConfig(), 1.0, None)]


def test_corpora_follow_each_other_with_tags(tmp_path: Path) -> None:
    """Of whatever format, and types of text; what is empty stays so."""
    first, second = make_random_pairs(5), [("a b", "A"), ("", "B"), (" \t\u2028", "C"), (" d", " D"), ("e", "")]
    write_files(tmp_path / "x", first)
    write_files(tmp_path / "y", second)
    (tmp_path / "z").mkdir()
    texts = [list(side) for side in zip(*second, strict=True)]
    large = pa.table({"to": pa.array(texts[1]), "n": [1] * 5, "from": pa.array(texts[0], pa.large_string())})
    pq.write_table(large, tmp_path / "z" / "train.parquet")
    columns = {"format": "parquet", "source": "from", "target": "to"}
    corpora = [
        CorpusConfig(str(tmp_path / "y"), 0.5, "bt"),
        CorpusConfig(str(tmp_path / "z"), 2.5, None, **columns),
        CorpusConfig(str(tmp_path / "z"), 1.0, "zß2", **columns),
    ]
    tagged = [("<bt> a b", "A"), *second[1:3], ("<bt>  d", " D"), ("<bt> e", "")]
    others = [(source.replace("<bt>", "<zß2>"), target) for source, target in tagged]
    expected = [*first[:3], *tagged, *second, *others]
    for cut in (3, 10):
        shares = [(cut, 1.0), (cut + 5, 0.5), (cut + 10, 2.5), (cut + 15, 1.0)]
        data = given_corpora(tmp_path / "x", *corpora, limit=cut)
        shares = [(end - max(0, cut - 5), weight) for end, weight in shares]
        assert mixed(data) == ([*first[: min(cut, 5)], *expected[3:]], shares)
    data = given_corpora(tmp_path / "z", *corpora[:1], **columns)
    data.corpora[0].format, data.corpora[0].source, data.corpora[0].target = "text", "de", "en"
    assert mixed(data)[0] == [*second, *tagged]
    run = make_run(tmp_path / "x", buffer=36, corpora=corpora, limit=3)
    texts = [list(side) for side in zip(*expected, strict=True)]
    tokenizer = train_tokenizer(*texts, TokenizerConfig(type="char", vocab_size=400))  # type: ignore[misc]
    [window] = take_windows(run, tokenizer, 1)
    streamed = list_pairs(window)  # a fifth of 36 is 7.2, a tenth 3.6
    assert [streamed[0:3], streamed[7:11], streamed[11:16], streamed[29:34]] == [
        first[:3],
        tagged[:4],
        second,
        others,
    ]


def test_tagged_text_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = given_corpora(
        write_files(tmp_path / "x", make_random_pairs(3)),
        CorpusConfig(str(write_files(tmp_path / "y", make_random_pairs(4, 1))), 1, "bt"),
    )
    first = mixed(data)
    held = sorted((tmp_path / "cache").rglob("*.arrow"))
    monkeypatch.setattr(mixing, "prepend_tag", None)
    assert mixed(data) == first and sorted((tmp_path / "cache").rglob("*.arrow")) == held
    data.corpora[0].tag = "other"
    with pytest.raises(TypeError):
        mixed(data)


def test_empty_sources_are_dropped_with_or_without_a_tag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    second = [("a", "A"), ("", "B"), ("\u00a0", "C"), ("d", "")]
    corpora = [CorpusConfig(str(write_files(tmp_path / "y", second)), 0.5, tag) for tag in ("bt", None)]
    run = make_run(write_files(tmp_path / "x", make_random_pairs(40)), streaming=False, corpora=corpora)
    run.tokenizer.vocab_size = 290
    pairs, shares = load_mixture(run.data)
    encoded = encode_corpus(pairs, get_or_train_tokenizer(pairs, run), run, shares)
    assert sorted(encoded.order.tolist()) == [*range(41), 44]
    assert encoded.mixture_weights == [(40, 1.0), (44, 0.5), (48, 0.5)]
    assert "train: 48 pairs, dropped 6 with an empty side" in caplog.text
    assert f"left out 4 pairs of data.path={tmp_path}/x and data.corpora, de: empty" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_with_another_corpus_is_said_of_its_files(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = given_corpora(
        write_files(tmp_path / "x", make_random_pairs(3)), CorpusConfig(str(tmp_path / "y"), 1.0, "bt")
    )
    run = make_run(tmp_path / "x", buffer=4, corpora=data.corpora, streaming=streaming)
    tokenizer = tokenizer_of("char", True)

    def read() -> Any:
        return take_windows(run, tokenizer, 1) if streaming else load_mixture(run.data)

    with pytest.raises(UserError, match=rf"data.corpora\[0\].path={tmp_path}/y is not a folder"):
        read()
    write_files(tmp_path / "y", [("a", "b"), ("c", "d")])
    (tmp_path / "y" / "train.en").write_bytes(b"b\n\xff\n")
    with pytest.raises(UserError, match=f"{tmp_path}/y/train.en:2: not UTF-8"):
        read()
    run.data.invalid = "drop"
    read()
    assert f"left out 1 line of {tmp_path}/y/train.en: not UTF-8 (first: 2)" in caplog.text
    (tmp_path / "y" / "train.de").unlink()
    with pytest.raises(UserError, match=f"{tmp_path}/y/train.de does not exist"):
        read()


def test_impossible_corpora() -> None:
    for values, message in (
        ({"path": ""}, "a corpus in data.corpora has no path"),
        ({"weight": 0.0}, "weight=0.0 in data.corpora must be greater than 0"),
        ({"weight": float("nan")}, "weight=nan in data.corpora must be"),
        ({"weight": 1001.0}, "at most 1,000"),
        ({"format": "toy"}, "format in data.corpora=toy"),
        ({"tag": ""}, "tag='' in data.corpora must consist of letters and digits"),
        ({"tag": "b t"}, "tag='b t'"),
        ({"tag": "<bt>"}, "tag='<bt>'"),
        ({"tag": "b_t"}, "tag='b_t'"),
        ({"tag": "bt\n"}, "tag='bt"),
    ):
        with pytest.raises(UserError, match=message):
            CorpusConfig(**{"path": "x"} | values)
    more = [CorpusConfig("y")]
    for data in ({}, {"format": "text", "path": "x", "alignments": "links"}):
        with pytest.raises(UserError, match="data.corpora does not support the built-in corpus or gold links"):
            DataConfig(**data, corpora=more)


# ---------------------------------------------------------------------------------------------------------------- tags
TAGS = ("<bt>", "<Web2>")
TYPES = ("bpe", "unigram", "char", "word")


@lru_cache
def tokenizer_of(type: str, joint: bool, normalization: str = "identity") -> Tokenizer:
    """Trained on text of which a third is tagged."""
    pairs = make_random_pairs(200)
    sources = [f"{tag} {source}" for (source, _), tag in zip(pairs, [*TAGS, "bt >"] * 200, strict=False)]
    config = TokenizerConfig(type=type, vocab_size=284, joint=joint, normalization=normalization)
    return train_tokenizer(sources, [target for _, target in pairs], config, 100, TAGS)


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("type", TYPES)
def test_a_tag_is_a_piece(tmp_path: Path, type: str, joint: bool, normalization: str) -> None:
    tokenizer = tokenizer_of(type, joint, normalization)
    tokenizer.save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = ["ab cd abcd", "ef", "0 1 199 gh"]
    for sampling in (0.0, 0.4) if type in ("bpe", "unigram") else (0.0,):
        for tag in TAGS:
            [[piece]] = tokenizer.source.encode([tag], sampling)
            assert tokenizer.source.pieces([piece]) == [f"\u2581{tag}"] and piece > EOS
            for text, ids in zip(texts, tokenizer.source.encode([f"{tag} {t}" for t in texts], sampling), strict=True):
                assert ids[0] == piece and ids.count(piece) == 1
                assert tokenizer.source.decode(ids) == f"{tag} {text}"
                if not sampling:
                    assert [ids[1:]] == tokenizer.source.encode([text])
            [ids] = tokenizer.source.encode([f"ab {tag} cd"], sampling)
            assert ids.count(piece) == 1 and tokenizer.source.decode(ids) == f"ab {tag} cd"
            [ids] = tokenizer.source.encode([f"{tag} ab"], sampling)
            assert tokenizer.source.word_indices(f"{tag} ab", ids)[0] == 0
    assert (tokenizer.target.encode(["<bt>"]) == tokenizer.source.encode(["<bt>"])) == joint
    if not joint and type != "word":
        assert tokenizer.target.decode(tokenizer.target.encode(["<bt> ab"])[0]) == "<bt> ab"
        assert len(tokenizer.target.encode(["<bt>"])[0]) > 1


@given(
    text=st.lists(st.sampled_from(["<bt>", "<bt", "bt>", "<Web2>", "ab", " ", "  ", "<s>", "x<bt>", "<bt>y", "é"])),
    type=st.sampled_from(TYPES[:3]),
    sampling=st.sampled_from([0.0, 0.3]),
)
def test_text_with_tags_survives(text: list[str], type: str, sampling: float) -> None:
    side, line = tokenizer_of(type, True).source, "".join(text)
    [ids] = side.encode([line], sampling if type != "char" else 0.0)
    assert side.decode(ids) == line


def test_pieces_of_tagged_text_are_the_same_word_by_word(tmp_path: Path) -> None:
    """In the cache, in a stream, and at translation."""
    pairs = make_random_pairs(40)
    corpora = [CorpusConfig(str(write_files(tmp_path / "y", pairs)), 1.0, "bt")]
    run = make_run(write_files(tmp_path / "x", make_random_pairs(40, 1)), streaming=False, corpora=corpora, buffer=80)
    tokenizer = tokenizer_of("bpe", True)
    mixture, shares = load_mixture(run.data)
    encoded = encode_corpus(mixture, tokenizer, run, shares)
    expected = tokenizer.source.encode(list(mixture["source"]))
    assert [encoded.source[row].tolist() for row in range(80)] == expected
    assert {ids[0] for ids in expected[40:]} == {tokenizer.source.encode(["<bt>"])[0][0]}
    run.data.streaming = True
    [window] = take_windows(run, tokenizer, 1)
    found: EncodedPairs = window.pairs
    assert sorted(found.source[row].tolist() for row in range(80)) == sorted(expected)


def test_a_tag_that_another_runs_tokenizer_lacks_is_refused() -> None:
    def data(tag: str) -> DataConfig:
        return given_corpora(Path("x"), CorpusConfig("y", 1.0, tag))

    check_tags(data("bt"), tokenizer_of("bpe", True))
    with pytest.raises(UserError, match="the tokenizer of init_from has no piece <new>; leave out .* data.path=y"):
        check_tags(data("new"), tokenizer_of("bpe", True))


def test_tags_are_in_the_tokenizer_of_a_corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    pairs = [write_files(tmp_path / name, make_random_pairs(100, seed)) for seed, name in enumerate("xy")]
    run = make_run(pairs[0], streaming=False)
    run.tokenizer.vocab_size = 290
    text = load_pairs(run.data, "train")
    plain = get_or_train_tokenizer(text, run)
    run.data.corpora = [CorpusConfig(str(pairs[1]), 1.0, tag) for tag in ("b", "a", "b", None)]
    tagged = get_or_train_tokenizer(text, run)
    assert not plain.source.tags and tagged.source.pieces(range(4, 6)) == ["\u2581<a>", "\u2581<b>"]
    run.data.corpora = run.data.corpora[:2]
    assert get_or_train_tokenizer(text, run) == tagged and "using the cached " in caplog.text


# ---------------------------------------------------------------------------------------------------------------- runs
SETTINGS = (
    *("name=x", "data=text", *SMALL_SETTINGS, "train.log_every=1", "tokenizer.sampling=0.1", "model.dropout=0.1"),
    *("train.max_steps=24", "train.validate_every=12"),
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three corpora, the first with gold links."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, size in (("main", 70), ("bt", 50), ("web", 30)):
        (folder / name).mkdir()
        write_corpus(folder / name, train=size, valid=7, test=5)
    lines = [(folder / "web" / f"train.{side}").read_text().splitlines() for side in ("en", "de")]
    (folder / "web" / "train.tsv").write_text("".join("\t".join(pair) + "\n" for pair in zip(*lines, strict=True)))
    return folder


@pytest.mark.parametrize("how", ["data.streaming=false", "data.streaming=true"])
def test_a_run_on_several_corpora(corpora: Path, tmp_path: Path, how: str) -> None:
    more = f"{{path:{corpora}/bt,weight:2,tag:bt}},{{path:{corpora}/web,weight:0.5,format:tsv,source:2,target:1}}"
    arguments = (*SETTINGS, f"data.path={corpora}/main", f"data.corpora=[{more}]", how, "data.buffer=60")
    run_ranks_ok(1, tmp_path / "whole", "train", *arguments)
    code, said = run_ranks(1, tmp_path / "stopped", train_until_signal, 15, 1, *arguments)
    assert code == 143 and "stopped at step 16" in said
    run_ranks_ok(1, tmp_path / "stopped", "train", *arguments, "resume=auto")
    whole, again = (tmp_path / name / "runs" / "x" for name in ("whole", "stopped"))
    torch.testing.assert_close(load_last_weights(again), load_last_weights(whole), rtol=0, atol=0)
    assert read_events(again, "validate") == read_events(whole, "validate")
    assert [event["loss"] for event in read_events(again, "train")] == [
        event["loss"] for event in read_events(whole, "train")
    ]

    side = load_tokenizer(whole).source
    assert side.tags == {"\u2581<bt>": 4}
    translated, lines = tmp_path / "whole" / "out.de", ["<bt> der Hund schläft .", "der Hund schläft ."]
    (tmp_path / "whole" / "in.de").write_text("".join(line + "\n" for line in lines))
    code, said = run_ranks(
        1, tmp_path / "whole", run_program, "translate", "checkpoint=runs/x", "input=in.de", f"output={translated}"
    )
    assert code == 0 and len(translated.read_text().splitlines()) == 2
    run_ranks_ok(
        1, tmp_path / "whole", "evaluate", "checkpoint=runs/x", "data.alignments=links", "search.beam=1", "pictures=0"
    )
    assert json.loads((whole / "eval" / "test" / "metrics.json").read_text())["aer"] is not None


def test_other_text_can_be_measured(corpora: Path) -> None:
    """Whatever of it the training text cannot have."""
    more = [CorpusConfig(str(corpora / "bt"))]
    for run in (given_corpora(corpora / "main", *more), make_run(corpora / "main").data):
        found = DataOverride(alignments="links").apply_to(run)
        assert (found.streaming, found.corpora, found.path) == (False, [], run.path)
        assert DataOverride(format="toy").apply_to(run).format == "toy"
        assert DataOverride(split="valid").apply_to(run).split == "valid"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_corpus_that_is_missing_is_named_by_its_own_key(tmp_path: Path, streaming: bool) -> None:
    for split in ("train", "valid"):
        for side in ("de", "en"):
            (tmp_path / f"{split}.{side}").write_text("a b c\nd e f\n")
    corpora = [CorpusConfig(path=str(tmp_path)), CorpusConfig(path="nowhere")]
    data = DataConfig(
        format="text", path=str(tmp_path), cache=str(tmp_path / "cache"), corpora=corpora, streaming=streaming
    )
    ends = TrainConfig(max_steps=1, validate_every=1)

    def read(data: DataConfig) -> None:
        if streaming:
            sample_stream(TrainRun(data=data, train=ends))
        else:
            load_mixture(data)

    with pytest.raises(UserError, match=r"^data\.corpora\[1\]\.path=nowhere is not a folder"):
        read(data)
    with pytest.raises(UserError, match="^data.path=nowhere is not a folder"):
        read(dataclasses.replace(data, path="nowhere", corpora=corpora[:1]))
