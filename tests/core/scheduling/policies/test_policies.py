"""Policies: the theorem, what a cap may cost, and the rule that each policy goes by."""

from __future__ import annotations

import os
import subprocess
import sys

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.algorithms.critical_path import critical_path as longest_path
from nimble_core.ir.call_graph import CallGraph, graph_from_edges, predecessors, successors
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.scheduling.policies import (
    POLICIES,
    critical_path,
    nimble,
    opara,
    plan_streams,
    resolve_policy,
    single,
    torchsched,
)
from nimble_core.scheduling.policies.critical_path import SYNC_COST_NS
from nimble_core.scheduling.simulator import DeviceModel, simulate
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError
from tests.support.strategies import costs_for, dags


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


@given(dags(), st.integers(1, 5), st.data())
def test_a_cap_holds_and_says_what_it_costs(graph: CallGraph, cap: int, data: st.DataObject) -> None:
    plan = check_schedule(graph, nimble(graph, data.draw(costs_for(graph)), max_streams=cap))
    assert plan.streams <= cap
    assert plan.maximum_concurrency == plan.minimum_syncs == (not plan.added_order)
    reach = closure(graph.size, graph.edges)
    lanes = stream_neighbours(plan.stream, plan.order)
    assert sorted(plan.added_order) == sorted(pair for pair in lanes if pair not in reach)


@given(dags())
def test_single_is_program_order_on_one_stream(graph: CallGraph) -> None:
    plan = check_schedule(graph, single(graph, uniform_costs(graph.size)))
    assert plan.stream == (0,) * graph.size
    assert plan.order == tuple(range(graph.size))
    assert plan.syncs == ()
    assert set(plan.added_order) == {(v - 1, v) for v in range(1, graph.size)} - set(graph.edges)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "single"])
def test_bad_caps_and_costs_are_refused(name: str) -> None:
    graph = graph_from_edges(2, [(0, 1)])
    with pytest.raises(InputError, match="max_streams=0"):
        POLICIES[name](graph, uniform_costs(2), max_streams=0)
    with pytest.raises(InputError, match="costs of 3 calls"):
        POLICIES[name](graph, uniform_costs(3))


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


@pytest.mark.parametrize("name", POLICIES)
@given(graph=dags(), cap=st.none() | st.integers(1, 5), data=st.data())
def test_every_policy_makes_valid_plans_of_any_graph_within_any_cap(
    name: str, graph: CallGraph, cap: int | None, data: st.DataObject
) -> None:
    costs = data.draw(costs_for(graph) | st.just(uniform_costs(graph.size)))
    plan = check_schedule(graph, POLICIES[name](graph, costs, max_streams=cap))
    assert plan.policy == name
    assert cap is None or plan.streams <= cap
    assert plan == POLICIES[name](graph, costs, max_streams=cap)


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from random import Random\n"
        "from nimble_core.ir.costs import Costs\n"
        "from nimble_core.ir.call_graph import graph_from_edges\n"
        "from nimble_core.scheduling.policies import POLICIES\n"
        "draw = Random(5)\n"
        "graph = graph_from_edges(200, [tuple(sorted(draw.sample(range(200), 2))) for _ in range(300)])\n"
        "costs = Costs(tuple(float(draw.randint(0, 9000)) for _ in range(200)), 'drawn')\n"
        "print([policy(graph, costs, max_streams=cap) for policy in POLICIES.values() for cap in (3, None)])\n"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1


@given(dags(), st.none() | st.integers(1, 4), st.sampled_from([None, 0.0, 0.5, 1.0, 3.0, 8.0]), st.data())
def test_critical_path_is_never_slower_than_one_stream(
    graph: CallGraph, cap: int | None, sync_ns: float | None, data: st.DataObject
) -> None:
    costs = data.draw(costs_for(graph) | st.just(uniform_costs(graph.size)))
    plan = check_schedule(graph, critical_path(graph, costs, max_streams=cap, sync_cost_ns=sync_ns))
    if sync_ns is None:
        sync_ns = 0.5 if costs.source == "uniform" else SYNC_COST_NS
    taken = simulate(graph, plan, costs, DeviceModel(sync_ns=sync_ns)).length_ns
    assert taken <= simulate(graph, single(graph, costs), costs, DeviceModel(sync_ns=sync_ns)).length_ns


@given(dags(), st.data())
def test_critical_path_reaches_the_longest_path_where_syncs_are_free(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    plan = critical_path(graph, costs, sync_cost_ns=0.0)
    assert simulate(graph, plan, costs).length_ns == longest_path(predecessors(graph), costs.ns)[0]


def test_critical_path_crosses_streams_only_where_that_pays() -> None:
    fork = graph_from_edges(3, [(0, 1), (0, 2)])
    assert critical_path(fork, Costs((9.0, 9.0, 3.0), "given"), sync_cost_ns=2.0).stream == (0, 0, 1)
    assert critical_path(fork, Costs((9.0, 1.0, 1.0), "given"), sync_cost_ns=2.0).stream == (0, 0, 0)
    assert critical_path(fork, Costs((9e3, 9e3, 9e3), "given")).streams == 2
    assert critical_path(fork, Costs((900.0, 900.0, 900.0), "given")).streams == 1
    # Unmeasured calls cost 1.0 of no unit at all.
    assert critical_path(fork, uniform_costs(3)).streams == 2


def test_critical_path_keeps_a_stream_for_the_more_urgent_successor() -> None:
    # Call 2 could start behind call 1 before it could start elsewhere, but then call 3 had to wait, or to move.
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3)])
    costs = Costs((10.0, 1.0, 100.0, 1000.0), "given")
    plan = critical_path(graph, costs, sync_cost_ns=2.0)
    assert plan.stream == (0, 0, 1, 0)
    assert simulate(graph, plan, costs, DeviceModel(sync_ns=2.0)).length_ns == 1011.0


def test_critical_path_issues_calls_in_the_order_in_which_they_start() -> None:
    # Call 2 has the longest path and is placed first, but waits for call 1 across streams; meanwhile call 3 starts.
    graph = graph_from_edges(4, [(0, 2), (1, 2)])
    plan = critical_path(graph, Costs((5.0, 5.0, 50.0, 10.0), "given"), max_streams=2, sync_cost_ns=2.0)
    assert plan.stream == (0, 1, 0, 1)
    assert plan.order == (0, 1, 3, 2)


@given(dags(), st.data())
def test_opara_first_successors_inherit_the_stream(graph: CallGraph, data: st.DataObject) -> None:
    plan = opara(graph, data.draw(costs_for(graph)))
    after = successors(graph, meg=True)
    heads = 0
    for call, sources in enumerate(predecessors(graph, meg=True)):
        heirs = [source for source in sources if after[source][0] == call]
        heads += not heirs
        if heirs:
            assert plan.stream[call] == plan.stream[heirs[0]]
    assert plan.added_order == ()
    assert plan.streams <= heads


def test_opara_launches_light_and_heavy_calls_in_turn() -> None:
    graph = graph_from_edges(6, [])
    demand = (0.1, 0.9, 0.2, 0.8, 0.3, 0.7)
    ns = tuple(1.0 - share for share in demand)
    assert opara(graph, Costs(ns, "given", demand=demand)).order == (0, 3, 2, 1, 4, 5)
    assert opara(graph, Costs(demand, "given")).order == (0, 3, 2, 1, 4, 5)


@given(dags(), st.integers(2, 5), st.data())
def test_torchsched_gives_the_longest_path_a_stream_and_deals_out_the_rest(
    graph: CallGraph, cap: int, data: st.DataObject
) -> None:
    costs = data.draw(costs_for(graph))
    plan = torchsched(graph, costs, max_streams=cap)
    _, path = longest_path(predecessors(graph), costs.ns)
    assert sum(costs.ns[call] for call in range(graph.size) if plan.stream[call] == 0) == sum(
        costs.ns[call] for call in path
    )
    rest = [lane for lane in plan.stream if lane]
    assert rest == [1 + turn % (cap - 1) for turn in range(len(rest))]
