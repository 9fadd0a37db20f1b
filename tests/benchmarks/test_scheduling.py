"""The scheduling benchmark: graphs are as wide as it says, and limits bite."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import scheduling
from nimble_core.ir.call_graph import build_graph, graph_from_edges

CASES = [("chains", 1), ("chains", 7), ("layered", 16), ("training", 45)]


@pytest.mark.parametrize(("shape", "wide"), CASES)
def test_a_program_has_the_hazards_that_were_drawn(shape: str, wide: int) -> None:
    edges = scheduling.SHAPES[shape](300, wide)
    graph = build_graph(scheduling.program_of(300, edges))
    assert graph.edges == graph_from_edges(300, edges).edges


def result(**changes: Any) -> dict[str, Any]:
    """One small case as measured, with a few values changed."""
    measured = scheduling.measure(
        "chains", 1_300, 4, limit_s=30, hopeless={"arena", "contention, 32 streams"}, memory=False
    )
    measured["best_s"] = dict.fromkeys(measured["best_s"], 0.0)
    return measured | changes


def test_limits_bite() -> None:
    good = result()
    assert scheduling.missed(good) == []
    slow = result(best_s=good["best_s"] | {"check": 9.0, "nimble": None})
    assert scheduling.missed(slow) == ["schedule over 0.1 s", "check over 0.02 s"]
    assert scheduling.missed(result(resident_bytes=3 << 30)) == ["3.0 GiB resident"]
