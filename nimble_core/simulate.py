"""A small discrete-event simulation: when each call of a schedule would run, were costs exact."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from nimble_core.costs import Costs
from nimble_core.errors import InputError, ScheduleError
from nimble_core.graph import CallGraph
from nimble_core.policies.base import stream_neighbours
from nimble_core.schedule import Schedule
from nimble_core.timeline import Lane, Span, Timeline

__all__ = ["simulate"]


def simulate(
    graph: CallGraph,
    schedule: Schedule,
    costs: Costs,
    *,
    sync_cost_ns: float = 0.0,
    concurrency: int | None = None,
    names: Sequence[str] = (),
) -> Timeline:
    """Run a schedule on a clock of its own; exact and deterministic.

    A call starts as soon as the call before it on its stream has ended, each call it waits for has ended
    ``sync_cost_ns`` ago, and one of ``concurrency`` places is free. Of several that could start at one time, higher
    priority goes first, then the earlier in issue order.

    Args:
        graph: gives the number of calls; its hazards are the business of ``check_schedule``.
        schedule: streams, order, waits and priorities.
        costs: duration of each call.
        sync_cost_ns: time that each wait across streams takes to be noticed.
        concurrency: most calls that run at one time, None for no limit.
        names: label of each call's span; ``"call 3"`` where not given.

    Returns:
        A timeline with one lane per stream and one span per call.

    Raises:
        InputError: costs or schedule of another number of calls, or ``concurrency`` below 1.
        ScheduleError: the schedule deadlocks.

    Complexity:
        O((calls + syncs) log calls).

    >>> from nimble_core.costs import uniform_costs
    >>> from nimble_core.graph import graph_from_edges
    >>> from nimble_core.policies import nimble
    >>> graph = graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])
    >>> simulate(graph, nimble(graph, uniform_costs(5)), uniform_costs(5)).length_ns
    4.0
    """
    size = graph.size
    if len(costs.ns) != size or len(schedule.stream) != size:
        raise InputError(
            f"costs of {len(costs.ns)} and a schedule of {len(schedule.stream)} calls for a graph of {size}",
            fix="pass values made from one program",
        )
    if concurrency is not None and concurrency < 1:
        raise InputError(f"concurrency={concurrency} lets nothing run", fix="at least 1, or None")
    followers: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    missing = [0] * size
    for u, v in stream_neighbours(schedule.stream, schedule.order):
        followers[u].append((v, 0.0))
        missing[v] += 1
    for u, v in schedule.syncs:
        followers[u].append((v, sync_cost_ns))
        missing[v] += 1

    rank = [(0, 0)] * size
    for position, call in enumerate(schedule.order):
        rank[call] = (-schedule.priority[call] if schedule.priority else 0, position)
    ready_ns = [0.0] * size
    waiting = [(0.0, call) for call in range(size) if not missing[call]]
    heapq.heapify(waiting)
    startable: list[tuple[tuple[int, int], int]] = []
    running: list[tuple[float, int]] = []
    spans: list[Span] = []
    now = 0.0
    while waiting or startable or running:
        while running and running[0][0] <= now:
            end, done = heapq.heappop(running)
            for call, delay in followers[done]:
                ready_ns[call] = max(ready_ns[call], end + delay)
                missing[call] -= 1
                if not missing[call]:
                    heapq.heappush(waiting, (ready_ns[call], call))
        while waiting and waiting[0][0] <= now:
            _, call = heapq.heappop(waiting)
            heapq.heappush(startable, (rank[call], call))
        started = False
        while startable and (concurrency is None or len(running) < concurrency):
            _, call = heapq.heappop(startable)
            end = now + costs.ns[call]
            heapq.heappush(running, (end, call))
            name = names[call] if names else f"call {call}"
            spans.append(Span(lane=schedule.stream[call], start_ns=now, end_ns=end, call=call, name=name))
            started = True
        if started:
            # A call that costs nothing ends now, and may let others start now.
            continue
        events = [heap[0][0] for heap in (running, waiting) if heap]
        if events:
            now = max(now, min(events))
    if len(spans) < size:
        stuck = sorted(set(range(size)) - {span.call for span in spans if span.call is not None})
        raise ScheduleError(f"the schedule deadlocks: call {stuck[0]} is never reached", fix="run check_schedule on it")
    return Timeline(
        run=schedule.policy,
        source="simulated",
        clock="simulated",
        lanes=tuple(Lane(name=f"stream {index}", kind="stream") for index in range(schedule.streams)),
        spans=tuple(spans),
    )
