"""Where streams stood still, and why: hand-made replays with exact figures, then what holds for all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import graph_from_edges
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.analysis.gaps import PARTS, Gap, gaps, longest_gaps, lost, stream_times
from nimble_viz.render.report import Report
from tests.support.sample_reports import sample_report


def line_of(spans: list[tuple[int, float, float, int | None]], lanes: int = 2) -> Timeline:
    drawn = sorted((Span(lane, float(a), float(b), call, "k") for lane, a, b, call in spans), key=lambda s: s.start_ns)
    made = tuple(Lane(f"stream {k}", "stream") for k in range(lanes))
    return Timeline("nimble", "measured", "GPU clock", made, tuple(drawn))


def test_a_wait_for_another_stream_where_nothing_else_was_ready() -> None:
    # 0 forks to 1 (stream 0) and 2 (stream 1); 3 joins on stream 0.
    line = line_of([(0, 0, 10, 0), (0, 11, 20, 1), (1, 13, 40, 2), (0, 44, 50, 3)])
    plan = Schedule("nimble", (0, 0, 1, 0), (0, 1, 2, 3), ((0, 2), (2, 3)))
    found = gaps(graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)]), plan, line)
    assert found == [
        Gap(0, 1, 0, 10, 11, 1, 0, 0),
        Gap(1, 2, 0, 0, 13, launch_ns=3, wait_ns=0, unready_ns=10),
        Gap(0, 3, 2, 20, 44, launch_ns=4, wait_ns=0, unready_ns=20),
    ]
    times = stream_times(found, line)
    assert [tuple(one.values()) for one in times] == [(25, 5, 0, 20, 0, 0), (27, 3, 0, 10, 0, 10)]
    assert {row["name"]: row["ns"] for row in lost(times)} == {
        "busy": 52,
        "launch gap": 8,
        "nothing ready": 30,
        "nothing left": 10,
    }


def test_a_wait_while_a_ready_call_queued_behind_its_stream() -> None:
    # 1 and 2 are ready from the start and share stream 1; stream 0 stands idle until 2 is done: 2 could have run there.
    line = line_of([(0, 0, 10, 0), (1, 0, 30, 1), (1, 30, 50, 2), (0, 50, 60, 3)])
    plan = Schedule("nimble", (0, 1, 1, 0), (0, 1, 2, 3), ((2, 3),))
    found = gaps(graph_from_edges(4, [(0, 3), (2, 3)]), plan, line)
    assert found == [Gap(0, 3, 2, 10, 50, launch_ns=0, wait_ns=20, unready_ns=20)]


def test_order_that_the_plan_adds_is_waited_for() -> None:
    line = line_of([(0, 0, 20, 0), (1, 26, 30, 1)])
    plan = Schedule("nimble", (0, 1), (0, 1), ((0, 1),), added_order=((0, 1),))
    # 1 needs nothing of 0 and was ready all the time: it queued because the plan says so.
    assert gaps(graph_from_edges(2, []), plan, line) == [Gap(1, 1, 0, 0, 26, launch_ns=6, wait_ns=20, unready_ns=0)]


def test_only_gaps_that_the_replays_length_depends_on_are_worth_a_line() -> None:
    # 0, 1, 3 took longest; 2, beside them, begins 9 late and ends long before it is waited for.
    line = line_of([(0, 0, 10, 0), (0, 11, 60, 1), (1, 19, 25, 2), (0, 63, 70, 3)])
    plan = Schedule("nimble", (0, 0, 1, 0), (0, 1, 2, 3), ((0, 2), (2, 3)))
    graph = graph_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    found = gaps(graph, plan, line)
    assert [(one.call, one.launch_ns) for one in found] == [(1, 1), (2, 9), (3, 3)]
    report = replace(sample_report(4), graph=graph, schedules=(plan,))
    rows = longest_gaps(report, line, found, 5)
    assert [(row["call"], row["why"], row["delay_ns"]) for row in rows] == [(3, "launch gap", 3), (1, "launch gap", 1)]


def test_a_delay_counts_from_when_the_data_was_ready() -> None:
    # 2 needs 0 alone, which ended at 10, and queues behind 1 on the other stream, which needed nothing.
    line = line_of([(0, 0, 10, 0), (1, 0, 40, 1), (1, 44, 50, 2)])
    plan = Schedule("nimble", (0, 1, 1), (0, 1, 2), ((0, 2),))
    graph = graph_from_edges(3, [(0, 2)])
    report = replace(sample_report(3), graph=graph, schedules=(plan,))
    (row,) = longest_gaps(report, line, gaps(graph, plan, line), 5)
    assert (row["call"], row["awaited"], row["ns"], row["delay_ns"]) == (2, 1, 4, 4)
    waits = line_of([(0, 0, 10, 0), (1, 0, 5, 1), (1, 16, 50, 2)])
    (row,) = longest_gaps(report, waits, gaps(graph, plan, waits), 5)
    assert (row["call"], row["awaited"], row["ns"], row["delay_ns"]) == (2, 0, 11, 6)


def test_between_kernels_of_one_call() -> None:
    line = line_of([(0, 0, 5, 0), (0, 9, 12, 0)], 1)
    found = gaps(graph_from_edges(1, []), Schedule("nimble", (0,), (0,), ()), line)
    assert found == [Gap(0, 0, 0, 5, 9, 4, 0, 0)]


def test_a_call_without_kernels_hands_on_what_it_waited_for() -> None:
    line = line_of([(0, 0, 30, 0), (1, 33, 40, 2)])
    plan = Schedule("nimble", (0, 0, 1), (0, 1, 2), ((1, 2),))
    found = gaps(graph_from_edges(3, [(0, 1), (1, 2)]), plan, line)
    assert found == [Gap(1, 2, 0, 0, 33, launch_ns=3, wait_ns=0, unready_ns=30)]


@st.composite
def replays(draw: st.DrawFn) -> tuple[Report, Timeline, Schedule]:
    """A random graph, plan and replay that keeps both; a call launches 0 to 2 kernels."""
    size, lanes = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    edges = [(u, v) for v in range(size) for u in range(v) if draw(st.integers(0, 2)) == 0]
    graph = graph_from_edges(size, edges)
    stream = [draw(st.integers(0, lanes - 1)) for _ in range(size)]
    syncs = tuple((u, v) for u, v in graph.meg if stream[u] != stream[v])
    free, end = [0] * lanes, [0] * size
    spans: list[tuple[int, float, float, int | None]] = []
    for call in range(size):
        at = max([free[stream[call]], *(end[u] for u, v in edges if v == call)])
        for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2)))):
            start = at + draw(st.integers(0, 6))
            at = start + draw(st.integers(0, 9))
            spans.append((stream[call], start, at, call))
        free[stream[call]] = end[call] = at
    report = replace(sample_report(size), graph=graph)
    return report, line_of(spans, lanes), Schedule("nimble", tuple(stream), tuple(range(size)), syncs)


@given(replays())
def test_the_parts_of_each_streams_time_add_up_to_the_replay(case: tuple[Report, Timeline, Schedule]) -> None:
    report, line, plan = case
    found = gaps(report.graph, plan, line)
    for one in found:
        assert one.launch_ns + one.wait_ns + one.unready_ns == one.end_ns - one.start_ns > 0
        assert min(one.launch_ns, one.wait_ns, one.unready_ns) >= 0
    for time in stream_times(found, line):
        parts = [time[key] for key, _, _ in PARTS]
        assert min(parts) >= 0
        assert sum(parts) == line.length_ns


@given(replays())
def test_a_gap_ends_no_earlier_than_what_was_waited_for(case: tuple[Report, Timeline, Schedule]) -> None:
    report, line, plan = case
    end = {span.call: max(other.end_ns for other in line.spans if other.call == span.call) for span in line.spans}
    for one in gaps(report.graph, plan, line):
        if one.awaited is not None and one.awaited != one.call:
            assert end[one.awaited] <= one.end_ns
            assert one.launch_ns <= one.end_ns - end[one.awaited]
