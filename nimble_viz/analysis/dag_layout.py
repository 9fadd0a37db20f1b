"""Group calls into nested boxes, modules as contiguous runs of calls, and lay these out.

All edges point from lower to higher index, so contracting any run of neighbouring calls leaves a DAG.

Each group is laid out once, whatever is folded elsewhere: the viewer only places boxes of known rows and order beside
and below each other. An edge that passes rows of a group runs through a lane there, a chain of places one row each,
kept free of boxes. All edges from one call share their lanes, so they look like one line that branches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Boxes", "Lane", "Layout", "components", "lay_out", "layers", "nest", "order", "spread_row", "stacked"]

_SWEEPS = 4
_LANE_WIDTH = 0.15
_MORE_PLACES = 4_000

_Source = tuple[int, int]
"""A group (-1: the outermost boxes), and a call whose edges run through it."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Calls ``0 … calls-1``, and groups after them with first and last call, as one forest (``parent`` -1: none)."""

    calls: int
    parent: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    name: tuple[str, ...]


def components(module: str) -> tuple[str, ...]:
    """Split a module path into steps; an index, or several, stays with the list it indexes.

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
    """Group neighbouring calls by module path, step by step; where there are ``phases``, they are the outermost groups.

    No group holds one call, or all calls of its parent: such a step is said in the parent's name, unless that is a
    phase; one that holds all calls vanishes. A group's number is higher than its parent's. O(calls × depth).

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
        deeper = []
        for start, stop in _runs(paths, begin, end, depth):
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


def _runs(paths: Sequence[tuple[str, ...]], begin: int, end: int, depth: int) -> list[tuple[int, int]]:
    """Split ``begin`` to ``end`` into stretches of one step at ``depth``; a path that ends above it stands alone."""
    runs = []
    at = begin
    while at < end:
        stop = at + 1
        if len(paths[at]) > depth:
            step = paths[at][depth]
            while stop < end and len(paths[stop]) > depth and paths[stop][depth] == step:
                stop += 1
        runs.append((at, stop))
        at = stop
    return runs


@dataclass(frozen=True, slots=True)
class Lane:
    """Places that the edges from call ``source`` hold free in rows ``first``, … of one group (-1: the outermost)."""

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


@dataclass(slots=True)
class _Routes:
    """The way of every edge through the groups, from its producer up and down to its consumer."""

    inside: dict[int, list[int]] = field(default_factory=dict)  # boxes of each group, in program order
    between: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # edges between boxes of each group
    holds: dict[_Source, int] = field(default_factory=dict)  # the box of a group that a source is in
    leaves: set[_Source] = field(default_factory=set)  # sources whose edges leave the group
    targets: dict[_Source, set[int]] = field(default_factory=dict)  # boxes of a group that edges of a source lead to
    fed: set[int] = field(default_factory=set)  # boxes that edges enter from outside their group


def lay_out(boxes: Boxes, edges: Sequence[tuple[int, int]]) -> Layout:
    """Find rows, positions and lanes of each group by itself.

    Args:
        boxes: calls and groups.
        edges: ``(producer, consumer)`` with producer < consumer.

    Returns:
        The layout. The shortest lanes come first until there are twice as many places as calls, and 4,000 more;
        what is longer gets none. O((calls + edges) · (depth + log calls)).
    """
    routes = _routes(boxes, edges)
    row, height = _rows(routes, len(boxes.parent))
    passed = _passed_rows(routes, row, height, 2 * boxes.calls + _MORE_PLACES)
    position, lanes = [0.0] * len(boxes.parent), list[Lane]()
    for group in routes.inside:
        lanes += _place(routes, group, row, passed.get(group, ()), position)
    return Layout(tuple(row), tuple(position), tuple(lanes))


def _routes(boxes: Boxes, edges: Sequence[tuple[int, int]]) -> _Routes:
    parent, total, found = boxes.parent, len(boxes.parent), _Routes()
    start = [*range(boxes.calls), *boxes.first]
    for box in sorted(range(total), key=lambda box: start[box]):
        found.inside.setdefault(parent[box], []).append(box)
    depth = [0] * total
    for box in [*range(boxes.calls, total), *range(boxes.calls)]:
        depth[box] = depth[parent[box]] + 1 if parent[box] >= 0 else 0
    for producer, consumer in edges:
        u, v = producer, consumer
        while parent[u] != parent[v]:
            if depth[u] >= depth[v]:
                found.holds[parent[u], producer] = u
                found.leaves.add((parent[u], producer))
                u = parent[u]
            else:
                found.targets.setdefault((parent[v], producer), set()).add(v)
                found.fed.add(v)
                v = parent[v]
        found.holds[parent[u], producer] = u
        found.targets.setdefault((parent[u], producer), set()).add(v)
        found.between.setdefault(parent[u], set()).add((u, v))
    return found


def _rows(routes: _Routes, total: int) -> tuple[list[int], dict[int, int]]:
    """Return the row of each box in its group, and the number of rows of each group."""
    leaving = {(source[0], routes.holds[source]) for source in routes.leaves if source in routes.holds}
    row, height = [0] * total, dict[int, int]()
    for group, members in routes.inside.items():
        local = {box: index for index, box in enumerate(members)}
        pairs = [(local[u], local[v]) for u, v in routes.between.get(group, ())]
        lines = layers(len(members), pairs, {local[box] for box in members if box in routes.fed})
        tied = {end for pair in pairs for end in pair}
        tied |= {local[box] for box in members if box in routes.fed or (group, box) in leaving}
        lines = stacked(lines, tied)
        for box, line in zip(members, lines, strict=True):
            row[box] = line
        height[group] = max(lines) + 1
    return row, height


def _passed_rows(
    routes: _Routes, row: Sequence[int], height: Mapping[int, int], budget: int
) -> dict[int, list[tuple[int, int, int]]]:
    """List by group ``(call, first row, one past the last)`` of the lanes that fit into ``budget`` places."""
    spans: dict[_Source, tuple[int, int]] = {}
    for source in routes.targets.keys() | routes.leaves:
        begin = row[routes.holds[source]] + 1 if source in routes.holds else 0
        end = height[source[0]] if source in routes.leaves else max(row[box] for box in routes.targets[source])
        spans[source] = (begin, end)
    chosen: dict[int, list[tuple[int, int, int]]] = {}
    for source in sorted(spans, key=lambda source: (spans[source][1] - spans[source][0], source)):
        begin, end = spans[source]
        budget -= end - begin
        if budget < 0:
            break
        if begin < end:
            chosen.setdefault(source[0], []).append((source[1], begin, end))
    return chosen


def _place(
    routes: _Routes, group: int, row: Sequence[int], passed: Sequence[tuple[int, int, int]], position: list[float]
) -> list[Lane]:
    """Order one group; write its boxes' places to ``position`` and return its lanes."""
    members = routes.inside[group]
    local = {box: index for index, box in enumerate(members)}
    lines, width = [row[box] for box in members], [1.0] * len(members)
    links = {(local[u], local[v]) for u, v in routes.between.get(group, ()) if row[v] == row[u] + 1}
    placed = []
    for call, begin, end in sorted(passed):
        source, node = (group, call), len(lines)
        lines.extend(range(begin, end))
        width.extend([_LANE_WIDTH] * (end - begin))
        links.update((at, at + 1) for at in range(node, node + end - begin - 1))
        if source in routes.holds:
            links.add((local[routes.holds[source]], node))
        for box in routes.targets.get(source, ()):
            if begin < row[box]:
                links.add((node + row[box] - 1 - begin, local[box]))
        placed.append((call, begin, node, node + end - begin))
    places = order(lines, sorted(links), width)
    for box, place in zip(members, places, strict=False):
        position[box] = place
    return [Lane(call, group, begin, tuple(places[node:stop])) for call, begin, node, stop in placed]


def layers(size: int, edges: Sequence[tuple[int, int]], fed: Collection[int] = ()) -> list[int]:
    """Return the row of each box, 0 on top: its longest path; a source sinks to just above its first reader.

    Edges are ``(u, v)`` with u < v. Boxes that are ``fed`` from outside do not sink. O(boxes + edges · log edges).

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
    """Move boxes without any edge (not ``tied``) below each other, beside the others, not all into the first row.

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
    """Position boxes in their rows: neighbours are at least half of both their widths apart.

    By the method of Sugiyama, Tagawa and Toda (1981): sweeps down and up pull each box towards the mean of its
    neighbours, its row is put in that order, and the row is spread as little as needed (least squares). Ties keep
    the order of the indices. Links ``(u, v)`` have row[u] < row[v]. Returns the middle of each box.
    O((boxes + links) · log boxes).

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
    """Find places in order, nearest to ``wanted`` in least squares, without overlap.

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
