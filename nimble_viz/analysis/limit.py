"""How far a replay is from its limit, what it is made of along the calls that took longest, and what runs beside."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from nimble_core.algorithms.antichain import level_width, width
from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.costs import Costs, limit_ns
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_count, format_ratio
from nimble_viz.analysis.labels import about, doubt_of
from nimble_viz.report.data import ReportData

__all__ = [
    "EXACT_CALLS", "Breakdown", "breakdown", "chain_that_ran", "distance", "distance_doubt", "distance_text", "ends",
    "graph_width", "in_flight", "observed",
]  # fmt: skip

EXACT_CALLS = 10_000
"""Up to so many calls the width is computed exactly; above, a lower bound is."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A replay, taken apart along the chain of calls that ran longest (``chain_that_ran``); nanoseconds.

    ``alone + contention + gaps + waits + launch`` is the replay's wall time, up to overlaps of neighbouring calls, and
    to what measurements vary by: isolated times, the watched replay and the wall time are of three different runs.

    Args:
        alone: isolated time of the calls on the chain.
        contention: how much longer they took than alone; on one stream that is due to caches and clocks instead. 0 if
            it is not more than isolated times vary by.
        gaps: idle time between neighbours on one stream, and between the kernels of one call.
        waits: idle time until a call of another stream had been waited for.
        launch: the rest of the wall time: before the first call and after the last one; 0 if it is not more than the
            wall time varies by.
        calls: the chain, first call first.
    """

    alone: float
    contention: float
    gaps: float
    waits: float
    launch: float
    calls: tuple[int, ...]


def distance(report: ReportData, run: str) -> float | None:
    """Divide the wall time of a replay of ``report.program`` by its limit; None if either is unknown."""
    taken, bound = report.measurement(run), limit_ns(report.costs, report.critical_path_ns)
    if taken is None or report.schedule(run) is None or report.critical_path_ns <= 0:
        return None
    return taken.median_ns / bound


def distance_doubt(report: ReportData, run: str) -> float:
    """Return by what share ``distance`` may be off, by the spread of replay and limiting calls."""
    costs, spread = report.costs, report.costs.spread_ns
    bound = limit_ns(costs, report.critical_path_ns)
    vary = 0.0
    if spread and bound > report.critical_path_ns:
        vary = sum(ns * share for ns, share in zip(spread, costs.demand, strict=True))
    elif spread:
        vary = sum(spread[call] for call in report.critical_path)
    return doubt_of(report.measurement(run)) + vary / (bound or 1.0)


def distance_text(report: ReportData, run: str) -> str:
    """Write ``distance`` with its doubt, as ``"1.50x ± 4%"``; empty if unknown."""
    far = distance(report, run)
    return "" if far is None else about(format_ratio(far), distance_doubt(report, run))


def breakdown(
    graph: CallGraph, plan: Schedule, costs: Costs, line: Timeline, wall_ns: float, spread: float = 0.0
) -> Breakdown | None:
    """Take a watched replay ``line`` of ``plan`` apart along ``chain_that_ran``; None if no span belongs to a call.

    ``wall_ns`` is the time of the unwatched replay, ``spread`` its interquartile range over it. Where watching slowed
    the replay, ``launch`` is 0, and not less. O(edges + spans).
    """
    chain = chain_that_ran(graph, plan, line)
    if not chain:
        return None
    start: dict[int, float] = {}
    busy: dict[int, float] = {}
    for span in line.spans:
        if span.call is not None:
            start[span.call] = min(start.get(span.call, span.start_ns), span.start_ns)
            busy[span.call] = busy.get(span.call, 0.0) + span.end_ns - span.start_ns
    end = ends(line)
    gaps = waits = 0.0
    for earlier, call in pairwise(chain):
        idle = start[call] - end[earlier]
        if plan.stream[earlier] == plan.stream[call]:
            gaps += idle
        else:
            waits += idle
    inside = sum(end[one] - start[one] - busy[one] for one in chain)
    alone = sum(costs.ns[one] for one in chain)
    vary = sum(costs.spread_ns[one] for one in chain) if costs.spread_ns else 0.0
    longer = sum(busy[one] for one in chain) - alone
    rest = wall_ns - (end[chain[-1]] - start[chain[0]])
    return Breakdown(
        alone=alone,
        contention=longer if abs(longer) > vary else 0.0,
        gaps=gaps + inside,
        waits=waits,
        launch=rest if rest > spread * wall_ns else 0.0,
        calls=chain,
    )


def chain_that_ran(graph: CallGraph, plan: Schedule, line: Timeline) -> tuple[int, ...]:
    """List the calls that determined how long a replay took, in order; empty if no span belongs to a call.

    The last is the call that ended last; before each stands the one whose end it had to await last, of those that
    precede it in the graph, that the plan makes it wait for, and the one before it on its stream. O(edges + spans).
    """
    end = ends(line)
    if not end:
        return ()
    awaited = [list(sources) for sources in predecessors(graph, meg=True)]
    for producer, consumer in (*plan.syncs, *stream_neighbours(plan.stream, plan.order)):
        awaited[consumer].append(producer)
    chain = [max(end, key=lambda index: (end[index], -index))]
    while True:
        call = chain[-1]
        earlier = [source for source in awaited[call] if source in end and end[source] < end[call]]
        if not earlier:
            return tuple(reversed(chain))
        chain.append(max(earlier, key=lambda index: (end[index], plan.stream[index] == plan.stream[call], -index)))


def ends(line: Timeline) -> dict[int, float]:
    """Return when each call's last span ended."""
    end: dict[int, float] = {}
    for span in line.spans:
        if span.call is not None:
            end[span.call] = max(end.get(span.call, span.end_ns), span.end_ns)
    return end


# What runs side by side.


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
