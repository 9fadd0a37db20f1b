"""A report as text for the terminal: drawn with rich, readable from 60 columns on, and in a plain pipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from nimble_core.utils.units import format_count, format_ns, format_percent
from nimble_viz.analysis.gaps import CAUSES
from nimble_viz.analysis.labels import INTERVAL, label_call, plural, trains, visible
from nimble_viz.analysis.overhead import PARTS, grouped, overhead
from nimble_viz.analysis.provenance import fused_calls, module_of
from nimble_viz.analysis.source import hottest, source
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.syncs import ENDS, host_syncs
from nimble_viz.analysis.timeline import axis_note, timelines
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

__all__ = ["MAX_WIDTH", "MIN_WIDTH", "columns", "pane_text", "paste_lines", "plain", "plain_text", "report_text"]

MIN_WIDTH, MAX_WIDTH = 60, 200
"""Columns that the text is laid out for."""

_TOP = 10
_GAPS = 5
_LINES = 5
_PLAN_COLUMNS, _PEER_COLUMNS = (38, 7, 8, 12), (28, 7, 25, 11)
_PATH_ENDS = 3
_NAMES = 46
_FILE_NAME = 20
_BAR_MIN, _BAR_MAX = 8, 24
_FILLS = ("█", "▓", "▒", "░", "▚")
_VERDICTS = {"faster": "green", "slower": "red", "undecided": "dim"}
"""How a ratio is set, and a headline but for what is undecided."""
_COLOURS = ("blue", "cyan", "yellow", "magenta", "green")
_NOTHING = {
    "overhead": "eager was not profiled, so nothing is known about where its host time went",
    "dag": "no edges are known: compare(model, inputs) records them",
    "timeline": "no timeline was taken: neither eager nor a replay was traced",
    "syncs": "no plan was made and eager was not profiled, so nothing is known to wait",
}


def plain_text(report: ReportData, width: int | None = None) -> str:
    """``report_text`` as a string without colour codes; ``width`` as for ``plain``."""
    return plain(report_text(report), width)


def pane_text(report: ReportData, pane: str, width: int | None = None) -> str:
    """What ``report_text`` says of one view, as a string without colour codes.

    Args:
        report: what is shown.
        pane: which; ``"source"`` and ``"memory"`` have texts of their own that follow this.
        width: as for ``plain``.
    """
    from rich.console import Group

    tables = summary(report)
    sections = [(title, body) for panes, title, body in _sections(report, tables) if pane in panes.split()]
    nothing = f"{_NOTHING[pane]}." if pane in _NOTHING and not sections else ""
    said = tables["verdict"] if pane == "summary" else nothing
    head = [_text(f"nimble_viz: {report.model}"), *([_text(said)] if said else [])]
    return plain(Group(*head, *_drawn(sections)), width)


def columns(width: int | None = None) -> int:
    """``width`` within 60 and 200; None takes the terminal's, or 80 where there is none."""
    from shutil import get_terminal_size

    return max(MIN_WIDTH, min(get_terminal_size().columns if width is None else width, MAX_WIDTH))


def plain(content: RenderableType, width: int | None = None) -> str:
    """``content`` as a string without colour codes, laid out for ``columns(width)``."""
    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=columns(width),
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def report_text(report: ReportData) -> RenderableType:
    """All of ``report`` for a rich console: verdict, speed, peers, equality, plans, limits, overhead, memory, ….

    Sections without anything to say are left out.
    """
    from rich.console import Group

    tables = summary(report)
    return Group(
        _text(f"nimble_viz: {report.model}", "bold"),
        _headline(report, tables["headline"]),
        *_drawn((title, body) for _, title, body in _sections(report, tables)),
    )


def _drawn(sections: Iterable[tuple[str, list[RenderableType]]]) -> Iterator[RenderableType]:
    """Title and indented body of each, with a line before it."""
    from rich.padding import Padding

    for title, body in sections:
        yield from (_text(""), _text(title, "bold cyan"), *(Padding(one, (0, 0, 0, 2)) for one in body))


def paste_lines(report: ReportData) -> str:
    """Python lines that prepare with the chosen plan from a file; the first, a comment, says how to make the file.

    Without an optimizer they prepare the model in place, which takes no plan. Empty if no plan was chosen.
    """
    if report.schedule(report.chosen) is None:
        return ""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", report.model)[:_FILE_NAME].strip("_") or "model"
    if trains(report):
        if not any(call.phase == "optimizer" for call in report.program.calls):
            lines = [
                "from nimble_core import Nimble",
                "",
                "net = Nimble(model).prepare(*args, training=True)",
                "loss_fn(net(*args), target).backward()",
            ]
        else:
            lines = [
                f'# once: report.plan.save("{name}.plan.json")',
                "from nimble_core import TrainStep, load_plan",
                "",
                f'plan = load_plan("{name}.plan.json")',
                "# add autocast=, scaler= and clip_grad_norm= as compared",
                "step = TrainStep(model, loss_fn, optimizer)",
                "step.prepare(inputs, targets, plan=plan)",
                "loss = step(inputs, targets)",
            ]
        return "\n".join(lines)
    return "\n".join(
        [
            f'# once: report.plan.save("{name}.plan.json")',
            "from nimble_core import Nimble, load_plan",
            "",
            f'plan = load_plan("{name}.plan.json")',
            "net = Nimble(model).prepare(*args, plan=plan, **kwargs)",
        ]
    )


def _headline(report: ReportData, head: dict[str, str]) -> Text:
    """What it is about in bold, and in the colour of its verdict if nothing is doubtful; undecided it is plain."""
    good = report.complete and bool(report.checks) and all(check.passed for check in report.checks)
    colour = _VERDICTS.get(head["verdict"], "") if good else "yellow"
    style = "" if head["verdict"] == "undecided" else f"bold {colour}".strip() if head["verdict"] else "bold yellow"
    return _text("").append_text(_text(head["lead"], style)).append_text(_text(head["rest"]))


def _sections(report: ReportData, tables: dict[str, Any]) -> Iterator[tuple[str, str, list[RenderableType]]]:
    """Of each section the names of the views that it belongs to, its title and its body."""
    if tables["profiled"]:
        yield "summary", "What an iteration is spent on", _spent(tables["profiled"])
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
        yield "summary syncs", "Streams and synchronisations", _plans(tables["plans"])
        yield "summary dag", "Concurrency", _concurrency(tables)
    lines = timelines(report)
    if lines:
        chosen = next((line for line in lines if line["run"] == report.chosen), lines[-1])
        yield "timeline", "Timelines", _timelines(lines, chosen, axis_note(report))
    if not tables["profiled"]:
        yield "summary dag", "Limits", _limits(report, tables)
    if tables["advice"]:
        yield "summary", "What would help next", _advice(tables["advice"])
    if tables["provenance"]:
        yield "dag", "What fused calls stand for, the most expensive first", _provenance(report)
    profile = overhead(report)
    if report.overhead is not None and profile is not None:
        yield "overhead", "Framework overhead of the eager run", _overhead(report, profile)
        waits = host_syncs(report)
        yield "syncs", "Host synchronisations of the eager run", [_waits(waits) if waits else _text("none")]
    code = source(report) if report.sources else None
    if code and code["figures"]:
        yield "source", "Hottest lines", _hottest(code)
    if tables["preparation"]:
        title = f"Preparation ({tables['preparation_total']})"
        yield "summary", title, [_pairs((row["name"], row["text"]) for row in tables["preparation"])]
    if tables["memory"]:
        yield "summary memory", "Memory" if tables["host"] else "Device memory", _memory(tables["memory"])
    if tables["profiled"]:
        body = [_bullet(f"{row['what']}: {row['why']}") for row in tables["profiled"]["absent"]]
        yield "summary", "Not in this report", [*body]
    yield "summary", "Environment", [_pairs(tables["environment"])]
    if tables["warnings"]:
        yield "summary", "Warnings", [_bullet(warning) for warning in tables["warnings"]]
    lines = paste_lines(report)
    if lines:
        title = "This step in production" if trains(report) else "This plan in production, without tuning"
        yield "summary", title, [_text(line) for line in lines.splitlines()]


def _spent(found: dict[str, Any]) -> list[RenderableType]:
    table = _table(("", ""), ("time", "r"), ("share", "r"), ("what it is", ""))
    for row in found["rows"]:
        colour = "bold" if row["name"] == found["bound"] else ""
        cells = [_text(row[key], colour) for key in ("name", "text", "share")]
        table.add_row(*cells, _text(row["meaning"], "dim"))
    return [table, _text(f"shares {found['basis']}", "dim"), _pairs(found["facts"])]


def _speed(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    table = _table(("run", ""), ("median", "r"), ("over eager", "r"), ("over one stream", "r"))
    for row in rows:
        name = f"{row['label']} *" if row["chosen"] else row["label"]
        doubt = "" if row["stable"] else " (unstable)"
        peer = ("peer, outputs differ, " if row["wrong"] else "peer, ") if row["peer"] else ""
        kept = f"{format_count(row['samples'])} of " if row["dropped"] else ""
        details = f"{peer}spread {row['spread']}, {kept}{plural(row['samples'] + row['dropped'], 'sample')}"
        label = _text(f"{visible(name)}{doubt}\n{details}", lines=True)
        table.add_row(label, _text(row["median"]), _ratio(row["eager"]), _ratio(row["single"]))
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
    return [table, *(_text(note, "dim") for note in notes)]


def _peers(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    body = _figures_head(("peer", "median", "ours over it", "prepared in"), _PEER_COLUMNS)
    for row in rows:
        over = row["ratio"]
        colour = "red" if row["wrong"] else ""
        ratio = _text(f"{over['text']} {over['interval']}", _VERDICTS.get(over["verdict"], "")) if over else ""
        outcome = f"{row['outcome']}; outputs {row['outputs']}" if row["median"] else row["outcome"]
        notes = [outcome, "" if row["stable"] else "unstable", row["note"] if row["note"] != row["outcome"] else ""]
        body.append(_figures((row["name"], row["median"], ratio, row["prepare"]), _PEER_COLUMNS, colour))
        body.append(_indented("; ".join(note for note in notes if note)))
    legend = f"ours over it: {INTERVAL}", "measured in turn with ours; prepared in: until the first finished result"
    return [*body, *(_text(note, "dim") for note in legend)]


def _phases(found: dict[str, Any]) -> list[RenderableType]:
    rows = found["rows"]
    table = _table(("", ""), *((row["phase"], "r") for row in rows))
    lines = [
        ("calls", [format_count(row["calls"]) for row in rows]),
        ("all, one by one", [row["cost"] for row in rows]),
        ("on the critical path", [row["path"] for row in rows]),
        ("eager, profiled", [row["eager"] for row in rows]),
        ("overhead in it", [row["overhead"] for row in rows]),
        *((name, [row["replays"][at] for row in rows]) for at, name in enumerate(found["runs"])),
    ]
    for name, cells in lines:
        if any(cells):
            table.add_row(_text(name), *(_text(cell or "-") for cell in cells))
    notes = [f"{row['phase']}: {row['inside']}, fused with theirs" for row in rows if row["inside"]]
    if found["runs"]:
        notes.insert(0, "replays: while any call of the phase ran; phases may run side by side")
    return [table, *(_text(note, "dim") for note in notes)]


def _candidates(tried: dict[str, Any]) -> list[RenderableType]:
    """Two lines for each plan: figures in columns of fixed width, then what does not fit beside a long name."""
    body = _figures_head(("plan", "median", "prepared", "pays back"), _PLAN_COLUMNS)
    for row in tried["rows"]:
        colour = "red" if row["wrong"] else ""
        name = _text(f"{row['label']} *", "green") if row["chosen"] else row["label"]
        pays = row["pays"].removeprefix("after ")
        body += [_figures((name, row["median"], row["cost"], pays), _PLAN_COLUMNS, colour)]
        body += [_indented(_tried(row, tried["single"]))]
    kernels = ", of eager's kernels" if tried["single"] == "one stream" and tried["fused"] else ""
    notes = [
        "* chosen; medians and quartiles of replays timed in turn while preparing",
        f"over {tried['single'] or 'one stream'}{kernels}: {INTERVAL}",
        "prepared: making the kernels and capturing; pays back: against eager, after so many calls",
    ]
    return [*body, *(_bullet(group["text"]) for group in tried["folded"]), *(_text(note, "dim") for note in notes)]


def _ratio(cell: dict[str, Any] | None) -> Text:
    if cell is None:
        return _text("")
    return _text(f"{cell['text']}\n{cell['interval']}", _VERDICTS.get(cell["verdict"], ""), lines=True)


def _advice(found: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [
        _bullet(f"{change['what']}: {change['gain']}; {change['why']}") for change in found["changes"]
    ]
    for split in (found["replay"], found["eager"]):
        if split:
            table = _table((split["run"], ""), ("time", "r"), ("share", "r"), ("what it is", ""))
            for row in split["rows"]:
                table.add_row(*(_text(row[key]) for key in ("name", "text", "share")), _text(row["meaning"], "dim"))
            body += [table, _text(split["note"], "dim")]
    return body


def _checks(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    table = _table(
        ("replay", ""), ("result", ""), ("relative error", "r"), ("tolerance", "r"), ("inputs move it by", "r")
    )
    for row in rows:
        bad = _text("DIFFERS" if row["differs"] else "NOT SHOWN", "bold red")
        result = _text("equal", "green") if row["passed"] else bad
        table.add_row(_text(row["run"]), result, _text(row["error"]), _text(row["tolerance"]), _text(row["effect"]))
    return [table, *(_text(f"{row['run']}: {row['reference']}", "dim") for row in rows if row["reference"])]


def _tried(row: dict[str, Any], single: str) -> str:
    size = f"{plural(row['streams'], 'stream')}, {plural(row['syncs'], 'sync')}" if row["streams"] else ""
    error = f" (error {row['error']})" if row["error"] else ""
    parts = [
        "OUTPUTS DIFFER" + error if row["wrong"] else row["outcome"],
        f"outputs {row['outputs']}{error}" if row["median"] and not row["wrong"] else "",
        f"over {single}: {row['single']['text']} {row['single']['interval']}" if row["single"] else "",
        size,
        f"quartiles {row['quartiles']}" if row["quartiles"] else "",
        "" if row["stable"] else "unstable",
        f"simulated {row['simulated']}" if row["simulated"] else "",
        row["memory"],
        f"kernels made in {row['made']}" if row["made"] else "",
        _pays_single(row["pays_single"]),
    ]
    return "; ".join(part for part in parts if part)


def _pays_single(calls: str) -> str:
    if calls in ("never", "undecided"):
        return f"{calls} {'pays back' if calls == 'never' else 'whether it pays back'} against one stream"
    return f"pays back against one stream {calls}" if calls else ""


def _figures_head(names: Sequence[str], widths: Sequence[int]) -> list[RenderableType]:
    from rich.constrain import Constrain
    from rich.rule import Rule

    return [_figures(names, widths, "bold"), Constrain(Rule(style="dim"), sum(widths) + 2 * (len(widths) - 1))]


def _figures(cells: Sequence[str | Text], widths: Sequence[int], style: str) -> RenderableType:
    """One line of a table whose rows are parted by lines of text: a name, which gives way, then figures."""
    from rich.constrain import Constrain
    from rich.table import Table

    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    line.add_column(overflow="fold", ratio=1)
    for width in widths[1:]:
        line.add_column(justify="right", overflow="fold", width=width)
    line.add_row(*(_text(cell, style) if isinstance(cell, str) else cell for cell in cells))
    return Constrain(line, sum(widths) + 2 * (len(widths) - 1))


def _indented(content: str | RenderableType) -> RenderableType:
    """Two columns to the right; a string dim."""
    from rich.padding import Padding

    return Padding(_text(content, "dim") if isinstance(content, str) else content, (0, 0, 0, 2))


def _plans(rows: Sequence[dict[str, Any]]) -> list[RenderableType]:
    table = _table(("plan", ""), ("streams", "r"), ("full", "r"), ("MEG", "r"), ("planned", "r"), ("emitted", "r"))
    for row in rows:
        counts = [row["streams"], row["full"], row["meg"], row["planned"]]
        emitted = "-" if row["emitted"] is None else format_count(row["emitted"])
        table.add_row(_text(row["label"]), *(_text(format_count(count)) for count in counts), _text(emitted))
    notes = [_text("waits between streams, counted on the full DAG, on its MEG, in the plan, in the graph", "dim")]
    for row in rows:
        if row["promise"] and (row["streams"] > 1 or not row["promise"]["kept"]):
            notes.append(
                _text(f"{row['label']}: {row['promise']['text']}", "" if row["promise"]["kept"] else "bold red")
            )
        ends = _ends(row)
        if ends:
            notes.append(_text(f"{row['label']}, counted apart: {ends}", "dim"))
        if row["added_order"]:
            added = format_count(row["added_order"])
            notes.append(
                _text(f"{row['label']}: {added} pairs of calls got an order the model does not ask for", "dim")
            )
        if row["phases"]:
            notes.append(_text(f"{row['label']} waits: {', '.join(one['text'] for one in row['phases'])}", "dim"))
        if row["promises"] != "none":
            notes.append(_text(f"{row['label']} promises: {row['promises']}", "dim"))
    return [table, *notes]


def _ends(row: dict[str, Any]) -> str:
    counts = [(name.lower(), row[key]) for key, name, _ in ENDS if row[key] is not None]
    return ", ".join(f"{name} {format_count(count)}" for name, count in counts)


def _concurrency(tables: dict[str, Any]) -> list[RenderableType]:
    """Width, what ran side by side, and how many streams are worth it."""
    what = "calls" if tables["host"] else "kernels"
    rows = [("Width of the DAG", tables["width"])]
    for row in tables["plans"]:
        seen = row["observed"]
        found = f", {what} in flight: {seen['most']} at most, {seen['mean']} on average" if seen else ""
        doubt = "" if seen is None or seen["reliable"] else " (unreliable)"
        rows.append((row["label"], f"{plural(row['streams'], 'stream')} planned{found}{doubt}"))
    note = "width: the most calls of which none must wait for another; no schedule has more calls in flight"
    body: list[RenderableType] = [_pairs(rows), _text(note, "dim")]
    asked = tables["what_if"]
    if asked:
        body += [_text(""), _text(f"How many streams are worth it? {asked['answer']}")]
        table = _table(("streams", "r"), ("simulated", "r"), ("over one stream", "r"))
        for row in asked["rows"]:
            cells = (format_count(row["streams"]), row["text"], row["over"])
            table.add_row(*(_text(cell, "green" if row["enough"] else "") for cell in cells))
        body += [table, _text(asked["note"], "dim")]
    return body


def _timelines(lines: Sequence[dict[str, Any]], chosen: dict[str, Any], note: str) -> list[RenderableType]:
    """What each run's lanes show: both lengths, what to doubt, and what the streams' time went to."""
    body: list[RenderableType] = []
    for line in lines:
        idle = f", device idle {format_percent(line['idle'])}"
        body.append(_text(f"{line['label']}: {line['lengths']}{idle} ({line['source']}, {line['clock']})", "bold"))
        body += [_indented(_text(mark, "bold red")) for mark in line["marks"]]
        body += [_indented(_pairs(line["facts"]))] if line["facts"] else []
    if chosen["longest"]:
        columns = (("call that waited", ""), ("for the end of", ""), ("delay", "r"), ("stream idle", "r"), ("why", ""))
        table = _table(*columns)
        for row in chosen["longest"][:_GAPS]:
            name = f"{row['call']} {row['label']} on {row['lane']}"
            table.add_row(_text(name), *(_text(row[key]) for key in ("after", "delay", "text", "why")))
        title = f"Gaps of {chosen['label']} that a faster launch or another order could save, most delay first:"
        body += [_text(""), _text(title), table]
        delay = "delay: since the call's data was ready; only of calls on the chain that ran longest, others delay none"
        body += [_text(delay, "dim"), *(_text(f"{name}: {meaning}", "dim") for _, name, meaning in CAUSES)]
    return [*body, _text(note, "dim")]


def _memory(held: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [_pairs(held["facts"])]
    if held["engines"]:
        columns = {"arena": "arena", "saved": "saved by reuse", "workspaces": "workspaces", "held": "held"}
        notes = ["arena: results of all calls and large workspaces; held: arena, input buffers and the rest"]
        if any(row["against"] for row in held["engines"]):
            columns["against"] = "of eager's peak"
            notes.append("of eager's peak: what is held, as a multiple of it; an engine holds it between runs as well")
        table = _table(("engine", ""), *((title, "r") for title in columns.values()))
        for row in held["engines"]:
            table.add_row(_text(row["label"]), *(_text(row[key] or "-") for key in columns))
        body += [_text(""), table, *(_text(note, "dim") for note in notes)]
    return body


def _limits(report: ReportData, tables: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [_pairs(tables["facts"])]
    reached = [f"{row['label']} {row['distance']}" for row in tables["speed"] if row["distance"]]
    if reached:
        body.append(_pairs([("Distance to the limit", ", ".join(reached))]))
    far = tables["limit"]
    if far and far["sentence"]:
        body.append(_text(f"{tables['best']}: {far['sentence']}"))
    path = report.critical_path
    if path:
        body.append(_text("along the critical path, by isolated times:", "dim"))
        for call in path[:_PATH_ENDS]:
            body.append(_bullet(_step(report, call)))
        if len(path) > 2 * _PATH_ENDS:
            body.append(_bullet(f"… {format_count(len(path) - 2 * _PATH_ENDS)} more"))
        for call in path[max(_PATH_ENDS, len(path) - _PATH_ENDS) :]:
            body.append(_bullet(_step(report, call)))
    return body


def _step(report: ReportData, index: int) -> str:
    call = report.program.calls[index]
    module = module_of(call)
    where = f" in {module}" if module else ""
    cost = "" if report.costs.source == "uniform" else f", {format_ns(report.costs.ns[index])}"
    return f"{label_call(call)}{where}{cost}"


def _provenance(report: ReportData) -> list[RenderableType]:
    body: list[RenderableType] = []
    for row in fused_calls(report, _TOP):
        cost = f", {row['cost']}" if row["cost"] else ""
        where = f" in {row['module']}" if row["module"] else ""
        body.append(_bullet(f"{row['label']}{where}{cost}"))
        details = [row["eager"], row["source"], row["kernel"] if row["kernel"] != row["label"] else ""]
        body.append(_indented("; ".join(part for part in details if part)))
    return body


def _overhead(report: ReportData, profile: dict[str, Any]) -> list[RenderableType]:
    body: list[RenderableType] = [_pairs(profile["facts"])]
    operators = grouped(report, "operator")
    if not operators:
        return body
    body += [_text(""), _groups("operator", operators)]
    modules = grouped(report, "module")
    if len(modules) > 1:
        body += [_text(""), _groups("module", modules)]
    legend = _text("parts: ")
    for fill, colour, part in zip(_FILLS, _COLOURS, PARTS, strict=True):
        share = profile["totals"][part] / (sum(profile["totals"][one] for one in PARTS) or 1)
        legend.append(f"{fill} {part} {format_percent(share)}  ", colour)
    for name, groups in (("operator", operators), ("module", modules)):
        rest = sum(row["overhead"] for row in groups[_TOP:])
        if len(groups) > _TOP and len(modules) > (name == "module"):
            legend.append(f"\nand {plural(len(groups) - _TOP, name)} more, {format_ns(rest)} together", "dim")
    return [*body, legend]


def _groups(by: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = _table((by, ""), ("calls", "r"), ("overhead", "r"), ("per call", "r"), ("exposed", "r"), ("parts", ""))
    for row in rows[:_TOP]:
        exposed = row["exposed"] / row["overhead"] if row["overhead"] > 0 else 0.0
        table.add_row(
            _text(row["name"]),
            _text(format_count(row["calls"])),
            _text(format_ns(row["overhead"])),
            _text("" if row["whole"] else format_ns(row["overhead"] / row["calls"])),
            _text(format_percent(exposed)),
            _Bar([row[part] for part in PARTS], rows[0]["overhead"]),
        )
    return table


@dataclass(frozen=True, slots=True)
class _Bar:
    """Parts stacked to a bar as wide as its cell allows; ``largest`` fills it."""

    parts: Sequence[float]
    largest: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(min(_BAR_MIN, options.max_width), min(_BAR_MAX, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(_BAR_MAX, options.max_width)
        bar, done, drawn = _text(""), 0.0, 0
        for part, fill, colour in zip(self.parts, _FILLS, _COLOURS, strict=True):
            done += max(part, 0.0)  # rounded on the running sum, so that the whole bar has the right length
            until = min(round(width * done / self.largest), width) if self.largest > 0 else 0
            bar.append(fill * (until - drawn), colour)
            drawn = until
        yield bar


def _waits(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(("kind", ""), ("count", "r"), ("total", "r"), ("where, and what to do", ""))
    for row in rows[:_TOP]:
        advice = _text(f"{visible(row['source'])}\n{row['hint']}" if row["source"] else row["hint"], lines=True)
        kind = f"{row['kind']} ({row['phase']})" if row["phase"] else row["kind"]
        table.add_row(_text(kind), _text(format_count(row["count"])), _text(row["total"]), advice)
    return table


def _hottest(code: dict[str, Any]) -> list[RenderableType]:
    """Lines of the model's code that take most of what is known first: eager host time, else time in the replay."""
    key, name, meaning = code["figures"][0]
    table = _table((name.lower(), "r"), ("share", "r"), ("line and code", ""))
    for row in hottest(code, key, _LINES):
        if not row["value"]:
            break
        where = _text(f"{row['file']}:{row['line']}")
        where.append(visible(f"  {row['name']}" if row["name"] else ""), "dim")
        if row["text"]:
            where.append(f"\n{visible(row['text'])}")
        where.no_wrap, where.overflow = True, "ellipsis"
        table.add_row(_text(format_ns(row["value"])), _text(format_percent(row["share"])), where)
    both = "; forward and backward together" if len(code["sides"]) > 1 else ""
    return [table, _text(f"{meaning}; shares are of all calls{both}; every line: report.source()", "dim")]


def _table(*columns: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name, side in columns:
        table.add_column(_text(name), justify="right" if side else "left", overflow="fold")
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", max_width=_NAMES)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(_text(name, "dim"), _text(value))
    return table


def _bullet(content: str) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(_text("-"), _text(content))
    return table


def _text(content: str, style: str = "", *, lines: bool = False) -> Text:
    """``content`` as it is: never markup, never a control code; line breaks only if ``lines``."""
    from rich.text import Text

    cleaned = "\n".join(map(visible, content.split("\n"))) if lines else visible(content)
    return Text(cleaned, style=style, overflow="fold")
