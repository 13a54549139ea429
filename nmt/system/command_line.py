"""From a command line to checked dataclasses, and one-line explanations of what is wrong with it."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.errors import UserError, extra_command, suggest
from nmt.system.quoting import escape_interpolations, quote_setting

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CONFIG_DIR = PACKAGE_DIR / "configs"  # in a wheel
if not CONFIG_DIR.is_dir():
    CONFIG_DIR = PACKAGE_DIR.parent / "configs"  # in a checkout
HYDRA_OPTION = re.compile(
    "-(h|m|c|p|i|cd|sc)|--(help|hydra-help|version|multirun|cfg|package|info|config-dir|shell-completion)"
)
TEXT_TYPES = (str, str | None, list[str], Any)
# What Hydra reads as a number other than 0, 1, 2, ..., or as a truth value (group 2), or else text in quotes.
NUMBER_OR_QUOTED = re.compile(
    r"""((?:^|[,\[])\s*)(?!(?:0|[1-9]\d*)\s*(?:[],]|$))([-+]?\.?\d[\w.+-]*|true|false|[-+]?inf|nan)(?=\s*(?:[],]|$))"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""",
    re.IGNORECASE,
)
SWEEP_PLUGINS = ("joblib", "submitit_local", "submitit_slurm")  # installed by the extra `sweep`
# Keys, and their names in other toolkits. Of several keys, the first that the command has is meant.
KEY_SYNONYMS = {
    "optim.lr": "learning_rate base_lr init_lr",
    "optim.name": "optimizer optimiser",
    "optim.schedule": "lr_scheduler lr_schedule scheduler decay_method",
    "optim.warmup": "warmup_steps warmup_updates warmup_ratio",
    "optim.clip": "clip_norm max_grad_norm grad_clip clip_grad_norm",
    "train.batch_sentences": "batch_size minibatch_size",
    "train.batch_tokens search.batch_tokens": "max_tokens tokens_per_batch",
    "train.max_epochs": "epochs num_epochs n_epochs num_train_epochs",
    "train.max_steps": "steps num_steps train_steps max_update max_updates",
    "train.accumulate": "accum_count update_freq gradient_accumulation_steps",
    "train.validate_every": "valid_steps eval_steps valid_freq",
    "train.log_every": "log_interval report_every logging_steps disp_freq",
    "train.patience": "early_stopping early_stop early_stopping_patience",
    "train.keep": "keep_checkpoint keep_last save_total_limit",
    "model.hidden": "hidden_size hidden_dim rnn_size hid_dim dim d_model",
    "model.embed": "emb_dim emb_size embed_dim embedding_dim word_vec_size",
    "model.encoder_layers": "n_layers num_layers layers enc_layers",
    "model.decoder_layers": "dec_layers num_decoder_layers",
    "model.dropout": "dropout_rate dropout_prob",
    "model.cell": "rnn_type cell_type",
    "model.tie": "tie_embeddings tied_embeddings share_embeddings",
    "model.attention.score": "attention_type global_attention attn_type",
    "model.attention.heads": "n_heads num_heads",
    "search.beam": "beam_size num_beams beam_width",
    "search.n_best": "nbest num_return_sequences",
    "search.length_penalty": "alpha lenpen",
    "tokenizer.vocab_size": "vocab n_vocab src_vocab_size num_merges",
    "tokenizer.joint": "share_vocab joined_dictionary",
    "data.source input source": "src src_lang source_lang train_src",
    "data.target target": "tgt trg tgt_lang target_lang train_tgt",
    "data.path input": "data_dir dataset train_file train_set corpus",
    "name output": "save_dir output_dir model_dir run_name save_model",
    "checkpoint init_from": "model_path ckpt load_model",
    "init_from checkpoint": "pretrained finetune train_from from_pretrained",
    "device": "gpu gpus cuda use_cuda gpu_id",
    "precision": "fp16 bf16 amp mixed_precision",
    "seed": "random_seed manual_seed",
}
KEYS_BY_SYNONYM = {name: keys.split() for keys, names in KEY_SYNONYMS.items() for name in names.split()}


def list_keys(schema: type, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a schema by the dotted names of the keys."""
    keys: dict[str, dataclasses.Field[Any]] = {}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(item.type):
            keys |= list_keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


def list_config_groups() -> dict[str, list[str]]:
    """Return the choices of each config group, such as `model`.

    Groups such as `data_model` are not among them: their files are chosen by the choices in two other groups.
    """
    folders = sorted(path for path in CONFIG_DIR.iterdir() if path.is_dir() and "_" not in path.name)
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def check_arguments(arguments: list[str], schema: type) -> None:
    """Check the names in a command line, since Hydra suggests none for those that do not exist.

    Raises:
        UserError: an argument is invalid; the message names it and says what to use instead.
    """
    keys, groups = list_keys(schema), list_config_groups()
    known = [*keys, *groups]
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+~")
        if argument.startswith("-") and not HYDRA_OPTION.fullmatch(name):
            if key in known:
                raise UserError(f"{argument}: settings are written without dashes: {key}={value or 'VALUE'}")
            raise UserError(f"there is no option {name}; use key=value{suggest_key(key, known)}")
        if not equals or argument.startswith("-") or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set its keys, as in {key}.KEY=VALUE")
        if key not in known:
            raise UserError(f"there is no key '{key}'{suggest_key(key, known)}; --help lists all keys")
        if not value or key in groups and value == "null":  # often an unset shell variable
            raise UserError(f"{argument}: the value is missing; set {key}=VALUE or remove {key}")


def keep_text(setting: str, schema: type) -> str:
    """Quote the numbers and truth values that a setting gives to a key of text, such as `name=2024_11_24`.

    Hydra would otherwise read them as such, and the text would become 20241124.
    """
    key, equals, value = setting.partition("=")
    field = list_keys(schema).get(key.lstrip("+~"))
    if field is None or field.type not in TEXT_TYPES:
        return setting
    return key + equals + NUMBER_OR_QUOTED.sub(lambda match: f'{match[1]}"{match[2]}"' if match[2] else match[0], value)


def suggest_key(key: str, known: list[str]) -> str:
    """Return `"; did you mean 'x'?"` for the key that has this name in other toolkits or the closest spelling."""
    leaf = key.rpartition(".")[2].replace("-", "_").lower()
    meanings = KEYS_BY_SYNONYM.get(leaf, [])
    if not meanings or any(name.rpartition(".")[2] == leaf for name in known):
        return suggest(key, known)
    known_meanings = [name for name in meanings if name in known]
    return f"; did you mean '{known_meanings[0]}'?" if known_meanings else f"; other commands have '{meanings[0]}'"


def list_constant_keys(arguments: list[str]) -> list[str]:
    """Return the keys of a sweep's command line that have one value, so that names of runs need not contain them."""
    settings = [argument for argument in arguments if ("=" in argument or argument[0] == "~") and argument[0] != "-"]
    overrides = OverridesParser.create().parse_overrides(settings)
    return [override.key_or_group for override in overrides if not override.is_sweep_override()]


def explain_hydra_error(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf as one line that begins with the argument or key it is about."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if choice in SWEEP_PLUGINS:
            return f"{group}={choice} needs a missing plug-in; install it with: {extra_command('sweep')}"
        return f"{group}={choice} is not one of {', '.join(error.options)}{suggest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"quote values with special characters: {quote_setting(key, value)}" if value else "use key=value"
        if value.startswith("~/"):
            remedy = f"the shell did not expand ~; use {key}=$HOME{value[1:]}"
        elif value.startswith("["):
            remedy = f"""quote the list, and items with special characters: '{key}=["A","B"]'"""
        return f"{error.override} cannot be read; {remedy}"
    lines = [line.strip(" .") for line in str(error.__cause__ or error).splitlines()]
    place = str(error).partition("Error merging override ")[2]
    place = place or next((line[9:].strip() for line in lines if line.startswith("full_key:")), "")
    reason = "; ".join(line for line in lines if line and not re.match("full_key:|object_type=|reference_type=", line))
    if "is not a ListConfig" in reason:
        key, _, value = place.partition("=")
        reason = f"expected a list; write it as {quote_setting(key, [value])}"
    return f"{place}: {reason}" if place else reason


def describe_error(error: Exception) -> str:
    """Return the message of an error that is not a bug, such as `runs/mine/train.log: No space left on device`."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return explain_hydra_error(error)
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    if isinstance(error, MemoryError):
        return f"out of memory; process less text at a time ({str(error) or 'no details'})"
    return str(error)


def remove_empty_folders(folder: str) -> None:
    """Remove a run folder, which Hydra creates before settings are checked, and its parents if they are empty."""
    try:
        os.removedirs(Path(folder).relative_to(Path.cwd()))
    except (OSError, ValueError):  # not empty, or elsewhere
        return


def to_dataclasses(config: DictConfig) -> Any:
    """Convert a composed configuration to checked dataclasses.

    Raises:
        UserError: a value is not allowed; the message has the key, the value and the allowed values.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain_hydra_error(error)) from error


def build_config(schema: type, values: dict[str, Any]) -> DictConfig:
    """Build an OmegaConf configuration from a dict of settings, whose strings are literal, even with `${` in them.

    Raises:
        UserError: a key does not exist, or its value has the wrong type.
    """
    config = OmegaConf.structured(schema)
    try:
        config.merge_with(escape_interpolations(values))
    except OmegaConfBaseException as error:
        raise UserError(explain_hydra_error(error)) from error
    return config


def build_settings(schema: type, values: dict[str, Any]) -> Any:
    """Build the checked dataclasses of a command from a dict of settings instead of a command line."""
    return to_dataclasses(build_config(schema, values))
