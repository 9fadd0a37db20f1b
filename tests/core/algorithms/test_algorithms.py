"""The pure algorithms, against networkx."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networkx.algorithms import bipartite

import nimble_core.algorithms
from nimble_core.algorithms.critical_path import critical_path, earliest_times, longest_behind
from nimble_core.algorithms.list_scheduling import list_order, run_order
from nimble_core.algorithms.matching import maximum_matching
from nimble_core.algorithms.path_cover import chains_of, fold_chains
from nimble_core.algorithms.reachability import ancestors, unconnected
from nimble_core.algorithms.transitive_reduction import transitive_reduction
from nimble_core.ir.call_graph import CallGraph, predecessors, successors
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import stream_neighbours
from nimble_core.scheduling.policies import nimble
from nimble_core.scheduling.verify_schedule import check_schedule
from tests.support.strategies import costs_for, dags

MODULES = [
    *(f"nimble_core.algorithms.{module.name}" for module in pkgutil.iter_modules(nimble_core.algorithms.__path__)),
    "nimble_core.ir.call_graph",
    *(f"nimble_core.scheduling.{name}" for name in ("verify_schedule", "simulator", "policies")),
    *(
        f"nimble_core.scheduling.policies.{name}"
        for name in ("base", "single", "nimble", "critical_path", "opara", "torchsched")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_tell_the_truth(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def closure(graph: CallGraph) -> set[tuple[int, int]]:
    return set(networkx.transitive_closure_dag(graph.to_networkx()).edges)


@given(dags(), st.data())
def test_ancestors_are_all_that_reach_a_call(graph: CallGraph, data: st.DataObject) -> None:
    marked = sorted(data.draw(st.sets(st.sampled_from(range(graph.size))))) if graph.size else []
    reach = closure(graph)
    for call, known in enumerate(ancestors(predecessors(graph), marked)):
        assert [u for bit, u in enumerate(marked) if known >> bit & 1] == [u for u in marked if (u, call) in reach]


@given(dags(), st.data())
def test_unconnected_pairs_are_those_outside_the_closure(graph: CallGraph, data: st.DataObject) -> None:
    calls = st.integers(0, max(0, graph.size - 1))
    pairs = data.draw(st.lists(st.tuples(calls, calls))) if graph.size else []
    reach = closure(graph)
    assert unconnected(predecessors(graph), pairs) == [pair for pair in pairs if pair not in reach]


@given(dags())
def test_reduction_is_networkx_reduction(graph: CallGraph) -> None:
    expected = sorted(networkx.transitive_reduction(graph.to_networkx()).edges)
    assert transitive_reduction(predecessors(graph)) == expected
    assert transitive_reduction([list(reversed(sources)) * 2 for sources in predecessors(graph)]) == expected


@given(dags())
def test_matching_is_a_matching_of_maximum_size(graph: CallGraph) -> None:
    partner = maximum_matching(successors(graph))
    pairs = [(u, v) for u, v in enumerate(partner) if v >= 0]
    assert set(pairs) <= set(graph.edges)
    assert len({v for _, v in pairs}) == len(pairs)
    both = networkx.Graph()
    both.add_nodes_from(("left", u) for u in range(graph.size))
    both.add_edges_from((("left", u), ("right", v)) for u, v in graph.edges)
    oracle = bipartite.hopcroft_karp_matching(both, [("left", u) for u in range(graph.size)])
    assert len(pairs) == len(oracle) // 2


def test_matching_and_chains_of_a_line_longer_than_the_stack() -> None:
    size = 50_000
    # The greedy start takes the edge that skips; the search must then flip long paths.
    edges = [[v for v in (u + 2, u + 1) if v < size] for u in range(size)]
    partner = maximum_matching(edges)
    assert sum(v >= 0 for v in partner) == size - 1
    assert [len(chain) for chain in chains_of(partner)] == [size]


@given(dags())
def test_chains_cover_every_call_once(graph: CallGraph) -> None:
    partner = maximum_matching(successors(graph, meg=True))
    chains = chains_of(partner)
    assert sorted(call for chain in chains for call in chain) == list(range(graph.size))
    assert len(chains) == graph.size - sum(v >= 0 for v in partner)
    assert [chain[0] for chain in chains] == sorted(chain[0] for chain in chains)


@given(dags())
def test_folding_adds_no_order(graph: CallGraph) -> None:
    chains = chains_of(maximum_matching(successors(graph, meg=True)))
    stream = fold_chains(predecessors(graph, meg=True), chains)
    reach = closure(graph)
    for u in range(graph.size):
        for v in range(u + 1, graph.size):
            assert stream[u] != stream[v] or (u, v) in reach
    assert set(stream) == set(range(max(stream, default=-1) + 1))
    assert max(stream, default=-1) < len(chains) or not chains


@given(dags(), st.data())
def test_critical_path_is_the_longest(graph: CallGraph, data: st.DataObject) -> None:
    ns = data.draw(costs_for(graph)).ns
    length, path = critical_path(predecessors(graph), ns)
    assert length == sum(ns[call] for call in path)
    assert all(edge in set(graph.edges) for edge in itertools.pairwise(path))
    weighted = networkx.DiGraph()
    weighted.add_nodes_from(["end", *range(graph.size)])
    weighted.add_weighted_edges_from((u, v, ns[u]) for u, v in graph.edges)
    weighted.add_weighted_edges_from((u, "end", ns[u]) for u in range(graph.size))
    assert length == networkx.dag_longest_path_length(weighted)
    assert earliest_times(predecessors(graph, meg=True), ns) == earliest_times(predecessors(graph), ns)


@given(dags(), st.data())
def test_the_longest_path_behind_a_call_leaves_a_fork_on_one_stream_only(graph: CallGraph, data: st.DataObject) -> None:
    ns = data.draw(costs_for(graph)).ns
    behind = longest_behind(successors(graph), ns)
    assert max(behind, default=0.0) == critical_path(predecessors(graph), ns)[0]
    assert behind == longest_behind(successors(graph, meg=True), ns)
    sync_ns = data.draw(st.sampled_from([0.0, 2.0, 5.0]))
    synced = longest_behind(successors(graph), ns, sync_ns=sync_ns)
    for call, after in enumerate(successors(graph)):
        staying = [max(synced[v] + sync_ns * (v != stays) for v in after) for stays in after]
        assert synced[call] == ns[call] + min(staying, default=0.0)


@given(dags(), st.data())
def test_list_order_is_topological_and_never_leaves_a_stream_idle_for_nothing(
    graph: CallGraph, data: st.DataObject
) -> None:
    ns = data.draw(costs_for(graph)).ns
    stream = data.draw(st.lists(st.integers(0, 3), min_size=graph.size, max_size=graph.size))
    rank = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=graph.size, max_size=graph.size))
    order = list_order(predecessors(graph), stream, ns, rank=rank)
    assert sorted(order) == list(range(graph.size))
    place = {call: at for at, call in enumerate(order)}
    assert all(place[u] < place[v] for u, v in graph.edges)
    start, end = [0.0] * graph.size, [0.0] * graph.size
    free: dict[int, float] = {}
    for call in order:
        start[call] = max([free.get(stream[call], 0.0), *(end[u] for u in predecessors(graph)[call])])
        end[call] = free[stream[call]] = start[call] + ns[call]
    for call in range(graph.size):
        could = max((end[u] for u in predecessors(graph)[call]), default=0.0)
        # From when it could run until it did, its stream was busy with others.
        beside = (c for c in range(graph.size) if stream[c] == stream[call] and c != call)
        busy = sum(max(min(end[c], start[call]) - max(start[c], could), 0.0) for c in beside)
        assert busy == start[call] - could


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))))
def test_list_order_takes_the_lowest_rank_and_else_the_longest_path_first(calls: list[tuple[int, int]]) -> None:
    alone, one = [[] for _ in calls], [0] * len(calls)
    rank, ns = [rank for rank, _ in calls], [float(ns) for _, ns in calls]
    assert list_order(alone, one, ns, rank=rank) == sorted(range(len(calls)), key=lambda call: rank[call])
    assert list_order(alone, one, ns) == sorted(range(len(calls)), key=lambda call: -ns[call])


@given(dags(), st.data())
def test_runs_are_issued_as_a_whole_and_in_order(graph: CallGraph, data: st.DataObject) -> None:
    plan = nimble(graph, uniform_costs(graph.size), max_streams=data.draw(st.none() | st.integers(1, 4)))
    order = run_order(plan.order, plan.stream, plan.syncs)
    check_schedule(graph, replace(plan, order=tuple(order)))
    assert stream_neighbours(plan.stream, order).sort() == stream_neighbours(plan.stream, plan.order).sort()
    waits, awaited = {v for _, v in plan.syncs}, {u for u, _ in plan.syncs}
    place = {call: position for position, call in enumerate(order)}
    for u, v in stream_neighbours(plan.stream, plan.order):
        if v not in waits and u not in awaited:
            assert place[v] == place[u] + 1
    assert order == run_order(order, plan.stream, plan.syncs)
