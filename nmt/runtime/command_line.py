"""Check a command line before Hydra sees it, and explain in one line what Hydra complains of."""

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

from nmt.errors import UserError, suggest
from nmt.runtime.quoting import literal, quote_setting, shell_quoted

HERE = Path(__file__).resolve().parent.parent
CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"  # a wheel carries them inside
FLAGS = (
    *("-h", "--help", "--hydra-help", "--version", "-m", "--multirun", "-c", "--cfg", "-p", "--package"),
    *("-i", "--info", "-cd", "--config-dir", "-sc", "--shell-completion"),
)
UNNAMED = ("name", "resume", "overwrite", "device", "data.path", "data.cache", "sweep")  # left out of a sweep's names
PLUGINS = ("joblib", "submitit_local", "submitit_slurm", "optuna")  # choices that the extra `sweep` brings
TEXTS = (str, str | None, Any)  # types of keys whose values may be texts that look like numbers
MEANT_BY = {  # keys, the first that the command has is meant, and what other toolkits call them
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
SYNONYMS = {name: keys.split() for keys, names in MEANT_BY.items() for name in names.split()}
EXAMPLES = {  # of keys whose values are lists or tables
    "data.corpora": "'data.corpora=[{path:FOLDER}]'",
    "compare": "'compare=[runs/A,runs/B]'",
    "by_pairs": "'by_pairs={optim.lr: {0: 0.001, 60000: 0.002}}'",
}
SHAPES = (  # what OmegaConf says of a value of the wrong shape, and what is needed
    (r"is not a ListConfig", "a list is needed here"),
    (r"Cannot merge \w+ with \w+", "keys with values are given where a list is needed, or a list where keys are"),
    (r"is not a subclass of CorpusConfig", "a corpus is needed here, with its path"),
    (
        r"is not a subclass of \w+Config|Cannot merge ListConfig with DictConfig",
        "keys with their values are needed here",
    ),
    (
        r"Cannot assign \w+ to Dict|is incompatible with",
        "keys are needed here, each with its values by numbers of pairs",
    ),
    (r"Cannot convert '(?:list|ListConfig)' to string", "one value is needed here, not a list"),
    (r"Cannot convert '(?:dict|DictConfig)' to string", "one value is needed here, not several by name"),
)
FOLDER_KEYS = ("name", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")  # what Hydra makes a run's folder of
COMMAND_ONLY = ("resume", "overwrite")  # of a command, and not of the settings that a file has


def check_command_line(arguments: list[str], keys: dict[str, Any], groups: list[str]) -> None:
    """Answer the usual slips (`--key value`, `+key=value`, an unknown key) better than Hydra would.

    Args:
        arguments: the command line.
        keys: the types of all keys by dotted name, sections among them.
        groups: names that take one of several files, as model=luong.

    Raises:
        UserError: naming the argument and what to write instead.
    """
    known = [*keys, *groups]
    settings = ["=" in argument and not argument.startswith("-") for argument in arguments]
    if "${" in os.getcwd():
        raise UserError(f"{os.getcwd()} is taken for an interpolation because of its ${{: run this in another folder")
    for place, argument in enumerate(arguments):
        if not encodable(argument):
            raise UserError(f"{argument!a} is not UTF-8: rename what it names, or make a link to it")
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+~")
        if argument.startswith("-"):
            if name in FLAGS:
                if any(settings[:place]) and any(settings[place + 1 :]):  # its parser takes settings in one row only
                    raise UserError(f"{argument} stands between settings; write it before them")
                continue
            if key in known:
                word = "VALUE"
                raise UserError(
                    f"{argument}: settings are written without dashes: {shell_quoted(f'{key}={value or word}')}"
                )
            raise UserError(f"there is no option {name}; write key=value{did_you_mean(key, known)}")
        if equals and key in FOLDER_KEYS and "\\${" in value:
            raise UserError(f"{argument}: the name of a run's folder holds no ${{; give another one")
        if (
            equals
            and (key in FOLDER_KEYS or keys.get(key) in TEXTS or keys.get(key) == list[str])
            and key not in COMMAND_ONLY
        ):
            check_read_as_written(argument, key)
        if not equals or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known:
            raise UserError(f"there is no key '{key}'{did_you_mean(key, known)}; --help lists them all")
        if argument.startswith("+"):
            raise UserError(
                f"{argument}: every key exists already, so no + is needed: {shell_quoted(f'{key}={value}')}"
            )
        if {"-m", "--multirun"} & set(arguments) and key in UNNAMED and is_swept(argument):
            raise UserError(f"{argument}: runs of a sweep have no names by {key}; give a command and a name= to each")
        if key in groups and "null" in value.split(","):
            raise UserError(f"{argument}: write {key}=CHOICE, or leave {key} out; --help lists the choices")
        if key not in groups and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set the keys in it, as {key}.KEY=VALUE")
        if not value and key not in groups:  # an unset variable of the shell
            raise UserError(f"{argument}: a value is needed; leave {key} out, or write {key}=VALUE")


def did_you_mean(key: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for what another toolkit calls so, or for the key that is spelled most like it."""
    leaf = key.rpartition(".")[2].replace("-", "_").lower()
    names = SYNONYMS.get(leaf, [])
    if not names or any(name.rpartition(".")[2] == leaf for name in known):
        return suggest(key, known)
    there = [name for name in names if name in known]
    return f"; did you mean '{there[0]}'?" if there else f"; other commands have '{names[0]}'"


def encodable(text: str) -> bool:
    """Whether it can be written as UTF-8; bytes of a command line that cannot be read so are halves of surrogates."""
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


def check_read_as_written(argument: str, key: str) -> None:
    """Refuse a text of which Hydra would make another one because it is not quoted: of 2024_11_24 the number 20241124,
    of `a ` and `a\\,b` what is without the space and the backslash.

    Raises:
        UserError: it has to be quoted.
    """
    written = argument.partition("=")[2]
    found = parse_override(argument)
    if found is None or found.is_sweep_override() or written[:1] in ("'", '"'):
        return
    value = found.value()
    if isinstance(value, list) and not re.search("['\"{]", written):
        taken, texts = [*map(str, value)], [item.strip() for item in written.strip()[1:-1].split(",")]
        if taken != texts and any(texts):
            raise UserError(
                f"{argument} would be taken for [{', '.join(taken)}]; quote it: {quote_setting(key, texts)}"
            )
    elif isinstance(value, str | bool | int | float) and str(value) != written:
        raise UserError(f"{argument} would be taken for {value}; quote it: {quote_setting(key, written)}")


def is_swept(argument: str) -> bool:
    """Whether a setting of a sweep has more than one value."""
    return (found := parse_override(argument)) is not None and found.is_sweep_override()


def parse_override(argument: str) -> Override | None:
    """As Hydra reads it; None of what cannot be read, of which Hydra complains."""
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def explain(error: Exception) -> str:
    """A complaint of Hydra or OmegaConf in one line, beginning with the argument or key that it is about."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if choice in PLUGINS:
            return f"{group}={choice} is a plug-in that is not installed: in the checkout, pip install '.[sweep]'"
        return f"{group}={choice} is not one of {', '.join(error.options)}{suggest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if (path := re.sub(r"(^|[\[,])~/", r"\1$HOME/", value)) != value:
            plain = re.fullmatch(r"[\w./$,\[\]-]+", path, re.ASCII)
            written = f"{key}={path}" if plain else quote_setting(key, os.path.expanduser(value))
            return f"{error.override} cannot be read: the shell left ~ as it is; write {written}"
        remedy = f"quote a value that has signs in it: {quote_setting(key, value)}" if equals else "write key=value"
        if value.startswith("[") and value.endswith(","):  # the shell has divided it
            remedy = f"a list has no spaces, or is quoted as a whole: '{key}=[A, B]'"
        elif value.startswith("[") and value.endswith("]"):
            remedy = f"""quote each item that has signs in it: '{key}=["ITEM","ITEM"]'"""
        return f"{error.override} cannot be read; {remedy}"
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
    complaint = "a value is needed here" if "is not Optional" in lines[0] else lines[0]
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)=(.*)'$", complaint):
        key, value = ambiguous.groups()
        return (
            f"{key}={value} has a comma: one value with a comma in it is written {quote_setting(key, value)}, a list "
            f"{key}=[A,B], and a run for each value wants -m"
        )
    needed = next((needed for pattern, needed in SHAPES if re.search(pattern, complaint)), None)
    complaint = needed or complaint
    if (unknown := re.match(r"Key '(.*)' not in '\w+'", complaint)) and dataclasses.is_dataclass(
        kind := getattr(cause, "object_type", None)
    ):
        names = [item.name for item in dataclasses.fields(kind)]
        complaint = f"there is no key '{unknown[1]}' but {', '.join(names)}{did_you_mean(unknown[1], names)}"
    if "INTERVAL_SWEEP" in complaint:
        return "interval() is for a search: write hydra/sweeper=optuna too, or list the values"
    if isinstance(cause, InterpolationResolutionError | GrammarParseError):
        complaint += """; where ${ is meant as it is, write \\${ and quote the value: 'KEY="VALUE"'"""
    override = str(error).partition("Error merging override ")[2]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    name = re.split(r"[=\[]", override or key)[0]
    if needed and (example := next((EXAMPLES[key] for key in EXAMPLES if f"{name}.".startswith(f"{key}.")), "")):
        complaint += f"; write it as {example}"
    return f"{override or key}: {complaint}" if override or key else complaint


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """The types of all keys of a schema, by dotted name, sections included."""
    types = {}
    for item in dataclasses.fields(schema):
        types[prefix + item.name] = item.type
        if dataclasses.is_dataclass(item.type):
            types |= schema_keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return types


def config_groups(command: str) -> list[str]:
    """The groups that the command's file lists among its defaults, as `data` and `model`."""
    defaults = OmegaConf.load(CONFIGS / f"{command}.yaml").defaults
    names = [str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry]
    return [name for name in names if not name.startswith("override ")]


def describe_os_error(error: OSError) -> str:
    """What the system could not do, as `runs/mine/train.log: No space left on device`."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def to_dataclasses(config: DictConfig) -> Any:
    """The checked dataclasses of a composed configuration.

    Raises:
        UserError: naming the key, its value, and what it may be.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error


def build_settings(schema: type, given: dict[str, Any]) -> Any:
    """The checked dataclasses of a command with these settings, which need not come from a command line.

    Raises:
        UserError: as `to_dataclasses`.
    """
    return to_dataclasses(build_config(schema, given))


def build_config(schema: type, given: dict[str, Any]) -> DictConfig:
    """The same as a configuration of OmegaConf, in which texts are as they are given, whatever is in them.

    Raises:
        UserError: there is no such key, or its value is of another type.
    """
    config = OmegaConf.structured(schema)
    try:
        config.merge_with(literal(given))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    return config
