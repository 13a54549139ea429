"""Checkpoints: written whole or not at all, verified when read, enough to rebuild the model from the run's settings.

    runs/<name>/config.yaml  tokenizer*.model
    runs/<name>/checkpoints/step_000500/{model,optimizer}.safetensors  state.json  manifest.json
    runs/<name>/checkpoints/{last,best}             one line each: the name of a step folder
    <export>/config.yaml  tokenizer*.model  model.safetensors  manifest.json

Loading executes nothing: tensors are safetensors, the rest is plain JSON and YAML.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmt.config import TrainRun
from nmt.data.tokenizer import Tokenizer, load_tokenizer
from nmt.errors import UserError
from nmt.files import unfinished, write_atomically
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
    seal(temporary, (MODEL, OPTIMISER, STATE))
    former = checkpoints / f".{folder.name}.old"
    if folder.exists():  # the same step once more
        folder.rename(former)
    temporary.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    sync(checkpoints)
    write_atomically(checkpoints / "last", [folder.name + "\n"])
    return folder


def seal(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of these files, and wait until all are on the disk."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)} for name in names}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
    for name in (*names, MANIFEST):
        sync(folder / name)


def export(model: Seq2Seq, tokenizer: Tokenizer, config: TrainRun, folder: Path) -> None:
    """Write a model without what only training needs: a folder that all commands take as `checkpoint=`.

    Raises:
        UserError: there is something already, or it cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already; give the name of a new folder")
    temporary = unfinished(folder)
    try:
        tokenizer.save(temporary)
        save_config(temporary, config)
        save_file(unshared(model), temporary / MODEL)
        seal(temporary, sorted(path.name for path in temporary.iterdir()))
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def step_folders(run: Path) -> list[Path]:
    """The whole checkpoints of a run, the first step first."""
    folders = [path.parent for path in (run / "checkpoints").glob(f"step_*/{MODEL}")]
    return sorted((f for f in folders if STEP_FOLDER.fullmatch(f.name)), key=lambda folder: int(folder.name[5:]))


def last_checkpoint(run: Path) -> Path | None:
    """The step folder that `last` points to, else the one with the largest number, None where there is none."""
    return pointer(run, "last") or next(reversed(step_folders(run)), None)


def find_checkpoint(path: str) -> tuple[Path, Path]:
    """The run and the step folder meant by `checkpoint=path`: a run (its best, else its last), a step folder, or an
    exported model, which is both.

    Raises:
        UserError: there is no such thing.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"checkpoint={path} is not a folder; give a run (runs/NAME) or one of its checkpoints/step_N")
    if (folder / MODEL).is_file():
        if (folder / "config.yaml").is_file():
            return folder, folder
        return (folder.parents[1] if len(folder.parts) > 2 else folder.resolve().parents[1]), folder
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


def load_weights(model: Seq2Seq, *folders: Path) -> None:
    """Fill a model from a step folder, or with the mean of several.

    Raises:
        UserError: the tensors are not those of this model.
    """
    wanted = unshared(model)
    total: dict[str, Tensor] = {}
    for folder in folders:
        tensors = load_tensors(folder / MODEL)
        wrong = [name for name in sorted(tensors.keys() | wanted.keys())
                 if name not in tensors or name not in wanted or tensors[name].shape != wanted[name].shape]  # fmt: skip
        if wrong:
            raise UserError(f"{folder / MODEL} does not fit the model's settings: {', '.join(wrong[:5])}")
        for name, tensor in tensors.items():
            total[name] = tensor if len(folders) == 1 else total.get(name, 0) + tensor.double()
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(total[name] / len(folders))


class Loaded(NamedTuple):
    """A model, and what it came from."""

    model: Seq2Seq
    tokenizer: Tokenizer
    config: TrainRun
    run: Path
    steps: list[Path]  # the checkpoints whose mean the model is


def load_model(path: str, average: int = 1) -> Loaded:
    """Rebuild a model from a run's own settings; with `average` its weights are the mean of the last so many of the
    checkpoints that the run keeps: `train.keep` best ones, and the last.

    Raises:
        UserError: `path` is no checkpoint, or a damaged one, or the run has not so many of them.
    """
    run, step = find_checkpoint(path)
    steps = [step]
    if average > 1:
        steps = step_folders(run)[-average:]
        if run.resolve() != Path(path).resolve() or not steps:
            raise UserError(f"average={average} is of the checkpoints of a run; {path} is only one")
        if len(steps) < average:
            raise UserError(f"average={average}: {run} has {len(steps)} checkpoints; train.keep says how many are kept")
    config = load_config(run)
    tokenizer = load_tokenizer(run)
    for folder in steps:
        verify(folder)
    model = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    load_weights(model, *steps)
    return Loaded(model.eval(), tokenizer, config, run, steps)
