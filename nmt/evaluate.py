"""Measure a trained model on a split of its own data, or of another corpus.

python -m nmt.evaluate checkpoint=runs/NAME
python -m nmt.evaluate checkpoint=runs/NAME data.split=valid search.beam=1
python -m nmt.evaluate --help
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint import load_model
from nmt.config import EvaluateRun, main
from nmt.data.corpus import column, load_pairs
from nmt.distributed import choose_precision, in_turn, joined, log, log_to_stderr, place, rank, told
from nmt.errors import UserError
from nmt.files import finite, write_atomically
from nmt.metrics import looks_tokenised, scores
from nmt.model.replay import fastest
from nmt.plot import heat_map
from nmt.report import page
from nmt.translator import Translation, Translator, warn_of_cuts
from nmt.validation import evaluate_loss

EXAMPLES = 4  # translations shown at the end


def draw(folder: Path, translations: list[Translation], limit: int) -> list[Path]:
    """Heat maps, word by word, of the first translations that are not empty."""
    for old in folder.glob("alignment_*.png"):
        old.unlink()
    paths: list[Path] = []
    for number, translation in enumerate(translations, 1):
        if len(paths) == limit:
            break
        record = translation.record
        weights = record.word_weights()
        if weights is None or not weights.size:
            continue
        paths.append(folder / f"alignment_{number}.png")
        heat_map(paths[-1], record.source_words, record.target_words, weights)
    return paths


@main("evaluate")
def evaluate(command: EvaluateRun) -> float | None:
    """Returns BLEU."""
    log_to_stderr()
    with joined(command.device) as device:
        return measure(command, device)


def measure(command: EvaluateRun, device: torch.device) -> float | None:
    """Measure, write the results into the run, and show them. Returns BLEU."""
    assert command.checkpoint is not None
    checkpoint = command.checkpoint
    model, tokenizer, run, folder, steps = in_turn(lambda: load_model(checkpoint, command.average))
    precision = choose_precision(command.precision, device)
    place(model, precision, device)
    data = command.data.over(run.data)
    pairs = in_turn(lambda: load_pairs(data, data.split))
    sources, references = list(column(pairs, "source")), list(column(pairs, "target"))
    if data.format != "toy" and looks_tokenised(references):
        log.warning("the references look tokenised (spaces before punctuation); BLEU compares with raw text elsewhere")

    results = folder / "eval" / data.split
    told(lambda: results.mkdir(parents=True, exist_ok=True))  # fails before the work, where it must fail
    measures: dict[str, Any] = evaluate_loss(model, tokenizer, pairs, device)
    translator = Translator(fastest(model, device), tokenizer, command.search, device)
    started = time.perf_counter()
    found = [options[0] for options in translator.translate(sources, keep_weights=True, progress=True)]
    warn_of_cuts(found, command.search, 1)
    measures["sentences_per_second"] = len(sources) / (time.perf_counter() - started)
    measures |= scores([translation.text for translation in found], references)
    measures |= {
        "sentences": len(sources),
        "checkpoint": " ".join(step.name for step in steps),
        "precision": precision,
        "data": asdict(data),
        "search": asdict(command.search),
    }
    if rank():
        return measures["bleu"]
    write_atomically(results / "translations.txt", (translation.text + "\n" for translation in found))
    write_atomically(results / "alignments.jsonl", (t.record.to_json() + "\n" for t in found))
    write_atomically(results / "metrics.json", [json.dumps(finite(measures), indent=1, ensure_ascii=False), "\n"])
    title = f"{folder.name}, {data.split}"
    write_atomically(results / "report.html", [page(title, measures, sources, references, found)])
    try:
        pictures = draw(results, found, command.pictures)
    except UserError as error:  # matplotlib is an extra; everything else is written
        log.warning(f"no pictures: {error}")
        pictures = []
    report(sources, references, found, measures, pictures, folder)
    print(f"{'page':<22}{results / 'report.html'}")
    return measures["bleu"]


def report(
    sources: list[str], references: list[str], found: list[Translation], measures: dict[str, Any],
    pictures: list[Path], folder: Path,
) -> None:  # fmt: skip
    """What a user wants to see first, on standard output."""
    for source, reference, translation in list(zip(sources, references, found, strict=True))[:EXAMPLES]:
        print(f"source     {source}\nreference  {reference}\nmodel      {translation.text}\n")
    names = ("loss", "ppl", "accuracy", "aer", "entropy", "bleu", "chrf", "ter", "sentences_per_second")
    for name in names:
        value = measures[name]
        print(f"{name:<22}" + ("-" if value is None else f"{value:.4f}" if name in names[:5] else f"{value:.2f}"))
    for name, signature in measures["signatures"].items():
        print(f"{name:<22}{signature}")
    if pictures:
        print(f"{'alignment picture':<22}{pictures[0]}")
    print(f"{'results':<22}{folder / 'eval'}\n{'run':<22}{folder}")


if __name__ == "__main__":
    evaluate()
