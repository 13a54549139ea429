"""Every knob of the data and the tokenizer: what it is called, what it may be, what it means. No torch here."""

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmt.errors import UserError, check_at_least, check_choice, check_share

FORMATS = ("toy", "text", "tsv", "jsonl", "parquet", "hub")
TOKENIZERS = ("bpe", "unigram", "char", "word")
PAD, UNK, BOS, EOS = range(4)  # the ids of padding, unknown words, <s> and </s> in every vocabulary


@dataclass(slots=True)
class CorpusConfig:
    """A corpus beside that of `data.path`: its train split is trained on, too. Null: as in `data.*`."""

    path: str = ""
    weight: float = 1.0  # how often its pairs are used, where those of data.path are used once
    tag: str | None = None  # bt: the piece <bt> stands before each source, so that the model knows where it is from
    format: str | None = None
    subset: str | None = None
    revision: str | None = None
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("a corpus of data.corpora needs a path: data.corpora=[{path:FOLDER}]")
        if self.format is not None:
            check_choice("format of data.corpora", self.format, FORMATS[1:])
        if not 0 < self.weight <= 1000:
            raise UserError(f"weight={self.weight} of data.corpora must be greater than 0 and at most 1,000")
        if self.tag is not None and not re.fullmatch(r"[^\W_]+", self.tag):
            raise UserError(f"tag={self.tag!r} of data.corpora must be letters and digits, as bt")


@dataclass(slots=True)
class DataConfig:
    """Where sentence pairs come from. `corpus.py` reads them, `batching.py` makes batches of them."""

    format: str = "toy"  # toy | text | tsv | jsonl | parquet | hub
    path: str | None = None  # a folder with {train,valid,test}.*; for the hub the name of a dataset, or such a folder
    subset: str | None = None  # the hub's configuration, for example "de-en"
    revision: str | None = None  # the hub's branch, tag or commit; null: the latest
    source: str = "de"  # file ending, column name or number, or nested column such as translation.de
    target: str = "en"  # likewise
    split: str = "test"  # the split that evaluate and align read
    limit: int | None = None  # use only the first pairs of the training split
    invalid: str = "refuse"  # lines that are not UTF-8, lack columns, or are no JSON: refuse | drop (and count)
    alignments: str | None = None  # text: the ending of files with gold links beside the text, as 0-0 1-2 a line
    seed: int = 1  # of the built-in corpus, which never depends on the run's own seed
    max_length: int = 100  # pieces on either side; longer training pairs are dropped and counted
    cache: str | None = None  # folder of what was read and tokenized; null: $XDG_CACHE_HOME/nmt or ~/.cache/nmt
    streaming: bool = False  # read the training text while it is trained on, over and over; nothing is kept on disk
    buffer: int = 100_000  # streaming: pairs that are shuffled and sorted by length at a time
    corpora: list[CorpusConfig] = field(default_factory=list)  # more training text: [{path:DIR,weight:1.0,tag:bt}]
    num_proc: int | None = None  # cores that tokenize; null: all that this process may use

    def __post_init__(self) -> None:
        check_choice("data.format", self.format, FORMATS)
        check_choice("data.invalid", self.invalid, ("refuse", "drop"))
        check_at_least(1, "data.", self, "limit", "max_length", "num_proc", "buffer")
        check_at_least(0, "data.", self, "seed")
        if self.split != Path(self.split).name:
            raise UserError(f"data.split={self.split} is the name of a split, as train, valid or test, and no path")
        if self.format != "toy" and not self.path:
            raise UserError(f"data.path is not set; data.format={self.format} needs it: data.path=FOLDER")
        if self.format == "toy" and self.path:
            raise UserError(
                f"data.path={self.path}: the built-in corpus has no folder; write data=text or data.format=text"
            )
        if self.streaming and (self.format == "toy" or self.alignments is not None):
            raise UserError("data.streaming=true is for text without gold links; leave it out")
        if self.corpora and (self.format == "toy" or self.alignments is not None):
            raise UserError("data.corpora is for text without gold links, beside data.path; leave it out")
        if self.alignments is not None and (self.format != "text" or self.invalid != "refuse"):
            raise UserError(f"data.alignments={self.alignments} needs data.format=text and data.invalid=refuse")
        if self.source == self.target:
            raise UserError(f"data.source and data.target are both '{self.source}'; they must differ")
        if self.format == "toy" and {self.source, self.target} != {"de", "en"}:
            raise UserError(
                f"data.source={self.source} data.target={self.target}: the built-in corpus has de and en; "
                "for text of your own write data=text data.path=FOLDER"
            )


@dataclass(slots=True)
class TokenizerConfig:
    """A SentencePiece model, trained on the training text and kept in the run."""

    type: str = "bpe"  # bpe | unigram | char | word
    vocab_size: int = 8000  # pieces; of each side if not joint
    joint: bool = True  # one model for both sides, or one for each
    source_vocab_size: int | None = None  # joint=false: pieces of the source side; null: vocab_size
    target_vocab_size: int | None = None  # joint=false: pieces of the target side; null: vocab_size
    sampling: float = 0.0  # BPE dropout, or the unigram model's 1 / temperature, in training; 0: always the best
    normalization: str = "identity"  # identity | nmt_nfkc

    def __post_init__(self) -> None:
        check_choice("tokenizer.type", self.type, TOKENIZERS)
        check_choice("tokenizer.normalization", self.normalization, ("identity", "nmt_nfkc"))
        check_at_least(8, "tokenizer.", self, "vocab_size", "source_vocab_size", "target_vocab_size")
        for side in ("source", "target"):
            if self.joint and (key := self.size_key(side)) != "vocab_size":
                raise UserError(
                    f"tokenizer.{key}={self.size(side)} is for two tokenizers: write tokenizer.joint=false too"
                )
        check_share("tokenizer.sampling", self.sampling)
        if self.sampling and self.type not in ("bpe", "unigram"):
            raise UserError(f"tokenizer.sampling={self.sampling} needs tokenizer.type=bpe or unigram, not {self.type}")

    def size_key(self, side: str) -> str:
        """The key that gives the vocabulary size of the `source` or the `target`."""
        return "vocab_size" if getattr(self, f"{side}_vocab_size") is None else f"{side}_vocab_size"

    def size(self, side: str) -> int:
        """The vocabulary size of the `source` or the `target`."""
        return int(getattr(self, self.size_key(side)))


@dataclass(slots=True)
class DataOverride:
    """`data.*` of the commands that read a run: null means the run's own value; for `limit` none, for `cache` the
    default; with another format or path, for `subset`, `revision` and `alignments` none, and for the last of these
    also with `invalid=drop`."""

    format: str | None = None  # null: the run's own, here and below
    path: str | None = None
    subset: str | None = None
    revision: str | None = None
    source: str | None = None
    target: str | None = None
    split: str | None = None
    limit: int | None = None  # of the training split; null: none
    invalid: str | None = None
    alignments: str | None = None
    seed: int | None = None
    cache: str | None = None  # folder of what was read; null: $XDG_CACHE_HOME/nmt or ~/.cache/nmt

    def over(self, run: DataConfig) -> DataConfig:
        """The run's data with what was given here in its place."""
        given: dict[str, Any] = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        other = (self.format or run.format, self.path or run.path) != (run.format, run.path)
        unset = {"limit"} | ({"subset", "revision", "alignments"} if other else set())
        unset |= {"path"} if self.format == "toy" else set()
        unset |= {"alignments"} if self.invalid == "drop" else set()
        unset |= {"cache"}  # where a command writes is for its user to say, not for who made the run
        stream = run.streaming and (self.format or run.format) == "hub"  # of which only the split is fetched
        alone = dict.fromkeys(unset) | {"streaming": stream, "corpora": []}
        data = dataclasses.replace(run, **{**alone, **given})
        if is_opposite_direction(data, run):
            raise UserError(
                f"data.source={data.source} data.target={data.target}: "
                f"the model was trained to translate {run.source} to {run.target}"
            )
        return data


def last_component(name: str) -> str:
    """`de` of `translation.de`, so that text can take the place of a dataset that has nested columns."""
    return name.rpartition(".")[2]


def is_opposite_direction(one: DataConfig, other: DataConfig) -> bool | None:
    """Whether they go opposite ways. None where names do not tell: numbers of columns mean something in one table."""
    numbered = one.source.isdecimal() or other.source.isdecimal()
    if numbered and os.path.realpath(str(one.path)) != os.path.realpath(str(other.path)):
        return None
    there, back = (one.source, one.target), (other.target, other.source)
    leaves = [[*map(last_component, ends)] for ends in (there, back)]
    return there == back or leaves[0] == leaves[1] and leaves[0] != leaves[0][::-1]


def swapped_side(one: DataConfig, other: DataConfig) -> str | None:
    """The side of `one`, "source" or "target", whose language is that of the opposite side of `other`, as names tell;
    None where there is none."""
    if is_opposite_direction(one, other):
        return "source"
    for side, across in (("source", "target"), ("target", "source")):
        name = last_component(getattr(one, side))
        if name == last_component(getattr(other, across)) and not name.isdecimal():
            return side
    return None
