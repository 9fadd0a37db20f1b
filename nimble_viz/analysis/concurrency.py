"""How much runs side by side: what the graph allows, what was seen, and how many streams are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from nimble_core.algorithms.antichain import level_width, width
from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import SAME
from nimble_core.ir.timeline import Timeline
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.utils.units import format_count, format_ns, format_percent, format_ratio
from nimble_viz.analysis.labels import plural, split_plan
from nimble_viz.report.data import ReportData

__all__ = ["EXACT_CALLS", "MOST_CALLS", "flight_times", "flights", "graph_width", "in_flight", "observed", "what_if"]

EXACT_CALLS = 10_000
"""Up to so many calls the width is computed exactly; above, a lower bound is."""

MOST_CALLS = 5_000
"""Larger graphs are not asked about: a view should open at once."""

_STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_MOST_STREAMS = 32

_SEARCHED_CALLS = 500
"""``contention`` tries many plans for each answer; above this its list schedules, ``critical_path``, answer alone."""


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


def what_if(report: ReportData) -> dict[str, Any] | None:
    """Simulate the replay with other numbers of streams and the chosen plan's policy.

    Say how many are worth it.

    None where there is nothing to simulate with or to ask: no GPU, costs not measured, too many calls, or a graph
    in which each call waits for the one before.
    """
    size = report.graph.size
    if report.environment.device != "cuda" or report.costs.source == "uniform" or not report.costs.total_ns:
        return None
    if size > MOST_CALLS:
        return None
    widest, _ = graph_width(report.graph)
    if widest < 2:
        return None
    policy = split_plan(report.chosen)[1].partition(",")[0]
    if policy not in POLICIES or policy == "single":
        policy = "contention"
    if policy == "contention" and size > _SEARCHED_CALLS:
        policy = "critical_path"
    times = _times(report.graph, report.costs, policy, min(widest, _MOST_STREAMS))
    one = times[0][1]
    best = min(ns for _, ns in times)
    enough, ns = next((streams, ns) for streams, ns in times if ns <= best * SAME)
    if enough == 1:
        answer = f"One stream is enough: more gain less than {format_percent(SAME - 1)}"
    else:
        answer = f"{plural(enough, 'stream')} are worth it, {format_ratio(one / ns)} over one"
        answer += f"; more gain less than {format_percent(SAME - 1)}" if enough != times[-1][0] else ""
    return {
        "policy": policy,
        "answer": f"{answer} (simulated)",
        "enough": enough,
        "rows": [
            {
                "streams": streams,
                "ns": ns,
                "text": format_ns(ns),
                "over": format_ratio(one / ns) if ns else "",
                "enough": streams == enough,
            }
            for streams, ns in times
        ],
        "note": f"simulated, not measured: policy {policy} under a cap on streams, with the model of an {H200.name}"
        + ("" if report.costs.demand else "; how much of the GPU each call fills was not recorded"),
    }


@lru_cache(maxsize=8)  # text, page and notebook ask the same question of the same report
def _times(graph: CallGraph, costs: Costs, policy: str, most: int) -> tuple[tuple[int, float], ...]:
    """``(streams, simulated ns)`` for one up to ``most`` streams, where the policy uses all it may."""
    found = []
    for streams in (*(few for few in _STREAMS if few < most), most):
        plan = POLICIES["single" if streams == 1 else policy](graph, costs, max_streams=streams)
        if plan.streams == streams:
            found.append((streams, simulate(graph, plan, costs, H200).length_ns))
    return tuple(found)
