"""What the dashboard knows: the values of the views as columns, its selection, its simulations, and all of it as HTML.

Pure, and without plotly. Nothing is computed here but simulations; ``dashboard_figures`` draws, ``dashboard`` links.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_count, format_ns, format_ratio
from nimble_viz.analysis.concurrency import MOST_CALLS
from nimble_viz.analysis.labels import INTERVAL, plural
from nimble_viz.analysis.overhead import PARTS
from nimble_viz.analysis.payload import unpack, view_data
from nimble_viz.analysis.provenance import became
from nimble_viz.analysis.timeline import timelines
from nimble_viz.report.data import ReportData

__all__ = [
    "Selection",
    "Simulated",
    "Views",
    "details",
    "facts_html",
    "host_syncs_html",
    "memory_html",
    "no_simulation",
    "require_plan",
    "search",
    "simulate_plan",
    "summary_html",
    "syncs_html",
]

_LISTED = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """What is marked in all panes: calls of the program, and the eager calls that these stand for."""

    calls: tuple[int, ...] = ()
    eager: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.eager)


class Views:
    """The values of all views of one report, as the page gets them, with columns as lists.

    Args:
        report: any report; torch is not needed.
    """

    def __init__(self, report: ReportData) -> None:
        packed = view_data(report)

        def table(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
            return {name: unpack(column, packed) for name, column in columns.items()}

        self.report = report
        self.summary: dict[str, Any] = packed["summary"]
        self.calls = table(packed["calls"])
        self.work = table(packed["work"])
        self.fused = packed["eager"] is not None
        self.eager = table(packed["eager"]) if self.fused else self.calls
        self.overhead = packed["overhead"] and packed["overhead"] | {"columns": table(packed["overhead"]["columns"])}
        self.graph = table(packed["dag"]["columns"])
        self.plans = [plan | table(plan["columns"]) for plan in packed["dag"]["plans"]]
        self.runs = [line | table(line["columns"]) for line in packed["timelines"]]
        self.axis: str = packed["axis"]
        self.colours: list[dict[str, str]] = packed["colours"]
        self.code = packed["source"] and packed["source"] | {"lines": table(packed["source"]["lines"])}
        self.live: dict[str, Any] | None = packed["live"]
        for run in self.live["runs"] if self.live else ():
            run["columns"] = table(run["columns"]) if run["columns"] else self.live["runs"][0]["columns"]
        self.sync_counts, self.sync_ends = packed["sync_counts"], packed["sync_ends"]
        self.host_syncs: list[dict[str, Any]] | None = packed["host_syncs"]
        self.size = len(report.program.calls)
        self.became = became(report)
        self.critical = frozenset(report.critical_path)
        self.timed = report.costs.source != "uniform"
        self.overhead_row = (
            {call: row for row, call in enumerate(self.overhead["columns"]["call"])} if self.overhead else {}
        )
        self.on_line: list[list[int]] = []
        self.row_of_line: dict[tuple[str, int], int] = {}
        if self.code:
            lines, functions = self.code["lines"], self.code["functions"]
            places = [functions[at]["file"] for at in lines["function"]]
            self.row_of_line = {place: row for row, place in enumerate(zip(places, lines["line"], strict=True))}
            self.on_line = [[] for _ in self.row_of_line]
            for call, place in enumerate(zip(self.eager["file"], self.eager["line"], strict=True)):
                if place in self.row_of_line:
                    self.on_line[self.row_of_line[place]].append(call)

    def of_calls(self, calls: Iterable[int]) -> Selection:
        """These calls of the program, with the eager calls that they stand for. Raises InputError: no numbers."""
        found = _among(calls, self.size)
        if not self.fused:
            return Selection(found, found)
        stands = (index for call in found for index in self.report.program.calls[call].eager)
        return Selection(found, tuple(dict.fromkeys(stands)))

    def of_eager(self, calls: Iterable[int]) -> Selection:
        """These eager calls, with the calls of the program that stand for them. Raises InputError: no numbers."""
        found = _among(calls, len(self.became))
        return Selection(tuple(dict.fromkeys(call for index in found for call in self.became[index])), found)

    def name(self, call: int, eager: bool = False) -> str:
        """``"12 addmm in encoder.layer.0"``."""
        table = self.eager if eager else self.calls
        where = table["module"][call]
        return f"{call} {table['label'][call]}{f' in {where}' if where else ''}"

    def source(self, call: int, eager: bool = False) -> str:
        """File and line; empty if unknown."""
        table = self.eager if eager else self.calls
        file, line = table["file"][call], table["line"][call]
        return f"{file}:{line}" if file and line else file

    def lines_of(self, marked: Selection) -> list[int]:
        """Rows of ``code["lines"]`` that the selection's eager calls were made on."""
        places = ((self.eager["file"][call], self.eager["line"][call]) for call in marked.eager)
        return list(dict.fromkeys(self.row_of_line[place] for place in places if place in self.row_of_line))

    def text_of_line(self, row: int) -> str:
        """The code of a row of ``code["lines"]``; empty where the report has none."""
        one = self.code["functions"][self.code["lines"]["function"][row]] if self.code else {}
        at = self.code["lines"]["line"][row] - one["first"] if self.code else 0
        return str(one["text"][at]) if 0 <= at < len(one.get("text", ())) else ""


def _among(calls: Iterable[int], size: int) -> tuple[int, ...]:
    """Those of ``calls`` that there are, once each."""
    given = tuple(calls)
    for call in given:
        if not isinstance(call, SupportsIndex):
            there = f"numbers from 0 to {size - 1}" if size else "there are none"
            raise InputError(f"{call!r} is no number of a call", fix=f"{there}, one by one: select(2, 5)")
    return tuple(dict.fromkeys(call for call in given if 0 <= call < size))


def search(views: Views, text: str) -> list[int]:
    """Calls whose operator, module, source or phase holds every word of ``text``; of no text all calls."""
    words = text.lower().split()
    calls = views.calls

    def told(call: int) -> str:
        own = (calls["operator"][call], calls["label"][call], calls["module"][call], calls["phase"][call])
        return f"{call} {' '.join(own)} {views.source(call)}".lower()

    return [call for call in range(views.size) if not words or all(word in told(call) for word in words)]


# ---------------------------------------------------------------- what if


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan nobody captured, simulated.

    Args:
        run: the timeline as ``Views.runs`` hold them, marked as simulated, and
        plan: its streams and waits as ``Views.plans`` hold them.
        facts: ``(name, text)``: simulated, and beside it what was measured.
    """

    run: dict[str, Any]
    plan: dict[str, Any]
    facts: tuple[tuple[str, str], ...]


def no_simulation(report: ReportData) -> str:
    """Why nothing can be simulated; empty if it can."""
    if report.sampling is not None:
        return "this is a profile of code as it is: which call needs which is not known"
    if not report.graph.size:
        return "the model made no call that reaches the device"
    if report.costs.source == "uniform" or not report.costs.total_ns:
        return "the calls' times were not measured"
    if report.environment.device != "cuda":
        return "how calls on this host slow each other down is not known; the simulation's model is that of a GPU"
    if report.graph.size > MOST_CALLS:
        return f"more than {format_count(MOST_CALLS)} calls"
    return ""


def require_plan(policy: str, streams: int) -> None:
    """Raise InputError unless ``policy`` is the name of one, and ``streams`` a number of streams."""
    if policy not in POLICIES:
        raise InputError(f"there is no policy {policy!r} to simulate", fix=f"one of {', '.join(POLICIES)}")
    if not isinstance(streams, SupportsIndex) or int(streams) < 1:
        raise InputError(f"streams={streams!r} is no number of streams", fix="a whole number, 1 or more")


def simulate_plan(views: Views, policy: str, streams: int) -> Simulated:
    """What ``policy`` would plan on at most ``streams`` streams, and when each call would run, by the simulation.

    Its figures are about one another: the simulation of one stream is there to compare with, and the measured runs for
    those who want to know how far it is off.

    What ``require_plan`` refuses is the caller's to refuse.
    """
    report = views.report
    plan = POLICIES[policy](report.graph, report.costs, max_streams=streams)
    line = simulate(report.graph, plan, report.costs, H200, names=[str(text) for text in views.calls["label"]])
    one = plan if plan.streams == 1 else POLICIES["single"](report.graph, report.costs, max_streams=1)
    alone = line if one is plan else simulate(report.graph, one, report.costs, H200)
    name = f"what if: {policy}, {plural(plan.streams, 'stream')}"
    alone_in_it = replace(report, schedules=(replace(plan, policy=name),), timelines=(replace(line, run=name),))
    (shown,) = timelines(alone_in_it)
    drawn = {
        "policy": name,
        "label": name,
        "stream": plan.stream,
        "producer": [u for u, _ in plan.syncs],
        "consumer": [v for _, v in plan.syncs],
    }
    length, single = line.length_ns, alone.length_ns
    measured = tuple(
        (
            f"Measured: {row['label']}",
            f"{row['median']}, over eager {_ratio(row['eager'])}" if row["eager"] else row["median"],
        )
        for row in views.summary["speed"]
        if not row["peer"]
    )
    capped = (
        f"; the policy uses {format_count(plan.streams)} of {format_count(streams)}" if plan.streams < streams else ""
    )
    facts = (
        ("SIMULATED, not measured", f"{format_ns(length)} with {policy} on {plural(plan.streams, 'stream')}{capped}"),
        ("Simulated over one stream, simulated", f"{format_ratio(single / length)} ({format_ns(single)} on one)"),
        (
            "Synchronisations planned",
            f"{format_count(len(plan.syncs))}; {format_count(plan.counts.full)} for every hazard",
        ),
        *measured,
        (
            "Model of the simulation",
            H200.name + ("" if report.costs.demand else "; how far calls fill the GPU is unknown"),
        ),
    )
    return Simulated(shown | shown["columns"] | {"label": name}, drawn, facts)


# ---------------------------------------------------------------- HTML


def summary_html(views: Views) -> str:
    """Verdict, speeds with spread, checks, facts, what-if, preparation, environment and warnings."""
    facts = views.summary
    speed = [
        (
            row["label"] + (" (peer)" if row["peer"] else "") + (" ✓ chosen" if row["chosen"] else ""),
            row["median"],
            f"{row['spread']}, drift {row['drift']}" + ("" if row["stable"] else " UNSTABLE"),
            "outputs differ" if row["wrong"] else _ratio(row["eager"]),
            _ratio(row["single"]),
            row["distance"] or "–",
        )
        for row in facts["speed"]
    ]
    lead, rest, said = (_text(facts["headline"][part]) for part in ("lead", "rest", "verdict"))
    parts = [f"<p>{lead if said == 'undecided' else f'<b>{lead}</b>'}{rest}</p>"]
    if facts["warnings"]:
        listed = "".join(f"<li>{_text(one)}</li>" for one in facts["warnings"])
        parts.append(_card("Warnings", f"<ul>{listed}</ul>"))
    heads = ("Run", "Median", "Spread", "Over eager", "Over one stream", "Over the limit")
    legend = f"<p>Ratios {INTERVAL}.</p>"
    parts.append(_card("Speed", _table(heads, speed) + legend if speed else "<p>Nothing was measured.</p>"))
    checks = [(_verdict(row), row["run"], row["error"], row["tolerance"], row["reason"]) for row in facts["checks"]]
    shown = (
        _table(("Outputs", "Run", "Error", "Tolerance", ""), checks) if checks else "<p>Outputs were not compared.</p>"
    )
    parts.append(_card("Equality with eager", shown))
    if facts["what_if"]:
        parts.append(_card("How many streams are worth it?", f"<p>{_text(facts['what_if']['answer'])}</p>"))
    parts.append(_card("Calls and graph", facts_html(facts["facts"])))
    if facts["preparation"]:
        steps = [(step["name"], step["text"]) for step in facts["preparation"]]
        parts.append(_card(f"Preparation, {facts['preparation_total']}", facts_html(steps)))
    parts.append(_card("Environment", facts_html(facts["environment"])))
    return "".join(parts)


def _verdict(row: Mapping[str, Any]) -> str:
    return "✓ equal" if row["passed"] else "✗ differs" if row["differs"] else "✗ not shown"


def syncs_html(views: Views) -> str:
    """Counts of all plans, each with its promise."""
    if not views.summary["plans"]:
        return "<p>No plan was made: what would have to wait for what is not known.</p>"
    heads = ("Plan", "Streams", *(name for _, name, _ in views.sync_counts), "Promise")
    rows = [
        (
            row["label"] + (" ✓ chosen" if row["chosen"] else ""),
            format_count(row["streams"]),
            *("not read" if row[key] is None else format_count(row[key]) for key, _, _ in views.sync_counts),
            f"{'✓' if row['promise']['kept'] else '✗'} {row['promise']['text']}" if row["promise"] else "–",
        )
        for row in views.summary["plans"]
    ]
    meant = "".join(f"<li><b>{_text(name)}</b>: {_text(meaning)}</li>" for _, name, meaning in views.sync_counts)
    return _card("Synchronisations across streams, counted four ways", f"{_table(heads, rows)}<ul>{meant}</ul>")


def host_syncs_html(views: Views) -> str:
    """Where eager made the host wait."""
    rows = views.host_syncs
    if rows is None:
        shown = "<p>Eager was not profiled, so its host synchronisations are unknown.</p>"
    elif not rows:
        shown = "<p>None was seen.</p>"
    else:
        heads = ("Kind", "Count", "Total", "Source line", "What to do")
        cells = [(row["kind"], str(row["count"]), row["total"], row["source"], row["hint"]) for row in rows]
        shown = _table(heads, cells)
    return _card("Where eager made the host wait", shown)


def memory_html(views: Views) -> str:
    """What the device held."""
    known = views.summary["memory"]
    if known is None:
        return "<p>Memory was not measured and not planned: what was held is not known.</p>"
    shown = facts_html(known["facts"])
    if known["engines"]:
        heads = (
            "Engine",
            "Arena",
            "Without sharing",
            "Sharing saves",
            "Workspaces",
            "Held in all",
            "Over eager's peak",
        )
        keys = ("arena", "unshared", "saved", "workspaces", "held", "against")
        rows = [
            (row["label"] + (" ✓ chosen" if row["chosen"] else ""), *(row[key] or "–" for key in keys))
            for row in known["engines"]
        ]
        shown += _table(heads, rows)
    return _card("Device memory", shown)


def details(views: Views, marked: Selection, plan: Mapping[str, Any] | None) -> str:
    """What is known about the selection: of one call everything, of several a list with what they add up to."""
    if not marked:
        return "<p>Nothing is selected. Click a node, a bar or a span, or pick a row.</p>"
    if len(marked.calls) > 1 and len(marked.eager) != 1:
        return _many(views, marked)
    rows: list[tuple[str, str]] = []
    title = ""
    if views.fused and len(marked.eager) == 1:
        (index,) = marked.eager
        title = views.eager["label"][index]
        rows += [
            ("Eager call", f"{index} of {format_count(len(views.became))}, {views.eager['operator'][index]}"),
            ("Module", views.eager["module"][index] or "the model itself"),
            ("Source", views.source(index, eager=True) or "unknown"),
            ("Writes", views.eager["writes"][index] or "nothing"),
            (
                "Became",
                _list(marked.calls, views, False) or "no call of the replay: folded into weights, or not needed",
            ),
        ]
    code = [text for row in views.lines_of(marked)[:1] if (text := views.text_of_line(row).strip())]
    for call in marked.calls[:1]:
        title = title or views.calls["label"][call]
        rows += _call_rows(views, call, plan)
    rows += [("Code", text) for text in code]
    found = [views.overhead_row[call] for call in marked.eager if call in views.overhead_row]
    if views.overhead is None:
        rows.append(("Overhead", "unknown: eager was not profiled"))
    elif found:
        columns = views.overhead["columns"]
        parts = [(part, sum(columns[part][row] for row in found)) for part in PARTS]
        named = ", ".join(f"{part} {format_ns(ns)}" for part, ns in parts if ns)
        exposed = sum(columns["exposed"][row] for row in found)
        shared = views.overhead["shared"] or {"name": "", "calls": ()}
        of_all = f"{shared['name']}: " if any(call in shared["calls"] for call in marked.eager) else ""
        rows.append(("Overhead", f"{of_all}{format_ns(sum(ns for _, ns in parts))} in profiled eager: {named}"))
        rows.append(("Exposed", f"{format_ns(exposed)} with the device idle"))
    else:
        rows.append(("Overhead", "not found in the profile"))
    for run in views.runs:
        of = frozenset(marked.eager if run["run"] == "eager" else marked.calls)
        spans = [at for at, call in enumerate(run["call"]) if call in of][:4]
        told = "; ".join(
            f"{run['lanes'][run['lane'][at]]['name']}: {format_ns(run['start'][at])} + {format_ns(run['length'][at])}"
            for at in spans
        )
        rows.append((run["label"], told or "no span seen"))
    return f"<h3>{_text(title)}</h3>{facts_html(rows)}"


def facts_html(rows: Iterable[tuple[str, str]]) -> str:
    """Names and texts in two columns."""
    cells = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(text)}</td></tr>' for name, text in rows)
    return f'<table class="nimble-facts"><tbody>{cells}</tbody></table>'


def _call_rows(views: Views, call: int, plan: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    calls, costs = views.calls, views.report.costs
    program = views.report.program.calls[call]
    rows = [
        ("Kernel" if views.fused else "Operator", calls["operator"][call]),
        ("Call", f"{call} of {format_count(views.size)}, {calls['phase'][call]}"),
    ]
    if views.fused:
        rows.append(("Stands for", _list(program.eager, views, True) or "no eager call: nothing explains it"))
    rows += [
        ("Module", calls["module"][call] or ("unknown" if not program.origins else "the model itself")),
        ("Source", views.source(call) or "unknown"),
        ("Reads", calls["reads"][call] or "nothing"),
        ("Writes", calls["writes"][call] or "nothing"),
    ]
    if calls["arguments"][call]:
        rows.append(("Arguments", calls["arguments"][call]))
    spread = f" (spread {format_ns(costs.spread_ns[call])})" if costs.spread_ns else ""
    rows.append(("Time alone", f"{format_ns(costs.ns[call])}{spread}" if views.timed else "not measured"))
    flops = views.work["flops"][call]
    rows.append(("FLOPs", format_count(flops) if flops >= 0 else "unknown"))
    rows.append(("On the critical path", "yes" if call in views.critical else "no"))
    rows.append(("Stream", f"{plan['stream'][call]} in {plan['label']}" if plan else "no plan was made"))
    return rows


def _many(views: Views, marked: Selection) -> str:
    total = sum(views.report.costs.ns[call] for call in marked.calls)
    rows = [
        ("Calls", _list(marked.calls, views, False)),
        ("Time alone, together", format_ns(total) if views.timed else "not measured"),
        ("On the critical path", format_count(len(views.critical.intersection(marked.calls)))),
    ]
    if views.fused:
        rows.insert(1, ("Stand for", _list(marked.eager, views, True) or "no eager call"))
    return f"<h3>{_text(plural(len(marked.calls), 'call'))}</h3>{facts_html(rows)}"


def _list(calls: Sequence[int], views: Views, eager: bool) -> str:
    shown = [views.name(call, eager) for call in calls[:_LISTED]]
    rest = len(calls) - len(shown)
    return "; ".join([*shown, f"and {format_count(rest)} more"] if rest else shown)


def _card(title: str, body: str) -> str:
    return f"<section><h4>{_text(title)}</h4>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(f'<td{_unbroken(cell)}>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="nimble-scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _unbroken(cell: str) -> str:
    """A number stays in one line with its unit."""
    return ' class="nimble-whole"' if len(cell) <= 12 else ""


def _ratio(cell: Mapping[str, Any] | None) -> str:
    return f"{cell['text']} {cell['interval']}" if cell else "–"


def _text(text: str) -> str:
    return html.escape(str(text))
