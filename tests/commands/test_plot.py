"""Tests of heat maps."""

import logging
import sys

import numpy as np
import pytest

from nmt.errors import UserError
from nmt.evaluation import plot
from nmt.evaluation.plot import draw_heat_map

pytest.importorskip("matplotlib")
SOURCE, TARGET = ["Ein", "Hund", "läuft", "."], ["A", "dog", "runs", "."]


def read_gray_pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3].mean(axis=2)


def test_heat_map_is_dark_where_weights_are_large(tmp_path):
    """Rows are target words; NaN is white."""
    one = np.zeros((4, 4))
    one[0, 3] = 1  # first target word, last source word: the upper right cell
    drawn = []
    for weights in (np.zeros((4, 4)), np.full((4, 4), np.nan), one):
        draw_heat_map(tmp_path / "a.png", SOURCE, TARGET, weights)
        drawn.append(read_gray_pixels(tmp_path / "a.png"))
    blank, nan, picture = drawn
    np.testing.assert_array_equal(nan, blank)
    rows, columns = np.nonzero(blank - picture > 0.5)
    cell = plot.CELL_SIZE * 150
    assert picture.shape[1] - columns.min() < 2 * cell and picture.shape[0] - rows.min() > 3.5 * cell


def test_heat_map_labels_are_literal(tmp_path):
    words = ["$x^2$", "$", "\\frac{", "a_b", "%", "tab\there", "\x00", "w" * 5000]
    draw_heat_map(tmp_path / "a.png", words, words, np.eye(len(words)))
    assert max(read_gray_pixels(tmp_path / "a.png").shape) < 2000
    assert plot.format_label("tab\there\n") == "tab·here·"
    assert len(plot.format_label("w" * 5000)) == plot.MAX_LABEL_LENGTH
    assert plot.format_label("می\u200cخواهم") == "می\u200cخواهم"  # the zero-width non-joiner changes its neighbors


def test_missing_glyphs_are_logged_once(tmp_path, monkeypatch, caplog, recwarn):
    plot.warn_of_missing_glyphs.cache_clear()
    monkeypatch.setattr(plot, "find_font_families", lambda: ["DejaVu Sans"])  # has no Chinese
    with caplog.at_level(logging.WARNING, logger="nmt"):
        for _ in range(2):
            draw_heat_map(tmp_path / "a.png", ["漢", "字"], ["漢", "字"], np.eye(2))
    assert len(caplog.records) == 1 and not recwarn.list


def test_missing_matplotlib_error_names_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r'pip install "attention-nmt\[plot\]"'):
        draw_heat_map(tmp_path / "a.png", SOURCE, TARGET, np.eye(4))
    assert not list(tmp_path.iterdir())
