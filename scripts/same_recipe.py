"""How often are two systems of the same recipe called different? It should be 5% at p < 0.05.

python scripts/same_recipe.py runs=90 groups=2,3,5 folder=runs/same_recipe

Trains many small models of the built-in corpus, which differ in their seed alone, translates its validation split, and
divides them again and again at random into systems of 2, 3 or 5 runs. Each two systems of a division are compared by
the method of `nmt.evaluate compare=` (nmt/evaluation/seeds.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from settings import parse_settings

import nmt
from nmt.config import DataConfig
from nmt.data.corpus import iter_column, load_pairs
from nmt.data.references import collect_references
from nmt.evaluation.metrics import build_metrics, build_streams
from nmt.evaluation.seeds import bootstrap_scores, compare_means, pool_variances

RECIPE = (
    "data.limit=2000",
    "data.num_proc=1",
    "tokenizer.vocab_size=1000",
    "model.embed=64",
    "model.hidden=128",
    "model.dropout=0.1",
    "optim.lr=0.006",
    "train.max_epochs=8",
    "train.batch_tokens=1000",
    "train.validate_every=1000000",  # only at the end
)
DIVISIONS = 200  # of the runs into systems


def translate(run: Path, sources: list[str]) -> list[str]:
    """Return the translations of a run, which are kept in its folder."""
    path = run / "translations.json"
    if not path.exists():
        texts = [translation.text for translation in nmt.load(run, beam=1).translate(sources)]
        path.write_text(json.dumps(texts), encoding="utf-8")
    translations: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return translations


def main() -> None:
    settings = parse_settings(runs="90", groups="2,3,5", folder="runs/same_recipe")
    folder, count = Path(settings["folder"]), int(settings["runs"])
    seeds = ",".join(map(str, range(1, count + 1)))
    command = (sys.executable, "-m", "nmt.train", "-m", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=${seed}")
    subprocess.run([*command, "resume=auto", *RECIPE, f"seed={seeds}"], check=True)
    pairs = load_pairs(DataConfig(), "valid")
    sources, references = list(iter_column(pairs, "source")), collect_references(pairs)
    metric = build_metrics("13a", references)["bleu"]
    streams = build_streams(references)
    statistics = [
        np.array(metric._extract_corpus_statistics(translate(folder / str(seed), sources), streams), np.float64)
        for seed in range(1, count + 1)
    ]
    scores_R = np.array([metric._compute_score_from_stats(list(sums.sum(0))).score for sums in statistics])
    samples_BR = bootstrap_scores(metric._compute_score_from_stats, statistics)
    print(f"BLEU of {count} runs: {scores_R.mean():.2f} ± {scores_R.std(ddof=1):.2f} (standard deviation)")
    generator = np.random.default_rng(1)
    for size in map(int, settings["groups"].split(",")):
        p_values = []
        for _ in range(DIVISIONS):
            systems = generator.permutation(count)[: count - count % (2 * size)].reshape(-1, 2, size)
            for a, b in systems:
                pooled = pool_variances([scores_R[a], scores_R[b]], [samples_BR[:, a], samples_BR[:, b]])
                test = compare_means(scores_R[a], scores_R[b], samples_BR[:, a], samples_BR[:, b], pooled)
                p_values.append(test.p_value)
        rejected = np.mean(np.array(p_values) < 0.05)
        print(f"{size} runs each: {100 * rejected:.1f}% of {len(p_values):,} comparisons have p < 0.05")


if __name__ == "__main__":
    main()
