"""List scheduling on measured durations: longest path first, each call where it starts soonest."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import median

from nimble_core.algorithms.critical_path import longest_behind
from nimble_core.ir.call_graph import CallGraph, predecessors, successors
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies.base import plan_streams, require_fit

__all__ = ["SYNC_COST_NS", "critical_path"]

SYNC_COST_NS = 1500.0
"""What a wait across streams adds, nanoseconds. Measured in graph replays on an H200: a kernel starts 0.45 us after its
predecessor on the same stream, and 1.3 to 4 us after one on another stream."""


def critical_path(
    graph: CallGraph, costs: Costs, *, max_streams: int | None = None, sync_cost_ns: float | None = None
) -> Schedule:
    """Whenever a stream is idle, plan the ready call with the longest path behind it (syncs at forks included) next.

    It goes to the stream where it starts soonest, a wait across streams included: to that of a predecessor, of several
    to that of the one that ends last, unless an idle stream, or a new one, lets it start sooner in spite of the wait.
    Short side calls thus queue on their own stream, where crossing would take longer; but on a stream whose last call
    has a more urgent successor still to come, a call counts as starting a sync later, as that is what it would cost
    the successor. A plan that would take longer than one stream is dropped for one stream: simulated with the same
    sync cost, the result is never slower than policy ``single``.

    Args:
        graph: the hazards.
        costs: duration of each call.
        max_streams: most streams to use, at least 1; None for as many as let a call start sooner.
        sync_cost_ns: what a wait across streams costs; None for ``SYNC_COST_NS``, or, where ``costs`` were never
            measured (source ``"uniform"``), half the median cost if that is less: a unit of their own that a time in
            nanoseconds must not dwarf.

    Raises:
        InputError: ``max_streams`` below 1, or costs of another number of calls.

    Complexity:
        O((calls + edges) log calls), and one bitset pass where waits are made the fewest.

    Source:
        Adam, Chandy, Dickson, "A Comparison of List Schedules for Parallel Processing Systems", CACM 17 (1974): highest
        level first with estimated times (HLFET). Topcuoglu, Hariri, Wu, "Performance-Effective and Low-Complexity Task
        Scheduling for Heterogeneous Computing", IEEE TPDS 13 (2002): communication cost in rank and start (HEFT).

    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> graph = graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])
    >>> critical_path(graph, Costs((9.0, 9.0, 4.0, 1.0, 1.0), "given"), sync_cost_ns=2.0).stream
    (0, 0, 1, 0, 0)
    >>> critical_path(graph, Costs((9.0, 1.0, 1.0, 1.0, 1.0), "given"), sync_cost_ns=2.0).stream
    (0, 0, 0, 0, 0)
    """
    require_fit(graph, costs, max_streams)
    sync_ns = _default_sync_ns(costs) if sync_cost_ns is None else sync_cost_ns
    before, after = predecessors(graph, meg=True), successors(graph, meg=True)
    stream, start_ns, order = _place(before, after, costs.ns, sync_ns, max_streams)
    one_stream_ns = 0.0
    for ns in costs.ns:
        one_stream_ns += ns
    if max((start_ns[call] + costs.ns[call] for call in order), default=0.0) > one_stream_ns:
        return plan_streams(graph, [0] * graph.size, policy="critical_path")
    # Sorting is stable: calls that start at one time stay as they were placed, predecessors first.
    order.sort(key=start_ns.__getitem__)
    return plan_streams(graph, stream, policy="critical_path", order=order)


def _default_sync_ns(costs: Costs) -> float:
    if costs.source == "uniform" and costs.ns:
        return min(SYNC_COST_NS, median(costs.ns) / 2)
    return SYNC_COST_NS


def _place(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    ns: Sequence[float],
    sync_ns: float,
    cap: int | None,
) -> tuple[list[int], list[float], list[int]]:
    """Return stream and start of each call, and the order in which they were placed."""
    size = len(before)
    behind = longest_behind(after, ns, sync_ns=sync_ns)
    # Of a call's successors the most urgent: it should find the call's stream free.
    heir = [max(followers, key=lambda v: (behind[v], -v), default=-1) for followers in after]
    placed = _Placed(behind, heir, sync_ns)
    order: list[int] = []
    missing = [len(sources) for sources in before]
    waiting = [(0.0, call) for call in range(size) if not missing[call]]
    ready: list[tuple[float, int]] = []
    now = 0.0
    while len(order) < size:
        while waiting and waiting[0][0] <= now:
            _, call = heapq.heappop(waiting)
            heapq.heappush(ready, (-behind[call], call))
        if not ready:
            now = waiting[0][0]
            continue
        idle_ns = placed.idle_since()
        if len(placed.tail) == cap and idle_ns > now:
            now = idle_ns
            continue
        _, call = heapq.heappop(ready)
        placed.put(call, before[call], ns[call], now)
        order.append(call)
        for v in after[call]:
            missing[v] -= 1
            if not missing[v]:
                heapq.heappush(waiting, (max(placed.end_ns[u] for u in before[v]), v))
    return placed.stream, placed.start_ns, order


class _Placed:
    """The calls that have a stream and a time so far.

    Args:
        behind: longest path behind each call.
        heir: the most urgent successor of each call, -1 for none.
        sync_ns: what a wait across streams costs.
    """

    def __init__(self, behind: Sequence[float], heir: Sequence[int], sync_ns: float) -> None:
        self.stream = [-1] * len(behind)
        self.start_ns = [0.0] * len(behind)
        self.end_ns = [0.0] * len(behind)
        self.tail: list[int] = []  # the last call of each stream
        self._idle: list[tuple[float, int]] = []  # (end of the stream, stream), outdated entries included
        self._behind, self._heir, self._sync_ns = behind, heir, sync_ns

    def idle_since(self) -> float:
        """Return the end of the stream that ends first; 0 without streams."""
        while self._idle and self.end_ns[self.tail[self._idle[0][1]]] != self._idle[0][0]:
            heapq.heappop(self._idle)
        return self._idle[0][0] if self._idle else 0.0

    def put(self, call: int, sources: Sequence[int], ns: float, now: float) -> None:
        """Place a call on the stream where it starts soonest: a predecessor's, an idle one or a new one."""
        latest: dict[int, float] = {}
        for source in sources:
            lane = self.stream[source]
            latest[lane] = max(latest.get(lane, 0.0), self.end_ns[source])
        sync_ns = self._sync_ns
        top, runner_up = heapq.nlargest(2, (*latest.values(), -sync_ns, -sync_ns))
        elsewhere = top + sync_ns
        arrival = {lane: max(end, (runner_up if end == top else top) + sync_ns) for lane, end in latest.items()}
        # The stream that was idle longest: those where something just ended stay free for its successors.
        idle = self._idle[0][1] if self._idle and self._idle[0][0] <= now else len(self.tail)
        best = max(now, elsewhere), 1, 0.0, idle
        for lane, end in latest.items():
            begin = max(arrival[lane], self.end_ns[self.tail[lane]])
            other = self._heir[self.tail[lane]]
            if other not in (-1, call) and self.stream[other] < 0 and self._behind[other] > self._behind[call]:
                # It would push a more urgent call off this stream.
                begin += sync_ns
            best = min(best, (begin, 0, -end, lane))
        lane = best[3]
        if lane == len(self.tail):
            self.tail.append(call)
            self.start_ns[call] = elsewhere
        else:
            self.start_ns[call] = max(arrival.get(lane, elsewhere), self.end_ns[self.tail[lane]])
            self.tail[lane] = call
        self.stream[call] = lane
        self.end_ns[call] = self.start_ns[call] + ns
        heapq.heappush(self._idle, (self.end_ns[call], lane))
