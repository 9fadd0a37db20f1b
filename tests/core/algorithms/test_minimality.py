"""Minimality by brute force: the theorems of docs/algorithm.md on every small DAG, decided by trying everything.

Orders are tuples of bitsets: bit u of ``before[v]`` says that u must come before v.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core.algorithms.antichain import width
from nimble_core.ir.call_graph import CallGraph, graph_from_edges, predecessors
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies import nimble, plan_streams
from tests.support.strategies import dags

Order = tuple[int, ...]
Pair = tuple[int, int]


def order_of(size: int, edges: Iterable[Pair]) -> Order:
    """What ``edges`` (low to high) order, directly or through others."""
    before = [0] * size
    for u, v in sorted(edges, key=lambda edge: edge[1]):
        before[v] |= before[u] | 1 << u
    return tuple(before)


def ordered_pairs(before: Order) -> list[Pair]:
    return [(u, v) for v, row in enumerate(before) for u in range(v) if row >> u & 1]


def covers(before: Order) -> set[Pair]:
    """Ordered pairs with nothing between them: the edges of the transitive reduction, by its definition."""
    pairs = set(ordered_pairs(before))
    return {(u, v) for u, v in pairs if not any((u, w) in pairs and (w, v) in pairs for w in range(u + 1, v))}


def assignments(before: Order) -> Iterator[list[list[int]]]:
    """Every way to put calls on streams so that independent calls never share one: partitions into chains."""

    def extend(call: int, streams: list[list[int]]) -> Iterator[list[list[int]]]:
        if call == len(before):
            yield [list(members) for members in streams]
            return
        for members in streams:
            if before[call] >> members[-1] & 1:
                members.append(call)
                yield from extend(call + 1, streams)
                members.pop()
        streams.append([call])
        yield from extend(call + 1, streams)
        streams.pop()

    yield from extend(0, [])


def neighbours(streams: Iterable[list[int]]) -> set[Pair]:
    return {pair for members in streams for pair in itertools.pairwise(members)}


def fewest_waits(before: Order, streams: list[list[int]]) -> int:
    """The size of the smallest set of waits that, with the order within streams, gives exactly ``before``.

    Tried are all sets of cross-stream pairs of the order, not only those of edges: any other wait adds order.
    """
    home = {call: index for index, members in enumerate(streams) for call in members}
    within = neighbours(streams)
    candidates = [(u, v) for u, v in ordered_pairs(before) if home[u] != home[v]]
    for count in range(len(candidates) + 1):
        for waits in itertools.combinations(candidates, count):
            if order_of(len(before), within.union(waits)) == before:
                return count
    raise AssertionError("all ordered pairs together give the order")


def planned(graph: CallGraph) -> Schedule:
    return nimble(graph, uniform_costs(graph.size))


def streams_of(schedule: Schedule) -> list[list[int]]:
    return [[call for call in schedule.order if schedule.stream[call] == lane] for lane in range(schedule.streams)]


@pytest.mark.parametrize("size", range(6))
def test_no_assignment_of_any_small_dag_needs_fewer_waits(size: int) -> None:
    possible = list(itertools.combinations(range(size), 2))
    best: dict[Order, int] = {}
    for kept in itertools.product([False, True], repeat=len(possible)):
        graph = graph_from_edges(size, itertools.compress(possible, kept))
        before = order_of(size, graph.edges)
        if before not in best:
            best[before] = min(fewest_waits(before, streams) for streams in assignments(before))
        plan = planned(graph)
        assert plan.maximum_concurrency
        assert plan.minimum_syncs
        assert best[before] == len(plan.syncs) == plan.meg_edges - plan.matched
        assert order_of(size, neighbours(streams_of(plan)).union(plan.syncs)) == before
    assert len(best) == [1, 1, 2, 7, 40, 357][size]  # naturally labelled posets, OEIS A006455


def check_against_every_assignment(graph: CallGraph) -> None:
    """Takes for granted what is tried on five calls: the waits of given streams are the covers they do not hold."""
    before = order_of(graph.size, graph.edges)
    edges = covers(before)
    best = min(len(edges - neighbours(streams)) for streams in assignments(before))
    plan = planned(graph)
    assert best == len(plan.syncs) == len(edges - neighbours(streams_of(plan)))
    assert best == plan.meg_edges - plan.matched


@given(dags(max_calls=8))
def test_no_assignment_of_a_drawn_dag_needs_fewer_waits(graph: CallGraph) -> None:
    check_against_every_assignment(graph)


@settings(max_examples=60)
@given(dags(max_calls=5), st.data())
def test_waits_of_given_streams_are_the_fewest_that_add_no_order(graph: CallGraph, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=graph.size, max_size=graph.size))
    stream = [sorted(set(drawn)).index(lane) for lane in drawn]
    plan = plan_streams(graph, stream, policy="drawn")
    streams = streams_of(plan)
    forced = order_of(graph.size, neighbours(streams).union(graph.edges))
    assert len(plan.syncs) == fewest_waits(forced, streams)
    assert order_of(graph.size, neighbours(streams).union(plan.syncs)) == forced
    assert set(plan.syncs) <= set(graph.meg)


def test_folding_reaches_the_width_of_small_graphs_only() -> None:
    possible = list(itertools.combinations(range(5), 2))
    for kept in itertools.product([False, True], repeat=len(possible)):
        graph = graph_from_edges(5, itertools.compress(possible, kept))
        assert planned(graph).streams == width(predecessors(graph))
    # The docs say that it is not always so; the waits are the fewest all the same.
    graph = graph_from_edges(7, [(0, 2), (0, 6), (1, 2), (1, 6), (2, 3), (2, 4), (5, 6)])
    assert planned(graph).streams == 4
    assert width(predecessors(graph)) == 3
    check_against_every_assignment(graph)
