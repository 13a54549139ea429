"""Each recipe (`configs/experiment`) trains, on a small folder laid out like its dataset on the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, works

from nmt.data.toy import generate

RECIPES = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
HUB = {"train": "train", "valid": "validation", "test": "test"}  # what the hub calls them
SMALL = ("tokenizer.vocab_size=300", "model.embed=8", "model.hidden=16", "train.batch_tokens=300",
         "train.max_steps=2", "train.validate_every=2", "device=cpu")  # fmt: skip


def settings(recipe: str) -> dict[str, Any]:
    """The recipe's file, on top of the one that it is made from."""
    own: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "experiment" / f"{recipe}.yaml").read_text())
    base = next((item for item in own.get("defaults", []) if isinstance(item, str) and item != "_self_"), None)
    return settings(base) | own | {"data": settings(base)["data"] | own["data"]} if base else own


def nested(name: str, text: str) -> dict[str, Any]:
    head, _, rest = name.partition(".")
    return {head: nested(rest, text) if rest else text}


def lay_out(folder: Path, data: dict[str, Any], as_text: bool) -> None:
    """Write a corpus in the layout that the recipe's dataset has: text, or rows of JSON with nested columns, in a
    folder of its configuration if it has several."""
    subset = data.get("subset")
    (folder / (subset or "")).mkdir(parents=True)
    for split, pairs in generate(1, {"train": 60, "valid": 8, "test": 2}).items():
        if as_text:
            for side, texts in (("source", [p.german for p in pairs]), ("target", [p.english for p in pairs])):
                (folder / f"{split}.{data[side]}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            continue
        rows = []
        for pair in pairs:
            row = nested(data["source"], pair.german)
            for key, value in nested(data["target"], pair.english).items():
                row[key] = row[key] | value if isinstance(value, dict) else value
            rows.append(json.dumps(row, ensure_ascii=False) + "\n")
        (folder / (subset or "") / f"{HUB[split]}.jsonl").write_text("".join(rows), encoding="utf-8")
    if subset:
        files = [{"split": name, "path": f"{subset}/{name}.jsonl"} for name in HUB.values()]
        card = yaml.safe_dump({"configs": [{"config_name": subset, "data_files": files}]})
        (folder / "README.md").write_text(f"---\n{card}---\n", encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(recipe: str, tmp_path: Path) -> None:
    data = {"source": "de", "target": "en"} | settings(recipe)["data"]
    lay_out(tmp_path / "corpus", data, as_text=data.get("path") is None)
    works("train", f"experiment={recipe}", f"data.path={tmp_path / 'corpus'}", *SMALL, folder=tmp_path)
    run = tmp_path / "runs" / recipe
    found = yaml.safe_load((run / "config.yaml").read_text())
    assert {key: found["data"][key] for key in data if key != "path"} == {k: v for k, v in data.items() if k != "path"}
    assert "finished at step 2" in (run / "train.log").read_text()
