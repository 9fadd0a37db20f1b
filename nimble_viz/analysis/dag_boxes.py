"""Group the calls of a program into nested boxes: modules as contiguous runs of calls.

All edges point from lower to higher index, so contracting any run of neighbouring calls leaves a DAG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Boxes", "components", "nest"]


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
    """Group neighbouring calls by module path, step by step.

    No groups of one call, or of all calls of their parent.

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
    """Split ``begin`` to ``end`` into stretches of one step at ``depth``.

    A path that ends above it stands alone.
    """
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
