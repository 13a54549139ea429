"""nmt: recurrent, attention-based machine translation, end to end. From Python:

import nmt

model = nmt.load("runs/mine", beam=5)
for translation in model.translate(["Ein Hund schläft.", "Eine Katze läuft."]):
    print(translation.text, translation.score)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.alignment import Record
from nmt.checkpoint import export, load_model
from nmt.config import SearchConfig, TrainRun
from nmt.distributed import choose_device, choose_precision, place
from nmt.errors import UserError
from nmt.model.seq2seq import Seq2Seq
from nmt.translator import Translation, Translator

__all__ = ["Model", "Record", "Translation", "UserError", "load"]


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model: what the commands do, from Python."""

    translator: Translator
    config: TrainRun  # the settings that it was trained with

    def translate(self, lines: Sequence[str], weights: bool = False) -> list[Translation]:
        """The best translation of each line; with `weights` `.record` says where the model looked."""
        return [options[0] for options in self.translator.translate(lines, weights)]

    def translate_n_best(self, lines: Sequence[str], weights: bool = False) -> list[list[Translation]]:
        """The `n_best` translations of each line, the best first; fewer where there are no more."""
        return self.translator.translate(lines, weights)

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[float]:
        """The log-probability of each given pair, `</s>` included."""
        return [scored.score for scored in self.translator.score(sources, targets)]

    def align(self, sources: Sequence[str], targets: Sequence[str]) -> list[Record]:
        """Where the model looks as it reads given pairs; `.links()` are links between words."""
        return self.translator.align([line.split() for line in sources], [line.split() for line in targets])

    def export(self, folder: str | Path) -> None:
        """Write the model without what only training needs: a folder that all commands take as `checkpoint=`.

        Raises:
            UserError: there is something already, or it cannot be written.
        """
        assert isinstance(self.translator.model, Seq2Seq)
        export(self.translator.model, self.translator.tokenizer, self.config, Path(folder))


def load(path: str | Path, *, device: str = "auto", precision: str = "auto", average: int = 1, **search: Any) -> Model:
    """A model for use: of a run (its best, else its last checkpoint), a step folder, or an exported model.

    Args:
        device, precision, average: as the keys of the commands.
        search: keys of `search.*`, as in `beam=5, n_best=3`.

    Raises:
        UserError: there is no such model, or a damaged one; a setting that cannot be.
    """
    where = choose_device(device)
    model, tokenizer, config, *_ = load_model(str(path), average)
    place(model, choose_precision(precision, where), where)
    return Model(Translator(model, tokenizer, SearchConfig(**search), where), config)
