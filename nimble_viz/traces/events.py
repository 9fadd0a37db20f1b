"""The events of a profile as plain values, and the iteration that is kept of them.

The profiler has two traps. Correlation ids of operators and of runtime calls are separate numberings that overlap: a
kernel is joined to its *launch* by ``correlation`` and to its *operator* by ``linked``, never across. And the profiler
loses device events when its buffers run out: ``Trace.warnings`` reports launches without a device event, and
iterations that differ in their counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from nimble_core.ir.program import Phase
from nimble_core.utils.errors import DeviceError
from nimble_viz.report.data import Stage

__all__ = [
    "CALIBRATION",
    "ITERATION",
    "PHASE",
    "PRINT",
    "RUN",
    "DeviceEvent",
    "OperatorEvent",
    "RawEvent",
    "RuntimeEvent",
    "Trace",
    "floor_of",
    "is_launch",
    "is_runtime",
    "is_synchronisation",
    "kind_of",
    "lost_launches",
    "outer_first",
    "trace_from_events",
]

ITERATION = "nimble.iteration"
RUN = "nimble.run"
CALIBRATION = "nimble.calibration"
PHASE = "nimble.phase."
"""What annotations of a training step's phases begin with."""
PRINT = "nimble::print"
"""Annotation of what makes a tensor's text: shown as one operator, since it reads the tensor value by value."""

_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchCooperativeKernel",
    "cudaMemcpyAsync",
    "cudaMemcpy2DAsync",
    "cudaMemsetAsync",
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemsetD",
    "cudaGraphLaunch",
    "cuGraphLaunch",
)
_BLOCKING_COPIES = ("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol")
_BLOCKING_DRIVER_COPIES = ("cuMemcpyDtoH_", "cuMemcpyHtoD_", "cuMemcpyDtoD_", "cuMemcpy_")
# What CUPTI says about itself and about waits; neither an operator nor work of the device.
_BOOKKEEPING = frozenset(
    {
        "Activity Buffer Request",
        "Buffer Flush",
        "Command Buffer Full",
        "Context Sync",
        "Driver Compiler",
        "Event Sync",
        "Instrumentation",
        "Lazy Function Loading",
        "Resource",
        "Runtime Triggered Module Loading",
        "Stream Sync",
        "Stream Wait Event",
        "Unrecognized overhead",
    }
)
_TRIVIAL = ("aten::add", "aten::neg", "aten::mul", "aten::tanh")


@dataclass(frozen=True, slots=True)
class OperatorEvent:
    """An operator on the host (``"aten::addmm"``, an autograd node) on the trace's clock; it may hold others."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    correlation: int = 0


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    """A call of the CUDA runtime or driver on the host, e.g. ``"cudaLaunchKernel"``."""

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
    operators: tuple[OperatorEvent, ...]
    runtime: tuple[RuntimeEvent, ...] = ()
    kernels: tuple[DeviceEvent, ...] = ()
    iterations_ns: tuple[int, ...] = ()
    floor_ns: float = 0.0
    warnings: tuple[str, ...] = ()
    phases: tuple[tuple[Stage, int, int], ...] = ()

    @property
    def length_ns(self) -> int:
        """Wall time of the profiled iteration."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class RawEvent:
    """An event as the profiler gives it, before it is sorted into kinds."""

    name: str
    start_ns: int
    end_ns: int
    on_device: bool
    annotation: bool
    thread: int
    stream: int
    correlation: int
    linked: int


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
    waits = is_runtime(name) and "Synchronize" in name
    return waits or name in _BLOCKING_COPIES or (name.startswith(_BLOCKING_DRIVER_COPIES) and "Async" not in name)


def is_runtime(name: str) -> bool:
    """Tell calls of the CUDA runtime (``cudaXxx``) and driver (``cuXxx``) from operators, which have a namespace."""
    return "::" not in name and (name.startswith("cuda") or (name.startswith("cu") and name[2:3].isupper()))


def kind_of(name: str) -> Literal["kernel", "memcpy", "memset"]:
    """Return the kind of a device event with this name."""
    lowered = name.lower()
    return "memcpy" if lowered.startswith("memcpy") else "memset" if lowered.startswith("memset") else "kernel"


def trace_from_events(events: Iterable[RawEvent], *, device: Literal["cuda", "cpu"]) -> Trace:
    """Sort the profiler's events into kinds and keep the iteration of median length. Pure; O(n log n).

    Iterations are the annotations ``nimble.iteration``, each holding a ``nimble.run``. A device event belongs to an
    iteration if its launch does, by correlation, or by its own start where the launch was not seen.

    Raises:
        DeviceError: there is no marked iteration.
    """
    host, on_device, marks = _sorted_out(events)
    iterations = sorted((event for event in marks if event.name == ITERATION), key=lambda event: event.start_ns)
    if not iterations:
        raise DeviceError("the profiler gave no marked iteration back", fix="run again without other profilers")
    runs = [event for event in marks if event.name == RUN]
    slices = [_slice(iteration, runs, host, on_device) for iteration in iterations]
    by_length = sorted(range(len(slices)), key=lambda i: iterations[i].end_ns - iterations[i].start_ns)
    chosen = by_length[len(by_length) // 2]
    run_end_ns, operators, runtime, kernels = slices[chosen]
    return Trace(
        device=device,
        start_ns=iterations[chosen].start_ns,
        run_end_ns=run_end_ns,
        end_ns=iterations[chosen].end_ns,
        operators=operators,
        runtime=runtime,
        kernels=kernels,
        iterations_ns=tuple(event.end_ns - event.start_ns for event in iterations),
        floor_ns=floor_of(host, [event for event in marks if event.name == CALIBRATION]),
        warnings=tuple(_doubts(device, chosen, slices)),
        phases=tuple(_phases(iterations[chosen], marks)),
    )


def outer_first(operators: Iterable[OperatorEvent]) -> tuple[OperatorEvent, ...]:
    """Sort by start, an operator before those it holds. Stable, so that ties keep the profiler's order."""
    return tuple(sorted(operators, key=lambda event: (event.start_ns, -event.end_ns)))


_Slice = tuple[int, tuple[OperatorEvent, ...], tuple[RuntimeEvent, ...], tuple[DeviceEvent, ...]]


def _sorted_out(events: Iterable[RawEvent]) -> tuple[list[RawEvent], list[RawEvent], list[RawEvent]]:
    """Split events into host, device and annotations, without bookkeeping and the device's echoes of annotations."""
    listed = [event for event in events if event.name not in _BOOKKEEPING]
    marks = [event for event in listed if event.annotation and not event.on_device]
    names = {event.name for event in marks}
    host = [event for event in listed if not event.on_device and (not event.annotation or event.name == PRINT)]
    on_device = [event for event in listed if event.on_device and not event.annotation and event.name not in names]
    return host, on_device, marks


def _slice(iteration: RawEvent, runs: list[RawEvent], host: list[RawEvent], on_device: list[RawEvent]) -> _Slice:
    inner = [run for run in runs if iteration.start_ns <= run.start_ns <= iteration.end_ns]
    run_end_ns = max((run.end_ns for run in inner), default=iteration.end_ns)
    inside = [event for event in host if iteration.start_ns <= event.start_ns < run_end_ns]
    operators = outer_first(
        OperatorEvent(event.name, event.start_ns, event.end_ns, event.thread, event.correlation)
        for event in inside
        if not is_runtime(event.name)
    )
    runtime = tuple(
        RuntimeEvent(event.name, event.start_ns, event.end_ns, event.thread, event.correlation)
        for event in sorted(inside, key=lambda event: event.start_ns)
        if is_runtime(event.name)
    )
    launched = {event.correlation for event in host if is_runtime(event.name)}
    mine = {event.correlation for event in runtime}
    kernels = tuple(
        DeviceEvent(
            event.name, kind_of(event.name), event.start_ns, event.end_ns, event.stream, event.correlation, event.linked
        )
        for event in sorted(on_device, key=lambda event: event.start_ns)
        if event.correlation in mine
        or (event.correlation not in launched and iteration.start_ns <= event.start_ns <= iteration.end_ns)
    )
    return run_end_ns, operators, runtime, kernels


def _phases(iteration: RawEvent, marks: list[RawEvent]) -> Iterator[tuple[Phase, int, int]]:
    for mark in sorted(marks, key=lambda event: event.start_ns):
        name = next((one for one in get_args(Phase) if mark.name == f"{PHASE}{one}"), None)
        if name is not None and iteration.start_ns <= mark.start_ns <= iteration.end_ns:
            yield name, mark.start_ns, mark.end_ns


def _doubts(device: str, chosen: int, slices: list[_Slice]) -> Iterator[str]:
    _, operators, runtime, kernels = slices[chosen]
    if len({len(part[1]) for part in slices}) > 1:
        yield f"the iterations differ in operators: {', '.join(str(len(part[1])) for part in slices)}"
    if len({len(part[3]) for part in slices}) > 1:
        counts = ", ".join(str(len(part[3])) for part in slices)
        yield f"the iterations differ in device events ({counts}): the profiler may have lost some"
    if device != "cuda":
        return
    if operators and not kernels:
        yield "the profiler saw no device event"
        return
    lost = lost_launches(runtime, kernels)
    if lost:
        yield lost


def lost_launches(runtime: Iterable[RuntimeEvent], kernels: Iterable[DeviceEvent]) -> str:
    """Say how many launches have no device event; empty if none is missing."""
    seen = {kernel.correlation for kernel in kernels}
    # A memset or copy of no bytes (cuDNN issues some) never becomes a device event: only kernels can be lost.
    launches = [event for event in runtime if is_launch(event.name) and "Mem" not in event.name]
    lost = sum(event.correlation not in seen for event in launches)
    return f"{lost} of {len(launches)} kernel launches have no device event: the profiler lost them" if lost else ""


def floor_of(host: Sequence[RawEvent], calibrations: Sequence[RawEvent]) -> float:
    """Return the median duration of the trivial operators, without the first half; 0 if there are none."""
    durations = [
        event.end_ns - event.start_ns
        for mark in calibrations
        for event in host
        if mark.start_ns <= event.start_ns < mark.end_ns and event.name in _TRIVIAL
    ]
    return float(median(durations[len(durations) // 2 :])) if durations else 0.0
