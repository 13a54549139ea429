"""Inject faults and check the guarantees of docs/reliability.md.

faults.py kill=100    kill training at 100 random moments (SIGKILL), and resume it each time
faults.py term=100    the same with SIGTERM
faults.py gaps=100    kill training and evaluation between two file operations, at 100 places
faults.py flip=1000    flip single bits in the files of a run, and load it
faults.py noise=10000    translate random bytes
faults.py lines=1000000    train on a corpus in which one line in a hundred is damaged
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not pay off for such a small model
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # a killed process leaves semaphores

from nmt.config import select_immutable_settings  # noqa: E402
from nmt.data.toy.corpus import generate  # noqa: E402
from nmt.errors import UserError  # noqa: E402
from nmt.runtime.streams import use_utf8  # noqa: E402
from nmt.training.checkpoint import (  # noqa: E402  after the number of threads
    STEP_FOLDER_PATTERN,
    find_checkpoint,
    find_last_checkpoint,
    find_last_intact_checkpoint,
    load_config_and_tokenizer,
    load_model,
    parse_step,
)
from nmt.training.state import read_progress  # noqa: E402

SMALL_SETTINGS = (
    "tokenizer.vocab_size=500", "model.embed=16", "model.hidden=32", "model.dropout=0.1", "train.batch_tokens=400",
    "optim.lr=0.005", "device=cpu", "precision=fp32",
)  # fmt: skip
AUDIT_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audited by Python before they happen
CONTEXT = multiprocessing.get_context("forkserver")  # with all imports preloaded, a process starts within a second


def count_changes(folder: str, gap: int | None, report: Callable[[int], Any]) -> None:
    """Kill this process just before its file operation number `gap`, counted from the first one in `folder`.

    Without a gap, `report` the number of operations after each.
    """
    count = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in AUDIT_EVENTS or not (count or folder in str(arguments[0])):
            return
        count += 1
        if gap is None:
            report(count)
        elif count == gap:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def run_program(
    name: str, arguments: tuple[str, ...], folder: Path, said: str, gap: tuple[str, int | None] | None
) -> None:
    """Run `python -m nmt.<name>` in this process, in a folder, with output appended to the file `said`."""
    os.chdir(folder)
    if gap:
        counted = os.open("changes", os.O_CREAT | os.O_WRONLY)
        count_changes(*gap, lambda count: os.pwrite(counted, f"{count:9}".encode(), 0))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [name, *arguments]
    module = __import__(f"nmt.{name}", fromlist=[name])
    getattr(module, name)()


def start_program(
    name: str, *arguments: str, folder: Path, said: str = "said", gap: tuple[str, int | None] | None = None
) -> Any:
    process = CONTEXT.Process(target=run_program, args=(name, arguments, folder, said, gap))
    process.start()
    return process


def run_to_exit(
    name: str, *arguments: str, folder: Path, said: str = "said", gap: tuple[str, int | None] | None = None
) -> int:
    process = start_program(name, *arguments, folder=folder, said=said, gap=gap)
    process.join()
    return process.exitcode


def write_corpus(folder: Path, **sizes: int) -> str:
    """Write text of the built-in corpus, and return the data.path setting."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for split, pairs in generate(1, sizes).items():
        for side, texts in {"de": [p.german for p in pairs], "en": [p.english for p in pairs]}.items():
            (folder / "text" / f"{split}.{side}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return f"data.path={folder / 'text'}"


# ---------------------------------------------------------------------------------------------------------------- kill
def check_kills(times: int, folder: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """Check that training killed `times` times ends with the same files as uninterrupted training."""
    rng = random.Random(1)
    settings = (
        "data=text", write_corpus(folder, train=400, valid=20, test=2), *SMALL_SETTINGS,
        f"train.max_steps={6 * times + 60}",
        "train.max_epochs=null", "train.save_every=2", "train.validate_every=25", "train.log_every=10", "resume=auto",
    )  # fmt: skip
    began = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0, (folder / "said").read_text()
    whole = time.monotonic() - began
    began = time.monotonic()
    assert run_to_exit("train", "name=whole", *settings, folder=folder) == 0
    opening = time.monotonic() - began
    wanted, ended, trainings, moments = read_results(folder / "runs" / "whole"), 0, 0, Counter[str]()
    print(f"undisturbed: {whole:.1f} s, of which {opening:.1f} s to start")
    while ended < times:
        trainings += 1
        shutil.rmtree(folder / "runs" / "torn", ignore_errors=True)
        finished = False
        while not finished:
            process = start_program("train", "name=torn", *settings, folder=folder)
            if ended < times:
                process.join(rng.uniform(0.5 * opening, opening + 3 * (whole - opening) / times))
            else:
                process.join()
            finished = process.exitcode == 0
            if process.exitcode is None:
                if ended % 2:  # every second one during or just after writing a checkpoint
                    wait_for_checkpoint_write(folder / "runs" / "torn", process, rng.uniform(0, 0.02))
                if process.is_alive():
                    os.kill(process.pid, number)
                process.join()
                ended += 1
                moments[describe_moment(folder / "runs" / "torn")] += 1
                said = (folder / "said").read_text()[-2000:]
                require(process.exitcode in (-number, 128 + number, 0), f"exit code {process.exitcode}:\n{said}")
            else:
                require(finished, f"exit code {process.exitcode}:\n{(folder / 'said').read_text()[-2000:]}")
        check_equal(read_results(folder / "runs" / "torn"), wanted)
    print(f"{number.name} {ended} times in {trainings} trainings, {dict(moments)}: checkpoints and validations equal")


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Require that both are the same, and name the files that differ."""
    others = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    state = {key: "missing" if key not in found else "extra" if key not in wanted else "different" for key in others}
    require(not others, ", ".join(f"{key} is {what}" for key, what in state.items()))


def wait_for_checkpoint_write(run: Path, process: Any, seconds: float) -> None:
    """Wait until a checkpoint is being written, and `seconds` more."""
    last = time.monotonic() + 5
    while process.is_alive() and time.monotonic() < last and not any(run.glob("checkpoints/.step_*.new")):
        pass
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
    found: dict[str, Any] = {name: (run / "checkpoints" / name).read_text() for name in ("best", "last")}
    for folder in sorted({run / "checkpoints" / name.strip() for name in found.values()}):
        found |= {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return found | {"validations": [event for event in events if event["event"] == "validate"]}


# ---------------------------------------------------------------------------------------------------------------- gaps
def check_gaps(times: int, folder: Path) -> None:
    """Check that training and evaluation killed between two file operations leave a consistent state.

    The best checkpoint must be the one by the validations in the last checkpoint. Result files must be of one
    evaluation, or metrics.json must be missing. Running again must give the files of an uninterrupted run.
    """
    settings = (
        "data=text", write_corpus(folder, train=300, valid=20, test=20), *SMALL_SETTINGS, "train.max_steps=12",
        "train.max_epochs=null", "train.save_every=3", "train.validate_every=4", "train.monitor=loss", "train.keep=2",
        "resume=auto",
    )  # fmt: skip
    places, rng = Counter[str](), random.Random(1)
    run_to_exit("train", "name=first", *settings, folder=folder)  # fills the cache
    wanted = run_and_read_files(folder, "train", "name=whole", *settings, gap=("runs/whole", None))
    changes = int((folder / "changes").read_text())
    final = range(changes - changes // 4, changes + 1)  # the last save and everything after it
    for gap in rng.sample(final, min(len(final), times // 2)) + rng.sample(range(1, final[0]), times // 4):
        shutil.rmtree(folder / "runs" / "torn", ignore_errors=True)
        code = run_to_exit("train", "name=torn", *settings, folder=folder, gap=("runs/torn", gap))
        require(code == -signal.SIGKILL, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
        places[check_best(folder / "runs" / "torn")] += 1
        check_equal(run_and_read_files(folder, "train", "name=torn", *settings), wanted)
    results = folder / "runs" / "whole" / "eval"
    other, one = (("evaluate", "checkpoint=runs/whole", "device=cpu", f"search.beam={beam}") for beam in (1, 3))
    before = run_and_read_files(folder, *other, results=True)
    after = run_and_read_files(folder, *one, results=True, gap=("eval/", None))
    changes = int((folder / "changes").read_text())
    for gap in rng.sample(range(1, changes + 1), min(changes, times - times // 2 - times // 4)):
        require(run_and_read_files(folder, *other, results=True) == before, "the same evaluation has other results")
        code = run_to_exit(*one, folder=folder, gap=("eval/", gap))
        require(code == -signal.SIGKILL, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
        left = {key: value for key, value in read_files(results).items() if key.startswith("test/")}
        if "test/metrics.json" in left:
            check_equal(left, before if left["test/metrics.json"] == before["test/metrics.json"] else after)
        places["evaluate, with whole results" if "test/metrics.json" in left else "evaluate, without metrics.json"] += 1
        check_equal(run_and_read_files(folder, *one, results=True), after)
    print(f"killed in {places.total()} gaps: {dict(places)}; nothing was different, missing or extra")


def run_and_read_files(
    folder: Path, *given: str, results: bool = False, gap: tuple[str, int | None] | None = None
) -> Any:
    """Run a command, and read the checkpoints and validations of its run, or its evaluation results."""
    code = run_to_exit(*given, folder=folder, gap=gap)
    require(code == 0, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
    run = folder / "runs" / given[1].partition("=")[2].removeprefix("runs/")
    return read_files(run / "eval") if results else read_results(run) | read_files(run / "checkpoints")


def read_files(folder: Path) -> dict[str, Any]:
    """Read all files below a folder, without the speed of evaluations."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            speed = rb'("sentences_per_second": |<dt>sentences per second</dt><dd>)[\d.,]+'
            found[str(path.relative_to(folder))] = re.sub(speed, rb"\1", path.read_bytes())
    return found


def check_best(run: Path) -> str:
    """Require that the best checkpoint of a killed run is the best by its validations, and describe the run."""
    last = find_last_checkpoint(run)
    if last is None:
        return "train, without a checkpoint"
    judged = read_progress(last / "state.json").validated_step
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = {e["step"]: e["loss"] for e in events if e["event"] == "validate" and e["step"] <= judged}
    found = find_checkpoint(str(run))[1]
    best = min(losses, key=losses.__getitem__) if losses else parse_step(last.name)
    require(parse_step(found.name) == best, f"{found} is loaded as the best checkpoint, but step {best} is the best")
    load_model(str(run))
    return "train, after its last validation" if judged == 12 else "train"


# ---------------------------------------------------------------------------------------------------------------- flip
def check_flips(times: int, folder: Path) -> None:
    """Check that a flipped bit in a file of a run is reported or harmless."""
    run, rng, found = train_small_run(folder), random.Random(1), Counter[str]()
    wanted = load_run(run)
    step = find_last_intact_checkpoint(run)
    files = [run / "config.yaml", *run.glob("tokenizer*.model"), *run.glob("checkpoints/*"), *step.iterdir()]
    files = sorted(path for path in files if path.is_file())
    warnings = MemoryHandler(times)
    logging.getLogger("nmt").addHandler(warnings)
    for _ in range(times):
        path = rng.choice(files)
        content = path.read_bytes()
        place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        warnings.buffer.clear()
        try:
            same = load_run(run) == wanted
            require(same or len(warnings.buffer) > 0, f"bit {bit} of byte {place} of {path} changes the loaded run")
            found["reported, previous checkpoint loaded" if warnings.buffer else "harmless"] += 1
        except UserError:
            found["reported"] += 1
        path.write_bytes(content)
    print(f"{times} bits flipped in {', '.join(path.name for path in files)}: {dict(found)}")


def load_run(run: Path) -> tuple[Any, ...]:
    """Load the model and the training state of a run."""
    step = find_last_intact_checkpoint(run)
    config, tokenizer = load_config_and_tokenizer(run, step)
    goes_on = select_immutable_settings(asdict(config)), tokenizer, step, read_progress(step / "state.json")
    loaded = load_model(str(run))
    weights = {name: tensor.numpy().tobytes() for name, tensor in loaded.model.state_dict().items()}
    return *goes_on, weights, loaded.tokenizer, select_immutable_settings(asdict(loaded.config))


def train_small_run(folder: Path) -> Path:
    """Train a model for two epochs, and return its run folder."""
    settings = ("data=text", write_corpus(folder, train=600, valid=40, test=30), *SMALL_SETTINGS, "train.max_epochs=2")
    require(run_to_exit("train", "name=small", *settings, folder=folder) == 0, (folder / "said").read_text())
    return folder / "runs" / "small"


# --------------------------------------------------------------------------------------------------------------- noise
def check_noise(lines: int, folder: Path) -> None:
    """Check that any bytes translate to as many lines, and print the memory for all lines and for a tenth of them."""
    run, rng, peaks = train_small_run(folder), random.Random(1), {}
    for count in (lines // 10, lines):
        text = b"\n".join(make_noise_line(rng) for _ in range(count)) + b"\n"
        (folder / "noise").write_bytes(text)
        imports = "from nmt.runtime.memory import peak_memory; from nmt.translate import translate"
        program = f"{imports}; translate(); print(peak_memory())"
        call = ["-c", program, f"checkpoint={run}", "input=noise", "output=out", "search.beam=1", "device=cpu"]
        process = subprocess.run([sys.executable, *call], cwd=folder, capture_output=True, text=True)
        require(process.returncode == 0 and "Traceback" not in process.stderr, process.stderr[-2000:])
        got, wanted = (folder / "out").read_bytes(), text.count(b"\n")
        require(got.count(b"\n") == wanted, f"{wanted} lines became {got.count(10)}")
        got.decode()
        peaks[wanted] = int(process.stdout) / 1e6
    shown = " and ".join(f"{number:,} in {peak:.0f} MB" for number, peak in peaks.items())
    print(f"lines of random bytes: {shown}; output has the same number of lines")


def make_noise_line(rng: random.Random) -> bytes:
    """Return random bytes of some kind, sometimes with line breaks."""
    kind, length = rng.randrange(6), int(rng.expovariate(1 / 30))
    if kind < 3:
        return rng.randbytes(length)
    if kind == 3:
        return "".join(chr(rng.choice([rng.randrange(0x20), rng.randrange(0x2000, 0x2100), 0x2581, 0xFEFF, 0x1F469]))
                       for _ in range(length)).encode()  # fmt: skip
    if kind == 4:
        return bytes([rng.randrange(256)]) * length
    return "".join(chr(rng.randrange(0xD800)) for _ in range(length)).encode()


# --------------------------------------------------------------------------------------------------------------- lines
def check_lines(count: int, folder: Path) -> None:
    """Check that a corpus with one damaged line in a hundred is refused, or trained on without those lines."""
    setting, rng, damaged = write_corpus(folder, train=20_000, valid=20, test=20), random.Random(1), Counter[str]()
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
    few = ("data=text", setting, *SMALL_SETTINGS, "train.max_steps=5", "data.cache=" + str(folder / "cache"))
    for invalid in ("refuse", "drop"):
        began, said = time.monotonic(), f"said_{invalid}"
        process = start_program("train", f"name={invalid}", f"data.invalid={invalid}", *few, folder=folder, said=said)
        process.join()
        require(process.exitcode == (invalid == "refuse"), (folder / said).read_text()[-2000:])
        print(f"data.invalid={invalid}, {time.monotonic() - began:.0f} s:\n{(folder / said).read_text()}")
    print(f"damaged lines: {dict(damaged)}")
    path = folder / "text" / "train.en"
    content, gone = path.read_bytes().split(b"\n"), rng.randrange(count)
    path.write_bytes(b"\n".join(content[:gone] + content[gone + 1 :]))
    require(
        run_to_exit("train", "name=parted", "data.invalid=drop", *few, folder=folder, said="parted") == 1, "not refused"
    )
    print(f"without line {gone + 1} of train.en:\n{(folder / 'parted').read_text()}")


# ---------------------------------------------------------------------------------------------------------------- soak
def check_soak(minutes: int, folder: Path) -> None:
    """Check that memory and open files of a process that trains and evaluates repeatedly do not grow."""
    setting = write_corpus(folder, train=600, valid=40, test=30)
    process = CONTEXT.Process(target=train_in_rounds, args=(folder, setting, 60.0 * minutes))
    process.start()
    process.join()
    require(process.exitcode == 0, (folder / "said").read_text()[-2000:])
    measured = json.loads((folder / "measured.json").read_text())
    settled = measured[len(measured) // 10]
    last = measured[-1]
    growth = last["rss"] / settled["rss"] - 1
    print(
        f"{len(measured)} trainings with evaluations in {minutes} minutes: {settled['rss'] / 1e6:.1f} MB after a tenth "
        f"of the time, {last['rss'] / 1e6:.1f} MB at the end ({growth:+.2%}); "
        f"open files: {settled['files']}, {last['files']}"
    )
    require(growth < 0.01 and last["files"] <= settled["files"], "memory or open files grow")


def train_in_rounds(folder: Path, setting: str, seconds: float) -> None:
    """Train and evaluate repeatedly in this process for `seconds`, and record memory and open files."""
    measured, began, number = [], time.monotonic(), 0
    while time.monotonic() - began < seconds:
        number += 1
        settings = (
            "name=soak",
            "data=text",
            setting,
            *SMALL_SETTINGS,
            "train.max_epochs=2",
            "overwrite=true",
            f"seed={number}",
        )
        run_program("train", settings, folder, "said", None)
        run_program("evaluate", ("checkpoint=runs/soak", "pictures=0", "device=cpu"), folder, "said", None)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        measured.append({"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))})
        (folder / "measured.json").write_text(json.dumps(measured))


def require(kept: bool, otherwise: str) -> None:
    if not kept:
        sys.exit(f"BROKEN: {otherwise}")


TRIALS: dict[str, Callable[[int, Path], None]] = {
    "kill": check_kills,
    "term": lambda times, folder: check_kills(times, folder, signal.SIGTERM),
    "gaps": check_gaps,
    "flip": check_flips,
    "noise": check_noise,
    "lines": check_lines,
    "soak": check_soak,
}


def run_trials(trials: dict[str, Callable[[int, Path], None]]) -> None:
    """Run the trials and sizes given on the command line, in a temporary folder or in folder=DIR."""
    use_utf8()
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if not given.keys() & trials.keys() or given.keys() - {*trials, "folder"}:
        sys.exit(sys.modules["__main__"].__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(given.pop("folder", temporary)).resolve()
        for name, size in given.items():
            trials[name](int(size), place / name)


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["nmt.train", "nmt.evaluate"])
    run_trials(TRIALS)
