"""Compare translation quality with Eole 0.6.4 on the same text: its best epoch and runs of nmt.

python scripts/bench_quality.py data=DIR source=de target=en epochs=18 runs=runs/NAME     # DIR/{train,valid,test}.*

Eole trains its recurrent model (scripts/eole.yaml: LSTM, embeddings 256, encoder 2 x 256, decoder 512, additive
attention with input feeding, shared embeddings, dropout 0.3, label smoothing 0.1, Adam with a rate of 0.001 that decays
in the last four ninths of training, 64 pairs per update) on 8,000 joint BPE pieces (or pieces=N), in a separate virtual
environment (`env`, next to the folder). After each epoch it translates the validation text greedily, as nmt does; the
epoch with the best BLEU translates the test text with beam 5 (or beam=N) and whichever length penalty is better on the
validation text, Eole's default or that of nmt. The runs of nmt are all those below `runs`. They must have the same
settings but for the seed, and must have been evaluated on the test split with the same beam (`python -m nmt.evaluate
checkpoint=... search.beam=N`). Everything is kept in a folder, by default under runs/bench_quality, and reused.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import sacrebleu
import yaml
from common import (
    SCRIPTS_DIR,
    build_predict_command,
    install_eole,
    join_pieces,
    parse_settings,
    read_lines,
    run_command,
    write_eole_config,
    write_pieces,
)
from xxhash import xxh3_128_hexdigest

from nmt.config import NON_NUMERIC_KEYS, TokenizerConfig
from nmt.data.tokenizer import train_tokenizer
from nmt.errors import UserError

SENTENCES_PER_UPDATE = 64  # of Eole
PENALTIES = ("avg", "wu")  # the default of Eole, mean log-probability per piece, and that of nmt (Wu et al. 2016)
MAX_LENGTH = 100


def translate_with_eole(eole: Path, model: Path, source: Path, output: Path, beam: int, penalty: str) -> list[str]:
    if not output.exists():
        part = output.with_name(f"{output.name}.part")
        command = build_predict_command(eole, model, source, part, beam, MAX_LENGTH, penalty)
        run_command(*command, log=output.with_name(f"{output.name}.log"))
        part.rename(output)
    return join_pieces(read_lines(output))


def read_scores(runs: list[Path], data: Path, source: str, target: str, beam: int) -> dict[str, float]:
    """Return the BLEU of runs of nmt, all trained and evaluated on this corpus with the same settings."""
    found = {}
    alike: dict[str, Any] = {}  # settings of the first run
    for run in runs:
        path = run / "eval" / "test" / "metrics.json"
        if not path.is_file():
            sys.exit(f"{path} is missing: python -m nmt.evaluate 'checkpoint=\"{run}\"' search.beam={beam}")
        tested = json.loads(path.read_text(encoding="utf-8"))
        if tested["search"]["beam"] != beam:
            sys.exit(f"{path} is for beam {tested['search']['beam']}; give that as beam=, or evaluate again")
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        for own in (config["data"], tested["data"]):
            if (Path(own["path"] or "").resolve(), own["source"], own["target"]) != (data, source, target):
                sys.exit(f"{run} is of {own['path']}, {own['source']} to {own['target']}")
        sections = {name: config[name] for name in ("tokenizer", "model", "optim", "train")}
        sections["search"] = tested["search"]
        settings = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
        settings = {key: value for key, value in settings.items() if key not in NON_NUMERIC_KEYS}
        alike = alike or settings
        if unlike := [key for key, value in settings.items() if value != alike.get(key)]:
            sys.exit(f"the runs must have the same settings, but {runs[0]} and {run} differ in {', '.join(unlike)}")
        found[str(run)] = float(tested["bleu"])
    return found


def train_eole(eole: Path, data: Path, source: str, target: str, folder: Path, epochs: int, pieces: int) -> list[Path]:
    """Train Eole, unless that is done, and return the checkpoint of each epoch."""
    text = read_lines(data / f"train.{source}")
    epoch = -(-len(text) // SENTENCES_PER_UPDATE)
    checkpoints = [folder / "model" / f"step_{number * epoch}" for number in range(1, epochs + 1)]
    if not (folder / "minutes").exists():
        (folder / "vocabulary").unlink(missing_ok=True)
        try:
            tokenizer = train_tokenizer(text, read_lines(data / f"train.{target}"), TokenizerConfig(vocab_size=pieces))
        except UserError as error:
            sys.exit(f"pieces={pieces}: {error}")
        write_pieces(tokenizer, data, source, target, folder)
        config = write_eole_config(eole, folder, epoch * epochs, 50, epoch)
        took = run_command(eole, "train", "-config", config, log=folder / "eole.log")
        (folder / "minutes").write_text(f"{took / 60:.0f}")
    return checkpoints


def main() -> None:
    settings = parse_settings(
        source="de", target="en", epochs="18", pieces="8000", beam="5", data="", runs="", folder=""
    )
    numbers = [int(settings[key]) if settings[key].isdigit() else 0 for key in ("epochs", "pieces", "beam")]
    if not settings["data"]:
        sys.exit(__doc__)
    if not all(numbers):
        sys.exit("epochs=, pieces= and beam= must be positive integers")
    epochs, pieces, beam = numbers
    data, source, target = Path(settings["data"]).resolve(), settings["source"], settings["target"]
    files = [data / f"{split}.{side}" for split in ("train", "valid", "test") for side in (source, target)]
    if missing := [str(path) for path in files if not path.is_file()]:
        sys.exit(f"missing: {', '.join(missing)}")
    given = settings["runs"]
    runs = sorted(path.parent for path in Path(given).rglob("config.yaml")) if given else []
    if given and not runs:
        sys.exit(f"runs={given} has no run")
    scores = read_scores(runs, data, source, target, beam)
    name = f"{data.name}_{source}_{target}_{epochs}_epochs_{pieces}_pieces"
    folder = Path(settings["folder"] or f"runs/bench_quality/{name}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "digests"
    digests = "".join(f"{xxh3_128_hexdigest(path.read_bytes())}\n" for path in [*files, SCRIPTS_DIR / "eole.yaml"])
    if known.exists() and known.read_text() != digests:
        sys.exit(f"{folder} is for different text or scripts/eole.yaml; give another folder=")
    known.write_text(digests)
    eole = install_eole(folder.parent)  # shared by all corpora
    checkpoints = train_eole(eole, data, source, target, folder, epochs, pieces)
    references = {split: read_lines(data / f"{split}.{target}") for split in ("valid", "test")}

    def translated(number: int, split: str, beam: int, penalty: str) -> list[str]:
        output = folder / f"{split}.{number}.beam_{beam}.{penalty}"
        return translate_with_eole(eole, checkpoints[number - 1], folder / f"{split}.source", output, beam, penalty)

    def bleu(found: list[str], split: str) -> float:
        return sacrebleu.corpus_bleu(found, [references[split]]).score

    curve = []
    for number in range(1, epochs + 1):
        curve.append(bleu(translated(number, "valid", 1, "none"), "valid"))
        print(f"Eole, epoch {number}: BLEU {curve[-1]:.2f} on the validation text, greedy", flush=True)
    best = curve.index(max(curve)) + 1
    if best == epochs:
        print(f"the last epoch is the best, so more epochs may be better: epochs={epochs + epochs // 2}")
    valid = {penalty: bleu(translated(best, "valid", beam, penalty), "valid") for penalty in PENALTIES}
    penalty = max(valid, key=valid.__getitem__)
    found = translated(best, "test", beam, penalty)
    score = bleu(found, "test")
    chrf, ter = (
        measure(found, [references["test"]]).score for measure in (sacrebleu.corpus_chrf, sacrebleu.corpus_ter)
    )
    minutes = (folder / "minutes").read_text()
    print(f"Eole, epoch {best}, the best of {epochs} ({minutes} min), with beam {beam}, length penalty {penalty}:")
    others = ", ".join(f"{valid[other]:.2f} with {other}" for other in PENALTIES if other != penalty)
    print(f"BLEU {valid[penalty]:.2f} of the validation text ({others})")
    print(f"BLEU {score:.2f}, chrF {chrf:.2f}, TER {ter:.2f} of the test text")
    for path, own in scores.items():
        print(f"{path}: BLEU {own:.2f}, {own - score:+.2f}")
    if len(scores) > 1:
        print(f"mean {mean(scores.values()):.2f} ± {stdev(scores.values()):.2f}, {mean(scores.values()) - score:+.2f}")


if __name__ == "__main__":
    main()
