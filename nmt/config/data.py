"""Settings of the data and the tokenizer."""

import dataclasses
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nmt.config.fields import setting
from nmt.errors import UserError, check_at_least, check_choices, check_fraction

CORPUS_FORMATS = ("toy", "text", "tsv", "jsonl", "parquet", "hub")
SIDES = ("source", "target")
TOKENIZER_TYPES = ("bpe", "unigram", "char", "word")
# Keys that tokenizers of some types cannot have, the value that turns them off, and the types that can.
KEYS_OF_SOME_TOKENIZERS = (
    ("sampling", "0", ("bpe",)),
    ("split_digits", "false", ("bpe", "unigram")),
    ("path", "null", ("bpe", "unigram")),
    ("literals", "0", ("bpe", "unigram", "char")),
)
PAD, UNK, BOS, EOS = range(4)  # ids of padding, unknown pieces, <s> and </s> in every vocabulary


@dataclass(slots=True)
class CorpusConfig:
    """An additional training corpus, of which the train split is used. Null fields default to `data.*`."""

    path: str = ""
    weight: float = setting(1.0, "how often its pairs are used, relative to those of data.path")
    tag: str | None = setting(None, "bt: start each source sentence with the piece <bt>")
    format: str | None = None
    subset: str | None = None
    revision: str | None = None
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("a corpus in data.corpora has no path; use data.corpora=[{path:FOLDER}]")
        check_choices("data.corpora: ", self, format=CORPUS_FORMATS[1:])
        if not 0 < self.weight <= 1000:
            raise UserError(f"data.corpora: weight={self.weight} must be greater than 0 and at most 1,000")
        if self.tag is not None and not re.fullmatch(r"[^\W_]+", self.tag):
            raise UserError(f"data.corpora: tag={self.tag!r} must consist of letters and digits, such as bt")


@dataclass(slots=True)
class DataConfig:
    """Source of sentence pairs, which `corpus.py` reads and `batching.py` groups into batches."""

    format: str = setting("toy", "toy | text | tsv | jsonl | parquet | hub")
    path: str | None = setting(None, "folder with {train,valid,test}.*; format=hub: name of a dataset, or a folder")
    subset: str | None = setting(None, "format=hub: dataset configuration, such as de-en")
    revision: str | None = setting(None, "format=hub: branch, tag or commit; null: latest")
    source: str = setting("de", "file extension, column name or number, or nested column (translation.de)")
    target: str = setting("en", "same as source, for the target side")
    split: str = setting("test", "split that evaluate and align read")
    limit: int | None = setting(None, "use only the first N pairs of the training split; null: all")
    alignments: str | None = setting(None, "format=text: extension of the files with gold links (not an output)")
    max_length: int = setting(100, "maximum pieces on either side; longer training pairs are dropped and counted")
    cache: str | None = setting(None, "folder for cached text and tokens; null: $XDG_CACHE_HOME/nmt or ~/.cache/nmt")
    streaming: bool = setting(False, "read the training text while training, without caching it")
    buffer: int = setting(100_000, "streaming: number of pairs that are shuffled and sorted by length together")
    corpora: list[CorpusConfig] = setting(list, "additional training text: [{path:DIR,weight:1.0,tag:bt}]")

    def __post_init__(self) -> None:
        check_choices("data.", self, format=CORPUS_FORMATS)
        check_at_least(1, "data.", self, "limit", "max_length", "buffer")
        if self.split != Path(self.split).name:
            raise UserError(f"data.split={self.split} is a path; give the name of a split, such as valid or test")
        if self.format != "toy" and not self.path:
            raise UserError(f"data.path is not set; data.format={self.format} needs data.path=FOLDER")
        if self.format == "toy" and self.path:
            raise UserError(f"data.path={self.path} is not read by the built-in corpus; set data=text as well")
        for key in ("streaming", "corpora"):
            if getattr(self, key) and (self.format == "toy" or self.alignments is not None):
                raise UserError(f"data.{key} does not support the built-in corpus or gold links; remove data.{key}")
        if self.alignments is not None and self.format != "text":
            raise UserError(f"data.alignments={self.alignments} needs data.format=text")
        if self.source == self.target:
            raise UserError(f"data.source and data.target are both '{self.source}'; they must differ")
        if self.format == "toy" and {self.source, self.target} != {"de", "en"}:
            sides = f"data.source={self.source} data.target={self.target}"
            raise UserError(f"{sides}: the built-in corpus has de and en; use data=text data.path=FOLDER for your text")

    @property
    def languages(self) -> tuple[str, str]:
        """Codes of source and target, such as `de`, as far as the names of the sides tell them."""
        return last_component(self.source), last_component(self.target)


@dataclass(slots=True)
class TokenizerConfig:
    """A SentencePiece model, trained on the training text and stored in the run folder."""

    type: str = setting("bpe", "bpe | unigram | char | word")
    vocab_size: int = setting(8000, "vocabulary size; per side if joint=false")
    joint: bool = setting(True, "share one tokenizer between source and target")
    sampling: float = setting(0.0, "type=bpe: share of merges that are dropped in training (BPE dropout); 0: off")
    normalization: str = setting("identity", "identity | nmt_nfkc")
    split_digits: bool = setting(False, "make each digit 0-9 a piece of its own, so that all numbers are split alike")
    path: str | None = setting(None, "use this SentencePiece model (BPE or unigram) for both sides; null: train one")
    literals: int = setting(0, "pieces that stand for numbers, addresses and tags with search.protect; see augment.*")

    def __post_init__(self) -> None:
        check_choices("tokenizer.", self, type=TOKENIZER_TYPES, normalization=("identity", "nmt_nfkc"))
        check_at_least(8, "tokenizer.", self, "vocab_size")
        check_fraction("tokenizer.", self, "sampling")
        if not 0 <= self.literals <= 256:
            raise UserError(f"tokenizer.literals={self.literals} must be at least 0 and at most 256")
        for key, off, types in KEYS_OF_SOME_TOKENIZERS:
            if getattr(self, key) and self.type not in types:
                needed = f"needs tokenizer.type={' or '.join(types)}, not {self.type}"
                raise UserError(f"tokenizer.{key} {needed}; set tokenizer.{key}={off}")


@dataclass(slots=True)
class AugmentConfig:
    """Random changes of training pairs, drawn anew in each epoch. Each value is the share of pairs to change."""

    lower_case: float = setting(0.0, "the source in lowercase; see search.capitals")
    title: float = setting(0.0, "the source with a capital at the beginning of each word")
    final_mark: float = setting(0.0, "without the marks at the end")
    numbers: float = setting(0.0, "other numbers; or a number in place of a word and its translation")
    names: float = setting(0.0, "other names: words that are the same on both sides")
    literals: float = setting(0.0, "pieces for search.protect in place of words and their translations")
    concatenate: float = setting(0.0, "another pair after it (Nguyen et al. 2021)")

    def __post_init__(self) -> None:
        check_fraction("augment.", self, *(item.name for item in fields(self)))

    @property
    def is_on(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))

    @property
    def needs_links(self) -> bool:
        """Whether a change needs to know which words translate each other."""
        return bool(self.numbers or self.names or self.literals)


@dataclass(slots=True)
class DataOverride:
    """`data.*` of commands that read a run. Null means the value of the run, but for `cache` the default folder.

    With another format or path, null `subset`, `revision` and `alignments` mean none.
    """

    format: str | None = setting(None, "null: same as the run, here and below")
    path: str | None = None
    subset: str | None = None
    revision: str | None = None
    source: str | None = None
    target: str | None = None
    split: str | None = None
    alignments: str | None = None
    cache: str | None = setting(None, "folder for cached text; null: $XDG_CACHE_HOME/nmt or ~/.cache/nmt")

    def apply_to(self, run: DataConfig) -> DataConfig:
        """Return the data settings of a run with these overrides.

        Raises:
            UserError: they name the opposite translation direction.
        """
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        changes: dict[str, Any] = {"limit": None, "cache": None, "corpora": []}
        changes["streaming"] = run.streaming and given.get("format", run.format) == "hub"  # fetches only the split
        if (self.format or run.format, self.path or run.path) != (run.format, run.path):
            changes |= {"subset": None, "revision": None, "alignments": None}
        if self.format == "toy":
            changes["path"] = None
        data = dataclasses.replace(run, **changes | given)
        if is_opposite_direction(data, run):
            sides = f"data.source={data.source} data.target={data.target}"
            raise UserError(f"{sides}: the model was trained to translate {run.source} to {run.target}")
        return data


def last_component(name: str) -> str:
    """Return the last part of a dotted name: `translation.de` then matches the file extension `de`."""
    return name.rpartition(".")[2]


def is_opposite_direction(data: DataConfig, other: DataConfig) -> bool | None:
    """Return whether two corpora have opposite directions, by the names of their sides.

    None if the names cannot tell: column numbers are comparable within the same path only.
    """
    is_numbered = data.source.isdecimal() or other.source.isdecimal()
    if is_numbered and os.path.realpath(str(data.path)) != os.path.realpath(str(other.path)):
        return None
    direction = (data.source, data.target)
    reverse_direction = (other.target, other.source)
    if direction == reverse_direction:
        return True
    components = [last_component(name) for name in direction]
    reverse_components = [last_component(name) for name in reverse_direction]
    return components == reverse_components and components != components[::-1]
