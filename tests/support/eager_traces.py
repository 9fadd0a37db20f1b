"""Profiled eager iterations for tests: one by hand, with exact times, and random ones."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from nimble_core.ir.program import Call, Origin, Program
from nimble_core.ir.timeline import Timeline
from nimble_viz.collect.matched_trace import MatchedTrace, eager_timeline
from nimble_viz.collect.overhead import overhead_profile
from nimble_viz.report.data import OverheadProfile
from nimble_viz.traces.events import DeviceEvent, HostEvent, Trace, outer_first


def program_of(*operators: str, lines: bool = False) -> Program:
    """A Program of calls by name, ``"mm"`` for ``"aten.mm.default"``; call i comes from line i + 1 of model.py."""
    full = [name if "." in name else f"aten.{name}.default" for name in operators]
    origins = [(Origin(name, file="model.py", line=i + 1),) if lines else () for i, name in enumerate(full)]
    calls = tuple(Call(i, name, (), (), origins=origins[i]) for i, name in enumerate(full))
    return Program(calls, (), (), ())


def split(program: Program, trace: Trace, unprofiled_ns: float) -> OverheadProfile:
    return overhead_profile(MatchedTrace.of(program, trace), unprofiled_ns)


def drawn(program: Program, trace: Trace, profile: OverheadProfile) -> Timeline:
    return eager_timeline(MatchedTrace.of(program, trace), profile)


def op(name: str, start: int, end: int, thread: int = 1) -> HostEvent:
    return HostEvent(name if "::" in name else f"aten::{name}", start, end, thread)


# One iteration, 0 to 200 ns on the host: linear around addmm, a view, relu, then the wait for the device.
CUDA = Trace(
    device="cuda",
    start_ns=0,
    run_end_ns=160,
    end_ns=200,
    operators=(
        op("linear", 10, 60),
        op("t", 12, 18),
        op("addmm", 20, 55),
        op("empty", 22, 30),
        op("view", 70, 75),
        op("relu", 80, 110),
    ),
    runtime=(
        HostEvent("cudaMalloc", 24, 28, 1, 100),
        HostEvent("cudaLaunchKernel", 40, 50, 1, 101),
        HostEvent("cudaStreamSynchronize", 85, 95, 1, 102),
        HostEvent("cudaLaunchKernel", 98, 104, 1, 103),
    ),
    kernels=(
        DeviceEvent("gemm", "kernel", 48, 90, 7, 101),
        DeviceEvent("relu_kernel", "kernel", 106, 190, 9, 103),
    ),
    iterations_ns=(200,),
)
TWO = program_of("addmm", "relu", lines=True)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Nested operators on two threads, runtime calls and kernels anywhere, in an iteration of 1,000 ns."""
    operators: list[HostEvent] = []

    def nest(thread: int, start: int, end: int, depth: int) -> None:
        at = start
        while at < end and draw(st.integers(0, 3)):
            first = draw(st.integers(at, end))
            last = draw(st.integers(first, end))
            operators.append(op(draw(st.sampled_from(["mm", "add", "relu", "view", "empty"])), first, last, thread))
            if depth:
                nest(thread, first, last, depth - 1)
            at = last + 1

    for thread in (1, 2):
        nest(thread, 0, 900, 2)
    names = st.sampled_from(["cudaLaunchKernel", "cudaMalloc", "cudaStreamSynchronize", "cudaGetDevice"])
    moments = st.tuples(st.integers(0, 899), st.integers(0, 60))
    runtime = [
        HostEvent(draw(names), start, start + length, 1, i)
        for i, (start, length) in enumerate(sorted(draw(st.lists(moments, max_size=8))))
    ]
    kernels = [
        DeviceEvent("k", "kernel", start - 20, start - 20 + 3 * length, i % 3, i)
        for i, (start, length) in enumerate(sorted(draw(st.lists(moments, max_size=8))))
    ]
    return Trace(
        device=draw(st.sampled_from(["cuda", "cpu"])),
        start_ns=0,
        run_end_ns=900,
        end_ns=1000,
        operators=outer_first(operators),
        runtime=tuple(runtime),
        kernels=tuple(kernels),
        floor_ns=float(draw(st.integers(0, 20))),
    )


programs = st.lists(st.sampled_from(["mm", "add", "relu", "mylib.op.default"]), max_size=12).map(
    lambda names: program_of(*names)
)


def no_overlap(line: Timeline) -> list[int]:
    """Checks the host lanes; returns the calls on them, sorted."""
    calls = []
    for lane in (i for i, lane in enumerate(line.lanes) if lane.kind == "host"):
        spans = [span for span in line.spans if span.lane == lane]
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))
        calls += [span.call for span in spans if span.call is not None]
    return sorted(calls)
