"""Break things and see that nmt keeps what docs/reliability.md promises.

faults.py kill=100    end training at 100 random moments (SIGKILL), go on each time
faults.py term=100    the same with SIGTERM
faults.py gaps=100    end training and evaluation between two changes of files, at 100 places
faults.py flip=1000    flip single bits in the files of a run and read it
faults.py noise=10000    translate random bytes
faults.py lines=1000000    train on a corpus of which one line in a hundred is damaged
faults.py soak=30    train and evaluate for 30 minutes, again and again

Several can be given. All work on the built-in corpus, in a temporary folder or in folder=DIR, which stays, and print
what they found. A broken promise ends the program with exit code 1.
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

os.environ["OMP_NUM_THREADS"] = "1"  # with a model as small as this threads only wait for each other
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # a process that is killed leaves semaphores

from nmt.config import immutable_settings  # noqa: E402
from nmt.data.toy.corpus import generate  # noqa: E402
from nmt.errors import UserError  # noqa: E402
from nmt.runtime.streams import use_utf8  # noqa: E402
from nmt.training.checkpoint import (  # noqa: E402  after the number of threads
    STEP_FOLDER,
    find_checkpoint,
    last_checkpoint,
    last_intact,
    load_model,
    load_verified,
    step_of,
)
from nmt.training.state import read_progress  # noqa: E402

SMALL = (
    "tokenizer.vocab_size=500", "model.embed=16", "model.hidden=32", "model.dropout=0.1", "train.batch_tokens=400",
    "optim.lr=0.005", "device=cpu", "precision=fp32",
)  # fmt: skip
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # events that Python announces before they happen
CONTEXT = multiprocessing.get_context("forkserver")  # a process that has imported everything begins within a second


def count_changes(folder: str, gap: int | None, report: Callable[[int], Any]) -> None:
    """Kill this process just before the change number `gap` of names in a file system, which Python announces; the
    first one counted is in `folder`. Without a gap, `report` how many there have been."""
    count = 0

    def announced(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CHANGES or not (count or folder in str(arguments[0])):
            return
        count += 1
        if gap is None:
            report(count)
        elif count == gap:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(announced)


def command(name: str, arguments: tuple[str, ...], folder: Path, said: str, gap: tuple[str, int | None] | None) -> None:
    """In a process of its own: `python -m nmt.<name>` in a folder; what it says goes to a file there."""
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


def start(
    name: str, *arguments: str, folder: Path, said: str = "said", gap: tuple[str, int | None] | None = None
) -> Any:
    process = CONTEXT.Process(target=command, args=(name, arguments, folder, said, gap))
    process.start()
    return process


def done(
    name: str, *arguments: str, folder: Path, said: str = "said", gap: tuple[str, int | None] | None = None
) -> int:
    process = start(name, *arguments, folder=folder, said=said, gap=gap)
    process.join()
    return process.exitcode


def write_corpus(folder: Path, **sizes: int) -> str:
    """Text of the built-in corpus as files; returns the settings that name them."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for split, pairs in generate(1, sizes).items():
        for side, texts in {"de": [p.german for p in pairs], "en": [p.english for p in pairs]}.items():
            (folder / "text" / f"{split}.{side}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return f"data.path={folder / 'text'}"


# ---------------------------------------------------------------------------------------------------------------- kill
def kill(times: int, folder: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """Training that is ended `times` times ends with the files of a training that is not."""
    rng = random.Random(1)
    settings = (
        "data=text", write_corpus(folder, train=400, valid=20, test=2), *SMALL, f"train.max_steps={6 * times + 60}",
        "train.max_epochs=null", "train.save_every=2", "train.validate_every=25", "train.log_every=10", "resume=auto",
    )  # fmt: skip
    began = time.monotonic()
    assert done("train", "name=whole", *settings, folder=folder) == 0, (folder / "said").read_text()
    whole = time.monotonic() - began
    began = time.monotonic()
    assert done("train", "name=whole", *settings, folder=folder) == 0
    opening = time.monotonic() - began
    wanted, ended, trainings, moments = fruits(folder / "runs" / "whole"), 0, 0, Counter[str]()
    print(f"undisturbed: {whole:.1f} s, of which {opening:.1f} s to begin")
    while ended < times:
        trainings += 1
        shutil.rmtree(folder / "runs" / "torn", ignore_errors=True)
        finished = False
        while not finished:
            process = start("train", "name=torn", *settings, folder=folder)
            if ended < times:
                process.join(rng.uniform(0.5 * opening, opening + 3 * (whole - opening) / times))
            else:
                process.join()
            finished = process.exitcode == 0
            if process.exitcode is None:
                if ended % 2:  # one in two while a checkpoint is written, or just after
                    await_writing(folder / "runs" / "torn", process, rng.uniform(0, 0.02))
                if process.is_alive():
                    os.kill(process.pid, number)
                process.join()
                ended += 1
                moments[moment(folder / "runs" / "torn")] += 1
                said = (folder / "said").read_text()[-2000:]
                promise(process.exitcode in (-number, 128 + number, 0), f"exit code {process.exitcode}:\n{said}")
            else:
                promise(finished, f"exit code {process.exitcode}:\n{(folder / 'said').read_text()[-2000:]}")
        compare(fruits(folder / "runs" / "torn"), wanted)
    print(f"{number.name} {ended} times in {trainings} trainings, {dict(moments)}: checkpoints and validations equal")


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Promise that both are the same, and say of which files that is not so."""
    others = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    state = {key: "missing" if key not in found else "extra" if key not in wanted else "different" for key in others}
    promise(not others, ", ".join(f"{key} is {what}" for key, what in state.items()))


def await_writing(run: Path, process: Any, seconds: float) -> None:
    """Wait until a checkpoint is begun, and so many seconds more."""
    last = time.monotonic() + 5
    while process.is_alive() and time.monotonic() < last and not any(run.glob("checkpoints/.step_*.new")):
        pass
    time.sleep(seconds)


def moment(run: Path) -> str:
    """What a training was doing when it was ended."""
    checkpoints = run / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    if any(STEP_FOLDER.fullmatch(name) and name.startswith(".") for name in names):
        return "while writing a checkpoint"
    return "before its first checkpoint" if not names else "elsewhere"


def fruits(run: Path) -> dict[str, Any]:
    """All that a training comes to, but for the speed that it had: a signal may have left a checkpoint more, before the
    last one."""
    found: dict[str, Any] = {name: (run / "checkpoints" / name).read_text() for name in ("best", "last")}
    for folder in sorted({run / "checkpoints" / name.strip() for name in found.values()}):
        found |= {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return found | {"validations": [event for event in events if event["event"] == "validate"]}


# ---------------------------------------------------------------------------------------------------------------- gaps
def gaps(times: int, folder: Path) -> None:
    """Training and evaluation that are killed between two changes of files leave one state, which readers find at once:
    the best checkpoint by the validations that the last one knows; files of results that belong together, or no
    metrics.json. Done again, they leave what they leave undisturbed, and nothing else."""
    settings = (
        "data=text", write_corpus(folder, train=300, valid=20, test=20), *SMALL, "train.max_steps=12",
        "train.max_epochs=null", "train.save_every=3", "train.validate_every=4", "train.monitor=loss", "train.keep=2",
        "resume=auto",
    )  # fmt: skip
    places, rng = Counter[str](), random.Random(1)
    done("train", "name=first", *settings, folder=folder)  # from here on the text is in the cache
    wanted = everything(folder, "train", "name=whole", *settings, gap=("runs/whole", None))
    changes = int((folder / "changes").read_text())
    final = range(changes - changes // 4, changes + 1)  # the last save and what comes after it
    for gap in rng.sample(final, min(len(final), times // 2)) + rng.sample(range(1, final[0]), times // 4):
        shutil.rmtree(folder / "runs" / "torn", ignore_errors=True)
        code = done("train", "name=torn", *settings, folder=folder, gap=("runs/torn", gap))
        promise(code == -signal.SIGKILL, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
        places[check_best(folder / "runs" / "torn")] += 1
        compare(everything(folder, "train", "name=torn", *settings), wanted)
    results = folder / "runs" / "whole" / "eval"
    other, one = (("evaluate", "checkpoint=runs/whole", "device=cpu", f"search.beam={beam}") for beam in (1, 3))
    before = everything(folder, *other, results=True)
    after = everything(folder, *one, results=True, gap=("eval/", None))
    changes = int((folder / "changes").read_text())
    for gap in rng.sample(range(1, changes + 1), min(changes, times - times // 2 - times // 4)):
        promise(everything(folder, *other, results=True) == before, "the same evaluation has other results")
        code = done(*one, folder=folder, gap=("eval/", gap))
        promise(code == -signal.SIGKILL, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
        left = {key: value for key, value in files_of(results).items() if key.startswith("test/")}
        if "test/metrics.json" in left:
            compare(left, before if left["test/metrics.json"] == before["test/metrics.json"] else after)
        places["evaluate, with whole results" if "test/metrics.json" in left else "evaluate, without metrics.json"] += 1
        compare(everything(folder, *one, results=True), after)
    print(f"killed in {places.total()} gaps: {dict(places)}; nothing was different, missing or extra")


def everything(folder: Path, *given: str, results: bool = False, gap: tuple[str, int | None] | None = None) -> Any:
    """Do it to the end; then what is in the run's checkpoints, and its validations, or in its results."""
    code = done(*given, folder=folder, gap=gap)
    promise(code == 0, f"exit code {code}:\n{(folder / 'said').read_text()[-2000:]}")
    run = folder / "runs" / given[1].partition("=")[2].removeprefix("runs/")
    return files_of(run / "eval") if results else fruits(run) | files_of(run / "checkpoints")


def files_of(folder: Path) -> dict[str, Any]:
    """What is in all files below a folder, but for the speed of an evaluation."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            speed = rb'("sentences_per_second": |<dt>sentences per second</dt><dd>)[\d.,]+'
            found[str(path.relative_to(folder))] = re.sub(speed, rb"\1", path.read_bytes())
    return found


def check_best(run: Path) -> str:
    """Promise that of a run that was killed the best checkpoint is read that its validations say."""
    last = last_checkpoint(run)
    if last is None:
        return "train, without a checkpoint"
    judged = read_progress(last / "state.json").validated_step
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = {e["step"]: e["loss"] for e in events if e["event"] == "validate" and e["step"] <= judged}
    found = find_checkpoint(str(run))[1]
    best = min(losses, key=losses.__getitem__) if losses else step_of(last.name)
    promise(step_of(found.name) == best, f"{found} is taken for the best checkpoint, but step {best} is the best")
    load_model(str(run))
    return "train, after its last validation" if judged == 12 else "train"


# ---------------------------------------------------------------------------------------------------------------- flip
def flip(times: int, folder: Path) -> None:
    """A flipped bit in a file of a run is named, or changes nothing."""
    run, rng, found = small_run(folder), random.Random(1), Counter[str]()
    wanted = contents(run)
    step = last_intact(run)
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
            same = contents(run) == wanted
            promise(same or len(warnings.buffer) > 0, f"bit {bit} of byte {place} of {path} changes what is read")
            found["named, and the checkpoint before taken" if warnings.buffer else "harmless"] += 1
        except UserError:
            found["named"] += 1
        path.write_bytes(content)
    print(f"{times} bits flipped in {', '.join(path.name for path in files)}: {dict(found)}")


def contents(run: Path) -> tuple[Any, ...]:
    """What is read of a run: a model to translate with, and where training goes on."""
    step = last_intact(run)
    config, tokenizer = load_verified(run, step)
    goes_on = immutable_settings(asdict(config)), tokenizer, step, read_progress(step / "state.json")
    loaded = load_model(str(run))
    weights = {name: tensor.numpy().tobytes() for name, tensor in loaded.model.state_dict().items()}
    return *goes_on, weights, loaded.tokenizer, immutable_settings(asdict(loaded.config))


def small_run(folder: Path) -> Path:
    """A model of two epochs."""
    settings = ("data=text", write_corpus(folder, train=600, valid=40, test=30), *SMALL, "train.max_epochs=2")
    promise(done("train", "name=small", *settings, folder=folder) == 0, (folder / "said").read_text())
    return folder / "runs" / "small"


# --------------------------------------------------------------------------------------------------------------- noise
def noise(lines: int, folder: Path) -> None:
    """Whatever bytes come in, as many lines go out; and how much memory that takes, also for a tenth of them."""
    run, rng, peaks = small_run(folder), random.Random(1), {}
    for count in (lines // 10, lines):
        text = b"\n".join(nonsense(rng) for _ in range(count)) + b"\n"
        (folder / "noise").write_bytes(text)
        program = "from nmt import memory, translate; translate.translate(); print(memory.peak_memory())"
        call = ["-c", program, f"checkpoint={run}", "input=noise", "output=out", "search.beam=1", "device=cpu"]
        process = subprocess.run([sys.executable, *call], cwd=folder, capture_output=True, text=True)
        promise(process.returncode == 0 and "Traceback" not in process.stderr, process.stderr[-2000:])
        got, wanted = (folder / "out").read_bytes(), text.count(b"\n")
        promise(got.count(b"\n") == wanted, f"{got.count(10)} lines came of {wanted}")
        got.decode()
        peaks[wanted] = int(process.stdout) / 1e6
    shown = " and ".join(f"{number:,} in {peak:.0f} MB" for number, peak in peaks.items())
    print(f"lines of random bytes: {shown}; as many came out")


def nonsense(rng: random.Random) -> bytes:
    """A line of bytes, sometimes several, that nobody would write."""
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
def lines(count: int, folder: Path) -> None:
    """A corpus of which one line in a hundred is damaged: refused, or trained on without those lines."""
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
    few = ("data=text", setting, *SMALL, "train.max_steps=5", "data.cache=" + str(folder / "cache"))
    for invalid in ("refuse", "drop"):
        began, said = time.monotonic(), f"said_{invalid}"
        process = start("train", f"name={invalid}", f"data.invalid={invalid}", *few, folder=folder, said=said)
        process.join()
        promise(process.exitcode == (invalid == "refuse"), (folder / said).read_text()[-2000:])
        print(f"data.invalid={invalid}, {time.monotonic() - began:.0f} s:\n{(folder / said).read_text()}")
    print(f"damaged were: {dict(damaged)}")
    path = folder / "text" / "train.en"
    content, gone = path.read_bytes().split(b"\n"), rng.randrange(count)
    path.write_bytes(b"\n".join(content[:gone] + content[gone + 1 :]))
    promise(done("train", "name=parted", "data.invalid=drop", *few, folder=folder, said="parted") == 1, "not refused")
    print(f"without line {gone + 1} of train.en:\n{(folder / 'parted').read_text()}")


# ---------------------------------------------------------------------------------------------------------------- soak
def soak(minutes: int, folder: Path) -> None:
    """One process that trains and evaluates for long needs no more memory and no more files at the end."""
    setting = write_corpus(folder, train=600, valid=40, test=30)
    process = CONTEXT.Process(target=rounds, args=(folder, setting, 60.0 * minutes))
    process.start()
    process.join()
    promise(process.exitcode == 0, (folder / "said").read_text()[-2000:])
    measured = json.loads((folder / "measured.json").read_text())
    settled = measured[len(measured) // 10]
    last = measured[-1]
    growth = last["rss"] / settled["rss"] - 1
    print(
        f"{len(measured)} trainings with evaluations in {minutes} minutes: {settled['rss'] / 1e6:.1f} MB after a tenth "
        f"of it, {last['rss'] / 1e6:.1f} MB at the end ({growth:+.2%}); open files: {settled['files']}, {last['files']}"
    )
    promise(growth < 0.01 and last["files"] <= settled["files"], "memory or open files grow")


def rounds(folder: Path, setting: str, seconds: float) -> None:
    """Train and evaluate in this process until the time is over; measure after each."""
    measured, began, number = [], time.monotonic(), 0
    while time.monotonic() - began < seconds:
        number += 1
        settings = ("name=soak", "data=text", setting, *SMALL, "train.max_epochs=2", "overwrite=true", f"seed={number}")
        command("train", settings, folder, "said", None)
        command("evaluate", ("checkpoint=runs/soak", "pictures=0", "device=cpu"), folder, "said", None)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        measured.append({"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))})
        (folder / "measured.json").write_text(json.dumps(measured))


def promise(kept: bool, otherwise: str) -> None:
    if not kept:
        sys.exit(f"BROKEN: {otherwise}")


TRIALS: dict[str, Callable[[int, Path], None]] = {
    "kill": kill,
    "term": lambda times, folder: kill(times, folder, signal.SIGTERM),
    "gaps": gaps,
    "flip": flip,
    "noise": noise,
    "lines": lines,
    "soak": soak,
}


def run_trials(trials: dict[str, Callable[[int, Path], None]]) -> None:
    """Those that the command line names, each so large, in a temporary folder or in folder=DIR."""
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
