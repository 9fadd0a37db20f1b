"""Progress: tell the user what is being done, and keep how long each step took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from nimble_viz.report.data import PrepareStep

__all__ = ["NotebookProgress", "Progress", "TerminalProgress", "default_progress"]

_REST_S, _SENDING_S = 1.0, 0.05
"""Seconds between two lines of a notebook's progress, and seconds for one to be sent."""


class Progress:
    """Times steps and shows nothing, for tests, logs and pipes; a context manager. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._inside = 0.0  # seconds of the steps inside the one under way, which are not counted twice
        self._seconds: dict[str, float] = {}
        self._told = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.finish()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show ``name`` while the body runs.

        A step that raises is kept too. A step inside another one is listed on its own and taken off the outer one,
        so the steps add up to the time spent.
        """
        began, around = self._clock(), self._inside
        self._inside = 0.0
        self._open.append(name)
        self._show(self._line(name))
        try:
            yield
        finally:
            self._open.pop()
            took = self._clock() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside
            self._inside = around + took
            if self._open:
                self._show(self._line(self._open[-1]))

    @property
    def steps(self) -> tuple[PrepareStep, ...]:
        """The steps that ended, in that order; steps of one name are one, with their seconds added."""
        return tuple(PrepareStep(name, taken) for name, taken in self._seconds.items())

    def tell(self, text: str) -> None:
        """Show ``text`` behind the names of steps from now on."""
        self._told = text

    def advance(self, done: int, total: int) -> None:
        """Note that the step under way has done ``done`` of ``total`` pieces."""

    def finish(self) -> None:
        """Remove the display. May be called again, and after an exception."""

    def _line(self, name: str) -> str:
        return f"{name}; {self._told}" if self._told else name

    def _show(self, name: str) -> None:
        """Show that ``name`` is under way."""


class TerminalProgress(Progress):
    """One line on the terminal (``console``, or standard error) that goes away when all is done."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task("", total=None, count="")

    def tell(self, text: str) -> None:
        """Write a line that stays, above the one that goes away."""
        self._bars.console.print(text, markup=False, highlight=False)

    def advance(self, done: int, total: int) -> None:
        """Draw ``done`` of ``total``."""
        self._bars.update(self._task, completed=done, total=total, count=f"{done}/{total}")

    def finish(self) -> None:
        """Take the line away."""
        self._bars.stop()

    def _show(self, name: str) -> None:
        self._bars.reset(self._task, description=name, total=None, count="")
        self._bars.start()


class NotebookProgress(Progress):
    """One line of a notebook cell's output, rewritten in place; at the end nothing of it is shown or kept.

    Plain HTML by the notebook's own display protocol: a widget would stay behind in the saved notebook.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._handle: Any = None
        self._shown = 0.0

    def advance(self, done: int, total: int) -> None:
        """Write ``done`` of ``total`` after the step's name, once a second, and wait until it is sent.

        The kernel sends it on a thread of its own, which would disturb what is timed.
        """
        if self._clock() - self._shown < _REST_S:
            return
        name = self._open[-1] if self._open else ""
        self._show(self._line(f"{name} {done}/{total}"))
        time.sleep(_SENDING_S)

    def finish(self) -> None:
        """Leave an empty text, which takes no room: the protocol cannot remove an output.

        An output without any data takes none either, but nbconvert warns of it.
        """
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
            self._handle = None

    def _show(self, name: str) -> None:
        import IPython.display

        ipython: Any = IPython.display  # its functions have no types
        self._shown = self._clock()
        line = ipython.HTML(f'<span style="opacity:.7">{escape(name)}</span>')
        if self._handle is None:
            self._handle = ipython.display(line, display_id=True)
        else:
            self._handle.update(line)


def default_progress() -> Progress:
    """Return a visible progress in a terminal or a notebook, a silent one elsewhere."""
    if "ipykernel" in sys.modules:
        from IPython import get_ipython

        if hasattr(get_ipython(), "kernel"):
            return NotebookProgress()
    return TerminalProgress() if sys.stderr.isatty() else Progress()
