"""Models, corpora, batches and runs for tests, and functions that run commands."""

import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from hydra._internal.hydra import Hydra
from safetensors.torch import load_file
from torch import Tensor, nn

from nmt.config import (
    EOS,
    PAD,
    AttentionConfig,
    DataConfig,
    LinksConfig,
    ModelConfig,
    OptimConfig,
    SearchConfig,
    SelfAttentionConfig,
    TokenizerConfig,
    TrainConfig,
    TrainRun,
)
from nmt.data.batch import Batch
from nmt.data.batching import NO_SHAPES, collate, pick_shape
from nmt.data.corpus import load_pairs
from nmt.data.encoding import (
    EncodedPairs,
    EncodedSide,
    encode_corpus,
    get_or_train_tokenizer,
    sort_by_length,
)
from nmt.data.readers import TEXT_SCHEMA
from nmt.data.stream import (
    Window,
    stream_windows,
)
from nmt.data.tokenizer import Tokenizer, train_tokenizer
from nmt.data.toy.corpus import generate
from nmt.decoding.alignment import choose_alignment_format
from nmt.decoding.beams import Hypothesis
from nmt.decoding.search import Literals, search_translations
from nmt.model.kernels.cuda_graphs import list_tensors
from nmt.model.reference import CELL_SPECS
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.page.export import quantize_tensors
from nmt.runs.checkpoint import find_last_intact_checkpoint
from nmt.runs.folder import find_last_checkpoint
from nmt.system.torchrun import LAUNCH_ENV
from nmt.training import loop as training
from nmt.training.data import TrainingData
from nmt.training.optim import build_optimizer
from nmt.training.progress import Progress
from nmt.training.state import TrainState, resume
from nmt.training.step import measure_batch

ROOT = Path(__file__).resolve().parent.parent
# Before Hydra runs a command it composes all settings once more, only to read `hydra.mode`, which no test sets. Without
# that a short command takes a tenth to a fifth less time. Commands in a new interpreter still do it.
Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preload"])
TINY_SIZES = (
    "tokenizer.vocab_size=500",
    "model.embed=16",
    "model.hidden=32",
    "model.dropout=0.1",
    "train.batch_tokens=400",
    "train.log_every=5",
    "optim.lr=0.005",
)
# Without input feeding a decoder computes all positions at once, and an update takes a quarter of the time.
TINY_SETTINGS = (*TINY_SIZES, "model.input_feeding=false")


def command_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command run in `folder`, with its own cache."""
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}


def run_in_new_process(
    command: str, *arguments: object, folder: Path, text: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m nmt.<command> arguments` in `folder` in a new Python process."""
    return subprocess.run(
        [sys.executable, "-m", f"nmt.{command}", *map(str, arguments)],
        cwd=folder,
        input=text,
        capture_output=True,
        timeout=300,
        env=command_environment(folder),
    )


def run_program(command: str, *arguments: str) -> None:
    """Run a command in this process."""
    sys.argv = [command, *arguments]
    getattr(importlib.import_module(f"nmt.{command}"), command)()


def run_in_folder(
    folder: Path, environment: dict[str, str], streams: list[Path], command: str, *arguments: str
) -> None:
    """Run a command in a folder and environment, with files as standard input, output and error."""
    os.chdir(folder)
    os.environ |= environment
    for number, path in enumerate(streams):
        with open(path, "wb" if number else "rb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # multiprocessing closes it
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)  # each line at once, as Python does it
    run_program(command, *arguments)


def run_nmt(
    command: str, *arguments: object, folder: Path, text: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a forked process with all imports done, several times faster than in a new process."""
    command_line = [command, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as temporary:
        stdin, stdout, stderr = (Path(temporary, name) for name in ("stdin", "stdout", "stderr"))
        stdin.write_bytes(text or b"")
        process = CONTEXT.Process(
            target=run_in_folder,
            args=(folder, command_environment(folder), [stdin, stdout, stderr], *command_line),
        )
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command_line, 300)
        return subprocess.CompletedProcess(command_line, process.exitcode, stdout.read_bytes(), stderr.read_bytes())


def run_ok(command: str, *arguments: object, folder: Path, text: bytes | None = None) -> str:
    """Run a command that must succeed, and return its standard output."""
    process = run_nmt(command, *arguments, folder=folder, text=text)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode()


def run_error(command: str, *arguments: object, folder: Path, text: bytes | None = None) -> str:
    """Run a command that must fail without a traceback, and return its error message."""
    process = run_nmt(command, *arguments, folder=folder, text=text)
    message = process.stderr.decode()
    assert process.returncode == 1 and "Traceback" not in message, message
    assert not process.stdout
    return message.splitlines()[-1]


def measure_peak_memory() -> int:
    """Return the peak memory of this process since the last call, in bytes, or 0 if the system does not count it."""
    try:
        [peak_kb] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, ValueError):
        return 0
    return int(peak_kb) * 1024


def write_corpus(folder: Path, **sizes: int) -> Path:
    """Write sentences of the built-in corpus as line-aligned files, with the given number of pairs per split.

    Gold links are written beside them: sure links as 0-1, possible links as 0?1.
    """
    for split, pairs in generate(1, sizes).items():
        links = []
        for pair in pairs:
            sure, possible = [f"{s}-{t}" for s, t in pair.sure], [f"{s}?{t}" for s, t in pair.possible]
            links.append(" ".join(sure + possible))
        columns = {"de": [pair.german for pair in pairs], "en": [pair.english for pair in pairs], "links": links}
        for suffix, lines in columns.items():
            (folder / f"{split}.{suffix}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


VOCABULARY = 13
STYLES: dict[str, dict[str, Any]] = {
    "bahdanau": {"style": "bahdanau"},
    "luong, input feeding": {"style": "luong", "input_feeding": True},
    "luong": {"style": "luong", "input_feeding": False},
    "gnmt": {"style": "gnmt"},
    "hybrid": {"style": "luong", "input_feeding": False, "encoder": "transformer"},
    "transformer": {"style": "transformer", "encoder": "transformer"},
}


def make_model(style: str = "bahdanau", cell: str = "lstm", **changes: object) -> Seq2Seq:
    """Return a small float64 model; `changes` are fields of ModelConfig."""
    settings = dict(embed=6, hidden=8, dropout=0.0, encoder_layers=2, decoder_layers=2, residual=True) | changes
    config = ModelConfig(cell=cell, attention=AttentionConfig(score="additive"), **STYLES[style] | settings)
    torch.manual_seed(5)
    model = build_model(config, VOCABULARY, VOCABULARY).double()
    model.dtype = torch.float64
    return model


def make_ragged_batch(lengths: tuple[int, ...] = (6, 3, 5, 1), target: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded source_BS, length_B and target_BT (`<s> ... </s>`) of different lengths."""
    generator = torch.Generator().manual_seed(3)
    source_BS = torch.randint(4, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    target_BT = torch.randint(4, VOCABULARY, (len(lengths), target + 2), generator=generator)
    target_BT[:, 0] = 2
    for row, length in enumerate(lengths):
        source_BS[row, length - 1], source_BS[row, length:] = EOS, PAD
        end = target + 1 - row % 3
        target_BT[row, end], target_BT[row, end + 1 :] = EOS, PAD
    return source_BS, torch.tensor(lengths), target_BT


LOCATION_POSITIONS = 3  # of the models below; less than the longest sentence
ATTENTION_STYLES: dict[str, dict[str, Any]] = {
    "bahdanau": {"style": "bahdanau"},
    "input feeding": {"style": "luong", "input_feeding": True},
    "luong": {"style": "luong", "input_feeding": False},
    "gnmt": {"style": "gnmt", "decoder_layers": 3},
    "hybrid": STYLES["hybrid"],
    "transformer": STYLES["transformer"],
    "transformer decoder": {"style": "transformer", "encoder_hidden": 6},
}


def randomize_(module: torch.nn.Module, scale: float) -> None:
    """Fill all parameters with random values, including those initialized to 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)


def make_attention_config(style: str, number: int = 0, **attention: Any) -> ModelConfig:
    """Return the settings of a model of a style; cell, depth, readout, shortcut and half width vary with `number`.

    `attention` are fields of AttentionConfig, and except for coverage of a Transformer's self-attention.
    """
    choose = random.Random(number).choice
    sizes = {} if attention["score"] == "none" else {"half_width": choose([1, 2])}
    attention_config = AttentionConfig(**sizes, **attention)
    settings = {"cell": choose(list(CELL_SPECS)), "decoder_layers": choose([1, 2])} | ATTENTION_STYLES[style]
    settings["readout"] = choose(["tanh", "maxout"]) if style == "bahdanau" else "tanh"
    settings["shortcut"] = choose([False, True])
    self_attention = (
        {"score": "scaled_dot"} if attention["score"] == "none" else {**sizes, **attention, "coverage": False}
    )
    return ModelConfig(
        embed=6,
        hidden=8,
        dropout=0.0,
        residual=True,
        attention=attention_config,
        self_attention=SelfAttentionConfig(**self_attention),
        **settings,
    )


def make_attention_model(style: str, number: int = 0, **attention: Any) -> Seq2Seq:
    """Return a float64 model of `make_attention_config` with random parameters."""
    with patch("nmt.model.attention.LOCATION_POSITIONS", LOCATION_POSITIONS):
        model = build_model(make_attention_config(style, number, **attention), VOCABULARY, VOCABULARY).double()
    model.dtype = torch.float64
    randomize_(model, 0.4)
    return model


def fake_capture_graph(work: Callable[[], Any], _: torch.device) -> tuple[Any, Callable[[], None]]:
    """Imitate `cuda_graphs.capture_graph`: return results, and a function that recomputes them in place."""
    results = work()

    def replay() -> None:
        for output, value in zip(list_tensors(results), list_tensors(work()), strict=True):
            output.copy_(value)

    for output in list_tensors(results):
        output.fill_(7)  # results are undefined until the first replay
    return results, replay


CPU = torch.device("cpu")


def make_state(corpus: Path, folder: Path, optim: dict[str, object] | None = None, **train: object) -> TrainState:
    """Return the state of a tiny run, resumed if the folder has a checkpoint."""
    run = TrainRun(
        data=DataConfig(format="text", path=str(corpus), cache=str(corpus / "cache")),
        tokenizer=TokenizerConfig(vocab_size=400),
        model=ModelConfig(style="luong", input_feeding=False, embed=8, hidden=16, dropout=0.1),  # as in TINY_SETTINGS
        optim=OptimConfig(**(optim or {})),
        train=TrainConfig(**({"batch_tokens": 400, "log_every": 2} | train)),
    )
    folder.mkdir(exist_ok=True)
    pairs = load_pairs(run.data, "train")
    tokenizer = get_or_train_tokenizer(pairs, run)
    tokenizer.save(folder)
    encoded = encode_corpus(pairs, tokenizer, run)
    torch.manual_seed(1)
    model = build_model(run.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    optimizer = build_optimizer(run.optim, model.parameters())
    valid = load_pairs(run.data, "valid")
    progress = Progress(encoded.key)
    if find_last_checkpoint(folder):
        progress = resume(run, folder, find_last_intact_checkpoint(folder), model, optimizer, encoded.key)
    return TrainState(run, folder, CPU, model, optimizer, TrainingData(run, encoded, valid, progress), progress)


def read_events(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def list_checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}


def write_alignments(path, records):
    """Return the bytes of an alignment file, in the format of its suffix."""
    format_record = choose_alignment_format(path)
    return "".join(f"{format_record(record, record.links(LinksConfig()))}\n" for record in records).encode()


class PageReader(HTMLParser):
    """Collect the elements of a page with the names of their attributes, and text by element ID or tag."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = defaultdict(str)
        self.current_element = ""
        self.feed(text)
        self.close()
        self.data = json.loads(self.text["data"])

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, tuple(attributes)))
        self.current_element = attributes.get("id") or tag
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self.current_element = ""

    def handle_data(self, data):
        self.text[self.current_element] += data


SUBWORDS = ("bpe", "unigram", "char")
TOKENIZER_TYPES = (*SUBWORDS, "word")
TEXT = "der die das Hund Katze läuft schläft schnell , . Straße 3 groß größer Größe Haus Häuser und auf im Haustür"
WORDS = TEXT.split()


def make_sentences(number: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(number)]


@lru_cache
def make_tokenizer(type: str, **settings: Any) -> Tokenizer:
    config = TokenizerConfig(type=type, vocab_size=320, **settings)
    return train_tokenizer(make_sentences(300), [line.upper() for line in make_sentences(300)], config)


SMALL_VOCABULARY = 19
MODEL_VARIANTS: dict[str, dict[str, Any]] = {
    "bahdanau": {},
    "bahdanau, two layers": {"decoder_layers": 2, "residual": True, "readout": "maxout"},
    "luong, input feeding": {"style": "luong", "decoder_layers": 2},
    "luong": {"style": "luong", "input_feeding": False, "tie": "three"},
    "luong, R-Drop": {"style": "luong", "input_feeding": False, "r_drop": 2.0},
    "gnmt": {"style": "gnmt", "encoder_layers": 2, "decoder_layers": 3, "residual": True},
    "local_m": {"attention": {"window": "local_m", "half_width": 1, "heads": 2}},
    "local_p": {"style": "luong", "attention": {"window": "local_p", "half_width": 1, "score": "general"}},
    "coverage": {"style": "luong", "input_feeding": False, "attention": {"coverage": True}},
    "transformer": {"style": "transformer", "encoder": "transformer", "decoder_layers": 2, "attention": {"heads": 2}},
}


def make_training_state(
    name: str, cell: str, dtype: torch.dtype, dropout: float = 0.2, kernels: str = "fast"
) -> TrainState:
    """Return the training state of a small model on random pairs."""
    settings = dict(MODEL_VARIANTS[name])
    attention, r_drop = AttentionConfig(**settings.pop("attention", {})), settings.pop("r_drop", 0.0)
    run = TrainRun(
        model=ModelConfig(cell=cell, embed=6, hidden=8, dropout=0.2, attention=attention, **settings),
        optim=OptimConfig(lr=0.02, schedule="constant", warmup=0, clip=1.0, label_smoothing=0.1),
        train=TrainConfig(batch_sentences=8, accumulate=2, r_drop=r_drop),
    )
    rng = np.random.default_rng(1)

    def make_side() -> EncodedSide:
        offsets = np.concatenate([[0], rng.integers(1, 9, 40).cumsum()])
        return EncodedSide(rng.integers(4, SMALL_VOCABULARY, offsets[-1], dtype=np.int32), offsets)

    unused: Any = None
    source, target = make_side(), make_side()
    order, runs = sort_by_length(np.stack([source.lengths(np.arange(40)), target.lengths(np.arange(40))]))
    pairs = EncodedPairs("random", unused, unused, source, target, order, runs, 99, 0.0, False)
    torch.manual_seed(1)
    model = build_model(replace(run.model, dropout=dropout, kernels=kernels), SMALL_VOCABULARY, SMALL_VOCABULARY).to(
        dtype
    )
    model.dtype = dtype
    for parameter in model.parameters():
        nn.init.normal_(parameter.detach(), std=0.4)  # include biases and coverage
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    progress = Progress("random")
    data = TrainingData(run, pairs, unused, progress)
    return TrainState(run, Path(), CPU, model, optimizer, data, progress)


def build_padded_batch(state: TrainState, pairs: np.ndarray) -> Batch:
    """Return the batch of some pairs, padded as on a GPU, with two more padding pairs."""
    count, source, target = pick_shape(measure_batch(state.data.pairs, pairs), NO_SHAPES)
    return collate(state.data.pairs, pairs).pad_to(count + 2, source, target)


def make_pairs(source: list[int], target: list[int]) -> EncodedPairs:
    """Return pairs with the given lengths, `</s>` included, and arbitrary pieces."""
    sides = []
    for lengths in (source, target):
        offsets = np.cumsum([0, *(length - 1 for length in lengths)])
        sides.append(EncodedSide(np.arange(offsets[-1], dtype=np.int32), offsets))
    order, runs = sort_by_length(np.array([source, target]))
    return EncodedPairs("", TEXT_SCHEMA.empty_table(), Tokenizer, *sides, order, runs, 100, 0.0, False)  # type: ignore[arg-type]


SMALL_SETTINGS = (
    "tokenizer.vocab_size=400",
    "model.input_feeding=false",  # as in TINY_SETTINGS
    "model.embed=8",
    "model.hidden=16",
    "train.batch_tokens=400",
    "optim.lr=0.005",
)
EXACT_SETTINGS = (
    *SMALL_SETTINGS,
    "precision=fp64",
    "model.dropout=0",
    "train.log_every=1",
    "train.max_steps=20",
    "train.validate_every=20",
)


def run_rank(
    number: int, count: int, port: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Call `work` as one rank of `count`, and append its output to the file `output`."""
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_CACHE_HOME": str(folder / "cache")}
    LAUNCH_ENV.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, RANK=number, LOCAL_RANK=number)
    with open("output", "ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    work(*arguments)


def run_ranks(count: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> tuple[int, str]:
    """Call `work` with `count` ranks, and return the first nonzero exit code, or 0, and their output.

    Like torchrun, terminate all ranks when one fails.
    """
    folder.mkdir(exist_ok=True)
    (folder / "output").write_bytes(b"")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, count, store.port, folder, work, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    code, deadline = 0, time.monotonic() + 120
    while alive := [process for process in processes if process.exitcode is None]:
        if not wait([process.sentinel for process in alive], deadline - time.monotonic()):
            for process in alive:
                process.kill()
            raise TimeoutError((folder / "output").read_text())
        for process in processes:
            code = code or process.exitcode or 0
        if code:
            for process in alive:
                process.terminate()
    return code, (folder / "output").read_text()


def run_ranks_ok(count: int, folder: Path, name: str, *arguments: object) -> str:
    """Run a command with `count` ranks, and return its output."""
    code, output = run_ranks(count, folder, run_program, name, *map(str, arguments))
    assert code == 0, output
    return output


def run_ranks_error(count: int, folder: Path, name: str, *arguments: object) -> str:
    """Run a command that must fail with one error message and no traceback, and return the message."""
    code, output = run_ranks(count, folder, run_program, name, *map(str, arguments))
    assert code == 1 and "Traceback" not in output, output
    [message] = re.findall("^error: (.*)", output, re.MULTILINE)
    return str(message)


def load_last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(find_last_intact_checkpoint(run) / "model.safetensors")


Pair = tuple[str, str]
SCHEDULE = {"max_steps": 9, "validate_every": 9}


def make_random_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Return random pairs that are all different."""
    rng = random.Random(seed)
    sources, targets = (
        [" ".join(rng.choices(["ab", "cd", "ef", "gh", "abcd"], k=rng.randint(1, 9))) for _ in range(count)]
        for _ in range(2)
    )
    texts = enumerate(zip(sources, targets, strict=True))
    return [(f"{seed} {number} {source}", f"{target} {number}") for number, (source, target) in texts]


def write_files(folder: Path, *shards: list[Pair]) -> Path:
    """Write the line-aligned files of a training split; several shards have numbers in their names."""
    folder.mkdir(exist_ok=True)
    for number, pairs in enumerate(shards):
        shard = f".{number}" if len(shards) > 1 else ""
        for side, suffix in enumerate(("de", "en")):
            (folder / f"train{shard}.{suffix}").write_text("".join(pair[side] + "\n" for pair in pairs))
    return folder


def make_run(path: Path, *, seed: int = 1, **data: Any) -> TrainRun:
    """Return the configuration of a run on streamed text."""
    settings = {"format": "text", "path": str(path), "streaming": True, "cache": str(path.parent / "cache")}
    return TrainRun(data=DataConfig(**settings | data), train=TrainConfig(**SCHEDULE), seed=seed)


def list_pairs(window: Window) -> list[Pair]:
    pairs = window.pairs.pairs
    return list(zip(pairs["source"].to_pylist(), pairs["target"].to_pylist(), strict=True))


def take_windows(run: TrainRun, tokenizer: Tokenizer, count: int, offsets: Any = ()) -> list[Window]:
    """Return the first windows of a stream, or the next ones from the given offsets."""
    windows = stream_windows(run, tokenizer, list(offsets))
    try:
        return list(itertools.islice(windows, count))
    finally:
        windows.close()  # type: ignore[attr-defined]


def train_until_signal(step: int, times: int, *arguments: str) -> None:
    """Train, and send SIGTERM `times` times during the update after `step`."""
    train_step: Callable[..., Any] = training.train_step

    def interrupted_step(state: Any, *args: Any) -> Any:
        for _ in range(times if state.progress.step == step else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(state, *args)

    training.train_step = interrupted_step  # type: ignore[assignment]
    run_program("train", *arguments)


def read_all_events(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def sharpen(model: Seq2Seq, factor: float = 3.0) -> Seq2Seq:
    """Scale up the weights to make probabilities less uniform and vary the lengths of hypotheses."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
        model.output.bias[EOS] += 4
    return model.eval()


SEARCH_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no penalty": {"length_penalty": 0.0},
    "coverage": {"coverage_penalty": 0.5},
    "length": {"max_ratio": 1.0, "max_length": 8},
    "sample": {"sample": True, "beam": 5, "temperature": 1.5, "top_k": 6},
}


# ---------------------------------------------------------------------------------------------------------- odd text
ODD_CHARACTERS = (
    "  \t\0\x07\x1c\x7f\x85\n\r\u00a0\u0301\u1680\u2028\u2029\u200d\u202e\u2581\u2585\u3000\ufeff\ufffd<>&\"'\\{}aäשמ"
    "😀🏽"
)
SPECIAL_STRINGS = (
    *["<s>", "</s>", "<pad>", "<unk>", "▁<unk>", "<0x41>", "<0x0A>", "</script>", "<!--", "0-0"],
    " ⁇ ",
    "Der Hund ",
)
ODD_LINES = [
    "Der Hund schläft .",
    "",
    "   ",
    "emoji 😀👩‍👩‍👧",
    "مرحبا بالعالم",
    "tab\there",
    "bell\x07 and \x00 NUL",
    "lone \r carriage return",
    "line\u2028separator",
    "▁ underline",
    "x" * 10_000,
    "a b c . " * 1_250,
    "Ende",
]
HOSTILE = [
    "<script>hacked=1</script>",
    "</script><script>hacked=1</script>",
    "</script x",
    "<!--<script>",
    "-->",
    "]]>",
    "</title><b>",
    "<img src=x onerror=hacked=1>",
    "\" onfocus='hacked=1' autofocus=\"",
    "&lt;b&gt;&amp;",
    "\u2028hacked=1//",
    "\u202eright\u202cto\u2066left",
    "<!--DATA-->",
    "<!--TITLE-->",
    "\\",
    "\x00\x1b[31m",
    "${hacked=1}",
    "__proto__",
    "مرحبا",
    "👩‍👩‍👧",
    "w" * 300,
]


def search(
    model: Any,
    source_BS: Tensor,
    length_B: Tensor,
    config: SearchConfig,
    keep_weights: bool = False,
    prefixes: list[list[int]] | None = None,
    literals: Literals | None = None,
    batch_size: int | None = None,
) -> list[list[Hypothesis]]:
    """Return the results of `search_translations` in the order of the sentences, `batch_size` at a time."""
    results: list[list[Hypothesis]] = []
    for start in range(0, len(source_BS), batch_size or len(source_BS)):
        rows = slice(start, start + (batch_size or len(source_BS)))
        source = source_BS[rows, : int(length_B[rows].max())], length_B[rows]
        given = prefixes and prefixes[rows], literals and literals._replace(of_sentences=literals.of_sentences[rows])
        found = dict(search_translations(model, *source, config, keep_weights, *given))
        results += [found[sentence] for sentence in range(len(found))]
    return results


def round_weights(model: Seq2Seq) -> None:
    """Replace the weights of a model by those of its page: int8 values times their scales."""
    quantized = quantize_tensors(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values, scales = quantized[name]
            parameter.copy_(values if scales is None else values * scales.unsqueeze(1))
