"""How many streams are worth it? Simulated replays with fewer and more of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import SAME
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.utils.units import format_ns, format_percent, format_ratio
from nimble_viz.analysis.concurrency import graph_width
from nimble_viz.analysis.labels import plural, split_plan
from nimble_viz.report.data import ReportData

__all__ = ["MOST_CALLS", "what_if"]

MOST_CALLS = 5_000
"""Larger graphs are not asked about: a view should open at once."""

_STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_MOST_STREAMS = 32

_SEARCHED_CALLS = 500
"""``contention`` tries many plans for each answer; above this its list schedules, ``critical_path``, answer alone."""


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
