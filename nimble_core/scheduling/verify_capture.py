"""Check a captured CUDA graph against its plan: count its edges, and prove that nothing races.

The plan promises waits; the graph that will run has edges. They are compared here, on the graph itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from nimble_core.algorithms.reachability import predecessor_lists, unconnected
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.utils.errors import ScheduleError

__all__ = [
    "RawGraph",
    "begun_by",
    "check_emitted",
    "emitted_counts",
    "emitted_syncs",
    "launched_ahead",
    "leading_fills",
]


@dataclass(frozen=True, slots=True)
class RawGraph:
    """Nodes and edges of a captured graph.

    Args:
        nodes: raw handles, every edge from an earlier to a later one.
        kinds: ``"kernel"``, ``"memcpy"``, ``"memset"``, or the driver's word, by node.
        edges: ``(from, to)`` as positions in ``nodes``, sorted.
        owner: the call that added each node, None where no call did.
        ahead: those of ``edges`` whose head may be launched before its tail has ended, and waits for that end by itself
            (programmatic dependent launch, CUDA C++ Programming Guide).
    """

    nodes: tuple[int, ...]
    kinds: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    owner: tuple[int | None, ...] = ()
    ahead: tuple[tuple[int, int], ...] = ()


def leading_fills(raw: RawGraph) -> tuple[int, ...]:
    """Find the nodes that fill memory before anything else of their call runs, ascending.

    >>> raw = RawGraph((7, 8, 9), ("kernel", "memset", "kernel"), ((0, 1), (1, 2)), (0, 1, 1))
    >>> leading_fills(raw), leading_fills(replace(raw, owner=(0, 0, 1)))
    ((1,), ())
    """
    inside = {head for tail, head in raw.edges if raw.owner[tail] == raw.owner[head]}
    return tuple(
        node
        for node, kind in enumerate(raw.kinds)
        if kind == "memset" and raw.owner[node] is not None and node not in inside
    )


def begun_by(raw: RawGraph, firsts: Sequence[int], instead_of: Collection[int]) -> RawGraph:
    """Add nodes that all others follow, and remove some; the neighbours of removed nodes stay in order.

    Args:
        raw: as it is.
        firsts: handles of the new nodes, which fill memory; they are no call's.
        instead_of: nodes to leave out, by position.

    Complexity:
        O(edges) for nodes with few neighbours each.

    >>> raw = RawGraph((7, 8, 9), ("kernel", "memset", "kernel"), ((0, 1), (1, 2)), (0, 1, 1))
    >>> begun_by(raw, [5], [1]) == RawGraph((5, 7, 9), ("memset", "kernel", "kernel"), ((0, 1), (1, 2)), (None, 0, 1))
    True
    """
    before: list[set[int]] = [set() for _ in raw.nodes]
    after: list[set[int]] = [set() for _ in raw.nodes]
    for tail, head in raw.edges:
        before[head].add(tail)
        after[tail].add(head)
    gone = set(instead_of)
    for node in sorted(gone):  # so that a removed neighbour has handed on its own already
        for head in after[node]:
            before[head] = (before[head] - {node}) | before[node]
    stay = [node for node in range(len(raw.nodes)) if node not in gone]
    new = range(len(firsts))
    place = {node: position for position, node in enumerate(stay, start=len(firsts))}
    kept = {(tail, head) for head in stay for tail in before[head]}
    begin = [(first, place[node]) for node in stay if not before[node] for first in new]
    return RawGraph(
        nodes=(*firsts, *(raw.nodes[node] for node in stay)),
        kinds=(*("memset" for _ in new), *(raw.kinds[node] for node in stay)),
        edges=tuple(sorted([*begin, *((place[tail], place[head]) for tail, head in kept)])),
        owner=(*(None for _ in new), *(raw.owner[node] for node in stay)),
        ahead=tuple(sorted((place[tail], place[head]) for tail, head in raw.ahead if (tail, head) in kept)),
    )


def launched_ahead(raw: RawGraph, waiting: Collection[int], library: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Find the edges whose heads may be launched before their tails have ended.

    Args:
        raw: as captured, with the call of each node.
        waiting: calls whose kernel waits, before all else, for whatever its node depends on; with more nodes than that
            kernel's they count as others.
        library: calls of libraries that know nothing of what precedes them: where they launch kernels ahead, these wait
            in time. Other kernels that are launched ahead may wait only for what their author put before them, which a
            schedule does not keep; inside a call it does.

    >>> raw = RawGraph((7, 8, 9), ("memset", "kernel", "kernel"), ((0, 1), (1, 2)), (0, 1, 2), ahead=((1, 2),))
    >>> launched_ahead(raw, [1, 2], []), launched_ahead(raw, [], [2]), launched_ahead(raw, [1], [])
    (((1, 2),), ((1, 2),), ())
    """
    already = frozenset(raw.ahead)
    nodes_of = Counter(raw.owner)

    def may_be(edge: tuple[int, int]) -> bool:
        before, call = (raw.owner[node] for node in edge)
        if call in waiting and nodes_of[call] == 1:
            return all(raw.kinds[node] == "kernel" for node in edge)
        return edge in already and call is not None and (call == before or call in library)

    return tuple(edge for edge in raw.edges if may_be(edge))


def emitted_syncs(schedule: Schedule, raw: RawGraph) -> list[tuple[int, int]]:
    """List the pairs of calls on different streams that an edge of the graph joins, sorted, once each."""
    stream, owner = schedule.stream, raw.owner
    pairs = {(owner[tail], owner[head]) for tail, head in raw.edges}
    return sorted((u, v) for u, v in pairs if u is not None and v is not None and stream[u] != stream[v])


def emitted_counts(schedule: Schedule, raw: RawGraph) -> SyncCounts:
    """Complete the schedule's counts by those of the graph: waits, forks, joins, edges inside calls, early launches."""
    if len(raw.owner) < len(raw.nodes):
        return schedule.counts
    # What fills memory for all calls at the beginning is no call's: streams start behind it.
    fills = {node for node, call in enumerate(raw.owner) if call is None and raw.kinds[node] == "memset"}
    heads, tails = {head for tail, head in raw.edges if tail not in fills}, {tail for tail, _ in raw.edges}
    return replace(
        schedule.counts,
        emitted=len(emitted_syncs(schedule, raw)),
        forks=len(raw.nodes) - len(heads | fills),
        joins=len(raw.nodes) - len(tails),
        inside=sum(raw.owner[tail] == raw.owner[head] is not None for tail, head in raw.edges),
        ahead=len({head for _, head in raw.ahead}),
    )


def check_emitted(
    schedule: Schedule, raw: RawGraph, hazards: Iterable[tuple[int, int]], program: Program | None = None
) -> None:
    """Prove on the captured graph that nothing races and that the planned waits were emitted.

    There may be more: a library that forks to a stream of its own leaves there, for its next call, what the last one
    waited for. That costs concurrency, never order; ``emitted_counts`` counts it.

    Args:
        schedule: what was captured.
        raw: the graph, with the call of each node.
        hazards: pairs ``(u, v)`` of calls: every node of v must come after every node of u.
        program: names calls in errors.

    Raises:
        ScheduleError: names the first hazard without a path; or, where every call added a node, the first wait that is
            planned and not emitted.

    Complexity:
        Linear in nodes and edges, plus one bitset pass for hazards that no single edge orders.

    >>> plan = Schedule("mine", (0, 1), (0, 1), ((0, 1),))
    >>> check_emitted(plan, RawGraph((7, 8), ("kernel", "kernel"), ((0, 1),), (0, 1)), [(0, 1)])
    >>> check_emitted(plan, RawGraph((7, 8), ("kernel", "kernel"), (), (0, 1)), [(0, 1)])
    Traceback (most recent call last):
    ...
    nimble_core.utils.errors.ScheduleError: the captured graph races: nothing orders call 0 -> call 1
      to do: this is a defect of the capture: report it with the model
    """
    first, last = _ends(schedule, raw)
    pairs = [(tail, head) for u, v in hazards for tail in last[u] for head in first[v]]
    for tail, head in unconnected(predecessor_lists(len(raw.nodes), raw.edges), pairs):
        u, v = raw.owner[tail], raw.owner[head]
        raise ScheduleError(f"the captured graph races: nothing orders {_pair(u, v, program)}", fix=_DEFECT)
    if all(first):
        for u, v in sorted(set(schedule.syncs).difference(emitted_syncs(schedule, raw))):
            what = f"the captured graph is not the plan: sync {_pair(u, v, program)} is planned but not in the graph"
            raise ScheduleError(what, fix=_DEFECT)


_DEFECT = "this is a defect of the capture: report it with the model"


def _ends(schedule: Schedule, raw: RawGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Find each call's first nodes, which no other node of it precedes, and its last ones."""
    inner_heads = {head for tail, head in raw.edges if raw.owner[tail] == raw.owner[head]}
    inner_tails = {tail for tail, head in raw.edges if raw.owner[tail] == raw.owner[head]}
    first: list[list[int]] = [[] for _ in schedule.stream]
    last: list[list[int]] = [[] for _ in schedule.stream]
    for node, call in enumerate(raw.owner):
        if call is not None:
            if node not in inner_heads:
                first[call].append(node)
            if node not in inner_tails:
                last[call].append(node)
    return first, last


def _pair(u: int | None, v: int | None, program: Program | None) -> str:
    if program is None or u is None or v is None:
        return f"call {u} -> call {v}"
    return f"{program.calls[u]} -> {program.calls[v]}"
