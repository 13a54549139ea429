"""From a command line to checked dataclasses, by way of Hydra; whatever a user can mend is answered in one line."""

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.errors import UserError, nearest, printable, told_by_another

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"  # a wheel carries them inside
FLAGS = (
    *("-h", "--help", "--hydra-help", "--version", "-m", "--multirun", "-c", "--cfg", "-p", "--package"),
    *("-i", "--info", "-cd", "--config-dir", "-sc", "--shell-completion"),
)
UNNAMED = ("name", "resume", "overwrite", "device", "data.path", "data.cache", "sweep")  # left out of a sweep's names
PLUGINS = ("joblib", "submitit_local", "submitit_slurm", "optuna")  # choices that the extra `sweep` brings
TEXTS = (str, str | None, Any)  # types of keys whose values may be texts that look like numbers
SYNONYMS = {  # last parts of keys of other toolkits, and what is meant here, in the order of what a command may have
    **dict.fromkeys(("learning_rate", "base_lr", "init_lr"), ("optim.lr",)),
    **dict.fromkeys(("optimizer", "optimiser", "optim_name"), ("optim.name",)),
    **dict.fromkeys(("lr_scheduler", "lr_schedule", "scheduler", "decay_method"), ("optim.schedule",)),
    **dict.fromkeys(("warmup_steps", "warmup_updates", "warmup_ratio"), ("optim.warmup",)),
    **dict.fromkeys(("clip_norm", "max_grad_norm", "grad_clip", "clip_grad_norm"), ("optim.clip",)),
    **dict.fromkeys(("smoothing", "label_smooth"), ("optim.label_smoothing",)),
    **dict.fromkeys(("batch_size", "minibatch_size"), ("train.batch_sentences", "search.batch_sentences")),
    **dict.fromkeys(("max_tokens", "batch_token", "tokens_per_batch"), ("train.batch_tokens", "search.batch_tokens")),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "num_train_epochs", "max_epoch"), ("train.max_epochs",)),
    **dict.fromkeys(("steps", "num_steps", "train_steps", "max_update", "max_updates"), ("train.max_steps",)),
    **dict.fromkeys(("accum_count", "update_freq", "gradient_accumulation_steps", "grad_accum"), ("train.accumulate",)),
    **dict.fromkeys(("valid_steps", "eval_steps", "valid_freq", "eval_every", "val_every"), ("train.validate_every",)),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "save_checkpoint_steps"), ("train.save_every",)),
    **dict.fromkeys(("log_interval", "report_every", "logging_steps", "disp_freq"), ("train.log_every",)),
    **dict.fromkeys(("early_stopping", "early_stop", "early_stopping_patience"), ("train.patience",)),
    **dict.fromkeys(("metric", "eval_metric", "early_stopping_metric", "bleu"), ("train.monitor",)),
    **dict.fromkeys(("keep_checkpoint", "keep_last", "save_total_limit"), ("train.keep",)),
    **dict.fromkeys(("hidden_size", "hidden_dim", "rnn_size", "hid_dim", "dim", "d_model"), ("model.hidden",)),
    **dict.fromkeys(
        ("emb_dim", "emb_size", "embed_dim", "embedding_dim", "embedding_size", "word_vec_size"), ("model.embed",)
    ),
    **dict.fromkeys(("n_layers", "num_layers", "layers", "enc_layers", "n_enc_layers"), ("model.encoder_layers",)),
    **dict.fromkeys(("dec_layers", "n_dec_layers", "num_decoder_layers"), ("model.decoder_layers",)),
    **dict.fromkeys(("dropout_rate", "dropout_prob", "drop_prob", "p_dropout"), ("model.dropout",)),
    **dict.fromkeys(("rnn_type", "cell_type", "rnn"), ("model.cell",)),
    **dict.fromkeys(("tie_embeddings", "tied_embeddings", "share_embeddings", "share_all_embeddings"), ("model.tie",)),
    **dict.fromkeys(("attention_type", "global_attention", "attn", "attn_type"), ("model.attention.score",)),
    **dict.fromkeys(("n_heads", "num_heads"), ("model.attention.heads",)),
    **dict.fromkeys(("beam_size", "num_beams", "beam_width"), ("search.beam",)),
    **dict.fromkeys(("nbest", "num_return_sequences"), ("search.n_best",)),
    **dict.fromkeys(("alpha", "lenpen", "len_pen"), ("search.length_penalty",)),
    **dict.fromkeys(("vocab", "n_vocab", "src_vocab_size", "num_merges", "bpe_size"), ("tokenizer.vocab_size",)),
    **dict.fromkeys(("share_vocab", "joined_dictionary", "joint_vocab"), ("tokenizer.joint",)),
    **dict.fromkeys(("bpe_dropout", "subword_sampling"), ("tokenizer.sampling",)),
    **dict.fromkeys(("src", "src_lang", "source_lang", "train_src"), ("data.source", "input", "source")),
    **dict.fromkeys(("tgt", "trg", "tgt_lang", "target_lang", "train_tgt", "ref"), ("data.target", "target")),
    **dict.fromkeys(("data_dir", "dataset", "train_file", "train_set", "corpus"), ("data.path", "input")),
    **dict.fromkeys(
        ("max_len", "max_seq_len", "max_length", "max_sent_length"), ("data.max_length", "search.max_length")
    ),
    **dict.fromkeys(("workers", "num_workers", "n_jobs"), ("data.num_proc",)),
    **dict.fromkeys(("save_dir", "output_dir", "model_dir", "run_name", "exp_name", "save_model"), ("name", "output")),
    **dict.fromkeys(("model_path", "ckpt", "load", "load_model", "restore"), ("checkpoint", "init_from")),
    **dict.fromkeys(("pretrained", "finetune", "train_from", "from_pretrained"), ("init_from", "checkpoint")),
    **dict.fromkeys(("gpu", "gpus", "cuda", "use_cuda", "gpu_id", "devices"), ("device",)),
    **dict.fromkeys(("fp16", "bf16", "amp", "half", "mixed_precision", "dtype"), ("precision",)),
    **dict.fromkeys(("random_seed", "rng_seed", "manual_seed"), ("seed",)),
}
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
failures: list[str] = []  # messages of this command's jobs, in whatever process they ran


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
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+~")
        if argument.startswith("-"):
            if name in FLAGS:
                if any(settings[:place]) and any(settings[place + 1 :]):  # its parser takes settings in one row only
                    raise UserError(f"{argument} stands between settings; write it before them")
                continue
            if key in known:
                raise UserError(f"{argument}: settings are written without dashes: {key}={value or 'VALUE'}")
            raise UserError(f"there is no option {name}; write key=value{meant(key, known)}")
        if not equals or key.startswith(("hydra.", "hydra/")):
            continue
        if key not in known:
            raise UserError(f"there is no key '{key}'{meant(key, known)}; --help lists them all")
        if argument.startswith("+"):
            raise UserError(f"{argument}: every key exists already, so no + is needed: {key}={value}")
        if {"-m", "--multirun"} & set(arguments) and key in UNNAMED and several(argument):
            raise UserError(f"{argument}: runs of a sweep have no names by {key}; give a command and a name= to each")
        if key in groups and "null" in value.split(","):
            raise UserError(f"{argument}: write {key}=CHOICE, or leave {key} out; --help lists the choices")
        if key not in groups and any(other.startswith(f"{key}.") for other in keys):
            raise UserError(f"{argument}: {key} is a section; set the keys in it, as {key}.KEY=VALUE")
        if not value and key not in groups:  # an unset variable of the shell
            raise UserError(f"{argument}: a value is needed; leave {key} out, or write {key}=VALUE")
        if keys.get(key) in TEXTS and (taken := as_number(argument)) not in (None, value):
            raise UserError(f"""{argument} would be taken for {taken}; quote it: {quoted(key, value)}""")


def meant(key: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for what another toolkit calls so, or for the key that is spelled most like it."""
    leaf = key.rpartition(".")[2].replace("-", "_").lower()
    names = SYNONYMS.get(leaf, ())
    if not names or any(name.rpartition(".")[2] == leaf for name in known):
        return nearest(key, known)
    there = [name for name in names if name in known]
    return f"; did you mean '{there[0]}'?" if there else f"; other commands have '{names[0]}'"


def quoted(key: str, value: str) -> str:
    """A setting as a shell takes it, whose value Hydra takes as it stands."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return shlex.quote(f'{key}="{escaped}"')


def as_number(argument: str) -> str | None:
    """What Hydra makes of a value that looks like a number to it, as 20241124 of 2024_11_24; None of others."""
    value = None if (found := parsed(argument)) is None else found.value()
    return str(value) if type(value) in (int, float) else None


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
            return f"{error.override} cannot be read: the shell left ~ as it is; write {key}={path}"
        remedy = f"quote a value that has signs in it: {quoted(key, value)}" if equals else "write key=value"
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
            f"{key}={value} has a comma: one value with a comma in it is written {quoted(key, value)}, a list "
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
    config = OmegaConf.structured(schema)
    try:
        config.merge_with(given)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    return checked(config)


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
            try:
                score: float | Failure | None = function(checked(config))
            except Exception as error:
                late = type(error).__module__.startswith("submitit.")  # the cluster's time for the job is up
                if not late and not isinstance(error, UserError | OSError):
                    if os.getpid() != first:  # from where an exception comes without its traceback
                        error.add_note(traceback.format_exc())
                    raise
                if ended:  # a library has made another error of the exit
                    sys.exit(128 + ended[0])
                message = trouble(error) if isinstance(error, OSError) else str(error)
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
            nonlocal first
            first = os.getpid()
            failures.clear()  # of an earlier call
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing in its own way
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            ConfigStore.instance().store(name=f"{command}_schema", node=schema)
            show_search()
            signal.signal(signal.SIGTERM, end)
            sys.unraisablehook = lost
            try:
                check_command_line(sys.argv[1:], keys(schema), groups(command))
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
                if isinstance(error, OSError):
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
