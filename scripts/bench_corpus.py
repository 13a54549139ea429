"""What a large corpus costs: preparing it, starting on it again, reading it, and memory.

python scripts/bench_corpus.py pairs=20000000 folder=DIR

Writes a corpus of so many pairs to the folder (2 GB for 20 million, unless it is there already), runs the command in
processes of their own as a user would, and prints what they took. Anonymous memory is what a process holds of its own;
what it maps from files goes where it is needed. Times count from the start of the process, imports included. What was
written is deleted at the end, unless keep=1. Other settings: vocabulary=8000 steps=20 updates=2000 train=0 (leaves the
training command out).
"""

import itertools
import multiprocessing
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
from settings import settings_given

from nmt.config import DataConfig, TokenizerConfig, TrainRun
from nmt.data.batching import collate, epoch_batches
from nmt.data.corpus import load_pairs
from nmt.data.encoding import cached_tokenizer, encode_corpus
from nmt.data.stream import sample_stream, stream_windows
from nmt.runtime.logging import log_to_stderr

WORDS = 100_000  # of each language
BLOCK = 250_000  # pairs in memory at a time
WINDOWS = 10  # of a stream
CONTEXT = multiprocessing.get_context("spawn")


# ------------------------------------------------------------------------------------------------------------- corpus
def generate(folder: Path, pairs: int) -> None:
    """Line-aligned files of made-up sentences: 3 to 20 words, as frequent as words are (Zipf), about 50 bytes a line,
    the sides of like length."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    vocabularies = {
        side: vocabulary(rng, letters) for side, letters in (("de", "aeinrstdhulcgmö"), ("en", "etaoinshrdlu"))
    }
    for split, size in {"valid": 500, "train": pairs}.items():
        with open(folder / f"{split}.de", "wb") as source, open(folder / f"{split}.en", "wb") as target:
            for start in range(0, size, BLOCK):
                words = 3 + rng.binomial(17, 0.44, min(BLOCK, size - start))
                source.write(sentences(rng, vocabularies["de"], words))
                target.write(sentences(rng, vocabularies["en"], np.maximum(2, words + rng.integers(-1, 3, len(words)))))


def vocabulary(rng: np.random.Generator, letters: str) -> pa.Array:
    """Words with a space after each; the frequent ones are short."""
    lengths = 2 + rng.poisson(np.linspace(1, 8, WORDS) ** 0.8)
    drawn = rng.choice(list(letters), size=lengths.sum())
    return pa.array(["".join(word) + " " for word in np.split(drawn, np.cumsum(lengths)[:-1])])


def sentences(rng: np.random.Generator, words: pa.Array, lengths: np.ndarray) -> bytes:
    """Lines of so many words."""
    ranks = np.exp(rng.random(lengths.sum(), dtype=np.float32) * np.float32(np.log(WORDS))).astype(np.int32) - 1
    text = words.take(pa.array(ranks))
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, np.int32)[np.cumsum(lengths)]
    letters = np.frombuffer(data, np.uint8)[: ends[-1]].copy()
    letters[ends - 1] = ord("\n")
    return letters.tobytes()


# ----------------------------------------------------------------------------------------------------------- measures
def memory(process: int) -> dict[str, int]:
    """Bytes of a process that are its own, and those that are of files; none of one that has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: 1024 * int(size) for name, size in re.findall(r"(RssAnon|RssFile):\s+(\d+) kB", status)}


class Watch(threading.Thread):
    """Looks at the memory of a process ten times a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak = process, {"RssAnon": 0, "RssFile": 0}
        self.start()

    def run(self) -> None:
        while now := memory(self.process):
            self.peak = {name: max(size, now[name]) for name, size in self.peak.items()}
            time.sleep(0.1)


def prepare(run: TrainRun, updates: int, connection: Connection) -> None:
    """What training does up to its first batch; then the first batches alone."""
    log_to_stderr()
    pairs = load_pairs(run.data, "train")
    encoded = encode_corpus(pairs, cached_tokenizer(pairs, run), run)
    started = time.perf_counter()
    batches = epoch_batches(encoded, run.train, run.seed, 0)
    ordered = time.perf_counter() - started
    collate(encoded, batches[0])
    connection.send(("first batch", len(encoded), ordered))
    started, tokens = time.perf_counter(), 0
    for i in range(min(updates, len(batches))):
        batch = collate(encoded, batches[i])
        tokens += int(batch.source_length_B.sum() + batch.target_length_B.sum())
    connection.send(("read", tokens / (time.perf_counter() - started), 0.0))


def read_stream(run: TrainRun) -> None:
    """The same text as a stream: windows read, tokenized, sorted and cut into batches."""
    data, config = replace(run.data, streaming=True), replace(run.train, max_steps=1, validate_every=1)
    run = replace(run, data=data, train=config)
    coming = stream_windows(run, cached_tokenizer(sample_stream(run), run), [])
    started, tokens = time.perf_counter(), 0
    for number, (pairs, _) in enumerate(itertools.islice(coming, WINDOWS)):
        for rows in epoch_batches(pairs, run.train, run.seed, number):
            batch = collate(pairs, rows)
            tokens += int(batch.source_length_B.sum() + batch.target_length_B.sum())
    print(f"reading as a stream: {tokens / (time.perf_counter() - started):,.0f} tokens/s", flush=True)


def start(name: str, run: TrainRun, pairs: int, updates: int) -> None:
    ours, theirs = CONTEXT.Pipe()
    started = time.perf_counter()
    process = CONTEXT.Process(target=prepare, args=(run, updates, theirs))
    process.start()
    watch = Watch(process.pid or 0)
    theirs.close()
    _, kept, ordered = ours.recv()
    seconds, peak = time.perf_counter() - started, dict(watch.peak)
    _, speed, _ = ours.recv()
    process.join()
    print(
        f"{name}: first batch of {kept:,} pairs after {seconds:.1f} s ({pairs / seconds:,.0f} pairs/s; the order of an "
        f"epoch {ordered:.1f} s), {peak['RssAnon'] / 1e9:.2f} GB anonymous, {peak['RssFile'] / 1e9:.2f} GB of files; "
        f"reading alone {speed:,.0f} tokens/s",
        flush=True,
    )


def train(name: str, folder: Path, vocabulary: int, steps: int) -> None:
    """The command itself."""
    command = [sys.executable, "-m", "nmt.train", "data=text", f"data.path={folder / 'text'}", "name=bench",
               f"data.cache={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}", "overwrite=true",
               f"tokenizer.vocab_size={vocabulary}", f"train.max_steps={steps}", "train.log_every=1"]  # fmt: skip
    started, first = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    watch, before = Watch(process.pid), 0
    assert process.stderr is not None
    for line in process.stderr:
        if not first and line.startswith("step "):
            first, before = time.perf_counter() - started, watch.peak["RssAnon"]
            watch.peak["RssAnon"] = 0
    assert process.wait() == 0, "training failed"
    print(
        f"{name}: first update after {first:.1f} s, up to there {before / 1e9:.2f} GB anonymous, afterwards "
        f"{watch.peak['RssAnon'] / 1e9:.2f} GB with the model",
        flush=True,
    )


def main() -> None:
    settings = settings_given(
        pairs="20000000", folder="", vocabulary="8000", steps="20", updates="2000", train="1", keep="0"
    )
    if not settings["folder"]:
        sys.exit(__doc__)
    folder, pairs = Path(settings["folder"]).resolve(), int(settings["pairs"])
    text, cache = folder / "text", folder / "cache"
    if not (text / "train.de").exists():
        started = time.perf_counter()
        generate(text, pairs)
        size = sum(file.stat().st_size for file in text.iterdir())
        print(f"{size / 1e9:.2f} GB of text made in {time.perf_counter() - started:.0f} s", flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    run = TrainRun(
        data=DataConfig(format="text", path=str(text), cache=str(cache)),
        tokenizer=TokenizerConfig(vocab_size=int(settings["vocabulary"])),
    )
    for name in ("cold", "warm"):
        start(f"preparing, {name}", run, pairs, int(settings["updates"]))
    read_stream(run)
    if settings["train"] == "1":
        train("training, warm", folder, int(settings["vocabulary"]), int(settings["steps"]))
    if settings["keep"] != "1":
        for part in (text, cache, folder / "run"):
            shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    main()
