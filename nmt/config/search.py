"""Settings of decoding, and of how word links are read off attention weights."""

from dataclasses import dataclass, fields, replace

from nmt.config.data import DataConfig
from nmt.errors import UserError, check_above_zero, check_at_least, check_choice


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
