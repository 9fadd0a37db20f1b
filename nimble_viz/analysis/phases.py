"""An iteration by phase, in eager and in each replay; and what iterations of code that nobody wrapped are bound by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from nimble_core.ir.program import Call
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_count, format_ns, format_percent
from nimble_viz.analysis.intervals import covered
from nimble_viz.analysis.labels import label_run, share_rows, trains
from nimble_viz.analysis.tables import BAR, bar, cell, number, row, table, words
from nimble_viz.report.data import STAGES, Bound, ReportData, Stage

__all__ = ["ABSENT", "BOUNDS", "PHASES", "phases", "profiled", "span_phases", "spent"]

PHASES = STAGES
"""In the order in which a step runs them."""


def phases(report: ReportData) -> dict[str, Any] | None:
    """Describe a table with a row for each phase; None where nothing was trained and no phases were seen.

    A row has the phase's calls, their isolated cost, that of those on the critical path, what the phase takes in
    profiled eager and how much of it is overhead, and for each replay how long any of its calls ran: phases may run
    side by side, so these may add up to more than the replay takes. Costs of a phase all of whose calls are parts of
    fused calls of others are empty.
    """
    if not _phased(report):
        return None
    calls, costs = report.program.calls, report.costs
    measured, seen = costs.source != "uniform", report.sampling is not None
    stages, critical = _stages(report, calls), frozenset(report.critical_path)
    profiled = {one.phase: one for one in report.overhead.phases} if report.overhead else {}
    lines = [line for line in report.timelines if line.run != "eager"]
    busy = [_busy(calls, line) for line in lines]
    rows, drawn = [], []
    for phase in PHASES:
        own = [call.index for call in calls if stages[call.index] == phase]
        eager = profiled.get(phase)
        if not own and eager is None:
            continue
        cost = sum(costs.ns[index] for index in own) if measured else 0.0
        path = sum(costs.ns[index] for index in own if index in critical)
        host = eager.host_ns if eager else 0.0
        drawn.append(host if seen else cost)
        share = format_percent(cost / costs.total_ns) if cost and costs.total_ns else ""
        overhead = f"{format_percent(eager.overhead_ns / host)} overhead" if eager and host else ""
        cells = [
            format_count(len(own)),
            cell(format_ns(cost), share) if measured and own and not seen else "",
            format_ns(path) if measured and own and not seen else "",
            cell(format_ns(host), overhead) if eager else "",
            *(format_ns(times[phase]) if times[phase] else "" for times in busy),
        ]
        rows.append((phase, cells))
    said = {
        "Isolated: all calls of the phase, one by one; on the path: those on the critical path.": measured and not seen,
        "Eager: host time under the profiler, with the share that is the framework's overhead.": bool(profiled),
        "Replays: while any call of the phase ran; phases may run side by side.": bool(lines),
    }
    runs = [number(label_run(report, line.run)) for line in lines]
    most = max(drawn, default=0.0) or 1.0
    return table(
        "One iteration by phase" if seen else "The training step by phase",
        [words("Phase"), BAR, number("Calls"), number("Isolated"), number("On the path"), number("Eager"), *runs],
        [row(name, bar(ns / most, name), *cells) for (name, cells), ns in zip(rows, drawn, strict=True)],
        about=" ".join(text for text, shown in said.items() if shown),
    )


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


def _busy(calls: tuple[Call, ...], line: Timeline) -> dict[Stage, float]:
    """Measure for how long any call of each phase ran, ns."""
    spans: dict[Stage, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    for span in line.spans:
        if span.call is not None:
            spans[calls[span.call].phase].append((span.start_ns, span.end_ns))
    return {phase: covered(own) for phase, own in spans.items()}


# Code that nobody wrapped.

BOUNDS = {
    "input": ("input-bound", "waiting for the data loader or copying inputs, the device idle meanwhile"),
    "device": ("device-bound", "the device at work"),
    "host": ("host-bound", "the device idle while the host runs Python, dispatches and launches"),
}
"""What an iteration can be bound by: key, verdict, meaning."""
_ON_HOST = {
    **BOUNDS,
    "device": ("compute-bound", "the operators' own computing, estimated"),
    "host": ("host-bound", "Python, dispatch and allocation"),
}
_ALIKE = 0.05
"""Of an iteration: what differs by less changes places from one profile to the next."""

ABSENT = (
    ("Streams, plans and the operator DAG", "a profile sees operators go by, not the tensors that make them wait"),
    ("Replays, their speed and equality with eager", "nothing was captured: compare(model, inputs) does that"),
    ("Costs, critical path and limit", "calls were not timed one by one"),
)
"""Views that need an engine, and why a profile has none of them."""


def spent(report: ReportData) -> dict[str, Any] | None:
    """Say what an eager iteration is spent on and bound by; None where eager was not profiled.

    Shares are of an iteration without the profiler where such were timed, else of the profiled one. Of the former the
    loader's wait was timed; a GPU's work is what the profiler saw, and the rest is the host's; without a GPU the rest
    is split as under the profiler.
    """
    ns, basis = _spent(report)
    if report.sampling is None and not any(ns.values()):
        return None
    total = sum(ns.values()) or 1.0
    most, second, *_ = sorted(ns, key=lambda key: -ns[key])
    bounds = BOUNDS if report.environment.device == "cuda" else _ON_HOST
    rows = share_rows([(key, ns[key], meaning) for key, (_, meaning) in bounds.items()], zeros=True)
    alike = ns[most] - ns[second] < _ALIKE * total
    verdict = f"between {bounds[most][0]} and {bounds[second][0]}" if alike else bounds[most][0]
    return {"bound": most, "verdict": verdict, "basis": basis, "rows": rows}


def profiled(report: ReportData) -> dict[str, Any] | None:
    """Say how iterations were looked at, and what is absent; None if this is no profile."""
    taken = report.sampling
    if taken is None:
        return None
    facts = [
        ("What was profiled", taken.subject),
        ("One iteration is", taken.iteration),
        ("Iterations that went by", f"{taken.seen:,}" if taken.seen else "unknown"),
        ("Timed without the profiler", f"{taken.timed:,}" if taken.timed else "none"),
        ("Profiled", f"{taken.profiled:,}, the one of median length is shown"),
    ]
    timed = report.measurement("eager")
    if timed:
        facts.append(("Without the profiler", f"{format_ns(timed.median_ns)}, spread {format_percent(timed.spread)}"))
    if taken.loader_ns >= 0:
        facts.append(("Wait for the data loader, without the profiler", format_ns(taken.loader_ns)))
    return {"facts": facts, "absent": [{"what": what, "why": why} for what, why in ABSENT]}


def _spent(report: ReportData) -> tuple[dict[str, float], str]:
    taken, timed, bound = report.sampling, report.measurement("eager"), _bound(report)
    if timed is None or timed.median_ns <= 0 or bound is None:
        parts = (bound.input_ns, bound.device_ns, bound.host_ns) if bound else (0.0, 0.0, 0.0)
        return dict(zip(BOUNDS, parts, strict=True)), "of the profiled iteration"
    total, loader = timed.median_ns, bound.input_ns
    if taken is not None and taken.loader_ns >= 0 and report.overhead is not None:
        waited = sum(one.host_ns for one in report.overhead.phases if one.phase == "loader")
        loader = taken.loader_ns + max(0.0, bound.input_ns - waited)
    fed = min(loader, total)
    busy = min(bound.device_ns, total - fed)
    if report.environment.device != "cuda":  # the profiler slows what it sees there, and operators are part of it
        busy = (total - fed) * bound.device_ns / ((bound.device_ns + bound.host_ns) or 1.0)
    return {"input": fed, "device": busy, "host": total - fed - busy}, "of an iteration without the profiler"


def _bound(report: ReportData) -> Bound | None:
    """Return what the profiled iteration was spent on, also where ``compare`` profiled it."""
    profile = report.overhead
    if report.sampling is not None:
        return report.sampling.bound
    if profile is None or profile.profiled_ns <= 0:
        return None
    fed = min(profile.loader_ns, profile.profiled_ns)
    busy = min(profile.device_busy_ns, profile.profiled_ns - fed)
    return Bound(fed, busy, profile.profiled_ns - fed - busy)
