"""How many calls of a DAG are independent of one another: exactly for small graphs, from below for large ones."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_core.algorithms.matching import maximum_matching
from nimble_core.algorithms.reachability import ancestors

__all__ = ["level_width", "width"]


def level_width(predecessors: Sequence[Sequence[int]]) -> int:
    """A lower bound of the width: the most calls on one level (equal longest distance from a source), O(edges).

    >>> level_width([[], [0], [0], [1, 2], [3]])
    2
    """
    level = [0] * len(predecessors)
    counts: dict[int, int] = {}
    for call, sources in enumerate(predecessors):
        level[call] = max((level[source] + 1 for source in sources), default=0)
        counts[level[call]] = counts.get(level[call], 0) + 1
    return max(counts.values(), default=0)


def width(predecessors: Sequence[Sequence[int]]) -> int:
    """The size of the largest set of calls of which none must wait for another.

    By Dilworth's theorem the fewest chains of the transitive closure that cover all calls, found by a matching on
    the whole closure: meant for graphs of up to a few thousand calls.

    Complexity:
        O(n²) memory, O(n^2.5) time.

    >>> width([[], [0], [0], [1, 2], [3]])
    2
    """
    size = len(predecessors)
    closure: list[list[int]] = [[] for _ in range(size)]
    for call, known in enumerate(ancestors(predecessors, range(size))):
        while known:
            source = known.bit_length() - 1
            closure[source].append(call)
            known ^= 1 << source
    return size - sum(partner >= 0 for partner in maximum_matching(closure))
