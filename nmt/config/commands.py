"""Settings of each command, and those that a resumed run must keep."""

import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nmt.config.data import AugmentConfig, DataConfig, DataOverride, TokenizerConfig
from nmt.config.fields import setting
from nmt.config.model import ModelConfig
from nmt.config.prepare import PrepareRun
from nmt.config.search import LinksConfig, SearchConfig
from nmt.config.training import OptimConfig, TrainConfig
from nmt.errors import UserError, check_at_least, check_choices

SACREBLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
BLEU_TOKENIZERS = ("auto", *SACREBLEU_TOKENIZERS, "flores200", "flores101", "spm", "spBLEU-1K")
TRAINING_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp64")
PRECISIONS = (*TRAINING_PRECISIONS, "fp16", "int8")
# Sections and keys that a resumed run must not change.
IMMUTABLE_KEYS = {
    "data",
    "tokenizer",
    "augment",
    "model",
    "init_from",
    "new_tokenizer",
    "seed",
    "precision",
    "bleu_tokenizer",
    "optim.name",
    "train.batch_tokens",
    "train.batch_sentences",
    "train.monitor",
}
# Keys of these sections that it may change with a warning. All kernels compute the same, but round differently.
MUTABLE_KEYS = {"model.kernels"}
# Keys that do not affect results, so that a resumed run may change them without a warning. The text in data.path is
# compared by content.
NON_NUMERIC_KEYS = {
    "name",
    "resume",
    "data.path",
    "data.cache",
    "data.split",
    "train.log_every",
    "train.save_minutes",
    "train.keep",
}


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten a nested dict into (dotted key, value) pairs."""
    pairs = []
    for key, value in tree.items():
        pairs += flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def select_immutable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted key, that a resumed run must keep."""
    return {
        key: value
        for key, value in flatten_keys(settings)
        if {key, key.split(".")[0]} & IMMUTABLE_KEYS and key not in NON_NUMERIC_KEYS | MUTABLE_KEYS
    }


def check_checkpoint(checkpoint: str | list[str] | None) -> None:
    if not checkpoint or isinstance(checkpoint, list) and not all(checkpoint):
        raise UserError("checkpoint is not set; give a run: checkpoint=runs/NAME")


def check_single(checkpoint: Any) -> str:
    """Return the checkpoint of a command that reads one model."""
    if isinstance(checkpoint, list):
        raise UserError(f"checkpoint=[{','.join(map(str, checkpoint))}]: this command takes one model, not an ensemble")
    return str(checkpoint)


def check_port(port: int) -> None:
    if not 0 <= port < 65_536:
        raise UserError(f"port={port} must be at least 0 and below 65,536")


@dataclass
class ComputeSettings:
    """Settings of commands that compute with a model."""

    _: KW_ONLY
    device: str = setting("auto", "auto | cpu | cuda | cuda:N | mps")
    precision: str = setting("auto", "auto | fp32 | tf32 (GPU) | bf16 | fp64; not in training: fp16 | int8 (CPU)")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", self.device):
            raise UserError(f"device={self.device} is not one of auto, cpu, cuda, cuda:N, mps")
        check_choices("", self, precision=PRECISIONS)


@dataclass
class ModelSettings:
    """Settings of commands that read a model."""

    checkpoint: Any = setting(
        None, "run folder (best checkpoint, else the last) or step folder; translate: [A,B] is an ensemble"
    )
    _: KW_ONLY
    average: int = setting(1, "average the weights of the last N checkpoints that the run kept (train.keep)")

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check_at_least(1, "", self, "average")


@dataclass
class TrainRun(ComputeSettings):
    """Settings of `python -m nmt.train`."""

    name: str = setting("run", "name of the run; its folder is runs/<name>")
    seed: int = setting(1, "random seed for initial weights, dropout and data order")
    resume: str = setting("false", "if the run exists: false (refuse) | true (continue) | auto (continue or start)")
    init_from: str | None = setting(None, "start from the weights and tokenizer of another run")
    new_tokenizer: bool = setting(False, "init_from: train a tokenizer; embeddings of common pieces are kept")
    bleu_tokenizer: str = setting("auto", "BLEU tokenizer: auto (by writing system) | 13a | intl | zh | ja-mecab | ...")
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    by_pairs: dict[str, dict[int, Any] | None] = setting(
        dict, "KEY: {N: value for N or more training pairs} | null (off)"
    )

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        self.resume = self.resume.lower()
        check_choices("", self, resume=("false", "true", "auto"), bleu_tokenizer=BLEU_TOKENIZERS)
        check_at_least(0, "", self, "seed")
        if self.precision not in TRAINING_PRECISIONS:
            raise UserError(f"precision={self.precision} is for translation only; train with precision=auto")
        if "${" in self.name or not self.name.strip("./ "):
            raise UserError(f"name={self.name!r} is not a valid folder name; use name=NAME for the folder runs/NAME")
        if self.data.streaming and (self.train.max_steps is None or self.train.validate_every is None):
            raise UserError("data.streaming=true has no epochs; set train.max_steps=N and train.validate_every=N")
        if self.model.tie == "three" and not self.tokenizer.joint:
            raise UserError("model.tie=three needs one vocabulary; use model.tie=two or tokenizer.joint=true")
        if self.train.coverage_loss and not self.model.attention.coverage:
            loss = f"train.coverage_loss={self.train.coverage_loss}"
            raise UserError(f"{loss} needs a model with coverage; set model.attention.coverage=true as well")
        if self.augment.is_on and (self.data.streaming or self.train.guided_alignment):
            key = "data.streaming" if self.data.streaming else "train.guided_alignment"
            raise UserError(f"augment.* cannot be used with {key}; use '~augment', or remove {key}")
        if self.augment.literals and not self.tokenizer.literals:
            raise UserError(f"augment.literals={self.augment.literals} needs tokenizer.literals=16 as well, or more")
        if guided := self.train.guided_alignment:
            if self.model.attention.score == "none":
                raise UserError(f"train.guided_alignment={guided} needs attention, but model.attention.score=none")
            if self.data.format != "toy" and self.data.alignments is None:
                links = "gold links of the training text; use data=text data.alignments=EXTENSION"
                raise UserError(f"train.guided_alignment={guided} needs {links}")


@dataclass
class EvaluateRun(ComputeSettings, ModelSettings):
    """Settings of `python -m nmt.evaluate`."""

    compare: list[str] = setting(
        list, "[A,B,...]: compare these runs, or runs with several seeds (A/*); A is the baseline"
    )
    erase: bool = setting(False, "also measure how much probability target words lose when a source word is removed")
    bleu_tokenizer: str | None = setting(None, "BLEU tokenizer; auto: by writing system; null: same as the run")
    data: DataOverride = field(default_factory=DataOverride)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        check_checkpoint(self.checkpoint or self.compare)
        self.checkpoint = check_single(self.checkpoint) if self.checkpoint else None
        distinct_paths = {path for path in self.compare if isinstance(path, str)}
        if self.compare and (self.checkpoint or len(distinct_paths) < max(2, len(self.compare))):
            raise UserError("compare= takes two or more different runs, and no checkpoint=: 'compare=[runs/A,runs/B]'")
        check_at_least(1, "", self, "average")
        check_choices("", self, bleu_tokenizer=BLEU_TOKENIZERS)


@dataclass
class TranslateRun(ComputeSettings, ModelSettings):
    """Settings of `python -m nmt.translate`."""

    input: str = setting("-", "input file; -: standard input")
    output: str = setting("-", "output file; -: standard output")
    target: str | None = setting(None, "file of translations of the input to score instead; -: standard input")
    prefix: str | None = setting(None, "file with the first words of each translation; -: standard input")
    format: str = setting(
        "text", "text | jsonl | links (text, and below it the source word of each target word) | html (a document)"
    )
    alignments: str | None = setting(
        None, "file; .jsonl: all attention weights; any other name: links; -: standard output"
    )
    links: LinksConfig = field(default_factory=LinksConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        ModelSettings.__post_init__(self)
        self.checkpoint = [*map(str, self.checkpoint)] if isinstance(self.checkpoint, list) else [str(self.checkpoint)]
        check_choices("", self, format=("text", "jsonl", "links", "html"))
        if self.target and (self.format != "text" or self.alignments or self.prefix):
            raise UserError(f"target={self.target} gives scores of lines; remove format=, alignments= and prefix=")
        if self.format == "html" and (self.alignments or self.prefix or self.search.n_best > 1):
            raise UserError("format=html writes one document; remove alignments=, prefix= and search.n_best=")


@dataclass
class ServeRun(ComputeSettings, ModelSettings):
    """Settings of `python -m nmt.serve`."""

    checkpoint: Any = setting(None, "run or step folder; [A,B]: a model for each direction; [[A,B]]: ensemble")
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all, so that other machines can connect")
    port: int = setting(5000, "port to listen on; 0: any free one, which the log names")
    links: LinksConfig = field(default_factory=LinksConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        ModelSettings.__post_init__(self)
        models = self.checkpoint if isinstance(self.checkpoint, list) else [self.checkpoint]
        self.checkpoint = [[*map(str, model)] if isinstance(model, list) else [str(model)] for model in models]
        check_port(self.port)


@dataclass
class AlignRun(ComputeSettings):
    """Settings of `python -m nmt.align`."""

    checkpoint: str | None = setting(None, "run or step folder; null: train an aligner on the text itself")
    reverse_checkpoint: str | None = setting(None, "model of the opposite direction, whose links are combined")
    symmetrize: str | None = setting(None, "intersection | union | grow_diag_final_and (default)")
    source: str | None = setting(None, "file of source sentences; -: standard input; null: the corpus of data.*")
    target: str | None = setting(None, "file of their translations; null: the corpus of data.*")
    output: str = setting("-", "file; .jsonl: all weights; any other name: links; -: standard output")
    tokenize: bool = setting(False, "aligner: link words and punctuation marks, also where no space separates them")
    gold: str | None = setting(None, "file of gold links: i-j sure, ipj or i?j possible; null: those of the corpus")
    gold_base: int = setting(0, "index of the first word of a sentence in the gold file: 0 | 1")
    links: LinksConfig = field(default_factory=LinksConfig)
    data: DataOverride = field(default_factory=DataOverride)

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        if not self.checkpoint and not self.source and not self.target:
            raise UserError("checkpoint is not set; give source=FILE and target=FILE, or checkpoint=runs/NAME")
        if self.checkpoint and self.tokenize:
            raise UserError("tokenize=true is for an aligner; remove tokenize=true or checkpoint=")
        if self.reverse_checkpoint and not self.checkpoint:
            raise UserError("reverse_checkpoint= is for models with attention; give checkpoint=runs/NAME as well")
        if bool(self.source) != bool(self.target):
            raise UserError("source= and target= belong together; give both, or neither for the corpus of data.*")
        if self.source and self.data != DataOverride():
            raise UserError("source= and target= replace the corpus of data.*; remove data.*")
        if self.reverse_checkpoint and self.writes_all_weights:
            raise UserError(f"output={self.output} is for weights of one model; two give links: output=links.pharaoh")
        if self.gold_base not in (0, 1):
            raise UserError(f"gold_base={self.gold_base} is not one of 0, 1")
        check_choices("", self, symmetrize=("intersection", "union", "grow_diag_final_and"))

    @property
    def writes_all_weights(self) -> bool:
        """Whether `output` is a file of all weights, rather than of links."""
        return re.search(r"\.jsonl(\.gz|\.zst)?$", self.output) is not None


@dataclass
class ExportRun(ModelSettings):
    """Settings of `python -m nmt.export`."""

    output: str | None = setting(None, "FILE.html: a page that translates | hf://OWNER/NAME | a new folder")
    license: str | None = setting(None, "output=hf://OWNER/NAME: identifier of the license, such as cc-by-4.0")
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        self.checkpoint = check_single(self.checkpoint)
        if not self.output:
            raise UserError("output is not set; give output=FILE.html, output=FOLDER or output=hf://OWNER/NAME")


@dataclass(slots=True)
class WatchRun:
    """Settings of `python -m nmt.watch`."""

    checkpoint: str | None = setting(None, "run folder, or a folder that has runs, at any depth")
    port: int = setting(5001, "port to listen on, on this machine only; 0: any free one, which the log names")

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check_port(self.port)


COMMANDS: dict[str, type] = {
    "prepare": PrepareRun,
    "train": TrainRun,
    "evaluate": EvaluateRun,
    "translate": TranslateRun,
    "align": AlignRun,
    "export": ExportRun,
    "serve": ServeRun,
    "watch": WatchRun,
}
