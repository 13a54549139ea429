"""Train the attention family on the built-in corpus; write what came of it into docs/results.md and docs/attention.md's
pictures.

python scripts/attention_table.py                    two hours on two cores
python scripts/attention_table.py jobs=1 seed=2      one run at a time, from another seed

A few mechanisms are trained as long as `make train` does. Then follow, two epochs each, every score x window x style,
and the best of them with every normalizer and with several heads. Each run is a folder runs/attention/seed1/NAME; what
is finished is not run again: delete them after a change of the code. Each has one thread, and there are as many at a
time as there are cores.

docs/lengths.png shows BLEU by source length with attention and without, as figure 2 of Bahdanau et al. 2014;
docs/pictures/ where each mechanism looks in the same sentence.
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
from settings import settings_given

from nmt.config import SearchConfig
from nmt.config.model import NORMALIZERS, SCORES, WINDOWS
from nmt.data.corpus import column, load_pairs
from nmt.decoding.translator import Translator
from nmt.evaluation.metrics import bleu_by_length
from nmt.evaluation.plot import curves, heat_map
from nmt.runtime.device import move_model
from nmt.training.checkpoint import load_config, load_model

DOCS = Path("docs")
BEGIN, END = "<!-- attention: written by scripts/attention_table.py -->", "<!-- end of attention -->"
STYLES = {
    "bahdanau": ("model.style=bahdanau",),
    "luong": ("model.style=luong",),
    "gnmt": ("model.style=gnmt", "model.decoder_layers=2"),
}
EPOCHS = 2  # of the runs of the large table
SENTENCE = 105  # of the test split: the one in the pictures


@dataclass(frozen=True)
class Variant:
    style: str
    score: str
    window: str = "global"
    normalizer: str = "softmax"
    heads: int = 1
    half_width: int = 5  # of a local window: the sentences of the built-in corpus are short
    coverage: bool = False
    epochs: int | None = EPOCHS  # None: the corpus's own

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
        return [*STYLES[self.style], *(f"model.attention.{key}={getattr(self, key)}" for key in keys), *length]


FULL = [
    *(Variant("bahdanau", score, epochs=None) for score in ("additive", "dot", "general", "none")),
    Variant("bahdanau", "general", "local_p", half_width=10, epochs=None),
    *(Variant("luong", score, epochs=None) for score in ("additive", "general")),
]
FAMILY = [
    Variant(style, score, window)
    for style in STYLES
    for score in SCORES
    for window in WINDOWS
    if score != "concat" and (score != "none" or window == "global")  # concat is additive
]


def refined(best: Variant) -> list[Variant]:
    """A variant with each normalizer, with one head and with four."""
    return [dataclasses.replace(best, normalizer=n, heads=heads) for n in NORMALIZERS for heads in (1, 4)]


def pictured(best: Variant) -> dict[str, Variant]:
    """Of each picture the mechanism that it shows."""
    return {
        **{score: Variant("bahdanau", score) for score in SCORES if score not in ("concat", "none")},
        **{window: Variant("bahdanau", "general", window) for window in WINDOWS if window != "global"},
        **{normalizer: dataclasses.replace(best, normalizer=normalizer) for normalizer in NORMALIZERS[1:]},
        "heads": dataclasses.replace(best, heads=4),
        "coverage": dataclasses.replace(best, coverage=True),
        **{style: Variant(style, "additive") for style in ("luong", "gnmt")},
    }


def run(variant: Variant, runs: Path, seed: str) -> dict[str, Any]:
    """Train and evaluate one variant, unless that is done. Returns its measures on the test split, its `speed`, and
    those of its last `validation`."""
    folder = runs / variant.name
    metrics = folder / "eval" / "test" / "metrics.json"
    if not metrics.is_file():
        call("nmt.train", f"hydra.run.dir={folder}", "resume=auto", f"seed={seed}", *variant.settings)
        call("nmt.evaluate", f"checkpoint={folder}", "pictures=0")
    measures = json.loads(metrics.read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measures["speed"] = median(event["target_tokens_per_second"] for event in events if event["event"] == "train")
    measures["validation"] = [event for event in events if event["event"] == "validate"][-1]
    print(f"{variant.name}: {' '.join(row(measures))}", flush=True)
    return measures


def call(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
    )
    if done.returncode:
        sys.exit(f"python -m {module} {' '.join(arguments)}\n{done.stderr.decode()}")


def row(measures: dict[str, Any]) -> list[str]:
    """BLEU, AER, entropy, target tokens/s."""
    formats = {"bleu": ".2f", "aer": ".3f", "entropy": ".2f", "speed": ",.0f"}
    return ["-" if measures[name] is None else f"{measures[name]:{form}}" for name, form in formats.items()]


def table(found: dict[Variant, dict[str, Any]], *keys: str) -> str:
    lines = [f"| {' | '.join(keys)} | BLEU | AER | Entropy | Target tokens/s |", "|---" * (len(keys) + 4) + "|"]
    lines += [f"| {' | '.join([*(str(getattr(v, k)) for k in keys), *row(m)])} |" for v, m in found.items()]
    return "\n".join(lines)


def draw_lengths(attentive: Path, without: Path) -> None:
    """BLEU by source length of two runs."""
    pairs = load_pairs(load_config(attentive).data, "test")
    sources, references = list(column(pairs, "source")), list(column(pairs, "target"))
    lengths = {}
    for label, folder in (("with attention", attentive), ("without", without)):
        translations = (folder / "eval" / "test" / "translations.txt").read_text(encoding="utf-8")
        lengths[label] = bleu_by_length(sources, translations.split("\n")[:-1], references)
    curves(DOCS / "lengths.png", lengths, "source words", "BLEU")


def draw_sentence(name: str, run: Path) -> None:
    """Where a run looks when it is made to write the reference of one sentence."""
    model, tokenizer, config, *_ = load_model(str(run))
    pair = load_pairs(config.data, "test")[SENTENCE]
    device = torch.device("cpu")
    move_model(model, "fp32", device)
    translator = Translator(model, tokenizer, SearchConfig(), device)
    [record] = translator.align([pair["source"].split()], [pair["target"].split()])
    weights = record.word_weights()
    assert weights is not None
    heat_map(DOCS / "pictures" / f"{name}.png", record.source_words, record.target_words, weights)


def main() -> None:
    options = settings_given(jobs=str(os.cpu_count() or 1), seed="1")
    runs = Path("runs/attention") / f"seed{options['seed']}"
    (DOCS / "pictures").mkdir(exist_ok=True)
    with ThreadPoolExecutor(int(options["jobs"])) as pool:

        def run_all(variants: Iterable[Variant]) -> dict[Variant, dict[str, Any]]:
            return dict(zip(variants, pool.map(lambda v: run(v, runs, options["seed"]), variants), strict=True))

        full = run_all(FULL)
        found = run_all(FAMILY)
        valid = {variant: found[variant]["validation"] for variant in FAMILY if variant.score != "none"}
        good = [variant for variant in valid if valid[variant]["bleu"] > max(v["bleu"] for v in valid.values()) - 1]
        best = min(good, key=lambda variant: valid[variant]["aer"])
        refinements = run_all(refined(best))
        pictures = pictured(best)
        run_all(pictures.values())
    draw_lengths(*(runs / Variant("bahdanau", score, epochs=None).name for score in ("additive", "none")))
    for name, variant in pictures.items():
        draw_sentence(name, runs / variant.name)

    command = " ".join(["python scripts/attention_table.py", *sys.argv[1:]])
    text = f"""{BEGIN}
`{command}`: the built-in corpus, test split, beam 5, {options["jobs"]} runs at a time with one thread each. AER is
that of forced decoding, entropy in nats a target piece, tokens/s the median of a run's windows.

Trained as long as `make train` does (`half_width` is 10):

{table(full, "style", "score", "window")}

![BLEU by source length with attention and without](lengths.png)

BLEU by source length of style bahdanau with additive attention and with none, as in figure 2 of Bahdanau et al. 2014.

Every score with every window in every style, {EPOCHS} epochs each (`half_width` is 5):

{table(found, "style", "score", "window")}

Of these, {best.style} with {best.score} and {best.window} has the lowest AER of the validation split among those within
1 BLEU of the best there:

{table(refinements, "normalizer", "heads")}
{END}"""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[-1] if END in page else ""
    (DOCS / "results.md").write_text(before.rstrip() + "\n\n" + text + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
