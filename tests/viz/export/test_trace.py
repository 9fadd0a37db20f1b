"""Chrome trace events: every span once, rows without overlaps, arrows between slices that exist, exact times."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.analysis.labels import label_run, visible
from nimble_viz.export.trace import _microseconds
from nimble_viz.render.report import Report
from tests.support.chrome_events import Slice, Told, ns, told_of
from tests.support.sample_reports import CASES, HOSTILE, fused_report, sample_report, training_report

BASE = sample_report(8)
REPORTS = {
    **CASES,
    "fused": fused_report,
    "training": training_report,
    "on the host": lambda: sample_report(60, device="cpu"),
    "hostile names": lambda: sample_report(20, model=HOSTILE, hostile=HOSTILE),
    "no timelines": lambda: sample_report(20, timelines=False),
}


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any spans on up to three lanes: overlapping, empty, with fractions of nanoseconds, before the start."""
    lanes = draw(st.lists(st.sampled_from(["host", "gpu", "stream", "worker"]), min_size=1, max_size=3))
    times = st.integers(-20, 60).map(lambda quarter: quarter / 4)
    spans = []
    for _ in range(draw(st.integers(0, 14))):
        start, end = sorted((draw(times), draw(times)))
        lane = draw(st.integers(0, len(lanes) - 1))
        spans.append(Span(lane, start, end, draw(st.none() | st.integers(0, 7)), draw(st.sampled_from(["a", "b"]))))
    spans.sort(key=lambda span: span.start_ns)
    run = draw(st.sampled_from(["eager", "nimble"]))
    kinds = tuple(Lane("the same name", kind) for kind in lanes)
    return Timeline(run, "measured", "drawn", kinds, tuple(spans))


def lanes_of(trace: Told, process: int) -> list[Slice]:
    """The slices of a process that stand for spans."""
    return [
        one
        for one in trace.slices
        if trace.tracks[one.track].process == process and trace.tracks[one.track].lane is not None
    ]


def check(report: Report) -> Told:
    """All that the events promise, of those of ``report``."""
    trace = told_of(report)
    ordered = sorted(report.timelines, key=lambda line: line.run != "eager")
    assert trace.processes == [visible(label_run(report, line.run)) for line in ordered]
    assert trace.other["model"] == visible(report.model)
    for process, line in enumerate(ordered):
        shift = -min(0.0, min((span.start_ns for span in line.spans), default=0.0))
        assert Counter(
            (trace.tracks[one.track].lane, one.start_ns, one.end_ns, one.name, one.arguments.get("call"))
            for one in lanes_of(trace, process)
        ) == Counter(
            (span.lane, round(span.start_ns + shift), round(span.end_ns + shift), visible(span.name), span.call)
            for span in line.spans
        )
        names = [track.name for track in trace.tracks if track.process == process]
        assert len(set(names)) == len(names)
    assert all(0 <= one.start_ns <= one.end_ns for one in trace.slices)
    assert [one.track for one in trace.slices] == sorted(one.track for one in trace.slices)
    by_track: dict[int, list[Slice]] = defaultdict(list)
    for one in trace.slices:
        by_track[one.track].append(one)
    for track, members in by_track.items():
        place = trace.tracks[track]
        kind = ordered[place.process].lanes[place.lane].kind if place.lane is not None else "row"
        around: list[Slice] = []
        for one in members:
            while around and around[-1].end_ns <= one.start_ns:
                around.pop()
            outer = around[-1] if around else None
            assert outer is None or (kind == "host" and outer.start_ns <= one.start_ns and one.end_ns <= outer.end_ns)
            around.append(one)
    for _, begun, ended in trace.flows:
        source, target = trace.slices[begun], trace.slices[ended]
        assert trace.tracks[source.track].process == trace.tracks[target.track].process
        assert source.start_ns < target.start_ns
    return trace


@given(timelines())
def test_any_timeline_keeps_every_span_without_overlap(line: Timeline) -> None:
    check(replace(BASE, timelines=(line,)))


@pytest.mark.parametrize("name", list(REPORTS))
def test_sample_reports(name: str) -> None:
    check(REPORTS[name]())


def test_waits_of_the_schedule_are_flows() -> None:
    report = sample_report(60)
    trace = check(report)
    plan = report.schedule("nimble")
    assert plan is not None
    call = [one.arguments.get("call") for one in trace.slices]
    waits = [(call[source], call[target]) for kind, source, target in trace.flows if kind == "wait"]
    assert sorted(waits) == sorted(plan.syncs)
    launches = [(call[source], call[target]) for kind, source, target in trace.flows if kind == "launch"]
    assert len(launches) == 60
    assert all(source == target for source, target in launches)


def test_a_wait_leaves_the_last_kernel_and_reaches_the_first() -> None:
    report = sample_report(8)
    plan = report.schedule("nimble")
    assert plan is not None
    producer, consumer = plan.syncs[0]
    lanes = (Lane("stream 0", "stream"), Lane("stream 1", "stream"))
    spans = tuple(
        Span(lane, start, start + 5, call, name)
        for lane, start, call, name in (
            (0, 0, producer, "early"),
            (0, 6, producer, "late"),
            (1, 20, consumer, "first"),
            (1, 30, consumer, "second"),
        )
    )
    trace = check(replace(report, timelines=(Timeline("nimble", "measured", "drawn", lanes, spans),)))
    ((_, source, target),) = trace.flows
    assert (trace.slices[source].name, trace.slices[target].name) == ("late", "first")


def test_arguments_name_the_call() -> None:
    report = fused_report(60)
    trace = check(report)
    known = {one.arguments["call"]: one.arguments for one in lanes_of(trace, len(trace.processes) - 1)}
    call = next(call for call in report.program.calls if len(call.eager) > 1)
    assert known[call.index] == {
        "call": call.index,
        "label": "gelu+layer_norm",
        "operator": call.operator,
        "module": call.module,
        "source": f"{call.origins[0].file}:{call.origins[0].line}",
        "phase": "forward",
        "bytes_read": sum(ref.nbytes for ref in call.reads),
        "bytes_written": sum(ref.nbytes for ref in call.writes),
        "eager_calls": list(call.eager),
    }
    eager = {one.arguments["call"] for one in lanes_of(trace, 0)}
    assert eager == set(range(60)), "the eager run counts in eager calls"


@given(st.integers(0, 10**13))
def test_times_are_read_back_exactly(time_ns: int) -> None:
    us = json.loads(json.dumps(_microseconds(time_ns)))
    assert ns(us) == round(us * 1000.0) == time_ns
