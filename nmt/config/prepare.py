"""Settings of corpus preparation: which pairs are dropped, and how the rest is divided into splits."""

from dataclasses import dataclass, field
from typing import Any

from nmt.config.fields import setting
from nmt.errors import UserError, check_at_least


@dataclass(slots=True)
class CleaningConfig:
    """Changes to the text of a pair, and reasons to drop it.

    Always dropped are pairs with an empty side, with U+FFFD, which stands for bytes that could not be decoded, or with
    a target that is the same as the source, and all but the first of equal pairs.
    """

    normalize: bool = setting(
        True, "remove HTML tags and control characters, replace entities, compose characters, single spaces"
    )
    max_words: int | None = setting(
        150, "drop pairs with more words on a side (characters where no spaces divide words)"
    )
    max_ratio: float | None = setting(
        3.0, "drop pairs whose ratio of lengths (characters + 10) is this many times the median or more"
    )
    min_script: float | None = setting(
        0.5, "drop pairs if less than this share of a side's letters is in its usual scripts"
    )
    numbers: bool = setting(True, "drop pairs with numbers on both sides that differ")

    def __post_init__(self) -> None:
        check_at_least(1, "clean.", self, "max_words")
        if self.max_ratio is not None and self.max_ratio <= 1:
            raise UserError(f"clean.max_ratio={self.max_ratio} must be above 1; null turns the rule off")
        if self.min_script is not None and not 0 < self.min_script <= 1:
            raise UserError(f"clean.min_script={self.min_script} must be above 0 and at most 1; null turns it off")


@dataclass(slots=True)
class PrepareRun:
    """Settings of `python -m nmt.prepare`."""

    input: Any = setting(None, "file, folder, or [A,B,...]: aligned files, .tsv, .jsonl, .parquet, .tmx, .zip")
    output: str | None = setting(None, "new folder for {train,valid,test}.* and report.json")
    source: str = setting("de", "source language: file extension, language in TMX, and name of the column")
    target: str = setting("en", "same as source, for the target side")
    columns: list[str] = setting(list, "[SOURCE,TARGET]: names or numbers of columns, if not the two languages")
    valid_size: int = setting(1000, "pairs of the validation split")
    test_size: int = setting(1000, "pairs of the test split")
    valid: Any = setting(None, "existing validation set, used as it is instead of valid_size pairs of the input")
    test: Any = setting(None, "existing test set, used as it is instead of test_size pairs of the input")
    near: bool = setting(
        True, "also keep sentences out of the training text that differ from a held-out one in one word"
    )
    clean: CleaningConfig = field(default_factory=CleaningConfig)

    def __post_init__(self) -> None:
        for key in ("input", "valid", "test"):
            value = getattr(self, key)
            if value is not None:
                setattr(self, key, [str(path) for path in value] if isinstance(value, list) else [str(value)])
        if not self.input:
            raise UserError("input is not set; give a file or a folder: input=corpus.tmx or 'input=[a.tsv,b.de]'")
        if not self.output:
            raise UserError("output is not set; give the name of a new folder: output=data/mine")
        if self.source == self.target:
            raise UserError(f"source and target are both '{self.source}'; they must differ")
        for key, language in (("source", self.source), ("target", self.target)):
            if not language or language.startswith(".") or "/" in language:
                raise UserError(f"{key}={language!r} must be a language, such as de; it becomes a file extension")
        self.columns = [str(column) for column in self.columns]
        if len(self.columns) not in (0, 2) or self.columns and self.columns[0] == self.columns[1]:
            raise UserError(f"columns=[{','.join(self.columns)}] must be two different columns: columns=[1,2]")
        check_at_least(0, "", self, "valid_size", "test_size")
