"""Parts that terminal texts are made of: tables, pairs, bullets and bars for rich, and plain strings of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nimble_viz.analysis.labels import visible

__all__ = [
    "COLOURS", "FILLS", "MAX_WIDTH", "MIN_WIDTH", "Bar", "bullet", "columns", "indented", "make_table",
    "note", "pairs", "plain", "sections", "words",
]  # fmt: skip

MIN_WIDTH, MAX_WIDTH = 60, 200
"""Columns that texts are laid out for."""

FILLS = ("█", "▓", "▒", "░", "▚")
COLOURS = ("blue", "cyan", "yellow", "magenta", "green")
"""Of the parts of a ``Bar``, in their order."""

_BAR_MIN, _BAR_MAX = 8, 24
_NAMES = 46


def columns(width: int | None = None) -> int:
    """Return ``width`` within 60 and 200; None takes the terminal's, or 80 where there is none."""
    return max(MIN_WIDTH, min(get_terminal_size().columns if width is None else width, MAX_WIDTH))


def plain(content: RenderableType, width: int | None = None) -> str:
    """Return ``content`` as a string without colour codes, laid out for ``columns(width)``."""
    console = Console(
        file=StringIO(), width=columns(width), color_system=None, force_jupyter=False, legacy_windows=False, _environ={}
    )
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def words(content: str, style: str = "", *, lines: bool = False) -> Text:
    """Return ``content`` as it is: never markup, never a control code; line breaks only if ``lines``."""
    cleaned = "\n".join(map(visible, content.split("\n"))) if lines else visible(content)
    return Text(cleaned, style=style, overflow="fold")


def note(content: str) -> Text:
    """Return dim words, as below a table."""
    return words(content, "dim")


def make_table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str | RenderableType]]) -> Table:
    """Make a table; a head is its name and ``"r"`` for a column on the right, text in cells is taken as it is."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name, side in heads:
        table.add_column(words(name), justify="right" if side else "left", overflow="fold")
    for row in rows:
        table.add_row(*(words(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Put names beside values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", max_width=_NAMES)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(note(name), words(value))
    return table


def bullet(content: str) -> Table:
    """Put a dash before ``content``."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(words("-"), words(content))
    return table


def indented(content: str | RenderableType) -> RenderableType:
    """Move ``content`` two columns to the right; a string is dim."""
    return Padding(note(content) if isinstance(content, str) else content, (0, 0, 0, 2))


def sections(parts: Iterable[tuple[str, Sequence[RenderableType]]]) -> Iterator[RenderableType]:
    """Draw titles with their indented bodies, a line before each."""
    for title, body in parts:
        yield words("")
        yield words(title, "bold cyan")
        yield from map(indented, body)


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts stacked to a bar as wide as its cell allows; ``largest`` fills it."""

    parts: Sequence[float]
    largest: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_BAR_MIN, options.max_width), min(_BAR_MAX, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(_BAR_MAX, options.max_width)
        bar, done, drawn = words(""), 0.0, 0
        for part, fill, colour in zip(self.parts, FILLS, COLOURS, strict=True):
            done += max(part, 0.0)  # rounded on the running sum, so that the whole bar has the right length
            until = min(round(width * done / self.largest), width) if self.largest > 0 else 0
            bar.append(fill * (until - drawn), colour)
            drawn = until
        yield bar
