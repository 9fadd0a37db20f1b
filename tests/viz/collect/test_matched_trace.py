"""Calls are found among the operators of a profile."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from nimble_core.ir.program import Program
from nimble_viz.collect.matched_trace import MatchedTrace
from nimble_viz.traces.events import DeviceEvent, Trace, outer_first
from tests.support.eager_traces import CUDA, TWO, drawn, no_overlap, op, program_of, programs, split, traces


@given(traces(), programs)
@settings(max_examples=100, deadline=None)
def test_matches_are_in_order_and_carry_the_name(trace: Trace, program: Program) -> None:
    matched = MatchedTrace.of(program, trace)
    calls = [call for call, _ in matched.matches]
    assert calls == sorted(set(calls))
    for call, position in matched.matches:
        assert matched.forest.events[position].name.split("::")[1] == program.calls[call].label


def test_an_operator_inside_a_call_is_no_candidate() -> None:
    operators = (op("addmm", 0, 50), op("copy_", 10, 20), op("copy_", 60, 70))
    matched = MatchedTrace.of(program_of("addmm", "copy_"), Trace("cpu", 0, 100, 100, operators))
    assert [(call, matched.forest.events[at].start_ns) for call, at in matched.matches] == [(0, 0), (1, 60)]


def test_timeline_of_a_cuda_run() -> None:
    profile = split(TWO, CUDA, 100.0)
    line = drawn(TWO, CUDA, profile)
    assert [(lane.name, lane.kind) for lane in line.lanes] == [
        ("host", "host"),
        ("GPU stream 7", "gpu"),
        ("GPU stream 9", "gpu"),
    ]
    assert [(s.lane, s.start_ns, s.end_ns, s.call, s.name) for s in line.spans] == [
        (0, 12.0, 18.0, None, "aten::t"),
        (0, 20.0, 55.0, 0, "aten::addmm"),
        (1, 48.0, 90.0, 0, "gemm"),
        (0, 70.0, 75.0, None, "aten::view"),
        (0, 80.0, 110.0, 1, "aten::relu"),
        (2, 106.0, 190.0, 1, "relu_kernel"),
    ]
    assert (line.run, line.source, line.clock) == ("eager", "measured", "torch.profiler")
    assert (line.profiled_ns, line.unprofiled_ns, line.reliable) == (200.0, 100.0, True)


def test_a_kernel_whose_launch_was_lost_is_found_by_its_operator() -> None:
    trace = replace(
        CUDA,
        operators=tuple(replace(event, correlation=i + 1) for i, event in enumerate(CUDA.operators)),
        runtime=(),
        kernels=(DeviceEvent("gemm", "kernel", 48, 90, 7, 101, linked=3), DeviceEvent("memset", "memset", 91, 92, 7)),
    )
    spans = [span for span in drawn(TWO, trace, split(TWO, trace, 0.0)).spans if span.lane == 1]
    assert [(span.name, span.call) for span in spans] == [("gemm", 0), ("memset", None)]


def test_backward_on_its_own_thread_gets_its_own_lane() -> None:
    trace = Trace(
        "cuda", 0, 100, 100, outer_first([op("mm", 5, 20), op("mm", 30, 50, thread=2), op("mm", 60, 70)])
    )  # fmt: skip
    program = program_of("mm", "mm", "mm")
    profile = split(program, trace, 0.0)
    line = drawn(program, trace, profile)
    assert [(span.lane, span.call) for span in line.spans] == [(0, 0), (1, 1), (0, 2)]
    assert [row.python_ns for row in profile.calls] == [5.0, 10.0, 10.0]


@given(traces(), programs)
@settings(max_examples=200, deadline=None)
def test_timeline_spans_of_a_host_lane_do_not_overlap(trace: Trace, program: Program) -> None:
    profile = split(program, trace, 1.0)
    line = drawn(program, trace, profile)
    assert [s.start_ns for s in line.spans] == sorted(s.start_ns for s in line.spans)
    assert all(s.end_ns >= s.start_ns for s in line.spans)
    host_calls = no_overlap(line)
    assert host_calls == [row.call for row in profile.calls]
