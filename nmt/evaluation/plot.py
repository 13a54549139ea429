"""Pictures of attention. The only file that imports matplotlib, and only when a picture is drawn."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmt.errors import UserError, with_filename

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

CELL = 0.3  # inches; text of FONT points stands well in it
FONT = 10
LARGEST = 24  # inches of a side; beyond, cells and text shrink
LONGEST = 24  # characters of a word that are shown
NOTO = ("CJK SC", "CJK JP", "CJK KR", "Arabic", "Hebrew", "Devanagari", "Bengali", "Gujarati", "Gurmukhi", "Kannada",
        "Malayalam", "Tamil", "Telugu", "Sinhala", "Thai", "Lao", "Khmer", "Myanmar", "Ethiopic")  # fmt: skip
SCRIPTS = ("Noto Sans", *(f"Noto Sans {script}" for script in NOTO), "WenQuanYi Zen Hei", "Droid Sans Fallback",
           "Noto Emoji", "Symbola", "Arial Unicode MS", "Segoe UI", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic",
           "Hiragino Sans", "Nirmala UI", "FreeSans", "Unifont")  # fmt: skip
JOINERS = "\u200c\u200d"  # not printable, but they shape their neighbors: Persian, Hindi, emoji
INK = "0.15"


def heat_map(path: Path, source: list[str], target: list[str], weights: np.ndarray) -> None:
    """Draw the alignment of one pair of sentences, black on white (Bahdanau et al. 2014, figure 3); write it as PNG.

    Args:
        path: the picture; its folder exists.
        source: words, one for each column.
        target: words, one for each row.
        weights: target words x source words, 0 (white) to 1 (black); what is not finite stays white.

    Raises:
        UserError: matplotlib is not installed.
    """
    assert weights.shape == (len(target), len(source)) and weights.size
    scale = min(1.0, LARGEST / (CELL * max(weights.shape)))
    with canvas(path, (CELL * scale * len(source), CELL * scale * len(target)), FONT * scale) as figure:
        draw(figure, source, target, weights)


def curves(path: Path, lines: Mapping[str, Sequence[tuple[Any, int, float | None]]], across: str, up: str) -> None:
    """Draw named lines of (place, number of sentences, value), as `metrics.bleu_by_length` returns, and write PNG. A
    place is a name or a number.

    Raises:
        UserError: matplotlib is not installed.
    """
    with canvas(path, (6, 3.2), FONT) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        looks = product((INK, "0.55", "0.75"), ("-o", "--s", ":^", "-.d"))
        drawn = []
        for points, (ink, style) in zip(lines.values(), cycle(looks), strict=False):
            places = [(place, value) for place, _, value in points if value is not None]
            drawn += axes.plot(*zip(*places, strict=True), style, color=ink, markersize=4, linewidth=1, clip_on=False)
        axes.set_xlabel(across, color=INK)
        axes.set_ylabel(up, color=INK)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        for text in axes.legend(drawn, list(lines), frameon=False).get_texts():
            text.set_parse_math(False)


@contextmanager
def canvas(path: Path, inches: tuple[float, float], font: float) -> Iterator["Figure"]:
    """An empty figure that is written to `path` at the end.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'nmt[plot]'") from None
    with matplotlib.rc_context({"font.family": installed_fonts(), "font.size": font}):
        figure = Figure(figsize=inches)
        yield figure
        save(figure, path)


def draw(figure: "Figure", source: list[str], target: list[str], weights: np.ndarray) -> None:
    """The cells fill the figure; words stand outside, where saving makes room for them."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(weights, cmap="gray_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    literal: dict[str, Any] = {"parse_math": False, "color": INK}
    axes.set_xticks(
        range(len(source)), [shown(word) for word in source], rotation=50, ha="left", rotation_mode="anchor", **literal
    )
    axes.set_yticks(range(len(target)), [shown(word) for word in target], **literal)
    axes.tick_params(length=0, pad=4)
    rows, columns = weights.shape
    grid: dict[str, Any] = {"color": "0.9", "linewidth": 0.6}
    axes.vlines(np.arange(0.5, columns - 1), -0.5, rows - 0.5, **grid)
    axes.hlines(np.arange(0.5, rows - 1), -0.5, columns - 0.5, **grid)
    axes.spines[:].set(color=INK, linewidth=0.8)


def save(figure: "Figure", path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with with_filename(path):
            figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.15)
    for warning in caught:
        if "missing from font" in str(warning.message):  # once for each glyph
            warn_of_missing_glyphs()
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@cache
def warn_of_missing_glyphs() -> None:
    log.warning("no installed font has all characters of these words, so pictures show boxes; Noto fonts have them")


@cache
def installed_fonts() -> list[str]:
    """Font families to try for each character, the first first."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in SCRIPTS if name in installed)]


def shown(word: str) -> str:
    """A word as a label: short, and without what would break the line."""
    visible = "".join(c if c.isprintable() or c in JOINERS else "·" for c in word)
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "…"
