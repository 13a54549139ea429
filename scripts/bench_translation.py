"""Translation speed beside Eole 0.6.4, the living successor of OpenNMT-py, on the same machine in the same run.

python scripts/bench_translation.py data=DIR run=runs/NAME eole=FOLDER/model/step_N

The models are those of `scripts/bench_quality.py`: a run of ours, and an epoch of Eole's in the folder where that put
it (the best, which it prints). Both commands translate the test set in turn, `rounds` times: with beam 5, 64 sentences
a batch and no length penalty, and greedily. A time is that of the whole command less that of the same command on one
line, so that loading does not count; ours also splits into pieces and joins them, Eole is given pieces. Medians are
printed, and ratios of medians.

Other settings: source=de target=en rounds=5, and folder=runs/bench_translation for what is written.
"""

import os
import sys
from pathlib import Path
from statistics import median

import sacrebleu
from peer import install, joined, lines, predict, run, write
from settings import settings_given

from nmt.data.tokenizer import load_tokenizer

SEARCH = {"beam 5": 5, "greedy": 1}
MAX_LENGTH = 60
OURS = ("fp32", "bf16", "int8")


def main() -> None:
    settings = settings_given(
        data="", run="", eole="", source="de", target="en", rounds="5", folder="runs/bench_translation"
    )
    if not all(settings.values()):
        sys.exit(__doc__)
    data, own, model, folder = (Path(settings[key]).resolve() for key in ("data", "run", "eole", "folder"))
    trained = model.parent.parent  # the folder of bench_quality.py
    whole = {"eole": trained / "test.source", "nmt": data / f"test.{settings['source']}"}
    if missing := [str(path) for path in (model, *whole.values()) if not path.exists()]:
        sys.exit(f"missing: {', '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    eole = install(trained.parent)

    text = lines(whole["nmt"])
    one = {name: write(folder / f"one.{name}", lines(path)[:1]) for name, path in whole.items()}

    def command(system: str, beam: int, source: Path, output: Path) -> list[str | Path]:
        if system == "eole fp32":
            return predict(eole, model, source, output, beam, MAX_LENGTH, "none")
        return [
            *(sys.executable, "-m", "nmt.translate", f'checkpoint="{own}"', f"input={source}", f"output={output}"),
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
