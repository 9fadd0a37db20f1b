"""The simulation: exact times, every order respected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs_for, dags

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.costs import Costs, uniform_costs
from nimble_core.errors import InputError, ScheduleError
from nimble_core.graph import CallGraph, graph_from_edges, predecessors
from nimble_core.policies import nimble, single
from nimble_core.simulate import simulate


@given(dags(), st.data())
def test_respects_hazards_streams_and_limits(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    schedule = nimble(graph, costs, max_streams=data.draw(st.sampled_from([1, 2, 4, None])))
    limit = data.draw(st.sampled_from([1, 2, 3, None]))
    wait = data.draw(st.sampled_from([0.0, 3.0]))
    timeline = simulate(graph, schedule, costs, sync_cost_ns=wait, concurrency=limit)
    span = {one.call: one for one in timeline.spans}
    assert len(span) == len(timeline.spans) == graph.size
    for call in range(graph.size):
        assert span[call].end_ns - span[call].start_ns == costs.ns[call]
        assert span[call].lane == schedule.stream[call]
    for u, v in graph.edges:
        assert span[u].end_ns <= span[v].start_ns
    for u, v in schedule.syncs:
        assert span[u].end_ns + wait <= span[v].start_ns
    for one in timeline.spans:
        others = [s for s in timeline.spans if s.start_ns <= one.start_ns < s.end_ns]
        assert limit is None or len(others) <= limit
        assert len({s.lane for s in others}) == len(others)
    assert [one.start_ns for one in timeline.spans] == sorted(one.start_ns for one in timeline.spans)


@given(dags(), st.data())
def test_unlimited_streams_take_the_critical_path_and_one_the_sum(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    assert simulate(graph, nimble(graph, costs), costs).length_ns == critical_path(predecessors(graph), costs.ns)[0]
    assert simulate(graph, single(graph, costs), costs).length_ns == costs.total_ns
    assert simulate(graph, nimble(graph, costs), costs, concurrency=1).length_ns == costs.total_ns


def test_a_diamond_to_the_nanosecond() -> None:
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = Costs((10.0, 20.0, 5.0, 1.0), "given")
    timeline = simulate(graph, nimble(graph, costs), costs, sync_cost_ns=2.0, names=["a", "b", "c", "d"])
    assert [(s.name, s.lane, s.start_ns, s.end_ns) for s in timeline.spans] == [
        ("a", 0, 0.0, 10.0),
        ("b", 0, 10.0, 30.0),
        ("c", 1, 12.0, 17.0),
        ("d", 0, 30.0, 31.0),
    ]
    assert [(lane.name, lane.kind) for lane in timeline.lanes] == [("stream 0", "stream"), ("stream 1", "stream")]
    assert (timeline.run, timeline.source) == ("nimble", "simulated")


def test_higher_priority_starts_first_where_places_are_few() -> None:
    graph = graph_from_edges(3, [])
    schedule = replace(nimble(graph, uniform_costs(3)), priority=(0, 0, 1))
    timeline = simulate(graph, schedule, uniform_costs(3), concurrency=1)
    assert [span.call for span in timeline.spans] == [2, 0, 1]


def test_a_deadlock_is_an_error() -> None:
    graph = graph_from_edges(2, [])
    schedule = replace(nimble(graph, uniform_costs(2)), syncs=((0, 1), (1, 0)))
    with pytest.raises(ScheduleError, match="deadlocks: call 0"):
        simulate(graph, schedule, uniform_costs(2))


def test_bad_input_is_refused() -> None:
    graph = graph_from_edges(2, [])
    schedule = nimble(graph, uniform_costs(2))
    with pytest.raises(InputError, match="costs of 3"):
        simulate(graph, schedule, uniform_costs(3))
    with pytest.raises(InputError, match="concurrency=0"):
        simulate(graph, schedule, uniform_costs(2), concurrency=0)
