"""The Report that users get: its values, and how it and its views are saved, shown, exported and compared.

Importing this module imports neither torch, plotly nor graphviz: what needs them is imported by the method that does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, RenderableType

from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.dag import dag
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import overhead
from nimble_viz.analysis.source import source
from nimble_viz.analysis.summary import brief, summary
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.timeline import timelines
from nimble_viz.export.tables import to_dataframe
from nimble_viz.render.html import fragment, page
from nimble_viz.render.text import pane_text, plain_text, report_text
from nimble_viz.render.verdicts import Difference, diff
from nimble_viz.report import file
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    import graphviz
    import pandas
    from plotly.graph_objects import Figure

    from nimble_viz.render.widget import ReportWidget

__all__ = ["PANES", "Pane", "Report", "load", "notebook_bundle"]

_VIEWS: dict[str, Callable[[ReportData], Any]] = {
    "summary": summary,
    "overhead": overhead,
    "dag": dag,
    "timeline": timelines,
    "syncs": host_syncs,
    "source": source,
    "memory": live_memory,
}

PANES = tuple(_VIEWS)
"""Views of the page, in the order of its tabs."""


@dataclass(frozen=True, slots=True)
class Pane:
    """A view of a report.

    Args:
        report: what it shows.
        name: which view, one of ``PANES``.

    Raises:
        InputError: there is no such view.
    """

    report: ReportData
    name: str

    def __post_init__(self) -> None:
        if self.name not in PANES:
            raise InputError(f"there is no view {self.name!r}", fix=f"one of {', '.join(PANES)}")

    @property
    def data(self) -> Any:
        """The view as plain values: what its function in ``analysis`` returns; None where nothing is known."""
        return _VIEWS[self.name](self.report)

    def to_text(self, width: int | None = None) -> str:
        """Return the view as plain text, ``width`` columns wide."""
        return pane_text(self.report, self.name, width)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page, opened at this view, to ``path``; raise OSError if that fails."""
        return write_file(path, page(self.report, self.name).encode())

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{self.name} of {self.report!r}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return notebook_bundle(self, self.report, self.name)


@dataclass(frozen=True, slots=True, repr=False)
class Report(ReportData):
    """Everything ``compare`` found out: its fields are those of ``ReportData``."""

    @classmethod
    def of(cls, data: ReportData) -> Self:
        """Make a report that shows itself of the same values."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(ReportData)})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write this report to ``path`` (by custom ``*.nimble``); ``nimble_viz.load`` reads it back.

        All of it is written or nothing. Links are followed, a file that is there keeps its mode, and a device or a pipe
        is written to.

        Raises:
            ReportFileError: the report is not consistent in itself.
            InputError: the path is empty.
            OSError: the file cannot be written; one that was there before is left as it was.
        """
        return file.save(self, path)

    def to_html(self, path: str | os.PathLike[str], before: ReportData | None = None) -> Path:
        """Write one self-contained page with all views to ``path``, as ``save`` does; raise OSError if that fails.

        With ``before``, an earlier report, its replay is drawn on the same axis, and what got slower since in red.
        """
        return write_file(path, page(self, before=before).encode())

    def export(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write this report to ``path`` for other tools.

        Args:
            path: ``*.json`` for Chrome trace events, which Perfetto opens as well, a folder for all tables as CSV, or
                one of them by name (``calls.csv``), ``*.gv`` or ``*.dot`` for the graph as Graphviz source, ``*.svg``,
                ``*.pdf`` or ``*.png`` for the graph drawn by Graphviz's ``dot``.
            format: ``"chrome"``, ``"csv"``, ``"dot"``, ``"svg"``, ``"pdf"`` or ``"png"``
                for a path that does not say.

        Raises:
            InputError: no such format or table, no timelines to trace, an empty path, or a package is missing.
            OSError: it cannot be written.
        """
        from nimble_viz.export.formats import export

        return export(self, path, format)

    def graphviz(self, policy: str | None = None, *, transitive: bool = False) -> graphviz.Digraph:
        """Draw the graph for Graphviz: ``.source`` is DOT text; showing it needs the ``dot`` program.

        Modules are clusters; calls are coloured by stream and say its number; waits between streams are dashed.

        Args:
            policy: name of the schedule; None: the one that the verdict is about.
            transitive: also edges that follow from others.

        Raises:
            InputError: no such schedule.
        """
        from nimble_viz.export.dot import digraph

        return digraph(self, policy, transitive=transitive)

    def to_dataframe(self, kind: str = "calls") -> pandas.DataFrame:
        """Return one table of this report as a pandas data frame.

        ``kind`` is one of ``nimble_viz.export.tables.KINDS``. Times are nanoseconds, sizes bytes.

        Raises:
            InputError: no such table, or pandas is not installed.
        """
        return to_dataframe(self, kind)

    def diff(self, other: ReportData) -> Difference:
        """Compare this report with ``other``, a later one: calls, costs, speed, counts, environment, ….

        Raises:
            InputError: ``other`` is no report.
        """
        return diff(self, other)

    def summary(self) -> dict[str, Any]:
        """Return what was found, what bounds it and what to do next, for programs: at most 12 kB as JSON.

        Times are in µs, shares from 0 to 1. docs/report-format.md describes each key.
        """
        return brief(self)

    def to_text(self, width: int | None = None, *, full: bool = False) -> str:
        """Return this report as plain text: its first screen in twelve lines, or with ``full`` all of it.

        It is ``width`` columns wide (60 to 200; None: the terminal's), and twelve lines long from 80 on.
        """
        return plain_text(self, width, full=full)

    __str__ = to_text

    def figure(self, kind: str = "speed") -> Figure:
        """Draw one view as a plain plotly figure, to restyle and to put into other notebooks and pages.

        Args:
            kind: ``"speed"``, all raw samples; ``"timeline"``, eager and the replays on one axis; ``"overhead"``, host
                time of eager by operator; ``"syncs"``, synchronisations of each schedule.

        Raises:
            InputError: no such figure.
        """
        from nimble_viz.render.figures import figure

        return figure(self, kind)

    def pane(self, name: str) -> Pane:
        """Return one view by itself.

        ``name`` is ``"summary"``, ``"overhead"``, ``"dag"``, ``"timeline"``, ``"syncs"``, ``"source"`` or ``"memory"``.

        In a notebook the page, opened at it; ``print`` gives text, ``data`` plain values, ``to_html(path)`` a file.

        Raises:
            InputError: no such view; names those there are.
        """
        return Pane(self, name)

    def source(self) -> Pane:
        """Show the model's code line by line: calls, eager's host and GPU time, replay time, waits.

        Shows the functions that ``sources`` carries; of a report without them, figures by file and line.
        """
        return self.pane("source")

    def live_memory(self) -> Pane:
        """Show live bytes call by call, in eager and in the chosen replay, and which results hold the peak."""
        return self.pane("memory")

    def dashboard(self, pane: str = "summary") -> ReportWidget:
        """Show this report in a notebook as a widget: the page, linked with the kernel.

        A click on a node, a bar, a span or a row selects its call in all views, and ``selected`` holds it. From code,
        ``select(call, …)`` does what clicks do, and ``what_if(policy, streams)`` simulates another schedule and shows
        it beside the measured runs. ``plan`` is the schedule in view, ``dark`` the theme.

        Needs a running kernel, but neither torch nor a GPU. Without a kernel there are ``to_html`` and the report's own
        display.

        Args:
            pane: the view to open first.

        Returns:
            A widget: the last line of a cell shows it.
        """
        from nimble_viz.render.widget import ReportWidget

        return ReportWidget(self, pane)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield report_text(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return notebook_bundle(self, self)


def notebook_bundle(shown: ReportData | Pane, report: ReportData, pane: str = "summary") -> dict[str, str]:
    """Return ``shown`` as text, and the page opened at ``pane``; never raises: without text there is the ``repr``."""
    bundle = {"text/plain": repr(shown)}
    try:
        bundle["text/plain"] = shown.to_text(100) if isinstance(shown, Pane) else plain_text(shown, 100)
        bundle["text/html"] = fragment(report, pane)
    except Exception as error:  # a display must not fail: what went wrong is said in the text
        bundle["text/plain"] += f"\n(not shown in full: {type(error).__name__}: {error})\n"
    return bundle


def load(path: str | os.PathLike[str], *, max_bytes: int = file.MAX_BYTES) -> Report:
    """Read a report that ``Report.save`` wrote, of this or an older version.

    See ``nimble_viz.report.file.read``.

    Raises:
        ReportFileError: it is no report, is damaged or too large, or holds what no report can.
        OSError: it cannot be read.
    """
    return Report.of(file.read(path, max_bytes=max_bytes))
