"""Synthetic events of a profile, and the iteration that is kept of them."""

from __future__ import annotations

import pytest

from nimble_core.utils.errors import DeviceError
from nimble_viz.traces.events import ITERATION, RUN, RawEvent, is_launch, is_synchronisation, trace_from_events


def host(name: str, start: int, end: int, correlation: int = 0, annotation: bool = False) -> RawEvent:
    return RawEvent(name, start, end, False, annotation, 1, 0, correlation, 0)


def gpu(name: str, start: int, end: int, correlation: int = 0, linked: int = 0, annotation: bool = False) -> RawEvent:
    return RawEvent(name, start, end, True, annotation, 0, 7, correlation, linked)


def iteration(start: int, length: int, first: int = 1, lost: bool = False) -> list[RawEvent]:
    """One iteration: an operator that launches a kernel, one that copies, and the harness's wait at the end."""
    end = start + length
    kernel = [gpu("gemm", start + 40, start + 70, first)]
    return [
        host(ITERATION, start, end, annotation=True),
        host(RUN, start + 1, end - 20, annotation=True),
        host("aten::mm", start + 10, start + 30, correlation=first + 1),  # collides with the copy's launch below
        host("cudaLaunchKernel", start + 15, start + 20, first),
        host("aten::copy_", start + 35, start + 50, correlation=first),
        host("cudaMemcpyAsync", start + 38, start + 45, first + 1),
        host("cudaDeviceSynchronize", end - 15, end - 5, first + 2),
        *([] if lost else kernel),
        gpu("Memcpy HtoD (Pageable -> Device)", start + 71, start + 75, first + 1),
        gpu(ITERATION, start + 40, start + 75),  # the device's echo of the annotation
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


def test_lost_device_events_are_reported() -> None:
    trace = trace_from_events(iteration(0, 100, lost=True), device="cuda")
    assert trace.warnings == ("1 of 1 kernel launches have no device event: the profiler lost them",)
    uneven = trace_from_events([*iteration(0, 100), *iteration(500, 90, 11, lost=True)], device="cuda")
    assert any("2, 1" in warning for warning in uneven.warnings)


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
        ("cudaMemcpyAsync", True, False),
        ("cudaMemcpy", False, True),
        ("cuMemcpyDtoH_v2", False, True),
        ("cuMemcpyDtoHAsync_v2", True, False),
        ("cudaStreamSynchronize", False, True),
        ("cudaMalloc", False, False),
        ("mylib::Synchronize", False, False),
    ],
)
def test_kinds_of_runtime_calls(name: str, launch: bool, wait: bool) -> None:
    assert (is_launch(name), is_synchronisation(name)) == (launch, wait)
