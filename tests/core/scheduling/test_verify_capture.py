from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.scheduling.policies import nimble
from nimble_core.scheduling.verify_capture import (
    RawGraph,
    begun_by,
    check_emitted,
    emitted_counts,
    launched_ahead,
    leading_fills,
)
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import ScheduleError
from tests.support.strategies import dags


def captured(schedule: Schedule, nodes_of_call: int = 1) -> RawGraph:
    """The graph a faithful capture makes: each call a chain of nodes, behind its stream and what it waits for."""
    first = {call: position * nodes_of_call for position, call in enumerate(schedule.order)}
    last = {call: node + nodes_of_call - 1 for call, node in first.items()}
    owner = [call for call in schedule.order for _ in range(nodes_of_call)]
    between = [*stream_neighbours(schedule.stream, schedule.order), *schedule.syncs]
    edges = [(last[u], first[v]) for u, v in between]
    edges += [(node, node + 1) for node in range(len(owner) - 1) if owner[node] == owner[node + 1]]
    return RawGraph(tuple(range(len(owner))), ("kernel",) * len(owner), tuple(sorted(edges)), tuple(owner))


@given(dags(), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_a_faithful_capture_holds_what_was_promised(graph: CallGraph, nodes: int, cap: int | None) -> None:
    schedule = check_schedule(graph, nimble(graph, uniform_costs(graph.size), max_streams=cap))
    raw = captured(schedule, nodes)
    check_emitted(schedule, raw, graph.edges)
    counts = emitted_counts(schedule, raw)
    assert counts.emitted == counts.planned == len(schedule.syncs)
    if cap is None:
        assert counts.emitted == schedule.meg_edges - schedule.matched
    assert counts.inside == graph.size * (nodes - 1)
    assert counts.forks is not None
    assert graph.size == 0 or 1 <= counts.forks <= schedule.streams
    assert graph.size == 0 or (counts.joins is not None and 1 <= counts.joins <= schedule.streams)


@given(dags(), st.data())
def test_every_lost_wait_is_noticed(graph: CallGraph, data: st.DataObject) -> None:
    schedule = nimble(graph, uniform_costs(graph.size))
    if not schedule.syncs:
        return
    u, v = data.draw(st.sampled_from(schedule.syncs))
    raw = captured(schedule)
    place = {call: node for node, call in enumerate(schedule.order)}
    fewer = tuple(edge for edge in raw.edges if edge != (place[u], place[v]))
    with pytest.raises(ScheduleError, match="races: nothing orders"):
        check_emitted(schedule, replace(raw, edges=fewer), graph.edges)


@given(dags(), st.integers(1, 3), st.data())
def test_only_kernels_that_wait_are_launched_ahead_and_order_stays(
    graph: CallGraph, nodes: int, data: st.DataObject
) -> None:
    schedule = nimble(graph, uniform_costs(graph.size))
    raw = captured(schedule, nodes)
    calls = [st.sets(st.sampled_from(range(graph.size))) if graph.size else st.just(set()) for _ in range(2)]
    waiting, library = (data.draw(one) for one in calls)
    kinds = tuple(data.draw(st.sampled_from(["kernel", "kernel", "memset"])) for _ in raw.nodes)
    between = [edge for edge in raw.edges if kinds[edge[0]] == kinds[edge[1]] == "kernel"]
    already = data.draw(st.sets(st.sampled_from(between))) if between else set()
    raw = replace(raw, kinds=kinds, ahead=tuple(sorted(already)))
    ahead = launched_ahead(raw, waiting, library)
    assert set(ahead) <= set(between)
    for edge in between:
        before, call = (raw.owner[node] for node in edge)
        alone = call in waiting and nodes == 1
        if edge in ahead:
            assert alone or (edge in already and (call in library or call == before))
        else:
            assert not alone
    assert launched_ahead(replace(raw, ahead=ahead), waiting, library) == ahead
    check_emitted(schedule, replace(raw, ahead=ahead), graph.edges)


@given(dags(), st.integers(1, 3), st.data())
def test_what_fills_memory_at_once_leaves_the_order_of_all_others(
    graph: CallGraph, nodes: int, data: st.DataObject
) -> None:
    schedule = nimble(graph, uniform_costs(graph.size))
    raw = captured(schedule, nodes)
    kinds = tuple(data.draw(st.sampled_from(["kernel", "memset"])) for _ in raw.nodes)
    raw = replace(raw, nodes=tuple(node + 100 for node in raw.nodes), kinds=kinds)
    leading = leading_fills(raw)
    firsts = {raw.owner.index(call) for call in range(graph.size)}
    assert set(leading) == {node for node in firsts if kinds[node] == "memset"}
    gone = data.draw(st.sets(st.sampled_from(leading))) if leading else set()
    made = begun_by(raw, [7], gone)
    assert made.nodes == (7, *(node for at, node in enumerate(raw.nodes) if at not in gone))
    assert made.kinds[0] == "memset"
    assert made.owner[0] is None
    assert all(tail < head for tail, head in made.edges)
    was, now = ({node: at for at, node in enumerate(one.nodes)} for one in (raw, made))
    before, after = followers(raw), followers(made)
    assert after[0] == set(range(1, len(made.nodes)))
    for node in made.nodes[1:]:
        kept = {raw.nodes[one] for one in before[was[node]] if one not in gone}
        assert {made.nodes[one] for one in after[now[node]]} == kept


def followers(raw: RawGraph) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in raw.nodes]
    for tail, head in sorted(raw.edges, reverse=True):
        found[tail] |= {head} | found[head]
    return found


def test_planned_waits_that_hazards_do_not_need_are_missed_too() -> None:
    schedule = Schedule("mine", (0, 1), (0, 1), ((0, 1),))
    raw = RawGraph((1, 2), ("kernel", "kernel"), (), (0, 1))
    with pytest.raises(ScheduleError, match="planned but not in the graph"):
        check_emitted(schedule, raw, [])


def test_every_node_of_a_call_counts() -> None:
    # Call 0 ends in two nodes, and call 1 waits for one of them only.
    schedule = Schedule("mine", (0, 1), (0, 1), ((0, 1),))
    raw = RawGraph((1, 2, 3), ("kernel",) * 3, ((0, 2),), (0, 0, 1))
    with pytest.raises(ScheduleError, match="races"):
        check_emitted(schedule, raw, [(0, 1)])
    check_emitted(schedule, replace(raw, edges=((0, 1), (1, 2))), [(0, 1)])


def test_calls_without_nodes_and_nodes_without_calls() -> None:
    schedule = Schedule("mine", (0, 1, 0), (0, 1, 2), ((0, 1), (1, 2)))
    raw = RawGraph((1, 2, 3), ("memcpy", "kernel", "kernel"), ((0, 1), (1, 2)), (None, 0, 2))
    check_emitted(schedule, raw, [(0, 2)])
    assert emitted_counts(schedule, raw).emitted == 0


def test_without_owners_nothing_is_claimed() -> None:
    schedule = Schedule("single", (0,), (0,), ())
    assert emitted_counts(schedule, RawGraph((1,), ("kernel",), ())).emitted is None
