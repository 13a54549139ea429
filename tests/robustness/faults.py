"""Inject faults and check the guarantees of docs/reliability.md.

faults.py kill=100    kill training at 100 random moments (SIGKILL), and resume it each time
faults.py term=100    the same with SIGTERM
faults.py fileops=100    kill training and evaluation just before 100 different file operations
faults.py bitflips=1000    flip single bits in the files of a run, and load it
faults.py noise=10000    translate random bytes
faults.py badlines=1000000    train on a corpus in which one line in a hundred is damaged
faults.py soak=30    train and evaluate repeatedly for 30 minutes

Several can be given. All work on the built-in corpus, in a temporary folder or in folder=DIR, which is kept, and print
their results. A violated guarantee ends the program with exit code 1.
"""

import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not pay off for such a small model
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # a killed process leaves semaphores

from nmt.config import select_immutable_settings  # noqa: E402
from nmt.data.toy.corpus import generate  # noqa: E402
from nmt.errors import UserError  # noqa: E402
from nmt.runs.checkpoint import (  # noqa: E402  after the number of threads
    STEP_FOLDER_PATTERN,
    find_checkpoint,
    find_last_checkpoint,
    find_last_intact_checkpoint,
    load_config_and_tokenizer,
    load_model,
    parse_step,
)
from nmt.system.memory import peak_memory  # noqa: E402
from nmt.system.standard_streams import use_utf8  # noqa: E402
from nmt.training.state import read_progress  # noqa: E402

SMALL_SETTINGS = (
    "tokenizer.vocab_size=500",
    "model.embed=16",
    "model.hidden=32",
    "model.dropout=0.1",
    "train.batch_tokens=400",
    "optim.lr=0.005",
    "device=cpu",
    "precision=fp32",
)
AUDIT_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audited by Python before they happen
CONTEXT = multiprocessing.get_context("forkserver")  # with all imports preloaded, a process starts within a second


def count_operations(folder: str, kill_at: int | None, report: Callable[[int], Any]) -> None:
    """Kill this process just before its file operation number `kill_at`, counted from the first one in `folder`.

    If that is None, `report` the number of operations after each.
    """
    count = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in AUDIT_EVENTS or not (count or folder in str(arguments[0])):
            return
        count += 1
        if kill_at is None:
            report(count)
        elif count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def run_program(
    name: str, arguments: tuple[str, ...], folder: Path, output: str, operations: tuple[str, int | None] | None
) -> None:
    """Run `python -m nmt.<name>` in this process, in a folder, with output appended to the file `output`.

    `operations` are the arguments of `count_operations`. Their number is written to the file `operations`.
    """
    os.chdir(folder)
    if operations:
        counter = os.open("operations", os.O_CREAT | os.O_WRONLY)
        count_operations(*operations, lambda count: os.pwrite(counter, f"{count:9}".encode(), 0))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [name, *arguments]
    module = __import__(f"nmt.{name}", fromlist=[name])
    getattr(module, name)()


def start_program(
    name: str,
    *arguments: str,
    folder: Path,
    output: str = "output",
    operations: tuple[str, int | None] | None = None,
) -> Any:
    process = CONTEXT.Process(target=run_program, args=(name, arguments, folder, output, operations))
    process.start()
    return process


def run_to_exit(
    name: str,
    *arguments: str,
    folder: Path,
    output: str = "output",
    operations: tuple[str, int | None] | None = None,
) -> int:
    process = start_program(name, *arguments, folder=folder, output=output, operations=operations)
    process.join()
    return process.exitcode


def read_end(path: Path) -> str:
    """Return the last 2,000 characters of an output."""
    return path.read_text()[-2000:]


def write_corpus(folder: Path, **sizes: int) -> str:
    """Write text of the built-in corpus, and return the data.path setting."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for split, pairs in generate(1, sizes).items():
        for side, texts in {"de": [p.german for p in pairs], "en": [p.english for p in pairs]}.items():
            (folder / "text" / f"{split}.{side}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return f"data.path={folder / 'text'}"


# ---------------------------------------------------------------------------------------------------------------- kill
@cache
def train_uninterrupted(settings: tuple[str, ...], folder: Path) -> tuple[dict[str, Any], float, float]:
    """Train once without interruption; return the results, and the seconds for all and for the start alone."""
    start = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0, (folder / "output").read_text()
    whole_seconds = time.monotonic() - start
    start = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0
    startup_seconds = time.monotonic() - start
    print(f"uninterrupted: {whole_seconds:.1f} s, of which {startup_seconds:.1f} s to start")
    return read_results(folder / "runs" / "whole"), whole_seconds, startup_seconds


def check_kills(times: int, folder: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """Check that training killed `times` times ends with the same files as uninterrupted training."""
    rng = random.Random(1)
    settings = (
        "data=text",
        write_corpus(folder, train=400, valid=6, test=2),
        *SMALL_SETTINGS,
        f"train.max_steps={6 * times + 12}",
        "train.max_epochs=null",
        "train.save_every=2",
        "train.validate_every=8",
        "train.log_every=10",
        "resume=auto",
    )
    expected, whole_seconds, startup_seconds = train_uninterrupted(settings, folder)
    kills, trainings, moments = 0, 0, Counter[str]()
    run = folder / "runs" / "killed"
    while kills < times:
        trainings += 1
        shutil.rmtree(run, ignore_errors=True)
        finished = False
        while not finished:
            process = start_program("train", "name=killed", *settings, folder=folder)
            if kills < times:
                longest = startup_seconds + min(3 / times, 0.7) * (whole_seconds - startup_seconds)
                process.join(rng.uniform(0.5 * startup_seconds, longest))
            else:
                process.join()
            finished = process.exitcode == 0
            if process.exitcode is None:
                if kills % 2:  # every second one during or just after writing a checkpoint
                    wait_for_checkpoint_write(run, process, rng.uniform(0, 0.02))
                if process.is_alive():
                    os.kill(process.pid, number)
                process.join()
                kills += 1
                moments[describe_moment(run)] += 1
                expected_codes = (-number, 128 + number, 0)
                message = f"exit code {process.exitcode}:\n{read_end(folder / 'output')}"
                require(process.exitcode in expected_codes, message)
            else:
                require(finished, f"exit code {process.exitcode}:\n{read_end(folder / 'output')}")
        check_equal(read_results(run), expected)
    print(
        f"{kills} x {number.name} in {trainings} trainings, {dict(moments)}: checkpoints and validations are identical"
    )


def check_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Require that both are the same, and name the files that differ."""
    differences = []
    for name in sorted(actual.keys() | expected.keys()):
        if name not in actual:
            differences.append(f"{name} is missing")
        elif name not in expected:
            differences.append(f"{name} is extra")
        elif actual[name] != expected[name]:
            differences.append(f"{name} differs")
    require(not differences, ", ".join(differences))


def wait_for_checkpoint_write(run: Path, process: Any, seconds: float) -> None:
    """Wait until a checkpoint is being written, and `seconds` more."""
    deadline = time.monotonic() + 5
    while process.is_alive() and time.monotonic() < deadline and not any(run.glob("checkpoints/.step_*.new")):
        time.sleep(0.0005)
    time.sleep(seconds)


def describe_moment(run: Path) -> str:
    """Describe what a training was doing when it was killed."""
    checkpoints = run / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    if any(STEP_FOLDER_PATTERN.fullmatch(name) and name.startswith(".") for name in names):
        return "while writing a checkpoint"
    return "before its first checkpoint" if not names else "elsewhere"


def read_results(run: Path) -> dict[str, Any]:
    """Read the best and last checkpoints and the validations of a run, which do not depend on interruptions."""
    results: dict[str, Any] = {name: (run / "checkpoints" / name).read_text() for name in ("best", "last")}
    for folder in sorted({run / "checkpoints" / name.strip() for name in results.values()}):
        results |= {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return results | {"validations": [event for event in events if event["event"] == "validate"]}


# ------------------------------------------------------------------------------------------------------------- fileops
def check_file_operations(times: int, folder: Path) -> None:
    """Check that training and evaluation killed between two file operations leave a consistent state.

    The best checkpoint must be the one by the validations in the last checkpoint. Result files must be of one
    evaluation, or metrics.json must be missing. Running again must give the files of an uninterrupted run.
    """
    settings = (
        "data=text",
        write_corpus(folder, train=300, valid=6, test=6),
        *SMALL_SETTINGS,
        "train.max_steps=12",
        "train.max_epochs=null",
        "train.save_every=3",
        "train.validate_every=4",
        "train.monitor=loss",
        "train.keep=2",
        "resume=auto",
    )
    places, rng = Counter[str](), random.Random(1)
    run = folder / "runs" / "killed"
    run_to_exit("train", "name=first", *settings, "train.max_steps=1", folder=folder)  # fills the cache
    expected = run_and_read_files(folder, "train", "name=whole", *settings, operations=("runs/whole", None))
    count = int((folder / "operations").read_text())
    final = range(count - count // 4, count + 1)  # the last save and everything after it
    for kill_at in rng.sample(final, min(len(final), times // 2)) + rng.sample(range(1, final[0]), times // 4):
        shutil.rmtree(run, ignore_errors=True)
        code = run_to_exit("train", "name=killed", *settings, folder=folder, operations=("runs/killed", kill_at))
        require(code == -signal.SIGKILL, f"exit code {code}:\n{read_end(folder / 'output')}")
        places[check_best(run)] += 1
        check_equal(run_and_read_files(folder, "train", "name=killed", *settings), expected)
    results = folder / "runs" / "whole" / "eval"
    old, new = (
        ("evaluate", "checkpoint=runs/whole", "device=cpu", "search.max_length=20", "pictures=1", f"search.beam={beam}")
        for beam in (1, 3)
    )
    old_results = run_and_read_files(folder, *old, results=True)
    shutil.copytree(results, folder / "old")
    new_results = run_and_read_files(folder, *new, results=True, operations=("eval/", None))
    count = int((folder / "operations").read_text())
    for kill_at in rng.sample(range(1, count + 1), min(count, times - times // 2 - times // 4)):
        shutil.rmtree(results)
        shutil.copytree(folder / "old", results)
        code = run_to_exit(*new, folder=folder, operations=("eval/", kill_at))
        require(code == -signal.SIGKILL, f"exit code {code}:\n{read_end(folder / 'output')}")
        files = {name: content for name, content in read_files(results).items() if name.startswith("test/")}
        if "test/metrics.json" in files:
            is_old = files["test/metrics.json"] == old_results["test/metrics.json"]
            check_equal(files, old_results if is_old else new_results)
            places["evaluate, with complete results"] += 1
        else:
            places["evaluate, without metrics.json"] += 1
        check_equal(run_and_read_files(folder, *new, results=True), new_results)
    print(f"killed before {places.total()} file operations: {dict(places)}; no file differs, is missing or extra")


def run_and_read_files(
    folder: Path, *command: str, results: bool = False, operations: tuple[str, int | None] | None = None
) -> Any:
    """Run a command, and read the checkpoints and validations of its run, or its evaluation results."""
    code = run_to_exit(*command, folder=folder, operations=operations)
    require(code == 0, f"exit code {code}:\n{read_end(folder / 'output')}")
    run = folder / "runs" / command[1].partition("=")[2].removeprefix("runs/")
    return read_files(run / "eval") if results else read_results(run) | read_files(run / "checkpoints")


def read_files(folder: Path) -> dict[str, Any]:
    """Read all files below a folder, without the speed of evaluations."""
    files: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            speed = rb'("sentences_per_second": |<dt>sentences per second</dt><dd>)[\d.,]+'
            files[str(path.relative_to(folder))] = re.sub(speed, rb"\1", path.read_bytes())
    return files


def check_best(run: Path) -> str:
    """Require that the best checkpoint of a killed run is the best by its validations, and describe the run."""
    last = find_last_checkpoint(run)
    if last is None:
        return "train, without a checkpoint"
    validated_step = read_progress(last / "state.json").validated_step
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    validations = [event for event in events if event["event"] == "validate"]
    losses = {event["step"]: event["loss"] for event in validations if event["step"] <= validated_step}
    loaded = find_checkpoint(str(run))[1]
    best = min(losses, key=losses.__getitem__) if losses else parse_step(last.name)
    require(parse_step(loaded.name) == best, f"{loaded} is loaded as the best checkpoint, but step {best} is the best")
    load_model(str(run))
    return "train, after its last validation" if validated_step == 12 else "train"


# ------------------------------------------------------------------------------------------------------------ bitflips
def check_bit_flips(times: int, folder: Path) -> None:
    """Check that a flipped bit in a file of a run is reported or harmless."""
    run, rng, outcomes = train_small_run(folder.with_name("small")), random.Random(1), Counter[str]()
    expected = load_run(run)
    checkpoint = find_last_intact_checkpoint(run)
    files = [run / "config.yaml", *run.glob("tokenizer*.model"), *run.glob("checkpoints/*"), *checkpoint.iterdir()]
    files = sorted(path for path in files if path.is_file())
    warnings = MemoryHandler(times)
    logging.getLogger("nmt").addHandler(warnings)
    for _ in range(times):
        path = rng.choice(files)
        content = path.read_bytes()
        position, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
        warnings.buffer.clear()
        try:
            unchanged = load_run(run) == expected
            reported = len(warnings.buffer) > 0
            require(unchanged or reported, f"bit {bit} of byte {position} of {path} changes the loaded run")
            outcomes["reported, previous checkpoint loaded" if reported else "harmless"] += 1
        except UserError:
            outcomes["reported"] += 1
        path.write_bytes(content)
    print(f"{times} bits flipped in {', '.join(path.name for path in files)}: {dict(outcomes)}")


def load_run(run: Path) -> tuple[Any, ...]:
    """Load the model and the training state of a run."""
    checkpoint = find_last_intact_checkpoint(run)
    config, tokenizer = load_config_and_tokenizer(run, checkpoint)
    loaded = load_model(str(run))
    return (
        select_immutable_settings(asdict(config)),
        tokenizer,
        checkpoint,
        read_progress(checkpoint / "state.json"),
        {name: tensor.numpy().tobytes() for name, tensor in loaded.model.state_dict().items()},
        loaded.tokenizer,
        select_immutable_settings(asdict(loaded.config)),
    )


@cache
def train_small_run(folder: Path) -> Path:
    """Train a model for two epochs of few updates, and return its run folder."""
    data_path = write_corpus(folder, train=600, valid=40, test=30)
    settings = ("data=text", data_path, *SMALL_SETTINGS, "train.batch_tokens=4000", "train.max_epochs=2")
    require(run_to_exit("train", "name=small", *settings, folder=folder) == 0, (folder / "output").read_text())
    return folder / "runs" / "small"


# --------------------------------------------------------------------------------------------------------------- noise
def check_noise(lines: int, folder: Path) -> None:
    """Check that random bytes give one translation per line, and print the memory for all lines and for a tenth."""
    run, rng, peaks = train_small_run(folder.with_name("small")), random.Random(1), {}
    folder.mkdir(exist_ok=True)
    for count in (lines // 10, lines):
        text = b"\n".join(make_noise_line(rng) for _ in range(count)) + b"\n"
        (folder / "noise").write_bytes(text)
        arguments = (f"checkpoint={run}", "input=noise", "output=out", "search.beam=1", "device=cpu")
        process = CONTEXT.Process(target=translate_and_write_peak, args=(arguments, folder))
        process.start()
        process.join()
        message = (folder / "output").read_text()
        require(process.exitcode == 0 and "Traceback" not in message, message[-2000:])
        translations = (folder / "out").read_bytes()
        actual, expected = translations.count(b"\n"), text.count(b"\n")
        require(actual == expected, f"{expected} input lines gave {actual} output lines")
        translations.decode()
        peaks[expected] = int((folder / "peak").read_text()) / 1e6
    sizes = " and ".join(f"{number:,} in {peak:.0f} MB" for number, peak in peaks.items())
    print(f"lines of random bytes: {sizes}; output has the same number of lines")


def translate_and_write_peak(arguments: tuple[str, ...], folder: Path) -> None:
    """Translate in this process, and write its peak memory in bytes to the file `peak`."""
    run_program("translate", arguments, folder, "output", None)
    Path("peak").write_text(str(peak_memory()))


def make_noise_line(rng: random.Random) -> bytes:
    """Return random bytes of some kind, sometimes with line breaks."""
    kind, length = rng.randrange(6), int(rng.expovariate(1 / 30))
    if kind < 3:
        return rng.randbytes(length)
    if kind == 3:
        codes = (
            rng.choice([rng.randrange(0x20), rng.randrange(0x2000, 0x2100), 0x2581, 0xFEFF, 0x1F469])
            for _ in range(length)
        )
        return "".join(map(chr, codes)).encode()
    if kind == 4:
        return bytes([rng.randrange(256)]) * length
    return "".join(chr(rng.randrange(0xD800)) for _ in range(length)).encode()


# ------------------------------------------------------------------------------------------------------------ badlines
def check_bad_lines(count: int, folder: Path) -> None:
    """Check that a corpus with one damaged line in a hundred is rejected, or trained on without those lines."""
    data_path = write_corpus(folder, train=min(count, 20_000), valid=20, test=20)
    rng, damaged = random.Random(1), Counter[str]()
    texts = [(folder / "text" / f"train.{side}").read_bytes().splitlines() for side in ("de", "en")]
    files = [open(folder / "text" / f"train.{side}", "wb") for side in ("de", "en")]  # noqa: SIM115
    kinds = {"encoding": b"\xff\xfe no text", "empty": b"", "long": b"x " * 50_000}
    for number in range(count):
        pair = [side[number % len(side)] for side in texts]
        if rng.randrange(100) == 0:
            kind = rng.choice([*kinds])
            pair[rng.randrange(2)] = kinds[kind]
            damaged[kind] += 1
        for file, line in zip(files, pair, strict=True):
            file.write(line + b"\n")
    for file in files:
        file.close()
    settings = ("data=text", data_path, *SMALL_SETTINGS, "train.max_steps=5", f"data.cache={folder / 'cache'}")
    for invalid in ("refuse", "drop"):
        start, output = time.monotonic(), f"output_{invalid}"
        arguments = (f"name={invalid}", f"data.invalid={invalid}", *settings)
        code = run_to_exit("train", *arguments, folder=folder, output=output)
        require(code == (invalid == "refuse"), read_end(folder / output))
        print(f"data.invalid={invalid}, {time.monotonic() - start:.0f} s:\n{(folder / output).read_text()}")
    print(f"damaged lines: {dict(damaged)}")
    path = folder / "text" / "train.en"
    lines, removed = path.read_bytes().split(b"\n"), rng.randrange(count)
    path.write_bytes(b"\n".join(lines[:removed] + lines[removed + 1 :]))
    arguments = ("name=shifted", "data.invalid=drop", *settings)
    code = run_to_exit("train", *arguments, folder=folder, output="output_shifted")
    require(code == 1, "a corpus whose sides differ in length is not rejected")
    print(f"without line {removed + 1} of train.en:\n{(folder / 'output_shifted').read_text()}")


# ---------------------------------------------------------------------------------------------------------------- soak
def check_soak(minutes: int, folder: Path) -> None:
    """Check that memory and open files of a process that trains and evaluates repeatedly do not grow."""
    data_path = write_corpus(folder, train=600, valid=40, test=30)
    process = CONTEXT.Process(target=train_repeatedly, args=(folder, data_path, 60.0 * minutes))
    process.start()
    process.join()
    require(process.exitcode == 0, read_end(folder / "output"))
    measurements = json.loads((folder / "measurements.json").read_text())
    early, last = measurements[len(measurements) // 10], measurements[-1]
    growth = last["rss"] / early["rss"] - 1
    print(
        f"{len(measurements)} trainings with evaluations in {minutes} minutes: {early['rss'] / 1e6:.1f} MB after a "
        f"tenth of the time, {last['rss'] / 1e6:.1f} MB at the end ({growth:+.2%}); "
        f"open files: {early['files']}, {last['files']}"
    )
    require(growth < 0.01 and last["files"] <= early["files"], "memory or the number of open files grows")


def train_repeatedly(folder: Path, data_path: str, seconds: float) -> None:
    """Train and evaluate repeatedly in this process for `seconds`, and record memory and open files."""
    measurements, start, number = [], time.monotonic(), 0
    common = ("name=soak", "data=text", data_path, *SMALL_SETTINGS, "train.max_epochs=2", "overwrite=true")
    while time.monotonic() - start < seconds:
        number += 1
        run_program("train", (*common, f"seed={number}"), folder, "output", None)
        run_program("evaluate", ("checkpoint=runs/soak", "pictures=0", "device=cpu"), folder, "output", None)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        measurements.append({"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))})
        (folder / "measurements.json").write_text(json.dumps(measurements))


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {message}")


TRIALS: dict[str, Callable[[int, Path], None]] = {
    "kill": check_kills,
    "term": lambda times, folder: check_kills(times, folder.with_name("kill"), signal.SIGTERM),
    "fileops": check_file_operations,
    "bitflips": check_bit_flips,
    "noise": check_noise,
    "badlines": check_bad_lines,
    "soak": check_soak,
}


def run_trials(trials: dict[str, Callable[[int, Path], None]]) -> None:
    """Run the trials and sizes given on the command line, in a temporary folder or in folder=DIR."""
    use_utf8()
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if not options.keys() & trials.keys() or options.keys() - {*trials, "folder"}:
        sys.exit(sys.modules["__main__"].__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.pop("folder", temporary)).resolve()
        for name, size in options.items():
            trials[name](int(size), folder / name)


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["nmt.train", "nmt.evaluate", "nmt.translate", "torch._dynamo"])
    run_trials(TRIALS)
