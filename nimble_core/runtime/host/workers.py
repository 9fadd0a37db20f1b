"""Threads that run the streams of a schedule beside the caller's thread.

With k streams on c cores each thread gets ``max(1, c // k)`` of torch's intra-operator threads, and the caller's
setting is put back after each run. OpenMP counts threads per calling thread, MKL for the whole process: while a run of
several workers lasts, MKL calls elsewhere in the process see it too, and so does a thread that calls torch for the
first time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any

import torch

from nimble_core.runtime.host.codegen import Code, Lines, Stopped
from nimble_core.torch_compat.autograd import set_grad_enabled
from nimble_core.utils.errors import DeviceError

__all__ = ["Crew", "usable_cores"]


def usable_cores() -> int:
    """Return the number of logical cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class _ThreadLimit:
    """The count of torch's intra-operator threads, lower while runs of several workers last.

    Setting it sets the process's default as well as the thread's own, and a new thread starts from the default: a run
    that begins while another lasts must not take the lower count for the caller's.
    """

    def __init__(self) -> None:
        self.runs: set[object] = set()
        self.usual = 0
        self._lock = Lock()

    def begin(self, run: object, threads: int) -> None:
        """Have this thread's operators use ``threads`` threads from here on."""
        with self._lock:
            if not self.runs:
                self.usual = torch.get_num_threads()
            self.runs.add(run)
        _use_threads(threads)

    def forget(self) -> None:
        """End all runs, in a process that was forked."""
        self._lock = Lock()
        if self.runs:
            self.runs.clear()
            torch.set_num_threads(self.usual)


_limit = _ThreadLimit()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_limit.forget)


def _use_threads(count: int) -> None:
    # A thread takes over the process's default at its first look, which must come before it is told otherwise.
    torch.get_num_threads()
    torch.set_num_threads(count)


class _Worker:
    """A thread that does one job after another. Between jobs it knows nothing of the executable."""

    def __init__(self, threads: int) -> None:
        self._desk = _Desk()
        self._thread = Thread(target=_work, args=(self._desk, threads), name="nimble host worker", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it has its count of threads."""
        self._thread.start()
        self.wait()

    def ask(self, job: Callable[[], object]) -> None:
        """Have it do a job, which must not raise."""
        self._desk.job = job
        self._desk.go.release()

    def wait(self) -> None:
        """Wait until the job is done."""
        self._desk.done.acquire()

    def stop(self) -> None:
        """End the thread once its job is done; to be called again where an interrupt came in between."""
        self._desk.closed = True
        with suppress(RuntimeError):  # open: an interrupt came after a job was asked for
            self._desk.go.release()
        # A thread that still ends while the interpreter does brings the process down.
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join()


class _Desk:
    """What a worker and who asks it share."""

    def __init__(self) -> None:
        self.job: Callable[[], object] | None = None
        self.closed = False
        self.go, self.done = Lock(), Lock()
        self.go.acquire()
        self.done.acquire()


def _work(desk: _Desk, threads: int) -> None:
    set_grad_enabled(False)
    _use_threads(threads)
    desk.done.release()
    while desk.go.acquire() and not desk.closed:
        job, desk.job = desk.job, None
        if job is not None:
            job()
        del job  # and with it the inputs
        desk.done.release()


class Run:
    """One run on several streams; the function of stream 0 starts and joins the others."""

    def __init__(self, code: Code, workers: Sequence[_Worker], lines: Sequence[Lines], inputs: Sequence[Any]) -> None:
        self.errors: list[BaseException] = []
        self._code = code
        self._workers = workers
        self._lines = lines
        self._inputs = inputs
        self._cells = [None] * code.cells
        self._inference = torch.is_inference_mode_enabled()

    def outputs(self) -> list[torch.Tensor]:
        """Run stream 0 here. What it raises is in ``errors``, behind what other streams raised before."""
        try:
            found: list[torch.Tensor] = self._lines[0].function(self._inputs, self._cells, self)
            return found
        except BaseException as error:
            self.fail(error)
            raise

    def start(self) -> None:
        """Have the workers begin."""
        for worker, one in zip(self._workers, self._lines[1:], strict=True):
            worker.ask(partial(self._on_worker, one.function))

    def join(self) -> None:
        """Wait for the workers. Raises Stopped if one of them failed."""
        for worker in self._workers:
            worker.wait()
        if self.errors:
            raise Stopped

    def fail(self, error: BaseException) -> None:
        """Have all streams stop where they next wait for another."""
        self.errors.append(error)
        self._code.open_locks()

    def _on_worker(self, function: Callable[..., object]) -> None:
        try:
            with torch.inference_mode() if self._inference else nullcontext():
                function(self._inputs, self._cells, self)
        except BaseException as error:
            self.fail(error)


class Crew:
    """The workers of one executable. Knows nothing of it, so that it can be collected.

    After a run that failed, or that an interrupt ended, its workers end too, and the next run starts others.

    Args:
        code: whose functions they run.
        size: how many of them.
    """

    def __init__(self, code: Code, size: int) -> None:
        self.size = size
        self._code = code
        self._threads = max(1, usable_cores() // (size + 1))
        self._workers: list[_Worker] = []
        self._run: Run | None = None
        """The one under way."""
        self._settled = True
        """Whether the last run came to a good end."""

    def run(self, lines: Sequence[Lines], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the first of ``lines`` here, the others on workers. Raises what was raised first in any of them."""
        self._settle()
        this = object()
        try:
            _limit.begin(this, self._threads)
            self._settled = False
            while len(self._workers) < self.size:
                self._workers.append(_Worker(self._threads))
                self._workers[-1].start()
            run = self._run = Run(self._code, self._workers, lines, inputs)
            outputs = run.outputs()
            self._settled = True
            return outputs
        except BaseException as error:
            first = self._run.errors[0] if self._run is not None and self._run.errors else error
            self._run = None
            self._settle()
        finally:
            self._run = None
            # Here and not in a function: an interrupt can undo one in Python before its first line, but not one in C.
            if this in _limit.runs:
                try:
                    torch.set_num_threads(_limit.usual)
                finally:
                    _limit.runs.discard(this)
        raise first

    def stop(self) -> None:
        """End the threads."""
        while self._workers:
            self._workers[-1].stop()
            self._workers.pop()

    def forget(self) -> None:
        """Let go of the workers, in a process that was forked; a run that was under way ends with an error."""
        self._workers.clear()
        if self._run is not None:
            self._run.fail(DeviceError("the process was forked in the middle of this run", fix="call it again"))

    def _settle(self) -> None:
        """Wait for the end of what a failed run left at work, and make all as it was before the first run."""
        if not self._settled:
            self._code.open_locks()
            self.stop()
            self._code.renew_locks()
            self._settled = True
