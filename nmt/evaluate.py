"""Evaluate a trained model on a split of its own data or of another corpus, or compare several models.

python -m nmt.evaluate checkpoint=runs/NAME
python -m nmt.evaluate checkpoint=runs/NAME data.split=valid search.beam=1
python -m nmt.evaluate 'compare=[runs/A,runs/B]'
python -m nmt.evaluate --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import glob
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nmt.config import EvaluateRun
from nmt.data.corpus import get_gold_links, iter_column, load_pairs
from nmt.data.encoding import content_key, gold_key, text_key
from nmt.data.mixing import load_training_text
from nmt.data.overlap import find_overlap
from nmt.data.preprocessed_text import warn_if_evaluation_is_preprocessed
from nmt.data.references import collect_references, load_further_references
from nmt.decoding.alignment import restore_unknown_words
from nmt.decoding.translation import Translation, check_scores, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.evaluation.comparison import (
    MAX_COMPARED_SENTENCES,
    compare_systems,
    format_comparison,
    has_seeds,
    write_comparison,
)
from nmt.evaluation.erasure import measure_erasure, normalize_losses
from nmt.evaluation.heads import WordWeights, compute_head_weights
from nmt.evaluation.literal_counts import describe_literals, measure_literals
from nmt.evaluation.metrics import (
    choose_bleu_tokenizer,
    compute_scores,
    format_perplexity,
    score_by_overlap,
    sentence_chrf,
)
from nmt.evaluation.plot import draw_heat_map
from nmt.evaluation.report import MAX_PAIRS_WITH_HEADS, build_report, sort_worst_first
from nmt.model.kernels.cuda_graphs import with_cuda_graphs
from nmt.runs.checkpoint import CONFIG_FILE, find_checkpoint, load_config, load_model
from nmt.system.cli import main
from nmt.system.device import choose_precision, prepare_model
from nmt.system.distributed import (
    MODEL_MISMATCH,
    TEXT_MISMATCH,
    broadcast_from_rank0,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank,
)
from nmt.system.files import replacing_files, write_atomically
from nmt.system.hub_client import is_hub_address, parse_address
from nmt.system.logging import log, log_to_stderr
from nmt.system.messages import pluralize
from nmt.system.text_io import echo, replace_nonfinite
from nmt.training.validation import evaluate_loss

OVERLAP_LABELS = {"seen": "in training text", "near": "one word from it", "unseen": "not in training text"}
SHOWN_EXAMPLES = 4  # translations printed at the end
RUNS_LEGEND = (
    "± half of the 95% confidence interval; p: probability of a difference at least this large in this direction by "
    "chance"
)
SEEDS_LEGEND = (
    "mean ± standard deviation over runs; difference ± half of its 95% confidence interval over seeds and sentences; "
    "p: probability of a difference at least this large by chance; seeds needed: runs of each system with which such a "
    "difference has p < 0.05 in 4 of 5 experiments"
)
METRIC_SETTINGS = ("checkpoint", "precision", "bleu_tokenizer", "data", "search")  # settings that metrics depend on
RESULT_FILES = (  # in eval/<split>
    "metrics.json",
    "translations.txt",
    "alignments.jsonl",
    "report.html",
    "alignment_*.png",
)


class Evaluation(NamedTuple):
    """A model's translations of a split, and their metrics."""

    run: Path
    results: Path  # folder of the result files
    sources: list[str]
    references: list[list[str]]
    translations: list[str]
    metrics: dict[str, Any]  # content of metrics.json
    pictures: list[Path]


@main("evaluate")
def evaluate(command: EvaluateRun) -> float | None:
    """Return BLEU; with several runs, that of the last one."""
    log_to_stderr()
    with process_group(command.device) as device:
        if command.compare:
            return compare_runs(command, device)
        evaluation = evaluate_run(command, device)
        if not rank():
            print_evaluation(evaluation)
    return evaluation.metrics["bleu"]


def compare_runs(command: EvaluateRun, device: torch.device) -> float | None:
    """Evaluate several runs, then print and write their comparison. Returns the BLEU of the last run."""
    systems = {name: expand_runs(name) for name in command.compare}
    paths = [path for runs in systems.values() for path in runs]
    bleu_tokenizer = local_rank0_first(lambda: check_comparable(command, paths))
    command = replace(command, bleu_tokenizer=bleu_tokenizer)
    evaluations = {path: evaluate_run(replace(command, checkpoint=path, compare=[]), device) for path in paths}
    first, *_, last = evaluations.values()
    if not rank():
        texts = {name: [evaluations[path].translations for path in runs] for name, runs in systems.items()}
        comparison = compare_systems(texts, first.sources, first.references, bleu_tokenizer)
        echo(format_comparison(comparison))
        echo(f"\n{SEEDS_LEGEND if has_seeds(texts) else RUNS_LEGEND}; * p < 0.05\n")
        for name, signature in comparison.signatures.items():
            echo(f"{name:<22}{signature}")
        settings = {
            path: {name: evaluation.metrics[name] for name in METRIC_SETTINGS}
            for path, evaluation in evaluations.items()
        }
        for path in write_comparison(comparison, settings, first.results):
            echo(f"{'results':<22}{path}")
    return last.metrics["bleu"]


def expand_runs(name: str) -> list[str]:
    """Return the runs of a system: a run folder, or the run folders that a pattern such as `runs/mine/*` matches.

    Raises:
        UserError: the pattern matches no run.
    """
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    paths = sorted(path for path in glob.glob(name) if Path(path, CONFIG_FILE).is_file())
    if not paths:
        raise UserError(f"compare=: {name} matches no run folder")
    return paths


def check_comparable(command: EvaluateRun, paths: Sequence[str]) -> str:
    """Check that runs can be compared, before they are evaluated. Returns the BLEU tokenizer to use for all of them.

    Raises:
        UserError: a run is named twice, sentences differ or are too many, or runs have different BLEU tokenizers.
    """
    tokenizers: dict[str, str] = {}
    texts: dict[Path, tuple[list[str], list[list[str]]]] = {}
    for path in paths:
        folder = find_checkpoint(path)[0].resolve()
        if folder in texts:
            raise UserError(
                f"compare=: {path} belongs to a run that is already listed, and eval/ of a run holds one evaluation "
                "per split; list each run once"
            )
        run = load_config(folder)
        data = command.data.apply_to(run.data)
        pairs = load_pairs(data, data.split)
        further = load_further_references(data, command.data.references)
        texts[folder] = list(iter_column(pairs, "source")), collect_references(pairs, *further.values())
        if texts[folder] != next(iter(texts.values())):
            raise UserError(
                f"compare=: the split {data.split} of {path} has different text from that of {paths[0]}; "
                "set data.* to text that fits all models, which must have the same direction"
            )
        if len(pairs) > MAX_COMPARED_SENTENCES:
            raise UserError(
                f"data.split={data.split} has {len(pairs):,} sentences; compare= supports up to "
                f"{MAX_COMPARED_SENTENCES:,}"
            )
        tokenizers[path] = choose_bleu_tokenizer(command.bleu_tokenizer or run.bleu_tokenizer, texts[folder][1])
    if len(set(tokenizers.values())) > 1:
        listing = ", ".join(f"{path}: {tokenizer}" for path, tokenizer in tokenizers.items())
        raise UserError(
            f"compare=: the runs have different BLEU tokenizers ({listing}); set one for all with bleu_tokenizer=NAME"
        )
    return next(iter(tokenizers.values()))


def evaluate_run(command: EvaluateRun, device: torch.device) -> Evaluation:
    """Evaluate a run and write the result files to `eval/<split>` in its folder; in `runs/OWNER/NAME` for the hub's."""
    assert command.checkpoint is not None
    checkpoint = command.checkpoint
    model, tokenizer, run, folder, steps, key = local_rank0_first(lambda: load_model(checkpoint, command.average))
    check_same_on_all_ranks(lambda: key, MODEL_MISMATCH)
    precision = choose_precision(command.precision, device)
    prepare_model(model, precision, device)
    data = command.data.apply_to(run.data)
    pairs = local_rank0_first(lambda: load_pairs(data, data.split))
    further = local_rank0_first(lambda: load_further_references(data, command.data.references))
    check_same_on_all_ranks(
        lambda: (content_key(pairs, tokenizer), gold_key(pairs), *map(text_key, further.values())), TEXT_MISMATCH
    )
    sources, targets = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
    references = collect_references(pairs, *further.values())

    bleu_tokenizer = broadcast_from_rank0(
        lambda: choose_bleu_tokenizer(command.bleu_tokenizer or run.bleu_tokenizer, references, is_logged=True)
    )
    # The cache of the hub is not for results.
    home = Path("runs", parse_address(checkpoint).repository) if is_hub_address(checkpoint) else folder
    results = home / "eval" / data.split
    broadcast_from_rank0(lambda: make_results_folder(results))  # first, so that an error does not waste the work
    metrics: dict[str, Any] = evaluate_loss(model, tokenizer, pairs, device)
    search = command.search.with_source_limit_of(run.data)
    translator = Translator(with_cuda_graphs(model, device), tokenizer, search, device, run.data.languages)
    start_time = time.perf_counter()
    translations = [options[0] for options in translator.translate(sources, keep_weights=True, progress=True)]
    check_scores(translations, 1)
    warn_if_truncated(translations, search, 1)
    texts = [translation.text for translation in translations]
    warn_if_evaluation_is_preprocessed(data, pairs, further, texts)
    metrics["sentences_per_second"] = len(sources) / (time.perf_counter() - start_time)
    metrics |= compute_scores(texts, references, bleu_tokenizer)
    metrics["literals"] = measure_literals(sources, texts, targets)
    metrics |= {
        "sentences": len(sources),
        "checkpoint": " ".join(step.name for step in steps),
        "precision": precision,
        "bleu_tokenizer": bleu_tokenizer,
        "data": asdict(data) | {"references": command.data.references},
        "search": asdict(search),
    }
    evaluation = Evaluation(folder, results, sources, references, texts, metrics, [])
    choices: list[WordWeights] = []
    if command.erase:
        losses, erasure_metrics = measure_erasure(translator, translations, sources, targets, get_gold_links(pairs))
        metrics |= erasure_metrics
        shares = [None if losses_TS is None else normalize_losses(losses_TS) for losses_TS in losses]
        choices.append(WordWeights("Log-probability lost without the source word", dict(enumerate(shares))))
    if len(run.model.layers_and_heads) > 1:
        worst = sort_worst_first(sentence_chrf(texts, references))[:MAX_PAIRS_WITH_HEADS]
        # Without CUDA graphs, which would replay the layer and head with which they were recorded.
        choices += compute_head_weights(model, run.model, replace(translator, model=model), translations, worst)
    if rank():
        return evaluation
    training_data = replace(run.data, cache=command.data.cache)
    train = load_training_text(training_data, "scores of sentences seen in the training text are left out")
    if train is not None:
        kinds = find_overlap(pairs, train, training_data)
        metrics["by_overlap"] = score_by_overlap(kinds, texts, references, bleu_tokenizer)
    title = f"{home.resolve().name}, {data.split}"
    with replacing_files(results, *RESULT_FILES) as new_folder:
        write_atomically(new_folder / "translations.txt", (text + "\n" for text in texts))
        write_atomically(
            new_folder / "alignments.jsonl", (translation.record.to_json() + "\n" for translation in translations)
        )
        page = build_report(title, metrics, sources, references, translations, choices)
        write_atomically(new_folder / "report.html", [page])
        write_atomically(
            new_folder / "metrics.json",
            [json.dumps(replace_nonfinite(metrics), indent=1, ensure_ascii=False), "\n"],
        )
        try:
            pictures = draw_heat_maps(new_folder, sources, translations, command.pictures)
            evaluation.pictures.extend(results / picture.name for picture in pictures)
        except UserError as error:  # matplotlib is optional
            log.warning(f"no pictures were drawn: {error}")
    return evaluation


def draw_heat_maps(folder: Path, sources: list[str], translations: list[Translation], limit: int) -> list[Path]:
    """Draw word alignments of the first `limit` translations that are not empty. Returns the paths of the pictures."""
    paths: list[Path] = []
    for number, (source, translation) in enumerate(zip(sources, translations, strict=True), 1):
        if len(paths) == limit:
            break
        record = translation.record
        weights = record.word_weights()
        if weights is None or not weights.size:
            continue
        path = folder / f"alignment_{number}.png"
        paths.append(path)
        source_words = restore_unknown_words(source, record.source_words)
        target_words = restore_unknown_words(translation.text, record.target_words)
        draw_heat_map(path, source_words, target_words, weights)
    return paths


def make_results_folder(folder: Path) -> None:
    """Create `eval/<split>` of a run.

    Symbolic links are refused: the run may come from someone else, and files in this folder are replaced.

    Raises:
        UserError: the folder or its parent is a symbolic link.
    """
    for path in (folder.parent, folder):
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link; results are not written through links, so remove it")
    folder.mkdir(parents=True, exist_ok=True)


def print_evaluation(evaluation: Evaluation) -> None:
    """Print examples, metrics and the paths of the results."""
    examples = zip(evaluation.sources, evaluation.references, evaluation.translations, strict=True)
    for source, references, translation in islice(examples, SHOWN_EXAMPLES):
        echo(f"source     {source}")
        for reference in references:
            echo(f"reference  {reference}")
        echo(f"model      {translation}\n")
    decimals = dict.fromkeys(("loss", "ppl", "accuracy", "aer", "entropy", "erasure_tau", "erasure_aer"), 4)
    for name in (*decimals, "bleu", "chrf", "ter", "exact_match", "sentences_per_second"):
        if name not in evaluation.metrics:
            continue  # without erase=true
        value = evaluation.metrics[name]
        if value is None:
            shown = "-"
        elif name == "ppl" and value >= 1e6:
            shown = format_perplexity(value)
        else:
            shown = f"{value:.{decimals.get(name, 2)}f}"
        echo(f"{name:<22}{shown}")
    for name, scores in evaluation.metrics.get("by_overlap", {}).items():
        if scores["sentences"]:
            bleu, chrf = ("-" if scores[key] is None else f"{scores[key]:.2f}" for key in ("bleu", "chrf"))
            label = OVERLAP_LABELS[name]
            echo(f"{label:<22}bleu {bleu}, chrf {chrf}, {pluralize(scores['sentences'], 'sentence')}")
    for kind, counts in evaluation.metrics["literals"].items():
        echo(f"{f'{kind} kept':<22}{describe_literals(counts)}")
    for name, signature in evaluation.metrics["signatures"].items():
        echo(f"{name:<22}{signature}")
    if evaluation.pictures:
        echo(f"{'alignment picture':<22}{evaluation.pictures[0]}")
    echo(f"{'results':<22}{evaluation.results.parent}")
    echo(f"{'run':<22}{evaluation.run}")
    echo(f"{'page':<22}{evaluation.results / 'report.html'}")


if __name__ == "__main__":
    evaluate()
