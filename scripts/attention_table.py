"""Compare attention mechanisms on the built-in corpus.

Writes the tables of experiments/attention.md and the figures of docs/models.md.

python scripts/attention_table.py                    # two hours on two cores
python scripts/attention_table.py jobs=1 seed=2      # one run at a time, with another seed

A few mechanisms are trained as long as in `make train`. Then every score x window x style is trained for two epochs,
and the best of them with every normalizer and with several heads. Each run has a folder runs/attention/seed1/NAME.
Finished runs are reused, so delete them after a change of the code. Each run has one thread, and as many run at a time
as there are cores.

docs/lengths.png shows BLEU by source length with and without attention, as figure 2 of Bahdanau et al. 2014;
docs/pictures/ shows the attention weights of each mechanism for the same sentence.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from settings import parse_settings

from nmt.config import SearchConfig
from nmt.config.model import ATTENTION_NORMALIZERS, ATTENTION_SCORES, ATTENTION_WINDOWS
from nmt.data.corpus import iter_column, load_pairs
from nmt.data.references import collect_references
from nmt.decoding.translator import Translator
from nmt.evaluation.metrics import bleu_by_length
from nmt.evaluation.plot import draw_curves, draw_heat_map
from nmt.runs.checkpoint import load_config, load_model
from nmt.system.device import prepare_model

DOCS, PAGE = Path("docs"), Path("experiments/attention.md")
BEGIN_MARKER, END_MARKER = "<!-- attention: written by scripts/attention_table.py -->", "<!-- end of attention -->"
STYLES = {
    "bahdanau": (),
    "luong": ("model.style=luong",),
    "gnmt": ("model.style=gnmt", "model.decoder_layers=2"),
}
EPOCHS = 2  # of the runs in the large table
PICTURED_SENTENCE = 105  # row of the test split


@dataclass(frozen=True)
class Variant:
    style: str
    score: str
    window: str = "global"
    normalizer: str = "softmax"
    heads: int = 1
    half_width: int = 5  # of local windows; small, because the sentences of the built-in corpus are short
    coverage: bool = False
    epochs: int | None = EPOCHS  # None: the default

    @property
    def name(self) -> str:
        parts = [self.style, self.score, self.window, self.normalizer, f"{self.heads}"]
        parts += [f"{self.half_width}"] * (self.window != "global") + ["coverage"] * self.coverage
        return "-".join(parts + ["full"] * (self.epochs is None))

    @property
    def settings(self) -> list[str]:
        length = [] if self.epochs is None else [f"train.max_epochs={self.epochs}"]
        keys = ["score"] if self.score == "none" else ["score", "window", "normalizer", "heads", "coverage"]
        keys += ["half_width"] * (self.window != "global")
        # model=bahdanau: data=toy has settings of its own for model=rnn.
        return [
            "model=bahdanau",
            *STYLES[self.style],
            *(f"model.attention.{key}={getattr(self, key)}" for key in keys),
            *length,
        ]


FULL_LENGTH_VARIANTS = [
    *(Variant("bahdanau", score, epochs=None) for score in ("additive", "dot", "general", "none")),
    Variant("bahdanau", "general", "local_p", half_width=10, epochs=None),
    *(Variant("luong", score, epochs=None) for score in ("additive", "general")),
]
FAMILY_VARIANTS = [
    Variant(style, score, window)
    for style in STYLES
    for score in ATTENTION_SCORES
    for window in ATTENTION_WINDOWS
    if score != "concat" and (score != "none" or window == "global")  # concat is the same as additive
]


def list_refinements(best: Variant) -> list[Variant]:
    """Return a variant with each normalizer, each with one head and with four."""
    return [dataclasses.replace(best, normalizer=n, heads=heads) for n in ATTENTION_NORMALIZERS for heads in (1, 4)]


def list_pictured_variants(best: Variant) -> dict[str, Variant]:
    """Return the variant that each figure shows, by the name of the figure."""
    return {
        **{score: Variant("bahdanau", score) for score in ATTENTION_SCORES if score not in ("concat", "none")},
        **{window: Variant("bahdanau", "general", window) for window in ATTENTION_WINDOWS if window != "global"},
        **{normalizer: dataclasses.replace(best, normalizer=normalizer) for normalizer in ATTENTION_NORMALIZERS[1:]},
        "heads": dataclasses.replace(best, heads=4),
        "coverage": dataclasses.replace(best, coverage=True),
        **{style: Variant(style, "additive") for style in ("luong", "gnmt")},
    }


def train_and_evaluate(variant: Variant, runs: Path, seed: str) -> dict[str, Any]:
    """Train and evaluate a variant, unless that is done.

    Returns its metrics on the test split, its `speed` in target tokens/s, and its last `validation`.
    """
    folder = runs / variant.name
    metrics = folder / "eval" / "test" / "metrics.json"
    if not metrics.is_file():
        run_module("nmt.train", f"hydra.run.dir={folder}", "resume=auto", f"seed={seed}", *variant.settings)
        run_module("nmt.evaluate", f"checkpoint={folder}", "pictures=0")
    measures = json.loads(metrics.read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measures["speed"] = median(event["target_tokens_per_second"] for event in events if event["event"] == "train")
    measures["validation"] = [event for event in events if event["event"] == "validate"][-1]
    print(f"{variant.name}: {' '.join(format_row(measures))}", flush=True)
    return measures


def run_module(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
    )
    if done.returncode:
        sys.exit(f"python -m {module} {' '.join(arguments)}\n{done.stderr.decode()}")


def format_row(measures: dict[str, Any]) -> list[str]:
    """Format BLEU, AER, entropy and target tokens/s."""
    formats = {"bleu": ".2f", "aer": ".3f", "entropy": ".2f", "speed": ",.0f"}
    return ["-" if measures[name] is None else f"{measures[name]:{form}}" for name, form in formats.items()]


def format_table(found: dict[Variant, dict[str, Any]], *keys: str) -> str:
    lines = [f"| {' | '.join(keys)} | BLEU | AER | Entropy | Target tokens/s |", "|---" * (len(keys) + 4) + "|"]
    lines += [f"| {' | '.join([*(str(getattr(v, k)) for k in keys), *format_row(m)])} |" for v, m in found.items()]
    return "\n".join(lines)


def draw_lengths(attentive: Path, without: Path) -> None:
    """Draw BLEU by source length of two runs."""
    pairs = load_pairs(load_config(attentive).data, "test")
    sources, references = list(iter_column(pairs, "source")), collect_references(pairs)
    lengths = {}
    for label, folder in (("with attention", attentive), ("without", without)):
        translations = (folder / "eval" / "test" / "translations.txt").read_text(encoding="utf-8")
        lengths[label] = bleu_by_length(sources, translations.split("\n")[:-1], references)
    draw_curves(DOCS / "lengths.png", lengths, "source words", "BLEU")


def draw_sentence(name: str, run: Path) -> None:
    """Draw the attention weights of a run in forced decoding of one sentence."""
    model, tokenizer, config, *_ = load_model(str(run))
    pair = load_pairs(config.data, "test")[PICTURED_SENTENCE]
    device = torch.device("cpu")
    prepare_model(model, "fp32", device)
    translator = Translator(model, tokenizer, SearchConfig(), device)
    [record] = translator.align([pair["source"].split()], [pair["target"].split()])
    weights = record.word_weights()
    assert weights is not None
    draw_heat_map(DOCS / "pictures" / f"{name}.png", record.source_words, record.target_words, weights)


def main() -> None:
    options = parse_settings(jobs=str(os.cpu_count() or 1), seed="1")
    runs = Path("runs/attention") / f"seed{options['seed']}"
    (DOCS / "pictures").mkdir(exist_ok=True)
    with ThreadPoolExecutor(int(options["jobs"])) as pool:

        def run_all(variants: Iterable[Variant]) -> dict[Variant, dict[str, Any]]:
            return dict(
                zip(variants, pool.map(lambda v: train_and_evaluate(v, runs, options["seed"]), variants), strict=True)
            )

        full = run_all(FULL_LENGTH_VARIANTS)
        found = run_all(FAMILY_VARIANTS)
        valid = {variant: found[variant]["validation"] for variant in FAMILY_VARIANTS if variant.score != "none"}
        good = [variant for variant in valid if valid[variant]["bleu"] > max(v["bleu"] for v in valid.values()) - 1]
        best = min(good, key=lambda variant: valid[variant]["aer"])
        refinements = run_all(list_refinements(best))
        pictures = list_pictured_variants(best)
        run_all(pictures.values())
    draw_lengths(*(runs / Variant("bahdanau", score, epochs=None).name for score in ("additive", "none")))
    for name, variant in pictures.items():
        draw_sentence(name, runs / variant.name)

    command = " ".join(["python scripts/attention_table.py", *sys.argv[1:]])
    text = f"""{BEGIN_MARKER}
`{command}`: the built-in corpus, test split, beam 5, {options["jobs"]} runs at a time with one thread each. AER is
that of forced decoding, entropy in nats a target piece, tokens/s the median of a run's windows.

Trained as long as `make train` does (`half_width` is 10):

{format_table(full, "style", "score", "window")}

![BLEU by source length with attention and without](../docs/lengths.png)

BLEU by source length of style bahdanau with additive attention and with none, as in figure 2 of Bahdanau et al. 2014.

Every score with every window in every style, {EPOCHS} epochs each (`half_width` is 5):

{format_table(found, "style", "score", "window")}

Of these, {best.style} with {best.score} and {best.window} has the lowest AER of the validation split among those within
1 BLEU of the best there:

{format_table(refinements, "normalizer", "heads")}
{END_MARKER}"""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN_MARKER)[0], page.split(END_MARKER)[-1] if END_MARKER in page else ""
    PAGE.write_text(before.rstrip() + "\n\n" + text + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
