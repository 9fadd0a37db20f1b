"""The scheduling benchmark: graphs are as wide as it says, and limits bite."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import scheduling
from nimble_core.algorithms.antichain import width
from nimble_core.ir.call_graph import build_graph, graph_from_edges, predecessors

CASES = [("chains", 1), ("chains", 7), ("layered", 16), ("training", 45)]


@pytest.mark.parametrize(("shape", "wide"), CASES)
def test_a_program_has_the_hazards_that_were_drawn(shape: str, wide: int) -> None:
    edges = scheduling.SHAPES[shape](300, wide)
    graph = build_graph(scheduling.program_of(300, edges))
    assert graph.edges == graph_from_edges(300, edges).edges


@pytest.mark.parametrize("wide", [1, 7, 50])
def test_chains_are_as_wide_as_promised(wide: int) -> None:
    graph = graph_from_edges(500, scheduling.chains(500, wide, seed=1))
    assert width(predecessors(graph)) == wide
    assert wide == 1 or len(graph.meg) > 500 - wide  # they are not apart


def test_every_weight_gradient_is_a_sink() -> None:
    edges = scheduling.training(1_000, 150, seed=1)
    assert 1_000 - len({u for u, _ in edges}) == pytest.approx(150, abs=1)


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


def test_a_step_is_given_up_in_time() -> None:
    with pytest.raises(scheduling.OutOfTime), scheduling.at_most(0.01):
        time.sleep(10)
    with scheduling.at_most(0.01):
        pass
    time.sleep(0.02)  # the alarm is off again
