"""The host as a device: recorded ATen calls issued again, directly, by one worker or several.

Called what it is: host replay. There is no graph to launch; what is saved is the framework's work around the calls
(see ``codegen``), and on several cores independent calls run side by side.

Threads: with k workers on c cores every worker gets ``max(1, c // k)`` of torch's intra-operator threads. Where that is
fewer than the caller has, sums may be split differently, so results agree with eager to rounding; one worker keeps the
caller's setting and agrees bit for bit. The setting is put back after each run. OpenMP counts threads per calling
thread, MKL for the whole process: while a run of several workers lasts, MKL calls elsewhere in the process see it too,
and so does a thread that calls torch for the first time.

Memory: results that calls can be told to fill lie in one arena, at planned offsets (``memory_planner``).

Failures: a call that raises leaves parameters, buffers, inputs and random state as eager leaves them. Where a schedule
does not order the calls that may raise and those that write such, workers wait for each other too (``failure_order``).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import quantile
from nimble_core.ir.observation import Observation
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.profiling.machine import cpu_name, interruptions
from nimble_core.profiling.nvtx import capture_range, replays_marked
from nimble_core.runtime.device import Executable, PlacementError, Timed
from nimble_core.runtime.host.codegen import Code, Lines, Stopped, compile_recording, lay_out_buffers
from nimble_core.scheduling.failure_order import failing_as_eager
from nimble_core.scheduling.memory_planner import MemoryPlan, plan_memory
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.torch_compat.autograd import set_grad_enabled
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Recording, issuing, rewinding
from nimble_core.tracing.rewritten import Rewritten
from nimble_core.tracing.rng_state import random_state_kept
from nimble_core.tracing.side_effects import rehearse
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError, first_line

if TYPE_CHECKING:
    from nimble_core.tracing.signature import Signature

__all__ = ["HostDevice", "HostExecutable", "WholeExecutable", "usable_cores"]


_ROUNDS = 3
_APART_S = 0.02
"""Between rounds of observing: threads that spin for work have gone to sleep by then."""


def usable_cores() -> int:
    """Logical cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class HostDevice:
    """Runs models on the CPU."""

    kind = "cpu"
    model = DeviceModel("host", sync_ns=22_000.0)

    def __init__(self) -> None:
        self.name = cpu_name()

    def stream_cap(self, asked: int | None) -> int | None:
        """At most one worker per core: more would only wait for each other."""
        cores = usable_cores()
        return cores if asked is None else min(asked, cores)

    def clock_ns(self) -> float:
        """Time in nanoseconds, monotonic."""
        return float(time.perf_counter_ns())

    def interruptions(self) -> int:
        """How often another program took a core from this process since it started."""
        return interruptions()

    def synchronize(self) -> None:
        """Do nothing: a host replay has finished when it returns."""

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model; leaves no trace in its state."""
        rehearse(model, args, kwargs)

    def record(
        self,
        model: Callable[..., Any],
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rewritten: Rewritten | None = None,
        *,
        traced: bool = True,
    ) -> Recording:
        """One live run, recorded. Raises CaptureError."""
        return record(model, signature, args=args, kwargs=kwargs, rewritten=rewritten)

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout:
        """What calls can fill; results that an operator must allocate itself, outputs among them, are its own."""
        return lay_out_buffers(recording)

    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> HostExecutable:
        """Compile ``schedule``; runs each call once on copies of what it writes. Plans the memory if it is not given.

        Raises:
            CaptureError: a call that cannot be issued again.
            DeviceError: out of memory.
            PlacementError: a call does not fill memory that was planned for it; ``lay_out`` leaves it out next time.
        """
        while memory is None:
            layout = layout or self.lay_out(recording, schedule)
            planned = plan_memory(recording.program, schedule, place=layout.arena)
            try:
                return self.capture(recording, schedule, inputs, layout, planned)
            except PlacementError:
                layout = None
        try:
            with (
                random_state_kept(torch.device("cpu"), recording.generators, recording.draws),
                capture_range(recording.program, schedule),
                torch.inference_mode(False),
                issuing("cpu"),
                no_torch_function(),
            ):
                issued, memory = failing_as_eager(recording.program, schedule, memory)
                code = compile_recording(recording, issued, inputs, memory)
                executable = HostExecutable(code, schedule, inputs)
                return replays_marked(executable, recording.program, schedule)
        except NimbleError:
            raise
        except MemoryError as error:
            raise DeviceError("out of memory while preparing", fix="prepare smaller inputs") from error
        except Exception as error:
            raise CaptureError(
                f"a recorded call cannot be issued again: {first_line(error)}",
                fix="keep that operator out of the prepared module",
            ) from error

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> WholeExecutable:
        """The model itself, called without autograd: what is left where calls cannot be issued one by one."""
        executable = WholeExecutable(model, recording, signature)
        return replays_marked(executable, recording.program, executable.schedule)

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Time each call in ``replays`` replays, with as many unobserved ones between them, in rounds that lie apart.

        Right after other threads computed, theirs may still spin on the cores that a call needs, and all of a round's
        calls take a thousand times as long. So a call's time is that of the round in which its median was least, and
        the timeline is one of the fastest round.

        Raises:
            DeviceError: ``executable`` is no host replay of single calls, or was closed.
        """
        if not isinstance(executable, HostExecutable):
            raise DeviceError(
                f"the calls of a {type(executable).__name__} cannot be observed",
                fix="observe what capture() returned",
            )
        executable.replay()
        rounds: list[_Round] = []
        for count in _shares(max(replays, 1), _ROUNDS):
            if rounds:
                time.sleep(_APART_S)
            plain: list[float] = []
            seen: list[tuple[float, list[int], list[int]]] = []
            for _ in range(count):
                start = time.perf_counter_ns()
                executable.replay()
                plain.append(time.perf_counter_ns() - start)
                seen.append(executable.timed_replay())
            rounds.append(_Round(plain, seen))
        return _observation(executable, recording, rounds)

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """The fastest of a few runs of each; None for those side by side, which take turns on this thread."""
        return [None if isinstance(call, tuple) else _fastest_ns(call) for call in calls]

    def libraries_tuned(self) -> AbstractContextManager[None]:
        """Nothing to tune: oneDNN chooses by shape."""
        return nullcontext()

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Peak of this process's resident memory during ``run`` above what it was before.

        0 where the system keeps no count that can be reset (Linux does).
        """
        before = _resident_peak(reset=True)
        run()
        return max(_resident_peak(reset=False) - before, 0) if before else 0


def _resident_peak(*, reset: bool) -> int:
    """Bytes; after a reset, what is resident now. 0 if unknown."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as control:
                control.write("5")
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class _Round:
    """Replays in a row: unobserved ones, ns, and observed ones, ``(ns, begins, ends)`` by call."""

    plain: Sequence[float]
    seen: Sequence[tuple[float, list[int], list[int]]]

    @property
    def wall_ns(self) -> float:
        return median(wall for wall, _, _ in self.seen)

    def taken_ns(self, call: int) -> list[float]:
        return [float(ends[call] - begins[call]) for _, begins, ends in self.seen]


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in at most ``parts`` nearly equal parts.

    >>> _shares(11, 3), _shares(2, 3)
    ([4, 4, 3], [1, 1])
    """
    return [share for part in range(parts) if (share := (total + parts - 1 - part) // parts)]


def _observation(executable: HostExecutable, recording: Recording, rounds: Sequence[_Round]) -> Observation:
    schedule = executable.schedule
    calls = recording.program.calls
    fastest = min(rounds, key=lambda one: one.wall_ns)
    wall, begins, ends = sorted(fastest.seen, key=lambda one: one[0])[(len(fastest.seen) - 1) // 2]
    zero = min(begins, default=0)
    spans = [
        Span(schedule.stream[call.index], float(begin - zero), float(end - zero), call.index, call.label)
        for call, begin, end in zip(calls, begins, ends, strict=True)
    ]
    taken = [[one.taken_ns(call) for one in rounds] for call in range(len(calls))]
    pooled = [[ns for one in own for ns in one] for own in taken]
    folded = executable.folded
    note = f"{folded} calls on constants were run once, at preparation: they take no time" if folded else ""
    workers = schedule.streams or 1
    return Observation(
        Timeline(
            run=schedule.policy,
            source="measured",
            clock="host clock",
            lanes=tuple(Lane(f"worker {index}", "worker") for index in range(workers)),
            spans=tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns))),
            profiled_ns=wall,
            unprofiled_ns=median(fastest.plain),
            note=note,
        ),
        Costs(
            ns=tuple(min(median(one) for one in own) for own in taken),
            source=f"host clock, {'one' if workers == 1 else workers}-worker replay",
            spread_ns=tuple(quantile(one, 0.75) - quantile(one, 0.25) for one in pooled),
            observed=sum(len(one.seen) for one in rounds),
            expected=len(calls),
            seen=len(spans),
        ),
    )


class HostExecutable:
    """A schedule as generated code; see ``codegen``. Runs may come from any thread; they take turns.

    Inputs are used where they are, never copied: calls that write them write the caller's tensors, as eager does.
    Outputs are new tensors on every run; one that aliases an input or a parameter is copied unless ``static``.

    ``schedule`` is the one that was asked for; ``issued``, by which it runs, may have more waits (``failure_order``).
    """

    def __init__(self, code: Code, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> None:
        self.schedule: Schedule = schedule
        self.issued: Schedule = code.schedule
        self.counts: SyncCounts = schedule.counts
        self.raw: RawGraph | None = None
        self.memory: MemoryPlan | None = code.memory
        self.arena: torch.UntypedStorage | None = code.arena
        self.folded = len(code.folded)
        self._lock = Lock()
        written = self._written = code.recording.written_inputs
        self._strides = [ref.strides for ref in code.recording.program.inputs]
        self._inputs = [t.clone() if p in written else t for p, t in enumerate(inputs)]
        self.nbytes: int = code.nbytes + sum(self._inputs[position].nbytes for position in written)
        self._rewind = rewinding(code.recording, self._inputs)
        self._copied = code.copied
        self._run: _Runner | None = _Runner(code)
        self._code = code
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
                outputs = self._runner()(inputs)
                if self._copied and not static:
                    for position in self._copied:
                        outputs[position] = outputs[position].detach().clone()
        finally:
            if inputs is not given:  # what was written before a call failed was written
                with torch.no_grad():
                    for position in self._written:
                        given[position].copy_(inputs[position])
        return outputs

    def replay(self) -> None:
        """Run once more on the inputs of preparation."""
        with self._lock:
            runner = self._runner()
            if self._rewind:
                self._rewind()
            runner(self._inputs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody runs it inside."""
        with self._lock:
            self._runner()
            yield

    def timed_replay(self) -> tuple[float, list[int], list[int]]:
        """A replay that notes when each call begins and ends: ``(wall ns, begins, ends)``."""
        with self._lock:
            runner, lines = self._runner(), self._code.timed_lines()
            if self._rewind:
                self._rewind()
            start = time.perf_counter_ns()
            runner(self._inputs, lines)
            wall = time.perf_counter_ns() - start
            names = self._code.namespace
            return wall, list(names["A"]), list(names["B"])

    def close(self) -> None:
        """Stop the workers and free the buffers."""
        with self._lock:
            if self._run is not None:
                self._run.stop()
            self._run = self.arena = None
            self.__dict__.pop("_code", None)
            self._inputs = []

    def forget(self) -> None:
        """In a process that was forked: neither who ran it in other threads nor its workers came along."""
        self._lock = Lock()
        if self._run is not None:
            self._run.crew.forget()

    def _runner(self) -> _Runner:
        if self._run is None:
            raise DeviceError("this executable was closed", fix="prepare again")
        return self._run


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
        """Call the model; its outputs are what it returned."""
        model = self._model
        if model is None:
            raise DeviceError("this executable was closed", fix="prepare again")
        args, kwargs = self._build(inputs)
        with torch.no_grad():
            tensors, _ = flatten(model(*args, **kwargs), what="output")
        return tensors

    def replay(self) -> None:
        """Run once more on the inputs of preparation."""
        if self._rewind:
            self._rewind()
        self.run(self._inputs)

    def paused(self) -> AbstractContextManager[None]:
        """Nothing to wait for: it has no buffers and folds nothing."""
        return nullcontext()

    def close(self) -> None:
        """Let go of the model."""
        self._model = None


class _Fewer:
    """The one count of torch's intra-operator threads that all runs of several workers put back.

    Setting it sets the process's default as well as the thread's own, and a new thread starts from the default: what
    is found there while another run lasts must not be taken for the caller's.
    """

    def __init__(self) -> None:
        self.running: set[object] = set()
        self.usual = 0
        self._lock = Lock()

    def begin(self, run: object, threads: int) -> None:
        """From here on this thread's operators use ``threads`` threads."""
        with self._lock:
            if not self.running:
                self.usual = torch.get_num_threads()
            self.running.add(run)
        _use_threads(threads)

    def forget(self) -> None:
        """In a process that was forked: runs of other threads, and their count of threads, end here."""
        self._lock = Lock()
        if self.running:
            self.running.clear()
            torch.set_num_threads(self.usual)


_fewer = _Fewer()
_executables: weakref.WeakSet[HostExecutable] = weakref.WeakSet()


def _forget() -> None:
    _fewer.forget()
    for executable in _executables:
        executable.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _use_threads(count: int) -> None:
    # A thread takes the process's default over at its first look: before it is told otherwise, not after.
    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker is told for one run."""

    function: Callable[[Sequence[torch.Tensor], list[Any]], Any]
    inputs: Sequence[torch.Tensor]
    cells: list[Any]
    inference: bool


class _Worker:
    """A thread that does a job each time it is told to. Made while fewer threads are asked for, see ``_fewer``.

    Between runs the thread knows nothing of the executable, so that one which nobody uses any more can be collected.

    Whoever asks counts in ``asked``, the thread in ``finished``: the locks only wake, and may be open more often than
    needed. So an interrupt, which Python raises between any two steps of the main thread, loses no count.
    """

    def __init__(self, threads: int, fail: Callable[[BaseException], None]) -> None:
        self.job: _Job | None = None
        self.asked, self.finished = 1, 0  # to get ready
        self._threads, self._fail = threads, fail
        self._go, self._done = Lock(), Lock()
        self._go.acquire()
        self._done.acquire()
        self._alive = True
        self._thread = Thread(target=self._loop, name="nimble host worker", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it is ready. Raises RuntimeError if the system refuses it."""
        self._thread.start()
        self.wait()

    def _loop(self) -> None:
        set_grad_enabled(False)
        _use_threads(self._threads)
        self.finished = 1
        _open(self._done)
        while True:
            self._go.acquire()
            if not self._alive:
                return
            asked, job = self.asked, self.job
            if asked == self.finished or job is None:
                continue
            try:
                with torch.inference_mode() if job.inference else nullcontext():
                    job.function(job.inputs, job.cells)
            except BaseException as error:
                self._fail(error)
            del job
            self.finished = asked
            _open(self._done)

    def ask(self) -> None:
        """Have it do its job."""
        self.asked += 1
        _open(self._go)

    def wait(self) -> None:
        """Wait until it has done what it was asked to."""
        while self.finished != self.asked:
            self._done.acquire()

    def wake(self) -> None:
        """Have it look whether it was asked: who did may have been interrupted before it said so."""
        _open(self._go)

    def stop(self) -> None:
        """End the thread; it must not be at work."""
        self._alive = False
        _open(self._go)
        # A thread that still ends while the interpreter does brings the process down.
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join()


def _open(lock: Lock) -> None:
    with suppress(RuntimeError):  # open already
        lock.release()


class _Crew:
    """The workers of one executable. Knows nothing of it, so that it can be collected.

    ``settled`` says that the last run came to its end. Where it did not, because the user interrupted it, or what was
    to put that right, the next run begins with what is left to do.
    """

    def __init__(self, code: Code, size: int, threads: int) -> None:
        self.code = code
        self.size = size
        self.threads = threads
        self.workers: list[_Worker] = []
        self.ready = False
        self.settled = True
        self.errors: list[BaseException] = []

    def run(self, lines: Sequence[Lines], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The first of ``lines`` here, the others on workers. Raises what was raised first in any of them."""
        self._settle()
        if not self.ready:
            self._start()
        cells = [None] * self.code.cells
        inference = torch.is_inference_mode_enabled()
        self.settled = False
        try:
            self.code.namespace.update(kick=self._kick, join=self._join)
            for worker, one in zip(self.workers, lines[1:], strict=True):
                worker.job = _Job(one.function, inputs, cells, inference)
            outputs: list[torch.Tensor] = lines[0].function(inputs, cells)
            self._let_go()
            self.settled = True
            return outputs
        except BaseException as error:
            self._fail(error)
            first = self.errors[0]
            self._settle()
        raise first

    def stop(self) -> None:
        """End the threads."""
        self._settle()
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
        self.ready = False

    def forget(self) -> None:
        """In a process that was forked: no thread is there to be joined. The next run starts others.

        A run that was under way ends: in this thread, if it was the one that forked, with an error.
        """
        self.workers, self.ready = [], False
        if not self.settled:
            self._fail(DeviceError("the process was forked in the middle of this run", fix="call it again"))

    def _start(self) -> None:
        """All of them; none if the system refuses one of them a thread."""
        self.stop()
        try:
            for _ in range(self.size):
                self.workers.append(_Worker(self.threads, self._fail))
                self.workers[-1].start()
            self.ready = True
        except BaseException:
            self.stop()
            raise

    def _kick(self) -> None:
        for worker in self.workers:
            worker.ask()

    def _join(self) -> None:
        for worker in self.workers:
            worker.wait()
        if self.errors:
            raise Stopped

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.code.open_locks()

    def _settle(self) -> None:
        """Bring home those who are still at work, and make everything as it was before the first run."""
        if self.settled:
            return
        self.code.open_locks()
        for worker in self.workers:
            worker.wake()
            worker.wait()
        self._let_go()
        self.errors.clear()
        self.code.renew_locks()
        self.settled = True

    def _let_go(self) -> None:
        """Keep neither the inputs of the last run alive nor, in a circle, the code."""
        for worker in self.workers:
            worker.job = None
        self.code.namespace.update(kick=None, join=None)


class _Runner:
    """Runs generated functions, one per stream: that of stream 0 here, the others on workers."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.lines = code.lines()
        self.threads = max(1, usable_cores() // len(self.lines))
        self.crew = _Crew(code, len(self.lines) - 1, self.threads)
        self.finalizer = weakref.finalize(self, self.crew.stop) if self.crew.size else None

    def __call__(self, inputs: Sequence[torch.Tensor], lines: Sequence[Lines] | None = None) -> list[torch.Tensor]:
        """Run on ``inputs``; other ``lines`` of the same code if given."""
        lines = lines or self.lines
        # What recording.issuing does, at a tenth of its price.
        grad, cast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        try:
            set_grad_enabled(False)
            if cast:
                torch.set_autocast_enabled("cpu", False)
            with no_torch_function():
                if len(lines) == 1:
                    outputs: list[torch.Tensor] = lines[0].function(inputs, [])
                    return outputs
                return self._with_workers(lines, inputs)
        except (NimbleError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise self._explained(error, lines) from error
        finally:
            # An interrupt can undo a function in Python before its first line, but not one in C.
            try:
                set_grad_enabled(grad)
            finally:
                if cast:
                    torch.set_autocast_enabled("cpu", True)

    def _with_workers(self, lines: Sequence[Lines], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        run = object()
        try:
            _fewer.begin(run, self.threads)
            return self.crew.run(lines, inputs)
        finally:
            if run in _fewer.running:
                try:
                    torch.set_num_threads(_fewer.usual)
                finally:
                    _fewer.running.discard(run)

    def stop(self) -> None:
        """End the workers."""
        if self.finalizer is not None:
            self.crew.stop()
            self.finalizer.detach()

    def _explained(self, error: Exception, lines: Sequence[Lines]) -> DeviceError:
        call = _call_of(error.__traceback__, lines)
        where = str(self.code.recording.program.calls[call]) if call is not None else ""
        return DeviceError(
            f"a call failed in the replay: {type(error).__name__}: {first_line(error)}",
            where=where,
            fix="run the model itself on the same inputs: it says more",
        )


def _call_of(trace: TracebackType | None, lines: Sequence[Lines]) -> int | None:
    known = {one.function.__code__: one.calls for one in lines}
    while trace is not None:
        calls = known.get(trace.tb_frame.f_code)
        if calls is not None:
            return calls.get(trace.tb_lineno)
        trace = trace.tb_next
    return None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    if 0 in strides:  # expanded: what was recorded for it runs on a full one, which takes other rows too
        return tensor.detach().contiguous()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor.detach())


def _fastest_ns(call: Callable[[], object]) -> float | None:
    times = []
    try:
        with torch.no_grad():
            call()
            for _ in range(3):
                start = time.perf_counter_ns()
                call()
                times.append(float(time.perf_counter_ns() - start))
    except RuntimeError:
        return None
    return min(times)
