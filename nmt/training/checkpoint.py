"""Checkpoints: written whole or not at all, verified when read, enough to rebuild the model from the run's settings.

    runs/<name>/config.yaml  tokenizer*.model
    runs/<name>/checkpoints/step_000500/{model,optimizer}.safetensors  state.json  manifest.json
    runs/<name>/checkpoints/{last,best}             one line each: the name of a step folder
                                                    (`last` decides: the best one is what its state.json says)
    <export>/config.yaml  tokenizer*.model  model.safetensors  manifest.json

A manifest has the digests of the files beside it, the settings that the model goes with, and its tokenizer's digest.
Loading executes nothing: tensors are safetensors, the rest is plain JSON and YAML. Nor does it take more memory than
what is in the files: sizes are compared before anything is made.
"""

import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmt.config import TrainRun, flatten_keys, immutable_settings
from nmt.data.tokenizer import Tokenizer, load_tokenizer
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.runtime.files import open_regular, read_small, remove, replacing_folder, sha256_of, sync, write_atomically
from nmt.runtime.quoting import from_yaml, literal, to_yaml

log = logging.getLogger("nmt")
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
CONFIG = "config.yaml"
STEP_FOLDER = re.compile(r"step_\d{6,12}|\.step_\d{6,12}(\.old|(\.\w+)?\.new)")  # whole; on its way out, half written
CLIP = 200  # characters of somebody else's complaint
FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors, as safetensors calls them


# ----------------------------------------------------------------------------------------------------------- writing
def write_manifest(folder: Path, config: TrainRun, tokenizer: Tokenizer) -> None:
    """Write the manifest of a folder's files, and wait until all are on the disk."""
    paths = sorted(folder.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    manifest = {"settings": immutable_settings(asdict(config)), "tokenizer": tokenizer.fingerprint, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*paths, folder / MANIFEST, folder):
        sync(path)


def write_model(model: Seq2Seq, path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in unshared(model).items()}, path)


def save_checkpoint(
    run: Path, model: Seq2Seq, tokenizer: Tokenizer, config: TrainRun, optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
) -> Path:  # fmt: skip
    """Write `checkpoints/step_N` for N = progress["step"] and point `last` to it. Returns the folder.

    Raises:
        UserError: it cannot be written; the last one is as it was.
    """
    sync(run)  # by now it has settings and tokenizer
    folder = run / "checkpoints" / f"step_{progress['step']:06d}"
    with replacing_folder(folder) as new:
        write_model(model, new / MODEL)
        save_file(flatten(optimizer), new / OPTIMIZER)
        (new / STATE).write_text(json.dumps(progress, indent=1), encoding="utf-8")
        write_manifest(new, config, tokenizer)
    write_atomically(folder.parent / "last", [folder.name + "\n"])
    return folder


def export(model: Seq2Seq, tokenizer: Tokenizer, config: TrainRun, folder: Path) -> None:
    """Write a model without what only training needs: a folder that all commands take as `checkpoint=`.

    Raises:
        UserError: there is something already, or it cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already; give the name of a new folder")
    with replacing_folder(folder) as new:
        tokenizer.save(new)
        save_config(new, config)
        write_model(model, new / MODEL)
        write_manifest(new, config, tokenizer)


def unshared(model: Seq2Seq) -> dict[str, Tensor]:
    """The model's parameters, each once: tied ones go by their first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def flatten(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's own state, by `parameter number.what`."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, slots in state.items() for key, value in slots.items() if value is not None}


def keep_only(run: Path, best: list[int], step: int) -> None:
    """Point `best` to the first of the best steps that is there, and remove the step folders that need not be kept, and
    what a process that died left of others. Kept are the best, `step`, and the one before it, which serves where `step`
    is found damaged."""
    there = step_folders(run)
    best = [number for number in best if number in there]
    pointed = run / "checkpoints" / "best"
    if best:
        write_atomically(pointed, [there[best[0]].name + "\n"])
    else:  # not validated yet; or it was damaged, and this run has gone back to a checkpoint before it
        pointed.unlink(missing_ok=True)
    before = [number for number in there if number < step]
    kept = {there[number].name for number in (step, *before[-1:], *best)}
    for folder in (run / "checkpoints").iterdir():
        if STEP_FOLDER.fullmatch(folder.name) and folder.name not in kept:
            remove(folder)


# ----------------------------------------------------------------------------------------------------------- reading
def pointer(run: Path, name: str) -> Path | None:
    """The step folder that `checkpoints/<name>` points to, None where there is none."""
    path = run / "checkpoints" / name
    if not path.is_file():
        return None
    with open(path, "rb", opener=open_regular) as file:
        target = file.read(99).decode(errors="replace").strip()
    return step_folders(run).get(step_of(target)) if STEP_FOLDER.fullmatch(target) else None


def step_folders(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, the first one first; among them one that was to be replaced by another of its
    step, where the process died in between."""
    found: dict[int, Path] = {}
    for path in sorted((run / "checkpoints").glob("*step_*/")):  # .step_N.old before step_N
        if STEP_FOLDER.fullmatch(path.name) and path.suffix != ".new":
            found[step_of(path.name)] = path
    return dict(sorted(found.items()))


def best_checkpoint(run: Path) -> Path | None:
    """The best checkpoint, None where none was validated. The state in the last checkpoint says which it is: `best` is
    written after it, so a process may have died before that.

    Raises:
        UserError: that state is damaged, and `best` is, too.
    """
    last = last_checkpoint(run)
    if last is None:
        return None
    try:
        verify(last, STATE)
        steps = [int(entry[-1]) for entry in json.loads(read_small(last / STATE))["best"]]
    except (UserError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        complaint = str(error) if isinstance(error, UserError) else f"{last / STATE} is damaged"
        if (best := pointer(run, "best")) is None:
            raise UserError(f"{complaint}, and {run / 'checkpoints' / 'best'} names none") from None
        log.warning(f"{complaint}; the best checkpoint is taken from {run / 'checkpoints' / 'best'}")
        return best
    there = step_folders(run)
    return next((there[step] for step in steps if step in there), None)


def step_of(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])


def last_checkpoint(run: Path) -> Path | None:
    """The step folder that `last` points to, else the one with the largest number, None where there is none."""
    return pointer(run, "last") or next(reversed(step_folders(run).values()), None)


def last_intact(run: Path) -> Path:
    """The last checkpoint of a run that is not damaged; damaged ones after it are named in a warning.

    Raises:
        UserError: all are.
    """
    last = last_checkpoint(run)
    assert last is not None
    if pointer(run, "last") is None:
        log.warning(f"{run / 'checkpoints' / 'last'} names no checkpoint; taking the one with the largest number")
    for folder in dict.fromkeys((last, *reversed(step_folders(run).values()))):
        try:
            verify(folder)
        except UserError as error:
            log.warning(f"{error}; going back to the checkpoint before it")
        else:
            return folder
    raise UserError(f"{run} has no checkpoint that is whole and of this version; name=ANOTHER starts beside it")


def find_checkpoint(path: str) -> tuple[Path, Path]:
    """The run and the checkpoint meant by `path`: a run (its best, else its last), a step folder, or an exported
    model, which is both.

    Raises:
        UserError: there is no such thing.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run (runs/NAME) or one of its checkpoints/step_N")
    if (folder / MODEL).is_file():
        place = folder.resolve()
        if place.parent.name != "checkpoints" or (folder / CONFIG).is_file():
            return folder, folder
        run = place.parents[1]
        above = folder.parents[1] if len(folder.parts) > 2 else run
        its_own = (above / "checkpoints").resolve() == place.parent  # not where a link leads to the checkpoint
        return (above if its_own else run), folder
    last = last_checkpoint(folder)
    if last is None:
        raise UserError(f"{path} holds no checkpoint; a run has config.yaml and checkpoints/")
    return folder, best_checkpoint(folder) or last


def verify(folder: Path, only: str | None = None) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, or `only` one of them. Returns the manifest, which has the
    settings, too, and the fingerprint of the tokenizer that the checkpoint goes with.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    remedy = "use another checkpoint of the run"
    try:
        manifest = json.loads(read_small(folder / MANIFEST))
        entries = [(str(name), entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()]
        manifest["settings"].items(), str(manifest["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / MANIFEST} is missing, damaged, or from another version; {remedy}") from None
    if (needed := only or MODEL) not in (name for name, *_ in entries):
        raise UserError(f"{folder / MANIFEST} does not list {needed}; {remedy}")
    for name, size, sha256 in entries:
        if only not in (None, name):
            continue
        path = folder / Path(name).name
        try:
            whole = path.name == name and path.is_file() and path.stat().st_size == size and sha256_of(path) == sha256
        except OSError:  # a name that no file can have
            whole = False
        if not whole:
            raise UserError(f"{str(path)[:CLIP]} is missing or damaged (see {MANIFEST}); {remedy}")
    return manifest


def load_verified(run: Path, folder: Path) -> tuple[TrainRun, Tokenizer]:
    """The settings and the tokenizer that a checkpoint goes with, after a look at the sizes of its tensors.

    Raises:
        UserError: naming what is missing or damaged.
    """
    config, tokenizer, manifest = load_config(run), load_tokenizer(run), verify(folder)
    found, trained = immutable_settings(asdict(config)), dict(flatten_keys(manifest["settings"]))
    others = [key for key in trained.keys() & found.keys() if trained[key] != found[key]]  # versions may differ in keys
    if others or tokenizer.fingerprint != manifest["tokenizer"]:
        what = f"{run / CONFIG} ({', '.join(sorted(others))})" if others else f"the tokenizer in {run}"
        raise UserError(
            f"{what} is not what {folder} was trained with, but damaged, or changed by hand; bring back the former one"
        )
    with torch.device("meta"):  # settings may ask for more memory than there is
        imagined = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    check_shapes(folder / MODEL, unshared(imagined), "the model's settings")
    return config, tokenizer


def load_config(folder: Path) -> TrainRun:
    """The settings that a model was trained with.

    Raises:
        UserError: config.yaml is missing, or no plain YAML, or does not fit this version.
    """
    path = folder / CONFIG
    try:
        given = literal(from_yaml(read_small(path)) or {})
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainRun), given))  # type: ignore[return-value]
    except FileNotFoundError:
        raise UserError(f"{path} is not there, so {folder} is not a run; give one, as runs/NAME") from None
    except UserError as error:
        raise UserError(f"{path}: {str(error)[: 2 * CLIP]}") from None
    except Exception as error:  # YAML's and OmegaConf's own errors have no common base
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{path} is damaged or from another version: {reason[:CLIP]}") from None


def save_config(folder: Path, config: TrainRun) -> None:
    write_atomically(folder / CONFIG, [to_yaml(asdict(config))])


def check_shapes(path: Path, wanted: dict[str, Tensor], what: str) -> None:
    """See that a file has tensors of these names and shapes; none is read.

    Raises:
        UserError: it is no file of safetensors, or others are in it.
    """
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            shapes = {name: tuple(part.get_shape()) for name, part in parts.items() if part.get_dtype() in FLOATS}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None
    wrong = [name for name in sorted(parts.keys() | wanted.keys())
             if name not in wanted or shapes.get(name) != tuple(wanted[name].shape)]  # fmt: skip
    if wrong:
        raise UserError(f"{path} does not fit {what}: {', '.join(name[:80] for name in wrong[:5])}")


def read_tensors(path: Path, wanted: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The tensors of a file, which have these names and shapes.

    Raises:
        UserError: others are in it, or their numbers are not finite.
    """
    check_shapes(path, wanted, what)
    found = load_file(path)
    if broken := [name for name, tensor in found.items() if not tensor.isfinite().all()]:
        raise UserError(f"{path}: {', '.join(broken[:5])}: not all numbers are finite; use another checkpoint")
    return found


def load_weights(model: Seq2Seq, *folders: Path) -> None:
    """Fill a model from a checkpoint, or with the mean of several.

    Raises:
        UserError: the tensors are not those of this model, or not finite.
    """
    wanted = unshared(model)
    total: dict[str, Tensor] = {}
    for folder in folders:
        for name, tensor in read_tensors(folder / MODEL, wanted, "the model's settings").items():
            total[name] = tensor if len(folders) == 1 else total.get(name, 0) + tensor.double()
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(total[name] / len(folders))


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Fill an optimizer's state from a checkpoint.

    Raises:
        UserError: the tensors are not those of this optimizer, or not finite.
    """
    wanted = flatten(optimizer)
    for name, tensor in read_tensors(folder / OPTIMIZER, wanted, "the optimizer").items():
        wanted[name].copy_(tensor)


class Loaded(NamedTuple):
    """A model, and what it came from."""

    model: Seq2Seq
    tokenizer: Tokenizer
    config: TrainRun
    run: Path
    steps: list[Path]  # the checkpoints whose mean the model is
    key: str  # digest of their manifests, which have the digests of all that belongs to them


def load_model(path: str, average: int = 1) -> Loaded:
    """Rebuild a model from a run's own settings; with `average` its weights are the mean of the last so many of the
    checkpoints that a run keeps: `train.keep` best ones, and the last two.

    Raises:
        UserError: `path` is no checkpoint, or a damaged one, or the run has not so many of them.
    """
    run, step = find_checkpoint(path)
    steps = [step]
    if average > 1:
        steps = list(step_folders(run).values())[-average:]
        if run.resolve() != Path(path).resolve() or not steps:
            raise UserError(f"average={average} is of the checkpoints of a run; {path} is only one")
        if len(steps) < average:
            raise UserError(f"average={average}: {run} has {len(steps)} checkpoints; train.keep says how many are kept")
    for folder in steps:
        config, tokenizer = load_verified(run, folder)
    model = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    load_weights(model, *steps)
    key = " ".join(sha256_of(folder / MANIFEST) for folder in steps)
    return Loaded(model.eval(), tokenizer, config, run, steps, key)
