"""From what a GPU did during watched replays to when each call ran.

Pure: activities and a graph go in, a timeline and costs come out. With graph node ids the answer is exact. Without
them nodes are told by name, launch shape and the graph's order, and what could have been told otherwise is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nimble_core.algorithms.reachability import ancestors, predecessor_lists
from nimble_core.ir.costs import Costs, Kernel
from nimble_core.ir.measurement import quantile
from nimble_core.ir.occupancy import Multiprocessors, call_demands
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, Observation, SelfCheck, Span, Timeline
from nimble_core.profiling.kernel_names import demangle, short_kernel_name
from nimble_core.scheduling.verify_capture import RawGraph

if TYPE_CHECKING:
    from nimble_core.profiling.cupti import Activity

__all__ = ["TIMED", "Launch", "Told", "observation", "replay_timeline", "tell_by_id", "tell_by_order"]

TIMED = ("kernel", "memcpy", "memset")
"""Kinds of nodes that a GPU spends time on."""

_NOWHERE = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a node of a graph launches, as the graph says.

    Args:
        name: of the kernel, as compiled; empty if unknown or no kernel.
        grid: blocks per dimension, zeros if unknown.
        block: threads per dimension, zeros if unknown.
    """

    name: str = ""
    grid: tuple[int, int, int] = _NOWHERE
    block: tuple[int, int, int] = _NOWHERE


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
    return Told(runs, SelfCheck(len(_timed(raw)), len(runs), "graph node id" if runs else "", 0, strangers))


def tell_by_order(seen: Sequence[Activity], raw: RawGraph, launches: Sequence[Launch], replays: int) -> Told:
    """Tell nodes by name, launch shape, and the graph's order.

    All or nothing: where a replay's kernels are not those of the graph, or no order explains them, no node is told.

    Args:
        seen: activities of ``replays`` replays that did not overlap, sorted by start.
        raw: the graph.
        launches: what each node launches.
        replays: how many there were.

    Complexity:
        O(replays (nodes + edges)) where few nodes with the same kernel may run at one time.
    """
    timed = _timed(raw)
    size = len(timed)
    nothing = Told({}, SelfCheck(size, 0, "", 0, max(0, len(seen) - size * replays)))
    if not size or len(seen) != size * replays:
        return nothing
    needs = _needs(raw, set(timed))
    rounds = [seen[at : at + size] for at in range(0, len(seen), size)]
    shaped = all(any(one.grid) for one in seen if one.kind == "kernel")
    for precise in (True, False):
        keys = {node: _key(raw.kinds[node], launches[node], precise=precise, shaped=shaped) for node in timed}
        said = [
            [_key(one.kind, Launch(one.name, one.grid, one.block), precise=precise, shaped=shaped) for one in part]
            for part in rounds
        ]
        wanted = Counter(keys.values())
        if any(Counter(part) != wanted for part in said):
            continue
        ahead = frozenset(raw.ahead)
        placed = [_in_order(part, names, keys, needs, ahead) for part, names in zip(rounds, said, strict=True)]
        whole = [found for found in placed if found is not None]
        if len(whole) < replays:
            return nothing
        runs = {node: tuple(part[found[node]] for part, found in zip(rounds, whole, strict=True)) for node in timed}
        return Told(runs, SelfCheck(size, size, "name and order", _ambiguous(raw, keys)))
    return nothing


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
    launches: Sequence[Launch] = (),
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
        launches: what each node launches, where activities do not say.
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
    return Observation(timeline, _costs(told, raw, len(schedule.stream), replays, source, gpu, launches))


def _costs(
    told: Told,
    raw: RawGraph,
    calls: int,
    replays: int,
    source: str,
    gpu: Multiprocessors,
    launches: Sequence[Launch],
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
        launch = launches[node] if launches and not any(first.grid) else Launch("", first.grid, first.block)
        name = short_kernel_name(first.name)
        size = first.registers, first.shared_bytes
        kernels.append(Kernel(call, name, launch.grid, launch.block, *size, first.node, middle))
    shaped = all(any(one.grid) for one in kernels if one.name not in TIMED)
    return Costs(
        ns=tuple(cost),
        source=source,
        spread_ns=tuple(spread),
        kernels=tuple(kernels),
        demand=call_demands(kernels, calls, gpu) if shaped else (),
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
    spans, streams, nodes, length = _median_replay(told.runs, raw, schedule, replays)
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
        nodes=nodes if check.by == "graph node id" else (),
    )


def _timed(raw: RawGraph) -> list[int]:
    return [node for node, kind in enumerate(raw.kinds) if kind in TIMED]


def _owner(raw: RawGraph, node: int) -> int | None:
    return raw.owner[node] if raw.owner else None


def _doubt(check: SelfCheck) -> str:
    """Say what the self-check leaves in doubt; empty if nothing."""
    found = []
    if check.seen != check.expected or not check.expected:
        found.append(f"{check.seen} of {check.expected} nodes seen in every replay")
    if check.unexpected:
        found.append(f"{check.unexpected} kernels or copies belong to no node")
    if check.by == "name and order":
        doubt = f"{check.ambiguous} of them could be another call's with the same kernel"
        sure = doubt if check.ambiguous else "without doubt"
        found.append(f"no graph node ids: kernels told by name and order, {sure}")
    return "; ".join(found)


_Key = tuple[Hashable, ...]


def _key(kind: str, launch: Launch, *, precise: bool, shaped: bool) -> _Key:
    """Return what tells one kernel from others; of a copy its kind alone."""
    if kind != "kernel":
        return (kind,)
    name = _named(launch.name, precise)
    return (kind, name, launch.grid, launch.block) if shaped else (kind, name)


def _named(name: str, precise: bool) -> str:
    """Return the whole name, or the function's own, which tools that demangle differently share."""
    return demangle(name) if precise else short_kernel_name(name)


def _needs(raw: RawGraph, timed: set[int]) -> dict[int, frozenset[int]]:
    """Return the timed nodes that precede each timed node, directly or through nodes that take no time."""
    through: list[frozenset[int]] = []
    needs: dict[int, frozenset[int]] = {}
    for node, before in enumerate(predecessor_lists(len(raw.nodes), raw.edges)):
        needed = frozenset().union(*(through[one] for one in before))
        through.append(frozenset((node,)) if node in timed else needed)
        if node in timed:
            needs[node] = needed
    return needs


class _Placing:
    """Gives the activities of one replay to nodes, in the order in which they started."""

    def __init__(
        self,
        part: Sequence[Activity],
        keys: Mapping[int, _Key],
        needs: Mapping[int, frozenset[int]],
        ahead: frozenset[tuple[int, int]],
    ) -> None:
        self._part = part
        self._keys = keys
        self._needs = needs
        self._ahead = ahead
        self.at: dict[int, int] = {}
        """Place of a node's activity in ``part``."""
        self._left = {node: len(needed) for node, needed in needs.items()}
        self._after: dict[int, list[int]] = {node: [] for node in needs}
        for node, needed in needs.items():
            for one in needed:
                self._after[one].append(node)
        self._ready: dict[_Key, set[int]] = {}
        for node, left in self._left.items():
            if not left:
                self._ready.setdefault(keys[node], set()).add(node)
        self._below: dict[int, int] = {}
        """Nodes on the longest path that begins with a node: where kernels are alike, more depends on it."""
        for node in sorted(needs, reverse=True):
            self._below[node] = 1 + max((self._below[one] for one in self._after[node]), default=0)

    def place(self, key: _Key, at: int) -> bool:
        """Give an activity to the likeliest node; False if it can be none."""
        ready = self._ready.get(key, set())
        start = self._part[at].start_ns
        # A kernel may start before the one it waits for has ended where the library asks for that.
        able = [node for node in ready if self._may_begin(node, start)] or list(ready)
        if not able:
            return False
        stream = self._part[at].stream
        node = min(able, key=lambda one: (not self._continues(one, stream), -self._below[one], one))
        self.at[node] = at
        ready.discard(node)
        for one in self._after[node]:
            self._left[one] -= 1
            if not self._left[one]:
                self._ready.setdefault(self._keys[one], set()).add(one)
        return True

    def _may_begin(self, node: int, start_ns: int) -> bool:
        """Whether all that ``node`` waits for had ended then, or begun where it is launched ahead."""
        return all(
            (one, node) in self._ahead or self._part[self.at[one]].end_ns <= start_ns for one in self._needs[node]
        )

    def _continues(self, node: int, stream: int) -> bool:
        """Whether the last activity that ``node`` waits for ran on this stream."""
        before = max((self.at[one] for one in self._needs[node]), default=-1)
        return before >= 0 and self._part[before].stream == stream


def _in_order(
    part: Sequence[Activity],
    said: Sequence[_Key],
    keys: Mapping[int, _Key],
    needs: Mapping[int, frozenset[int]],
    ahead: frozenset[tuple[int, int]],
) -> dict[int, int] | None:
    """Return the place in ``part`` of each node's activity; None if no order was found."""
    placing = _Placing(part, keys, needs, ahead)
    return placing.at if all(placing.place(key, at) for at, key in enumerate(said)) else None


def _ambiguous(raw: RawGraph, keys: Mapping[int, _Key]) -> int:
    """Count the nodes that the graph does not order with all others of the same key.

    Their activities may be swapped; where it orders all nodes of a key, they run in that order.
    """
    earlier: dict[_Key, int] = {}
    doubtful = 0
    predecessors = predecessor_lists(len(raw.nodes), raw.edges)
    for node, before in enumerate(ancestors(predecessors, range(len(raw.nodes)))):
        if node in keys:
            alike = earlier.get(keys[node], 0)
            unordered = alike & ~before
            if unordered:
                doubtful |= unordered | 1 << node
            earlier[keys[node]] = alike | 1 << node
    return doubtful.bit_count()


def _median_replay(
    runs: Mapping[int, Sequence[Activity]], raw: RawGraph, schedule: Schedule, replays: int
) -> tuple[tuple[Span, ...], tuple[int, ...], tuple[int, ...], float]:
    """Return spans of the median replay, the device's stream and node id of each, and its length."""
    if not runs:
        return (), (), (), 0.0
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
        drawn.append((Span(lane, start, end, call, short_kernel_name(run.name)), run.stream, run.node))
    drawn.sort(key=lambda one: (one[0].start_ns, one[0].lane))
    spans, streams, nodes = zip(*drawn, strict=True)
    return spans, streams, nodes, float(ends[chosen] - starts[chosen])
