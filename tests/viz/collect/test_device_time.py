"""Why the device idled, and what an iteration is bound by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_viz.collect.device_time import device_idle, iteration_bound
from nimble_viz.report.data import Bound
from nimble_viz.traces.events import DeviceEvent, RuntimeEvent, Trace
from tests.support.eager_traces import CUDA, TWO, op, program_of, split


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
