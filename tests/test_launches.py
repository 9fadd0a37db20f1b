"""Where a graph may be cut into several launches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.check import check_schedule
from nimble_core.costs import uniform_costs
from nimble_core.graph import graph_from_edges
from nimble_core.launches import ways_to_launch
from nimble_core.policies import nimble, single


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Calls in layers, each of which needs all of the layer before through one call; and those calls."""
    edges, joints, size = [], [], 1
    for width in draw(st.lists(st.integers(2, 5), min_size=12, max_size=40)):
        start = size - 1
        joints.append(start)
        branches = range(size, size + width)
        edges += [(start, one) for one in branches] + [(one, size + width) for one in branches]
        size += width + 1
    return size, edges, joints


@given(layers())
def test_cuts_rise_and_lie_where_one_result_is_wanted(made: tuple[int, list[tuple[int, int]], list[int]]) -> None:
    size, edges, joints = made
    graph = graph_from_edges(size, edges)
    schedule = nimble(graph, uniform_costs(size))
    ways = ways_to_launch(graph, schedule)
    assert bool(ways) == (size >= 48)
    assert len(set(ways)) == len(ways)
    for launches in ways:
        assert all(a < b for a, b in pairwise((0, *launches, size)))
        check_schedule(graph, replace(schedule, launches=launches, maximum_concurrency=False))
    # A cut far in has room to move to where only the call that joins a layer is still waited for.
    after_a_joint = {schedule.order.index(joint) + 1 for joint in joints}
    assert all(launches[-1] in after_a_joint for launches in ways if launches[-1] > 60)


def test_one_stream_and_few_calls_are_launched_at_once() -> None:
    chain = graph_from_edges(100, [(at, at + 1) for at in range(99)])
    assert ways_to_launch(chain, single(chain, uniform_costs(100))) == ()
    few = graph_from_edges(40, [(0, at) for at in range(1, 40)])
    assert ways_to_launch(few, nimble(few, uniform_costs(40))) == ()
