"""Measure time and memory for a large corpus: preparing it, starting from the cache, and reading it.

python scripts/bench_corpus.py pairs=20000000 folder=DIR

Writes a random corpus of that many pairs to the folder (2 GB for 20 million) unless it exists, works on it in separate
processes as a user would, and prints time and memory. Anonymous memory belongs to the process; the system can reclaim
memory mapped from files. Times include the start of the process and imports. The folder is deleted at the end, unless
keep=1. Other settings: vocabulary=8000 steps=20 updates=2000 train=0 (skips the training command).
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
from settings import parse_settings

from nmt.config import DataConfig, TokenizerConfig, TrainRun
from nmt.data.batching import collate, epoch_batches
from nmt.data.corpus import load_pairs
from nmt.data.encoding import encode_corpus, get_or_train_tokenizer
from nmt.data.stream import sample_stream, stream_windows
from nmt.system.logging import log_to_stderr

WORDS_PER_LANGUAGE = 100_000
PAIRS_PER_BLOCK = 250_000  # pairs in memory at a time
STREAM_WINDOWS = 10  # windows of a stream to read
CONTEXT = multiprocessing.get_context("spawn")


# ------------------------------------------------------------------------------------------------------------- corpus
def write_corpus(folder: Path, pairs: int) -> None:
    """Write line-aligned files of random sentences: 3 to 20 words with Zipf frequencies, about 50 bytes per line, both
    sides of similar length."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    vocabularies = {
        side: make_vocabulary(rng, letters) for side, letters in (("de", "aeinrstdhulcgmö"), ("en", "etaoinshrdlu"))
    }
    for split, size in {"valid": 500, "train": pairs}.items():
        with open(folder / f"{split}.de", "wb") as source, open(folder / f"{split}.en", "wb") as target:
            for start in range(0, size, PAIRS_PER_BLOCK):
                words = 3 + rng.binomial(17, 0.44, min(PAIRS_PER_BLOCK, size - start))
                source.write(make_sentences(rng, vocabularies["de"], words))
                target.write(
                    make_sentences(rng, vocabularies["en"], np.maximum(2, words + rng.integers(-1, 3, len(words))))
                )


def make_vocabulary(rng: np.random.Generator, letters: str) -> pa.Array:
    """Return random words, each with a trailing space; frequent words are short."""
    lengths = 2 + rng.poisson(np.linspace(1, 8, WORDS_PER_LANGUAGE) ** 0.8)
    drawn = rng.choice(list(letters), size=lengths.sum())
    return pa.array(["".join(word) + " " for word in np.split(drawn, np.cumsum(lengths)[:-1])])


def make_sentences(rng: np.random.Generator, words: pa.Array, lengths: np.ndarray) -> bytes:
    """Return lines of random words, with the given numbers of words."""
    ranks = (
        np.exp(rng.random(lengths.sum(), dtype=np.float32) * np.float32(np.log(WORDS_PER_LANGUAGE))).astype(np.int32)
        - 1
    )
    text = words.take(pa.array(ranks))
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, np.int32)[np.cumsum(lengths)]
    letters = np.frombuffer(data, np.uint8)[: ends[-1]].copy()
    letters[ends - 1] = ord("\n")
    return letters.tobytes()


# ----------------------------------------------------------------------------------------------------------- measures
def read_memory(process: int) -> dict[str, int]:
    """Return the bytes of anonymous and of file-mapped memory of a process, or {} if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: 1024 * int(size) for name, size in re.findall(r"(RssAnon|RssFile):\s+(\d+) kB", status)}


class MemoryWatch(threading.Thread):
    """Record the peak memory of a process, ten times per second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak = process, {"RssAnon": 0, "RssFile": 0}
        self.start()

    def run(self) -> None:
        while now := read_memory(self.process):
            self.peak = {name: max(size, now[name]) for name, size in self.peak.items()}
            time.sleep(0.1)


def prepare_and_read(run: TrainRun, updates: int, connection: Connection) -> None:
    """Prepare the corpus as training does up to its first batch, then measure reading of batches."""
    log_to_stderr()
    pairs = load_pairs(run.data, "train")
    encoded = encode_corpus(pairs, get_or_train_tokenizer(pairs, run), run)
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


def measure_stream(run: TrainRun) -> None:
    """Measure the same text as a stream, whose windows are read, tokenized, sorted and split into batches."""
    data, config = replace(run.data, streaming=True), replace(run.train, max_steps=1, validate_every=1)
    run = replace(run, data=data, train=config)
    coming = stream_windows(run, get_or_train_tokenizer(sample_stream(run), run), [])
    started, tokens = time.perf_counter(), 0
    for number, (pairs, _) in enumerate(itertools.islice(coming, STREAM_WINDOWS)):
        for rows in epoch_batches(pairs, run.train, run.seed, number):
            batch = collate(pairs, rows)
            tokens += int(batch.source_length_B.sum() + batch.target_length_B.sum())
    print(f"reading as a stream: {tokens / (time.perf_counter() - started):,.0f} tokens/s", flush=True)


def measure_preparation(name: str, run: TrainRun, pairs: int, updates: int) -> None:
    ours, theirs = CONTEXT.Pipe()
    started = time.perf_counter()
    process = CONTEXT.Process(target=prepare_and_read, args=(run, updates, theirs))
    process.start()
    watch = MemoryWatch(process.pid or 0)
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


def measure_training(name: str, folder: Path, vocabulary: int, steps: int) -> None:
    """Measure the training command."""
    settings = [f"data.path={folder / 'text'}", f"data.cache={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}"]
    settings += ["model=bahdanau", "data=text", "name=bench", "overwrite=true", "train.log_every=1"]
    settings += [f"tokenizer.vocab_size={vocabulary}", f"train.max_steps={steps}"]
    command = [sys.executable, "-m", "nmt.train", *settings]
    started, first = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    watch, before = MemoryWatch(process.pid), 0
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
    settings = parse_settings(
        pairs="20000000", folder="", vocabulary="8000", steps="20", updates="2000", train="1", keep="0"
    )
    if not settings["folder"]:
        sys.exit(__doc__)
    folder, pairs = Path(settings["folder"]).resolve(), int(settings["pairs"])
    text, cache = folder / "text", folder / "cache"
    if not (text / "train.de").exists():
        started = time.perf_counter()
        write_corpus(text, pairs)
        size = sum(file.stat().st_size for file in text.iterdir())
        print(f"{size / 1e9:.2f} GB of text written in {time.perf_counter() - started:.0f} s", flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    run = TrainRun(
        data=DataConfig(format="text", path=str(text), cache=str(cache)),
        tokenizer=TokenizerConfig(vocab_size=int(settings["vocabulary"])),
    )
    for name in ("cold", "warm"):
        measure_preparation(f"preparing, {name}", run, pairs, int(settings["updates"]))
    measure_stream(run)
    if settings["train"] == "1":
        measure_training("training, warm", folder, int(settings["vocabulary"]), int(settings["steps"]))
    if settings["keep"] != "1":
        for part in (text, cache, folder / "run"):
            shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    main()
