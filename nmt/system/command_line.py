"""Check a command line before Hydra parses it, and explain errors of Hydra in one line."""

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from nmt.errors import UserError, extra_command, suggest
from nmt.system.quoting import escape_interpolations, is_encodable, quote_for_shell, quote_setting

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CONFIG_DIR = PACKAGE_DIR / "configs"  # in a wheel
if not CONFIG_DIR.is_dir():
    CONFIG_DIR = PACKAGE_DIR.parent / "configs"  # in a checkout
HYDRA_FLAG = re.compile(
    "-(h|m|c|p|i|cd|sc)|--(help|hydra-help|version|multirun|cfg|package|info|config-dir|shell-completion)"
)
# Keys that are left out of the run names of a sweep.
KEYS_NOT_IN_RUN_NAMES = ("name", "resume", "overwrite", "device", "data.path", "data.cache", "sweep")
SWEEP_PLUGINS = ("joblib", "submitit_local", "submitit_slurm", "optuna")  # installed by the extra `sweep`
STRING_KEY_TYPES = (str, str | None, Any)  # types of keys whose values may be strings that look like numbers
# Keys, and the names that other toolkits use for them. Of several keys the first that a command has is meant.
KEY_SYNONYMS = {
    "optim.lr": "learning_rate base_lr init_lr",
    "optim.name": "optimizer optimiser optim_name",
    "optim.schedule": "lr_scheduler lr_schedule scheduler decay_method",
    "optim.warmup": "warmup_steps warmup_updates warmup_ratio",
    "optim.clip": "clip_norm max_grad_norm grad_clip clip_grad_norm",
    "optim.label_smoothing": "smoothing label_smooth",
    "train.batch_sentences search.batch_sentences": "batch_size minibatch_size",
    "train.batch_tokens search.batch_tokens": "max_tokens batch_token tokens_per_batch",
    "train.max_epochs": "epochs num_epochs n_epochs num_train_epochs max_epoch",
    "train.max_steps": "steps num_steps train_steps max_update max_updates",
    "train.accumulate": "accum_count update_freq gradient_accumulation_steps grad_accum",
    "train.validate_every": "valid_steps eval_steps valid_freq eval_every val_every",
    "train.save_every": "save_steps save_freq save_interval save_checkpoint_steps",
    "train.log_every": "log_interval report_every logging_steps disp_freq",
    "train.patience": "early_stopping early_stop early_stopping_patience",
    "train.monitor": "metric eval_metric early_stopping_metric bleu",
    "train.keep": "keep_checkpoint keep_last save_total_limit",
    "model.hidden": "hidden_size hidden_dim rnn_size hid_dim dim d_model",
    "model.embed": "emb_dim emb_size embed_dim embedding_dim embedding_size word_vec_size",
    "model.encoder_layers": "n_layers num_layers layers enc_layers n_enc_layers",
    "model.decoder_layers": "dec_layers n_dec_layers num_decoder_layers",
    "model.dropout": "dropout_rate dropout_prob drop_prob p_dropout",
    "model.cell": "rnn_type cell_type rnn",
    "model.tie": "tie_embeddings tied_embeddings share_embeddings share_all_embeddings",
    "model.attention.score": "attention_type global_attention attn attn_type",
    "model.attention.heads": "n_heads num_heads",
    "search.beam": "beam_size num_beams beam_width",
    "search.n_best": "nbest num_return_sequences",
    "search.length_penalty": "alpha lenpen len_pen",
    "tokenizer.vocab_size": "vocab n_vocab src_vocab_size num_merges bpe_size",
    "tokenizer.joint": "share_vocab joined_dictionary joint_vocab",
    "tokenizer.sampling": "bpe_dropout subword_sampling",
    "data.source input source": "src src_lang source_lang train_src",
    "data.target target": "tgt trg tgt_lang target_lang train_tgt ref",
    "data.path input": "data_dir dataset train_file train_set corpus",
    "data.max_length search.max_length": "max_len max_seq_len max_length max_sent_length",
    "data.num_proc": "workers num_workers n_jobs",
    "name output": "save_dir output_dir model_dir run_name exp_name save_model",
    "checkpoint init_from": "model_path ckpt load load_model restore",
    "init_from checkpoint": "pretrained finetune train_from from_pretrained",
    "device": "gpu gpus cuda use_cuda gpu_id devices",
    "precision": "fp16 bf16 amp half mixed_precision dtype",
    "seed": "random_seed rng_seed manual_seed",
}
KEYS_BY_SYNONYM = {name: keys.split() for keys, names in KEY_SYNONYMS.items() for name in names.split()}
# Example values of keys that take lists or tables.
SETTING_EXAMPLES = {
    "data.corpora": "'data.corpora=[{path:FOLDER}]'",
    "data.references": "'data.references=[en1,en2]'",
    "tokenizer.symbols": "'tokenizer.symbols=[\"<br>\"]'",
    "search.patterns": "'search.patterns=[\"[A-Z]+-[0-9]+\"]'",
    "compare": "'compare=[runs/A,runs/B]'",
    "by_pairs": "'by_pairs={optim.lr: {0: 0.001, 60000: 0.002}}'",
}
# Patterns of OmegaConf's errors about a value of the wrong shape, and what is expected instead.
SHAPE_ERRORS = (
    (r"is not a ListConfig", "expected a list"),
    (r"Cannot merge \w+ with \w+", "got keys with values where a list is expected, or a list where keys are expected"),
    (r"is not a subclass of CorpusConfig", "expected a corpus with its path"),
    (r"is not a subclass of \w+Config|Cannot merge ListConfig with DictConfig", "expected keys with values"),
    (r"Cannot assign \w+ to Dict|is incompatible with", "expected keys, each with its values by number of pairs"),
    (r"Cannot convert '(?:list|ListConfig)' to string", "expected one value, not a list"),
    (r"Cannot convert '(?:dict|DictConfig)' to string", "expected one value, not keys with values"),
)
RUN_FOLDER_KEYS = ("name", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")  # parts of the run folder's path
COMMAND_ONLY_KEYS = ("resume", "overwrite")  # not taken from config=FILE


def check_command_line(arguments: list[str], keys: dict[str, Any], groups: list[str]) -> None:
    """Report common mistakes (`--key value`, `+key=value`, an unknown key) with better messages than Hydra's.

    `keys` has the types of all keys by dotted name, including sections; `groups` the config groups, such as `model`.

    Raises:
        UserError: an argument is invalid; the message names it and says what to use instead.
    """
    known_names = [*keys, *groups]
    is_setting = ["=" in argument and not argument.startswith("-") for argument in arguments]
    if "${" in os.getcwd():
        raise UserError(f"{os.getcwd()} contains ${{, which is read as an interpolation; use another working directory")
    for index, argument in enumerate(arguments):
        if not is_encodable(argument):
            raise UserError(f"{argument!a} is not UTF-8; rename the file or create a link to it")
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+~")
        if argument.startswith("-"):
            if HYDRA_FLAG.fullmatch(name):
                if any(is_setting[:index]) and any(is_setting[index + 1 :]):  # Hydra needs all settings in one row
                    raise UserError(f"{argument} cannot come between settings; move it to the front")
                continue
            if key in known_names:
                setting = quote_for_shell(f"{key}={value or 'VALUE'}")
                raise UserError(f"{argument}: settings are written without dashes: {setting}")
            raise UserError(f"there is no option {name}; use key=value{suggest_key(key, known_names)}")
        if equals and key in RUN_FOLDER_KEYS and "\\${" in value:
            raise UserError(f"{argument}: the name of a run folder cannot contain ${{; choose another name")
        takes_strings = key in RUN_FOLDER_KEYS or keys.get(key) in STRING_KEY_TYPES or keys.get(key) == list[str]
        if equals and takes_strings and key not in COMMAND_ONLY_KEYS:
            check_parsed_as_written(argument, key)
        if not equals or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known_names:
            raise UserError(f"there is no key '{key}'{suggest_key(key, known_names)}; --help lists all keys")
        if argument.startswith("+"):
            raise UserError(f"{argument}: + is not needed, since every key exists: {quote_for_shell(f'{key}={value}')}")
        if {"-m", "--multirun"} & set(arguments) and key in KEYS_NOT_IN_RUN_NAMES and is_swept(argument):
            raise UserError(
                f"{argument}: {key} cannot be swept, since run names do not contain it; use one command per value, "
                "each with its own name="
            )
        if key in groups and "null" in value.split(","):
            raise UserError(f"{argument}: set {key}=CHOICE or remove {key}; --help lists the choices")
        if key not in groups and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set its keys, as in {key}.KEY=VALUE")
        if not value and key not in groups:  # often an unset shell variable
            raise UserError(f"{argument}: the value is missing; set {key}=VALUE or remove {key}")


def suggest_key(key: str, known: list[str]) -> str:
    """Return `"; did you mean 'x'?"` for the key that has this name in other toolkits or the closest spelling."""
    leaf = key.rpartition(".")[2].replace("-", "_").lower()
    meanings = KEYS_BY_SYNONYM.get(leaf, [])
    if not meanings or any(name.rpartition(".")[2] == leaf for name in known):
        return suggest(key, known)
    known_meanings = [name for name in meanings if name in known]
    return f"; did you mean '{known_meanings[0]}'?" if known_meanings else f"; other commands have '{meanings[0]}'"


def check_parsed_as_written(argument: str, key: str) -> None:
    """Raise a `UserError` unless Hydra reads an unquoted string as it is written.

    It reads 2024_11_24 as the number 20241124, `a ` without the space, and `a\\,b` without the backslash.
    """
    text = argument.partition("=")[2]
    override = parse_override(argument)
    if override is None or override.is_sweep_override() or text[:1] in ("'", '"'):
        return
    value = override.value()
    if isinstance(value, list) and not re.search("['\"{]", text):
        parsed_items = [*map(str, value)]
        items = [item.strip() for item in text.strip()[1:-1].split(",")]
        if parsed_items != items and any(items):
            raise UserError(
                f"{argument} would be read as [{', '.join(parsed_items)}]; quote it: {quote_setting(key, items)}"
            )
    elif isinstance(value, str | bool | int | float) and str(value) != text:
        raise UserError(f"{argument} would be read as {value}; quote it: {quote_setting(key, text)}")


def is_swept(argument: str) -> bool:
    """Return whether a setting of a sweep has more than one value."""
    override = parse_override(argument)
    return override is not None and override.is_sweep_override()


def parse_override(argument: str) -> Override | None:
    """Parse an argument with Hydra's grammar; None if it is invalid, which Hydra reports later."""
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def explain_hydra_error(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf as one line that begins with the argument or key it is about."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if choice in SWEEP_PLUGINS:
            return f"{group}={choice} needs a missing plug-in; install it with: {extra_command('sweep')}"
        return f"{group}={choice} is not one of {', '.join(error.options)}{suggest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        return explain_parse_error(error.override)
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
    reason = "expected a value" if "is not Optional" in lines[0] else lines[0]
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)=(.*)'$", reason):
        key, value = ambiguous.groups()
        return (
            f"{key}={value} contains a comma; use {quote_setting(key, value)} for one value with a comma, "
            f"{key}=[A,B] for a list, or add -m for one run per value"
        )
    expected = next((expected for pattern, expected in SHAPE_ERRORS if re.search(pattern, reason)), None)
    reason = expected or reason
    unknown = re.match(r"Key '(.*)' not in '\w+'", reason)
    schema = getattr(cause, "object_type", None)
    if unknown and dataclasses.is_dataclass(schema):
        names = [item.name for item in dataclasses.fields(schema)]
        reason = f"there is no key '{unknown[1]}', only {', '.join(names)}{suggest_key(unknown[1], names)}"
    if "INTERVAL_SWEEP" in reason:
        return "interval() needs hydra/sweeper=optuna; add it or list the values"
    if isinstance(cause, InterpolationResolutionError | GrammarParseError):
        reason += """; for a literal ${ write \\${ and quote the value: 'KEY="VALUE"'"""
    override = str(error).partition("Error merging override ")[2]
    full_key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    name = re.split(r"[=\[]", override or full_key)[0]
    if expected:
        examples = [example for key, example in SETTING_EXAMPLES.items() if f"{name}.".startswith(f"{key}.")]
        reason += f"; write it as {examples[0]}" if examples else ""
    return f"{override or full_key}: {reason}" if override or full_key else reason


def explain_parse_error(override: str) -> str:
    """Return one line about an argument that does not follow Hydra's grammar, and how to write it instead."""
    key, equals, value = override.partition("=")
    path = re.sub(r"(^|[\[,])~/", r"\1$HOME/", value)
    if path != value:
        needs_no_quotes = re.fullmatch(r"[\w./$,\[\]-]+", path, re.ASCII)
        setting = f"{key}={path}" if needs_no_quotes else quote_setting(key, os.path.expanduser(value))
        return f"{override} cannot be read because the shell did not expand ~; use {setting}"
    if value.startswith("[") and value.endswith(","):  # the shell split it at a space
        remedy = f"write a list without spaces or quote it as a whole: '{key}=[A, B]'"
    elif value.startswith("[") and value.endswith("]"):
        remedy = f"""quote items with special characters: '{key}=["ITEM","ITEM"]'"""
    elif equals:
        remedy = f"quote values with special characters: {quote_setting(key, value)}"
    else:
        remedy = "use key=value"
    return f"{override} cannot be read; {remedy}"


def list_key_types(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return the types of all keys of a schema by dotted name, including sections."""
    types = {}
    for item in dataclasses.fields(schema):
        types[prefix + item.name] = item.type
        if dataclasses.is_dataclass(item.type):
            types |= list_key_types(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return types


def list_config_groups(command: str) -> list[str]:
    """Return the config groups that a command line can choose from, such as `data` and `model`.

    Optional groups such as `data_model` are not among them: their files are chosen by the choices in other groups.
    """
    defaults = OmegaConf.load(CONFIG_DIR / f"{command}.yaml").defaults
    names = [str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry]
    return [name for name in names if not name.startswith(("override ", "optional "))]


def describe_os_error(error: OSError) -> str:
    """Return a message such as `runs/mine/train.log: No space left on device`."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def to_dataclasses(config: DictConfig) -> Any:
    """Convert a composed configuration to checked dataclasses.

    Raises:
        UserError: a value is not allowed; the message has the key, the value and the allowed values.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain_hydra_error(error)) from error


def build_settings(schema: type, values: dict[str, Any]) -> Any:
    """Build the checked dataclasses of a command from a dict of settings instead of a command line."""
    return to_dataclasses(build_config(schema, values))


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
