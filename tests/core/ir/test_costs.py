from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import graph_from_edges
from nimble_core.ir.costs import Costs, limit_ns
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import simulate


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1)), max_size=20), st.floats(0, 1e9))
def test_the_limit_is_the_longer_of_path_and_shared_work(calls, path_ns):
    ns, demand = tuple(one for one, _ in calls), tuple(share for _, share in calls)
    work = sum(one * share for one, share in calls)
    assert limit_ns(Costs(ns, "given", demand=demand), path_ns) == pytest.approx(max(work, path_ns))
    assert limit_ns(Costs(ns, "given"), path_ns) == path_ns


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_no_simulated_replay_of_calls_that_fill_the_device_one_by_one_beats_it(policy):
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = Costs((2.0, 3.0, 4.0, 1.0), "given", demand=(0.5,) * 4)
    assert simulate(graph, POLICIES[policy](graph, costs), costs).length_ns >= limit_ns(costs, 7.0) == 7.0
