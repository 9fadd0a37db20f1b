"""``profile``: where the time goes in a function or a block, as it is; of a long loop in a few iterations."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TypeVar, cast, overload

import torch

from nimble_core.ir.measurement import summarize
from nimble_core.profiling.machine import environment, finish
from nimble_core.utils.errors import InputError, ReportFileError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_core.utils.units import format_ns
from nimble_viz.collect.from_trace import make_report
from nimble_viz.collect.iterations import LOADER
from nimble_viz.collect.sampler import KIND_WORDS, Action, Counts, Kind, Sampler
from nimble_viz.collect.sources import read_sources
from nimble_viz.collect.watchers import DispatchOrigins, LoopHooks
from nimble_viz.render.report import Report
from nimble_viz.traces.events import RUN
from nimble_viz.traces.profiler import Profiled

__all__ = ["Profiling", "profile", "profile_script"]


_Batch = TypeVar("_Batch")
_OTHER_THREADS = "what other threads run is not seen: enter profile() in the thread that runs the loop"


class Profiling:
    """Profiles what runs inside ``with``; afterwards ``report`` is there.

    Inside, ``step()`` says that an iteration begins, where neither data loader, optimizer nor module would.

    Args:
        counts: iterations to look at.
        subject: what the report calls it.
        stop: end the process (``SystemExit``) once all was sampled.
        looks_for_loop: False: only ``step()`` says what an iteration is, and nothing is profiled before it is warm.
    """

    def __init__(
        self, counts: Counts, *, subject: str = "block", stop: bool = False, looks_for_loop: bool = True
    ) -> None:
        self.subject = subject
        self.sampler = Sampler(counts)
        self.running: Profiled | None = None
        self._stop_when_done, self._looks_for_loop = stop, looks_for_loop
        self._thread = 0
        self._early: Profiled | None = None
        self._warm: Profiled | None = None
        self._hooks: LoopHooks | None = None
        self._origins, self._early_replays = DispatchOrigins(), False
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """What was found out.

        Raises:
            InputError: the block has not ended, or ran no operator.
        """
        if self._report is None:
            raise InputError("there is no report yet", fix="read it after the with block")
        return self._report

    @property
    def found(self) -> bool:
        """Whether there is a report."""
        return self._report is not None

    def step(self) -> None:
        """Say that an iteration begins here, or that one ends: only what lies between two calls counts."""
        self._tick("step", 0)

    def loader(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the same batches; making each counts as waiting for input, as a ``DataLoader``'s does.

        For a generator, or a pipeline of another library's, whose Python cannot be told from the loop's own.
        """
        made, end = iter(batches), object()

        def following() -> object:
            with torch.profiler.record_function(f"{LOADER}{type(made).__name__}.__next__"):
                return next(made, end)

        while (batch := self._hooks.timed(id(self), following) if self._hooks else next(made, end)) is not end:
            yield cast(_Batch, batch)

    def __enter__(self) -> Profiling:
        if self._thread:
            raise InputError("this profile() has been entered before", fix="call profile() anew for each block")
        self._thread = get_ident()
        if not self._looks_for_loop:
            return self
        try:
            with interrupts_postponed():
                self._early = self.running = Profiled(cuda=torch.cuda.is_available())
                self._early.start()
                self._hooks = LoopHooks(self._tick, self.sampler.waited)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                self._end()
            except KeyboardInterrupt:  # before it postponed interrupts, perhaps
                self._end()
                raise
            self._finish()
        except ReportFileError as nothing:
            if kind is None:
                raise InputError(
                    f"nothing was profiled: {nothing.what}", fix=f"{nothing.fix}; {_OTHER_THREADS}"
                ) from nothing
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"what was profiled before cannot be shown: {type(failed).__name__}: {failed}")
        # An error of the block goes its way; what was profiled before it is in ``report``.

    def _tick(self, kind: Kind, who: int) -> None:
        if get_ident() != self._thread:
            return
        action = self.sampler.tick(kind, who, perf_counter_ns())
        if action:
            with interrupts_postponed():  # torch's profiler must not be left half started or half stopped
                self._do(action)

    def _do(self, action: Action) -> None:
        if action == "start":
            self._warm = self.running = Profiled(cuda=torch.cuda.is_available())
            self.running.start()
        elif action == "forget":
            self._remove_watchers()
            if self._stop_when_done:
                raise SystemExit(0)
        else:
            if action == "found" and self._hooks is not None and self.sampler.chosen is not None:
                self._hooks.only(self.sampler.chosen[0])
            if self.running is not None:
                self.running.tick()
            if action == "stop" or (action == "found" and not self.sampler.counts.at_once):
                self._stop_session()
                if self._warm is not None:
                    self._origins.begin()

    def _stop_session(self) -> None:
        if self.running is not None:
            self.running.end()
            self.running = None

    def _remove_watchers(self) -> None:
        if self._hooks is not None:
            self._early_replays |= self._hooks.replayed
            self._hooks.close()
            self._hooks = None
        self._origins.end()

    def _end(self) -> None:
        """Stop everything that still watches."""
        with interrupts_postponed():
            self._remove_watchers()
            self._stop_session()

    def _finish(self) -> None:
        sampler = self.sampler
        warm = self._warm if self._warm is not None and self._warm.ticks > 1 else None
        session = warm or self._early
        if session is None:
            return
        # The first iterations under the profiler and later ones without it are not the same work: never one verdict.
        samples = sampler.times_ns if warm else []
        recording = session.recording()
        made = make_report(
            recording,
            finish(environment(recording.device)),
            subject=self.subject,
            iteration=self._iteration(),
            seen=sampler.seen,
            timed=summarize("eager", samples, sampler.counts.warmup) if samples else None,
            loader_ns=median(sampler.waits_ns) if samples and any(sampler.waits_ns) else -1.0,
            origins=self._origins.seen,
            warnings=() if warm else (self._why_not_warm(),),
            replayed=self._origins.replayed if warm else self._early_replays,
        )
        self._report = replace(made, sources=read_sources(made.program.calls))

    def _iteration(self) -> str:
        if not self._looks_for_loop:
            return "one call of the function"
        return KIND_WORDS[self.sampler.chosen[0]] if self.sampler.chosen else ""

    def _why_not_warm(self) -> str:
        sampler, times = self.sampler, self.sampler.times_ns
        if sampler.chosen is None:
            return (
                "no loop was found, so all of it was profiled, once: times include what is done only once; "
                f"{_OTHER_THREADS}"
            )
        without = f"; {len(times)} later ones took {format_ns(median(times))} each without it" if times else ""
        return (
            f"the loop ended after {sampler.seen} iterations, before it was warm: shown is one of its first, under "
            f"the profiler{without}. {sampler.enough} are enough, fewer with a lower warmup and timed"
        )


@overload
def profile(*, warmup: int = ..., timed: int = ..., profiled: int = ...) -> Profiling: ...
@overload
def profile(
    function: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = ...,
    warmup: int = ...,
    timed: int = ...,
    profiled: int = ...,
) -> Report: ...
def profile(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    warmup: int = 3,
    timed: int = 10,
    profiled: int = 3,
) -> Report | Profiling:
    """Find where the time goes in a function that is called here, or in a block of a ``with`` statement.

    The function is called ``warmup + timed + profiled + 2`` times, and the device is waited for after each call. The
    report of a block, ``with profile() as run:``, is ``run.report`` once it has ended. A loop in it is found by its
    data loader, optimizer or outermost module, or by ``run.step()``. As many of its iterations are looked at; the rest
    runs as if nothing were there. A block without a loop is profiled whole, once.

    Nothing is changed about the code, and nothing of it is captured: ``compare`` says what a replay would be worth.

    Args:
        function: what to profile; None: a block.
        args: of the function.
        kwargs: of the function.
        warmup: iterations before any is looked at.
        timed: iterations timed without the profiler.
        profiled: iterations profiled.

    Raises:
        DeviceError: another profiler is running in this process or, where there is a GPU, attached to it.
        InputError: not a function, a count below what is needed, or no operator ran.
    """
    counts = Counts(warmup, timed, profiled)
    if function is None:
        return Profiling(counts)
    if not callable(function):
        raise InputError(f"a {type(function).__name__} cannot be profiled", fix="give a function, then its arguments")
    name = getattr(function, "__name__", type(function).__name__)
    named = dict(kwargs or {})
    run = Profiling(counts, subject=name, looks_for_loop=False)
    with run:
        for _ in range(counts.calls):
            run.step()
            with torch.profiler.record_function(RUN) if run.running else nullcontext():
                function(*args, **named)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
    return run.report


def profile_script(
    path: Path, arguments: list[str], counts: Counts, *, stop: bool = False
) -> tuple[Report, int | Exception]:
    """Run a script under ``profile``; return a Report, and its exit code or the error that ended it.

    It runs as ``__main__`` with ``arguments``; with ``stop`` it is ended once ``counts`` are done.

    Raises:
        InputError: no such script, or it ran no operator. Errors of a script that ran none propagate.
        SystemExit: it ran no operator, and ended with an exit code of its own.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}", fix="give the path of a Python script, then its arguments")
    code, complete = 0, True
    run = Profiling(counts, subject=path.name, stop=stop)
    try:
        with _script_arguments(path, arguments), run:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
            except KeyboardInterrupt:
                code, complete = 130, False
    except Exception as error:
        if run.found:
            return run.report, error
        if code:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(code) from error
        raise
    return replace(run.report, complete=complete), code


@contextmanager
def _script_arguments(path: Path, arguments: list[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as for a script that is run by itself; put them back afterwards."""
    argv, first = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path[:1] = [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, first
