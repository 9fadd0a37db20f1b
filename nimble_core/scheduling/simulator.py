"""A discrete-event simulation: when each call of a schedule would run, on a device whose calls slow each other down."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.utils.errors import InputError, ScheduleError

__all__ = ["EXACT", "H200", "DeviceModel", "simulate"]


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """How a device departs from calls that start at once and take their isolated time.

    While others run beside it, a call takes ``1 + per_call * min(others, crowd) + per_share * their demand`` times as
    long, where demand is the share of the device that the others fill (``Costs.demand``; 0 where unknown).

    Args:
        name: what was measured, in words.
        gap_ns: from the end of a call to the start of the next one on its stream.
        sync_ns: from the end of a call to the start of one that waits for it on another stream.
        per_call: slowdown by each call that runs beside.
        crowd: calls beside one, above which more do not slow it further.
        per_share: slowdown by calls beside that fill the whole device.
    """

    name: str = "exact"
    gap_ns: float = 0.0
    sync_ns: float = 0.0
    per_call: float = 0.0
    crowd: int = 4
    per_share: float = 0.0


EXACT = DeviceModel()
"""Every call takes its isolated time, and the next one starts at once."""

H200 = DeviceModel("NVIDIA H200", gap_ns=550.0, sync_ns=2850.0, per_call=0.05, per_share=0.65)
"""Fitted to back-to-back replays of 11 models under 8 plans each, on 1 to 16 streams (median error 1.8%; what the
benchmark of policies finds is in its results). A replay that starts on an idle GPU takes longer by its launch."""


def simulate(
    graph: CallGraph,
    schedule: Schedule,
    costs: Costs,
    device: DeviceModel = EXACT,
    *,
    names: Sequence[str] = (),
) -> Timeline:
    """Run a schedule on a clock of its own; deterministic.

    A call starts as soon as the call before it on its stream has ended ``gap_ns`` ago and each call it waits for has
    ended ``sync_ns`` ago. Priorities are not looked at.

    Args:
        graph: gives the number of calls; its hazards are the business of ``check_schedule``.
        schedule: streams, order and waits.
        costs: isolated duration of each call, and its demand.
        device: what it runs on.
        names: label of each call's span; ``"call 3"`` where not given.

    Returns:
        A timeline with one lane per stream and one span per call.

    Raises:
        InputError: costs or schedule of another number of calls.
        ScheduleError: the schedule deadlocks.

    Complexity:
        O((calls + syncs) log calls); where calls slow each other by what they fill, and O(calls) times the different
        demands that run at one time.

    >>> from nimble_core.ir.costs import uniform_costs
    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> from nimble_core.scheduling.policies import nimble
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
    start_ns, end_ns = _run(schedule, costs, device)
    stuck = next((call for call, end in enumerate(end_ns) if end < 0), None)
    if stuck is not None:
        raise ScheduleError(f"the schedule deadlocks: call {stuck} is never reached", fix="run check_schedule on it")
    order = sorted(schedule.order, key=start_ns.__getitem__)
    return Timeline(
        run=schedule.policy,
        source="simulated",
        clock=f"simulated: {device.name}",
        lanes=tuple(Lane(name=f"stream {index}", kind="stream") for index in range(schedule.streams)),
        spans=tuple(
            Span(schedule.stream[call], start_ns[call], end_ns[call], call, names[call] if names else f"call {call}")
            for call in order
        ),
    )


def _followers(schedule: Schedule, device: DeviceModel) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """List the calls that wait for each call, with their delay; and count how many each call waits for."""
    followers: list[list[tuple[int, float]]] = [[] for _ in schedule.order]
    missing = [0] * len(schedule.order)
    for pairs, delay in (
        (stream_neighbours(schedule.stream, schedule.order), device.gap_ns),
        (schedule.syncs, device.sync_ns),
    ):
        for u, v in pairs:
            followers[u].append((v, delay))
            missing[v] += 1
    return followers, missing


def _run(schedule: Schedule, costs: Costs, device: DeviceModel) -> tuple[list[float], list[float]]:
    """Start and end of each call; the end of a call that is never reached is -1."""
    size = len(schedule.order)
    followers, missing = _followers(schedule, device)
    ready_ns = [0.0] * size
    waiting = [(0.0, call) for call in range(size) if not missing[call]]
    heapq.heapify(waiting)
    running = _Crowd(device, costs.demand)
    start_ns = [0.0] * size
    end_ns = [-1.0] * size
    now = 0.0
    while waiting or running.calls:
        while waiting and waiting[0][0] <= now:
            _, call = heapq.heappop(waiting)
            start_ns[call] = now
            running.start(call, now, costs.ns[call])
        now = min(running.next_end(now), waiting[0][0] if waiting else inf)
        for call in running.finish(now):
            end_ns[call] = now
            for follower, delay in followers[call]:
                ready_ns[follower] = max(ready_ns[follower], now + delay)
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(waiting, (ready_ns[follower], follower))
    return start_ns, end_ns


@dataclass(slots=True)
class _Group:
    """Running calls of one demand. They run equally fast, on one clock of isolated nanoseconds, and so end in order."""

    clock: float = 0.0
    slowdown: float = 1.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """``(clock at the end, call)``, a heap."""
    next_ns: float = inf


class _Crowd:
    """Calls that slow each other down, in groups of equal demand."""

    def __init__(self, device: DeviceModel, demand: Sequence[float]) -> None:
        self.calls = 0
        self._device = device
        self._demand = demand if device.per_share > 0 else ()
        self._groups: dict[float, _Group] = {}
        self._since = 0.0

    def start(self, call: int, now: float, ns: float) -> None:
        group = self._groups.setdefault(self._demand[call] if self._demand else 0.0, _Group())
        heapq.heappush(group.ends, (group.clock + ns, call))
        self.calls += 1

    def next_end(self, now: float) -> float:
        device = self._device
        beside = 1 + device.per_call * min(self.calls - 1, device.crowd)
        total = 0.0
        for demand, group in self._groups.items():
            total += demand * len(group.ends)
        first = inf
        for demand, group in self._groups.items():
            group.slowdown = beside + device.per_share * (total - demand)
            group.next_ns = ends = now + (group.ends[0][0] - group.clock) * group.slowdown
            if ends < first:
                first = ends
        return first

    def finish(self, now: float) -> list[int]:
        passed, self._since = now - self._since, now
        done: list[int] = []
        for demand, group in list(self._groups.items()):
            if group.next_ns > now:
                group.clock += passed / group.slowdown
                continue
            # On the dot, whatever rounding says: a remainder below the resolution of the time would never end.
            group.clock = group.ends[0][0]
            while group.ends and group.ends[0][0] <= group.clock:
                done.append(heapq.heappop(group.ends)[1])
            if not group.ends:
                del self._groups[demand]
        self.calls -= len(done)
        return sorted(done)
