"""The first screen for a terminal: three tiles in at most twelve lines, with two bars on one scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from nimble_viz.analysis.labels import context
from nimble_viz.analysis.tiles import tiles
from nimble_viz.render.layout import Bar, note, words
from nimble_viz.report.data import ReportData

__all__ = ["COLOURED", "TilesText"]

COLOURED = {"faster": "green", "slower": "red", "undecided": "dim"}
"""How a ratio is set."""
_MOST = 12
_NAME, _BAR, _GAP = 8, 16, 2
_NARROW = 80
_MORE = "everything: --full, to_text(full=True); page: --html, to_html(path)"


@dataclass(frozen=True, slots=True)
class TilesText:
    """The three tiles of a report; not ``full``, on at most twelve lines from 80 columns on."""

    report: ReportData
    full: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, found = options.max_width, tiles(self.report)
        room = width - _NAME - _GAP
        beside = room - (_BAR + _GAP if width >= _NARROW else 0)
        now, prepared, following = found["now"], found["prepared"], found["next"]
        largest = max(now["ns"], prepared["ns"])

        def cut(content: Text, most: int, room: int = room) -> list[Text]:
            lines = list(content.wrap(console, room, overflow="fold"))
            if self.full or len(lines) <= most:
                return lines
            lines[most - 1].truncate(room - 1)
            lines[most - 1].append("…")
            return lines[:most]

        def row(name: str, lines: list[Text], parts: list[float] | None = None) -> Iterator[RenderableType]:
            yield _row(name, lines[:1], Bar(parts, largest) if parts and largest and width >= _NARROW else None)
            for line in lines[1:]:
                yield _row("", [line])

        title = words(f"nimble_viz: {self.report.model}, {context(self.report)}", "bold")
        title.truncate(width, overflow="ellipsis" if not self.full else "fold")
        yield title
        spent = ", ".join(
            f"{one['name']} {one['share']}{' (' * self.full}{one['text'] * self.full}{')' * self.full}"
            for one in now["rows"]
            if one["ns"]
        )
        bound = f"{now['bound']}: {spent}" if now["bound"] else ""
        told = (bound, *now["lines"]) if now["stable"] else (*now["lines"], bound)
        said = words("; ".join(filter(None, told)))
        parts = [one["ns"] for one in now["rows"]] or [now["ns"]]
        shares = [*parts, *[0.0] * (5 - len(parts))]
        head = words(now["figure"], "bold").append(f"  {now['of']}", "not bold")
        explained = cut(said, 1 if prepared["ns"] else 3) if said else []
        yield from row("now", [*cut(head, 1, beside), *explained], shares)
        code = [words(line, "cyan") for line in following["code"].splitlines() if line]
        pasted = [line for one in code for line in one.wrap(console, room, overflow="fold")]
        step = cut(words(following["figure"]), 2)
        left = _MOST - 4 - max(len(explained), 1) - len(step) - len(pasted)
        lines = [prepared["of"], *prepared["lines"]] if prepared["of"] else prepared["lines"]
        details = cut(words("; ".join(lines)), max(left, 1))
        parts = [0.0, prepared["ns"], 0.0, 0.0, 0.0]
        yield from row("prepared", [*cut(_figure(prepared), 1, beside), *details], parts if prepared["ns"] else None)
        if self.full and prepared["code"]:
            yield from row("", [words(line, "cyan") for line in prepared["code"].splitlines() if line])
        yield from row("next", [*step, *pasted])
        if self.full:
            yield from (line for one in following["lines"] for line in row("", cut(words(one), 1)))
        else:
            yield from row("more", cut(note(_MORE), 1))


def _figure(tile: dict[str, Any]) -> Text:
    """Set a verdict in its colour where nothing is doubtful; never what is undecided."""
    colour = COLOURED.get(tile["verdict"], "") if tile["good"] else "yellow"
    style = "" if tile["verdict"] in ("", "undecided") else f"bold {colour}".strip()
    beside = {"": "", "no difference": " from eager", "undecided": " against eager"}.get(tile["verdict"], " than eager")
    text = words(tile["figure"], style).append(beside, "")
    return text.append(f" ({tile['interval']})" if tile["interval"] else "", "not bold")


def _row(name: str, content: list[Text], bar: Bar | None = None) -> RenderableType:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(width=_NAME)
    if bar:
        table.add_column(width=_BAR)
    table.add_column(overflow="fold")
    table.add_row(words(name, "bold cyan"), *([bar] if bar else []), *content)
    return table
