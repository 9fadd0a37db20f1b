"""From what a GPU did during watched replays to when each call ran: which activity was which node of the graph.

Pure: activities and a graph go in, a timeline and costs come out. With graph node ids the answer is exact. Without
them nodes are told by name, launch shape and the graph's order, and what could have been told otherwise is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from nimble_core.algorithms.reachability import predecessor_lists
from nimble_core.ir.costs import Costs, Kernel
from nimble_core.ir.measurement import quantile
from nimble_core.ir.observation import Observation
from nimble_core.ir.occupancy import Multiprocessors, call_demands
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, SelfCheck, Span, Timeline
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
    """Tell nodes by name, launch shape, and the graph's order: a node starts after those before it have ended.

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
    for precise in (True, False):
        keys = {node: _node_key(raw.kinds[node], launches[node], precise) for node in timed}
        shaped = all(any(one.grid) for one in seen if one.kind == "kernel")
        if not shaped:
            keys = {node: key[:2] for node, key in keys.items()}
        said = [[_activity_key(one, precise, shaped) for one in part] for part in rounds]
        wanted = Counter(keys.values())
        if any(Counter(part) != wanted for part in said):
            continue
        ahead = frozenset(raw.ahead)
        placed = [_in_order(part, names, keys, needs, ahead) for part, names in zip(rounds, said, strict=True)]
        whole = [one for one in placed if one is not None]
        if len(whole) < replays:
            return nothing
        runs = {
            node: tuple(part[found[node]] for part, (found, _) in zip(rounds, whole, strict=True)) for node in timed
        }
        doubtful = set().union(*(doubt for _, doubt in whole))
        return Told(runs, SelfCheck(size, size, "name and order", len(doubtful)))
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
    """The timeline of the replay of median length, and what each call costs: the median of its kernels' durations.

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
    calls, check, runs = len(schedule.stream), told.check, told.runs
    kernels = []
    cost, spread = [0.0] * calls, [0.0] * calls
    for node in sorted(runs):
        durations = [float(run.end_ns - run.start_ns) for run in runs[node]]
        middle, call = median(durations), _owner(raw, node)
        if call is not None:
            cost[call] += middle
            spread[call] += quantile(durations, 0.75) - quantile(durations, 0.25)
        first = runs[node][0]
        shape = (first.grid, first.block) if any(first.grid) or not launches else _shape(launches[node])
        name, size = short_kernel_name(first.name), (first.registers, first.shared_bytes)
        kernels.append(Kernel(call, name, *shape, *size, first.node, middle))
    source = f"{clock.partition(' ')[0]}, kernels of {replays} replays of policy {schedule.policy}"
    shaped = all(any(one.grid) for one in kernels if one.name not in TIMED)
    costs = Costs(
        ns=tuple(cost),
        source=source if runs else f"unknown: {note or _doubt(check)}",
        spread_ns=tuple(spread),
        kernels=tuple(kernels),
        demand=call_demands(kernels, calls, gpu) if shaped else (),
        observed=replays,
        expected=check.expected,
        seen=check.seen,
    )
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
    return Observation(timeline, costs)


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
    """The replay of median length, its lanes the planned streams; arguments are those of ``observation``.

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


def _shape(launch: Launch) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    return launch.grid, launch.block


def _doubt(check: SelfCheck) -> str:
    """What the self-check leaves to doubt, in words; empty if nothing."""
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


def _node_key(kind: str, launch: Launch, precise: bool) -> _Key:
    if kind != "kernel":
        return (kind, kind, None)
    return (kind, _named(launch.name, precise), (launch.grid, launch.block))


def _activity_key(activity: Activity, precise: bool, shaped: bool) -> _Key:
    if activity.kind != "kernel":
        return (activity.kind, activity.kind, None)[: 3 if shaped else 2]
    key = (activity.kind, _named(activity.name, precise), (activity.grid, activity.block))
    return key if shaped else key[:2]


def _named(name: str, precise: bool) -> str:
    """Tools demangle in different ways: where whole names differ, the functions' own may still agree."""
    return demangle(name) if precise else short_kernel_name(name)


def _needs(raw: RawGraph, timed: set[int]) -> dict[int, frozenset[int]]:
    """For each timed node the timed nodes that precede it directly, or through nodes that take no time."""
    through: list[frozenset[int]] = []
    needs: dict[int, frozenset[int]] = {}
    for node, before in enumerate(predecessor_lists(len(raw.nodes), raw.edges)):
        needed = frozenset().union(*(through[one] for one in before))
        through.append(frozenset((node,)) if node in timed else needed)
        if node in timed:
            needs[node] = needed
    return needs


_TRIES = 1000
"""Exchanges that may be tried where no node explains an activity; after that the replay counts as not the graph's."""


@dataclass(slots=True)
class _Placing:
    """Activities of one replay, given to nodes in the order in which they started."""

    part: Sequence[Activity]
    keys: Mapping[int, _Key]
    needs: Mapping[int, frozenset[int]]
    ahead: frozenset[tuple[int, int]] = frozenset()
    """Pairs of nodes of which the second may begin once the first has."""
    at: dict[int, int] = field(default_factory=dict)
    """Place of a node's activity in ``part``."""
    left: dict[int, int] = field(default_factory=dict)
    after: dict[int, list[int]] = field(default_factory=dict)
    ready: dict[_Key, set[int]] = field(default_factory=dict)
    alike: dict[_Key, list[int]] = field(default_factory=dict)
    tries: int = 0
    moved: list[tuple[int, int]] = field(default_factory=list)
    """Nodes that were given another's activity, and whose it was."""

    def __post_init__(self) -> None:
        for node, needed in self.needs.items():
            self.alike.setdefault(self.keys[node], []).append(node)
            self.left[node] = len(needed)
            for one in needed:
                self.after.setdefault(one, []).append(node)
            if not needed:
                self.ready.setdefault(self.keys[node], set()).add(node)

    def place(self, node: int, at: int) -> None:
        self.at[node] = at
        self.ready.get(self.keys[node], set()).discard(node)
        for one in self.after.get(node, ()):
            self.left[one] -= 1
            if not self.left[one] and one not in self.at:
                self.ready.setdefault(self.keys[one], set()).add(one)

    def take_back(self, node: int) -> int:
        """Undo ``place``."""
        for one in self.after.get(node, ()):
            self.ready.get(self.keys[one], set()).discard(one)
            self.left[one] += 1
        at = self.at.pop(node)
        if not self.left[node]:
            self.ready.setdefault(self.keys[node], set()).add(node)
        return at

    def may_begin(self, node: int, start_ns: int) -> bool:
        """Whether all that ``node`` waits for had ended then, or begun where it is launched ahead."""
        return all(self._lets(one, node, start_ns) for one in self.needs[node])

    def candidates(self, key: _Key, at: int, *, early: bool = False) -> list[int]:
        """Nodes that this activity can be, the likeliest first: one that follows a node on the activity's stream.

        Args:
            key: of the activity.
            at: its place in ``part``.
            early: also nodes that wait for one that had not ended.
        """
        activity = self.part[at]
        able = [node for node in sorted(self.ready.get(key, ())) if early or self.may_begin(node, activity.start_ns)]
        return sorted(able, key=lambda node: not self._continues(node, activity.stream))

    def _continues(self, node: int, stream: int) -> bool:
        before = max((self.at[one] for one in self.needs[node]), default=-1)
        return before >= 0 and self.part[before].stream == stream

    def make_way(self, key: _Key, at: int) -> bool:
        """Exchange activities of one kernel until a node that this activity could be may have begun; whether it may.

        Of nodes with the same kernel that ran side by side the wrong one may have been taken: it shows when something
        starts that only the other explains. An exchange may need others before it.
        """
        self.tries, self.moved = _TRIES, []
        waiting = [node for node in self.alike[key] if node not in self.at]
        return any(self._bring(node, self.part[at].start_ns) for node in waiting)

    def _bring(self, node: int, start_ns: int) -> bool:
        """Have all that ``node`` waits for on activities that had ended then; else everything stays as it is."""
        before = len(self.moved)
        if all(self._lets(one, node, start_ns) or self._take(one, start_ns) for one in sorted(self.needs[node])):
            return True
        while len(self.moved) > before:
            self._exchange(*reversed(self.moved.pop()))
        return False

    def _take(self, node: int, end_ns: int) -> bool:
        """Give ``node`` an activity that had ended then, and its own, if it has one, to whose that was."""
        for other in self._others(node, end_ns):
            if not self.tries:
                return False
            self.tries -= 1
            self._exchange(node, other)
            if self._bring(node, self.part[self.at[node]].start_ns):
                self.moved.append((node, other))
                return True
            self._exchange(other, node)
        return False

    def _exchange(self, node: int, other: int) -> None:
        """Each gets what the other has; one of them may have nothing."""
        places = [(one, self.at.get(two)) for one, two in ((node, other), (other, node))]
        for one, _ in places:
            if one in self.at:
                self.take_back(one)
        for one, at in places:
            if at is not None:
                self.place(one, at)

    def _others(self, node: int, end_ns: int) -> list[int]:
        """Nodes with the same kernel that have ended then and can do with what ``node`` has, the latest first."""
        own = self.part[self.at[node]].end_ns if node in self.at else None
        found = []
        for other in self.alike[self.keys[node]]:
            if other == node or not self._ended(other, end_ns):
                continue
            follow = [self.part[self.at[one]].start_ns for one in self.after.get(other, ()) if one in self.at]
            if not follow or (own is not None and own <= min(follow)):
                found.append(other)
        return sorted(found, key=lambda one: -self.at[one])

    def _lets(self, node: int, then: int, start_ns: int) -> bool:
        """Whether ``then`` may have begun at this time for all that ``node`` did."""
        if (node, then) in self.ahead:
            return node in self.at and self.part[self.at[node]].start_ns <= start_ns
        return self._ended(node, start_ns)

    def _ended(self, node: int, end_ns: int) -> bool:
        return node in self.at and self.part[self.at[node]].end_ns <= end_ns


def _in_order(
    part: Sequence[Activity],
    said: Sequence[_Key],
    keys: Mapping[int, _Key],
    needs: Mapping[int, frozenset[int]],
    ahead: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[dict[int, int], set[int]] | None:
    """``(place in part by node, nodes that could have been told otherwise)``; None if no order was found."""
    placing = _Placing(part, keys, needs, ahead)
    for at, key in enumerate(said):
        found = placing.candidates(key, at)
        if not found and placing.make_way(key, at):
            found = placing.candidates(key, at)
        # A kernel may start before the one it waits for has ended where the library asks for that.
        found = found or placing.candidates(key, at, early=True)
        if not found:
            return None
        placing.place(found[0], at)
    starts = {node: part[at].start_ns for node, at in placing.at.items()}
    early = bool(ahead) or not all(placing.may_begin(node, start) for node, start in starts.items())
    return placing.at, _doubtful(part, said, keys, needs, early=early)


def _doubtful(
    part: Sequence[Activity],
    said: Sequence[_Key],
    keys: Mapping[int, _Key],
    needs: Mapping[int, frozenset[int]],
    *,
    early: bool,
) -> set[int]:
    """Nodes whose activities could have been another's, whichever way they were told.

    Of each key the nodes that may have begun are kept open until as many activities have come as there are such nodes:
    then it was these nodes, in some order, and none of them is a doubt to what follows. A node may have begun once
    each that it waits for may have ended.

    Args:
        part: activities of one replay, sorted by start.
        said: key of each.
        keys: of each node.
        needs: what each node waits for.
        early: nodes may start before those that they wait for have ended, only not before those have started.
    """
    after: dict[int, list[int]] = {}
    left = {node: len(needed) for node, needed in needs.items()}
    coming: dict[_Key, list[int]] = {}
    """Nodes before which everything may have begun."""
    for node, needed in needs.items():
        for one in needed:
            after.setdefault(one, []).append(node)
        if not needed:
            coming.setdefault(keys[node], []).append(node)
    ended: dict[int, int] = {}
    """The earliest that a node's activity, among those that may be its, ended."""
    opened: dict[_Key, set[int]] = {}
    seen: Counter[_Key] = Counter()
    doubtful: set[int] = set()
    for activity, key in zip(part, said, strict=True):
        window, still = opened.setdefault(key, set()), []
        for node in coming.pop(key, ()):
            if early or all(ended[one] <= activity.start_ns for one in needs[node]):
                window.add(node)
            else:
                still.append(node)
                continue
            for one in after.get(node, ()):
                left[one] -= 1
                if not left[one]:
                    (still if keys[one] == key else coming.setdefault(keys[one], [])).append(one)
        coming[key] = still
        for node in window:
            ended[node] = min(ended.get(node, activity.end_ns), activity.end_ns)
        seen[key] += 1
        if seen[key] == len(window):
            doubtful |= window if len(window) > 1 else set()
            window.clear()
            seen[key] = 0
    return doubtful


def _median_replay(
    runs: Mapping[int, Sequence[Activity]], raw: RawGraph, schedule: Schedule, replays: int
) -> tuple[tuple[Span, ...], tuple[int, ...], tuple[int, ...], float]:
    """Spans of the replay of median length, the device's stream and the node id of each, and that length."""
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
