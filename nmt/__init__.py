"""Attention-based machine translation.

import nmt

model = nmt.load("runs/mine", beam=5)
for translation in model.translate(["Ein Hund schläft.", "Eine Katze läuft."]):
    print(translation.text, translation.score)
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from nmt.errors import UserError

if TYPE_CHECKING:
    from nmt.api import Model, Record, Translation, load

# OpenMP threads that wait spin for a few microseconds, not for milliseconds, in which all would wait for one whose core
# another process has (experiments/cpu_speed.md). OpenMP reads this when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "2000"
__version__ = "0.1.0"
__all__ = ["Model", "Record", "Translation", "UserError", "load"]


def __getattr__(name: str) -> Any:
    """Import the API, and PyTorch with it, when it is first used, so that `--help` does not wait for them."""
    if name in __all__:
        return getattr(importlib.import_module("nmt.api"), name)
    raise AttributeError(f"module 'nmt' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
