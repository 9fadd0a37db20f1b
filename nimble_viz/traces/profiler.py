"""One eager iteration under ``torch.profiler``, as plain values.

``profile_eager`` is the effect; what it returns, a ``Trace``, knows nothing of torch, and everything in
``nimble_viz.collect.overhead`` is a function of it. Importing this module does not import torch.

Two traps of the profiler are dealt with here and nowhere else. Correlation ids of operators and of runtime calls are
two number spaces that overlap, so a kernel is joined to its *launch* by ``correlation`` and to its *operator* by
``linked``, never across. And the profiler loses device events when its buffers run out: launches without a device
event, and iterations that differ in their counts, are counted and reported in ``Trace.warnings``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import median
from threading import Lock
from typing import Any, Literal, get_args

from nimble_core.ir.program import Phase
from nimble_core.profiling.cupti import attached_tool, profiler_runs
from nimble_core.profiling.kineto import Session
from nimble_core.utils.errors import DeviceError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_viz.report.data import Stage

__all__ = [
    "PHASE",
    "PRINT",
    "DeviceEvent",
    "OperatorEvent",
    "RawEvent",
    "Running",
    "RuntimeEvent",
    "Trace",
    "calibrate",
    "claim_profiler",
    "dispatch_floor_ns",
    "floor_of",
    "is_launch",
    "is_runtime",
    "is_synchronisation",
    "kind_of",
    "lost_launches",
    "outer_first",
    "profile_eager",
    "quiet_kineto",
    "release_profiler",
    "trace_from_events",
    "watched_prints",
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


@dataclass(frozen=True, slots=True)
class OperatorEvent:
    """An operator on the host (``"aten::addmm"``, ``"mylib::op"``, an autograd node); it may hold others.

    ``start_ns`` and ``end_ns`` are on the trace's clock, ``thread`` is the profiler's number of the host thread.
    """

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
    """Something the device did.

    ``correlation`` is that of the runtime event that launched it, ``linked`` that of the operator around the launch;
    0 where unknown.
    """

    name: str
    kind: Literal["kernel", "memcpy", "memset"]
    start_ns: int
    end_ns: int
    stream: int
    correlation: int = 0
    linked: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One profiled iteration.

    Args:
        device: ``"cuda"`` or ``"cpu"``: what ran the model.
        start_ns: start of the iteration.
        run_end_ns: when the model's own code returned; what follows is the harness waiting for the device.
        end_ns: end of the iteration, the device idle again.
        operators: operators that began before ``run_end_ns``, sorted by start, outer before inner.
        runtime: CUDA runtime and driver calls, the harness's own waiting excluded, sorted by start.
        kernels: what the device did, sorted by start.
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
    """Whether a runtime call hands work to the device and returns.

    >>> is_launch("cudaLaunchKernelExC"), is_launch("cudaStreamSynchronize")
    (True, False)
    """
    return name.startswith(_LAUNCHES)


def is_synchronisation(name: str) -> bool:
    """Whether a runtime call makes the host wait for the device.

    >>> is_synchronisation("cudaStreamSynchronize"), is_synchronisation("cudaMemcpy"), is_synchronisation("cudaMalloc")
    (True, True, False)
    """
    waits = is_runtime(name) and "Synchronize" in name
    return waits or name in _BLOCKING_COPIES or (name.startswith(_BLOCKING_DRIVER_COPIES) and "Async" not in name)


def profile_eager(
    run: Callable[[], object],
    *,
    device: Literal["cuda", "cpu"],
    synchronize: Callable[[], object],
    warmup: int = 2,
    iterations: int = 3,
) -> Trace:
    """Run ``run`` under the profiler and return its iteration of median length.

    ``synchronize`` waits until the device is idle; it is called after every run, inside the iteration and outside
    what counts as the model's own. Shapes and stacks are not recorded: they would slow the run further. The mode of
    autograd is the caller's.

    Raises:
        DeviceError: another profiler is running or attached, or the profiler gave no iteration back.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    supported: set[Any] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    missing = device == "cuda" and torch.profiler.ProfilerActivity.CUDA not in supported
    if device == "cuda" and not missing:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    mark = torch.profiler.record_function
    profiler = torch.profiler.profile(activities=activities, record_shapes=False, with_stack=False, acc_events=True)
    running = Running()
    try:
        running.start(profiler, cuda=device == "cuda", synchronize=synchronize)
        for _ in range(warmup):
            run()
            synchronize()
        for _ in range(iterations):
            with mark(ITERATION):
                with mark(RUN):
                    run()
                synchronize()
        if device == "cpu":
            calibrate(torch, mark)
    finally:
        running.stop()
    warnings = ("this build of torch cannot profile CUDA: no device events",) if missing else ()
    return trace_from_events(_raw_events(profiler), device=device, warnings=warnings)


_CLAIMED = Lock()
_ONE_AT_A_TIME = "leave its context first; of several threads one profiles at a time"


class Running:
    """A run of ``torch.profiler`` that nothing else profiles beside; interrupts come once it has started or stopped."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def start(self, profiler: Any, *, cuda: bool, synchronize: Callable[[], object] = lambda: None) -> None:
        """Start ``profiler``. See to ``stop`` before: an interrupt that came meanwhile is raised when it runs.

        Args:
            profiler: a ``torch.profiler.profile``.
            cuda: whether it watches a GPU.
            synchronize: waits until the device is idle.

        Raises:
            DeviceError: another profiler is running or attached.
        """
        import torch

        with interrupts_postponed(), ExitStack() as undo:
            claim_profiler(torch, cuda=cuda)
            undo.callback(release_profiler)
            synchronize()
            with quiet_kineto():
                session = Session(profiler)
            undo.callback(session.stop)
            undo.enter_context(watched_prints(lambda: torch.profiler.record_function(PRINT)))
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Stop it, if it runs."""
        with interrupts_postponed(), quiet_kineto():
            self._undo.close()


def claim_profiler(torch: Any, *, cuda: bool) -> None:
    """Take ``torch.profiler`` for this process until ``release_profiler``: beside another profiler it does not start.

    In one thread a second one loses what either of them holds. From two threads they corrupt memory: what torch knows
    of its own profiler it knows by thread, and Kineto is one for the process.

    Args:
        torch: the module.
        cuda: whether it would watch a GPU, which tools like Nsight Systems keep to themselves.

    Raises:
        DeviceError: ``torch.profiler`` runs already, in any thread, or such a tool is attached.
    """
    if not _CLAIMED.acquire(blocking=False):
        raise DeviceError("another profiler is running in this process", fix=_ONE_AT_A_TIME)
    try:
        if profiler_runs():
            raise DeviceError("another profiler is running in this process", fix=_ONE_AT_A_TIME)
        tool = attached_tool() if cuda else ""
        if tool:
            raise DeviceError(f"{tool} is attached, and CUPTI serves one tool at a time", fix="run without that tool")
    except BaseException:
        _CLAIMED.release()
        raise


def release_profiler() -> None:
    """What was claimed is free again. After the profiler has stopped, once for each claim."""
    _CLAIMED.release()


@contextmanager
def watched_prints(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, whatever makes a tensor's text (``print``, ``str``, ``repr``) runs within ``around()``."""
    from nimble_core.torch_compat.members import TENSOR_TEXT

    original = TENSOR_TEXT.require()

    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        with around():
            return original(*args, **named)

    with TENSOR_TEXT.replaced_by(watched):
        yield


def dispatch_floor_ns() -> float:
    """What the profiler shows for an operator on one element: dispatch, its output's allocation, and no work; ns.

    Measured back to back, with warm caches: a lower bound of what an operator of a model spends before it works.
    ``profile_eager`` measures it in the same session as the model (``Trace.floor_ns``); this is the same by itself.
    """
    return profile_eager(lambda: None, device="cpu", synchronize=lambda: None, warmup=0, iterations=1).floor_ns


def trace_from_events(
    events: Iterable[RawEvent], *, device: Literal["cuda", "cpu"], warnings: Sequence[str] = ()
) -> Trace:
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
        warnings=(*warnings, *_doubts(device, chosen, slices)),
        phases=tuple(_phases(iterations[chosen], marks)),
    )


def outer_first(operators: Iterable[OperatorEvent]) -> tuple[OperatorEvent, ...]:
    """Sort by start, an operator before those it holds. Stable, so that ties keep the profiler's order."""
    return tuple(sorted(operators, key=lambda event: (event.start_ns, -event.end_ns)))


_Slice = tuple[int, tuple[OperatorEvent, ...], tuple[RuntimeEvent, ...], tuple[DeviceEvent, ...]]


def _sorted_out(events: Iterable[RawEvent]) -> tuple[list[RawEvent], list[RawEvent], list[RawEvent]]:
    """Host events, device events, annotations; the device's echoes of annotations and bookkeeping are dropped."""
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
    """How many launches have no device event, in words; empty if none is missing."""
    seen = {kernel.correlation for kernel in kernels}
    # A memset or copy of no bytes (cuDNN issues some) never becomes a device event: only kernels can be lost.
    launches = [event for event in runtime if is_launch(event.name) and "Mem" not in event.name]
    lost = sum(event.correlation not in seen for event in launches)
    return f"{lost} of {len(launches)} kernel launches have no device event: the profiler lost them" if lost else ""


def floor_of(host: Sequence[RawEvent], calibrations: Sequence[RawEvent]) -> float:
    """Median duration of the trivial operators, the first half left out as warm-up; 0 if there are none."""
    durations = [
        event.end_ns - event.start_ns
        for mark in calibrations
        for event in host
        if mark.start_ns <= event.start_ns < mark.end_ns and event.name in _TRIVIAL
    ]
    return float(median(durations[len(durations) // 2 :])) if durations else 0.0


_TRIVIAL = ("aten::add", "aten::neg", "aten::mul", "aten::tanh")


def calibrate(torch: Any, mark: Callable[[str], Any], rounds: int = 100) -> None:
    """Run operators on one element, marked: what the profiler shows of them is its floor (``floor_of``)."""
    with torch.no_grad(), mark(CALIBRATION):
        one = torch.ones(1, device="cpu")
        for _ in range(rounds):
            torch.add(one, one)
            torch.neg(one)
            torch.mul(one, one)
            torch.tanh(one)


def is_runtime(name: str) -> bool:
    """CUDA runtime and driver calls are ``cudaXxx`` and ``cuXxx``; operators have a namespace."""
    return "::" not in name and (name.startswith("cuda") or (name.startswith("cu") and name[2:3].isupper()))


def kind_of(name: str) -> Literal["kernel", "memcpy", "memset"]:
    """What kind of device event has this name."""
    lowered = name.lower()
    return "memcpy" if lowered.startswith("memcpy") else "memset" if lowered.startswith("memset") else "kernel"


def _raw_events(profiler: Any) -> list[RawEvent]:
    """Kineto's own records; where this torch does not show them, the profiler's public events (µs resolution)."""
    try:
        return [_from_kineto(event) for event in profiler.profiler.kineto_results.events()]
    except AttributeError:
        return [_from_public(event) for event in profiler.events()]


def _from_kineto(event: Any) -> RawEvent:
    start_ns = event.start_ns()
    return RawEvent(
        name=event.name(),
        start_ns=start_ns,
        end_ns=start_ns + event.duration_ns(),
        on_device=event.device_type().name != "CPU",
        annotation=event.is_user_annotation(),
        thread=event.start_thread_id(),
        stream=event.device_resource_id(),
        correlation=event.correlation_id(),
        linked=event.linked_correlation_id(),
    )


def _from_public(event: Any) -> RawEvent:
    """``prof.events()`` does not say which operator a kernel is linked to: joined by its launch alone."""
    return RawEvent(
        name=event.name,
        start_ns=round(event.time_range.start * 1000),
        end_ns=round(event.time_range.end * 1000),
        on_device=event.device_type.name != "CPU",
        annotation=bool(event.is_user_annotation),
        thread=event.thread,
        stream=event.device_resource_id,
        correlation=event.id,
        linked=0,
    )


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """A profiler that is started inside says nothing on stderr.

    Kineto writes its progress there unless this variable, read when it first starts, says not to.
    """
    given = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)
