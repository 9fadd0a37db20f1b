"""The DAG as nested boxes: modules as contiguous runs of calls, each laid out in layers of its own.

A box is a call or a group of calls. Groups are runs of neighbouring calls of one module, so contracting any of them
leaves a DAG (all edges point from lower to higher index), and each group is laid out once, whatever is folded
elsewhere: the viewer only places boxes of known rows and order beside and below each other.

An edge that passes rows of a group runs through a lane there, a chain of places one row each, kept free of boxes.
All edges from one call share their lanes, so what one call is read by looks like one line that branches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from nimble_core.ir.schedule import Schedule
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.labels import label_call, label_run, trains
from nimble_viz.analysis.provenance import nesting_modules
from nimble_viz.report.data import ReportData

__all__ = [
    "Boxes",
    "Lane",
    "Layout",
    "components",
    "dag",
    "lay_out",
    "layers",
    "nest",
    "opening_schedule",
    "order",
    "spread_row",
    "stacked",
]

_SWEEPS = 4
_LANE_WIDTH = 0.15


@dataclass(frozen=True, slots=True)
class Boxes:
    """Calls ``0 … calls-1`` and groups ``calls … calls+groups-1``, as one forest.

    Args:
        calls: number of calls.
        parent: box that holds each box, -1 for the outermost.
        first: first call of each group, and
        last: its last call, both included.
        name: module path of each group, relative to the group around it; steps that lead to all of it included.
    """

    calls: int
    parent: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    name: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Places that the edges from one call hold free in neighbouring rows of one group.

    Args:
        source: the call that the edges come from.
        within: the group that the rows belong to, -1 for the outermost rows.
        first: the first of the rows.
        places: position in each row.
    """

    source: int
    within: int
    first: int
    places: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Row and position of each box in the group around it, and the lanes between the boxes."""

    row: tuple[int, ...]
    position: tuple[float, ...]
    lanes: tuple[Lane, ...]


def dag(report: ReportData) -> dict[str, Any]:
    """Boxes with their rows and positions, edges, critical path and plans, as columns.

    A group is number ``like`` (from 1) of ``alike`` that make the same calls, and number ``part`` of ``parts`` that its
    module is in: what other modules' calls come between is apart.
    """
    graph, calls = report.graph, report.program.calls
    boxes = nest(nesting_modules(report), [call.phase for call in calls] if trains(report) else None)
    layout = lay_out(boxes, graph.meg)
    labels = [label_call(call) for call in calls]
    shapes = [tuple(labels[first : last + 1]) for first, last in zip(boxes.first, boxes.last, strict=True)]
    alike = Counter(shapes)
    paths = _paths(boxes)
    parts = Counter(paths)
    minimum = frozenset(graph.meg)
    return {
        "columns": {
            "parent": boxes.parent,
            "row": layout.row,
            "position": [round(100 * value) for value in layout.position],
            "lane_source": [lane.source for lane in layout.lanes],
            "lane_within": [lane.within for lane in layout.lanes],
            "lane_first": [lane.first for lane in layout.lanes],
            "lane_rows": [len(lane.places) for lane in layout.lanes],
            "lane_places": [round(100 * place) for lane in layout.lanes for place in lane.places],
            "first": boxes.first,
            "last": boxes.last,
            "name": boxes.name,
            "alike": [alike[shape] for shape in shapes],
            "like": _ranks(shapes),
            "parts": [parts[path] for path in paths],
            "part": _ranks(paths),
            "from": [u for u, _ in graph.edges],
            "reach": [v - u for u, v in graph.edges],
            "minimum": [int(edge in minimum) for edge in graph.edges],
            "kind": graph.kinds,
            "critical": report.critical_path,
        },
        "plans": [
            {
                "policy": plan.policy,
                "label": label_run(report, plan.policy),
                "columns": {
                    "stream": plan.stream,
                    "producer": [u for u, _ in plan.syncs],
                    "consumer": [v for _, v in plan.syncs],
                },
            }
            for plan in report.schedules
        ],
        "opens": report.schedules.index(first) if (first := opening_schedule(report)) else -1,
    }


def _paths(boxes: Boxes) -> list[str]:
    """Name of each group after those of the groups around it."""
    paths: list[str] = []
    for name, around in zip(boxes.name, boxes.parent[boxes.calls :], strict=True):
        paths.append(f"{paths[around - boxes.calls]}.{name}" if around >= 0 else name)
    return paths


def _ranks(values: Sequence[Any]) -> list[int]:
    """Which of its equals each value is, from 1.

    >>> _ranks(["a", "b", "a"])
    [1, 1, 2]
    """
    seen: Counter[Any] = Counter()
    ranks = []
    for value in values:
        seen[value] += 1
        ranks.append(seen[value])
    return ranks


def opening_schedule(report: ReportData) -> Schedule | None:
    """Which schedule to show first: that of the run that the verdict is about, else the last; None of none."""
    return report.schedule(best_run(report)) or (report.schedules[-1] if report.schedules else None)


def components(module: str) -> tuple[str, ...]:
    """Steps of a module path; an index, or several, stays with the list it indexes.

    >>> components("encoder.layer.0.output"), components("cells.3–5")
    (('encoder', 'layer.0', 'output'), ('cells.3–5',))
    """
    steps: list[str] = []
    for part in module.split(".") if module else ():
        if part[0:1].isdecimal() and steps:
            steps[-1] += f".{part}"
        else:
            steps.append(part)
    return tuple(steps)


def nest(modules: Sequence[str], phases: Sequence[str] | None = None) -> Boxes:
    """Group neighbouring calls by module path, step by step; no groups of one call, or of all calls of their parent.

    A step that holds all calls of the group around it is said in that group's name, unless that is a phase; one that
    holds all calls vanishes.

    Args:
        modules: module path of each call, in program order.
        phases: phase of each call: the outermost groups; None: no such groups.

    Returns:
        The boxes; a group's number is higher than that of the group around it. O(calls × depth).

    >>> nest(["a.x", "a.x", "a.y", "b"]).name
    ('a', 'x')
    >>> nest(["a.0.x", "a.0.y", "b"]).name
    ('a.0',)
    >>> nest(["a.list.0.x", "a.list.0.y", "b"]).name
    ('a.list.0',)
    """
    paths = [components(module) for module in modules]
    if phases is not None:
        paths = [(phase, *path) for phase, path in zip(phases, paths, strict=True)]
    size = len(paths)
    parent = [-1] * size
    first: list[int] = []
    last: list[int] = []
    name: list[str] = []
    pending = [(0, size, 0, -1)]
    while pending:
        begin, end, depth, around = pending.pop()
        runs: list[tuple[int, int]] = []
        at = begin
        while at < end:
            stop = at + 1
            if len(paths[at]) > depth:
                step = paths[at][depth]
                while stop < end and len(paths[stop]) > depth and paths[stop][depth] == step:
                    stop += 1
            runs.append((at, stop))
            at = stop
        deeper = []
        for start, stop in runs:
            if stop - start == 1:
                parent[start] = around
            elif (start, stop) == (begin, end):
                deeper.append((start, stop, depth + 1, around))
                of_phase = phases is not None and around >= 0 and parent[around] < 0
                if around >= 0 and len(paths[start]) > depth and not of_phase:
                    name[around - size] += f".{paths[start][depth]}"
            else:
                parent.append(around)
                first.append(start)
                last.append(stop - 1)
                name.append(paths[start][depth])
                deeper.append((start, stop, depth + 1, len(parent) - 1))
        pending.extend(reversed(deeper))
    return Boxes(size, tuple(parent), tuple(first), tuple(last), tuple(name))


def layers(size: int, edges: Sequence[tuple[int, int]], fed: Collection[int] = ()) -> list[int]:
    """Row of each box: the longest path from the sources; a source then sinks to just above its first reader.

    Args:
        size: number of boxes.
        edges: ``(u, v)`` with u < v.
        fed: boxes that also read from outside; they do not sink.

    Returns:
        The rows, 0 on top. O(boxes + edges · log edges).

    >>> layers(5, [(0, 1), (1, 2), (2, 4), (3, 4)])
    [0, 1, 2, 2, 3]
    """
    row = [0] * size
    last = [-1] * size
    source = [box not in fed for box in range(size)]
    for u, v in sorted(edges):
        row[v] = max(row[v], row[u] + 1)
        source[v] = False
    for u, v in edges:
        last[u] = row[v] - 1 if last[u] < 0 else min(last[u], row[v] - 1)
    return [last[box] if source[box] and last[box] >= 0 else row[box] for box in range(size)]


def stacked(row: Sequence[int], tied: Collection[int]) -> list[int]:
    """Rows in which boxes without any edge lie below each other beside the others, instead of all in the first row.

    Args:
        row: of each box.
        tied: boxes with edges; their rows stay.

    >>> stacked([0, 1, 2, 0, 0, 0, 0], {0, 1, 2})
    [0, 1, 2, 0, 0, 1, 1]
    >>> stacked([0, 0, 0, 0], ())
    [0, 0, 1, 1]
    """
    free = [box for box in range(len(row)) if box not in tied]
    found = list(row)
    if free:
        tall = max(max((row[box] for box in tied), default=-1) + 1, math.isqrt(len(free) - 1) + 1)
        abreast = -(-len(free) // tall)
        for place, box in enumerate(free):
            found[box] = place // abreast
    return found


def order(row: Sequence[int], links: Sequence[tuple[int, int]], width: Sequence[float]) -> list[float]:
    """Positions of boxes in their rows: neighbours are at least half of both their widths apart.

    By the method of Sugiyama, Tagawa and Toda (1981): sweeps down and up pull each box towards the mean of its
    neighbours, its row is put in that order, and the row is spread as little as needed (least squares). Ties keep
    the order of the indices.

    Args:
        row: row of each box.
        links: ``(u, v)`` with row[u] < row[v].
        width: width of each box.

    Returns:
        The middle of each box. O((boxes + links) · log boxes).

    >>> order([0, 1, 1, 2], [(0, 1), (0, 2), (1, 3), (2, 3)], [1.0] * 4)
    [0.0, -0.5, 0.5, 0.0]
    """
    before: list[list[int]] = [[] for _ in row]
    after: list[list[int]] = [[] for _ in row]
    for u, v in sorted(links):
        before[v].append(u)
        after[u].append(v)
    rows: list[list[int]] = [[] for _ in range(max(row, default=-1) + 1)]
    for box, line in enumerate(row):
        rows[line].append(box)
    position = [0.0] * len(row)
    for members in rows:
        for box, place in zip(members, spread_row([0.0] * len(members), [width[box] for box in members]), strict=True):
            position[box] = place
    for sweep in range(_SWEEPS):
        near, lines = (before, rows) if sweep % 2 == 0 else (after, list(reversed(rows)))
        for members in lines:
            wanted = {
                box: sum(position[other] for other in near[box]) / len(near[box]) if near[box] else position[box]
                for box in members
            }
            members.sort(key=lambda box: (wanted[box], position[box], box))
            places = spread_row([wanted[box] for box in members], [width[box] for box in members])
            for box, place in zip(members, places, strict=True):
                position[box] = place
    return position


def spread_row(wanted: Sequence[float], width: Sequence[float]) -> list[float]:
    """Places in order, nearest to ``wanted`` in least squares, so that boxes of these widths do not overlap.

    Pooling of adjacent violators, O(boxes).

    >>> spread_row([0.0, 0.0, 5.0], [1.0, 1.0, 1.0])
    [-0.5, 0.5, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    offsets: list[float] = []
    for slot, place in enumerate(wanted):
        offsets.append(offsets[-1] + (width[slot - 1] + width[slot]) / 2 if slot else 0.0)
        mean, count = place - offsets[slot], 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    spread = [mean for mean, count in blocks for _ in range(count)]
    return [place + offset for place, offset in zip(spread, offsets, strict=True)]


def lay_out(boxes: Boxes, edges: Sequence[tuple[int, int]]) -> Layout:
    """Rows, positions and lanes of each group by itself.

    Args:
        boxes: calls and groups.
        edges: ``(producer, consumer)`` with producer < consumer.

    Returns:
        The layout. The shortest lanes come first until there are twice as many places as calls, and 4,000 more;
        what is longer gets none. O((calls + edges) · (depth + log calls)).
    """
    parent, total = boxes.parent, len(boxes.parent)
    start = [*range(boxes.calls), *boxes.first]
    inside: dict[int, list[int]] = {}
    for box in sorted(range(total), key=lambda box: start[box]):
        inside.setdefault(parent[box], []).append(box)
    depth = [0] * total
    for box in [*range(boxes.calls, total), *range(boxes.calls)]:
        depth[box] = depth[parent[box]] + 1 if parent[box] >= 0 else 0

    between: dict[int, set[tuple[int, int]]] = {}
    holds: dict[tuple[int, int], int] = {}
    leaves: set[tuple[int, int]] = set()
    fed: set[int] = set()
    targets: dict[tuple[int, int], set[int]] = {}
    for producer, consumer in edges:
        u, v = producer, consumer
        while parent[u] != parent[v]:
            if depth[u] >= depth[v]:
                holds[parent[u], producer] = u
                leaves.add((parent[u], producer))
                u = parent[u]
            else:
                targets.setdefault((parent[v], producer), set()).add(v)
                fed.add(v)
                v = parent[v]
        holds[parent[u], producer] = u
        targets.setdefault((parent[u], producer), set()).add(v)
        between.setdefault(parent[u], set()).add((u, v))

    leaving = {(key[0], holds[key]) for key in leaves if key in holds}
    row, height = [0] * total, dict[int, int]()
    for around, members in inside.items():
        local = {box: index for index, box in enumerate(members)}
        pairs = [(local[u], local[v]) for u, v in between.get(around, ())]
        lines = layers(len(members), pairs, {local[box] for box in members if box in fed})
        tied = {end for pair in pairs for end in pair}
        tied |= {local[box] for box in members if box in fed or (around, box) in leaving}
        lines = stacked(lines, tied)
        for box, line in zip(members, lines, strict=True):
            row[box] = line
        height[around] = max(lines) + 1

    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for key in targets.keys() | leaves:
        begin = row[holds[key]] + 1 if key in holds else 0
        end = height[key[0]] if key in leaves else max(row[box] for box in targets[key])
        spans[key] = (begin, end)
    budget, chosen = 2 * boxes.calls + 4_000, dict[int, list[tuple[int, int, int]]]()
    for key in sorted(spans, key=lambda key: (spans[key][1] - spans[key][0], key)):
        begin, end = spans[key]
        budget -= end - begin
        if budget < 0:
            break
        if begin < end:
            chosen.setdefault(key[0], []).append((key[1], begin, end))

    position, lanes = [0.0] * total, list[Lane]()
    for around, members in inside.items():
        local = {box: index for index, box in enumerate(members)}
        lines, width = [row[box] for box in members], [1.0] * len(members)
        links = {(local[u], local[v]) for u, v in between.get(around, ()) if row[v] == row[u] + 1}
        placed = []
        for source, begin, end in sorted(chosen.get(around, ())):
            key, node = (around, source), len(lines)
            lines.extend(range(begin, end))
            width.extend([_LANE_WIDTH] * (end - begin))
            links.update((at, at + 1) for at in range(node, node + end - begin - 1))
            if key in holds:
                links.add((local[holds[key]], node))
            for box in targets.get(key, ()):
                if begin < row[box]:
                    links.add((node + row[box] - 1 - begin, local[box]))
            placed.append((source, begin, node, node + end - begin))
        places = order(lines, sorted(links), width)
        for box, place in zip(members, places, strict=False):
            position[box] = place
        lanes.extend(Lane(source, around, begin, tuple(places[node:stop])) for source, begin, node, stop in placed)
    return Layout(tuple(row), tuple(position), tuple(lanes))
