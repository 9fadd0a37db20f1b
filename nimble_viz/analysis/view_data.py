"""All views of one report as one JSON value for the viewer: columns instead of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nimble_core.ir.program import Call, Program, TensorRef
from nimble_viz.analysis.dag import dag
from nimble_viz.analysis.diff import beside
from nimble_viz.analysis.labels import label_call, shortened
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import colours, exposed, overhead
from nimble_viz.analysis.phases import PHASES
from nimble_viz.analysis.provenance import modules_of
from nimble_viz.analysis.source import source
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import COUNTS, ENDS, host_syncs
from nimble_viz.analysis.timeline import axis_note, timelines
from nimble_viz.analysis.work import work
from nimble_viz.report.data import ReportData

__all__ = ["view_data"]

_LONGEST_ARGUMENTS = 240


def view_data(report: ReportData, before: ReportData | None = None) -> dict[str, Any]:
    """Everything the viewer draws, ready for ``json.dumps``; with what there was ``before``, if that is given.

    A table says where in ``columns`` each of its columns lies: what several tables hold is there once.

    ``calls`` are those of the program; ``stands`` counts the eager calls that each stands for, ``for`` lists these.
    Overhead and the eager timeline count in ``eager`` calls, null where the program itself holds the eager calls.
    """
    kept: dict[tuple[Any, ...], int] = {}

    def table(columns: Mapping[str, Sequence[Any]]) -> dict[str, int]:
        return {name: kept.setdefault(tuple(column), len(kept)) for name, column in columns.items()}

    profile = overhead(report)
    if profile:
        profile["columns"] = table(profile["columns"])
    lines, since, tables = timelines(report), before and beside(before, report), summary(report)
    if since:
        lines += [since.pop("line")] if since["line"] else []
        tables["tiles"]["picture"]["runs"] += [since["run"]] if since["run"] else []
        tables["tiles"]["prepared"]["lines"].insert(0, since["text"])
    for line in lines:
        for columns in ("columns", "gaps"):
            line[columns] = table(line[columns])
    code, live = source(report), live_memory(report)
    if code:
        code["lines"] = table(code["lines"])
    for at, run in enumerate(live["runs"] if live else ()):
        run["columns"] = None if at and live and live["alike"] else table(run["columns"])
    graph = dag(report)
    graph["columns"] = table(graph["columns"])
    graph["plans"] = [
        {"policy": plan["policy"], "label": plan["label"], "columns": table(plan["columns"])} for plan in graph["plans"]
    ]
    return {
        "summary": tables,
        "before": since,
        "calls": table(_calls(report)),
        "work": table(work(report)),
        "eager": table(_eager(report.eager)) if report.eager is not None else None,
        "overhead": profile,
        "dag": graph,
        "colours": colours(report),
        "timelines": lines,
        "axis": axis_note(report),
        "sync_counts": COUNTS,
        "sync_ends": ENDS,
        "phases": PHASES,
        "host_syncs": host_syncs(report),
        "source": code,
        "live": live,
        "columns": list(kept),
    }


def _calls(report: ReportData) -> dict[str, list[Any]]:
    calls = report.program.calls
    spread = report.costs.spread_ns
    return {
        "operator": [call.operator for call in calls],
        "label": [label_call(call) for call in calls],
        "module": [modules_of(call) for call in calls],
        "origins": [len(call.origins) for call in calls],
        "stands": [len(call.eager) for call in calls],
        "for": [index for call in calls for index in call.eager],
        "file": [call.origins[0].file if call.origins else "" for call in calls],
        "line": [call.origins[0].line if call.origins else 0 for call in calls],
        "phase": [call.phase for call in calls],
        "reads": [_shapes(call.reads) for call in calls],
        "writes": [_shapes(call.writes) for call in calls],
        "arguments": [_arguments(call) for call in calls],
        "cost": [round(ns) for ns in report.costs.ns],
        "spread": [round(ns) for ns in spread] if spread else [],
        "exposed": exposed(report),
    }


def _eager(program: Program) -> dict[str, list[Any]]:
    """Eager calls as far as fused calls refer to them."""
    first = [call.origins[0] if call.origins else None for call in program.calls]
    return {
        "operator": [call.operator for call in program.calls],
        "label": [call.label for call in program.calls],
        "module": [call.module for call in program.calls],
        "phase": [call.phase for call in program.calls],
        "file": [origin.file if origin else "" for origin in first],
        "line": [origin.line if origin else 0 for origin in first],
        "writes": [_shapes(call.writes) for call in program.calls],
    }


def _shapes(refs: Sequence[TensorRef]) -> str:
    shown = [f"{ref.dtype}[{', '.join(map(str, ref.sizes))}]" for ref in refs[:6]]
    return "  ".join(shown) + (f"  and {len(refs) - 6} more" if len(refs) > 6 else "")


def _arguments(call: Call) -> str:
    text = ", ".join(f"{name}={value}" for name, value in call.arguments if not value.startswith("%"))
    return shortened(text, _LONGEST_ARGUMENTS)
