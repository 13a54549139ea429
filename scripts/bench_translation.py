"""Translation speed beside Eole 0.6.4, the living successor of OpenNMT-py, on the same machine in the same run.

python scripts/bench_translation.py data=DIR source=de target=en         DIR/{train,valid,test}.{de,en}

Both train a model of the same size for a few hundred steps on the same pieces (LSTM, embeddings 256, encoder 2 x 256,
decoder 512, additive attention with input feeding, 8,000 joint pieces), Eole in an environment of its own, installed
into the folder. Then both commands translate the test set in turn, `rounds` times: with beam 5, 64 sentences a batch
and no length penalty, and greedily. A time is that of the whole command less that of the same command on one line, so
that loading does not count; ours also splits into pieces and joins them, Eole is given pieces. Medians are printed, and
ratios of medians.

Other settings: steps=400 rounds=5 folder=runs/bench_translation. What is there already is not made again.
"""

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import sacrebleu

from nmt.data.tokenizer import Tokenizer, load_tokenizer

HERE = Path(__file__).resolve().parent
SEARCH = {"beam 5": 5, "greedy": 1}
MAX_LENGTH = 60
OURS = ("fp32", "bf16", "int8")


def run(*command: str | Path, log: Path) -> float:
    """Run a command, its output into a file. Returns its seconds."""
    started = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed; see {log}")
    return time.perf_counter() - started


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write(path: Path, text: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return path


def prepare_ours(data: Path, source: str, target: str, steps: int, folder: Path) -> Path:
    """A model of ours; the folder of its run."""
    own = folder / "nmt"
    if not (own / "checkpoints" / "last").exists():
        print(f"training nmt: {steps} steps", flush=True)
        settings = [
            *("data=text", f"data.path={data}", f"data.source={source}", f"data.target={target}"),
            *("tokenizer.type=bpe", "tokenizer.vocab_size=8000", "tokenizer.joint=true"),
            *("model=luong", "model.attention.score=additive", "model.embed=256", "model.hidden=512"),
            *("model.dropout=0.3", "optim.label_smoothing=0.1", "train.batch_sentences=64", "device=cpu"),
            *(f"train.max_steps={steps}", f"train.validate_every={steps}", "precision=fp32"),
        ]
        settings += [f"hydra.run.dir={own}", "overwrite=true"]
        run(sys.executable, "-m", "nmt.train", *settings, log=folder / "nmt.log")
    return own


def install_eole(folder: Path) -> Path:
    """Eole in an environment of its own; its command."""
    eole = folder / "env" / "bin" / "eole"
    if not eole.exists():
        print("installing Eole", flush=True)
        run(sys.executable, "-m", "venv", folder / "env", log=folder / "install.log")
        torch = f"torch=={version('torch').partition('+')[0]}"  # as ours
        packages = torch, "eole==0.6.4", "aiohttp"  # the last it needs without asking for it
        run(eole.parent / "python", "-m", "pip", "install", *packages, log=folder / "install.log")
    return eole


def configure_eole(eole: Path, folder: Path, steps: int, report_every: int, epoch: int | None = None) -> Path:
    """Its settings, for pieces in files of that folder; it keeps a checkpoint each `epoch` of so many steps."""
    filled = {"FOLDER": folder, "STEPS": steps, "EVERY": report_every, "EPOCH": epoch or steps}
    filled["PAIRS"] = len(lines(folder / "train.source"))
    text = (HERE / "eole.yaml").read_text(encoding="utf-8").splitlines()
    config = "\n".join(line for line in text if not line.startswith("#"))
    for word, value in filled.items():
        config = config.replace(word, str(value))
    path = write(folder / "eole.yaml", config.splitlines())
    if not (folder / "vocabulary").exists():
        run(eole, "build_vocab", "-config", path, "-n_sample", "-1", log=folder / "vocabulary.log")
    return path


def write_pieces(tokenizer: Tokenizer, data: Path, source: str, target: str, folder: Path) -> None:
    """The text of all splits as Eole reads it."""
    for split in ("train", "valid", "test"):
        for name, side, language in (("source", tokenizer.source, source), ("target", tokenizer.target, target)):
            ids = side.encode(lines(data / f"{split}.{language}"))
            write(folder / f"{split}.{name}", [" ".join(side.pieces(line)) for line in ids])


def joined(pieces: list[str]) -> list[str]:
    """The text of lines of pieces."""
    return ["".join(line.split()).replace("▁", " ").strip() for line in pieces]


def prepare_eole(data: Path, source: str, target: str, steps: int, own: Path, folder: Path) -> Path:
    """A model of Eole on the same pieces; the command that runs it."""
    eole = install_eole(folder)
    if not (folder / "model").exists():
        print(f"training Eole: {steps} steps", flush=True)
        tokenizer = load_tokenizer(own)
        write_pieces(tokenizer, data, source, target, folder)
        run(eole, "train", "-config", configure_eole(eole, folder, steps, 50), log=folder / "eole.log")
    return eole


def main() -> None:
    settings = {"source": "de", "target": "en", "steps": "400", "rounds": "5", "folder": "runs/bench_translation"}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in (*settings, "data") or not value:
            sys.exit(__doc__)
        settings[key] = value
    if "data" not in settings:
        sys.exit(__doc__)
    data, folder = Path(settings["data"]).resolve(), Path(settings["folder"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = prepare_ours(data, settings["source"], settings["target"], int(settings["steps"]), folder)
    eole = prepare_eole(data, settings["source"], settings["target"], int(settings["steps"]), own, folder)

    text = lines(data / f"test.{settings['source']}")
    whole = {"eole": folder / "test.source", "nmt": data / f"test.{settings['source']}"}
    one = {name: write(folder / f"one.{name}", lines(path)[:1]) for name, path in whole.items()}

    def command(system: str, beam: int, source: Path, output: Path) -> list[str | Path]:
        if system == "eole fp32":
            return [
                *(eole, "predict", "-model_path", folder / "model", "-src", source, "-output", output),
                *("-beam_size", str(beam), "-batch_size", "64", "-batch_type", "sents", "-world_size", "0"),
                *("-max_length", str(MAX_LENGTH), "-length_penalty", "none"),
            ]
        return [
            *(sys.executable, "-m", "nmt.translate", f"checkpoint={own}", f"input={source}", f"output={output}"),
            "device=cpu",
            *(f"precision={system.split()[1]}", f"search.beam={beam}", "search.batch_sentences=64"),
            *(f"search.max_length={MAX_LENGTH}", "search.length_penalty=0"),
        ]

    systems = ["eole fp32", *(f"nmt {precision}" for precision in OURS)]
    seconds: dict[tuple[str, str], list[float]] = {}
    log = folder / "translate.log"
    for turn in range(int(settings["rounds"])):
        for kind, beam in SEARCH.items():
            for system in systems:
                tool = system.split()[0]
                output = folder / f"{system} {kind}.txt".replace(" ", "_")
                loading = run(*command(system, beam, one[tool], folder / "one.txt"), log=log)
                took = run(*command(system, beam, whole[tool], output), log=log) - loading
                seconds.setdefault((kind, system), []).append(took)
                print(f"round {turn + 1}, {kind}, {system}: {took:.2f} s (and {loading:.1f} s of loading)", flush=True)

    side = load_tokenizer(own).target
    references = lines(data / f"test.{settings['target']}")
    print(f"\n{len(text):,} sentences, {os.cpu_count()} cores; medians of {settings['rounds']} rounds")
    print(
        f"{'':<10}{'':<12}{'seconds':>9}{'sentences/s':>13}{'ratio':>8}{'pieces':>9}{'pieces/s':>10}{'ratio':>8}{'BLEU':>7}"
    )
    for kind in SEARCH:
        first: tuple[float, float] | None = None
        for system in systems:
            found = lines(folder / f"{system} {kind}.txt".replace(" ", "_"))
            if system == "eole fp32":
                found = joined(found)
            pieces = sum(len(ids) + 1 for ids in side.encode(found))
            took = median(seconds[kind, system])
            speed = len(text) / took, pieces / took
            first = first or speed
            bleu = sacrebleu.corpus_bleu(found, [references]).score
            print(f"{kind:<10}{system:<12}{took:>9.2f}{speed[0]:>13.1f}{speed[0] / first[0]:>7.2f}x{pieces:>9,}"
                  f"{speed[1]:>10,.0f}{speed[1] / first[1]:>7.2f}x{bleu:>7.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
