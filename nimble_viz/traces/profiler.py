"""Profile one eager iteration with ``torch.profiler``, which is imported only then, into a plain ``Trace``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from threading import Lock
from typing import Any, Literal

from nimble_core.profiling.cupti import attached_tool, profiler_runs
from nimble_core.profiling.kineto import Session
from nimble_core.utils.errors import DeviceError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_viz.traces.events import (
    CALIBRATION,
    ITERATION,
    PRINT,
    RUN,
    RawEvent,
    Trace,
    trace_from_events,
)

__all__ = [
    "Running",
    "calibrate",
    "profile_eager",
    "watched_prints",
]


def profile_eager(
    run: Callable[[], object],
    *,
    device: Literal["cuda", "cpu"],
    synchronize: Callable[[], object],
    warmup: int = 2,
    iterations: int = 3,
) -> Trace:
    """Run ``run`` under the profiler and return its iteration of median length, or raise DeviceError.

    ``synchronize`` waits until the device is idle; it is called after every run, inside the iteration and outside
    what counts as the model's own. Shapes and stacks are not recorded: they would slow the run further.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
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
    taken: Any = profiler.profiler
    return trace_from_events(map(_raw_event, taken.kineto_results.events()), device=device)


_CLAIMED = Lock()
_ONE_AT_A_TIME = "leave its context first; of several threads one profiles at a time"


class Running:
    """A run of ``torch.profiler`` that nothing else profiles beside; interrupts come once it has started or stopped."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def start(self, profiler: Any, *, cuda: bool, synchronize: Callable[[], object] = lambda: None) -> None:
        """Start ``profiler``, or raise DeviceError. See to ``stop`` before: an interrupt meanwhile is raised then."""
        import torch

        with interrupts_postponed(), ExitStack() as undo:
            undo.enter_context(_claimed(cuda=cuda))
            synchronize()
            with _quiet_kineto():
                session = Session(profiler)
            undo.callback(session.stop)
            undo.enter_context(watched_prints(lambda: torch.profiler.record_function(PRINT)))
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Stop it, if it runs."""
        with interrupts_postponed(), _quiet_kineto():
            self._undo.close()


@contextmanager
def _claimed(*, cuda: bool) -> Iterator[None]:
    """Take ``torch.profiler`` for this process; raise DeviceError if it or (``cuda``) a tool that keeps the GPU runs.

    In one thread a second one loses what either of them holds. From two threads they corrupt memory: what torch knows
    of its own profiler it knows by thread, and Kineto is one for the process.
    """
    if not _CLAIMED.acquire(blocking=False):
        raise DeviceError("another profiler is running in this process", fix=_ONE_AT_A_TIME)
    try:
        if profiler_runs():
            raise DeviceError("another profiler is running in this process", fix=_ONE_AT_A_TIME)
        tool = attached_tool() if cuda else ""
        if tool:
            raise DeviceError(f"{tool} is attached, and CUPTI serves one tool at a time", fix="run without that tool")
        yield
    finally:
        _CLAIMED.release()


@contextmanager
def watched_prints(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run whatever makes a tensor's text inside (``print``, ``str``, ``repr``) within ``around()``."""
    from nimble_core.torch_compat.members import TENSOR_TEXT

    original = TENSOR_TEXT.require()

    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        with around():
            return original(*args, **named)

    with TENSOR_TEXT.replaced_by(watched):
        yield


def calibrate(torch: Any, mark: Callable[[str], Any], rounds: int = 100) -> None:
    """Run operators on one element, marked: what the profiler shows of them is its floor (``floor_of``)."""
    with torch.no_grad(), mark(CALIBRATION):
        one = torch.ones(1, device="cpu")
        for _ in range(rounds):
            torch.add(one, one)
            torch.neg(one)
            torch.mul(one, one)
            torch.tanh(one)


def _raw_event(event: Any) -> RawEvent:
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


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep a profiler that is started inside from writing its progress to stderr: Kineto reads this once."""
    given = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)
