"""Host time of the eager run."""

from __future__ import annotations

import pytest

from nimble_viz.analysis.overhead import PARTS, computing, grouped, overhead
from nimble_viz.analysis.syncs import host_syncs
from nimble_viz.analysis.timeline import timelines
from tests.support.sample_reports import CASES, sample_report


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


@pytest.mark.parametrize("by", ["operator", "module"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_computing_is_shared_out_most_first(device, by):
    report = sample_report(60, device=device)
    rows = computing(report, by)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sum(row["work"] for row in rows) == pytest.approx(sum(row.work_ns for row in report.overhead.calls))
    assert [row["work"] for row in rows] == sorted((row["work"] for row in rows), reverse=True)
    assert {row["name"] for row in rows} <= {row["name"] for row in grouped(report, by)}


def test_sizes_are_those_of_the_call_that_computes_longest():
    report = sample_report(60)
    first, *_ = computing(report, "operator")
    longest = max(
        (row for row in report.overhead.calls if report.eager_calls[row.call].label == first["name"]),
        key=lambda row: row.work_ns,
    )
    (ref, *_) = report.eager_calls[longest.call].reads
    assert first["sizes"].startswith("×".join(map(str, ref.sizes)))


def test_nothing_profiled_computes_nothing():
    assert computing(CASES["nothing profiled"](), "operator") == []
