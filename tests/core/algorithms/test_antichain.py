"""Widths and widest sets, against networkx and by Dilworth's theorem."""

from __future__ import annotations

import itertools

import networkx
from hypothesis import given, settings
from networkx.algorithms import bipartite

from nimble_core.algorithms.antichain import level_width, widest_set, width
from nimble_core.ir.call_graph import CallGraph, predecessors
from tests.support.strategies import dags


def chains_needed(graph: CallGraph) -> int:
    """Fewest chains that cover all calls, by networkx: calls less a maximum matching of the closure."""
    closure = networkx.transitive_closure_dag(graph.to_networkx())
    both = networkx.Graph()
    both.add_nodes_from(("left", u) for u in range(graph.size))
    both.add_edges_from((("left", u), ("right", v)) for u, v in closure.edges)
    matching = bipartite.hopcroft_karp_matching(both, [("left", u) for u in range(graph.size)])
    return graph.size - len(matching) // 2


@given(dags(max_calls=10))
def test_width_is_the_largest_antichain(graph: CallGraph) -> None:
    assert width(predecessors(graph)) == max(map(len, networkx.antichains(graph.to_networkx())), default=0)


@settings(max_examples=50)
@given(dags(max_calls=40))
def test_widest_set_is_independent_and_as_large_as_the_fewest_chains(graph: CallGraph) -> None:
    calls = widest_set(predecessors(graph))
    assert calls == sorted(set(calls))
    # An antichain holds one call of a chain at most: of equal size, neither can be improved.
    reach = set(networkx.transitive_closure_dag(graph.to_networkx()).edges)
    assert not any(pair in reach for pair in itertools.combinations(calls, 2))
    assert len(calls) == width(predecessors(graph)) == chains_needed(graph)
    assert widest_set(predecessors(graph, meg=True)) == calls


@given(dags(max_calls=10))
def test_of_several_widest_sets_the_earliest_is_found(graph: CallGraph) -> None:
    calls = widest_set(predecessors(graph))
    reach = set(networkx.transitive_closure_dag(graph.to_networkx()).edges)
    for other in networkx.antichains(graph.to_networkx()):
        if len(other) == len(calls):
            assert all(any(call == after or (call, after) in reach for after in other) for call in calls)


@given(dags())
def test_levels_bound_the_width_from_below(graph: CallGraph) -> None:
    assert level_width(predecessors(graph)) <= width(predecessors(graph))


def test_long_augmenting_paths_need_no_recursion() -> None:
    # A zigzag of 1,500 pairs: below[i] precedes above[i] and above[i + 1], and the greedy start takes the wrong ones.
    pairs = 1_500
    before: list[list[int]] = [[] for _ in range(pairs)]
    before += [[i, i + 1] if i + 1 < pairs else [i] for i in range(pairs)]
    assert width(before) == pairs
    assert len(widest_set(before)) == pairs
