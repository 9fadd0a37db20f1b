"""The verifier must let good schedules pass and stop every bad one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Call, Origin, Program
from nimble_core.ir.schedule import Schedule, SyncCounts, stream_neighbours
from nimble_core.scheduling.policies import nimble, plan_streams
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError, ScheduleError
from tests.support.strategies import dags

DIAMOND = graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])
PLAN = nimble(DIAMOND, uniform_costs(5))


def with_syncs(plan: Schedule, syncs: list[tuple[int, int]]) -> Schedule:
    counts = replace(plan.counts, planned=len(syncs))
    return replace(plan, syncs=tuple(syncs), counts=counts, minimum_syncs=False)


@given(dags(), st.integers(1, 14), st.data())
def test_without_any_one_sync_a_plan_fails(graph: CallGraph, cap: int, data: st.DataObject) -> None:
    plan = nimble(graph, uniform_costs(graph.size), max_streams=cap)
    assume(plan.syncs)
    dropped = data.draw(st.sampled_from(plan.syncs))
    with pytest.raises(ScheduleError, match=r"call \d+ -> call \d+: a hazard that nothing orders"):
        check_schedule(graph, with_syncs(plan, [sync for sync in plan.syncs if sync != dropped]))


@given(dags(max_calls=8), st.data())
def test_accepts_exactly_the_schedules_that_order_every_hazard(graph: CallGraph, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(graph.size)))
    order = list(networkx.lexicographical_topological_sort(graph.to_networkx(), key=order.index))
    lanes = data.draw(st.lists(st.integers(0, 2), min_size=graph.size, max_size=graph.size))
    numbers = {lane: index for index, lane in enumerate(dict.fromkeys(lanes))}
    stream = [numbers[lane] for lane in lanes]
    apart = [(u, v) for at, v in enumerate(order) for u in order[:at] if stream[u] != stream[v]]
    syncs = data.draw(st.lists(st.sampled_from(apart), unique=True)) if apart else []
    runs = networkx.DiGraph()
    runs.add_nodes_from(range(graph.size))
    runs.add_edges_from(syncs)
    runs.add_edges_from((u, v) for at, v in enumerate(order) for u in order[:at] if stream[u] == stream[v])
    safe = set(graph.edges) <= set(networkx.transitive_closure_dag(runs).edges)
    reach = networkx.transitive_closure_dag(graph.to_networkx())
    last: dict[int, int] = {}
    added = []
    for call in order:
        before = last.get(stream[call], call)
        if before != call and not reach.has_edge(before, call):
            added.append((before, call))
        last[stream[call]] = call
    added += [(u, v) for u, v in syncs if not reach.has_edge(u, v)]
    plan = Schedule(
        policy="drawn",
        stream=tuple(stream),
        order=tuple(order),
        syncs=tuple(syncs),
        added_order=tuple(added),
        counts=SyncCounts(0, 0, len(syncs)),
    )
    if safe:
        assert check_schedule(graph, plan) is plan
    else:
        with pytest.raises(ScheduleError, match="a hazard that nothing orders"):
            check_schedule(graph, plan)


BAD: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "a stream is missing": (lambda plan: replace(plan, stream=plan.stream[:-1]), "not one of 5 calls"),
    "a call is issued twice": (lambda plan: replace(plan, order=(0, 1, 2, 3, 3)), "not one of 5 calls"),
    "streams have a gap": (lambda plan: replace(plan, stream=(0, 0, 2, 0, 0)), "without gaps"),
    "a negative stream": (lambda plan: replace(plan, stream=(-1, 0, 1, 0, 0)), "without gaps"),
    "priorities of another number": (lambda plan: replace(plan, priority=(1,)), "1 priorities"),
    "a consumer is issued first": (lambda plan: replace(plan, order=(0, 3, 1, 2, 4)), "call 1 -> call 3: issued"),
    "a sync to nowhere": (lambda plan: with_syncs(plan, [*plan.syncs, (0, 9)]), "not there"),
    "a sync within a stream": (lambda plan: with_syncs(plan, [*plan.syncs, (0, 1)]), "stays on stream 0"),
    "a sync from the future": (lambda plan: with_syncs(plan, [*plan.syncs, (4, 2)]), "deadlock"),
    "a sync listed twice": (lambda plan: with_syncs(plan, [*plan.syncs, plan.syncs[0]]), "listed twice"),
    "a wrong count": (lambda plan: replace(plan, counts=SyncCounts(2, 2, 7)), "counts 7 planned"),
    "added order that is none": (lambda plan: replace(plan, added_order=((1, 3),)), "but not added"),
    "more syncs than promised": (
        lambda plan: replace(with_syncs(plan, [*plan.syncs, (2, 4)]), minimum_syncs=True),
        "promises the minimum of 2",
    ),
    "a matching that is not maximum": (lambda plan: replace(plan, matched=2), "a matching of 2"),
    "another graph's edges": (lambda plan: replace(plan, meg_edges=6), "made for 6 edges"),
}


@pytest.mark.parametrize("case", BAD)
def test_stops(case: str) -> None:
    spoil, message = BAD[case]
    with pytest.raises(ScheduleError, match=message):
        check_schedule(DIAMOND, spoil(PLAN))


def test_stops_a_broken_promise_of_concurrency() -> None:
    plan = plan_streams(DIAMOND, [0] * 5, policy="one")
    with pytest.raises(ScheduleError, match=r"call 1 -> call 2: independent calls share stream 0"):
        check_schedule(DIAMOND, replace(plan, maximum_concurrency=True))
    with pytest.raises(ScheduleError, match=r"call 1 -> call 2: the order is not listed"):
        check_schedule(DIAMOND, replace(plan, added_order=()))


def test_order_added_by_a_wait_is_listed_and_breaks_the_promise_of_concurrency() -> None:
    fork = graph_from_edges(3, [(0, 1), (0, 2)])
    plan = plan_streams(fork, [0, 0, 1], policy="ordered", extra=[(1, 2)])
    assert (plan.syncs, plan.added_order) == (((1, 2),), ((1, 2),))
    assert check_schedule(fork, plan) is plan
    with pytest.raises(ScheduleError, match=r"call 1 -> call 2: the order is not listed"):
        check_schedule(fork, replace(plan, added_order=()))
    with pytest.raises(ScheduleError, match=r"call 1 -> call 2: independent calls are made to wait"):
        check_schedule(fork, replace(plan, maximum_concurrency=True))


@given(dags(), st.data())
def test_extra_order_is_kept_with_needed_waits_only(graph: CallGraph, data: st.DataObject) -> None:
    lanes = data.draw(st.lists(st.integers(0, 2), min_size=graph.size, max_size=graph.size))
    numbers = {lane: index for index, lane in enumerate(dict.fromkeys(lanes))}
    pairs = [(u, v) for v in range(graph.size) for u in range(v)]
    extra = data.draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []
    plan = plan_streams(graph, [numbers[lane] for lane in lanes], policy="drawn", extra=extra)
    assert check_schedule(graph, plan) is plan
    runs = networkx.DiGraph()
    runs.add_nodes_from(range(graph.size))
    runs.add_edges_from([*plan.syncs, *stream_neighbours(plan.stream, plan.order)])
    reach = networkx.transitive_closure_dag(runs)
    assert set(extra) <= set(reach.edges)
    for sync in plan.syncs:
        fewer = runs.copy()
        fewer.remove_edge(*sync)
        assert not networkx.has_path(fewer, *sync)


def test_extra_order_against_the_issue_order_is_refused() -> None:
    with pytest.raises(InputError, match=r"extra order 2 -> 1 contradicts"):
        plan_streams(graph_from_edges(3, []), [0, 1, 2], policy="wrong", extra=[(2, 1)])


def test_names_operators_and_modules() -> None:
    calls = tuple(
        Call(index, "aten.relu.default", (), (), origins=(Origin("aten.relu.default", f"layer.{index}", "m.py", 7),))
        for index in range(5)
    )
    with pytest.raises(ScheduleError, match=r"call 0: aten.relu.default in layer.0 at m.py:7 -> call 2: aten.relu"):
        check_schedule(DIAMOND, with_syncs(PLAN, [(2, 3)]), Program(calls, (), (), ()))
