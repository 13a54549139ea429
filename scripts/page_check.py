"""Compare pages written by `nmt.export` with Python: greedy translations and attention of the same int8 weights.

    OMP_NUM_THREADS=1 python scripts/page_check.py folder=FOLDER sentences=1000

Trains five small models on the built-in corpus into FOLDER/runs, unless they exist, exports each and translates the
same sentences in a headless Chromium and in Python. Prints for each model how many translations are equal, the largest
difference of attention weights in these, and the time of the browser.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from settings import parse_settings

import nmt
from nmt.config import SearchConfig
from nmt.data.toy.corpus import generate
from nmt.decoding.translator import Translator
from nmt.runs.checkpoint import load_model
from nmt.system.device import prepare_model
from nmt.system.messages import pluralize

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from browser import Browser  # type: ignore[import-not-found]  # noqa: E402
from builders import round_weights  # type: ignore[import-not-found]  # noqa: E402

SIZES = (
    "model=bahdanau",
    "data.limit=2000",
    "tokenizer.vocab_size=800",
    "model.hidden=64",
    "model.embed=64",
    "optim.lr=0.005",
)
LENGTH = ("train.max_epochs=3", "train.batch_tokens=400", "train.validate_every=10000", "precision=fp32")
MODELS = {
    "default": (),
    "local_p": (
        "model.style=luong",
        "model.attention.score=general",
        "model.attention.window=local_p",
        "model.attention.half_width=4",
        "model.attention.normalizer=sparsemax",
    ),
    "gnmt": ("model.style=gnmt", "model.encoder_layers=2", "model.decoder_layers=2"),
    "gru": ("model.cell=gru", "model.encoder_layers=2", "model.decoder_layers=2", "tokenizer.type=unigram"),
    "multi30k": ("model.style=luong", "model.input_feeding=false", "model.tie=three", "model.shortcut=true"),
}
LINES_AT_ONCE = 25
CPU = torch.device("cpu")


def check_model(name: str, folder: Path, lines: list[str], browser: Browser) -> None:
    run, page = folder / "runs" / name, folder / f"{name}.html"
    if not (run / "checkpoints" / "best").exists():
        command = [sys.executable, "-m", "nmt.train", f"name={name}", "resume=auto", *SIZES, *LENGTH, *MODELS[name]]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    nmt.load(run, device="cpu").export(page)
    expected = [options[0] for options in load_rounded(run).translate(lines, keep_weights=True)]
    browser.open(page.resolve().as_uri())
    actual = []
    start = time.monotonic()
    for first in range(0, len(lines), LINES_AT_ONCE):
        text = json.dumps("\n".join(lines[first : first + LINES_AT_ONCE]))
        actual += browser.evaluate(f"(beam.value = 1, translator.translate({text}, () => {{}}))")
    seconds = time.monotonic() - start
    equal, largest = 0, 0.0
    for python, result in zip(expected, actual, strict=True):
        if python.text == result["options"][0]["text"]:
            equal += 1
            weights = python.record.word_weights()
            assert weights is not None
            largest = max(largest, float(np.abs(weights - np.array(result["options"][0]["weights"])).max()))
    print(
        f"{name}: {equal:,} of {pluralize(len(lines), 'translation')} equal ({len({t.text for t in expected}):,} "
        f"different ones), largest difference of a weight {largest:.1e}, {seconds:.0f} s",
        flush=True,
    )


def load_rounded(run: Path) -> Translator:
    """Return the model of a run with the weights of its page."""
    model, tokenizer, config, *_ = load_model(str(run))
    round_weights(model)
    prepare_model(model, "fp32", CPU)
    return Translator(model, tokenizer, SearchConfig(beam=1).with_source_limit_of(config.data), CPU)


def main() -> None:
    settings = parse_settings(folder="runs/page_check", sentences="1000")
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [pair.german for pair in generate(7, {"test": int(settings["sentences"])})["test"]]
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for name in MODELS:
            check_model(name, folder, lines, browser)
        browser.close()


if __name__ == "__main__":
    main()
