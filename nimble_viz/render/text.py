"""A report as text for the terminal: drawn with rich, readable from 60 columns on, and in a plain pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nimble_core.utils.units import format_bytes, format_count, format_ns, format_percent
from nimble_viz.analysis.gaps import CAUSES
from nimble_viz.analysis.labels import context, plural, visible
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import PARTS, grouped, overhead
from nimble_viz.analysis.source import hottest, source
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.tables import Cell
from nimble_viz.analysis.tiles import tiles
from nimble_viz.analysis.timeline import axis_note, timelines
from nimble_viz.render.layout import (
    COLOURS,
    FILLS,
    Bar,
    bullet,
    indented,
    make_table,
    note,
    pairs,
    plain,
    sections,
    words,
)
from nimble_viz.report.data import ReportData

__all__ = ["pane_text", "plain_text", "report_text"]

_COLOURED = {"faster": "green", "slower": "red", "undecided": "dim"}
"""How a ratio is set."""
_MOST = 12
_NAME, _BAR, _GAP = 8, 16, 2
_NARROW = 80
_MORE = "everything: --full, to_text(full=True); page: --html, to_html(path)"
_TOP = 10
_GAPS = 5
_MARKS = {"good": "green", "bad": "red", "open": "dim"}
_LINES, _MORE_LINES = 5, 40
"""Lines of code, and results at the peak of memory: those of the whole report, and of one view."""
_NOTHING = {
    "overhead": "eager was not profiled, so nothing is known about where its host time went",
    "dag": "no edges are known: compare(model, inputs) records them",
    "timeline": "no timeline was taken: neither eager nor a replay was traced",
    "syncs": "no plan was made and eager was not profiled, so nothing is known to wait",
    "source": "no call of this report has a source line",
    "memory": "the memory of this report's calls is not known",
}


def plain_text(report: ReportData, width: int | None = None, *, full: bool = False) -> str:
    """Return ``report_text`` as a string without colour codes; ``width`` as for ``plain``."""
    return plain(report_text(report, full=full), width)


def pane_text(report: ReportData, pane: str, width: int | None = None) -> str:
    """Return what the full text says of one view, with more lines of code and results that hold the peak of memory."""
    shown = [(title, body) for panes, title, body in _sections(report, _MORE_LINES) if pane in panes.split()]
    nothing = f"{_NOTHING[pane]}." if pane in _NOTHING and not shown else ""
    named = words(f"nimble_viz: {report.model}", "bold"), *([words(nothing)] if nothing else [])
    return plain(Group(*((TilesText(report, full=True),) if pane == "summary" else named), *sections(shown)), width)


def report_text(report: ReportData, *, full: bool = False) -> RenderableType:
    """Return ``report`` for a rich console: its first screen, or all; sections with nothing to say are left out."""
    if not full:
        return TilesText(report)
    parts = ((title, body) for _, title, body in _sections(report, _LINES))
    return Group(TilesText(report, full=True), *sections(parts))


def _sections(report: ReportData, most: int) -> Iterator[tuple[str, str, list[RenderableType]]]:
    """Yield of each section the names of the views that it belongs to, its title and its body."""
    tables = summary(report)
    if tables["profiled"]:
        yield "summary", "What was profiled", [pairs(tables["profiled"]["facts"])]
    if tables["computing"]:
        body = [part for one in tables["computing"] for part in (*_described(one), words(""))]
        yield "summary overhead", "What computes", body[:-1]
    for panes, key in (
        ("summary", "speed"),
        ("summary", "phases"),
        ("summary", "peers"),
        ("summary", "checks"),
        ("summary", "candidates"),
        ("summary dag syncs", "synchronisations"),
    ):
        if tables[key]:
            yield panes, tables[key]["title"], _described(tables[key])
    lines = timelines(report)
    if lines:
        chosen = next((line for line in lines if line["run"] == report.chosen), lines[-1])
        yield "timeline", "Timelines", _timelines(lines, chosen, axis_note(report))
    if not tables["profiled"]:
        yield "summary dag", "Limits", [pairs(tables["facts"])]
    if advice := tables["advice"]:
        changes = [bullet(f"{change['what']}: {change['gain']}; {change['why']}") for change in advice["changes"]]
        replay = _described(advice["replay"]) if advice["replay"] else []
        yield "summary", "What each change would gain", [*changes, *replay]
    profile = overhead(report)
    if report.overhead is not None and profile is not None:
        yield "overhead", "Framework overhead of the eager run", _overhead(report, profile)
        waits = host_syncs(report)
        yield "syncs", "Host synchronisations of the eager run", [_waits(waits) if waits else words("none")]
    annotated, live = source(report), live_memory(report)
    if annotated and annotated["figures"]:
        yield "source", "Hottest lines", _hottest(annotated, most)
    if tables["preparation"]:
        yield "summary", tables["preparation"]["title"], _described(tables["preparation"])
    if held := tables["memory"]:
        engines = [words(""), *_described(held["engines"])] if held["engines"] else []
        yield "summary memory", "Memory" if tables["host"] else "Device memory", [pairs(held["facts"]), *engines]
    if live:
        yield "memory", "Results that hold the peak", [*_live(live, most)]
    if tables["profiled"]:
        body = [bullet(f"{row['what']}: {row['why']}") for row in tables["profiled"]["absent"]]
        yield "summary", "Not in this report", [*body]
    yield "summary", "Environment", [pairs(tables["environment"])]
    if tables["warnings"]:
        yield "summary", "Warnings", [bullet(warning) for warning in tables["warnings"]]


def _described(found: dict[str, Any]) -> list[RenderableType]:
    """Draw a table of ``analysis.tables``, with what is said about it and below it."""
    shown = [at for at, one in enumerate(found["columns"]) if not one["page"]]
    heads = [(found["columns"][at]["name"], "r" * (found["columns"][at]["kind"] == "number")) for at in shown]
    rows = [[_cell(row["cells"][at], "dim" * row["void"]) for at in shown] for row in found["rows"]]
    about = [note(found["about"])] * bool(found["about"])
    return [make_table(heads, rows), *about, *(_cell(one, "dim" * isinstance(one, str)) for one in found["below"])]


def _cell(content: Cell, style: str = "") -> Text:
    if isinstance(content, str):
        return words(content, style)
    tags = ", ".join(tag for tag, _ in content["tags"])
    lines = [f"{content['text']} ({tags})" if tags else content["text"], content["under"]]
    return words("\n".join(visible(line) for line in lines if line), _MARKS.get(content["mark"], style), lines=True)


def _timelines(lines: Sequence[dict[str, Any]], chosen: dict[str, Any], axis: str) -> list[RenderableType]:
    """Say what each run's lanes show: both lengths, what to doubt, and what the streams' time went to."""
    body: list[RenderableType] = []
    for line in lines:
        idle = f", device idle {format_percent(line['idle'])}"
        body.append(words(f"{line['label']}: {line['lengths']}{idle} ({line['source']}, {line['clock']})", "bold"))
        body += [indented(words(mark, "bold red")) for mark in line["marks"]]
        body += [indented(pairs(line["facts"]))] if line["facts"] else []
    if chosen["longest"]:
        heads = (("call that waited", ""), ("for the end of", ""), ("delay", "r"), ("stream idle", "r"), ("why", ""))
        rows = chosen["longest"][:_GAPS]
        names = [f"{row['call']} {row['label']} on {row['lane']}" for row in rows]
        cells = [
            (name, *(row[key] for key in ("after", "delay", "text", "why")))
            for name, row in zip(names, rows, strict=True)
        ]
        table = make_table(heads, cells)
        title = f"Gaps of {chosen['label']} that a faster launch or another order could save, most delay first:"
        body += [words(""), words(title), table]
        delay = "delay: since the call's data was ready; only of calls on the chain that ran longest, others delay none"
        body += [note(delay), *(note(f"{name}: {meaning}") for _, name, meaning in CAUSES)]
    return [*body, note(axis)]


def _live(found: dict[str, Any], most: int) -> Iterator[RenderableType]:
    """Say of each run what it holds at most and which results hold it; two with the same curve are one."""
    for run in found["runs"][: 1 if found["alike"] else 2]:
        yield words(f"{run['label']}: {format_bytes(run['peak'])} live at most, at {run['where']}", "bold")
        yield pairs([*((name, format_bytes(nbytes)) for name, nbytes in run["marks"]), *run["facts"]])
        rows = [(row["size"], row["share"], row["text"]) for row in run["holders"][:most]]
        yield make_table((("size", "r"), ("share", "r"), ("result", "")), rows)
    yield pairs(found["fixed"])
    yield note(found["note"])


def _overhead(report: ReportData, profile: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [pairs(profile["facts"])]
    rows = grouped(report, "operator")
    if not rows:
        return body
    legend = words("parts: ")
    for fill, colour, part in zip(FILLS, COLOURS, PARTS, strict=True):
        share = profile["totals"][part] / (sum(profile["totals"][one] for one in PARTS) or 1)
        legend.append(f"{fill} {part} {format_percent(share)}  ", colour)
    if len(rows) > _TOP:
        rest = sum(row["overhead"] for row in rows[_TOP:])
        legend.append(f"\nand {plural(len(rows) - _TOP, 'operator')} more, {format_ns(rest)} together", "dim")
    return [*body, words(""), _operators(rows), legend]


def _operators(rows: Sequence[dict[str, Any]]) -> Table:
    heads = (("operator", ""), ("calls", "r"), ("overhead", "r"), ("per call", "r"), ("exposed", "r"), ("parts", ""))
    cells = [
        (
            row["name"],
            format_count(row["calls"]),
            format_ns(row["overhead"]),
            "" if row["whole"] else format_ns(row["overhead"] / row["calls"]),
            format_percent(row["exposed"] / row["overhead"] if row["overhead"] > 0 else 0.0),
            Bar([row[part] for part in PARTS], rows[0]["overhead"]),
        )
        for row in rows[:_TOP]
    ]
    return make_table(heads, cells)


def _waits(rows: Sequence[dict[str, Any]]) -> Table:
    cells = []
    for row in rows[:_TOP]:
        advice = words(f"{visible(row['source'])}\n{row['hint']}" if row["source"] else row["hint"], lines=True)
        kind = f"{row['kind']} ({row['phase']})" if row["phase"] else row["kind"]
        cells.append((kind, format_count(row["count"]), row["total"], advice))
    return make_table((("kind", ""), ("count", "r"), ("total", "r"), ("where, and what to do", "")), cells)


def _hottest(code: dict[str, Any], most: int) -> list[RenderableType]:
    """Draw the lines of code that take most of what is known: eager host time, else time in the replay."""
    key, name, meaning = code["figures"][0]
    cells = []
    for row in hottest(code, key, most):
        if not row["value"]:
            break
        where = words(f"{row['file']}:{row['line']}")
        where.append(visible(f"  {row['name']}" if row["name"] else ""), "dim")
        if row["text"]:
            where.append(f"\n{visible(row['text'])}")
        where.no_wrap, where.overflow = True, "ellipsis"
        cells.append((format_ns(row["value"]), format_percent(row["share"]), where))
    table = make_table(((name.lower(), "r"), ("share", "r"), ("line and code", "")), cells)
    both = "; forward and backward together" if len(code["sides"]) > 1 else ""
    return [table, note(f"{meaning}; shares are of all calls{both}; every line: report.source()")]


# The first screen: three tiles, with two bars on one scale.


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
        explained = cut(said, 1 if prepared["verdict"] else 3) if said else []
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
    colour = _COLOURED.get(tile["verdict"], "") if tile["good"] else "yellow"
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
