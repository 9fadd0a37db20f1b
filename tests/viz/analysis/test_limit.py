"""How far a replay is from its limit, and why."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import summarize
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.utils.units import format_ns
from nimble_viz.analysis import limit
from nimble_viz.analysis.limit import breakdown, distance, distance_text, graph_width
from nimble_viz.analysis.summary import summary
from tests.support.sample_reports import CASES, fused_report, sample_report


def _made(spans, streams, edges, ns, wall, *, syncs=()):
    """A breakdown of calls given as ``(start, end)``, on these streams."""
    size = len(spans)
    lanes = tuple(Lane(str(k), "stream") for k in range(max(streams) + 1))
    plan = Schedule("mine", tuple(streams), tuple(range(size)), syncs)
    placed = sorted(
        (Span(streams[k], float(start), float(end), k, "k") for k, (start, end) in enumerate(spans)),
        key=lambda span: span.start_ns,
    )
    line = Timeline("mine", "measured", "clock", lanes, tuple(placed))
    return breakdown(graph_from_edges(size, edges), plan, Costs(tuple(map(float, ns)), "given"), line, float(wall))


def test_gaps_contention_waits_and_launch_are_told_apart():
    # 0 and 1 beside each other, both slowed by half; 2 waits for 1 across streams; 3 follows 2 on its stream.
    found = _made(
        [(10, 40), (12, 42), (50, 60), (63, 70)], [0, 1, 0, 0], [(0, 2), (1, 2), (2, 3)], [20, 20, 10, 7], 75,
        syncs=((1, 2),),
    )  # fmt: skip
    assert found.calls == (1, 2, 3)
    assert (found.alone, found.contention, found.waits, found.gaps, found.launch) == (37, 10, 8, 3, 17)


def test_a_call_of_two_kernels_has_its_gap_inside():
    graph, plan = CallGraph(1, (), (), ()), Schedule("mine", (0,), (0,), ())
    spans = (Span(0, 0.0, 4.0, 0, "a"), Span(0, 6.0, 9.0, 0, "b"), Span(0, 9.0, 99.0, None, "memset"))
    line = Timeline("mine", "measured", "clock", (Lane("0", "stream"),), spans)
    found = breakdown(graph, plan, Costs((7.0,), "given"), line, 12.0)
    assert (found.alone, found.contention, found.gaps, found.launch) == (7, 0, 2, 3)
    assert breakdown(graph, plan, Costs((7.0,), "given"), replace(line, spans=spans[2:]), 12.0) is None


@given(st.integers(1, 8), st.integers(0, 10**6))
def test_a_breakdown_adds_up_to_the_wall_time(width, seed):
    report = sample_report(30, width=width)
    line = report.timelines[-1]
    wall = line.length_ns + seed
    found = breakdown(report.graph, report.schedules[-1], report.costs, line, wall)
    parts = found.alone + found.contention + found.gaps + found.waits + found.launch
    assert parts == pytest.approx(wall)
    assert all(u < v for u, v in itertools.pairwise(found.calls))


@given(st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_what_measurements_vary_by_is_no_part_of_a_breakdown(spread, apart):
    report = sample_report(30)
    line = report.timelines[-1]
    wall = line.length_ns * (1 + apart)
    found = breakdown(report.graph, report.schedules[-1], report.costs, line, wall, spread)
    rest = apart * line.length_ns
    if abs(rest - spread * wall) > 1e-6 * wall:
        assert found.launch == pytest.approx(rest if rest > spread * wall else 0.0)
    assert found.contention == 0.0  # calls ran as long as alone, up to rounding
    slower = tuple(replace(one, end_ns=one.end_ns + apart * (one.end_ns - one.start_ns)) for one in line.spans)
    found = breakdown(report.graph, report.schedules[-1], report.costs, replace(line, spans=slower), wall, spread)
    doubt = sum(report.costs.spread_ns[call] for call in found.calls) / found.alone
    if abs(apart - doubt) > 1e-6:  # isolated times vary by 3%
        assert (found.contention > 0) == (apart > doubt)


def test_a_distance_says_its_doubt_and_is_of_replays_alone():
    report = fused_report()
    noisy = [ns * report.critical_path_ns for ns in (1.0, 1.5, 2.0)] * 15
    doubtful = replace(report, measurements=(summarize(report.chosen, noisy),))
    assert distance_text(doubtful, report.chosen) == "1.50x ± 67%"
    assert distance_text(report, "eager") == ""
    assert distance_text(replace(report, critical_path_ns=0.0), report.chosen) == ""


def test_where_resources_bind_they_are_the_limit():
    report = sample_report(60)
    full = replace(report, costs=replace(report.costs, demand=(1.0,) * 60))
    found = dict(summary(full)["facts"])["Limit: the longer of critical path and shared work"]
    assert found == f"{format_ns(report.costs.total_ns)}, SM time of all calls over SMs"
    assert distance(full, "nimble") == pytest.approx(report.measurement("nimble").median_ns / report.costs.total_ns)


def test_width_is_exact_up_to_a_bound_and_says_so_above(monkeypatch):
    report = CASES["wide"]()
    assert graph_width(report.graph) == (12, "12")
    monkeypatch.setattr(limit, "EXACT_CALLS", 59)
    bound, text = graph_width(report.graph)
    assert bound <= 12
    assert text.startswith(f"at least {bound} ")
