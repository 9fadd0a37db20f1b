"""Longest weighted paths: what no schedule can beat, and how soon each call could run."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["critical_path", "earliest_times", "longest_behind"]


def earliest_times(predecessors: Sequence[Sequence[int]], ns: Sequence[float]) -> tuple[list[float], list[float]]:
    """Earliest start and end of each call, were there no limit but the graph.

    Args:
        predecessors: direct predecessors of each call, all of a lower index.
        ns: duration of each call, nanoseconds.

    >>> earliest_times([[], [0], [0], [1, 2], [3]], [1, 2, 3, 1, 1])
    ([0.0, 1.0, 1.0, 4.0, 5.0], [1.0, 3.0, 4.0, 5.0, 6.0])
    """
    start = [0.0] * len(predecessors)
    end = [0.0] * len(predecessors)
    for call, sources in enumerate(predecessors):
        begin = 0.0
        for source in sources:
            if end[source] > begin:
                begin = end[source]
        start[call] = begin
        end[call] = begin + ns[call]
    return start, end


def longest_behind(successors: Sequence[Sequence[int]], ns: Sequence[float], *, sync_ns: float = 0.0) -> list[float]:
    """Longest path from the start of each call to the end of all: its own duration and what must come after.

    With ``sync_ns``, of a call's successors the one with the longest path goes on where the call ran, and every other
    is reached across streams, that much later: a fork leaves room for one successor only.

    Args:
        successors: direct successors of each call, each once, all of a higher index.
        ns: duration of each call, nanoseconds, not negative.
        sync_ns: what an edge across streams costs, nanoseconds.

    Complexity:
        O(calls + edges).

    >>> longest_behind([[1, 2], [3], [3], [4], []], [1, 2, 3, 1, 1])
    [6.0, 4.0, 5.0, 2.0, 1.0]
    >>> longest_behind([[1, 2], [3], [3], [4], []], [1, 2, 3, 1, 1], sync_ns=4)
    [9.0, 4.0, 5.0, 2.0, 1.0]
    """
    behind = [0.0] * len(successors)
    for call in reversed(range(len(successors))):
        first = second = 0.0
        for follower in successors[call]:
            path = behind[follower]
            if path > first:
                first, second = path, first
            elif path > second:
                second = path
        behind[call] = ns[call] + (max(first, second + sync_ns) if len(successors[call]) > 1 else first)
    return behind


def critical_path(predecessors: Sequence[Sequence[int]], ns: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Length in nanoseconds and calls of the longest path; of equal ones, that through the lowest indices.

    Args:
        predecessors: direct predecessors of each call, all of a lower index.
        ns: duration of each call, nanoseconds, not negative.

    Complexity:
        O(calls + edges).

    >>> critical_path([[], [0], [0], [1, 2], [3]], [1, 2, 3, 1, 1])
    (6.0, (0, 2, 3, 4))
    """
    if not predecessors:
        return 0.0, ()
    _, end = earliest_times(predecessors, ns)
    call = max(range(len(end)), key=lambda index: (end[index], -index))
    path = [call]
    while predecessors[call]:
        call = max(predecessors[call], key=lambda index: (end[index], -index))
        path.append(call)
    return end[path[0]], tuple(reversed(path))
