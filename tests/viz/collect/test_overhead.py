"""Overhead of eager calls: exact sums on synthetic CUDA traces, and real models on this machine's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nimble_core.ir.program import Call, Origin, Program
from nimble_core.ir.timeline import Timeline
from nimble_viz.collect.overhead import (
    align,
    device_idle,
    eager_timeline,
    iteration_bound,
    match_calls,
    measure_overhead,
    overhead_profile,
)
from nimble_viz.report.data import Bound, CallOverhead, HostSync, OverheadProfile
from nimble_viz.traces.profiler import DeviceEvent, OperatorEvent, RuntimeEvent, Trace, outer_first, profile_eager


def program_of(*operators: str, lines: bool = False) -> Program:
    """A Program of calls by name, ``"mm"`` for ``"aten.mm.default"``; call i comes from line i + 1 of model.py."""
    full = [name if "." in name else f"aten.{name}.default" for name in operators]
    origins = [(Origin(name, file="model.py", line=i + 1),) if lines else () for i, name in enumerate(full)]
    calls = tuple(Call(i, name, (), (), origins=origins[i]) for i, name in enumerate(full))
    return Program(calls, (), (), ())


def op(name: str, start: int, end: int, thread: int = 1) -> OperatorEvent:
    return OperatorEvent(name if "::" in name else f"aten::{name}", start, end, thread)


def host_ns(profile: OverheadProfile, device: str) -> float:
    work = sum(row.work_ns for row in profile.calls) if device == "cpu" else 0.0
    return profile.overhead_ns + work + profile.waiting_ns + profile.remainder_ns


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
        RuntimeEvent("cudaMalloc", 24, 28, 1, 100),
        RuntimeEvent("cudaLaunchKernel", 40, 50, 1, 101),
        RuntimeEvent("cudaStreamSynchronize", 85, 95, 1, 102),
        RuntimeEvent("cudaLaunchKernel", 98, 104, 1, 103),
    ),
    kernels=(
        DeviceEvent("gemm", "kernel", 48, 90, 7, 101),
        DeviceEvent("relu_kernel", "kernel", 106, 190, 9, 103),
    ),
    iterations_ns=(200,),
)
TWO = program_of("addmm", "relu", lines=True)


def test_each_nanosecond_has_one_cause() -> None:
    profile = overhead_profile(TWO, CUDA, 100.0)
    first, second = profile.calls
    # 0–10 Python; linear to 60, less empty (22–30), the launch (40–50) and what follows it; the device idles until 48.
    assert first == CallOverhead(0, 10.0, 22.0, 8.0, 10.0, 42.0, exposed_ns=48.0, tail_ns=10.0)
    # 60–70 and 75–80 Python, view and relu dispatch less the wait, the launch and the tail from 104 on; idle 95–106, as
    # 85–95 is waiting.
    assert second == CallOverhead(1, 15.0, 13.0, 0.0, 6.0, 84.0, exposed_ns=11.0, tail_ns=6.0)
    assert (first.hidden_ns, second.hidden_ns) == (12.0, 29.0)
    assert profile.waiting_ns == 10 + 40
    assert profile.remainder_ns == 200 - 60 - 40 - 50
    assert profile.device_busy_ns == 42 + 84
    assert profile.device_idle_share == 1 - 126 / 200
    assert (profile.matched, profile.total, profile.slowdown) == (2, 2, 2.0)
    assert profile.warnings == (
        "50 ns of the profiled iteration (25.0%) come after its last call and belong to none: 50 ns in one stretch of "
        "Python, after model.py:2",
    )


def test_a_remainder_in_pieces_is_of_no_line() -> None:
    views = (op("view", 120, 121), op("view", 131, 132), op("view", 142, 143))
    (warning,) = overhead_profile(TWO, replace(CUDA, operators=(*CUDA.operators, *views)), 100.0).warnings
    assert warning == "50 ns of the profiled iteration (25.0%) come after its last call and belong to none"
    (unknown,) = overhead_profile(program_of("addmm", "relu"), CUDA, 100.0).warnings
    assert unknown == warning


def test_a_remainder_within_the_bound_is_no_doubt() -> None:
    profile = overhead_profile(TWO, replace(CUDA, run_end_ns=120), 100.0)
    assert (profile.remainder_ns, profile.warnings) == (10.0, ())
    optimizer = (("forward", 0, 110), ("optimizer", 110, 160))
    assert overhead_profile(TWO, replace(CUDA, phases=optimizer), 100.0).warnings == ()
    # Python runs from 110 on, the optimizer's included: all but 5 ns of that is known.
    later = (("forward", 0, 110), ("optimizer", 115, 160))
    assert overhead_profile(TWO, replace(CUDA, phases=later), 100.0).warnings == ()
    assert "30 ns of the" in overhead_profile(TWO, replace(CUDA, phases=(("optimizer", 120, 140),)), 100.0).warnings[0]


def with_optimizer(*after: str) -> Program:
    calls = program_of("addmm", "relu", *after).calls
    return Program(tuple(replace(one, phase="optimizer") if one.index > 1 else one for one in calls), (), (), ())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_calls_of_the_optimizer_have_what_an_eager_one_took_once_for_all(device: Any) -> None:
    eager = (op("_foreach_mul_", 120, 130), op("_foreach_add_", 132, 150))
    trace = replace(
        CUDA,
        device=device,
        operators=(*CUDA.operators, *eager),
        runtime=(*CUDA.runtime, RuntimeEvent("cudaLaunchKernel", 140, 145, 1, 104)) if device == "cuda" else (),
        kernels=(*CUDA.kernels, DeviceEvent("multi_tensor", "kernel", 191, 197, 9, 104)) if device == "cuda" else (),
        phases=(("forward", 0, 112), ("optimizer", 112, 155)),
    )
    profile = overhead_profile(with_optimizer("_fused_sgd_", "_fused_sgd_"), trace, 0.0)
    (both,) = profile.calls[2:]
    assert (both.call, profile.shared) == (2, (2, 3))
    # From 110, where relu ended, to 155.
    if device == "cuda":
        assert (both.python_ns, both.dispatch_ns, both.launch_ns, both.work_ns) == (17, 23, 5, 6)
        assert (profile.waiting_ns, profile.remainder_ns) == (10 + 40, 5)
    else:
        assert (both.python_ns, both.dispatch_ns, both.work_ns) == (17, 0, 28)
        assert profile.remainder_ns == 45
    assert host_ns(profile, device) == 200
    assert not any("belong to none" in warning for warning in profile.warnings) or device == "cpu"


def test_calls_of_the_optimizer_that_are_found_have_their_own_time() -> None:
    trace = replace(CUDA, operators=(*CUDA.operators, op("_fused_sgd_", 120, 140)), phases=(("optimizer", 112, 155),))
    profile = overhead_profile(with_optimizer("_fused_sgd_"), trace, 0.0)
    assert (profile.calls[2].overhead_ns, profile.remainder_ns, profile.shared) == (30, 20, ())
    assert overhead_profile(TWO, trace, 0.0).remainder_ns == 50  # without a call of the optimizer's it is nobody's


def test_phases_come_in_the_order_of_a_step() -> None:
    marks = (("optimizer", 0, 5), ("forward", 5, 62), ("loss", 62, 66), ("backward", 66, 112), ("optimizer", 112, 150))
    profile = overhead_profile(TWO, replace(CUDA, phases=marks), 100.0)
    assert [(one.phase, one.spans) for one in profile.phases] == [
        ("forward", ((5.0, 62.0),)),
        ("loss", ((62.0, 66.0),)),
        ("backward", ((66.0, 112.0),)),
        ("optimizer", ((0.0, 5.0), (112.0, 150.0))),
    ]
    assert sum(one.host_ns for one in profile.phases) == 150


def test_host_synchronisations_by_kind_and_place() -> None:
    trace = replace(
        CUDA,
        operators=outer_first(
            [*CUDA.operators, op("item", 120, 150), op("_local_scalar_dense", 121, 149), op("item", 152, 156)]
        ),
        runtime=(
            *CUDA.runtime,
            RuntimeEvent("cudaMemcpyAsync", 125, 130, 1, 104),
            RuntimeEvent("cudaStreamSynchronize", 130, 145, 1, 105),
        ),
    )
    syncs = overhead_profile(TWO, trace, 0.0).host_syncs
    # Nothing waited in the second read: what it read lay on the host.
    assert [(s.kind, s.count, s.total_ns, s.source) for s in syncs] == [
        ("aten::item", 1, 30.0, "after model.py:2"),
        ("cudaStreamSynchronize", 1, 10.0, "model.py:2"),
    ]


def test_what_has_no_line_comes_after_the_last_that_is_known_in_its_phase() -> None:
    trace = replace(CUDA, operators=outer_first([*CUDA.operators, op("item", 120, 150)]), device="cpu", runtime=())
    known = program_of("addmm", lines=True).calls[0]
    for phase, source in (("forward", "after model.py:1"), ("backward", "")):
        calls = (known, Call(1, "aten.relu.default", (), (), phase=phase))
        (sync,) = overhead_profile(Program(calls, (), (), ()), trace, 0.0).host_syncs
        assert (sync.kind, sync.source) == ("aten::item", source)


def test_on_the_host_the_optimizer_reads_counters() -> None:
    reads = [op("item", 120, 125), op("item", 130, 140), op("item", 150, 155)]
    phases = (("forward", 0, 126), ("optimizer", 126, 145), ("forward", 145, 200))
    trace = replace(
        CUDA, operators=outer_first([*CUDA.operators, *reads]), device="cpu", runtime=(), kernels=(), phases=phases
    )
    (sync,) = overhead_profile(TWO, trace, 0.0).host_syncs
    assert (sync.kind, sync.count, sync.total_ns) == ("aten::item", 2, 10.0)


def waiting(*names: tuple[str, int, int], launch: int, wait: int, copy: str = "") -> list[HostSync]:
    """Synchronisations of a run of nested operators with one launch and one wait for the stream after it."""
    trace = Trace(
        "cuda", 0, 100, 100, outer_first([op(*one) for one in names]),
        runtime=(
            RuntimeEvent("cudaMemcpyAsync", launch, launch + 2, 1, 7),
            RuntimeEvent("cudaStreamSynchronize", wait, wait + 20, 1, 8),
        ),
        kernels=(DeviceEvent(copy, "memcpy", launch + 5, launch + 9, 7, 7),) if copy else (),
    )  # fmt: skip
    return list(overhead_profile(program_of("_to_copy"), trace, 0.0).host_syncs)


def test_a_blocking_copy_is_named_after_the_copy() -> None:
    copy = "Memcpy DtoH (Device -> Pinned)"
    nested = ("to", 10, 60), ("_to_copy", 12, 58), ("copy_", 20, 55)
    assert waiting(*nested, launch=25, wait=30, copy=copy) == [HostSync(copy, 1, 20.0, "")]
    within = "Memcpy DtoD (Device -> Device)"
    assert waiting(*nested, launch=25, wait=30, copy=within) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]
    assert waiting(*nested, launch=25, wait=30) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]
    assert waiting(*nested, launch=25, wait=70, copy=copy) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]


def test_a_copy_to_pageable_memory_waits_by_itself() -> None:
    copy = "Memcpy DtoH (Device -> Pageable)"
    nested = ("to", 10, 60), ("_to_copy", 12, 58), ("copy_", 20, 55)
    # The copy waits (25–27), then the stream is waited for (30–50): one synchronisation.
    assert waiting(*nested, launch=25, wait=30, copy=copy) == [HostSync(copy, 1, 22.0, "")]
    # non_blocking=True does not help where the memory is not pinned.
    assert waiting(*nested, launch=25, wait=70, copy=copy) == [
        HostSync("cudaStreamSynchronize", 1, 20.0, ""),
        HostSync(copy, 1, 2.0, ""),
    ]
    assert waiting(launch=25, wait=70, copy=copy)[1] == HostSync(copy, 1, 2.0, "")


def test_an_operator_whose_size_depends_on_data_is_one_synchronisation() -> None:
    assert waiting(("nonzero", 10, 60), launch=25, wait=30) == [HostSync("aten::nonzero", 1, 50.0, "")]
    # Where the host did not wait inside it, it is none.
    assert waiting(("nonzero", 10, 60), launch=25, wait=70) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]


def idle(*kernels: tuple[int, int, int], end: int = 100) -> tuple[float, float, float, float]:
    """Causes for kernels of ``(launch, start, end)``; a launch of -1 was not seen."""
    runtime = [
        RuntimeEvent("cudaLaunchKernel", at, at + 1, 1, i + 1) for i, (at, _, _) in enumerate(kernels) if at >= 0
    ]
    trace = Trace(
        "cuda", 0, end, end, (),
        runtime=tuple(runtime),
        kernels=tuple(DeviceEvent("k", "kernel", start, to, 7, i + 1) for i, (_, start, to) in enumerate(kernels)),
    )  # fmt: skip
    found = device_idle(trace)
    return found.host_late_ns, found.launch_ns, found.dependency_ns, found.unknown_ns


def test_the_cause_of_each_gap_of_the_device() -> None:
    # Launched at 10, runs at 14: late until 10, latency 4; nothing follows 20.
    assert idle((10, 14, 20)) == (10 + 80, 4, 0, 0)
    # The second is queued while the first runs, long before: it waited for the first alone.
    assert idle((10, 14, 50), (20, 53, 90)) == (10 + 10, 4, 3, 0)
    # Queued 1 before the first ended: 3 of the usual latency of 4 are left, 2 more are dependency.
    assert idle((10, 14, 50), (49, 55, 90)) == (10 + 10, 4 + 3, 2, 0)
    assert idle((-1, 14, 50), (40, 60, 100)) == (0, 0, 10, 14)
    assert idle() == (100, 0, 0, 0)
    # Clocks that disagree: a kernel that seems to start before its launch.
    assert idle((20, 15, 100)) == (15, 0, 0, 0)
    # Kernels of the iteration before and after it count as far as they reach into it.
    assert idle((-1, -10, 30), (25, 40, 200)) == (0, 0, 10, 0)


def test_what_an_iteration_is_bound_by() -> None:
    marks = (("loader", 0, 40), ("copy", 40, 50), ("forward", 50, 160))
    trace = replace(CUDA, phases=marks)
    # Busy 48–90 and 106–190; input 0–50 less the 2 of them; the rest is the host's.
    assert iteration_bound(trace, overhead_profile(TWO, trace, 0.0)) == Bound(48.0, 126.0, 26.0)
    host = Trace(
        "cpu", 0, 100, 100, (op("mm", 50, 90),), floor_ns=5.0, phases=(("loader", 0, 30), ("forward", 30, 100))
    )
    assert iteration_bound(host, overhead_profile(program_of("mm"), host, 0.0)) == Bound(30.0, 35.0, 35.0)


def test_timeline_of_a_cuda_run() -> None:
    profile = overhead_profile(TWO, CUDA, 100.0)
    line = eager_timeline(TWO, CUDA, profile)
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
    spans = [span for span in eager_timeline(TWO, trace, overhead_profile(TWO, trace, 0.0)).spans if span.lane == 1]
    assert [(span.name, span.call) for span in spans] == [("gemm", 0), ("memset", None)]


def test_work_on_the_host_is_self_time_above_the_floor() -> None:
    trace = Trace(
        "cpu", 0, 100, 100, (op("linear", 5, 95), op("addmm", 10, 90), op("as_strided", 12, 16), op("empty", 20, 30)),
        floor_ns=6.0,
    )  # fmt: skip
    (row,) = overhead_profile(program_of("addmm"), trace, 50.0).calls
    assert row.work_ns == 80 - 4 - 10 - 6
    assert (row.python_ns, row.allocation_ns, row.dispatch_ns, row.tail_ns) == (5.0, 10.0, 90 - 60 - 10 - 5, 5.0)
    assert row.exposed_ns == row.overhead_ns


def test_backward_on_its_own_thread_gets_its_own_lane() -> None:
    trace = Trace(
        "cuda", 0, 100, 100, outer_first([op("mm", 5, 20), op("mm", 30, 50, thread=2), op("mm", 60, 70)])
    )  # fmt: skip
    program = program_of("mm", "mm", "mm")
    profile = overhead_profile(program, trace, 0.0)
    line = eager_timeline(program, trace, profile)
    assert [(span.lane, span.call) for span in line.spans] == [(0, 0), (1, 1), (0, 2)]
    assert [row.python_ns for row in profile.calls] == [5.0, 10.0, 10.0]


def test_a_program_that_is_not_in_the_profile_is_doubted() -> None:
    program = program_of("mm", "relu", "softmax")
    profile = overhead_profile(program, CUDA, 1.0)
    assert profile.matched == 1
    assert "1 of 3 calls (33.3%)" in profile.warnings[0]
    assert "aten.mm.default" in profile.warnings[0]


def test_a_restless_machine_is_doubted() -> None:
    uneven = overhead_profile(TWO, replace(CUDA, iterations_ns=(150, 200, 300)), 100.0)
    assert "150 ns to 300 ns" in uneven.warnings[0]
    slow = overhead_profile(TWO, CUDA, 300.0)
    assert "faster than those without the profiler" in slow.warnings[0]
    assert eager_timeline(TWO, CUDA, slow).reliable


@pytest.mark.parametrize("program", [program_of(), program_of("mm")])
def test_an_empty_profile_is_all_remainder(program: Program) -> None:
    trace = Trace("cpu", 10, 30, 30, ())
    profile = overhead_profile(program, trace, 0.0)
    assert (profile.calls, profile.remainder_ns, profile.slowdown) == ((), 20.0, 0.0)
    assert eager_timeline(program, trace, profile).spans == ()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Nested operators on two threads, runtime calls and kernels anywhere, in an iteration of 1,000 ns."""
    operators: list[OperatorEvent] = []

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
        RuntimeEvent(draw(names), start, start + length, 1, i)
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


@given(traces(), programs)
@settings(max_examples=200, deadline=None)
def test_parts_and_remainder_add_up_to_the_profiled_time(trace: Trace, program: Program) -> None:
    profile = overhead_profile(program, trace, 1.0)
    assert host_ns(profile, trace.device) == profile.profiled_ns == 1000.0
    assert profile.remainder_ns >= 0.0
    if profile.idle:
        causes = profile.idle
        parts = (causes.host_late_ns, causes.launch_ns, causes.dependency_ns, causes.unknown_ns)
        assert min(parts) >= 0.0
        assert sum(parts) + profile.device_busy_ns == 1000.0
    bound = iteration_bound(trace, profile)
    assert bound.input_ns + bound.device_ns + bound.host_ns == 1000.0
    assert 0.0 <= profile.device_idle_share <= 1.0
    for row in profile.calls:
        parts = (row.python_ns, row.dispatch_ns, row.allocation_ns, row.launch_ns, row.tail_ns, row.work_ns)
        assert min(parts) >= 0.0
        assert 0.0 <= row.exposed_ns <= row.overhead_ns


@given(traces(), programs)
@settings(max_examples=200, deadline=None)
def test_timeline_spans_of_a_host_lane_do_not_overlap(trace: Trace, program: Program) -> None:
    profile = overhead_profile(program, trace, 1.0)
    line = eager_timeline(program, trace, profile)
    assert [s.start_ns for s in line.spans] == sorted(s.start_ns for s in line.spans)
    assert all(s.end_ns >= s.start_ns for s in line.spans)
    host_calls = no_overlap(line)
    assert host_calls == [row.call for row in profile.calls]


def no_overlap(line: Timeline) -> list[int]:
    """Checks the host lanes; returns the calls on them, sorted."""
    calls = []
    for lane in (i for i, lane in enumerate(line.lanes) if lane.kind == "host"):
        spans = [span for span in line.spans if span.lane == lane]
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))
        calls += [span.call for span in spans if span.call is not None]
    return sorted(calls)


@given(traces(), programs)
@settings(max_examples=100, deadline=None)
def test_matches_are_in_order_and_carry_the_name(trace: Trace, program: Program) -> None:
    matches = match_calls(program, trace.operators)
    calls = [call for call, _ in matches]
    assert calls == sorted(set(calls))
    assert all(event.name.split("::")[1] == program.calls[call].label for call, event in matches)


def longest_common(left: str, right: str) -> int:
    """Length of the longest common subsequence, by the textbook table."""
    row = [0] * (len(right) + 1)
    for a in left:
        new = [0]
        for j, b in enumerate(right):
            new.append(row[j] + 1 if a == b else max(new[j], row[j + 1]))
        row = new
    return row[-1]


words = st.text("abcd", max_size=25)


@given(words, words)
@settings(max_examples=400)
def test_align_is_a_longest_common_subsequence(left: str, right: str) -> None:
    pairs = align(left, right)
    assert len(pairs) == longest_common(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs))


@given(words, words, st.integers(1, 6))
@settings(max_examples=400)
def test_align_with_few_edits_is_still_a_common_subsequence(left: str, right: str, max_edits: int) -> None:
    pairs = align(left, right, max_edits)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs))


def test_align_survives_a_long_stretch_of_others_and_missing_calls() -> None:
    body = [f"op{i * i % 23}" for i in range(10_000)]
    profiled = body[:3000] + body[3100:6000] + ["op1", "op2"] * 100 + body[6000:]
    assert len(align(body, profiled)) >= 9_890


def test_an_operator_inside_a_call_is_no_candidate() -> None:
    operators = (op("addmm", 0, 50), op("copy_", 10, 20), op("copy_", 60, 70))
    matches = match_calls(program_of("addmm", "copy_"), operators)
    assert [(call, event.start_ns) for call, event in matches] == [(0, 0), (1, 60)]


class Calls(TorchDispatchMode):
    """Names of the operators that are more than a view or an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        view = bool(made) and all(t.untyped_storage()._cdata in given for t in made) and not func._schema.is_mutable
        if not view and "empty" not in str(func) and func.namespace != "profiler":
            self.names.append(str(func))
        return result


def measured(run: Callable[[], object]) -> tuple[Program, OverheadProfile, Timeline]:
    run()
    with Calls() as calls:
        run()
    program = program_of(*calls.names)
    return program, *measure_overhead(program, run, device="cpu", unprofiled_ns=1e6, synchronize=lambda: None)


@contextmanager
def custom_operator() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    library = torch.library.Library("nimbletest", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    try:
        yield torch.ops.nimbletest.twice
    finally:
        library._destroy()


def bert() -> Callable[[], object]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(0, 100, (1, 16))
    return lambda: model(ids)


def conv() -> Callable[[], object]:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
        torch.nn.Softmax(-1),
    ).eval()
    x = torch.randn(2, 3, 16, 16)
    return lambda: model(x)


def training() -> Callable[[], object]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, y = torch.randn(5, 8), torch.randn(5, 4)

    def step() -> None:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(("model", "grad"), [(bert, False), (conv, False), (conv, True), (training, True)])
def test_real_models_are_matched_call_by_call(model: Callable[[], Callable[[], object]], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        program, profile, line = measured(model())
    assert profile.total == len(program.calls) > 5
    assert profile.matched >= 0.95 * profile.total
    assert not any("found in the profile" in warning for warning in profile.warnings)
    assert host_ns(profile, "cpu") == profile.profiled_ns > 0
    assert profile.overhead_ns > 0
    assert 0 < profile.device_busy_ns < profile.profiled_ns
    assert profile.slowdown == profile.profiled_ns / 1e6
    assert no_overlap(line) == [row.call for row in profile.calls]
    names = {span.call: span.name for span in line.spans if span.call is not None}
    assert all(name.split("::")[1] == program.calls[call].label for call, name in names.items())


def test_bert_and_conv_in_inference_are_matched_in_full() -> None:
    for model in (bert(), conv()):
        with torch.no_grad():
            _, profile, _ = measured(model)
        assert profile.matched == profile.total


def test_custom_operators_are_matched() -> None:
    with custom_operator() as twice, torch.no_grad():
        program, profile, _ = measured(lambda: twice(torch.ones(4).neg()) + 1)
    assert "nimbletest.twice.default" in {call.operator for call in program.calls}
    assert profile.matched == profile.total


def test_a_longer_operator_has_more_work() -> None:
    small, large = torch.randn(2, 2), torch.randn(256, 256)

    def run() -> None:
        torch.mm(small, small)
        torch.mm(large, large)

    _, profile, _ = measured(run)
    assert profile.calls[1].work_ns > profile.calls[0].work_ns


def test_item_on_the_host_is_listed() -> None:
    trace = profile_eager(lambda: torch.ones(3).sum().item(), device="cpu", synchronize=lambda: None)
    (sync,) = overhead_profile(program_of("sum"), trace, 0.0).host_syncs
    assert (sync.kind, sync.count) == ("aten::item", 1)


@pytest.mark.gpu
def test_cuda_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
    x = torch.randn(32, 256, device="cuda")
    program = program_of("addmm", "relu", "addmm")
    with torch.no_grad():
        profile, line = measure_overhead(
            program, lambda: model(x), device="cuda", unprofiled_ns=1e5, synchronize=torch.cuda.synchronize
        )
    assert profile.matched == profile.total
    assert profile.host_syncs == ()
    assert host_ns(profile, "cuda") == profile.profiled_ns
    assert all(row.launch_ns > 0 and row.work_ns > 0 for row in profile.calls)
    assert {span.call for span in line.spans if line.lanes[span.lane].kind == "gpu"} == {0, 1, 2}
