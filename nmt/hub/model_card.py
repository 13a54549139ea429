"""The model card of a published model: metadata for the hub, and what a user should know.

All names, settings and scores come from files that somebody else may have written. In the metadata they are values that
`huggingface_hub` writes as YAML; in the text they are escaped, so that they are neither Markdown nor HTML.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nmt.config import TrainRun
from nmt.errors import escape_controls
from nmt.runs.checkpoint import LoadedModel
from nmt.system.files import read_small
from nmt.system.hub_client import PREFIX
from nmt.system.logging import log

METRICS = {"bleu": "BLEU", "chrf": "chrF"}
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$:@.-])")  # characters that can have a meaning in Markdown
MAX_LOG_BYTES = 2**24
MAX_NAME_LENGTH = 100  # characters of a name in the text


class Scores(NamedTuple):
    """The metrics of a model on a split."""

    split: str
    sentences: int
    values: dict[str, float]  # by metric
    signatures: dict[str, str]  # of sacreBLEU


def build_model_card(loaded: LoadedModel, repository: str, license: str) -> str:
    """Return the text of README.md for a model that is published as `OWNER/NAME`."""
    scores = list(read_scores(loaded))
    return f"---\n{build_metadata(loaded.config, scores, repository, license)}\n---\n\n" + build_text(
        loaded, scores, repository, license
    )


def build_metadata(config: TrainRun, scores: list[Scores], repository: str, license: str) -> str:
    """Return the YAML of the card."""
    from huggingface_hub import EvalResult, ModelCardData  # optional, and slow to import

    data = config.data
    languages = list(data.languages)
    pair = "-".join(languages)
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {pair}",
            dataset_type=data.format,
            dataset_name=describe_data(config),
            dataset_split=split.split,
            metric_type=metric,
            metric_value=round(value, 2),
            metric_name=METRICS[metric],
            metric_args={"signature": split.signatures[metric]} if metric in split.signatures else None,
        )
        for split in scores
        for metric, value in split.values.items()
    ]
    card = ModelCardData(
        language=[code for code in languages if LANGUAGE_CODE.fullmatch(code)] or None,
        license=license,
        library_name="nmt",
        pipeline_tag="translation",
        tags=["translation", "nmt", config.model.style],
        model_name=repository.partition("/")[2],
        eval_results=results or None,
    )
    return str(card.to_yaml())


def build_text(loaded: LoadedModel, scores: list[Scores], repository: str, license: str) -> str:
    """Return the Markdown of the card, without metadata."""
    data, model, tokenizer = loaded.config.data, loaded.config.model, loaded.config.tokenizer
    source, target = map(escape, data.languages)
    address = PREFIX + repository
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    rows = {
        "model": f"{escape(model.style)} decoder, {escape(model.encoder)} encoder, {parameters:,} parameters",
        "layers": f"{model.encoder_layers} in the encoder, {model.decoder_layers} in the decoder",
        "sizes": f"embeddings {model.embed}, hidden {model.hidden}",
        "attention": f"{escape(model.attention.score)}, {escape(model.attention.window)}",
        "tokenizer": f"{escape(tokenizer.type)}, {loaded.tokenizer.source.vocab_size:,} source and "
        f"{loaded.tokenizer.target.vocab_size:,} target pieces",
        "training data": f"{escape(describe_data(loaded.config))}{describe_pair_count(loaded)}",
        "checkpoint": ", ".join(escape(folder.name) for folder in loaded.checkpoints),
        "license": escape(license),
    }
    lines = [
        f"# {escape(repository.partition('/')[2])}",
        "",
        f"A model that translates {source} to {target}, trained with nmt.",
        "",
        "```",
        f'echo "..." | python -m nmt.translate checkpoint={address}',
        f"python -m nmt.serve checkpoint={address}",
        "```",
        "",
        "```python",
        "import nmt",
        "",
        f'model = nmt.load("{address}")',
        'print(model.translate(["..."])[0].text)',
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "`config.yaml` has all settings. `manifest.json` has the digests of the files, which nmt checks before it uses "
        "them; none of them holds code.",
        "",
        "## Scores",
        "",
    ]
    if scores:
        lines += ["| Split | Sentences | Metric | Score | sacreBLEU's signature |", "|---|---|---|---|---|"]
        lines += [
            f"| {escape(split.split)} | {split.sentences:,} | {METRICS[metric]} | {value:.2f} | "
            f"{escape(split.signatures.get(metric, ''))} |"
            for split in scores
            for metric, value in split.values.items()
        ]
    else:
        lines.append("This model has not been evaluated.")
    return "\n".join(lines) + "\n"


def describe_data(config: TrainRun) -> str:
    """Return the name of the training corpus, without its place on this machine."""
    data = config.data
    if data.format == "toy" or data.path is None:
        return "built-in corpus of nmt"
    name = data.path if data.format == "hub" and not Path(data.path).is_absolute() else Path(data.path).resolve().name
    return name if data.subset is None else f"{name}, {data.subset}"


def read_scores(loaded: LoadedModel) -> Iterator[Scores]:
    """Yield the scores of `eval/<split>/metrics.json` in the run, if they are of this checkpoint."""
    checkpoint = " ".join(folder.name for folder in loaded.checkpoints)
    for path in sorted((loaded.run_folder / "eval").glob("*/metrics.json")):
        try:
            metrics = json.loads(read_small(path))
            values = {name: float(metrics[name]) for name in METRICS if metrics[name] is not None}
            signatures = {name: str(metrics["signatures"][name]) for name in values}
            scores = Scores(path.parent.name, int(metrics["sentences"]), values, signatures)
            is_same = metrics["checkpoint"] == checkpoint
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            log.warning(f"{path} is damaged or from another version; the model card leaves it out")
            continue
        if not is_same:
            log.warning(
                f"{path} has scores of {metrics['checkpoint']!s:.80}, not of {checkpoint:.80}; the model card leaves "
                "them out"
            )
        elif all(map(math.isfinite, values.values())):
            yield scores


def describe_pair_count(loaded: LoadedModel) -> str:
    """Return the number of training pairs that the log of the run states, such as `, 20,000 pairs`, or nothing."""
    try:
        with open(loaded.run_folder / "train.log", "rb") as file:
            text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    counts = re.findall(r"^\S+ \S+ train: ([\d,]+) pairs", text, re.MULTILINE)
    return f", {counts[-1]} pairs" if counts else ""


def escape(text: str) -> str:
    """Escape a name for Markdown, including HTML."""
    text = " ".join(escape_controls(text[:MAX_NAME_LENGTH]).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return MARKDOWN.sub(r"\\\1", text)
