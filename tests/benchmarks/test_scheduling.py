"""The scheduling benchmark: graphs are as wide as it says, and limits bite."""

from __future__ import annotations

import pytest

from benchmarks import scheduling
from nimble_core.ir.call_graph import build_graph, graph_from_edges

CASES = [("chains", 1), ("chains", 7), ("layered", 16), ("training", 45)]


@pytest.mark.parametrize(("shape", "wide"), CASES)
def test_a_program_has_the_hazards_that_were_drawn(shape: str, wide: int) -> None:
    edges = scheduling.SHAPES[shape](300, wide)
    graph = build_graph(scheduling.program_of(300, edges))
    assert graph.edges == graph_from_edges(300, edges).edges
