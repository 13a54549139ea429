"""Fuzz tests: random texts by hypothesis, and valid files with random damage to their bytes."""

import json
import logging
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    ODD_CHARACTERS,
    ODD_LINES,
    SPECIAL_STRINGS,
    SUBWORDS,
    TOKENIZER_TYPES,
    PageReader,
    make_tokenizer,
    measure_peak_memory,
    run_ok,
    run_ranks,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import nmt
from nmt.config import DataConfig, TranslateRun
from nmt.data.corpus import load_pairs
from nmt.data.readers import LINE_READERS, BadLine, LinePair
from nmt.data.tokenizer import group_by_spaces, load_tokenizer
from nmt.data.word_links import format_pharaoh, parse_gold_links, read_gold_links
from nmt.data.words import segment_words
from nmt.decoding.alignment import restore_unknown_words
from nmt.decoding.translation import Translation
from nmt.errors import UserError
from nmt.evaluation.metrics import compute_scores
from nmt.evaluation.report import build_report
from nmt.runs.checkpoint import find_last_intact_checkpoint, load_config, load_model
from nmt.system.text import read_dictionary
from nmt.training.progress import read_progress
from nmt.translate import OUTPUT_FORMATS

any_text = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(ODD_CHARACTERS), st.sampled_from(SPECIAL_STRINGS)
    ),
    max_size=15,
).map("".join)
any_line = st.one_of(any_text, st.builds(lambda text, times: text * times, any_text, st.integers(0, 100)))
short_line = st.builds(lambda text, times: text * times, any_text, st.integers(0, 8))  # for models to read
word_lists = st.lists(any_text, max_size=6)
fuzz = settings(derandomize=True, deadline=None, max_examples=40)


def damage(content: bytes, seed: int) -> bytes:
    """Flip random bits and, for odd seeds, also delete, repeat or insert bytes."""
    rng, data = random.Random(seed), bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        position, size = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 8, 100])
        match rng.randrange(4) if seed % 2 else 0:
            case 0 if position < len(data):
                data[position] ^= 1 << rng.randrange(8)
            case 1:
                del data[position : position + size]
            case 2:
                data[position:position] = data[position : position + size]
            case 3:
                data[position:position] = rng.randbytes(size)
    return bytes(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Suppress warnings, of which there are thousands, and restore the log that commands change."""
    log = logging.getLogger("nmt")
    level, propagate, handlers = log.level, log.propagate, [*log.handlers]
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)
    log.propagate, log.handlers[:] = propagate, handlers


# --------------------------------------------------------------------------------------------------------------- files
TEXT = "Ein Hund\nzwei  Katzen\r\n\nä😀\u2028\n5\t6\n".encode()
TABLE = "ein Hund\ta dog\r\nzwei\t\t2\nä\tb\tc\n\tx\n".encode()
OBJECTS = rb"""{"de": "a\u00e4", "en": "b"}

{"en": "x\n", "de": "y", "n": [1.5, null]}
{"x": {"de": "c"}, "en": "d", "de": "\ud83d\ude00"}
"""
GOLD = b"0-0 1p1\r\n\n1?0\t2-1 0-0\n0-1\n" * 3
WORDS = [["x"] * count for count in [7, 0, 9, 5] * 3], [["y"] * count for count in [6, 1, 8, 5] * 3]


def read_corpus(path: Path, source: str = "de", target: str = "en") -> None:
    (path.parent / "train.en").write_text("a\n" * 5)
    format = "text" if path.suffix == ".de" else path.suffix.removeprefix(".")
    data = DataConfig(format, str(path.parent), source=source, target=target, cache=str(path.parent / "cache"))
    for pair in load_pairs(data, "train").to_pylist():
        assert all(isinstance(pair[side], str) for side in ("source", "target"))


def read_gold(path: Path) -> None:
    for gold, source, target in zip(read_gold_links(path, 0, *WORDS), *WORDS, strict=True):
        assert gold.sure <= gold.possible
        assert all(0 <= s < len(source) and 0 <= t < len(target) for s, t in gold.possible)


def read_terms(path: Path) -> None:
    assert all(word and translation for word, translation in read_dictionary("search.terms", str(path)).items())


def read_state(path: Path) -> None:
    progress = read_progress(path)
    assert isinstance(progress.corpus, str) and all(type(checkpoint.step) is int for checkpoint in progress.best)


# Name of the file: its content, or a pattern of a file of the run, and how it is read.
READERS: dict[str, tuple[bytes | str, Callable[[Path], None]]] = {
    "text/train.de": (TEXT, read_corpus),
    "numbered/train.tsv": (TABLE, lambda path: read_corpus(path, "2", "1")),
    "named/train.tsv": (b"en\tde\tid\n" + TABLE, read_corpus),
    "json/train.jsonl": (OBJECTS, read_corpus),
    "gold": (GOLD, read_gold),
    "terms": ("Hund\tdog\r\nKatze\tthe cat\nä\tb\tc\n".encode() * 3, read_terms),
    "state.json": ("checkpoints/*/state.json", read_state),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_file_is_valid_or_rejected_in_one_line(name: str, home: Path, tmp_path: Path) -> None:
    content, read = READERS[name]
    if isinstance(content, str):
        content = next((home / "runs" / "mine").glob(content)).read_bytes()
    path, outcomes = tmp_path / name, Counter[bool]()
    path.parent.mkdir(exist_ok=True)
    for seed in range(150):
        path.write_bytes(damage(content, seed))
        try:
            read(path)
            outcomes[True] += 1
        except UserError as error:
            assert str(path.parent) in str(error) and str(error).isprintable() and len(str(error)) < 1000
            outcomes[False] += 1
    assert min(outcomes[True], outcomes[False]) > 2, outcomes


def read_lines(format: str, *arguments: Any) -> list[LinePair | BadLine]:
    """Return the results of a reader in the order of the lines."""
    results: list[LinePair | BadLine] = []
    for item in LINE_READERS[format](*arguments):
        if isinstance(item, BadLine):
            results.append(item)
        else:
            results += [LinePair(row["line"], row["source"], row["target"]) for row in item.to_pylist()]
    return sorted(results, key=lambda line: line.number)


@pytest.mark.parametrize("format", ["text", "tsv", "jsonl"])
@fuzz
@given(pairs=st.lists(st.tuples(any_text, any_text), max_size=8), escaped=st.booleans(), crlf=st.booleans())
def test_readers_return_written_texts(
    format: str, folder: Path, pairs: list[tuple[str, str]], escaped: bool, crlf: bool
) -> None:
    if format != "jsonl":  # line breaks and tabs separate lines and cells
        pairs = [(re.sub("[\n\r\t]", "", s), re.sub("[\n\r\t]", "", t)) for s, t in pairs]
    rows = {
        "text": [[s for s, _ in pairs], [t for _, t in pairs]],
        "tsv": [[f"{s}\t{t}" for s, t in pairs]],
        "jsonl": [[json.dumps({"x": {"a": s}, "b": t}, ensure_ascii=escaped) for s, t in pairs]],
    }[format]
    paths = [folder / f"{format}{side}" for side in range(len(rows))]
    for path, lines in zip(paths, rows, strict=True):
        end = "\r\n" if crlf else "\n"
        path.write_bytes(b"\xef\xbb\xbf" + "".join(line + end for line in lines).encode())
    names = {"text": (), "tsv": ("1", "2"), "jsonl": ("x.a", "b")}[format]
    assert read_lines(format, *paths, *names) == [LinePair(n, *pair) for n, pair in enumerate(pairs, 1)]


# ----------------------------------------------------------------------------------------------------------- tokenizer
@pytest.mark.parametrize("type", SUBWORDS)
@fuzz
@given(line=any_line)
def test_tokenizer_round_trip(type: str, line: str) -> None:
    """Only U+2581 and line breaks become spaces. Long lists, which are encoded in several threads, give the same."""
    side = make_tokenizer(type).source
    [ids] = side.encode([line])
    assert side.encode([line] * 40) == [ids] * 40
    assert side.decode(ids) == re.sub("[▁\n\r]", " ", line)
    assert all(0 <= i < side.vocab_size for i in ids)


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@fuzz
@given(line=any_line, words=word_lists, seed=st.integers(0, 99))
def test_word_indices_are_ordered_and_in_range(
    type: str, normalization: str, line: str, words: list[str], seed: int
) -> None:
    side = make_tokenizer(type, normalization=normalization).source
    word_count = len([word for word in line.split(" ") if word])
    sampling = 0.5 if type == "bpe" else 0.0
    for ids in (side.encode([line])[0], side.encode([line], sampling, seed)[0]):
        indices = side.word_indices(line, ids)
        assert len(indices) == len(ids) and set(indices) <= {*range(-1, word_count)}
        known = [index for index in indices if index >= 0]
        assert known == sorted(known) and all(0 <= i < side.vocab_size for i in ids)
    [ids], [indices] = side.encode_words([[[word] for word in words]])
    assert len(indices) == len(ids) and indices == sorted(indices) and set(indices) <= {*range(len(words))}


def use_tokenizers(models: Path) -> None:
    """Use the tokenizers in some folders, and print whether each is rejected or works."""
    lines = ["", "der Hund", "▁ a▁b  c\0\x07 😀", "x" * 300, "<s> </s> \u00bd \ufb01 e\u0301"] * 8
    for folder in sorted(models.iterdir(), key=lambda folder: int(folder.name)):
        print(folder.name, end=" ", flush=True)
        try:
            side = load_tokenizer(folder).source
        except UserError:
            print("rejected", flush=True)
            continue
        for line, ids in [
            *zip(lines, side.encode(lines), strict=True),
            *zip(lines, side.encode(lines, 0.5 * side.is_bpe, 1), strict=True),
        ]:
            assert all(0 <= i < side.vocab_size for i in ids)
            assert not set("\n\r") & set(side.decode(ids))
            assert len(group_by_spaces(side.pieces([*ids, 3]))[1]) == len(ids) + 1
            assert len(side.word_indices(line, [*ids, 3])) == len(ids) + 1
        print("works", flush=True)


def test_damaged_tokenizer_is_rejected_or_works(tmp_path: Path) -> None:
    """The files are loaded in a separate process, which must not crash inside SentencePiece (C++)."""
    for seed in range(300):
        normalization = "nmt_nfkc" if seed % 20 == 0 else "identity"
        side = make_tokenizer(TOKENIZER_TYPES[seed % 4], normalization=normalization).source
        (tmp_path / "models" / str(seed)).mkdir(parents=True)
        (tmp_path / "models" / str(seed) / "tokenizer.model").write_bytes(damage(side.model, seed // 4))
    code, output = run_ranks(1, tmp_path, use_tokenizers, tmp_path / "models")
    outcomes = dict(line.split() for line in output.splitlines() if " " in line.strip())
    assert code == 0 and len(outcomes) == 300, output[-2000:]
    assert min(Counter(outcomes.values()).values()) > 20, Counter(outcomes.values())


@pytest.mark.parametrize(
    ("type", "old", "new"),
    [
        pytest.param("word", b"der", b"\xff\xfer", id="piece not UTF-8"),
        pytest.param("bpe", b"<0x41>", b"<0xzz>", id="invalid byte piece"),
        pytest.param("bpe", b"<0x41>", b"<0x42>", id="wrong byte piece"),
        pytest.param("word", b"Hund\x15", b"Hund\x15\x00\x00\xc0\x7f", id="NaN score"),
        pytest.param("bpe", b"</s>", b"</t>", id="wrong special piece"),
    ],
)
def test_tokenizer_with_invalid_pieces_is_rejected(tmp_path: Path, type: str, old: bytes, new: bytes) -> None:
    model = make_tokenizer(type).source.model
    start = model.index(old)
    (tmp_path / "tokenizer.model").write_bytes(model[:start] + new + model[start + len(new) :])
    with pytest.raises(UserError, match="is not a tokenizer of this program"):
        load_tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------------------- translation
SEARCHES = {
    "greedy": {"beam": 1, "max_length": 100},
    "beam": {"beam": 3, "n_best": 3, "max_source": 30, "max_length": 40},
    "samples": {"sample": True, "n_best": 2, "temperature": 3.0, "max_length": 40},
}


@pytest.fixture(scope="module")
def models(home: Path) -> dict[str, nmt.Model]:
    run = home / "runs" / "mine"
    return {name: nmt.load(run, device="cpu", precision="fp32", **search) for name, search in SEARCHES.items()}


def check_translation(translation: Translation) -> None:
    assert math.isfinite(translation.score) and translation.score <= 0
    assert not set("\n\r") & set(translation.text)
    record = translation.record
    assert json.loads(record.to_json())["target_pieces"] == translation.target_pieces
    links, sizes = record.links(), (len(record.source_words), len(record.target_words))
    assert parse_gold_links(format_pharaoh(links), 0, *sizes).sure == set(links)


@pytest.mark.parametrize("name", SEARCHES)
@settings(fuzz, max_examples=15)
@given(pairs=st.lists(st.tuples(short_line, any_text), max_size=4), has_prefixes=st.booleans())
def test_translate_returns_valid_translation_per_line(
    name: str, models: dict[str, nmt.Model], pairs: list[tuple[str, str]], has_prefixes: bool
) -> None:
    model, lines = models[name], [line for line, _ in pairs]
    prefixes = [prefix[:10] for _, prefix in pairs] if has_prefixes else None
    n_best_lists = model.translate_n_best(lines, weights=True, prefixes=prefixes)
    assert len(n_best_lists) == len(lines)
    command = TranslateRun("-", search=model.translator.config)
    for line, n_best in zip(lines, n_best_lists, strict=True):
        for translation in n_best:
            check_translation(translation)
            assert line.strip() or not translation.text
        assert name == "samples" or len({translation.text for translation in n_best}) == len(n_best)
        assert OUTPUT_FORMATS["text"](line, n_best, command).count("\n") == command.search.n_best
        assert json.loads(OUTPUT_FORMATS["jsonl"](line, n_best, command))["source"] == line
    assert all(map(math.isfinite, model.score(lines, [n_best[0].text for n_best in n_best_lists])))


def test_commands_with_random_bytes(home: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = [line.encode()[:80] for line in ODD_LINES]
    lines = [
        rng.choice([rng.randbytes(40), damage(rng.choice(texts), seed)]).replace(b"\n", b"") for seed in range(100)
    ]
    for name, side in (("in", lines), ("other", [line[:20] for line in lines[::-1]])):
        (tmp_path / name).write_bytes(b"\n".join([*side, b""]))
    model = (f"checkpoint={home}/runs/mine", "device=cpu")
    n_best = ("input=in", "output=out", "alignments=links", "search.beam=2", "search.n_best=2", "search.max_length=60")
    run_ok("translate", *model, *n_best, folder=tmp_path)
    texts_out = (tmp_path / "out").read_bytes().decode().split("\n")
    links = (tmp_path / "links").read_text().split("\n")
    assert len(texts_out) == len(links) == 2 * len(lines) + 1 and not any("\r" in text for text in texts_out)
    for text, line in zip(texts_out, links, strict=True):
        parse_gold_links(line, 0, 10**6, len([word for word in text.split(" ") if word]))
    with_prefix = ("input=in", "output=out.jsonl", "prefix=other", "search.beam=1", "format=jsonl")
    run_ok("translate", *model, *with_prefix, "search.max_length=60", folder=tmp_path)
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(rows) == len(lines) and all(len(row["translations"]) == 1 for row in rows)
    run_ok("align", *model, "source=in", "target=other", "output=aligned", folder=tmp_path)
    aligned = (tmp_path / "aligned").read_text().split("\n")
    assert len(aligned) == len(lines) + 1 and sum(map(bool, aligned)) > 25


# ------------------------------------------------------------------------------------------------------- files of runs
def test_damaged_run_is_rejected_or_unchanged(home: Path, tmp_path: Path) -> None:
    """No damage changes the weights, or the checkpoint that training continues from, without an error."""

    def read_weights(run: Path) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in load_model(str(run)).model.state_dict().items()}

    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval"))
    steps = [*(run / "checkpoints").glob("step_*")]
    weights = [read_weights(step) for step in steps]
    outcomes = Counter[bool]()
    files = [run / "config.yaml", run / "tokenizer.model", *run.glob("checkpoints/*"), *steps[0].iterdir()]
    for path in filter(Path.is_file, files):
        content = path.read_bytes()
        for seed in range(8):
            path.write_bytes(damage(content, seed))
            try:
                assert read_weights(run) in weights and find_last_intact_checkpoint(run) in steps
                outcomes[True] += 1
            except UserError as error:
                assert str(run) in str(error)
                outcomes[False] += 1
        path.write_bytes(content)
    assert min(outcomes.values()) > 5


VALUES = ("null", "[]", "[1, x]", "{}", "{a: 1}", "x", "''", "-1", "0", "1e400", ".nan", "true", "???", "0x" + "f" * 99)
HOSTILE_CONFIGS = {
    "long integer": "seed: " + "9" * 10**6,
    "huge exponent": "train:\n  max_steps: 1e" + "9" * 10**5,
    "nested interpolations": "name: '" + "${a:" * 10**4 + "'",
    "long key": "? " + "x" * 10**6,
    "many keys": "".join(f"k{i}: 1\n" for i in range(8_000)),
}


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_hostile_config_is_rejected_without_much_memory(name: str, tmp_path: Path) -> None:
    """Memory does not grow out of proportion to the file."""
    (tmp_path / "config.yaml").write_text(HOSTILE_CONFIGS[name])
    measure_peak_memory()
    memory_before = measure_peak_memory()
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/config.yaml")):
        load_config(tmp_path)
    assert measure_peak_memory() - memory_before < 200e6


def test_config_with_wrong_types_is_rejected_or_loads(home: Path, tmp_path: Path) -> None:
    """Each line of a config gets one of the odd values, in turn."""
    text = (home / "runs" / "mine" / "config.yaml").read_text(encoding="utf-8")
    lines, outcomes = text.splitlines(), Counter[bool]()
    for index, line in enumerate(lines):
        key, value = line.partition(":")[0], VALUES[index * 5 % len(VALUES)]
        changed = [*lines[:index], f"{key}: {value}", *lines[index + 1 :]]
        (tmp_path / "config.yaml").write_text("\n".join(changed), encoding="utf-8")
        try:
            load_config(tmp_path)
            outcomes[True] += 1
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}/config.yaml") and len(str(error).splitlines()) == 1
            outcomes[False] += 1
    assert min(outcomes.values()) > 5


# ------------------------------------------------------------------------------------------------- reports, alignments
pieces = st.lists(any_text, min_size=1, max_size=5).map(lambda texts: [*texts, "</s>"])


@st.composite
def translations(draw: Any) -> Translation:
    """Translations of any pieces, with any weights."""
    source, target = draw(pieces), draw(pieces)
    numbers = st.floats(0, 1) | st.sampled_from([math.nan, math.inf])
    size = len(target) * len(source)
    matrix = np.array(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(len(target), len(source))
    return Translation(draw(any_text), source, target, draw(numbers), draw(st.sampled_from([None, matrix])))


@settings(fuzz, max_examples=30)
@given(rows=st.lists(st.tuples(any_line, any_text, translations()), max_size=5), title=any_text)
def test_report_elements_do_not_depend_on_text(rows: list[tuple[str, str, Translation]], title: str) -> None:
    """No text is taken for markup: replacing all of it by x gives the same elements."""
    sources, texts, results = ([row[column] for row in rows] for column in range(3))
    scores = compute_scores([translation.text for translation in results], texts) | {"any": title}
    report = PageReader(build_report(title, scores, sources, texts, results))
    x_sources = [" ".join("x" for _ in segment_words(source)) for source in sources]
    x_references, x_results = ["x"] * len(rows), [Translation("x")] * len(rows)
    x_report = PageReader(build_report("x", scores | {"any": "x"}, x_sources, x_references, x_results))
    assert report.elements == x_report.elements and report.policy == x_report.policy
    assert report.text["script"] == x_report.text["script"] and report.text["style"] == x_report.text["style"]
    assert sorted(pair["line"] for pair in report.data) == [*range(1, len(rows) + 1)]
    for pair in report.data:
        source, reference, translation = rows[pair["line"] - 1]
        record = translation.record
        assert (pair["reference"], pair["source"]) == (reference, restore_unknown_words(source, record.source_words))
        assert pair["translation"] == restore_unknown_words(translation.text, record.target_words)
