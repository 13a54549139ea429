"""All that only a GPU can answer, in one command: is every path right there, how fast is it, how good are its models.

python scripts/gpu.py                             all sections, in nine minutes
python scripts/gpu.py sections=facts,correct      some of facts, correct, speed, quality
python scripts/gpu.py text=DIR                    also trains Multi30k's recipe on DIR/{train,valid,test}.{de,en}
python scripts/gpu.py device=cpu size=tiny        a trial of the script itself, without a GPU

FOLDER/results.jsonl has each result as soon as it is known, FOLDER/table.md all of them as tables, also printed last,
FOLDER/errors.txt the traceback of each check that failed to run, FOLDER/commands.txt what commands printed. FOLDER is
folder=..., else $OUT, else runs/gpu. Each section has its share of the time, and may use what those before it left;
what does not fit into it is reported as skipped. The exit code is 1 where a check failed. Other settings: minutes=9.
"""

import contextlib
import faulthandler
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_search import PIECES, build, seconds, translate
from bench_search import SIZES as SEARCHED
from bench_training import OPTIM, SIZES, Size, System, flop_per_token, made_up, processor, product_rate, random_pairs
from bench_training import updates as bare_updates
from checks import ROOT, Check, Report, Setting, Skipped, Values, finish, limit_time, run_section, said, started
from safetensors.torch import load_file
from settings import settings_given
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nmt.config import PRECISIONS, AttentionConfig, ModelConfig, SearchConfig, TrainConfig, TrainRun
from nmt.data.batching import collate, epoch_batches
from nmt.data.encoding import EncodedPairs, Indices
from nmt.decoding.search import score_targets, search
from nmt.model.kernels import cuda_graphs as replay
from nmt.model.recurrence import CELLS, RNN
from nmt.model.seq2seq import build_model
from nmt.runtime.device import DTYPES, choose_device, choose_precision, move_model
from nmt.runtime.memory import PEAKS, peak_device_memory
from nmt.training.loop import epoch_batches_of
from nmt.training.optim import build_optimizer
from nmt.training.state import Progress, TrainState
from nmt.training.step import forward_backward, train_step

STYLES: dict[str, dict[str, Any]] = {
    "gnmt": {"style": "gnmt"},
    "luong, feeding": {"style": "luong"},
    "luong": {"style": "luong", "input_feeding": False},
    "bahdanau": {"style": "bahdanau"},
}
BARE = {"nn.LSTM over sentences": STYLES["gnmt"], "nn.LSTMCell, feeding": STYLES["luong, feeding"]}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: changes | {"encoder_layers": 2, "decoder_layers": 2} for name, changes in STYLES.items()},
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
# By how much the gradient of the parameter where it is most may be off, as a relative norm: the rounding of one product
# and what it grows to on the way back through a sentence; generous.
NEAR = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 2e-2, "fp16": 3e-2, "bf16": 2e-1}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam 4": {"beam": 4, "n_best": 4},
    "sampling": {"sample": True, "n_best": 3, "temperature": 2.0},
}
EPOCH = 15_000  # pairs
WARM = 3  # updates after which a shape is recorded
OWN_CELL = re.compile(r"(lstm|gru)_cell_(forward|backward)")  # PyTorch's kernels, where cuDNN has none
TINY = ("tokenizer.vocab_size=400", "model.embed=16", "model.hidden=32", "data.limit=300", "train.batch_tokens=2000")


def release(device: torch.device) -> None:
    """Free what earlier checks left: graphs hold the memory they share."""
    gc.collect()
    replay.drop_graphs()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        PEAKS.clear()


def training_words(setting: Setting, name: str, *words: str) -> list[str]:
    """A training of the built-in corpus, or of the text given where all is tiny: validating is quicker there."""
    text = ("data=text", f"data.path={setting.text}") if setting.tiny and setting.text else ()
    return ["-m", "nmt.train", f"name={name}", f"device={setting.device}", *text, *words, *TINY * setting.tiny]


def events(run: Path) -> list[Values]:
    """The whole lines of a run's metrics.jsonl, without what differs from time to time."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in event.items() if not re.search("second|memory", k)} for event in found]


# -------------------------------------------------------------------------------------------------------------- facts
def facts(setting: Setting) -> list[Check]:
    on_gpu = setting.device.type == "cuda"
    precisions = ("bf16", "fp32", "tf32") if on_gpu else (choose_precision("auto", setting.device),)
    products: list[Check] = [(f"product, {name}", partial(product, precision=name)) for name in precisions]
    return [("versions", versions), ("card", card), ("driver", driver), ("copy", copy), *products]


def versions(setting: Setting) -> Iterator[Values]:
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    yield {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA": torch.version.cuda,
           "cuDNN": torch.backends.cudnn.version(), "triton": triton, "processor": processor(),
           "cores": os.cpu_count()}  # fmt: skip


def card(setting: Setting) -> Iterator[Values]:
    setting.need_gpu()
    found = torch.cuda.get_device_properties(setting.device)
    capability = f"{found.major}.{found.minor}"
    yield {"card": found.name, "GB": found.total_memory / 1e9, "capability": capability,
           "multiprocessors": found.multi_processor_count}  # fmt: skip


def driver(setting: Setting) -> Iterator[Values]:
    setting.need_gpu()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    yield {"driver": subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()}


def copy(setting: Setting) -> Iterator[Values]:
    a = torch.rand(2**22 if setting.tiny else 2**29, device=setting.device)
    b = torch.empty_like(a)
    took = seconds(lambda: b.copy_(a), setting.device, 10)
    yield {"GB/s, read and written": 2 * a.numel() * a.element_size() / took / 1e9}


@cache
def rate(device: torch.device, precision: str) -> float:
    return product_rate(device, precision)


def product(setting: Setting, precision: str) -> Iterator[Values]:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, precision == "tf32"
    try:
        yield {"TFLOP/s": rate(setting.device, precision) / 1e12}
    finally:
        matmul.allow_tf32 = before


# ------------------------------------------------------------------------------------------------------------ correct
def correct(setting: Setting) -> list[Check]:
    names, cells = ([*STYLES][:2], ["lstm"]) if setting.tiny else ([*VARIANTS], [*CELLS])
    both = [(name, cell) for name in names for cell in cells]
    return [
        *((f"gradients, {n}, {cell}", partial(gradients, name=n, cell=cell)) for n, cell in both),
        *((f"graph, {name}", partial(graph, name=name)) for name in VARIANTS),
        *((f"no waiting, {name}", partial(no_waiting, name=name)) for name in STYLES),
        *((f"whole layers, {cell}", partial(whole_layers, cell=cell)) for cell in CELLS),
        *((f"search, {name}, {cell}", partial(searches, name=name, cell=cell)) for name in names[:4] for cell in cells),
        ("fp16's loss scale", loss_scale),
        ("graphs after others are gone", second_model),
        ("out of memory", out_of_memory),
        *((f"out of memory, {how}", partial(in_capture, how=how)) for how in SHORTAGES),
        ("training stopped and resumed", resumed),
        ("the suite's tests of a GPU", suite),
    ]


def sentences(setting: Setting, count: int, longest: int) -> tuple[EncodedPairs, int]:
    """Random pairs, and the size of their vocabulary."""
    rng, vocabulary = np.random.default_rng(2), 19 if setting.tiny else 500
    source, target = rng.integers(1, longest, (2, count))
    return random_pairs(source, target, vocabulary), vocabulary


def begin(
    config: ModelConfig, vocabulary: int, encoded: EncodedPairs, device: torch.device, precision: str,
    train: TrainConfig | None = None, dropout: float | None = None, loss_scale: float = 2.0**16,
) -> TrainState:  # fmt: skip
    """Training of a model with fresh weights, which are drawn where it computes."""
    run = TrainRun(model=config, optim=OPTIM, train=train or TrainConfig(max_steps=10**6), precision=precision)
    torch.manual_seed(1)
    with device:
        model = build_model(config if dropout is None else replace(config, dropout=dropout), vocabulary, vocabulary)
    move_model(model, precision, device, training=True)
    nothing: Any = None
    optimizer = build_optimizer(run.optim, model.parameters())
    progress = Progress(encoded.key, loss_scale=loss_scale)
    return TrainState(run, Path(), device, model, nothing, optimizer, encoded, nothing, progress)


def scatter(model: nn.Module) -> None:
    """Give a model the same weights on every device: larger than fresh ones, and biases too."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.detach().copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def small(setting: Setting, name: str, cell: str, device: torch.device, precision: str, dropout: float) -> TrainState:
    """Training of a small model of some kind."""
    changes = dict(VARIANTS[name])
    attention = AttentionConfig(**changes.pop("attention", {}))
    train = TrainConfig(max_steps=10**6, r_drop=changes.pop("r_drop", 0.0))
    embed, hidden = (6, 8) if setting.tiny else (48, 64)
    config = ModelConfig(cell=cell, embed=embed, hidden=hidden, attention=attention, **changes)
    encoded, vocabulary = sentences(setting, 24, 6 if setting.tiny else 20)
    state = begin(config, vocabulary, encoded, device, precision, train, dropout)
    scatter(state.model)
    return state


def gradient(state: TrainState) -> dict[str, Tensor]:
    """The loss of a batch and its gradient, in fp64 on the processor, where no replay overwrites them."""
    rows = np.arange(24)
    tokens = int(state.train.lengths(rows)[1].sum())
    found, sums = forward_backward(state, [rows], tokens, 100)
    named = dict(zip(dict(state.model.named_parameters()), found, strict=True)) | {"loss": sums.smoothed / tokens}
    factor = {name: 1.0 if name == "loss" else state.scale.factor.item() for name in named}
    return {name: value.double().cpu() / factor[name] for name, value in named.items() if value is not None}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative norm of a difference, and the name of what has it. What is shorter than a thousandth of all
    together counts as so long."""
    least = 1e-3 * math.sqrt(sum(float(value.square().sum()) for value in wanted.values())) + 1e-300
    norms = {name: float((found[name] - value).norm()) / max(float(value.norm()), least)
             for name, value in wanted.items()}  # fmt: skip
    worst = max(norms, key=lambda name: math.inf if math.isnan(norms[name]) else norms[name])
    return norms[worst], worst


def gradients(setting: Setting, name: str, cell: str) -> Iterator[Values]:
    """A batch without dropout, against fp64 on the processor."""
    wanted = gradient(small(setting, name, cell, torch.device("cpu"), "fp64", 0.0))
    found = {
        precision: apart(gradient(small(setting, name, cell, setting.device, precision, 0.0)), wanted)
        for precision in NEAR
        if precision in PRECISIONS
    }
    over = [f"{precision}: {worst}" for precision, (norm, worst) in found.items() if not norm <= NEAR[precision]]
    yield {"ok": not over, **{precision: norm for precision, (norm, _) in found.items()}, "too far": ", ".join(over)}


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Record nothing."""
    before, replay.MAX_GRAPHS = replay.MAX_GRAPHS, 0
    try:
        yield
    finally:
        replay.MAX_GRAPHS = before


def recorded_graphs() -> int:
    return sum(len(recorded.graphs) for recorded in replay.GRAPHED)


def graph(setting: Setting, name: str) -> Iterator[Values]:
    """A batch with dropout and one seed, in bf16: as it runs, twice, and as it is recorded and replayed."""
    setting.need_gpu()
    state = small(setting, name, "lstm", setting.device, "bf16", 0.2)
    with eager():
        first, second = gradient(state), gradient(state)
    replays = [gradient(state) for _ in range(WARM)]
    again, far = apart(second, first)[0], max(apart(other, first)[0] for other in replays)
    # cuDNN may sum in another order, which is a rounding of bf16.
    yield {"ok": max(again, far) < 1e-2, "run again": again, "replayed": far, "graphs": recorded_graphs()}


def no_waiting(setting: Setting, name: str) -> Iterator[Values]:
    """A replayed update of more than 3,072 tokens, the size from which gradients of embeddings are made another way,
    where whatever makes the processor wait for the GPU is an error."""
    setting.need_gpu()
    rows = np.arange(160)
    encoded = random_pairs(np.full(160, 23), np.full(160, 23), 500)
    model = ModelConfig(embed=64, hidden=64, encoder_layers=2, decoder_layers=2, **STYLES[name])
    state = begin(model, 500, encoded, setting.device, "bf16")
    for _ in range(WARM):
        train_step(state, rows, 100)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, rows, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield {"ok": recorded_graphs() > 0, "tokens": int(encoded.lengths(rows)[1].sum()), "graphs": recorded_graphs()}


def whole_layers(setting: Setting, cell: str) -> Iterator[Values]:
    """A layer over whole sentences against fp64 on the processor, in odd sizes and in usual ones; whether it is cuDNN
    that runs, and whether it warns of weights that are not one piece of memory."""
    for inputs, hidden, rows, steps in ((5, 7, 3, 4), (64, 128, 16, 12)):
        generator = torch.Generator().manual_seed(1)
        x_BTI, toward = (torch.randn(rows, steps, size, generator=generator).double() for size in (inputs, hidden))
        wanted: dict[str, Tensor] = {}
        for precision in ("fp64", *(name for name in NEAR if name in PRECISIONS)):
            device, dtype = (setting.device if wanted else torch.device("cpu")), DTYPES[precision]
            rnn = RNN(cell, inputs, hidden)
            scatter(rnn)
            move_model(rnn, precision, device, training=True)
            x = x_BTI.clone().to(device, dtype).requires_grad_()

            def work(rnn: RNN = rnn, x: Tensor = x, toward: Tensor = toward) -> Tensor:
                h_BTD, _ = rnn(x, rnn.zeros(x))
                h_BTD.backward(toward.to(h_BTD))
                return h_BTD.detach()

            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                torch.set_warn_always(True)
                h_BTD = work()
                torch.set_warn_always(False)
            named = {name: value.grad for name, value in [*rnn.named_parameters(), ("x", x)]} | {"h": h_BTD}
            found = {name: value.double().cpu() for name, value in named.items() if value is not None}
            if not wanted:
                wanted = found
                continue
            norm, worst = apart(found, wanted)
            text = " ".join(str(warning.message) for warning in warned)
            kernels = [event["name"] for event in traced(setting, work) if event.get("cat") == "kernel"]
            library = "PyTorch" if any(map(OWN_CELL.search, kernels)) else "cuDNN" if kernels else None
            yield {"ok": norm <= NEAR[precision] and "contiguous" not in text, "precision": precision,
                   "hidden": hidden, "relative norm": norm, "worst": worst, "library": library,
                   "warnings": text}  # fmt: skip


def searches(setting: Setting, name: str, cell: str) -> Iterator[Values]:
    """Twice on the device, the second time replayed, against the processor."""
    found: dict[str, list[list[tuple[list[int], float]]]] = {}
    for device in (torch.device("cpu"), setting.device):
        state = small(setting, name, cell, device, "fp64", 0.0)
        model = state.model.eval()
        move_model(model, "fp64", device)
        quick, batch = replay.maybe_graph(model, device), collate(state.train, np.arange(24)).to(device)
        source = batch.source_BS, batch.source_length_B
        for kind, options in SEARCHES.items():
            config = SearchConfig(max_length=20, **options)
            for _ in range(2):
                best = [one for several in search(quick, *source, config, at_once=12) for one in several]
                found.setdefault(kind, []).append([(one.tokens, one.score) for one in best])
        forced = score_targets(quick, *source, batch.target_BT)
        found.setdefault("forced", []).append([(one.tokens, one.score) for one in forced])
    for kind, (wanted, *others) in found.items():
        pairs = [(one, another) for other in others for one, another in zip(wanted, other, strict=True)]
        differ = sum(one[0] != another[0] for one, another in pairs)
        score = max(abs(one[1] - another[1]) for one, another in pairs)
        yield {"ok": differ == 0 and score < 1e-6, "search": kind, "other tokens": differ, "score off by": score}


def loss_scale(setting: Setting) -> Iterator[Values]:
    """From a scale that is far too large to one with which the loss falls."""
    encoded, vocabulary = sentences(setting, 24, 6 if setting.tiny else 20)
    config = ModelConfig(embed=16, hidden=32, **STYLES["bahdanau"])
    state = begin(config, vocabulary, encoded, setting.device, "fp16", dropout=0.0, loss_scale=2.0**40)
    outcomes = [train_step(state, np.arange(24), 10**6) for _ in range(60)]
    failed = [bool(outcome.failed) for outcome in outcomes]
    losses = [float(outcome.sums.nats / outcome.sums.target) for outcome in outcomes]
    right = failed[0] and not any(failed[-20:]) and losses[-1] < losses[0]
    yield {"ok": right, "skipped": sum(failed), "scale": state.scale.factor.item(), "first loss": losses[0],
           "last loss": losses[-1]}  # fmt: skip


def second_model(setting: Setting) -> Iterator[Values]:
    """A model is recorded after all graphs of another are gone, as in a sweep or where models are loaded in turn."""
    setting.need_gpu()
    counts = []
    for name in ("bahdanau", "luong, feeding"):
        state = small(setting, name, "lstm", setting.device, "bf16", 0.2)
        for _ in range(WARM):
            train_step(state, np.arange(24), 100)
        counts.append(recorded_graphs())
        del state
        gc.collect()
    yield {"ok": min(counts) > 0, "graphs": counts}


def large(setting: Setting) -> tuple[TrainState, Indices]:
    """Training in which memory is that of one batch rather than of weights."""
    encoded = random_pairs(np.full(512, 39), np.full(512, 39), SIZES["small"].vocabulary)
    state = begin(SIZES["small"].model, SIZES["small"].vocabulary, encoded, setting.device, "bf16", dropout=0.0)
    return state, np.arange(512)


def needs(setting: Setting) -> tuple[int, int, float]:
    """Bytes of such a training at rest and at most in an update that is not recorded; the loss of that."""
    state, rows = large(setting)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    with eager():
        loss = float(train_step(state, rows, 100).sums.smoothed)
    return rest, torch.cuda.max_memory_allocated(), loss


def limit_memory(setting: Setting, size: float | None) -> None:
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / total)


def out_of_memory(setting: Setting) -> Iterator[Values]:
    """An update for which memory is too small is made in parts, with the same loss."""
    setting.need_gpu()
    rest, most, wanted = needs(setting)
    release(setting.device)
    state, rows = large(setting)
    limit_memory(setting, rest + 0.6 * (most - rest))
    try:
        with eager():
            outcome = train_step(state, rows, 100)
        loss, failed = float(outcome.sums.smoothed), bool(outcome.failed)
    finally:
        limit_memory(setting, None)
    off = abs(loss / wanted - 1)
    yield {"ok": state.max_positions < math.inf and not failed and off < 1e-2, "needed, GB": most / 1e9,
           "positions at once": state.max_positions, "loss off by": off}  # fmt: skip


def less_while_recording(setting: Setting, state: TrainState, rest: int, most: int) -> None:
    """Memory runs out within the capture, of which no look at free memory can warn."""
    loss = state.model.loss

    def short(*given: Any) -> Any:
        limit_memory(setting, rest + 0.3 * (most - rest) if torch.cuda.is_current_stream_capturing() else None)
        return loss(*given)

    state.model.loss = short  # type: ignore[method-assign, assignment]


def hold_the_rest(setting: Setting, state: TrainState, rest: int, most: int) -> Tensor:
    """Another tensor has nearly all that is free: there is room for an update, and hardly more."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(int(free - 1.1 * (most - rest)), dtype=torch.uint8, device=setting.device)


SHORTAGES: dict[str, Callable[[Setting, TrainState, int, int], Any]] = {
    "in the capture": less_while_recording,
    "too little for a capture": hold_the_rest,
}


def record_in_little(how: str) -> None:
    """Four updates of one shape, in a process of its own: what came of it is printed."""
    setting = Setting(choose_device("cuda"), False, "", Path(), Path())
    rest, most, wanted = needs(setting)
    release(setting.device)
    state, rows = large(setting)
    with eager():
        train_step(state, rows, 100)
    held = SHORTAGES[how](setting, state, rest, most)
    outcomes = [train_step(state, rows, 100) for _ in range(4)]
    limit_memory(setting, None)
    failed, last = sum(bool(outcome.failed) for outcome in outcomes), float(outcomes[-1].sums.smoothed)
    limit = state.max_positions if math.isfinite(state.max_positions) else None
    right = not failed and abs(last / wanted - 1) < 0.05  # the learning rate has only begun to rise
    right = right and limit is None and recorded_graphs() == 0
    print(json.dumps({"ok": right, "graphs": recorded_graphs(), "positions at once": limit}))
    del held


def in_capture(setting: Setting, how: str) -> Iterator[Values]:
    setting.need_gpu()
    with started(setting, "-c", f"import gpu; gpu.record_in_little({how!r})") as process:
        finish(process, setting)
    printed = (setting.folder / "commands.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    yield json.loads(next(line for line in reversed(printed) if line.startswith("{")))


def resumed(setting: Setting) -> Iterator[Values]:
    """The built-in corpus: stopped at half of the updates and resumed, beside the same undisturbed."""
    half, whole = (2, 4) if setting.tiny else (60, 120)
    common = ("optim.schedule=constant", f"train.validate_every={half}", f"train.log_every={half // 2}")
    words = {
        name: partial(training_words, setting, name, *common, "train.max_epochs=null")
        for name in ("straight", "broken")
    }
    with started(setting, *words["straight"](f"train.max_steps={whole}")) as straight:
        for last_step in (half, whole):
            with started(setting, *words["broken"](f"train.max_steps={last_step}", "resume=auto")) as part:
                finish(part, setting)
        finish(straight, setting)
    runs = [setting.scratch / "runs" / name for name in words]
    one, other = (load_file(run / "checkpoints" / f"step_{whole:06}" / "model.safetensors") for run in runs)
    far, _ = apart({name: value.double() for name, value in other.items()},
                   {name: value.double() for name, value in one.items()})  # fmt: skip
    wanted, found = map(events, runs)
    differ = sum(a != b for a, b in zip(wanted, found, strict=True))
    yield {"ok": not differ and far == 0, "events": len(wanted), "other events": differ, "weights off by": far}


def suite(setting: Setting) -> Iterator[Values]:
    setting.need_gpu()
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("no pytest")
    own = ROOT / "tests" / "test_gpu_script.py"  # of this script, without a GPU
    chosen = ("-k", "gpu or cuda", f"--ignore={own}", "--continue-on-collection-errors")
    options = ("-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *chosen)
    with started(setting, "-m", "pytest", *options, "--rootdir", str(ROOT), str(ROOT / "tests")) as process:
        finish(process, setting, codes=(0, 1, 2))
        yield {"ok": process.returncode == 0, "said": said(setting)}


# -------------------------------------------------------------------------------------------------------------- speed
def speed(setting: Setting) -> list[Check]:
    """The most valuable first: there is not always time for all."""
    if setting.tiny:
        precision = choose_precision("auto", setting.device)
        order = [("gnmt", precision, 8, (*STYLES, *BARE))]
    else:
        first, rest = ("gnmt", "luong, feeding", *BARE), ("bahdanau", "luong")
        order = [
            ("gnmt", "bf16", 128, first), ("gnmt", "bf16", 384, first), ("search", "bf16", 0, ()),
            ("gnmt", "bf16", 128, rest), ("gnmt", "bf16", 384, rest), ("small", "bf16", 128, (*STYLES, *BARE)),
            ("gnmt", "fp16", 128, (*STYLES,)), ("gnmt", "fp16", 384, (*STYLES,)), ("small", "bf16", 384, (*STYLES,)),
            ("small", "fp16", 128, (*STYLES,)), ("small", "fp16", 384, (*STYLES,)),
        ]  # fmt: skip
    checks: list[Check] = []
    for size, precision, count, names in order:
        for name in names:
            work = partial(training, size=size, name=name, precision=precision, count=count)
            checks.append((f"training, {size}, {name}, {precision}, {count} sentences", work))
        if size == "search" or setting.tiny:
            checks += [(f"search, {size}", partial(searching, size=size, precision=precision)) for size in SEARCHED]
    return checks


def sized(setting: Setting, size: str) -> Size:
    found = SIZES[size]
    model = replace(found.model, embed=8, hidden=16, encoder_layers=2, decoder_layers=2)
    return replace(found, model=model, vocabulary=60, length=6.0) if setting.tiny else found


def training(setting: Setting, size: str, name: str, precision: str, count: int) -> Iterator[Values]:
    """All updates of an epoch in their order: first meetings and recordings count in the first epoch; the last one, of
    at most three, is the first in which nothing is recorded. Tokens are those of both sides, without padding."""
    scale, device = sized(setting, size), setting.device
    layers = {"decoder_layers": max(2, scale.model.decoder_layers)} if name == "gnmt" or name in BARE else {}
    model = replace(scale.model, **({**STYLES, **BARE}[name] | layers))
    system = System(name, model, precision, count, plain=name in BARE)
    encoded = made_up(scale, 3 * count if setting.tiny else EPOCH)
    config = TrainConfig(batch_sentences=count, max_steps=10**6)
    if system.plain:
        update: Callable[[Any], Any] = bare_updates(system, scale.vocabulary, encoded, device)
        batches = list(epoch_batches(encoded, config, 1, 0))[::3]  # nothing is recorded: a third is enough
    else:
        state = begin(model, scale.vocabulary, encoded, device, precision, config)
        update, batches = partial(train_step, state, total_steps=10**6), list(epoch_batches_of(state))
    tokens = sum(int(encoded.lengths(rows).sum()) for rows in batches)
    epochs: list[tuple[float, float | None]] = []
    before = -1
    while len(epochs) < 2 or before < recorded_graphs() and len(epochs) < 3:
        before = recorded_graphs()
        epochs.append(clocked(setting, update, batches))
    wall, on_gpu = epochs[-1]
    with torch.device("meta"):
        work = flop_per_token(system, scale.vocabulary, encoded)
    target = sum(int(encoded.lengths(rows)[1].sum()) for rows in batches)
    yield {
        **{"tokens/s": tokens / wall, "ms an update": 1e3 * wall / len(batches)},
        "on the GPU": on_gpu and 1e3 * on_gpu / len(batches),
        "first epoch": tokens / epochs[0][0],
        "second": tokens / epochs[1][0],
        **{"updates": len(batches), "shapes": sum(len(recorded.met) for recorded in replay.GRAPHED)},
        **{"graphs": recorded_graphs(), "recorded last": recorded_graphs() - before},
        "share of product": target / wall * work / rate(device, "fp32" if precision == "fp32" else "bf16"),
        "GB": on_gpu and (peak_device_memory(device) or 0) / 1e9,
    }
    if size == "gnmt" and precision == "bf16" and count == 128 and on_gpu:
        yield from profiled(setting, partial(update, batches[0]))


def clocked(setting: Setting, update: Callable[[Any], Any], batches: list[Indices]) -> tuple[float, float | None]:
    """Seconds of these updates by the clock, and those that the GPU spent between the beginning of each and its end."""
    times = []
    begun = time.perf_counter()
    for rows in batches:
        setting.hurry()
        if setting.device.type == "cuda":
            times.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            times[-1][0].record()
        update(rows)
        if setting.device.type == "cuda":
            times[-1][1].record()
    if setting.device.type != "cuda":
        return time.perf_counter() - begun, None
    torch.cuda.synchronize()
    wall = time.perf_counter() - begun
    return wall, sum(first.elapsed_time(last) for first, last in times) / 1e3


def traced(setting: Setting, work: Callable[[], Any]) -> list[Values]:
    """What a GPU did, and what was asked of it, as the events of a trace; on a processor nothing."""
    if setting.device.type != "cuda":
        return []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    path = setting.scratch / "trace.json"
    found.export_chrome_trace(str(path))
    events: list[Values] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def profiled(setting: Setting, work: Callable[[], Any]) -> Iterator[Values]:
    """The kernels of an update: how many there are, in graphs and outside, and on which most time is spent."""
    traced(setting, work)  # the first trace has the profiler's own beginnings in it
    trace = traced(setting, work)
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    copies = [event for event in trace if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    calls = [event for event in trace if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {event["args"].get("correlation") for event in calls if "GraphLaunch" in event["name"]}
    inside = sum(event["args"].get("correlation") in launches for event in kernels)
    busy = sum(event["dur"] for event in kernels)
    span = max(event["ts"] + event["dur"] for event in kernels) - min(event["ts"] for event in kernels)
    yield {"kernels": len(kernels), "in graphs": inside, "launched alone": len(kernels) - inside,
           "graph launches": len(launches), "copies and fills": len(copies), "ms busy": busy / 1e3,
           "ms in all": span / 1e3, "own cells": any(OWN_CELL.search(event["name"]) for event in kernels)}  # fmt: skip
    times: dict[str, list[float]] = {}
    for event in kernels:
        times.setdefault(event["name"], []).append(event["dur"])
    for name, durations in sorted(times.items(), key=lambda item: -sum(item[1]))[:15]:
        yield {
            "kernel": name[:160],
            "times": len(durations),
            "ms": sum(durations) / 1e3,
            "share": sum(durations) / busy,
        }


def searching(setting: Setting, size: str, precision: str) -> Iterator[Values]:
    config, vocabulary, _ = SEARCHED[size]
    cases = [(1, 1, 15), (5, 64, 5), (5, 512, 3), (5, 2048, 1)]
    if setting.tiny:
        config, vocabulary, cases = sized(setting, size).model, 60, [(1, 1, 1), (5, 4, 1)]
    model = build(config, vocabulary, setting.device, precision)
    for beam, count, rounds in cases:
        setting.hurry()
        took = translate(model, setting.device, rounds, count, PIECES, PIECES, beam)
        yield {"beam": beam, "sentences": count, "ms": 1e3 * took, "sentences/s": count / took}


# ------------------------------------------------------------------------------------------------------------ quality
def quality(setting: Setting) -> list[Check]:
    short = ("train.max_epochs=1",) * setting.tiny
    recipe = ("experiment=multi30k_de_en", "data=text", f"data.path={setting.text}", *short)
    return [
        ("the built-in corpus", partial(end_to_end, name="builtin", words=short)),
        ("Multi30k", partial(end_to_end, name="multi30k", words=recipe, given="text=DIR")),
    ]


def end_to_end(setting: Setting, name: str, words: tuple[str, ...], given: str = "") -> Iterator[Values]:
    """A training's validations as they come, its time, and what `nmt.evaluate` says of it."""
    if given and not setting.text:
        raise Skipped(f"no {given}")
    begun, told = time.perf_counter(), 0
    run = setting.scratch / "runs" / name
    with started(setting, *training_words(setting, name, *words)) as process:
        while True:
            ended = process.poll() is not None
            found = [event for event in events(run) if event["event"] == "validate"]
            for event in found[told:]:
                yield {key: event[key] for key in ("step", "loss", "bleu", "aer")} | {
                    "after": time.perf_counter() - begun
                }
            told = len(found)
            if ended:
                break
            setting.hurry()
            time.sleep(0.2)
        finish(process, setting)
    trained = time.perf_counter() - begun
    asked = (f"checkpoint={run}", f"device={setting.device}", "pictures=0", f"search.beam={5 if not given else 12}")
    with started(setting, "-m", "nmt.evaluate", *asked) as process:
        finish(process, setting)
    measured = json.loads((run / "eval" / "test" / "metrics.json").read_text(encoding="utf-8"))
    yield {key: measured[key] for key in ("bleu", "chrf", "aer", "sentences_per_second")} | {"training": trained}


# Of the time, what share, and what to do in it.
SECTIONS: dict[str, tuple[float, Callable[[Setting], list[Check]]]] = {
    "facts": (0.05, facts),
    "correct": (0.35, correct),
    "speed": (0.4, speed),
    "quality": (0.2, quality),
}


def main() -> None:
    given = settings_given(
        sections=",".join(SECTIONS), folder=os.environ.get("OUT", "runs/gpu"), device="auto", size="auto", text="",
        minutes="9",
    )  # fmt: skip
    chosen = given["sections"].split(",")
    if not set(chosen) <= SECTIONS.keys() or given["size"] not in ("auto", "tiny"):
        sys.exit(__doc__)
    total, begun = 60 * float(given["minutes"]), time.monotonic()
    folder, device = Path(given["folder"]).resolve(), choose_device(given["device"])
    report = Report(folder)
    limit_time(report, 0.98 * total)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = given["size"] == "tiny" or device.type == "cpu"
        text = str(Path(given["text"]).resolve()) if given["text"] else ""
        setting, part = Setting(device, tiny, text, folder, Path(scratch)), 0.0
        for name in [name for name in SECTIONS if name in chosen]:
            part += SECTIONS[name][0] / sum(SECTIONS[name][0] for name in chosen)
            setting.end = begun + 0.96 * total * part
            run_section(name, SECTIONS[name][1](setting), setting, report, release)
    faulthandler.cancel_dump_traceback_later()
    sys.exit(0 if report.close() else 1)


if __name__ == "__main__":
    main()
