"""Check on a GPU that every code path is correct, and measure its speed and the quality of its models.

python scripts/gpu.py                             # all sections, nine minutes
python scripts/gpu.py sections=facts,correct      # some of facts, correct, speed, quality
python scripts/gpu.py text=DIR                    # also trains Multi30k's recipe on DIR/{train,valid,test}.{de,en}
python scripts/gpu.py device=cpu size=tiny        # tries the script itself, without a GPU

Writes to FOLDER: results.jsonl and table.md (each result as soon as it is known; the tables are printed at the end),
errors.txt (tracebacks of checks that raised an exception), and commands.txt (output of commands). FOLDER is folder=...,
else $OUT, else runs/gpu. Each section has a share of the time, and may use what earlier sections left;
checks for which no time is left are skipped. The exit code is 1 if a check failed. Other settings: minutes=9.
"""

import contextlib
import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_training import (
    OPTIM,
    SIZES,
    Size,
    System,
    count_flop_per_token,
    get_processor_name,
    make_random_corpus,
    make_random_pairs,
    measure_product_rate,
)
from bench_training import make_update as bare_updates
from checks import (
    ROOT,
    Check,
    CheckSkipped,
    Report,
    Setting,
    Values,
    read_last_output_line,
    run_section,
    start_python,
    wait_for_exit,
)
from common import parse_settings
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nmt.config import EOS, PRECISIONS, AttentionConfig, ModelConfig, SearchConfig, TrainConfig, TrainRun
from nmt.data.batching import collate, epoch_batches
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.tokenizer import SPECIALS
from nmt.decoding.search import Literals, score_targets, search_translations
from nmt.model.kernels import cuda_graphs as replay
from nmt.model.reference import CELL_SPECS
from nmt.model.seq2seq import build_model
from nmt.system.device import choose_device, choose_precision, prepare_model
from nmt.system.memory import PEAK_RESERVED_BYTES, peak_device_memory
from nmt.training.data import TrainingData
from nmt.training.optim import build_optimizer
from nmt.training.progress import Progress
from nmt.training.state import TrainState
from nmt.training.step import forward_backward, train_step

STYLES: dict[str, dict[str, Any]] = {
    "gnmt": {"style": "gnmt"},
    "luong, feeding": {"style": "luong"},
    "luong": {"style": "luong", "input_feeding": False},
    "bahdanau": {"style": "bahdanau"},
    "hybrid": {"style": "luong", "input_feeding": False, "encoder": "transformer"},
    "transformer": {"style": "transformer", "encoder": "transformer"},
}
BARE_VARIANTS = {"nn.LSTM over sentences": STYLES["gnmt"], "nn.LSTMCell, feeding": STYLES["luong, feeding"]}
VARIANTS: dict[str, dict[str, Any]] = {
    **{n: changes | {"encoder_layers": 2, "decoder_layers": 2} for n, changes in STYLES.items()},
    "gnmt, residual": {"style": "gnmt", "decoder_layers": 3, "residual": True},
    "maxout, residual": {"decoder_layers": 2, "residual": True, "readout": "maxout"},
    "tied": {"style": "luong", "input_feeding": False, "tie": "three", "shortcut": True},
    "R-Drop": {"style": "luong", "input_feeding": False, "r_drop": 2.0},
    "local_m, heads": {"attention": {"window": "local_m", "half_width": 1, "heads": 2}},
    "local_p, general": {"style": "luong", "attention": {"window": "local_p", "half_width": 1, "score": "general"}},
    "coverage": {"style": "luong", "input_feeding": False, "attention": {"coverage": True}},
    "sparsemax, dot": {"attention": {"normalizer": "sparsemax", "score": "dot"}},
    "entmax15, location": {"style": "luong", "attention": {"normalizer": "entmax15", "score": "location"}},
    "no attention": {"attention": {"score": "none"}},
}
# Largest allowed relative norm of the error of a parameter's gradient, generous for the rounding of a matrix product
# and its growth in the backward pass through a sentence.
MAX_RELATIVE_NORMS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 2e-2, "bf16": 2e-1}
SEARCH_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam 4": {"beam": 4, "n_best": 4},
    "sampling": {"sample": True, "n_best": 3, "temperature": 2.0, "top_k": 6},
    "coverage": {"coverage_penalty": 0.5, "length_penalty": 0.0},
    "long": {"max_length": 40, "max_ratio": 20.0, "length_penalty": 9.0},  # more tokens than fit at first
}
PAIRS_PER_EPOCH = 15_000
SENTENCE_PIECES = 16  # of sentences to translate, as for 12 words of Multi30k
WARMUP_UPDATES = 3  # updates after which a shape has a CUDA graph
TINY_SETTINGS = (
    "tokenizer.vocab_size=400",
    "model.embed=16",
    "model.hidden=32",
    "data.limit=300",
    "train.batch_tokens=2000",
)


def free_memory(device: torch.device) -> None:
    """Free the memory of earlier checks, including CUDA graphs and their memory pool."""
    gc.collect()
    replay.drop_graphs()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        PEAK_RESERVED_BYTES.clear()


def build_training_command(setting: Setting, name: str, *words: str) -> list[str]:
    """Return a command that trains on the built-in corpus, or on `text` with size=tiny, for a faster validation."""
    text = ("data=text", f"data.path={setting.text}") if setting.tiny and setting.text else ()
    return ["-m", "nmt.train", f"name={name}", f"device={setting.device}", *text, *words, *TINY_SETTINGS * setting.tiny]


def read_events(run: Path) -> list[Values]:
    """Read the complete lines of a run's metrics.jsonl, without speed and memory."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in event.items() if not re.search("second|memory", k)} for event in found]


# -------------------------------------------------------------------------------------------------------------- facts
def list_fact_checks(setting: Setting) -> list[Check]:
    products: list[Check] = [
        (f"product, {name}", partial(measure_product, precision=name)) for name in ("bf16", "fp32")
    ]
    return [("versions", report_versions), ("card", report_card), *products]


def report_versions(setting: Setting) -> Iterator[Values]:
    yield {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "processor": get_processor_name(),
        "cores": os.cpu_count(),
    }


def report_card(setting: Setting) -> Iterator[Values]:
    setting.require_gpu()
    found = torch.cuda.get_device_properties(setting.device)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    yield {"card": found.name, "GB": found.total_memory / 1e9, "driver": driver}


def measure_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds of `rounds` calls, after one warm-up."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times[1:])


@cache
def get_product_rate(device: torch.device, precision: str) -> float:
    return measure_product_rate(device, precision)


def measure_product(setting: Setting, precision: str) -> Iterator[Values]:
    yield {"TFLOP/s": get_product_rate(setting.device, precision) / 1e12}


# ------------------------------------------------------------------------------------------------------------ correct
def list_correctness_checks(setting: Setting) -> list[Check]:
    names, cells = ([*STYLES][:2], ["lstm"]) if setting.tiny else ([*VARIANTS], [*CELL_SPECS])
    both = [(name, cell) for name in names for cell in cells]
    return [
        *((f"gradients, {n}, {cell}", partial(check_gradients, name=n, cell=cell)) for n, cell in both),
        *((f"graph, {name}", partial(check_graph, name=name)) for name in VARIANTS),
        *((f"no waiting, {name}", partial(check_no_synchronization, name=name)) for name in STYLES),
        *(
            (f"search, {name}, {cell}", partial(check_search, name=name, cell=cell))
            for name in names[: len(STYLES)]
            for cell in cells
        ),
        ("out of memory", check_out_of_memory),
        ("training stopped and resumed", check_resuming),
        ("the suite's tests of a GPU", run_test_suite),
    ]


def make_sentences(setting: Setting, count: int, longest: int) -> tuple[EncodedPairs, int]:
    """Return random pairs, and the size of their vocabulary."""
    rng, vocabulary = np.random.default_rng(2), 19 if setting.tiny else 500
    source, target = rng.integers(1, longest, (2, count))
    return make_random_pairs(source, target, vocabulary), vocabulary


def make_state(
    config: ModelConfig,
    vocabulary: int,
    encoded: EncodedPairs,
    device: torch.device,
    precision: str,
    train: TrainConfig | None = None,
    dropout: float | None = None,
) -> TrainState:
    """Return the training state of a new model, initialized on its device."""
    run = TrainRun(model=config, optim=OPTIM, train=train or TrainConfig(max_steps=10**6), precision=precision)
    torch.manual_seed(1)
    with device:
        model = build_model(config if dropout is None else replace(config, dropout=dropout), vocabulary, vocabulary)
    prepare_model(model, precision, device, training=True)
    nothing: Any = None
    optimizer = build_optimizer(run.optim, model.parameters())
    progress = Progress(encoded.key)
    data = TrainingData(run, encoded, nothing, progress)
    return TrainState(run, Path(), device, model, optimizer, data, progress)


def set_fixed_weights(model: nn.Module) -> None:
    """Set the same random weights and biases on every device, larger than at initialization."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.detach().copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def make_small_state(
    setting: Setting, name: str, cell: str, device: torch.device, precision: str, dropout: float
) -> TrainState:
    """Return the training state of a small model of a variant."""
    changes = dict(VARIANTS[name])
    attention = AttentionConfig(**changes.pop("attention", {}))
    train = TrainConfig(max_steps=10**6, r_drop=changes.pop("r_drop", 0.0))
    embed, hidden = (6, 8) if setting.tiny else (48, 64)
    config = ModelConfig(cell=cell, embed=embed, hidden=hidden, attention=attention, **changes)
    encoded, vocabulary = make_sentences(setting, 24, 6 if setting.tiny else 20)
    state = make_state(config, vocabulary, encoded, device, precision, train, dropout)
    set_fixed_weights(state.model)
    return state


def compute_gradient(state: TrainState) -> dict[str, Tensor]:
    """Return the loss of a batch and its gradient, copied to fp64 on the CPU because replays overwrite gradients."""
    rows = np.arange(24)
    tokens = int(state.data.pairs.lengths(rows)[1].sum())
    found, sums = forward_backward(state, [rows], tokens, 100)
    named = dict(zip(dict(state.model.named_parameters()), found, strict=True)) | {"loss": sums.smoothed / tokens}
    return {name: value.double().cpu() for name, value in named.items() if value is not None}


def find_largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative norm of a difference between tensors, and the name of the tensor.

    The norm of the reference counts as at least a thousandth of the norm of all tensors together.
    """
    least = 1e-3 * math.sqrt(sum(float(value.square().sum()) for value in wanted.values())) + 1e-300
    norms = {
        name: float((found[name] - value).norm()) / max(float(value.norm()), least) for name, value in wanted.items()
    }
    worst = max(norms, key=lambda name: math.inf if math.isnan(norms[name]) else norms[name])
    return norms[worst], worst


def check_gradients(setting: Setting, name: str, cell: str) -> Iterator[Values]:
    """Compare the gradient of a batch without dropout with fp64 on the CPU."""
    wanted = compute_gradient(make_small_state(setting, name, cell, torch.device("cpu"), "fp64", 0.0))
    found = {
        precision: find_largest_difference(
            compute_gradient(make_small_state(setting, name, cell, setting.device, precision, 0.0)), wanted
        )
        for precision in MAX_RELATIVE_NORMS
        if precision in PRECISIONS
    }
    over = [
        f"{precision}: {worst}"
        for precision, (norm, worst) in found.items()
        if not norm <= MAX_RELATIVE_NORMS[precision]
    ]
    yield {"ok": not over, **{precision: norm for precision, (norm, _) in found.items()}, "too far": ", ".join(over)}


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Disable CUDA graphs."""
    before, replay.MAX_GRAPHS = replay.MAX_GRAPHS, 0
    try:
        yield
    finally:
        replay.MAX_GRAPHS = before


def count_graphs() -> int:
    return sum(recorded.count_graphs() for recorded in replay.GRAPHED_CALLABLES)


def check_graph(setting: Setting, name: str) -> Iterator[Values]:
    """Compare gradients of a batch with dropout and a fixed seed, in bf16: eager twice, then captured and replayed."""
    setting.require_gpu()
    state = make_small_state(setting, name, "lstm", setting.device, "bf16", 0.2)
    with without_graphs():
        first, second = compute_gradient(state), compute_gradient(state)
    replays = [compute_gradient(state) for _ in range(WARMUP_UPDATES)]
    again, far = (
        find_largest_difference(second, first)[0],
        max(find_largest_difference(other, first)[0] for other in replays),
    )
    # cuDNN may sum in another order, which changes the rounding in bf16.
    yield {"ok": max(again, far) < 1e-2, "run again": again, "replayed": far, "graphs": count_graphs()}


def check_no_synchronization(setting: Setting, name: str) -> Iterator[Values]:
    """Check that a replayed update does not synchronize with the GPU.

    It has more than 3,072 tokens, from where on PyTorch computes gradients of embeddings with another algorithm.
    """
    setting.require_gpu()
    rows = np.arange(160)
    encoded = make_random_pairs(np.full(160, 23), np.full(160, 23), 500)
    model = ModelConfig(embed=64, hidden=64, encoder_layers=2, decoder_layers=2, **STYLES[name])
    state = make_state(model, 500, encoded, setting.device, "bf16")
    for _ in range(WARMUP_UPDATES):
        train_step(state, rows, 100)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, rows, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield {"ok": count_graphs() > 0, "tokens": int(encoded.lengths(rows)[1].sum()), "graphs": count_graphs()}


def check_search(setting: Setting, name: str, cell: str) -> Iterator[Values]:
    """Compare search on the device, eager and replayed, with search on the CPU."""
    found: dict[str, list[list[tuple[list[int], float]]]] = {}
    for device in (torch.device("cpu"), setting.device):
        state = make_small_state(setting, name, cell, device, "fp64", 0.0)
        model = state.model.eval()
        prepare_model(model, "fp64", device)
        quick, batch = replay.with_cuda_graphs(model, device), collate(state.data.pairs, np.arange(24)).to(device)
        source = batch.source_BS, batch.source_length_B
        literals = Literals([10, 11], [[], [10], [11, 10]] * 8)
        given: dict[str, Any] = {"prefixes": [[], [5], [], [7, 7]] * 6, "literals": literals}
        for kind, options in SEARCH_OPTIONS.items():
            config = SearchConfig(**{"max_length": 20} | options)
            for _ in range(2):
                results = sorted(search_translations(quick, *source, config, **given))
                best = [one for _, several in results for one in several]
                found.setdefault(kind, []).append([(one.tokens, one.score) for one in best])
        forced = score_targets(quick, *source, batch.target_BT)
        found.setdefault("forced", []).append([(one.tokens, one.score) for one in forced])
    for kind, (wanted, *others) in found.items():
        pairs = [(one, another) for other in others for one, another in zip(wanted, other, strict=True)]
        differ = sum(one[0] != another[0] for one, another in pairs)
        score = max(abs(one[1] - another[1]) for one, another in pairs)
        yield {"ok": differ == 0 and score < 1e-6, "search": kind, "other tokens": differ, "score off by": score}


def make_large_state(setting: Setting) -> tuple[TrainState, Indices]:
    """Return a training state and rows of a batch that needs much more memory than the weights."""
    encoded = make_random_pairs(np.full(512, 39), np.full(512, 39), SIZES["small"].vocabulary)
    state = make_state(SIZES["small"].model, SIZES["small"].vocabulary, encoded, setting.device, "bf16", dropout=0.0)
    return state, np.arange(512)


def check_out_of_memory(setting: Setting) -> Iterator[Values]:
    """Check that an update that does not fit in memory is split into micro-batches, with the same loss."""
    setting.require_gpu()
    state, rows = make_large_state(setting)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    with without_graphs():
        wanted = float(train_step(state, rows, 100).sums.smoothed)
    needed = torch.cuda.max_memory_allocated()
    free_memory(setting.device)
    state, rows = make_large_state(setting)
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction((rest + 0.6 * (needed - rest)) / total)
    try:
        with without_graphs():
            outcome = train_step(state, rows, 100)
        off = abs(float(outcome.sums.smoothed) / wanted - 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    right = state.max_positions < math.inf and not outcome.failed and off < 1e-2
    yield {"ok": right, "needed, GB": needed / 1e9, "positions at once": state.max_positions, "loss off by": off}


def check_resuming(setting: Setting) -> Iterator[Values]:
    """Compare a training that is stopped halfway and resumed with an uninterrupted one."""
    half, whole = (2, 4) if setting.tiny else (60, 120)
    common = ("optim.schedule=constant", f"train.validate_every={half}", f"train.log_every={half // 2}")
    words = {
        name: partial(build_training_command, setting, name, *common, "train.max_epochs=null")
        for name in ("straight", "broken")
    }
    with start_python(setting, *words["straight"](f"train.max_steps={whole}")) as straight:
        for last_step in (half, whole):
            with start_python(setting, *words["broken"](f"train.max_steps={last_step}", "resume=auto")) as part:
                wait_for_exit(part, setting)
        wait_for_exit(straight, setting)
    runs = [setting.scratch / "runs" / name for name in words]
    one, other = (load_file(run / "checkpoints" / f"step_{whole:06}" / "model.safetensors") for run in runs)
    far, _ = find_largest_difference(
        {name: value.double() for name, value in other.items()}, {name: value.double() for name, value in one.items()}
    )
    wanted, found = map(read_events, runs)
    differ = sum(a != b for a, b in zip(wanted, found, strict=True))
    yield {"ok": not differ and far == 0, "events": len(wanted), "other events": differ, "weights off by": far}


def run_test_suite(setting: Setting) -> Iterator[Values]:
    setting.require_gpu()
    if importlib.util.find_spec("pytest") is None:
        raise CheckSkipped("no pytest")
    own = ROOT / "tests" / "commands" / "test_gpu_script.py"  # tests this script without a GPU
    chosen = ("-k", "gpu or cuda", f"--ignore={own}", "--continue-on-collection-errors")
    options = ("-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *chosen)
    with start_python(setting, "-m", "pytest", *options, "--rootdir", str(ROOT), str(ROOT / "tests")) as process:
        wait_for_exit(process, setting, codes=(0, 1, 2))
        yield {"ok": process.returncode == 0, "said": read_last_output_line(setting)}


# -------------------------------------------------------------------------------------------------------------- speed
def list_speed_checks(setting: Setting) -> list[Check]:
    """List speed checks, the most valuable first, because time may run out."""
    first = ("gnmt", "luong, feeding", *BARE_VARIANTS)
    order: list[tuple[str, str, int, tuple[str, ...]]] = [
        ("gnmt", "bf16", 128, first),
        ("gnmt", "bf16", 384, first),
        ("small", "bf16", 128, (*STYLES, *BARE_VARIANTS)),
        ("gnmt", "bf16", 384, ("bahdanau", "luong", "transformer")),
    ]
    precision = choose_precision("auto", setting.device)
    if setting.tiny:
        order = [("gnmt", precision, 8, (*STYLES, *BARE_VARIANTS))]
    training: list[Check] = [
        (
            f"training, {size}, {name}, {asked}, {count} sentences",
            partial(measure_training, size=size, name=name, precision=asked, count=count),
        )
        for size, asked, count, names in order
        for name in names
    ]
    search: list[Check] = [
        (f"search, {size}", partial(measure_search, size=size, precision=precision)) for size in SIZES
    ]
    return training[: len(first)] + search + training[len(first) :]


def get_size(setting: Setting, size: str) -> Size:
    found = SIZES[size]
    model = replace(found.model, embed=8, hidden=16, encoder_layers=2, decoder_layers=2)
    return replace(found, model=model, vocabulary=60, length=6.0) if setting.tiny else found


def measure_training(setting: Setting, size: str, name: str, precision: str, count: int) -> Iterator[Values]:
    """Measure all updates of an epoch, two or three times, until an epoch captures no new CUDA graphs.

    The first epoch includes the first run of each shape and the captures. Tokens are those of both sides, without
    padding.
    """
    scale, device = get_size(setting, size), setting.device
    changes = (STYLES | BARE_VARIANTS)[name]
    if changes["style"] == "gnmt" or name in BARE_VARIANTS:
        changes = changes | {"decoder_layers": max(2, scale.model.decoder_layers)}
    model = replace(scale.model, **changes)
    system = System(name, model, precision, count, plain=name in BARE_VARIANTS)
    encoded = make_random_corpus(scale, 3 * count if setting.tiny else PAIRS_PER_EPOCH)
    config = TrainConfig(batch_sentences=count, max_steps=10**6)
    if system.plain:
        update: Callable[[Any], Any] = bare_updates(system, scale.vocabulary, encoded, device)
        batches = list(epoch_batches(encoded, config, 1, 0))[::3]  # a third is enough without CUDA graphs
    else:
        state = make_state(model, scale.vocabulary, encoded, device, precision, config)
        update, batches = partial(train_step, state, total_steps=10**6), list(state.data.batches)
    tokens = sum(int(encoded.lengths(rows).sum()) for rows in batches)
    epochs: list[float] = []
    before = -1
    while len(epochs) < 2 or before < count_graphs() and len(epochs) < 3:
        before = count_graphs()
        epochs.append(time_updates(setting, update, batches))
    seconds = epochs[-1]
    with torch.device("meta"):
        work = count_flop_per_token(system, scale.vocabulary, encoded)
    target = sum(int(encoded.lengths(rows)[1].sum()) for rows in batches)
    on_gpu = device.type == "cuda"
    yield {
        "tokens/s": tokens / seconds,
        "ms an update": 1e3 * seconds / len(batches),
        "first epoch": tokens / epochs[0],
        "graphs": count_graphs(),
        "share of product": target
        / seconds
        * work
        / get_product_rate(device, "fp32" if precision == "fp32" else "bf16"),
        "GB": (peak_device_memory(device) or 0) / 1e9 if on_gpu else None,
    }
    if size == "gnmt" and precision == "bf16" and count == 128 and on_gpu:
        yield from profile_update(setting, partial(update, batches[0]))


def time_updates(setting: Setting, update: Callable[[Any], Any], batches: list[Indices]) -> float:
    """Return the seconds that updates take."""
    started = time.perf_counter()
    for rows in batches:
        setting.check_time()
        update(rows)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def profile_update(setting: Setting, work: Callable[[], Any]) -> Iterator[Values]:
    """Report the kernels of an update that take most time."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    busy = sum(kernel.self_device_time_total for kernel in kernels)
    yield {"kernels": sum(kernel.count for kernel in kernels), "ms busy": busy / 1e3}
    for kernel in kernels[:15]:
        ms = kernel.self_device_time_total / 1e3
        yield {"kernel": kernel.key[:160], "times": kernel.count, "ms": ms, "share": 1e3 * ms / busy}


def measure_search(setting: Setting, size: str, precision: str) -> Iterator[Values]:
    """Measure search of a model with random weights that never generates `</s>`, so that the work is known."""
    scale, cases = get_size(setting, size), [(1, 1, 15), (5, 64, 5), (5, 512, 3), (5, 2048, 1)]
    if setting.tiny:
        cases = [(1, 1, 1), (5, 4, 1)]
    torch.manual_seed(1)
    model = build_model(scale.model, scale.vocabulary, scale.vocabulary).eval()
    model.output.bias.detach()[EOS] = -1e4
    prepare_model(model, precision, setting.device)
    quick = replay.with_cuda_graphs(model, setting.device)
    for beam, count, rounds in cases:
        setting.check_time()
        source_BS = torch.randint(len(SPECIALS), scale.vocabulary, (count, SENTENCE_PIECES), device=setting.device)
        length_B = torch.full((count,), SENTENCE_PIECES, device=setting.device)
        config = SearchConfig(beam=beam, max_length=SENTENCE_PIECES)

        def search(given: Any = (source_BS, length_B, config)) -> Any:
            return list(search_translations(quick, *given))

        took = measure_seconds(search, setting.device, rounds)
        yield {"beam": beam, "sentences": count, "ms": 1e3 * took, "sentences/s": count / took}


# ------------------------------------------------------------------------------------------------------------ quality
def list_quality_checks(setting: Setting) -> list[Check]:
    short = ("train.max_epochs=1",) * setting.tiny
    recipe = ("experiment=multi30k_de_en", "data=text", f"data.path={setting.text}", *short)
    return [
        ("the built-in corpus", partial(train_and_evaluate, name="builtin", words=short)),
        ("Multi30k", partial(train_and_evaluate, name="multi30k", words=recipe, given="text=DIR")),
    ]


def train_and_evaluate(setting: Setting, name: str, words: tuple[str, ...], given: str = "") -> Iterator[Values]:
    """Report the validations of a training, its time, and the results of `nmt.evaluate`."""
    if given and not setting.text:
        raise CheckSkipped(f"no {given}")
    started, run = time.perf_counter(), setting.scratch / "runs" / name
    with start_python(setting, *build_training_command(setting, name, *words)) as process:
        wait_for_exit(process, setting)
    trained = time.perf_counter() - started
    for event in read_events(run):
        if event["event"] == "validate":
            yield {key: event[key] for key in ("step", "loss", "bleu", "aer")}
    asked = (f"checkpoint={run}", f"device={setting.device}", f"search.beam={5 if not given else 12}")
    with start_python(setting, "-m", "nmt.evaluate", *asked) as process:
        wait_for_exit(process, setting)
    measured = json.loads((run / "eval" / "test" / "metrics.json").read_text(encoding="utf-8"))
    yield {key: measured[key] for key in ("bleu", "chrf", "aer", "sentences_per_second")} | {"training": trained}


# Share of the time, and checks of each section.
SECTIONS: dict[str, tuple[float, Callable[[Setting], list[Check]]]] = {
    "facts": (0.05, list_fact_checks),
    "correct": (0.35, list_correctness_checks),
    "speed": (0.4, list_speed_checks),
    "quality": (0.2, list_quality_checks),
}


def main() -> None:
    given = parse_settings(
        sections=",".join(SECTIONS),
        folder=os.environ.get("OUT", "runs/gpu"),
        device="auto",
        size="auto",
        text="",
        minutes="9",
    )
    chosen = given["sections"].split(",")
    if not set(chosen) <= SECTIONS.keys() or given["size"] not in ("auto", "tiny"):
        sys.exit(__doc__)
    seconds, started = 60 * float(given["minutes"]), time.monotonic()
    folder, device = Path(given["folder"]).resolve(), choose_device(given["device"])
    report = Report(folder)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = given["size"] == "tiny" or device.type == "cpu"
        text = str(Path(given["text"]).resolve()) if given["text"] else ""
        setting, part = Setting(device, tiny, text, folder, Path(scratch)), 0.0
        for name in [name for name in SECTIONS if name in chosen]:
            part += SECTIONS[name][0] / sum(SECTIONS[name][0] for name in chosen)
            setting.end = started + seconds * part
            run_section(name, SECTIONS[name][1](setting), setting, report, free_memory)
    print((folder / "table.md").read_text(encoding="utf-8"), flush=True)
    sys.exit(any(result["status"] in ("failed", "error") for result in report.results))


if __name__ == "__main__":
    main()
