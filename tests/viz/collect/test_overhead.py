"""Overhead of eager calls: exact sums on synthetic CUDA traces, and real models on this machine's profiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from nimble_core.ir.program import Program
from nimble_viz.collect.overhead import device_idle, iteration_bound, measure_overhead
from nimble_viz.report.data import Bound, CallOverhead, OverheadProfile
from nimble_viz.traces.events import DeviceEvent, HostEvent, Trace
from tests.support.eager_traces import CUDA, TWO, drawn, op, program_of, programs, split, traces


def host_ns(profile: OverheadProfile, device: str) -> float:
    work = sum(row.work_ns for row in profile.calls) if device == "cpu" else 0.0
    return profile.overhead_ns + work + profile.waiting_ns + profile.remainder_ns


def test_each_nanosecond_has_one_cause() -> None:
    profile = split(TWO, CUDA, 100.0)
    first, second = profile.calls
    # 0–10 Python; linear to 60, less empty (22–30), the launch (40–50) and what follows it; the device idles until 48.
    assert first == CallOverhead(0, 10.0, 22.0, 8.0, 10.0, 42.0, exposed_ns=48.0, tail_ns=10.0)
    # 60–70 and 75–80 Python, view and relu dispatch less the wait, the launch and the tail from 104 on; idle 95–106, as
    # 85–95 is waiting.
    assert second == CallOverhead(1, 15.0, 13.0, 0.0, 6.0, 84.0, exposed_ns=11.0, tail_ns=6.0)
    assert profile.waiting_ns == 10 + 40
    assert profile.remainder_ns == 200 - 60 - 40 - 50
    assert profile.device_busy_ns == 42 + 84
    assert profile.device_idle_share == 1 - 126 / 200
    assert (profile.matched, profile.total, profile.slowdown) == (2, 2, 2.0)
    assert profile.warnings == ("50 ns of the profiled iteration (25.0%) come after its last call",)


def test_a_remainder_within_the_bound_is_no_doubt() -> None:
    profile = split(TWO, replace(CUDA, run_end_ns=120), 100.0)
    assert (profile.remainder_ns, profile.warnings) == (10.0, ())
    optimizer = (("forward", 0, 110), ("optimizer", 110, 160))
    assert split(TWO, replace(CUDA, phases=optimizer), 100.0).warnings == ()
    # Python runs from 110 on, the optimizer's included: all but 5 ns of that is known.
    later = (("forward", 0, 110), ("optimizer", 115, 160))
    assert split(TWO, replace(CUDA, phases=later), 100.0).warnings == ()
    assert "30 ns of the" in split(TWO, replace(CUDA, phases=(("optimizer", 120, 140),)), 100.0).warnings[0]


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
        runtime=(*CUDA.runtime, HostEvent("cudaLaunchKernel", 140, 145, 1, 104)) if device == "cuda" else (),
        kernels=(*CUDA.kernels, DeviceEvent("multi_tensor", "kernel", 191, 197, 9, 104)) if device == "cuda" else (),
        phases=(("forward", 0, 112), ("optimizer", 112, 155)),
    )
    profile = split(with_optimizer("_fused_sgd_", "_fused_sgd_"), trace, 0.0)
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
    assert not any("come after its last" in warning for warning in profile.warnings) or device == "cpu"


def test_calls_of_the_optimizer_that_are_found_have_their_own_time() -> None:
    trace = replace(CUDA, operators=(*CUDA.operators, op("_fused_sgd_", 120, 140)), phases=(("optimizer", 112, 155),))
    profile = split(with_optimizer("_fused_sgd_"), trace, 0.0)
    assert (profile.calls[2].overhead_ns, profile.remainder_ns, profile.shared) == (30, 20, ())
    assert split(TWO, trace, 0.0).remainder_ns == 50  # without a call of the optimizer's it is nobody's


def test_work_on_the_host_is_self_time_above_the_floor() -> None:
    trace = Trace(
        "cpu", 0, 100, 100, (op("linear", 5, 95), op("addmm", 10, 90), op("as_strided", 12, 16), op("empty", 20, 30)),
        floor_ns=6.0,
    )  # fmt: skip
    (row,) = split(program_of("addmm"), trace, 50.0).calls
    assert row.work_ns == 80 - 4 - 10 - 6
    assert (row.python_ns, row.allocation_ns, row.dispatch_ns, row.tail_ns) == (5.0, 10.0, 90 - 60 - 10 - 5, 5.0)
    assert row.exposed_ns == row.overhead_ns


def test_a_program_that_is_not_in_the_profile_is_doubted() -> None:
    program = program_of("mm", "relu", "softmax")
    profile = split(program, CUDA, 1.0)
    assert profile.matched == 1
    assert "1 of 3 calls (33.3%)" in profile.warnings[0]
    assert "aten.mm.default" in profile.warnings[0]


def test_a_restless_machine_is_doubted() -> None:
    uneven = split(TWO, replace(CUDA, iterations_ns=(150, 200, 300)), 100.0)
    assert "150 ns to 300 ns" in uneven.warnings[0]
    slow = split(TWO, CUDA, 300.0)
    assert "faster than those without the profiler" in slow.warnings[0]
    assert drawn(TWO, CUDA, slow).reliable


@given(traces(), programs)
@settings(max_examples=200, deadline=None)
def test_parts_and_remainder_add_up_to_the_profiled_time(trace: Trace, program: Program) -> None:
    profile = split(program, trace, 1.0)
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


def idle(*kernels: tuple[int, int, int], end: int = 100) -> tuple[float, float, float, float]:
    """Causes for kernels of ``(launch, start, end)``; a launch of -1 was not seen."""
    runtime = [HostEvent("cudaLaunchKernel", at, at + 1, 1, i + 1) for i, (at, _, _) in enumerate(kernels) if at >= 0]
    trace = Trace(
        "cuda", 0, end, end, (),
        runtime=tuple(runtime),
        kernels=tuple(DeviceEvent("k", "kernel", start, to, 7, i + 1) for i, (_, start, to) in enumerate(kernels)),
    )  # fmt: skip
    found = device_idle(trace)
    return found.host_late_ns, found.launch_ns, found.dependency_ns, found.unknown_ns


@pytest.mark.parametrize(
    ("kernels", "causes"),
    [
        # Launched at 10, runs at 14: late until 10, latency 4; nothing follows 20.
        ([(10, 14, 20)], (10 + 80, 4, 0, 0)),
        # The second is queued while the first runs, long before: it waited for the first alone.
        ([(10, 14, 50), (20, 53, 90)], (10 + 10, 4, 3, 0)),
        # Queued 1 before the first ended: 3 of the usual latency of 4 are left, 2 more are dependency.
        ([(10, 14, 50), (49, 55, 90)], (10 + 10, 4 + 3, 2, 0)),
        ([(-1, 14, 50), (40, 60, 100)], (0, 0, 10, 14)),
        ([], (100, 0, 0, 0)),
        # Clocks that disagree: a kernel that seems to start before its launch.
        ([(20, 15, 100)], (15, 0, 0, 0)),
        # Kernels of the iteration before and after it count as far as they reach into it.
        ([(-1, -10, 30), (25, 40, 200)], (0, 0, 10, 0)),
    ],
)
def test_the_cause_of_each_gap_of_the_device(
    kernels: list[tuple[int, int, int]], causes: tuple[float, float, float, float]
) -> None:
    assert idle(*kernels) == causes


def test_what_an_iteration_is_bound_by() -> None:
    marks = (("loader", 0, 40), ("copy", 40, 50), ("forward", 50, 160))
    trace = replace(CUDA, phases=marks)
    # Busy 48–90 and 106–190; input 0–50 less the 2 of them; the rest is the host's.
    assert iteration_bound(trace, split(TWO, trace, 0.0)) == Bound(48.0, 126.0, 26.0)
    host = Trace(
        "cpu", 0, 100, 100, (op("mm", 50, 90),), floor_ns=5.0, phases=(("loader", 0, 30), ("forward", 30, 100))
    )
    assert iteration_bound(host, split(program_of("mm"), host, 0.0)) == Bound(30.0, 35.0, 35.0)
