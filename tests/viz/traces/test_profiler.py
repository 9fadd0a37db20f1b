"""Profiler events to a Trace: on this machine's profiler, and on synthetic CUDA events."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nimble_core.utils.errors import DeviceError
from nimble_viz.traces import profiler as module
from nimble_viz.traces.profiler import (
    RawEvent,
    dispatch_floor_ns,
    is_launch,
    is_synchronisation,
    profile_eager,
    trace_from_events,
)


def host(name: str, start: int, end: int, correlation: int = 0, annotation: bool = False) -> RawEvent:
    return RawEvent(name, start, end, False, annotation, 1, 0, correlation, 0)


def gpu(name: str, start: int, end: int, correlation: int = 0, linked: int = 0, annotation: bool = False) -> RawEvent:
    return RawEvent(name, start, end, True, annotation, 0, 7, correlation, linked)


def iteration(start: int, length: int, first: int = 1, lost: bool = False) -> list[RawEvent]:
    """One iteration: an operator that launches a kernel, one that copies, and the harness's wait at the end."""
    end = start + length
    kernel = [gpu("gemm", start + 40, start + 70, first)]
    return [
        host(module.ITERATION, start, end, annotation=True),
        host(module.RUN, start + 1, end - 20, annotation=True),
        host("aten::mm", start + 10, start + 30, correlation=first + 1),  # collides with the copy's launch below
        host("cudaLaunchKernel", start + 15, start + 20, first),
        host("aten::copy_", start + 35, start + 50, correlation=first),
        host("cudaMemcpyAsync", start + 38, start + 45, first + 1),
        host("cudaDeviceSynchronize", end - 15, end - 5, first + 2),
        *([] if lost else kernel),
        gpu("Memcpy HtoD (Pageable -> Device)", start + 71, start + 75, first + 1),
        gpu(module.ITERATION, start + 40, start + 75),  # the device's echo of the annotation
        host("Activity Buffer Request", start + 31, start + 33),
        gpu("Stream Wait Event", start + 76, start + 77, first + 3),
    ]


def test_the_iteration_of_median_length_is_kept() -> None:
    events = [*iteration(1000, 300, 1), *iteration(2000, 100, 11), *iteration(3000, 200, 21)]
    trace = trace_from_events(events, device="cuda")
    assert (trace.start_ns, trace.run_end_ns, trace.end_ns) == (3000, 3180, 3200)
    assert trace.iterations_ns == (300, 100, 200)
    assert [event.name for event in trace.operators] == ["aten::mm", "aten::copy_"]
    assert [(k.kind, k.correlation, k.stream) for k in trace.kernels] == [("kernel", 21, 7), ("memcpy", 22, 7)]
    assert trace.warnings == ()


def test_the_harness_own_wait_is_left_out() -> None:
    trace = trace_from_events(iteration(0, 100), device="cuda")
    assert [event.name for event in trace.runtime] == ["cudaLaunchKernel", "cudaMemcpyAsync"]


def test_lost_device_events_are_reported() -> None:
    trace = trace_from_events(iteration(0, 100, lost=True), device="cuda")
    assert trace.warnings == ("1 of 1 kernel launches have no device event: the profiler lost them",)
    uneven = trace_from_events([*iteration(0, 100), *iteration(500, 90, 11, lost=True)], device="cuda")
    assert any("2, 1" in warning for warning in uneven.warnings)


def test_an_empty_memset_is_not_lost() -> None:
    empty = host("cudaMemsetAsync", 21, 22, correlation=99)
    assert trace_from_events([*iteration(0, 100), empty], device="cuda").warnings == ()


def test_no_device_event_at_all_is_reported() -> None:
    events = [event for event in iteration(0, 100) if not event.on_device]
    assert trace_from_events(events, device="cuda").warnings == ("the profiler saw no device event",)


def test_a_kernel_of_another_iteration_is_not_taken_for_ours() -> None:
    late = gpu("late", 520, 530, correlation=1)  # launched in the first iteration, ran when the second had begun
    trace = trace_from_events([*iteration(0, 100), *iteration(500, 100, 11), late], device="cuda")
    assert trace.start_ns == 500
    assert "late" not in {kernel.name for kernel in trace.kernels}


def test_without_a_marked_iteration() -> None:
    with pytest.raises(DeviceError, match="no marked iteration"):
        trace_from_events([host("aten::mm", 0, 1)], device="cpu")


@pytest.mark.parametrize(
    ("name", "launch", "wait"),
    [
        ("cudaLaunchKernel", True, False),
        ("cudaLaunchKernelExC", True, False),
        ("cuLaunchKernelEx", True, False),
        ("cudaMemcpyAsync", True, False),
        ("cudaMemsetAsync", True, False),
        ("cudaMemcpy", False, True),
        ("cuMemcpyDtoH_v2", False, True),
        ("cuMemcpyDtoHAsync_v2", True, False),
        ("cudaStreamSynchronize", False, True),
        ("cudaEventSynchronize", False, True),
        ("cuCtxSynchronize", False, True),
        ("cudaMalloc", False, False),
        ("mylib::Synchronize", False, False),
    ],
)
def test_kinds_of_runtime_calls(name: str, launch: bool, wait: bool) -> None:
    assert (is_launch(name), is_synchronisation(name)) == (launch, wait)


def test_real_profile_is_nested_ordered_and_within_the_iteration() -> None:
    layer = torch.nn.Linear(8, 8)
    waits: list[int] = []
    with torch.no_grad():
        trace = profile_eager(lambda: layer(torch.ones(2, 8)), device="cpu", synchronize=lambda: waits.append(1))
    assert len(waits) == 1 + 2 + 3
    names = [event.name for event in trace.operators]
    assert names.index("aten::linear") < names.index("aten::addmm")
    assert [e.start_ns for e in trace.operators] == sorted(e.start_ns for e in trace.operators)
    assert all(trace.start_ns <= e.start_ns <= e.end_ns <= trace.run_end_ns for e in trace.operators)
    assert len(trace.iterations_ns) == 3
    assert trace.length_ns == sorted(trace.iterations_ns)[1]
    assert trace.kernels == trace.runtime == ()
    assert 0 < trace.floor_ns < 1e6


def test_dispatch_floor() -> None:
    assert 0 < dispatch_floor_ns() < 1e6


def test_public_events_are_read_where_kinetos_own_are_hidden() -> None:
    with torch.profiler.profile() as profiler, torch.profiler.record_function(module.ITERATION):
        torch.ones(3) + 1
    own = module._raw_events(profiler)
    public = module._raw_events(SimpleNamespace(profiler=SimpleNamespace(), events=profiler.events))
    assert {event.name for event in public} <= {event.name for event in own}
    by_own, by_public = trace_from_events(own, device="cpu"), trace_from_events(public, device="cpu")
    assert [e.name for e in by_own.operators] == [e.name for e in by_public.operators] != []
    assert abs(by_own.length_ns - by_public.length_ns) <= 2000


def test_a_second_profiler_is_refused_and_the_first_survives() -> None:
    with torch.profiler.profile() as profiler:
        with pytest.raises(DeviceError, match="another profiler is running"):
            profile_eager(lambda: None, device="cpu", synchronize=lambda: None)
        torch.ones(3) + 1
    assert any(event.name == "aten::add" for event in profiler.events())


def test_an_error_of_the_model_stops_the_profiler() -> None:
    def fail() -> None:
        raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        profile_eager(fail, device="cpu", synchronize=lambda: None)
    assert profile_eager(lambda: torch.ones(1), device="cpu", synchronize=lambda: None).operators


def test_kineto_is_silent_and_the_environment_as_it_was() -> None:
    code = (
        "import os; from nimble_viz.traces.profiler import dispatch_floor_ns as f; f(); "
        "assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    clean = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_importing_needs_no_torch() -> None:
    code = "import sys, nimble_viz.traces.profiler, nimble_viz.collect.overhead; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_cuda_profile_joins_every_launch() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(2, 64, device="cuda")
    with torch.no_grad():
        trace = profile_eager(lambda: layer(x).relu(), device="cuda", synchronize=torch.cuda.synchronize)
    assert trace.warnings == ()
    assert len(trace.kernels) >= 2
    assert not any(is_synchronisation(event.name) for event in trace.runtime)
