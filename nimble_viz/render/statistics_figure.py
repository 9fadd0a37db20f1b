"""Statistics of a report as a plotly figure: every raw sample, and what became of them over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_core.ir.measurement import Measurement
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import label_run
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    from plotly.graph_objects import Box, Figure, Scattergl

__all__ = ["MAX_POINTS", "statistics_figure"]

MAX_POINTS = 2_000
"""Above this many samples of one candidate only its outliers are drawn as points."""

_COLOURS = ("#7a7a7a", "#d98c21", "#1f6fb4", "#2e9e6b", "#a04fb0", "#c44e52")


def statistics_figure(report: ReportData) -> Figure:
    """Draw a box per candidate with its raw samples, and the samples in the order they were taken.

    Milliseconds. The names carry the median, ``unstable`` where spread or drift is beyond its bound, and ``peer``;
    peers are drawn hollow and dotted. The title names model, dtype, batch and device. A report without measurements
    gives an empty figure that says so.
    """
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    subject = f"{_escape(report.model)}, {_escape(report.dtype)}, batch {report.batch}"
    title = f"Time per call of {subject} on {_escape(report.environment.device_name)}"
    if not report.measurements:
        return Figure().update_layout(title=f"{title}: nothing was measured", template="plotly_white")
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
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=360 + 60 * len(report.measurements),
        margin={"l": 20, "r": 20, "t": 80, "b": 40},
        legend={"orientation": "h", "y": -0.14},
    )
    return figure


def _traces(report: ReportData, taken: Measurement, colour: str) -> tuple[Box, Scattergl]:
    """Draw one measurement: a box with its samples, and the samples in their order."""
    from plotly.graph_objects import Box, Scattergl

    samples = [ns / 1e6 for ns in taken.samples_ns]
    peer = any(one.name == taken.name for one in report.peers)
    label = f"{_escape(label_run(report, taken.name))}{', peer' if peer else ''}"
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


def _escape(text: str) -> str:
    """Escape a name: plotly reads a little HTML in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
