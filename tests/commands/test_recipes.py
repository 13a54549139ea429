"""Tests that each recipe (`configs/experiment`) trains, and of the table of results over seeds."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from builders import ROOT, command_environment, read_all_events, run_ok

from nmt.data.toy.corpus import generate

RECIPES = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
SMALL_SETTINGS = (
    "tokenizer.vocab_size=500",
    "model.embed=8",
    "model.hidden=16",
    "train.batch_tokens=300",
    "train.max_steps=2",
    "train.validate_every=2",
    "device=cpu",
)


def read_recipe(recipe: str) -> dict[str, Any]:
    """Read the settings of a recipe, merged into those of the recipe it is based on."""
    own: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "experiment" / f"{recipe}.yaml").read_text())
    bases = [item for item in own.get("defaults", []) if isinstance(item, str) and item != "_self_"]
    if not bases:
        return own
    base = read_recipe(bases[0])
    return base | own | {"data": base["data"] | own["data"]}


def make_nested(name: str, text: str) -> dict[str, Any]:
    """Return {"a": {"b": text}} for the name a.b."""
    first, _, rest = name.partition(".")
    return {first: make_nested(rest, text) if rest else text}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_dataset(folder: Path, data: dict[str, Any]) -> None:
    """Write a corpus in the layout of a recipe's dataset.

    The layout is text files, tables, JSON lines, Parquet shards named by a dataset card, or Parquet as converted by
    the hub.
    """
    folder.mkdir()
    subset = data.get("subset")
    for split, pairs in generate(1, {"train": 60, "valid": 8, "test": 2}).items():
        if data.get("source") == "1":
            lines = (f"{pair.german}\t{len(pair.german.split()) % 2}\n" for pair in pairs)
            (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
            continue
        if data.get("path") is None:
            for side, texts in (("source", [p.german for p in pairs]), ("target", [p.english for p in pairs])):
                (folder / f"{split}.{data[side]}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            continue
        rows = []
        for pair in pairs:
            row = make_nested(data["source"], pair.german)
            for key, value in make_nested(data["target"], pair.english).items():
                row[key] = row[key] | value if isinstance(value, dict) else value
            rows.append(row)
        if subset:
            for shard in (0, 1):
                write_rows(folder / subset / f"{HUB_SPLITS[split]}-0000{shard}-of-00002.parquet", rows[shard::2])
        elif data.get("revision") == "refs/convert/parquet":
            write_rows(folder / "default" / HUB_SPLITS[split] / "0000.parquet", rows)
        else:
            write_rows(folder / f"{HUB_SPLITS[split]}.jsonl", rows)
    if subset:
        files = [{"split": name, "path": f"{subset}/{name}-*"} for name in HUB_SPLITS.values()]
        card = yaml.safe_dump({"configs": [{"config_name": subset, "data_files": files}]})
        (folder / "README.md").write_text(f"---\n{card}---\n", encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains(recipe: str, tmp_path: Path) -> None:
    data = {"source": "de", "target": "en"} | read_recipe(recipe)["data"]
    write_dataset(tmp_path / "corpus", data)
    for corpus in data.get("corpora", []):  # beside the text of data.path, as the recipe says
        corpus["path"] = corpus["path"].replace("${data.path}", str(tmp_path / "corpus"))
        write_dataset(Path(corpus["path"]), data)
    run_ok("train", f"experiment={recipe}", f"data.path={tmp_path / 'corpus'}", *SMALL_SETTINGS, folder=tmp_path)
    run = tmp_path / "runs" / recipe
    config = yaml.safe_load((run / "config.yaml").read_text())
    data.pop("path", None)
    for corpus, expected in zip(config["data"]["corpora"], data.pop("corpora", []), strict=True):
        assert corpus.items() >= expected.items()
    assert {key: config["data"][key] for key in data} == data
    assert "finished at step 2" in (run / "train.log").read_text()


def test_results_script_writes_table(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs are copies of one, so deviations are 0. A second call replaces the table."""
    run_ok("evaluate", "checkpoint=runs/mine", "search.beam=1", folder=home)
    runs = tmp_path / "runs" / "cells"
    for name in ("seed=1", "seed=2", "model.cell=gru,seed=2", "init_from=runs/y,seed=2"):
        shutil.copytree(home / "runs" / "mine", runs / f"experiment=x,{name}")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "recipes.md"
    page.write_text("# Results\n")

    script = ROOT / "scripts" / "results.py"
    spec = importlib.util.spec_from_file_location("results", script)
    assert spec and spec.loader
    spec.loader.exec_module(results := importlib.util.module_from_spec(spec))
    monkeypatch.chdir(tmp_path)

    def run_script() -> str:
        """Return the messages of results.py."""
        try:
            results.main(["runs/cells"])
        except SystemExit as error:
            return f"{error.code}\n"
        return str(capsys.readouterr().err)

    lines = (home / "runs" / "mine" / "train.log").read_text().splitlines()
    [end] = [line for line in lines if " finished at step " in line]
    with open(runs / "experiment=x,seed=2" / "train.log", "a", encoding="utf-8") as log:  # like `resume=auto`
        log.write(f"2026-01-01 00:00:00,000 resuming\n{end}\n")
    command = [sys.executable, str(script), "runs/cells"]
    subprocess.run(command, cwd=tmp_path, env=command_environment(tmp_path), check=True)
    assert not run_script()
    best = max(event["bleu"] for event in read_all_events(home / "runs" / "mine") if event["event"] == "validate")
    assert page.read_text().count("All with `experiment=x`. Trained on: ") == 1
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 4 and page.read_text().startswith("# Results\n\n<!-- runs/cells: ")
    assert rows[1].startswith(f"| the recipe | 1, 2 | {best:.2f} ± 0.00 |  |")
    assert rows[2].startswith(f"| `init_from=runs/y` | 2 | {best:.2f} | 0.00 |") and not rows[2].endswith("|  |")
    assert rows[3].startswith(f"| `model.cell=gru` | 2 | {best:.2f} | 0.00 |")
    log = runs / "experiment=x,model.cell=gru,seed=2" / "train.log"
    log.write_text("2026-01-01 00:00:00,000 resuming\n" + log.read_text())
    assert not run_script() and page.read_text().count("|  |\n") == 1  # the training time is unknown
    metrics = runs / "experiment=x,seed=2" / "eval" / "test" / "metrics.json"
    metrics.write_text(metrics.read_text().replace('"beam": 1', '"beam": 2'))
    assert run_script() == "the runs of runs/cells were evaluated on different text or with different settings\n"
    shutil.rmtree(log.parent)
    metrics.write_text(metrics.read_text().replace('"checkpoint": "', '"checkpoint": "not_'))
    assert run_script().endswith("not for the best checkpoint; evaluate runs/cells/experiment=x,seed=2 again\n")
    (runs / "experiment=x,seed=2" / "train.log").write_text("")
    assert run_script() == "runs/cells/experiment=x,seed=2 is not finished\n"
    shutil.move(runs / "experiment=x,seed=2", runs / "plain")
    assert run_script() == "skipping runs/cells/plain: its name has no seed, as seed=1\n"
