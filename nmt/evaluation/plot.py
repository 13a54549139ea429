"""Pictures of attention weights. Only this module imports matplotlib, and only to draw."""

import logging
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmt.errors import UserError, extra_command, with_filename

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

CELL_SIZE = 0.3  # inches; fits text of FONT_SIZE
FONT_SIZE = 10  # points
MAX_SIDE = 24  # inches; cells and text of larger heat maps are scaled down
MAX_LABEL_LENGTH = 24  # characters
OTHER_FONTS = ["WenQuanYi Zen Hei", "Arial Unicode MS", "Microsoft YaHei", "Hiragino Sans", "FreeSans", "Unifont"]
ZERO_WIDTH_JOINERS = "\u200c\u200d"  # not printable, but they shape adjacent characters in Persian, Hindi and emoji
INK_COLOR = "0.15"  # a gray level of matplotlib


def draw_heat_map(path: Path, source: list[str], target: list[str], weights: np.ndarray) -> None:
    """Draw the word alignment of a sentence pair as a PNG, black on white (Bahdanau et al. 2014, figure 3).

    Args:
        path: PNG file to write; its folder must exist.
        source: words, one for each column.
        target: words, one for each row.
        weights: target words x source words, from 0 (white) to 1 (black); NaN and infinities are white.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"pictures need matplotlib; install it with: {extra_command('plot')}") from None
    assert weights.shape == (len(target), len(source)) and weights.size
    scale = min(1.0, MAX_SIDE / (CELL_SIZE * max(weights.shape)))
    inches = CELL_SIZE * scale * len(source), CELL_SIZE * scale * len(target)
    with matplotlib.rc_context({"font.family": find_font_families(), "font.size": FONT_SIZE * scale}):
        figure = Figure(figsize=inches)
        draw_cells(figure, source, target, weights)
        with warnings.catch_warnings(record=True) as caught, with_filename(path):
            warnings.simplefilter("always")
            figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.15)
    if any("missing from font" in str(warning.message) for warning in caught):
        warn_of_missing_glyphs()


def draw_cells(figure: "Figure", source: list[str], target: list[str], weights: np.ndarray) -> None:
    """Fill the figure with cells. Labels are outside of it; saving makes room for them."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(weights, cmap="gray_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    text_style: dict[str, Any] = {"parse_math": False, "color": INK_COLOR}
    axes.set_xticks(
        range(len(source)),
        [format_label(word) for word in source],
        rotation=50,
        ha="left",
        rotation_mode="anchor",
        **text_style,
    )
    axes.set_yticks(range(len(target)), [format_label(word) for word in target], **text_style)
    axes.tick_params(length=0, pad=4)
    rows, columns = weights.shape
    grid_style: dict[str, Any] = {"color": "0.9", "linewidth": 0.6}
    axes.vlines(np.arange(0.5, columns - 1), -0.5, rows - 0.5, **grid_style)
    axes.hlines(np.arange(0.5, rows - 1), -0.5, columns - 0.5, **grid_style)
    axes.spines[:].set(color=INK_COLOR, linewidth=0.8)


@cache
def warn_of_missing_glyphs() -> None:
    log.warning("no installed font has all characters of these words, so pictures show boxes; install Noto fonts")


@cache
def find_font_families() -> list[str]:
    """Return the installed font families, in the order in which they are tried for each character."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    scripts = sorted(
        (name for name in installed if name.startswith("Noto Sans")), key=lambda name: ("CJK" not in name, name)
    )
    return ["DejaVu Sans", *scripts, *(name for name in OTHER_FONTS if name in installed)]


def format_label(word: str) -> str:
    """Return a word as a label: shortened, and with unprintable characters replaced."""
    visible = "".join(c if c.isprintable() or c in ZERO_WIDTH_JOINERS else "·" for c in word)
    return visible if len(visible) <= MAX_LABEL_LENGTH else visible[: MAX_LABEL_LENGTH - 1] + "…"
