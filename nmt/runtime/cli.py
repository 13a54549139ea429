"""From a command line to checked dataclasses, by way of Hydra; whatever a user can mend is answered in one line."""

import contextlib
import dataclasses
import hashlib
import inspect
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from nmt.config import COMMANDS
from nmt.errors import UserError, nearest, printable, told_by_another
from nmt.runtime.quoting import from_yaml, literal, pasted, quoted, setting
from nmt.runtime.streams import use_utf8

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
FOLDERS = ("name", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")  # what Hydra makes a run's folder of
OWN = ("resume", "overwrite")  # of a command, and not of the settings that a file has
NAME_BYTES = 150  # of a run's name in a sweep; file systems allow 255
UNNAMED_KEY = "hydra.job.config.override_dirname.exclude_keys"
LARGEST = 2**22  # bytes of a file of settings
failures: list[str] = []  # messages of this command's jobs, in whatever process they ran
given: set[str] = set()  # dotted keys that the present job has been given, on the command line or in a file


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
                raise UserError(f"{argument}: settings are written without dashes: {pasted(f'{key}={value or word}')}")
            raise UserError(f"there is no option {name}; write key=value{meant(key, known)}")
        if equals and key in FOLDERS and "\\${" in value:
            raise UserError(f"{argument}: the name of a run's folder holds no ${{; give another one")
        if equals and (key in FOLDERS or keys.get(key) in TEXTS or keys.get(key) == list[str]) and key not in OWN:
            check_read_as_written(argument, key)
        if not equals or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known:
            raise UserError(f"there is no key '{key}'{meant(key, known)}; --help lists them all")
        if argument.startswith("+"):
            raise UserError(f"{argument}: every key exists already, so no + is needed: {pasted(f'{key}={value}')}")
        if {"-m", "--multirun"} & set(arguments) and key in UNNAMED and several(argument):
            raise UserError(f"{argument}: runs of a sweep have no names by {key}; give a command and a name= to each")
        if key in groups and "null" in value.split(","):
            raise UserError(f"{argument}: write {key}=CHOICE, or leave {key} out; --help lists the choices")
        if key not in groups and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set the keys in it, as {key}.KEY=VALUE")
        if not value and key not in groups:  # an unset variable of the shell
            raise UserError(f"{argument}: a value is needed; leave {key} out, or write {key}=VALUE")


def meant(key: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for what another toolkit calls so, or for the key that is spelled most like it."""
    leaf = key.rpartition(".")[2].replace("-", "_").lower()
    names = SYNONYMS.get(leaf, [])
    if not names or any(name.rpartition(".")[2] == leaf for name in known):
        return nearest(key, known)
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
    found = parsed(argument)
    if found is None or found.is_sweep_override() or written[:1] in ("'", '"'):
        return
    value = found.value()
    if isinstance(value, list) and not re.search("['\"{]", written):
        taken, texts = [*map(str, value)], [item.strip() for item in written.strip()[1:-1].split(",")]
        if taken != texts and any(texts):
            raise UserError(f"{argument} would be taken for [{', '.join(taken)}]; quote it: {setting(key, texts)}")
    elif isinstance(value, str | bool | int | float) and str(value) != written:
        raise UserError(f"{argument} would be taken for {value}; quote it: {setting(key, written)}")


def several(argument: str) -> bool:
    """Whether a setting of a sweep has more than one value."""
    return (found := parsed(argument)) is not None and found.is_sweep_override()


def parsed(argument: str) -> Override | None:
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
        return f"{group}={choice} is not one of {', '.join(error.options)}{nearest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if (path := re.sub(r"(^|[\[,])~/", r"\1$HOME/", value)) != value:
            plain = re.fullmatch(r"[\w./$,\[\]-]+", path, re.ASCII)
            written = f"{key}={path}" if plain else setting(key, os.path.expanduser(value))
            return f"{error.override} cannot be read: the shell left ~ as it is; write {written}"
        remedy = f"quote a value that has signs in it: {setting(key, value)}" if equals else "write key=value"
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
            f"{key}={value} has a comma: one value with a comma in it is written {setting(key, value)}, a list "
            f"{key}=[A,B], and a run for each value wants -m"
        )
    needed = next((needed for pattern, needed in SHAPES if re.search(pattern, complaint)), None)
    complaint = needed or complaint
    if (unknown := re.match(r"Key '(.*)' not in '\w+'", complaint)) and dataclasses.is_dataclass(
        kind := getattr(cause, "object_type", None)
    ):
        names = [item.name for item in dataclasses.fields(kind)]
        complaint = f"there is no key '{unknown[1]}' but {', '.join(names)}{meant(unknown[1], names)}"
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


def keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """The types of all keys of a schema, by dotted name, sections included."""
    types = {}
    for item in dataclasses.fields(schema):
        types[prefix + item.name] = item.type
        if dataclasses.is_dataclass(item.type):
            types |= keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return types


def groups(command: str) -> list[str]:
    """The groups that the command's file lists among its defaults, as `data` and `model`."""
    defaults = OmegaConf.load(CONFIGS / f"{command}.yaml").defaults
    names = [str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry]
    return [name for name in names if not name.startswith("override ")]


def meanings(schema: type, prefix: str = "") -> dict[str, str]:
    """The comment beside each key of a schema, by dotted name."""
    lines = re.findall(r"^ {4}(\w+): .*?  # (.*)", inspect.getsource(schema), re.MULTILINE)
    comments = {prefix + name: comment for name, comment in lines}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(item.type):
            comments |= meanings(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return comments


@contextlib.contextmanager
def explained(schema: type) -> Iterator[None]:
    """Add to each key on the help page, which Hydra prints as YAML, what it means."""
    page = io.StringIO()
    try:
        with contextlib.redirect_stdout(page):
            yield
    finally:  # Hydra leaves by SystemExit
        comments, path = meanings(schema), [""]
        for line in page.getvalue().splitlines():
            key = re.fullmatch(r"((?:  )*)(\w+):.*", line)
            path = [*path[: len(key[1]) // 2], key[2]] if key else path
            comment = comments.get(".".join(path)) if key else None
            print(printable(f"{line:<31} # {comment}" if comment else line))


def trouble(error: OSError) -> str:
    """What the system could not do, as `runs/mine/train.log: No space left on device`."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def checked(config: DictConfig) -> Any:
    """The checked dataclasses of a composed configuration.

    Raises:
        UserError: naming the key, its value, and what it may be.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error


def settled(schema: type, given: dict[str, Any]) -> Any:
    """The checked dataclasses of a command with these settings, which need not come from a command line.

    Raises:
        UserError: as `checked`.
    """
    return checked(composed(schema, given))


def composed(schema: type, given: dict[str, Any]) -> DictConfig:
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


# ------------------------------------------------------------------------------------------------- settings in a file
def read_settings(argument: str, schema: type, groups: list[str]) -> tuple[str, dict[str, Any]]:
    """The path of `config=FILE`, and the settings in the file by dotted key.

    Raises:
        UserError: there is no such file, it is no YAML, or a key or a value of it is none of this command.
    """
    override = parsed(argument)
    if override is None or override.is_sweep_override() or not isinstance(path := override.value(), str):
        remedy = setting("config", argument.partition("=")[2])
        raise UserError(f"{argument}: config= takes one file; quote a name that has signs in it: {remedy}")
    if os.path.isdir(path):
        raise UserError(
            f"{argument} is a folder; give the file: {setting('config', os.path.join(path, 'config.yaml'))}"
        )
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"it has more than {LARGEST:,} bytes")
        tree = from_yaml(content.decode())
    except OSError as error:
        raise UserError(f"config={trouble(error)}") from None
    except UserError as error:
        raise UserError(f"config={path}: {error}") from None
    except Exception as error:  # YAML's own errors and those of types that it makes have no common base
        reason = " ".join((str(error) or repr(error)).split())
        raise UserError(f"config={path} is not YAML: {reason[:200]}") from None
    known = keys(schema)
    found: dict[str, Any] = {}

    def collect(tree: Any, prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in groups and not isinstance(value, dict):
                raise UserError(
                    f"config={path}: {key}: {value} is a choice for the command line; write the keys of {key}"
                )
            if key not in known:
                raise UserError(f"config={path}: there is no key '{key}'{nearest(key, known)}; --help lists them all")
            if not dataclasses.is_dataclass(known[key]):
                found[key] = value
            elif isinstance(value, dict):
                collect(value, f"{key}.")
            elif value is not None:
                raise UserError(f"config={path}: {key} is a section; write its keys below it")

    if not isinstance(tree, dict):
        raise UserError(f"config={path} holds no settings: a line for each is KEY: VALUE")
    collect(tree, "")
    config = OmegaConf.structured(schema)
    try:
        for key, value in found.items():
            OmegaConf.update(config, key, literal(value), merge=False)
    except OmegaConfBaseException as error:
        raise UserError(f"config={path}: {explain(error)}") from None
    return path, found


def with_file(arguments: list[str], schema: type, groups: list[str]) -> tuple[list[str], dict[str, Any]]:
    """A command line without `config=FILE`, and the settings of the file; what Hydra has to know of them before a job
    begins, which is the name of a run and what kind of corpus is the default, in the place of it.

    Raises:
        UserError: as `read_settings`; or the command line chooses one of the groups, too.
    """
    places = [place for place, argument in enumerate(arguments) if argument.startswith("config=")]
    if not places:
        return arguments, {}
    if len(places) > 1:
        raise UserError(f"{arguments[places[1]]}: config= is there already; give one file")
    [place] = places
    path, found = read_settings(arguments[place], schema, groups)
    written = {argument.partition("=")[0] for argument in arguments}
    if both := sorted(written & set(groups)):
        raise UserError(
            f"{both[0]}= and config={path} both say what many keys are; leave out {both[0]}=, and write single keys, "
            "which win over those of the file"
        )
    for key in OWN:
        if (value := found.pop(key, None)) not in (None, False, "false"):
            logging.getLogger("nmt").warning(f"{path}: {key}: {value} is not taken over; write {key}= yourself")
    early = []
    if "data" in groups and (CONFIGS / "data" / f"{found.get('data.format')}.yaml").is_file():
        early.append(f"data={found['data.format']}")
    if isinstance(found.get("name"), str) and not written & {"name", "hydra.run.dir"}:
        early.append(f"name={quoted(found['name'])}")
    return [*arguments[:place], *early, *arguments[place + 1 :]], found


def take(settings: dict[str, Any], config: DictConfig, written: set[str]) -> None:
    """Set what a file has, but for keys that are `written` on the command line."""
    for key, value in settings.items():
        if not any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in written):
            OmegaConf.update(config, key, literal(value), merge=False)


# ------------------------------------------------------------------------------------------------------ names of runs
def run_name(overrides: list[str], unnamed: list[str]) -> str:
    """The folder of a job of a sweep: `key=value,key=value` of what is swept, in letters that every system allows.
    Where that is too long, keys go by the least of their ends that tells them apart. Where something is left out or
    replaced, a digest of all is at the end, so that other settings have other names."""
    swept = [found for found in map(parsed, sorted(overrides)) if found and found.key_or_group not in unnamed]
    keys = [found.key_or_group for found in swept]
    values = [in_name(found.value()) for found in swept]
    exact = values == [text_of(found.value()) for found in swept if not isinstance(found.value(), list | dict)]
    name = ",".join(map("=".join, zip(keys, values, strict=True)))
    if len(name) > NAME_BYTES:
        name = ",".join(f"{shortest(key, keys)}={value}" for key, value in zip(keys, values, strict=True))
    if exact and len(name) <= NAME_BYTES:
        return name
    digest = hashlib.sha256(",".join(str(found.input_line) for found in swept).encode()).hexdigest()
    return f"{name[: NAME_BYTES - 9].rstrip(',')}-{digest[:8]}"


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}-{text_of(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "+".join(map(text_of, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def in_name(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", text_of(value), flags=re.ASCII)[:40]


def shortest(key: str, others: Iterable[str]) -> str:
    """The last parts of a dotted key, as many as tell it apart from the others."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in others) == 1:
            return end
    return key


def named_by_what_varies(arguments: list[str]) -> list[str]:
    """The command line of a sweep, with what is the same in all its jobs left out of their names; as it is where no
    setting of it has several values, as in a search."""
    settings = [place for place, argument in enumerate(arguments) if not argument.startswith("-")]
    same = [arguments[place].partition("=")[0].lstrip("+~") for place in settings if not several(arguments[place])]
    if not {"-m", "--multirun"} & set(arguments) or len(same) == len(settings) or UNNAMED_KEY in same:
        return arguments
    last = settings[-1] + 1  # settings are one row
    return [*arguments[:last], f"{UNNAMED_KEY}=[{','.join([*UNNAMED, *same])}]", *arguments[last:]]


OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def fail(message: str, own: bool = False) -> None:
    """Report a failure. Of the processes of a job the first does so, but for what is another one's `own`."""
    number = int(os.environ.get("RANK", "0"))
    if number and not own:
        told_by_another()
    failures.append(message)
    with contextlib.suppress(OSError):  # nobody reads
        print(f"error: {f'process {number}: ' if number else ''}{printable(message)}", file=sys.stderr, flush=True)


class Failure:
    """What a failed job returns: no number, by which a search knows it (over NaN Optuna's plug-in stumbles). One from
    another process is reported by the first process when it comes there, which is when it is unpickled."""

    def __init__(self, message: str, report: bool = True, own: bool = False) -> None:
        self.message = message
        if report:
            fail(message, own)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Failure, (self.message,)


def show_search() -> None:
    """Show what Optuna's plug-in says, its results above all; failed jobs, of which it warns, are reported already."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno < logging.WARNING)
    log = logging.getLogger("hydra_plugins.hydra_optuna_sweeper")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def come_again(number: int) -> None:
    """Send this process a signal a little later, which came when it could not end it."""
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def open_streams() -> None:
    """Open the null device for standard streams that were closed when Python started, as by `2>&-`. Otherwise the next
    file would get such a number, and what libraries report would be written into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  until the end


def flush_streams(code: Any) -> Any:
    """Write out what was printed. Returns the exit code, 1 where that cannot be done."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else Python complains once more
            if stream is sys.stdout:
                code = code or 1
                if not isinstance(error, BrokenPipeError):
                    fail(f"standard output: {error.strerror}")
    return code


def remove_empty(folder: Path) -> None:
    """Take back the run's folder, which Hydra makes before the checks, unless there is something in it."""
    with contextlib.suppress(OSError):  # not empty, or another rank was here first
        while folder.is_relative_to(Path.cwd()) and folder != Path.cwd():
            folder.rmdir()
            folder = folder.parent


def program(command: str, schema: type) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of checked dataclasses into a command-line program, configured by `configs/<command>.yaml`.

    Whatever the user can mend ends the program with its message alone and exit code 1. In a sweep (`-m`) a failing job
    is reported so, wherever it runs, the others still run, and the exit code is 1 at the end.
    """

    def decorate(function: Callable[[Any], float | None]) -> Callable[[], None]:
        ended: list[int] = []  # signals
        inside = False  # the job, where an unforeseen exception is a bug of ours; outside it is about the command line
        first = 0  # process, of the command; a launcher may run a job in another one, with copies of all this
        settings: dict[str, Any] = {}  # of config=FILE

        def end(number: int, _: object) -> None:
            if isinstance(sys.exception(), UserError):
                come_again(number)
                return  # the message first
            ended.append(number)
            sys.exit(128 + number)  # on the way out what is half done is cleared away

        def lost(what: "sys.UnraisableHookArgs") -> None:
            if isinstance(what.exc_value, SystemExit) and ended:
                come_again(ended.pop())  # Python drops what is raised in a destructor
            elif isinstance(what.exc_value, KeyboardInterrupt):
                come_again(signal.SIGINT)
            else:
                sys.__unraisablehook__(what)

        def job(config: DictConfig) -> float | Failure | None:
            nonlocal inside
            inside = True
            overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            written = {argument.lstrip("+~").partition("=")[0] for argument in overrides}
            take(settings, config, written - set(groups(command)))
            given.clear()
            given.update(written, settings)
            try:
                score: float | Failure | None = function(checked(config))
            except Exception as error:
                late = type(error).__module__.startswith("submitit.")  # the cluster's time for the job is up
                if not late and not isinstance(error, UserError | OSError | MemoryError):
                    if os.getpid() != first:  # from where an exception comes without its traceback
                        error.add_note(traceback.format_exc())
                    raise
                if ended:  # a library has made another error of the exit
                    sys.exit(128 + ended[0])
                message = trouble(error) if isinstance(error, OSError) else str(error)
                if isinstance(error, MemoryError):
                    message = f"out of memory; give less text at a time ({message or 'no details'})"
                remove_empty(Path(HydraConfig.get().runtime.output_dir))
                score = Failure(message, report=os.getpid() == first, own=getattr(error, "own", False))
            inside = False
            return score

        def run() -> None:
            open_streams()
            try:
                work()
                code: Any = 0
            except SystemExit as error:
                code = error.code
            code = flush_streams(code)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Where processes were joined, threads of gloo now and then abort one that ends as usual, with all done.
                os._exit(code or 0)
            if code:
                sys.exit(code)

        def work() -> None:
            nonlocal first, settings
            use_utf8()
            first = os.getpid()
            failures.clear()  # of an earlier call
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing in its own way
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            ConfigStore.instance().store(name=f"{command}_schema", node=schema)
            show_search()
            signal.signal(signal.SIGTERM, end)
            sys.unraisablehook = lost
            try:
                known, choices = keys(schema) | {"config": str}, groups(command)
                check_command_line(sys.argv[1:], known, choices)
                arguments, settings = with_file(sys.argv[1:], schema, choices)
                check_command_line(arguments, known, choices)
                sys.argv[1:] = named_by_what_varies(arguments)
                with explained(schema) if {"-h", "--help"} & set(sys.argv) else contextlib.nullcontext():
                    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=command)(job)()
            except KeyboardInterrupt:
                fail("interrupted")
                sys.exit(130)
            except Exception as error:
                if ended:
                    sys.exit(128 + ended[0])
                if inside or hasattr(error, "__notes__"):
                    raise
                if isinstance(error, OSError) and not isinstance(error, HydraException):
                    error.filename = error.filename or "standard output"
                    fail(trouble(error))
                else:
                    fail(str(error) if isinstance(error, UserError) else explain(error))
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to be cleared away
                sys.unraisablehook = sys.__unraisablehook__
            if failures:
                sys.exit(1)

        return run

    return decorate


def main(command: str) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of a command's checked dataclasses into a program: `@main("train")`."""
    return program(command, COMMANDS[command])
