"""Tests that each recipe (`configs/experiment`) trains."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from builders import ROOT, run_ok

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
