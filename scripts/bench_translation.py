"""Compare translation speed with Eole 0.6.4, the successor of OpenNMT-py, on the same machine in the same run.

python scripts/bench_translation.py data=DIR run=runs/NAME eole=FOLDER/model/step_N

The models are those of `scripts/bench_quality.py`: a run of nmt, and the best epoch of Eole, whose folder that script
prints. They take turns to translate the test set `rounds` times, without length penalty: with beam 5, and greedily; nmt
with its default batches, Eole with 64 sentences per batch. A time is that of the whole command minus that of the same
command on one line, so loading does not count. nmt also tokenizes and detokenizes, Eole is given pieces.

Other settings: source=de target=en rounds=5, folder=runs/bench_translation (for all files).
"""

import os
import sys
from pathlib import Path
from statistics import median

import sacrebleu
from common import (
    build_predict_command,
    install_eole,
    join_pieces,
    parse_settings,
    read_lines,
    run_command,
    write_lines,
)

from nmt.data.tokenizer import load_tokenizer

SEARCH = {"beam 5": 5, "greedy": 1}
MAX_LENGTH = 60
OURS = ("fp32", "bf16", "int8")


def main() -> None:
    settings = parse_settings(
        data="", run="", eole="", source="de", target="en", rounds="5", folder="runs/bench_translation"
    )
    if not all(settings.values()):
        sys.exit(__doc__)
    data, own, model, folder = (Path(settings[key]).resolve() for key in ("data", "run", "eole", "folder"))
    trained = model.parent.parent  # folder of bench_quality.py
    whole = {"eole": trained / "test.source", "nmt": data / f"test.{settings['source']}"}
    if missing := [str(path) for path in (model, *whole.values()) if not path.exists()]:
        sys.exit(f"missing: {', '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    eole = install_eole(trained.parent)

    text = read_lines(whole["nmt"])
    one = {name: write_lines(folder / f"one.{name}", read_lines(path)[:1]) for name, path in whole.items()}

    def command(system: str, beam: int, source: Path, output: Path) -> list[str | Path]:
        if system == "eole fp32":
            return build_predict_command(eole, model, source, output, beam, MAX_LENGTH, "none")
        return [
            *(sys.executable, "-m", "nmt.translate", f'checkpoint="{own}"', f"input={source}", f"output={output}"),
            "device=cpu",
            *(f"precision={system.split()[1]}", f"search.beam={beam}"),
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
                loading = run_command(*command(system, beam, one[tool], folder / "one.txt"), log=log)
                took = run_command(*command(system, beam, whole[tool], output), log=log) - loading
                seconds.setdefault((kind, system), []).append(took)
                print(
                    f"round {turn + 1}, {kind}, {system}: {took:.2f} s (without {loading:.1f} s of loading)", flush=True
                )

    side = load_tokenizer(own).target
    references = read_lines(data / f"test.{settings['target']}")
    print(f"\n{len(text):,} sentences, {os.cpu_count()} cores; medians of {settings['rounds']} rounds")
    print(
        f"{'':<10}{'':<12}{'seconds':>9}{'sentences/s':>13}{'ratio':>8}{'pieces':>9}{'pieces/s':>10}{'ratio':>8}{'BLEU':>7}"
    )
    for kind in SEARCH:
        first: tuple[float, float] | None = None
        for system in systems:
            found = read_lines(folder / f"{system} {kind}.txt".replace(" ", "_"))
            if system == "eole fp32":
                found = join_pieces(found)
            pieces = sum(len(ids) + 1 for ids in side.encode(found))
            took = median(seconds[kind, system])
            speed = len(text) / took, pieces / took
            first = first or speed
            bleu = sacrebleu.corpus_bleu(found, [references]).score
            print(
                f"{kind:<10}{system:<12}{took:>9.2f}{speed[0]:>13.1f}{speed[0] / first[0]:>7.2f}x{pieces:>9,}"
                f"{speed[1]:>10,.0f}{speed[1] / first[1]:>7.2f}x{bleu:>7.2f}"
            )


if __name__ == "__main__":
    main()
