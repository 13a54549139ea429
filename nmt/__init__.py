"""nmt: recurrent, attention-based machine translation, end to end. From Python:

import nmt

model = nmt.load("runs/mine", beam=5)
for translation in model.translate(["Ein Hund schläft.", "Eine Katze läuft."]):
    print(translation.text, translation.score)
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import nmt.runtime.openmp  # noqa: F401  # isort: skip  it sets what torch reads once
import torch

from nmt.config import SearchConfig, TranslateRun
from nmt.config.data import is_opposite_direction
from nmt.decoding.alignment import Record
from nmt.decoding.translator import Translation, Translator, check_scores, warn_of_cuts
from nmt.errors import UserError
from nmt.model.ensemble import Ensemble
from nmt.model.kernels.cuda_graphs import maybe_graph
from nmt.runtime.command_line import build_settings
from nmt.runtime.device import choose_device, choose_precision, move_model
from nmt.training.checkpoint import export, load_model

__all__ = ["Model", "Record", "Translation", "UserError", "load"]

LINE_END = re.compile(r"\r?\n\Z")


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model, or several as one: what the commands do, from Python. What cannot be is a UserError."""

    translator: Translator
    paths: list[str]  # what it was loaded from
    average: int

    def translate(
        self, lines: Iterable[str], weights: bool = False, beginnings: Iterable[str] | None = None
    ) -> list[Translation]:
        """The best translation of each line, or the first sample; with `weights` its `.record` says where the model
        looked. Translations begin with the words of `beginnings`, one string for each line."""
        return [options[0] for options in self.translate_n_best(lines, weights, beginnings)]

    def translate_n_best(
        self, lines: Iterable[str], weights: bool = False, beginnings: Iterable[str] | None = None
    ) -> list[list[Translation]]:
        """The `n_best` translations of each line, the best first; fewer where there are no more."""
        given, *begun = texts(lines, *([] if beginnings is None else [beginnings]))
        found = self.translator.translate(given, weights, beginnings=begun[0] if begun else None)
        best = [options[0] for options in found]
        check_scores(best, 1)
        warn_of_cuts(best, self.translator.config, 1)
        return found

    def score(self, sources: Iterable[str], targets: Iterable[str]) -> list[float]:
        """The log-probability of each given pair, `</s>` included."""
        given, wanted = texts(sources, targets)
        scored = self.translator.score(given, wanted)
        check_scores(scored, 1)
        return [one.score for one in scored]

    def align(self, sources: Iterable[str], targets: Iterable[str]) -> list[Record]:
        """Where the model looks as it reads given pairs; `.links()` are links between words, which are `.source_words`
        and `.target_words`."""
        if not self.translator.model.attends:
            raise UserError(f"{self.paths[0]} has no attention, so nothing can be aligned by it")
        left, right = ([line.split() for line in side] for side in texts(sources, targets))
        return self.translator.align(left, right, divide=True)

    def export(self, folder: str | Path) -> None:
        """Write the model without what only training needs: a folder that all commands take as `checkpoint=`. It is
        read once more, in full precision: of a run that is still trained, what is its best checkpoint by now."""
        if len(self.paths) > 1:
            raise UserError("several models are no one model that could be exported; export each")
        model, tokenizer, config, *_ = load_model(self.paths[0], self.average)
        export(model, tokenizer, config, Path(folder))


def load(
    checkpoint: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    precision: str = "auto",
    average: int = 1,
    **search: Any,
) -> Model:
    """A model for use: of a run (its best, else its last checkpoint), a step folder, or an exported model; several of
    them are one, by the mean of their probabilities. Arguments are as the keys of the commands; `search` are those of
    `search.*`, as in `beam=5, n_best=3`.

    Raises:
        UserError: there is no such model, or a damaged one, or two have different vocabularies or opposite
            directions; a setting cannot be.
    """
    known = {item.name for item in fields(SearchConfig)}
    if unknown := sorted(search.keys() - known):
        raise UserError(f"there is no search.{unknown[0]}; there are {', '.join(sorted(known))}")
    paths = [*map(str, checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint])]
    given = {"checkpoint": paths, "device": device, "precision": precision, "average": average, "search": search}
    command: TranslateRun = build_settings(TranslateRun, given)  # refuses what cannot be
    settings = command.precision, command.average, command.search
    translator = open_translator(paths, choose_device(command.device), *settings)
    return Model(translator, [*map(os.path.abspath, paths)], command.average)


def open_translator(
    paths: list[str], device: torch.device, precision: str, average: int, search: SearchConfig
) -> Translator:
    """What `load` and `nmt.translate` translate with.

    Raises:
        UserError: a model cannot be read, or two have different vocabularies or opposite directions.
    """
    loaded = [load_model(path, average) for path in paths]
    tokenizer, trained = loaded[0].tokenizer, [other.config.data for other in loaded]
    for path, other in zip(paths, loaded, strict=True):
        for side in ("source", "target"):
            if getattr(other.tokenizer, side).model != getattr(tokenizer, side).model:
                raise UserError(
                    f"{paths[0]} and {path} have different {side} vocabularies; models that translate as one must "
                    "share a tokenizer"
                )
        if is_opposite_direction(trained[0], other.config.data):
            raise UserError(f"{path} translates the other way than {paths[0]}; both cannot translate as one")
        move_model(other.model, choose_precision(precision, device), device)
    model = loaded[0].model if len(loaded) == 1 else Ensemble([other.model for other in loaded])
    key = " ".join(other.key for other in loaded)
    return Translator(maybe_graph(model, device), tokenizer, search.after(*trained), device, key)


def texts(*sides: Iterable[str]) -> list[list[str]]:
    """The lines of one side, or of two of which each line belongs to the same line of the other; without their ends,
    which lines of a file have.

    Raises:
        UserError: one is no text, or the sides differ in length.
    """
    if any(isinstance(side, str) for side in sides):
        raise UserError("one string was given; give a list of lines")
    if strange := [side for side in sides if not isinstance(side, Iterable)]:
        raise UserError(f"{strange[0]!r:.80} is no list of lines")
    found = [list(side) for side in sides]
    for line in (line for side in found for line in side):
        try:
            str.encode(line)
        except TypeError:
            raise UserError(f"{line!r:.80} is no text but of type {type(line).__name__}") from None
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UserError(f"{line[:80]!r} is no text: it cannot be written as UTF-8") from None
    if len(found[0]) != len(found[-1]):
        raise UserError(f"{len(found[0]):,} lines and {len(found[-1]):,} belong together; their numbers must be equal")
    return [[LINE_END.sub("", line) for line in side] for side in found]
