"""The Python API: `nmt.load` and what it returns."""

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmt.config import SIDES, SearchConfig, TranslateRun
from nmt.config.data import is_opposite_direction
from nmt.decoding.alignment import Record
from nmt.decoding.html_translation import translate_html
from nmt.decoding.translation import Translation, check_scores, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.model.ensemble import Ensemble
from nmt.model.kernels.cuda_graphs import with_cuda_graphs
from nmt.page.export import build_page
from nmt.runs.checkpoint import export_model, fetch_model, load_model
from nmt.system.command_line import build_config, to_dataclasses
from nmt.system.device import choose_device, choose_precision, prepare_model
from nmt.system.text import open_output


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model, or an ensemble of several, for use from Python.

    Methods raise `nmt.UserError` for invalid input.
    """

    translator: Translator
    paths: list[str]  # of runs, step folders, exported models or downloads from the hub
    average: int

    def translate(
        self, lines: Iterable[str], weights: bool = False, prefixes: Iterable[str] | None = None
    ) -> list[Translation]:
        """Return the best translation of each line, or its first sample.

        Args:
            weights: whether to keep attention weights, which are in `Translation.record`.
            prefixes: text that each translation starts with, one string for each line.
        """
        return [options[0] for options in self.translate_n_best(lines, weights, prefixes)]

    def translate_n_best(
        self, lines: Iterable[str], weights: bool = False, prefixes: Iterable[str] | None = None
    ) -> list[list[Translation]]:
        """Return the `n_best` translations of each line, best first; fewer if the search found fewer.

        Arguments are as in `translate`.
        """
        sides = check_lines(lines) if prefixes is None else check_lines(lines, prefixes)
        results = self.translator.translate(sides[0], weights, prefixes=sides[1] if prefixes is not None else None)
        best = [options[0] for options in results]
        check_scores(best, 1)
        warn_if_truncated(best, self.translator.config, 1)
        return results

    def translate_html(self, document: str) -> str:
        """Return an HTML document, or a part of one, with its text translated and its tags around the same words.

        The model must have attention, which says where tags belong.
        """
        check_lines([document])
        return translate_html(self.translator, document)

    def score(self, sources: Iterable[str], targets: Iterable[str]) -> list[float]:
        """Return the log-probability of each target given its source, `</s>` included."""
        source_lines, target_lines = check_lines(sources, targets)
        scored = self.translator.score(source_lines, target_lines)
        check_scores(scored, 1)
        return [translation.score for translation in scored]

    def align(self, sources: Iterable[str], targets: Iterable[str]) -> list[Record]:
        """Align sentence pairs by forced decoding.

        `Record.links()` returns links between `Record.source_words` and `Record.target_words`.
        """
        if not self.translator.model.attends:
            raise UserError("the model has no attention, so it cannot align; use a model with attention")
        source_lines, target_lines = check_lines(sources, targets)
        source_words = [line.split() for line in source_lines]
        target_words = [line.split() for line in target_lines]
        return self.translator.align(source_words, target_words, segment=True)

    def export(self, path: str | Path) -> None:
        """Export the model to a page that translates, if the path ends in `.html`, or else to a new folder.

        The checkpoint is read again, in full precision. The page follows the settings of search.
        """
        if len(self.paths) > 1:
            raise UserError("an ensemble of several models cannot be exported; export each model")
        export_checkpoint(self.paths[0], str(path), self.average, self.translator.config)


def load(
    checkpoint: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    precision: str = "auto",
    average: int = 1,
    **search: Any,
) -> Model:
    """Load a model, or an ensemble of several models that averages their probabilities.

    Args:
        checkpoint: a run (its best checkpoint, else its last), a step folder, an exported model, or one on the Hugging
            Face hub, given as `hf://OWNER/NAME` or `hf://OWNER/NAME@REVISION`; or a list of them.
        device, precision, average: as the keys of the commands.
        search: settings `search.*`, as in `beam=5, n_best=3`.

    Raises:
        UserError: a model does not exist or is damaged, models have different vocabularies or opposite directions, or a
            setting is invalid.
    """
    paths = [*map(str, checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint])]
    settings = {"checkpoint": paths, "device": device, "precision": precision, "average": average, "search": search}
    command: TranslateRun = to_dataclasses(build_config(TranslateRun, settings))
    paths = [*map(fetch_model, paths)]
    device_to_use = choose_device(command.device)
    translator = open_translator(paths, device_to_use, command.precision, command.average, command.search)
    return Model(translator, [*map(os.path.abspath, paths)], command.average)


def open_translator(
    paths: list[str], device: torch.device, precision: str, average: int, search: SearchConfig
) -> Translator:
    """Load models and return their translator, for `load` and the commands that translate or align.

    Raises:
        UserError: a model cannot be read, or models have different vocabularies or opposite directions.
    """
    loaded_models = [load_model(path, average) for path in paths]
    first = loaded_models[0]
    for path, loaded in zip(paths, loaded_models, strict=True):
        same = [getattr(loaded.tokenizer, side).model == getattr(first.tokenizer, side).model for side in SIDES]
        if not all(same):
            raise UserError(f"{paths[0]} and {path} have different vocabularies; an ensemble must share a tokenizer")
        if is_opposite_direction(first.config.data, loaded.config.data):
            raise UserError(
                f"{path} translates in the opposite direction of {paths[0]}; an ensemble needs one direction"
            )
        prepare_model(loaded.model, choose_precision(precision, device), device)
    training_data = [loaded.config.data for loaded in loaded_models]
    model = first.model if len(loaded_models) == 1 else Ensemble([loaded.model for loaded in loaded_models])
    return Translator(
        with_cuda_graphs(model, device),
        first.tokenizer,
        search.with_source_limit_of(*training_data),
        device,
        training_data[0].languages,
    )


def export_checkpoint(checkpoint: str, output: str, average: int, search: SearchConfig) -> None:
    """Export a model to a page or to a folder, for `Model.export` and `nmt.export`.

    Raises:
        UserError: the checkpoint cannot be read, the output cannot be written, or a setting of search does not work in
            a page.
    """
    model, tokenizer, config, *_ = load_model(checkpoint, average)
    if output.lower().endswith(".html"):
        with open_output(output) as file:
            file.write(build_page(model, tokenizer, config, search).encode())
    else:
        export_model(model, tokenizer, config, Path(output))


def check_lines(*sides: Iterable[str]) -> list[list[str]]:
    """Return the lines of one side, or of two parallel sides, without line breaks at their ends.

    Raises:
        UserError: a line is not text, or the sides have different numbers of lines.
    """
    if any(isinstance(side, str) or not isinstance(side, Iterable) for side in sides):
        raise UserError("give a list of lines")
    lines_of_sides = [list(side) for side in sides]
    for line in itertools.chain(*lines_of_sides):
        if not isinstance(line, str):
            raise UserError(f"{line!r:.80} is not a string but of type {type(line).__name__}")
        if re.search("[\ud800-\udfff]", line):  # half of a surrogate pair
            raise UserError(f"{line[:80]!r} is not valid text: it cannot be encoded as UTF-8")
    if len({*map(len, lines_of_sides)}) > 1:
        counts = " and ".join(f"{len(lines):,}" for lines in lines_of_sides)
        raise UserError(f"got {counts} lines; both sides need the same number")
    return [[re.sub(r"\r?\n\Z", "", line) for line in lines] for lines in lines_of_sides]
