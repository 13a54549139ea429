"""What comes in may be anything. Texts are drawn by hypothesis; files are whole ones with damage to their bytes."""

import io
import json
import logging
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    SUBWORDS,
    TOKENIZER_TYPES,
    PageReader,
    command_environment,
    has_carriage_return_lines,
    make_tokenizer,
    measure_peak_memory,
    write_alignments,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import nmt
from nmt.align import align
from nmt.config import DataConfig, LinksConfig, ModelConfig, SearchConfig, TranslateRun
from nmt.data.corpus import load_pairs
from nmt.data.readers import LINE_READERS, MAX_VALUE_CHARS, BadLine, LinePair
from nmt.data.tokenizer import load_tokenizer
from nmt.data.word_links import Link, format_pharaoh, parse_gold_links, read_gold_links
from nmt.data.words import segment_words
from nmt.decoding.alignment import Record, restore_unknown_words
from nmt.decoding.translator import Translation, Translator
from nmt.errors import UserError
from nmt.evaluation.metrics import compute_scores
from nmt.evaluation.report import build_report
from nmt.model.seq2seq import build_model
from nmt.runtime.text_io import read_dictionary
from nmt.training.checkpoint import load_config, load_model
from nmt.training.state import read_progress
from nmt.translate import OUTPUT_FORMATS, translate

ODD = (
    "  \t\0\x07\x1c\x7f\x85\n\r\u00a0\u0301\u1680\u2028\u2029\u200d\u202e\u2581\u2585\u3000\ufeff\ufffd<>&\"'\\{}aäשמ"
    "😀🏽"
)
MARKED = ("<s>", "</s>", "<pad>", "<unk>", "▁<unk>", "<0x41>", "<0x0A>", " ⁇ ", "</script>", "<!--", "Der Hund ", "0-0")
any_text = st.lists(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(ODD), st.sampled_from(MARKED)), max_size=15
).map("".join)
any_line = st.one_of(any_text, st.builds(lambda text, times: text * times, any_text, st.integers(0, 100)))
some_line = st.builds(lambda text, times: text * times, any_text, st.integers(0, 8))  # for models to read
some_words = st.lists(any_text, max_size=6)
fuzz = settings(derandomize=True, deadline=None, max_examples=40)


def damaged(content: bytes, seed: int) -> bytes:
    """The same with bytes flipped or, of odd seeds, some left out, repeated or put in as well."""
    rng, found = random.Random(seed), bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place, size = rng.randrange(len(found) + 1), rng.choice([1, 1, 2, 8, 100])
        match rng.randrange(4) if seed % 2 else 0:
            case 0 if place < len(found):
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                del found[place : place + size]
            case 2:
                found[place:place] = found[place : place + size]
            case 3:
                found[place:place] = rng.randbytes(size)
    return bytes(found)


def nonsense(seed: int, lines: int) -> list[bytes]:
    """Lines of random bytes, and of texts that nobody would write."""
    rng = random.Random(seed)
    sizes = [int(rng.expovariate(1 / 20)) for _ in range(lines)]
    kinds: list[Callable[[int], bytes]] = [
        rng.randbytes,
        lambda size: "".join(rng.choices(ODD, k=size)).encode(),
        lambda size: " ".join(rng.choices(MARKED, k=size // 5)).encode(),
        lambda size: bytes([rng.randrange(256)]) * size,
    ]
    return [rng.choice(kinds)(size).replace(b"\n", b"") for size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of warnings are not kept."""
    log = logging.getLogger("nmt")
    level, propagate, handlers = log.level, log.propagate, [*log.handlers]
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)
    log.propagate, log.handlers[:] = propagate, handlers  # commands have their own


# -------------------------------------------------------------------------------------------------------------- corpus
SIDES = ("de", "en")
TEXT = "Ein Hund\nzwei  Katzen\r\n\nä😀\u2028\n5\t6\n".encode(), b"A dog\ntwo cats\n\xef\xbb\xbfx\nae\nend"
TABLE = "ein Hund\ta dog\r\nzwei\t\t2\nä\tb\tc\n\tx\n".encode()
OBJECTS = rb"""{"de": "a\u00e4", "en": "b"}

{"en": "x\n", "de": "y", "n": [1.5, null]}
{"x": {"de": "c"}, "en": "d", "de": "\ud83d\ude00"}
"""
CORPORA: dict[str, tuple[str, dict[str, bytes], tuple[str, str]]] = {
    "text": ("text", dict(zip(("train.de", "train.en"), TEXT, strict=True)), SIDES),
    "numbered": ("tsv", {"train.tsv": TABLE}, ("2", "1")),
    "named": ("tsv", {"train.tsv": b"en\tde\tid\n" + TABLE}, ("de", "en")),
    "jsonl": ("jsonl", {"train.jsonl": OBJECTS}, SIDES),
}


def lines_in(content: bytes) -> list[bytes]:
    """The lines of a file, cut by hand."""
    *lines, last = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] + [last] * bool(last)


def read_by_hand(kind: str, contents: list[bytes], sides: tuple[str, str]) -> dict[int, Any] | None:
    """The pair of each line by its number, None for a line that holds none; or None, where there is no telling."""
    if any(map(has_carriage_return_lines, contents)):
        return None
    lines = [lines_in(content) for content in contents]
    found: dict[int, Any] = {}
    first = lines[0][0].decode(errors="replace").split("\t") if lines[0] else []
    names, most = sides, len(first)
    if kind == "named":
        if not set(names) <= set(first):
            return None
        names = str(first.index(sides[0]) + 1), str(first.index(sides[1]) + 1)
        del lines[0][0]
    if len({len(side) for side in lines}) > 1:
        return None
    for number, line in enumerate(zip(*lines, strict=True), 2 if kind == "named" else 1):
        try:
            texts: list[Any] = [part.decode() for part in line]
            if kind == "jsonl" and not texts[0].strip():
                continue
            if kind == "jsonl":
                record = json.loads(texts[0])
                texts = [record[side] for side in sides]
            elif kind != "text":
                cells = texts[0].split("\t")
                if len(cells) > most:
                    raise ValueError
                texts = [cells[int(name) - 1] for name in names]
            for text in texts:
                text.encode()  # what is no text, or half a surrogate pair, has no bytes
            found[number] = tuple(texts)
        except (ValueError, LookupError, TypeError, AttributeError):
            found[number] = None
    return found


def read(format: str, *arguments: Any) -> list[LinePair | BadLine]:
    """What a reader finds, in the order of the lines."""
    found: list[LinePair | BadLine] = []
    for item in LINE_READERS[format](*arguments):
        pairs = [] if isinstance(item, BadLine) else item.to_pylist()
        found += (
            [item]
            if isinstance(item, BadLine)
            else [LinePair(*(p[k] for k in ("line", "source", "target"))) for p in pairs]
        )
    return sorted(found, key=lambda line: line.number)


@pytest.mark.parametrize("kind", CORPORA)
def test_each_line_of_a_damaged_file_is_a_pair_or_named(kind: str, folder: Path) -> None:
    """The pairs are those of a slow twin, under the same numbers; all other lines are bad ones, in the same order."""
    format, files, sides = CORPORA[kind]
    outcomes = Counter[str]()
    for seed in range(300):
        contents = [damaged(content, seed + i) for i, content in enumerate(files.values())]
        paths = [folder / name for name in files]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        expected = read_by_hand(kind, contents, sides)
        try:
            items = read(format, *paths, *(() if format == "text" else sides))
        except UserError:
            assert expected is None
            outcomes["refused"] += 1
            continue
        found = {item.number: (item.source, item.target) if isinstance(item, LinePair) else None for item in items}
        assert expected is not None and list(found.items()) == list(expected.items())
        outcomes["bad" if None in expected.values() else "fine"] += 1
    assert outcomes["bad"] > 10 and outcomes["fine"] > 10


@pytest.mark.parametrize("kind", CORPORA)
def test_a_damaged_corpus_is_refused_by_its_first_bad_line_or_read_without_such_lines(kind: str, folder: Path) -> None:
    format, files, sides = CORPORA[kind]
    place = folder / kind
    place.mkdir()
    common = {"format": format, "path": str(place), "source": sides[0], "target": sides[1], "cache": str(folder)}
    for seed in range(20):
        contents = [damaged(content, seed + i) for i, content in enumerate(files.values())]
        for name, content in zip(files, contents, strict=True):
            (place / name).write_bytes(content)
        expected = read_by_hand(kind, contents, sides) or {}
        good = {number: pair for number, pair in expected.items() if pair}
        try:
            pairs = load_pairs(DataConfig(**common, invalid="drop"), "train")
        except UserError:
            assert not good
            continue
        found = {row["line"]: (row["source"], row["target"]) for row in pairs}
        assert found == good and len(pairs) == len(good)
        try:
            assert len(load_pairs(DataConfig(**common), "train")) == len(expected) == len(good)
        except UserError as error:
            first = min(expected.keys() - good.keys())
            assert re.match(rf"{re.escape(str(place))}/train\.\w+:{first}: .*; fix the line", str(error))


@pytest.mark.parametrize("format", ["text", "tsv", "jsonl"])
@fuzz
@given(pairs=st.lists(st.tuples(any_text, any_text), max_size=8), escaped=st.booleans(), crlf=st.booleans())
def test_texts_read_back(format: str, folder: Path, pairs: list[tuple[str, str]], escaped: bool, crlf: bool) -> None:
    """Whatever is in them but what ends a line, or a cell."""
    if format != "jsonl":
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
    assert read(format, *paths, *names) == [LinePair(n, *pair) for n, pair in enumerate(pairs, 1)]


@fuzz
@given(names=st.lists(any_line, min_size=1, max_size=30, unique=True))
def test_a_complaint_is_a_short_line_whatever_it_names(folder: Path, names: list[str]) -> None:
    path = folder / "names"
    path.write_text(json.dumps(dict.fromkeys(names, 1)), encoding="utf-8")
    [bad] = LINE_READERS["jsonl"](path, "no such", "key")
    assert isinstance(bad, BadLine)
    path.write_bytes("\t".join(names).encode() + b"\n")
    with pytest.raises(UserError) as error:
        list(LINE_READERS["tsv"](path, "no such", "key"))
    for message in (bad.reason, str(error.value)):
        assert message.isprintable() and len(message) < 25 * (MAX_VALUE_CHARS + 5) + len(str(path)) + 200


# ----------------------------------------------------------------------------------------------------------- tokenizer
@pytest.mark.parametrize("type", SUBWORDS)
@fuzz
@given(line=any_line)
def test_any_line_comes_back(type: str, line: str) -> None:
    """With spaces for U+2581 and line breaks; in a list that goes to several threads, too."""
    side = make_tokenizer(type).source
    *many, ids = side.encode([line] * 40)
    assert all(other == ids for other in many) and [ids] == side.encode([line])
    assert side.decode(ids) == re.sub("[▁\n\r]", " ", line)
    assert all(0 <= i < side.vocab_size for i in ids)


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@fuzz
@given(line=any_line, words=some_words, seed=st.integers(0, 99))
def test_each_piece_has_its_word(type: str, normalization: str, line: str, words: list[str], seed: int) -> None:
    side = make_tokenizer(type, normalization=normalization).source
    there = len([word for word in line.split(" ") if word])
    for ids in (side.encode([line])[0], side.encode([line], 0.5 * (type in ("bpe", "unigram")), seed)[0]):
        owners = side.word_indices(line, ids)
        assert len(owners) == len(ids) and set(owners) <= {*range(-1, there)}
        known = [owner for owner in owners if owner >= 0]
        assert known == sorted(known) and all(0 <= i < side.vocab_size for i in ids)
    [ids], [owners] = side.encode_words([words])
    assert len(owners) == len(ids) and owners == sorted(owners) and set(owners) <= {*range(len(words))}
    if type == "word":
        assert len(side.normalized_words(line)) == len(side.encode([line])[0])


SCRIPT = """
import sys
from pathlib import Path
from nmt.data.tokenizer import group_by_spaces, load_tokenizer
from nmt.errors import UserError
lines = ["", "der Hund", "▁ a▁b  c\\0\\x07 😀", "x" * 300, "<s> </s> \\u00bd \\ufb01 e\\u0301"] * 8
for folder in sorted(Path(sys.argv[1]).iterdir(), key=lambda folder: int(folder.name)):
    print(folder.name, end=" ", flush=True)
    try:
        side = load_tokenizer(folder).source
    except UserError:
        print("refused", flush=True)
        continue
    for line, ids in [*zip(lines, side.encode(lines)), *zip(lines, side.encode(lines, 0.5, 1))]:
        assert all(0 <= i < side.vocab_size for i in ids)
        assert not set("\\n\\r") & set(side.decode(ids))
        assert len(group_by_spaces(side.pieces([*ids, 3]))[1]) == len(ids) + 1
        assert len(side.word_indices(line, [*ids, 3])) == len(ids) + 1
    print("works", flush=True)
"""


def test_a_damaged_tokenizer_is_refused_or_works(tmp_path: Path) -> None:
    """In a process of its own, for SentencePiece is a library in C++. It ends with the last file, and silently."""
    for seed in range(300):
        side = make_tokenizer(TOKENIZER_TYPES[seed % 4], normalization=("identity", "nmt_nfkc")[seed % 20 == 0]).source
        (tmp_path / "models" / str(seed)).mkdir(parents=True)
        (tmp_path / "models" / str(seed) / "tokenizer.model").write_bytes(damaged(side.model, seed // 4))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "models")]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(tmp_path))
    outcomes = dict(line.split() for line in done.stdout.splitlines() if " " in line.strip())
    assert done.returncode == 0 and len(outcomes) == 300, done.stdout[-50:] + done.stderr
    assert min(Counter(outcomes.values()).values()) > 20, Counter(outcomes.values())


@pytest.mark.parametrize(
    ("type", "old", "new"),
    [
        pytest.param("word", b"der", b"\xff\xfer", id="no text"),
        pytest.param("bpe", b"<0x41>", b"<0xzz>", id="no byte"),
        pytest.param("bpe", b"<0x41>", b"<0x42>", id="another byte"),
        pytest.param("word", b"Hund\x15", b"Hund\x15\x00\x00\xc0\x7f", id="a score that is no number"),
        pytest.param("bpe", b"</s>", b"</t>", id="another special"),
    ],
)
def test_pieces_that_cannot_be_are_refused(tmp_path: Path, type: str, old: bytes, new: bytes) -> None:
    model = make_tokenizer(type).source.model
    place = model.index(old)
    (tmp_path / "tokenizer.model").write_bytes(model[:place] + new + model[place + len(new) :])
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


@pytest.fixture(scope="module")
def of_few_words() -> Translator:
    """A model that knows little and writes <unk> for most."""
    tokenizer = make_tokenizer("word")
    torch.manual_seed(1)
    model = build_model(ModelConfig(embed=8, hidden=8), tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    with torch.no_grad():
        model.output.bias[1] += 3
    search = SearchConfig(beam=2, n_best=2, max_length=8, replace_unknown=True)
    return Translator(model.eval(), tokenizer, search, torch.device("cpu"))


def check(translation: Translation) -> None:
    assert math.isfinite(translation.score) and translation.score <= 0
    assert not set("\n\r") & set(translation.text)
    record = translation.record
    assert json.loads(record.to_json())["target_pieces"] == translation.target_pieces
    check_links(record, record.links(), len(record.source_words), len(record.target_words))


def check_links(record: Record, links: list[Link], source: int, target: int) -> None:
    assert parse_gold_links(format_pharaoh(links), 0, source, target).sure == set(links)


@pytest.mark.parametrize("name", SEARCHES)
@settings(fuzz, max_examples=15)
@given(pairs=st.lists(st.tuples(some_line, any_text), max_size=4), has_prefixes=st.booleans())
def test_a_line_becomes_a_line(
    name: str, models: dict[str, nmt.Model], pairs: list[tuple[str, str]], has_prefixes: bool
) -> None:
    model, lines = models[name], [line for line, _ in pairs]
    prefixes = [prefix[:10] for _, prefix in pairs] if has_prefixes else None
    found = model.translate_n_best(lines, weights=True, prefixes=prefixes)
    assert len(found) == len(lines)
    command = TranslateRun("-", search=model.translator.config)
    for line, options in zip(lines, found, strict=True):
        for option in options:
            check(option)
            assert line.strip() or not option.text
        assert name == "samples" or len({option.text for option in options}) == len(options)
        assert OUTPUT_FORMATS["text"](line, options, command).count("\n") == command.search.n_best
        assert json.loads(OUTPUT_FORMATS["jsonl"](line, options, command))["source"] == line
    assert all(map(math.isfinite, model.score(lines, [options[0].text for options in found])))


@fuzz
@given(lines=st.lists(some_line, min_size=1, max_size=4), entry=any_text)
def test_words_of_the_source_break_no_line(of_few_words: Translator, lines: list[str], entry: str) -> None:
    of_few_words.dictionary = {word: entry for line in lines for word in line.split()[:1]}
    for options in of_few_words.translate(lines):
        for option in options:
            check(option)


def test_unknown_words_that_are_given_stay(of_few_words: Translator) -> None:
    of_few_words.dictionary = {}
    [[option, *_]] = of_few_words.translate(["Die Katze schläft ."], prefixes=["The ocelot \u2581 yawns"])
    assert option.text.startswith("The ocelot yawns ") and option.target_pieces[1] == "▁<unk>"


def run(program: Callable[[], None], place: Path, *arguments: str) -> None:
    """A command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HYDRA_FULL_ERROR", "0")  # the program sets it for itself alone; so it is put back
        patch.setattr(sys, "argv", ["nmt", "device=cpu", *arguments])
        program()


def test_random_bytes_are_translated_line_by_line(home: Path, tmp_path: Path) -> None:
    lines, beginnings = nonsense(1, 200), [line[:20] for line in nonsense(2, 200)]
    (tmp_path / "in").write_bytes(b"\n".join([*lines, b""]))
    (tmp_path / "prefix").write_bytes(b"\n".join([*beginnings, b""]))
    common = (f"checkpoint={home}/runs/mine", "input=in", "search.max_length=80")
    run(translate, tmp_path, *common, "output=out", "search.beam=2", "search.n_best=2", "alignments=links")
    run(translate, tmp_path, *common, "output=begun", "prefix=prefix", "search.beam=1", "format=jsonl")
    texts = (tmp_path / "out").read_bytes().decode().split("\n")
    links = (tmp_path / "links").read_text().split("\n")
    assert len(texts) == len(links) == 2 * len(lines) + 1 and not any("\r" in text for text in texts)
    for text, line in zip(texts, links, strict=True):
        parse_gold_links(line, 0, 10**6, len([word for word in text.split(" ") if word]))
    rows = [json.loads(row) for row in (tmp_path / "begun").read_text(encoding="utf-8").split("\n")[:-1]]
    given = lines_in((tmp_path / "in").read_bytes())
    assert [row["source"] for row in rows] == [line.decode(errors="replace") for line in given]
    assert all(len(row["translations"]) == 1 for row in rows)


# ----------------------------------------------------------------------------------------------------------- alignment
@settings(fuzz, max_examples=30)
@given(pairs=st.lists(st.tuples(some_words, some_words), max_size=4), threshold=st.sampled_from([None, 0.1]))
def test_links_are_between_the_words_given(
    models: dict[str, nmt.Model], pairs: list[tuple[list[str], list[str]]], threshold: float | None
) -> None:
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    records = models["greedy"].translator.align(sources, targets)
    for record, source, target in zip(records, sources, targets, strict=True):
        assert (record.source_words, record.target_words) == (source, target) and math.isfinite(record.score)
        check_links(record, record.links(LinksConfig(threshold=threshold)), len(source), len(target))
        pieces = len(record.source_pieces) - 1, len(record.target_pieces) - 1
        check_links(record, record.links(LinksConfig("pieces", threshold)), *pieces)


def test_random_bytes_are_aligned_line_by_line(home: Path, tmp_path: Path) -> None:
    sides = [nonsense(seed, 200) for seed in (3, 4)]
    for name, lines in zip(SIDES, sides, strict=True):
        (tmp_path / name).write_bytes(b"\n".join([*lines, b""]))
    run(align, tmp_path, f"checkpoint={home}/runs/mine", "source=de", "target=en", "output=out", "max_length=100")
    links = (tmp_path / "out").read_text().split("\n")
    assert len(links) == 201 and sum(map(bool, links)) > 50
    texts = [lines_in((tmp_path / name).read_bytes()) for name in SIDES]
    for line, source, target in zip(links[:-1], *texts, strict=True):
        parse_gold_links(line, 0, *(len(segment_words(side.decode(errors="replace"))) for side in (source, target)))


# ---------------------------------------------------------------------------------------------------------------- gold
GOLD = b"0-0 1p1\r\n\n1?0\t2-1 0-0\n0-1\n" * 3
WORDS = [["x"] * count for count in [7, 0, 9, 5] * 3], [["y"] * count for count in [6, 1, 8, 5] * 3]


def test_damaged_gold_is_within_range_or_named(folder: Path) -> None:
    path, outcomes = folder / "gold", Counter[bool]()
    for seed in range(400):
        path.write_bytes(damaged(GOLD, seed))
        lines = lines_in(path.read_bytes())
        try:
            found = read_gold_links(path, 0, *WORDS)
        except UserError as error:
            assert str(error).isprintable() and len(str(error)) < len(str(path)) + 200
            if not str(error).startswith(f"{path} has {len(lines)} lines for {len(WORDS[0])} pairs"):
                number = int(str(error).removeprefix(f"{path}:").partition(":")[0])
                with pytest.raises(ValueError):
                    parse_gold_links(lines[number - 1].decode(), 0, *(len(side[number - 1]) for side in WORDS))
            outcomes[False] += 1
            continue
        for gold, source, target in zip(found, *WORDS, strict=True):
            assert gold.sure <= gold.possible
            assert all(0 <= s < len(source) and 0 <= t < len(target) for s, t in gold.possible)
        outcomes[True] += 1
    assert min(outcomes.values()) > 20


def test_gold_beside_damaged_text_is_within_range(folder: Path) -> None:
    """Links count words between white space, those of a corpus words between spaces."""
    text = "ein\u00a0Hund\u3000 da\n\n a  b\tc\nx\u2028y z\n".encode()
    place, outcomes = folder / "golden", Counter[bool]()
    place.mkdir()
    data = DataConfig(format="text", path=str(place), cache=str(folder), alignments="links")
    for seed in range(30):
        (place / "train.de").write_bytes(damaged(text, 2 * seed))
        (place / "train.en").write_bytes(text)
        (place / "train.links").write_bytes(damaged(b"0-0 1p1 2-2\n\n0?2 1-1\n2-0\n", seed) if seed % 3 else b"\n" * 4)
        try:
            pairs = load_pairs(data, "train")
        except UserError:
            outcomes[False] += 1
            continue
        for row in pairs:
            source, target = (len([word for word in row[side].split(" ") if word]) for side in ("source", "target"))
            assert all(0 <= s < source and 0 <= t < target for s, t in row["sure"] + row["possible"])
        outcomes[True] += 1
    assert min(outcomes.values()) > 5


# ------------------------------------------------------------------------------------------------------- files of runs
def test_damaged_dictionaries_are_read_or_named(folder: Path) -> None:
    path, outcomes = folder / "dictionary", Counter[bool]()
    for seed in range(300):
        path.write_bytes(damaged("Hund\tdog\r\nKatze\tthe cat\nä\tb\tc\n".encode() * 3, seed))
        lines = [line.decode(errors="replace") for line in lines_in(path.read_bytes())]
        try:
            found = read_dictionary(str(path))
        except UserError as error:
            number = int(str(error).removeprefix(f"{path}:").partition(":")[0])
            assert not re.fullmatch("(?s)[^\t]+\t.+", lines[number - 1])
            outcomes[False] += 1
            continue
        assert found == {source: target for source, _, target in (line.partition("\t") for line in lines)}
        outcomes[True] += 1
    assert min(outcomes.values()) > 20


def weights(run: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_model(str(run)).model.state_dict().items()}


def test_a_damaged_run_is_refused_or_the_same(home: Path, tmp_path: Path) -> None:
    """Whatever byte of its settings, its tokenizer, its manifests and pointers is another."""
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("eval", "tensorboard"))
    names = ("config.yaml", "tokenizer.model", "checkpoints/*/manifest.json", "checkpoints/best", "checkpoints/last")
    wanted = {tuple(weights(step).items()) for step in (run / "checkpoints").glob("step_*")}
    outcomes = Counter[bool]()
    for pattern in names:
        for path in run.glob(pattern):
            content = path.read_bytes()
            for seed in range(14):
                path.write_bytes(damaged(content, seed))
                try:
                    assert tuple(weights(run).items()) in wanted
                    outcomes[True] += 1
                except UserError as error:
                    assert str(run) in str(error)
                    outcomes[False] += 1
            path.write_bytes(content)
    assert min(outcomes.values()) > 5


def test_a_damaged_state_is_refused_or_has_its_types(home: Path, tmp_path: Path) -> None:
    [state, *_] = (home / "runs" / "mine").glob("checkpoints/*/state.json")
    path, outcomes = tmp_path / "state.json", Counter[bool]()
    for seed in range(400):
        path.write_bytes(damaged(state.read_bytes(), seed))
        try:
            found = read_progress(path)
        except UserError as error:
            assert str(error).startswith(f"{path} is damaged or from another version")
            outcomes[False] += 1
            continue
        assert isinstance(found.corpus, str) and all(type(one.step) is int for one in found.best)
        outcomes[True] += 1
    assert min(outcomes.values()) > 20


VALUES = ("null", "[]", "[1, x]", "{}", "{a: 1}", "x", "''", "-1", "0", "1e400", ".nan", "true", "???", "0x" + "f" * 99)
HOSTILE = {
    "digits": "seed: " + "9" * 10**6,
    "a number beyond numbers": "seed: 1" + ":1" * 10**5 + ".5",
    "half a number": "train:\n  max_steps: 1e" + "9" * 10**5,
    "interpolations": "name: '" + "${a:" * 10**5 + "'",
    "depth": "".join(" " * i + "a:\n" for i in range(1000)),
    "dashes": "- " * 10**5,
    "one name": "? " + "x" * 10**6,
    "documents": "---\n" * 10**4,
    "an object": "name: !!python/object/apply:os.getcwd []",
    "bytes": "!!binary " + "A" * 10**6,
    "a sequence": "[1]",
    "colons": ":" * 10**6,
    "sixties": "seed: 1" + ":1" * 500_000,
    "a wide list": "x: [" + "1," * 500_000 + "]",
    "many keys": "".join(f"k{i}: 1\n" for i in range(80_000)),
    "a long number": "seed: 0x" + "f" * 10**6,
    "an escaped interpolation": 'name: "\\x24{oc.env:HOME}"',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_settings_are_refused_soon(name: str, tmp_path: Path) -> None:
    """In seconds, and in little more memory than they have themselves."""
    (tmp_path / "config.yaml").write_text(HOSTILE[name])
    measure_peak_memory()
    before, began = measure_peak_memory(), time.process_time()
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/config.yaml")):
        load_config(tmp_path)
    assert time.process_time() - began < 5
    assert measure_peak_memory() - before < 200e6


def test_a_setting_of_another_kind_is_refused_or_checked(home: Path, tmp_path: Path) -> None:
    """A value of each key is another, and each value is that of several keys."""
    text = (home / "runs" / "mine" / "config.yaml").read_text(encoding="utf-8")
    lines, outcomes = text.splitlines(), Counter[bool]()
    for number, line in enumerate(lines):
        key, value = line.partition(":")[0], VALUES[number * 5 % len(VALUES)]
        changed = [*lines[:number], f"{key}: {value}", *lines[number + 1 :]]
        (tmp_path / "config.yaml").write_text("\n".join(changed), encoding="utf-8")
        try:
            load_config(tmp_path)
            outcomes[True] += 1
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}/config.yaml") and len(str(error).splitlines()) == 1
            outcomes[False] += 1
    assert min(outcomes.values()) > 5


# ------------------------------------------------------------------------------------------------- reports, alignments
pieces = st.lists(any_text, min_size=1, max_size=5).map(lambda found: [*found, "</s>"])


@st.composite
def translations(draw: Any) -> Translation:
    """Of any pieces, with any weights."""
    source, target = draw(pieces), draw(pieces)
    numbers = st.floats(0, 1) | st.sampled_from([math.nan, math.inf])
    size = len(target) * len(source)
    matrix = np.array(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(len(target), len(source))
    return Translation(draw(any_text), source, target, draw(numbers), draw(st.sampled_from([None, matrix])))


@settings(fuzz, max_examples=30)
@given(rows=st.lists(st.tuples(any_line, any_text, translations()), max_size=5), title=any_text)
def test_a_report_has_the_elements_of_a_tame_one(rows: list[tuple[str, str, Translation]], title: str) -> None:
    """Nothing in the data is markup: letters in its place make the same page."""
    sources, references, found = ([row[column] for row in rows] for column in range(3))
    measures = compute_scores([one.text for one in found], references) | {"any": title}
    report = PageReader(build_report(title, measures, sources, references, found))
    tame = [" ".join("x" for _ in segment_words(source)) for source in sources]
    plain = PageReader(
        build_report("x", measures | {"any": "x"}, tame, ["x"] * len(rows), [Translation("x")] * len(rows))
    )
    assert report.elements == plain.elements and report.policy == plain.policy
    assert report.text["script"] == plain.text["script"] and report.text["style"] == plain.text["style"]
    assert sorted(pair["line"] for pair in report.data) == [*range(1, len(rows) + 1)]
    for pair in report.data:
        source, reference, translation = rows[pair["line"] - 1]
        record = translation.record
        assert (pair["reference"], pair["source"]) == (reference, restore_unknown_words(source, record.source_words))
        assert pair["translation"] == restore_unknown_words(translation.text, record.target_words)


@fuzz
@given(found=st.lists(translations(), max_size=4))
def test_alignments_read_back(found: list[Translation]) -> None:
    """JSON to the last bit but for what is not finite; links of Pharaoh; arrays but for zeros at the ends of words."""
    records = [translation.record for translation in found]
    *lines, end = write_alignments("x.jsonl", records).decode().split("\n")
    *links, last = write_alignments("x", records).decode().split("\n")
    assert end == last == "" and len(lines) == len(links) == len(records)
    arrays = np.load(io.BytesIO(write_alignments("x.npz", records)), allow_pickle=False)
    for number, (record, line, link) in enumerate(zip(records, lines, links, strict=True)):
        read = json.loads(line)
        for name in ("source_pieces", "target_pieces", "source_words", "target_words"):
            assert read[name] == getattr(record, name)
            assert arrays[f"{number}/{name}"].tolist() == [text.rstrip("\0") for text in read[name]]
        assert read["score"] == (record.score if math.isfinite(record.score) else None)
        if record.weights is not None:
            again = np.array(read["weights"], dtype=float)
            assert np.array_equal(again, np.where(np.isfinite(record.weights), record.weights, np.nan), equal_nan=True)
        assert parse_gold_links(link, 0, len(record.source_words), len(record.target_words)).sure == set(record.links())
