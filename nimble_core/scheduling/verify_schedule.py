"""The verifier between planning and capture: a schedule that passes cannot race or deadlock, and keeps its promises."""

from __future__ import annotations

from nimble_core.algorithms.matching import maximum_matching
from nimble_core.algorithms.reachability import predecessor_lists, unconnected
from nimble_core.ir.call_graph import CallGraph, predecessors, successors
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule, positions, stream_neighbours
from nimble_core.utils.errors import ScheduleError

__all__ = ["check_schedule"]


def check_schedule(graph: CallGraph, schedule: Schedule, program: Program | None = None) -> Schedule:
    """Return ``schedule`` if it is safe for ``graph`` and keeps its promises.

    Checked: one stream per call, numbered without gaps; the order is a topological permutation; waits join different
    streams, once each, and never look into the future (which would deadlock); every hazard is ordered by streams and
    waits; the added order is exactly what streams and waits add; the promises and the count of planned waits hold.

    Args:
        graph: the hazards.
        schedule: what a policy made of them.
        program: names operators and modules in errors.

    Raises:
        ScheduleError: names the first pair of calls, or the figure, that is wrong.

    Complexity:
        Linear, plus one bitset pass over the hazards that neither a stream nor a wait of their own orders.

    >>> from nimble_core.ir.costs import uniform_costs
    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> from nimble_core.scheduling.policies import nimble
    >>> graph = graph_from_edges(3, [(0, 1), (0, 2)])
    >>> check_schedule(graph, nimble(graph, uniform_costs(3))).streams
    2
    """
    size = graph.size
    if len(schedule.stream) != size or sorted(schedule.order) != list(range(size)):
        raise ScheduleError(
            f"the schedule is not one of {size} calls: {len(schedule.stream)} streams, {len(schedule.order)} in order",
            fix="one stream for each call, and each call once in the order",
        )
    if set(schedule.stream) != set(range(schedule.streams)):
        raise ScheduleError("streams are not numbered 0, 1, … without gaps", fix="renumber them")
    if schedule.priority and len(schedule.priority) != size:
        raise ScheduleError(f"{len(schedule.priority)} priorities for {size} calls", fix="one each, or none")
    position = positions(schedule.order)
    for u, v in graph.edges:
        if position[u] > position[v]:
            raise ScheduleError(f"{_pair(u, v, program)}: issued in the wrong order", fix="issue the producer first")
    _check_syncs(schedule, position, program)
    neighbours = stream_neighbours(schedule.stream, schedule.order)
    _check_hazards(graph, schedule, position, neighbours, program)
    _check_promises(graph, schedule, neighbours, program)
    return schedule


def _check_syncs(schedule: Schedule, position: list[int], program: Program | None) -> None:
    size = len(position)
    seen: set[tuple[int, int]] = set()
    for u, v in schedule.syncs:
        if not (0 <= u < size and 0 <= v < size):
            raise ScheduleError(f"sync call {u} -> call {v} names a call that is not there", fix=f"0 to {size - 1}")
        if schedule.stream[u] == schedule.stream[v]:
            raise ScheduleError(f"sync {_pair(u, v, program)} stays on stream {schedule.stream[u]}", fix="drop it")
        if position[u] > position[v]:
            raise ScheduleError(
                f"sync {_pair(u, v, program)} waits for what is issued later: a deadlock",
                fix="issue the producer first",
            )
        if (u, v) in seen:
            raise ScheduleError(f"sync {_pair(u, v, program)} is listed twice", fix="drop one")
        seen.add((u, v))
    if schedule.counts.planned != len(schedule.syncs):
        raise ScheduleError(
            f"the schedule counts {schedule.counts.planned} planned syncs and lists {len(schedule.syncs)}",
            fix="build it with nimble_core.scheduling.policies.plan_streams",
        )


def _check_hazards(
    graph: CallGraph,
    schedule: Schedule,
    position: list[int],
    neighbours: list[tuple[int, int]],
    program: Program | None,
) -> None:
    """Raise for the first hazard that streams and waits leave open, looking at positions in issue order."""
    stream, waits = schedule.stream, set(schedule.syncs)
    doubtful = [(position[u], position[v]) for u, v in graph.edges if stream[u] != stream[v] and (u, v) not in waits]
    if not doubtful:
        return
    ordered = predecessor_lists(
        graph.size, ((position[u], position[v]) for pairs in (neighbours, schedule.syncs) for u, v in pairs)
    )
    for first, second in unconnected(ordered, doubtful):
        u, v = schedule.order[first], schedule.order[second]
        raise ScheduleError(
            f"{_pair(u, v, program)}: a hazard that nothing orders: they run on streams {stream[u]} and {stream[v]}",
            fix=f"add the sync ({u}, {v})",
        )


def _check_promises(
    graph: CallGraph, schedule: Schedule, neighbours: list[tuple[int, int]], program: Program | None
) -> None:
    if graph.size == 0:
        return
    added = unconnected(predecessors(graph, meg=True), [*neighbours, *schedule.syncs])
    for u, v in sorted(set(added) ^ set(schedule.added_order)):
        missing = "is not listed in added_order" if (u, v) in added else "is listed in added_order but not added"
        raise ScheduleError(
            f"{_pair(u, v, program)}: the order {missing}", fix="list exactly what streams and waits add"
        )
    if schedule.maximum_concurrency and added:
        u, v = added[0]
        how = f"share stream {schedule.stream[u]}" if schedule.stream[u] == schedule.stream[v] else "are made to wait"
        raise ScheduleError(
            f"{_pair(u, v, program)}: independent calls {how}, though the schedule promises maximum concurrency",
            fix="let them run side by side, or drop the promise",
        )
    if schedule.minimum_syncs:
        # Where no order is added, the edges within streams are a matching: if it is maximum, one search proves it.
        within = [(u, v) for u, v in graph.meg if schedule.stream[u] == schedule.stream[v]]
        partner = maximum_matching(successors(graph, meg=True), () if added else within)
        best = sum(v >= 0 for v in partner)
        if schedule.meg_edges != len(graph.meg) or schedule.matched != best:
            raise ScheduleError(
                f"the schedule was made for {schedule.meg_edges} edges and a matching of {schedule.matched}, "
                f"the graph has {len(graph.meg)} and {best}",
                fix="plan it again for this graph",
            )
        if len(schedule.syncs) != schedule.meg_edges - schedule.matched:
            raise ScheduleError(
                f"{len(schedule.syncs)} syncs, though the schedule promises the minimum of "
                f"{schedule.meg_edges - schedule.matched}",
                fix="drop the syncs that others imply, or the promise",
            )


def _pair(u: int, v: int, program: Program | None) -> str:
    if program is None:
        return f"call {u} -> call {v}"
    return f"{program.calls[u]} -> {program.calls[v]}"
