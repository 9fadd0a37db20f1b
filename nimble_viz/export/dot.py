"""The DAG as Graphviz source, for papers and other tools; drawn where the ``dot`` program is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

import graphviz

from nimble_core.ir.schedule import Schedule
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.dag import opening_schedule
from nimble_viz.analysis.dag_layout import nest
from nimble_viz.analysis.labels import label_call, label_run, source_of, trains
from nimble_viz.analysis.provenance import module_of, nesting_modules
from nimble_viz.report.data import ReportData

__all__ = ["DRAWN", "Drawn", "digraph", "write_dot"]

Drawn = Literal["svg", "pdf", "png"]
DRAWN: tuple[Drawn, ...] = get_args(Drawn)

_STREAMS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#e8d92f", "#8a8f92")
"""Okabe and Ito's colours, safe for colour-blind readers, as in the other views; a stream's number is written too."""
_ON_DARK = ("#0072b2", "#d55e00")
_SYNC, _EDGE, _IMPLIED = "#c23b00", "#6b7280", "#b6bcc2"
_MOST_DRAWN = 2_000


def digraph(report: ReportData, policy: str | None = None, *, transitive: bool = False) -> graphviz.Digraph:
    """Draw the graph of ``report`` under one of its schedules, as ``Report.graphviz`` says. O(calls + edges)."""
    schedule = opening_schedule(report) if policy is None else report.schedule(policy)
    if policy is not None and schedule is None:
        known = ", ".join(repr(plan.policy) for plan in report.schedules)
        raise InputError(f"the report has no schedule {policy!r}", fix=f"one of {known}" if known else "leave it out")
    text = {"fontname": "Helvetica,Arial,sans-serif", "fontsize": "10"}
    title = f"{report.model}: {label_run(report, schedule.policy) if schedule else 'no schedule'}"
    drawn = graphviz.Digraph(
        re.sub(r"\W+", "_", report.model),
        comment=" ".join(title.split()),
        graph_attr={**text, "ranksep": "0.3", "nodesep": "0.2", "newrank": "true"},
        node_attr={**text, "shape": "box", "style": "filled,rounded", "height": "0.3", "margin": "0.12,0.05"},
        edge_attr={"color": _EDGE, "arrowsize": "0.6"},
    )
    calls, critical = report.program.calls, frozenset(report.critical_path)
    boxes = nest(nesting_modules(report), [call.phase for call in calls] if trains(report) else None)
    inside: dict[int, list[int]] = {}
    for box, parent in enumerate(boxes.parent):
        inside.setdefault(parent, []).append(box)

    def fill(around: graphviz.Digraph, members: list[int]) -> None:
        for box in members:
            if box < boxes.calls:
                _add_call(around, report, schedule, box, critical=box in critical)
                continue
            name = boxes.name[box - boxes.calls]
            look = {"label": graphviz.escape(name), "style": "rounded", "color": _IMPLIED, "labeljust": "l"}
            with around.subgraph(name=f"cluster_{box}", graph_attr=look) as cluster:
                fill(cluster, inside.get(box, []))

    fill(drawn, inside.get(-1, []))
    syncs = frozenset(schedule.syncs if schedule else ())
    path = frozenset(zip(report.critical_path, report.critical_path[1:], strict=False))
    minimum = frozenset(report.graph.meg)
    for u, v in sorted(minimum | syncs):
        look = {"style": "dashed", "color": _SYNC} if (u, v) in syncs else {}
        if (u, v) in path:
            look["penwidth"] = "2.5"
        if (u, v) not in minimum:
            look["constraint"] = "false"
        drawn.edge(f"c{u}", f"c{v}", **look)
    if transitive:
        for u, v in sorted(frozenset(report.graph.edges) - minimum - syncs):
            drawn.edge(f"c{u}", f"c{v}", style="dotted", color=_IMPLIED, constraint="false")
    return drawn


def _add_call(
    around: graphviz.Digraph, report: ReportData, schedule: Schedule | None, index: int, *, critical: bool
) -> None:
    call, cost = report.program.calls[index], report.costs.ns[index]
    stream = schedule.stream[index] if schedule else None
    colour = "#ffffff" if stream is None else _STREAMS[stream % len(_STREAMS)]
    figures = [format_ns(cost)] if cost else []
    figures += [] if stream is None else [f"stream {stream}"]
    lines = [f"{index} {label_call(call)}", " · ".join(figures)]
    around.node(
        f"c{index}",
        label=r"\n".join(graphviz.escape(line) for line in lines if line),
        tooltip=graphviz.escape("\n".join(filter(None, (call.operator, module_of(call), source_of(call))))),
        fillcolor=colour,
        fontcolor="#ffffff" if colour in _ON_DARK else "#111111",
        penwidth="2.5" if critical else "0.8",
    )


def write_dot(report: ReportData, target: Path, kind: Literal["dot"] | Drawn) -> Path:
    """Write DOT text, or what ``dot`` draws of it.

    Raises:
        InputError: there is no ``dot``, it failed, or the graph is too large for it.
        OSError: the file cannot be written.
    """
    drawn = digraph(report)
    if kind == "dot":
        return write_file(target, drawn.source.encode())
    source = f"{target.stem}.gv"
    size = len(report.program.calls)
    if size > _MOST_DRAWN:
        raise InputError(
            f"a graph of {size:,} calls takes dot hours", fix=f"to_html(), which draws it at once, or {source} as text"
        )
    try:
        return write_file(target, drawn.pipe(format=kind))
    except graphviz.ExecutableNotFound:
        raise InputError(
            "Graphviz's dot is not on the PATH", fix=f"apt install graphviz, or brew install graphviz, or {source}"
        ) from None
    except graphviz.CalledProcessError as error:
        raise InputError(f"dot failed: {error}", fix=f"{source} as text") from error
