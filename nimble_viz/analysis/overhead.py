"""Where the host time of an eager iteration went, call by call, and what else calls can be coloured by."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from nimble_core.ir.program import Call, TensorRef
from nimble_core.utils.units import format_ns, format_percent, format_ratio
from nimble_viz.analysis.labels import about, doubt_of, plural, trains
from nimble_viz.report.data import OverheadProfile, ReportData

__all__ = [
    "IDLE", "PARTS", "colours", "computing", "exposed", "group_name", "grouped", "idle_causes", "overhead", "shared",
]  # fmt: skip

PARTS = ("python", "dispatch", "allocation", "launch", "tail")
"""Kinds of overhead, in the order they are stacked."""

IDLE = (
    ("host_late_ns", "host late, nothing queued", "the host had not begun to launch what came next"),
    ("launch_ns", "launch latency", "the host was launching it, or it had been launched and had not begun"),
    ("dependency_ns", "dependency, queued behind others", "it was queued in time and waited for what came before it"),
    ("unknown_ns", "unknown, launch not seen", "its launch was not seen"),
)
"""Causes of an idle device: field of ``DeviceIdle``, name, meaning."""

_SUMS = ("overhead", "exposed", "work")
_HOMELESS, _OPTIMIZER = "(the model itself)", "(the optimizer)"


def overhead(report: ReportData) -> dict[str, Any] | None:
    """Return columns of the profiled eager calls (whole ns) and their totals; None if not profiled."""
    profile = report.overhead
    if profile is None:
        return None
    rows = profile.calls
    columns: dict[str, list[int]] = {"call": [row.call for row in rows]}
    for part in (*PARTS, "work", "exposed"):
        columns[part] = [round(getattr(row, f"{part}_ns")) for row in rows]
    host = report.environment.device != "cuda"
    share = profile.overhead_ns / profile.profiled_ns if profile.profiled_ns else 0.0
    exposed = sum(row.exposed_ns for row in rows)
    phased = sum(phase.overhead_ns for phase in profile.phases)
    of_phases = f"{format_ns(phased)}, calls or not"
    slowdown = about(format_ratio(profile.slowdown), doubt_of(report.measurement("eager")))
    return {
        "columns": columns,
        "serial": host,
        "totals": {part: sum(columns[part]) for part in (*PARTS, "work", "exposed")},
        "shared": {"name": shared(report), "calls": list(profile.shared)} if profile.shared else None,
        "profiled_ns": profile.profiled_ns,
        "unprofiled_ns": profile.unprofiled_ns,
        "remainder_ns": profile.remainder_ns,
        "waiting_ns": profile.waiting_ns,
        "loader_ns": profile.loader_ns,
        "facts": [
            ("Framework overhead", f"{format_ns(profile.overhead_ns)}, {format_percent(share)} of the profiled run"),
            *([("Overhead inside the phases", of_phases)] if profile.phases else []),
            ("Exposed (device idle meanwhile)", format_ns(exposed)),
            *([] if host else [("Hidden (device busy meanwhile)", format_ns(profile.overhead_ns - exposed))]),
            ("Device idle", format_percent(profile.device_idle_share)),
            *idle_causes(profile),
            ("Profiled run", format_ns(profile.profiled_ns)),
            ("Same run unprofiled", format_ns(profile.unprofiled_ns) if profile.unprofiled_ns else "not timed"),
            ("Profiler's slowdown", slowdown if profile.unprofiled_ns else "unknown"),
            *([("Waits for the device", format_ns(profile.waiting_ns))] if profile.waiting_ns else []),
            *([("Waits for the data loader", format_ns(profile.loader_ns))] if profile.loader_ns else []),
            ("Unattributed", _of(profile.remainder_ns, profile.profiled_ns)),
            ("Calls found in the profile", f"{profile.matched:,} of {profile.total:,}"),
            ("Measured by", profile.source),
        ],
        "warnings": list(profile.warnings),
    }


def grouped(report: ReportData, by: Literal["operator", "module"]) -> list[dict[str, Any]]:
    """Sum the profiled calls by operator or innermost module, most overhead first; nanoseconds.

    A row has ``name``, ``calls``, ``overhead``, ``exposed``, ``work`` and each of ``PARTS``; ``whole``: it
    holds the time of calls that were not found (see ``shared``), so no mean over its calls is one of theirs. The rows
    of one grouping add up to those of any other.
    """
    if report.overhead is None:
        return []
    rows: dict[str, dict[str, Any]] = {}
    for row in report.overhead.calls:
        name = group_name(report, row.call, by)
        sums = rows.setdefault(name, {"name": name, "calls": 0, "whole": False} | dict.fromkeys((*_SUMS, *PARTS), 0.0))
        sums["calls"] += len(report.overhead.calls_of(row))
        sums["whole"] |= row.call in report.overhead.shared
        for part in (*_SUMS, *PARTS):
            sums[part] += getattr(row, f"{part}_ns")
    return sorted(rows.values(), key=lambda row: (-row["overhead"], row["name"]))


def computing(report: ReportData, by: Literal["operator", "module"]) -> list[dict[str, Any]]:
    """Rows of ``grouped``, most computing first, without those that do none.

    Each also has ``share``, its part of all computing, and ``sizes``: what the call that computes longest reads, in
    words; empty where shapes were not recorded.
    """
    longest: dict[str, tuple[float, Call]] = {}
    for row in report.overhead.calls if report.overhead is not None else ():
        name, found = group_name(report, row.call, by), (row.work_ns, report.eager_calls[row.call])
        longest[name] = max(longest.get(name, found), found, key=lambda one: one[0])

    def sizes(ref: TensorRef) -> str:
        return "×".join(map(str, ref.sizes)) or "scalar"

    rows = grouped(report, by)
    total = sum(row["work"] for row in rows) or 1.0
    return [
        row | {"share": row["work"] / total, "sizes": ", ".join(map(sizes, longest[row["name"]][1].reads[:3]))}
        for row in sorted(rows, key=lambda row: (-row["work"], row["name"]))
        if row["work"] > 0
    ]


def group_name(report: ReportData, call: int, by: Literal["operator", "module"]) -> str:
    """Name the row of ``grouped`` that a profiled eager call is in."""
    one = report.eager_calls[call]
    if by == "operator":
        together = report.overhead is not None and call in report.overhead.shared
        return shared(report) if together else one.label
    # The optimizer's calls have no module: they update parameters of many.
    return _OPTIMIZER if one.phase == "optimizer" else one.module or _HOMELESS


def shared(report: ReportData) -> str:
    """Name the row of the optimizer's calls that were not found (``OverheadProfile.shared``)."""
    missing = len(report.overhead.shared) if report.overhead else 0
    calls = sum(call.phase == "optimizer" for call in report.eager_calls)
    return f"optimizer (eager runs other operators: {calls - missing} of {plural(calls, 'call')} found)"


def idle_causes(profile: OverheadProfile) -> list[tuple[str, str]]:
    """Say why the device idled: name, time and its share of the profiled run; empty where it is not known."""
    if profile.idle is None:
        return []
    causes = [(field, name, getattr(profile.idle, field)) for field, name, _ in IDLE]
    return [
        (f"Idle: {name}", _of(ns, profile.profiled_ns)) for field, name, ns in causes if ns or field != "unknown_ns"
    ]


def _of(ns: float, whole: float) -> str:
    return f"{format_ns(ns)}, {format_percent(ns / whole)}" if whole else format_ns(ns)


def colours(report: ReportData) -> list[dict[str, str]]:
    """List what calls can be coloured by, in the order in which it is offered.

    A row has ``key`` (``"stream"``, ``"exposed"``, ``"time"`` or ``"phase"``), ``name``, ``meaning``, ``unknown`` (what
    to say of calls without a value; empty where each has one) and ``why`` (a few words where no call has one or all
    have the same, so that there is nothing to see; else empty).
    """
    serial = report.environment.device != "cuda"
    found = exposed(report)
    missing = sum(value < 0 for value in found)
    of_eager = "" if report.eager is None else "; of the eager calls that a call stands for"
    rows = [
        ("stream", "Stream", "the stream that the schedule puts each call on", "", ""),
        (
            "exposed",
            "Exposed overhead",
            f"overhead of profiled eager during which the device was idle{of_eager}",
            f"{plural(missing, 'call')} not among those of profiled eager" if missing else "",
            "" if missing < len(found) else "not in the profile" if report.overhead else "eager was not profiled",
        ),
        (
            "time",
            "Time" if serial else "GPU time",
            "each call alone, with nothing beside it",
            "",
            "not measured" if report.costs.source == "uniform" else "",
        ),
        ("phase", "Phase", "the part of a training step", "", "" if trains(report) else "all calls are forward"),
    ]
    return [dict(zip(("key", "name", "meaning", "unknown", "why"), row, strict=True)) for row in rows]


def exposed(report: ReportData) -> list[int]:
    """Return the exposed overhead of each call in profiled eager, whole ns; -1 where it is not known.

    A call that stands for eager calls has theirs together. An eager call that several stand for is shared out among
    them equally, so that no sum over calls counts it twice. O(calls + eager calls).
    """
    found, together = (report.overhead.calls, report.overhead.shared) if report.overhead else ((), ())
    known: dict[int, float] = {row.call: row.exposed_ns for row in found if row.call not in together}
    if report.eager is None:
        return [round(known.get(call.index, -1)) for call in report.program.calls]
    own = [dict.fromkeys(call.eager) for call in report.program.calls]
    shared: Counter[int] = Counter(index for indices in own for index in indices)
    profiled = [[index for index in indices if index in known] for indices in own]
    return [round(sum(known[k] / shared[k] for k in indices)) if indices else -1 for indices in profiled]
