"""Sessions of ``torch.profiler``, which is imported only then; what they saw, as a ``Recording``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

from nimble_core.profiling.cupti import attached_tool, profiler_runs
from nimble_core.profiling.kineto import Session
from nimble_core.utils.errors import DeviceError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_viz.traces.chrome import MAX_BYTES, Recording, read_trace
from nimble_viz.traces.events import CALIBRATION, PRINT, TICK

__all__ = ["Profiled", "calibrate", "exported", "watched_prints"]

_CLAIMED = Lock()


class Profiled:
    """A run of ``torch.profiler``, from ``start`` until ``end``, that nothing else profiles beside.

    Shapes and stacks are not recorded: they would slow what runs further. Interrupts come once it has started or
    stopped.
    """

    def __init__(self, *, cuda: bool) -> None:
        import torch

        kinds = torch.profiler.ProfilerActivity
        self.ticks = 0
        self._cuda, self._mark = cuda, torch.profiler.record_function
        self._profiler = torch.profiler.profile(activities=[kinds.CPU] + [kinds.CUDA] * cuda, acc_events=True)
        self._undo = ExitStack()

    def start(self) -> None:
        """Start, or raise DeviceError. See to ``end`` before: an interrupt meanwhile is raised then."""
        with interrupts_postponed(), ExitStack() as undo:
            undo.enter_context(_claimed(cuda=self._cuda))
            with _quiet_kineto():
                session = Session(self._profiler)
            undo.callback(session.stop)
            undo.callback(calibrate, self._mark)
            undo.enter_context(watched_prints(lambda: self._mark(PRINT)))
            self._undo = undo.pop_all()

    def tick(self) -> None:
        """Mark that an iteration begins."""
        self.ticks += 1
        with self._mark(TICK):
            pass

    def end(self) -> None:
        """Stop, if it runs."""
        with interrupts_postponed(), _quiet_kineto():
            self._undo.close()

    def recording(self) -> Recording:
        """Return what was recorded. Raises ReportFileError if nothing was."""
        return exported(self._profiler)


def exported(profiler: Any, max_bytes: int = MAX_BYTES) -> Recording:
    """Read what a ``torch.profiler.profile`` that has stopped exports, which it does once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path, max_bytes=max_bytes)


@contextmanager
def _claimed(*, cuda: bool) -> Iterator[None]:
    """Take ``torch.profiler`` for this process; raise DeviceError if it or (``cuda``) a tool that keeps the GPU runs.

    In one thread a second one loses what either of them holds. From two threads they corrupt memory: what torch knows
    of its own profiler it knows by thread, and Kineto is one for the process.
    """
    claimed = _CLAIMED.acquire(blocking=False)
    try:
        if not claimed or profiler_runs():
            fix = "leave its context first; of several threads one profiles at a time"
            raise DeviceError("another profiler is running in this process", fix=fix)
        if cuda and (tool := attached_tool()):
            raise DeviceError(f"{tool} is attached, and CUPTI serves one tool at a time", fix="run without that tool")
        yield
    finally:
        if claimed:
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


def calibrate(mark: Callable[[str], Any], rounds: int = 100) -> None:
    """Run operators on one element, marked: what the profiler shows of them is its floor (``floor_of``)."""
    import torch

    with torch.no_grad(), mark(CALIBRATION):
        one = torch.ones(1, device="cpu")
        for _ in range(rounds):
            torch.add(one, one)
            torch.neg(one)
            torch.mul(one, one)
            torch.tanh(one)


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
