"""Models on the Hugging Face hub: upload, model card, download, and what can go wrong."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import run_error, run_in_new_process, run_ok
from fake_hub import FakeHub, running_hub
from markdown_it import MarkdownIt

import nmt
from nmt.hub.model_card import build_model_card
from nmt.hub.push import push_model, strip_local_paths
from nmt.runs.checkpoint import fetch_model, load_model

ADDRESS = "hf://owner/de-en"
LINES = ["Die Frau liest ein Buch .", "Der Hund schläft ."]
FILES = {"README.md", "config.yaml", "manifest.json", "model.safetensors", "tokenizer.model"}
METRICS = {
    "bleu": 43.21,
    "chrf": 62.5,
    "signatures": {"bleu": "nrefs:1|case:mixed", "chrf": "nrefs:1|nc:6"},
    "sentences": 1000,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """A run with an evaluation of its best checkpoint and one of another."""
    folder = Path(shutil.copytree(home / "runs" / "mine", tmp_path / "my run", ignore=shutil.ignore_patterns("eval")))
    [best] = load_model(str(folder)).checkpoints
    for split, checkpoint in (("test", best.name), ("valid", "step_000001")):
        (folder / "eval" / split).mkdir(parents=True)
        (folder / "eval" / split / "metrics.json").write_text(json.dumps(METRICS | {"checkpoint": checkpoint}))
    return folder


def read_card(text: str) -> tuple[dict[str, Any], str]:
    """Return the metadata of a model card, and its text."""
    match = re.fullmatch(r"---\n(.*?\n)---\n(.*)", text, re.DOTALL)
    assert match
    return yaml.safe_load(match[1]), match[2]


def test_uploads_are_revisions_without_what_is_local(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    url = push_model(str(run), ADDRESS, "cc-by-4.0")
    digest, files = hub.commits["owner/de-en"][-1]
    assert url == f"{hub.url}/owner/de-en/commit/{digest}" and files.keys() == FILES | {".gitattributes"}
    assert str(tmp_path) not in files["config.yaml"].decode()
    # A second upload replaces files of the first; the first remains under its revision.
    hub.commit("owner/de-en", files | {"tokenizer.source.model": b"old", "notes.txt": b"mine"})
    push_model(str(run), ADDRESS, "mit")
    assert hub.commits["owner/de-en"][-1][1].keys() == FILES | {".gitattributes", "notes.txt"}
    assert fetch_model(f"{ADDRESS}@{digest}") != fetch_model(ADDRESS)
    assert not any("README" in request for request in hub.requests if "resolve" in request)


def test_commands_publish_take_addresses_and_work_offline(
    hub: FakeHub, run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = run_error("export", f"checkpoint={run}", f"output={ADDRESS}", folder=home)
    assert "license=None is not an identifier such as license=cc-by-4.0" in message
    run_ok("export", f"checkpoint={run}", f"output={ADDRESS}", "license=mit", folder=home)
    text = "".join(line + "\n" for line in LINES).encode()
    settings = ("precision=fp32", "device=cpu", "search.beam=2")
    expected = run_ok("translate", "checkpoint=runs/mine", *settings, folder=home, text=text)
    online = run_in_new_process("translate", f"checkpoint={ADDRESS}@main", *settings, folder=home, text=text)
    assert (online.returncode, online.stdout.decode()) == (0, expected), online.stderr.decode()
    hub.commits.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    offline = nmt.load(f"{ADDRESS}@main", device="cpu", precision="fp32", beam=2)
    assert "".join(f"{translation.text}\n" for translation in offline.translate(LINES)) == expected
    with pytest.raises(nmt.UserError, match="^hf://owner/none: .*; check the network and HF_HUB_OFFLINE"):
        nmt.load("hf://owner/none")


def test_damaged_download_is_refused(hub: FakeHub, run: Path) -> None:
    push_model(str(run), ADDRESS, "mit")
    _, files = hub.commits["owner/de-en"][-1]
    weights = files["model.safetensors"]
    for name, content in {
        "model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1]),
        "config.yaml": files["config.yaml"].replace(b"hidden: 32", b"hidden: 64"),
        "manifest.json": b"{}",
        "tokenizer.model": b"x",
    }.items():
        hub.commit("owner/de-en", files | {name: content})
        with pytest.raises(nmt.UserError, match=name):
            nmt.load(ADDRESS)
    hub.commit("owner/de-en", {"pytorch_model.bin": b"pickle", "config.json": b"{}"})
    with pytest.raises(nmt.UserError, match="has no model.safetensors, so it is not a model that nmt exported"):
        nmt.load(ADDRESS)
    assert not any("pytorch_model" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://owner/none", "check the name, or log in with"),
        ("hf://owner/gated", "log in with `hf auth login` or HF_TOKEN if you have access"),
        ("hf://owner/de-en@v9", "Revision Not Found"),
        ("hf://owner", "use hf://OWNER/NAME or hf://OWNER/NAME@REVISION"),
        ("hf://owner/../x", "use hf://OWNER/NAME"),
        ("hf://owner/a--b", "a--b"),
    ],
)
def test_download_error_says_what_to_do(hub: FakeHub, address: str, message: str) -> None:
    hub.commits["owner/de-en"] = []
    hub.commit("owner/de-en", {})
    with pytest.raises(nmt.UserError, match=f"^{re.escape(address)}.*{re.escape(message)}"):
        nmt.load(address)


def test_upload_errors(hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, license, message in (
        ("hf://owner/x", "My own!", "license=My own! is not an identifier"),
        ("hf://owner", "mit", "use hf://OWNER/NAME"),
        ("hf://owner/x@v1", "mit", "remove @v1"),
    ):
        with pytest.raises(nmt.UserError, match=message):
            push_model(str(run), address, license)
    assert not hub.requests
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(nmt.UserError, match="hf://owner/x: .*401.*; check the name, or log in"):
        push_model(str(run), "hf://owner/x", "mit")
    assert not hub.commits


# ------------------------------------------------------------------------------------------------------------ the card
def test_card_states_languages_license_scores_and_data(run: Path) -> None:
    loaded = load_model(str(run))
    metadata, text = read_card(build_model_card(loaded, "owner/de-en", "cc-by-4.0"))
    assert metadata["language"] == ["de", "en"] and metadata["license"] == "cc-by-4.0"
    assert metadata["pipeline_tag"] == "translation" and metadata["library_name"] == "nmt"
    [index] = metadata["model-index"]
    [result] = index["results"]
    assert index["name"] == "de-en" and result["task"]["type"] == "translation" and result["dataset"]["split"] == "test"
    assert [(metric["type"], metric["value"], metric["args"]["signature"]) for metric in result["metrics"]] == [
        ("bleu", 43.21, METRICS["signatures"]["bleu"]),
        ("chrf", 62.5, METRICS["signatures"]["chrf"]),
    ]
    assert "checkpoint=hf://owner/de-en" in text and "43.21" in text
    assert "valid" not in text
    untested, _ = read_card(build_model_card(loaded._replace(run_folder=run / "none"), "owner/x", "mit"))
    assert "model-index" not in untested


HOSTILE = [
    "<script>hacked=1</script>",
    "&lt;b&gt;&amp;",
    "\n---\nlicense: mit\n---\n",
    "!!python/object/apply:os.system ['id']",
    "*anchor &anchor",
    "| a | b |\n|---|---|",
    "[x](javascript:alert(1)) ![y](http://evil/z.png) http://evil.example",
    "```\n# heading\n```",
    "\x00\x1b[31m\u202eright\u2028\u2066left",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_cannot_inject_into_the_card(text: str, run: Path) -> None:
    loaded = load_model(str(run))
    [path] = (run / "eval").glob("test/metrics.json")
    hostile_scores = METRICS | {"checkpoint": loaded.checkpoints[0].name, "signatures": {"bleu": text, "chrf": text}}
    path.write_text(json.dumps(hostile_scores))
    data = replace(loaded.config.data, path=text.replace("\0", ""), subset=text, source=text, target="en", format="tsv")
    hostile = loaded._replace(config=replace(loaded.config, data=data))
    plain_metadata, plain = read_card(build_model_card(loaded, "owner/x", "mit"))
    metadata, card = read_card(build_model_card(hostile, "owner/x", "mit"))
    assert metadata.keys() == plain_metadata.keys() and metadata["license"] == "mit"
    assert metadata["language"] == (["en"] if text != "de" else ["de", "en"])
    [result] = metadata["model-index"][0]["results"]
    assert result["metrics"][0]["args"]["signature"] == text

    def list_elements(markdown: str) -> list[str]:
        parser = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable("table")
        tokens = [token for block in parser.parse(markdown) for token in [block, *(block.children or [])]]
        return [token.type for token in tokens if token.type != "text"]

    assert list_elements(card) == list_elements(plain)
    assert "\x1b" not in card and "\u202e" not in card


def test_local_paths_are_not_published(run: Path) -> None:
    config = load_model(str(run)).config
    data = replace(config.data, path="/home/me/secret/corpus", cache="/home/me/cache")
    stripped = strip_local_paths(replace(config, data=data, init_from="/home/me/secret/parent"))
    assert (stripped.data.path, stripped.data.cache, stripped.init_from) == ("corpus", None, "parent")
    on_hub = replace(config.data, path="wmt/wmt14", format="hub")
    assert strip_local_paths(replace(config, data=on_hub)).data.path == "wmt/wmt14"
