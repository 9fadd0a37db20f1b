"""A report as text for the terminal: drawn with rich, readable from 60 columns on, and in a plain pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nimble_core.utils.units import format_bytes, format_count, format_ns, format_percent
from nimble_viz.analysis.gaps import CAUSES
from nimble_viz.analysis.labels import INTERVAL, plural, visible
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import PARTS, grouped, overhead
from nimble_viz.analysis.source import hottest, source
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.timeline import axis_note, timelines
from nimble_viz.render.layout import (
    COLOURS,
    FILLS,
    MAX_WIDTH,
    MIN_WIDTH,
    Bar,
    bullet,
    columns,
    indented,
    make_table,
    note,
    pairs,
    plain,
    sections,
    words,
)
from nimble_viz.render.tiles_text import COLOURED, TilesText
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["MAX_WIDTH", "MIN_WIDTH", "columns", "pane_text", "plain", "plain_text", "report_text"]

_TOP = 10
_GAPS = 5
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
    from rich.console import Group

    shown = [(title, body) for panes, title, body in _sections(report, _MORE_LINES) if pane in panes.split()]
    nothing = f"{_NOTHING[pane]}." if pane in _NOTHING and not shown else ""
    named = words(f"nimble_viz: {report.model}", "bold"), *([words(nothing)] if nothing else [])
    return plain(Group(*((TilesText(report, full=True),) if pane == "summary" else named), *sections(shown)), width)


def report_text(report: ReportData, *, full: bool = False) -> RenderableType:
    """Return ``report`` for a rich console: its first screen, or all; sections with nothing to say are left out."""
    from rich.console import Group

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
        yield "summary overhead", "What computes", _computing(tables["computing"])
    if tables["speed"] and not tables["profiled"]:
        yield "summary", f"Speed ({tables['context']})", _speed(tables["speed"])
    if tables["phases"]:
        title = "An iteration by phase" if tables["profiled"] else "The training step by phase"
        yield "summary", title, _phases(tables["phases"])
    if tables["peers"]:
        yield "summary", f"{tables['best'] or 'Nothing of ours'} against peers", _peers(tables["peers"])
    if tables["checks"]:
        yield "summary", "Equality with eager, on fresh inputs", _checks(tables["checks"])
    if tables["candidates"]:
        yield "summary", "Plans that were tried", _candidates(tables["candidates"])
    if tables["plans"]:
        yield "summary dag syncs", "Streams and synchronisations", _plans(tables)
    lines = timelines(report)
    if lines:
        chosen = next((line for line in lines if line["run"] == report.chosen), lines[-1])
        yield "timeline", "Timelines", _timelines(lines, chosen, axis_note(report))
    if not tables["profiled"]:
        reached = [f"{row['label']} {row['distance']}" for row in tables["speed"] if row["distance"]]
        limits = [*tables["facts"], *[("Distance to the limit", ", ".join(reached))] * bool(reached)]
        yield "summary dag", "Limits", [pairs(limits)]
    if tables["advice"]:
        yield "summary", "What each change would gain", _advice(tables["advice"])
    profile = overhead(report)
    if report.overhead is not None and profile is not None:
        yield "overhead", "Framework overhead of the eager run", _overhead(report, profile)
        waits = host_syncs(report)
        yield "syncs", "Host synchronisations of the eager run", [_waits(waits) if waits else words("none")]
    annotated, live = source(report), live_memory(report)
    if annotated and annotated["figures"]:
        yield "source", "Hottest lines", _hottest(annotated, most)
    if tables["preparation"]:
        title = f"Preparation ({tables['preparation_total']})"
        yield "summary", title, [pairs((row["name"], row["text"]) for row in tables["preparation"])]
    if tables["memory"]:
        yield "summary memory", "Memory" if tables["host"] else "Device memory", _memory(tables["memory"])
    if live:
        yield "memory", "Results that hold the peak", [*_live(live, most)]
    if tables["profiled"]:
        body = [bullet(f"{row['what']}: {row['why']}") for row in tables["profiled"]["absent"]]
        yield "summary", "Not in this report", [*body]
    yield "summary", "Environment", [pairs(tables["environment"])]
    if tables["warnings"]:
        yield "summary", "Warnings", [bullet(warning) for warning in tables["warnings"]]


def _speed(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    cells = []
    for row in rows:
        name = f"{row['label']} *" if row["chosen"] else row["label"]
        doubt = "" if row["stable"] else " (unstable)"
        peer = ("peer, outputs differ, " if row["wrong"] else "peer, ") if row["peer"] else ""
        kept = f"{format_count(row['samples'])} of " if row["dropped"] else ""
        details = f"{peer}spread {row['spread']}, {kept}{plural(row['samples'] + row['dropped'], 'sample')}"
        label = words(f"{visible(name)}{doubt}\n{details}", lines=True)
        cells.append((label, row["median"], _ratio(row["eager"]), _ratio(row["single"])))
    table = make_table((("run", ""), ("median", "r"), ("over eager", "r"), ("over one stream", "r")), cells)
    notes = []
    if any(row["eager"] for row in rows):
        notes.append(INTERVAL)
    if any(row["single"] for row in rows):
        notes.append("over one stream: over a replay of the same kernels on one stream")
    if any(row["chosen"] for row in rows):
        notes.append("* the plan the engine would use")
    notes.append(f"samples taken in turn, after {rows[0]['warmup']} warm-up calls")
    if any(row["dropped"] for row in rows):
        notes.append("samples that other programs interrupted more than usual are dropped")
    return [table, *(note(one) for one in notes)]


def _peers(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    cells = []
    for row in rows:
        colour = "red" if row["wrong"] else COLOURED.get(row["ratio"]["verdict"], "") if row["ratio"] else ""
        outcome = f"{row['outcome']}; outputs {row['outputs']}" if row["median"] else row["outcome"]
        notes = [outcome, "" if row["stable"] else "unstable", row["note"] if row["note"] != row["outcome"] else ""]
        cells.append((row["name"], row["median"], row["prepare"], words("; ".join(filter(None, notes)), colour)))
    heads = (("peer", ""), ("median", "r"), ("prepared in", "r"), ("what was found", ""))
    legend = "measured in turn with ours, in brackets the 99.5% interval; prepared in: until the first finished result"
    return [make_table(heads, cells), note(legend)]


def _phases(found: dict[str, Any]) -> list[RenderableType]:
    rows = found["rows"]
    lines = [
        ("calls", [format_count(row["calls"]) for row in rows]),
        ("all, one by one", [row["cost"] for row in rows]),
        ("on the critical path", [row["path"] for row in rows]),
        ("eager, profiled", [row["eager"] for row in rows]),
        ("overhead in it", [row["overhead"] for row in rows]),
        *((name, [row["replays"][at] for row in rows]) for at, name in enumerate(found["runs"])),
    ]
    heads = (("", ""), *((row["phase"], "r") for row in rows))
    table = make_table(heads, [(name, *(cell or "-" for cell in cells)) for name, cells in lines if any(cells)])
    side = "replays: while any call of the phase ran; phases may run side by side"
    return [table, *[note(side)] * bool(found["runs"])]


def _candidates(tried: dict[str, Any]) -> list[RenderableType]:
    cells = []
    for row in tried["rows"]:
        size = f"{plural(row['streams'], 'stream')}, {plural(row['syncs'], 'sync')}" if row["streams"] else ""
        name = words(f"{visible(row['label'])}{' *' * row['chosen']}\n{size}", "green" * row["chosen"], lines=True)
        outcome = f"OUTPUTS DIFFER (error {row['error']})" if row["wrong"] else row["outcome"]
        found = words(outcome if row["stable"] else f"{outcome}; unstable", "red" if row["wrong"] else "")
        cells.append((name, row["median"], row["cost"], row["pays"].removeprefix("after "), found))
    heads = (("plan", ""), ("median", "r"), ("prepared", "r"), ("break-even", "r"), ("outcome", ""))
    notes = [
        "* chosen; medians of replays timed in turn while preparing",
        "prepared: making the kernels and capturing; break-even: against eager, after so many calls",
    ]
    return [make_table(heads, cells), *map(bullet, tried["folded"]), *map(note, notes)]


def _ratio(cell: dict[str, Any] | None) -> Text:
    if cell is None:
        return words("")
    return words(f"{cell['text']}\n{cell['interval']}", COLOURED.get(cell["verdict"], ""), lines=True)


def _advice(found: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [
        bullet(f"{change['what']}: {change['gain']}; {change['why']}") for change in found["changes"]
    ]
    if split := found["replay"]:
        heads = ((split["run"], ""), ("time", "r"), ("share", "r"), ("what it is", ""))
        rows = [(row["name"], row["text"], row["share"], note(row["meaning"])) for row in split["rows"]]
        body += [make_table(heads, rows), note(split["note"])]
    return body


def _checks(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    heads = (("replay", ""), ("result", ""), ("error", "r"), ("tolerance", "r"), ("sensitivity", "r"))
    cells = []
    for row in rows:
        bad = words("DIFFERS" if row["differs"] else "NOT SHOWN", "bold red")
        result = words("equal", "green") if row["passed"] else bad
        cells.append((row["run"], result, row["error"], row["tolerance"], row["effect"]))
    references = [note(f"{row['run']}: {row['reference']}") for row in rows if row["reference"]]
    return [make_table(heads, cells), *references]


def _plans(tables: dict[str, Any]) -> list[RenderableType]:
    counts = ("streams", "full", "meg", "planned", "emitted")
    flights = any(row["observed"] for row in tables["plans"])
    heads = [("plan", ""), ("streams", "r"), ("full", "r"), ("MEG", "r"), ("planned", "r"), ("emitted", "r")]
    cells: list[Sequence[str]] = []
    notes: list[RenderableType] = []
    for row in tables["plans"]:
        seen = row["observed"]
        found = f"{seen['most']}, mean {seen['mean']}{'' if seen['reliable'] else ' (unreliable)'}" if seen else "-"
        numbers = ["-" if row[key] is None else format_count(row[key]) for key in counts]
        cells.append((row["label"], *numbers, *[found] * flights))
        notes += _plan_notes(row)
    table = make_table([*heads, *[("in flight, at most", "r")] * flights], cells)
    legend = "waits between streams, counted on the full DAG, on its MEG, in the plan, in the graph"
    width = "of calls need not wait for each other: no schedule has more in flight"
    return [table, note(legend), note(f"width of the DAG: {tables['width']}; so many {width}"), *notes]


def _plan_notes(row: dict[str, Any]) -> Iterator[Text]:
    label, promise = row["label"], row["promise"]
    if promise and (row["streams"] > 1 or not promise["kept"]):
        yield words(f"{label}: {promise['text']}", "" if promise["kept"] else "bold red")
    if row["added_order"]:
        yield note(f"{label}: {format_count(row['added_order'])} pairs of calls got an added ordering")
    if row["promises"] != "none":
        yield note(f"{label} promises: {row['promises']}")


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


def _memory(held: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [pairs(held["facts"])]
    if held["engines"]:
        shown = {"arena": "arena", "saved": "saved by reuse", "workspaces": "workspaces", "held": "held"}
        notes = ["arena: results of all calls and large workspaces; held: arena, input buffers and the rest"]
        if any(row["against"] for row in held["engines"]):
            shown["against"] = "of eager's peak"
            notes.append("of eager's peak: what is held, as a multiple of it; an engine holds it between runs as well")
        cells = [(row["label"], *(row[key] or "-" for key in shown)) for row in held["engines"]]
        table = make_table((("engine", ""), *((title, "r") for title in shown.values())), cells)
        body += [words(""), table, *(note(one) for one in notes)]
    return body


def _live(found: dict[str, Any], most: int) -> Iterator[RenderableType]:
    """Say of each run what it holds at most and which results hold it; two with the same curve are one."""
    for run in found["runs"][: 1 if found["alike"] else 2]:
        yield words(f"{run['label']}: {format_bytes(run['peak'])} live at most, at {run['where']}", "bold")
        yield pairs([*((name, format_bytes(nbytes)) for name, nbytes in run["marks"]), *run["facts"]])
        rows = [(row["size"], row["share"], row["text"]) for row in run["holders"][:most]]
        yield make_table((("size", "r"), ("share", "r"), ("result", "")), rows)
    yield pairs(found["fixed"])
    yield note(found["note"])


def _computing(found: dict[str, Any]) -> list[RenderableType]:
    """Draw which operators and modules compute longest, beside what they cost the host."""
    body: list[RenderableType] = []
    for one in found["tables"]:
        keys = ["name", "calls", "time", "share", "overhead"] + ["sizes"] * any(row["sizes"] for row in one["rows"])
        heads = ((one["by"], ""), ("calls", "r"), (found["time"], "r"), ("share", "r"), ("host overhead", "r"))
        cells = [[str(row[key]) for key in keys] for row in one["rows"]]
        body += [words("")] * bool(body) + [make_table((*heads, ("longest reads", ""))[: len(keys)], cells)]
        body += [note(one["rest"])] * bool(one["rest"])
    return body


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
