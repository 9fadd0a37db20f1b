"""Eager and replays on one axis: what each run states, what it is marked with, and the figures of its lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import graph_from_edges
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import summarize
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, SelfCheck, Span, Timeline
from nimble_core.utils.units import format_percent
from nimble_viz.analysis.limit import in_flight
from nimble_viz.analysis.overhead import overhead
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.timeline import axis_note, distorted, timelines
from nimble_viz.export.tables import make_table
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from tests.support.chrome_events import told_of
from tests.support.sample_reports import sample_report

LANES = (Lane("stream 0", "stream"), Lane("stream 1", "stream"))
SPANS = (
    Span(0, 0.0, 10.0, 0, "a"),
    Span(0, 11.0, 20.0, 1, "b"),
    Span(1, 13.0, 40.0, 2, "c"),
    Span(0, 44.0, 50.0, 3, "d"),
)
SEEN = SelfCheck(4, 4, "graph node id")
LINE = Timeline(
    "nimble", "measured", "CUPTI activity, GPU clock", LANES, SPANS, 50.0, 55.0, True, "", (7, 7, 9, 7), SEEN
)


def report_of(line: Timeline = LINE) -> Report:
    """A diamond: 0, then 1 on stream 0 beside 2 on stream 1, then 3."""
    base = sample_report(4)
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    plan = Schedule("nimble", (0, 0, 1, 0), (0, 1, 2, 3), ((0, 2), (2, 3)))
    costs = Costs((10.0, 9.0, 17.0, 6.0), "CUPTI", expected=4, seen=4)
    made = replace(base, graph=graph, schedules=(plan,), costs=costs, critical_path=(0, 2, 3), critical_path_ns=33.0)
    taken = (base.measurements[0], summarize("nimble", [line.unprofiled_ns] * 48))
    return replace(made, timelines=(line,), measurements=taken, candidates=(), checks=(), chosen="nimble")


def test_the_figures_of_a_replay() -> None:
    assert dict(timelines(report_of())[0]["facts"]) == {
        "Self-check": "4 kernels seen, 4 nodes expected, told by graph node id",
        "In flight": "2 at most, 1.04 on average",
        "Time of its streams": "busy 52.0%, launch gap 8.0%, nothing ready 30.0%, nothing left 10.0%",
    }


def test_each_gap_says_who_waited_for_whom() -> None:
    shown = timelines(report_of())[0]
    columns = shown["gaps"]
    rows = list(zip(*(columns[name] for name in ("span", "awaited", "launch", "wait")), strict=True))
    assert [(shown["columns"]["call"][span], *row) for span, *row in rows] == [(1, 0, 1, 0), (2, 0, 3, 0), (3, 2, 4, 0)]
    assert [(row["call"], row["awaited"], row["why"]) for row in shown["longest"]] == [
        (3, 2, "nothing ready 20 ns, launch gap 4 ns"),
        (2, 0, "nothing ready 10 ns, launch gap 3 ns"),
    ]
    assert [row["delay"] for row in shown["longest"]] == ["4 ns", "3 ns"]
    assert shown["longest"][0]["after"].endswith(" on stream 1")


def test_a_failed_self_check_marks_page_text_exports_and_value() -> None:
    broken = replace(LINE, spans=SPANS[:3], streams=(7, 7, 9), reliable=False, note="3 of 4 nodes seen in every replay",
                     check=SelfCheck(4, 3, "graph node id"))  # fmt: skip
    report = report_of(broken)
    shown = timelines(report)[0]
    assert shown["marks"] == ["UNRELIABLE: 3 of 4 nodes seen in every replay"]
    assert dict(shown["facts"])["Gaps, calls in flight"] == "not derived: kernels are missing"
    assert shown["longest"] == shown["gaps"]["span"] == []
    assert "UNRELIABLE: 3 of 4 nodes seen in every replay" in plain_text(report, 120, full=True)
    assert any("unreliable" in warning for warning in summary(report)["warnings"])
    assert "UNRELIABLE" in told_of(report).labels[0].split(", ")
    assert set(map(len, make_table(report, "gaps").values())) == {0}


@pytest.mark.parametrize(
    ("unprofiled", "marked"), [(50.0, False), (41.7, False), (41.6, True), (60.0, False), (61.0, True)]
)
def test_runs_are_marked_where_the_profiler_changed_their_length_by_more_than_a_fifth(unprofiled, marked) -> None:
    line = replace(LINE, unprofiled_ns=unprofiled)
    assert distorted(report_of(line), line) == marked
    shown = timelines(report_of(line))[0]
    assert any(mark.startswith("DISTORTED") for mark in shown["marks"]) == shown["distorted"] == marked
    noisy = [unprofiled * (1 + 0.2 * (k % 3 - 1)) for k in range(48)]
    vary = replace(report_of(line), measurements=(summarize("nimble", noisy),))
    assert not distorted(vary, line)  # by what its time varies, the profiler need not have changed it
    assert "± 40%)" in timelines(vary)[0]["lengths"]


def test_a_simulation_is_never_shown_without_its_label() -> None:
    line = replace(LINE, source="simulated", clock="simulated: H200", check=None, streams=())
    report = report_of(line)
    assert timelines(report)[0]["marks"] == ["SIMULATED, not measured"]
    assert "SIMULATED, not measured: nimble replay" in axis_note(report)
    assert "SIMULATED" in plain_text(report, 200, full=True)
    assert "simulated" in told_of(report).labels[0]


@st.composite
def drawn_lines(draw: st.DrawFn) -> Timeline:
    lanes = (*LANES, Lane("host", "host"))
    spans = [
        Span(draw(st.integers(0, 2)), float(at), float(at + long), None, "k")
        for at, long in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=14))
    ]
    return replace(LINE, lanes=lanes, spans=tuple(sorted(spans, key=lambda s: s.start_ns)), streams=(), check=None)


@given(drawn_lines())
def test_what_is_in_flight_is_counted(line: Timeline) -> None:
    spans = [span for span in line.spans if line.lanes[span.lane].kind != "host"]
    running = [sum(span.start_ns <= at + 0.5 < span.end_ns for span in spans) for at in range(45)]
    most, mean = in_flight(line)
    assert most == max(running)
    assert mean * line.length_ns == pytest.approx(sum(running))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_how_long_the_device_was_idle_is_one_number(device):
    """What the profile of eager found is what overhead, timeline and the lane of its only stream show."""
    report = sample_report(60, device=device)
    eager = replace(report.timeline("eager"), profiled_ns=report.overhead.profiled_ns)
    report = replace(report, timelines=(eager, *report.timelines[1:]))
    shown, *replays = timelines(report)
    share = report.overhead.device_idle_share
    assert shown["idle"] == share > 0
    assert dict(overhead(report)["facts"])["Device idle"] == format_percent(share)
    assert [lane["idle"] for lane in shown["lanes"]] == ([None, round(share, 4)] if device == "cuda" else [None])
    for line in replays:  # busy while any of the streams is
        assert 0 <= line["idle"] <= min(lane["idle"] for lane in line["lanes"])
    alone = next(line for line in replays if len(line["lanes"]) == 1)
    assert alone["idle"] == alone["lanes"][0]["idle"]
