"""Train the attention family on the built-in corpus and write what came of it into docs/results.md.

python scripts/attention_table.py                                every score x window x style: some fifty runs
python scripts/attention_table.py jobs=1 train.max_epochs=2      one at a time, shorter; settings of nmt.train

Each run is a folder runs/attention/STYLE-SCORE-WINDOW...; what is finished is not run again. Each has one thread, and
there are as many at a time as there are cores. The best of them is then trained with every normaliser and with several
heads. docs/lengths.png shows BLEU by source length with attention and without, as figure 2 of Bahdanau et al. 2014.
"""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nmt.config import DataConfig
from nmt.data.corpus import column, load_pairs
from nmt.metrics import bleu_by_length
from nmt.model.config import NORMALISERS, SCORES, WINDOWS
from nmt.plot import curves

RESULTS = Path("docs/results.md")
BEGIN, END = "<!-- attention: written by scripts/attention_table.py -->", "<!-- end of attention -->"
STYLES = {
    "bahdanau": ("model.style=bahdanau",),
    "luong": ("model.style=luong",),
    "luong without feeding": ("model.style=luong", "model.input_feeding=false"),
    "gnmt": ("model.style=gnmt", "model.decoder_layers=2"),
}
HEADS = (1, 4)
HALF_WIDTH = 5  # pieces: sentences of the built-in corpus are short


@dataclass(frozen=True)
class Variant:
    style: str
    score: str
    window: str = "global"
    normaliser: str = "softmax"
    heads: int = 1

    @property
    def name(self) -> str:
        parts = (self.style.replace(" ", "_"), self.score, self.window, self.normaliser, f"{self.heads}")
        return "attention/" + "-".join(parts)

    @property
    def settings(self) -> tuple[str, ...]:
        if self.score == "none":
            return (*STYLES[self.style], "model.attention.score=none")
        local = () if self.window == "global" else (f"model.attention.half_width={HALF_WIDTH}",)
        return (
            *STYLES[self.style],
            f"model.attention.score={self.score}",
            f"model.attention.window={self.window}",
            f"model.attention.normaliser={self.normaliser}",
            f"model.attention.heads={self.heads}",
            *local,
        )


def folder_of(variant: Variant, settings: list[str]) -> Path:
    """Where a variant is trained: with other settings elsewhere."""
    mark = f"-{hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}" if settings else ""
    return Path("runs") / f"{variant.name}{mark}"


def run(variant: Variant, settings: list[str]) -> dict[str, Any]:
    """Train and evaluate one variant, unless that is done. Returns its measures."""
    folder = folder_of(variant, settings)
    metrics = folder / "eval" / "test" / "metrics.json"
    if not metrics.is_file():
        name = f"name={folder.relative_to('runs')}"
        call("nmt.train", name, "resume=auto", *variant.settings, *settings)
        call("nmt.evaluate", f"checkpoint={folder}", "pictures=0")
    measures = json.loads(metrics.read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measures["speed"] = median(event["target_tokens_per_second"] for event in events if event["event"] == "train")
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


def table(found: dict[Variant, dict[str, Any]], keys: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join(keys)} | BLEU | AER | Entropy | Target tokens/s |", "|---" * (len(keys) + 4) + "|"]
    lines += [f"| {' | '.join([*(str(getattr(v, k)) for k in keys), *row(m)])} |" for v, m in found.items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    jobs = next(
        (int(text.removeprefix("jobs=")) for text in arguments if text.startswith("jobs=")), os.cpu_count() or 1
    )
    settings = [text for text in arguments if not text.startswith("jobs=")]
    family = [
        Variant(style, score, window)
        for style in STYLES
        for score in SCORES
        for window in WINDOWS
        if score != "concat" and (score != "none" or window == "global")  # concat is additive
    ]
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(family, pool.map(lambda variant: run(variant, settings), family), strict=True))
        good = [variant for variant in family if found[variant]["bleu"] > max(m["bleu"] for m in found.values()) - 1]
        best = min((v for v in good if v.score != "none"), key=lambda variant: found[variant]["aer"])
        more = [Variant(best.style, best.score, best.window, n, heads) for n in NORMALISERS for heads in HEADS]
        refined = dict(zip(more, pool.map(lambda variant: run(variant, settings), more), strict=True))

    pairs = load_pairs(DataConfig(), "test")
    sources, references = list(column(pairs, "source")), list(column(pairs, "target"))
    without = Variant(best.style, "none")
    lengths = {}
    for label, variant in (("with attention", best), ("without", without)):
        translations = (folder_of(variant, settings) / "eval" / "test" / "translations.txt").read_text(encoding="utf-8")
        lengths[label] = bleu_by_length(sources, translations.split("\n")[:-1], references)
    curves(RESULTS.parent / "lengths.png", lengths, "source words", "BLEU")

    command = " ".join(["python scripts/attention_table.py", *arguments])
    text = f"""{BEGIN}
`{command}`: the built-in corpus, test split, beam 5, {jobs} runs at a time with one thread each. AER is that of forced
decoding, entropy in nats a target piece, tokens/s the median of a run's windows. `half_width` is {HALF_WIDTH}.

{table(found, ("style", "score", "window"))}

Of these, {best.style} with {best.score} and {best.window} has the lowest AER among those within 1 BLEU of the best:

{table(refined, ("normaliser", "heads"))}

![BLEU by source length with attention and without](lengths.png)
{END}"""
    page = RESULTS.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[-1] if END in page else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + text + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
