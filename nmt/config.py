"""Every knob of nmt: what it is called, what it may be, what it means.

The dataclasses here are the schema that Hydra checks a command line against; the files under configs/ only give them
values. A value that cannot work is refused here, with the key, the value and the remedy, before anything is built.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nmt.command import program
from nmt.data.config import DataConfig, DataOverride, TokenizerConfig
from nmt.errors import UserError, check_above_zero, check_at_least, check_choice, check_share
from nmt.model.config import AttentionConfig as AttentionConfig
from nmt.model.config import ModelConfig
from nmt.streams import STDIN, STDOUT, identity, own_descriptor

OPTIMISERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "inverse_sqrt", "cosine", "plateau")
MONITORS = {"bleu": True, "loss": False, "ppl": False, "accuracy": True}  # whether higher is better
FLOORS = {"bleu": 0.005, "accuracy": 0.0005}  # below these the log shows 0: a model that has not learned yet
BLEU_TOKENIZERS = (  # sacreBLEU's
    *("auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"),
    *("flores200", "flores101", "spm", "spBLEU-1K"),
)
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp64", "int8")
STEP = 8  # sentences: a batch has a multiple of it where it can, for each new shape costs a processor a kernel
# What a resumed run does with settings that have changed: it refuses the first, and says nothing of the second.
LASTING = {  # sections and keys
    "data", "tokenizer", "model", "init_from", "seed", "precision", "bleu_tokenizer",
    "optim.name", "train.batch_tokens", "train.batch_sentences", "train.monitor",
}  # fmt: skip
FREE = {  # keys on which no number depends; the text of data.path is compared, wherever it is now
    "name", "resume", "overwrite", "data.path", "data.cache", "data.split", "data.num_proc", "data.invalid",
    "train.log_every", "train.save_every", "train.save_minutes", "train.keep", "train.max_skipped",
}  # fmt: skip
PAD, UNK, BOS, EOS = range(4)  # the ids of padding, unknown words, <s> and </s> in every vocabulary


# ------------------------------------------------------------------------------------------------------------ schema
@dataclass(slots=True)
class OptimConfig:
    name: str = "adam"  # adam | adamw | sgd
    lr: float = 0.001  # the highest learning rate
    schedule: str = "constant"  # constant | inverse_sqrt | cosine | plateau
    warmup: int = 0  # steps of linear growth
    decay: float = 0.5  # plateau: factor at each validation that brings nothing better
    label_smoothing: float = 0.1  # share of the target probability spread over the vocabulary
    clip: float | None = 1.0  # largest norm of the gradient; null: none
    weight_decay: float = 0.0  # of Adam and SGD as a part of the gradient, of AdamW apart from it

    def __post_init__(self) -> None:
        check_choice("optim.name", self.name, OPTIMISERS)
        check_choice("optim.schedule", self.schedule, SCHEDULES)
        check_above_zero("optim.", self, "lr", "clip", "decay")
        check_at_least(0, "optim.", self, "warmup", "weight_decay")
        check_share("optim.label_smoothing", self.label_smoothing)
        if self.decay >= 1:
            raise UserError(f"optim.decay={self.decay} must be below 1")
        if self.decay != 0.5 and self.schedule != "plateau":
            raise UserError(f"optim.decay={self.decay} is of optim.schedule=plateau; write both, or neither")
        if self.schedule == "inverse_sqrt" and self.warmup == 0:
            raise UserError("optim.schedule=inverse_sqrt needs optim.warmup of at least 1 step")


@dataclass(slots=True)
class TrainConfig:
    max_steps: int | None = None  # updates; null: no limit
    max_epochs: int | None = 20  # whichever of the two comes first ends training; a stream only max_steps
    batch_tokens: int = 1500  # per update: the sum of max(source, target) pieces, without padding
    batch_sentences: int | None = None  # a number of sentences instead
    accumulate: int = 1  # micro-batches that an update's batch is divided into
    validate_every: int | None = None  # steps; null: each epoch
    save_every: int | None = None  # steps; null: at each validation, and by the clock
    save_minutes: float | None = 10.0  # ... when so many have passed since the last checkpoint; null: never
    log_every: int = 50  # steps
    monitor: str = "bleu"  # what is best, and what early stopping watches: bleu | loss | ppl | accuracy
    coverage_loss: float = 0.0  # its weight in the loss (See et al. 2017); needs model.attention.coverage
    r_drop: float = 0.0  # R-Drop (Liang et al. 2021): weight of what tells two passes with other dropout apart
    guided_alignment: float = 0.0  # a loss on how far attention is from gold links (data.alignments): its last weight
    patience: int | None = None  # validations without a better one before training stops; null: never
    keep: int = 1  # best checkpoints kept beside the last two
    max_skipped: int = 20  # updates in a row whose loss or gradient is not finite, before training stops

    def __post_init__(self) -> None:
        check_choice("train.monitor", self.monitor, MONITORS)
        check_at_least(1, "train.", self, "max_steps", "max_epochs", "batch_tokens", "log_every", "keep", "accumulate")
        check_at_least(1, "train.", self, "batch_sentences", "validate_every", "save_every", "patience", "max_skipped")
        check_above_zero("train.", self, "save_minutes")
        check_at_least(0, "train.", self, "coverage_loss", "r_drop", "guided_alignment")
        if self.max_steps is None and self.max_epochs is None:
            raise UserError("train.max_steps and train.max_epochs are both null; training needs an end: set one")


@dataclass(slots=True)
class SearchConfig:
    beam: int = 5  # 1: greedy
    n_best: int = 1  # translations of each line, different as text
    penalty: str = "gnmt"  # hypotheses of different length n: log-probability / ((5 + n) / 6)^alpha | mean: / n^alpha
    length_penalty: float = 1.0  # alpha; 0: none
    coverage_penalty: float = 0.0  # beta: of leaving source pieces without attention, Wu et al. 2016; 0: none
    min_length: int = 0  # target pieces, `</s>` counted
    min_ratio: float = 0.0  # the same, for each source piece
    max_length: int = 2000  # target pieces of a line, or of a part of a long one, `</s>` counted
    max_ratio: float = 2.0  # target pieces for each source piece, and 20 beside
    max_source: int | None = None  # source pieces, `</s>` counted; longer lines go in parts; null: as trained
    no_repeat_ngram: int = 0  # n: no n pieces in a row occur twice in a translation; 0: off
    replace_unknown: bool = False  # tokenizer.type=word: the source word that attention found, in place of <unk>
    dictionary: str | None = None  # ... or what this file has for it: source word, tab, target word on each line
    groups: int = 1  # diverse beam search: groups of the beam, each of which avoids what those before it write
    diversity: float = 0.5  # ... what a piece costs for each hypothesis of earlier groups that takes it
    sample: bool = False  # draw n_best translations at random, in place of searching the best
    temperature: float = 1.0  # ... below 1: likelier ones, above 1: more different ones
    top_k: int = 0  # ... among so many likeliest pieces; 0: all
    top_p: float = 1.0  # ... among the likeliest that together have this probability
    seed: int = 1  # ... other numbers, other samples; a line's do not depend on the lines beside it
    batch_tokens: int | None = None  # source pieces x beam in one batch; null: 8,000, on a GPU 64,000
    batch_sentences: int | None = None  # a number of sentences instead

    def __post_init__(self) -> None:
        check_at_least(1, "search.", self, "beam", "n_best", "max_length", "batch_tokens", "batch_sentences", "groups")
        check_at_least(2, "search.", self, "max_source")
        check_at_least(0, "search.", self, "length_penalty", "coverage_penalty", "min_length", "min_ratio", "max_ratio")
        check_at_least(0, "search.", self, "no_repeat_ngram", "diversity", "top_k", "seed")
        check_choice("search.penalty", self.penalty, ("gnmt", "mean"))
        if not 0 < self.top_p <= 1:
            raise UserError(f"search.top_p={self.top_p} must be greater than 0 and at most 1")
        check_above_zero("search.", self, "temperature")
        if self.n_best > self.beam and not self.sample:
            raise UserError(f"search.n_best={self.n_best} must not be more than search.beam={self.beam}")
        for least, most in (("min_length", "max_length"), ("min_ratio", "max_ratio")):
            if getattr(self, least) > getattr(self, most):
                raise UserError(
                    f"search.{least}={getattr(self, least)} is more than search.{most}={getattr(self, most)}"
                )
        if self.beam % self.groups:
            raise UserError(f"search.groups={self.groups} must divide search.beam={self.beam}")
        if self.dictionary and not self.replace_unknown:
            raise UserError(f"search.dictionary={self.dictionary} is for search.replace_unknown=true; write both")
        if not self.sample and (idle := self.changed("temperature", "top_k", "top_p", "seed")):
            raise UserError(f"{idle}: nothing is drawn; write search.sample=true too")
        if self.sample and (idle := self.changed("beam", "groups", "penalty", "length_penalty", "coverage_penalty")):
            raise UserError(f"{idle}: samples are not ranked; leave it out with search.sample=true")
        if self.diversity != 0.5 and self.groups == 1:
            raise UserError(f"search.diversity={self.diversity} is between groups; write search.groups=2 or more too")

    def changed(self, *keys: str) -> str:
        """Those of these keys that have another value than by default, with it."""
        default = {item.name: item.default for item in fields(self)}
        return " ".join(f"search.{key}={getattr(self, key)}" for key in keys if getattr(self, key) != default[key])

    def after(self, *trained: DataConfig) -> "SearchConfig":
        """The same for models trained on these: a line longer than training allowed is translated in parts."""
        return replace(self, max_source=self.max_source or min(data.max_length for data in trained) + 1)

    @property
    def width(self) -> int:
        """Hypotheses of a sentence at a time."""
        return self.n_best if self.sample else self.beam


@dataclass(slots=True)
class LinksConfig:
    """How links are read off attention weights."""

    unit: str = "words"  # words | pieces
    threshold: float | None = None  # links of at least this weight; null: each target word's best, `</s>` meaning none

    def __post_init__(self) -> None:
        check_choice("links.unit", self.unit, ("words", "pieces"))
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise UserError(f"links.threshold={self.threshold} must be greater than 0 and at most 1")


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """A nested dict as (dotted key, value) pairs. In the dicts of a list null is as good as nothing, so that a key that
    they get one day changes no run."""
    pairs = []
    for key, value in tree.items():
        if isinstance(value, list):
            value = [
                {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in value
            ]
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def lasting(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's settings, by dotted key, that stay as long as the run goes on."""
    return {key: value for key, value in flat(settings) if {key, key.split(".")[0]} & LASTING and key not in FREE}


def check_hardware(device: str, precision: str) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", device):
        raise UserError(f"device={device} is not one of auto, cpu, cuda, cuda:N, mps")
    check_choice("precision", precision, PRECISIONS)


def check_model(checkpoint: str | list[str] | None, device: str, precision: str) -> None:
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
        check_model(self.checkpoint or self.compare, self.device, self.precision)
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
        check_model(self.checkpoint, self.device, self.precision)
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
        check_files(self, ("input", "target", "prefix"), ("output", "alignments"))
        if self.mode == "score" and self.prefix:
            raise UserError(f"prefix={self.prefix} is for mode=translate only")
        if self.mode == "translate" and self.target:
            raise UserError(f"target={self.target} is for mode=score only")


def check_files(command: Any, read: Sequence[str], written: Sequence[str]) -> None:
    """Replace `-` in these keys by the path of standard input or output, and refuse what cannot be: a stream that is
    read by two keys, a file that is written by two or is read as well, two outputs mixed in standard output."""
    taken: dict[Hashable, str] = {}
    for key in (*read, *written):
        given = getattr(command, key)
        if given == "-":
            setattr(command, key, STDIN if key in read else STDOUT)
        if not (path := getattr(command, key)):
            continue
        number, file = own_descriptor(path), identity(path)
        stream = number if key in read or number == 1 else None  # other pipes and devices may get several outputs
        for place in (stream, file):
            other = taken.get(place)
            if place is not None and other and (place == stream or key in written):
                raise UserError(f"{key}={given} is the same file as {other}; give another one")
        taken |= {place: f"{key}={given}" for place in (stream, file) if place is not None}


@dataclass(slots=True)
class AlignRun:
    """`python -m nmt.align`"""

    checkpoint: str | None = None  # a run (its best, else its last checkpoint) or a step folder
    reverse_checkpoint: str | None = None  # a model of the other direction, whose links are put together with these
    symmetrise: str | None = None  # intersection | union | grow_diag_final_and; null: the last, where there are two
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
        check_model(self.checkpoint, self.device, self.precision)
        check_at_least(2, "", self, "max_length", "batch_tokens")
        if bool(self.source) != bool(self.target):
            raise UserError("source= and target= are two files of equal length; give both, or neither for data.*")
        if self.source and self.data != DataOverride():
            raise UserError("source= and target= are aligned in place of a corpus; leave out data.*")
        check_files(self, ("source", "target", "gold"), ("output",))
        if self.reverse_checkpoint and re.search(r"\.(jsonl|npz)(\.gz|\.zst)?$", self.output):
            raise UserError(f"output={self.output} is for one model's weights; two have links: output=links.pharaoh")
        if self.gold_base not in (0, 1):
            raise UserError(f"gold_base={self.gold_base} is not one of 0, 1")
        if self.gold_base and not self.gold:
            raise UserError(f"gold_base={self.gold_base} is of a file of gold links: write gold=FILE too")
        if self.links.unit == "pieces" and (self.gold or self.reverse_checkpoint):
            raise UserError("links.unit=pieces: gold= and reverse_checkpoint= are about words; write links.unit=words")
        if self.symmetrise is not None:
            check_choice("symmetrise", self.symmetrise, ("intersection", "union", "grow_diag_final_and"))
            if not self.reverse_checkpoint:
                raise UserError(f"symmetrise={self.symmetrise} needs two models: reverse_checkpoint=runs/OTHER")


COMMANDS: dict[str, type] = {"train": TrainRun, "evaluate": EvaluateRun, "translate": TranslateRun, "align": AlignRun}


def main(command: str) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """Turn a function of a command's checked dataclasses into a program: `@config.main("train")`."""
    return program(command, COMMANDS[command])
