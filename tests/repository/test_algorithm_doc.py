"""docs/algorithm.md does what it says: its Python runs, its figure shows the same plan, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithm.md"
TEXT = PAGE.read_text(encoding="utf-8")


def run_blocks(text: str) -> dict[str, object]:
    """Run the Python blocks one after the other in one namespace, and return it."""
    namespace: dict[str, object] = {"__name__": "algorithm"}
    for number, source in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
        exec(compile(source, f"docs/algorithm.md block {number}", "exec"), namespace)
    return namespace


def test_python_blocks_run_in_order() -> None:
    assert TEXT.count("```python\n") == 5
    run_blocks(TEXT)


def test_a_block_that_is_wrong_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        run_blocks(TEXT.replace("(9, 5)", "(9, 6)"))


def test_references_are_all_cited_and_numbered() -> None:
    body, _, references = TEXT.partition("## References")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", references, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {int(number) for number in re.findall(r"\[(\d+)\]", body)} == set(numbers)


def test_the_figure_shows_the_plan_of_the_example() -> None:
    from nimble_core.ir.call_graph import graph_from_edges
    from nimble_core.ir.costs import uniform_costs
    from nimble_core.scheduling.policies import nimble

    figure = ElementTree.parse(PAGE.parent / "images" / "algorithm.svg").getroot()
    covers = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4), (4, 5), (4, 6), (5, 7), (6, 7)]
    plan = nimble(graph_from_edges(8, covers), uniform_costs(8))
    lines = [line.attrib for line in figure.iter("{http://www.w3.org/2000/svg}line")]
    waits = [line for line in lines if line["marker-end"] == "url(#w)"]
    thick = [line for line in lines if line["stroke-width"] == "3"]
    assert len(waits) == len(plan.syncs)
    assert len(thick) == 2 * plan.matched  # matched edges, and the same edges within streams
    circles = [circle.attrib["fill"] for circle in figure.iter("{http://www.w3.org/2000/svg}circle")]
    streams = circles[-8:]  # in the order of calls
    assert [streams.index(fill) for fill in streams] == [plan.stream.index(lane) for lane in plan.stream]
