"""One view of a report by itself: plain data, text for a terminal, and in a notebook the page, opened at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.dag import dag
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import overhead
from nimble_viz.analysis.source import source
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.timeline import timelines
from nimble_viz.render.html import fragment, page
from nimble_viz.render.text import pane_text, plain_text
from nimble_viz.report.data import ReportData

__all__ = ["PANES", "Pane", "notebook_bundle"]

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


def notebook_bundle(shown: ReportData | Pane, report: ReportData, pane: str = "summary") -> dict[str, str]:
    """Return ``shown`` as text, and the page opened at ``pane``; never raises: without text there is the ``repr``."""
    bundle = {"text/plain": repr(shown)}
    try:
        bundle["text/plain"] = shown.to_text(100) if isinstance(shown, Pane) else plain_text(shown, 100)
        bundle["text/html"] = fragment(report, pane)
    except Exception as error:  # a display must not fail: what went wrong is said in the text
        bundle["text/plain"] += f"\n(not shown in full: {type(error).__name__}: {error})\n"
    return bundle
