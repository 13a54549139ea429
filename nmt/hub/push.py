"""Publish a model on the Hugging Face hub: the exported model and a model card."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from nmt.config import TrainRun
from nmt.errors import UserError
from nmt.hub.model_card import build_model_card
from nmt.runs.checkpoint import EXPORTED_FILES, export_model, load_model
from nmt.system.hub_client import is_hub_address, parse_address, upload

CARD_FILE = "README.md"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # identifiers of the hub


def push_model(path: str, address: str, license: str | None, average: int = 1) -> str:
    """Upload a model with a model card to the hub. Returns the address of the commit.

    Args:
        path: a run, a step folder or an exported model.
        address: `hf://OWNER/NAME`. The repository is created if it does not exist.
        license: identifier of the license, such as `cc-by-4.0`.
        average: number of checkpoints whose weights are averaged.

    Raises:
        UserError: there is no license, the model cannot be read, or the hub refuses.
    """
    if license is None or not LICENSE.fullmatch(license):
        raise UserError(
            f"license={license} is not an identifier such as license=cc-by-4.0, without which nobody may use the "
            "model, and only you know what the licenses of your training data allow; use one of "
            "https://huggingface.co/docs/hub/repositories-licenses, or license=other if none fits"
        )
    repository, _ = parse_address(address)
    loaded = load_model(path, average)
    published = loaded._replace(config=strip_local_paths(loaded.config))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        export_model(published.model, published.tokenizer, published.config, folder)
        (folder / CARD_FILE).write_text(build_model_card(published, repository, license), encoding="utf-8")
        return upload(folder, address, EXPORTED_FILES, "Upload model")


def strip_local_paths(config: TrainRun) -> TrainRun:
    """Return settings that name files and folders without their place on this machine, to be published.

    Names of data sets on the hub stay as they are.
    """
    data = config.data
    corpora = [replace(corpus, path=strip_path(corpus.path, corpus.format or data.format)) for corpus in data.corpora]
    path = None if data.path is None else strip_path(data.path, data.format)
    return replace(
        config,
        data=replace(data, path=path, cache=None, corpora=corpora),
        init_from=None if config.init_from is None else strip_path(config.init_from, ""),
    )


def strip_path(path: str, format: str) -> str:
    """Return the last part of a path; all of it if it names something on the hub."""
    is_on_hub = is_hub_address(path) or format == "hub" and not Path(path).exists() and not Path(path).is_absolute()
    return path if is_on_hub else Path(path).resolve().name or path
