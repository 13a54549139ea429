"""What an evaluation leaves: files in the folder of the run, and lines on standard output."""

import json
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nmt.decoding.alignment import restore_unknown_words
from nmt.decoding.translation import Translation
from nmt.errors import UserError
from nmt.evaluation.heads import WordWeights
from nmt.evaluation.metrics import format_number
from nmt.evaluation.plot import draw_heat_map
from nmt.evaluation.report import build_report
from nmt.system.files import replacing_folder, write_atomically
from nmt.system.text import echo, replace_nonfinite

log = logging.getLogger("nmt")
MAX_PICTURES = 4  # of alignments
SHOWN_EXAMPLES = 4  # translations printed at the end
DECIMALS = dict.fromkeys(("loss", "ppl", "accuracy", "aer", "entropy", "erasure_tau", "erasure_aer"), 4)
DECIMALS |= dict.fromkeys(("bleu", "chrf", "ter", "exact_match", "sentences_per_second"), 2)  # of printed metrics


class Evaluation(NamedTuple):
    """A model's translations of a split, and their metrics."""

    run: Path
    results: Path  # folder of the result files
    sources: list[str]
    references: list[str]
    translations: list[Translation]
    metrics: dict[str, Any]  # content of metrics.json


def make_results_folder(folder: Path) -> None:
    """Create the folder of the results before the work, which an error after it would waste.

    Raises:
        UserError: its parent is a symbolic link, in a run of someone else perhaps to files of the user.
    """
    if folder.parent.is_symlink():
        raise UserError(f"{folder.parent} is a symbolic link; results are not written through links, so remove it")
    folder.mkdir(parents=True, exist_ok=True)


def write_results(evaluation: Evaluation, title: str, choices: Sequence[WordWeights]) -> None:
    """Replace the folder of results: translations, alignments, metrics, the report, and pictures of alignments."""
    run, _, sources, references, translations, metrics = evaluation
    files = {
        "translations.txt": (translation.text + "\n" for translation in translations),
        "alignments.jsonl": (translation.record.to_json() + "\n" for translation in translations),
        "report.html": [build_report(title, metrics, sources, references, translations, choices)],
        "metrics.json": [json.dumps(replace_nonfinite(metrics), indent=1, ensure_ascii=False), "\n"],
    }
    with replacing_folder(evaluation.results) as folder:
        for name, parts in files.items():
            write_atomically(folder / name, parts)
        try:
            draw_heat_maps(folder, sources, translations)
        except UserError as error:  # matplotlib is optional
            log.warning(f"no pictures were drawn: {error}")


def draw_heat_maps(folder: Path, sources: list[str], translations: list[Translation]) -> None:
    """Draw word alignments of the first translations that are not empty."""
    weights = ((row, translation.record.word_weights()) for row, translation in enumerate(translations))
    shown = ((row, weights_TS) for row, weights_TS in weights if weights_TS is not None and weights_TS.size)
    for row, weights_TS in islice(shown, MAX_PICTURES):
        record = translations[row].record
        source_words = restore_unknown_words(sources[row], record.source_words)
        target_words = restore_unknown_words(translations[row].text, record.target_words)
        draw_heat_map(folder / f"alignment_{row + 1}.png", source_words, target_words, weights_TS)


def print_evaluation(evaluation: Evaluation) -> None:
    """Print examples, metrics and the paths of the results."""
    run, results, sources, references, translations, metrics = evaluation
    for source, reference, translation in islice(zip(sources, references, translations, strict=True), SHOWN_EXAMPLES):
        echo(f"source     {source}\nreference  {reference}\nmodel      {translation.text}\n")
    rows: list[tuple[str, Any]] = []
    for name, decimals in DECIMALS.items():
        if name in metrics:
            rows.append((name, "-" if metrics[name] is None else format_number(metrics[name], decimals)))
    rows += metrics["signatures"].items()
    rows += [("alignment picture", path) for path in sorted(results.glob("alignment_*.png"))[:1]]
    rows += [("results", results.parent), ("run", run), ("page", results / "report.html")]
    for name, value in rows:
        echo(f"{name:<22}{value}")
