"""Drawings of the paper's results: all that was measured is in them, and nothing where nothing was."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import paper, paper_figures
from benchmarks.table import NOTHING
from tests.benchmarks.test_paper import measured

ROWS = paper.rows_of([*measured("resnet50", several=100.0), *measured("train-bert", several=500.0)])
DRAWN = {
    "inference": (lambda rows: paper_figures.speeds(rows, paper.INFERENCE[1:]), ["ResNet-50", "10.00x", "4.00x"]),
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
    root = ElementTree.fromstring(draw(ROWS))
    shown = [one.text for one in root.iter("text")]
    assert [text for text in texts if text not in shown] == []
    width = float(root.attrib["viewBox"].split()[2])
    assert all(float(one.attrib["x"]) + float(one.attrib["width"]) <= width for one in root.iter("rect"))
    assert draw({}) == f"<p>{NOTHING}</p>"


def test_a_table_keeps_every_cell_as_text() -> None:
    root = ElementTree.fromstring(paper_figures.table("| a | b |\n| --- | --- |\n| 1 & <b> | 2 |"))
    assert [[cell.text for cell in row] for row in root] == [["a", "b"], ["1 & <b>", "2"]]
    assert paper_figures.table(NOTHING) == f"<p>{NOTHING}</p>"
