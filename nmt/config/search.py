"""Settings of decoding and of the extraction of links from attention weights."""

from dataclasses import dataclass, replace

from nmt.config.data import DataConfig
from nmt.config.fields import setting
from nmt.errors import UserError, check_above_zero, check_at_least


@dataclass(slots=True)
class SearchConfig:
    """Beam search or sampling."""

    beam: int = setting(5, "number of hypotheses kept at each step; 1: greedy search")
    n_best: int = setting(1, "number of translations per line, all different as text")
    length_penalty: float = setting(1.0, "alpha: divide the score of n pieces by ((5 + n) / 6)^alpha; 0: no penalty")
    coverage_penalty: float = setting(0.0, "beta, the coverage penalty of Wu et al. 2016; 0: none")
    max_length: int = setting(2000, "maximum target pieces of a line, or of one part of a long line, with </s>")
    max_ratio: float = setting(2.0, "maximum target pieces: max_ratio x source pieces + 20")
    max_source: int | None = setting(None, "pieces, with </s>; longer lines are split; null: as in training")
    capitals: bool = setting(True, "translate a line in capitals as one in lowercase, and return it in capitals")
    protect: bool = setting(False, "copy numbers of 2 or more digits, addresses, tags and the like from the source")
    terms: str | None = setting(
        None, "file of source term, tab, the translation to use; of several for a term the last"
    )
    sample: bool = setting(False, "sample n_best translations instead of beam search")
    temperature: float = setting(1.0, "sample: below 1 favors likely pieces, above 1 gives more variety")
    top_k: int = setting(0, "sample: only from the k most likely pieces; 0: all")
    seed: int = setting(1, "sample: random seed; samples of a line do not depend on other lines")
    batch_tokens: int | None = setting(None, "batch size in source pieces x beam; null: 8,000 on CPU, 64,000 on GPU")

    def __post_init__(self) -> None:
        check_at_least(1, "search.", self, "beam", "n_best", "max_length", "batch_tokens")
        check_at_least(2, "search.", self, "max_source")
        check_at_least(0, "search.", self, "length_penalty", "coverage_penalty", "max_ratio", "top_k", "seed")
        check_above_zero("search.", self, "temperature")
        if self.n_best > self.beam and not self.sample:
            raise UserError(f"search.n_best={self.n_best} must not exceed search.beam={self.beam}")

    def with_source_limit_of(self, *corpora: DataConfig) -> "SearchConfig":
        """Return a copy for models trained on these corpora, with `max_source` set to the longest training sentence."""
        return replace(self, max_source=self.max_source or min(data.max_length for data in corpora) + 1)

    @property
    def width(self) -> int:
        """Number of hypotheses per sentence."""
        return self.n_best if self.sample else self.beam


@dataclass(slots=True)
class LinksConfig:
    """Extraction of links between words from attention weights."""

    threshold: float | None = setting(
        None, "minimum weight of a link; null: link each word to its best source word (an aligner: 0.5)"
    )

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise UserError(f"links.threshold={self.threshold} must be greater than 0 and at most 1")
