"""A step by phase: loader, copy, forward, loss, backward, optimizer; in eager and in each replay."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nimble_core.ir.program import Call
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_count, format_ns, format_percent
from nimble_viz.analysis.labels import label_run, plural, trains
from nimble_viz.report.data import STAGES, ReportData, Stage

__all__ = ["PHASES", "phase_syncs", "phases", "span_phases"]

PHASES = STAGES
"""In the order in which a step runs them."""


def phases(report: ReportData) -> dict[str, Any] | None:
    """Describe each phase; None where nothing was trained and no phases were seen.

    A row has the phase's calls, their isolated cost, that of those on the critical path, what the phase takes in
    profiled eager and how much of it is overhead, and for each replay (named in ``runs``) how long any of its calls
    ran: phases may run side by side, so these may add up to more than the replay takes. ``inside`` says of a phase
    whose calls are all parts of fused calls of others in which they are; its costs are theirs, and empty here.
    """
    if not _phased(report):
        return None
    calls, ns = report.program.calls, report.costs.ns
    measured = report.costs.source != "uniform"
    critical = frozenset(report.critical_path)
    stages = _stages(report, calls)
    profiled = {one.phase: one for one in report.overhead.phases} if report.overhead else {}
    lines = [line for line in report.timelines if line.run != "eager"]
    busy = [_busy(calls, line) for line in lines]
    total = report.costs.total_ns
    rows = []
    for phase in PHASES:
        own = [call.index for call in calls if stages[call.index] == phase]
        eager = profiled.get(phase)
        inside = "" if own else _inside(report, phase)
        if not own and eager is None and not inside:
            continue
        cost = sum(ns[index] for index in own)
        path = sum(ns[index] for index in own if index in critical)
        host = eager.host_ns if eager else 0.0
        rows.append(
            {
                "phase": phase,
                "calls": len(own),
                "inside": inside,
                "cost": format_ns(cost) if measured and not inside else "",
                "cost_ns": cost if measured else 0.0,
                "share": format_percent(cost / total) if measured and total and not inside else "",
                "path": format_ns(path) if measured and not inside else "",
                "eager": format_ns(host) if eager else "",
                "eager_ns": host,
                "overhead": format_percent(eager.overhead_ns / host) if eager and host else "",
                "parts": _parts(report, phase),
                "replays": [format_ns(times[phase]) if times[phase] else "" for times in busy],
            }
        )
    return {"runs": [label_run(report, line.run) for line in lines], "rows": rows}


def _inside(report: ReportData, phase: Stage) -> str:
    """Say which fused calls of other phases hold this one: ``"inside 2 calls of backward"``."""
    if report.eager is None:
        return ""
    eager = report.eager.calls
    holders: Counter[Stage] = Counter(
        call.phase for call in report.program.calls if any(eager[index].phase == phase for index in call.eager)
    )
    named = ", ".join(f"{plural(holders[one], 'call')} of {one}" for one in PHASES if holders[one])
    return f"inside {named}" if named else ""


def phase_syncs(report: ReportData, plan: Schedule) -> list[dict[str, Any]]:
    """Count the plan's waits by the phases they lie between, in a step's order; empty without training."""
    if not trains(report):
        return []
    calls = report.program.calls
    counts = Counter((calls[u].phase, calls[v].phase) for u, v in plan.syncs)
    order = sorted(counts, key=lambda pair: (PHASES.index(pair[0]), PHASES.index(pair[1])))
    return [
        {
            "from": before,
            "to": after,
            "count": counts[before, after],
            "text": f"{format_count(counts[before, after])} "
            + (f"within {before}" if before == after else f"from {before} to {after}"),
        }
        for before, after in order
    ]


def span_phases(report: ReportData, line: Timeline) -> list[int]:
    """Return the phase of each span, that of its call or during which it began, by place in ``PHASES``; -1: none."""
    if not _phased(report):
        return [-1] * len(line.spans)
    eager = line.run == "eager"
    stages = _stages(report, report.eager_calls if eager else report.program.calls)
    marks = report.overhead.phases if eager and report.overhead else ()
    stretches = sorted((start, end, PHASES.index(one.phase)) for one in marks for start, end in one.spans)
    found, at = [], 0
    for span in line.spans:  # sorted by start
        while at < len(stretches) and stretches[at][1] <= span.start_ns:
            at += 1
        if span.call is not None:
            found.append(PHASES.index(stages[span.call]))
        elif at < len(stretches) and stretches[at][0] <= span.start_ns and not _on_device(line, span.lane):
            found.append(stretches[at][2])
        else:
            found.append(-1)
    return found


def _phased(report: ReportData) -> bool:
    return trains(report) or bool(report.overhead and report.overhead.phases)


def _stages(report: ReportData, calls: Sequence[Call]) -> list[Stage]:
    """Return the stage of each call: its phase, or in unmodified code the stage during which it began."""
    found: list[Stage] = [call.phase for call in calls]
    line = report.timeline("eager")
    if report.sampling is None or report.overhead is None or line is None:
        return found
    stretches = sorted((start, end, one.phase) for one in report.overhead.phases for start, end in one.spans)
    starts = [start for start, _, _ in stretches]
    for span in line.spans:
        at = bisect_right(starts, span.start_ns) - 1
        if span.call is not None and at >= 0 and not _on_device(line, span.lane):
            found[span.call] = stretches[at][2]
    return found


def _on_device(line: Timeline, lane: int) -> bool:
    return line.lanes[lane].kind == "gpu"


def _parts(report: ReportData, phase: Stage) -> dict[str, int]:
    one = next((one for one in report.overhead.phases if one.phase == phase), None) if report.overhead else None
    if one is None:
        return {}
    parts = ("python", "dispatch", "allocation", "launch", "tail", "work", "exposed")
    return {part: round(getattr(one, f"{part}_ns")) for part in parts}


def _busy(calls: tuple[Call, ...], line: Timeline) -> dict[Stage, float]:
    """Measure the union of the spans of each phase's calls, ns; spans are sorted by start."""
    busy: dict[Stage, float] = dict.fromkeys(PHASES, 0.0)
    reached = dict.fromkeys(PHASES, float("-inf"))
    for span in line.spans:
        if span.call is not None:
            phase = calls[span.call].phase
            busy[phase] += max(0.0, span.end_ns - max(span.start_ns, reached[phase]))
            reached[phase] = max(reached[phase], span.end_ns)
    return busy
