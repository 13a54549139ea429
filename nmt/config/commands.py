"""Settings of each command, and which of them a resumed run must keep."""

import re
from dataclasses import dataclass, field, fields
from typing import Any

from nmt.config.data import DataConfig, DataOverride, TokenizerConfig
from nmt.config.model import ModelConfig
from nmt.config.search import LinksConfig, SearchConfig
from nmt.config.training import OptimConfig, TrainConfig
from nmt.errors import UserError, check_at_least, check_choice

BLEU_TOKENIZERS = (  # sacreBLEU's
    *("auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"),
    *("flores200", "flores101", "spm", "spBLEU-1K"),
)
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp64", "int8")
# What a resumed run does with settings that have changed: it refuses the first, and says nothing of the second.
IMMUTABLE = {  # sections and keys
    "data", "tokenizer", "model", "init_from", "seed", "precision", "bleu_tokenizer",
    "optim.name", "train.batch_tokens", "train.batch_sentences", "train.monitor",
}  # fmt: skip
NON_NUMERIC = {  # keys on which no number depends; the text of data.path is compared, wherever it is now
    "name", "resume", "overwrite", "data.path", "data.cache", "data.split", "data.num_proc", "data.invalid",
    "train.log_every", "train.save_every", "train.save_minutes", "train.keep", "train.max_skipped",
}  # fmt: skip


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """A nested dict as (dotted key, value) pairs. In the dicts of a list null is as good as nothing, so that a key that
    they get one day changes no run."""
    pairs = []
    for key, value in tree.items():
        if isinstance(value, list):
            value = [
                {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in value
            ]
        pairs += flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def immutable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's settings, by dotted key, that stay as long as the run goes on."""
    return {
        key: value
        for key, value in flatten_keys(settings)
        if {key, key.split(".")[0]} & IMMUTABLE and key not in NON_NUMERIC
    }


def check_hardware(device: str, precision: str) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", device):
        raise UserError(f"device={device} is not one of auto, cpu, cuda, cuda:N, mps")
    check_choice("precision", precision, PRECISIONS)


def check_checkpoint(checkpoint: str | list[str] | None, device: str, precision: str) -> None:
    check_hardware(device, precision)
    if not checkpoint or isinstance(checkpoint, list) and not all(checkpoint):
        raise UserError("checkpoint is not set; give a run: checkpoint=runs/NAME")


@dataclass(slots=True)
class TrainRun:
    """`python -m nmt.train`"""

    name: str = "run"  # the run's folder is runs/<name>
    seed: int = 1  # of initial weights, dropout and the order of the data
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    precision: str = "auto"  # auto | fp32 | tf32 (GPUs) | bf16 | fp16 | fp64
    resume: str = "false"  # a folder with a checkpoint: false (refuse) | true (continue) | auto (continue or start)
    overwrite: bool = False  # ... or throw it away and start anew, whatever resume=auto would do
    init_from: str | None = None  # start from the weights and the tokenizer of another run
    bleu_tokenizer: str = "auto"  # sacreBLEU's: 13a, intl, zh, ja-mecab, ko-mecab, char, flores200 ...; auto: by script
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    by_pairs: dict[str, dict[int, Any] | None] = field(default_factory=dict)  # KEY: null | {N: VALUE from N pairs on}

    def __post_init__(self) -> None:
        check_hardware(self.device, self.precision)
        if self.precision == "int8":
            raise UserError(
                "precision=int8 is for translating with a trained model; train in auto, fp32, tf32, bf16, fp16 or fp64"
            )
        check_at_least(0, "", self, "seed")
        check_choice("bleu_tokenizer", self.bleu_tokenizer, BLEU_TOKENIZERS)
        if "${" in self.name:
            raise UserError(f"name={self.name!r}: names of runs hold no interpolations (${{...}}); write name=NAME")
        if not self.name.strip("./ "):
            raise UserError(f"name={self.name!r} names no folder; write name=NAME for the run runs/NAME")
        self.resume = self.resume.lower()
        check_choice("resume", self.resume, ("false", "true", "auto"))
        if self.overwrite and self.resume == "true":
            raise UserError(f"overwrite=true contradicts resume={self.resume}; give one of them")
        if self.data.streaming and (self.train.max_steps is None or self.train.validate_every is None):
            raise UserError(
                "data.streaming=true knows no end of an epoch: write train.max_steps=N train.validate_every=N too"
            )
        if self.train.guided_alignment and self.model.attention.score == "none":
            raise UserError("train.guided_alignment guides attention, and model.attention.score=none has none")
        if self.train.guided_alignment and self.data.format != "toy" and self.data.alignments is None:
            raise UserError(
                f"train.guided_alignment={self.train.guided_alignment} needs gold links of the training text: "
                "write data=text data.alignments=ENDING for those in data.path/train.ENDING"
            )
        if self.train.r_drop and not self.model.dropout:
            raise UserError(
                f"train.r_drop={self.train.r_drop} compares two passes with different dropout, and model.dropout=0 has "
                "none; write model.dropout=0.3, or train.r_drop=0"
            )
        if self.train.coverage_loss and not self.model.attention.coverage:
            raise UserError(
                f"train.coverage_loss={self.train.coverage_loss} is for models that know what they attended to: "
                "write model.attention.coverage=true too"
            )
        if self.model.tie == "three" and not self.tokenizer.joint:
            raise UserError(
                "model.tie=three shares source and target embeddings, and tokenizer.joint=false gives each side pieces "
                "of its own; write model.tie=two, for target embeddings and output layer, or tokenizer.joint=true"
            )


@dataclass(slots=True)
class EvaluateRun:
    """`python -m nmt.evaluate`"""

    checkpoint: str | None = None  # a run (its best, else its last checkpoint) or a step folder
    compare: list[str] = field(default_factory=list)  # [A,B,...]: runs beside each other, A the baseline
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    precision: str = "auto"  # auto | fp32 | tf32 (GPUs) | bf16 | fp16 | fp64 | int8 (processors)
    average: int = 1  # the mean weights of the last so many checkpoints that the run has kept (train.keep)
    pictures: int = 4  # heat maps of the first sentences
    bleu_tokenizer: str | None = None  # sacreBLEU's, as in training; auto: by the references' script; null: the run's
    data: DataOverride = field(default_factory=DataOverride)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint or self.compare, self.device, self.precision)
        named = {path for path in self.compare if isinstance(path, str)}
        if self.compare and (self.checkpoint or len(named) < max(2, len(self.compare))):
            raise UserError(
                "compare= takes two runs or more, each once, in place of checkpoint=: 'compare=[runs/A,runs/B]'"
            )
        check_at_least(0, "", self, "pictures")
        if self.bleu_tokenizer is not None:
            check_choice("bleu_tokenizer", self.bleu_tokenizer, BLEU_TOKENIZERS)
        check_at_least(1, "", self, "average")


@dataclass(slots=True)
class TranslateRun:
    """`python -m nmt.translate`"""

    checkpoint: Any = None  # a run (its best, else its last checkpoint) or a step folder; [A,B]: both, as one model
    input: str = "-"  # a file; -: standard input
    output: str = "-"  # a file; -: standard output
    target: str | None = None  # mode=score: the translations to score; -: standard input
    prefix: str | None = None  # a file: with what words the translation of each line begins; -: standard input
    mode: str = "translate"  # translate | score
    format: str = "text"  # text | jsonl | links (text, and below it the words that it was made from)
    alignments: str | None = None  # a file: .jsonl or .npz for all weights, else links (i-j); -: standard output
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    precision: str = "auto"  # auto | fp32 | tf32 (GPUs) | bf16 | fp16 | fp64 | int8 (processors)
    average: int = 1  # the mean weights of the last so many checkpoints that the run has kept (train.keep)
    links: LinksConfig = field(default_factory=LinksConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, self.device, self.precision)
        self.checkpoint = [*map(str, self.checkpoint)] if isinstance(self.checkpoint, list) else [str(self.checkpoint)]
        check_at_least(1, "", self, "average")
        check_choice("mode", self.mode, ("translate", "score"))
        check_choice("format", self.format, ("text", "jsonl", "links"))
        if self.mode == "score" and not self.target:
            raise UserError("mode=score needs two files of equal length: input=SOURCES target=TRANSLATIONS")
        if self.mode == "score" and (self.format != "text" or self.alignments):
            raise UserError("mode=score writes a number a line; format= and alignments= are for mode=translate")
        searching = [item.name for item in fields(SearchConfig) if not item.name.startswith("batch")]
        if self.mode == "score" and (idle := self.search.changed(*searching)):
            raise UserError(f"{idle}: mode=score searches for nothing; leave it out")
        if self.links != LinksConfig() and self.format == "text" and not self.alignments:
            raise UserError("links.* is about links: write alignments=FILE, format=links or format=jsonl, too")
        if self.format == "links" and self.links.unit == "pieces":
            raise UserError("format=links shows words; leave out links.unit=pieces")
        if self.mode == "score" and self.prefix:
            raise UserError(f"prefix={self.prefix} is for mode=translate only")
        if self.mode == "translate" and self.target:
            raise UserError(f"target={self.target} is for mode=score only")


@dataclass(slots=True)
class AlignRun:
    """`python -m nmt.align`"""

    checkpoint: str | None = None  # a run (its best, else its last checkpoint) or a step folder
    reverse_checkpoint: str | None = None  # a model of the other direction, whose links are put together with these
    symmetrize: str | None = None  # intersection | union | grow_diag_final_and; null: the last, where there are two
    source: str | None = None  # a file of sentences (-: standard input) ...
    target: str | None = None  # ... and one of their translations; null: the corpus of data.*
    output: str = "-"  # a file: .jsonl or .npz for all weights, any other for links; -: standard output
    gold: str | None = None  # a file of gold links: i-j sure, ipj or i?j possible; null: those of the corpus, if any
    gold_base: int = 0  # the number of a sentence's first word in it: 0 or 1
    max_length: int = 1000  # pieces, `</s>` counted; a pair with a longer side gets no links, and a warning
    batch_tokens: int | None = None  # pieces of the longer side in one batch; null: 8,000, on a GPU 64,000
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    precision: str = "auto"  # auto | fp32 | tf32 (GPUs) | bf16 | fp16 | fp64 | int8 (processors)
    links: LinksConfig = field(default_factory=LinksConfig)
    data: DataOverride = field(default_factory=DataOverride)

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, self.device, self.precision)
        check_at_least(2, "", self, "max_length", "batch_tokens")
        if bool(self.source) != bool(self.target):
            raise UserError("source= and target= are two files of equal length; give both, or neither for data.*")
        if self.source and self.data != DataOverride():
            raise UserError("source= and target= are aligned in place of a corpus; leave out data.*")
        if self.reverse_checkpoint and re.search(r"\.(jsonl|npz)(\.gz|\.zst)?$", self.output):
            raise UserError(f"output={self.output} is for one model's weights; two have links: output=links.pharaoh")
        if self.gold_base not in (0, 1):
            raise UserError(f"gold_base={self.gold_base} is not one of 0, 1")
        if self.gold_base and not self.gold:
            raise UserError(f"gold_base={self.gold_base} is of a file of gold links: write gold=FILE too")
        if self.links.unit == "pieces" and (self.gold or self.reverse_checkpoint):
            raise UserError("links.unit=pieces: gold= and reverse_checkpoint= are about words; write links.unit=words")
        if self.symmetrize is not None:
            check_choice("symmetrize", self.symmetrize, ("intersection", "union", "grow_diag_final_and"))
            if not self.reverse_checkpoint:
                raise UserError(f"symmetrize={self.symmetrize} needs two models: reverse_checkpoint=runs/OTHER")


COMMANDS: dict[str, type] = {"train": TrainRun, "evaluate": EvaluateRun, "translate": TranslateRun, "align": AlignRun}
