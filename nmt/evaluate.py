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
from pathlib import Path
from typing import Any

import torch

from nmt.config import SIDES, EvaluateRun
from nmt.data.corpus import get_gold_links, iter_column, load_pairs
from nmt.decoding.translation import check_scores, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.evaluation.comparison import compare_systems, format_comparison
from nmt.evaluation.erasure import measure_erasure, normalize_losses
from nmt.evaluation.heads import WordWeights, compute_head_weights
from nmt.evaluation.metrics import choose_bleu_tokenizer, compute_scores, sentence_chrf
from nmt.evaluation.report import MAX_PAIRS_WITH_HEADS, sort_worst_first
from nmt.evaluation.results import Evaluation, make_results_folder, print_evaluation, write_results
from nmt.model.kernels.cuda_graphs import with_cuda_graphs
from nmt.runs.checkpoint import CONFIG_FILE, find_checkpoint, load_config, load_model
from nmt.system.cli import main
from nmt.system.device import choose_precision, prepare_model
from nmt.system.distributed import broadcast_from_rank0, local_rank0_first, process_group, rank
from nmt.system.files import write_atomically
from nmt.system.hub_client import is_hub_address, parse_address
from nmt.system.text import echo
from nmt.training.validation import evaluate_loss


@main("evaluate")
def evaluate(command: EvaluateRun) -> float | None:
    """Return BLEU; with several runs, that of the last one."""
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
        texts = {
            name: [[translation.text for translation in evaluations[path].translations] for path in runs]
            for name, runs in systems.items()
        }
        comparison = compare_systems(texts, first.sources, first.references, bleu_tokenizer)
        echo(format_comparison(comparison))
        for name, signature in comparison.signatures.items():
            echo(f"{name:<22}{signature}")
        path = first.results / "comparison.json"
        scores = {name: {key: score._asdict() for key, score in row.items()} for name, row in comparison.scores.items()}
        content = json.dumps(comparison._asdict() | {"scores": scores}, indent=1, ensure_ascii=False)
        write_atomically(path, [content, "\n"])
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
    """Check that runs can be compared, before they are evaluated. Returns the BLEU tokenizer of the first.

    Raises:
        UserError: a run is named twice, or sentences differ.
    """
    folders = [find_checkpoint(path)[0].resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise UserError("compare=: list each run once; with a run listed twice, p-values would be wrong")
    runs = [load_config(folder) for folder in folders]
    corpora = [command.data.apply_to(run.data) for run in runs]
    texts = [[list(iter_column(load_pairs(data, data.split), side)) for side in SIDES] for data in corpora]
    for path, text in zip(paths, texts, strict=True):
        if text != texts[0]:
            raise UserError(
                f"compare=: {path} and {paths[0]} have different text; set data.* to text that fits all models, which "
                "must have the same direction"
            )
    return choose_bleu_tokenizer(command.bleu_tokenizer or runs[0].bleu_tokenizer, texts[0][1])


def evaluate_run(command: EvaluateRun, device: torch.device) -> Evaluation:
    """Evaluate a run and write the result files to `eval/<split>` in its folder; in `runs/OWNER/NAME` for the hub's."""
    checkpoint = str(command.checkpoint)
    model, tokenizer, run, folder, steps = local_rank0_first(lambda: load_model(checkpoint, command.average))
    precision = choose_precision(command.precision, device)
    prepare_model(model, precision, device)
    data = command.data.apply_to(run.data)
    pairs = local_rank0_first(lambda: load_pairs(data, data.split))
    sources, references = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
    bleu_tokenizer = broadcast_from_rank0(
        lambda: choose_bleu_tokenizer(command.bleu_tokenizer or run.bleu_tokenizer, references, is_logged=True)
    )
    # The cache of the hub is not for results.
    home = Path("runs", parse_address(checkpoint)[0]) if is_hub_address(checkpoint) else folder
    results = home / "eval" / data.split
    broadcast_from_rank0(lambda: make_results_folder(results))

    metrics: dict[str, Any] = evaluate_loss(model, tokenizer, pairs, device)
    search = command.search.with_source_limit_of(run.data)
    translator = Translator(with_cuda_graphs(model, device), tokenizer, search, device, run.data.languages)
    start_time = time.perf_counter()
    translations = [options[0] for options in translator.translate(sources, keep_weights=True, progress=True)]
    metrics["sentences_per_second"] = len(sources) / (time.perf_counter() - start_time)
    check_scores(translations, 1)
    warn_if_truncated(translations, search, 1)
    texts = [translation.text for translation in translations]
    metrics |= compute_scores(texts, references, bleu_tokenizer)
    metrics |= {
        "sentences": len(sources),
        "checkpoint": " ".join(step.name for step in steps),
        "precision": precision,
        "bleu_tokenizer": bleu_tokenizer,
        "data": asdict(data),
        "search": asdict(search),
    }
    choices: list[WordWeights] = []
    if command.erase:
        losses, erasure_metrics = measure_erasure(translator, translations, sources, references, get_gold_links(pairs))
        metrics |= erasure_metrics
        shares = [None if losses_TS is None else normalize_losses(losses_TS) for losses_TS in losses]
        choices.append(WordWeights("Log-probability lost without the source word", dict(enumerate(shares))))
    if len(run.model.layers_and_heads) > 1:
        worst = sort_worst_first(sentence_chrf(texts, references))[:MAX_PAIRS_WITH_HEADS]
        # Without CUDA graphs, which would replay the layer and head with which they were recorded.
        choices += compute_head_weights(model, run.model, replace(translator, model=model), translations, worst)
    evaluation = Evaluation(folder, results, sources, references, translations, metrics)
    if not rank():
        write_results(evaluation, f"{home.resolve().name}, {data.split}", choices)
    return evaluation


if __name__ == "__main__":
    evaluate()
