"""Where the host time of an eager iteration went, call by call."""

from __future__ import annotations

from typing import Any

from nimble_core.units import format_ns, format_percent, format_ratio
from nimble_viz.report import Report

__all__ = ["PARTS", "overhead"]

PARTS = ("python", "dispatch", "allocation", "launch")
"""Kinds of overhead, in the order they are stacked."""


def overhead(report: Report) -> dict[str, Any] | None:
    """Columns of the profiled eager calls (whole ns) and the totals they add up to; None if not profiled."""
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
    return {
        "columns": columns,
        "serial": host,
        "totals": {part: sum(columns[part]) for part in (*PARTS, "work", "exposed")},
        "profiled_ns": profile.profiled_ns,
        "unprofiled_ns": profile.unprofiled_ns,
        "remainder_ns": profile.remainder_ns,
        "facts": [
            ("Framework overhead", f"{format_ns(profile.overhead_ns)}, {format_percent(share)} of the profiled run"),
            *([("Overhead inside the phases", of_phases)] if profile.phases else []),
            ("Exposed (device idle meanwhile)", format_ns(exposed)),
            ("Device idle", format_percent(profile.device_idle_share)),
            ("Profiled run", format_ns(profile.profiled_ns)),
            ("Same run unprofiled", format_ns(profile.unprofiled_ns)),
            ("Profiler's slowdown", format_ratio(profile.slowdown) if profile.unprofiled_ns else "unknown"),
            ("Belongs to no call", format_ns(profile.remainder_ns)),
            ("Calls found in the profile", f"{profile.matched:,} of {profile.total:,}"),
            ("Measured by", profile.source),
        ],
        "warnings": list(profile.warnings),
    }
