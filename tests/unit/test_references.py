"""Several references for each sentence: reading them, and scores that use them all."""

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import WORDS
from sacrebleu.metrics import BLEU, CHRF, TER

from nmt.config.data import DataConfig, EvaluationData
from nmt.data.corpus import load_pairs
from nmt.data.references import collect_references, load_further_references
from nmt.errors import UserError
from nmt.evaluation.metrics import (
    OVERLAP_KINDS,
    bleu_by_length,
    compute_scores,
    paired_bootstrap,
    score_by_overlap,
)
from nmt.evaluation.seeds import compare_over_seeds

METRICS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
SOURCES = ["eins", "zwei", "drei", "vier"]
SIDES = {
    "de": SOURCES,
    "en": ["one", "two", "three", ""],
    "en1": ["a one", "", "a three", ""],
    "en2": ["the one", "  ", "", "four"],
}
REFERENCES = [["one", "a one", "the one"], ["two"], ["three", "a three"], ["four"]]


def make_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(count)]


def make_corpus(most: int) -> tuple[list[str], list[list[str]]]:
    """Return translations, and up to `most` references of each."""
    rng = random.Random(most)
    further = [make_texts(60, seed) for seed in range(2, most + 2)]
    return make_texts(60, 1), [list(own[: rng.randint(1, most)]) for own in zip(*further, strict=True)]


# ------------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize("most", [1, 2, 4])
def test_scores_are_those_of_sacrebleu(most: int) -> None:
    translations, references = make_corpus(most)
    streams = [[own[n] if n < len(own) else None for own in references] for n in range(most)]
    scores = compute_scores(translations, references)
    for name, build in METRICS.items():
        metric = build()
        assert scores[name] == metric.corpus_score(translations, streams).score  # type: ignore[arg-type]
        assert scores["signatures"][name] == str(metric.get_signature())
    assert f"nrefs:{1 if most == 1 else 'var'}|" in scores["signatures"]["bleu"]
    kinds = [kind for kind in OVERLAP_KINDS.values() for _ in range(20)]
    for number, part in enumerate(score_by_overlap(kinds, translations, references, "13a").values()):
        rows = slice(20 * number, 20 * number + 20)
        own_streams = [stream[rows] for stream in streams]
        for name in ("bleu", "chrf"):
            assert part[name] == METRICS[name]().corpus_score(translations[rows], own_streams).score
    [(_, count, score)] = bleu_by_length(["x"] * 60, translations, references)
    assert (count, score) == (60, scores["bleu"])


def test_comparisons_use_all_references() -> None:
    translations, references = make_corpus(3)
    better = [
        own[-1] if row % 2 else text for row, (text, own) in enumerate(zip(translations, references, strict=True))
    ]
    expected = {"a": compute_scores(translations, references), "b": compute_scores(better, references)}
    by_runs, signatures = paired_bootstrap({"a": translations, "b": better}, references)
    by_seeds, signatures_by_seeds = compare_over_seeds({"a": [translations, better], "b": [better]}, references)
    for name in METRICS:
        for system, scores in expected.items():
            assert by_runs[system][name].score == pytest.approx(scores[name])
            assert by_seeds[system][name].scores[0] == pytest.approx(scores[name])
        assert "nrefs:var" in signatures[name] and "nrefs:var" in signatures_by_seeds[name]
    assert by_runs["b"]["bleu"].p_value is not None and by_runs["b"]["bleu"].p_value < 0.01


# -------------------------------------------------------------------------------------------------------------- files
def write_text(folder: Path) -> None:
    for name, lines in SIDES.items():
        (folder / f"test.{name}").write_text("".join(f"{line}\n" for line in lines))


def write_compressed_shards(folder: Path) -> None:
    for name, lines in SIDES.items():
        for shard in range(2):
            text = "".join(f"{line}\n" for line in lines[2 * shard : 2 * shard + 2])
            (folder / f"test.{shard}.{name}.gz").write_bytes(gzip.compress(text.encode()))


def write_tsv(folder: Path) -> None:
    rows = [[*SIDES], *zip(*SIDES.values(), strict=True)]
    (folder / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))


def write_jsonl(folder: Path) -> None:
    rows = [dict(zip(SIDES, row, strict=True)) for row in zip(*SIDES.values(), strict=True)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(folder: Path) -> None:
    pq.write_table(pa.table(SIDES), folder / "test.parquet")


WRITERS: dict[str, Callable[[Path], None]] = {
    "text": write_text,
    "text, shards": write_compressed_shards,
    "tsv": write_tsv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def read_references(data: DataConfig, names: list[str]) -> list[list[str]]:
    return collect_references(load_pairs(data, "test"), *load_further_references(data, names).values())


@pytest.mark.parametrize("kind", WRITERS)
def test_references_are_read_in_every_format(kind: str, tmp_path: Path) -> None:
    """An empty line is no reference, unless the sentence has no other."""
    WRITERS[kind](tmp_path)
    data = DataConfig(kind.split(",")[0], str(tmp_path), cache=str(tmp_path / "cache"))
    assert read_references(data, ["en1", "en2"]) == REFERENCES
    assert read_references(data, ["en1"])[3] == [""]
    assert read_references(data, []) == [[text] for text in SIDES["en"]]
    reordered = read_references(replace(data, target="en2"), ["en1", "en"])
    assert [sorted(own) for own in reordered] == [sorted(own) for own in REFERENCES]


def test_references_are_read_beside_gold_links(tmp_path: Path) -> None:
    """The links are those of the target."""
    write_text(tmp_path)
    (tmp_path / "test.links").write_text("0-0\n0-0\n0-0\n\n")
    data = DataConfig("text", str(tmp_path), alignments="links", cache=str(tmp_path / "cache"))
    assert "sure" in load_pairs(data, "test").column_names and read_references(data, ["en1", "en2"]) == REFERENCES


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["en1", "en3"], {}, r"data\.references=\[en3\]: .*/test\.en3 does not exist"),
        (["short"], {}, r"data\.references=\[short\]: .*/test\.de has 4 lines and .*/test\.short has 3; each line"),
        (["en"], {}, r"data\.references has en, which is data\.target; list only"),
        (["en1"], {"invalid": "drop"}, r"data\.references needs data\.invalid=refuse"),
        (["en7"], {"format": "tsv"}, r"data\.references=\[en7\]: .*no column 'en7' in the first line"),
        (["en1"], {"format": "toy", "path": None}, r"data\.references=\[en1\]: .*the built-in corpus has de and en"),
    ],
)
def test_references_that_cannot_be_read(
    names: list[str], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_text(tmp_path)
    write_tsv(tmp_path)
    (tmp_path / "test.short").write_text("x\n" * 3)
    data = DataConfig(**{"format": "text", "path": str(tmp_path), "cache": str(tmp_path / "cache")} | settings)
    with pytest.raises(UserError, match=message):
        load_further_references(data, names)


def test_reference_is_listed_once() -> None:
    with pytest.raises(UserError, match="data.references has en1 more than once"):
        EvaluationData(references=["en1", "en2", "en1"])
