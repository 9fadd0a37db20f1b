"""Views of a report as plain plotly figures, for users to restyle and to put into notebooks and pages of their own.

Nothing is linked and nothing is clicked here: that is the page's and the widget's. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from plotly.graph_objects import Bar, Box, Figure, Scattergl
from plotly.subplots import make_subplots

from nimble_core.ir.measurement import Measurement
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import label_run, plural
from nimble_viz.analysis.overhead import PARTS, grouped
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import COUNTS
from nimble_viz.analysis.timeline import axis_note, timelines
from nimble_viz.report.data import ReportData

__all__ = ["KINDS", "MAX_POINTS", "figure"]

MAX_POINTS = 2_000
"""Above this many samples of one candidate only its outliers are drawn as points."""

MAX_ROWS = 40
"""Operators that are drawn; those with the least overhead are left out, which is said."""

_COLOURS = ("#7a7a7a", "#d98c21", "#1f6fb4", "#2e9e6b", "#a04fb0", "#c44e52")


def figure(report: ReportData, kind: str = "speed") -> Figure:
    """Draw one view; what the report does not know gives an empty figure that says so.

    Raises:
        InputError: ``kind`` is none of ``KINDS``.
    """
    if kind not in KINDS:
        raise InputError(f"there is no figure {kind!r}", fix=f"one of {', '.join(KINDS)}")
    drawn = KINDS[kind](report)
    return drawn.update_layout(template="plotly_white", margin={"l": 20, "r": 20, "t": 80, "b": 40})


def _timeline(report: ReportData) -> Figure:
    """Draw eager above the replays on one axis: a bar for each span, a row for each lane."""
    figure = Figure()
    names: list[str] = []
    for run in timelines(report):
        spans, first = run["columns"], len(names)
        doubts = "".join(f"<br>{escape(mark)}" for mark in run["marks"])
        names += [f"{escape(run['label'])} · {escape(lane['name'])}" for lane in run["lanes"]]
        figure.add_trace(
            Bar(
                orientation="h",
                name=escape(run["label"]),
                base=[ns / 1e6 for ns in spans["start"]],
                x=[ns / 1e6 for ns in spans["length"]],
                y=[first + lane for lane in spans["lane"]],
                customdata=spans["call"],
                hovertext=[
                    f"<b>{escape(name)}</b>{f'<br>call {call}' if call >= 0 else ''}<br>{format_ns(ns)}{doubts}"
                    for name, call, ns in zip(spans["name"], spans["call"], spans["length"], strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
                marker={"line": {"width": 0}},
            )
        )
    if not figure.data:
        return _empty(report, "Timeline", "no run was timed call by call")
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text=f"ms<br>{escape(axis_note(report))}")
    return figure.update_layout(
        title=_title(report, "Timeline"), barmode="overlay", bargap=0.2, height=220 + 24 * len(names)
    )


def _overhead(report: ReportData) -> Figure:
    """Draw eager's host time by operator, stacked by source; on the host the operators' own work as well."""
    rows = grouped(report, "operator")
    if report.overhead is None or not rows:
        return _empty(report, "Framework overhead", "eager was not profiled")
    shown = rows[:MAX_ROWS]
    names = [escape(row["name"]) for row in shown]
    parts = (*PARTS, "work") if report.environment.device != "cuda" else PARTS
    figure = Figure([Bar(name=part, orientation="h", y=names, x=[row[part] / 1e6 for row in shown]) for part in parts])
    left = len(rows) - len(shown)
    rest = f"; {plural(left, 'operator')} with less are left out" if left else ""
    figure.update_xaxes(title_text=f"ms of host time in the profiled eager run{rest}")
    figure.update_yaxes(autorange="reversed")
    return figure.update_layout(
        title=_title(report, "Framework overhead"), barmode="stack", height=220 + 22 * len(shown)
    )


def _syncs(report: ReportData) -> Figure:
    """Draw the synchronisations across streams of each schedule, counted in four ways."""
    plans = summary(report)["plans"]
    if not plans:
        return _empty(report, "Synchronisations", "no plan was made")
    labels = [f"{escape(row['label'])}, {plural(row['streams'], 'stream')}" for row in plans]
    figure = Figure(
        [
            Bar(name=name, x=labels, y=[row[key] for row in plans], hovertemplate=f"%{{y}}: {escape(meaning)}")
            for key, name, meaning in COUNTS
        ]
    )
    figure.update_yaxes(title_text="synchronisations across streams", rangemode="tozero")
    return figure.update_layout(title=_title(report, "Synchronisations"), barmode="group", height=420)


def _title(report: ReportData, what: str) -> str:
    subject = f"{escape(report.model)}, {escape(report.dtype)}, batch {report.batch}"
    return f"{what} of {subject} on {escape(report.environment.device_name)}"


def _empty(report: ReportData, what: str, why: str) -> Figure:
    return Figure().update_layout(title=f"{_title(report, what)}: {why}")


def _speed(report: ReportData) -> Figure:
    """Draw a box per candidate with its raw samples, and the samples in the order they were taken.

    Milliseconds. The names carry the median, ``unstable`` where spread or drift is beyond its bound, and ``peer``;
    peers are drawn hollow and dotted. The title names model, dtype, batch and device. A report without measurements
    gives an empty figure that says so.
    """
    if not report.measurements:
        return _empty(report, "Time per call", "nothing was measured")
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.6, 0.4],
        vertical_spacing=0.16,
        subplot_titles=("samples and quartiles", "in the order taken"),
    )
    for k, taken in enumerate(report.measurements):
        box, line = _traces(report, taken, _COLOURS[k % len(_COLOURS)])
        figure.add_trace(box, row=1, col=1)
        figure.add_trace(line, row=2, col=1)
    figure.update_xaxes(title_text="ms per call", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(title_text="sample", row=2, col=1)
    figure.update_yaxes(title_text="ms", rangemode="tozero", row=2, col=1)
    return figure.update_layout(
        title=_title(report, "Time per call"),
        height=360 + 60 * len(report.measurements),
        legend={"orientation": "h", "y": -0.14},
    )


def _traces(report: ReportData, taken: Measurement, colour: str) -> tuple[Box, Scattergl]:
    """Draw one measurement: a box with its samples, and the samples in their order."""
    samples = [ns / 1e6 for ns in taken.samples_ns]
    peer = any(one.name == taken.name for one in report.peers)
    label = f"{escape(label_run(report, taken.name))}{', peer' if peer else ''}"
    name = f"{label}: median {format_ns(taken.median_ns)}{'' if taken.stable else ' (unstable)'}"
    marker = {"color": colour, "size": 4, "symbol": "circle-open" if peer else "circle"}
    box = Box(
        x=samples,
        name=name,
        boxpoints="all" if len(samples) <= MAX_POINTS else "suspectedoutliers",
        jitter=0.5,
        pointpos=0,
        marker={**marker, "opacity": 0.6},
        line={"width": 1.5},
        fillcolor="rgba(0,0,0,0)",
        hovertemplate="%{x:.4f} ms<extra></extra>",
        showlegend=False,
    )
    line = Scattergl(
        y=samples,
        name=name,
        mode="lines+markers",
        marker=marker,
        line={"width": 1, "dash": "dot" if peer else "solid"},
        hovertemplate="sample %{x}: %{y:.4f} ms<extra></extra>",
    )
    return box, line


KINDS: dict[str, Callable[[ReportData], Any]] = {
    "speed": _speed,
    "timeline": _timeline,
    "overhead": _overhead,
    "syncs": _syncs,
}
"""Names of the figures, and what draws each."""
