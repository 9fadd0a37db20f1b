"""Gantt lanes of the eager run and of each replay, for one common axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nimble_core.timeline import Lane, Span
from nimble_viz.report import Report
from nimble_viz.views.labels import label_run
from nimble_viz.views.phases import span_phases

__all__ = ["DISTORTION_BOUND", "timelines"]

DISTORTION_BOUND = 1.2
"""A profiled run this many times longer or shorter than the unprofiled one is marked as distorted."""


def timelines(report: Report) -> list[dict[str, Any]]:
    """One entry per timeline, eager first; spans as columns, whole nanoseconds from that run's first start."""
    ordered = sorted(report.timelines, key=lambda line: line.run != "eager")
    shown = []
    for line in ordered:
        zero = min((span.start_ns for span in line.spans), default=0.0)
        phased = zip(line.spans, span_phases(report, line), strict=True)
        ordered_spans = sorted(phased, key=lambda one: (one[0].start_ns, one[0].lane, one[0].end_ns))
        spans = [span for span, _ in ordered_spans]
        length = line.profiled_ns or line.length_ns
        factor = length / line.unprofiled_ns if line.unprofiled_ns else 0.0
        lanes = [
            {"name": lane.name, "kind": lane.kind, "idle": _idle(line.length_ns, busy)}
            for lane, busy in zip(line.lanes, _busy(line.lanes, spans), strict=True)
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


def _busy(lanes: Sequence[Lane], spans: Sequence[Span]) -> list[float]:
    """Union of the spans of each lane; ``spans`` sorted by start."""
    busy, reached = [0.0] * len(lanes), [float("-inf")] * len(lanes)
    for span in spans:
        busy[span.lane] += max(0.0, span.end_ns - max(span.start_ns, reached[span.lane]))
        reached[span.lane] = max(reached[span.lane], span.end_ns)
    return busy


def _idle(length: float, busy: float) -> float:
    return round(max(0.0, 1 - busy / length), 4) if length else 0.0
