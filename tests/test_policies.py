"""Policies: the theorem, and what a cap may cost."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs_for, dags

from nimble_core.check import check_schedule
from nimble_core.costs import Costs, uniform_costs
from nimble_core.errors import InputError
from nimble_core.graph import CallGraph, graph_from_edges
from nimble_core.policies import POLICIES, nimble, plan_streams, resolve_policy, single
from nimble_core.policies.base import stream_neighbours
from nimble_core.schedule import Schedule


def closure(size: int, edges: object) -> set[tuple[int, int]]:
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(range(size))
    digraph.add_edges_from(edges)
    return set(networkx.transitive_closure_dag(digraph).edges)


@given(dags())
def test_independent_calls_never_share_a_stream(graph: CallGraph) -> None:
    plan = nimble(graph, uniform_costs(graph.size))
    reach = closure(graph.size, graph.edges)
    for u in range(graph.size):
        for v in range(u + 1, graph.size):
            assert plan.stream[u] != plan.stream[v] or (u, v) in reach
    assert plan.maximum_concurrency
    assert plan.added_order == ()


@given(dags())
def test_syncs_are_the_edges_that_the_matching_leaves(graph: CallGraph) -> None:
    plan = nimble(graph, uniform_costs(graph.size))
    assert plan.minimum_syncs
    assert len(plan.syncs) == plan.meg_edges - plan.matched == plan.counts.planned == plan.counts.meg
    assert plan.meg_edges == len(graph.meg)
    assert plan.counts.full >= plan.counts.meg
    assert plan.counts.emitted is None


@given(dags())
def test_uncapped_streams_add_no_order(graph: CallGraph) -> None:
    plan = nimble(graph, uniform_costs(graph.size))
    lanes = stream_neighbours(plan.stream, plan.order)
    assert closure(graph.size, [*graph.meg, *lanes]) == closure(graph.size, graph.edges)


@given(dags(max_calls=9), st.data())
def test_no_other_assignment_with_maximum_concurrency_needs_fewer_syncs(graph: CallGraph, data: st.DataObject) -> None:
    chains = data.draw(st.lists(st.integers(0, 3), min_size=graph.size, max_size=graph.size))
    numbers = {lane: index for index, lane in enumerate(dict.fromkeys(chains))}
    other = plan_streams(graph, [numbers[lane] for lane in chains], policy="drawn")
    if not other.added_order:
        assert len(other.syncs) >= len(nimble(graph, uniform_costs(graph.size)).syncs)


@given(dags(), st.integers(1, 5), st.data())
def test_a_cap_holds_and_says_what_it_costs(graph: CallGraph, cap: int, data: st.DataObject) -> None:
    plan = check_schedule(graph, nimble(graph, data.draw(costs_for(graph)), max_streams=cap))
    assert plan.streams <= cap
    assert plan.maximum_concurrency == plan.minimum_syncs == (not plan.added_order)
    reach = closure(graph.size, graph.edges)
    lanes = stream_neighbours(plan.stream, plan.order)
    assert list(plan.added_order) == [pair for pair in lanes if pair not in reach]


@given(dags(), st.integers(1, 4))
def test_capped_syncs_are_the_fewest_for_their_streams(graph: CallGraph, cap: int) -> None:
    plan = nimble(graph, uniform_costs(graph.size), max_streams=cap)
    lanes = stream_neighbours(plan.stream, plan.order)
    full = closure(graph.size, [*graph.meg, *lanes])
    assert closure(graph.size, [*plan.syncs, *lanes]) == full
    for dropped in plan.syncs:
        fewer = [sync for sync in plan.syncs if sync != dropped]
        assert closure(graph.size, [*fewer, *lanes]) != full


@given(dags())
def test_a_cap_that_does_not_bind_changes_nothing(graph: CallGraph) -> None:
    free = nimble(graph, uniform_costs(graph.size))
    assert nimble(graph, uniform_costs(graph.size), max_streams=max(1, free.streams)) == free


@given(dags())
def test_single_is_program_order_on_one_stream(graph: CallGraph) -> None:
    plan = check_schedule(graph, single(graph, uniform_costs(graph.size)))
    assert plan.stream == (0,) * graph.size
    assert plan.order == tuple(range(graph.size))
    assert plan.syncs == ()
    assert set(plan.added_order) == {(v - 1, v) for v in range(1, graph.size)} - set(graph.edges)


def test_above_the_cap_a_chain_joins_the_stream_that_is_free_soonest() -> None:
    # A long backbone 0-1-2 and three independent calls: with two streams they belong on the other one.
    graph = graph_from_edges(6, [(0, 1), (1, 2)])
    plan = nimble(graph, Costs((100.0, 100.0, 100.0, 10.0, 10.0, 10.0), "given"), max_streams=2)
    assert plan.stream == (0, 0, 0, 1, 1, 1)
    assert plan.added_order == ((3, 4), (4, 5))
    assert not plan.maximum_concurrency


def test_bad_caps_and_costs_are_refused() -> None:
    graph = graph_from_edges(2, [(0, 1)])
    with pytest.raises(InputError, match="max_streams=0"):
        nimble(graph, uniform_costs(2), max_streams=0)
    with pytest.raises(InputError, match="costs of 3 calls"):
        nimble(graph, uniform_costs(3))
    with pytest.raises(InputError, match="1 streams"):
        plan_streams(graph, [0], policy="mine")


def test_policies_are_found_by_name_and_functions_taken_as_they_are() -> None:
    assert {name: resolve_policy(name) for name in POLICIES} == dict(POLICIES)
    assert resolve_policy(nimble) is nimble
    with pytest.raises(InputError, match="single, nimble"):
        resolve_policy("nimbel")
    with pytest.raises(InputError, match="not a policy"):
        resolve_policy(3)  # type: ignore[arg-type]


def test_a_function_without_a_cap_is_a_policy_too() -> None:
    def mine(graph: CallGraph, costs: Costs) -> Schedule:
        return plan_streams(graph, range(graph.size), policy="mine")

    graph = graph_from_edges(2, [(0, 1)])
    assert resolve_policy(mine)(graph, uniform_costs(2), max_streams=1).policy == "mine"


@given(dags(), st.data())
def test_any_issue_order_gives_a_checked_plan_whose_waits_are_all_needed(graph: CallGraph, data: st.DataObject) -> None:
    order: list[int] = []
    while len(order) < graph.size:
        ready = [v for v in range(graph.size) if v not in order and all(u in order for u, w in graph.edges if w == v)]
        order.append(data.draw(st.sampled_from(ready)))
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=graph.size, max_size=graph.size))
    numbers = {lane: index for index, lane in enumerate(dict.fromkeys(chosen))}
    plan = check_schedule(graph, plan_streams(graph, [numbers[c] for c in chosen], policy="drawn", order=order))
    lanes = stream_neighbours(plan.stream, plan.order)
    whole = closure(graph.size, [*graph.meg, *lanes])
    assert closure(graph.size, [*plan.syncs, *lanes]) <= whole
    for sync in plan.syncs:
        rest = [other for other in plan.syncs if other != sync]
        assert sync not in closure(graph.size, [*rest, *lanes])


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="each of 2 calls once"):
        plan_streams(graph_from_edges(2, []), [0, 1], policy="mine", order=[0, 0])
