"""A graph launched in parts: the first calls run while the host still launches the rest.

Launching a graph of many streams takes the host some 0.2 µs a node, and the device waits for it. Parts wait for each
other as a whole, so a cut costs what could have run across it: cuts are made where few results are on their way.
"""

from __future__ import annotations

from itertools import pairwise

from nimble_core.graph import CallGraph
from nimble_core.schedule import Schedule

__all__ = ["ways_to_launch"]

_SHARES = ((0.25,), (0.1,), (0.05, 0.25), (0.1, 0.35), (0.03, 0.1, 0.35))
"""Of the calls, that come before each cut. Parts grow: each is to run for as long as the next one takes to launch."""
_SLACK = 0.3
"""How far a cut may lie from there, as a share of the calls before it."""
_FEWEST = 48
"""Graphs of fewer calls are launched before anything could be gained."""


def ways_to_launch(graph: CallGraph, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Values of ``Schedule.launches`` that may be faster than one launch; none for few calls, or one stream.

    Args:
        graph: hazards between the calls.
        schedule: of them.

    Complexity:
        Linear in calls and hazards.

    >>> from nimble_core.graph import graph_from_edges
    >>> from nimble_core.policies import plan_streams
    >>> pairs = [(at, to) for at in range(0, 100, 2) for to in (at + 1, at + 2, at + 3) if to < 100]
    >>> ladder = graph_from_edges(100, pairs)
    >>> ways_to_launch(ladder, plan_streams(ladder, [call % 2 for call in range(100)], policy="mine"))[0]
    (24,)
    """
    size = graph.size
    if size < _FEWEST or schedule.streams < 2:
        return ()
    wanted = _results_wanted(graph, schedule)
    found: dict[tuple[int, ...], None] = {}
    for shares in _SHARES:
        cuts = tuple(_near(wanted, max(1, round(share * size))) for share in shares)
        if all(a < b for a, b in pairwise((0, *cuts, size))):
            found[cuts] = None
    return tuple(found)


def _results_wanted(graph: CallGraph, schedule: Schedule) -> list[int]:
    """How many calls before each position of the order one at it, or later, has to wait for."""
    position = {call: at for at, call in enumerate(schedule.order)}
    last = list(range(graph.size))
    for u, v in graph.edges:
        last[position[u]] = max(last[position[u]], position[v])
    steps = [0] * (graph.size + 2)
    for at, until in enumerate(last):
        steps[at + 1] += 1
        steps[until + 1] -= 1
    wanted, found = 0, []
    for step in steps[: graph.size]:
        wanted += step
        found.append(wanted)
    return found


def _near(wanted: list[int], at: int) -> int:
    """The best position for a cut around one."""
    reach = int(_SLACK * at)
    return min(range(max(1, at - reach), min(len(wanted), at + reach + 1)), key=lambda p: (wanted[p], abs(p - at), p))
