"""How much runs side by side: what the graph allows and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nimble_core.algorithms.antichain import level_width, width
from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_count
from nimble_viz.report.data import ReportData

__all__ = ["EXACT_CALLS", "flight_times", "flights", "graph_width", "in_flight", "observed"]

EXACT_CALLS = 10_000
"""Up to so many calls the width is computed exactly; above, a lower bound is."""


def graph_width(graph: CallGraph) -> tuple[int, str]:
    """Count the most calls of which none must wait for another; also as text, ``"at least 9"`` if it is a bound."""
    before = predecessors(graph, meg=True)
    if graph.size <= EXACT_CALLS:
        exact = width(before)
        return exact, format_count(exact)
    bound = level_width(before)
    return bound, f"at least {format_count(bound)} (the most on one level; not exact above {EXACT_CALLS:,} calls)"


def observed(report: ReportData, policy: str) -> dict[str, Any] | None:
    """Return how many kernels (on the host: calls) a replay ran at one time; None if it was not watched."""
    line = report.timeline(policy)
    if line is None or not line.spans:
        return None
    most, mean = in_flight(line)
    return {"most": most, "mean": f"{mean:.2f}", "source": line.source, "reliable": line.reliable}


def in_flight(line: Timeline) -> tuple[int, float]:
    """Return the most spans on the device at one time, and their mean over the timeline's length."""
    times = flight_times(flights(line))
    busy = sum(running * ns for running, ns in enumerate(times))
    return max(len(times) - 1, 0), busy / line.length_ns if line.length_ns else 0.0


def flights(line: Timeline) -> list[tuple[float, int]]:
    """List how many spans run on the device (not on host threads) from each time on where that changes; at last 0."""
    if not line.spans:
        return []
    changes: dict[float, int] = {}
    for span in line.spans:
        if line.lanes[span.lane].kind != "host":
            changes[span.start_ns] = changes.get(span.start_ns, 0) + 1
            changes[span.end_ns] = changes.get(span.end_ns, 0) - 1
    first, last = line.spans[0].start_ns, max(span.end_ns for span in line.spans)
    steps, running = [(first, 0)], 0
    for at in sorted(changes):
        running += changes[at]
        if at == steps[-1][0]:
            steps[-1] = (at, running)
        elif running != steps[-1][1]:
            steps.append((at, running))
    if steps[-1][0] != last:
        steps.append((last, running))
    return steps


def flight_times(steps: Sequence[tuple[float, int]]) -> list[float]:
    """Sum the nanoseconds with 0, 1, 2, … spans running, given ``flights``.

    >>> flight_times([(0.0, 1), (1.0, 2), (2.0, 1), (4.0, 0)])
    [0.0, 3.0, 1.0]
    """
    times = [0.0] * (max((running for _, running in steps), default=-1) + 1)
    for (since, running), (until, _) in pairwise(steps):
        times[running] += until - since
    return times
