"""Which node of a replayed graph is which call of a report: two tools' views of one plan, joined.

Pure. A node's id tells it exactly; what the id means is found in one of three ways, the surest first:

1. By the ranges that a capture leaves in the profile itself: a node belongs to the call in whose NVTX range it was
   captured, and an instance's node to that of the node it was copied from.
2. By its place in the graph (the lower half of its id), which is the same for the same plan in every process, where the
   report holds the places of its own replay; a node counts only if its kernel has the name that the report knows.
3. By kernel name and the order of the plan, as where there are no ids at all (``profiling.kernel_matching``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from nimble_core.ir.costs import Kernel
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck, Span, Timeline
from nimble_core.profiling.cupti import Activity
from nimble_core.profiling.kernel_matching import TIMED, Launch, Told, tell_by_order
from nimble_core.profiling.kernel_names import short_kernel_name
from nimble_core.profiling.nvtx import call_name, whole_name
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.utils.errors import InputError
from nimble_viz.traces.nsight import Export, NamedRange, Replay, node_of, process_of

__all__ = ["Expected", "Joined", "Way", "expected", "join"]

Way = Literal["capture ranges", "graph node ids", "name and order"]

_SUREST: dict[Way, int] = {"capture ranges": 2, "graph node ids": 1, "name and order": 0}
_ORDERED = 5
"""Replays in which nodes are told by order; what most of them say holds for all."""
_NO_TIME = "empty"
_NOWHERE = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a replay of a plan runs, as a report knows it.

    Args:
        schedule: the plan.
        capture: the NVTX range around its capture, and
        replay: around each of its replays.
        calls: the NVTX range of each call, by index.
        raw: nodes of its graph and what comes before what; a call of which no kernel is known has one node that takes
            no time.
        launches: what each node of ``raw`` launches, its name as short as in a timeline.
        ids: position in ``raw`` by place in the graph; empty if unknown.
    """

    schedule: Schedule
    capture: str
    replay: str
    calls: tuple[str, ...]
    raw: RawGraph
    launches: tuple[Launch, ...]
    ids: Mapping[int, int]

    @property
    def timed(self) -> tuple[int, ...]:
        """Nodes of which the kernel is known."""
        return tuple(node for node, kind in enumerate(self.raw.kinds) if kind != _NO_TIME)


@dataclass(frozen=True, slots=True)
class Joined:
    """The replays of one graph, node by node.

    Args:
        way: how nodes were told.
        told: activities by node, and the self-check.
        raw: the nodes.
        places: position in ``raw`` by graph node id, all 64 bits, of the nodes that were told.
        replays: those that ran the same nodes as most.
        partial: how many did not: the profile began or ended amid them, or lost some of their kernels.
        missing: kernels of the report that no node of the graph is, with how many.
        strangers: kernels of the graph that belong to no call, with how many in each replay.
        rivals: other graphs in the profile that fit as well.
    """

    way: Way
    told: Told
    raw: RawGraph
    places: Mapping[int, int]
    replays: tuple[Replay, ...]
    partial: int
    missing: tuple[tuple[str, int], ...]
    strangers: tuple[tuple[str, int], ...]
    rivals: int = 0

    def call(self, node: int) -> int | None:
        """The call of a graph node, by its whole id."""
        return self.raw.owner[self.places[node]] if node in self.places else None


def expected(program: Program, schedule: Schedule, line: Timeline | None, kernels: Sequence[Kernel] = ()) -> Expected:
    """What a report knows of a plan's replays.

    Args:
        program: its calls.
        schedule: the plan.
        line: its replay as it was measured; None, simulated or unreliable: its kernels are not known.
        kernels: launch shapes of the calls' kernels, of any plan.
    """
    known = line is not None and line.source == "measured" and line.reliable
    spans, ids = (line.spans, line.nodes) if line is not None and known else ((), ())
    shapes: dict[tuple[int | None, str], list[Kernel]] = {}
    for kernel in reversed(kernels):
        shapes.setdefault((kernel.call, short_kernel_name(kernel.name)), []).append(kernel)
    kinds: list[str] = []
    launches: list[Launch] = []
    owner: list[int | None] = []
    places: dict[int, int] = {}

    def add(call: int | None, index: int | None) -> int:
        kind, launch = (_NO_TIME, Launch()) if index is None else _launch(spans[index], shapes)
        if index is not None and ids:
            places[ids[index]] = len(kinds)
        kinds.append(kind)
        launches.append(launch)
        owner.append(call)
        return len(kinds) - 1

    of_call: dict[int | None, list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda index: ids[index] if ids else index):
        of_call.setdefault(spans[index].call, []).append(index)
    for index in of_call.get(None, ()):
        add(None, index)
    waits: dict[int, list[int]] = {}
    for producer, consumer in schedule.syncs:
        waits.setdefault(consumer, []).append(producer)
    edges: set[tuple[int, int]] = set()
    last_on: dict[int, int] = {}
    last_of: dict[int, int] = {}
    for call in schedule.order:
        chain = [add(call, index) for index in of_call.get(call, (None,))]
        edges.update(pairwise(chain))
        stream = schedule.stream[call]
        before = [last_of[one] for one in waits.get(call, ()) if one in last_of]
        edges.update((node, chain[0]) for node in (*before, last_on.get(stream, chain[0])) if node != chain[0])
        last_on[stream] = last_of[call] = chain[-1]
    raw = RawGraph(tuple(range(len(kinds))), tuple(kinds), tuple(sorted(edges)), tuple(owner))
    names = whole_name("capture", program, schedule), whole_name("replay", program, schedule)
    return Expected(schedule, *names, tuple(map(call_name, program.calls)), raw, tuple(launches), places)


def join(export: Export, plan: Expected) -> Joined:
    """Find the graph of ``plan`` among those that were replayed, and tell its nodes.

    Where the profile holds the plan's own ranges around replays, only those replays count.

    Raises:
        InputError: no graph in the profile is the plan's: of each fewer than half of the nodes could be told.

    Complexity:
        O(n log n) in activities, nodes and ranges; by name and order as ``tell_by_order``, for five replays.
    """
    owners = _captured(export, plan)
    found = []
    for replays in _graphs(export, plan):
        whole, partial = _whole(replays)
        told = [_by_capture(export, plan, owners, whole), _by_place(export, plan, whole)]
        if not any(one is not None and one.told.check.passed for one in told):
            told.append(_by_order(plan, whole))
        able = [one for one in told if one is not None]
        if able:
            found.append(replace(max(able, key=_rank), partial=partial))
    if not found:
        graphs = len({replay.graph for replay in export.replays})
        many = (
            "the CUDA graph in the profile is not" if graphs == 1 else f"none of {graphs} CUDA graphs in the profile is"
        )
        raise InputError(
            f"{many} the plan {plan.schedule.policy!r} of the report",
            fix="profile the report's model with its plan (prepare(..., plan=report.plan)) and --trace=cuda,nvtx",
        )
    best = max(found, key=lambda one: (_rank(one), len(one.replays)))
    return replace(best, rivals=sum(_rank(one) == _rank(best) for one in found) - 1)


def _rank(one: Joined) -> tuple[bool, int, int]:
    return one.told.check.passed, _SUREST[one.way], one.told.check.seen


def _graphs(export: Export, plan: Expected) -> list[list[Replay]]:
    """Replays by graph; only those that the plan's ranges hold, if there are any."""
    inside = _Ranges(one for one in export.ranges if one.text == plan.replay)
    named = [replay for replay in export.replays if inside.at(replay.thread, replay.launched_ns)]
    graphs: dict[tuple[int, int], list[Replay]] = {}
    for replay in named or export.replays:
        graphs.setdefault(replay.graph, []).append(replay)
    return list(graphs.values())


def _whole(replays: Sequence[Replay]) -> tuple[tuple[Replay, ...], int]:
    """Replays that ran what most of them ran, and how many did not."""
    ran = [tuple(sorted(replay.nodes)) for replay in replays]
    counts = Counter(ran)
    usual = max(counts, key=lambda nodes: (counts[nodes], len(nodes)))
    whole = tuple(replay for replay, nodes in zip(replays, ran, strict=True) if nodes == usual)
    return whole, len(replays) - len(whole)


class _Ranges:
    """Ranges that do not nest: which holds a moment on a thread."""

    def __init__(self, ranges: Iterable[NamedRange]) -> None:
        self._of: dict[int, list[NamedRange]] = {}
        for one in ranges:
            self._of.setdefault(one.thread, []).append(one)
        self._starts = {thread: [one.start_ns for one in of] for thread, of in self._of.items()}

    def at(self, thread: int, moment: int) -> NamedRange | None:
        index = bisect_right(self._starts.get(thread, ()), moment) - 1
        found = self._of[thread][index] if index >= 0 else None
        return found if found is not None and moment <= found.end_ns else None


def _captured(export: Export, plan: Expected) -> dict[tuple[int, int], int | None]:
    """The call that captured each node, by process and node, where the profile holds whole captures of the plan.

    Inside a capture's range there is one for each call, in the order in which they are issued. A capture in which names
    or order are others (one that was given up, one of another version) says nothing.
    """
    order = plan.schedule.order
    wanted = [plan.calls[call] for call in order]
    names = set(wanted)
    ranges = [one for one in export.ranges if one.text in names]
    range_keys = [(one.thread, one.start_ns) for one in ranges]
    node_keys = [(node.thread, node.start_ns) for node in export.created]
    owners: dict[tuple[int, int], int | None] = {}
    for whole in (one for one in export.ranges if one.text == plan.capture):
        begin, end = (whole.thread, whole.start_ns), (whole.thread, whole.end_ns)
        inside = ranges[bisect_left(range_keys, begin) : bisect_right(range_keys, end)]
        if [one.text for one in inside] != wanted:
            continue
        held, call_of = _Ranges(inside), dict(zip(inside, order, strict=True))
        for node in export.created[bisect_left(node_keys, begin) : bisect_right(node_keys, end)]:
            one = held.at(node.thread, node.start_ns)
            owners[process_of(node.thread), node.node] = call_of[one] if one else None
    return owners


def _source(export: Export, process: int, node: int) -> int:
    """The node that was captured, of which ``node`` is a copy, or a copy's copy."""
    seen: set[int] = set()
    while node not in seen and (process, node) in export.copied:
        seen.add(node)
        node = export.copied[process, node]
    return node


def _by_capture(
    export: Export, plan: Expected, owners: Mapping[tuple[int, int], int | None], whole: Sequence[Replay]
) -> Joined | None:
    process = whole[0].process
    places: dict[int, int] = {}
    kinds: list[str] = []
    calls: list[int | None] = []
    for node, activity in sorted(_activities(whole[0]).items()):
        key = process, _source(export, process, node)
        if key in owners:
            places[node] = len(places)
            kinds.append(activity.kind)
            calls.append(owners[key])
    if not places:
        return None
    raw = RawGraph(tuple(range(len(calls))), tuple(kinds), (), tuple(calls))
    return _joined("capture ranges", raw, len(calls), places, whole, plan)


def _by_place(export: Export, plan: Expected, whole: Sequence[Replay]) -> Joined | None:
    process = whole[0].process
    places: dict[int, int] = {}
    for node, activity in _activities(whole[0]).items():
        at = plan.ids.get(node_of(_source(export, process, node)))
        if at is not None and (activity.kind, _name(activity)) == (plan.raw.kinds[at], plan.launches[at].name):
            places[node] = at
    if 2 * len(places) < max(1, len(plan.timed), len(whole[0].nodes)):
        return None
    return _joined("graph node ids", plan.raw, len(plan.timed), places, whole, plan)


def _by_order(plan: Expected, whole: Sequence[Replay]) -> Joined | None:
    shaped = all(any(launch.grid) for node, launch in enumerate(plan.launches) if plan.raw.kinds[node] == "kernel")
    for shapes in (True, False) if shaped else (False,):
        said: Counter[tuple[tuple[int, int], ...]] = Counter()
        doubt = 0
        for replay in whole[:_ORDERED]:
            seen = [replace(one, node=at) for at, one in enumerate(replay.activities)]
            launches = plan.launches
            if not shapes:
                seen = [replace(one, grid=_NOWHERE, block=_NOWHERE) for one in seen]
                launches = tuple(Launch(launch.name) for launch in launches)
            told = tell_by_order(seen, plan.raw, launches, 1)
            if told.runs:
                doubt = max(doubt, told.check.ambiguous)
                said[tuple(sorted((replay.nodes[of[0].node], node) for node, of in told.runs.items()))] += 1
        if said:
            places = dict(said.most_common(1)[0][0])
            return _joined("name and order", plan.raw, len(plan.timed), places, whole, plan, doubt)
    return None


def _joined(
    way: Way,
    raw: RawGraph,
    timed: int,
    places: Mapping[int, int],
    whole: Sequence[Replay],
    plan: Expected,
    doubt: int = 0,
) -> Joined:
    runs: dict[int, list[Activity]] = {}
    for replay in whole:
        for node, activity in zip(replay.nodes, replay.activities, strict=True):
            if node in places:
                runs.setdefault(places[node], []).append(activity)
    once = {node: tuple(of) for node, of in sorted(runs.items()) if len(of) == len(whole)}
    strange = Counter(
        _name(activity)
        for node, activity in zip(whole[0].nodes, whole[0].activities, strict=True)
        if node not in places
    )
    unexpected = strange.total() * len(whole)
    check = SelfCheck(
        timed, len(once), "name and order" if way == "name and order" else "graph node id", doubt, unexpected
    )
    if way == "capture ranges":
        ran = Counter(_name(of[0]) for of in once.values())
        missing = Counter(plan.launches[node].name for node in plan.timed) - ran
    else:
        missing = Counter(plan.launches[node].name for node in plan.timed if node not in once)
    return Joined(way, Told(once, check), raw, places, tuple(whole), 0, _sorted(missing), _sorted(strange))


def _sorted(counts: Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def _activities(replay: Replay) -> dict[int, Activity]:
    return dict(zip(replay.nodes, replay.activities, strict=True))


def _name(activity: Activity) -> str:
    return activity.kind if activity.kind != "kernel" else short_kernel_name(activity.name)


def _launch(span: Span, shapes: Mapping[tuple[int | None, str], list[Kernel]]) -> tuple[str, Launch]:
    name = short_kernel_name(span.name)
    left = shapes.get((span.call, name))
    launch = Launch(name, left[-1].grid, left.pop().block) if left else Launch(name)
    return name if name in TIMED else "kernel", launch
