"""The DAG as nested boxes: modules as contiguous runs of calls, each laid out in layers of its own.

A box is a call or a group of calls. Groups are runs of neighbouring calls of one module, so contracting any of them
leaves a DAG (all edges point from lower to higher index), and each group is laid out once, whatever is folded
elsewhere: the viewer only places boxes of known rows and positions beside and below each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nimble_viz.report import Report
from nimble_viz.views.summary import label_run

__all__ = ["Boxes", "components", "dag", "layered", "nest", "spread_row"]

_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Boxes:
    """Calls ``0 … calls-1`` and groups ``calls … calls+groups-1``, as one forest.

    Args:
        calls: number of calls.
        parent: box that holds each box, -1 for the outermost.
        first: first call of each group, and
        last: its last call, both included.
        name: module path of each group, relative to the group around it.
    """

    calls: int
    parent: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    name: tuple[str, ...]


def dag(report: Report) -> dict[str, Any]:
    """Boxes with their rows and positions, edges, critical path and plans, as columns."""
    graph, calls = report.graph, report.program.calls
    boxes = nest([call.module for call in calls])
    row, position = _place(boxes, graph.meg)
    labels = [call.label for call in calls]
    shapes = [tuple(labels[first : last + 1]) for first, last in zip(boxes.first, boxes.last, strict=True)]
    alike = Counter(shapes)
    minimum = frozenset(graph.meg)
    return {
        "columns": {
            "parent": boxes.parent,
            "row": row,
            "position": [round(100 * value) for value in position],
            "first": boxes.first,
            "last": boxes.last,
            "name": boxes.name,
            "alike": [alike[shape] for shape in shapes],
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
    }


def components(module: str) -> tuple[str, ...]:
    """Steps of a module path; an index stays with the list it indexes.

    >>> components("encoder.layer.0.output")
    ('encoder', 'layer.0', 'output')
    """
    steps: list[str] = []
    for part in module.split(".") if module else ():
        if part.isdecimal() and steps:
            steps[-1] += f".{part}"
        else:
            steps.append(part)
    return tuple(steps)


def nest(modules: Sequence[str]) -> Boxes:
    """Group neighbouring calls by module path, step by step; groups of one call, or of all of their parent, vanish.

    Args:
        modules: module path of each call, in program order.

    Returns:
        The boxes; a group's number is higher than that of the group around it. O(calls × depth).

    >>> nest(["a.x", "a.x", "a.y", "b"]).name
    ('a', 'x')
    """
    paths = [components(module) for module in modules]
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
            else:
                parent.append(around)
                first.append(start)
                last.append(stop - 1)
                name.append(paths[start][depth])
                deeper.append((start, stop, depth + 1, len(parent) - 1))
        pending.extend(reversed(deeper))
    return Boxes(size, tuple(parent), tuple(first), tuple(last), tuple(name))


def layered(size: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Rows and positions of a DAG of unit boxes: neighbours in a row are at least 1 apart.

    Rows are longest paths from the sources. Positions follow the method of Sugiyama, Tagawa and Toda (1981):
    sweeps down and up pull each box towards the mean of its neighbours, its row is put in that order, and the row
    is spread as little as needed (least squares). Ties keep the order of the indices.

    Args:
        size: number of boxes.
        edges: ``(u, v)`` with u < v.

    Returns:
        ``(row, position)`` of each box. O((boxes + edges) · log boxes).

    >>> layered(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    ([0, 1, 1, 2], [0.0, -0.5, 0.5, 0.0])
    """
    before: list[list[int]] = [[] for _ in range(size)]
    after: list[list[int]] = [[] for _ in range(size)]
    row = [0] * size
    for u, v in sorted(edges):
        before[v].append(u)
        after[u].append(v)
        row[v] = max(row[v], row[u] + 1)
    rows: list[list[int]] = [[] for _ in range(max(row, default=-1) + 1)]
    for box in range(size):
        rows[row[box]].append(box)
    position = [0.0] * size
    for members in rows:
        for slot, box in enumerate(members):
            position[box] = slot - (len(members) - 1) / 2
    for sweep in range(_SWEEPS):
        near, line = (before, rows) if sweep % 2 == 0 else (after, list(reversed(rows)))
        for members in line:
            wanted = {
                box: sum(position[other] for other in near[box]) / len(near[box]) if near[box] else position[box]
                for box in members
            }
            members.sort(key=lambda box: (wanted[box], position[box], box))
            for box, place in zip(members, spread_row([wanted[box] for box in members]), strict=True):
                position[box] = place
    return row, position


def spread_row(wanted: Sequence[float]) -> list[float]:
    """Places at least 1 apart, in order, nearest to ``wanted`` in least squares (pooling adjacent violators).

    >>> spread_row([0.0, 0.0, 5.0])
    [-0.5, 0.5, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for slot, place in enumerate(wanted):
        mean, count = place - slot, 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    spread = [mean for mean, count in blocks for _ in range(count)]
    return [place + slot for slot, place in enumerate(spread)]


def _place(boxes: Boxes, meg: Sequence[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Row and position of each box within the box around it."""
    parent = boxes.parent
    start = [*range(boxes.calls), *boxes.first]
    inside: dict[int, list[int]] = {}
    for box in sorted(range(len(parent)), key=lambda box: start[box]):
        inside.setdefault(parent[box], []).append(box)
    depth = [0] * len(parent)
    for box in [*range(boxes.calls, len(parent)), *range(boxes.calls)]:
        depth[box] = depth[parent[box]] + 1 if parent[box] >= 0 else 0
    between: dict[int, set[tuple[int, int]]] = {}
    for producer, consumer in meg:
        u, v = producer, consumer
        while parent[u] != parent[v]:
            if depth[u] >= depth[v]:
                u = parent[u]
            else:
                v = parent[v]
        between.setdefault(parent[u], set()).add((u, v))
    row, position = [0] * len(parent), [0.0] * len(parent)
    for around, members in inside.items():
        local = {box: index for index, box in enumerate(members)}
        edges = [(local[u], local[v]) for u, v in between.get(around, ())]
        rows, places = layered(len(members), edges)
        for box, line, place in zip(members, rows, places, strict=True):
            row[box], position[box] = line, place
    return row, position
