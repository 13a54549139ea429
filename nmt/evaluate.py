"""Measure a trained model on a split of its own data, or of another corpus.

python -m nmt.evaluate checkpoint=runs/NAME
python -m nmt.evaluate checkpoint=runs/NAME data.split=valid search.beam=1
python -m nmt.evaluate 'compare=[runs/A,runs/B]'
python -m nmt.evaluate --help
"""

import json
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nmt.config import EvaluateRun
from nmt.data.corpus import column, load_pairs
from nmt.data.encoding import content_key, gold_key
from nmt.data.processed import warn_of_evaluation
from nmt.decoding.alignment import as_written
from nmt.decoding.translator import Translation, Translator, check_scores, warn_of_cuts
from nmt.errors import UserError
from nmt.evaluation.comparison import MANY, compare, show, write
from nmt.evaluation.metrics import choose_tokenizer, in_short, resolve_tokenizer, scores
from nmt.evaluation.plot import heat_map
from nmt.evaluation.report import page
from nmt.model.kernels.cuda_graphs import maybe_graph
from nmt.runtime.cli import main
from nmt.runtime.device import choose_precision, move_model
from nmt.runtime.distributed import (
    OTHER_MODEL,
    OTHER_TEXT,
    broadcast_from_rank0,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank,
)
from nmt.runtime.files import replacing_files, write_atomically
from nmt.runtime.logging import log, log_to_stderr
from nmt.runtime.text_io import echo, finite_or_none
from nmt.training.checkpoint import find_checkpoint, load_config, load_model
from nmt.training.validation import evaluate_loss

EXAMPLES = 4  # translations shown at the end
RESULTS = ("metrics.json", "translations.txt", "alignments.jsonl", "report.html", "alignment_*.png")  # in eval/<split>
SETTINGS = ("checkpoint", "precision", "bleu_tokenizer", "data", "search")  # what metrics depend on


def draw(folder: Path, sources: list[str], translations: list[Translation], limit: int) -> list[Path]:
    """Heat maps, word by word, of the first translations that are not empty."""
    paths: list[Path] = []
    for number, (source, translation) in enumerate(zip(sources, translations, strict=True), 1):
        if len(paths) == limit:
            break
        record = translation.record
        weights = record.word_weights()
        if weights is None or not weights.size:
            continue
        paths.append(folder / f"alignment_{number}.png")
        words = as_written(source, record.source_words), as_written(translation.text, record.target_words)
        heat_map(paths[-1], *words, weights)
    return paths


@main("evaluate")
def evaluate(command: EvaluateRun) -> float | None:
    """Returns BLEU, of several runs that of the last one."""
    log_to_stderr()
    with process_group(command.device) as device:
        if command.compare:
            return compare_runs(command, device)
        measured = measure(command, device)
        if not rank():
            report(measured)
    return measured.scores["bleu"]


class Measured(NamedTuple):
    """A model's translations of a split and how good they are."""

    run: Path
    results: Path  # folder
    sources: list[str]
    references: list[str]
    translations: list[str]
    scores: dict[str, Any]
    pictures: list[Path]


def compare_runs(command: EvaluateRun, device: torch.device) -> float | None:
    """Measure several runs, compare them, and show what was found. Returns the BLEU of the last one."""
    bleu_tokenizer = local_rank0_first(lambda: check_text(command))
    command = replace(command, bleu_tokenizer=bleu_tokenizer)
    found = [measure(replace(command, checkpoint=path, compare=[]), device) for path in command.compare]
    first = found[0]
    if not rank():
        systems = {path: measured.translations for path, measured in zip(command.compare, found, strict=True)}
        trained = replace(load_config(first.run).data, cache=command.data.cache)
        comparison = compare(systems, first.sources, first.references, trained, bleu_tokenizer)
        echo(show(comparison))
        echo("\n± 95% confidence; p: how likely chance makes as large a difference in this direction; * below 0.05\n")
        for name, signature in comparison.signatures.items():
            echo(f"{name:<22}{signature}")
        settings = [{name: measured.scores[name] for name in SETTINGS} for measured in found]
        for written in write(comparison, dict(zip(command.compare, settings, strict=True)), first.results):
            echo(f"{'results':<22}{written}")
    return found[-1].scores["bleu"]


def check_text(command: EvaluateRun) -> str:
    """See that runs can be compared, before they are measured. Returns BLEU's tokenizer for all of them.

    Raises:
        UserError: two are one, or their sentences differ, or are too many; or no tokenizer of BLEU is that of all.
    """
    tokenizers: dict[str, str] = {}
    texts: dict[Path, tuple[list[str], list[str]]] = {}
    for path in command.compare:
        folder = find_checkpoint(path)[0].resolve()
        if folder in texts:
            raise UserError(f"compare=: {path} is of a run that was named before, whose eval/ has room for one of them")
        run = load_config(folder)
        data = command.data.over(run.data)
        pairs = load_pairs(data, data.split)
        texts[folder] = list(column(pairs, "source")), list(column(pairs, "target"))
        if texts[folder] != next(iter(texts.values())):
            raise UserError(
                f"compare=: the split {data.split} of {path} is other text than that of {command.compare[0]}; give "
                "data.* that suit all, and models of one direction"
            )
        if len(pairs) > MANY:
            raise UserError(f"compare= is for up to {MANY:,} sentences, and data.split={data.split} has {len(pairs):,}")
        tokenizers[path] = choose_tokenizer(command.bleu_tokenizer or run.bleu_tokenizer, texts[folder][1])
    if len(set(tokenizers.values())) > 1:
        found = ", ".join(f"{path}: {tokenizer}" for path, tokenizer in tokenizers.items())
        raise UserError(f"compare=: the runs have BLEU by different tokenizers ({found}); write bleu_tokenizer=NAME")
    return next(iter(tokenizers.values()))


def measure(command: EvaluateRun, device: torch.device) -> Measured:
    """Measure a run and write the results into it."""
    assert command.checkpoint is not None
    checkpoint = command.checkpoint
    model, tokenizer, run, folder, steps, key = local_rank0_first(lambda: load_model(checkpoint, command.average))
    check_same_on_all_ranks(lambda: key, OTHER_MODEL)
    precision = choose_precision(command.precision, device)
    move_model(model, precision, device)
    data = command.data.over(run.data)
    pairs = local_rank0_first(lambda: load_pairs(data, data.split))
    check_same_on_all_ranks(lambda: (content_key(pairs, tokenizer), gold_key(pairs)), OTHER_TEXT)
    sources, references = list(column(pairs, "source")), list(column(pairs, "target"))

    bleu_tokenizer = broadcast_from_rank0(
        lambda: resolve_tokenizer(command.bleu_tokenizer or run.bleu_tokenizer, references)
    )
    results = folder / "eval" / data.split
    broadcast_from_rank0(lambda: make_results(results))  # fails before the work, where it must fail
    measures: dict[str, Any] = evaluate_loss(model, tokenizer, pairs, device)
    search = command.search.after(run.data)
    translator = Translator(maybe_graph(model, device), tokenizer, search, device)
    started = time.perf_counter()
    found = [options[0] for options in translator.translate(sources, keep_weights=True, progress=True)]
    check_scores(found, 1)
    warn_of_cuts(found, search, 1)
    warn_of_evaluation(data, pairs, [translation.text for translation in found])
    measures["sentences_per_second"] = len(sources) / (time.perf_counter() - started)
    measures |= scores([translation.text for translation in found], references, bleu_tokenizer)
    measures |= {
        "sentences": len(sources),
        "checkpoint": " ".join(step.name for step in steps),
        "precision": precision,
        "bleu_tokenizer": bleu_tokenizer,
        "data": asdict(data),
        "search": asdict(search),
    }
    measured = Measured(folder, results, sources, references, [t.text for t in found], measures, [])
    if rank():
        return measured
    title = f"{folder.resolve().name}, {data.split}"
    with replacing_files(results, *RESULTS) as new:
        write_atomically(new / "translations.txt", (translation.text + "\n" for translation in found))
        write_atomically(new / "alignments.jsonl", (t.record.to_json() + "\n" for t in found))
        write_atomically(new / "report.html", [page(title, measures, sources, references, found)])
        write_atomically(
            new / "metrics.json", [json.dumps(finite_or_none(measures), indent=1, ensure_ascii=False), "\n"]
        )
        try:
            pictures = draw(new, sources, found, command.pictures)
            measured.pictures.extend(results / picture.name for picture in pictures)
        except UserError as error:  # matplotlib is an extra; everything else is written
            log.warning(f"no pictures: {error}")
    return measured


def make_results(folder: Path) -> None:
    """Make `eval/<split>` of a run. It is no link: a run may be somebody else's, and files there are replaced.

    Raises:
        UserError: it is a symbolic link, or its parent is.
    """
    for path in (folder.parent, folder):
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, through which no results are written; remove it")
    folder.mkdir(parents=True, exist_ok=True)


def report(found: Measured) -> None:
    """What a user wants to see first, on standard output."""
    lines = zip(found.sources, found.references, found.translations, strict=True)
    for source, reference, translation in islice(lines, EXAMPLES):
        echo(f"source     {source}\nreference  {reference}\nmodel      {translation}\n")
    names = ("loss", "ppl", "accuracy", "aer", "entropy", "bleu", "chrf", "ter", "sentences_per_second")
    for name in names:
        value = found.scores[name]
        shown = "-" if value is None else f"{value:.4f}" if name in names[:5] else f"{value:.2f}"
        echo(f"{name:<22}" + (in_short(value) if name == "ppl" and value >= 1e6 else shown))
    for name, signature in found.scores["signatures"].items():
        echo(f"{name:<22}{signature}")
    if found.pictures:
        echo(f"{'alignment picture':<22}{found.pictures[0]}")
    echo(f"{'results':<22}{found.results.parent}\n{'run':<22}{found.run}\n{'page':<22}{found.results / 'report.html'}")


if __name__ == "__main__":
    evaluate()
