"""Issue order: which call goes first where several on one stream could."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from nimble_core.algorithms.critical_path import longest_behind
from nimble_core.algorithms.reachability import successor_lists

__all__ = ["list_order", "run_order"]


def list_order(
    predecessors: Sequence[Sequence[int]],
    stream: Sequence[int],
    ns: Sequence[float],
    *,
    rank: Sequence[float] | None = None,
) -> list[int]:
    """Order calls by when list scheduling starts them on their given streams.

    A free stream takes, of its calls whose predecessors have ended, the one of lowest rank. Program order instead can
    leave a stream waiting at a call while others behind it could run.

    Args:
        predecessors: of each call, all of lower index.
        stream: of each call, 0-based.
        ns: duration of each call.
        rank: of each call, lower goes first; by the longest path behind the call if None.

    Returns:
        Call indices; a topological order. O((calls + edges) log calls).

    Source:
        Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969); Hu's rule (1961).

    >>> list_order([[], [0], [], [2]], [0, 1, 1, 0], [9.0, 1.0, 2.0, 1.0])
    [0, 2, 3, 1]
    """
    successors = _successors(predecessors)
    if rank is None:
        rank = [-behind for behind in longest_behind(successors, ns)]
    missing = [len(before) for before in predecessors]
    ready: list[list[tuple[float, int]]] = [[] for _ in range(max(stream, default=-1) + 1)]
    for call, count in enumerate(missing):
        if not count:
            heapq.heappush(ready[stream[call]], (rank[call], call))
    busy = [False] * len(ready)
    order: list[int] = []
    ends: list[tuple[float, int, int]] = []  # (time, position in order, call)
    now, woken = 0.0, list(range(len(ready)))
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
                    heapq.heappush(ready[stream[v]], (rank[v], v))
                    touched.add(stream[v])
        woken = sorted(touched)


def _successors(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    edges = ((source, node) for node, before in enumerate(predecessors) for source in before)
    return successor_lists(len(predecessors), edges)


def run_order(order: Sequence[int], stream: Sequence[int], syncs: Sequence[tuple[int, int]]) -> list[int]:
    """Issue calls in runs: what a stream does between two waits goes out as a whole, runs by their first calls.

    A wait ends a run on both sides: before the call that waits, and after the call that is waited for. Replays of large
    CUDA graphs start sooner that way than if calls of all streams are issued in turn, and a run that is far behind in
    the given order still is.

    Args:
        order: call indices as they were to be issued: topological, waits included.
        stream: of each call, 0-based.
        syncs: ``(producer, consumer)`` pairs on different streams.

    Returns:
        Call indices; a topological order in which calls of one stream follow each other as before.

    Complexity:
        O((calls + syncs) log calls).

    >>> run_order([0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1], [(2, 5)])
    [0, 2, 1, 3, 4, 5]
    """
    waits = {consumer for _, consumer in syncs}
    awaited = {producer for producer, _ in syncs}
    runs: list[list[int]] = []
    run_of = [0] * len(stream)
    latest: dict[int, int] = {}
    before: list[set[int]] = []
    for call in order:
        lane = stream[call]
        previous = latest.get(lane)
        if previous is not None and call not in waits and runs[previous][-1] not in awaited:
            run_of[call] = previous
            runs[previous].append(call)
            continue
        run_of[call] = latest[lane] = len(runs)
        runs.append([call])
        before.append(set() if previous is None else {previous})
    for producer, consumer in syncs:
        before[run_of[consumer]].add(run_of[producer])
    after = _successors([sorted(sources) for sources in before])
    missing = [len(sources) for sources in before]
    ready = [run for run, count in enumerate(missing) if not count]
    issued: list[int] = []
    while ready:
        run = heapq.heappop(ready)
        issued += runs[run]
        for following in after[run]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, following)
    return issued
