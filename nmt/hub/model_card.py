"""The model card of a published model: metadata for the hub, and what a user should know.

All names, settings and scores come from files that somebody else may have written. In the metadata they are values that
`huggingface_hub` writes as YAML; in the text they are escaped, so that they are neither Markdown nor HTML.
"""

import json
import math
import re
from collections.abc import Iterator
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
MAX_NAME_LENGTH = 100  # characters of a name in the text


TEXT = """# {title}

A model that translates {source} to {target}, trained with nmt.

```
echo "..." | python -m nmt.translate checkpoint={address}
python -m nmt.serve checkpoint={address}
```

```python
import nmt

model = nmt.load("{address}")
print(model.translate(["..."])[0].text)
```

| | |
|---|---|
| model | {model.style} decoder, {model.encoder} encoder, {parameters:,} parameters |
| layers | {model.encoder_layers} in the encoder, {model.decoder_layers} in the decoder |
| sizes | embeddings {model.embed}, hidden {model.hidden} |
| attention | {model.attention.score}, {model.attention.window} |
| pieces | {source_pieces:,} source and {target_pieces:,} target |
| training data | {data} |
| license | {license} |

`config.yaml` has all settings. `manifest.json` has the digests of the files, which nmt checks before it uses them; none
of them holds code.

## Scores

| Split | Sentences | Metric | Score | sacreBLEU's signature |
|---|---|---|---|---|
{scores}"""


class Score(NamedTuple):
    """The score of a model on a split."""

    split: str
    sentences: int
    metric: str
    value: float
    signature: str  # of sacreBLEU


def build_model_card(loaded: LoadedModel, repository: str, license: str) -> str:
    """Return the text of README.md for a model that is published as `OWNER/NAME`, with settings to be published."""
    config, tokenizer, scores = loaded.config, loaded.tokenizer, list(read_scores(loaded))
    source, target = map(escape, config.data.languages)
    text = TEXT.format(
        title=escape(repository.partition("/")[2]),
        source=source,
        target=target,
        address=PREFIX + repository,
        model=config.model,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        source_pieces=tokenizer.source.vocab_size,
        target_pieces=tokenizer.target.vocab_size,
        data=escape(describe_data(config)),
        license=escape(license),
        scores="".join(
            f"| {escape(split)} | {sentences:,} | {metric} | {value:.2f} | {escape(signature)} |\n"
            for split, sentences, metric, value, signature in scores
        ),
    )
    return f"---\n{build_metadata(config, scores, repository, license)}\n---\n\n{text}"


def build_metadata(config: TrainRun, scores: list[Score], repository: str, license: str) -> str:
    """Return the YAML of the card."""
    from huggingface_hub import EvalResult, ModelCardData  # optional, and slow to import

    languages = list(config.data.languages)
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {'-'.join(languages)}",
            dataset_type=config.data.format,
            dataset_name=describe_data(config),
            dataset_split=score.split,
            metric_type=score.metric.lower(),
            metric_value=round(score.value, 2),
            metric_name=score.metric,
            metric_args={"signature": score.signature},
        )
        for score in scores
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


def describe_data(config: TrainRun) -> str:
    """Return the name of the training corpus."""
    data = config.data
    if data.format == "toy" or data.path is None:
        return "built-in corpus of nmt"
    return data.path if data.subset is None else f"{data.path}, {data.subset}"


def read_scores(loaded: LoadedModel) -> Iterator[Score]:
    """Yield the scores of `eval/<split>/metrics.json` in the run, if they are of this checkpoint."""
    checkpoint = " ".join(folder.name for folder in loaded.checkpoints)
    for path in sorted((loaded.run_folder / "eval").glob("[!.]*/metrics.json")):
        try:
            metrics = json.loads(read_small(path))
            scores = [
                Score(path.parent.name, int(metrics["sentences"]), name, value, str(metrics["signatures"][key]))
                for key, name in METRICS.items()
                if metrics[key] is not None and math.isfinite(value := float(metrics[key]))
            ]
            is_same = metrics["checkpoint"] == checkpoint
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            log.warning(f"{path} is damaged or from another version; the model card leaves it out")
            continue
        if is_same:
            yield from scores
        else:
            log.warning(
                f"{path} has scores of {metrics['checkpoint']!s:.80}, not of {checkpoint:.80}; the model card leaves "
                "them out"
            )


def escape(text: str) -> str:
    """Escape a name for Markdown, including HTML."""
    text = " ".join(escape_controls(text[:MAX_NAME_LENGTH]).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return MARKDOWN.sub(r"\\\1", text)
