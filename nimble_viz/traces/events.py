"""The events of a profile as plain values, and the iteration that is kept of them.

The profiler has two traps. Correlation ids of operators and of runtime calls are separate numberings that overlap: a
kernel is joined to its *launch* by ``correlation`` and to its *operator* by ``linked``, never across. And the profiler
loses device events when its buffers run out: ``lost_launches`` counts launches without a device event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nimble_viz.report.data import Stage

__all__ = [
    "CALIBRATION", "PHASE", "PRINT", "RUN", "TICK", "DeviceEvent", "HostEvent", "Trace", "floor_of", "is_launch",
    "is_synchronisation", "lost_launches", "outer_first",
]  # fmt: skip

TICK = "nimble.tick"
"""Annotation between two iterations, where somebody said what an iteration is."""
RUN = "nimble.run"
CALIBRATION = "nimble.calibration"
PHASE = "nimble.phase."
"""What annotations of a training step's phases begin with."""
PRINT = "nimble::print"
"""Annotation of what makes a tensor's text: shown as one operator, since it reads the tensor value by value."""

_LAUNCHES = (
    "cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel",
    "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemsetAsync", "cuMemcpyAsync", "cuMemcpyDtoDAsync",
    "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD", "cudaGraphLaunch", "cuGraphLaunch",
)  # fmt: skip
_BLOCKING_COPIES = ("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol")
_BLOCKING_DRIVER_COPIES = ("cuMemcpyDtoH_", "cuMemcpyHtoD_", "cuMemcpyDtoD_", "cuMemcpy_")
_TRIVIAL = ("aten::add", "aten::neg", "aten::mul", "aten::tanh")


@dataclass(frozen=True, slots=True)
class HostEvent:
    """What ran on a thread: an operator (``"aten::addmm"``, an autograd node), a call of the CUDA runtime, a range."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    correlation: int = 0


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something the device did; ``correlation`` is its launch's, ``linked`` its operator's, 0 where unknown."""

    name: str
    kind: Literal["kernel", "memcpy", "memset"]
    start_ns: int
    end_ns: int
    stream: int
    correlation: int = 0
    linked: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One profiled iteration, until the device is idle again; events are sorted by start, outer before inner.

    Args:
        device: what ran the model.
        start_ns: start of the iteration.
        run_end_ns: when the model's own code returned; what follows is the harness waiting for the device.
        end_ns: end of the iteration.
        operators: those that began before ``run_end_ns``; ``runtime`` calls likewise.
        iterations_ns: length of every profiled iteration; this one is their (upper) median.
        floor_ns: what the profiler shows for an operator that has next to nothing to do; 0 if not measured.
        warnings: why it should be doubted.
        phases: ``(phase, start, end)`` of a step's stretches that are known to be for something, in order.
    """

    device: Literal["cuda", "cpu"]
    start_ns: int
    run_end_ns: int
    end_ns: int
    operators: tuple[HostEvent, ...]
    runtime: tuple[HostEvent, ...] = ()
    kernels: tuple[DeviceEvent, ...] = ()
    iterations_ns: tuple[int, ...] = ()
    floor_ns: float = 0.0
    warnings: tuple[str, ...] = ()
    phases: tuple[tuple[Stage, int, int], ...] = ()

    @property
    def length_ns(self) -> int:
        """Wall time of the profiled iteration."""
        return self.end_ns - self.start_ns


def is_launch(name: str) -> bool:
    """Tell whether a runtime call hands work to the device and returns.

    >>> is_launch("cudaLaunchKernelExC"), is_launch("cudaStreamSynchronize")
    (True, False)
    """
    return name.startswith(_LAUNCHES)


def is_synchronisation(name: str) -> bool:
    """Tell whether a runtime call makes the host wait for the device.

    >>> is_synchronisation("cudaStreamSynchronize"), is_synchronisation("cudaMemcpy"), is_synchronisation("cudaMalloc")
    (True, True, False)
    """
    waits = name.startswith("cu") and "Synchronize" in name
    return waits or name in _BLOCKING_COPIES or (name.startswith(_BLOCKING_DRIVER_COPIES) and "Async" not in name)


def outer_first(operators: Iterable[HostEvent]) -> tuple[HostEvent, ...]:
    """Sort by start, an operator before those it holds. Stable, so that ties keep the profiler's order."""
    return tuple(sorted(operators, key=lambda event: (event.start_ns, -event.end_ns)))


def lost_launches(runtime: Iterable[HostEvent], kernels: Iterable[DeviceEvent]) -> str:
    """Say how many launches have no device event; empty if none is missing."""
    seen = {kernel.correlation for kernel in kernels}
    # A memset or copy of no bytes (cuDNN issues some) never becomes a device event: only kernels can be lost.
    launches = [event for event in runtime if is_launch(event.name) and "Mem" not in event.name]
    lost = sum(event.correlation not in seen for event in launches)
    return f"{lost} of {len(launches)} kernel launches have no device event: the profiler lost them" if lost else ""


def floor_of(host: Sequence[HostEvent], calibrations: Sequence[HostEvent]) -> float:
    """Return the median duration of the trivial operators, without the first half; 0 if there are none."""
    durations = [
        event.end_ns - event.start_ns
        for mark in calibrations
        for event in host
        if mark.start_ns <= event.start_ns < mark.end_ns and event.name in _TRIVIAL
    ]
    return float(median(durations[len(durations) // 2 :])) if durations else 0.0
