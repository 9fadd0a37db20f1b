"""Host time of the eager run."""

from __future__ import annotations

import pytest

from nimble_viz.analysis.overhead import PARTS, overhead
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.timeline import timelines
from tests.support.sample_reports import (
    CASES,
    sample_report,
)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_overhead_parts_and_remainder_add_up_to_the_profiled_run(device):
    view = overhead(sample_report(60, device=device))
    parts = sum(view["totals"][part] for part in PARTS) + (view["totals"]["work"] if view["serial"] else 0)
    assert parts + view["remainder_ns"] == pytest.approx(view["profiled_ns"], abs=5 * 60)
    assert view["serial"] == (device == "cpu")


def test_nothing_profiled_is_none():
    report = CASES["nothing profiled"]()
    assert overhead(report) is None
    assert host_syncs(report) is None
    assert timelines(report) == []
