import logging
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmt.errors import UserError
from nmt.evaluation import plot
from nmt.evaluation.plot import draw_curves, draw_heat_map

pytest.importorskip("matplotlib")
SOURCE, TARGET = ["Ein", "Hund", "läuft", "."], ["A", "dog", "runs", "."]


def size(path):
    """Width and height of a PNG, pixels."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3].mean(axis=2)


def test_black_where_the_weight_is(tmp_path):
    draw_heat_map(tmp_path / "all.png", SOURCE, TARGET, np.ones((4, 4)))
    draw_heat_map(tmp_path / "none.png", SOURCE, TARGET, np.zeros((4, 4)))
    draw_heat_map(tmp_path / "nan.png", SOURCE, TARGET, np.full((4, 4), np.nan))
    assert pixels(tmp_path / "all.png").mean() < pixels(tmp_path / "none.png").mean() - 0.3
    np.testing.assert_array_equal(pixels(tmp_path / "nan.png"), pixels(tmp_path / "none.png"))


def test_rows_are_target_words_from_above(tmp_path):
    weights = np.zeros((4, 4))
    weights[0, 3] = 1  # the first target word looks at the last source word: the cell on the upper right
    draw_heat_map(tmp_path / "a.png", SOURCE, TARGET, weights)
    draw_heat_map(tmp_path / "b.png", SOURCE, TARGET, np.zeros((4, 4)))
    rows, columns = np.nonzero(pixels(tmp_path / "b.png") - pixels(tmp_path / "a.png") > 0.5)
    page, cell = pixels(tmp_path / "a.png"), plot.CELL_SIZE * 150
    assert page.shape[1] - columns.min() < 2 * cell and page.shape[0] - rows.min() > 3.5 * cell


def test_the_picture_grows_with_the_words_up_to_a_limit(tmp_path):
    sizes = []
    for words in (4, 40, 100):
        draw_heat_map(tmp_path / "a.png", ["Wort"] * words, ["word"] * words, np.eye(words))
        sizes.append(size(tmp_path / "a.png"))
    assert sizes[0] < sizes[1] < sizes[2]
    assert min(sizes[1]) > 40 * plot.CELL_SIZE * 150 and max(sizes[2]) < 1.2 * plot.MAX_SIDE * 150


def test_words_are_shown_as_they_are(tmp_path):
    words = ["$x^2$", "$", "\\frac{", "a_b", "%", "tab\there", "\x00", "w" * 5000]
    draw_heat_map(tmp_path / "a.png", words, words, np.eye(len(words)))
    assert max(size(tmp_path / "a.png")) < 2000
    assert (
        plot.format_label("tab\there\n") == "tab·here·" and len(plot.format_label("w" * 5000)) == plot.MAX_LABEL_LENGTH
    )
    assert plot.format_label("می\u200cخواهم") == "می\u200cخواهم"  # the joiner shapes its neighbors


def test_glyphs_that_no_font_has_are_one_line_in_the_log(tmp_path, monkeypatch, caplog, recwarn):
    plot.warn_of_missing_glyphs.cache_clear()
    monkeypatch.setattr(plot, "find_font_families", lambda: ["DejaVu Sans"])  # matplotlib's own: no Chinese in it
    with caplog.at_level(logging.WARNING, logger="nmt"):
        for _ in range(2):
            draw_heat_map(tmp_path / "a.png", ["漢", "字"], ["漢", "字"], np.eye(2))
    assert len(caplog.records) == 1 and not recwarn.list


def test_without_matplotlib_there_is_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'nmt\[plot\]'"):
        draw_heat_map(tmp_path / "a.png", SOURCE, TARGET, np.eye(4))
    assert not list(tmp_path.iterdir())


def test_importing_it_does_not_import_matplotlib():
    program = "import sys, nmt.evaluation.plot; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_curves_are_drawn(tmp_path: Path) -> None:
    lines = {"with": [("up to 5", 3, 90.0), ("6-10", 9, 80.0)], "without": [("up to 5", 3, 50.0), ("6-10", 9, None)]}
    draw_curves(tmp_path / "lengths.png", lines, "source words", "BLEU")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
