"""How much runs side by side: what the graph allows, what was planned, what was seen."""

from __future__ import annotations

from typing import Any

from nimble_core.algorithms.width import level_width, width
from nimble_core.graph import CallGraph, predecessors
from nimble_core.timeline import Timeline
from nimble_core.units import format_count
from nimble_viz.report import Report

__all__ = ["EXACT_CALLS", "graph_width", "in_flight", "observed"]

EXACT_CALLS = 10_000
"""Up to so many calls the width is computed exactly; above, a lower bound is."""


def graph_width(graph: CallGraph) -> tuple[int, str]:
    """The most calls of which none must wait for another, and the same as text: ``"at least 9"`` if it is a bound."""
    before = predecessors(graph, meg=True)
    if graph.size <= EXACT_CALLS:
        exact = width(before)
        return exact, format_count(exact)
    bound = level_width(before)
    return bound, f"at least {format_count(bound)} (the most on one level; not exact above {EXACT_CALLS:,} calls)"


def observed(report: Report, policy: str) -> dict[str, Any] | None:
    """Kernels (on the host: calls) that a replay ran at one time, ``most`` and ``mean``; None if it was not watched."""
    line = report.timeline(policy)
    if line is None or not line.spans:
        return None
    most, mean = in_flight(line)
    return {"most": most, "mean": f"{mean:.2f}", "source": line.source, "reliable": line.reliable}


def in_flight(line: Timeline) -> tuple[int, float]:
    """The most spans on streams or workers at one time, and their time-weighted mean over the timeline's length.

    >>> from nimble_core.timeline import Lane, Span
    >>> spans = (Span(0, 0.0, 2.0, 0, "a"), Span(1, 1.0, 3.0, 1, "b"), Span(0, 2.0, 4.0, 2, "c"))
    >>> in_flight(Timeline("mine", "measured", "host clock", (Lane("0", "stream"), Lane("1", "stream")), spans))
    (2, 1.5)
    """
    spans = [span for span in line.spans if line.lanes[span.lane].kind in ("stream", "worker")]
    # Ends before starts at one point of time: calls that follow each other were never side by side.
    events = sorted([(span.start_ns, 1) for span in spans] + [(span.end_ns, -1) for span in spans])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    busy = sum(span.end_ns - span.start_ns for span in spans)
    return most, busy / line.length_ns if line.length_ns else 0.0
