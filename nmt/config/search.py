"""Settings of decoding and of the extraction of links from attention weights."""

import re
from dataclasses import MISSING, dataclass, fields, replace

from nmt.config.data import DataConfig
from nmt.config.fields import setting
from nmt.errors import UserError, check_above_zero, check_at_least, check_choice


@dataclass(slots=True)
class SearchConfig:
    """Beam search or sampling."""

    beam: int = setting(5, "number of hypotheses kept at each step; 1: greedy search")
    n_best: int = setting(1, "number of translations per line, all different as text")
    penalty: str = setting("gnmt", "for n pieces, divide the score by: gnmt ((5 + n) / 6)^alpha | mean n^alpha")
    length_penalty: float = setting(1.0, "alpha, exponent of the length penalty; 0: none")
    coverage_penalty: float = setting(0.0, "beta, the coverage penalty of Wu et al. 2016; 0: none")
    min_length: int = setting(0, "minimum target pieces, with </s>")
    min_ratio: float = setting(0.0, "minimum target pieces per source piece")
    max_length: int = setting(2000, "maximum target pieces of a line, or of one part of a long line, with </s>")
    max_ratio: float = setting(2.0, "maximum target pieces: max_ratio x source pieces + 20")
    max_source: int | None = setting(None, "pieces, with </s>; longer lines are split; null: as in training")
    no_repeat_ngram: int = setting(0, "n: no n-gram of pieces may occur twice in a translation; 0: off")
    replace_unknown: bool = setting(False, "tokenizer.type=word: replace <unk> by its source word")
    dictionary: str | None = setting(None, "replace_unknown: file of source word, tab, target word")
    capitals: bool = setting(True, "translate a line in capitals as one in small letters, and return it in capitals")
    protect: bool = setting(False, "copy numbers of 2 or more digits, addresses, tags and the like from the source")
    patterns: list[str] = setting(list, "protect: regular expressions of more text to copy")
    terms: str | None = setting(
        None, "file of source term, tab, the translation to use; of several for a term the last"
    )
    groups: int = setting(1, "number of groups in diverse beam search; each avoids the pieces of earlier groups")
    diversity: float = setting(0.5, "groups: penalty per hypothesis of an earlier group that chose the same piece")
    sample: bool = setting(False, "sample n_best translations instead of beam search")
    temperature: float = setting(1.0, "sample: below 1 favors likely pieces, above 1 gives more variety")
    top_k: int = setting(0, "sample: only from the k most likely pieces; 0: all")
    top_p: float = setting(1.0, "sample: only from the most likely pieces that together have this probability")
    seed: int = setting(1, "sample: random seed; samples of a line do not depend on other lines")
    batch_tokens: int | None = setting(None, "batch size in source pieces x beam; null: 8,000 on CPU, 64,000 on GPU")
    batch_sentences: int | None = setting(None, "batch size in sentences, instead of batch_tokens")

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
            raise UserError(f"search.n_best={self.n_best} must not exceed search.beam={self.beam}")
        for low_key, high_key in (("min_length", "max_length"), ("min_ratio", "max_ratio")):
            low, high = getattr(self, low_key), getattr(self, high_key)
            if low > high:
                raise UserError(f"search.{low_key}={low} must not exceed search.{high_key}={high}")
        if self.beam % self.groups:
            raise UserError(f"search.groups={self.groups} must evenly divide search.beam={self.beam}")
        if self.patterns and not self.protect:
            raise UserError("search.patterns needs search.protect=true")
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"search.patterns has {pattern!r}, which is not a regular expression: {error}"
                ) from None
        if self.dictionary and not self.replace_unknown:
            raise UserError(f"search.dictionary={self.dictionary} needs search.replace_unknown=true")
        sampling_keys = ("temperature", "top_k", "top_p", "seed")
        beam_keys = ("beam", "groups", "penalty", "length_penalty", "coverage_penalty")
        if not self.sample and (unused := self.format_changed(*sampling_keys)):
            raise UserError(f"{unused} has no effect without sampling; set search.sample=true as well")
        if self.sample and (unused := self.format_changed(*beam_keys)):
            raise UserError(f"{unused} has no effect with search.sample=true; remove {unused}")
        if self.groups == 1 and (unused := self.format_changed("diversity")):
            raise UserError(f"{unused} needs search.groups=2 or more")

    def format_changed(self, *keys: str) -> str:
        """Return `search.key=value` for those of these keys whose value is not the default, separated by spaces."""
        default = {
            item.name: item.default if item.default_factory is MISSING else item.default_factory()
            for item in fields(self)
        }
        return " ".join(f"search.{key}={getattr(self, key)}" for key in keys if getattr(self, key) != default[key])

    def with_source_limit_of(self, *corpora: DataConfig) -> "SearchConfig":
        """Return a copy for models trained on these corpora, with `max_source` set to the longest training sentence."""
        return replace(self, max_source=self.max_source or min(data.max_length for data in corpora) + 1)

    @property
    def width(self) -> int:
        """Number of hypotheses per sentence."""
        return self.n_best if self.sample else self.beam


@dataclass(slots=True)
class LinksConfig:
    """Extraction of links from attention weights."""

    unit: str = setting("words", "words | pieces")
    threshold: float | None = setting(
        None, "minimum weight of a link; null: link each word to its best source word (an aligner: 0.5)"
    )

    def __post_init__(self) -> None:
        check_choice("links.unit", self.unit, ("words", "pieces"))
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise UserError(f"links.threshold={self.threshold} must be greater than 0 and at most 1")
