"""Which node of a replayed graph is which call of a report: two tools' views of one plan, joined.

Pure. A node's id tells it exactly; what the id means is found in one of three ways, the surest first:

1. By the ranges that a capture leaves in the profile itself: a node belongs to the call in whose NVTX range it was
   captured, and an instance's node to that of the node it was copied from.
2. By its place in the graph (the lower half of its id), which is the same for the same plan in every process, where the
   report holds the places of its own replay; a node counts only if its kernel has the name that the report knows.
3. By kernel name and the order of the plan, as where there are no ids at all (``nimble_core.observation``).

A plan in several launches replays as several graphs, one after the other. Which of them are one replay the profile says
where it holds the plan's ranges around replays; else graphs of which each runs its own part of the plan are one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from nimble_core.costs import Kernel
from nimble_core.cupti import Activity
from nimble_core.emitted import RawGraph
from nimble_core.errors import InputError
from nimble_core.kernel_names import short_kernel_name
from nimble_core.observation import TIMED, Launch, Told, tell_by_order
from nimble_core.program import Program
from nimble_core.ranges import call_name, whole_name
from nimble_core.schedule import Schedule
from nimble_core.timeline import SelfCheck, Span, Timeline
from nimble_viz.measure.nsys_sqlite import Export, NamedRange, Replay, node_of, process_of

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
        parts: the launch of the plan that each node of ``raw`` belongs to.
        ids: position in ``raw`` by place in the graph; empty if unknown.
    """

    schedule: Schedule
    capture: str
    replay: str
    calls: tuple[str, ...]
    raw: RawGraph
    launches: tuple[Launch, ...]
    parts: tuple[int, ...]
    ids: Mapping[int, int]

    @property
    def timed(self) -> tuple[int, ...]:
        """Nodes of which the kernel is known."""
        return tuple(node for node, kind in enumerate(self.raw.kinds) if kind != _NO_TIME)

    @property
    def shown(self) -> tuple[int, ...]:
        """Launches of the plan that show in a profile: those that run a kernel, or all where none is known."""
        return tuple(sorted({self.parts[node] for node in self.timed} or set(self.parts)))


@dataclass(frozen=True, slots=True)
class Joined:
    """The replays of one graph, or of those that are launched one after the other, node by node.

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
        shifts: other ways to divide the launches of these graphs into replays that fit as well.
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
    shifts: int = 0

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
    parts: list[int] = []
    places: dict[int, int] = {}
    launch_of = schedule.launch_of()
    begun = _begun(spans, launch_of)

    def add(call: int | None, index: int | None) -> int:
        kind, launch = (_NO_TIME, Launch()) if index is None else _launch(spans[index], shapes)
        if index is not None and ids:
            places[ids[index]] = len(kinds)
        kinds.append(kind)
        launches.append(launch)
        owner.append(call)
        parts.append(launch_of[call] if call is not None else begun[index] if index is not None else 0)
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
    calls = tuple(map(call_name, program.calls))
    return Expected(schedule, *names, calls, raw, tuple(launches), tuple(parts), places)


def _begun(spans: Sequence[Span], launch_of: Sequence[int]) -> list[int]:
    """The launch that ran when each span began: of spans that belong to no call it is theirs."""
    found, latest = [0] * len(spans), 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_ns):
        call = spans[index].call
        latest = max(latest, launch_of[call] if call is not None else 0)
        found[index] = latest
    return found


def join(export: Export, plan: Expected) -> Joined:
    """Find the graph of ``plan``, or those of its launches, among all that were replayed, and tell its nodes.

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
        ways = [_by_capture(export, plan, owners, whole), _by_place(export, plan, whole)]
        if not any(one is not None and one.told.check.passed and _in_turn(plan, one) for one in ways):
            ways.append(_by_order(plan, whole))
        able = [one for one in ways if one is not None and _in_turn(plan, one)]
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
    alike = [_graphs_of(one.replays[0]) for one in found if _rank(one) == _rank(best)]
    own = _graphs_of(best.replays[0])
    shifts = alike.count(own) - 1
    told = best.told
    if shifts and best.way == "name and order":  # any node may be one of another launch
        told = replace(told, check=replace(told.check, ambiguous=told.check.seen))
    return replace(best, told=told, rivals=len(set(alike)) - 1, shifts=shifts)


def _rank(one: Joined) -> tuple[bool, int, int]:
    return one.told.check.passed, _SUREST[one.way], one.told.check.seen


def _graphs(export: Export, plan: Expected) -> list[list[Replay]]:
    """Replays by graph, or by the graphs of their launches; only those in the plan's ranges, if there are any."""
    inside = _Ranges(one for one in export.ranges if one.text == plan.replay)
    held: dict[NamedRange, list[Replay]] = {}
    for replay in _launched(export.replays):
        around = inside.at(replay.thread, replay.launched_ns)
        if around is not None:
            held.setdefault(around, []).append(replay)
    if not plan.schedule.launches:
        alone = [replay for of in held.values() for replay in of] or export.replays
        return list(_by_graph(alone).values())
    if held:
        return _by_engine(list(held.values()))
    length = len(plan.shown)
    found = [_in_rounds(export.replays, graphs) for graphs in _sequences(export.replays, length)]
    # Two that only once followed each other are not of one replay: mostly a part of them runs.
    return [rounds for rounds in found if len(_parts(_whole(rounds)[0][0])) == length]


_Graph = tuple[int, int]


def _by_graph(replays: Iterable[Replay]) -> dict[_Graph, list[Replay]]:
    graphs: dict[_Graph, list[Replay]] = {}
    for replay in replays:
        graphs.setdefault(replay.graph, []).append(replay)
    return graphs


def _graphs_of(replay: Replay) -> frozenset[_Graph]:
    """The graphs of all its launches."""
    return frozenset((replay.process, node >> 32) for node in replay.nodes)


def _launched(replays: Iterable[Replay]) -> list[Replay]:
    """In the order of their launches; where one is not known, by its first kernel."""
    return sorted(replays, key=lambda one: one.launched_ns if one.launched_ns >= 0 else one.activities[0].start_ns)


def _by_engine(rounds: Sequence[Sequence[Replay]]) -> list[list[Replay]]:
    """Replays, each given by its launches, that have a graph in common: an instance is one engine's."""
    engines: dict[_Graph, list[Replay]] = {}
    for launches in sorted(rounds, key=len, reverse=True):  # the profile may hold others in part
        engine = next((engines[one.graph] for one in launches if one.graph in engines), [])
        engine.append(_together(launches))
        for one in launches:
            engines.setdefault(one.graph, engine)
    return [_launched(engine) for engine in {id(engine): engine for engine in engines.values()}.values()]


def _sequences(replays: Sequence[Replay], length: int) -> list[tuple[_Graph, ...]]:
    """What may be the graphs of one replay: ``length`` of them, launched one after the other on a thread."""
    threads: dict[tuple[int, int], list[_Graph]] = {}
    for replay in _launched(replays):
        threads.setdefault((replay.process, replay.thread), []).append(replay.graph)
    found = (tuple(graphs[at : at + length]) for graphs in threads.values() for at in range(len(graphs) - length + 1))
    return list(dict.fromkeys(graphs for graphs in found if len(set(graphs)) == length))


def _in_rounds(replays: Sequence[Replay], graphs: Sequence[_Graph]) -> list[Replay]:
    """Launches of ``graphs``, those that follow each other in this order as one replay."""
    turn = {graph: at for at, graph in enumerate(graphs)}
    rounds: list[list[Replay]] = []
    for replay in _launched(replay for replay in replays if replay.graph in turn):
        if not rounds or turn[replay.graph] <= turn[rounds[-1][-1].graph]:
            rounds.append([])
        rounds[-1].append(replay)
    return [_together(launches) for launches in rounds]


def _together(launches: Sequence[Replay]) -> Replay:
    """One replay of its launches, in their order."""
    return replace(
        launches[0],
        launches=tuple(launch for one in launches for launch in one.launches),
        nodes=tuple(node for one in launches for node in one.nodes),
        activities=tuple(activity for one in launches for activity in one.activities),
    )


def _parts(replay: Replay) -> list[range]:
    """Which activities are of which launch."""
    begin = [at for at, launch in enumerate(replay.launches) if not at or launch != replay.launches[at - 1]]
    return [range(*part) for part in pairwise((*begin, len(replay.launches)))]


def _in_turn(plan: Expected, one: Joined) -> bool:
    """Whether what was told of each launch is of other launches of the plan than what was told of those before."""
    launch_of, reached = plan.schedule.launch_of(), -1
    nodes = one.replays[0].nodes
    for part in _parts(one.replays[0]):
        calls = {one.call(nodes[at]) for at in part}
        ran = {launch_of[call] for call in calls if call is not None}
        if ran and min(ran) <= reached:
            return False
        reached = max(ran, default=reached)
    return True


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
    parts, graphs = _parts(whole[0]), _part_graphs(plan)
    if len(parts) != len(graphs):
        return None
    for shapes in (True, False) if shaped else (False,):
        said: Counter[tuple[tuple[int, int], ...]] = Counter()
        doubt = 0
        for replay in whole[:_ORDERED]:
            found: list[tuple[int, int]] = []
            doubtful = 0
            for part, (nodes, raw) in zip(_parts(replay), graphs, strict=True):
                seen = [replace(replay.activities[at], node=at) for at in part]
                launches = [plan.launches[node] for node in nodes]
                if not shapes:
                    seen = [replace(one, grid=_NOWHERE, block=_NOWHERE) for one in seen]
                    launches = [Launch(launch.name) for launch in launches]
                told = tell_by_order(seen, raw, launches, 1)
                if not told.runs:
                    break
                doubtful += told.check.ambiguous
                found += ((replay.nodes[of[0].node], nodes[at]) for at, of in told.runs.items())
            else:
                doubt = max(doubt, doubtful)
                said[tuple(sorted(found))] += 1
        if said:
            places = dict(said.most_common(1)[0][0])
            return _joined("name and order", plan.raw, len(plan.timed), places, whole, plan, doubt)
    return None


def _part_graphs(plan: Expected) -> list[tuple[list[int], RawGraph]]:
    """Of each launch that shows in a profile: its nodes, by position in ``plan.raw``, and the graph of them alone."""
    found = []
    for launch in plan.shown:
        nodes = [node for node, part in enumerate(plan.parts) if part == launch]
        place = {node: at for at, node in enumerate(nodes)}
        edges = tuple((place[u], place[v]) for u, v in plan.raw.edges if u in place and v in place)
        kinds = tuple(plan.raw.kinds[node] for node in nodes)
        found.append((nodes, RawGraph(tuple(range(len(nodes))), kinds, edges)))
    return found


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
