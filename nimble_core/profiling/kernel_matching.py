"""From what a GPU did during watched replays to when each call ran.

Pure: activities and a graph go in, a timeline and costs come out. Graph node ids say which was which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nimble_core.ir.costs import Costs, Kernel
from nimble_core.ir.measurement import quantile
from nimble_core.ir.occupancy import Multiprocessors, call_demands
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, Observation, SelfCheck, Span, Timeline
from nimble_core.profiling.kernel_names import short_kernel_name
from nimble_core.scheduling.verify_capture import RawGraph

if TYPE_CHECKING:
    from nimble_core.profiling.cupti import Activity

__all__ = ["TIMED", "Told", "observation", "replay_timeline", "tell_by_id"]

TIMED = ("kernel", "memcpy", "memset")
"""Kinds of nodes that a GPU spends time on."""


@dataclass(frozen=True, slots=True)
class Told:
    """Which activity was which node.

    Args:
        runs: for each node that was seen once in every replay its activities, in order of the replays.
        check: expected and seen.
    """

    runs: Mapping[int, tuple[Activity, ...]]
    check: SelfCheck


def tell_by_id(seen: Sequence[Activity], raw: RawGraph, ids: Mapping[int, int], replays: int) -> Told:
    """Tell nodes by the graph node ids of their activities.

    Args:
        seen: activities of ``replays`` replays, sorted by start.
        raw: the graph.
        ids: position in ``raw.nodes`` by graph node id, of the nodes in ``TIMED``.
        replays: how many there were.
    """
    by_node: dict[int, list[Activity]] = {}
    unknown: list[Activity] = []
    for activity in seen:
        if activity.node < 0:  # work outside graphs: torch sets the random state before each replay, for one
            continue
        if activity.node in ids:
            by_node.setdefault(ids[activity.node], []).append(activity)
        else:
            unknown.append(activity)
    first = min((of[0].start_ns for of in by_node.values()), default=0)
    strangers = sum(one.start_ns >= first for one in unknown)  # before: what CUPTI handed over late of another graph
    runs = {node: tuple(by_node[node]) for node in sorted(by_node) if len(by_node[node]) == replays}
    return Told(runs, SelfCheck(_timed(raw), len(runs), "graph node id" if runs else "", strangers))


def observation(
    told: Told,
    raw: RawGraph,
    schedule: Schedule,
    replays: int,
    *,
    clock: str,
    profiled_ns: float,
    unprofiled_ns: float,
    gpu: Multiprocessors,
    note: str = "",
) -> Observation:
    """Return the timeline of the median replay, and each call's cost: its kernels' median times.

    Args:
        told: which activity was which node.
        raw: the graph, with the call of each node.
        schedule: what was captured: its streams are the lanes.
        replays: how many were watched.
        clock: how times were taken, in words.
        profiled_ns: wall time of a watched replay, 0 for that from its first start to its last end.
        unprofiled_ns: wall time of a replay that nobody watched.
        gpu: where it ran.
        note: why nothing could be seen.
    """
    source = f"{clock.partition(' ')[0]}, kernels of {replays} replays of policy {schedule.policy}"
    if not told.runs:
        source = f"unknown: {note or _doubt(told.check)}"
    timeline = replay_timeline(
        told,
        raw,
        schedule,
        replays,
        clock=clock,
        profiled_ns=profiled_ns,
        unprofiled_ns=unprofiled_ns,
        note=note,
    )
    return Observation(timeline, _costs(told, raw, len(schedule.stream), replays, source, gpu))


def _costs(
    told: Told,
    raw: RawGraph,
    calls: int,
    replays: int,
    source: str,
    gpu: Multiprocessors,
) -> Costs:
    kernels = []
    cost, spread = [0.0] * calls, [0.0] * calls
    for node in sorted(told.runs):
        durations = [float(run.end_ns - run.start_ns) for run in told.runs[node]]
        middle, call = median(durations), _owner(raw, node)
        if call is not None:
            cost[call] += middle
            spread[call] += quantile(durations, 0.75) - quantile(durations, 0.25)
        first = told.runs[node][0]
        name = short_kernel_name(first.name)
        size = first.registers, first.shared_bytes
        kernels.append(Kernel(call, name, first.grid, first.block, *size, first.node, middle))
    return Costs(
        ns=tuple(cost),
        source=source,
        spread_ns=tuple(spread),
        kernels=tuple(kernels),
        demand=call_demands(kernels, calls, gpu),
        observed=replays,
        expected=told.check.expected,
        seen=told.check.seen,
    )


def replay_timeline(
    told: Told,
    raw: RawGraph,
    schedule: Schedule,
    replays: int,
    *,
    clock: str,
    profiled_ns: float = 0.0,
    unprofiled_ns: float = 0.0,
    note: str = "",
) -> Timeline:
    """Return the median replay on the planned streams; arguments are those of ``observation``.

    What was launched ahead begins where its wait ends: with the end of what it waited for.
    """
    check = told.check
    spans, streams, length = _median_replay(told.runs, raw, schedule, replays)
    return Timeline(
        run=schedule.policy,
        source="measured",
        clock=clock,
        lanes=tuple(Lane(f"stream {index}", "stream") for index in range(max(schedule.streams, 1))),
        spans=spans,
        profiled_ns=max(profiled_ns, length) if spans else 0.0,
        unprofiled_ns=unprofiled_ns,
        reliable=check.passed,
        note=note or _doubt(check),
        streams=streams,
        check=check,
    )


def _timed(raw: RawGraph) -> int:
    return sum(kind in TIMED for kind in raw.kinds)


def _owner(raw: RawGraph, node: int) -> int | None:
    return raw.owner[node] if raw.owner else None


def _doubt(check: SelfCheck) -> str:
    """Say what the self-check leaves in doubt; empty if nothing."""
    found = []
    if check.seen != check.expected or not check.expected:
        found.append(f"{check.seen} of {check.expected} nodes seen in every replay")
    if check.unexpected:
        found.append(f"{check.unexpected} kernels or copies match no node")
    return "; ".join(found)


def _median_replay(
    runs: Mapping[int, Sequence[Activity]], raw: RawGraph, schedule: Schedule, replays: int
) -> tuple[tuple[Span, ...], tuple[int, ...], float]:
    """Return spans of the median replay, the device's stream of each, and its length."""
    if not runs:
        return (), (), 0.0
    starts = [min(run[i].start_ns for run in runs.values()) for i in range(replays)]
    ends = [max(run[i].end_ns for run in runs.values()) for i in range(replays)]
    order = sorted(range(replays), key=lambda i: ends[i] - starts[i])
    chosen = order[len(order) // 2]
    waited: dict[int, int] = {}
    """Until when a node that was launched ahead waited."""
    for tail, head in raw.ahead:
        if tail in runs:
            waited[head] = max(waited.get(head, 0), runs[tail][chosen].end_ns)
    drawn = []
    for node, of in runs.items():
        call, run = _owner(raw, node), of[chosen]
        lane = schedule.stream[call] if call is not None else 0
        begun = max(run.start_ns, min(waited.get(node, 0), run.end_ns))
        start, end = float(begun - starts[chosen]), float(run.end_ns - starts[chosen])
        drawn.append((Span(lane, start, end, call, short_kernel_name(run.name)), run.stream))
    drawn.sort(key=lambda one: (one[0].start_ns, one[0].lane))
    spans, streams = zip(*drawn, strict=True)
    return spans, streams, float(ends[chosen] - starts[chosen])
