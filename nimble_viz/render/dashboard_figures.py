"""What the dashboard draws: plotly figures made of the values of the views, and of nothing else.

Pure functions; ``dashboard`` puts the figures into widgets. Colours are those of the page, read from its own style
sheet, and none is alone: streams are numbered, sources hatched, phases named, the critical path and the selection
outlined. Every point carries what a click on it means as ``customdata``.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any, Literal

from plotly.graph_objects import Bar, Figure, Scatter

from nimble_core.utils.units import format_bytes, format_count, format_ns
from nimble_viz.analysis.dag_layout import Boxes, lay_out
from nimble_viz.analysis.labels import plural
from nimble_viz.analysis.overhead import PARTS, group_name, grouped, module_tree
from nimble_viz.render.dashboard_views import Selection, Views

__all__ = [
    "MOST_BARS",
    "MOST_NODES",
    "MOST_SPANS",
    "Grouping",
    "Palette",
    "dag_figure",
    "dag_marks",
    "memory_figure",
    "memory_marks",
    "opened_boxes",
    "overhead_figure",
    "overhead_marks",
    "overhead_rows",
    "palette",
    "timeline_figure",
    "timeline_marks",
    "visible_boxes",
]

MOST_BARS = 1_500
"""Of more calls the Overhead pane draws those with the most overhead."""

MOST_NODES = 1_500
"""Of more boxes the DAG pane draws the first ones."""

MOST_SPANS = 3_000
"""Of a run with more spans the Timeline pane draws neighbours on a lane as one block."""

_GROUPS = 40
_OPEN_NODES = 1_200
_ROWS = 32
_NAMED_ROWS = 10
_NAMED_BARS = 24
_SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_PATTERNS = ("", "/", ".", "|")

Grouping = Literal["call", "operator", "module", "tree"]


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one theme: those of streams in turn, little to much, and others by the style sheet's names."""

    streams: tuple[str, ...]
    heat: tuple[str, ...]
    named: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.named[name]

    def stream(self, index: int) -> str:
        """Colour of a stream; after eight they come round again, in another shape or pattern."""
        return self.streams[index % len(self.streams)]


@lru_cache(maxsize=2)
def palette(dark: bool) -> Palette:
    """The page's own colours."""
    style, script = (
        resources.files("nimble_viz.render.viewer").joinpath(name).read_text(encoding="utf-8")
        for name in ("viewer.css", "viewer.js")
    )
    light_rules, dark_rules = re.findall(r"^:root[^{]*\{(.*?)^\}", style, re.MULTILINE | re.DOTALL)[:2]
    named = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", dark_rules if dark else light_rules))
    lists = re.findall(rf"^    {'dark' if dark else 'light'}: \[(.*)\]", script, re.MULTILINE)
    streams, heat = (tuple(re.findall(r"#[0-9a-f]{6}", found)) for found in lists)
    return Palette(streams, heat, named)


# ---------------------------------------------------------------- Overhead


def overhead_rows(views: Views, by: Grouping, order: str) -> list[dict[str, Any]]:
    """Rows of the Overhead pane, sorted; each has its name, the parts in ns, and ``eager``: the calls it is about.

    Args:
        views: of a report that was profiled.
        by: a row for each call, operator or innermost module; ``"tree"``: each module with all that is in it. What is
            in it follows, sorted by itself, as many levels as can be drawn.
        order: ``"overhead"``, ``"exposed"``, ``"work"``: most first; ``"program"``: as they were issued.
    """
    if views.overhead is None:
        return []
    columns, shared = views.overhead["columns"], views.overhead["shared"]
    together = shared["calls"] if shared else ()
    if by == "tree":
        all_rows = [row for root in module_tree(views.report, order) for row in root]
        fit = [depth for depth in range(1, 99) if sum(row.depth < depth for row in all_rows) <= _GROUPS]
        return [
            {"name": f"{row.path} {row.name}" if row.own else row.path}
            | {"eager": tuple(row.eager), "calls": len(row.eager)}
            | row.sums
            for row in all_rows
            if row.depth < max(fit, default=1)
        ]
    if by == "call":
        rows = [
            {"name": views.name(call, eager=True), "eager": (call,), "calls": 1}
            | ({"name": shared["name"], "eager": tuple(together)} if call in together else {})
            | {part: columns[part][row] for part in (*PARTS, "work", "exposed")}
            | {"overhead": sum(columns[part][row] for part in PARTS)}
            for row, call in enumerate(columns["call"])
        ]
    else:
        members = _members(views, by)
        rows = [row | {"eager": tuple(members[row["name"]])} for row in grouped(views.report, by)]
    if order == "program":
        return sorted(rows, key=lambda row: row["eager"][0])
    return sorted(rows, key=lambda row: (-row[order], row["eager"][0]))


def overhead_figure(views: Views, rows: Sequence[Mapping[str, Any]], by: Grouping, colours: Palette) -> Figure:
    """Bars of the rows stacked by source, with a mark at the exposed part; ``customdata`` is the row.

    On the host the operators' own work is stacked as well: it is part of the same time.
    """
    shown, left = _most(rows, MOST_BARS if by == "call" else _GROUPS)
    along = by == "call"
    names = [_plain(row["name"]) for row in shown]
    at = list(range(len(shown)))
    serial = bool(views.overhead and views.overhead["serial"])
    figure = Figure()
    for part in (*PARTS, *(("work",) if serial else ())):
        values = [row[part] / 1e3 for row in shown]
        if not any(values):
            continue
        figure.add_trace(
            Bar(
                **({"x": at, "y": values} if along else {"y": at, "x": values, "orientation": "h"}),
                name=part,
                marker={
                    "color": colours[part],
                    "line": {"width": 0 if along else 0.5, "color": colours["surface"]},
                    "pattern": _hatch("" if along else _source_pattern(part), colours),
                },
                customdata=at,
                hovertext=[
                    f"<b>{name}</b><br>{part} {format_ns(row[part])}" for name, row in zip(names, shown, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    exposed = [row["exposed"] / 1e3 for row in shown]
    if shown:
        figure.add_trace(
            Scatter(
                **({"x": at, "y": exposed} if along else {"y": at, "x": exposed}),
                name="exposed: device idle meanwhile",
                mode="markers",
                marker={
                    "symbol": "line-ew" if along else "line-ns",
                    "size": 5 if len(shown) > 200 else 9 if along else 16,
                    "line": {"width": 2, "color": colours["text"]},
                },
                customdata=at,
                hovertext=[_overhead_words(name, row) for name, row in zip(names, shown, strict=True)],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    _finish(figure, colours, 420 if along else 130 + 22 * len(shown))
    figure.update_layout(barmode="stack", bargap=0.1 if along else 0.25)
    value = "µs of host time in the profiled eager run"
    rest = f"; {format_count(left)} with less are left to the page" if left else ""
    if along:
        figure.update_xaxes(
            title_text=f"eager calls, in this order{rest}",
            showticklabels=len(shown) <= _NAMED_BARS,
            tickvals=at if len(shown) <= _NAMED_BARS else [],
            ticktext=[_plain(_shorten(row["name"], 22)) for row in shown[:_NAMED_BARS]],
            showgrid=False,
            range=[-0.7, len(shown) - 0.3],
        )
        figure.update_yaxes(title_text=value, rangemode="tozero")
    else:
        sides = [_plain(_shorten(row["name"], 34)) for row in shown]
        figure.update_layout(legend={"xref": "container", "yref": "container", "x": 0.01, "y": 0.99, "yanchor": "top"})
        figure.update_xaxes(title_text=f"{value}{rest}", rangemode="tozero")
        figure.update_yaxes(tickvals=at, ticktext=sides, autorange="reversed")
    return figure


def overhead_marks(rows: Sequence[Mapping[str, Any]], by: Grouping, marked: Selection, colours: Palette) -> Scatter:
    """Triangles at the rows that hold a marked eager call."""
    shown, _ = _most(rows, MOST_BARS if by == "call" else _GROUPS)
    eager = frozenset(marked.eager)
    hit = [at for at, row in enumerate(shown) if not eager.isdisjoint(row["eager"])]
    zero = [0.0] * len(hit)
    return Scatter(
        **({"x": hit, "y": zero} if by == "call" else {"y": hit, "x": zero}),
        name="selected",
        mode="markers",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=bool(hit),
        marker={
            "symbol": "triangle-up" if by == "call" else "triangle-right",
            "size": 15,
            "color": colours["select"],
            "line": {"width": 1.5, "color": colours["surface"]},
        },
    )


# ---------------------------------------------------------------- DAG


def opened_boxes(views: Views, most: int = _OPEN_NODES) -> frozenset[int]:
    """Modules to open at first: whole levels of nesting, as long as no more than ``most`` boxes are seen."""
    parent = views.graph["parent"]
    depth = [0] * len(parent)
    for box in (*range(views.size, len(parent)), *range(views.size)):  # a group comes after the group around it
        depth[box] = depth[parent[box]] + 1 if parent[box] >= 0 else 0
    opened: set[int] = set()
    for level in range(max(depth, default=0)):
        if sum(one <= level + 1 for one in depth[: views.size]) + depth[views.size :].count(level + 1) > most:
            break
        opened.update(box for box in range(views.size, len(parent)) if depth[box] == level)
    return frozenset(opened)


def visible_boxes(views: Views, opened: frozenset[int]) -> list[int]:
    """The box that each call is seen as: itself, or the outermost closed module around it."""
    parent = views.graph["parent"]
    shown = list(range(len(parent)))
    for box in range(views.size, len(parent)):
        around = parent[box]
        if around >= 0 and (shown[around] != around or around not in opened):
            shown[box] = shown[around]
    for call in range(views.size):
        around = parent[call]
        if around >= 0 and (shown[around] != around or around not in opened):
            shown[call] = shown[around]
    return shown[: views.size]


def dag_figure(
    views: Views,
    opened: frozenset[int],
    plan: Mapping[str, Any] | None,
    colour: str,
    colours: Palette,
    *,
    transitive: bool = False,
) -> Figure:
    """Boxes in layers from left to right, edges of the MEG, waits of ``plan`` and the critical path.

    ``customdata`` of a node is its box: a call, or a module that stands for neighbouring calls. Of more than
    ``MOST_NODES`` boxes the first are drawn; the title of the axis says so.
    """
    box_of = visible_boxes(views, opened)
    boxes = list(dict.fromkeys(box_of))[:MOST_NODES]
    left = len(set(box_of)) - len(boxes)
    place = {box: at for at, box in enumerate(boxes)}
    spot = [place.get(box, -1) for box in box_of]

    def contracted(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        ends = ((spot[u], spot[v]) for u, v in pairs)
        return sorted({(u, v) for u, v in ends if u != v and u >= 0 and v >= 0})

    graph = views.graph
    all_edges = list(zip(graph["from"], graph["reach"], graph["minimum"], strict=True))
    edges = contracted((u, u + reach) for u, reach, minimum in all_edges if minimum)
    layout = lay_out(Boxes(len(boxes), (-1,) * len(boxes), (), (), ()), edges)
    row, position = layout.row, layout.position
    lanes = {lane.source: lane for lane in layout.lanes}

    def routed(pairs: Iterable[tuple[int, int]]) -> tuple[list[float | None], list[float | None]]:
        xs: list[float | None] = []
        ys: list[float | None] = []
        for u, v in pairs:
            xs.append(row[u])
            ys.append(position[u])
            lane = lanes.get(u)
            for at, passed in enumerate(lane.places, lane.first) if lane else ():
                if at < row[v]:
                    xs.append(at)
                    ys.append(passed)
            xs += (row[v], None)
            ys += (position[v], None)
        return xs, ys

    figure = Figure()

    def add_lines(pairs: list[tuple[int, int]], name: str, colour: str, width: float, dash: str) -> None:
        if pairs:
            xs, ys = routed(pairs)
            line = {"color": colour, "width": width, "dash": dash}
            figure.add_trace(Scatter(x=xs, y=ys, mode="lines", name=name, line=line, hoverinfo="skip"))

    if transitive:
        extra = contracted((u, u + reach) for u, reach, minimum in all_edges if not minimum)
        add_lines(extra, "transitive hazards", colours["transitive"], 1, "dot")
    syncs = contracted(zip(plan["producer"], plan["consumer"], strict=True)) if plan else []
    waits = frozenset(syncs)
    path = contracted(pairwise(graph["critical"]))
    add_lines(path, "critical path", colours["critical"], 4.5, "solid")
    add_lines([pair for pair in edges if pair not in waits], "edges of the MEG", colours["edge"], 1.2, "solid")
    add_lines(syncs, "synchronisations", colours["sync"], 2.2, "dash")
    members: list[list[int]] = [[] for _ in boxes]
    for call, at in enumerate(spot):
        if at >= 0:
            members[at].append(call)
    _add_nodes(figure, views, boxes, members, row, position, plan, colour, colours)
    rows = max(row, default=0) + 1
    if rows <= _NAMED_ROWS:
        _add_names(figure, views, boxes, row, position, colours)
    low, high = min(position, default=0.0), max(position, default=0.0)
    half = max(high - low + 2, 7) / 2
    _finish(figure, colours, 520)
    note = (
        ""
        if not left
        else f"the first {format_count(len(boxes))} boxes; {format_count(left)} more are left to the page"
    )
    figure.update_layout(
        dragmode="pan",
        hovermode="closest",
        xaxis={
            "visible": bool(note),
            "title": {"text": note},
            "showticklabels": False,
            "showgrid": False,
            "zeroline": False,
            "range": [-1, min(rows, _ROWS)],
        },
        yaxis={"visible": False, "range": [(low + high) / 2 - half, (low + high) / 2 + half]},
    )
    return figure


def dag_marks(figure: Figure, views: Views, opened: frozenset[int], marked: Selection, colours: Palette) -> Scatter:
    """Rings around the nodes of ``figure`` that are, or hold, a marked call."""
    box_of = visible_boxes(views, opened)
    hit = {box_of[call] for call in marked.calls}
    at = [
        (x, y)
        for trace in figure.data
        if trace.customdata is not None
        for x, y, box in zip(trace.x, trace.y, trace.customdata, strict=True)
        if box in hit
    ]
    return Scatter(
        x=[x for x, _ in at],
        y=[y for _, y in at],
        name="selected",
        mode="markers",
        hoverinfo="skip",
        showlegend=bool(at),
        marker={"symbol": "circle-open", "size": 32, "color": colours["select"], "line": {"width": 4}},
    )


# ---------------------------------------------------------------- Timeline


def timeline_figure(
    views: Views, runs: Sequence[Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]], colours: Palette
) -> Figure:
    """Lanes of the runs, one run above the other, on one axis from the first start of each; microseconds.

    Idle of a lane of the device is shaded, and calls on the critical path have a bold lower edge. Where ``plans`` holds
    the plan of a run whose spans are drawn one by one, its waits go from the producer's end to the consumer's start.
    ``customdata`` of a bar is its call, -1 where it belongs to none; the trace's ``meta`` is the run, ``"eager"``
    counting in eager calls.
    """
    figure = Figure()
    ticks: list[tuple[float, str]] = []
    heads: list[tuple[float, str]] = []
    bottom = 0.0
    connectors: tuple[list[float | None], list[float | None]] = ([], [])
    for run, rows in _rows(runs):
        heads.append((rows[0] - 1 if rows else bottom, _head(run)))
        bottom = rows[-1] + 1.4 if rows else bottom + 1
        ticks += [(y, _plain(lane["name"])) for y, lane in zip(rows, run["lanes"], strict=True)]
        figure.add_trace(_idle_trace(run, rows, colours))
        figure.add_trace(_span_trace(views, run, rows, colours))
        plan = plans.get(run["run"])
        if plan and _together(run) == 1:
            _connect(run, rows, plan, connectors)
    if runs and views.critical:
        figure.add_trace(_path_trace(views, runs, colours))
    if connectors[0]:
        figure.add_trace(
            Scatter(
                x=connectors[0],
                y=connectors[1],
                mode="lines",
                name="synchronisation: what waits for what",
                line={"color": colours["sync"], "width": 1.4, "dash": "dash"},
                hoverinfo="skip",
            )
        )
    _finish(figure, colours, int(110 + 27 * bottom))
    figure.update_layout(
        barmode="overlay",
        bargap=0.2,
        dragmode="pan",
        hovermode="closest",
        xaxis={"title": {"text": "µs from the first start of each run"}, "side": "bottom", "zeroline": False},
        yaxis={
            "tickvals": [y for y, _ in ticks],
            "ticktext": [text for _, text in ticks],
            "range": [bottom - 0.4, -0.6],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        annotations=[
            {
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": y + 0.1,
                "text": text,
                "showarrow": False,
                "align": "left",
            }
            for y, text in heads
        ],
    )
    return figure


def timeline_marks(runs: Sequence[Mapping[str, Any]], marked: Selection, colours: Palette) -> Bar:
    """Outlines of the bars of these runs that belong to a marked call."""
    hit: list[tuple[float, float, float]] = []
    for run, rows in _rows(runs):
        of = frozenset(marked.eager if run["run"] == "eager" else marked.calls)
        blocks = _blocks(run) if of else ()
        hit += [(rows[lane], start, length) for lane, start, length, calls in blocks if not of.isdisjoint(calls)]
    return Bar(
        x=[length / 1e3 for _, _, length in hit],
        base=[start / 1e3 for _, start, _ in hit],
        y=[y for y, _, _ in hit],
        orientation="h",
        name="selected",
        hoverinfo="skip",
        showlegend=bool(hit),
        width=0.98,
        marker={"color": "rgba(0,0,0,0)", "line": {"width": 3, "color": colours["select"]}},
    )


# ---------------------------------------------------------------- Memory


def memory_figure(views: Views, run: Mapping[str, Any], colours: Palette) -> Figure:
    """Live bytes while each call of ``run`` (``live_memory``) runs, in the order of issue; sizes to compare as lines.

    ``customdata`` of a step is its call, which the trace's ``meta`` is the run of, ``"eager"`` counting in eager calls.
    """
    columns, table = run["columns"], views.eager if run["eager"] else views.calls
    order = columns["call"]
    top = max([run["peak"], *(nbytes for _, nbytes in run["marks"])], default=0)
    unit, size = next(((name, size) for name, size in _SIZES if top >= size), ("B", 1))
    figure = Figure()
    figure.add_trace(
        Scatter(
            x=list(range(len(order))),
            y=[nbytes / size for nbytes in columns["live"]],
            mode="lines",
            name=f"live results, {_plain(run['label'])}",
            meta=run["run"],
            fill="tozeroy",
            line={"shape": "hvh", "width": 1.4, "color": colours["work"]},
            customdata=order,
            hovertext=[
                f"<b>{_plain(f'{call} ' + table['label'][call])}</b><br>{_plain(table['module'][call])}<br>"
                f"{table['phase'][call]}; {format_bytes(live)} live, {format_bytes(made)} made here"
                for call, live, made in zip(order, columns["live"], columns["makes"], strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    for at, (label, nbytes) in enumerate(run["marks"]):
        figure.add_trace(
            Scatter(
                x=[-0.5, len(order) - 0.5],
                y=[nbytes / size] * 2,
                mode="lines",
                name=f"{_plain(label)}: {format_bytes(nbytes)}",
                line={"width": 1.6, "dash": ("dash", "dot")[at % 2], "color": colours["sync"]},
                hoverinfo="skip",
            )
        )
    if order:
        figure.add_trace(
            Scatter(
                x=[run["peak_at"]],
                y=[run["peak"] / size],
                mode="markers",
                name=f"peak: {run['peak_text']}",
                marker={"symbol": "triangle-down", "size": 12, "color": colours["critical"]},
                hoverinfo="skip",
            )
        )
    _finish(figure, colours, 360)
    figure.update_layout(
        dragmode="pan",
        hovermode="x",
        xaxis={"title": {"text": "calls, in the order of issue"}, "range": [-0.5, len(order) - 0.5], "zeroline": False},
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
    )
    return figure


def memory_marks(run: Mapping[str, Any], marked: Selection, colours: Palette) -> Scatter:
    """A triangle below each marked call, and a line for as long as something that it makes is alive."""
    of = frozenset(marked.eager if run["run"] == "eager" else marked.calls)
    hit = [(at, run["columns"]["held"][at]) for at, call in enumerate(run["columns"]["call"]) if call in of]
    xs: list[float | None] = []
    for at, held in hit:
        xs += (at, at + held, None)
    return Scatter(
        x=xs,
        y=[None if x is None else 0.0 for x in xs],
        name="selected, and how long its results live",
        mode="lines+markers",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=bool(hit),
        line={"width": 5, "color": colours["select"]},
        marker={"symbol": "triangle-up", "size": [14, 0, 0] * len(hit), "color": colours["select"], "opacity": 1},
    )


# ---------------------------------------------------------------- parts of figures


def _members(views: Views, by: Literal["operator", "module"]) -> dict[str, list[int]]:
    """Profiled eager calls by the name that ``grouped`` gives their group."""
    members: dict[str, list[int]] = {}
    profile = views.report.overhead
    for row in profile.calls if profile else ():
        members.setdefault(group_name(views.report, row.call, by), []).extend(profile.calls_of(row))
    return members


def _most(rows: Sequence[Any], most: int) -> tuple[Sequence[Any], int]:
    return rows[:most], max(0, len(rows) - most)


def _overhead_words(name: str, row: Mapping[str, Any]) -> str:
    parts = "<br>".join(f"{part} {format_ns(row[part])}" for part in (*PARTS, "work") if row[part])
    calls = f"<br>{plural(row['calls'], 'call')}" if row["calls"] > 1 else ""
    return (
        f"<b>{name}</b>{calls}<br>overhead {format_ns(row['overhead'])}, exposed {format_ns(row['exposed'])}<br>{parts}"
    )


def _hatch(shape: str | list[str], colours: Palette) -> dict[str, Any]:
    return {"shape": shape, "fillmode": "overlay", "fgcolor": colours["surface"], "size": 6, "solidity": 0.22}


def _source_pattern(part: str) -> str:
    return {"dispatch": "/", "allocation": "x", "launch": "\\", "tail": ".", "work": "-"}.get(part, "")


def _add_nodes(
    figure: Figure,
    views: Views,
    boxes: Sequence[int],
    members: Sequence[Sequence[int]],
    row: Sequence[int],
    position: Sequence[float],
    plan: Mapping[str, Any] | None,
    colour: str,
    colours: Palette,
) -> None:
    """One trace of the calls and one of the modules; what a colour means is written on the node, or on a scale."""
    numbers = _numbers(views, members, colour)
    known = [ns for ns in numbers if ns]
    low, high = min(known, default=1.0), max(known, default=1.0)
    for groups, symbol, name in ((False, "circle", "calls"), (True, "square", "modules, folded: click to open")):
        chosen = [at for at, box in enumerate(boxes) if (box >= views.size) == groups]
        if not chosen:
            continue
        if numbers:
            marks = [_heated(numbers[at], low, high, colours) for at in chosen]
        else:
            marks = [_mark(views, members[at], plan, colour, colours) for at in chosen]
        figure.add_trace(
            Scatter(
                x=[row[at] for at in chosen],
                y=[position[at] for at in chosen],
                mode="markers+text",
                name=name,
                text=[text for _, text, _ in marks],
                textfont={"size": 9, "color": [ink for _, _, ink in marks]},
                textposition="middle center",
                customdata=[boxes[at] for at in chosen],
                hovertext=[_node_words(views, boxes[at], members[at], plan) for at in chosen],
                hovertemplate="%{hovertext}<extra></extra>",
                marker={
                    "opacity": 1,
                    "symbol": [_symbol(symbol, views, members[at], plan, colour) for at in chosen],
                    "size": 26 if numbers else 22 if groups else 17,
                    "color": [fill for fill, _, _ in marks],
                    "line": {
                        "width": [2.5 if views.critical.intersection(members[at]) else 1 for at in chosen],
                        "color": colours["critical"],
                    },
                },
            )
        )
    if known:
        figure.add_trace(_heat_scale(low, high, colours))


def _numbers(views: Views, members: Sequence[Sequence[int]], colour: str) -> list[float | None]:
    """Nanoseconds of the calls of each box, None where they are not known; empty if the colour is not about time."""
    column = {"time": "cost", "exposed": "exposed"}.get(colour)
    if column is None:
        return []
    values = views.calls[column]
    known = [[values[call] for call in held if values[call] >= 0] for held in members]
    return [sum(found) if found else None for found in known]


def _heated(ns: float | None, low: float, high: float, colours: Palette) -> tuple[str, str, str]:
    """Fill, text and ink of a time: in so many steps from ``low`` to ``high``, each a like factor more."""
    if not ns:
        fill = colours["sunken"]
        return fill, "?" if ns is None else "0", _ink(fill)
    share = math.log(ns / low) / math.log(high / low) if high > low else 0.5
    fill = colours.heat[round((len(colours.heat) - 1) * share)]
    return fill, _short_us(ns), _ink(fill)


def _heat_scale(low: float, high: float, colours: Palette) -> Scatter:
    """No point, but the scale that the nodes' colours are read off."""
    steps = [low * (high / low) ** (at / 4) for at in range(5)] if high > low else [low]
    return Scatter(
        x=[None],
        y=[None],
        mode="markers",
        hoverinfo="skip",
        showlegend=False,
        marker={
            "color": [0.0],
            "cmin": 0.0,
            "cmax": 1.0,
            "showscale": True,
            "colorscale": [[at / (len(colours.heat) - 1), fill] for at, fill in enumerate(colours.heat)],
            "colorbar": {
                "title": {"text": "µs"},
                "thickness": 12,
                "len": 0.8,
                "tickvals": [at / 4 for at in range(5)] if high > low else [0.5],
                "ticktext": [_short_us(ns) for ns in steps],
            },
        },
    )


def _short_us(ns: float) -> str:
    """Microseconds in at most four characters."""
    us = ns / 1e3
    return f"{us:.1f}" if us < 9.95 else f"{us:.0f}" if us < 9_999.5 else f"{us / 1e3:.0f}k"


def _add_names(
    figure: Figure, views: Views, boxes: Sequence[int], row: Sequence[int], position: Sequence[float], colours: Palette
) -> None:
    """What each node is, below it: where columns are wide enough to be read."""
    names = [
        f"{box} {views.calls['label'][box]}" if box < views.size else views.graph["name"][box - views.size]
        for box in boxes
    ]
    figure.add_trace(
        Scatter(
            x=list(row),
            y=[place - 0.25 for place in position],
            mode="text",
            name="names",
            text=[_plain(_shorten(name, 18)) for name in names],
            textfont={"size": 10, "color": colours["text"]},
            textposition="bottom center",
            hoverinfo="skip",
            showlegend=False,
        )
    )


def _mark(
    views: Views, held: Sequence[int], plan: Mapping[str, Any] | None, colour: str, colours: Palette
) -> tuple[str, str, str]:
    """Fill, text and ink of a node that stands for the calls ``held``."""
    if colour == "phase":
        found = {views.calls["phase"][call] for call in held}
        if len(found) == 1:
            fill = colours[next(iter(found))]
            return fill, next(iter(found))[:1].upper(), _ink(fill)
    elif plan:
        streams = {plan["stream"][call] for call in held}
        if len(streams) == 1:
            fill = colours.stream(next(iter(streams)))
            return fill, str(next(iter(streams))), _ink(fill)
    fill = colours["sunken"]
    return fill, "…" if len(held) > 1 else "", _ink(fill)


def _symbol(symbol: str, views: Views, held: Sequence[int], plan: Mapping[str, Any] | None, colour: str) -> str:
    if symbol == "square" or colour != "stream" or not plan:
        return symbol
    return ("circle", "diamond", "hexagon", "star-square")[plan["stream"][held[0]] // 8 % 4]


def _node_words(views: Views, box: int, held: Sequence[int], plan: Mapping[str, Any] | None) -> str:
    calls = views.calls
    if box >= views.size:
        at = box - views.size
        alike = views.graph["alike"][at]
        path = _box_path(views, box)
        same = f"; {format_count(alike)} blocks of the model are like this" if alike > 1 else ""
        total = f"<br>{format_ns(sum(views.report.costs.ns[call] for call in held))} alone" if views.timed else ""
        count = f"{plural(len(held), 'call')}, {held[0]} to {held[-1]}"
        return f"<b>{_plain(path)}</b><br>{count}{same}{total}<br>click to open"
    lines = [
        f"<b>{_plain(calls['operator'][box])}</b>",
        _plain(views.name(box)),
        _plain(views.source(box)),
        _plain(f"→ {calls['writes'][box]}" if calls["writes"][box] else ""),
        f"{format_ns(views.report.costs.ns[box])} alone" if views.timed else "time not measured",
        f"{format_ns(calls['exposed'][box])} of overhead exposed in eager" if calls["exposed"][box] >= 0 else "",
        f"stream {plan['stream'][box]}" if plan else "",
        "on the critical path" if box in views.critical else "",
    ]
    return "<br>".join(line for line in lines if line)


def _box_path(views: Views, box: int) -> str:
    steps = []
    while box >= 0:
        steps.append(views.graph["name"][box - views.size])
        box = views.graph["parent"][box]
    return ".".join(reversed(steps))


def _idle_trace(run: Mapping[str, Any], rows: Sequence[float], colours: Palette) -> Bar:
    """The whole length of each lane of the device: where nothing covers it, it is idle."""
    lanes = [(y, lane) for y, lane in zip(rows, run["lanes"], strict=True) if lane["idle"] is not None]
    length = max(run["length_ns"], run["profiled_ns"] if run["run"] == "eager" else 0.0) / 1e3
    return Bar(
        x=[length] * len(lanes),
        y=[y for y, _ in lanes],
        base=[0.0] * len(lanes),
        orientation="h",
        width=0.8,
        showlegend=False,
        marker={
            "color": colours["idle"],
            "line": {"width": 0},
            "pattern": {"shape": "/", "size": 7, "solidity": 0.12, "fgcolor": colours["line-strong"]},
        },
        hovertext=[f"{_plain(lane['name'])}: idle {lane['idle']:.1%} of this run" for _, lane in lanes],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _span_trace(views: Views, run: Mapping[str, Any], rows: Sequence[float], colours: Palette) -> Bar:
    blocks = _blocks(run)
    eager = run["run"] == "eager"
    simulated = run["source"] == "simulated"
    kinds = [lane["kind"] for lane in run["lanes"]]

    def fill(lane: int) -> str:
        if eager:
            return colours["remainder"] if kinds[lane] == "host" else colours["work"]
        return colours.stream(lane)

    return Bar(
        x=[length / 1e3 for _, _, length, _ in blocks],
        base=[start / 1e3 for _, start, _, _ in blocks],
        y=[rows[lane] for lane, _, _, _ in blocks],
        orientation="h",
        width=0.8,
        name=_plain(run["label"]),
        meta=run["run"],
        showlegend=False,
        customdata=[calls[0] if calls else -1 for _, _, _, calls in blocks],
        hovertext=[_span_words(views, run, block, simulated) for block in blocks],
        hovertemplate="%{hovertext}<extra></extra>",
        marker={
            "color": [fill(lane) for lane, _, _, _ in blocks],
            "opacity": 0.7 if simulated else 1.0,
            "line": {"width": 0.25, "color": colours["surface"]},
            "pattern": _hatch(["" if eager else _PATTERNS[lane // 8 % 4] for lane, _, _, _ in blocks], colours),
        },
    )


def _path_trace(views: Views, runs: Sequence[Mapping[str, Any]], colours: Palette) -> Bar:
    """A bold edge below what is on the critical path: it stays readable where an outline would cover narrow spans."""
    eager = frozenset(views.of_calls(views.critical).eager)
    edges = [
        (start / 1e3, length / 1e3, rows[lane] + 0.44)
        for run, rows in _rows(runs)
        for lane, start, length, calls in _blocks(run)
        if not (eager if run["run"] == "eager" else views.critical).isdisjoint(calls)
    ]
    return Bar(
        x=[length for _, length, _ in edges],
        base=[start for start, _, _ in edges],
        y=[y for _, _, y in edges],
        orientation="h",
        width=0.13,
        name="critical path",
        hoverinfo="skip",
        marker={"color": colours["critical"], "line": {"width": 0}},
    )


def _rows(runs: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[float]]]:
    """Where the lanes of each run are drawn; a free row above them is for the run's name."""
    placed = []
    top = 1.0
    for run in runs:
        placed.append((run, [top + lane for lane in range(len(run["lanes"]))]))
        top += len(run["lanes"]) + 1.4
    return placed


def _together(run: Mapping[str, Any]) -> int:
    """How many neighbours on a lane are drawn as one block."""
    return max(1, -(-len(run["lane"]) // MOST_SPANS))


def _blocks(run: Mapping[str, Any]) -> list[tuple[int, float, float, tuple[int, ...]]]:
    """``(lane, start, length, calls)`` of what is drawn: spans, or where there are too many neighbours as one."""
    together = _together(run)
    if together == 1:
        columns = zip(run["lane"], run["start"], run["length"], run["call"], strict=True)
        return [(lane, start, length, () if call < 0 else (call,)) for lane, start, length, call in columns]
    lanes: list[list[int]] = [[] for _ in run["lanes"]]
    for at, lane in enumerate(run["lane"]):
        lanes[lane].append(at)
    blocks = []
    for lane, spans in enumerate(lanes):
        for first in range(0, len(spans), together):
            held = spans[first : first + together]
            start = run["start"][held[0]]
            end = max(run["start"][at] + run["length"][at] for at in held)
            calls = sorted({run["call"][at] for at in held if run["call"][at] >= 0})
            blocks.append((lane, start, end - start, tuple(calls)))
    return blocks


def _span_words(
    views: Views, run: Mapping[str, Any], block: tuple[int, float, float, tuple[int, ...]], simulated: bool
) -> str:
    lane, start, length, calls = block
    table = views.eager if run["run"] == "eager" else views.calls
    what = "belongs to no call" if not calls else f"call {calls[0]}: {table['label'][calls[0]]}"
    if len(calls) > 1:
        what = f"{format_count(len(calls))} neighbours as one block: calls {calls[0]} to {calls[-1]}"
    where = f"{run['label']}, {run['lanes'][lane]['name']}"
    told = [f"<b>{_plain(what)}</b>", _plain(where), f"{format_ns(start)} + {format_ns(length)}"]
    if len(calls) == 1 and table["module"][calls[0]]:
        told.insert(1, _plain(table["module"][calls[0]]))
    return "<br>".join([*told, "SIMULATED, not measured"] if simulated else told)


def _connect(
    run: Mapping[str, Any],
    rows: Sequence[float],
    plan: Mapping[str, Any],
    lines: tuple[list[float | None], list[float | None]],
) -> None:
    """Lines from the last end of each producer to the first start of what waits for it."""
    ends: dict[int, tuple[float, float]] = {}
    starts: dict[int, tuple[float, float]] = {}
    for lane, start, length, call in zip(run["lane"], run["start"], run["length"], run["call"], strict=True):
        if call >= 0:
            ends[call] = max(ends.get(call, (0.0, 0.0)), (start + length, rows[lane]))
            starts[call] = min(starts.get(call, (start, rows[lane])), (start, rows[lane]))
    for producer, consumer in zip(plan["producer"], plan["consumer"], strict=True):
        if producer in ends and consumer in starts:
            lines[0].extend((ends[producer][0] / 1e3, starts[consumer][0] / 1e3, None))
            lines[1].extend((ends[producer][1], starts[consumer][1], None))


def _head(run: Mapping[str, Any]) -> str:
    """The run's name, length and idle share; of doubts the first word: the pane says them in full."""
    simulated = run["source"] == "simulated"
    length = f"{format_ns(run['length_ns'])}, SIMULATED, not measured" if simulated else run["lengths"]
    marks = "".join(f"; {mark.partition(':')[0]}" for mark in run["marks"] if not simulated)
    folded = _together(run)
    many = f"; {folded} neighbours drawn as one block, synchronisations left to the page" if folded > 1 else ""
    return f"<b>{_plain(run['label'])}</b>  {length}, device idle {run['idle']:.1%}{_plain(marks)}{many}"


def _finish(figure: Figure, colours: Palette, height: int) -> None:
    grid = {"gridcolor": colours["line"], "linecolor": colours["line-strong"], "zerolinecolor": colours["line-strong"]}
    figure.update_layout(
        template="none",
        autosize=True,
        height=height,
        margin={"l": 10, "r": 10, "t": 60, "b": 44},
        paper_bgcolor=colours["surface"],
        plot_bgcolor=colours["surface"],
        font={"color": colours["text"], "size": 12, "family": "system-ui, sans-serif"},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "itemclick": False,
            "itemdoubleclick": False,
        },
        hoverlabel={
            "bgcolor": colours["surface"],
            "bordercolor": colours["line-strong"],
            "font": {"color": colours["text"], "size": 12},
            "align": "left",
        },
        xaxis=grid | {"automargin": True},
        yaxis=grid | {"automargin": True},
    )


def _ink(fill: str) -> str:
    """Black or white, whichever reads on ``fill`` (WCAG 2 relative luminance, as the page does it)."""
    channels = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return "#10181b" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.19 else "#ffffff"


def _shorten(text: str, most: int) -> str:
    """Both ends of a long name: which part of the model, and which module in it."""
    return text if len(text) <= most else f"{text[: most // 4]}…{text[len(text) - (most - most // 4) + 1 :]}"


def _plain(text: str) -> str:
    """plotly reads a little HTML in labels: names are text."""
    return html.escape(str(text), quote=False)
