"""Drawings of the paper's results: all that was measured is in them, and nothing where nothing was."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import paper, paper_figures
from benchmarks.table import NOTHING
from tests.benchmarks.test_paper import measured

ROWS = paper.rows_of([*measured("resnet50", several=100.0), *measured("train-bert", several=500.0)])
DRAWN = {
    "inference": (
        lambda rows: paper_figures.speeds(rows, paper.INFERENCE[1:]),
        ["ResNet-50", "10.00x + streams", "4.00x"],
    ),
    "training": (
        lambda rows: paper_figures.speeds(rows, paper.STEP[1:], training=True),
        ["BERT-base 128, 32", "2.00x"],
    ),
    "streams": (paper_figures.streams_against_concurrency, ["ResNet-50", "1.25x"]),
    "host": (lambda rows: paper_figures.host_speeds(rows, "resnet50"), ["1000 µs", "900 µs", "200 µs", "100 µs"]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_shows_what_was_measured(name: str) -> None:
    draw, texts = DRAWN[name]
    shown = [text.strip() for text in ElementTree.fromstring(draw(ROWS)).itertext()]
    assert [text for text in texts if not any(one.startswith(text) for one in shown)] == []
    assert draw({}) == f"<p>{NOTHING}</p>"


def test_bars_are_as_long_as_what_they_show() -> None:
    drawn = paper_figures.host_speeds(ROWS, "resnet50")
    widths = [int(one) for one in re.findall(r"width:(\d+)px", drawn)]
    assert widths == [paper_figures.LONGEST_PX * us // 1000 for us in (1000, 900, 200, 100)]
    published = paper_figures.speeds(ROWS, paper.INFERENCE[1:]).partition("dashed")
    assert "4.32x published" in published[2]


def test_a_table_keeps_every_cell_as_text() -> None:
    root = ElementTree.fromstring(paper_figures.table("| a | b |\n| --- | --- |\n| 1 & <b> | 2 |"))
    assert [[cell.text for cell in row] for row in root] == [["a", "b"], ["1 & <b>", "2"]]
    assert paper_figures.table(NOTHING) == f"<p>{NOTHING}</p>"
