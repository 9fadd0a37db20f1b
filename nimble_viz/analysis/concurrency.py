"""How much runs side by side: what the graph allows and what was seen."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from nimble_core.algorithms.antichain import level_width, width
from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_count
from nimble_viz.report.data import ReportData

__all__ = ["EXACT_CALLS", "graph_width", "in_flight", "observed"]

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
    """Return the most spans on the device (not on host threads) at one time, and their mean over the line's length."""
    spans = [span for span in line.spans if line.lanes[span.lane].kind != "host"]
    changes = sorted([*((span.start_ns, 1) for span in spans), *((span.end_ns, -1) for span in spans)])
    busy = sum(span.end_ns - span.start_ns for span in spans)
    most = max(accumulate(by for _, by in changes), default=0)
    return most, busy / line.length_ns if line.length_ns else 0.0
