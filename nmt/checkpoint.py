"""Checkpoints: written whole or not at all, verified when read, enough to rebuild the model from the run's settings.

    runs/<name>/config.yaml  tokenizer*.model
    runs/<name>/checkpoints/step_000500/{model,optimizer}.safetensors  state.json  manifest.json
    runs/<name>/checkpoints/{last,best}             one line each: the name of a step folder

Loading executes nothing: tensors are safetensors, the rest is plain JSON and YAML.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmt.config import TrainRun
from nmt.data.tokenizer import Tokenizer, load_tokenizer
from nmt.errors import UserError
from nmt.files import write_atomically
from nmt.model.seq2seq import Seq2Seq, build_model

MODEL, OPTIMISER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
STEP_FOLDER = re.compile(r"step_\d+|\.step_\d+\.(new|old)")  # whole; or half written, or on its way out


# ----------------------------------------------------------------------------------------------------------- writing
def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def save_checkpoint(run: Path, model: Seq2Seq, optimiser: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
    """Write `checkpoints/step_N` for N = progress["step"] and point `last` to it. Returns the folder."""
    checkpoints = run / "checkpoints"
    folder = checkpoints / f"step_{progress['step']:06d}"
    temporary = checkpoints / f".{folder.name}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(unshared(model), temporary / MODEL)
        save_file(flatten(optimiser), temporary / OPTIMISER)
    except SafetensorError as error:  # a full disk, for one
        raise UserError(f"{temporary} cannot be written: {error}; the last checkpoint is as it was") from None
    (temporary / STATE).write_text(json.dumps(progress, indent=1), encoding="utf-8")
    files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": digest(temporary / name)}
             for name in (MODEL, OPTIMISER, STATE)}  # fmt: skip
    (temporary / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
    for name in (*files, MANIFEST):
        sync(temporary / name)
    former = checkpoints / f".{folder.name}.old"
    if folder.exists():  # the same step once more
        folder.rename(former)
    temporary.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    sync(checkpoints)
    write_atomically(checkpoints / "last", [folder.name + "\n"])
    return folder


def unshared(model: Seq2Seq) -> dict[str, Tensor]:
    """The model's tensors, each once: tied parameters go by their first name."""
    seen: dict[int, str] = {}
    return {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if seen.setdefault(tensor.data_ptr(), name) == name
    }


def flatten(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as tensors named `parameter number.what`."""
    state = optimiser.state_dict()["state"]
    return {f"{i}.{key}": value.contiguous() for i, slots in state.items() for key, value in slots.items()
            if value is not None}  # fmt: skip


def restore(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `flatten`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".")
        state.setdefault(int(number), {})[key] = tensor
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def delete_all_but(run: Path, names: set[str]) -> None:
    """Remove the step folders that are not among `names`, and what a process that died left of others."""
    for folder in (run / "checkpoints").iterdir():
        if STEP_FOLDER.fullmatch(folder.name) and folder.name not in names:
            shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------------------- reading
def pointer(run: Path, name: str) -> Path | None:
    """The step folder that `checkpoints/<name>` points to, None where there is none."""
    path = run / "checkpoints" / name
    if not path.is_file():
        return None
    folder = path.parent / Path(path.read_text(encoding="utf-8", errors="replace").strip()).name
    return folder if (folder / MODEL).is_file() else None


def last_checkpoint(run: Path) -> Path | None:
    """The step folder that `last` points to, else the one with the largest number, None where there is none."""
    folders = [path.parent for path in (run / "checkpoints").glob(f"step_*/{MODEL}")]
    steps = {int(folder.name[5:]): folder for folder in folders if STEP_FOLDER.fullmatch(folder.name)}
    return pointer(run, "last") or (steps[max(steps)] if steps else None)


def find_checkpoint(path: str) -> tuple[Path, Path]:
    """The run and the step folder meant by `checkpoint=path`: a run (its best, else its last) or a step folder.

    Raises:
        UserError: there is no such thing.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"checkpoint={path} is not a folder; give a run (runs/NAME) or one of its checkpoints/step_N")
    if (folder / MODEL).is_file():
        run = folder.parents[1] if len(folder.parts) > 2 else folder.resolve().parents[1]
        return (run if (run / "config.yaml").is_file() else folder), folder
    step = pointer(folder, "best") or last_checkpoint(folder)
    if step is None:
        raise UserError(f"checkpoint={path} holds no checkpoint; a run has config.yaml and checkpoints/")
    return folder, step


def verify(folder: Path) -> None:
    """Compare a checkpoint's files with its manifest.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = [(name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / MANIFEST} is missing or damaged; use another checkpoint of the run") from None
    for name, size, sha256 in entries:
        path = folder / Path(name).name
        if not path.is_file() or path.stat().st_size != size or digest(path) != sha256:
            raise UserError(f"{path} is missing or damaged (see {MANIFEST}); use another checkpoint of the run")


def load_config(run: Path) -> TrainRun:
    """The settings that a run was trained with.

    Raises:
        UserError: config.yaml is missing or does not fit this version.
    """
    path = run / "config.yaml"
    try:
        if "${" in path.read_text(encoding="utf-8"):
            raise UserError("a run's settings hold no interpolations (${...})")
        merged = OmegaConf.merge(OmegaConf.structured(TrainRun), OmegaConf.load(path))
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except FileNotFoundError:
        raise UserError(f"{path} is not there, so {run} is not a run; give checkpoint=runs/NAME") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # YAML's and OmegaConf's own errors have no common base
        raise UserError(f"{path} is damaged or from another version: {str(error).splitlines()[0]}") from None


def save_config(run: Path, config: TrainRun) -> None:
    write_atomically(run / "config.yaml", [OmegaConf.to_yaml(OmegaConf.create(asdict(config)))])


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None


def load_weights(model: Seq2Seq, folder: Path) -> None:
    """Fill a model from a step folder.

    Raises:
        UserError: the tensors are not those of this model.
    """
    tensors, wanted = load_tensors(folder / MODEL), unshared(model)
    wrong = [name for name in sorted(tensors.keys() | wanted.keys())
             if name not in tensors or name not in wanted or tensors[name].shape != wanted[name].shape]  # fmt: skip
    if wrong:
        raise UserError(f"{folder / MODEL} does not fit the model's settings: {', '.join(wrong[:5])}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])


def load_model(path: str) -> tuple[Seq2Seq, Tokenizer, TrainRun, Path]:
    """Rebuild a model from a run's own settings. Returns model, tokenizer, settings and the run's folder.

    Raises:
        UserError: `path` is no checkpoint, or a damaged one.
    """
    run, folder = find_checkpoint(path)
    config = load_config(run)
    tokenizer = load_tokenizer(run)
    verify(folder)
    model = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    load_weights(model, folder)
    return model.eval(), tokenizer, config, run
