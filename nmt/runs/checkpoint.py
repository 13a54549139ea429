"""Checkpoints: written atomically, verified when read, and sufficient to rebuild the model from the run's settings.

    runs/<name>/checkpoints/step_000500/{model,optimizer}.safetensors  state.json  manifest.json
    <export>/config.yaml  tokenizer*.model  model.safetensors  manifest.json    (also on the Hugging Face hub)

A manifest has the sizes and hashes of the files next to it, the settings of the model, and the hash of its tokenizer.
Loading executes no code: tensors are safetensors, everything else is plain JSON and YAML. Loading needs no more memory
than the size of the files: shapes are compared before tensors are allocated.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nmt.config import TrainRun, flatten_keys, select_immutable_settings
from nmt.data.tokenizer import Tokenizer, load_tokenizer
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.runs.folder import find_last_checkpoint, list_step_folders
from nmt.system.files import fsync_path, hash_file, read_small, replacing_folder, write_atomically
from nmt.system.hub_client import download, is_hub_address
from nmt.system.messages import first_line
from nmt.system.quoting import escape_interpolations, from_yaml, to_yaml

log = logging.getLogger("nmt")
CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
# What is downloaded of a repository on the hub.
EXPORTED_FILES = (
    CONFIG_FILE,
    MODEL_FILE,
    MANIFEST_FILE,
    "tokenizer.model",
    "tokenizer.source.model",
    "tokenizer.target.model",
)
MAX_QUOTED_CHARS = 200  # of a library's error message or of a name in a manifest
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


# ------------------------------------------------------------------------------------------------------------ writing
def write_manifest(folder: Path, config: TrainRun, tokenizer: Tokenizer) -> None:
    """Write the manifest of a folder's files, and flush all of them to disk."""
    paths = sorted(folder.iterdir())
    manifest = {
        "settings": select_immutable_settings(asdict(config)),
        "tokenizer": tokenizer.fingerprint,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths},
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*paths, folder / MANIFEST_FILE, folder):
        fsync_path(path)


def save_weights(model: Seq2Seq, path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in get_unique_parameters(model).items()}, path)


def save_checkpoint(
    run_folder: Path,
    model: Seq2Seq,
    tokenizer: Tokenizer,
    config: TrainRun,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
) -> Path:
    """Write `checkpoints/step_N` for N = progress["step"], and return its folder.

    Raises:
        UserError: it cannot be written; the last checkpoint is unchanged.
    """
    fsync_path(run_folder)  # settings and tokenizer were written there without waiting for the disk
    folder = run_folder / "checkpoints" / f"step_{progress['step']:06d}"
    with replacing_folder(folder) as new:
        save_weights(model, new / MODEL_FILE)
        save_file(flatten_optimizer_state(optimizer), new / OPTIMIZER_FILE)
        (new / STATE_FILE).write_text(json.dumps(progress, indent=1), encoding="utf-8")
        write_manifest(new, config, tokenizer)
    return folder


def export_model(model: Seq2Seq, tokenizer: Tokenizer, config: TrainRun, folder: Path) -> None:
    """Write a model without training state to a new folder, which all commands take as `checkpoint=`.

    Raises:
        UserError: the folder exists, or it cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; give the name of a new folder")
    with replacing_folder(folder) as new:
        tokenizer.save(new)
        save_config(new, config)
        save_weights(model, new / MODEL_FILE)
        write_manifest(new, config, tokenizer)


def get_unique_parameters(model: Seq2Seq) -> dict[str, Tensor]:
    """Return the model's parameters by name, tied ones once under their first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def flatten_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state tensors by `PARAMETER_NUMBER.KEY`."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, slots in state.items() for key, value in slots.items() if value is not None}


# ------------------------------------------------------------------------------------------------------------ finding
def find_best_checkpoint(run_folder: Path) -> Path | None:
    """Return the best checkpoint by the state of the last one, or None if none was validated.

    Raises:
        UserError: the state of the last checkpoint is damaged.
    """
    last = find_last_checkpoint(run_folder)
    if last is None:
        return None
    verify_checkpoint(last, STATE_FILE)
    folders = list_step_folders(run_folder)
    try:
        best_steps = [int(entry[-1]) for entry in json.loads(read_small(last / STATE_FILE))["best"]]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        raise UserError(f"{last / STATE_FILE} is damaged or from another version") from None
    return next((folders[step] for step in best_steps if step in folders), None)


def find_last_intact_checkpoint(run_folder: Path) -> Path:
    """Return the last checkpoint of a run that is not damaged, and warn of damaged later ones.

    Raises:
        UserError: all are damaged.
    """
    for folder in reversed(list_step_folders(run_folder).values()):
        try:
            verify_checkpoint(folder)
        except UserError as error:
            log.warning(f"{error}; falling back to the previous checkpoint")
        else:
            return folder
    raise UserError(f"{run_folder} has no intact checkpoint of this version; name=ANOTHER starts a new run")


def fetch_model(path: str) -> str:
    """Return `path`, or the folder of the downloaded model if it is an address of the hub, `hf://OWNER/NAME@REVISION`.

    Raises:
        UserError: the repository cannot be downloaded, or holds no model of nmt.
    """
    if not is_hub_address(path):
        return path
    folder = download(path, EXPORTED_FILES)
    if not (folder / MODEL_FILE).is_file():
        raise UserError(f"{path} has no {MODEL_FILE}, so it is not a model that nmt exported; check the name")
    return str(folder)


def find_checkpoint(path: str) -> tuple[Path, Path]:
    """Return the run folder and the checkpoint that `path` stands for.

    `path` may be a run folder, for its best checkpoint, or its last if none was validated; a step folder; an exported
    model, which is both run folder and checkpoint; or the address of one on the hub, which is downloaded.

    Raises:
        UserError: there is no checkpoint.
    """
    folder = Path(fetch_model(path))
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run (runs/NAME) or one of its checkpoints/step_N")
    if (folder / MODEL_FILE).is_file():
        if (folder / CONFIG_FILE).is_file():
            return folder, folder
        return (folder if len(folder.parts) > 2 else folder.absolute()).parents[1], folder
    last = find_last_checkpoint(folder)
    if last is None:
        raise UserError(f"{path} has no checkpoint; a run has config.yaml and checkpoints/")
    return folder, find_best_checkpoint(folder) or last


# ------------------------------------------------------------------------------------------------------------ reading
def verify_checkpoint(folder: Path, only: str | None = None) -> dict[str, Any]:
    """Compare a checkpoint's files, or just the file `only`, with its manifest, and return the manifest.

    Raises:
        UserError: a file is missing or damaged; the message names it.
    """
    remedy = "use another checkpoint of the run"
    if (folder / CONFIG_FILE).is_file():
        remedy = "export the model again, or download it again (from the hub, after `hf cache rm model/OWNER/NAME`)"
    try:
        manifest: dict[str, Any] = json.loads(read_small(folder / MANIFEST_FILE))
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        manifest["settings"].items(), str(manifest["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / MANIFEST_FILE} is missing, damaged, or from another version; {remedy}") from None
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    for name in [only] if only else [MODEL_FILE, *expected]:
        path = files.get(name)
        if not path or (path.stat().st_size, hash_file(path)) != expected.get(name):
            what = str(folder / name)[:MAX_QUOTED_CHARS]
            raise UserError(f"{what} is missing or damaged (see {MANIFEST_FILE}); {remedy}")
    return manifest


class NoInitialization(TorchFunctionMode):
    """Makes the functions of `nn.init` do nothing. On the meta device `normal_` would import PyTorch's compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


def load_config_and_tokenizer(run_folder: Path, folder: Path) -> tuple[TrainRun, Tokenizer]:
    """Verify a checkpoint, check the shapes of its weights, and return its settings and tokenizer.

    Raises:
        UserError: a file is missing or damaged; the message names it.
    """
    config, tokenizer, manifest = load_config(run_folder), load_tokenizer(run_folder), verify_checkpoint(folder)
    current = select_immutable_settings(asdict(config))
    trained = dict(flatten_keys(manifest["settings"]))
    # Other versions of the program may have other keys, so only common keys are compared.
    changed = [key for key in trained.keys() & current.keys() if trained[key] != current[key]]
    if changed or tokenizer.fingerprint != manifest["tokenizer"]:
        what = f"the tokenizer in {run_folder}"
        if changed:
            what = f"{run_folder / CONFIG_FILE} ({', '.join(sorted(changed))})"
        raise UserError(
            f"{what} differs from what {folder} was trained with: it is damaged or was edited; restore the original"
        )
    with torch.device("meta"), NoInitialization():  # damaged settings may ask for more memory than there is
        meta_model = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    check_tensor_shapes(folder / MODEL_FILE, get_unique_parameters(meta_model), "the model's settings")
    return config, tokenizer


def load_config(folder: Path) -> TrainRun:
    """Load the settings of a run or an exported model.

    Raises:
        UserError: config.yaml is missing, is not plain YAML, or does not fit this version.
    """
    path = folder / CONFIG_FILE
    try:
        values = escape_interpolations(from_yaml(read_small(path)) or {})
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainRun), values))  # type: ignore[return-value]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, so {folder} is not a run; give a run, such as runs/NAME") from None
    except UserError as error:
        raise UserError(f"{path}: {str(error)[: 2 * MAX_QUOTED_CHARS]}") from None
    except Exception as error:  # the errors of YAML and OmegaConf have no common base class
        raise UserError(f"{path} is damaged or from another version: {first_line(error)}") from None


def save_config(folder: Path, config: TrainRun) -> None:
    write_atomically(folder / CONFIG_FILE, [to_yaml(asdict(config))])


def check_tensor_shapes(path: Path, expected: dict[str, Tensor], owner: str) -> None:
    """Raise a `UserError` unless a file has floating-point tensors of exactly these names and shapes.

    The tensors are not read. `owner` says in the message what needs them.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
            shapes = {
                name: tuple(part.get_shape()) for name, part in slices.items() if part.get_dtype() in FLOAT_DTYPES
            }
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None
    wrong = [
        name
        for name in sorted(slices.keys() | expected.keys())
        if name not in expected or shapes.get(name) != tuple(expected[name].shape)
    ]
    if wrong:
        raise UserError(f"{path} does not fit {owner}: {', '.join(name[:80] for name in wrong[:5])}")


def read_tensors(path: Path, expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """Read a file of tensors that have the names and shapes of `expected`.

    Raises:
        UserError: they do not fit `owner`, or are not finite.
    """
    check_tensor_shapes(path, expected, owner)
    tensors = load_file(path)
    if non_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"{path} has NaN or infinity in {', '.join(non_finite[:5])}; use another checkpoint")
    return tensors


def load_weights(model: Seq2Seq, *folders: Path) -> None:
    """Load the weights of a checkpoint into a model, or the mean of the weights of several."""
    parameters = get_unique_parameters(model)
    total: dict[str, Tensor] = {}
    for folder in folders:
        for name, tensor in read_tensors(folder / MODEL_FILE, parameters, "the model's settings").items():
            total[name] = tensor if len(folders) == 1 else total.get(name, 0) + tensor.double()
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(total[name] / len(folders))


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load an optimizer's state from a checkpoint."""
    state = flatten_optimizer_state(optimizer)
    for name, tensor in read_tensors(folder / OPTIMIZER_FILE, state, "the optimizer").items():
        state[name].copy_(tensor)


class LoadedModel(NamedTuple):
    """A model, and where it was loaded from."""

    model: Seq2Seq
    tokenizer: Tokenizer
    config: TrainRun
    run_folder: Path
    checkpoints: list[Path]  # the step folders whose weights were averaged


def load_model(path: str, average: int = 1) -> LoadedModel:
    """Rebuild a model from the settings of its run.

    With `average` > 1 its weights are the mean of the last `average` checkpoints that the run has kept: the
    `train.keep` best ones and the last two.

    Raises:
        UserError: `path` is not a checkpoint, is damaged, or the run has fewer than `average` checkpoints.
    """
    run_folder, checkpoint = find_checkpoint(path)
    checkpoints = [checkpoint]
    if average > 1:
        checkpoints = list(list_step_folders(run_folder).values())[-average:]
        if run_folder.resolve() != Path(path).resolve() or not checkpoints:
            raise UserError(f"average={average} needs a run, but {path} is a single checkpoint")
        if len(checkpoints) < average:
            raise UserError(
                f"average={average}: {run_folder} has only {len(checkpoints)} checkpoints; "
                "train.keep sets how many a run keeps"
            )
    for folder in checkpoints:
        config, tokenizer = load_config_and_tokenizer(run_folder, folder)
    model = build_model(config.model, tokenizer.source.vocab_size, tokenizer.target.vocab_size)
    load_weights(model, *checkpoints)
    return LoadedModel(model.eval(), tokenizer, config, run_folder, checkpoints)
