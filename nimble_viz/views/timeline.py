"""Gantt lanes of the eager run and of each replay, for one common axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nimble_core.timeline import Lane, Span, Timeline
from nimble_viz.report import Report
from nimble_viz.views.labels import label_run
from nimble_viz.views.phases import span_phases

__all__ = ["DISTORTION_BOUND", "device_idle", "timelines"]

DISTORTION_BOUND = 1.2
"""A profiled run this many times longer or shorter than the unprofiled one is marked as distorted."""


def timelines(report: Report) -> list[dict[str, Any]]:
    """One entry per timeline, eager first; spans as columns, whole nanoseconds from that run's first start.

    ``idle`` is ``device_idle``; that of a lane is the same of the lane alone, None of a host thread.
    """
    ordered = sorted(report.timelines, key=lambda line: line.run != "eager")
    shown = []
    for line in ordered:
        zero = min((span.start_ns for span in line.spans), default=0.0)
        phased = zip(line.spans, span_phases(report, line), strict=True)
        ordered_spans = sorted(phased, key=lambda one: (one[0].start_ns, one[0].lane, one[0].end_ns))
        spans = [span for span, _ in ordered_spans]
        length = _length(line)
        factor = length / line.unprofiled_ns if line.unprofiled_ns else 0.0
        own: list[list[Span]] = [[] for _ in line.lanes]
        for span in spans:
            own[span.lane].append(span)
        lanes = [
            {"name": lane.name, "kind": lane.kind, "idle": _idle(length, inside) if _on_device(lane) else None}
            for lane, inside in zip(line.lanes, own, strict=True)
        ]
        shown.append(
            {
                "run": line.run,
                "label": label_run(report, line.run),
                "source": line.source,
                "clock": line.clock,
                "length_ns": line.length_ns,
                "profiled_ns": line.profiled_ns,
                "unprofiled_ns": line.unprofiled_ns,
                "idle": device_idle(report, line),
                "factor": factor,
                "distorted": bool(factor) and not 1 / DISTORTION_BOUND <= factor <= DISTORTION_BOUND,
                "reliable": line.reliable,
                "note": line.note,
                "lanes": lanes,
                "columns": {
                    "lane": [span.lane for span in spans],
                    "start": [round(span.start_ns - zero) for span in spans],
                    "length": [round(span.end_ns - span.start_ns) for span in spans],
                    "call": [-1 if span.call is None else span.call for span in spans],
                    "name": [span.name for span in spans],
                    "phase": [phase for _, phase in ordered_spans],
                },
            }
        )
    return shown


def device_idle(report: Report, line: Timeline) -> float:
    """Share of a run's length during which the device did nothing, whatever the stream.

    The length is that of the profiled run where it is known, the wait for the device at its end included. Of the eager
    run this is ``OverheadProfile.device_idle_share``: where operators run on the host, too, of which the profile knows
    what is their own work, and the timeline does not.
    """
    if line.run == "eager" and report.overhead is not None:
        return report.overhead.device_idle_share
    return _idle(_length(line), (span for span in line.spans if _on_device(line.lanes[span.lane])))


def _on_device(lane: Lane) -> bool:
    """Whether a lane shows what the device does, not the host that asks for it."""
    return lane.kind != "host"


def _length(line: Timeline) -> float:
    return line.profiled_ns or line.length_ns


def _idle(length: float, spans: Iterable[Span]) -> float:
    """Share of ``length`` in which none of the spans, sorted by start, ran."""
    busy, reached = 0.0, float("-inf")
    for span in spans:
        busy += max(0.0, span.end_ns - max(span.start_ns, reached))
        reached = max(reached, span.end_ns)
    return round(max(0.0, 1 - busy / length), 4) if length else 0.0
