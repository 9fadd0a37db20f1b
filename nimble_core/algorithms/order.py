"""Issue order: which call goes first where several on one stream could."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["list_order"]


def list_order(predecessors: Sequence[Sequence[int]], stream: Sequence[int], ns: Sequence[float]) -> list[int]:
    """Order calls by when list scheduling starts them on their given streams.

    Whenever a stream is free it takes, of its calls whose predecessors have ended, the one with the longest path
    behind it. Program order instead can leave a stream waiting at a call while others behind it could run.

    Args:
        predecessors: of each call, all of lower index.
        stream: of each call, 0-based.
        ns: duration of each call.

    Returns:
        Call indices; a topological order.

    Complexity:
        O((calls + edges) log calls).

    Source:
        Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969); longest path first is
        Hu's rule (1961).

    >>> list_order([[], [0], [], [2]], [0, 1, 1, 0], [9.0, 1.0, 2.0, 1.0])
    [0, 2, 3, 1]
    """
    size = len(stream)
    successors: list[list[int]] = [[] for _ in range(size)]
    for call, before in enumerate(predecessors):
        for u in before:
            successors[u].append(call)
    behind = [0.0] * size
    for call in reversed(range(size)):
        behind[call] = ns[call] + max((behind[v] for v in successors[call]), default=0.0)
    missing = [len(before) for before in predecessors]
    ready: list[list[tuple[float, int]]] = [[] for _ in range(max(stream, default=-1) + 1)]
    busy = [False] * len(ready)
    for call in range(size):
        if not missing[call]:
            heapq.heappush(ready[stream[call]], (-behind[call], call))
    order: list[int] = []
    ends: list[tuple[float, int, int]] = []  # (time, position in order, call)
    now = 0.0
    woken = list(range(len(ready)))
    while True:
        for lane in woken:
            if ready[lane] and not busy[lane]:
                _, call = heapq.heappop(ready[lane])
                busy[lane] = True
                heapq.heappush(ends, (now + ns[call], len(order), call))
                order.append(call)
        if not ends:
            return order
        now = ends[0][0]
        touched = set()
        while ends and ends[0][0] == now:
            _, _, call = heapq.heappop(ends)
            busy[stream[call]] = False
            touched.add(stream[call])
            for v in successors[call]:
                missing[v] -= 1
                if not missing[v]:
                    heapq.heappush(ready[stream[v]], (-behind[v], v))
                    touched.add(stream[v])
        woken = sorted(touched)
