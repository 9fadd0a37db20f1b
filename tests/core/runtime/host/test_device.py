"""The host as a device: what it observes, times and offers."""

from __future__ import annotations

import pytest
import torch

from nimble_core.scheduling.policies import nimble
from nimble_core.scheduling.simulator import simulate
from tests.support.host_models import Branches, Prepared


def test_observing_sees_every_call_once() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    for executable in (made.capture(), made.wide(2)):
        seen = made.device.observe(executable, made.recording, 3)
        spans = seen.timeline.spans
        assert {span.call for span in spans} == set(range(made.graph.size))
        assert len(spans) == made.graph.size
        assert all(span.end_ns >= span.start_ns for span in spans)
        assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)
        ends = {span.call: span.end_ns for span in spans}
        starts = {span.call: span.start_ns for span in spans}
        assert all(ends[u] <= starts[v] for u, v in made.graph.edges)
        assert seen.timeline.source == "measured"
        assert seen.timeline.profiled_ns > 0
        assert seen.timeline.unprofiled_ns > 0
        assert len(seen.costs.ns) == len(seen.costs.spread_ns) == made.graph.size
        assert seen.costs.reliable
        executable.close()


def test_streams_are_expected_to_take_as_long_as_one() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    lengths = {
        simulate(made.graph, nimble(made.graph, made.costs, max_streams=cap), made.costs, made.device.model).length_ns
        for cap in (1, 2, 4)
    }
    assert max(lengths) == pytest.approx(min(lengths)) == pytest.approx(sum(made.costs.ns))
