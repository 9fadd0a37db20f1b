"""Show the DAG as nested boxes: modules as contiguous runs of calls, each laid out in rows of its own."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from nimble_core.ir.schedule import Schedule
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.dag_layout import Boxes, lay_out, nest
from nimble_viz.analysis.labels import label_run, trains
from nimble_viz.analysis.provenance import nesting_modules
from nimble_viz.report.data import ReportData

__all__ = ["dag", "opening_schedule"]


def dag(report: ReportData) -> dict[str, Any]:
    """Return boxes with their rows and positions, edges, critical path and plans, as columns."""
    graph, calls = report.graph, report.program.calls
    boxes = nest(nesting_modules(report), [call.phase for call in calls] if trains(report) else None)
    layout = lay_out(boxes, graph.meg)
    paths = _paths(boxes)
    parts, numbers = Counter(paths), {path: count(1) for path in paths}
    minimum = frozenset(graph.meg)
    return {
        "columns": {
            "parent": boxes.parent,
            "row": layout.row,
            "position": [round(100 * value) for value in layout.position],
            "lane_source": [lane.source for lane in layout.lanes],
            "lane_within": [lane.within for lane in layout.lanes],
            "lane_first": [lane.first for lane in layout.lanes],
            "lane_rows": [len(lane.places) for lane in layout.lanes],
            "lane_places": [round(100 * place) for lane in layout.lanes for place in lane.places],
            "first": boxes.first,
            "last": boxes.last,
            "name": boxes.name,
            "parts": [parts[path] for path in paths],
            "part": [next(numbers[path]) for path in paths],
            "from": [u for u, _ in graph.edges],
            "reach": [v - u for u, v in graph.edges],
            "minimum": [int(edge in minimum) for edge in graph.edges],
            "critical": report.critical_path,
        },
        "plans": [
            {
                "policy": plan.policy,
                "label": label_run(report, plan.policy),
                "columns": {
                    "stream": plan.stream,
                    "producer": [u for u, _ in plan.syncs],
                    "consumer": [v for _, v in plan.syncs],
                },
            }
            for plan in report.schedules
        ],
        "opens": report.schedules.index(first) if (first := opening_schedule(report)) else -1,
    }


def _paths(boxes: Boxes) -> list[str]:
    """Name each group by its path: the names of the groups around it, then its own."""
    paths: list[str] = []
    for name, around in zip(boxes.name, boxes.parent[boxes.calls :], strict=True):
        paths.append(f"{paths[around - boxes.calls]}.{name}" if around >= 0 else name)
    return paths


def opening_schedule(report: ReportData) -> Schedule | None:
    """Choose the schedule to show first: that of the verdict, else the last; None without any."""
    return report.schedule(best_run(report)) or (report.schedules[-1] if report.schedules else None)
