"""Progress: steps are timed by the injected clock, and shown only where somebody watches."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nimble_viz.collect.progress import Progress, TerminalProgress, default_progress
from nimble_viz.report.data import PrepareStep


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.recursive(st.integers(0, 5), lambda inner: st.lists(inner, max_size=4)))
def test_steps_add_up_to_the_time_spent(tree: object) -> None:
    clock = Clock()
    progress = Progress(clock)

    def run(node: object, depth: int) -> None:
        with progress.step(f"depth {depth}"):
            if isinstance(node, int):
                clock.now += node
            elif isinstance(node, list):
                for one in node:
                    run(one, depth + 1)

    run(tree, 0)
    assert sum(step.seconds for step in progress.steps) == clock.now - 100.0


def test_a_step_that_raises_is_kept_and_the_error_passes() -> None:
    clock = Clock()
    progress = Progress(clock)

    def fail() -> None:
        with progress, progress.step("capture"):
            clock.now += 3
            raise KeyError("no")

    with pytest.raises(KeyError):
        fail()
    assert progress.steps == (PrepareStep("capture", 3.0),)


def test_the_terminal_shows_the_step_and_then_nothing() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with TerminalProgress(console) as progress, progress.step("record [bold]now"):
        progress.advance(3, 30)
        progress._bars.refresh()
    shown = screen.getvalue()
    assert "record [bold]now" in shown
    assert "3/30" in shown
    assert shown.rstrip("\n").endswith("\x1b[2K") or shown.rstrip("\n").endswith("\x1b[?25h")
    progress.finish()


def test_what_is_told_stays_on_the_terminal_and_follows_steps_elsewhere() -> None:
    screen = io.StringIO()
    with TerminalProgress(Console(file=screen, force_terminal=True, width=80)) as progress:
        with progress.step("record"):
            progress.tell("three times [as fast]")
        with progress.step("compile"):
            pass
    assert screen.getvalue().count("three times [as fast]") == 1

    lines: list[str] = []

    class Shown(Progress):
        def _show(self, name: str) -> None:
            lines.append(name)

    with Shown() as progress:
        progress.tell("twice as fast")
        with progress.step("compile"):
            pass
    assert lines == ["compile; twice as fast"]
    assert progress.steps[0].name == "compile"


@pytest.mark.parametrize(("terminal", "kind"), [(False, Progress), (True, TerminalProgress)])
def test_shown_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: type[Progress]) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    assert type(default_progress()) is kind


def test_a_notebook_shows_steps_and_keeps_nothing_of_them() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make test installs it")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat: make test installs it")
    code = """
from nimble_viz.collect.progress import NotebookProgress, default_progress
print("before")
with default_progress() as progress, progress.step("record <now>"):
    assert type(progress) is NotebookProgress
    progress.advance(2, 30)
print("after")
"""
    silent = "with NotebookProgress(): pass"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in (code, silent)])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    shown, nothing = (cell.outputs for cell in notebook.cells)
    assert "".join(one.text for one in shown if one.output_type == "stream") == "before\nafter\n"
    assert [one.data for one in shown if one.output_type == "display_data"] == [{"text/plain": ""}]
    assert nothing == []
    nbformat.validate(notebook)
