"""Policy ``contention``: in simulation as fast as what it builds on, and faster where calls crowd each other."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.measurement import TIE
from nimble_core.scheduling.policies import critical_path, nimble, single
from nimble_core.scheduling.policies.contention import STREAMS, contention
from nimble_core.scheduling.simulator import EXACT, H200, DeviceModel, simulate
from nimble_core.scheduling.verify_schedule import check_schedule
from tests.support.strategies import costs_for, dags

DEVICES = st.sampled_from([EXACT, H200, DeviceModel(gap_ns=1.0, sync_ns=3.0, per_call=0.3, per_share=0.5)])


@st.composite
def measured(draw: st.DrawFn) -> tuple[CallGraph, Costs]:
    """A graph and costs, in nanoseconds or thousands of them, with or without demand."""
    graph = draw(dags())
    costs = draw(costs_for(graph))
    if draw(st.booleans()):
        share = st.lists(st.integers(1, 10).map(lambda tenths: tenths / 10), min_size=graph.size, max_size=graph.size)
        costs = replace(costs, ns=tuple(1000 * ns for ns in costs.ns), demand=tuple(draw(share)))
    return graph, costs


@given(measured(), st.none() | st.integers(1, 5), DEVICES)
def test_valid_within_the_cap_and_never_slower_than_what_it_builds_on(
    task: tuple[CallGraph, Costs], cap: int | None, device: DeviceModel
) -> None:
    graph, costs = task
    plan = check_schedule(graph, contention(graph, costs, max_streams=cap, device=device))
    assert plan.policy == "contention"
    assert plan.streams <= (cap or STREAMS)
    assert plan == contention(graph, costs, max_streams=cap, device=device)
    taken = simulate(graph, plan, costs, device).length_ns
    for policy in (single, nimble, critical_path):
        rival = simulate(graph, policy(graph, costs, max_streams=cap), costs, device).length_ns
        assert taken <= rival * TIE**2


def test_calls_of_the_longest_path_are_urgent() -> None:
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    plan = contention(graph, Costs((2e4, 3e4, 1e4, 2e4), "given"))
    assert plan.streams == 2
    assert plan.priority == (1, 1, 0, 1)
    nearly = contention(graph, Costs((2e4, 3e4, 2.95e4, 2e4), "given"))
    assert nearly.priority == (1, 1, 1, 1)


def test_waits_and_company_are_weighed() -> None:
    graph = graph_from_edges(6, [(0, 3), (1, 2), (2, 3), (3, 4)])
    costs = Costs((16e3, 11e3, 5e3, 14e3, 6e3, 17e3), "given")
    device = DeviceModel(gap_ns=650.0, sync_ns=2500.0, per_call=0.24, per_share=0.4)
    plan = contention(graph, costs, device=device)
    taken = simulate(graph, plan, costs, device).length_ns
    for policy in (single, nimble, critical_path):
        assert taken < 0.99 * simulate(graph, policy(graph, costs), costs, device).length_ns


def test_of_equally_fast_plans_the_one_with_fewer_streams_wins() -> None:
    chain = graph_from_edges(4, [(0, 1), (1, 2), (2, 3)])
    assert contention(chain, Costs((5e3,) * 4, "given")).streams == 1
    empty = graph_from_edges(3, [])
    assert contention(empty, Costs((0.0,) * 3, "given"), device=EXACT).streams == 1


def test_unmeasured_calls_get_the_streams_of_nimble() -> None:
    graph = graph_from_edges(12, [])
    plan = contention(graph, uniform_costs(12), max_streams=4)
    assert plan == replace(nimble(graph, uniform_costs(12), max_streams=4), policy="contention")
