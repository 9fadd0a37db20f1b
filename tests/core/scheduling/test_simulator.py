"""The simulation: exact times, every order respected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.ir.call_graph import CallGraph, graph_from_edges, predecessors
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies import nimble, single
from nimble_core.scheduling.simulator import DeviceModel, simulate
from nimble_core.utils.errors import InputError, ScheduleError
from tests.support.strategies import costs_for, dags


@given(dags(), st.data())
def test_respects_hazards_and_streams(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    schedule = nimble(graph, costs, max_streams=data.draw(st.sampled_from([1, 2, 4, None])))
    wait = data.draw(st.sampled_from([0.0, 3.0]))
    timeline = simulate(graph, schedule, costs, DeviceModel(sync_ns=wait))
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
        assert len({s.lane for s in others}) == len(others)
    assert [one.start_ns for one in timeline.spans] == sorted(one.start_ns for one in timeline.spans)


@given(dags(), st.data())
def test_unlimited_streams_take_the_critical_path_and_one_the_sum(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    assert simulate(graph, nimble(graph, costs), costs).length_ns == critical_path(predecessors(graph), costs.ns)[0]
    assert simulate(graph, single(graph, costs), costs).length_ns == costs.total_ns


def test_a_diamond_to_the_nanosecond() -> None:
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = Costs((10.0, 20.0, 5.0, 1.0), "given")
    timeline = simulate(graph, nimble(graph, costs), costs, DeviceModel(sync_ns=2.0), names=["a", "b", "c", "d"])
    assert [(s.name, s.lane, s.start_ns, s.end_ns) for s in timeline.spans] == [
        ("a", 0, 0.0, 10.0),
        ("b", 0, 10.0, 30.0),
        ("c", 1, 12.0, 17.0),
        ("d", 0, 30.0, 31.0),
    ]
    assert [(lane.name, lane.kind) for lane in timeline.lanes] == [("stream 0", "stream"), ("stream 1", "stream")]
    assert (timeline.run, timeline.source) == ("nimble", "simulated")


def in_steps(graph: CallGraph, schedule: Schedule, costs: Costs, device: DeviceModel) -> list[tuple[float, float]]:
    """Start and end of each call, by doing the definition: all that is left of all calls, at every event."""
    start, end = {}, {}
    left = dict(enumerate(costs.ns))
    last: dict[int, int] = {}
    sources: dict[int, list[tuple[int, float]]] = {call: [] for call in left}
    for call in schedule.order:
        if (before := last.get(schedule.stream[call])) is not None:
            sources[call].append((before, device.gap_ns))
        last[schedule.stream[call]] = call
    for u, v in schedule.syncs:
        sources[v].append((u, device.sync_ns))
    now = 0.0
    while len(end) < graph.size:
        ready = {}
        for call in left:
            if call not in start and all(u in end for u, _ in sources[call]):
                ready[call] = max([0.0, *(end[u] + delay for u, delay in sources[call])])
        start |= {call: now for call, at in ready.items() if at <= now}
        running = [call for call in start if call not in end]
        speed = {}
        for call in running:
            others = [other for other in running if other != call]
            share = sum(costs.demand[other] for other in others)
            speed[call] = 1 / (1 + device.per_call * min(len(others), device.crowd) + device.per_share * share)
        waits = [at - now for at in ready.values() if at > now]
        step = min([left[call] / speed[call] for call in running] + waits)
        now += step
        for call in running:
            left[call] -= step * speed[call]
            if left[call] < 1e-9:
                end[call] = now
    return [(start[call], end[call]) for call in range(graph.size)]


@given(dags(max_calls=9), st.data())
def test_crowded_calls_slow_each_other_as_defined(graph: CallGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_for(graph))
    shares = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=graph.size, max_size=graph.size)
    costs = replace(costs, demand=tuple(data.draw(shares)))
    device = DeviceModel(
        gap_ns=data.draw(st.sampled_from([0.0, 0.7])),
        sync_ns=data.draw(st.sampled_from([0.0, 2.3])),
        per_call=data.draw(st.sampled_from([0.0, 0.24])),
        crowd=2,
        per_share=data.draw(st.sampled_from([0.0, 0.4])),
    )
    schedule = nimble(graph, costs, max_streams=data.draw(st.sampled_from([1, 3, None])))
    spans = {span.call: span for span in simulate(graph, schedule, costs, device).spans}
    for call, (start, end) in enumerate(in_steps(graph, schedule, costs, device)):
        assert (spans[call].start_ns, spans[call].end_ns) == pytest.approx((start, end), abs=1e-6)


def test_times_beyond_the_resolution_of_a_nanosecond_end() -> None:
    graph = graph_from_edges(3, [])
    costs = Costs((1e17, 1e17 / 3, 1.0), "given")
    assert simulate(graph, nimble(graph, costs), costs, DeviceModel(per_call=0.3)).length_ns >= 1e17


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
