"""What replays on the host: generated code for the calls of a schedule, or the model itself."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.runtime.host.codegen import Code, Lines
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.torch_compat.autograd import set_grad_enabled
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recording import Recording, rewinding
from nimble_core.utils.errors import DeviceError, NimbleError, first_line

if TYPE_CHECKING:
    from nimble_core.runtime.device import Ready
    from nimble_core.tracing.signature import Signature

__all__ = ["HostExecutable", "WholeExecutable"]


class HostExecutable:
    """Calls as generated code, in program order; see ``codegen``. Runs may come from any thread; they take turns.

    Inputs are used where they are, never copied: calls that write them write the caller's tensors, as eager does.
    Outputs are new tensors on every run; one that aliases an input or a parameter is copied unless ``static``.
    """

    def __init__(self, code: Code, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> None:
        self.schedule: Schedule = schedule
        self.counts: SyncCounts = schedule.counts
        self.raw: RawGraph | None = None
        self.memory: MemoryPlan | None = code.memory
        self.arena: torch.UntypedStorage | None = code.arena
        self._lock = Lock()
        written = self._written = code.recording.written_inputs
        self._strides = [ref.strides for ref in code.recording.program.inputs]
        self._inputs = [t.clone() if p in written else t for p, t in enumerate(inputs)]
        self.nbytes: int = code.memory.nbytes + sum(self._inputs[position].nbytes for position in written)
        self._rewind = rewinding(code.recording, self._inputs)
        self._copied = code.copied
        self._code: Code | None = code
        _executables.add(self)

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Run on ``inputs`` and return the outputs.

        Raises:
            DeviceError: closed, or a call failed; names the call. The executable stays usable.
        """
        given = inputs
        if any(tensor.stride() != strides for tensor, strides in zip(inputs, self._strides, strict=True)):
            # Views were recorded for these strides.
            inputs = [_laid_out(tensor, strides) for tensor, strides in zip(inputs, self._strides, strict=True)]
        try:
            with self._lock:
                code = self._open()
                outputs = self._issue(code.recording, code.lines, inputs)
                if self._copied and not static:
                    for position in self._copied:
                        outputs[position] = outputs[position].detach().clone()
        finally:
            if inputs is not given:  # what was written before a call failed was written
                with torch.no_grad():
                    for position in self._written:
                        given[position].copy_(inputs[position])
        return outputs

    def quick(self, ready: Ready, *, static: bool) -> None:
        """Return None: a run takes longer than what is asked before it."""

    def replay(self) -> None:
        """Run once more on the inputs of preparation."""
        with self._lock:
            code = self._open()
            if self._rewind:
                self._rewind()
            self._issue(code.recording, code.lines, self._inputs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep it from running inside."""
        with self._lock:
            self._open()
            yield

    def timed_replay(self) -> tuple[float, list[int], list[int]]:
        """Replay, noting when each call begins and ends: ``(wall ns, begins, ends)``."""
        with self._lock:
            code = self._open()
            lines = code.timed_lines()
            if self._rewind:
                self._rewind()
            start = time.perf_counter_ns()
            self._issue(code.recording, lines, self._inputs)
            wall = time.perf_counter_ns() - start
            return wall, list(code.namespace["A"]), list(code.namespace["B"])

    def close(self) -> None:
        """Free the buffers."""
        with self._lock:
            self._code = self.arena = None
            self._inputs = []

    def forget(self) -> None:
        """Let go of runs of other threads, in a process that was forked: they did not come along."""
        self._lock = Lock()

    def _open(self) -> Code:
        if self._code is None:
            raise DeviceError("this executable was closed", fix="prepare again")
        return self._code

    def _issue(self, recording: Recording, lines: Lines, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the function without autograd and autocast, as ``recording.issuing``, only cheaper."""
        grad, cast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        try:
            set_grad_enabled(False)
            if cast:
                torch.set_autocast_enabled("cpu", False)
            with no_torch_function():
                outputs: list[torch.Tensor] = lines.function(inputs)
                return outputs
        except (NimbleError, KeyboardInterrupt):
            raise
        except Exception as error:
            call = _call_of(error.__traceback__, lines)
            raise DeviceError(
                f"a call failed in the replay: {type(error).__name__}: {first_line(error)}",
                where=str(recording.program.calls[call]) if call is not None else "",
                fix="run the model itself on the same inputs: it says more",
            ) from error
        finally:
            # An interrupt can undo a function in Python before its first line, but not one in C.
            try:
                set_grad_enabled(grad)
            finally:
                if cast:
                    torch.set_autocast_enabled("cpu", True)


_executables: weakref.WeakSet[HostExecutable] = weakref.WeakSet()


def _forget() -> None:
    for executable in _executables:
        executable.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class WholeExecutable:
    """The model itself, called as it is without autograd; no schedule, no buffers."""

    nbytes = 0
    raw: RawGraph | None = None
    memory: MemoryPlan | None = None

    def __init__(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> None:
        calls = len(recording.program.calls)
        self.schedule = Schedule("whole", (0,) * calls, tuple(range(calls)), ())
        self.counts = self.schedule.counts
        self._model: Callable[..., Any] | None = model
        self._build = builder(signature.structure)
        written = recording.written_inputs
        self._inputs = [t.detach().clone() if p in written else t for p, t in enumerate(signature.tensors)]
        self._rewind = rewinding(recording, self._inputs)

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Call the model; return copies of its outputs, which may be its own buffers, unless ``static``."""
        model = self._model
        if model is None:
            raise DeviceError("this executable was closed", fix="prepare again")
        args, kwargs = self._build(inputs)
        with torch.no_grad():
            tensors, _ = flatten(model(*args, **kwargs), what="output")
            return list(tensors) if static else [tensor.clone() for tensor in tensors]

    def quick(self, ready: Ready, *, static: bool) -> None:
        """Return None: a run takes longer than what is asked before it."""

    def replay(self) -> None:
        """Run once more on the inputs of preparation."""
        if self._rewind:
            self._rewind()
        self.run(self._inputs, static=True)

    def paused(self) -> AbstractContextManager[None]:
        """Do nothing: it has no buffers and folds nothing."""
        return nullcontext()

    def close(self) -> None:
        """Let go of the model."""
        self._model = None


def _call_of(trace: TracebackType | None, lines: Lines) -> int | None:
    """Return the call on whose line of generated code an error was raised."""
    while trace is not None:
        if trace.tb_frame.f_code is lines.function.__code__:
            return lines.calls.get(trace.tb_lineno)
        trace = trace.tb_next
    return None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    if 0 in strides:  # expanded: what was recorded for it runs on a full one, which takes other rows too
        return tensor.detach().contiguous()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor.detach())
