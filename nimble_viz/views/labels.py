"""Words that all views share: what a run is called, where it ran, how a ratio is put."""

from __future__ import annotations

from typing import Any

from nimble_core.measurement import Ratio
from nimble_core.units import format_count, format_ratio
from nimble_viz.report import Report

__all__ = ["SAME_BAND", "context", "label_plan", "label_run", "planned", "plural", "ratio_cell"]

SAME_BAND = 0.02
"""Ratios closer to 1 than this are called "as fast as": the machine cannot tell them apart."""


def planned(report: Report) -> bool:
    """Whether this is a plan: nothing was run, and so nothing measured."""
    return report.complete and not (report.measurements or report.checks or report.timelines)


def context(report: Report) -> str:
    """What every ratio must name: dtype, batch, device. ``"float16, batch 1, NVIDIA H200"``."""
    batch = f"batch {report.batch}" if report.batch else "no batch dimension"
    return f"{report.dtype}, {batch}, {_place(report)}"


def label_plan(name: str) -> str:
    """A plan's name for people: ``"single"`` reads ``"one stream"``."""
    return "one stream" if name == "single" else name


def label_run(report: Report, name: str) -> str:
    """A run's name for people: ``"single"`` reads ``"one-stream replay"``, ``"nimble"`` ``"nimble replay"``.

    What was only planned is no replay: ``"one stream"``, ``"nimble"``.
    """
    if planned(report):
        return label_plan(name)
    if name == "single":
        return "one-stream replay"
    return f"{name} replay" if report.schedule(name) else name


def plural(count: int, noun: str) -> str:
    """``"1 stream"``, ``"1,024 streams"``."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def ratio_cell(report: Report, ratio: Ratio | None) -> dict[str, Any] | None:
    """A ratio with its quartiles and its doubt, as texts; None stays None."""
    if ratio is None:
        return None
    return {
        "text": format_ratio(ratio.value),
        "quartiles": f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}",
        "stable": ratio.stable,
        "faster": ratio.value > 1 + SAME_BAND,
        "slower": ratio.value < 1 - SAME_BAND,
        "full": f"{label_run(report, ratio.name)} over {label_run(report, ratio.baseline)}, {context(report)}",
    }


def _place(report: Report) -> str:
    where = report.environment
    if planned(report):
        return f"planned for {where.device}"
    if where.device == "cuda":
        return where.device_name
    return f"host replay on {where.device_name or where.host_cpu or 'an unnamed CPU'}, no GPU"
