"""Prepare a better engine while a first one serves: compile in a thread, capture in a later call.

The thread rewrites and compiles; it runs no model, captures nothing, and launches no more than computes constants, so
that the caller may use the device meanwhile. A CUDA graph that the caller captures itself has to be captured in the
``thread_local`` mode, as beside any other thread that allocates. The rest is done by the first call after that, on the
caller's thread, and takes as long as preparing with warm caches. ``Nimble.finish()`` does it at a moment of the
caller's choice.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from nimble_core.api.engine import Engine
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.autotune.kept_choice import compile_for_tuning
from nimble_core.ir.program import KernelChoice
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.dispatch import current_mode
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.recorded import Recorded
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import first_line

__all__ = ["Background", "InBackground"]

State = Literal["compiling", "compiled", "done", "failed", "cancelled"]
Choices = Collection[KernelChoice] | None

_EXIT_S = 30.0
"""How long an interpreter that exits waits at most for a compiler to stop: it does after the kernel that it is at."""
_running: weakref.WeakSet[Background] = weakref.WeakSet()


class InBackground:
    """The preparations of one module.

    Attributes:
        begun: all of them, in order.
        pending: those that are not over.
    """

    def __init__(self) -> None:
        self.begun: tuple[Background, ...] = ()
        self.pending: tuple[Background, ...] = ()
        self._lock = threading.Lock()

    def begin(self, net: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> None:
        """Let a first engine of a ``Nimble`` serve, and begin to compile for a better one; raises as ``prepare``."""
        first = net.make_engine(args, kwargs, options=first_options(options, Signature(args, kwargs).device))
        net.adopt_engine(first, args, kwargs)
        here = weakref.ref(net)

        def adopt(compiled: Choices) -> None:
            owner = here()
            if owner is not None and any(one is first for one in owner.engines):
                owner.adopt_engine(owner.make_engine(args, kwargs, compiled=compiled), args, kwargs)

        one = Background(first, options, adopt)
        with self._lock:
            self.begun, self.pending = (*self.begun, one), (*self.pending, one)

    def step(self) -> None:
        """Swap engines whose better ones are compiled."""
        over = [one for one in self.pending if one.step()]
        if over:
            with self._lock:
                self.pending = tuple(one for one in self.pending if one not in over)

    def finish(self, timeout_s: float | None) -> None:
        """Wait for what is compiled, each for so long, and swap."""
        for one in self.pending:
            one.wait(timeout_s)
        self.step()

    def cancel(self) -> None:
        """Swap nothing any more."""
        with self._lock:
            cancelled, self.pending = self.pending, ()
        for one in cancelled:
            one.cancel()


def first_options(options: Options, device: torch.device) -> Options:
    """Return options that prepare within seconds: no compiler, nothing measured."""
    library = device.type == "cuda" and options.fuse != "none"
    return replace(options, fuse="library" if library else "none", tune="off")


class Background:
    """What becomes of a preparation in the background.

    Args:
        first: the engine that serves meanwhile.
        options: for the better one.
        adopt: prepares and adopts it, on the thread that calls it, from what was compiled.
    """

    def __init__(self, first: Engine, options: Options, adopt: Callable[[Choices], object]) -> None:
        self.state: State = "compiling"
        self.error: Exception | None = None
        """What went wrong; the first engine serves on."""
        self._first: Engine | None = first
        self._adopt: Callable[[Choices], object] | None = adopt
        self._options = options
        self._choices: Choices = None
        self._swapping, self._told = threading.Lock(), False
        recorded = first.recorded.eager or first.recorded
        # torch 2.13 keeps a user's settings of Inductor by thread, in context variables.
        as_caller = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=as_caller, args=(self._compile, recorded), name="nimble-compile", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Background({self.state})" if self.error is None else f"Background({self.state}: {self.error})"

    def _compile(self, recorded: Recorded) -> None:
        where = recorded.signature.device
        try:
            if where.type == "cuda":
                torch.cuda.set_device(where)  # of this thread
            choices = None if recorded.whole else compile_for_tuning(device_for(where), recorded, self._options)
        except Exception as error:
            self._end("failed", error)
        else:
            self._choices = choices
            self._end("compiled", None, only_from="compiling")

    def _end(self, state: State, error: Exception | None, *, only_from: State | None = None) -> None:
        if self.state != "cancelled" and only_from in (None, self.state):
            self.state, self.error = state, error

    def step(self) -> bool:
        """Swap the engines if all is compiled; return whether nothing is left to do.

        Called before each call of the model; does not wait, and raises nothing: what goes wrong is warned of, once.
        """
        if self.state == "compiling":
            return False
        if not self._swapping.acquire(blocking=False):
            return False  # another thread is at it; the first engine serves this one
        try:
            first, adopt = self._first, self._adopt
            if self.state == "compiled" and first is not None and adopt is not None:
                if not _may_swap(first):
                    return False
                try:
                    with torch.inference_mode(False):
                        adopt(self._choices)
                    self._end("done", None)
                except Exception as error:
                    self._end("failed", error)
            if self.error is not None and not self._told:
                self._told = True
                warn(f"preparing in the background failed, the first engine serves on: {first_line(self.error)}")
            self._first = self._adopt = None  # and the memory that they hold
            return True
        finally:
            self._swapping.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is compiled; return whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Swap nothing any more; a compiler that runs goes on to its end."""
        self.state = "cancelled"
        self._first = self._adopt = None

    def stop(self) -> None:
        """Interrupt the compiler: a daemon thread inside of C++ would end an exiting interpreter by a crash."""
        self.cancel()
        until_s = time.monotonic() + _EXIT_S
        while (
            self._thread.is_alive() and time.monotonic() < until_s
        ):  # again: what waits, or cleans up, may not hear it
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
            self._thread.join(0.5)


def _may_swap(first: Engine) -> bool:
    """Return whether the model would be prepared here as it was for ``first``."""
    if first.signature.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    mode = bool(getattr(first.recorded.model, "training", False))
    return current_mode() is None and mode == first.mode and (first.autocast is None or first.autocast.holds())


@atexit.register
def _stop_all() -> None:
    for one in list(_running):
        one.stop()
